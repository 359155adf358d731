"""flash.py - attention in Triton: keys and values pass once, in tiles, and the matrix of scores never exists.

    out = flash_attention(q, k, v, causal=True)                  dense: (B, T, H, D) against (B, S, G, D)
    out = paged_attention(q, k_cache, v_cache, block_table,      the contract of the KV cache: packed tokens of many
                          kv_len, q_start, scale, max_q=max_q)   sequences, prompts and single tokens in one call

The one idea is the online softmax (Milakov and Gimelshein 2018). A softmax wants the maximum and the sum of a whole
row before anything can be divided; but with a running maximum m, a running sum l and an unnormalized output, what was
summed under an old maximum is mended by one factor when a larger one turns up:

    m' = max(m, max_j s_j)    l' = l e^(m - m') + sum_j e^(s_j - m')    acc' = acc e^(m - m') + sum_j e^(s_j - m') v_j

So a tile of keys can be forgotten once it has been used (FlashAttention: Dao et al. 2022, arXiv:2205.14135; Dao 2023,
arXiv:2307.08691). One kernel does everything. The rows of its query tile are the new tokens of one sequence times the
query heads that share a KV head, so that a key, once read, serves them all:

    KV head 1, heads 4 to 7, two tokens      row 0 1 2 3 4 5 6 7
                                             token 0 0 0 0 1 1 1 1      head 4 5 6 7 4 5 6 7

It is launched in two forms. Sequences with MANY new tokens: tall tiles, each of which walks through all its keys.
With FEW: tiles of 16 rows, and the walk itself is cut into pieces of SPLIT keys that run side by side, whose results
`merge_kernel` joins by the same rule (Flash-Decoding: Dao et al. 2023): else one long context would keep one
multiprocessor busy and leave a hundred idle. Form, tile and pieces follow from the sequence alone, never from the
batch or the number of multiprocessors, so a row gets the same bits whoever shares its batch.

The file imports anywhere and needs triton and an NVIDIA GPU only when called; the PyTorch version of
`paged_attention`, with the same signature, is in attention.py. Left out on purpose: gradients, dropout, other masks,
matrix products in 8 bits (the caches are widened in the kernel), AMD's GPUs (whose shared memory the tiles exceed),
tiles found by trying (they are written down below, per chip).

Shapes: B sequences, N packed tokens, H query heads, G KV heads, D head_dim, S keys, T queries of a sequence.
"""
from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import torch

triton: Any = None
if torch.version.cuda or "TRITON_INTERPRET" in os.environ:  # else 0.3 s of importing for nothing
    try:
        import triton  # type: ignore[no-redef]
        import triton.language as tl
    except ImportError:  # there is none outside Linux
        triton = None

FEW = 8  # new tokens of a sequence, up to which its keys are split: one, or the drafts to be verified
SPLIT = 512  # keys in a piece; a multiple of every BLOCK_N
CODES = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}

# ------------------------------------------------------------------ the two functions


def paged_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
                    kv_len: torch.Tensor, q_start: torch.Tensor, scale: float, *, max_q: int,
                    window: int | None = None, k_scale: torch.Tensor | None = None,
                    v_scale: torch.Tensor | None = None, return_lse: bool = False,
                    memo: dict | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of N packed new tokens to the cached keys of their own sequences, their own included.

    q            (N, H, D) float16, bfloat16 or float32, any strides; sequence b has the rows q_start[b] .. q_start[b+1]
    k_cache, v_cache   (n_blocks, block_size, G, D), any strides; in q's dtype, or int8 or float8_e4m3fn with
    k_scale, v_scale   (n_blocks, block_size, G) float32: one number for each token and KV head multiplies its codes
    block_table  (B, max_blocks) int32;  kv_len (B,) int32, the new tokens included;  q_start (B + 1,) int32
    scale        multiplies q.k, above 0;  max_q: at least the most new tokens of a sequence, known to the host
    window       how many keys a token sees at most, itself among them; None: all
    memo         not used: what one step's layers have in common costs nothing here (attention.py keeps it there)
    Returns (N, H, D) in q's dtype, and with return_lse the logarithm of each softmax's sum, (N, H) float32.

    Of a sequence's n new tokens the j-th sees the keys max(0, kv_len - n + j - window + 1) .. kv_len - n + j. A row
    without a key, or of no sequence, gives 0 and -inf. Slots from kv_len on are not read and may hold anything; query
    head h reads KV head h // (H / G). Nothing waits for the GPU. Scratch memory, if the table has room for more than
    SPLIT keys: 4 (D + 1) H bytes for each of B * min(max_q, FEW) rows and each SPLIT of those keys.
    ValueError for arguments that do not fit together.
    """
    B, quantized = kv_len.numel(), k_cache.dtype in CODES
    _check(q, k_cache, v_cache, scale, window)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    for name, x in scales.items():
        if (x is not None) != quantized or (quantized and (x.shape != k_cache.shape[:3] or x.dtype != torch.float32)):
            raise ValueError(f"a {k_cache.dtype} cache wants {name} " + (
                f"{tuple(k_cache.shape[:3])} float32" if quantized else "None") + ", not " + (
                "None" if x is None else f"{tuple(x.shape)} {x.dtype}"))
    if block_table.ndim != 2 or len(block_table) != B or q_start.shape != (B + 1,) or kv_len.ndim != 1:
        raise ValueError(f"block_table {tuple(block_table.shape)}, kv_len {tuple(kv_len.shape)} and q_start "
                         f"{tuple(q_start.shape)} must be (B, max_blocks), (B,) and (B + 1,)")
    if any(x.dtype != torch.int32 for x in (block_table, kv_len, q_start)):
        raise ValueError("block_table, kv_len and q_start must be int32")
    out, lse = _launch(q, k_cache, v_cache, scales, block_table, kv_len, q_start, scale, max_q,
                       block_table.shape[1] * k_cache.shape[1], True, window)
    return (out, lse) if return_lse else out


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = True, scale: float | None = None,
                    *, window: int | None = None,
                    return_lse: bool = False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T) v for q (B, T, H, D) and k, v (B, S, G, D), any strides: (B, T, H, D), lse (B, T, H).

    scale is D ** -0.5 unless given. causal aligns the mask to the bottom right: the last query sees all keys, query t
    the keys 0 .. S - T + t. window: as in `paged_attention`, for causal attention only.
    """
    if q.ndim != 4 or k.ndim != 4 or len(q) != len(k):
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must be (B, T, H, D) and (B, S, G, D)")
    (B, T, H, D), S = q.shape, k.shape[1]
    scale = D ** -0.5 if scale is None else scale
    _check(q.flatten(0, 1), k, v, scale, window)
    if k.dtype in CODES or (window is not None and not causal):
        raise ValueError("flash_attention takes no quantized keys, and a window only if causal: see paged_attention")
    # A sequence is one block, and its number is the block's: no table.
    starts = torch.arange(B + 1, dtype=torch.int32, device=q.device) * T
    out, lse = _launch(q.flatten(0, 1), k, v, {}, None, starts.new_full((B,), S), starts, scale, T, S, causal, window)
    out, lse = out.view(B, T, H, D), lse.view(B, T, H)
    return (out, lse) if return_lse else out


def _check(q, k, v, scale, window) -> None:
    interpreted = triton is not None and not isinstance(attention_kernel, triton.JITFunction)
    if triton is None or not (q.is_cuda or interpreted):
        raise ValueError("flash.py needs triton (pip install triton, on Linux) and an NVIDIA GPU, and q is on "
                         f"{q.device}: use attention.py's paged_attention, the same in PyTorch")
    if q.ndim != 3 or q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or not 1 <= q.shape[-1] <= 256:
        raise ValueError(f"q must be (N, H, D) in float16, bfloat16 or float32 with D from 1 to 256, not "
                         f"{tuple(q.shape)} {q.dtype}")
    if k.ndim != 4 or k.shape != v.shape or k.shape[3] != q.shape[2] or not k.shape[2] or q.shape[1] % k.shape[2]:
        raise ValueError(f"q {tuple(q.shape)} is (N, H, D), so keys and values must be (.., .., G, D) with G a divisor "
                         f"of H, not {tuple(k.shape)} and {tuple(v.shape)}")
    if k.dtype != v.dtype or (k.dtype != q.dtype and k.dtype not in CODES):
        raise ValueError(f"keys and values must be in q's {q.dtype}, int8 or float8_e4m3fn, not {k.dtype}, {v.dtype}")
    if not 0 < scale < math.inf or (window is not None and window < 1):
        raise ValueError(f"scale must be above 0 and window at least 1 (the token itself), not {scale} and {window}")


# ------------------------------------------------------------------ tiles and launches


def tile_config(cc: int, D: int, group: int, dtype: torch.dtype, codes: bool, many: bool, window: bool) -> dict:
    """Rows and keys of a tile, and launch options, for compute capability `cc` (80, 90, 100, 120; 0: interpreter).

    Reasoned from compiled code (no spilled registers, shared memory within the chip's), not measured. Nothing here may
    depend on the batch.
    """
    if cc == 0:
        return dict(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1)
    large = cc // 10 in (9, 10)  # instructions of their own for 64 rows and more, and 227 KiB of shared memory
    if dtype == torch.float32:  # no tensor cores, which would round to 10 bits, and twice the bytes
        rows, keys, warps, stages = 16, 16, 8, 3
    elif not many:  # bound by memory: what counts is tiles on their way. 16 rows is the least that tensor cores take
        rows, keys = min(64, max(16, triton.next_power_of_2(group))), 64 if D <= 64 or (large and D <= 128) else 32
        warps, stages = 4, 5
    elif large:
        rows, keys, warps, stages = (128, 32 if codes else 64, 8, 3) if D <= 128 else (64, 32, 8, 3)
    else:
        rows, (keys, warps), stages = 64 if D <= 128 else 32, (64, 4) if D <= 64 and not codes else (32, 8), 3
    # ptxas spills a few bytes where one more block then fits on a multiprocessor, unless told how many registers it may
    # take. Told so, the plain kernel for few tokens would lose that block, where (not on 86, 89, 120) there is shared
    # memory for it; in the usual widths it does not spill.
    free = not (many or codes or window) and (large or cc == 80) and D in (64, 128)
    return dict(BLOCK_M=rows, BLOCK_N=keys, num_warps=warps, num_stages=stages, maxnreg=None if free else 255)


def _launch(q, k, v, scales, block_table, kv_len, q_start, scale, max_q, capacity, causal, window):
    """capacity: a bound of kv_len that the host knows."""
    (N, H, D), G, B = q.shape, k.shape[2], len(kv_len)
    out = q.new_zeros(N, H, D)
    lse = torch.full((N, H), -math.inf, device=q.device)
    if out.numel() == 0 or B == 0 or max_q == 0 or capacity == 0:
        return out, lse
    interpreted = not isinstance(attention_kernel, triton.JITFunction)
    major, minor = (0, 0) if interpreted else torch.cuda.get_device_capability(q.device)
    code = CODES.get(k.dtype, "")
    k_scale, v_scale = (scales[name] if code else None for name in ("k_scale", "v_scale"))
    if code:  # fp8 as its bytes: chips before 89 have no such type, and the kernel needs none
        k, v = k.view(torch.int8), v.view(torch.int8)
    kv_len, q_start, few = kv_len.contiguous(), q_start.contiguous(), min(max_q, FEW)
    strides = [s for x, n in ((block_table, 2), (q, 3), (k, 4), (v, 4), (k_scale, 3), (v_scale, 3))
               for s in ((0,) * n if x is None else x.stride())]
    # The interpreter's tl.dot is wrong in bfloat16; on a GPU the operands keep q's dtype, for the tensor cores.
    dot = tl.float32 if interpreted else getattr(tl, str(q.dtype).removeprefix("torch."))
    shape = dict(D=D, BLOCK_D=max(16, triton.next_power_of_2(D)), CAUSAL=causal, WINDOW=window is not None)
    window = min(window or 0, capacity)  # a wider one sees no more, and pos - window could leave 32 bits
    with torch.cuda.device_of(q):
        for many in (False, True) if max_q > FEW else (False,):
            config = tile_config(10 * major + minor, D, H // G, q.dtype, bool(code), many, shape["WINDOW"])
            row_tiles = triton.cdiv((max_q if many else few) * (H // G), config["BLOCK_M"])
            n_splits = 1 if many else triton.cdiv(capacity, SPLIT)
            parts = [out, lse]
            if n_splits > 1:  # every piece that merge_kernel reads has been written: there is no need to clear them
                parts = [q.new_empty(B * few, H, n_splits, *d, dtype=torch.float32) for d in ((D,), ())]
            attention_kernel[(row_tiles * n_splits * G * B,)](
                q, k, v, k_scale, v_scale, *parts, block_table, kv_len, q_start, scale * math.log2(math.e),
                window, row_tiles, n_splits, few, *strides, H=H, G=G, CODE=code, DOT=dot, MANY=many, FEW=FEW,
                BLOCK_SIZE=k.shape[1] if block_table is not None else 0, SPLIT=SPLIT, PARTS=n_splits > 1, **shape,
                **config)
            if n_splits > 1:
                merge_kernel[(B * few * H,)](*parts, out, lse, kv_len, q_start, window, few, n_splits, H=H,
                                             SPLIT=SPLIT, CHUNK=16, num_warps=4, **shape)
    return out, lse


# ------------------------------------------------------------------ kernels

if triton is not None:

    @triton.jit
    def load_rows(ptr, d_stride, inside, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
        """(rows, BLOCK_D): the D elements that begin at each of ptr (rows,), then zeros; zeros where not inside."""
        d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
        if MASKED:
            x = tl.load(ptr[:, None] + d * d_stride, mask=inside[:, None] & (d < D), other=0)
        elif D < BLOCK_D:
            x = tl.load(ptr[:, None] + d * d_stride, mask=d < D, other=0)
        else:
            x = tl.load(ptr[:, None] + d * d_stride)
        return x

    @triton.jit
    def widen(x, CODE: tl.constexpr):
        """Codes as something that floats hold exactly; of fp8, 1/256 of it.

        The bits of float8_e4m3fn are s eeee mmm. Moved to the exponent's place in float16, s 0eeee mmm0000000, they
        are the same number, subnormal ones too, but for the bias: 15 there, 7 here.
        """
        if CODE == "fp8":
            x = x.to(tl.int16)
            bits = tl.where((x & 127) == 127, 0x7E00, (x << 7) & 0x3F80 | (x & 128) << 8)  # s 1111 111 is NaN
            x = bits.to(tl.int16).to(tl.float16, bitcast=True)
        return x

    @triton.jit
    def walk(acc, m, l, q, pos, begin, end, low, high, window, c, k_ptr, v_ptr, ks_ptr, vs_ptr, table_ptr,
             table_i, k_b, k_t, k_d, v_b, v_t, v_d, ks_b, ks_t, vs_b, vs_t, D: tl.constexpr, BLOCK_D: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, CODE: tl.constexpr, DOT: tl.constexpr,
             CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr):
        """The online softmax over the tiles of keys from begin to end. m counts in powers of two: c is scale * log2(e).

        MASKED: some row may not see some key. Keys outside low .. high, which no row sees, are not even loaded.
        """
        for start in tl.range(begin, end, BLOCK_N, num_stages=1 if MASKED else None):
            key = start + tl.arange(0, BLOCK_N)
            inside = (key >= low) & (key < high)
            block, slot = tl.zeros_like(key).to(tl.int64), key.to(tl.int64)
            if BLOCK_SIZE > 0:
                slot = (key % BLOCK_SIZE).to(tl.int64)
                block = tl.load(table_ptr + key // BLOCK_SIZE * table_i, mask=inside, other=0).to(tl.int64)
            k = load_rows(k_ptr + block * k_b + slot * k_t, k_d, inside, D, BLOCK_D, MASKED)  # (BLOCK_N, BLOCK_D)
            s = tl.dot(q, tl.trans(widen(k, CODE).to(DOT)), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
            if CODE != "":
                unit: tl.constexpr = 256.0 if CODE == "fp8" else 1.0
                k_scale = tl.load(ks_ptr + block * ks_b + slot * ks_t, mask=inside, other=0) * unit
                s *= k_scale[None, :]
            if MASKED:
                seen = inside[None, :]
                if CAUSAL:
                    seen &= key[None, :] <= pos[:, None]
                if WINDOW:
                    seen &= key[None, :] > pos[:, None] - window
                s = tl.where(seen, s, -float("inf"))
            m_new = tl.maximum(m, tl.max(s, 1) * c)
            # subtle: where a row has seen no key yet, m_new is -inf, and -inf - -inf is NaN.
            base = tl.where(m_new == -float("inf"), 0, m_new) if MASKED else m_new
            p = tl.exp2(s * c - base[:, None])
            old = tl.exp2(m - base)
            l = l * old + tl.sum(p, 1)
            v = widen(load_rows(v_ptr + block * v_b + slot * v_t, v_d, inside, D, BLOCK_D, MASKED), CODE)
            if CODE != "":
                v_scale = tl.load(vs_ptr + block * vs_b + slot * vs_t, mask=inside, other=0) * unit
                v = v.to(tl.float32) * v_scale[:, None]
            acc = tl.dot(p.to(DOT), v.to(DOT), acc * old[:, None], input_precision="ieee")
            m = m_new
        return acc, m, l

    @triton.jit(do_not_specialize=["window", "row_tiles", "n_splits", "few", "table_b"])
    def attention_kernel(q_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr, out_ptr, lse_ptr, table_ptr, kv_len_ptr, q_start_ptr, c,
                         window, row_tiles, n_splits, few, table_b, table_i, q_n, q_h, q_d, k_b, k_t, k_g, k_d,
                         v_b, v_t, v_g, v_d, ks_b, ks_t, ks_g, vs_b, vs_t, vs_g,
                         H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
                         BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr,
                         CODE: tl.constexpr, DOT: tl.constexpr, MANY: tl.constexpr, FEW: tl.constexpr,
                         PARTS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
        """One tile of query rows of one sequence and KV head against its keys; without MANY, against one piece of them.

        PARTS: out (B * few, H, n_splits, D) and lse without the last are for merge_kernel; else (N, H, D) and (N, H).
        """
        GROUP: tl.constexpr = H // G
        pid = tl.program_id(0)
        tile = row_tiles - 1 - pid % row_tiles  # the last first: they have the most keys
        piece = pid // row_tiles % n_splits
        g = pid // row_tiles // n_splits % G
        b = pid // row_tiles // n_splits // G
        first = tl.load(q_start_ptr + b)
        n, S = tl.load(q_start_ptr + b + 1) - first, tl.load(kv_len_ptr + b)
        if (tile * BLOCK_M >= n * GROUP) | ((n <= FEW) if MANY else (n > few)):
            return
        r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        alive = r < n * GROUP
        j, head = tl.minimum(r // GROUP, n - 1), g * GROUP + r % GROUP
        pos = S - n + j  # the last key that each row sees; that of the first and of the last row:
        early = S - n + tile * BLOCK_M // GROUP
        late = S - n + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, n - 1)

        low, every_low, high, every_high = 0, 0, S, S  # keys that some row sees: low .. high; that every row sees
        if CAUSAL:
            high, every_high = late + 1, early + 1
        if WINDOW:
            low, every_low = tl.maximum(early - window + 1, 0), tl.maximum(late - window + 1, 0)
        if not MANY:
            low, high = tl.maximum(low, piece * SPLIT), tl.minimum(high, piece * SPLIT + SPLIT)
        if low >= high:
            return  # rows without keys keep their 0 and -inf; a piece without any is not read
        # Tiles begin at multiples of BLOCK_N. Between `open` and `close` nothing is masked.
        begin = low // BLOCK_N * BLOCK_N
        opened = tl.minimum(tl.maximum(tl.cdiv(every_low, BLOCK_N) * BLOCK_N, begin), high)
        closed = tl.maximum(tl.maximum(tl.minimum(every_high, high), 0) // BLOCK_N * BLOCK_N, opened)
        # subtle: a number times a stride is 64 bits wide, as it passes 2 ** 31 long before either does.
        q_ptr = q_ptr + (first + j).to(tl.int64) * q_n + head.to(tl.int64) * q_h
        q = load_rows(q_ptr, q_d, alive, D, BLOCK_D, True).to(DOT)
        k_ptr, v_ptr = k_ptr + g.to(tl.int64) * k_g, v_ptr + g.to(tl.int64) * v_g
        if CODE != "":
            ks_ptr, vs_ptr = ks_ptr + g.to(tl.int64) * ks_g, vs_ptr + g.to(tl.int64) * vs_g
        if BLOCK_SIZE > 0:
            table_ptr += b.to(tl.int64) * table_b
        else:
            k_ptr, v_ptr = k_ptr + b.to(tl.int64) * k_b, v_ptr + b.to(tl.int64) * v_b
        m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        l = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for phase in tl.static_range(3):  # the window's edge, the open middle, the diagonal and the end
            if phase > 0 or WINDOW:
                start = begin if phase == 0 else opened if phase == 1 else closed
                end = opened if phase == 0 else closed if phase == 1 else high
                acc, m, l = walk(acc, m, l, q, pos, start, end, low, high, window, c, k_ptr, v_ptr, ks_ptr, vs_ptr,
                                 table_ptr, table_i, k_b, k_t, k_d, v_b, v_t, v_d, ks_b, ks_t, vs_b, vs_t, D, BLOCK_D,
                                 BLOCK_N, BLOCK_SIZE, CODE, DOT, CAUSAL, WINDOW, phase != 1)
        sums = tl.where(l == 0, 1, l)
        row = ((b * few if PARTS else first) + j).to(tl.int64)
        result = (row * H + head) * n_splits + piece
        d = tl.arange(0, BLOCK_D)[None, :]
        tl.store(out_ptr + (result[:, None] * D + d), (acc / sums[:, None]).to(out_ptr.dtype.element_ty),
                 mask=alive[:, None] & (d < D))
        tl.store(lse_ptr + result, m * 0.6931471805599453 + tl.log(sums), mask=alive)

    @triton.jit(do_not_specialize=["window", "few", "n_splits"])
    def merge_kernel(part_ptr, part_lse_ptr, out_ptr, lse_ptr, kv_len_ptr, q_start_ptr, window, few, n_splits,
                     H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr,
                     CHUNK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
        """One row of one head: the pieces that hold keys it sees, joined by the online softmax, CHUNK at a time."""
        pid = tl.program_id(0)
        head, j, b = pid % H, pid // H % few, pid // H // few
        first = tl.load(q_start_ptr + b)
        n, S = tl.load(q_start_ptr + b + 1) - first, tl.load(kv_len_ptr + b)
        last, low = S - 1, 0
        if CAUSAL:
            last = S - n + j
        if WINDOW:
            low = tl.maximum(last - window + 1, 0)
        if (j >= n) | (n > few) | (last < 0):
            return
        m, l, acc = -float("inf"), 0.0, tl.zeros((BLOCK_D,), tl.float32)
        for start in range(low // SPLIT, last // SPLIT + 1, CHUNK):
            piece = start + tl.arange(0, CHUNK)
            inside = piece <= last // SPLIT
            part = (pid.to(tl.int64) * n_splits) + piece  # pid counts the rows of part_ptr
            x = tl.load(part_lse_ptr + part, mask=inside, other=-float("inf"))
            m_new = tl.maximum(m, tl.max(x, 0))
            old, w = tl.exp(m - m_new), tl.exp(x - m_new)  # every row saw a key in each piece: m_new is finite
            acc = acc * old + tl.sum(w[:, None] * load_rows(part_ptr + part * D, 1, inside, D, BLOCK_D, True), 0)
            l, m = l * old + tl.sum(w, 0), m_new
        row = (first + j).to(tl.int64) * H + head
        d = tl.arange(0, BLOCK_D)
        tl.store(out_ptr + (row * D + d), (acc / l).to(out_ptr.dtype.element_ty), mask=d < D)
        tl.store(lse_ptr + row, m + tl.log(l))

# ------------------------------------------------------------------ demo


def online_softmax(scores: torch.Tensor, values: torch.Tensor, tile: int) -> Iterator[tuple[float, float, float]]:
    """The maximum m, the sum l and the output so far after each tile of scores (S,) and values (S,): what a kernel
    computes for one row and one dimension.

    >>> for m, l, out in online_softmax(torch.tensor([-0.45, -1.45]), torch.tensor([0.75, 0.13]), tile=2):
    ...     print(f"m {m:.2f}, l {l:.2f}, out {out:.3f}")
    m -0.45, l 1.37, out 0.583
    """
    m, l, acc = -math.inf, 0.0, 0.0
    for s, v in zip(scores.double().split(tile), values.double().split(tile)):
        m_new = max(m, s.max().item())
        p, old = (s - m_new).exp(), math.exp(m - m_new)
        m, l, acc = m_new, l * old + p.sum().item(), acc * old + (p @ v).item()
        yield m, l, acc / l


def demo() -> None:
    scores = torch.tensor([-0.45, -1.45, 0.55, -0.20, -3.00, 0.30, 1.75])
    values = torch.tensor([0.75, 0.13, 0.20, 0.90, 0.50, -0.40, 1.00])
    print("A row of attention in tiles of two keys (m: maximum, l: sum of e^(s - m), old: what a new maximum leaves):")
    before = -math.inf
    for i, (m, l, out) in enumerate(online_softmax(scores, values, 2)):
        tile = ", ".join(f"{s:5.2f}" for s in scores[2 * i: 2 * i + 2].tolist())
        print(f"  scores {tile:<13}  old x {math.exp(before - m):.3f}   m {m:5.2f}   l {l:.3f}   out so far {out:.4f}")
        before = m
    exact = (scores.double().softmax(0) @ values.double()).item()
    print(f"  the whole row at once: {exact:.4f}, difference {abs(out - exact):.0e}")
    print("\nThe same row in pieces of four keys that know nothing of each other, then merged:")
    pieces = [list(online_softmax(s, v, 2))[-1] for s, v in zip(scores.split(4), values.split(4))]
    top = max(m for m, _, _ in pieces)
    weights = [l * math.exp(m - top) for m, l, _ in pieces]
    for (m, l, out), w in zip(pieces, weights):
        print(f"  out {out:.4f}   log-sum-exp {m + math.log(l):.4f}   weight {w / sum(weights):.4f}")
    merged = sum(w * out for w, (_, _, out) in zip(weights, pieces)) / sum(weights)
    print(f"  merged: {merged:.4f}, difference {abs(merged - exact):.0e}")


if __name__ == "__main__":
    demo()
