"""packed.py - weights that stay in 4 or 8 bits while the model runs.

    layer = QuantLinear(weight, bias)          a drop-in for nn.Linear; weight is plain data, a dict:

    codes   (N, K)  uint8 or int8 (float8_e4m3fn for fp8)   N = out_features, K = in_features
    scales  (N, G)  floating point, one a group of a row; G = 1 is "per channel"
    zeros   (N, G)  integer zero points, in units of a code; None is 0
    mins    (N, G)  floating point, added; None is 0
    g_idx   (K,)    group of each column; None: K / G neighbours each
    bits    int     2..8, the width of a code
    W[n, k] = scales[n, g(k)] * (codes[n, k] - zeros[n, g(k)]) + mins[n, g(k)]

The one idea: generating one token reads every weight once, so its speed is the memory's, and a weight of 4 bits costs a
quarter of one in bfloat16. What a kernel does with the codes on the way to the multiplier hardly matters. A prompt is
the other way round: many rows share each weight that was read, arithmetic is what costs, and above some number of rows
it pays to expand the matrix once and multiply densely. `QuantLinear` does whichever is faster.

    one row     x -> [4-bit kernel: codes, scales -> products -> sum] -> y
    many rows   codes, scales -> W in bfloat16 -> [matrix product with x] -> y

Kernels: on a CPU torch's own for 4 bits; 8 bits are two digits of 4, see `_pack_int4`. On CUDA the Triton kernel
below. Any other shape, group or machine dequantizes each time: slow, and right. `fast` tells beforehand.
Left out on purpose: choosing codes (quantize.py), files (gguf.py, layouts.py), and quantized activations: x is never
rounded to integers, so 8-bit weights made for integer activations (W8A8) run a little better here than was planned.

Papers: Dettmers et al. 2022, arXiv:2208.07339 (weights in 8 bits); Frantar et al. 2022, arXiv:2210.17323 (act-order).
Shapes: M rows, N out_features, K in_features, G groups of a row.
"""
from __future__ import annotations

import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn

triton: Any = None
if torch.version.cuda or torch.version.hip or "TRITON_INTERPRET" in os.environ:  # else 0.3 s of importing for nothing
    try:
        import triton  # type: ignore[no-redef]
        import triton.language as tl
    except ImportError:  # there is none outside Linux; only quant_matmul needs it
        triton = None

KEYS = ("codes", "scales", "zeros", "mins", "g_idx", "bits")
# From so many rows on, expanding and multiplying densely is faster, by bits: measured on a CPU, `python packed.py`. On
# CUDA the kernel takes any number of rows, and whether it should is not measured.
MANY_ROWS = {4: 80, 8: 40}
EXPAND_ROWS = 5  # and of 8 bits that are kept expanded too, see QuantLinear.pack_
GROUPS = (256, 128, 64, 32)  # that torch's CPU kernel takes

# ------------------------------------------------------------------ the plain form


def check_weight(weight: Mapping) -> None:
    """ValueError unless `weight` is a packed weight as the file's docstring says."""
    if set(weight) != set(KEYS):
        raise ValueError(f"a packed weight has the keys {', '.join(KEYS)}, not {', '.join(map(str, weight))}")
    codes, scales, bits = weight["codes"], weight["scales"], weight["bits"]
    for name in ("scales", "mins"):
        if weight[name] is not None and not (weight[name].is_floating_point() and weight[name].isfinite().all()):
            raise ValueError(f"{name} must be finite floating-point numbers, and are {weight[name].dtype}")
    if type(bits) is not int or (weight["zeros"] is not None and weight["zeros"].is_floating_point()):
        raise ValueError(f"bits and zeros are whole numbers; bits are {bits!r}")
    if codes.dim() != 2 or scales.dim() != 2 or 0 in codes.shape or len(codes) != len(scales):
        raise ValueError(f"codes {tuple(codes.shape)} and scales {tuple(scales.shape)} must be (N, K) and (N, G)")
    K, G, g_idx = codes.shape[1], scales.shape[1], weight["g_idx"]
    for name in ("zeros", "mins"):
        if weight[name] is not None and weight[name].shape != scales.shape:
            raise ValueError(f"{name} {tuple(weight[name].shape)} must have the shape of scales, {tuple(scales.shape)}")
    if g_idx is None and (G == 0 or K % G):
        raise ValueError(f"{K} columns do not divide into {G} groups; give g_idx, the group of each column")
    if g_idx is not None and (g_idx.shape != (K,) or int(g_idx.min()) < 0 or int(g_idx.max()) >= G):
        raise ValueError(f"g_idx must name one of {G} groups for each of {K} columns")
    if codes.dtype == torch.float8_e4m3fn:
        return
    if codes.dtype not in (torch.uint8, torch.int8) or not 2 <= bits <= 8:
        raise ValueError(f"codes are uint8 or int8 of 2 to 8 bits, not {codes.dtype} of {bits}")
    low, high = (0, 2**bits - 1) if codes.dtype == torch.uint8 else (-2 ** (bits - 1), 2 ** (bits - 1) - 1)
    least, most = (int(x) for x in codes.aminmax())
    if least < low or most > high:
        raise ValueError(f"{codes.dtype} codes of {bits} bits go from {low} to {high}, not from {least} to {most}")


def _unsigned(weight: Mapping) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(u (N, K) uint8, scales (N, G), mins (N, G) float32 or None) with W = scales * u + mins: signed codes are raised
    to 0..2^bits - 1, and that, like a zero point, is a matter of the minimum. fp8 stays as it is."""
    codes, scales, zeros, mins = (weight[k] for k in ("codes", "scales", "zeros", "mins"))
    if codes.dtype == torch.int8:
        offset = 2 ** (weight["bits"] - 1)
        codes = (codes + offset if offset < 128 else codes ^ -128).view(torch.uint8)
        zeros = torch.full_like(scales, offset, dtype=torch.float32) if zeros is None else zeros.float() + offset
    if zeros is not None:
        shift = -(scales.float() * zeros)
        mins = shift if mins is None else mins + shift
    return codes, scales, None if mins is None else mins.float()


def dequantize(codes: torch.Tensor, scales: torch.Tensor, mins: torch.Tensor | None, g_idx: torch.Tensor | None,
               dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """scales * codes + mins in float32, rounded to dtype once: (N, K)."""
    K, G = codes.shape[-1], scales.shape[-1]
    if g_idx is None:
        w = codes.float().unflatten(-1, (G, K // G)).mul_(scales.float()[..., None])  # (N, G, K / G)
        return (w if mins is None else w.add_(mins.float()[..., None])).flatten(-2).to(dtype)
    w = codes.float().mul_(scales.float()[..., g_idx])
    return (w if mins is None else w.add_(mins.float()[..., g_idx])).to(dtype)


def to_nibbles(u: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 (.., K), K even, to bytes (.., K / 2): even columns in the low half.

    >>> to_nibbles(torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8))
    tensor([[33, 67]], dtype=torch.uint8)
    """
    return u[..., ::2] | u[..., 1::2] << 4


def from_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of to_nibbles: (.., K / 2) -> (.., K)."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


# ------------------------------------------------------------------ 4 bits on a CPU


def _int4_group(N: int, K: int, G: int) -> int | None:
    """The group size with which torch's CPU kernel can take N x K weights in G groups a row; None if it cannot."""
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu") or N % 16 or K % G or not _int4_block():
        return None
    return next((g for g in GROUPS if (K // G) % g == 0), None)


def _pack_int4(u, scales, mins, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed (N, K / 2) uint8, scales and zeros (K / group, N, 2) bfloat16); K is 2 K if bits > 4.

    The kernel computes scale * (u - 8) + zero. A code of up to 8 bits is two digits, u = 16 h + l, so that
        scale * u + min  =  16 scale * (h - 8)  +  [ scale * (l - 8) + (min + 136 scale) ]
    is one product of twice the length, x twice in a row with [l | h], exactly: 16 scale and, where min is -128 scale,
    8 scale lose nothing in bfloat16, and the sum is rounded once.
    """
    N, K = u.shape
    s = scales.float().repeat_interleave(K // scales.shape[1] // group, 1)  # (N, K / group)
    m = torch.zeros_like(s) if mins is None else mins.repeat_interleave(K // mins.shape[1] // group, 1)
    # Narrower codes are raised to the middle of the range, where the zero of a symmetric weight is 0, not a rounded sum
    middle = 8 if bits <= 4 else 136
    lift = min(middle - 2 ** (bits - 1), 255 - (2**bits - 1))
    zero = m + (middle - lift) * s
    if bits > 4:
        s, zero = torch.cat((s, 16 * s), 1), torch.cat((zero, torch.zeros_like(zero)), 1)
    packed = torch.empty(N, K // 2 if bits <= 4 else K, dtype=torch.uint8, device="cpu")
    for i in range(0, N, 1024):  # rows at a time, a multiple of every block: torch asks for int32 codes, eight times
        rows = u[i:i + 1024] + lift if lift else u[i:i + 1024]  # the room
        rows = torch.cat((rows & 15, rows >> 4), 1) if bits > 4 else rows
        packed[i:i + 1024] = torch._convert_weight_to_int4pack_for_cpu(rows.int(), 1)
    return packed, torch.stack((s, zero), -1).bfloat16().transpose(0, 1).contiguous()


@functools.cache
def _int4_block() -> int | None:
    """How torch packs on this machine: blocks of 64 rows (AVX-512) or 32 (AVX2), a byte holding rows j and j + half a
    block of one column. Tried out rather than believed. None where it is neither: there the kernel is no fast one."""
    codes = torch.randint(0, 16, (128, 32), generator=torch.Generator().manual_seed(0), dtype=torch.int32, device="cpu")
    packed = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    return next((b for b in (64, 32) if torch.equal(_unpack_int4(packed, b).t(), codes.to(torch.uint8))), None)


def _unpack_int4(packed: torch.Tensor, block: int) -> torch.Tensor:
    """Codes (K, N) uint8 of a matrix that torch packed in blocks of `block` rows."""
    N, K = packed.shape[0], packed.shape[1] * 2
    blocks = packed.view(N // block, K, block // 2)
    u = packed.new_empty(K, N // block, block)  # (K, blocks, rows of a block)
    u.permute(1, 0, 2)[..., :block // 2] = blocks & 15
    u.permute(1, 0, 2)[..., block // 2:] = blocks >> 4
    return u.view(K, N)


# ------------------------------------------------------------------ a product that reads its weights in 4 or 8 bits


def quant_matmul_reference(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, mins: torch.Tensor | None,
                           bits: int, group: int) -> torch.Tensor:
    """y = x @ W.T with W[n, k] = scales[n, k // group] * codes[n, k] + mins[n, k // group]: the definition, in PyTorch.

    x       (M, K) float16, bfloat16 or float32
    codes   uint8: (N, K) for 8 bits; (N, K / 2) for 4, column 2j in the low half of byte j, column 2j + 1 in the high
    scales  (N, K / group) floating point; mins the same, or None = 0
    Returns (M, N) in x's dtype; W and the sums are float32.

    >>> scales, mins = torch.tensor([[2.0]]), torch.tensor([[-1.0]])
    >>> codes = torch.tensor([[0x53]], dtype=torch.uint8)  # columns 3 and 5, so W is 5 and 9
    >>> quant_matmul_reference(torch.tensor([[1.0, 10.0]]), codes, scales, mins, bits=4, group=2)
    tensor([[95.]])
    """
    codes = from_nibbles(codes) if bits == 4 else codes  # (N, K)
    weight = codes * scales.float().repeat_interleave(group, dim=1)
    if mins is not None:
        weight = weight + mins.float().repeat_interleave(group, dim=1)
    return (x.float() @ weight.T).to(x.dtype)


def quant_matmul(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, mins: torch.Tensor | None,
                 bits: int, group: int) -> torch.Tensor:
    """`quant_matmul_reference` as one Triton kernel, which reads a weight's 4 or 8 bits and never writes W to memory.

    group is a multiple of 16 that divides K; x may have any row stride, the others are contiguous. Sums are float32.
    With two rows or more W is rounded to x's dtype, for the tensor cores. A row's last bits depend on M, as the form
    of the kernel does, but not on the other rows; nothing is added atomically, so a result repeats itself bit by bit.
    """
    # Only a decorator that read TRITON_INTERPRET=1 makes a kernel which runs on the CPU.
    interpreted = triton is not None and not isinstance(quant_kernel, triton.JITFunction)
    if triton is None or not (x.is_cuda or interpreted):
        raise ValueError(f"quant_matmul needs triton and a GPU, and x is on {x.device}: use quant_matmul_reference")
    if x.ndim != 2 or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"x must be (M, K) in float16, bfloat16 or float32, not {tuple(x.shape)} {x.dtype}")
    (M, K), N = x.shape, len(codes)
    if bits not in (4, 8) or group < 16 or group % 16 or K % group:
        raise ValueError(f"the kernel takes 4 or 8 bits and groups that divide K and are a multiple of 16, not {bits} "
                         f"bits, group {group}, K {K}; quant_matmul_reference takes any")
    row_bytes, groups = K * bits // 8, (N, K // group)
    other = scales if mins is None else mins
    if codes.dtype != torch.uint8 or codes.shape != (N, row_bytes) or not scales.shape == other.shape == groups:
        raise ValueError(f"x {tuple(x.shape)}, {bits} bits and groups of {group} want codes uint8 ({N}, {row_bytes}), "
                         f"scales and mins {groups}: got codes {codes.dtype} {tuple(codes.shape)}, scales "
                         f"{tuple(scales.shape)}, mins {None if mins is None else tuple(mins.shape)}")
    if not all(t is None or t.is_contiguous() for t in (codes, scales, mins)):
        raise ValueError("codes, scales and mins must be contiguous: call .contiguous() once, when they are loaded")
    y = x.new_empty(M, N)
    if y.numel() == 0:
        return y
    x = x if x.stride(1) == 1 else x.contiguous()
    config = quant_config(M, N, K, bits, group, x.dtype)
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(N, config["BLOCK_N"])
    # The interpreter's tl.dot is wrong in bfloat16; on a GPU the operands keep x's dtype, for the tensor cores.
    dot = tl.float32 if interpreted else getattr(tl, str(x.dtype).removeprefix("torch."))
    with torch.cuda.device_of(x):
        quant_kernel[(tiles,)](x, codes, scales, mins, y, M, N, row_bytes, x.stride(0), BITS=bits, GROUP=group,
                               HAS_MINS=mins is not None, DOT=dot, **config)
    return y


def quant_config(M: int, N: int, K: int, bits: int, group: int, dtype: torch.dtype) -> dict:
    """The kernel's form, tile and launch options for one product. Reasoned from compiled code, not measured.

    One row: bound by memory, so what counts is bytes on their way. Blocks of 4 or 8 rows of W keep every multiprocessor
    of a large GPU busy (576 rows make 144 blocks, 4096 make 512), and up to 4 warps share a row's columns. That is the
    split of K there is: one across blocks would need atomics, whose order changes the last bits, or a second kernel.
    """
    if M == 1:
        columns = min(max(256, triton.next_power_of_2(K)), 1024)  # a warp takes 256, a thread 8
        return dict(GEMV=True, BLOCK_M=1, BLOCK_N=8 if bits == 4 and N >= 4096 else 4, BLOCK_K=columns, UNIT=8,
                    num_warps=columns // 256, num_stages=1)
    if M <= 16:  # still bound by memory: many small blocks, each with four loads ahead
        rows, out, columns, warps, stages = 16, 32, 128, 2, 5
    elif M <= 64:
        rows, out, columns, warps, stages = triton.next_power_of_2(M), 64, 64, 4, 4
    else:
        rows, out, columns, warps, stages = 128, 128, 64, 8, 4
    if dtype == torch.float32:  # no tensor cores, twice the bytes: smaller tiles
        rows, out, columns, warps, stages = min(rows, 32), 32, 64, 4, 2
    return dict(GEMV=False, BLOCK_M=rows, BLOCK_N=out, BLOCK_K=columns, UNIT=math.gcd(group, columns), num_warps=warps,
                num_stages=stages)


if triton is not None:

    @triton.jit(do_not_specialize=["M"])
    def quant_kernel(x_ptr, codes_ptr, scales_ptr, mins_ptr, y_ptr, M, N, row_bytes, x_stride,
                     BITS: tl.constexpr, GROUP: tl.constexpr, HAS_MINS: tl.constexpr, DOT: tl.constexpr,
                     GEMV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                     UNIT: tl.constexpr):
        """One tile of y, transposed: (BLOCK_N, BLOCK_M) = W (BLOCK_N, K) @ x.T (K, BLOCK_M), BLOCK_K columns a turn.

        W stands on the left, where tensor cores take an operand from the registers in which it was unpacked.
        A run of UNIT columns lies in one group; UNIT is a power of two, as tl.reshape wants, GROUP need not be.
        """
        PACK: tl.constexpr = 8 // BITS  # columns in a byte
        K = row_bytes * PACK
        tiles_m = tl.cdiv(M, BLOCK_M)  # tiles of x go fastest: those that share rows of W run together
        # subtle: 64 bits, since row * length passes 2 ** 31 long before row or length does.
        m = (tl.program_id(0) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]  # (BLOCK_M, 1)
        n = (tl.program_id(0) // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]  # (BLOCK_N, 1)
        acc = tl.zeros((BLOCK_N, BLOCK_K if GEMV else BLOCK_M), dtype=tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)[None, :]
            x = tl.load(x_ptr + m * x_stride + k, mask=(m < M) & (k < K), other=0)  # (BLOCK_M, BLOCK_K)
            byte = start // PACK + tl.arange(0, BLOCK_K // PACK)[None, :]
            if GEMV:  # a thread takes 8 columns of x (16 bytes), of W and of the scales alike: none need change threads
                byte = tl.max_contiguous(byte, [1, 8 // PACK])
            code = tl.load(codes_ptr + n * row_bytes + byte, mask=(n < N) & (byte < row_bytes), other=0)
            first = start + tl.arange(0, BLOCK_K // UNIT)[None, :] * UNIT  # first column of each run
            group = n * (K // GROUP) + first // GROUP  # (BLOCK_N, BLOCK_K / UNIT)
            scale = tl.load(scales_ptr + group, mask=(n < N) & (first < K), other=0)
            if HAS_MINS:
                low = tl.load(mins_ptr + group, mask=(n < N) & (first < K), other=0)
            if BITS == 4:
                code = tl.interleave(code & 15, code >> 4)  # (BLOCK_N, BLOCK_K / 2) -> (BLOCK_N, BLOCK_K)
            w = tl.reshape(code, (BLOCK_N, BLOCK_K // UNIT, UNIT)).to(tl.float32) * scale.to(tl.float32)[:, :, None]
            if HAS_MINS:
                w += low.to(tl.float32)[:, :, None]
            w = tl.reshape(w, (BLOCK_N, BLOCK_K))
            if GEMV:
                acc += w * x.to(tl.float32)
            else:
                acc = tl.dot(w.to(DOT), tl.trans(x.to(DOT)), acc, input_precision="ieee")
        if GEMV:
            acc = tl.sum(acc, axis=1, keep_dims=True)  # (BLOCK_N, BLOCK_K) -> (BLOCK_N, 1)
        tl.store(y_ptr + tl.trans(m) * N + n, acc.to(y_ptr.dtype.element_ty), mask=(tl.trans(m) < M) & (n < N))

# ------------------------------------------------------------------ the layers


def repack(w: torch.Tensor, bits: int, group: int = 32) -> tuple[dict, float]:
    """(packed weight, relative error): W (N, K) rounded to the nearest of 2^bits even steps between the least and the
    greatest weight of each group. For weights that came quantized in a form without a kernel, such as groups of 16;
    the error, |W' - W| / |W| in Frobenius norms, adds to what they lost before."""
    parts, lost, total = [], 0.0, 1e-30
    for rows in w.split(1024):  # so that what is computed with takes little room beside the matrix
        grouped = rows.float().unflatten(1, (-1, group))  # (rows, G, group)
        low, high = grouped.aminmax(dim=-1)
        # as the kernel will have it; never less, or the last of 255 steps would end short of the greatest weight
        scales = ((high - low) / (2**bits - 1) * (1 + 2**-8)).bfloat16().float()
        scales = torch.where(scales == 0, 1, scales)
        codes = ((grouped - low[..., None]) / scales[..., None]).round().clamp(0, 2**bits - 1)
        lost += (codes * scales[..., None] + low[..., None] - grouped).square().sum(dtype=torch.float64).item()
        total += grouped.square().sum(dtype=torch.float64).item()
        parts.append((codes.flatten(1).byte(), scales, low))
    codes, scales, mins = (torch.cat(part) for part in zip(*parts))
    weight = {"codes": codes, "scales": scales, "zeros": None, "mins": mins, "g_idx": None, "bits": bits}
    return weight, math.sqrt(lost / total)


def fast(weight: Mapping, device: str | torch.device = "cpu") -> bool:
    """Whether QuantLinear has a kernel for this weight on this kind of device, so that packed beats expanded."""
    return _plan(weight, torch.device(device).type)[0] != "dense"


def _plan(weight: Mapping, device: str) -> tuple[str, int]:
    """("int4", "triton" or "dense", group size). QuantLinear.pack_ may make an "int4" a "bfloat16"."""
    (N, K), G = weight["codes"].shape, weight["scales"].shape[1]
    g_idx = weight["g_idx"]
    if weight["codes"].dtype == torch.float8_e4m3fn or K % G:
        return "dense", 0
    if g_idx is not None and not bool((torch.bincount(g_idx.long(), minlength=G) == K // G).all()):
        return "dense", 0
    if device == "cpu" and (group := _int4_group(N, K, G)):
        return "int4", group
    if device == "cuda" and triton is not None and K // G % 16 == 0:
        return "triton", K // G
    return "dense", K // G


def _few_rows(packed: torch.Tensor, group: int, scales: torch.Tensor, layer: nn.Module,
              x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.bfloat16 or len(x) >= MANY_ROWS[4]:
        return layer(x)
    return torch._weight_int4pack_mm_for_cpu(x.contiguous(), packed, group, scales)


class QuantLinear(nn.Module):
    """y = x W^T + bias with W in 4 or 8 bits: x (*, K) -> (*, N) in x's dtype.

    weight is the packed weight of this file's docstring, on the device where the layer is to run, and may be let go
    afterwards. The layer stays on that device and is not cast: kernels differ in their layout. There is no gradient.
    The CPU kernel computes in bfloat16 with float32 sums: of a wider x, the few rows that it takes are rounded to that.
    Raises ValueError for a weight whose parts do not fit together.
    """

    def __init__(self, weight: Mapping, bias: torch.Tensor | None = None):
        super().__init__()
        check_weight(weight)
        self.out_features, self.in_features = weight["codes"].shape
        self.bits, self.groups = weight["bits"], weight["scales"].shape[1]
        self.kind, self.group = _plan(weight, weight["codes"].device.type)
        self.expand_rows = sys.maxsize  # of so many rows on, see pack_
        self.expanded: torch.Tensor | None = None  # no buffer: it can be made again, and neither copied nor saved
        u, scales, mins = _unsigned(weight)
        g_idx, order = weight["g_idx"], None
        if g_idx is not None and self.kind != "dense":  # act-order: bring the columns of a group together, and x's too
            order = torch.argsort(g_idx, stable=True)
            u, g_idx = u[:, order], None
        self.register_buffer("order", order)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        self.nibbles = self.bits <= 4 and u.dtype == torch.uint8 and self.in_features % 2 == 0
        if self.kind == "int4":
            (packed, scales), mins = _pack_int4(u, scales, mins, self.bits, self.group), None
        else:
            packed = to_nibbles(u) if self.nibbles else u
        for name, part in zip(("packed", "scales", "mins", "g_idx"), (packed, scales, mins, g_idx)):
            self.register_buffer(name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)  # (M, K)
        if self.order is not None:
            rows = rows[:, self.order]
        y = self._product(rows)
        if self.bias is not None:
            y = y + self.bias
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)

    def _product(self, x: torch.Tensor) -> torch.Tensor:  # (M, K) -> (M, N)
        if self.kind == "triton":
            y = x.float() if x.dtype == torch.float64 else x
            y = quant_matmul(y, self.packed, self.scales, self.mins, 4 if self.nibbles else 8, self.group)
            return y.to(x.dtype)
        expand = x.shape[0] >= self.expand_rows and (self.kind == "bfloat16" or x.dtype == torch.bfloat16)
        many = self.kind == "int4" and not expand and x.shape[0] >= MANY_ROWS[4 if self.bits <= 4 else 8]
        if self.kind == "dense" or (many and self._block()):
            return x @ self._dense(x.dtype)
        # in any other type these kernels are many times slower; asking first is cheaper than a call that does nothing
        narrow = x if x.dtype == torch.bfloat16 else x.to(torch.bfloat16)
        if expand:
            if self.expanded is None:
                self.expanded = self._expand()
            y = torch.ops.mkldnn._linear_pointwise(narrow, self.expanded, None, "none", [], "")
        else:
            if self.bits > 4:
                narrow = torch.cat((narrow, narrow), 1)  # (M, 2 K)
            elif not narrow.is_contiguous():
                narrow = narrow.contiguous()
            y = torch._weight_int4pack_mm_for_cpu(narrow, self.packed, self.group, self.scales)
        return y if y.dtype == x.dtype else y.to(x.dtype)

    def bare(self) -> Callable:
        """forward (M, K) -> (M, N) as a function, which for few rows of bfloat16 on a CPU is one call of the kernel:
        11 us instead of 15. It holds the weights as they are now."""
        plain = self.kind == "int4" and self.bits <= 4 and self.order is None and self.bias is None
        return partial(_few_rows, self.packed, self.group, self.scales, self) if plain else self

    def pack_(self, rows: int = EXPAND_ROWS) -> QuantLinear:
        """On a CPU, also keep 8 bits expanded, in the order in which oneDNN reads bfloat16, for x of at least so many
        rows; made when it is first needed, with rows = 1 now and in place of the codes. In place, returns self.

        For the one matrix of a model that is much wider than the others, its head: to the kernel of few rows 8 bits are
        two products, the time of which grows by steps of four rows. Of 49152 x 576, milliseconds:

            rows           1     2     4     5    16        memory
            8 bits       1.0   1.1   1.5   3.2   6.4         30 MB
            expanded     1.6   1.6   1.4   1.5   2.0         57 MB
        """
        native = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if native and self.kind == "int4" and self.bits > 4 and self._block():
            self.expand_rows = rows
            if rows == 1:
                self.expand_rows, self.expanded, self.kind = 0, self._expand(), "bfloat16"
                self.register_buffer("scales", None)
                self.register_buffer("packed", None)
        return self

    def __getstate__(self) -> dict:  # of copy and pickle
        return self.__dict__ if self.kind == "bfloat16" else {**self.__dict__, "expanded": None}

    def _expand(self) -> torch.Tensor:
        dense = torch.empty(self.out_features, self.in_features, dtype=torch.bfloat16)
        for i in range(0, self.out_features, 1024):  # a multiple of every block; all at once takes four times that
            rows = slice(i, i + 1024)
            dense[rows] = self._expanded(self.packed[rows], self.scales[:, rows], torch.bfloat16).t()
        return torch.ops.mkldnn._reorder_linear_weight(dense, None)

    def _block(self) -> int | None:
        block = _int4_block()
        return block if block and self.out_features % block == 0 else None

    def _dense(self, dtype: torch.dtype) -> torch.Tensor:
        """W^T (K, N), made anew."""
        if self.kind == "dense":
            u = from_nibbles(self.packed) if self.nibbles else self.packed
            return dequantize(u, self.scales, self.mins, self.g_idx, dtype).t()
        return self._expanded(self.packed, self.scales, dtype)

    def _expanded(self, packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """W^T (K, N) of rows that torch packed."""
        u, middle = _unpack_int4(packed, self._block()), 8  # (K, N) or (2 K, N)
        if self.bits > 4:
            low, high = u.chunk(2)
            u, middle = low | high << 4, 136
        # (K / group, group, N); exact: at most 8 bits. Bytes are subtracted from in a fifth of the time of bfloat16s
        u = u.view(torch.int8).sub_(middle).to(dtype) if self.bits <= 4 else u.to(dtype).sub_(middle)
        u = u.unflatten(0, (-1, self.group))
        scale, zero = (p[:len(u), None].to(dtype).contiguous() for p in scales.unbind(-1))  # (K / group, 1, N)
        return torch.addcmul(zero, u, scale).flatten(0, 1)

    @staticmethod
    def join(layers: Sequence[QuantLinear]) -> QuantLinear | None:
        """One layer whose outputs are those of `layers`, one behind the other, or None where their layouts differ.
        Nothing is quantized or packed again, and `layers` share no memory with the result."""
        first = layers[0]
        same = all(isinstance(x, QuantLinear) and x._layout() == first._layout() for x in layers)
        if not same or first.kind == "bfloat16" or (first.kind == "int4" and not all(x._block() for x in layers)):
            return None
        for name in ("order", "g_idx"):
            columns = getattr(first, name)
            if columns is not None and not all(torch.equal(getattr(x, name), columns) for x in layers):
                return None
        joined = QuantLinear.__new__(QuantLinear)
        nn.Module.__init__(joined)
        joined.__dict__.update({k: v for k, v in first.__dict__.items() if not k.startswith("_")})
        joined.expand_rows, joined.expanded = sys.maxsize, None
        joined.out_features = sum(x.out_features for x in layers)
        for name, part in first._buffers.items():
            rows = 1 if first.kind == "int4" and name.startswith("scales") else 0  # the dimension of N
            shared = part is None or name in ("order", "g_idx")
            joined.register_buffer(name, part if shared else torch.cat([getattr(x, name) for x in layers], rows))
        bias = None if first.bias is None else nn.Parameter(torch.cat([x.bias for x in layers]), requires_grad=False)
        joined.register_parameter("bias", bias)
        return joined

    def _layout(self) -> tuple:
        return (self.kind, self.in_features, self.groups, self.group, getattr(self, "nibbles", None), self.bias is None,
                *((n, None if b is None else b.dtype) for n, b in self._buffers.items()))

    def extra_repr(self) -> str:
        return (f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
                f"bits={self.bits}, groups={self.groups}, kernel={self.kind}")


class QuantEmbedding(nn.Module):
    """Rows of W by id, dequantized when looked up: ids (*) -> (*, K) in `dtype`."""

    def __init__(self, weight: Mapping, dtype: torch.dtype):
        super().__init__()
        check_weight(weight)
        self.num_embeddings, self.embedding_dim = weight["codes"].shape
        self.dtype = dtype
        u, scales, mins = _unsigned(weight)
        self.nibbles = u.dtype == torch.uint8 and weight["bits"] <= 4 and self.embedding_dim % 2 == 0
        parts = {"packed": to_nibbles(u) if self.nibbles else u, "scales": scales, "mins": mins,
                 "g_idx": weight["g_idx"]}
        for name, part in parts.items():
            self.register_buffer(name, part)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        u, scales, mins = (None if t is None else t[ids] for t in (self.packed, self.scales, self.mins))
        return dequantize(from_nibbles(u) if self.nibbles else u, scales, mins, self.g_idx, self.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


# ------------------------------------------------------------------ demo


def demo() -> None:
    """Bytes and error of 4 and 8 bits, and where expanding the matrix begins to pay: MANY_ROWS is from those tables."""
    torch.manual_seed(0)
    dense, x = torch.randn(3072, 576), torch.randn(4, 576)
    y = x @ dense.t()
    print(f"A matrix {tuple(dense.shape)} in 4 and 8 bits: its size, its error, and from how many rows expanding pays.")
    for bits in (4, 8):
        weight, error = repack(dense, bits)
        layer = QuantLinear(weight)
        size, off = sum(b.nbytes for b in layer.buffers()), (layer(x.bfloat16()).float() - y).norm() / y.norm()
        print(f"\n{layer}:\n  {size:,} bytes, {8 * size / dense.numel():.1f} bits a weight; relative error of W "
              f"{error:.4f}, of x W^T in bfloat16 {off:.4f}")
        if layer.kind == "int4":
            _threshold(layer, dense.bfloat16())


def _threshold(layer: QuantLinear, half: torch.Tensor) -> None:
    def median_us(f):
        seconds = []
        for _ in range(8):
            begin = time.perf_counter()
            f()
            seconds.append(time.perf_counter() - begin)
        return 1e6 * statistics.median(seconds[1:])

    print(f"  rows  packed as it is  expand, multiply  bfloat16    microseconds, {tuple(half.shape)}")
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    for rows in (1, 16, 48, 64, 96, 256):
        x = torch.randn(rows, layer.in_features).bfloat16()
        long = x if layer.bits <= 4 else torch.cat((x, x), 1)
        times = (median_us(partial(product, long, layer.packed, layer.group, layer.scales)),
                 median_us(lambda x=x: x @ layer._dense(torch.bfloat16)), median_us(partial(torch.matmul, x, half.t())))
        print("{:6} {:16.0f} {:17.0f} {:9.0f}".format(rows, *times))


if __name__ == "__main__":
    demo()
