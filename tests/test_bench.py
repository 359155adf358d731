"""bench.py: what it measures is what it says, on a tiny model; no test here looks at a speed."""
import contextlib
import ctypes
import hashlib
import io
import json
import math
import os
import subprocess
import sys
import zipfile
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from tiny import byte_alphabet, tiny_folder

import bench
import compiled
import generate
from benchmarks import parallel as ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


def run(capsys, *argv) -> tuple[int, str, dict]:
    code = bench.main(argv)
    out, err = capsys.readouterr()
    return code, out, json.loads(out.splitlines()[-1]) if code == 0 else err


def test_the_card_names_the_machine(capsys):
    card = bench.card()
    assert card["cores"] >= 1 and card["read_GB_per_s"] > 0.1 and card["torch"] == torch.__version__ and card["cpu"]


def test_a_card_of_a_machine_that_says_little(monkeypatch):
    """No /proc, no git, or a folder that is no clone: what is unknown is left out, and nothing fails."""
    def no_file(path, *more, **others):
        raise FileNotFoundError(path)

    def no_clone(command, **_):
        raise subprocess.CalledProcessError(128, command)

    monkeypatch.setattr(bench, "open", no_file, raising=False)
    monkeypatch.setattr(bench, "read_bandwidth", lambda: 1.25)
    for missing in (no_file, no_clone):
        monkeypatch.setattr(bench.subprocess, "run", missing)
        card = bench.card()
        assert card["commit"] is None and card["cpu"] and card["read_GB_per_s"] == 1.2
    said = {"status": " M a.py\n", "rev-parse": "abc123\n"}
    monkeypatch.setattr(bench.subprocess, "run", lambda command, **_: SimpleNamespace(stdout=said[command[1]]))
    assert bench.card()["commit"] == "abc123 with changes"
    said["status"] = "\n"
    assert bench.card()["commit"] == "abc123"


def test_latency_beside_transformers(capsys, folder):
    code, out, result = run(capsys, "latency", "--model", folder, "--dtype", "float32", "--peer", "transformers",
                            "--prompts", "20", "--contexts", "4", "20", "--tokens", "3", "--rounds", "2")
    assert code == 0 and "| engine" in out and "torch" in out
    ours, theirs = result["tokens_per_s"]
    assert ours == "nanoinfer float32" and theirs.startswith("transformers")
    columns = ["prefill 20", "decode at 4", "decode at 20"]
    for row in (*result["tokens_per_s"].values(), result["ratios"][theirs]):
        assert [c for c in row if c in columns] == columns and all(v > 0 for v in row.values())
    assert "matmuls alone" in result["tokens_per_s"][ours] and "matmuls alone" not in result["tokens_per_s"][theirs]
    assert result["command"] == "latency" and result["card"]["threads"] == torch.get_num_threads()


def test_the_engines_compute_the_same_tokens(folder):
    """A peer that computed something else would make the comparison worthless."""
    engines = [bench.Ours(generate.load(folder, dtype="float32")), bench.Transformers(folder, torch.float32)]
    answers = []
    for engine in engines:
        prompts = [list(range(5, 25)), list(range(105, 125))]
        tokens = [engine.prefill(prompts)]
        for _ in range(10):
            tokens.append(engine.decode(tokens[-1]))
        answers.append(tokens)
        assert engine.prefill(prompts) == tokens[0], "prefill forgets what was before"
        assert engine.prefill(prompts[1:]) == tokens[0][1:], "a batch of one says the same"
    assert answers[0] == answers[1]


def test_llama_cpp_continues_with_our_tokens(default_gguf):
    pytest.importorskip("llama_cpp")
    ours = bench.Ours(generate.load(default_gguf, dtype="float32"))
    ids = ours.llm.encode("The capital of France is", raw=True)
    prompts = [ids, ids[::-1], ids]
    for requantize, share in ((None, 0.9), ("Q4_0", 0.6)):  # it rounds activations to 8 bits; Q4_0 the weights as well
        peer = bench.LlamaCpp(default_gguf, False, 64, batch=3, requantize=requantize)
        tokens, theirs = [ours.prefill(prompts)], [peer.prefill(prompts)]
        for _ in range(8):
            theirs.append(peer.decode(tokens[-1]))  # fed with our tokens
            tokens.append(ours.decode(tokens[-1]))
        alike = [a == b for mine, yours in zip(tokens, theirs) for a, b in zip(mine, yours)]
        assert sum(alike) >= share * len(alike)


def test_transformers_runs_a_gguf_file(tmp_path):
    """Dequantized once, through a folder that does not stay, to the tokens that we compute from the file."""
    import test_gguf as g

    tokens = [letter for _, letter in sorted(byte_alphabet().items())] + ["ab", "<|endoftext|>", "<|im_end|>"]
    pairs, tensors = g.tiny(kind="Q8_0", vocab=len(tokens))
    pairs |= {"tokenizer.ggml.model": (g.STR, "gpt2"), "tokenizer.ggml.pre": (g.STR, "smollm"),
              "tokenizer.ggml.tokens": (g.ARR, (g.STR, tokens)),
              "tokenizer.ggml.token_type": (g.ARR, (5, [1] * 257 + [3] * 2)),
              "tokenizer.ggml.merges": (g.ARR, (g.STR, ["a b"]))}
    path = g.write(tmp_path / "m.gguf", pairs, tensors)
    ours, theirs = bench.Ours(generate.load(path, dtype="float32")), bench.Transformers(path, torch.float32)
    prompts = [list(range(40, 60)), list(range(140, 160))]
    said = [[engine.prefill(prompts)] for engine in (ours, theirs)]
    for _ in range(5):
        for engine, spoken in zip((ours, theirs), said):
            spoken.append(engine.decode(spoken[-1]))
    assert said[0] == said[1] and len({*map(tuple, said[0])}) > 1


class Library:
    """Stands in for llama_cpp: the likeliest token follows from all that a sequence has seen, and asking for logits
    that were not wanted, for a position out of order or for more than a batch holds is noticed."""

    __version__, LLAMA_FTYPE_MOSTLY_Q4_0, V = "0", 2, 270

    class Params(ctypes.Structure):
        _fields_ = (("ftype", ctypes.c_int), ("allow_requantize", ctypes.c_bool))

    llama_model_quantize_default_params = Params
    llama_log_callback = llama_backend_init = llama_log_set = staticmethod(lambda *_: None)
    llama_model_default_params = llama_context_default_params = staticmethod(SimpleNamespace)
    llama_model_get_vocab = llama_get_memory = staticmethod(lambda x: x)

    def __init__(self):
        self.seen, self.calls, self.rows, self.opened, self.fault = {}, [], {}, [], ""

    def llama_model_quantize(self, source, target, how):
        assert (how._obj.ftype, how._obj.allow_requantize) == (2, True)
        with open(target, "wb") as file:
            file.write(b"Q4_0 of " + source)
        return int(self.fault == "quantize")

    def llama_model_load_from_file(self, path, params):
        with open(path, "rb") as file:
            self.opened.append(file.read(4))
        return None if self.fault == "load" else "model"

    def llama_init_from_model(self, model, params):
        self.params = params
        return model and "context"

    def llama_vocab_n_tokens(self, vocab):
        return self.V

    def llama_batch_init(self, n, *_):
        return SimpleNamespace(n_tokens=0, token=[0] * n, pos=[0] * n, n_seq_id=[0] * n, seq_id=[[0] for _ in range(n)],
                               logits=[0] * n)

    def llama_memory_clear(self, *_):
        self.seen.clear()

    def llama_decode(self, context, b):
        self.rows = {}
        self.calls.append(b.n_tokens)
        for i in range(b.n_tokens):
            ids = self.seen.setdefault(b.seq_id[i][0], [])
            if self.fault == "decode" or b.pos[i] != len(ids) or b.n_seq_id[i] != 1:
                return 1
            ids.append(b.token[i])
            if b.logits[i]:
                self.rows[i] = self.likeliest(ids)
        return 0

    def llama_get_logits_ith(self, context, i):
        logits = (ctypes.c_float * self.V)()
        logits[self.rows[i]] = 1
        return ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))

    @classmethod
    def likeliest(cls, ids):
        return (sum((i + 1) * t for i, t in enumerate(ids))) % cls.V


def test_what_llama_cpp_is_asked(monkeypatch, tmp_path):
    """Prompts in pieces of 512 with logits of their last token only, then one token of each sequence in a call; a file
    rounded once more is gone when it has been read. Against a stand-in; the test above has the library itself."""
    monkeypatch.setitem(sys.modules, "llama_cpp", library := Library())
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for kind, flash in ((None, False), ("Q4_0", True)):
        peer = bench.LlamaCpp(str(tmp_path / "m.gguf"), flash, 1200, batch=2, requantize=kind)
        assert peer.name == ("llama.cpp (0) Q4_0 flash on" if flash else "llama.cpp (0) flash off")
        assert (library.params.n_ctx, library.params.n_seq_max, library.params.flash_attn_type) == (2400, 2, int(flash))
        assert library.params.n_threads == torch.get_num_threads()
        for n, calls in ((1100, [512, 512, 76] * 2), (512, [512] * 2), (1, [1] * 2)):
            library.calls.clear()
            prompts = [[(7 * i + b) % 270 for i in range(n)] for b in (0, 5)]
            tokens = peer.prefill(prompts)
            for _ in range(3):
                assert tokens == [library.likeliest(ids) for ids in prompts]
                prompts = [[*ids, t] for ids, t in zip(prompts, tokens)]
                tokens = peer.decode(tokens)
            assert library.calls == [*calls, 2, 2, 2]
    assert library.opened == [b"GGUF", b"Q4_0"] and [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    library.fault = "decode"
    with pytest.raises(AssertionError, match="llama_decode failed with 1"):
        peer.prefill([[1]])
    for fault, says in (("load", "not load .*m.gguf with a context of 12"), ("quantize", "not requantize .* to Q4_0")):
        library.fault = fault
        with pytest.raises(ValueError, match=says):
            bench.LlamaCpp(str(tmp_path / "m.gguf"), False, 12, requantize="Q4_0")


def test_each_kind_of_llama_cpp_runs_with_flash_attention_and_without(capsys, monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "llama_cpp", Library())
    _, _, result = run(capsys, "latency", "--model", f"{folder}/model.safetensors", "--dtype", "float32", "--peer",
                       "llama.cpp", "--peer", "llama.cpp-q4_0", "--prompts", "8", "--contexts", "4", "--batches", "1",
                       "2", "--tokens", "2", "--rounds", "1")
    assert list(result["ratios"]) == [f"llama.cpp (0) {kind}flash {on}" for kind in ("", "Q4_0 ") for on in ("off",
                                                                                                         "on")]
    assert all(list(row) == ["prefill 8", "decode at 4", "2 sequences at 4"] for row in result["ratios"].values())


def test_compiled_steps_are_compared_with_the_rest(capsys, monkeypatch, folder, tmp_path):
    """Compiled is the first, with which all others are compared. (Here the formula stands in for the compiler.)"""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "compile_step", lambda step, pool, path: (
        os.makedirs(os.path.dirname(path), exist_ok=True), zipfile.ZipFile(path, "w").close()))
    monkeypatch.setattr(compiled, "load_step", lambda step, path: lambda *a: list(step(*a)))
    _, _, result = run(capsys, "latency", "--model", folder, "--dtype", "float32", "--compile", "--prompts", "8",
                       "--contexts", "4", "--batches", "1", "2", "--tokens", "2", "--rounds", "1")
    assert list(result["tokens_per_s"]) == ["nanoinfer float32 compiled", "nanoinfer float32"]
    assert list(result["ratios"]) == ["nanoinfer float32"]


def test_perplexity_is_the_exponential_of_the_mean_loss(capsys, folder, tmp_path):
    text = "The quick brown fox jumps over the lazy dog. " * 4
    (tmp_path / "text.txt").write_text(text)
    _, _, result = run(capsys, "perplexity", str(tmp_path / "text.txt"), "--model", folder, "--dtype", "float64",
                       "--window", "32", "--windows", "3")
    model, ids, losses = generate.load(folder, dtype="float64").model, list(text.encode()), []
    for begin in (0, 32, 64):
        window = torch.tensor([ids[begin: begin + 32]])
        with torch.inference_mode():
            logp = model(window)[0].log_softmax(-1)
        losses += [-logp[i, window[0, i + 1]].item() for i in range(31)]
    assert result["windows"] == 3 and abs(result["perplexity"]["float64"] - math.exp(sum(losses) / 93)) < 1e-3


def test_several_types_are_compared_in_one_run(capsys, folder, tmp_path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 4)
    flags = ["--model", folder, "--dtype", "float64", "--dtype", "bfloat16"]
    _, out, result = run(capsys, "perplexity", str(tmp_path / "text.txt"), *flags, "--window", "32")
    wide, narrow = result["perplexity"]["float64"], result["perplexity"]["bfloat16"]
    assert 0 < abs(wide - narrow) < 0.05 * wide and "% beside float64" in out
    _, _, result = run(capsys, "latency", *flags, "--prompts", "8", "--contexts", "4", "--batches", "1",
                       "--tokens", "2", "--rounds", "1")
    assert list(result["tokens_per_s"]) == ["nanoinfer float64", "nanoinfer bfloat16"]
    assert list(result["ratios"]["nanoinfer bfloat16"]) == ["prefill 8", "decode at 4", "matmuls alone"]
    alike = str(generate.load(folder).dtype).removeprefix("torch.")  # what auto is for an unquantized model
    for command in (["latency"], ["perplexity", str(tmp_path / "text.txt"), "--window", "32"]):
        code, _, err = run(capsys, *command, "--model", folder, "--dtype", "auto", "--dtype", alike)
        assert code == 2 and f"--dtype {alike} runs model in {alike}, as another --dtype does" in err


def test_quantize_keeps_its_cells(capsys, folder, tmp_path, monkeypatch):
    """Each cell once: a second run measures nothing again; and nothing is judged by the text it was calibrated on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 8)
    kept = tmp_path / "cells.json"
    command = ["quantize", str(text), "--model", folder, "--window", "32", "--windows", "2", "--divergence", "1",
               "--sequences", "4", "--length", "16", "--rounds", "1", "--tokens", "2", "--results", str(kept),
               "--methods", "rtn 4 bits a row", "gptq 4 bits a row", "int8", "nf4"]
    code, out, result = run(capsys, *command)
    assert code == 0 and set(result["rows"]) == {"float32", "rtn 4 bits a row", "gptq 4 bits a row", "int8", "nf4"}
    rows = result["rows"]
    assert rows["float32"]["bits"] == 32 and 4 < rows["nf4"]["bits"] < 5 < 8 < rows["int8"]["bits"] < 9
    assert rows["int8"]["text.txt KL"] < rows["rtn 4 bits a row"]["text.txt KL"]
    assert "tokens/s" in rows["int8"] and "tokens/s" not in rows["nf4"]
    monkeypatch.setattr(bench.quality.Bench, "_quantized", lambda *_: pytest.fail("measured again"))
    assert run(capsys, *command)[2]["rows"] == rows
    code, _, err = run(capsys, *command, "--calibration", str(text))
    assert code == 2 and "calibrated on the text that it is judged by" in err


def test_matmuls_are_those_of_a_step(folder, default_gguf):
    """Every matrix once, the head included; of a tied model that is the embedding."""
    for model, n in ((folder, 2 * 4 + 1), (default_gguf, 30 * 4 + 1)):
        engine = bench.Ours(generate.load(model, dtype="bfloat16"))
        engine.matmuls()
        assert len(engine.matrices) == n
    packed = bench.Ours(generate.load(default_gguf))
    packed.matmuls()
    assert len(packed.matrices) == 30 * 4 + 1 and packed.name == "nanoinfer packed"
    for one, low, high in ((engine, 15, 17), (packed, 5, 8)):  # as roofline.py counts them: all but the norms
        shape = bench._shape(one)
        assert shape.n_params == 134_515_008 - 61 * 576 and low < shape.weight_bits < high


@pytest.mark.parametrize("kv, window", [("auto", None), ("auto", 5), ("int8", None)])
def test_ceilings_are_those_of_roofline(tmp_path, kv, window, monkeypatch):
    """A step reads every matrix once, and K and V of the tokens that it sees; the share is of the card's bandwidth."""
    kind = {"model_type": "mistral", "sliding_window": window} if window else {}
    engine = bench.Ours(generate.load(tiny_folder(tmp_path / "m", **kind), dtype="float32", kv_dtype=kv))
    c, args = engine.llm.model.config, SimpleNamespace(bandwidth=2.0, tokens=3)
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
    matrices, row = 4 * (2 * layer + 32 * 270), 2 * 2 * 2 * (8 * 4 if kv == "auto" else 8 + 4)
    shape = bench._shape(engine)
    assert shape.weight_bytes == matrices and shape.n_params == matrices / 4 and shape.kv_bytes == row
    assert bench.roofline.flops_per_token(shape) == 2 * (2 * layer + 32 * 270) and (c.n_head, shape.n_head) == (4, 4)
    points, medians = [(1, 4), (3, 20)], {engine.name: {"a": 100.0, "b": 600.0}}
    found = bench._ceilings([engine], points, ["a", "b"], medians, args)
    for (b, context), column in zip(points, "ab"):
        n_bytes = matrices + b * min(context + 2, window or 99) * row
        cell = found[f"{engine.name}, {column}"]
        assert list(cell) == ["MB a step", "share"] and cell["MB a step"] == round(n_bytes / 1e6, 1)
        assert cell["share"] == round(medians[engine.name][column] / b * n_bytes / 2e9, 3)
    right = bench.roofline.decode_bytes
    monkeypatch.setattr(bench.roofline, "decode_bytes", lambda *a: 10 * right(*a))
    again = bench._ceilings([engine], points, ["a", "b"], medians, args)
    assert all(again[name]["share"] > 9 * cell["share"] > 0 for name, cell in found.items())


@pytest.mark.parametrize("argv, mentions", [
    (["perplexity", "nowhere.txt"], "nowhere.txt"), (["perplexity", "pydoc", "--window", "0"], "--window"),
    (["latency", "--rounds", "0"], "--rounds"),
    (["prefix", "--dtype", "float32", "--dtype", "auto"], "prefix measures one --dtype"),
    (["latency", "--peer", "llama.cpp", "--prompts", "8", "--contexts", "4"], ".gguf"),
    (["latency", "--prompts", "1000", "--contexts", "4"], "1000"),
    (["latency", "--prompts", "60", "--contexts", "4", "--kv-memory", "1e-4"],
     "32 sequences of 37 tokens need 96 blocks of the KV cache, which has"),
    (["perplexity", "pydoc", "--window", "999999999"], "tokens, fewer than one window of 999999999"),
    (["parallel", "--ranks", "1", "--prompt", "100"], "1 ranks ended with code 1: "),
])
def test_wrong_input_is_one_line_and_exit_code_2(capsys, folder, argv, mentions):
    code, _, err = run(capsys, *argv, "--model", folder)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and mentions in err


def test_what_cannot_be_measured_is_one_line(capsys, folder, tmp_path, monkeypatch):
    """A peer that is not installed, and a model whose logits are no numbers; Ctrl-C is code 130, as in a shell."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = run(capsys, "latency", "--model", folder, "--peer", "transformers", "--prompts", "8", "--contexts",
                       "4", "--batches", "1")
    assert code == 2 and err == "error: the peer needs a package that is not installed: pip install transformers\n"
    broken = tiny_folder(tmp_path / "m", scale=float("nan"))
    code, _, err = run(capsys, "perplexity", "pydoc", "--model", broken, "--dtype", "float32", "--window", "16")
    assert code == 2 and err.splitlines()[-1].startswith("error: the model's logits are not finite: damaged weights")
    monkeypatch.setattr(bench, "card", ctrl_c)
    assert run(capsys, "attention") == (130, "", "")


def ctrl_c():
    raise KeyboardInterrupt


def test_texts_to_be_judged_by(tmp_path, monkeypatch):
    """`pydoc` is Python's own help, the same in each run, unless there is a file of this name; no byte of a file stops
    the reading."""
    from pydoc_data.topics import topics

    monkeypatch.chdir(tmp_path)
    text = bench.read_text("pydoc")
    assert text == bench.read_text("pydoc") and all(topic in text for topic in topics.values())
    (tmp_path / "pydoc").write_bytes(b"mine \xff \xc3\xa9")
    assert bench.read_text("pydoc") == "mine \ufffd é"


def test_prefix_finds_the_shared_blocks_and_the_same_answer(capsys, folder):
    code, out, result = run(capsys, "prefix", "--model", folder, "--dtype", "float64", "--prompt", "33", "--tokens",
                            "3", "--rounds", "2")
    assert code == 0 and result["cached"] == 32 and result["equal"] == result["rounds"] == 2 and result["ratio"] > 0
    code, _, err = run(capsys, "prefix", "--model", folder, "--prompt", "60")
    assert code == 2 and "60 + 20 + 16 tokens exceed the model's context of 64" in err


def test_attention_is_compared_before_it_is_timed(capsys, monkeypatch):
    sizes = ["attention", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--contexts", "5", "33",
             "--prompts", "7"]
    code, out, result = run(capsys, *sizes)
    assert code == 0 and list(result["us"]) == ["1 rows, 5 keys", "1 rows, 33 keys", "7 rows, 7 keys"]
    assert all(v > 0 for row in result["us"].values() for v in (row["paged us"], row["dense us"]))
    if torch.cuda.is_available():
        return
    assert "no GPU here: flash.py was not timed" in out
    right = bench.attention.paged_attention
    monkeypatch.setattr(bench.attention, "paged_attention", lambda q, *a, **k: right(q, *a, **k).roll(1, 1))
    code, _, err = run(capsys, *sizes)
    assert code == 2 and "paged and dense attention differ by" in err


@pytest.mark.slow
def test_perplexity_of_the_default_model(default_gguf, capsys):
    """12.88 on Python's own help topics, measured with transformers on the dequantized weights; packed weights are
    within half a percent of the same weights in float32."""
    if hashlib.sha256(bench.read_text("pydoc").encode()).hexdigest()[:16] != "71f2ff5d99bdc1f9":
        pytest.skip("another Python has another text")
    _, _, result = run(capsys, "perplexity", "pydoc")
    assert abs(result["perplexity"]["packed"] / 12.88 - 1) < 0.01
    _, _, result = run(capsys, "perplexity", "pydoc", "--dtype", "float32", "--dtype", "auto", "--windows", "4")
    assert abs(result["perplexity"]["packed"] / result["perplexity"]["float32"] - 1) < 0.005


def test_serve_measures_what_it_says(capsys, tmp_path):
    """Every part runs, every request gets its tokens, and the counted figures agree; no speed is looked at."""
    folder = tiny_folder(tmp_path / "m", max_position_embeddings=512)
    flags = ["--model", folder, "--dtype", "float32", "--requests", "6", "--slots", "3", "--prompt", "8",
             "--output", "4", "--streams", "2", "--long", "40", "--rate", "50", "--shared", "16", "--rounds", "2"]
    code, out, result = run(capsys, "serve", *flags)
    assert code == 0 and "continuous is faster by" in out and "goodput" in out and "E2E" in out
    assert [len(result[part]) for part in ("mix", "spike", "arrivals")] == [2, 2, 2]
    assert list(result["mix"][0]) == ["static, padded", "static, ended rows dropped", "continuous"]
    on, off = result["medians"]["arrivals"]["prefix cache"], result["medians"]["arrivals"]["without"]
    assert on["requests"] == on["answered"] == off["requests"] == 6 and on["tokens"] == off["tokens"]
    assert on["cached"] > 0.2 and off["cached"] == 0 and on["ttft_s"]["p50"] > 0
    assert result["medians"]["spike"]["chunked"].keys() == result["medians"]["spike"]["whole"].keys()
    code, _, err = run(capsys, "serve", *flags, "--long", "600")
    assert code == 2 and "spike needs 601 tokens" in err and "context is 512" in err


def test_speculate_measures_what_it_says(capsys, tmp_path, monkeypatch):
    """The same tokens with drafts and without, and figures that belong together; a constant text is all copies."""
    from benchmarks import speculate

    items = [{"kind": kind, "task": kind, "prompt": "abc" * 5} for kind in ("copy", "prose")]
    monkeypatch.setattr(speculate, "prompts", lambda kinds: [i for i in items if i["kind"] in kinds])
    folder = tiny_folder(tmp_path / "m", max_position_embeddings=512)
    code, out, result = run(capsys, "speculate", "--model", folder, "--dtype", "float64", "--tokens", "60",
                            "--rounds", "1")
    assert code == 0 and "wasted rows" in out
    for row in result["prompts"]:
        assert row["first difference"] is None and row["tokens"] == 60
        assert row["passes"] + sum(a for _, a in row["drafts"]) == 60, "a pass gives one token and those accepted"
    figures = speculate.figures([{"passes": 10, "tokens": 20, "ratio": 1.5, "drafts": [[2, 2], [3, 1], [4, 4]]}])
    assert figures["alpha"] == round(7 / 8, 3) and figures["wasted rows"] == round(2 / 19, 4)
    assert figures["closed form"] == round((7 + sum(1 + 7 / 8 * (1 - (7 / 8) ** k) * 8 for k in (2, 3, 4))) / 10, 3)


def test_static_batching_computes_for_nobody(folder):
    """Padded static batching takes as many steps as its longest answers; continuous as many as there is work."""
    from benchmarks import serve

    llm, steps = generate.load(folder, dtype="float32"), {}
    for static in ("pad", "drop", None):
        batcher = llm.new_batcher(max_batch=2, static=static)
        asked = [(0.0, serve.request([5] * n, n, f"{static}{i}")) for i, n in enumerate((2, 9, 3, 12))]
        found = serve.drive(batcher, asked)
        assert [len(t.times) for t in found["timelines"]] == [2, 9, 3, 12]
        steps[static] = (batcher.stats.steps, batcher.stats.computed)
    assert steps["pad"][0] == steps["drop"][0] == 9 + 12 and steps[None][0] < 9 + 12
    assert steps["pad"][1] > steps["drop"][1] == steps[None][1]


# ------------------------------------------------------------------ several ranks


class Group:
    """Two ranks as their first one sees them: counts of what is exchanged, raised by `exchange`."""

    size, rank = 2, 0

    def __init__(self):
        self.bytes, self.seconds = Counter(), Counter()

    def exchange(self, **n):
        self.bytes.update(n)
        self.seconds.update(dict.fromkeys(n, 0.25))


def alone(argv) -> dict:
    """benchmarks/parallel.py in this process, as one rank."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        ranks.main(argv)
    return json.loads(said.getvalue())


@pytest.mark.parametrize("told", [True, False])
def test_a_step_of_several_ranks_is_told_with_its_bytes(folder, monkeypatch, told):
    """What was exchanged and written in each step, not from the beginning on, beside the closed form."""
    llm, group, pipe = generate.load(folder, dtype="float64"), Group(), os.pipe()
    if not told:
        monkeypatch.setattr(ranks, "open", lambda path: io.StringIO("rchar: 5\n"), raising=False)
    elif ranks.written() is None:
        pytest.skip("this system does not tell what a process writes")
    group.exchange(all_reduce=10 ** 6)  # before the first step
    forward = llm.batcher.forward

    def exchanging(step):
        group.exchange(all_reduce=100 * len(step.tokens), gather=7, plan=3)
        os.read(pipe[0], os.write(pipe[1], bytes(5000)))
        return forward(step)

    llm.batcher.forward = exchanging
    found = ranks.steps(llm, group, 2, 3, rounds=3)
    assert [found[f"{kind} bytes"] for kind in ranks.KINDS] == [600, 7, 3] and found["all_reduce seconds"] == 0.25
    assert found["all_reduce formula"] == found["ring"] == (2 * 2 + 1) * 6 * 32 * 8  # two ranks: each sends it once
    assert found["gather formula"] == 2 * 135 * 8 and found["seconds"] > 0
    assert found["written"] is None if not told else 5000 <= found["written"] < 10_000
    assert llm.cache.n_free == llm.cache.n_blocks
    for end in pipe:
        os.close(end)


def test_ranks_are_told_beside_one(capsys, folder, monkeypatch):
    """`bench.py parallel`: one process measured here, and a second set of figures made of the first."""
    def launch(n, argv):
        run_ = alone(argv)
        assert run_["kind"] == "float32" and run_["weights"] == 4 * (2 * 270 * 32 + 2 * 32 * (2 * 48 + 3 * 64) + 5 * 32)
        for i, x in enumerate(run_["steps"].values() if n > 1 else ()):
            x.update({f"{kind} seconds": x["seconds"] / 8 for kind in ranks.KINDS}, written=None if i else 1234567)
            x.update({"all_reduce bytes": 64_000, "all_reduce formula": 64_001, "gather bytes": 540, "ring": 64_003,
                      "gather formula": 541, "plan bytes": 77})
        return run_

    monkeypatch.setattr(bench.parallel, "launch", launch)
    threads = torch.get_num_threads()
    code, out, result = run(capsys, "parallel", "--model", folder, "--dtype", "float32", "--ranks", "1", "2",
                            "--threads", str(threads), "--batches", "1", "3", "--prompt", "8", "--rounds", "1")
    assert code == 0, result
    assert list(result["ranks"]) == ["1", "2"] and result["threads"] == threads
    assert list(result["ranks"]["1"]["steps"]) == ["decode 1", "decode 3", "prompt 8"]
    cells = [[cell.strip() for cell in line[2:-2].split(" | ")] for line in out.splitlines() if line[:1] == "|"]
    lone, both, moved = (cells[i: i + 5] for i in (0, 5, 10))
    assert lone[0][1:] == both[0][1:] == ["step", "all_reduce", "gather", "plan", "computing", "times one rank"]
    assert [row[-1] for row in lone[2:]] == ["1"] * 3 and lone[2][2:5] == ["0"] * 3
    for row in both[2:]:  # three eighths of the time were spent on exchanges
        assert float(row[5]) == pytest.approx(float(row[1]) * 5 / 8, rel=0.02)
    assert moved[2] == ["decode 1", "64,000", "64,001", "540", "541", "77", "64,003", "1,234,567"]
    assert moved[3][-1] == "nan" and "2 ranks of" in out and "1 rank of" in out


def test_ranks_are_processes_of_torchrun(monkeypatch):
    """One is a plain process. What a failed one said comes back, not more of it than one reads."""
    commands, done = [], SimpleNamespace(returncode=0, stdout="a warning\n{\"steps\": {}}\n", stderr="")
    monkeypatch.setattr(ranks.subprocess, "run", lambda command, **_: (commands.append(command[1:]), done)[1])
    for n in (1, 2):
        assert ranks.launch(n, ["--rounds", "2"]) == {"steps": {}}
    assert commands[0] == ["-m", "benchmarks.parallel", "--rounds", "2"]
    assert commands[1][:2] == ["-m", "torch.distributed.run"] and commands[1][-4:] == commands[0]
    assert commands[1][commands[1].index("--nproc-per-node") + 1] == "2"
    done.returncode, done.stderr = 1, "\nValueError: " + "x" * 10_000
    with pytest.raises(RuntimeError, match=r"^3 ranks ended with code 1: ValueError: x+$") as caught:
        ranks.launch(3, [])
    assert len(str(caught.value)) < 600


def test_prompts_of_speculation_are_of_the_kinds_that_are_asked_for():
    from benchmarks import speculate

    copies, prose = (speculate.prompts([kind]) for kind in ("copy", "prose"))
    assert {item["kind"] for item in copies} == {"copy"} and {item["kind"] for item in prose} == {"prose"}
    assert len(copies) >= 3 <= len(prose) and speculate.prompts([]) == []
    assert all(item["prompt"].strip() and item["task"] for item in [*copies, *prose])
    assert len(speculate.prompts(["prose", "copy"])) == len(copies) + len(prose)


def test_under_torchrun_nothing_is_measured_or_written(monkeypatch, capsys):
    """All ranks would write the same files."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(bench.readme, "write", lambda: pytest.fail("it was written"))
    assert bench.main(["readme"]) == 2 and "leave out torchrun" in capsys.readouterr().err
