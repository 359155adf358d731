"""Readers of untrusted files meet hundreds of thousands of damaged ones: our error or a sound result, nothing else.

    PYTHONPATH=. python tests/test_fuzz.py NAME SEED N     a longer campaign, past its failures
    PYTHONPATH=. python tests/test_fuzz.py NAME CASE       one case again, as a failure names it
"""
import atexit
import base64
import contextlib
import ctypes
import functools
import io
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from fuzzing import MESSAGE, Target, campaign, mutate_bytes, mutate_tree, size_of
from tiny import TINY, byte_alphabet, tiny_folder

import chat
import checkpoint
import gguf
import layouts
import prompts
import tokenizer as T
import vocab
from model import Config, Llama, rope_frequencies

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory and time as Linux has them")
ROOM = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
atexit.register(shutil.rmtree, ROOM, ignore_errors=True)
ROOT = Path(__file__).resolve().parent.parent
TEXTS = ("", "Hello, wörld! ab ab\n\n  12345 <|e|><|im_end|> \ud800 e\u0301 😀", " a" * 40)

# ------------------------------------------------------------------ what each reader has to do with an input


def check_config(tree, stage):
    """A usable config, or a refusal: what from_dict lets through has frequencies and can be built."""
    with stage("config"):
        config = None
        config = Config.from_dict(tree)
    if config is None:
        return
    inv, factor = rope_frequencies(config.rope, config.head_dim)
    assert inv.shape == (config.head_dim // 2,) and bool((inv.isfinite() & (inv >= 0)).all()) and 0 < factor < 1e16
    if config.n_layer <= 2 and size_of(tree) % 4 == 0:
        with torch.device("meta"):
            assert sum(p.numel() for p in Llama(config).parameters()) > 0
        stage.counts["built"] += 1


def check_tokenizer(make, stage):
    with stage("tokenizer", FileNotFoundError):
        tok = None
        tok = make()
    for text in TEXTS if tok else ():
        with stage("encoded"):
            ids = tok.encode(text, allow_special=len(text) > 50)
            assert all(type(i) is int and 0 <= i < tok.vocab_size for i in ids), ids
            assert isinstance(tok.decode(ids), str)


def check_header(data, stage):
    with stage("header"):
        _, alignment, metadata, infos, start = gguf.read_header(data)
        with stage("metadata"):
            check_config(gguf.read_config(metadata, infos), stage)
        with stage("layout"):
            gguf.check_layout(infos, start, alignment, start + sum(i.nbytes + 31 for i in infos.values()) % (1 << 40))


def check_gguf(data, stage):
    path = ROOM / "m.gguf"
    path.write_bytes(data)
    with stage("opened"), gguf.GGUF(str(path)) as file:
        for _, name, shape in gguf.expected_tensors(file.config):
            assert file.tensor(name).shape == shape
            with stage("codes"):
                assert file.codes(name)["codes"].shape == shape
        check_config(file.config, stage)
        check_tokenizer(lambda: T.Tokenizer(**vocab.read_gguf(file.metadata)), stage)


def dump(tree) -> bytes:
    if isinstance(tree, bytes):
        return tree
    try:
        return json.dumps(tree).encode()
    except (RecursionError, TypeError):  # too deep, or bytes that moved into the tree
        return b'{"a":' * 985 + b"0" + b"}" * 985


def protobuf(tree) -> bytes:
    """A tree as a protobuf message: {field: value or [values]}; floats in 4 bytes, texts, bytes and trees by length."""
    def varint(n):
        n %= 2**64
        return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)

    def field(key, v):
        number = int(key) if key.isdecimal() and key.isascii() and len(key) < 9 else len(key)
        if isinstance(v, float):
            return varint(number << 3 | 5) + struct.pack("<f", v if abs(v) < 1e38 else float("nan"))
        if v is None or isinstance(v, int):
            return varint(number << 3) + varint(v or 0)
        data = v if isinstance(v, bytes) else v.encode("utf-8", "replace") if isinstance(v, str) else protobuf(v)
        return varint(number << 3 | 2) + varint(len(data)) + data

    try:
        fields = tree.items() if isinstance(tree, dict) else [("1", tree)]
        return b"".join(field(k, v) for k, vs in fields for v in (vs if isinstance(vs, list) else [vs]))
    except RecursionError:
        return b"\x0a\x02" * 1000


def dump_folder(tree, room: Path):
    """Writes {file name: bytes or JSON tree}; a safetensors file is {"header": tree, "data": bytes}."""
    for old in room.iterdir():
        old.unlink()
    for name, content in tree.items():
        if isinstance(content, dict) and "proto" in content:
            content = protobuf(content["proto"])
        elif isinstance(content, dict) and "header" in content:
            head = dump(content["header"])
            data = content.get("data", b"")
            content = struct.pack("<Q", len(head)) + head + (data if isinstance(data, bytes) else b"")
        (room / name).write_bytes(dump(content))


def mutate_folder(rng, tree, seeds):
    """A change in one file: of its tree, of its bytes, or of the file as such."""
    name, way = rng.choice(list(tree)), rng.random()
    others = [s[name] for s in seeds if name in s]
    if way < 0.03 and len(tree) > 1:
        return {k: v for k, v in tree.items() if k != name}
    if way < 0.06:
        return {**tree, name: tree[rng.choice(list(tree))]}
    if way < 0.5 or isinstance(tree[name], bytes):
        dump_folder({"x": tree[name]}, ROOM / "scratch")
        return {**tree, name: mutate_bytes(rng, (ROOM / "scratch/x").read_bytes(), front=rng.choice((1, 3)))}
    return {**tree, name: mutate_tree(rng, tree[name], others)}


def check_folder(tree, stage):
    room = ROOM / "folder"
    dump_folder(tree, room)
    with stage("loaded", FileNotFoundError):
        read = checkpoint.load(room)
        assert isinstance(read.config, dict) and isinstance(read.generation, dict)
        for name in read.tensors:
            with stage("read"):
                assert read.tensors[name].nbytes <= 4096
        check_config(read.config, stage)


def check_json(pair, stage):
    T.HEAP_BYTES = -1 if size_of(pair) % 4 == 0 else 1 << 20  # below 0, tiktoken merges from the first byte on
    check_tokenizer(lambda: T.Tokenizer(**vocab.read_json(pair["data"], pair["config"])), stage)


def mutate_pair(rng, pair, seeds):
    key = rng.choice(("data", "data", "config"))
    return {**pair, key: mutate_tree(rng, pair[key], [s[key] for s in seeds], False)}


def check_layout(pair, stage):
    with stage("understood"):
        weights = layouts.read(pair["config"], pair["tensors"])
        for name in weights:
            with stage("decoded"):
                weight = weights[name]
                if isinstance(weight, dict):
                    dense, (n, k) = layouts.dequantize(weight), weight["codes"].shape
                    assert dense.shape == (n, k) and weight["scales"].shape[0] == n
                    assert weight["zeros"] is None or weight["zeros"].shape == weight["scales"].shape


def mutate_tensor(rng, t):
    """A tensor of another shape, type or content; never larger than a file of its size could hold."""
    flat = t.reshape(-1)
    ways = [lambda: flat, lambda: t[:-1] if t.dim() else t, lambda: t[..., :1], lambda: t.unsqueeze(0),
            lambda: t.transpose(0, 1), lambda: torch.cat((flat, flat)), lambda: t.new_empty(0),
            lambda: t.new_empty(0, 4), lambda: flat[:1].sum(),
            lambda: t.contiguous().view(rng.choice((torch.uint8, torch.int8))),
            lambda: t.to(rng.choice(DTYPES)), lambda: t.reshape(-1, 2), lambda: flat.roll(1).view(t.shape),
            lambda: t.neg()]
    if rng.random() < 0.5 and t.numel():  # one value
        limits = [0, 1, -1, 5, float("nan"), float("inf")] if t.is_floating_point() else [0, 1, -1, 5, 120, -128]
        limits += [2**31 - 1, -2**31, 65] if t.dtype in (torch.int32, torch.int64) else []
        limits += [2**62, 2**40] if t.dtype == torch.int64 else []
        flat = flat.clone()
        flat[rng.randrange(len(flat))] = rng.choice(limits)
        return flat.view(t.shape)
    try:
        return rng.choice(ways)()
    except (RuntimeError, IndexError):  # the transpose of a vector, the last column of a number
        return flat


def mutate_layout(rng, pair, seeds):
    if rng.random() < 0.55:
        return {**pair, "config": mutate_tree(rng, pair["config"], [s["config"] for s in seeds])}
    tensors, name = dict(pair["tensors"]), rng.choice(list(pair["tensors"]))
    way, old = rng.random(), tensors.pop(name)
    if way < 0.8:
        tensors[name] = mutate_tensor(rng, old)
    elif way < 0.95:
        head, _, part = name.rpartition(".")
        tensors[rng.choice((f"{head}.weight", f"{head}.bias", f"{head}x.{part}", part, f"{head}.g_idx"))] = old
    return {**pair, "tensors": tensors or {name: old}}


def check_tokenizer_folder(tree, stage):
    dump_folder(tree, ROOM / "folder")
    check_tokenizer(lambda: T.Tokenizer(**vocab.read_folder(ROOM / "folder")), stage)


class Bare:
    """As little of a tokenizer as a chat template needs."""

    special, special_ids, names = {"<|im_end|>": 0, "<think>": 1}, frozenset({0}), {"eos_token": "<|im_end|>"}


SEEN: list[str] | None = None  # audit events while a template runs
REACH = {"os", "subprocess", "socket", "ctypes", "shutil", "pickle", "urllib"}


def watched(event: str, args: tuple) -> None:
    """An audit hook: notes what a template must never reach. (Python itself reads its own modules late, and looks for
    the source of what it cannot compile.)"""
    if SEEN is not None and (event.partition(".")[0] in REACH or (
            event == "open" and not str(args[0]).endswith((".py", ".pyc", "<template>")))):
        SEEN.append(f"{event} {args!r:.100}")


@functools.cache
def warm():
    """What Jinja and the codecs import on first use is imported."""
    for source in ("{{ messages | tojson }}", "{{ 1 / 0 }}", "{% if %}"):
        with contextlib.suppress(ValueError):
            chat.ChatTemplate(source).render([{"role": "user"}], Bare())


def check_chat(pair, stage):
    """A text, or a refusal in time; the messages stay as they were, and no file, process or socket is touched."""
    global SEEN
    warm()
    before, SEEN = dump(pair["messages"]), []
    try:
        with mock.patch.object(chat, "TEMPLATE_SECONDS", 0.3), stage("rendered"):
            text = None
            text = chat.ChatTemplate(pair["source"]).render(pair["messages"], Bare())
    finally:
        seen, SEEN = SEEN, None
    assert not seen, f"it reached {seen[0]}"
    assert dump(pair["messages"]) == before, "the messages were changed"
    if text is not None:
        text.encode()  # no half of a pair
        stage.counts["long"] += len(text) > 100


def mutate_chat(rng, pair, seeds):
    """Other messages, or a template with pieces of another, with a tag out of place, or a number beyond sense."""
    way, source = rng.random(), pair["source"]
    if way < 0.2:
        return {**pair, "messages": mutate_tree(rng, pair["messages"], [s["messages"] for s in seeds])}
    if way < 0.5:
        data = mutate_bytes(rng, source.encode(errors="replace"), [s["source"].encode() for s in seeds])
        return {**pair, "source": data.decode(errors="replace")}
    parts = re.findall(r"\w+|\W", source) or [""]
    at, more = rng.randrange(len(parts)), re.findall(r"\{[{%].*?[}%]\}|\w+|\W", rng.choice(seeds)["source"]) or [""]
    start, n = rng.randrange(len(more)), rng.choice((1, 1, 2, 5, 20))
    word = rng.choice(("__class__", "__globals__", "format", "10" * 9, "loop", "self", "namespace", "recursive",
                       "|join", "|tojson", "* 99999", "~", "[::-1]", "(", "{{", "%}", "{% else %}"))
    piece = [word] if way < 0.65 else more[start:start + n]
    return {**pair, "source": "".join(parts[:at] + piece + parts[at + rng.choice((0, 1, n)):])}


def check_prompts(data, stage):
    """Each line that is not blank gives one Line, usable or with an error that names it; and as a file of answers to go
    on with, the same bytes are taken or refused, never anything else."""
    found = list(prompts._requests(io.BytesIO(data), len(data) % 2 == 0))
    body = data.removeprefix(b"\xef\xbb\xbf")
    assert [x.number for x in found] == [n for n, raw in enumerate(body.split(b"\n"), 1) if raw.strip()]
    for line in found:
        assert (line.error is None) == (line.prompt is not None)
        if line.error is None:
            json.dumps([line.prompt, line.options], ensure_ascii=False, allow_nan=False).encode()
            assert 0 <= line.at < float("inf") and set(line.options) <= set(prompts.OPTIONS)
        else:
            assert line.error.startswith(f"line {line.number}: ") and len(line.error) < MESSAGE, line.error
        stage.counts["whole" if line.error is None else "broken"] += 1
    path = ROOM / "answers.jsonl"
    path.write_bytes(data)
    with stage("resumed"), prompts.Results(path, resume=True) as results:
        for line in found:
            results.done(line)
    left, whole = path.read_bytes(), data.rfind(b"\n") + 1
    ours = data[whole:].startswith(b'{"id": ') or b'{"id": '.startswith(data[whole:].rstrip(b"\0"))
    assert left in (data, data + b"\n") or (left == data[:whole] and ours), "only a record that was cut short may go"


# ------------------------------------------------------------------ sound inputs to start from


def configs() -> list[dict]:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 32, "rope_theta": 500000.0}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False, "attention_factor": None, "rope_theta": 1e4}
    ropes = [{}, {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_parameters": llama3},
             {"rope_scaling": llama3}, {"rope_parameters": yarn}, {"rope_scaling": {**yarn, "type": "yarn"}},
             {"rope_parameters": {"rope_type": "factors", "factors": [1.0, 2, 3.5, 4], "rope_theta": 1e4}}]
    flags = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "head_dim": 8, "torch_dtype": "bfloat16"}
    return [*({**TINY, **flags, **rope} for rope in ropes), {**TINY, "model_type": "mistral", "sliding_window": 32},
            {**TINY, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32, "max_window_layers": 2},
            {**TINY, "model_type": "qwen3", **flags, "rope_parameters": yarn}]


def sentencepieces(n: int | None = None):
    """Texts, scores and kinds: three control pieces, the bytes, and n more."""
    more = [("▁", 1), ("ab", 1), ("a", 1), ("b", 1), ("▁ab", 1), ("l", 1), ("lo", 1), ("<|e|>", 4), ("Hel", 5)][:n]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *(text for text, _ in more)]
    return texts, [-float(i) for i in range(len(texts))], [2, 3, 3] + [6] * 256 + [kind for _, kind in more]


def gguf_files() -> list[bytes]:
    """Each architecture and each type that is read, with the metadata of a tokenizer of either kind, or of none."""
    from test_gguf import ARR, F32, I32, STR, TYPE, U32, T, blocks, build, tiny

    files = []
    for n, kind in enumerate(gguf.FLOATS):
        arch = ("llama", "qwen2", "qwen3")[n % 3]
        vocab = 262 if n % 2 else 12  # half of them small, so that what follows the tokens is hit as often
        pairs, tensors = tiny(arch, "Q8_0", 32, 2, 1, 16, 256, vocab, 1, tied=n % 2 == 0, bias=n == 3)
        down, ggml = "blk.0.ffn_down.weight", "tokenizer.ggml."
        tensors[down] = T(down, (32, 256), kind, blocks(kind, (32, 256)))
        if arch == "llama" and n % 2:
            tensors["rope_freqs.weight"] = T("rope_freqs.weight", (8,), TYPE["F32"], struct.pack("<8f", *range(1, 9)))
            texts, scores, kinds = sentencepieces(3)
            pairs |= {ggml + "model": (STR, "llama"), ggml + "tokens": (ARR, (STR, texts)),
                      ggml + "scores": (ARR, (F32, scores)), ggml + "token_type": (ARR, (I32, kinds))}
        elif vocab == 262:
            texts, pre = [*byte_alphabet().values(), "ab", "Ġab", "<s>", "<|e|>", "<|im_end|>", "[PAD]"], "qwen2"
            pairs |= {ggml + "model": (STR, "gpt2"), ggml + "pre": (STR, pre if n % 4 == 1 else "llama-bpe"),
                      ggml + "tokens": (ARR, (STR, texts)), ggml + "merges": (ARR, (STR, ["a b", "Ġ ab"])),
                      ggml + "token_type": (ARR, (I32, [1] * 258 + [3, 3, 4, 5])), ggml + "eot_token_id": (U32, 260)}
        files.append(build(pairs, list(tensors.values())))
    return files


def folders() -> list[dict]:
    """Folders of one file, of one with all that safetensors can hold, and of shards, as trees."""
    sets = [{"a": torch.ones(3), "b": torch.zeros(2, 2).bfloat16(), "c": torch.tensor(1.5), "d": torch.empty(0, 3)},
            {str(t): torch.zeros(4, 2).to(t) for t in (torch.int8, torch.float8_e4m3fn, torch.int32, torch.float16)}]
    trees = []
    for tensors, shard in ((sets[0], 10**9), (sets[1], 10**9), (sets[0], 8), (sets[1], 16)):
        room = Path(tempfile.mkdtemp(dir=ROOM))
        checkpoint.save(str(room), configs()[2], tensors, {"eos_token_id": [2]}, max_shard_bytes=shard)
        tree = {}
        for path in sorted(room.iterdir()):
            data = path.read_bytes()
            size = int.from_bytes(data[:8], "little")
            tree[path.name] = ({"header": json.loads(data[8:8 + size]), "data": data[8 + size:]}
                               if path.suffix == ".safetensors" else json.loads(data))
        trees.append(tree)
    return trees


def tokenizers() -> list:
    """[tokenizer.json, tokenizer_config.json] of several kinds."""
    from test_vocab import tree

    folder = Path(tiny_folder(Path(tempfile.mkdtemp(dir=ROOM)) / "m"))
    plain = [json.loads((folder / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json")]
    bos = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|e|>", "type_id": 0}},
                                                    {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
           "special_tokens": {"<|e|>": {"id": "<|e|>", "ids": [257], "tokens": ["<|e|>"]}}}
    config = {"bos_token": {"content": "<|e|>"}, "eos_token": "<|e|>", "add_bos_token": True, "unk_token": None,
              "added_tokens_decoder": {"300": {"content": "<|x|>", "special": True, "lstrip": True, "rstrip": True}},
              "chat_template": [{"name": "default", "template": "{{ messages }}"}]}
    digits = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True},
                                                    {"type": "ByteLevel", "add_prefix_space": False}]}
    nfc = {"type": "Sequence", "normalizers": [{"type": "NFC"}]}
    texts, _, _ = sentencepieces()
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    unmark = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
              {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    pieces = {"model": {"type": "BPE", "vocab": {text: i for i, text in enumerate(texts)}, "byte_fallback": True,
                        "merges": ["▁ ab", ["a", "b"]], "unk_token": "<unk>", "fuse_unk": True},
              "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, mark]},
              "pre_tokenizer": None, "post_processor": None, "decoder": {"type": "Sequence", "decoders": unmark},
              "added_tokens": [{"id": i, "content": texts[i], "special": True, "normalized": False} for i in range(3)]}
    return [[pieces, config], [{**pieces, "normalizer": None, "pre_tokenizer": space, "decoder": space}, {}],
            plain, [tree(post_processor=bos, normalizer=nfc), config], [tree(pre_tokenizer=digits), config],
            [tree(model__ignore_merges=True, model__unk_token="a"), {}]]


def tokenizer_folders() -> list[dict]:
    small = b"\n".join(base64.b64encode(bytes([b])) + b" %d" % b for b in range(256))
    proto = {"1": [{"1": text, "2": score, "3": kind} for text, score, kind in zip(*sentencepieces())],
             "2": {"3": 2, "35": 1, "40": 0, "41": 1, "42": 2, "43": -1}, "3": {"3": 1, "4": 0, "5": 1}}
    return [*({"tokenizer.json": data, "tokenizer_config.json": config, "special_tokens_map.json": {"eos_token": "a"}}
              for data, config in tokenizers()), {"tokenizer.model": small, "tokenizer_config.json": {}},
            *[{"tokenizer.model": {"proto": proto}, "tokenizer_config.json": {"legacy": False}}] * 3]


def llama_folder() -> list[dict]:
    from test_vocab import llama_ranks

    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in llama_ranks().items()]
    return [{"tokenizer.model": b"\n".join(lines), "tokenizer_config.json": tokenizers()[0][1]}]


def chats() -> list[dict]:
    """Templates as models bring them, and those that mean harm."""
    from test_chat import ESCAPES, LARGE, LONG, THINK
    from tiny import CHATML

    reach = "{{ raise_exception.__globals__.json.codecs.open('/etc/passwd').read() }}"
    sound = [CHATML, THINK, "{% set n = namespace(x=0) %}{% for m in messages[::-1] if m.role != 'tool' %}{% set n.x = "
             "n.x + loop.index0 %}{{ m.content | trim | replace('a', 'b') | upper }}{% if loop.last %}{{ n.x }}"
             "{{ messages | map(attribute='role') | join('-') }}{% endif %}{% endfor %}",
             "{% macro turn(m, end='\n') %}{{ '<|im_start|>%s:%d' % (m.role, 3) ~ end }}{{ m | tojson(indent=2) }}"
             "{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}{{ strftime_now('%d %b %Y') }}"]
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <|im_end|> é\n<think>"},
             {"role": "assistant", "content": "<think>\n</think>ok", "tool_calls": [{"name": "f", "arguments": {}}]}]
    return [{"source": source, "messages": turns}
            for source in (*sound * 40, *ESCAPES, reach, *(s for s in (*LONG, *LARGE) if len(s) < 500))]


def jobs() -> list[bytes]:
    """Files of prompts: plain text, JSON objects, and answers, which have the same form."""
    lines = [{"prompt": "Why is the sky blue?", "id": "sky", "max_tokens": 9, "temperature": 0.5, "at": 1.5},
             {"messages": [{"role": "user", "content": "é\n"}], "stop": ["\n"], "n": 2, "seed": 2**63},
             {"prompt_ids": [1, 17, 4], "logit_bias": {"17": -5, "3": 1e3}, "id": 7},
             {"prompt": "JSON", "json_schema": {"type": "object"}, "raw": True}]
    answers = [{**prompts.head(prompts._from_json(i, json.dumps(line).encode(), {})), "text": "é", "samples": [
        {"finish_reason": ("stop", "abort")[i % 2]}]} for i, line in enumerate(lines, 1)]
    asked = [json.dumps(line, ensure_ascii=i % 2 == 0).encode() for i, line in enumerate(lines)]
    told = [json.dumps(answer, ensure_ascii=False).encode() for answer in answers]
    return [b"\n".join(asked) + b"\n", b"\r\n".join(asked), b"\xef\xbb\xbf" + b"\n\n".join(asked),
            b"\n".join(told) + b"\n", b"\n".join(told), "plain\n  text é\n\nof lines\n".encode()]


DTYPES = (torch.float32, torch.float16, torch.int32, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)


def quantized() -> list[dict]:
    """Small checkpoints of each layout: 16 outputs, 32 columns."""
    codes, up = torch.arange(512).view(16, 32) * 37 % 16, "model.layers.0.mlp.up_proj"
    base = {"codes": codes.to(torch.uint8), "scales": torch.ones(16, 4).half(), "zeros": torch.full((16, 4), 5).int(),
            "mins": None, "g_idx": None, "bits": 4}
    signed = {**base, "codes": (codes - 8).to(torch.int8), "zeros": None}
    order = torch.arange(31, -1, -1, dtype=torch.int32) // 8
    made = [("compressed-tensors", base, {"sym": False}), ("compressed-tensors", signed, {}),
            ("awq", base, {"sym": False}), ("gptq", base, {"sym": False}),
            ("gptq", {**signed, "g_idx": order}, {"desc_act": True})]
    trees = [{"config": {"quantization_config": layouts.quantization_config(name, 4, 8, **how)},
              "tensors": {"norm.weight": torch.ones(4), **layouts.write(name, up, w)}} for name, w, how in made]
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 8]}
    quant = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head", "re:.*gate$"],
             "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    fp8 = {f"{up}.weight": torch.ones(16, 32).to(torch.float8_e4m3fn), f"{up}.weight_scale": torch.ones(2, 4)}
    int8 = {f"{up}.weight": codes.to(torch.int8), f"{up}.weight_scale": torch.ones(16, 1)}
    channel = {"group_0": {"targets": [f"re:.*{up}"], "weights": {"num_bits": 8, "strategy": "channel"}}}
    return [*trees, {"config": {"quantization_config": quant}, "tensors": fp8}, {"config": {
        "quantization_config": {**quant, "format": "int-quantized", "config_groups": channel}}, "tensors": int8}]


def bytes_target(seeds, check, front=1.0):
    return Target(seeds, lambda rng, value, others: mutate_bytes(rng, value, others, front), check)


def headers() -> list[bytes]:
    return [data[:gguf.read_header(data)[4]] for data in gguf_files()]


TARGETS = {
    "gguf-header": lambda: bytes_target(headers(), check_header),
    "gguf": lambda: bytes_target(gguf_files(), check_gguf, front=3),
    "config": lambda: Target(configs(), mutate_tree, check_config),
    "folder": lambda: Target(folders(), mutate_folder, check_folder),
    "layouts": lambda: Target(quantized(), mutate_layout, check_layout),
    "tokenizer": lambda: Target([{"data": d, "config": c} for d, c in tokenizers()], mutate_pair, check_json),
    "tokenizer-folder": lambda: Target(tokenizer_folders(), mutate_folder, check_tokenizer_folder),
    "tiktoken": lambda: Target(llama_folder(), mutate_folder, check_tokenizer_folder),
    "chat": lambda: Target(chats(), mutate_chat, check_chat, slack=100 << 20),
    "prompts": lambda: bytes_target(jobs(), check_prompts),
}


# ------------------------------------------------------------------ campaigns


def no_memory(cursor, n):
    try:
        bytes(min(n, 1 << 40))
    except MemoryError:
        raise ValueError("this file is damaged") from None


def quote(cursor, n):
    raise ValueError(f"{n} bytes are not in {cursor.data[8:].decode('latin-1')}")


def hang(cursor, n):
    signal.setitimer(signal.ITIMER_PROF, 0.1)  # sooner than usual
    return [None for _ in iter(int, 1)]


FAULTS = {  # name: (what a reader does, before it refuses, with n bytes that are not there; a word of the report)
    "allocates": (lambda c, n: bytearray(min(n, 1 << 40)), "MemoryError"),
    "allocates-in-torch": (lambda c, n: torch.empty(min(n, 1 << 40), dtype=torch.uint8), "can't allocate memory"),
    "allocates-objects": (lambda c, n: [object() for _ in range(200_000)], "bytes allocated"),
    "hides-it": (no_memory, "memory ran out behind a ValueError"), "hangs": (hang, "SIGPROF"),
    "reads-past-the-end": (lambda c, n: c.data[min(c.pos + n, 1 << 62)], "IndexError"),
    "passes-on": (lambda c, n: b"\xff".decode(), "UnicodeDecodeError is a ValueError, but not one of ours"),
    "quotes": (quote, "a message of"),
    "crashes": (lambda c, n: ctypes.string_at(0), "SIGSEGV"),
}


def faulty(fault):
    sound = gguf._Cursor.take

    def take(self, n, what):
        if n > self.end - self.pos:
            fault(self, n)
        return sound(self, n, what)

    def check(data, stage):
        with mock.patch.object(gguf._Cursor, "take", take):
            check_header(data, stage)
    return bytes_target(headers(), check)


TARGETS |= {name: functools.partial(faulty, fault) for name, (fault, _) in FAULTS.items()}
BROKEN = {  # name: (target, where, a function there, what stands in for it, a word of the report)
    "raises-anything": ("tokenizer", vocab, "_reading", contextlib.nullcontext, "KeyError|TypeError|AttributeError"),
    "quotes-strangers": ("tokenizer-folder", vocab, "_printable", str, "a message of"),
    "lets-templates-out": ("chat", chat._Sandbox, "is_safe_attribute", lambda *_: True, "it reached open"),
    "lets-templates-run": ("chat", chat._Meter, "pay", lambda *_: None, "SIGPROF|MemoryError|bytes allocated"),
    "raises-for-a-line": ("prompts", prompts, "_object", json.loads, "AttributeError|TypeError|JSON compliant"),
    "cuts-more": ("prompts", prompts.os, "ftruncate", lambda fd, _, cut=os.ftruncate: cut(fd, 0), "cut short may go"),
}


def broken(target, where, name, stand_in):
    sound = TARGETS[target]()

    def check(value, stage):
        with mock.patch.object(where, name, stand_in):
            sound.check(value, stage)
    return sound._replace(check=check)


TARGETS |= {name: functools.partial(broken, *how[:4]) for name, how in BROKEN.items()}
CAMPAIGNS = {  # inputs, of a slow campaign, and how many of a hundred get how far at the least
    "gguf-header": (7000, 110_000, {"header": 10, "metadata": 8, "layout": 7}),
    "gguf": (1500, 15_000, {"opened": 20, "codes": 100, "config": 20, "tokenizer": 8, "encoded": 20}),
    "config": (8000, 120_000, {"config": 15, "built": 2}),
    "folder": (2000, 20_000, {"loaded": 15, "read": 50, "config": 10}),
    "layouts": (2500, 30_000, {"understood": 30, "decoded": 40}),
    "tokenizer": (1500, 20_000, {"tokenizer": 20, "encoded": 60}),
    "tokenizer-folder": (800, 8000, {"tokenizer": 15, "encoded": 40}), "tiktoken": (6, 60, {"tokenizer": 20}),
    "chat": (800, 8000, {"rendered": 8, "long": 4}), "prompts": (3000, 30_000, {"whole": 40, "resumed": 5}),
}


def main(lines):
    """Each line asks for a campaign, "NAME SEED N [FIRST]", or for one case, "NAME CASE"; each answer is one of JSON.
    A process of its own, since it forks: pytest's has threads by then."""
    torch.set_num_threads(1)
    sys.addaudithook(watched)
    for room in ("folder", "scratch"):
        (ROOM / room).mkdir(exist_ok=True)
    targets = {}
    for line in lines:
        name, *numbers = line.split()
        target = targets[name] = targets.get(name) or TARGETS[name]()
        last = {"seed": 0, "n": 1, "case": numbers[0]} if len(numbers) == 1 else dict(
            zip(("seed", "n", "first"), map(int, numbers)))
        yield campaign(name, target, **last)


@pytest.fixture(scope="module")
def fuzz():
    path = os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "tests"))
    with subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "PYTHONPATH": path}) as server:
        def ask(*words):
            print(*words, file=server.stdin, flush=True)
            return json.loads(server.stdout.readline())
        yield ask
        server.stdin.close()


def passes(fuzz, name, seed, n):
    started = time.perf_counter()
    result = fuzz(name, seed, n)
    assert "failure" not in result, result["failure"]
    print(f"{name}: {result} in {time.perf_counter() - started:.1f} s")
    for stage, percent in CAMPAIGNS[name][2].items():
        assert 100 * result.get(stage, 0) >= percent * n, (stage, result)


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_damaged_inputs_end_in_our_error_or_a_sound_result(fuzz, name):
    passes(fuzz, name, 1, CAMPAIGNS[name][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_many_more_damaged_inputs(fuzz, name):
    assert sum(n for _, n, _ in CAMPAIGNS.values()) >= 350_000
    passes(fuzz, name, 2, CAMPAIGNS[name][1])


@pytest.mark.parametrize("name", FAULTS)
def test_a_reader_without_a_check_is_found_out(fuzz, name):
    """The same campaign on sabotaged readers: each fault is reported, small, and again when its case is run alone."""
    result = fuzz(name, 1, 1000)
    assert FAULTS[name][1] in result.get("failure", "no failure"), result
    assert result["case"].count(":") <= 2 and f"again: python tests/test_fuzz.py {name} {result['case']}" in \
        result["failure"]
    if name != "allocates-objects":  # every 16th input is traced, and a case alone is the first
        assert FAULTS[name][1] in fuzz(name, result["case"]).get("failure", "no failure")
    assert "failure" not in fuzz("gguf-header", result["case"])


@pytest.mark.parametrize("name", BROKEN)
def test_a_reader_that_is_sabotaged_elsewhere_is_found_out(fuzz, name):
    target, *_, word = BROKEN[name]
    result = fuzz(name, 1, 1000)
    assert re.search(word, result.get("failure", "no failure")), result
    assert re.search(word, fuzz(name, result["case"]).get("failure", "no failure"))
    assert "failure" not in fuzz(target, result["case"])


@pytest.mark.parametrize("change, word", [
    ({"vocab_size": [[[[["deep"]]]] * 10**4]}, "vocab_size"), ({"model_type": "x" * 10**6}, "model_type"),
    ({"head_dim": 2**14, "rope_scaling": {"type": "yarn", "factor": 4.0, "rope_theta": 1 + 2**-52}}, None),
])
def test_found_in_config(change, word):
    """What campaigns found: messages as long as the file, and an OverflowError from a rope_theta next to 1."""
    if word is None:
        assert Config.from_dict({**TINY, **change}).head_dim == 2**14
        return
    with pytest.raises(ValueError, match=word) as caught:
        Config.from_dict({**TINY, **change})
    assert len(str(caught.value)) < 300


def test_found_in_folders(tmp_path):
    """What campaigns found: an OSError from a name of 400 bytes, and escape sequences in what safetensors quotes."""
    folder = tmp_path / "m"
    checkpoint.save(folder, TINY, {"a": torch.ones(3), "b": torch.ones(2)}, max_shard_bytes=8)
    index = folder / checkpoint.INDEX
    sound = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": {**sound["weight_map"], "a": "é" * 200}}))
    with pytest.raises(ValueError, match="plain path"):
        checkpoint.load(folder)
    index.write_text(json.dumps(sound))
    head = json.dumps({"a": {"dtype": "\x1b[2J" + "x" * 10**5, "shape": [3], "data_offsets": [0, 12]}}).encode()
    (folder / sound["weight_map"]["a"]).write_bytes(struct.pack("<Q", len(head)) + head + bytes(12))
    with pytest.raises(ValueError, match="not a sound") as caught:
        checkpoint.load(folder)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


if __name__ == "__main__":
    if len(sys.argv) < 2:
        for answer in main(sys.stdin):
            print(json.dumps(answer), flush=True)
    name, *numbers = sys.argv[1:] or [""]
    first, n = 0, int(numbers[1]) if len(numbers) == 2 else len(numbers)
    for _ in range(20):
        if first < n:
            (answer,) = main([" ".join([name, *numbers] if n == 1 else [name, numbers[0], str(n - first), str(first)])])
            print(answer.pop("failure", "no failure"), answer, flush=True)
            first = answer.get("at", n) + 1
