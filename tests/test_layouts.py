"""layouts.py against the compressed-tensors package, against transformers, and against files decoded bit by bit."""
import json
import random
import re

import numpy as np
import pytest
import torch
from tiny import TINY

import checkpoint
import layouts
from layouts import dequantize, pack, quantization_config, read, unpack, write
from model import Config, Llama

pytestmark = pytest.mark.usefixtures("one_thread")
LAYOUTS = ["compressed-tensors", "gptq", "awq"]
I32 = torch.int32


# ------------------------------------------------------------------ a quantizer and slow decoders to compare with


def rtn(w, bits=4, size=-1, sym=True, dtype=torch.float16):
    """Rounding to nearest, as the contract has it: the scale rounded first, ties to even, scale 1 for zeros."""
    groups = w.unflatten(1, (-1, size if size > 0 else w.shape[1])).float()
    top = (1 << bits) - 1
    if sym:
        scales = groups.abs().amax(-1) / (7.5 if bits == 4 else (1 << bits - 1) - 1)
        low, zeros = -(1 << bits - 1), None
    else:
        least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales, low = (most - least) / top, 0
    scales = torch.where(scales.to(dtype) == 0, 1.0, scales).to(dtype)
    codes = groups / scales.float()[..., None]
    if not sym:
        zeros = (-least / scales.float()).round().clamp(1, top).int()  # from 1 on, which every layout can hold
        codes = codes + zeros[..., None]
    codes = codes.round().clamp(low, low + top).to(torch.int8 if sym else torch.uint8).flatten(1)
    return {"codes": codes, "scales": scales, "zeros": zeros, "mins": None, "g_idx": None, "bits": bits}


def fp8(w, dtype=torch.bfloat16):
    scales = (w.abs().amax(1, keepdim=True) / 448).to(dtype)
    scales = torch.where(scales == 0, 1.0, scales).to(dtype)
    codes = (w / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"codes": codes, "scales": scales, "zeros": None, "mins": None, "g_idx": None, "bits": 8}


def weight(n, k, bits=4, size=-1, sym=True, seed=0, dtype=torch.float16):
    """Every code occurs, not only those that rounding would choose."""
    g = torch.Generator().manual_seed(seed)
    groups = 1 if size == -1 else k // size
    low = -(1 << bits - 1) if sym else 0
    codes = torch.randint(low, low + (1 << bits), (n, k), generator=g).to(torch.int8 if sym else torch.uint8)
    zeros = None if sym else torch.randint(1, 1 << bits, (n, groups), generator=g).int()
    scales = torch.randn(n, groups, generator=g).to(dtype)
    return {"codes": codes, "scales": scales, "zeros": zeros, "mins": None, "g_idx": None, "bits": bits}


def same(a, b):
    assert a.keys() == b.keys() == {"codes", "scales", "zeros", "mins", "g_idx", "bits"}
    for key in a:
        if isinstance(a[key], torch.Tensor):
            assert b[key] is not None and a[key].dtype == b[key].dtype and a[key].shape == b[key].shape, key
            x, y = a[key].float(), b[key].float()
            assert torch.equal(x, y) and torch.equal(x.signbit(), y.signbit()), key
        else:
            assert a[key] == b[key], key


def config(layout, **settings):
    return {"quantization_config": {**quantization_config(layout, 4, 32), **settings}}


def change(entry, **weights):
    """A compressed-tensors config with other settings of its weights."""
    group = entry["config_groups"]["group_0"]
    return {**entry, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **weights}}}}


def config_for(layout, w, size, sym):
    if layout == "compressed-tensors":
        entry = change(quantization_config(layout, 4, size, sym), num_bits=w["bits"])
    elif layout == "gptq":
        entry = {**quantization_config(layout, 4, size, sym), "bits": w["bits"]}
    else:
        entry = {**quantization_config(layout, 4, size), "zero_point": not sym}
    return {"quantization_config": entry}


def bit_stream(words, bits, n):
    """Codes out of one Python int, the whole stream."""
    whole = sum((int(word) & 0xFFFFFFFF) << 32 * i for i, word in enumerate(words))
    return [whole >> bits * i & (1 << bits) - 1 for i in range(n)]


def slow_gptq(t, bits, offset):
    """A GPTQ file to a matrix, one element at a time. offset: 1 for version 1, 0 for version 2."""
    qweight, qzeros = t["x.qweight"].numpy(), t["x.qzeros"].numpy()
    scales, g_idx = t["x.scales"].float().numpy(), t["x.g_idx"].tolist()
    k, n = len(g_idx), qweight.shape[1]
    zeros = [bit_stream(row, bits, n) for row in qzeros]
    out = np.empty((n, k), np.float32)
    for i in range(n):
        codes = bit_stream(qweight[:, i], bits, k)
        for j in range(k):
            z = zeros[g_idx[j]][i] + offset & (1 << bits) - 1
            out[i, j] = scales[g_idx[j], i] * np.float32(codes[j] - z)
    return torch.from_numpy(out)


def slow_awq(t, size):
    """An AWQ file to a matrix: output 8 w + order[i] lies at bits 4 i of word w."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    qweight, qzeros, scales = t["x.qweight"].numpy(), t["x.qzeros"].numpy(), t["x.scales"].float().numpy()
    k, words = qweight.shape
    out = np.empty((8 * words, k), np.float32)
    for j in range(k):
        g = j // size
        for word in range(words):
            for i in range(8):
                row = 8 * word + order[i]
                code, zero = (int(q) >> 4 * i & 15 for q in (qweight[j, word], qzeros[g, word]))
                out[row, j] = scales[g, row] * np.float32(code - zero)
    return torch.from_numpy(out)


# ------------------------------------------------------------------ bit streams


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("n", [1, 7, 8, 10, 11, 21, 22, 31, 32, 33, 64, 100])
def test_pack_is_a_little_endian_stream(bits, n):
    codes = torch.randint(1 << bits, (3, n), generator=torch.Generator().manual_seed(n))
    words = pack(codes, bits, 1)
    assert words.dtype == I32 and words.shape == (3, -(-n * bits // 32)) and words.is_contiguous()
    for row, stream in zip(codes.tolist(), words.tolist()):
        assert bit_stream(stream, bits, n) == row
        used = sum((word & 0xFFFFFFFF) << 32 * i for i, word in enumerate(stream))
        assert used >> bits * n == 0, "what is left of the last word is zero"
    assert torch.equal(pack(codes.t(), bits, 0), words.t())
    back = unpack(words, bits, 1, n)
    assert back.dtype == torch.uint8 and torch.equal(back, codes.to(torch.uint8))
    assert torch.equal(unpack(words.t(), bits, 0, n), codes.t().to(torch.uint8))
    assert torch.equal(unpack(words[None].expand(2, -1, -1), bits, -1, n), codes.to(torch.uint8).expand(2, -1, -1))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("shape", [(5, 33), (8, 64), (33, 7), (1, 1)])
def test_pack_equals_the_library(bits, shape):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    half = 1 << bits - 1
    signed = torch.randint(-half, half, shape, generator=torch.Generator().manual_seed(bits)).to(torch.int8)
    for dim in (0, 1):
        theirs = helpers.pack_to_int32(signed, bits, packed_dim=dim)
        ours = pack(signed.int() + half, bits, dim)
        assert torch.equal(theirs, ours)
        assert torch.equal(helpers.unpack_from_int32(ours, bits, shape, packed_dim=dim),
                           (unpack(theirs, bits, dim, shape[dim]).int() - half).to(torch.int8))


def test_no_code_spills():
    """GQ-20, auto-round #2273: a code above the maximum went into its neighbour when packed."""
    bad = torch.tensor([[16, 0, 3, 0, 0, 0, 0, 0]])
    with pytest.raises(ValueError, match="0 to 16, but 4 bits hold 0 to 15"):
        pack(bad, 4, 1)
    spilled = int(sum(code << 4 * i for i, code in enumerate(bad[0].tolist())))  # what unchecked packing makes of it
    assert spilled == 0x310 and bit_stream([spilled], 4, 8) == [0, 1, 3, 0, 0, 0, 0, 0]
    for codes in (torch.tensor([-1]), torch.tensor([256]), torch.tensor([2**40])):
        with pytest.raises(ValueError, match="hold 0 to 255"):
            pack(codes, 8, 0)
    for codes in (torch.tensor([1.0]), torch.tensor([True])):
        with pytest.raises(ValueError, match="only integers"):
            pack(codes, 4, 0)
    for code in (16, -9):
        w = {**weight(8, 32), "codes": torch.full((8, 32), code, dtype=torch.int8)}
        for layout in LAYOUTS:
            with pytest.raises(ValueError, match="not 4 bits"):
                write(layout, "x", w)


@pytest.mark.parametrize("words, bits, n", [(torch.zeros(3, dtype=I32), 4, 25), (torch.zeros(3, dtype=I32), 4, 16),
                                            (torch.zeros(3, dtype=torch.int64), 4, 24), (torch.zeros(3), 4, 24),
                                            (torch.zeros(3, dtype=I32), 0, 8), (torch.zeros(3, dtype=I32), 4, 2**62)])
def test_unpack_wants_just_the_words(words, bits, n):
    with pytest.raises(ValueError, match="take"):
        unpack(words, bits, 0, n)


# ------------------------------------------------------------------ known words and identities


def test_zero_points_of_both_versions():
    """GQ-05, AutoGPTQ #325, #640, GPTQModel #2350, vllm #38966: zero points stored less one (v1) or as is (v2)."""
    w = weight(8, 32, size=32)
    stored = write("gptq", "x", w)
    assert stored["x.qzeros"].tolist() == [[0x77777777]] == [[2004318071]]
    v2 = {**stored, "x.qzeros": torch.tensor([[-2004318072]], dtype=I32)}  # 0x88888888
    key = "checkpoint_format"
    for tensors, version in ((stored, {}), (stored, {key: None}), (v2, {key: "gptq_v2"})):
        same(read(config("gptq", **version), tensors)["x.weight"], w)
        asym = read(config("gptq", sym=False, **version), tensors)["x.weight"]
        assert (asym["zeros"] == 8).all() and torch.equal(dequantize(asym), dequantize(w))
    no_version = config("gptq")
    del no_version["quantization_config"]["checkpoint_format"]
    same(read(no_version, stored)["x.weight"], w)
    for tensors, version in ((v2, "gptq"), (stored, "gptq_v2")):  # mixed up: nothing but sym can tell
        with pytest.raises(ValueError, match=r"x.qzeros has zero points from \d to \d, but the config says symmetric"):
            read(config("gptq", checkpoint_format=version), tensors)["x.weight"]
    assert write("awq", "x", w)["x.qzeros"].tolist() == [[-2004318072]], "never less one"
    eight = write("gptq", "x", weight(8, 32, bits=8, size=32))["x.qzeros"]
    assert eight.tolist() == [[0x7F7F7F7F] * 2]


def test_zero_point_zero_and_version_1():
    """GQ-05, AutoGPTQ #325: 0 less one is all ones, and adding one has to stay within the code's own bits."""
    w = weight(8, 32, size=32, sym=False)
    stored = {**write("gptq", "x", w), "x.qzeros": torch.tensor([[-1]], dtype=I32)}
    assert read(config("gptq", sym=False), stored)["x.weight"]["zeros"].tolist() == [[0]] * 8
    w["zeros"][3, 0] = 0
    with pytest.raises(ValueError, match="zero point of 0"):
        write("gptq", "x", w)
    for layout in ("awq", "compressed-tensors"):
        entry = {"quantization_config": quantization_config(layout, 4, 32, sym=False)}
        same(read(entry, write(layout, "x", w))["x.weight"], w)


def test_awq_nibbles():
    """AW-05, llm-awq #91, GPTQModel #1826, pie #491: the order of AWQ's nibbles, along the outputs."""
    w = {**weight(8, 1), "codes": torch.arange(8, dtype=torch.uint8)[:, None],
         "zeros": torch.arange(8, dtype=I32)[:, None]}
    stored = write("awq", "x", w)
    assert stored["x.qweight"].tolist() == stored["x.qzeros"].tolist() == [[0x75316420]] == [[1966171168]]
    entry = config("awq", group_size=-1)
    same(read(entry, stored)["x.weight"], w)
    linear = {**stored, "x.qweight": pack(w["codes"].t(), 4, 1)}
    assert linear["x.qweight"].item() == 0x76543210
    assert read(entry, linear)["x.weight"]["codes"][:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7], "the fault is visible"


def test_three_bits_straddle_words():
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, 10] = codes[0, 21] = 7
    assert [word & 0xFFFFFFFF for word in pack(codes, 3, 1)[0].tolist()] == [3 << 30, 1 | 1 << 31, 3]


@pytest.mark.parametrize("n, k, size", [(8, 32, 32), (24, 96, 32), (64, 128, -1)])
def test_one_packer_serves_all(n, k, size):
    """The identities: the same integers, transposed or in another order."""
    for bits in (3, 4, 8):
        m = n * 4  # whole words of 3 bits
        w = weight(m, k, bits, size, sym=False)
        ct, gptq = write("compressed-tensors", "x", w), write("gptq", "x", w)
        assert torch.equal(gptq["x.qweight"], ct["x.weight_packed"].t())
        assert torch.equal(gptq["x.scales"], ct["x.weight_scale"].t())
        assert torch.equal(unpack(ct["x.weight_zero_point"], bits, 0, m).t(), unpack(gptq["x.qzeros"], bits, 1, m) + 1)
        if bits == 4:
            v2 = gptq["x.qzeros"] + 0x11111111
            assert torch.equal(unpack(v2, 4, 1, m), unpack(ct["x.weight_zero_point"], 4, 0, m).t())
            awq = unpack(write("awq", "x", w)["x.qzeros"], 4, 1, m).unflatten(1, (-1, 8))[..., [0, 4, 1, 5, 2, 6, 3, 7]]
            assert torch.equal(awq.flatten(1), unpack(v2, 4, 1, m))
    w = weight(n, k, 4, size)
    ct, gptq = write("compressed-tensors", "x", w), write("gptq", "x", w)
    assert torch.equal(gptq["x.qweight"], ct["x.weight_packed"].t()) and "x.weight_zero_point" not in ct
    assert (gptq["x.qzeros"] == 0x77777777).all()
    assert torch.equal(gptq["x.g_idx"], (torch.arange(k) // (size if size > 0 else k)).int())


def test_the_cpu_kernel_takes_the_same_codes():
    """W = (q - 8) s + (8 - z) s, as torch's own 4-bit kernel has it."""
    w = weight(16, 64, 4, 32, sym=False, dtype=torch.bfloat16)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(w["codes"].int(), 1)
    scales = w["scales"]
    both = torch.stack([scales, (8 - w["zeros"]).to(scales.dtype) * scales], -1).transpose(0, 1).contiguous()
    x = torch.eye(64, dtype=torch.bfloat16)
    out = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 32, both)
    torch.testing.assert_close(out.t().float(), dequantize(w), rtol=0.02, atol=0.05)


# ------------------------------------------------------------------ round trips


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("dtype", layouts.FLOATS)
def test_round_trip_bit_for_bit(layout, sym, dtype):
    """RT-18, pytorch/ao #805, and RT-19, executorch #21065: -8 is a code like any other, and no path rounds anew."""
    rng = random.Random(f"{layout}{sym}{dtype}")
    for _ in range(40):
        bits = 4 if layout == "awq" else rng.choice([2, 3, 4, 8])
        size = rng.choice([-1, 32, 64, 96]) if layout == "gptq" else rng.choice([-1, 1, 2, 3, 5, 32, 64])
        k = size * rng.randint(1, 4) if size > 0 else rng.randint(1, 70)
        n = rng.randint(1, 40)
        if layout == "gptq":
            n, k = 32 * -(-n // 32) if bits == 3 else 16 * -(-n // 16), 32 * -(-k // 32)
        elif layout == "awq":
            n = 8 * -(-n // 8)
        w = weight(n, k, bits, size, sym, rng.randrange(1000), dtype)
        stored = write(layout, "a.x", w)
        assert all(name.startswith("a.x.") and t.is_contiguous() for name, t in stored.items())
        got = read(config_for(layout, w, size, sym), stored)
        if layout == "awq" and sym:
            assert (got["a.x.weight"]["zeros"] is None)
        same(got["a.x.weight"], w)
        assert list(got) == ["a.x.weight"] and len(got) == 1
        again = write(layout, "a.x", got["a.x.weight"])
        assert stored.keys() == again.keys() and all(torch.equal(stored[key], again[key]) for key in stored)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_against_the_slow_decoder(bits, version):
    """Random words, as no writer made them: every zero point occurs, and act-order in any order."""
    g = torch.Generator().manual_seed(bits)
    n, k, size = 32, 96, 32
    words = torch.randint(-2**31, 2**31, (k * bits // 32, n), generator=g).int()
    zeros = torch.randint(-2**31, 2**31, (3, n * bits // 32), generator=g).int()
    for g_idx in (torch.randint(3, (k,), generator=g), torch.arange(k) // size, torch.arange(k).flip(0) // size):
        t = {"x.qweight": words, "x.qzeros": zeros, "x.scales": torch.randn(3, n, generator=g).half(),
             "x.g_idx": g_idx.int()}
        entry = {**quantization_config("gptq", 4, size, sym=False, desc_act=True), "bits": bits,
                 "checkpoint_format": version}
        got = read({"quantization_config": entry}, t)["x.weight"]
        assert torch.equal(dequantize(got), slow_gptq(t, bits, int(version == "gptq")))
        assert not torch.equal(dequantize(got), slow_gptq(t, bits, int(version != "gptq"))), "the fault is visible"
        assert (got["g_idx"] is None) == torch.equal(g_idx, torch.arange(k) // size)


def test_gptq_of_before_config_json():
    """An old model has its settings in quantize_config.json, and may lack g_idx."""
    old = {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "static_groups": False, "sym": True,
           "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model"}
    w = weight(16, 96, size=32)
    stored = write("gptq", "x", w)
    same(read(old, stored)["x.weight"], w)
    del stored["x.g_idx"]
    same(read(old, stored)["x.weight"], w)
    with pytest.raises(ValueError, match="no g_idx"):
        read({**old, "desc_act": True}, stored)


@pytest.mark.parametrize("size", [1, 8, 24, -1])
def test_awq_against_the_slow_decoder(size):
    g = torch.Generator().manual_seed(size + 1)
    n, k = 40, 24
    groups = 1 if size == -1 else k // size
    t = {"x.qweight": torch.randint(-2**31, 2**31, (k, n // 8), generator=g).int(),
         "x.qzeros": torch.randint(-2**31, 2**31, (groups, n // 8), generator=g).int(),
         "x.scales": torch.randn(groups, n, generator=g).half()}
    got = read(config("awq", group_size=size), t)["x.weight"]
    assert torch.equal(dequantize(got), slow_awq(t, k if size == -1 else size))
    t["x.qzeros"].fill_(-2004318072)
    plain = dequantize(read(config("awq", group_size=size), t)["x.weight"])
    for zeros in (t["x.qzeros"], torch.zeros(groups, n // 8).int(), None):  # no zero points, whatever lies there
        t["x.qzeros"] = zeros
        without = read(config("awq", group_size=size, zero_point=False), {a: b for a, b in t.items() if b is not None})
        assert without["x.weight"]["zeros"] is None and torch.equal(dequantize(without["x.weight"]), plain)


def test_short_last_group():
    """GQ-19, GPTQModel #328, text-generation-inference #2639, compressed-tensors #447: 192 columns in groups of 128."""
    w = weight(16, 192, size=96)
    short = {**w, "g_idx": torch.arange(192).int() // 128}
    stored = write("gptq", "x", short)
    assert stored["x.scales"].shape == (2, 16)
    got = read(config("gptq", group_size=128), stored)["x.weight"]
    same(got, short)
    assert torch.equal(dequantize(got), slow_gptq(stored, 4, 1))
    del stored["x.g_idx"]
    assert torch.equal(dequantize(read(config("gptq", group_size=128), stored)["x.weight"]), dequantize(short))
    for layout in ("compressed-tensors", "awq"):
        with pytest.raises(ValueError, match=r"x: .* equally many neighbouring columns; gptq has"):
            write(layout, "x", short)
        with pytest.raises(ValueError, match=r"192 (columns|rows), which are not groups of 128"):
            entry = {"quantization_config": quantization_config(layout, 4, 128)}
            read(entry, write(layout, "x", w))["x.weight"]
    with pytest.raises(ValueError, match="192 columns do not divide into 5 groups"):
        write("gptq", "x", {**w, "scales": torch.ones(16, 5)})


def test_bias_is_neither_invented_nor_lost():
    """GQ-23, optimum #1827: a bias appeared from nowhere on load. Old GPTQ files do hold zeros where there is none."""
    w = weight(8, 32, size=32)
    for layout in LAYOUTS:
        stored = write(layout, "x", w)
        assert not any("bias" in name for name in stored)
        got = read(config(layout), stored)
        assert "x.bias" not in got and list(got) == ["x.weight"]
        with pytest.raises(KeyError):
            got["x.bias"]
    bias = torch.arange(8).half()
    for layout in LAYOUTS:
        got = read(config(layout), {**write(layout, "x", w), "x.bias": bias})
        assert set(got) == {"x.weight", "x.bias"} and torch.equal(got["x.bias"], bias)
    got = read(config("gptq"), {**write("gptq", "x", w), "x.bias": bias * 0, "norm.bias": bias * 0})
    assert set(got) == {"x.weight", "norm.bias"}, "no surplus for a model without biases"
    assert "x.bias" in got and torch.equal(got["x.bias"], bias * 0), "but there for one with biases"


# ------------------------------------------------------------------ scales, fp8, twice


@pytest.mark.parametrize("layout", LAYOUTS)
def test_group_of_zeros(layout):
    """RT-01, GPTQModel #1531, auto-round #1909: an all-zero group gave 0/0."""
    w = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    w[:, 32:64] = 0
    w[3] = 0
    for size in (32, -1):
        q = rtn(w, 4, size)
        back = read(config(layout, **({} if layout == "compressed-tensors" else {"group_size": size})) if size == 32
                    else {"quantization_config": quantization_config(layout, 4)}, write(layout, "x", q))["x.weight"]
        matrix = dequantize(back)
        assert back["scales"].isfinite().all() and matrix.isfinite().all()
        assert (matrix[3] == 0).all() and (matrix[:, 32:64] == 0).all()
    zero = {**weight(8, 32, size=32), "scales": torch.zeros(8, 1).half()}  # a scale of 0 is unwise, but a number
    assert (dequantize(read(config(layout), write(layout, "x", zero))["x.weight"]) == 0).all()


@pytest.mark.parametrize("format", ["int-quantized", "float-quantized", "pack-quantized"])
def test_scales_are_one_a_row(format):
    """RT-04, aimet #3184, onnxruntime #19996: the axis of per-channel scales, swapped, shows only off the square."""
    matrix = torch.tensor([[1.0, 1, 1], [100, 100, 100]])
    w = rtn(matrix, 8, dtype=torch.float32) if format != "float-quantized" else fp8(matrix, torch.float32)
    stored = write("compressed-tensors", "x", w, format=format)
    assert stored["x.weight_scale"].shape == (2, 1)
    entry = {"quantization_config": quantization_config("compressed-tensors", 8, format=format)}
    got = read(entry, stored)["x.weight"]
    same(got, w)
    torch.testing.assert_close(dequantize(got), matrix)
    for scale in (torch.ones(1, 3), torch.ones(3, 1), torch.ones(1, 2), torch.ones(2)):
        with pytest.raises(ValueError, match=r"x.weight_scale is .*must be .*2, 1"):
            read(entry, {**stored, "x.weight_scale": scale})["x.weight"]


def test_fp8_overflow_is_no_code():
    """RT-08, ml_dtypes #260, pytorch #178817: beyond 448 a cast to e4m3fn may give NaN, which is refused both ways."""
    w = torch.tensor([[447.0, 448, 449, 464, 465, 1000, float("inf"), -1000]])
    clamped = {**fp8(w), "codes": w.clamp(-448, 448).to(torch.float8_e4m3fn), "scales": torch.ones(1, 1)}
    assert dequantize(clamped)[0].tolist() == [448.0] * 7 + [-448.0]
    stored = write("compressed-tensors", "x", clamped)
    assert set(stored) == {"x.weight", "x.weight_scale"}
    entry = {"quantization_config": quantization_config("compressed-tensors", 8, format="float-quantized")}
    same(read(entry, stored)["x.weight"], clamped)
    nan = torch.tensor([[127, 0, 255, 8, 1, 2, 3, 4]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert nan.float().isnan().sum() == 2
    with pytest.raises(ValueError, match=r"clamped to .-448"):
        write("compressed-tensors", "x", {**clamped, "codes": nan})
    with pytest.raises(ValueError, match=r"x.weight holds NaN"):
        read(entry, {**stored, "x.weight": nan})["x.weight"]
    for layout in ("gptq", "awq"):
        with pytest.raises(ValueError, match="compressed-tensors takes any"):
            write(layout, "x", clamped)


@pytest.mark.parametrize("n, k, block", [(256, 256, (128, 128)), (200, 300, (128, 128)), (5, 7, (2, 3))])
def test_fp8_in_blocks_and_with_one_scale(n, k, block):
    g = torch.Generator().manual_seed(n)
    codes = torch.randn(n, k, generator=g).to(torch.float8_e4m3fn)
    entry = change(quantization_config("compressed-tensors", 8, format="float-quantized"), strategy="block",
                   block_structure=list(block))
    scale = torch.rand(-(-n // block[0]), -(-k // block[1]), generator=g)
    t = {"x.weight": codes, "x.weight_scale": scale, "x.input_scale": torch.ones(1)}
    got = read({"quantization_config": entry}, t)
    assert list(got) == ["x.weight"], "the activations' scale is used up, and not used"
    expected = codes.float()
    for i in range(n):
        for j in range(0, k, block[1]):
            expected[i, j:j + block[1]] *= scale[i // block[0], j // block[1]]
    assert torch.equal(dequantize(got["x.weight"]), expected)
    entry = change(entry, strategy="tensor", block_structure=None)
    for one in (torch.tensor([0.5]), torch.tensor(0.5), torch.tensor([[0.5]])):
        assert torch.equal(dequantize(read({"quantization_config": entry}, {**t, "x.weight_scale": one})["x.weight"]),
                           codes.float() * 0.5)


def test_nothing_is_quantized_or_rounded_twice():
    """RT-20, OneTrainer #1634: what is packed already is not packed again, and scales are not rounded on the way."""
    w = weight(8, 64, size=32, dtype=torch.float32)
    for layout in LAYOUTS:
        entry = config(layout, zero_point=False) if layout == "awq" else config(layout)
        same(read(entry, write(layout, "x", w))["x.weight"], w)
        for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
            with pytest.raises(ValueError, match=r"scales that .* does not hold exactly"):
                write(layout, "x", w, dtype)
        wide = {**w, "scales": w["scales"].bfloat16()}
        assert torch.equal(dequantize(read(config(layout), write(layout, "x", wide, torch.float32))["x.weight"]),
                           dequantize(wide))
        with pytest.raises(ValueError, match="both a weight and packed weights"):
            read(config(layout), {**write(layout, "x", w), "x.weight": torch.ones(8, 64)})


def test_ties_and_ranges():
    """RT-18, pytorch/ao #805, and RT-19, executorch #21065: what the tests' quantizer chose is what is read back."""
    w = torch.tensor([[-1, -0.5, 0.5, 1]] * 8)
    got = read({"quantization_config": quantization_config("awq", 4)}, write("awq", "x", rtn(w, dtype=torch.float32)))
    torch.testing.assert_close(dequantize(got["x.weight"])[0], torch.tensor([-0.9333, -0.5333, 0.5333, 0.9333]),
                               atol=1e-4, rtol=0)
    w = torch.tensor([[0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, 7.5]])
    got = read({"quantization_config": quantization_config("compressed-tensors", 4)},
               write("compressed-tensors", "x", rtn(w)))["x.weight"]
    assert got["scales"].item() == 1 and got["codes"].tolist() == [[0, 2, 2, 4, 0, -2, -2, 7]]


# ------------------------------------------------------------------ the compressed-tensors package


SCHEMES = [(None, 4, 16, True), (None, 4, 16, False), (None, 4, -1, False), (None, 8, -1, True), (None, 8, 16, True),
           ("int-quantized", 8, -1, True), ("float-quantized", 8, -1, True)]


@pytest.fixture(scope="module")
def library():
    """The package's own description of a scheme and its compressor, made of our config."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    def of(entry):
        parsed = QuantizationConfig.model_validate({**entry, "quant_method": "compressed-tensors"})
        return BaseCompressor.get_value_from_registry(entry["format"]), parsed.config_groups["group_0"]
    return of


@pytest.mark.parametrize("format, bits, size, sym", SCHEMES)
@pytest.mark.parametrize("n, k", [(32, 64), (9, 48), (1, 16)])
def test_the_library_unpacks_ours_and_we_unpack_its(library, format, bits, size, sym, n, k):
    entry = quantization_config("compressed-tensors", bits, size, sym, format=format)
    compressor, scheme = library(entry)
    matrix = torch.randn(n, k, generator=torch.Generator().manual_seed(n))
    w = fp8(matrix, torch.float32) if format == "float-quantized" else rtn(matrix, bits, size, sym, torch.float32)
    ours = {name[2:]: t for name, t in write("compressed-tensors", "x", w, format=format).items()}
    assert set(ours) == set(compressor.compression_param_names(scheme))
    assert torch.equal(compressor.decompress(ours, scheme)["weight"], dequantize(w))
    half = 1 << bits - 1  # the library's zero points are signed
    zeros = torch.zeros_like(w["scales"]) if sym else w["zeros"] - half
    dtype = torch.float8_e4m3fn if format == "float-quantized" else torch.int8
    theirs = compressor.compress({"weight": matrix, "weight_scale": w["scales"],
                                  "weight_zero_point": zeros.to(dtype)}, scheme)
    assert theirs.keys() == ours.keys()
    for name in ours:
        assert torch.equal(theirs[name], ours[name]) and theirs[name].dtype == ours[name].dtype, name
    same(read({"quantization_config": entry}, {f"x.{name}": t for name, t in theirs.items()})["x.weight"], w)


@pytest.mark.parametrize("format, bits", [("pack-quantized", 4), ("pack-quantized", 8), ("int-quantized", 8)])
@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_zero_points_stored_as_bytes(library, format, bits, strategy):
    """The library packs zero points of groups and rows only, and only beside packed codes."""
    entry = change(quantization_config("compressed-tensors", bits, format=format), strategy=strategy, symmetric=False)
    compressor, scheme = library(entry)
    matrix = torch.randn(9, 40, generator=torch.Generator().manual_seed(bits))
    scale = torch.tensor([0.1]) if strategy == "tensor" else torch.rand(9, 1) + 0.1
    zero = torch.full_like(scale, -3).to(torch.int8)
    theirs = compressor.compress({"weight": matrix, "weight_scale": scale, "weight_zero_point": zero}, scheme)
    got = read({"quantization_config": entry}, {f"x.{name}": t for name, t in theirs.items()})["x.weight"]
    assert torch.equal(dequantize(got), compressor.decompress(theirs, scheme)["weight"])
    assert ((got["zeros"] == -3) if got["codes"].dtype == torch.int8 else got["zeros"] == (1 << bits - 1) - 3).all()


def test_config_has_the_keys_that_every_version_knows():
    """QuantizationArgs and QuantizationScheme forbid keys they do not know: a newer one would break older engines."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128,
               "dynamic": False}
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
              "ignore": ["lm_head"], "kv_cache_scheme": None, "config_groups": {"group_0": {
                  "targets": ["Linear"], "input_activations": None, "output_activations": None, "weights": weights}}}
    assert quantization_config("compressed-tensors", 4, 128) == packed
    for format, kind in (("int-quantized", "int"), ("float-quantized", "float")):
        entry = quantization_config("compressed-tensors", 8, format=format)
        assert entry["format"] == format and entry["config_groups"]["group_0"] == {
            "targets": ["Linear"], "output_activations": None,
            "input_activations": {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True},
            "weights": {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False}}
    assert quantization_config("gptq", 4, 128) == {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
        "checkpoint_format": "gptq", "damp_percent": 0.01, "lm_head": False}
    assert quantization_config("awq", 4, 128) == {
        "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None}
    json.dumps([quantization_config(layout, 4, 128) for layout in LAYOUTS])


@pytest.mark.parametrize("arguments, message", [
    (("gptq", 3), "4 or 8"), (("awq", 8), "awq 4"), (("marlin", 4), "these are"), (("compressed-tensors", 3), "4 or 8"),
    (("compressed-tensors", 4, -1, True, ["lm_head"], "int-quantized"), "int-quantized 8"),
    (("compressed-tensors", 8, 32, True, ["lm_head"], "float-quantized"), "group_size is 32"),
    (("compressed-tensors", 8, -1, False, ["lm_head"], "int-quantized"), "symmetric only"),
    (("gptq", 4, 0), "group_size is 0"), (("gptq", 4, 32, True, ["lm_head", "a"]), "left out"),
    (("awq", 4, 32, True, [], None, True), "only gptq"), (("gptq", 4, 32, True, [], "pack-quantized"), "not written")])
def test_config_refuses_what_is_not_written(arguments, message):
    with pytest.raises(ValueError, match=message):
        quantization_config(*arguments)


# ------------------------------------------------------------------ whole models and transformers


TRANSFORMERS = {**TINY, "architectures": ["LlamaForCausalLM"]}
IDS = torch.arange(1, 27).view(2, 13) * 7 % 270


def our_logits(weights, settings=TINY, dtype=torch.float32):
    plain = {name: dequantize(w, dtype) if isinstance(w, dict) else w for name, w in weights.items()}
    with torch.inference_mode():
        return Llama.from_tensors(Config.from_dict(settings), plain)(IDS)


def their_logits(model):
    model.eval()
    for module in model.modules():  # W8A8 would round activations as well, which we do not
        module.quantization_enabled = False
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize("format, bits, size, sym", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:You passed .quantization_config.:UserWarning")
def test_a_folder_of_ours_opens_in_transformers(tmp_path, library, format, bits, size, sym, dtype):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    stored, kept = {}, {}
    for name, p in Llama(Config.from_dict(TINY)).state_dict().items():
        kept[name] = p
        if name.endswith("_proj.weight"):
            kept[name] = fp8(p, dtype) if format == "float-quantized" else rtn(p, bits, size, sym, dtype)
            stored |= write("compressed-tensors", name.removesuffix(".weight"), kept[name], dtype, format)
        else:
            stored[name] = p
    entry = quantization_config("compressed-tensors", bits, size, sym, format=format)
    checkpoint.save(tmp_path / "m", {**TRANSFORMERS, "quantization_config": entry}, stored)
    how = {}
    if not sym:  # packed zero points load in this way only, the library's own as well as ours (llm-compressor #1618)
        how["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32, **how)
    theirs = their_logits(model)
    product = torch.float32 if sym else dtype  # this way it multiplies in the dtype of the scales
    torch.testing.assert_close(theirs, our_logits(kept, dtype=product), rtol=0, atol=2e-6)
    loaded = checkpoint.load(tmp_path / "m")
    weights = read(loaded.config, loaded.tensors)
    assert set(weights) == set(kept)
    torch.testing.assert_close(our_logits(weights), our_logits(kept), rtol=0, atol=0)
    shifted = {name: {**w, "codes": w["codes"].roll(1, 0)} if "down_proj" in name else w for name, w in kept.items()}
    assert (our_logits(shifted) - theirs).abs().max() > 1e-3, "the comparison can fail"


@pytest.mark.parametrize("preset", ["W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC"])
def test_a_folder_of_transformers_opens_here(tmp_path, library, preset):
    """Quantized, compressed and saved by the library and transformers alone."""
    transformers = pytest.importorskip("transformers")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TINY, "attention_bias": True}))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if scheme.weights.group_size:
        scheme.weights.group_size = 16
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme},
                                                        ignore=["lm_head", "re:.*layers[.]1[.]mlp[.](up|gate)_proj"]))
    n = 0
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            groups = module.weight.unflatten(1, (module.weight_scale.shape[1], -1))
            scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
            module.weight_scale.data.copy_(scale)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero)
            n += 1
    assert n == 12
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "m")
    compressor.update_config(tmp_path / "m")
    loaded = checkpoint.load(tmp_path / "m")
    weights = read(loaded.config, loaded.tensors)
    packed = [name for name, w in weights.items() if isinstance(w, dict)]
    assert len(packed) == n and all((weights[p]["zeros"] is None) == ("ASYM" not in preset) for p in packed)
    torch.testing.assert_close(our_logits(weights, {**TINY, "attention_bias": True}), their_logits(model),
                               rtol=0, atol=2e-6)


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_a_whole_model_of_gptq_and_awq(tmp_path, layout):
    """Transformers opens neither on a CPU without more packages, so our logits are compared with the slow decoders'."""
    torch.manual_seed(0)
    stored, kept = {}, {}
    for name, p in Llama(Config.from_dict(TINY)).state_dict().items():
        kept[name] = p
        if name.endswith("_proj.weight"):
            w = rtn(p, 4, 16, sym=layout == "gptq")
            t = write(layout, "x", w)
            kept[name] = slow_gptq(t, 4, 1) if layout == "gptq" else slow_awq(t, 16)
            stored |= {name.removesuffix("weight") + part[2:]: value for part, value in t.items()}
        else:
            stored[name] = p
    entry = quantization_config(layout, 4, 16, sym=layout == "gptq")
    checkpoint.save(tmp_path / "m", {**TINY, "quantization_config": entry}, stored)
    loaded = checkpoint.load(tmp_path / "m")
    weights = read(loaded.config, loaded.tensors)
    assert set(weights) == set(kept) and len(weights) == len(kept)
    assert torch.equal(our_logits(weights), our_logits(kept))


# ------------------------------------------------------------------ names and settings


def test_names():
    """What no layout explains keeps its name, nothing is decoded before it is asked for, nothing is held."""
    asked = []

    class Watched(dict):
        def __getitem__(self, name):
            asked.append(name)
            return super().__getitem__(name)

    for layout in LAYOUTS:
        tensors = Watched({"norm.weight": torch.ones(4), **write(layout, "a.x", weight(8, 32, size=32)),
                           "b.x.scales": torch.ones(1), "weight_shape": torch.ones(1), "a.x.lora": torch.ones(1)})
        asked.clear()
        got = read(config(layout), tensors)
        assert set(got) == {"norm.weight", "a.x.weight", "b.x.scales", "weight_shape", "a.x.lora"}
        assert len(got) == 5 and "a.x.weight" in got and "a.x.qweight" not in got and 3 not in got
        assert "1 of them packed" in repr(got) and asked == []
        assert got["a.x.weight"] is not got["a.x.weight"] and got["norm.weight"] is tensors["norm.weight"]
        for name in ("a.x.qweight", "a.x.weight_scale", "c", 3):
            with pytest.raises(KeyError):
                got[name]
    cache = {"k.k_scale": torch.ones(1), "k.v_scale": torch.ones(1)}
    w = write("compressed-tensors", "x", weight(8, 32, size=32))
    assert "k.k_scale" in read(config("compressed-tensors"), {**w, **cache})
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    assert list(read(config("compressed-tensors", kv_cache_scheme=scheme), {**w, **cache})) == ["x.weight"]


def test_several_groups():
    """A group is found by name, else by pattern, else by class; each has its own bits and format."""
    eight, four = weight(6, 50, 8, 25), weight(6, 50, 4, sym=False)
    int8, fp = rtn(torch.randn(6, 50), 8), fp8(torch.randn(6, 50))
    tensors = {**write("compressed-tensors", "l.0.up", eight), **write("compressed-tensors", "l.0.down", four),
               **write("compressed-tensors", "l.1.up", int8, format="int-quantized"),
               **write("compressed-tensors", "head", fp), "l.9.up.weight": torch.ones(2, 2)}

    def group(targets, **settings):
        return {"targets": targets, "weights": {"num_bits": 8, "type": "int", "symmetric": True, **settings}}
    groups = {"a": group(["Linear"], strategy="channel", num_bits=4, symmetric=False),
              "b": group(["re:.*[.](up|gate)$"], group_size=25), "kv": {"targets": ["LlamaAttention"], "weights": None},
              "c": {**group(["l.1.up"], group_size=-1), "format": "int-quantized"},
              "d": {**group(["re:head", "nobody"], group_size=-1, type="float"), "format": "float-quantized"}}
    entry = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups,
             "ignore": ["re:l[.]9.*", "lm_head"]}
    got = read({"quantization_config": entry}, tensors)
    for name, w in (("l.0.up", eight), ("l.0.down", four), ("l.1.up", int8), ("head", fp)):
        same(got[f"{name}.weight"], w)
    assert torch.equal(got["l.9.up.weight"], torch.ones(2, 2)), "a plain weight, quantized or not in name"
    for ignored in (["l.0.up"], ["re:.*up"], ["Linear"]):
        with pytest.raises(ValueError, match=r"'.*' has packed tensors, but the config ignores it"):
            read({"quantization_config": {**entry, "ignore": ignored}}, tensors)
    with pytest.raises(ValueError, match=r"'l.0.down' has packed tensors, but no config group"):
        read({"quantization_config": {**entry, "config_groups": {**groups, "a": groups["b"]}}}, tensors)
    with pytest.raises(ValueError, match="floating point"):
        floats = {"d": {**groups["d"], "targets": ["Linear"]}}
        read({"quantization_config": {**entry, "config_groups": floats}}, tensors)


def test_patterns_from_strangers_end():
    x = "model.layers.11.self_attn.q_proj"
    for pattern, found in (("re:.*q_proj", 2), ("re:.*lm_head", 0), ("re:model[.]layers[.](0|11)[.].*_proj$", 2),
                           (r"re:.*\.layers\.\d+\.self_attn\.(q|k|v|o)_proj", 2), ("re:q_proj", 0), (x, 3),
                           (f"re:.*[.]({'|'.join(map(str, range(40)))})[.].*", 2), ("LlamaMLP", 0)):
        assert layouts._matches(pattern, x) == found
    for pattern in ("re:(a+)+$", "re:(a|a)*b", "re:" + "(a|a)" * 30 + "b", "re:" + "a?" * 30 + "a" * 30,
                    "re:" + "a*" * 20 + "b", "re:" + "x" * 2000, "re:((a{1,9}){1,9}){1,9}", "re:(",
                    "re:a{99999999999}"):
        with pytest.raises(ValueError, match="pattern"):
            layouts._matches(pattern, "a" * 40)


CT = "compressed-tensors"


@pytest.mark.parametrize("layout, settings, message", [
    (CT, {"format": "nvfp4-pack-quantized"}, "nvfp4"), (CT, {"format": "mxfp4-pack-quantized"}, "mxfp4"),
    (CT, {"format": "marlin-24"}, "marlin"), (CT, {"format": "sparse-24-bitmask"}, "sparse"),
    (CT, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    (CT, {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    (CT, {"quantization_status": "decompressed"}, "quantization_status is 'decompressed'"),
    (CT, {"config_groups": None}, "config_groups"), (CT, {"config_groups": {"W4A16": ["Linear"]}}, "config_groups"),
    (CT, {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}}},
     "num_bits is 4"),
    (CT, {"config_groups": {"a": {"targets": "Linear", "weights": {}}}}, "targets"), (CT, {"ignore": [3]}, "ignore"),
    ("gptq", {"bits": 5}, "bits is 5"), ("gptq", {"bits": "4"}, "bits is '4'"),
    ("gptq", {"bits": None}, "bits is None"), ("gptq", {"bits": True}, "bits is True"),
    ("gptq", {"group_size": 0}, "group_size"), ("gptq", {"group_size": 2**60}, "group_size"),
    ("gptq", {"sym": "false"}, "sym is 'false'"), ("gptq", {"checkpoint_format": "gptq_p"}, "gptq_p"),
    ("gptq", {"checkpoint_format": "marlin"}, "marlin"), ("gptq", {"is_marlin_format": True}, "marlin"),
    ("gptq", {"dynamic": {"+:.*up.*": {"bits": 8}}}, "dynamic"), ("gptq", {"dynamic": 4}, "dynamic"),
    ("gptq", {"bits": 8}, "32 columns of 8 bits"), ("gptq", {"group_size": 16}, r"x.scales is .*\(1, 16\).*\(2, 16\)"),
    ("awq", {"version": "gemv"}, "gemv"), ("awq", {"bits": 8}, "bits is 8"), ("awq", {"version": "marlin"}, "marlin"),
    ("awq", {"group_size": 64}, "groups of 64"), ("awq", {"modules_to_not_convert": ["x"]}, "modules_to_not_convert"),
    ("awq", {"modules_to_not_convert": "x"}, "modules_to_not_convert"), ("awq", {"zero_point": None}, "zero_point"),
    *((CT, {"quant_method": method}, f"quantized with '{method}'.*use the unquantized") for method in (
        "bitsandbytes", "fp8", "fbgemm_fp8", "hqq", "torchao", "mxfp4", "marlin", "auto-round")),
    (CT, {"quant_method": None}, "None"), (CT, {"quant_method": ["gptq"]}, "gptq")])
def test_settings_are_refused_by_name(layout, settings, message):
    stored = write(layout, "x", weight(16, 32, size=32))
    assert read(config(layout), stored)["x.weight"]
    with pytest.raises(ValueError, match=message):
        read(config(layout, **settings), stored)["x.weight"]


def test_configs_without_quantization():
    for settings in ({}, {"quantization_config": None}, {"quantization_config": "gptq"}, {"bits": 4}):
        with pytest.raises(ValueError, match="no quantization_config"):
            read(settings, {})
    w = weight(16, 32, size=32)
    old = {"compression_config": config(CT)["quantization_config"]}
    same(read(old, write(CT, "x", w))["x.weight"], w)
    skipped = config("gptq", dynamic={"-:.*gate.*": {}})
    same(read(skipped, write("gptq", "x", w))["x.weight"], w)
    early = {**config(CT)["quantization_config"], "quantization_status": "frozen"}  # with zero points all the same
    stored = {**write(CT, "x", w), "x.weight_zero_point": torch.full((2, 1), -2004318072, dtype=I32)}
    same(read({"quantization_config": early}, stored)["x.weight"], w)
    with pytest.raises(ValueError, match=r"x.weight_zero_point has zero points from 9 to 9"):
        stored["x.weight_zero_point"] += 0x11111111
        read({"quantization_config": early}, stored)["x.weight"]


def test_act_order_of_compressed_tensors():
    w = weight(5, 96, size=32)
    g_idx = torch.randperm(96, generator=torch.Generator().manual_seed(0)).int() // 32
    entry = {"quantization_config": change(quantization_config(CT, 4, 32), actorder="group")}
    same(read(entry, {**write(CT, "x", w), "x.weight_g_idx": g_idx})["x.weight"], {**w, "g_idx": g_idx})
    same(read(entry, {**write(CT, "x", w), "x.weight_g_idx": g_idx.sort().values})["x.weight"], w)
    with pytest.raises(ValueError, match=r"'x' has .*but no weight_g_idx: the file is incomplete"):
        read(entry, write(CT, "x", w))  # not taken for groups of neighbours
    entry = {"quantization_config": change(quantization_config(CT, 4, 32), actorder="weight")}
    same(read(entry, write(CT, "x", w))["x.weight"], w)


def test_nothing_lands_on_a_default_device():
    """Who has set torch's default device to a GPU, here to meta, gets tensors where the weights are."""
    for layout in (CT, "gptq", "awq"):
        w = weight(16, 64, size=32, sym=layout != "awq")
        entry = {"quantization_config": quantization_config(layout, 4, 32, sym=layout != "awq")}
        try:
            torch.set_default_device("meta")
            stored = write(layout, "x", w)
            again = read(entry, stored)["x.weight"]
            dense = dequantize(again)
        finally:
            torch.set_default_device(None)
        assert {t.device.type for t in (*stored.values(), dense)} == {"cpu"}
        same(again, w)


# ------------------------------------------------------------------ what cannot be written, and damage


@pytest.mark.parametrize("layout, change, message", [
    (CT, {"mins": torch.ones(8, 1)}, "minimum"), (CT, {"scales": torch.full((8, 1), float("nan"))}, "not finite"),
    (CT, {"scales": torch.ones(8, 5)}, "5 groups"), (CT, {"scales": torch.ones(7, 1)}, "scales is"),
    (CT, {"scales": torch.ones(8, 1).long()}, "scales is"), (CT, {"codes": torch.ones(8, 32)}, "codes is"),
    (CT, {"codes": torch.ones(8, dtype=torch.int8)}, "codes is"), (CT, {"zeros": torch.ones(8, 1)}, "zeros is"),
    (CT, {"zeros": torch.ones(8, 2).int()}, "zeros is"), (CT, {"zeros": torch.full((8, 1), 8)}, "zero points outside"),
    (CT, {"g_idx": torch.arange(32) % 2, "scales": torch.ones(8, 2)}, "gptq has"),
    ("gptq", {"g_idx": torch.arange(32), "scales": torch.ones(8, 2)}, "0 to 31, but there are 2"),
    ("gptq", {"g_idx": torch.arange(31)}, "g_idx is"), ("gptq", {"codes": torch.ones(7, 32).char(),
                                                                "scales": torch.ones(7, 1)}, "takes any"),
    ("gptq", {"codes": torch.ones(8, 33).char()}, "takes any"), ("gptq", {"bits": 5}, "takes any"),
    ("awq", {"codes": torch.ones(7, 32).char(), "scales": torch.ones(7, 1)}, "takes any"),
    ("awq", {"bits": 8}, "takes any"), ("gguf", {}, "no layout 'gguf'"), (CT, {"bits": 3}, "not 3 bits")])
def test_what_a_layout_cannot_express(layout, change, message):
    w = {**weight(8, 32, dtype=torch.float32), **change}
    with pytest.raises(ValueError, match=message):
        write(layout, "x", w)


def test_formats_that_do_not_fit():
    for format in ("int-quantized", "float-quantized"):
        with pytest.raises(ValueError, match=format):
            write(CT, "x", weight(8, 32, 4), format=format)
    with pytest.raises(ValueError, match="pack-quantized takes groups"):
        write(CT, "x", weight(8, 32, 8, 16), format="int-quantized")
    with pytest.raises(ValueError, match="pack-quantized"):
        write(CT, "x", fp8(torch.ones(8, 32)), format="pack-quantized")
    with pytest.raises(ValueError, match="no layout 'gptq' with format"):
        write("gptq", "x", weight(8, 32), format="int-quantized")


HUGE = torch.tensor([2**40, 2**40])


@pytest.mark.parametrize("layout, part, value, message", [
    (CT, "weight_shape", HUGE, "x.weight_shape says 1099511627776"),
    (CT, "weight_shape", torch.tensor([16, 2**40]), "weight_shape"),
    (CT, "weight_shape", torch.tensor([16, -32]), "weight_shape"), (CT, "weight_shape", torch.tensor([16, 0]), "shape"),
    (CT, "weight_shape", torch.tensor([16., 32]), "weight_shape is"),
    (CT, "weight_shape", torch.ones(3).long(), "weight_shape is"),
    (CT, "weight_packed", torch.zeros(0, 2**40, dtype=I32), "weight_packed is"),
    (CT, "weight_packed", torch.zeros(2**40, 0, dtype=I32), "weight_packed is"),
    (CT, "weight_g_idx", torch.full((32,), 1).int(), "groups 1 to 1, but there are 1"),
    (CT, "weight_g_idx", torch.full((32,), -1).int(), "groups -1 to -1"),
    (CT, "weight_scale", torch.full((16, 1), float("inf")), "x.weight_scale holds scales that are not finite"),
    (CT, "weight_scale", torch.ones(16, 1).to(torch.float8_e4m3fn), "weight_scale is"),
    ("gptq", "qweight", torch.zeros(0, 2**40, dtype=I32), "qweight is"),
    ("gptq", "g_idx", torch.full((32,), 1).int(), "groups 1 to 1"),
    ("gptq", "g_idx", torch.full((32,), -1), "groups -1"),
    ("gptq", "g_idx", torch.zeros(2**20).int(), "not 1048576 columns"), ("gptq", "g_idx", torch.zeros(32), "g_idx is"),
    ("gptq", "g_idx", torch.zeros(0, 2**40).int(), "not 0 columns"), ("gptq", "scales", torch.ones(16, 1), "scales is"),
    ("gptq", "scales", torch.full((1, 16), float("nan")), "x.scales holds scales that are not finite"),
    ("gptq", "qzeros", torch.zeros(1, 3).int(), "qzeros is"), ("gptq", "qzeros", torch.zeros(1, 2), "qzeros is"),
    ("awq", "qweight", torch.zeros(2**40, 0).int(), "qweight is"),
    ("awq", "qzeros", torch.zeros(2, 2).int(), "qzeros is"), ("awq", "scales", torch.ones(2, 16), "scales is"),
    ("awq", "scales", torch.full((1, 16), float("inf")), "not finite"),
])
def test_damage_is_named(layout, part, value, message):
    stored = write(layout, "x", weight(16, 32, size=32))
    with pytest.raises(ValueError, match=message):
        read(config(layout), {**stored, f"x.{part}": value})["x.weight"]


@pytest.mark.parametrize("layout, needed", [
    (CT, ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"]), ("gptq", ["qzeros", "scales"]),
    ("awq", ["qzeros", "scales"])])
def test_a_missing_tensor_is_named(layout, needed):
    stored = write(layout, "x", weight(16, 32, size=32, sym=False))
    entry = {"quantization_config": quantization_config(layout, 4, 32, sym=False)}
    for part in needed:
        with pytest.raises(ValueError, match=f"'x' has .*but no {part}: "):
            read(entry, {name: t for name, t in stored.items() if name != f"x.{part}"})


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes of the largest tensor that any operation makes."""
    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor):
                self.nbytes = max(self.nbytes, t.untyped_storage().nbytes())
        return out


def mutated_tensor(t, rng):
    change = rng.choice([
        lambda: t[:0], lambda: t[..., :-1], lambda: t.flip(-1), lambda: t.t() if t.dim() == 2 else t[None],
        lambda: t.reshape(-1), lambda: t.double(), lambda: t.long(), lambda: t.to(torch.uint8), lambda: t.bool(),
        lambda: t[None], lambda: t.sum(), lambda: torch.cat([t, t]), lambda: t * 0 - 1,
        lambda: t * 0 + 2**30, lambda: torch.full_like(t.float(), rng.choice([float("nan"), float("inf"), 3e38])),
        lambda: torch.zeros(2**40, 0, dtype=t.dtype), lambda: t.to(torch.float8_e4m3fn), lambda: t.bfloat16(),
        lambda: t[..., :1].expand(t.shape)])
    try:
        return change()
    except NotImplementedError:  # not every operation knows fp8
        return t[:0]


def mutated_config(value, rng):
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        return {**value, key: mutated_config(value[key], rng)}
    return rng.choice([None, True, False, 0, 1, -1, 2, 3, 8, 2**31 - 1, 2**70, 1.5, float("nan"), "", "x", "Linear",
                       "re:(", "re:(x+)+", "group", "block", "tensor", "channel", "float", "int", [], ["x"], [128, 128],
                       [1, 2**31 - 1], [2**31 - 1, 2**31 - 1], [0, 1],
                       [[]], {}, {"x": 1}, "gptq_v2", "awq", "gptq", "compressed-tensors"])


@pytest.mark.parametrize("seed", range(8))
def test_damaged_files_give_value_errors_only(seed):
    """Also: no tensor larger than a small multiple of what is in the file is ever made."""
    rng, refused, opened = random.Random(seed), 0, 0
    files = []
    for layout, sym in ((CT, True), (CT, False), ("gptq", True), ("gptq", False), ("awq", False)):
        files.append((write(layout, "x", weight(64, 64, size=32, sym=sym)),
                      {"quantization_config": quantization_config(layout, 4, 32, sym)}))
    for format, w in (("int-quantized", rtn(torch.randn(64, 64), 8)), ("float-quantized", fp8(torch.randn(64, 64)))):
        entry = quantization_config(CT, 8, format=format)
        files.append((write(CT, "x", w, format=format), {"quantization_config": entry}))
        block = change(entry, strategy="block", block_structure=[32, 32])
        files.append(({**write(CT, "x", w, format=format), "x.weight_scale": torch.ones(2, 2)},
                      {"quantization_config": block}))
    for _ in range(150):
        tensors, settings = rng.choice(files)
        tensors = dict(tensors)
        for _ in range(rng.choice([0, 1, 1, 2])):
            name = rng.choice(list(tensors))
            if rng.random() < 0.1:
                del tensors[name]
            elif tensors[name].numel() and tensors[name].dim():
                tensors[name] = mutated_tensor(tensors[name].clone(), rng)
            if not tensors:
                break
        if rng.random() < 0.6:
            settings = mutated_config(settings, rng)
        if not isinstance(settings, dict):
            continue
        with Largest() as largest:
            try:
                for name, w in read(settings, tensors).items():
                    if isinstance(w, dict):
                        opened += 1
                        largest_read = largest.nbytes
                        assert largest_read <= 64 * sum(t.nbytes for t in tensors.values())
                        assert dequantize(w).shape == w["codes"].shape
                    else:
                        assert w is tensors[name]
            except ValueError as e:
                assert re.search(r"quantiz|'?x'?[. ]|groups", str(e)) and len(str(e)) < 500
                refused += 1
            assert largest.nbytes < 10**6
    assert refused > 30 and opened > 10
