"""Whatever file a user arrives with: each kind, whole, through `generate.load`, to the same answers.

The default model in other clothes (a Hugging Face folder made of its GGUF file, 8 bits of compressed-tensors) says the
golden ids; small random models go through every layout, as single files, and through what must be refused.
"""
import json
from pathlib import Path

import pytest
import torch
from test_golden import ANSWER, PROMPT
from tiny import tiny_folder

import checkpoint
import generate
import gguf
import layouts
import packed

pytestmark = pytest.mark.usefixtures("one_thread")


def write_tokenizer(folder, metadata):
    """tokenizer.json and tokenizer_config.json that say what a GGUF file's metadata says, for a byte-level BPE whose
    digits stand alone."""
    texts, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": i, "content": texts[i], "special": kind == 3, **flags}
             for i, kind in enumerate(kinds) if kind in (3, 4)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": added, "normalizer": None, "post_processor": None, "decoder": level,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, level]},
        "model": {"type": "BPE", "vocab": {text: i for i, text in enumerate(texts)},
                  "merges": metadata["tokenizer.ggml.merges"], "unk_token": None, "byte_fallback": False}}))
    names = {f"{x}_token": texts[metadata[f"tokenizer.ggml.{x}_token_id"]] for x in ("bos", "eos")}
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {**names, "chat_template": metadata["tokenizer.chat_template"]}))


def rtn(w, bits, group, sym=True, dtype=torch.bfloat16):
    """Round to nearest, by the contract: absmax / 7.5 for 4 bits, absmax / 127 for 8, or (max - min) / 15 and a zero
    point; the scale is rounded to the type it is stored in before codes are computed."""
    N, K = w.shape
    g = w.float().view(N, -1, group or K)
    low, high = -2 ** (bits - 1), 2 ** (bits - 1) - 1
    if sym:
        scales = g.abs().amax(-1) / (7.5 if bits == 4 else high)
        scales = torch.where(scales == 0, 1, scales).to(dtype)
        codes = (g / scales.float()[..., None]).round().clamp(low, high).to(torch.int8)
        zeros = None
    else:
        least, most = g.amin(-1).clamp(max=0), g.amax(-1).clamp(min=0)
        scales = ((most - least) / (2**bits - 1)).to(dtype)
        zeros = (-least / scales.float()).round().clamp(0, 2**bits - 1).to(torch.int32)
        codes = ((g / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, 2**bits - 1).to(torch.uint8)
    return {"codes": codes.view(N, K), "scales": scales, "zeros": zeros, "mins": None, "g_idx": None, "bits": bits}


def is_linear(name):
    return name.endswith("_proj.weight")


def quantized(tensors, layout, bits, group, sym=True, method=None):
    """Yields the tensors of a folder in this layout: every linear but the head quantized by `rtn`."""
    for name in tensors:
        if is_linear(name):
            yield from layouts.write(layout, name.removesuffix(".weight"), rtn(tensors[name], bits, group, sym)).items()
        else:
            yield name, tensors[name]


# ------------------------------------------------------------------ the default model, in other clothes


def answer(path, dtype):
    llm = generate.load(str(path), dtype=dtype)
    found, = llm.generate("Why is the sky blue?", temperature=0, max_tokens=60)
    assert found.prompt_ids == PROMPT
    return llm, found.ids


def same_but_for_ties(llm, ids, gap):
    """Greedy ids are the golden ones, except from a step on at which the model sees two within `gap` of each other."""
    if ids == ANSWER:
        return True
    i = next(i for i, (a, b) in enumerate(zip(ids, ANSWER)) if a != b)
    with torch.inference_mode():
        logits = llm.model(torch.tensor([PROMPT + ANSWER[:i]]))[0, -1].float()
    return bool(logits[ids[i]] - logits[ANSWER[i]] < gap)


def test_golden_packed_straight_from_the_gguf_file(default_gguf):
    """The default: 4-bit and 8-bit blocks as they lie in the file, scales rounded to bfloat16 and nothing else."""
    llm, ids = answer(default_gguf, "auto")
    assert llm.weights == "packed" and "runs packed" in llm.about and "Q4_1, Q8_0, F32" in llm.about
    assert "llama, 134.5 M parameters in 96.6 MB, 5.7 bits each" in llm.about
    kinds = {type(m).__name__ for m in llm.model.modules()}
    assert "QuantEmbedding" in kinds and "Linear" not in kinds, "no matrix was expanded"
    memory = sum(b.nbytes for b in llm.model.buffers())
    assert memory < 140e6, "the head was expanded, for one row"
    if llm.dtype == torch.bfloat16:
        assert llm.about in (Path(__file__).parent.parent / "README.md").read_text(), "it shows what the command says"
    assert same_but_for_ties(llm, ids, 0.25), "logits near 20 are 0.125 apart in bfloat16"


@pytest.fixture(scope="module")
def resaved(default_gguf, metadata, tmp_path_factory):
    """The default model as a Hugging Face folder in float32, exactly what the file's blocks say."""
    folder = tmp_path_factory.mktemp("resaved") / "model"
    with gguf.GGUF(default_gguf) as file:
        checkpoint.save(folder, file.config, file, max_shard_bytes=200_000_000)
    write_tokenizer(folder, metadata)
    return folder


@pytest.mark.slow
def test_golden_through_a_hugging_face_folder(resaved):
    llm, ids = answer(resaved, "float32")
    assert ids == ANSWER and "4.0 bits" not in llm.about and "32.0 bits each (float32); runs in float32" in llm.about
    llm, ids = answer(resaved, "auto")
    assert same_but_for_ties(llm, ids, 0.25)


@pytest.mark.slow
def test_golden_through_compressed_tensors_8_bits(resaved, metadata, tmp_path):
    """8 bits in groups of 32, rounded to nearest. That moves logits by up to a tenth, and at one of the 60 steps the
    model's two likeliest words are closer than that; so what must hold exactly is that our answer is transformers' on
    the same folder, and that the golden ids are within reach of the rounding."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    source, folder = checkpoint.load(resaved), tmp_path / "w8"
    config = {**source.config, "quantization_config": layouts.quantization_config(
        "compressed-tensors", bits=8, group_size=32, sym=True, ignore=["lm_head"])}
    checkpoint.save(folder, config, quantized(source.tensors, "compressed-tensors", 8, 32))
    write_tokenizer(folder, metadata)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    expected = theirs.generate(torch.tensor([PROMPT]), max_new_tokens=60, do_sample=False)[0, len(PROMPT):].tolist()
    llm, ids = answer(folder, "float32")
    assert ids == expected and sum(a == b for a, b in zip(ids, ANSWER)) >= 40
    assert same_but_for_ties(llm, ids, 0.15)
    llm, ids = answer(folder, "auto")
    assert llm.weights == "packed" and "compressed-tensors" in llm.about and same_but_for_ties(llm, ids, 0.4)


# ------------------------------------------------------------------ every layout, on a small random model


LAYOUTS = [  # layout, bits, columns of a group (None: per channel), symmetric
    ("compressed-tensors", 4, 32, True), ("compressed-tensors", 4, 32, False), ("compressed-tensors", 4, None, True),
    ("compressed-tensors", 8, 32, True), ("compressed-tensors", 8, None, True), ("gptq", 4, 32, True),
    ("gptq", 4, 32, False), ("gptq", 8, None, True), ("awq", 4, 32, False),
]


def quantized_folder(path, layout, bits, group, sym, **changes):
    """A tiny folder and its twin in this layout."""
    plain = tiny_folder(path / "plain", hidden_size=64, intermediate_size=128, **changes)
    source = checkpoint.load(plain)
    config = {**source.config, "quantization_config": layouts.quantization_config(
        layout, bits=bits, group_size=group or -1, sym=sym, ignore=["lm_head"])}
    checkpoint.save(path / "quantized", config, quantized(source.tensors, layout, bits, group, sym))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / "quantized" / name).write_bytes((path / "plain" / name).read_bytes())
    return plain, str(path / "quantized")


def logits(llm, ids=(1, 200, 3, 77, 5)):
    with torch.inference_mode():
        return llm.model(torch.tensor([ids]))[0].double()


@pytest.mark.parametrize(("layout", "bits", "group", "sym"), LAYOUTS)
@pytest.mark.parametrize("changes", [{}, {"model_type": "qwen2", "tie_word_embeddings": True}], ids=["llama", "qwen2"])
def test_every_layout_runs_packed_and_expanded(tmp_path, layout, bits, group, sym, changes):
    plain, folder = quantized_folder(tmp_path, layout, bits, group, sym, **changes)
    expanded, runs = generate.load(folder, dtype="float64"), generate.load(folder)
    original = generate.load(plain, dtype="float64")
    with torch.no_grad():  # the definition: the original with each linear rounded
        for name, m in original.model.named_modules():
            if isinstance(m, torch.nn.Linear) and name != "lm_head":
                m.weight.copy_(layouts.dequantize(rtn(m.weight, bits, group, sym)))  # row by row, so fused as well
    want = logits(original)
    assert (logits(expanded) - want).abs().max() < 1e-5 * want.abs().max()
    assert runs.weights == "packed" and expanded.weights == "float64"
    assert (logits(runs) - want).norm() < 0.05 * want.norm()
    assert f"({layout}, {bits} bits); runs" in runs.about and "% packed, the rest in" in runs.about
    assert "in float64" in expanded.about
    found, = runs.generate("hello", temperature=0, max_tokens=4)
    assert len(found.ids) == 4
    assert sum(isinstance(m, packed.QuantLinear) for m in runs.model.modules()) >= 2 * 4


@pytest.mark.parametrize("format", ["int-quantized", "float-quantized"])
def test_w8a8_folders_run_with_activations_as_they_are(tmp_path, format):
    """int8 per channel runs packed; fp8, for which there is no kernel, is expanded, or repacked if asked for."""
    plain = tiny_folder(tmp_path / "plain", hidden_size=64, intermediate_size=128)
    source, stored, dense = checkpoint.load(plain), {}, {}
    for name, w in source.tensors.items():
        stored[name] = dense[name] = w
        if is_linear(name):
            weight = rtn(w, 8, None)
            if format == "float-quantized":
                scales = (w.float().abs().amax(1, keepdim=True) / 448).bfloat16()
                codes = (w.float() / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
                weight = {**weight, "codes": codes, "scales": scales}
            dense[name] = layouts.dequantize(weight).double()
            del stored[name]
            stored |= layouts.write("compressed-tensors", name.removesuffix(".weight"), weight, format=format)
    config = {**source.config, "quantization_config": layouts.quantization_config("compressed-tensors", 8,
                                                                                  format=format)}
    checkpoint.save(tmp_path / "q", config, stored)
    checkpoint.save(tmp_path / "d", source.config, dense)
    for folder in ("q", "d"):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / folder / name).write_bytes((tmp_path / "plain" / name).read_bytes())
    want = logits(generate.load(str(tmp_path / "d"), dtype="float64"))
    assert (logits(generate.load(str(tmp_path / "q"), dtype="float64")) - want).abs().max() < 1e-5 * want.abs().max()
    runs = generate.load(str(tmp_path / "q"))
    assert (runs.weights == "packed") == (format == "int-quantized")
    assert (logits(runs) - want).norm() < 0.05 * want.norm()
    again = generate.load(str(tmp_path / "q"), repack="int8")
    assert again.weights == "packed" and ("repacked to 8 bits, relative error up to 0." in again.about) == (
        format == "float-quantized")
    assert (logits(again) - want).norm() < 0.05 * want.norm()


def test_repack_goes_with_auto(default_gguf):
    for options in ({"repack": "int3"}, {"repack": "int8", "dtype": "bfloat16"}):
        with pytest.raises(ValueError, match=r"repack 'int[38]' must be int8 or int4, and goes with dtype auto"):
            generate.load(default_gguf, **options)


def test_settings_of_gptq_in_a_file_of_their_own(tmp_path):
    """Older GPTQ folders: config.json says nothing, quantize_config.json beside it does, without a method."""
    _, folder = quantized_folder(tmp_path, "gptq", 4, 32, True)
    want, path = logits(generate.load(folder)), tmp_path / "quantized" / "config.json"
    config = json.loads(path.read_text())
    settings = config.pop("quantization_config")
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="holds packed weights, but"):
        generate.load(folder)
    (tmp_path / "quantized" / "quantize_config.json").write_text(
        json.dumps({k: settings[k] for k in ("bits", "group_size", "desc_act", "sym")}))
    assert torch.equal(logits(generate.load(folder)), want)


def rewrite(folder, **changes):
    """config.json with other values; None takes a key out."""
    path = f"{folder}/config.json"
    with open(path) as f:
        config = {**json.load(f), **changes}
    with open(path, "w") as f:
        json.dump({k: v for k, v in config.items() if v is not None}, f)


def test_where_the_settings_may_stand(tmp_path):
    """compression_config is how older compressed-tensors files call it; an empty quantization_config is none, and then
    packed weights are named."""
    _, folder = quantized_folder(tmp_path, "compressed-tensors", 4, 32, True)
    want = logits(generate.load(folder))
    settings = checkpoint.load(folder).config["quantization_config"]
    rewrite(folder, quantization_config=None, compression_config=settings)
    assert torch.equal(logits(generate.load(folder)), want)
    for empty in ({}, []):
        rewrite(folder, quantization_config=empty, compression_config=None)
        with pytest.raises(ValueError, match=r"holds packed weights, but its config\.json has no quantization_config"):
            generate.load(folder)
    plain = tiny_folder(tmp_path / "other")
    rewrite(plain, quantization_config={})
    assert generate.load(plain).about.startswith("other: llama, ")


def test_the_line_counts_what_the_model_uses(tmp_path):
    """A stale head of a tied model is stored and looked at, but is no parameter; the width of the codes is said."""
    plain, folder = quantized_folder(tmp_path, "gptq", 4, 32, True, tie_word_embeddings=True)
    before = generate.load(folder).about
    source = checkpoint.load(folder)
    stale = {**{n: t.clone() for n, t in source.tensors.items()}, "lm_head.weight": torch.full((270, 64), 7.0)}
    checkpoint.save(folder, source.config, stale, force=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "quantized" / name).write_bytes((tmp_path / "plain" / name).read_bytes())
    with pytest.warns(UserWarning, match="head is tied"):
        again = generate.load(folder).about
    assert "(gptq, 4 bits)" in before and before.split(" M parameters")[0] == again.split(" M parameters")[0]
    assert before.split("; ")[1] == again.split("; ")[1]


def test_repack_leaves_alone_what_gets_no_kernel_by_it(tmp_path):
    """Rows that are no multiple of 16 have none however they are rounded; one that helps nothing says so."""
    _, folder = quantized_folder(tmp_path, "compressed-tensors", 8, None, True, num_attention_heads=4,
                                 num_key_value_heads=1, head_dim=24)  # k and v have 24 rows
    as_it_is, again = generate.load(folder), generate.load(folder, repack="int4")
    assert torch.equal(logits(as_it_is), logits(again)) and "(there was nothing to repack)" in again.about
    kinds = {m.kind for m in again.model.modules() if isinstance(m, packed.QuantLinear)}
    assert kinds == ({"int4"} if packed._int4_block() else set())


def test_a_single_file_with_its_config_beside_it(tmp_path):
    _, folder = quantized_folder(tmp_path, "compressed-tensors", 4, 32, True)
    whole = generate.load(folder)
    alone = generate.load(f"{folder}/model.safetensors")
    assert torch.equal(logits(whole), logits(alone))
    assert alone.about.startswith("model.safetensors: llama, ") and alone.weights == "packed"


def test_rt_20_weights_that_are_quantized_are_not_quantized_again(tmp_path):
    """RT-20, OneTrainer #1634: loading twice, or writing what was read, changes no code: nothing here quantizes what is
    quantized already."""
    _, folder = quantized_folder(tmp_path, "gptq", 4, 32, False)
    source = checkpoint.load(folder)
    read = layouts.read(source.config, source.tensors)
    name = "model.layers.0.mlp.up_proj"
    again = layouts.write("gptq", name, read[f"{name}.weight"])
    for part, tensor in again.items():
        assert torch.equal(tensor, source.tensors[part]), part


def test_adapters_and_parts_are_refused_by_name(tmp_path):
    """A LoRA adapter, as a Hugging Face folder with or without a config.json and as a GGUF file, and one part of a GGUF
    file of several, are not models; the message says what to do with them."""
    for with_config in (False, True):
        folder = tmp_path / f"adapter{with_config}"
        folder.mkdir()
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/model"}')
        (folder / "adapter_model.safetensors").write_bytes(bytes(8))
        if with_config:
            (folder / "config.json").write_text("{}")
        for path in (folder, folder / "adapter_model.safetensors"):
            with pytest.raises(ValueError, match="holds a LoRA adapter, not a model; merge it into its base model"):
                generate.load(str(path))

    def string(text):
        return len(text).to_bytes(8, "little") + text.encode()

    three = (4).to_bytes(4, "little") + (3).to_bytes(4, "little")
    adapter = (8).to_bytes(4, "little") + string("adapter")
    for key, value, message in (("general.type", adapter, "a LoRA to be merged"),
                                ("split.count", three, "one of 3 parts")):
        pairs = string("general.architecture") + (8).to_bytes(4, "little") + string("llama") + string(key) + value
        head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (2).to_bytes(8, "little")
        (tmp_path / "m.gguf").write_bytes(head + pairs)
        with pytest.raises(ValueError, match=message):
            generate.load(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize(("quantization_config", "message"), [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"), ({"quant_method": "hqq"}, "hqq"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"), ({"quant_method": 3}, "3"), ("awq", "quantiz"),
    ({"quant_method": "gptq", "bits": 5, "group_size": 32}, "bits is 5"),
])
def test_other_methods_are_refused_by_name(tmp_path, quantization_config, message):
    folder = tiny_folder(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization_config}))
    with pytest.raises(ValueError, match=message):
        generate.load(folder)


def test_a_surplus_tensor_of_a_quantized_folder_is_reported(tmp_path):
    """Every tensor is used or accounted for, in quantized folders too."""
    _, folder = quantized_folder(tmp_path, "gptq", 4, 32, True)
    source = checkpoint.load(folder)
    extra = {**{n: source.tensors[n].clone() for n in source.tensors}, "model.layers.0.mlp.up_proj.lora": torch.ones(1)}
    checkpoint.save(tmp_path / "more", source.config, extra)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "more" / name).write_bytes((tmp_path / "quantized" / name).read_bytes())
    with pytest.raises(ValueError, match=r"up_proj\.lora"):
        generate.load(str(tmp_path / "more"))


# ------------------------------------------------------------------ a SentencePiece model, whole

WORDS = ["h", "e", "l", "o", "w", "r", "d", "▁", "he", "ll", "hell", "hello", "▁hello", "wo", "rl", "worl", "world",
         "▁world"]
PARTS = {"he": "h e", "ll": "l l", "hell": "he ll", "hello": "hell o", "▁hello": "▁ hello", "wo": "w o", "rl": "r l",
         "worl": "wo rl", "world": "worl d", "▁world": "▁ world"}
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *WORDS]


def llama2_tokenizer():
    """tokenizer.json in the way of Llama 2: byte fallback, "▁" for spaces and one in front, a BOS by template."""
    added = [{"id": i, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False} for i, text in enumerate(PIECES[:3])]
    return {"version": "1.0", "added_tokens": added, "pre_tokenizer": None,
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
            "post_processor": {"type": "TemplateProcessing", "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
                {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                      "vocab": {piece: i for i, piece in enumerate(PIECES)}, "merges": list(PARTS.values())}}


def test_a_llama_2_vocabulary_from_a_folder_and_from_gguf(tmp_path):
    """TK-13, sglang #888: one BOS, from either file; ids as the tokenizers library gives them, also for what only bytes
    can spell; an answer is what its ids add to the prompt's text, its leading space included."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tiny_folder(tmp_path / "m", vocab_size=len(PIECES), eos_token_id=2)
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(llama2_tokenizer()))
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    llm = generate.load(folder, dtype="float64")

    import test_gguf as g

    kinds = [2, 3, 3, *[6] * 256, *[1] * len(WORDS)]
    scores = [0.0] * 259 + [float(-WORDS.index(w)) for w in WORDS]
    pairs, tensors = g.tiny(kind="Q4_1", vocab=len(PIECES))
    pairs |= {"tokenizer.ggml.model": (g.STR, "llama"), "tokenizer.ggml.tokens": (g.ARR, (g.STR, PIECES)),
              "tokenizer.ggml.scores": (g.ARR, (6, scores)), "tokenizer.ggml.token_type": (g.ARR, (5, kinds)),
              "tokenizer.ggml.bos_token_id": (g.U32, 1), "tokenizer.ggml.eos_token_id": (g.U32, 2)}
    from_gguf = generate.load(g.write(tmp_path / "m.gguf", pairs, tensors))
    for text in ("hello world", " hello", "hello  world", "held", "é 😀", "</s>", "", "▁"):
        ids = llm.encode(text, raw=True)
        if text not in ("</s>", ""):  # control tokens are plain text here; the library's prefix needs some text
            assert ids == theirs.encode(text).ids, text
            assert ids == from_gguf.encode(text, raw=True), text
        assert ids[0] == 1 and ids.count(1) == 1 and 2 not in ids
    found, = llm.generate("hello", raw=True, max_tokens=8, temperature=1.0, seed=3)
    whole = llm.tokenizer.decode([*found.prompt_ids, *found.ids])
    assert found.text == whole.removeprefix("hello") and len(found.ids) >= 1
