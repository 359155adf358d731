"""quantize.py against definitions written out in plain Python and references in float64."""
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import layouts
import packed
import quantize
from quantize import (
    Factor,
    Int8Linear,
    NF4Linear,
    awq_clip,
    awq_scales,
    dequantize,
    factorize,
    fp8,
    gptq,
    method,
    nf4,
    nf4_dequantize,
    output_error,
    rtn,
    smooth_scales,
)

pytestmark = pytest.mark.usefixtures("one_thread")
F64, F16 = torch.float64, torch.float16


def randn(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def correlated(rows, K, seed=0, dtype=F64):
    """Inputs in which every column goes along with all others."""
    return (randn(rows, K, seed=seed) @ (torch.eye(K, dtype=F64) + 0.8 * torch.ones(K, K, dtype=F64))).to(dtype)


def hessian(x):
    return x.t() @ x / len(x)


# ------------------------------------------------------------------ rounding to nearest


def by_definition(w, bits, size, sym, dtype):
    """The docstring's rules, one group at a time: lists of codes, scales, zeros, and of each column's group."""
    def stored(x):
        return torch.tensor(x, dtype=F64).to(dtype).double().item()

    N, K = w.shape
    size = K if size in (-1, 0) else size
    spans = [(i, min(i + size, K)) for i in range(0, K, size)]
    codes, scales, zeros = [], [], []
    for n in range(N):
        codes.append([])
        scales.append([])
        zeros.append([])
        for a, b in spans:
            group = w[n, a:b].tolist()
            if sym:
                top = 127 if bits == 8 else 2 ** (bits - 1) - 0.5
                low, high = (-127, 127) if bits == 8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
                s, z = stored(max(map(abs, group)) / top) or 1.0, 0
            else:
                low, high = 0, 2**bits - 1
                s = stored((max(0.0, *group) - min(0.0, *group)) / high) or 1.0
                z = min(max(round(-min(0.0, *group) / s), low), high)
            codes[-1] += [min(max(round(x / s) + z, low), high) for x in group]
            scales[-1].append(s)
            zeros[-1].append(z)
    return codes, scales, zeros, [g for g, (a, b) in enumerate(spans) for _ in range(a, b)]


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rtn_is_its_definition(bits, sym, dtype):
    for size in (-1, 1, 3, 4, 5, 7, 12, 100):
        w = randn(5, 12, seed=size + 9)
        w[0] = 0
        w[1, :4] = 0
        w[2] = w[2].abs() + 20
        w[3] = -w[3].abs()
        w[4, :] = 0.7
        got = rtn(w, bits, size, sym, dtype)
        codes, scales, zeros, groups = by_definition(w, bits, size, sym, dtype)
        assert got["codes"].tolist() == codes and got["scales"].tolist() == scales
        assert got["scales"].dtype == dtype and got["bits"] == bits
        assert (got["zeros"] is None) if sym else (got["zeros"].tolist() == zeros)
        assert groups == (got["g_idx"].tolist() if got["g_idx"] is not None
                          else [k * len(scales[0]) // 12 for k in range(12)])
        packed.check_weight(got)
        torch.testing.assert_close(dequantize(got), layouts.dequantize(got))


def test_one_scale_for_a_matrix():
    w = randn(6, 10)
    got = rtn(w, 4, 0)
    assert got["scales"].shape == (6, 1) and (got["scales"] == got["scales"][0]).all()
    whole = rtn(w.reshape(1, -1), 4)
    assert torch.equal(whole["codes"].view(6, 10), got["codes"]) and whole["scales"][0, 0] == got["scales"][3, 0]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_greatest_error_is_half_a_step(bits):
    for sym in (True, False):
        w = randn(16, 64)
        got = rtn(w, bits, 16, sym, F64)
        steps = (dequantize(got, F64) - w).abs().unflatten(1, (-1, 16)) / got["scales"][..., None]
        assert steps.max() <= (0.5 if sym else 1.0) + 1e-9  # asymmetric: the zero point is rounded too


def test_repack_and_rtn_tell_the_same_of_one_grid():
    """packed.repack has a float minimum and a scale that is never too short, so it may differ, but by no more than a
    step and no worse."""
    w = randn(32, 64, dtype=torch.float32)
    again, error = packed.repack(w, 4)
    assert error < output_error(w, dequantize(rtn(w, 4, 32, False))) * 1.02
    off = layouts.dequantize(again) - dequantize(rtn(w, 4, 32, False))
    assert off.abs().max() <= 1.5 * float(again["scales"].max())


def test_all_zero_groups_in_every_form():
    """RT-01, GPTQModel #1531, auto-round #1909: 0/0. Zeros alone and a zero group among others, in each form."""
    for w in (torch.zeros(1, 128), torch.cat((torch.zeros(1, 128), randn(1, 128, dtype=torch.float32)))):
        for got in (rtn(w, 4, 64), rtn(w, 4, 64, False), rtn(w, 8), fp8(w), gptq(w, torch.eye(128), 4, 64)):
            assert (got["scales"][0] == 1).all() and (got["codes"][0].float() == 0).all()
            assert (dequantize(got)[0] == 0).all() and dequantize(got).isfinite().all()
        assert (nf4_dequantize(**nf4(w))[0] == 0).all()
        assert (awq_clip(w, torch.eye(128), 4, 64)[0] == 0).all()
    x = randn(3, 128, dtype=torch.float32) * torch.tensor([0.0, 1, 1])[:, None]
    assert (Int8Linear(rtn(w, 8))(x)[0] == 0).all() and (Int8Linear(rtn(w, 8))(x)[:, 0] == 0).all()


def test_all_positive_and_constant_groups():
    """RT-02, llm-awq #193: 20 to 27 have the zero point 0; RT-17, cs249r_book #1444: equal numbers are themselves."""
    got = rtn(torch.arange(20.0, 28)[None], 4, -1, False)
    assert got["codes"].tolist() == [[11, 12, 12, 13, 13, 14, 14, 15]] and got["zeros"].item() == 0
    assert got["scales"].item() == pytest.approx(1.8)
    for constant in (0.7, -0.7, 5.0, 500.0):
        w = torch.full((1, 4), constant)
        torch.testing.assert_close(dequantize(rtn(w, 4, -1, False)), w)


def test_rows_and_columns_are_not_mixed_up():
    """RT-04, aimet #3184, and RT-18, pytorch/ao #805: one scale for each output, of a matrix that is not square."""
    got = rtn(torch.tensor([[1.0, 1, 1], [100, 100, 100]]), 8)
    assert got["scales"].shape == (2, 1) and got["codes"].tolist() == [[127] * 3] * 2
    assert fp8(torch.ones(2, 5))["scales"].shape == (2, 1)
    got = dequantize(rtn(torch.tensor([[-1, -0.5, 0.5, 1]]), 4))
    torch.testing.assert_close(got, torch.tensor([[-0.9333, -0.5333, 0.5333, 0.9333]]), atol=1e-4, rtol=0)


def test_fp8_saturates():
    """RT-08, ml_dtypes #260, pytorch #178817: nothing becomes NaN, whatever the scale is rounded to; infinite weights
    are refused."""
    w = torch.tensor([[447.0, 448, 449, 464, 465, 1000, -1000]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = fp8(w, dtype)
        assert got["codes"].float().isfinite().all() and got["codes"].float().abs().max() == 448
        packed.check_weight(got)
    for bad in (math.inf, math.nan):
        with pytest.raises(ValueError, match="finite"):
            fp8(torch.tensor([[1.0, bad]]))


@pytest.mark.parametrize("call, message", [
    (lambda: rtn(torch.ones(2, 4), 9), "from 2 to 8"),
    (lambda: rtn(torch.ones(2, 4), 4, -2), "group_size"),
    (lambda: rtn(torch.ones(2, 4), 4, 2.0), "group_size"),
    (lambda: rtn(torch.ones(4), 4), "matrix"),
    (lambda: rtn(torch.ones(0, 4), 4), "at least one"),
    (lambda: rtn(torch.ones(2, 4, dtype=torch.int8), 4), "floating-point"),
    (lambda: rtn(torch.tensor([[math.nan, 1]]), 4), "finite"),
    (lambda: rtn(torch.tensor([[math.inf, 1]]), 4, -1, False), "finite"),
    (lambda: rtn(torch.full((1, 2), 1e6), 4, scale_dtype=torch.float16), "float16"),
    (lambda: gptq(torch.ones(2, 4), torch.eye(4), 4, 0), "-1"),
    (lambda: gptq(torch.ones(2, 4), torch.eye(5), 4), "factor"),
    (lambda: factorize(torch.eye(3), damp=-1), "damp"),
    (lambda: Int8Linear(rtn(torch.ones(2, 4), 4, 2)), "Int8Linear"),
    (lambda: nf4(torch.tensor([math.inf])), "finite"),
    (lambda: method("magic"), "known are rtn, gptq"),
    (lambda: method("gptq", chop=True), "no option 'chop'; it has act_order, clip, damp, block"),
    (lambda: method("rtn", alpha=1), "it has none"),
    (lambda: method("awq", 1), "2 to 8"),
    (lambda: method("gptq", 4, 0), "-1"),
    (lambda: method("gptq", damp=-1), "damp"),
    (lambda: method("gptq", block=0), "block"),
])
def test_mistakes_are_one_clear_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ------------------------------------------------------------------ GPTQ


def naive(w, H, bits, size, sym, damp=0.01, carried=None):
    """GPTQ as the derivation has it: round a column, solve anew for the move of those that are left. carried: blocks
    behind whose ends nothing arrives, the fault of GQ-01. Scales are rounded to float16, since an exact symmetric scale
    puts the greatest weight of a group on a tie, which the last bit of either algorithm would decide."""
    w, H = w.clone(), H.clone()
    K = len(H)
    H += damp * H.diagonal().mean() * torch.eye(K, dtype=H.dtype)
    codes = torch.empty_like(w)
    for i in range(K):
        if i % size == 0:
            scales, zeros = quantize.choose_grid(w[:, i:i + size], bits, sym, F16)
        codes[:, i] = quantize.to_codes(w[:, i], scales, zeros, bits)
        value = (codes[:, i] - (0 if zeros is None else zeros)) * scales.double()
        inverse = torch.linalg.inv(H[i:, i:])
        move = torch.outer((w[:, i] - value) / inverse[0, 0], inverse[0])
        end = K if carried is None else (i // carried + 1) * carried
        w[:, i:end] -= move[:, :end - i]
    return codes


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_is_the_naive_algorithm(bits, sym):
    for K, size in ((1, 1), (12, 4), (12, 12), (13, 5), (40, 8), (130, 130), (130, 64)):
        w, x = randn(3, K, seed=K), correlated(4 * K, K, seed=1)
        H = hessian(x)
        got = gptq(w, H, bits, size, sym, scale_dtype=F16)
        assert torch.equal(got["codes"].double(), naive(w, H, bits, size, sym))


def case_01():
    w, x = randn(3, 12), correlated(40, 12, seed=1)
    return w, x.t() @ x / 40


@pytest.mark.parametrize("block", [1, 2, 3, 4, 5, 7, 12, 128])
def test_the_error_is_carried_past_the_block(block):
    """GQ-01, FP-Quant #7: the error of a block never reached the columns behind it. A block is only another order of
    the same sums; the sabotaged twin shows that the case would tell."""
    w, H = case_01()
    assert torch.equal(gptq(w, H, 4, 4, block=block, scale_dtype=F16)["codes"].double(), naive(w, H, 4, 4, True))
    if block < 8:
        assert not torch.equal(naive(w, H, 4, 4, True, carried=block), naive(w, H, 4, 4, True))


def test_groups_are_counted_from_the_first_column():
    """GQ-02, sparseml #2290, keras #23512: the group was counted from the start of a block, or forgotten at its end."""
    w, H = case_01()
    for block in (5, 6, 8):
        assert torch.equal(gptq(w, H, 4, 4, block=block)["codes"], gptq(w, H, 4, 4, block=12)["codes"])
    w, H = randn(3, 256), hessian(correlated(300, 256))
    whole, cut = (gptq(w, H, 4, -1, block=block, scale_dtype=F16) for block in (256, 128))
    assert cut["scales"].shape == (3, 1) and torch.equal(whole["codes"], cut["codes"])
    assert torch.equal(cut["scales"], rtn(w, 4, scale_dtype=F16)["scales"])


def test_a_singular_hessian():
    """GQ-09, llm-compressor #142, #1019, neural-compressor #1965: damping 0 is an error with the layer's name, 0.01
    succeeds, and damping that had to be raised is reported."""
    H = 2 * torch.ones(8, 8, dtype=F64)
    with pytest.raises(ValueError, match=r"layers\.3\.up.*singular"):
        factorize(H, damp=0, name="layers.3.up")
    factor = factorize(H, 0.01)
    assert 1 / factor.upper.diagonal().max() == pytest.approx(0.15117, abs=1e-5) and factor.damp == 0.01
    bad = torch.eye(4, dtype=F64)
    bad[0, 1] = bad[1, 0] = 1.05  # not positive definite: 1 + 0.01 is not enough, 1 + 0.1 is
    assert factorize(bad, 0.01).damp == pytest.approx(0.1)
    with pytest.raises(ValueError, match="singular"):
        factorize(bad * torch.tensor([1, -1e9, 1, 1], dtype=F64)[:, None], 0.01)


def test_the_factor_is_that_of_the_inverse():
    H = hessian(correlated(60, 20))
    factor = factorize(H, 0.01)
    damped = H + 0.01 * H.diagonal().mean() * torch.eye(20, dtype=F64)
    torch.testing.assert_close(factor.upper.t() @ factor.upper, torch.linalg.inv(damped), atol=1e-10, rtol=1e-8)
    assert torch.equal(factor.upper, factor.upper.triu())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_hessian_that_is_not_finite(bad):
    """GQ-10, llm-compressor #2952: every damping was tried in vain; calibrate.py refuses such inputs before that."""
    with pytest.raises(ValueError, match=r"mlp\.up: H is not finite"):
        factorize(torch.tensor([[1.0, bad], [bad, 1.0]]), name="mlp.up")


def test_dead_columns():
    """GQ-11, TICO #412, AutoGPTQ #772: the weights of an input that was always 0 were wiped out."""
    w, x = randn(4, 8), correlated(20, 8)
    w[:, 3] /= 8  # so that the one group's scale is the same with and without it
    x[:, 3] = 0
    live = [0, 1, 2, 4, 5, 6, 7]
    got = gptq(w, hessian(x), 4, scale_dtype=F16)["codes"]
    without = gptq(w[:, live], hessian(x[:, live]), 4, scale_dtype=F16)["codes"]
    plain = rtn(w, 4, scale_dtype=F16)["codes"]
    assert torch.equal(got[:, live], without) and torch.equal(got[:, 3], plain[:, 3])
    assert got[:, 3].any() and not torch.equal(got, plain)
    for act_order in (False, True):
        assert torch.equal(gptq(w, torch.zeros(8, 8, dtype=F64), 4, 4, act_order=act_order, scale_dtype=F16)["codes"],
                           rtn(w, 4, 4, scale_dtype=F16)["codes"])


def test_direction_and_sign_of_the_error():
    """GQ-13, IST-DASLab/gptq, FP-Quant #7: by hand. 7.5 in a third column, which has nothing to do with the two, makes
    the scale 1: then 0.4 becomes 0, and the second 0.4 is moved to 0.4 + 0.4 * 0.9 / 1.01 = 0.756 and becomes 1."""
    w = torch.tensor([[0.4, 0.4, 7.5]], dtype=F64)
    H = torch.tensor([[1, 0.9, 0], [0.9, 1, 0], [0, 0, 1]], dtype=F64)
    assert gptq(w, H, 4)["codes"].tolist() == [[0, 1, 7]] and rtn(w, 4)["codes"].tolist() == [[0, 0, 7]]
    factor = factorize(H, 0.01)
    assert 0.4 - 0.4 * factor.upper[0, 1] / factor.upper[0, 0] == pytest.approx(0.756436, abs=1e-6)
    pair = H[:2, :2]
    for q, error in (((0, 0), 0.608), ((0, 1), 0.088)):
        d = w[0, :2] - torch.tensor(q, dtype=F64)
        assert float(d @ pair @ d) == pytest.approx(error)


def test_two_columns_are_never_worse_than_plain_rounding():
    """GQ-13, the same in general: with two columns and one fixed grid the second makes up for the first or stays."""
    for seed in range(200):
        w = torch.cat((randn(1, 2, seed=seed), torch.full((1, 1), 7.5, dtype=F64)), 1)
        r = math.tanh(float(randn(1, seed=seed + 1000)))
        H = torch.tensor([[1, r, 0], [r, 1, 0], [0, 0, 1]], dtype=F64)
        assert output_error(w, dequantize(gptq(w, H, 4, damp=1e-9), F64), H) <= \
            output_error(w, dequantize(rtn(w, 4), F64), H) + 1e-12


@pytest.mark.parametrize("N", [1, 2])
def test_what_was_passed_in_is_not_changed(N):
    w, H = randn(N, 6), hessian(correlated(20, 6))
    was = w.clone(), H.clone()
    for call in (lambda: gptq(w, H, 3), lambda: gptq(w, H, 3, act_order=True), lambda: rtn(w, 3, 4, False),
                 lambda: fp8(w), lambda: awq_clip(w, H, 3, 3), lambda: nf4(w), lambda: awq_scales(w, H, H[0].abs(), 3)):
        call()
        assert torch.equal(w, was[0]) and torch.equal(H, was[1])


def test_a_diagonal_of_zero():
    """GQ-18, keras #23413, #23492: an entry of 0 in the factor is an error, not a division that makes codes of inf."""
    upper = torch.eye(4)
    upper[2, 2] = 0
    with pytest.raises(ValueError, match="diagonal"):
        gptq(torch.ones(4, 4), Factor(upper, None, 0.01), 4)
    got = gptq(torch.ones(4, 4), 1e-38 * torch.eye(4), 4)  # tiny is not 0: only ratios matter
    assert torch.equal(got["codes"], rtn(torch.ones(4, 4), 4)["codes"])


@pytest.mark.parametrize("sym", [True, False])
def test_act_order_has_the_plain_layout(sym):
    w, H = randn(8, 48), hessian(correlated(100, 48) * torch.linspace(0.1, 3, 48, dtype=F64))
    got = gptq(w, H, 4, 16, sym, act_order=True, scale_dtype=F16)
    assert got["g_idx"] is None and torch.equal(got["scales"], rtn(w, 4, 16, sym, F16)["scales"])
    # the same as the naive algorithm on permuted columns, one column a group so that groups do not matter
    order = torch.argsort(H.diagonal(), descending=True)
    fixed = gptq(w, H, 4, 1, sym, act_order=True, scale_dtype=F16)
    U = factorize(H[order][:, order]).upper
    moved = w[:, order].clone()
    for i, k in enumerate(order.tolist()):
        grid = quantize.choose_grid(w[:, k:k + 1], 4, sym, F16)
        code = quantize.to_codes(moved[:, i], *grid, 4)
        assert torch.equal(fixed["codes"][:, k].double(), code)
        value = (code - (0 if sym else grid[1])) * grid[0].double()
        moved[:, i:] -= torch.outer((moved[:, i] - value) / U[i, i], U[i, i:])


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_output_is_closer_than_with_rtn(bits):
    """Over inputs that calibration has not seen. The sabotaged twin, which moves columns the wrong way, is worse."""
    w, mix = randn(64, 96, dtype=torch.float32), randn(24, 96, seed=1)
    new, seen = (((randn(2000, 24, seed=s) @ mix) + 0.3 * randn(2000, 96, seed=s + 9)).float() for s in (2, 3))
    H, unseen = hessian(seen), hessian(new)
    args = {"bits": bits, "group_size": 32}
    error = {name: output_error(w, dequantize(q), unseen) for name, q in (
        ("rtn", rtn(w, **args)), ("gptq", gptq(w, H, **args)), ("act", gptq(w, H, **args, act_order=True)))}
    assert error["gptq"] < 0.75 * error["rtn"] and error["act"] < 0.75 * error["rtn"]
    factor = factorize(H)
    wrong = 2 * torch.diag(factor.upper.diagonal()) - factor.upper
    assert output_error(w, dequantize(gptq(w, Factor(wrong, None, 0.01), **args)), unseen) > error["rtn"]


@pytest.mark.parametrize("act_order", [True, False])
def test_ranges_chosen_beforehand(act_order):
    """Scales are those of the ranges, codes are clamped to them, and clipped ranges help heavy-tailed weights."""
    w, g = randn(48, 64) ** 3, {"bits": 4, "group_size": 16, "act_order": act_order}
    x = randn(500, 64, seed=1)
    H = hessian(x + 0.2 * x.roll(1, 1))
    clipped = awq_clip(w, H, 4, 16)
    made = gptq(w, H, **g, ranges=clipped)
    assert torch.equal(made["scales"], rtn(clipped, 4, 16)["scales"]) and made["codes"].abs().max() <= 8
    if act_order:  # whose scales come from the weights themselves, if nothing else is said
        assert torch.equal(gptq(w, H, **g, ranges=w)["codes"], gptq(w, H, **g)["codes"])
    factors = method("gptq", 4, 16, act_order=act_order, clip=True)
    [choice] = factors.choose(["x"], [w], type("Inputs", (), {"H": H}))
    assert torch.equal(choice.weight["codes"], made["codes"])
    assert output_error(w, dequantize(made, F64), H) < output_error(w, dequantize(gptq(w, H, **g), F64), H)


def test_a_short_last_group():
    """GQ-19, GPTQModel #328, compressed-tensors #447: 192 columns in groups of 128, 288 in 256; the last scale comes
    from the real columns."""
    for K, size, rest in ((192, 128, 64), (288, 256, 32)):
        w, H = randn(8, K), hessian(correlated(2 * K, K))
        for got in (rtn(w, 4, size, scale_dtype=F16), gptq(w, H, 4, size, act_order=True, scale_dtype=F16)):
            assert got["scales"].shape == (8, 2) and int((got["g_idx"] == 1).sum()) == rest
            assert torch.equal(got["scales"][:, 1], (w[:, -rest:].abs().amax(1) / 7.5).to(F16))
            packed.check_weight(got)
        assert torch.equal(gptq(w, H, 4, size, scale_dtype=F16)["codes"].double(), naive(w, H, 4, size, True))


# ------------------------------------------------------------------ AWQ


def outliers(K=64, N=48, seed=0):
    """A weight, and inputs of which a few are large, as in language models."""
    x = randn(600, K, seed=seed + 1, dtype=torch.float32)
    x[:, ::16] *= 10
    return randn(N, K, seed=seed, dtype=torch.float32), x


def test_awq_is_closer_than_rtn():
    w, x = outliers()
    s, ratio = awq_scales(w, hessian(x), x.abs().mean(0), 3, 32)
    _, new = outliers(seed=5)
    H = hessian(new)
    error = output_error(w, dequantize(rtn(w * s, 3, 32)) / s, H)
    plain = output_error(w, dequantize(rtn(w, 3, 32)), H)
    wrong = output_error(w, dequantize(rtn(w / s, 3, 32)) * s, H)
    assert ratio > 0 and error < 0.9 * plain < plain < wrong


def test_candidates_do_not_add_up(monkeypatch):
    """AW-07, AutoAWQ #484: weights were not restored between candidates. Ratio 0 is plain rounding, the best is no
    worse, the weight is untouched, and each candidate is tried on the original weight."""
    w, x = outliers()
    before, H, mean, tried = w.clone(), hessian(x), x.abs().mean(0), []
    real = quantize.output_error
    monkeypatch.setattr(quantize, "output_error", lambda *a: tried.append(real(*a)) or tried[-1])
    s, ratio = awq_scales(w, H, mean, 3, 32, ratios=20)
    assert torch.equal(w, before) and len(tried) == 20
    assert tried[0] == pytest.approx(real(w, dequantize(rtn(w, 3, 32)), H), rel=1e-6)
    assert min(tried) == tried[round(ratio * 20)] <= tried[0]
    for i in (19, 7, 13):  # in any other order, each by itself
        again = mean.pow(i / 20)
        again = again / (again.max() * again.min()).sqrt()
        assert real(w, dequantize(rtn(w * again, 3, 32)) / again, H) == pytest.approx(tried[i], rel=1e-5)


def test_inputs_that_are_always_zero():
    """AW-08, llm-awq #96, GPTQModel #2332: a mean of 0 gave scales of NaN and infinity."""
    H, mean = torch.tensor([[0.0, 0.0], [0.0, 1.0]]), torch.tensor([0.0, 1.0])
    found = []
    original = quantize.rtn
    w = torch.tensor([[1.0, 0.4]])
    quantize.rtn = lambda scaled, *a: found.append(scaled / w) or original(scaled, *a)
    try:
        s, _ = awq_scales(w, H, mean, 4, ratios=2)
    finally:
        quantize.rtn = original
    torch.testing.assert_close(found[1], torch.tensor([[0.01, 100.0]]))  # ratio 0.5
    assert s.isfinite().all() and (s > 0).all()
    s, ratio = awq_scales(randn(4, 8, dtype=torch.float32), torch.zeros(8, 8), torch.zeros(8), 4)
    assert torch.equal(s, torch.ones(8)) and ratio == 0


@pytest.mark.parametrize("sym", [True, False])
def test_clipping(sym):
    """AW-10, AutoAWQ #531, TesseraQ #3: never worse than no clipping, down to the documented share, and that share is
    found by trying each by itself."""
    w, x = outliers()
    w[torch.rand(w.shape, generator=torch.Generator().manual_seed(3)) < 0.02] *= 5
    H, size = hessian(x), 16
    clipped = awq_clip(w, H, 3, size, sym)
    for g in range(0, 64, size):
        block, part = H[g:g + size, g:g + size], w[:, g:g + size]
        best = torch.full((48,), math.inf)
        for share in [1 - 0.05 * i for i in range(11)]:
            limit = part.abs().amax(1, keepdim=True) * share
            off = dequantize(rtn(part.clamp(-limit, limit), 3, -1, sym)) - part
            best = torch.minimum(best, (off @ block * off).sum(1))
        off = dequantize(rtn(clipped[:, g:g + size], 3, -1, sym)) - part
        torch.testing.assert_close((off @ block * off).sum(1), best, rtol=1e-3, atol=1e-5)
    share = clipped.unflatten(1, (-1, size)).abs().amax(-1) / w.unflatten(1, (-1, size)).abs().amax(-1)
    assert share.min() >= 0.5 - 1e-6 and share.max() == 1 and (share < 1).any()
    plain, after = (output_error(w, dequantize(rtn(v, 3, size, sym)), H) for v in (w, clipped))
    assert after < plain


# ------------------------------------------------------------------ SmoothQuant, NF4


def test_smooth_scales_with_zeros():
    """RT-16, neural-compressor #1427, sparseml #1872: 1 where the inputs or the weights of a column are zero."""
    s = smooth_scales(torch.tensor([0.0, 4, 4, 0]), torch.tensor([0.0, 1, 0, 1]), 0.5)
    assert s.tolist() == [1, 2, 1, 1]


def test_int8_linear():
    """RT-09, triton #3566: sums do not wrap; against float64 on the same rounded numbers."""
    w, x = randn(40, 96, dtype=torch.float32), randn(2, 5, 96, seed=1, dtype=torch.float32)
    bias = randn(40, seed=2, dtype=torch.float32)
    layer = Int8Linear(rtn(w, 8), bias)
    scales = x.abs().amax(-1, keepdim=True) / 127
    rounded = (x / scales).round().double() * scales.double()
    torch.testing.assert_close(layer(x).double(), rounded @ dequantize(rtn(w, 8), F64).t() + bias, rtol=1e-5, atol=1e-5)
    big = Int8Linear({**rtn(torch.ones(1, 2), 8), "scales": torch.full((1, 1), 1.0)})
    assert big(torch.tensor([[127.0, 127.0]])).item() == 2 * 127 * 127
    assert layer(x.bfloat16()).dtype == torch.bfloat16 and layer(x[:, :0]).shape == (2, 0, 40)
    broken = x.clone()
    broken[0, 0, 0] = math.nan
    assert layer(broken)[0, 0].isnan().all() and torch.equal(layer(broken)[1], layer(x)[1])


def test_nf4_blocks():
    """RT-12, bitsandbytes #565, #1160, #1721: the error grows smoothly with the block; a stale nibble is a jump."""
    torch.manual_seed(0)
    w = torch.randn(65536)
    for power, expected in zip(range(6, 13), (0.0919, 0.0955, 0.0987, 0.1017, 0.1048, 0.1079, 0.1109)):
        off = nf4_dequantize(**nf4(w, 2**power)) - w
        assert float(off.square().mean().sqrt()) == pytest.approx(expected, abs=6e-5)


def test_nf4_ends():
    """RT-13, bitsandbytes #1884: the last block's absmax is of its own entries, and an odd count loses none."""
    w = torch.cat((torch.ones(128), torch.full((22,), 0.001)))
    got = nf4(w)
    assert got["absmax"].tolist() == pytest.approx([1, 1, 0.001]) and len(got["packed"]) == 75
    torch.testing.assert_close(nf4_dequantize(**got), w)
    got = nf4(torch.cat((w, torch.full((1,), 0.001))))
    assert len(got["packed"]) == 76 and nf4_dequantize(**got).shape == (151,)
    assert nf4_dequantize(**got)[-1] == pytest.approx(0.001)


def test_nf4_takes_the_nearest():
    table = torch.tensor(quantize.nf4_table())
    assert len(table) == 16 and table[0] == -1 and table[7] == 0 and table[15] == 1 and (table.diff() > 0).all()
    published = torch.tensor([-1.0, -0.6961928, -0.5250731, 0.5626170, 0.7229568])
    torch.testing.assert_close(table[[0, 1, 2, 13, 14]], published, atol=1e-4, rtol=0)
    w = randn(3, 50, dtype=torch.float32)
    got = nf4_dequantize(**nf4(w, 150))
    unit = w / w.abs().max()
    torch.testing.assert_close(got / w.abs().max(), table[(unit[..., None] - table).abs().argmin(-1)])
    layer, x = NF4Linear(nf4(w), torch.ones(3)), randn(4, 50, seed=1, dtype=torch.float32)
    torch.testing.assert_close(layer(x), x @ nf4_dequantize(**nf4(w)).t() + 1)


# ------------------------------------------------------------------ methods as data


class Inputs:
    def __init__(self, x):
        self.H, self.mean_abs, self.max_abs = hessian(x), x.abs().mean(0), x.abs().amax(0)


@pytest.mark.parametrize("sym", [True, False])
def test_matrices_that_share_their_inputs(sym):
    """Together and one by one gptq chooses the same codes, and every method gives one choice for each."""
    ws, inputs = [randn(n, 32, seed=n) for n in (5, 1, 3)], Inputs(correlated(80, 32))
    for choice, w in zip(method("gptq", 3, 8, sym, scale_dtype=F16).choose(["q", "k", "v"], ws, inputs), ws):
        alone = gptq(w, inputs.H, 3, 8, sym, scale_dtype=F16)
        assert torch.equal(choice.weight["codes"], alone["codes"]) and torch.equal(choice.dense, dequantize(alone, F64))
        assert choice.damp == 0.01
        packed.check_weight(choice.weight)
        base = choice.weight["codes"].untyped_storage().nbytes()
        assert base == choice.weight["codes"].numel(), "a slice would keep the others' memory"
    for name in quantize.OPTIONS:
        how = method(name, 4, 8, sym)
        made = how.choose(["q", "k", "v"], ws, inputs if how.calibrated else None)
        assert [m.dense.shape for m in made] == [w.shape for w in ws] and all(m.dense.dtype == F64 for m in made)
        assert all(output_error(w, m.dense) < 0.2 for w, m in zip(ws, made)) or name == "gptq"


def test_q_and_k_are_not_clipped():
    """AW-10, AutoAWQ #531: the product of q and k is what counts there, and the method leaves them out."""
    w, x = outliers()
    names = ["a.q_proj", "a.k_proj", "a.v_proj"]
    q, k, v = method("awq", 3, 16).choose(names, [w, w, w], Inputs(x))
    plain = rtn(w, 3, 16)["codes"]
    assert torch.equal(q.weight["codes"], plain) and torch.equal(k.weight["codes"], plain)
    assert not torch.equal(v.weight["codes"], plain)
    for choice in method("awq", 3, 16, clip=False).choose(names, [w, w, w], Inputs(x)):
        assert torch.equal(choice.weight["codes"], plain)
