"""gguf.py against the `gguf` package, the converter's formulas, and files damaged in every way we could think of."""
import collections
import contextlib
import doctest
import importlib.metadata
import importlib.util
import math
import random
import struct
import subprocess
import sys
import time
import tracemalloc
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gguf

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
LETTER = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
TYPE = {name: kind for kind, (name, _, _) in gguf.BLOCK.items()}
INTEGER = {  # least and greatest code, bits, weights in a group, whether there are minimums
    "Q4_0": (-8, 7, 4, 32, False), "Q4_1": (0, 15, 4, 32, True), "Q5_0": (-16, 15, 5, 32, False),
    "Q5_1": (0, 31, 5, 32, True), "Q8_0": (-128, 127, 8, 32, False), "Q2_K": (0, 3, 2, 16, True),
    "Q3_K": (-4, 3, 3, 16, False), "Q4_K": (0, 15, 4, 32, True), "Q5_K": (0, 31, 5, 32, True),
    "Q6_K": (-32, 31, 6, 16, False), "Q8_K": (-128, 127, 8, 256, False), "IQ4_NL": (-127, 113, 8, 32, False),
    "IQ4_XS": (-127, 113, 8, 32, False),
}
READ = ["F32", "F16", "BF16", "F64", *INTEGER]
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2),
          "Q6_K": (208,)}  # where a block has its half-precision numbers, if not only at 0


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def ref():
    """The `gguf` package. Our file has the same name and comes first on the path, so the package is fetched by hand."""
    try:
        folder = Path(importlib.metadata.distribution("gguf").locate_file("gguf"))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the gguf package is not installed")
    ours = sys.modules["gguf"]
    spec = importlib.util.spec_from_file_location("gguf", folder / "__init__.py",
                                                  submodule_search_locations=[str(folder)])
    package = importlib.util.module_from_spec(spec)
    sys.modules["gguf"] = package
    try:
        spec.loader.exec_module(package)
    finally:
        for name in [name for name in sys.modules if name.startswith("gguf.")]:
            del sys.modules[name]
        sys.modules["gguf"] = ours
    return package


# ------------------------------------------------------------------ a writer for good and for bad files


class T(NamedTuple):
    """A tensor to write. The fields after `data` override what would follow from the ones before."""
    name: str
    shape: tuple
    kind: int
    data: bytes
    offset: int | None = None
    dims: tuple | None = None
    n_dims: int | None = None


def string(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind, v):
    if isinstance(v, bytes):  # raw, for damaged files
        return v
    if kind == STR:
        return string(v)
    if kind == ARR:
        item, items = v
        return struct.pack("<IQ", item, len(items)) + b"".join(value(item, x) for x in items)
    return struct.pack("<" + LETTER[kind], v)


def build(pairs, tensors, *, magic=b"GGUF", version=3, n_tensors=None, n_pairs=None, alignment=32):
    pairs = list(pairs.items()) if isinstance(pairs, dict) else pairs
    head = magic + struct.pack("<IQQ", version, len(tensors) if n_tensors is None else n_tensors,
                               len(pairs) if n_pairs is None else n_pairs)
    for key, (kind, v) in pairs:
        head += string(key) + struct.pack("<I", kind) + value(kind, v)
    data = b""
    for t in tensors:
        dims = t.shape[::-1] if t.dims is None else t.dims
        head += string(t.name) + struct.pack("<I", len(dims) if t.n_dims is None else t.n_dims)
        head += struct.pack(f"<{len(dims)}QIQ", *dims, t.kind, len(data) if t.offset is None else t.offset)
        data += t.data + bytes(-len(t.data) % alignment)
    return head + bytes(-len(head) % alignment) + data


def blocks(kind, shape, seed=0):
    """Random blocks whose halves (scales and zeros) are ordinary numbers."""
    name, weights, size = gguf.BLOCK[kind]
    n = math.prod(shape) // weights
    rng = np.random.default_rng(seed)
    if weights == 1:
        w = torch.tensor(rng.standard_normal(n))
        return w.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}.get(
            name, torch.float32)).view(torch.uint8).numpy().tobytes()[:n * size]
    raw = rng.integers(0, 256, (n, size), dtype=np.uint8)
    for at in HALVES.get(name, (0,)):
        raw[:, at:at + 2] = rng.standard_normal((n, 1)).astype(np.float16).view(np.uint8)
    if name == "Q8_K":
        raw[:, :4] = rng.standard_normal((n, 1)).astype(np.float32).view(np.uint8)
    return raw.tobytes()


def tiny(arch="llama", kind="Q4_1", hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=40, layers=2, tied=True,
         bias=False):
    """A small model as (pairs, tensors by name). The names are spelled out here, not taken from gguf.py."""
    p = {
        "general.architecture": (STR, arch), f"{arch}.block_count": (U32, layers), f"{arch}.context_length": (U32, 128),
        f"{arch}.embedding_length": (U32, hidden), f"{arch}.feed_forward_length": (U32, ffn),
        f"{arch}.attention.head_count": (U32, heads), f"{arch}.attention.head_count_kv": (U32, kv_heads),
        f"{arch}.attention.layer_norm_rms_epsilon": (F32, 1e-6), f"{arch}.rope.freq_base": (F32, 50000.0),
        f"{arch}.attention.key_length": (U32, head_dim), f"{arch}.attention.value_length": (U32, head_dim),
        "tokenizer.ggml.tokens": (ARR, (STR, [f"t{i}" for i in range(vocab)])),
        "tokenizer.ggml.token_type": (ARR, (I32, [1] * vocab)),
        "tokenizer.ggml.bos_token_id": (U32, 1), "tokenizer.ggml.eos_token_id": (U32, 2),
    }
    q, k = heads * head_dim, kv_heads * head_dim
    shapes = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    if not tied:
        shapes["output.weight"] = (vocab, hidden)
    for i in range(layers):
        layer = {"attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,), "attn_q.weight": (q, hidden),
                 "attn_k.weight": (k, hidden), "attn_v.weight": (k, hidden), "attn_output.weight": (hidden, q),
                 "ffn_gate.weight": (ffn, hidden), "ffn_up.weight": (ffn, hidden), "ffn_down.weight": (hidden, ffn)}
        if arch == "qwen2" or bias:
            layer |= {"attn_q.bias": (q,), "attn_k.bias": (k,), "attn_v.bias": (k,)}
        if bias:
            layer |= {"attn_output.bias": (hidden,)}
        if arch == "qwen3":
            layer |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    tensors = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        kind_id = TYPE[kind if len(shape) == 2 else "F32"]
        tensors[name] = T(name, shape, kind_id, blocks(kind_id, shape, seed))
    return p, tensors


def write(path, pairs, tensors, **kw):
    path.write_bytes(build(pairs, list(tensors.values()) if isinstance(tensors, dict) else tensors, **kw))
    return str(path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def package_dequantize(ref, raw, name):
    """The gguf package's, which lacks Q8_K: float d, 256 int8, and sums of 16 of them, which decoding does not need."""
    with np.errstate(all="ignore"):
        if name != "Q8_K":
            return ref.quants.dequantize(raw, ref.GGMLQuantizationType[name])
        blocks = [struct.unpack("<f256b16h", block.tobytes()) for block in raw.reshape(-1, 292)]
        rows = [[np.float32(d) * np.float32(code) for code in rest[:256]] for d, *rest in blocks]
        return np.array(rows).reshape(raw.shape[0], -1)


def same_bits(a, b):
    """Equal to the last bit; NaN equals NaN whatever its payload, which IEEE leaves to the processor."""
    a, b = (x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in (a, b))
    assert a.dtype == b.dtype == torch.float32 and a.shape == b.shape
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a.view(torch.int32)[~nan], b.view(torch.int32)[~nan])


# ------------------------------------------------------------------ types


# +-0, subnormal, infinite, NaN, largest: halves, and the upper halves of floats
SPECIAL = [0, 0x8000, 1, 0x8001, 0x03FF, 0x83FF, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0x7BFF, 0xFBFF]
TOPS = [0, 0x8000, 1, 0x8001, 0x007F, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F7F, 0xFF7F]


@pytest.mark.parametrize("name", [name for name in READ if name != "F64"])
@pytest.mark.parametrize("scales", ["ordinary", "any bytes"])
def test_dequantize_is_that_of_the_gguf_package_bit_for_bit(ref, name, scales):
    _, weights, size = gguf.BLOCK[TYPE[name]]
    shape = (64, {1: 1024, 32: 96, 256: 768}[weights])
    n = math.prod(shape) // weights
    raw = np.frombuffer(blocks(TYPE[name], shape), np.uint8).reshape(n, size).copy()
    if scales == "any bytes":
        raw = np.random.default_rng(1).integers(0, 256, (n, size), dtype=np.uint8)
        wide = name in ("F32", "BF16", "Q8_K")  # whose numbers are floats or their upper half
        columns = (2,) if name in ("F32", "Q8_K") else HALVES.get(name, (0,))
        for first, column in zip((0, 8), (*columns, *columns)):
            rows = raw[first::16]
            rows[:, column:column + 2] = np.resize(TOPS if wide else SPECIAL, len(rows)).astype(np.uint16).view(
                np.uint8).reshape(-1, 2)
            if name in ("F32", "Q8_K"):
                rows[:, :2] = 0
    expected = package_dequantize(ref, raw.reshape(shape[0], -1), name)
    ours = gguf.dequantize(torch.from_numpy(raw), name, shape)
    assert same_bits(ours, expected)
    assert same_bits(gguf.dequantize(torch.from_numpy(raw.reshape(-1)), TYPE[name], shape), expected)
    assert gguf.dequantize(torch.empty(0, dtype=torch.uint8), name, (0, 256)).shape == (0, 256)
    if scales == "any bytes":
        assert ours.isnan().any() and ours.isinf().any()
        damaged = torch.from_numpy(raw).clone()
        damaged[:, size // 2] ^= 0x81  # a twin that must fail
        assert not same_bits(gguf.dequantize(damaged, name, shape), expected)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])  # it writes no others
def test_what_the_gguf_package_quantizes_comes_back(ref, name):
    w = np.random.default_rng(0).standard_normal((40, 128)).astype(np.float32)
    w[3] *= 1e-6  # scales that are subnormal halves
    w[4] *= 1e4
    w[5] = 0
    w[6] = -abs(w[6])
    raw = ref.quants.quantize(w, ref.GGMLQuantizationType[name])
    expected = ref.quants.dequantize(raw, ref.GGMLQuantizationType[name])
    ours = gguf.dequantize(torch.from_numpy(raw.view(np.uint8).copy()), name, w.shape)
    assert same_bits(ours, expected)
    assert (ours[7:] - torch.tensor(w[7:])).abs().max() < 0.5


def test_f64_is_rounded_to_float32():
    w = np.array([1 / 3, -1e-300, 1e300, 2.0**-149, np.inf])
    ours = gguf.dequantize(torch.from_numpy(w.view(np.uint8).copy()), "F64", (5,))
    assert same_bits(ours, torch.tensor(w).float())


@pytest.mark.parametrize("name, block, expected", [
    ("Q4_0", "003cf0e1d2c3b4a5968778695a4b3c2d1e0f", [*range(-8, 8), *range(7, -9, -1)]),
    ("Q4_1", "003800c0f0e1d2c3b4a5968778695a4b3c2d1e0f", [i / 2 - 2 for i in [*range(16), *range(15, -1, -1)]]),
    ("Q5_0", "003c010002000ff0" + "00" * 14, [15 if i in (0, 17) else -16 for i in range(32)]),
    ("IQ4_NL", "003c" + bytes(range(0, 256, 17)).hex(), 2 * [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38,
                                                             53, 69, 89, 113]),
    # d = 2, dmin = 1; scales 1 2 3 4 | 33 34 35 36, minimums 5 6 7 8 | 48 49 50 51: 33 is 1 and, above 1, 2; codes 1, 2
    ("Q4_K", "0040003c" "81828384" "c5c6c7c8" "01122334" + "21" * 128,
     [2 * scale * (1 + i % 2) - m
      for i, (scale, m) in enumerate([(1, 5), (2, 6), (3, 7), (4, 8), (33, 48), (34, 49), (35, 50), (36, 51)])
      for _ in range(32)]),
])
def test_ld_11_block_layout(name, block, expected):
    """LD-11 (1bit-MONSTER/1bit-MONSTER #572; ml-explore/mlx #3664): nibbles j and j + 16, offset 8, header size."""
    raw = torch.tensor(list(bytes.fromhex(block)), dtype=torch.uint8)
    assert gguf.dequantize(raw, name, (len(expected),)).tolist() == expected
    if name in ("Q4_0", "Q4_1"):
        neighbours = torch.stack([raw[-16:] & 15, raw[-16:] >> 4], 1).flatten()  # the fault, which must not pass
        assert neighbours.float().tolist() != [e - min(expected) for e in expected]


def test_block_table_is_that_of_ggml(ref):
    package = {int(k): (k.name, *ref.constants.GGML_QUANT_SIZES[k]) for k in ref.GGMLQuantizationType}
    assert package.pop(9) == ("Q8_1", 32, 40) and gguf.BLOCK[9] == ("Q8_1", 32, 36)  # two halves and 32 bytes in ggml
    assert package.items() <= gguf.BLOCK.items() and set(gguf.BLOCK) - set(package) <= {9, 42}
    assert not set(gguf.REMOVED) & set(gguf.BLOCK)


@pytest.mark.parametrize("raw, kind, shape", [
    (torch.zeros(18, dtype=torch.uint8), "Q4_0", (31,)), (torch.zeros(17, dtype=torch.uint8), "Q4_0", (32,)),
    (torch.zeros(18), "Q4_0", (32,)), (torch.zeros(144, dtype=torch.uint8), "Q4_K", (32,)),
    (torch.zeros(82, dtype=torch.uint8), "IQ2_S", (256,)),
    (torch.zeros(144, dtype=torch.uint8), 4, (256,)), (torch.zeros(4, dtype=torch.uint8), "Q9", (1,)),
])
def test_dequantize_refuses_what_does_not_fit(raw, kind, shape):
    with pytest.raises(ValueError, match=r"Q4_0|Q4_K|IQ2_S is not read|type 4|Q9"):
        gguf.dequantize(raw, kind, shape)


def test_doctests():
    assert doctest.testmod(gguf).failed == 0


# ------------------------------------------------------------------ rows of q and k


def converter_permute(w, n_head, n_kv_head):
    """What convert_hf_to_gguf.py does to q (n_head, n_head) and k (n_head, n_kv_head) of a llama, in numpy."""
    n = n_kv_head if n_kv_head is not None and n_head != n_kv_head else n_head
    return w.reshape(n, 2, w.shape[0] // n // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


@pytest.mark.parametrize("n_head, n_kv_head, head_dim", [(1, 1, 2), (4, 2, 8), (9, 3, 64), (6, 1, 4)])
@pytest.mark.parametrize("columns", [(), (5,)])
def test_unpermute_undoes_the_converter(n_head, n_kv_head, head_dim, columns):
    for heads in (n_head, n_kv_head):  # q, k
        w = np.random.default_rng(0).standard_normal((heads * head_dim, *columns))
        stored = converter_permute(w, n_head, heads)
        assert np.array_equal(gguf.unpermute(torch.tensor(stored), heads).numpy(), w)


def test_scores_of_interleaved_and_half_split_rope_agree():
    """llama.cpp turns neighbours (2i, 2i + 1), Hugging Face (i, i + D/2): scores agree if and only if rows moved."""
    torch.manual_seed(0)
    heads, dim, hidden, time_ = 3, 8, 16, 5
    q, k = torch.randn(heads * dim, hidden).double(), torch.randn(heads * dim, hidden).double()  # as stored in GGUF
    x = torch.randn(time_, hidden).double()
    angle = torch.arange(time_).double()[:, None] * 10000.0 ** (-torch.arange(0, dim, 2).double() / dim)  # (T, D/2)
    rotation = torch.polar(torch.ones_like(angle), angle)[:, None]

    def interleaved(w):
        y = torch.view_as_complex((x @ w.T).view(time_, heads, dim // 2, 2).contiguous())
        return torch.view_as_real(y * rotation).flatten(2)

    def half_split(w):
        y = (x @ w.T).view(time_, heads, 2, dim // 2)
        y = torch.complex(y[:, :, 0], y[:, :, 1]) * rotation
        return torch.cat([y.real, y.imag], -1)

    def scores(turn, q, k):
        return torch.einsum("qhd,khd->hqk", turn(q), turn(k))

    expected = scores(interleaved, q, k)
    torch.testing.assert_close(scores(half_split, gguf.unpermute(q, heads), gguf.unpermute(k, heads)), expected)
    assert (scores(half_split, q, k) - expected).abs().max() > 0.1  # rows as stored: wrong from the second token on


# ------------------------------------------------------------------ whole files


def expected_tensor(t, arch, heads, kv_heads):
    w = gguf.dequantize(torch.frombuffer(bytearray(t.data), dtype=torch.uint8), t.kind, t.shape)
    rows = {"attn_q": heads, "attn_k": kv_heads}.get(t.name.split(".")[-2])
    return gguf.unpermute(w, rows) if rows and arch == "llama" else w


HF = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
      "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
      "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
      "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def hf_name(name):
    if name.startswith("blk."):
        _, i, middle, end = name.split(".")
        return f"model.layers.{i}.{HF[middle]}.{end}"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
            "output.weight": "lm_head.weight"}[name]


@pytest.mark.parametrize("arch, bias, tied", [("llama", False, True), ("llama", True, False), ("qwen2", False, True),
                                              ("qwen3", False, False)])
@pytest.mark.parametrize("kind, version", [(kind, 2 + i % 2) for i, kind in enumerate(READ)] + [("Q4_1", 2)])
def test_every_tensor_of_every_architecture_and_type(path, arch, bias, tied, kind, version):
    size = 256 if gguf.BLOCK[TYPE[kind]][1] == 256 else 64
    pairs, tensors = tiny(arch, kind, hidden=size, ffn=size, head_dim=size // 4, bias=bias, tied=tied)
    with gguf.GGUF(write(path, pairs, tensors, version=version)) as g:
        assert g.version == version and g.alignment == 32 and len(g) == len(tensors)
        assert set(g) == {hf_name(name) for name in tensors}
        for name, t in tensors.items():
            expected = expected_tensor(t, arch, 4, 2)
            assert same_bits(g[hf_name(name)], expected)
            assert torch.equal(g.tensor(hf_name(name), dtype=torch.bfloat16), expected.bfloat16())
            with gguf.GGUF(path, torch.bfloat16) as narrow:
                assert torch.equal(narrow[hf_name(name)], expected.bfloat16())
        assert g.infos["blk.1.ffn_down.weight"][:4] == ("blk.1.ffn_down.weight", (size, size), TYPE[kind], kind)
        assert g.config == {
            "model_type": arch, "hidden_size": size, "intermediate_size": size, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": size // 4, "vocab_size": 40,
            "max_position_embeddings": 128, "rms_norm_eps": struct.unpack("<f", struct.pack("<f", 1e-6))[0],
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}, "tie_word_embeddings": tied,
            "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu"} | ({"attention_bias": True} if bias else {})


def spread(packed):
    """W = scales * (codes - zeros) + mins, in the order of operations of ggml."""
    assert list(packed) == ["codes", "scales", "zeros", "mins", "g_idx", "bits"]
    assert packed["zeros"] is None and packed["g_idx"] is None
    codes, group = packed["codes"], packed["codes"].shape[1] // packed["scales"].shape[1]
    w = codes * packed["scales"].repeat_interleave(group, 1)
    return w if packed["mins"] is None else w + packed["mins"].repeat_interleave(group, 1)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", INTEGER)
def test_codes_scales_and_mins_are_the_tensor_bit_for_bit(path, arch, kind):
    size = 256 if gguf.BLOCK[TYPE[kind]][1] == 256 else 64
    pairs, tensors = tiny(arch, kind, hidden=size, ffn=size + 256, head_dim=size // 4)
    special = [0, 0x8000, 1, 0x8001, 0x7C00, 0xFC00, 0x7E00, 0xBC00]  # halves: +-0, subnormals, +-inf, NaN, -1
    for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.ffn_up.weight"):
        raw = bytearray(tensors[name].data)
        for i, bits in enumerate(special):
            at = 2 if kind == "Q8_K" else HALVES.get(kind, (0,))[-1]  # Q8_K: the upper half of a float
            struct.pack_into("<H", raw, gguf.BLOCK[TYPE[kind]][2] * i + at, bits)
        tensors[name] = tensors[name]._replace(data=bytes(raw))
    low, high, bits, group, has_mins = INTEGER[kind]
    with gguf.GGUF(write(path, pairs, tensors)) as g, gguf.GGUF(path, torch.bfloat16, packed=True) as p:
        for name in g:
            shape = g[name].shape
            if len(shape) == 1:
                assert torch.equal(p[name], g[name].bfloat16())
                with pytest.raises(ValueError, match=rf"{name}.*F32.*Q4_0.*Q4_K"):
                    g.codes(name)
                continue
            parts = g.codes(name)
            codes, scales, mins = parts["codes"], parts["scales"], parts["mins"]
            assert codes.shape == shape and codes.dtype == (torch.uint8 if low == 0 else torch.int8)
            assert low == codes.min() and codes.max() == high and parts["bits"] == bits
            for part in [scales] if mins is None else [scales, mins]:
                assert part.shape == (shape[0], shape[1] // group) and part.dtype == torch.float32
                assert part.is_contiguous()
            assert codes.is_contiguous() and (mins is not None) == has_mins
            assert same_bits(spread(parts), g[name])
            assert not same_bits(spread(parts | {"codes": codes.roll(1, 0)}), g[name])
            assert p[name].keys() == parts.keys() and torch.equal(p[name]["codes"], codes)
            assert same_bits(spread(p[name]), g[name])


def test_types_and_bytes(path):
    pairs, tensors = tiny("qwen2", "Q4_1", tied=False)
    tensors["output.weight"] = T("output.weight", (40, 64), TYPE["IQ4_NL"], blocks(TYPE["IQ4_NL"], (40, 64)))
    with gguf.GGUF(write(path, pairs, [*tensors.values(), ROPE_FREQS])) as g:  # rope_freqs is no tensor of the model
        matrices = 40 * 64 + 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96)
        assert list(g.types.items()) == [("Q4_1", matrices), ("IQ4_NL", 40 * 64), ("F32", 64 + 2 * (3 * 64 + 2 * 32))]
        assert g.nbytes == sum(len(t.data) for t in tensors.values()) == matrices // 32 * 20 + 40 * 2 * 18 + 576 * 4


@pytest.mark.parametrize("kind", ["Q5_1", "Q4_K"])
def test_long_tensors_are_decoded_in_pieces_that_join(path, monkeypatch, kind):
    pairs, tensors = tiny(kind=kind, vocab=300, hidden=256, ffn=256, head_dim=64, layers=1)
    name = write(path, pairs, tensors)
    q = "model.layers.0.self_attn.q_proj.weight"  # pieces need not end where heads do
    with gguf.GGUF(name) as g:
        whole, parts = {n: g[n] for n in g}, {n: g.codes(n) for n in ("model.embed_tokens.weight", q)}
    for step, large in ((1024, 1 << 24), (256 * 37, 1 << 24), (256 * 5 + 1, 0), (1, 0), (1 << 22, 0)):
        monkeypatch.setattr(gguf, "SMALL_STEP", step)
        monkeypatch.setattr(gguf, "LARGE_STEP", step)
        monkeypatch.setattr(gguf, "LARGE", large)
        with gguf.GGUF(name) as g:
            assert all(same_bits(g[n], w) for n, w in whole.items())
            for n, before in parts.items():
                again = g.codes(n)
                assert all(torch.equal(again[k], before[k]) for k in ("codes", "scales", "mins"))


def test_it_is_a_lazy_mapping_whose_tensors_survive_it(path, monkeypatch):
    pairs, tensors = tiny()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch.frombuffer warns of read-only memory, for one
        g = gguf.GGUF(write(path, pairs, tensors))
        q = g["model.layers.0.self_attn.q_proj.weight"]
        norm = g["model.norm.weight"]
    before = q.clone(), norm.clone()
    decoded = []
    monkeypatch.setattr(g, "_decode", lambda *a: decoded.append(a))
    assert "model.norm.weight" in g and "output_norm.weight" not in g and None not in g
    assert len(list(g.keys())) == len(g) == len(tensors) and decoded == []
    monkeypatch.undo()
    for missing in ("lm_head.weight", "output_norm.weight"):
        with pytest.raises(KeyError, match=missing):
            g[missing]
    with pytest.raises(ValueError, match="int8"):
        g.tensor("model.norm.weight", dtype=torch.int8)
    g.close()
    g.close()
    path.write_bytes(b"")  # nothing handed out looks at the file any more
    assert torch.equal(q, before[0]) and torch.equal(norm, before[1])
    norm += 1
    with pytest.raises(ValueError, match="closed"):
        g["model.norm.weight"]
    with pytest.raises(ValueError, match="closed"):
        g.codes("model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("alignment", [32, 64, 8])
def test_files_of_the_gguf_package(ref, path, arch, alignment):
    rng = np.random.default_rng(0)
    w = ref.GGUFWriter(str(path), arch)
    if alignment != 32:
        w.add_custom_alignment(alignment)
    w.add_name("tiny")
    w.add_context_length(4096)
    w.add_embedding_length(64)
    w.add_block_count(1)
    w.add_feed_forward_length(32)
    w.add_head_count(4)
    w.add_head_count_kv(2)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(1e6)
    w.add_tags(["a", "b", ""])
    w.add_token_list(["é", "日本", "\n", "<|end|>", ""])
    w.add_token_scores([0.5, -1.0, 0.0, float("inf"), 2.0])
    w.add_token_types([1, 2, 3, 4, 5])
    w.add_eos_token_id(3)
    w.add_add_bos_token(False)
    w.add_chat_template("{{ x }}")
    w.add_array("test.bools", [True, False])
    w.add_array("test.integers", [-1, 2**30])
    kinds = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32"]
    _, tensors = tiny(arch, ffn=32, vocab=5, layers=1)
    expected = {}
    for i, t in enumerate(tensors.values()):
        kind = ref.GGMLQuantizationType[kinds[i % 8] if len(t.shape) == 2 else "F32"]
        raw = ref.quants.quantize(rng.standard_normal(t.shape).astype(np.float32), kind)
        w.add_tensor(t.name, raw, raw_dtype=kind)
        expected[t.name] = ref.quants.dequantize(raw, kind)
        rows = {"attn_q": 4, "attn_k": 2}.get(t.name.split(".")[-2])
        if rows and arch == "llama":  # undo by the definition: row r of the checkpoint is where the converter put it
            order = converter_permute(np.arange(t.shape[0]), 4, rows)
            expected[t.name] = expected[t.name][np.argsort(order)]
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    reader = ref.GGUFReader(str(path))
    with gguf.GGUF(str(path)) as g:
        assert g.alignment == alignment == reader.alignment
        assert all(same_bits(g[hf_name(name)], np.ascontiguousarray(e)) for name, e in expected.items())
        for t in reader.tensors:
            assert g.infos[t.name].offset == t.data_offset and g.infos[t.name].nbytes == t.n_bytes
        fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
        assert g.metadata == fields and g.metadata["test.integers"] == [-1, 2**30]
        assert g.metadata["tokenizer.ggml.tokens"] == ["é", "日本", "\n", "<|end|>", ""]
        assert g.config["eos_token_id"] == 3 and g.config["bos_token_id"] is None and g.config["head_dim"] == 16
    del reader


MIXTURE = {"token_embd": "Q6_K", "output": "Q8_0", "attn_q": "Q4_K", "attn_k": "Q5_0", "attn_v": "Q6_K",
           "attn_output": "IQ4_NL", "ffn_gate": "Q4_K", "ffn_up": "Q5_K", "ffn_down": "IQ4_XS"}  # norms: F32


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_ld_26_a_file_of_many_types(ref, path, arch):
    """LD-26 (llama.cpp #14996; pollard-weights #103): what calls itself Q4_K_M mixes types, each read as what it is."""
    _, tensors = tiny(arch, hidden=256, ffn=512, head_dim=64, vocab=24, tied=False)
    w, expected = ref.GGUFWriter(str(path), arch), {}
    w.add_context_length(128)
    w.add_embedding_length(256)
    w.add_block_count(2)
    w.add_feed_forward_length(512)
    w.add_head_count(4)
    w.add_head_count_kv(2)
    w.add_layer_norm_rms_eps(1e-5)
    for seed, t in enumerate(tensors.values()):
        name = MIXTURE.get(t.name.split(".")[-2], "F32") if len(t.shape) == 2 else "F32"
        raw = np.frombuffer(blocks(TYPE[name], t.shape, seed), np.uint8).reshape(t.shape[0], -1)
        raw = raw.view(np.float32).reshape(t.shape) if name == "F32" else raw
        w.add_tensor(t.name, raw, raw_dtype=ref.GGMLQuantizationType[name])
        expected[t.name] = np.array(ref.quants.dequantize(raw, ref.GGMLQuantizationType[name]))
        rows = {"attn_q": 4, "attn_k": 2}.get(t.name.split(".")[-2])
        if rows and arch == "llama":
            expected[t.name] = expected[t.name][np.argsort(converter_permute(np.arange(t.shape[0]), 4, rows))]
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    with gguf.GGUF(str(path)) as g, gguf.GGUF(str(path), packed=True) as p:
        assert set(g.types) == {"F32", *MIXTURE.values()}
        assert sum(g.types.values()) == sum(e.size for e in expected.values())
        for name, e in expected.items():
            kind, hf = g.infos[name].type_name, hf_name(name)
            assert same_bits(g[hf], np.ascontiguousarray(e)), name
            assert isinstance(p[hf], dict) == (kind in INTEGER), (name, kind)
            if kind in INTEGER:
                assert same_bits(spread(p[hf]), np.ascontiguousarray(e)), name
            else:
                with pytest.raises(ValueError, match=rf"{hf}.*{kind}"):
                    g.codes(hf)


def test_split_big_endian_and_adapter_files_of_the_gguf_package(ref, tmp_path):
    _, tensors = tiny(layers=1)
    big = {"endianess": ref.GGUFEndian.BIG}
    for name, options in (("split", {"split_max_tensors": 4}), ("big", big), ("lora", {})):
        w = ref.GGUFWriter(str(tmp_path / f"{name}.gguf"), "llama", **options)
        w.add_type("adapter" if name == "lora" else "model")
        w.add_block_count(1)
        for t in tensors.values():
            w.add_tensor(t.name, np.zeros(t.shape, np.float32))
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
    (first, *_) = sorted(tmp_path.glob("split-*.gguf"))
    for file, words in ((first, r"split.count.*merge"), (tmp_path / "big.gguf", "big-endian"),
                        (tmp_path / "lora.gguf", "LoRA")):
        with pytest.raises(ValueError, match=words):
            gguf.GGUF(str(file))


@pytest.mark.parametrize("arch, bias", [("llama", False), ("llama", True), ("qwen2", False), ("qwen3", False)])
def test_names_and_shapes_are_those_of_transformers(path, arch, bias):
    transformers = pytest.importorskip("transformers")
    pairs, tensors = tiny(arch, bias=bias, tied=False)
    with gguf.GGUF(write(path, pairs, tensors)) as g, torch.device("meta"):
        config = transformers.AutoConfig.for_model(**g.config)
        model = transformers.AutoModelForCausalLM.from_config(config)
        shapes = {name: tuple(p.shape) for name, p in model.state_dict().items()}
        assert {name: tuple(g[name].shape) for name in g} == shapes
        assert config.rope_parameters["rope_theta"] == 50000.0 and config.rms_norm_eps == g.config["rms_norm_eps"]


# ------------------------------------------------------------------ config


def config_of(path, pairs, arch="llama", extra=(), **kw):
    p, tensors = tiny(arch, **kw)
    for key, v in pairs.items():
        key = key if key.startswith(("tokenizer.", "general.", "split.")) else f"{arch}.{key}"
        if v is None:
            p.pop(key, None)
        else:
            p[key] = v
    with gguf.GGUF(write(path, p, [*tensors.values(), *extra])) as g:
        return g.config


FACTORS = [1.0, 1.5, 2.0, 8.0, 8.0, 8.0, 32.0, 32.0]
ROPE_FREQS = T("rope_freqs.weight", (8,), 0, struct.pack("<8f", *FACTORS))


@pytest.mark.parametrize("pairs, expected", [
    ({}, {"rope_type": "default", "rope_theta": 50000.0}),
    ({"rope.freq_base": None}, {"rope_type": "default", "rope_theta": 10000.0}),
    ({"rope.scaling.type": (STR, "none"), "rope.scaling.factor": (F32, 4.0)},
     {"rope_type": "default", "rope_theta": 50000.0}),
    ({"rope.scaling.type": (STR, "linear"), "rope.scaling.factor": (F32, 4.0)},
     {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0}),
    ({"rope.scaling.factor": (F32, 4.0)}, {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0}),
    ({"rope.scale_linear": (F32, 2.0)}, {"rope_type": "linear", "rope_theta": 50000.0, "factor": 2.0}),
    ({"rope.scale_linear": (F32, 2.0), "rope.scaling.factor": (F32, 4.0)},
     {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0}),
    ({"rope.scaling.factor": (F32, 0.0)}, {"rope_type": "default", "rope_theta": 50000.0}),
    ({"rope.scaling.type": (STR, "yarn"), "rope.scaling.factor": (F32, 4.0),
      "rope.scaling.original_context_length": (U32, 32)},
     {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 32}),
    ({"rope.scaling.type": (STR, "yarn"), "rope.scaling.factor": (F32, 4.0), "rope.scaling.yarn_beta_fast": (F32, 16.0),
      "rope.scaling.yarn_beta_slow": (F32, 2.0), "rope.scaling.yarn_attn_factor": (F32, 1.25)},
     {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 128,
      "attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0}),
    ({"rope.scaling.type": (STR, "yarn"), "rope.scaling.factor": (F32, 4.0), "rope.scaling.attn_factor": (F32, 0.5)},
     {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 128,
      "attention_factor": 0.5 * (1 + 0.1 * math.log(4.0))}),
])
def test_rope_parameters(path, pairs, expected):
    assert config_of(path, pairs)["rope_parameters"] == expected


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_rope_freqs_become_factors(path, arch):
    config = config_of(path, {}, arch, [ROPE_FREQS])
    assert config["rope_parameters"] == {"rope_type": "factors", "rope_theta": 50000.0, "factors": FACTORS}
    config = config_of(path, {"rope.scaling.factor": (F32, 2.0)}, arch, [ROPE_FREQS])  # linear scaling on top
    assert config["rope_parameters"]["factors"] == [2 * f for f in FACTORS]
    with gguf.GGUF(str(path)) as g:
        assert "rope_freqs.weight" not in g and len(g) == len(g.infos) - 1


def test_llama_31_factors_give_its_inverse_frequencies(path):
    """The converter's formula for rope_freqs.weight and transformers' for llama3 end in the same frequencies."""
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    factor, low, high, original, dim, theta = 32.0, 1.0, 4.0, 8192, 64, 500000.0
    factors = []
    for f in 1.0 / theta ** (np.arange(0, dim, 2) / dim):
        wavelength = 2 * math.pi / f
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    freqs = T("rope_freqs.weight", (32,), 0, struct.pack("<32f", *factors))
    ours = config_of(path, {"rope.freq_base": (F32, theta)}, "llama", [freqs], head_dim=64)["rope_parameters"]
    inverse = ours["rope_theta"] ** -(torch.arange(0, dim, 2).double() / dim) / torch.tensor(ours["factors"]).double()
    llama3 = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": low,
              "high_freq_factor": high, "original_max_position_embeddings": original}
    config = transformers.LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=dim, rope_parameters=llama3)
    expected, _ = rope.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    torch.testing.assert_close(inverse.float(), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("pairs, expected", [
    ({}, (1, 2)), ({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.eos_token_id": None}, (None, None)),
    ({"tokenizer.ggml.eot_token_id": (U32, 7)}, (1, [2, 7])),
    ({"tokenizer.ggml.eot_token_id": (U32, 2), "tokenizer.ggml.eom_token_id": (U32, 9)}, (1, [2, 9])),
    ({"tokenizer.ggml.eot_token_id": (U32, 2)}, (1, 2)),
    ({"tokenizer.ggml.bos_token_id": (U32, 2**32 - 1), "tokenizer.ggml.eos_token_id": (I32, -1)}, (None, None)),
])
def test_special_ids(path, pairs, expected):
    config = config_of(path, pairs)
    assert (config["bos_token_id"], config["eos_token_id"]) == expected


def test_other_config_keys(path):
    assert config_of(path, {"attention.sliding_window": (U32, 32)})["sliding_window"] == 32
    assert "sliding_window" not in config_of(path, {"attention.sliding_window": (U32, 0)})
    assert config_of(path, {"rope.dimension_count": (U32, 8)})["partial_rotary_factor"] == 0.5
    assert "partial_rotary_factor" not in config_of(path, {"rope.dimension_count": (U32, 16)})
    assert config_of(path, {"attention.head_count_kv": None}, kv_heads=4)["num_key_value_heads"] == 4
    assert config_of(path, {"attention.key_length": None, "attention.value_length": None})["head_dim"] == 16
    assert config_of(path, {}, "qwen3", head_dim=32)["head_dim"] == 32  # 4 heads of 32 in a hidden size of 64
    assert config_of(path, {"expert_count": (U32, 0), "logit_scale": (F32, 1.0), "split.count": (U16, 1)})
    assert config_of(path, {"vocab_size": (U32, 40), "general.type": (STR, "model"), "block_count": (I64, 2)})


def test_ld_10_without_output_weight_the_embedding_is_the_head(path):
    """LD-10 (vllm #30405; llama.cpp #6578): no output.weight means tied embeddings."""
    for tied in (True, False):
        pairs, tensors = tiny(tied=tied)
        with gguf.GGUF(write(path, pairs, tensors)) as g:
            assert g.config["tie_word_embeddings"] is tied and ("lm_head.weight" in g) is not tied


@pytest.mark.parametrize("eps, expected", [(1e-6, 0.707107), (1e-5, 0.301511)])
def test_ld_28_rms_eps_is_the_files(path, eps, expected):
    """LD-28 (llama.cpp #2373, #2374, #2384): eps comes from its key, never a constant; a file without it is refused."""
    config = config_of(path, {"attention.layer_norm_rms_epsilon": (F32, eps)})
    x = torch.full((8,), 1e-3)
    assert (x / (x.square().mean() + config["rms_norm_eps"]).sqrt())[0].item() == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match=r"llama.attention.layer_norm_rms_epsilon.*missing"):
        config_of(path, {"attention.layer_norm_rms_epsilon": None})


def test_default_model(default_gguf):
    started, cpu = time.perf_counter(), time.process_time()
    g = gguf.GGUF(default_gguf)
    assert time.process_time() - cpu < 0.5, "49,152 tokens and 48,900 merges must parse fast"
    assert g.config == {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
        "max_position_embeddings": 8192, "rms_norm_eps": pytest.approx(1e-5, rel=1e-6), "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}, "tie_word_embeddings": True,
        "bos_token_id": 1, "eos_token_id": 2}
    kinds = [info.type_name for info in g.infos.values()]
    assert {k: kinds.count(k) for k in set(kinds)} == {"Q4_1": 210, "F32": 61, "Q8_0": 1} and len(g) == 272
    assert len(g.metadata["tokenizer.ggml.tokens"]) == 49152 and g.metadata["tokenizer.ggml.tokens"][2] == "<|im_end|>"
    assert g.infos["token_embd.weight"].type_name == "Q8_0"
    weights = sum(math.prod(info.shape) for info in g.infos.values())
    assert weights == 134515008
    cpu = time.process_time()
    assert sum(g.tensor(name, torch.bfloat16).numel() for name in g) == weights
    assert g.types == {"Q4_1": 106168320, "Q8_0": 28311552, "F32": 35136} and sum(g.types.values()) == weights
    assert g.nbytes == 106168320 // 32 * 20 + 28311552 // 32 * 34 + 35136 * 4
    assert time.process_time() - cpu < 8 and time.perf_counter() - started < 60  # a guard against quadratic work only
    g.close()


def test_default_model_against_the_gguf_package(ref, default_gguf):
    data = np.memmap(default_gguf, mode="r")
    with gguf.GGUF(default_gguf) as g:
        for name, info in g.infos.items():
            if name.split(".")[1] not in ("0", "29", "weight"):
                continue
            raw = data[info.offset:info.offset + info.nbytes]
            raw = raw.reshape(info.shape[0], -1)[:5000] if len(info.shape) == 2 else raw  # not all of the embedding
            expected = ref.quants.dequantize(raw, ref.GGMLQuantizationType[info.type_name])
            rows = {"attn_q": 9, "attn_k": 3}.get(name.split(".")[-2])
            if rows:
                expected = expected[np.argsort(converter_permute(np.arange(len(expected)), 9, rows))]
            assert same_bits(g[hf_name(name)][:5000], expected), name


@pytest.mark.slow
def test_loading_the_default_model_holds_it_once(default_gguf):
    """Peak memory over torch itself: the bfloat16 weights (269 MB), the file's pages (98 MB) and a little more."""
    code = ("import resource, sys, torch; sys.path.insert(0, sys.argv[1]); import gguf\n"
            "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3\n"
            "before = peak(); g = gguf.GGUF(sys.argv[2]); kept = {n: g.tensor(n, torch.bfloat16) for n in g}\n"
            "print(peak() - before)")
    run = subprocess.run([sys.executable, "-c", code, str(Path(gguf.__file__).parent), default_gguf],
                         capture_output=True, text=True)
    assert run.returncode == 0 and float(run.stdout) < 269 + 98 + 110, run.stderr + run.stdout


# ------------------------------------------------------------------ files that must be refused


def refused(path, *words):
    """Opening gives one short ValueError with the path and these words in it, soon, and with little memory."""
    size = Path(path).stat().st_size if Path(path).is_file() else 0
    tracemalloc.start()
    started = time.perf_counter()
    try:
        with pytest.raises(ValueError) as caught:
            gguf.GGUF(str(path))
        seconds, peak = time.perf_counter() - started, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert type(caught.value) is ValueError and message.startswith(str(path)) and "\n" not in message, message
    assert len(message) < len(str(path)) + 400 and all(word in message for word in words), (words, message)
    assert seconds < 2 and peak < 40 * size + 300_000, (seconds, peak, size)


def raw_kv(*entries, n_tensors=0, n_pairs=None):
    body = b"".join(string(key) + struct.pack("<I", kind) + raw for key, kind, raw in entries)
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, len(entries) if n_pairs is None else n_pairs) + body + bytes(64)


def u64(n):
    return struct.pack("<Q", n)


HEADERS = {
    "wrong magic": (b"GGML" + bytes(60), "not a GGUF file", "GGML"),
    "older container": (b"tjgg" + bytes(60), "not a GGUF file"),
    "three bytes": (b"GGU", "not a GGUF file"),
    "magic only": (b"GGUF", "version"),
    "version 1": (b"GGUF" + struct.pack("<III", 1, 0, 0) + bytes(32), "version 1", "versions 2 and 3"),
    "version 0": (b"GGUF" + bytes(32), "version 0"),
    "version 4": (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "cut in the counts": (b"GGUF" + struct.pack("<IQ", 3, 0) + b"123", "key count"),
    "2^63 keys": (raw_kv(n_pairs=2**63), "keys", str(2**63)),
    "2^63 tensors": (raw_kv(n_tensors=2**63), "tensors", str(2**63)),
    "more keys than bytes": (raw_kv(n_pairs=5), "keys"),
    "2^17 keys": (raw_kv(n_pairs=1 << 17) + bytes(14 << 17), "keys", "65536"),
    "no model": (raw_kv(), "general.architecture"),
    "key of 2^63 bytes": (raw_kv(n_pairs=1)[:24] + u64(2**63) + bytes(64), "key 0", str(2**63)),
    "key length all ones": (raw_kv(n_pairs=1)[:24] + u64(2**64 - 1) + bytes(64), "key 0"),
    "empty key": (raw_kv(("", STR, string("x"))), "empty"),
    "key not UTF-8": (raw_kv((b"\xff\xfe", STR, string("x"))), "key 0", "UTF-8"),
    "string of 2^63 bytes": (raw_kv(("general.name", STR, u64(2**63))), "general.name", str(2**63)),
    "string one byte too long": (raw_kv(("general.name", STR, u64(65))), "general.name"),
    "string not UTF-8": (raw_kv(("general.name", STR, string(b"\xc3("))), "general.name", "UTF-8"),
    "array of 2^60 numbers": (raw_kv(("x.y", ARR, struct.pack("<IQ", I32, 2**60))), "x.y", str(2**62)),
    "array of 2^60 bytes": (raw_kv(("x.y", ARR, struct.pack("<IQ", U8, 2**60))), "x.y"),
    "array of 2^62 doubles": (raw_kv(("x.y", ARR, struct.pack("<IQ", F64, 2**62))), "x.y"),
    "array of 2^60 strings": (raw_kv(("x.y", ARR, struct.pack("<IQ", STR, 2**60))), "x.y"),
    "strings past the end": (raw_kv(("x.y", ARR, struct.pack("<IQ", STR, 5) + string("a" * 20) + u64(99))), "string 1"),
    "nested array": (raw_kv(("x.y", ARR, struct.pack("<IQIQ", ARR, 1, U8, 0))), "x.y", "array in an array"),
    "arrays 10,000 deep": (raw_kv(("x.y", ARR, struct.pack("<IQ", ARR, 1) * 10000)), "x.y", "array in an array"),
    "unknown value type": (raw_kv(("x.y", 13, bytes(8))), "x.y", "13"),
    "value type 2^32 - 1": (raw_kv(("x.y", 2**32 - 1, bytes(8))), "x.y", "value type"),
    "unknown item type": (raw_kv(("x.y", ARR, struct.pack("<IQ", 99, 1))), "x.y", "99"),
    "bool of 2": (raw_kv(("x.y", BOOL, b"\x02")), "x.y", "bool"),
    "bools of 2": (raw_kv(("x.y", ARR, struct.pack("<IQ", BOOL, 2) + b"\x01\x02")), "x.y", "bool"),
    "a key twice": (raw_kv(("x.y", U8, b"1"), ("x.y", U8, b"1")), "x.y", "twice"),
    "a key with an escape sequence": (raw_kv(("\x1b[2J\n" + "x" * 5000, 13, bytes(8))), "\\x1b[2J\\n", "..."),
}


@pytest.mark.parametrize("name", HEADERS)
def test_ld_18_malformed_header(path, name):
    """LD-18 (llama.cpp #26690, #27188, #28810; ggml #709, #1516): a header's claims are checked before use."""
    data, *words = HEADERS[name]
    path.write_bytes(data)
    refused(path, *words)


@pytest.mark.parametrize("alignment, good", [
    ((U32, 0), False), ((U32, 3), False), ((U32, 2**31), False), ((U32, 4), False), ((STR, "32"), False),
    ((I32, -32), False), ((F32, 32.0), False), ((ARR, (U32, [32] * 1000)), False), ((U32, 8), True), ((U32, 64), True),
    ((U32, 4096), True), ((U64, 128), True),
])
def test_ld_18_alignment(path, alignment, good):
    """LD-18: alignment 0, 3 and 2^31, and its wrong types."""
    pairs, tensors = tiny(layers=1)
    write(path, pairs | {"general.alignment": alignment}, tensors, alignment=alignment[1] if good else 32)
    if good:
        with gguf.GGUF(str(path)) as g:
            expected = expected_tensor(tensors["output_norm.weight"], "llama", 4, 2)
            assert g.alignment == alignment[1] and same_bits(g["model.norm.weight"], expected)
    else:
        refused(path, "general.alignment")


UP = "blk.0.ffn_up.weight"
TENSORS = {  # changes of one tensor
    "5 dimensions": ({"dims": (64, 96, 1, 1, 1)}, "5 dimensions"),
    "no dimensions": ({"dims": ()}, "0 dimensions"),
    "2^31 dimensions": ({"n_dims": 2**31}, "dimensions"),
    "a product that wraps to 4": ({"dims": (2**62 + 1, 4), "kind": 0}, UP, "shape"),
    "a product of 2^128": ({"dims": (2**63, 2**63, 2**63, 2**63)}, "shape"),
    "a dimension of 0": ({"dims": (64, 0)}, "0"),
    "a row length of 0": ({"dims": (0, 96)}, "0"),
    "transposed": ({"dims": (96, 64)}, "shape (64, 96)", "(96, 64)"),
    "three dimensions": ({"dims": (64, 96, 2)}, "shape"),
    "misaligned": ({"offset": 7}, "aligned"),
    "past the end": ({"offset": 2**40}, "cut off", str(2**40)[:4]),
    "offset 2^64 - 32": ({"offset": 2**64 - 32}, "cut off"),
    "overlapping": ({"offset": 0}, "inside tensor"),
    "another name": ({"name": "blk.0.ffn_up.wait"}, "missing"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_ld_18_malformed_tensor(path, name):
    """LD-18: dimensions, products that overflow, offsets; the message names the tensor."""
    change, *words = TENSORS[name]
    pairs, tensors = tiny()
    tensors[UP] = tensors[UP]._replace(**change)
    write(path, pairs, tensors)
    refused(path, UP if name != "overlapping" else "token_embd.weight", *words)


def test_ld_18_two_tensors_of_one_name_and_data_cut_off(path):
    """LD-18: duplicate names; data shorter than claimed, cut anywhere, also inside the header."""
    pairs, tensors = tiny(layers=1)
    write(path, pairs, [*tensors.values(), tensors[UP]])
    refused(path, UP, "twice")
    whole = build(pairs, list(tensors.values()))
    last = len(whole) - max(len(t.data) + -len(t.data) % 32 for t in list(tensors.values())[-1:])
    rng = random.Random(0)
    for cut in [0, 1, 3, 4, 8, 23, 24, last, len(whole) - 32, *(rng.randrange(len(whole) - 32) for _ in range(60))]:
        path.write_bytes(whole[:cut])
        refused(path)


def test_zero_tensors_or_a_vocabulary_only(path):
    pairs, _ = tiny()
    write(path, pairs, [])
    refused(path, "token_embd.weight", "no model")


@pytest.mark.parametrize("kind, shape", [("Q4_K", (1, 896)), ("Q4_0", (1, 48)), ("IQ4_NL", (2, 16)), ("Q8_0", (4, 31)),
                                         ("Q6_K", (256, 1)), ("IQ4_XS", (2, 576)), ("Q2_K", (3, 128)),
                                         ("Q5_K", (4, 64)), ("Q3_K", (1, 257)), ("Q8_K", (2, 255))])
def test_ld_26_rows_must_be_whole_blocks(path, kind, shape):
    """LD-26 (llama.cpp #14996): a row that is no multiple of the block is refused with the tensor's name."""
    pairs, tensors = tiny()
    tensors[UP] = T(UP, shape, TYPE[kind], bytes(4096))
    write(path, pairs, tensors)
    refused(path, UP, kind, f"multiple of the {gguf.BLOCK[TYPE[kind]][1]}")


@pytest.mark.parametrize("kind", sorted(name for _, (name, _, _) in gguf.BLOCK.items() if name not in READ))
def test_ld_26_unsupported_types_are_named(path, kind):
    """LD-26 (llama.cpp #14996; pollard-weights #103): files mix types, and those not read are named on opening."""
    pairs, tensors = tiny(hidden=256, ffn=256, head_dim=64, vocab=4)
    tensors["blk.1.ffn_down.weight"] = T("blk.1.ffn_down.weight", (256, 256), TYPE[kind], bytes(256 * 256 * 8))
    write(path, pairs | {"tokenizer.ggml.tokens": (ARR, (STR, ["a"]))}, tensors)
    refused(path, "blk.1.ffn_down.weight", f"type {kind},", "Q8_0")


@pytest.mark.parametrize("kind", [4, 5, 31, 32, 33, 36, 37, 38, 43, 999, 2**31, 2**32 - 1])
def test_ld_27_removed_and_unknown_types(path, kind):
    """LD-27 (unslothai/unsloth #3124): ids without a meaning are refused with tensor and id."""
    pairs, tensors = tiny()
    tensors[UP] = tensors[UP]._replace(kind=kind)
    write(path, pairs, tensors)
    refused(path, UP, f"type id {kind},", "removed" if kind < 39 else "does not define")


@pytest.mark.parametrize("kind, row_bytes", [("Q6_K", 2310), ("Q4_0", 1584), ("Q8_0", 2992), ("Q4_K", 1584),
                                             ("Q3_K", 1210), ("Q2_K", 924)])
def test_ld_27_the_embedding_has_its_own_type(ref, path, kind, row_bytes):
    """LD-27 (FlashML-org/FreeToken #188): row bytes follow from the tensor's own type, also for the embedding."""
    header = build({}, [T("token_embd.weight", (3, 2816), TYPE[kind], bytes(3 * row_bytes))])
    _, _, _, infos, start = gguf.read_header(header)
    assert infos["token_embd.weight"].nbytes == 3 * row_bytes and start + 3 * row_bytes <= len(header)
    pairs, tensors = tiny(kind="Q4_1", hidden=2816, ffn=32, vocab=3, layers=1)
    tensors["token_embd.weight"] = T("token_embd.weight", (3, 2816), TYPE[kind], blocks(TYPE[kind], (3, 2816)))
    with gguf.GGUF(write(path, pairs, tensors)) as g:
        raw = np.frombuffer(tensors["token_embd.weight"].data, np.uint8).reshape(3, row_bytes)
        assert same_bits(g["model.embed_tokens.weight"], package_dequantize(ref, raw, kind))
        assert same_bits(spread(g.codes("model.embed_tokens.weight")), g["model.embed_tokens.weight"])


KEYS = {  # changes of keys of a tiny llama (None removes), and words of the message
    "no architecture": ({"general.architecture": None}, "general.architecture", "missing"),
    "architecture a number": ({"general.architecture": (U32, 1)}, "general.architecture"),
    "another architecture": ({"general.architecture": (STR, "gemma3")}, "gemma3", "llama, qwen2, qwen3"),
    "a LoRA": ({"general.type": (STR, "adapter")}, "adapter", "LoRA"),
    "a projector": ({"general.type": (STR, "mmproj")}, "mmproj"),
    "split": ({"split.count": (U16, 4)}, "split.count", "4 parts"),
    "experts": ({"expert_count": (U32, 8)}, "expert_count", "8", "mixture of experts"),
    "a logit scale": ({"logit_scale": (F32, 0.5)}, "logit_scale", "0.5"),
    "soft capping": ({"attn_logit_softcapping": (F32, 50.0)}, "attn_logit_softcapping"),
    "not causal": ({"attention.causal": (BOOL, False)}, "attention.causal"),
    "a scale per layer": ({"residual_scale": (ARR, (F32, [1.0] * 2))}, "residual_scale"),
    "no embedding length": ({"embedding_length": None}, "llama.embedding_length", "missing"),
    "no block count": ({"block_count": None}, "llama.block_count", "missing"),
    "no head count": ({"attention.head_count": None}, "llama.attention.head_count", "missing"),
    "no feed-forward length": ({"feed_forward_length": None}, "llama.feed_forward_length", "missing"),
    "no context length": ({"context_length": None}, "llama.context_length", "missing"),
    "zero heads": ({"attention.head_count": (U32, 0)}, "attention.head_count", "not 0"),
    "negative heads": ({"attention.head_count": (I32, -4)}, "attention.head_count", "-4"),
    "heads a float": ({"attention.head_count": (F32, 4.0)}, "attention.head_count"),
    "heads a bool": ({"attention.head_count": (BOOL, True)}, "attention.head_count"),
    "heads by layer": ({"attention.head_count": (ARR, (U32, [4, 4]))}, "attention.head_count", "a list of 2"),
    "key-value heads by layer": ({"attention.head_count_kv": (ARR, (U32, [2, 2]))}, "head_count_kv", "a list of 2"),
    "feed-forward by layer": ({"feed_forward_length": (ARR, (U32, [96, 96]))}, "feed_forward_length", "a list of 2"),
    "heads that do not share": ({"attention.head_count_kv": (U32, 3)}, "4 heads", "3 key-value heads"),
    "more key-value heads": ({"attention.head_count_kv": (U32, 8)}, "4 heads", "8 key-value heads"),
    "heads that do not divide": ({"attention.head_count": (U32, 6), "attention.key_length": None}, "64", "6 heads"),
    "2^31 heads": ({"attention.head_count": (U32, 2**31)}, "attention.head_count"),
    "other heads": ({"attention.head_count": (U32, 8)}, "blk.0.attn_q.weight", "shape (64, 64)", "(128, 64)"),
    "other key-value heads": ({"attention.head_count_kv": (U32, 4)}, "blk.0.attn_k.weight", "shape (32, 64)"),
    "values of another size": ({"attention.value_length": (U32, 8)}, "8"),
    "odd heads": ({"attention.key_length": (U32, 15), "attention.value_length": (U32, 15)}, "15"),
    "rotation wider than a head": ({"rope.dimension_count": (U32, 18)}, "18"),
    "odd rotation": ({"rope.dimension_count": (U32, 7)}, "7"),
    "another hidden size": ({"embedding_length": (U32, 128)}, "token_embd.weight", "shape (40, 64)", "(40, 128)"),
    "another feed-forward length": ({"feed_forward_length": (U32, 64)}, "blk.0.ffn_gate.weight", "(96, 64)"),
    "more layers": ({"block_count": (U32, 3)}, "blk.2.attn_norm.weight", "missing"),
    "2^31 - 1 layers": ({"block_count": (U32, 2**31 - 1)}, "blk.2.attn_norm.weight", "missing"),
    "2^63 layers": ({"block_count": (U64, 2**63)}, "block_count"),
    "fewer layers": ({"block_count": (U32, 1)}, "blk.1.", "not part of llama"),
    "eps NaN": ({"attention.layer_norm_rms_epsilon": (F32, math.nan)}, "layer_norm_rms_epsilon", "nan"),
    "eps infinite": ({"attention.layer_norm_rms_epsilon": (F64, math.inf)}, "layer_norm_rms_epsilon", "inf"),
    "eps zero": ({"attention.layer_norm_rms_epsilon": (F32, 0.0)}, "layer_norm_rms_epsilon"),
    "eps negative": ({"attention.layer_norm_rms_epsilon": (F32, -1e-5)}, "layer_norm_rms_epsilon"),
    "eps a string": ({"attention.layer_norm_rms_epsilon": (STR, "1e-5")}, "layer_norm_rms_epsilon"),
    "theta zero": ({"rope.freq_base": (F32, 0.0)}, "rope.freq_base"),
    "theta infinite": ({"rope.freq_base": (F32, math.inf)}, "rope.freq_base"),
    "factor negative": ({"rope.scaling.factor": (F32, -2.0)}, "rope.scaling.factor"),
    "factor NaN": ({"rope.scaling.factor": (F32, math.nan)}, "rope.scaling.factor"),
    "long rope": ({"rope.scaling.type": (STR, "longrope")}, "longrope"),
    "scaling a number": ({"rope.scaling.type": (U32, 2)}, "rope.scaling.type"),
    "attention factor without YaRN": ({"rope.scaling.attn_factor": (F32, 1.19)}, "attn_factor"),
    "YaRN log multiplier": ({"rope.scaling.yarn_log_multiplier": (F32, 0.1)}, "yarn_log_multiplier"),
    "YaRN extrapolation factor": ({"rope.scaling.yarn_ext_factor": (F32, 0.5)}, "yarn_ext_factor"),
    "YaRN beta": ({"rope.scaling.type": (STR, "yarn"), "rope.scaling.yarn_beta_fast": (F32, -1.0)}, "yarn_beta_fast"),
    "eos outside": ({"tokenizer.ggml.eos_token_id": (U32, 40)}, "eos_token_id", "40"),
    "bos a string": ({"tokenizer.ggml.bos_token_id": (STR, "1")}, "bos_token_id"),
    "too many tokens": ({"tokenizer.ggml.tokens": (ARR, (STR, ["x"] * 41))}, "40 rows", "41 tokens"),
    "another vocabulary size": ({"vocab_size": (U32, 50)}, "token_embd.weight", "40 rows", "50 tokens"),
}


@pytest.mark.parametrize("name", KEYS)
def test_unsupported_or_impossible_metadata(path, name):
    change, *words = KEYS[name]
    pairs, tensors = tiny()
    for key, v in change.items():
        key = key if key.startswith(("tokenizer.", "general.", "split.")) else f"llama.{key}"
        pairs.pop(key, None)
        pairs |= {} if v is None else {key: v}
    write(path, pairs, tensors)
    refused(path, *words)


@pytest.mark.parametrize("tensor, shape", [
    ("token_embd.weight", (64,)), ("output_norm.weight", (32,)), ("blk.0.attn_norm.weight", (64, 64)),
    ("blk.1.attn_v.weight", (64, 64)), ("blk.1.attn_output.weight", (64, 32))])
def test_shapes_that_contradict_the_config(path, tensor, shape):
    pairs, tensors = tiny()
    tensors[tensor] = T(tensor, shape, TYPE["F32"], bytes(4 * math.prod(shape)))
    write(path, pairs, tensors)
    refused(path, tensor)


@pytest.mark.parametrize("arch, change, words", [
    ("llama", ["blk.1.attn_q.bias"], ["blk.1.attn_q.bias", "not part of llama"]),
    ("llama", ["blk.0.attn_q.bias"], ["blk.0.attn_k.bias", "missing"]),
    ("llama", ["blk.0.ffn_gate_inp.weight"], ["blk.0.ffn_gate_inp.weight", "not part of llama"]),
    ("llama", ["blk.0.attn_q_norm.weight"], ["attn_q_norm", "not part of llama"]),
    ("qwen3", ["blk.0.attn_q.bias"], ["blk.0.attn_q.bias", "not part of qwen3"]),
])
def test_tensors_that_the_model_would_not_use_are_refused(path, arch, change, words):
    pairs, tensors = tiny(arch)
    write(path, pairs, [*tensors.values(), *(T(name, (64,), 0, bytes(256)) for name in change)])
    refused(path, *words)


@pytest.mark.parametrize("arch, name", [("qwen2", "blk.1.attn_k.bias"), ("qwen3", "blk.0.attn_k_norm.weight"),
                                        ("llama", "output_norm.weight"), ("llama", "token_embd.weight")])
def test_missing_tensors_are_named(path, arch, name):
    pairs, tensors = tiny(arch)
    del tensors[name]
    write(path, pairs, tensors)
    refused(path, name, "missing")


@pytest.mark.parametrize("freqs, pairs", [
    (ROPE_FREQS._replace(shape=(4,)), {}), (ROPE_FREQS, {"llama.rope.scaling.type": (STR, "yarn")}),
    (ROPE_FREQS._replace(data=struct.pack("<8f", *[1.0] * 7, 0.0)), {}),
    (ROPE_FREQS._replace(data=struct.pack("<8f", *[1.0] * 7, math.nan)), {}),
    (ROPE_FREQS._replace(data=struct.pack("<8f", *[1.0] * 7, -1.0)), {}),
    (ROPE_FREQS, {"llama.rope.dimension_count": (U32, 8)}),
])
def test_rope_freqs_that_cannot_be(path, freqs, pairs):
    p, tensors = tiny()
    write(path, p | pairs, [*tensors.values(), freqs])
    refused(path, "rope_freqs.weight")


def test_things_that_are_no_file(tmp_path):
    refused(tmp_path, "no file")
    empty = tmp_path / "empty.gguf"
    empty.write_bytes(b"")
    refused(empty, "empty")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.gguf"):
        gguf.GGUF(str(tmp_path / "nowhere.gguf"))


def test_a_header_may_not_grow_without_bound(path, monkeypatch):
    """A file can be large for good reasons, its header cannot: past the bound, reading stops."""
    pairs, tensors = tiny()
    monkeypatch.setattr(gguf, "MAX_HEADER", 1000)
    write(path, pairs, tensors)
    refused(path, "1000 bytes that a header may take")


@pytest.mark.slow
@pytest.mark.parametrize("kind, n", [(U8, 60 << 20), (F32, 15 << 20), (BOOL, 60 << 20), (STR, 7 << 20)])
def test_the_largest_header_that_is_read(path, kind, n):
    """The worst that a legal header can do: 60 MB of numbers, bools or empty strings."""
    raw = bytes(n * {U8: 1, F32: 4, BOOL: 1, STR: 8}[kind])
    path.write_bytes(raw_kv(("x.y", ARR, struct.pack("<IQ", kind, n) + raw)))
    started = time.perf_counter()
    with pytest.raises(ValueError, match=r"general\.architecture"):
        gguf.GGUF(str(path))
    assert time.perf_counter() - started < 20


# ------------------------------------------------------------------ fuzz


def mutate(rng, data, head):
    """One damaged copy: flipped bytes, a cut, lengths and counts replaced, pieces removed, doubled or moved."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(min(head, len(data)) if rng.random() < 0.9 else len(data))
        way = rng.randrange(6)
        if way == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif way == 1:
            data[at] = rng.randrange(256)
        elif way == 2:
            special = rng.choice([0, 1, 5, 31, 255, 2**16, 2**31, 2**32 - 1, 2**60, 2**62 + 1, 2**63, 2**64 - 1])
            width = rng.choice([4, 8])
            data[at:at + width] = (special % 2**(8 * width)).to_bytes(width, "little")
        elif way == 3:
            del data[at:at + rng.randrange(1, 40)]
        elif way == 4:
            piece = data[at:at + rng.randrange(1, 60)]
            to = rng.randrange(len(data))
            data[to:to] = piece
        else:
            del data[rng.randrange(len(data)):]
        if not data:
            break
    return bytes(data)


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that any operation of torch returns; tracemalloc does not see these."""
    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(t, torch.Tensor):
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


def many_types():
    """A model with a matrix of every type that is read in blocks of 256, and of a few others."""
    pairs, tensors = tiny("llama", "F16", hidden=256, heads=2, kv_heads=1, head_dim=4, ffn=32, vocab=6, layers=1,
                          tied=False)
    for name, kind in {"token_embd": "Q2_K", "output": "Q3_K", "blk.0.attn_q": "Q4_K", "blk.0.attn_k": "Q5_K",
                       "blk.0.attn_v": "Q6_K", "blk.0.ffn_gate": "IQ4_XS", "blk.0.ffn_up": "Q8_K",
                       "blk.0.ffn_down": "IQ4_NL"}.items():
        name += ".weight"
        tensors[name] = tensors[name]._replace(kind=TYPE[kind], data=blocks(TYPE[kind], tensors[name].shape))
    return pairs, list(tensors.values())


def decode(g, names):
    for name in names:
        decoded, info = g[name], g._names[name]
        if isinstance(decoded, torch.Tensor) and info.type_id in gguf.CODES and len(info.shape) == 2:
            g.codes(name)


def fuzz(path, seed, n):
    """Opens n damaged files, and decodes those that still open. Returns how many opened, and the longest time."""
    rng, bases = random.Random(seed), []
    for arch, kind in (("llama", "Q4_1"), ("qwen2", "Q8_0"), ("qwen3", "Q5_0")):
        pairs, tensors = tiny(arch, kind, hidden=32, heads=2, kv_heads=1, ffn=32, vocab=6, layers=1)
        bases.append(build(pairs, [*tensors.values(), *([ROPE_FREQS] if arch == "llama" else [])]))
    bases = [(whole, gguf.read_header(whole)[4]) for whole in (*bases, build(*many_types()))]
    opened, longest = 0, 0.0
    for i in range(n):
        data = mutate(rng, *bases[i % 4])
        path.write_bytes(data)
        if traced := i % 5 == 0:  # tracing is slow, and would see what torch imports for Largest
            tracemalloc.start()
        started, largest = time.perf_counter(), Largest()
        try:
            with gguf.GGUF(str(path), packed=i % 2 == 0) as g, largest if i % 5 == 1 else contextlib.nullcontext():
                decode(g, g)
            opened += 1
        except ValueError as error:
            message = str(error)
            assert message.startswith(str(path)) and "\n" not in message and len(message) < 600, (seed, i, message)
        finally:
            longest = max(longest, time.perf_counter() - started)
            peak = tracemalloc.get_traced_memory()[1] if traced else 0
            tracemalloc.stop()
        assert peak < 40 * len(data) + 300_000, (seed, i, peak)
        assert largest.bytes <= 13 * len(data), (seed, i, largest.bytes)  # Q2_K: 84 bytes for 256 floats
    return opened, longest


def test_ld_18_any_tensor_as_any_type(path):
    """LD-18 with LD-27: every tensor of a file of many types takes every type id in turn; decoded or one ValueError."""
    pairs, tensors = many_types()
    opened = collections.Counter()
    for i, t in enumerate(tensors):
        for kind in (*gguf.BLOCK, *gguf.REMOVED, 43, 2**31):
            whole = build(pairs, [*tensors[:i], t._replace(kind=kind), *tensors[i + 1:]])
            path.write_bytes(whole)
            largest = Largest()
            try:
                with gguf.GGUF(str(path)) as g, largest:
                    decode(g, [hf_name(t.name)])
                    opened[g.infos[t.name].type_name] += 1
            except ValueError as error:
                assert str(error).startswith(str(path)) and t.name in str(error), (t.name, kind, error)
            assert largest.bytes <= 13 * len(whole), (t.name, kind, largest.bytes)
    assert {*INTEGER} <= set(opened)


def test_ld_18_fuzz(path):
    """LD-18: thousands of damaged files; only a ValueError naming the file comes out, soon and with little memory."""
    opened, longest = fuzz(path, seed=1, n=3000)
    assert 100 < opened < 1500 and longest < 5  # some damage is harmless (a name, a weight), most is not


@pytest.mark.slow
def test_ld_18_fuzz_more(path):
    """LD-18: the same with many more files."""
    opened, longest = fuzz(path, seed=2, n=20000)
    assert opened > 200 and longest < 10


def test_the_demo_runs(capsys):
    gguf._demo()
    out = capsys.readouterr().out
    assert "d*c+m  -2 -1.5 -1" in out and "general.architecture" in out
