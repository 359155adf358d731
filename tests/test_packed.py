"""packed.py against the definition in its docstring, computed entry by entry in float64."""
import copy
import os
import pickle
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import packed
from packed import QuantEmbedding, QuantLinear, fast

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).resolve().parent.parent
CPU_KERNEL = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu") and packed._int4_block() is not None


def random_weight(N, K, G, bits, kind="signed", act_order=False, seed=0):
    """A packed weight. kind: signed or unsigned codes, the latter with zero points ("zeros"), minimums ("mins"), both
    or neither. Scales differ by a factor of 4 at most, so that a wrong group shows."""
    g = torch.Generator().manual_seed(seed)
    low, high = (-2 ** (bits - 1), 2 ** (bits - 1)) if kind == "signed" else (0, 2**bits)
    codes = torch.randint(low, high, (N, K), generator=g).to(torch.int8 if kind == "signed" else torch.uint8)
    codes[0, 0], codes[-1, -1] = low, high - 1  # both ends are there
    scales = (0.25 + torch.rand(N, G, generator=g)) / 2**bits
    zeros = torch.randint(0, 2**bits, (N, G), generator=g, dtype=torch.int32) if kind in ("zeros", "both") else None
    mins = torch.randn(N, G, generator=g) / 4 if kind in ("mins", "both") else None
    g_idx = None
    if act_order:
        g_idx = torch.arange(K).div(K // G, rounding_mode="floor")[torch.randperm(K, generator=g)].int()
    return {"codes": codes, "scales": scales, "zeros": zeros, "mins": mins, "g_idx": g_idx, "bits": bits}


def definition(w):
    """W[n, k] = scales[n, g(k)] * (codes[n, k] - zeros[n, g(k)]) + mins[n, g(k)], float64."""
    (N, K), G = w["codes"].shape, w["scales"].shape[1]
    out = torch.zeros(N, K, dtype=torch.float64)
    for k in range(K):
        g = int(w["g_idx"][k]) if w["g_idx"] is not None else k * G // K
        zero = 0 if w["zeros"] is None else w["zeros"][:, g].double()
        out[:, k] = w["scales"][:, g].double() * (w["codes"][:, k].double() - zero)
        if w["mins"] is not None:
            out[:, k] += w["mins"][:, g].double()
    return out


def close(y, x, W, dtype):
    """y = x W^T up to the rounding of dtype: of the result, of scales and weights on the way, and of x."""
    exact = x.double() @ W.t()
    size = x.double().abs() @ W.abs().t() + 1e-30  # what the sums run through
    return bool(((y.double() - exact).abs() <= size * (2**-7 if dtype != torch.float32 else 1e-5)).all())


def many(bits):
    return packed.MANY_ROWS[4 if bits <= 4 else 8]


KINDS = ["signed", "unsigned", "zeros", "mins", "both"]


# ------------------------------------------------------------------ products


@pytest.mark.skipif(not CPU_KERNEL, reason="torch has no fast int4 kernel for this CPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(("N", "K", "G"), [(16, 32, 1), (64, 64, 2), (192, 576, 18), (48, 256, 1), (80, 384, 3)])
def test_the_kernel_computes_the_definition(N, K, G, bits, kind):
    w = random_weight(N, K, G, bits, kind)
    layer, W = QuantLinear(w), definition(w)
    assert layer.kind == "int4" and fast(w)
    assert layer.packed.shape == (N, K // 2 if bits <= 4 else K)
    for rows in (0, 1, 2, 5, many(bits) - 1, many(bits), many(bits) + 1):
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).to(dtype)
            y = layer(x)
            assert y.dtype == dtype and y.shape == (rows, N)
            assert close(y, x, W, torch.bfloat16)


def test_the_comparison_would_notice():
    """Sabotaged twins: a swapped digit, a neighbour's group, a zero point one off, columns and x in unlike orders."""
    w = random_weight(64, 128, 4, 4, "zeros", act_order=True)
    W, x = definition(w), torch.randn(3, 128).bfloat16()
    assert close(QuantLinear(w)(x), x, W, torch.bfloat16)
    for change in ({"codes": w["codes"].roll(1, 1)}, {"scales": w["scales"].roll(1, 1)}, {"zeros": w["zeros"] + 1},
                   {"g_idx": None}):
        assert not close(QuantLinear({**w, **change})(x), x, W, torch.bfloat16)
    layer = QuantLinear(random_weight(64, 128, 4, 8))
    assert close(layer(x), x, definition(random_weight(64, 128, 4, 8)), torch.bfloat16)
    layer.packed = layer.packed.roll(64, 1)
    assert not close(layer(x), x, definition(random_weight(64, 128, 4, 8)), torch.bfloat16)


@pytest.mark.parametrize("kind", ["signed", "both"])
@pytest.mark.parametrize("bits", [2, 3, 4, 7, 8])
@pytest.mark.parametrize(("N", "K", "G"), [(1, 1, 1), (7, 33, 3), (15, 48, 3), (17, 64, 2), (16, 32, 2), (3, 10, 10)])
def test_any_other_shape_is_dequantized(N, K, G, bits, kind):
    w = random_weight(N, K, G, bits, kind)
    layer, W = QuantLinear(w), definition(w)
    assert layer.kind == "dense" and not fast(w)
    for rows in (0, 1, 70):
        x = torch.randn(rows, K)
        assert close(layer(x), x, W, torch.float32)
        assert torch.allclose(layer(x.double()), x.double() @ W.t(), rtol=1e-5, atol=1e-5)
        assert close(layer(x.bfloat16()), x.bfloat16(), W, torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_every_weight_alone_is_right(bits, kind):
    """A row of x with a single 1 picks a column of W: nothing can hide in a sum. Scales are powers of two and minimums
    whole steps, so every number on the way is exact in bfloat16, and one step off in one code is a difference."""
    w = random_weight(128, 96, 3, bits, kind)
    w["scales"] = torch.exp2(torch.randint(-4, 4, (128, 3)).float())
    if w["mins"] is not None:
        w["mins"] = w["scales"] * torch.randint(-(2**bits // 2), 1, (128, 3))
    if kind == "both":  # the two together stay within 8 bits
        w["zeros"] = w["zeros"] // 4
        w["mins"] = w["mins"] // w["scales"] // 4 * w["scales"]
    expected, eye = definition(w).t().bfloat16(), torch.eye(96).bfloat16()
    assert torch.equal(expected.double(), definition(w).t()), "the test's own numbers are exact"

    def both_ways(weight):
        layer = QuantLinear(weight)
        return [torch.cat([layer(eye[i:i + 1]) for i in range(96)]), layer(eye)]

    assert all(torch.equal(y, expected) for y in both_ways(w))
    off_by_one = {"codes": w["codes"].roll(1, 1)} | ({"zeros": w["zeros"] + 1} if w["zeros"] is not None else {})
    for part, changed in off_by_one.items():
        assert not any(torch.equal(y, expected) for y in both_ways({**w, part: changed}))


def test_eight_bits_are_two_exact_digits():
    """q = 16 h + l: with whole numbers small enough that no sum needs rounding, not a bit is lost on the way."""
    codes = torch.arange(-128, 128).repeat(16, 1).to(torch.int8)  # every code, (16, 256)
    w = {"codes": codes, "scales": torch.full((16, 8), 0.5), "zeros": None, "mins": None, "g_idx": None, "bits": 8}
    layer = QuantLinear(w)
    assert layer.kind == "int4"
    for k in range(256):
        x = torch.zeros(1, 256).bfloat16()
        x[0, k] = 2
        assert layer(x).tolist() == [[k - 128.0] * 16]


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_on_lesser_processors(capability):
    """torch packs in another order on each kind of CPU, and where it knows no fast kernel (ARM, old x86) nothing stays
    packed: the products are right all the same, few rows or many. A probe that cannot see rows got this wrong once."""
    code = f"""
import sys, torch
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]
import packed
from test_packed import close, definition, many, random_weight
for bits in (4, 8):
    for N, K, G in ((192, 96, 3), (128, 64, 1), (48, 64, 2)):
        w = random_weight(N, K, G, bits, "both")
        layer, W = packed.QuantLinear(w), definition(w)
        for rows in (1, many(bits)):
            x = torch.randn(rows, K)
            assert close(layer(x), x, W, torch.bfloat16), (bits, N, rows, layer)
        assert packed.fast(w) == (layer.kind == "int4") == (packed._int4_block() is not None)
print(torch.backends.cpu.get_cpu_capability(), packed._int4_block())
"""
    done = subprocess.run([sys.executable, "-B", "-c", code], env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
                          text=True, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    if platform.machine() == "x86_64":
        assert done.stdout.split() == {"default": ["DEFAULT", "None"], "avx2": ["AVX2", "32"]}[capability]


def test_both_ways_to_many_rows_agree(monkeypatch):
    """Expanding W and multiplying is the same product as the kernel's, and a block size believed wrongly shows."""
    if packed._int4_block() is None:
        pytest.skip("torch packs in an order here that only its kernel knows")
    blocks = (packed._int4_block(), None, 32 if packed._int4_block() == 64 else 64)  # None: an unknown machine
    for bits in (4, 8):
        w = random_weight(192, 160, 5, bits, "mins")
        layer, W = QuantLinear(w), definition(w)
        x = torch.randn(many(bits), 160).bfloat16()
        right = []
        for block in blocks:
            monkeypatch.setattr(packed, "_int4_block", lambda block=block: block)
            right.append(close(layer(x), x, W, torch.bfloat16))
        assert right == [True, True, False]


@pytest.mark.parametrize(("K", "G"), [(64, 2), (128, 1), (40, 5)])
def test_act_order(K, G):
    """Columns of a group may lie anywhere: the layer brings them together, and x's with them."""
    w = random_weight(32, K, G, 4, "zeros", act_order=True)
    x, W = torch.randn(3, K), definition(w)
    assert close(QuantLinear(w)(x), x, W, torch.bfloat16 if K // G % 32 == 0 else torch.float32)


def test_gq_19_groups_of_unlike_sizes():
    """GQ-19, GPTQModel #328: a short last group (192 columns in groups of 128, 288 in 256) is neither skipped nor
    padded: it runs, dequantized."""
    for K, group in ((192, 128), (288, 256)):
        w = random_weight(32, K, 1, 4) | {"scales": torch.rand(32, 2) + 0.5, "g_idx": torch.arange(K) // group}
        x = torch.randn(2, K)
        assert QuantLinear(w).kind == "dense" and close(QuantLinear(w)(x), x, definition(w), torch.float32)


def test_fp8_and_shapes_of_x():
    codes = torch.randn(32, 64).to(torch.float8_e4m3fn)
    w = {"codes": codes, "scales": torch.rand(32, 1) + 0.5, "zeros": None, "mins": None, "g_idx": None, "bits": 8}
    W, layer = codes.double() * w["scales"].double(), QuantLinear(w)
    x = torch.randn(2, 3, 64)
    assert layer.packed.dtype == torch.float8_e4m3fn, "it stays in 8 bits"
    assert layer(x).shape == (2, 3, 32) and close(layer(x).flatten(0, 1), x.flatten(0, 1), W, torch.float32)
    layer = QuantLinear(random_weight(32, 64, 2, 4))
    wide = torch.randn(4, 128).bfloat16()
    for y in (wide[:, :64], wide.t().contiguous().t()[:, 64:], wide[0, 9:73], wide.view(2, 2, -1)[..., :64]):
        assert torch.equal(layer(y), layer(y.contiguous())), "any strides"
    assert layer(torch.randn(0, 3, 64)).shape == (0, 3, 32)


# ------------------------------------------------------------------ bias, join, embedding


def test_gq_23_no_bias_from_nowhere():
    """GQ-23, optimum #1827: no bias is made up; one that is given is added, in join too."""
    w, b = random_weight(64, 64, 2, 4), torch.randn(64)
    x = torch.randn(2, 64)
    plain, biased = QuantLinear(w), QuantLinear(w, b)
    assert plain.bias is None and not any("bias" in name for name in plain.state_dict())
    assert torch.equal(biased(x), plain(x) + b)
    joined = QuantLinear.join([biased, biased])
    assert torch.equal(joined(x), torch.cat([biased(x)] * 2, 1))
    assert QuantLinear.join([biased, plain]) is None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("sizes", "K", "G", "order"), [((64, 128, 64), 96, 3, False), ((128, 64), 64, 2, True),
                                                        ((7, 9), 10, 2, False), ((48, 64), 64, 2, False)])
def test_join_is_the_layers_behind_each_other(sizes, K, G, order, bits):
    ws = [random_weight(n, K, G, bits, "both", seed=n) for n in sizes]
    if order:
        for w in ws:
            w["g_idx"] = random_weight(1, K, G, 4, act_order=True)["g_idx"]
    layers = [QuantLinear(w) for w in ws]
    joined = QuantLinear.join(layers)
    if layers[0].kind == "int4" and any(n % (packed._int4_block() or 1) for n in sizes):
        assert joined is None, "blocks cut in two cannot be put together"
        return
    for rows in (1, many(bits)):
        x = torch.randn(rows, K)
        assert torch.allclose(joined(x), torch.cat([layer(x) for layer in layers], 1), atol=1e-5)
        assert joined(x).shape == (rows, sum(sizes)) and f"out_features={sum(sizes)}" in repr(joined)
    shared = {b.data_ptr() for layer in layers for n, b in layer.named_buffers() if n != "order"}
    assert not shared & {b.data_ptr() for n, b in joined.named_buffers() if n != "order"}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("extra", ["", "bias", "order"])
def test_bare_is_the_layer_as_a_function(bits, extra):
    """The same bits for every type and number of rows, also of rows that lie apart; a copy goes with its own layer."""
    w = random_weight(64, 128, 4, bits, act_order=extra == "order")
    layer = QuantLinear(w, torch.randn(64).bfloat16() if extra == "bias" else None)
    for rows in (0, 1, 3, many(bits), 100):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(rows, 2, 128, dtype=dtype)[:, 0]
            assert torch.equal(layer.bare()(x), layer(x)) and layer.bare()(x).dtype == dtype
    twin, x = copy.deepcopy(layer.bare()), torch.randn(1, 128).bfloat16()
    before = layer(x)
    for tensor in (t for t in (twin, *getattr(twin, "args", ())) if isinstance(t, torch.Tensor)):
        tensor.zero_()
    assert torch.equal(layer(x), before)


@pytest.mark.skipif(not CPU_KERNEL or not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no native bfloat16")
@pytest.mark.parametrize("kind", KINDS)
def test_eight_bits_are_kept_expanded_for_more_rows(kind):
    """pack_: from 5 rows on bfloat16, made at first need; with 1 at once and instead of the codes. 4 bits: never."""
    w = random_weight(2112, 64, 2, 8, kind)
    layer, whole, W = QuantLinear(w).pack_(), QuantLinear(w).pack_(1), definition(w)
    assert whole.packed is None and whole.expanded is not None and layer.expanded is None
    for rows in (0, 1, 4, 5, 16, 200):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(rows, 64).to(dtype)
            assert close(layer(x), x, W, torch.bfloat16) and close(whole(x), x, W, torch.bfloat16)
        assert (layer.expanded is not None) == (rows >= packed.EXPAND_ROWS)
        assert rows < packed.EXPAND_ROWS or torch.equal(layer(x), whole(x))
    wide = torch.randn(packed.MANY_ROWS[8], 64)
    assert torch.equal(layer(wide), QuantLinear(w)(wide)), "float32 is rounded for few rows only, as without pack_"
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.expanded is None and torch.equal(twin(x), layer(x)) and "expanded" not in twin.state_dict()
    joined = QuantLinear.join([layer, layer])
    assert joined.expanded is None and close(joined(x), x, torch.cat((W, W)), torch.bfloat16)
    four = QuantLinear(random_weight(64, 64, 2, 4)).pack_(1)
    four(torch.randn(8, 64))
    assert four.expanded is None and four.packed is not None


def test_join_refuses_what_is_unlike():
    a = QuantLinear(random_weight(64, 128, 4, 4))
    for b in (random_weight(64, 128, 4, 8), random_weight(64, 128, 2, 4), random_weight(64, 64, 2, 4),
              random_weight(64, 128, 4, 4, act_order=True), random_weight(7, 128, 4, 4)):
        assert QuantLinear.join([a, QuantLinear(b)]) is None
    for N, K, G in ((64, 128, 4), (7, 12, 4)):  # brought into order for the kernel, and left as they are without one
        one, two = (random_weight(N, K, G, 4, act_order=True, seed=s) for s in (1, 2))
        if N == 7:  # groups of unlike sizes
            one["g_idx"][one["g_idx"] == 3] = 2
        one, two = QuantLinear(one), QuantLinear(two)
        assert QuantLinear.join([one, two]) is None, "their columns are in unlike orders"
        assert QuantLinear.join([one, one]) is not None
    assert QuantLinear.join([a, torch.nn.Linear(128, 64)]) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_embedding_looks_up_rows(bits, kind):
    for K, G, order in ((64, 2, False), (33, 3, False), (64, 4, True)):
        w = random_weight(10, K, G, bits, kind, act_order=order)
        W, ids = definition(w), torch.tensor([[3, 0], [9, 3]])
        assert torch.allclose(QuantEmbedding(w, torch.float32)(ids).double(), W[ids], atol=1e-5)
        assert torch.equal(QuantEmbedding(w, torch.bfloat16)(ids), QuantEmbedding(w, torch.float32)(ids).bfloat16())
        assert QuantEmbedding(w, torch.float32)(ids[:0]).shape == (0, 2, K)
        with pytest.raises(IndexError):
            QuantEmbedding(w, torch.float32)(torch.tensor([10]))
        assert repr(QuantEmbedding(w, torch.float32)) == f"QuantEmbedding(10, {K})"


def test_gq_12_a_packed_head_leaves_the_embedding_alone():
    """GQ-12, transformers #37905: of a tied 8 x 4 matrix the head is packed and the embedding looked up, from the same
    codes: neither changes the other."""
    w = random_weight(8, 4, 1, 8)
    before = {k: None if v is None else v.clone() for k, v in w.items() if k != "bits"}
    head, embedding = QuantLinear(w), QuantEmbedding(w, torch.float32)
    x, ids = torch.randn(3, 4), torch.arange(8)
    rows = embedding(ids)
    assert close(head(x), x, definition(w), torch.float32)
    assert torch.equal(embedding(ids), rows) and torch.allclose(rows.double(), definition(w), atol=1e-6)
    assert all(v is None or torch.equal(v, w[k]) for k, v in before.items())


# ------------------------------------------------------------------ memory, ends of the range, errors


def test_the_memory_really_falls():
    full = 192 * 576 * 2
    for bits, share in ((4, 0.33), (8, 0.66)):
        layer = QuantLinear(random_weight(192, 576, 18, bits))
        assert sum(b.nbytes for b in layer.buffers()) < share * full
        assert not any(b.dtype.is_floating_point and b.numel() >= 192 * 576 for b in layer.buffers())
    assert QuantLinear(random_weight(7, 576, 18, 4)).packed.nbytes == 7 * 288, "nibbles where there is no kernel, too"
    assert QuantEmbedding(random_weight(7, 576, 18, 4), torch.float32).packed.nbytes == 7 * 288


def test_rt_01_zero_groups():
    """RT-01, GPTQModel #1531: a group of zeros, stored with scale 0 or with scale 1 and codes 0, gives exact zeros."""
    for scale in (0.0, 1.0):
        w = random_weight(32, 128, 4, 4)
        w["codes"][5], w["scales"][5] = 0, scale
        w["codes"][6, :32], w["scales"][6, 0] = 0, scale
        x = torch.randn(3, 128).bfloat16()
        y = QuantLinear(w)(x)
        assert torch.equal(y[:, 5], torch.zeros(3).bfloat16()) and torch.isfinite(y).all()
        assert close(y, x, definition(w), torch.bfloat16)


def test_rt_04_scales_are_of_outputs():
    """RT-04, aimet #3184: [[1, 1], [100, 100]] per output channel is codes of 127 and exact, also when not square."""
    for K in (2, 32):
        w = {"codes": torch.full((16, K), 127, dtype=torch.int8), "scales": torch.full((16, 1), 1 / 127), "zeros": None,
             "mins": None, "g_idx": None, "bits": 8}
        w["scales"][8:] = 100 / 127
        y = QuantLinear(w)(torch.eye(K))
        assert torch.allclose(y, torch.tensor([1.0] * 8 + [100.0] * 8).expand(K, 16), rtol=2**-7)


def test_gq_20_codes_out_of_range():
    """GQ-20, auto-round #2273: a code of 16 in 4 bits would spill into its neighbour; it is refused."""
    w = random_weight(16, 32, 1, 4, "unsigned")
    w["codes"][3, 4] = 16
    with pytest.raises(ValueError, match="codes of 4 bits go from 0 to 15, not from 0 to 16"):
        QuantLinear(w)
    w = random_weight(16, 32, 1, 4)
    w["codes"][3, 4] = -9
    with pytest.raises(ValueError, match="from -8 to 7, not from -9 to 7"):
        QuantEmbedding(w, torch.float32)


@pytest.mark.parametrize(("change", "message"), [
    ({"codes": torch.zeros(4, 8)}, "uint8 or int8 of 2 to 8 bits, not torch.float32 of 4"),
    ({"bits": 9}, "of 9"), ({"bits": 1}, "of 1"),
    ({"scales": torch.ones(4)}, r"codes \(4, 8\) and scales \(4,\)"),
    ({"scales": torch.ones(5, 2)}, r"scales \(5, 2\)"),
    ({"scales": torch.ones(4, 3)}, "8 columns do not divide into 3 groups"),
    ({"scales": torch.ones(4, 0)}, "8 columns do not divide into 0 groups"),
    ({"zeros": torch.ones(4, 1).int()}, r"zeros \(4, 1\)"), ({"mins": torch.ones(2, 4)}, r"mins \(2, 4\)"),
    ({"g_idx": torch.zeros(7, dtype=torch.int32)}, "one of 2 groups for each of 8 columns"),
    ({"g_idx": torch.full((8,), 2)}, "one of 2 groups"), ({"g_idx": torch.full((8,), -1)}, "one of 2 groups"),
    ({"codes": torch.zeros(0, 8, dtype=torch.uint8), "scales": torch.ones(0, 1)}, r"\(0, 8\)"),
])
def test_parts_that_do_not_fit(change, message):
    w = random_weight(4, 8, 2, 4) | change
    with pytest.raises(ValueError, match=message):
        QuantLinear(w)
    for change in ({"scales": torch.ones(4, 2).long()}, {"scales": torch.full((4, 2), float("nan"))}, {"bits": "4"},
                   {"mins": torch.full((4, 2), float("inf"))}, {"zeros": torch.ones(4, 2)}, {"bits": 4.0}):
        with pytest.raises(ValueError, match=r"finite floating-point|whole numbers"):
            QuantEmbedding(random_weight(4, 8, 2, 4) | change, torch.float32)
    missing = random_weight(4, 8, 2, 4)
    del missing["zeros"]
    with pytest.raises(ValueError, match="keys codes, scales, zeros"):
        QuantLinear(missing)


def test_under_another_default_device():
    """Who has set torch's default device, here to meta, gets a layer where its weight is."""
    packed._int4_block.cache_clear()
    try:
        torch.set_default_device("meta")
        w = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in WEIGHT.items()}
        joined = QuantLinear.join([QuantLinear(w), QuantLinear(w)])
    finally:
        torch.set_default_device(None)
    x = torch.randn(2, 64)
    assert close(joined(x)[:, 64:], x, definition(WEIGHT), torch.bfloat16)


WEIGHT = random_weight(64, 64, 2, 4)


def test_what_a_gpu_has_a_kernel_for_is_known_beforehand(monkeypatch):
    """With triton: groups of a multiple of 16, whatever the rows are; never fp8, nor groups of unlike sizes."""
    monkeypatch.setattr(packed, "triton", None)
    assert not fast(random_weight(7, 48, 3, 4), "cuda")
    monkeypatch.setattr(packed, "triton", object())
    for (N, K, G), kernel in (((7, 48, 3), True), ((64, 64, 1), True), ((64, 40, 5), False), ((1, 16, 1), True)):
        assert fast(random_weight(N, K, G, 4), "cuda") == fast(random_weight(N, K, G, 8), "cuda:1") == kernel
    unlike = random_weight(8, 64, 2, 4) | {"g_idx": (torch.arange(64) > 20).int()}
    assert not fast(unlike, "cuda") and fast(random_weight(8, 64, 2, 4, act_order=True), "cuda")
    assert not fast(random_weight(8, 64, 2, 8) | {"codes": torch.zeros(8, 64).to(torch.float8_e4m3fn)}, "cuda")
    assert not fast(random_weight(7, 48, 3, 4), "cpu"), "seven rows are no block of the CPU's"


def test_nibbles():
    u = torch.randint(0, 16, (3, 5, 8), dtype=torch.uint8)
    assert torch.equal(packed.from_nibbles(packed.to_nibbles(u)), u)
    assert packed.to_nibbles(u).shape == (3, 5, 4)


def test_rt_02_a_group_far_from_zero():
    """RT-02, llm-awq #193: 20 to 27 in 4 bits: with a floating-point minimum the error is half a step of 7 / 15."""
    w = torch.arange(20.0, 28).repeat(4, 4)
    again, _ = packed.repack(w, 4)
    assert (definition(again) - w.double()).abs().max() <= 7 / 30 * (1 + 2**-7)


@pytest.mark.parametrize("constant", [0.7, -0.7, 5.0, 500.0, 0.0])
def test_rt_17_a_constant_group(constant):
    """RT-17, cs249r_book #1444: four times the same number, or 32 times, is that number, beside other groups too."""
    for group, w in ((4, torch.full((2, 4), constant)), (32, torch.randn(16, 96))):
        w[:, :group] = constant
        for bits in (4, 8):
            again = definition(packed.repack(w, bits, group)[0])
            assert torch.equal(again[:, :group].float(), w[:, :group]) and torch.isfinite(again).all()


def test_repack_is_round_to_nearest():
    """Even steps between a group's least and greatest weight, half a step off at most; the error that is stated is the
    error there is, and falls by 16 from 4 bits to 8."""
    w = torch.randn(32, 96)
    w[3, :32], w[4, 32:64] = 0.7, 0.0  # constant groups
    errors = {}
    for bits in (4, 8):
        again, errors[bits] = packed.repack(w, bits)
        W = definition(again)
        step = again["scales"].repeat_interleave(32, 1).double()
        assert ((W - w.double()).abs() <= 0.5001 * step + 1e-6).all() and torch.equal(W[3, :32].float(), w[3, :32])
        assert not W[4, 32:64].any()
        assert abs(errors[bits] - ((W - w.double()).norm() / w.double().norm()).item()) < 1e-4
        assert fast(again) == CPU_KERNEL and QuantLinear(again).bits == bits
    assert 12 < errors[4] / errors[8] < 20
