"""quantize.py - choosing the codes of a weight: RTN, GPTQ, AWQ, SmoothQuant, FP8 and NF4.

    weight = rtn(w, bits=4, group_size=64)            a float matrix to integer codes and scales
    weight = gptq(w, H, bits=4, group_size=64)        the same form, codes chosen for the inputs that the matrix meets
    how    = method("gptq", bits=4, group_size=64)    the same as data, for calibrate.quantize_ and a whole model

The one idea: what has to stay the same is not the weight but the layer's output. Over inputs x the squared error of the
output is a quadratic form of the weight's error, row by row,

    sum |x (w - q)^T|^2  =  tokens * (w - q) H (w - q)^T,        H = x^T x / tokens   (K, K)

and every method is a way of making it small with the same few codes:

    RTN          takes each weight's nearest code, as if H were the identity
    GPTQ         rounds column by column, and moves the columns still to come so that they make up for each rounding
    AWQ          multiplies the columns of the larger inputs, which the layer before divides, so that those are rounded
                 finer; then clips the range of a group where that lowers the error
    SmoothQuant  the same scaling, but to make the *inputs* easy to round: weights and activations in 8 bits

What it buys: a weight of 4 or 8 bits is read faster, and one token at a time reading is what costs (packed.py).
SmoothQuant also multiplies in integers, which speeds prompts where the machine has such instructions. FP8 and NF4 save
memory only: they are expanded before each product here.

A packed weight is packed.py's dict: codes (N, K), scales (N, G), zeros (N, G) or None, mins None, g_idx (K,) or None,
bits, and W[n, k] = scales[n, g(k)] * (codes[n, k] - zeros[n, g(k)]). The rules are the same in every method:

    symmetric   codes -2^(b-1) .. 2^(b-1) - 1 with scale absmax / (2^(b-1) - 1/2), for 4 bits absmax / 7.5; 8 bits are
                -127 .. 127 with absmax / 127. Asymmetric: codes 0 .. 2^b - 1 over a range that always includes 0
    rounding    ties to even; a scale is rounded to `scale_dtype` before codes are computed
    zeros       a group of nothing but zeros has scale 1 and codes 0
    group_size  -1 is one scale a row, 0 one for the matrix (rtn only). A short last group is named by g_idx

Papers: GPTQ, Frantar et al. 2022 (arXiv 2210.17323); AWQ, Lin et al. 2023 (2306.00978); SmoothQuant, Xiao et al. 2022
(2211.10438); FP8, Micikevicius et al. 2022 (2209.05433); NF4, Dettmers et al. 2023 (2305.14314).
Left out on purpose: where H comes from (calibrate.py), files (layouts.py), computing on 4 bits (packed.py), rotations,
and whatever learns by gradients.
Shapes: N out_features, K in_features, G groups of a row, g(k) the group of column k, "*" any leading dimensions.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

# ------------------------------------------------------------------ a grid, and the nearest point on it


def code_range(bits: int, sym: bool) -> tuple[int, int]:
    """The least and the greatest code.

    >>> code_range(4, True), code_range(8, True), code_range(3, False)
    ((-8, 7), (-127, 127), (0, 7))
    """
    if type(bits) is not int or not 2 <= bits <= 8:
        raise ValueError(f"bits is {bits!r}, but must be a whole number from 2 to 8")
    if not sym:
        return 0, 2**bits - 1
    return (-127, 127) if bits == 8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def choose_grid(groups: Tensor, bits: int, sym: bool, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Groups of weights (*, g) -> scales (*) in scale_dtype and zeros (*) int32, None if symmetric.

    Half a step is left over at both ends of a symmetric range, so that the error of the greatest weight, whatever its
    sign, is that half step. The asymmetric range includes 0, since a zero point is a code.

    >>> choose_grid(torch.arange(20.0, 28), 4, False, torch.float32)
    (tensor(1.8000), tensor(0, dtype=torch.int32))
    """
    low, high = code_range(bits, sym)
    if sym:
        scales = groups.abs().amax(-1) / (127 if bits == 8 else high + 0.5)
    else:
        least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = (most - least) / high
    scales = scales.to(scale_dtype)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    if not scales.isfinite().all():
        raise ValueError(f"a weight of {float(groups.abs().max()):g} has no scale in {scale_dtype}: weights must be "
                         "finite, and their range fit the type of the scales (float32 or bfloat16 hold more)")
    return scales, None if sym else (-least / scales).round().clamp(0, high).int()


def to_codes(w: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> Tensor:
    """The codes nearest to w, still floating point; scales and zeros broadcast against w. Ties go to the even one.

    >>> to_codes(torch.tensor([0.5, 1.5, 2.5, -2.5, 7, 9]), torch.tensor(1.0), None, 4)
    tensor([ 0.,  2.,  2., -2.,  7.,  7.])
    """
    codes = (w / scales.to(w.dtype)).round_()
    return (codes if zeros is None else codes.add_(zeros)).clamp_(*code_range(bits, zeros is None))


def rtn(w: Tensor, bits: int, group_size: int = -1, sym: bool = True,
        scale_dtype: torch.dtype = torch.float32) -> dict:
    """Round to nearest: w (N, K) to a packed weight. The bar for all else, and of 8 bits nothing more is needed.

    >>> rtn(torch.tensor([[-1, -0.5, 0.5, 1]]), 4)["codes"]
    tensor([[-7, -4,  4,  7]], dtype=torch.int8)
    """
    w = _checked(w)
    size = _columns_in_group(w.shape[1], group_size)
    groups = F.pad(w, (0, -w.shape[1] % size)).unflatten(1, (-1, size))  # (N, G, size); zeros widen no range
    scales, zeros = choose_grid(groups if group_size else groups.reshape(1, 1, -1), bits, sym, scale_dtype)
    codes = to_codes(groups, scales[..., None], None if zeros is None else zeros[..., None], bits)
    scales, zeros = (None if t is None else t.expand(groups.shape[:2]).contiguous() for t in (scales, zeros))
    return _as_packed(codes.flatten(1)[:, :w.shape[1]], scales, zeros, bits, size)


def _checked(w: Tensor) -> Tensor:
    if w.dim() != 2 or 0 in w.shape or not w.is_floating_point():
        raise ValueError(f"a weight is a floating-point matrix (N, K) with at least one entry, not {w.dtype} "
                         f"{tuple(w.shape)}")
    return w.detach() if w.dtype == torch.float64 else w.detach().float()


def _columns_in_group(K: int, group_size: int) -> int:
    if type(group_size) is not int or group_size < -1:
        raise ValueError(f"group_size is {group_size!r}, but must be -1 (a row), 0 (the matrix) or a number of columns")
    return K if group_size in (-1, 0) else min(K, group_size)


def _as_packed(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, size: int) -> dict:
    K = codes.shape[1]
    g_idx = torch.arange(K, device=codes.device) // size if K % size else None
    codes = codes.to(torch.int8 if zeros is None else torch.uint8).contiguous()
    return {"codes": codes, "scales": scales, "zeros": zeros, "mins": None, "g_idx": g_idx, "bits": bits}


def dequantize(weight: Mapping, dtype: torch.dtype = torch.float32) -> Tensor:
    """The (N, K) matrix that a packed weight stands for, computed in at least float32 and rounded to dtype once."""
    codes, scales, zeros, g_idx = (weight[k] for k in ("codes", "scales", "zeros", "g_idx"))
    K, wide = codes.shape[1], torch.float64 if dtype == torch.float64 else torch.float32
    if g_idx is None:
        g_idx = torch.arange(K, device=codes.device) // (K // scales.shape[1])
    w = codes.to(wide)
    if zeros is not None:
        w -= zeros.to(wide)[:, g_idx]
    return w.mul_(scales.to(wide)[:, g_idx]).to(dtype)


def output_error(w: Tensor, q: Tensor, H: Tensor | None = None) -> float:
    """|x (w - q)^T| / |x w^T| in Frobenius norms over the inputs that made H; H None: |w - q| / |w|.

    >>> w, q = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 3.0]])
    >>> output_error(w, q), output_error(w, q, torch.diag(torch.tensor([1.0, 0.0])))
    (0.2, 0.0)
    """
    def size(d: Tensor) -> float:
        return float((d * (d if H is None else d @ H)).sum(dtype=torch.float64).clamp(min=0))

    w, q = (t.float() if H is None else t.to(H.dtype) for t in (w, q))
    whole = size(w)
    return math.sqrt(size(w - q) / whole) if whole else 0.0


# ------------------------------------------------------------------ GPTQ


class Factor(NamedTuple):
    """What GPTQ needs of H, the same for all layers that share an input: see `factorize`."""
    upper: Tensor         # (K, K) upper triangular U with H^-1 = U^T U, columns in the order of their rounding
    order: Tensor | None  # (K,) the column that is rounded i-th; None is 0 .. K-1
    damp: float           # share of the mean diagonal that was added to make the Cholesky factorization work


def factorize(H: Tensor, damp: float = 0.01, act_order: bool = False, name: str = "this layer") -> Factor:
    """H (K, K) -> Factor. damp is added to the diagonal, as a share of its mean, and raised tenfold, up to three times,
    while H stays singular. An input that was always 0 (a zero on the diagonal) is left out of the mean and has nothing
    to do with the others: its weights are rounded plainly. act_order: the largest diagonal entries first.

    Row i of U is what GPTQ needs at step i: U[i, i] is the spread that column i keeps when all later ones are free to
    move, and -U[i, j] / U[i, i] the move of a later column j that best makes up for an error of one in column i.
    Raises ValueError if H is not finite, or singular with every damping that was tried (damp 0 tries only that).
    """
    if not H.isfinite().all():
        raise ValueError(f"{name}: H is not finite, which no damping can repair; look for NaN in the activations")
    if not 0 <= damp < math.inf:
        raise ValueError(f"damp is {damp}, but must be a number from 0 on (0.01 is usual)")
    diagonal = H.diagonal()
    dead = diagonal == 0
    mean = float(diagonal[~dead].mean()) if not dead.all() else 1.0
    order = torch.argsort(diagonal, descending=True, stable=True) if act_order else None
    H = H + torch.diag_embed(torch.where(dead, mean, 0.0).to(H.dtype))
    H = H if order is None else H[order][:, order]
    identity = torch.eye(len(H), dtype=H.dtype, device=H.device)
    for power in range(4 if damp else 1):
        used = damp * 10**power
        # subtle: the factorization from the last row to the first, H = R R^T with R upper, gives the factor of the
        # inverse as U = R^-1: one Cholesky, and H^-1 itself, with the square of the rounding, is never formed.
        lower, failed = torch.linalg.cholesky_ex((H + used * mean * identity).flip(0, 1))
        if not failed:
            upper = torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
            if upper.isfinite().all():
                return Factor(upper, order, used)
    raise ValueError(f"{name}: H is singular (Cholesky fails) with a damping of {used:g}; calibrate on more tokens, or "
                     "set damp to 0.01 or above")


def gptq(w: Tensor, H: Tensor | Factor, bits: int, group_size: int = -1, sym: bool = True, *, act_order: bool = False,
         damp: float = 0.01, block: int = 128, ranges: Tensor | None = None,
         scale_dtype: torch.dtype = torch.float32) -> dict:
    """w (N, K) and H (K, K) of its inputs (or the Factor of it) to a packed weight. Frantar et al. 2022, algorithm 1.

    A group's scale is chosen when its first column is reached, from weights that have already been moved; with
    act_order, whose groups are not reached one after the other, from the original weights ("static groups"), so that
    the layout stays plain. ranges (N, K): all scales are chosen beforehand, as if these were the weights; what awq_clip
    makes of w, say, which gives up the ends of a group's range for a finer grid. Columns are moved at once within a
    block and behind it when the block is complete, which is the same sums in another order: the block size changes the
    speed and nothing else.
    """
    w, size = _checked(w), _columns_in_group(w.shape[1], group_size)
    if not group_size or block < 1:
        raise ValueError(f"group_size is {group_size} and block {block}, but gptq needs scales for each row (-1, or a "
                         "group size from 1 on) and blocks of at least 1 column")
    factor = H if isinstance(H, Factor) else factorize(H, damp, act_order)
    U, order, K = factor.upper, factor.order, w.shape[1]
    spread = U.diagonal()
    if U.shape != (K, K) or not (spread.isfinite() & (spread > 0)).all():
        raise ValueError(f"the factor of H must be ({K}, {K}) with a finite diagonal above 0, not {tuple(U.shape)} "
                         f"from {float(spread.min()):g} to {float(spread.max()):g}: raise damp")
    spread, G = spread.tolist(), -(-K // size)
    columns = w.t().to(U.dtype, memory_format=torch.contiguous_format, copy=True)  # (K, N): a step takes one column
    grids: list = [None] * G
    if order is not None or ranges is not None:
        fixed = columns.t() if ranges is None else ranges.to(columns.dtype)
        grids = [choose_grid(fixed[:, g * size:(g + 1) * size], bits, sym, scale_dtype) for g in range(G)]
    columns = columns if order is None else columns[order]
    codes = torch.empty_like(columns)
    groups = (torch.arange(K, device=w.device) if order is None else order).div(size, rounding_mode="floor").tolist()
    for start, end in _blocks(K, size, block):
        errors = columns[start:end].clone()  # (columns of the block, N)
        for i in range(start, end):
            g = groups[i]
            if grids[g] is None:  # all moves by earlier columns have arrived: no group begins before its block
                grids[g] = choose_grid(columns[i:i + size].t(), bits, sym, scale_dtype)
            scales, zeros = grids[g]
            code = codes[i] = to_codes(columns[i], scales, zeros, bits)
            value = (code if zeros is None else code - zeros) * scales.to(code.dtype)
            error = errors[i - start] = (columns[i] - value) / spread[i]
            columns[i + 1:end].addr_(U[i, i + 1:end], error, alpha=-1)
        columns[end:].addmm_(U[start:end, end:].t(), errors, alpha=-1)
    if order is not None:
        codes = torch.empty_like(codes).index_copy_(0, order, codes)  # back to where the columns were
    scales, zeros = (None if t[0] is None else torch.stack(t, 1) for t in zip(*grids))
    return _as_packed(codes.t(), scales, zeros, bits, size)


def _blocks(K: int, size: int, block: int) -> Iterator[tuple[int, int]]:
    """Runs of at most `block` columns. Groups begin at the start of a run or lie in it whole, if need be in more.

    >>> list(_blocks(12, 4, 8)), list(_blocks(12, 6, 4)), list(_blocks(5, 2, 3))
    ([(0, 8), (8, 12)], [(0, 4), (4, 6), (6, 10), (10, 12)], [(0, 2), (2, 4), (4, 5)])
    """
    step = max(size, block // size * size)
    for first in range(0, K, step):
        last = min(first + step, K)
        yield from ((i, min(i + block, last)) for i in range(first, last, block))


# ------------------------------------------------------------------ AWQ: scaling columns, clipping groups


def awq_scales(w: Tensor, H: Tensor, mean_abs: Tensor, bits: int, group_size: int = -1, sym: bool = True, *,
               ratios: int = 20, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, float]:
    """Factors s (K,) for the columns of w (N, K), one matrix or several that share their inputs one under the other,
    such that x / s times the rounded w * s comes closest to x w^T. Lin et al. 2023, section 3.2.

    mean_abs (K,) is the mean of |x|. Tried are s = mean_abs^r for `ratios` values of r in even steps from 0, which is
    plain rounding, to below 1, normalized so that the largest and the smallest multiply to 1. Returns the best s, r.
    """
    w = _checked(w)
    best, chosen, ratio = math.inf, torch.ones_like(mean_abs), 0.0
    for r in (i / ratios for i in range(ratios)):
        s = mean_abs.pow(r).clamp(min=1e-4)  # an input that was always 0 must not divide by 0
        s = s / (s.max() * s.min()).sqrt()
        error = output_error(w, dequantize(rtn(w * s, bits, group_size, sym, scale_dtype), w.dtype) / s, H)
        if error < best:
            best, chosen, ratio = error, s, r
    return chosen, ratio


def awq_clip(w: Tensor, H: Tensor, bits: int, group_size: int = -1, sym: bool = True, *, shares: int = 10,
             least: float = 0.5, scale_dtype: torch.dtype = torch.float32) -> Tensor:
    """w (N, K) with each group's weights clipped to that share of their absmax, of `shares` even steps from 1 down to
    `least`, at which the group's own part of the output has the least error: a few large weights lose, all others gain
    by the finer grid. Groups are judged one by one, by their diagonal blocks of H."""
    w = _checked(w)
    K, size = w.shape[1], _columns_in_group(w.shape[1], group_size)
    padded = F.pad(w, (0, -K % size)).unflatten(1, (-1, size))  # (N, G, size)
    H = F.pad(H.to(w.dtype), (0, -K % size, 0, -K % size))
    blocks = torch.stack([H[i:i + size, i:i + size] for i in range(0, len(H), size)])  # (G, size, size)
    absmax = padded.abs().amax(-1, keepdim=True)  # (N, G, 1)
    best, limit = torch.full_like(absmax, math.inf), absmax
    for share in torch.linspace(1, least, shares + 1).tolist():
        clipped = padded.clamp(-absmax * share, absmax * share)
        scales, zeros = choose_grid(clipped, bits, sym, scale_dtype)
        zeros = None if zeros is None else zeros[..., None]
        codes = to_codes(clipped, scales[..., None], zeros, bits)
        off = (codes if zeros is None else codes - zeros) * scales.to(w.dtype)[..., None] - padded
        error = (torch.einsum("ngi,gij->ngj", off, blocks) * off).sum(-1, keepdim=True)
        better = error < best
        best, limit = torch.where(better, error, best), torch.where(better, absmax * share, limit)
    return padded.clamp(-limit, limit).flatten(1)[:, :K]


# ------------------------------------------------------------------ 8 bits for activations too, and two floating forms


def smooth_scales(x_max: Tensor, w_max: Tensor, alpha: float = 0.5) -> Tensor:
    """SmoothQuant's factors s (K,): x / s and w * s share out the inputs' outliers. x_max and w_max (K,) are the
    greatest |x| and |w| of each column; s is 1 where either is 0. Xiao et al. 2022, equation 4.

    >>> smooth_scales(torch.tensor([0.0, 4, 4, 0]), torch.tensor([0.0, 1, 0, 1])).tolist()
    [1.0, 2.0, 1.0, 1.0]
    """
    usable = (x_max > 0) & (w_max > 0)
    one = torch.ones_like(x_max)
    return torch.where(usable, x_max, one).pow(alpha) / torch.where(usable, w_max, one).pow(1 - alpha)


class Int8Linear(nn.Module):
    """y = x W^T + bias with both in 8 bits: W by row, x by token when it comes ("dynamic"), sums in int32.

    Speeds up prompts where the machine multiplies int8 (tensor cores, AVX-512 VNNI); elsewhere torch._int_mm is much
    slower than float32. Memory is that of 8 bits everywhere. weight is rtn(w, 8, -1): see the file's docstring.
    """

    def __init__(self, weight: Mapping, bias: Tensor | None = None):
        super().__init__()
        if weight["codes"].dtype != torch.int8 or weight["scales"].shape[1] != 1 or weight["zeros"] is not None:
            raise ValueError("Int8Linear takes symmetric int8 codes with one scale a row, as of rtn(w, 8, -1)")
        self.out_features, self.in_features = weight["codes"].shape
        self.register_buffer("codes", weight["codes"])
        self.register_buffer("scales", weight["scales"].float().flatten())
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).float()  # (M, K)
        scales = rows.abs().amax(1, keepdim=True) / 127  # (M, 1)
        scales = torch.where(scales == 0, torch.ones_like(scales), scales)
        codes = (rows / scales).round_().to(torch.int8)
        if x.is_cuda and len(rows) <= 16:  # the kernel of CUDA takes 17 rows or more
            codes = F.pad(codes, (0, 0, 0, 17 - len(rows)))
        y = torch._int_mm(codes, self.codes.t())[:len(rows)].float() * scales * self.scales  # (M, N)
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def fp8(w: Tensor, scale_dtype: torch.dtype = torch.float32) -> dict:
    """w (N, K) to float8_e4m3fn, one scale a row so that its absmax becomes 448: a packed weight. Three bits of
    fraction, but a step that shrinks with the weight, so no outlier costs the others anything. Memory only, here: the
    codes are expanded before each product. Clamped first, since not every cast saturates.

    >>> fp8(torch.tensor([[1.0, -448.0]]))["codes"].float().tolist()
    [[1.0, -448.0]]
    """
    w = _checked(w)
    scales = (w.abs().amax(1, keepdim=True) / 448).to(scale_dtype)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    if not scales.isfinite().all():
        raise ValueError(f"a weight of {float(w.abs().max()):g} has no scale in {scale_dtype}: weights must be finite")
    codes = (w / scales.to(w.dtype)).clamp_(-448, 448).to(torch.float8_e4m3fn)
    return {"codes": codes, "scales": scales, "zeros": None, "mins": None, "g_idx": None, "bits": 8}


@functools.cache
def nf4_table() -> tuple[float, ...]:
    """The 16 numbers of NF4: quantiles of the normal distribution, 8 on the side of 0 and above, 8 below, in -1 .. 1.

    >>> [round(x, 4) for x in nf4_table()[6:10]]
    [-0.091, 0.0, 0.0796, 0.1609]
    """
    quantile, edge = NormalDist().inv_cdf, 0.9677083  # the mean of 1 - 1/32 and 1 - 1/30

    def side(n):
        return [quantile(edge + (0.5 - edge) * i / n) / quantile(edge) for i in range(n)]
    return (*(-x for x in side(7)), 0.0, *reversed(side(8)))


def nf4(w: Tensor, block: int = 64) -> dict:
    """w, any shape, to NF4: in blocks of its flattened entries, each divided by its absmax, the nearest of 16 numbers
    that normally distributed weights meet equally often. Memory only: a look-up gives the weight back, no integer.

    Returns packed (entries / 2,) uint8, the first of two in the low half; absmax (blocks,) float32; shape and block.
    Not a packed weight of the other methods, since its steps are uneven; `nf4_dequantize` reads it.
    """
    if not w.numel() or not w.is_floating_point() or not w.isfinite().all():
        raise ValueError(f"nf4 takes finite floating-point weights, at least one, not {w.dtype} {tuple(w.shape)}")
    flat = w.detach().float().flatten()
    blocks = F.pad(flat, (0, -len(flat) % block)).view(-1, block)
    absmax = blocks.abs().amax(1)
    table = torch.tensor(nf4_table(), device=w.device)
    middles = (table[1:] + table[:-1]) / 2
    unit = blocks / torch.where(absmax == 0, torch.ones_like(absmax), absmax)[:, None]
    codes = torch.bucketize(unit, middles).flatten()[:len(flat)].to(torch.uint8)
    codes = F.pad(codes, (0, len(codes) % 2))
    return {"packed": codes[::2] | codes[1::2] << 4, "absmax": absmax, "shape": tuple(w.shape), "block": block}


def nf4_dequantize(packed: Tensor, absmax: Tensor, shape: Sequence[int], block: int,
                   dtype: torch.dtype = torch.float32) -> Tensor:
    """The inverse of nf4, as near as it gets."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten()[:math.prod(shape)].int()
    table = torch.tensor(nf4_table(), device=packed.device)
    scale = absmax.repeat_interleave(block)[:len(codes)]
    return (table[codes] * scale).view(shape).to(dtype)


class NF4Linear(nn.Module):
    """y = x W^T + bias, W kept as `nf4` made it and expanded at each call: 4.5 bits a weight, slower than floats."""

    def __init__(self, weight: Mapping, bias: Tensor | None = None):
        super().__init__()
        self.shape, self.block = weight["shape"], weight["block"]
        self.out_features, self.in_features = self.shape
        self.register_buffer("packed", weight["packed"])
        self.register_buffer("absmax", weight["absmax"])
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, nf4_dequantize(self.packed, self.absmax, self.shape, self.block, x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


# ------------------------------------------------------------------ the methods as data


class Choice(NamedTuple):
    """What a method made of one matrix."""
    weight: dict               # packed, or nf4's
    dense: Tensor              # (N, K): what it stands for, in the dtype of the matrix
    damp: float | None = None  # gptq: the damping that was used


class Method(NamedTuple):
    """All that has to be known to quantize a model and is not about the model. `inputs` is any object with averages
    over a layer's inputs: H (K, K), mean_abs (K,) and max_abs (K,)."""
    name: str
    choose: Callable[[Sequence[str], Sequence[Tensor], object], list[Choice]]  # (names, matrices that share inputs,
    group_size: int = -1                                                       # inputs) -> one Choice each
    calibrated: bool = False  # False: it looks at no inputs, which may be None
    hessian: bool = False     # it needs H, which costs as much as the layer itself
    in_order: bool = False    # its inputs must be those that the quantized layers before it make, in the same block too
    scales: Callable[[Tensor, Any], Tensor] | None = None  # (matrix, inputs) -> factors (K,) to be folded beforehand
    module: Callable | None = None  # (weight, bias) -> the layer that computes with it, where packed.QuantLinear cannot


OPTIONS = {"rtn": (), "gptq": ("act_order", "clip", "damp", "block"), "awq": ("ratios", "clip", "shares", "least"),
           "smoothquant": ("alpha",), "fp8": (), "nf4": ()}


def method(name: str, bits: int = 4, group_size: int = -1, sym: bool = True, *,
           scale_dtype: torch.dtype = torch.float32, **options) -> Method:
    """rtn, gptq, awq, smoothquant, fp8 or nf4, ready for use. bits, group_size and sym say nothing to the last three: 8
    bits by rows, fp8 by rows, blocks of 64. The options of each are in OPTIONS and explained at its functions; clip
    False leaves out awq_clip. Raises ValueError for what does not exist.

    >>> method("gptq", 4, 64, act_order=True).hessian
    True
    """
    if name not in OPTIONS:
        raise ValueError(f"method {name!r:.80} is unknown; known are {', '.join(OPTIONS)}")
    if unknown := set(options) - set(OPTIONS[name]):
        raise ValueError(f"{name} has no option {min(unknown)!r:.80}; it has {', '.join(OPTIONS[name]) or 'none'}")
    if name == "smoothquant":
        bits, group_size, sym = 8, -1, True
    grid: dict[str, Any] = {"bits": bits, "group_size": group_size, "sym": sym, "scale_dtype": scale_dtype}
    plain = functools.partial(_choose_plain, functools.partial(rtn, **grid))
    if name == "fp8":
        return Method(name, functools.partial(_choose_plain, functools.partial(fp8, scale_dtype=scale_dtype)))
    if name == "nf4":
        return Method(name, functools.partial(_choose_plain, nf4), module=NF4Linear)
    rtn(torch.ones(1, 1), **grid)  # what makes no sense is said now, not in the middle of a model
    if name == "gptq":
        gptq(torch.ones(1, 1), torch.ones(1, 1), **grid, **{k: v for k, v in options.items() if k != "clip"})
        choose = functools.partial(_choose_gptq, grid, **options)
        return Method(name, choose, group_size, calibrated=True, hessian=True, in_order=True)
    if name == "awq":
        search = {"ratios": options.pop("ratios")} if "ratios" in options else {}
        return Method(name, functools.partial(_choose_awq, grid, **options), group_size, calibrated=True, hessian=True,
                      scales=lambda w, inputs: awq_scales(w, inputs.H, inputs.mean_abs, **grid, **search)[0])
    if name == "smoothquant":
        return Method(name, plain, calibrated=True, module=Int8Linear, scales=lambda w, inputs: smooth_scales(
            inputs.max_abs, w.abs().amax(0).to(inputs.max_abs.dtype), **options))
    return Method(name, plain, group_size)


def _choose_plain(quantizer: Callable, names: Sequence[str], ws: Sequence[Tensor], inputs: object) -> list[Choice]:
    made = [quantizer(w) for w in ws]
    return [Choice(m, (dequantize(m, w.dtype) if "codes" in m else nf4_dequantize(**m, dtype=w.dtype)))
            for m, w in zip(made, ws)]


def _choose_gptq(grid: dict, names: Sequence[str], ws: Sequence[Tensor], inputs, act_order: bool = False,
                 clip: bool = False, damp: float = 0.01, block: int = 128) -> list[Choice]:
    """Rows do not know of each other, so matrices that share their inputs are one: one factor, one pass of columns.
    clip: the groups' ranges as awq_clip has them."""
    factor, w = factorize(inputs.H, damp, act_order, names[0]), torch.cat(list(ws))
    ranges = awq_clip(w, inputs.H, **grid) if clip else None
    joined, rows = gptq(w, factor, **grid, block=block, ranges=ranges), [len(w) for w in ws]
    parts = {k: joined[k].split(rows) for k in ("codes", "scales", "zeros") if joined[k] is not None}
    split = [joined | {k: v[i].clone() for k, v in parts.items()} for i in range(len(ws))]
    return [Choice(m, dequantize(m, w.dtype), factor.damp) for m, w in zip(split, ws)]


def _choose_awq(grid: dict, names: Sequence[str], ws: Sequence[Tensor], inputs, clip: bool = True,
                **search) -> list[Choice]:
    """q and k are never clipped: what counts of them is their product."""
    ws = [awq_clip(w, inputs.H, **grid, **search).to(w.dtype) if clip and not n.endswith(("q_proj", "k_proj")) else w
          for n, w in zip(names, ws)]
    return _choose_plain(functools.partial(rtn, **grid), names, ws, inputs)


# ------------------------------------------------------------------ demo


def demo() -> None:
    """Each method on one matrix, for inputs as they are in language models: some go along with others, a few are large.
    The errors of the weight and of the output, which is what counts, and how the latter are spread."""
    g = torch.Generator().manual_seed(0)
    N, K = 192, 256
    x = torch.randn(4096, K // 4, generator=g) @ torch.randn(K // 4, K, generator=g) / 8
    x = x + 0.3 * torch.randn(4096, K, generator=g)
    x[:, ::37] *= 12
    w = torch.randn(N, K, generator=g) / 16
    w[torch.rand(N, K, generator=g) < 0.003] *= 6
    H, size, y = x.t() @ x / len(x), x.abs(), x @ w.t()
    print(f"One {N} x {K} matrix, {len(x):,} inputs, relative errors:\n{'':32}weight  output")
    shown = {}
    for bits in (8, 4, 3):
        how: dict[str, Any] = {"bits": bits, "group_size": 64}
        s, ratio = awq_scales(w, H, size.mean(0), **how)
        tried = {"RTN": dequantize(rtn(w, **how)), "GPTQ": dequantize(gptq(w, H, **how)),
                 "GPTQ, act-order": dequantize(gptq(w, H, **how, act_order=True)),
                 f"AWQ, s = mean|x|^{ratio:.2f}": dequantize(rtn(w * s, **how)) / s,
                 "AWQ and clipping": dequantize(rtn(awq_clip(w * s, H / (s * s[:, None]), **how), **how)) / s}
        tried |= {"FP8": dequantize(fp8(w))} if bits == 8 else {"NF4": nf4_dequantize(**nf4(w))} if bits == 4 else {}
        for name, q in tried.items():
            print(f"{bits} bits, {name:24}{output_error(w, q):.4f}  {output_error(w, q, H):.4f}")
        shown = {"RTN": tried["RTN"], "AWQ": tried["AWQ and clipping"], "GPTQ": tried["GPTQ, act-order"]}
    s = smooth_scales(size.amax(0), w.abs().amax(0))
    for name, layer, inputs in (("", rtn(w, 8), x), (", SmoothQuant", rtn(w * s, 8), x / s)):
        print(f"{'8 bits, inputs too' + name:40}{(Int8Linear(layer)(inputs) - y).norm() / y.norm():.4f}")
    print("\nErrors of the outputs at 3 bits, in shares of their standard deviation:")
    bins = {name: torch.histc((x @ q.t() - y) / y.std(), 13, -0.39, 0.39) / y.numel() for name, q in shown.items()}
    print("       " + "".join(f"{name:24}" for name in bins))
    for i in range(13):
        print(f"{(i - 6) * 0.06:5.2f}  " + "".join(f"{'#' * round(60 * float(b[i])):24}" for b in bins.values()))


if __name__ == "__main__":
    demo()
