"""attention.py - attention through a block table, in plain PyTorch.

The keys and values of a sequence lie in blocks, scattered over a pool; its block table says where. Attention takes
the new tokens of many sequences, packed one after the other, and for each of them the keys of its own sequence:

    block table of b   [5, 2]            pool, blocks of 4   ... 2: k4 k5 . .   ...   5: k0 k1 k2 k3 ...
    keys of b          k0 k1 k2 k3 k4 k5

The mask, stated once: of a sequence's n new tokens the j-th (from 0) sees keys 0 .. kv_len - n + j, of these the last
`window` if there is a window, which counts the token itself.

            keys  0 1 2 3 4                      keys  0 1 2 3 4
        new 0     x x x x .                  new 0     . . x x .        kv_len 5, n 2; on the right window 2
        new 1     x x x x x                  new 1     . . . x x        (torch's is_causal would align it top left)

`paged_attention` is what a CPU runs, `reference_attention` the same in a few slow lines, to be compared with; a GPU
kernel of the same signature takes their place. What makes the difference on a CPU:

- query heads that share a key/value head become rows of one product with it (grouped-query attention)
- blocks that lie in one run are read in place, others are gathered first
- few new tokens of many sequences of like length go as one padded batch, not in a loop
- what the layers of a step have in common (which keys, where they lie, masks) is worked out once and kept in a memo
- a chunk of a prompt is cut into groups of rows, so that no mask grows with rows times keys, and keys behind a group
  are not read; in bfloat16 groups are plain products and a softmax, in 0.4 of the time of torch's own attention
- keys of another type than the queries are converted a piece at a time, and the scales of a quantized cache multiply
  scores and weights (one number a key), not keys and values (head_dim numbers). Pieces are joined by the log-sum-exp of
  their scores, as in FlashAttention (Dao et al. 2022, after Milakov and Gimelshein 2018)

Left out on purpose: ALiBi, soft caps, attention sinks, dropout, gradients through the cache.

Shapes: B sequences, N packed tokens, n new tokens of one, H query heads, G key/value heads,
D head_dim, S cached length.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F

FEW_ROWS = 8  # sequences with at most so many new tokens share a padded batch,
SHORT = 1024  # if they have at most so many keys: reading longer ones in place is faster than copying them
MASK_CELLS = 1 << 23  # rows times keys of one mask at most
FEW_KEYS = 32  # and lengths up to this count as alike, longer ones within a factor of two
RUNS = 4  # of keys in the pool that one row reads where they lie; with more it reads a copy
PIECE = 1024  # keys of a quantized cache that become floating point at once
ROWS = 128  # of a longer prompt at once: keys that none of them sees are not read. torch reads half of them in vain
PRODUCTS = 128  # rows of a product from which on, in bfloat16 on a CPU, plain products take 0.4 of torch's attention
MANY_KEYS = 2048  # from which on, in bfloat16 on a CPU, plain products are faster for one row, too, see `_attend_one`

# ------------------------------------------------------------------ the plain form


def reference_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
                        kv_len: torch.Tensor, q_start: torch.Tensor, scale: float, *, max_q: int,
                        window: int | None = None, k_scale: torch.Tensor | None = None,
                        v_scale: torch.Tensor | None = None, return_lse: bool = False, memo: dict | None = None):
    """Attention through a block table, slow and plain: sequence by sequence, all scores at once.

    q (N, H, D) -> (N, H, D), and the log-sum-exp (N, H) if asked; the other arguments are paged_attention's.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device)
    block_size, G, group = k_cache.shape[1], k_cache.shape[2], q.shape[1] // k_cache.shape[2]
    for blocks, S, begin, end in zip(block_table.tolist(), kv_len.tolist(), q_start.tolist(), q_start.tolist()[1:]):
        at = torch.arange(S, device=q.device)
        at = torch.tensor(blocks, device=q.device)[at // block_size], at % block_size
        k, v = k_cache[at].to(dtype), v_cache[at].to(dtype)  # (S, G, D)
        if k_scale is not None:
            k, v = k * k_scale[at][..., None].to(dtype), v * v_scale[at][..., None].to(dtype)
        rows = q[begin:end].to(dtype).unflatten(1, (G, group))  # (n, G, H/G, D)
        age = S - (end - begin) + torch.arange(end - begin, device=q.device)[:, None] - torch.arange(S, device=q.device)
        hidden = age < 0 if window is None else (age < 0) | (age >= window)  # (n, S); age: how far back a key lies
        scores = torch.einsum("nghd,sgd->nghs", rows, k) * scale
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        lse[begin:end] = scores.logsumexp(-1).flatten(1)
        weights = scores.softmax(-1).masked_fill(hidden.all(1)[:, None, None, None], 0)  # no key: zeros, not NaN
        out[begin:end] = torch.einsum("nghs,sgd->nghd", weights, v).flatten(1, 2).to(q.dtype)
    return (out, lse) if return_lse else out


# ------------------------------------------------------------------ the fast form


def paged_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
                    kv_len: torch.Tensor, q_start: torch.Tensor, scale: float, *, max_q: int,
                    window: int | None = None, k_scale: torch.Tensor | None = None,
                    v_scale: torch.Tensor | None = None, return_lse: bool = False, memo: dict | None = None,
                    alone: bool = False):
    """Attention of N packed new tokens to the cached keys of their own sequences, their own included.

    q            (N, H, D), sequence b's rows are q_start[b] .. q_start[b + 1]
    k_cache, v_cache   (n_blocks, block_size, G, D), any strides; H is a multiple of G, head h reads KV head h // (H/G)
    block_table  (B, max_blocks) int32;  kv_len (B,) keys of each sequence, the new ones included;  q_start (B + 1,)
    scale        multiplies q.k, usually D ** -0.5;  max_q: most new tokens of one sequence (kernels size grids by it)
    window       a token sees so many keys at most, itself included
    k_scale, v_scale   (n_blocks, block_size, G) float32: then the caches hold codes, worth code * scale
    memo         a dict, empty at first, kept by the caller for as long as these index tensors, the window and the
                 caches' strides stay as they are, that is for the layers of one step: the first one leaves there what
                 all have in common
    alone        each sequence by itself and from a copy of its keys: slower, but the bits of its rows depend neither on
                 who else is in the step nor on where its blocks lie
    Returns (N, H, D), with return_lse also the natural log-sum-exp of the scores (N, H), float32 or wider.

    A row that sees no key at all (kv_len < n) gives zeros, and -inf as log-sum-exp.
    """
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, but counts the token itself and must be 1 or more")
    caches = (k_cache, v_cache) if k_scale is None else (k_cache, v_cache, k_scale[..., None], v_scale[..., None])
    memo = {} if memo is None else memo
    if "parts" not in memo:
        in_place = not alone and all(_in_a_row(cache) for cache in caches)
        memo["parts"] = _parts(block_table, kv_len, q_start, k_cache.shape[1], window, in_place,
                               0 if alone else FEW_ROWS)
        memo["rows"], part = q_start.tolist()[-1], memo["parts"][0] if memo["parts"] else None
        memo["one"] = part is not None and len(q) == part.B == part.n == 1 and 0 < len(part.runs) <= RUNS
    assert memo["rows"] == len(q), f"q has {len(q)} rows, but q_start ends at {memo['rows']}"
    parts = memo["parts"]
    if memo["one"] and k_cache.dtype == q.dtype and not return_lse:
        return _attend_one(q, k_cache, v_cache, parts[0], scale)
    if len(parts) == 1 and parts[0].B * parts[0].n == len(q):  # nothing to put together
        out, lse = _attend_part(q, caches, parts[0], scale, return_lse)
        return (out, lse) if return_lse else out
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=_wide(q), device=q.device)
    for part in parts:
        out[part.rows], sums = _attend_part(q[part.rows], caches, part, scale, return_lse)
        if return_lse:
            lse[part.rows] = sums
    return (out, lse) if return_lse else out


def _wide(q: torch.Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


@dataclass(eq=False)
class _Part:
    """Sequences that are computed together, with all that their layers have in common."""

    rows: slice | torch.Tensor  # which of the packed new tokens
    B: int  # sequences
    n: int  # new tokens of each
    S: int  # keys of each, or of the longest
    W: int  # of these the last W are read, all that a window lets be seen; shorter sequences are padded to W
    window: int  # of a token; S if there is none
    runs: tuple = ()  # of one sequence that is read in place: the slot where each run of its keys begins, and its keys
    slots: torch.Tensor | None = None  # (B * W,), where keys lie that are not one run
    hidden: torch.Tensor | None = None  # (B, n, W), of several sequences: True where a key is not seen
    masks: dict = field(default_factory=dict)  # by kind, see `_mask`


def _parts(block_table: torch.Tensor, kv_len: torch.Tensor, q_start: torch.Tensor, block_size: int,
           window: int | None, in_place: bool, few_rows: int = FEW_ROWS) -> list[_Part]:
    """The parts of a step; sequences without new tokens or without keys are in none. in_place: runs can be views."""
    starts, lengths, device, parts = q_start.tolist(), kv_len.tolist(), block_table.device, []
    for batch in _batches(starts, lengths, few_rows):
        b, B = batch[0], len(batch)
        n, S = starts[b + 1] - starts[b], max(lengths[b] for b in batch)
        seen = S if window is None else min(window, S)
        rows = slice(starts[b], starts[batch[-1] + 1])
        if rows.stop - rows.start > B * n:  # others are among them
            rows = torch.tensor([r for b in batch for r in range(starts[b], starts[b + 1])], device=device)
        part = _Part(rows, B, n, S, min(S, seen + n - 1), seen)
        if B == 1:
            first, blocks = S - part.W, block_table[b]
            numbers = blocks[first // block_size: -(-S // block_size)].tolist()
            if in_place:
                part.runs = _runs(numbers, block_size, first % block_size, part.W)
            if len(part.runs) != 1:
                t = torch.arange(first, S, device=device)
                part.slots = blocks.index_select(0, t // block_size) * block_size + t % block_size
        else:
            mine = None if len(lengths) == B else torch.tensor(batch, device=device)
            table, ends = (x if mine is None else x.index_select(0, mine) for x in (block_table, kv_len))
            _pad_together(part, table, ends, block_size)
        parts.append(part)
    return parts


def _runs(blocks: list[int], block_size: int, skip: int, W: int) -> tuple[tuple[int, int], ...]:
    """Where W keys lie, behind the first `skip` tokens of these blocks: the first slot of each run, and its length.

    >>> _runs([5, 6, 2], 4, 1, 8)   # tokens 1 .. 3 of block 5, all of block 6, one of block 2
    ((21, 7), (8, 1))
    """
    begins = [i for i, block in enumerate(blocks) if not i or block != blocks[i - 1] + 1] + [len(blocks)]
    runs = []
    for begin, end in pairwise(begins):
        first, last = max(begin * block_size, skip), min(end * block_size, skip + W)
        runs.append((blocks[begin] * block_size + first - begin * block_size, last - first))
    return tuple(runs)


def _pad_together(part: _Part, table: torch.Tensor, kv_len: torch.Tensor, block_size: int) -> None:
    """Slots and mask of several sequences, table (B, max_blocks), kv_len (B,).

    subtle: a key that pads is a copy of its sequence's first key, which is masked. Were it read from where the padding
    points to, it could be NaN, and 0 * NaN is NaN.
    """
    t = (kv_len - part.W).clamp(min=0)[:, None] + torch.arange(part.W, device=table.device)  # (B, W), which keys
    at = kv_len[:, None] - part.n + torch.arange(part.n, device=table.device)  # (B, n), where the new tokens stand
    age = at[..., None] - t[:, None]  # (B, n, W), how far back a key lies
    part.hidden = (age < 0) | (age >= part.window)
    slots = table.gather(1, t // block_size) * block_size + t % block_size  # (B, W)
    part.slots = torch.where(t < kv_len[:, None], slots, slots[:, :1]).flatten()


def _batches(starts: list[int], lengths: list[int], few_rows: int = FEW_ROWS) -> list[list[int]]:
    """Which sequences to compute together: each one alone, but those of few new tokens and few keys by like length.

    >>> _batches([0, 1, 2, 9, 10, 11], [500, 30, 7, 40, 600])   # of one new token, but for the third
    [[1, 3], [0, 4], [2]]
    """
    batches, few = [], []
    for b, S in enumerate(lengths):
        n = starts[b + 1] - starts[b]
        if n and S:
            few.append((n, S, b)) if n <= few_rows and n <= S <= SHORT else batches.append([b])
    count = most = 0
    for n, S, b in sorted(few):
        if n != count or most < S:
            count, most = n, max(2 * S, FEW_KEYS)
            batches.append([])
        batches[-1].append(b)
    return [sorted(batch) for batch in batches]


def _attend_part(q: torch.Tensor, caches: tuple, part: _Part, scale: float, return_lse: bool) -> tuple:
    """The new tokens q (B * n, H, D) of a part's sequences -> (B * n, H, D), log-sum-exp (B * n, H) or None."""
    (_, H, D), G, B, n, S, W = q.shape, caches[0].shape[2], part.B, part.n, part.S, part.W
    group, keys = H // G, [_read(cache, part) for cache in caches]  # (G, B, W, D)
    if 1 < n == S == part.window < ROWS and B == 1 and caches[0].dtype == q.dtype and not return_lse:
        # A short prompt, whole: torch's own causal mask is right here and needs no (n, S) matrix.
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], *(k.transpose(0, 1) for k in keys),
                                             is_causal=True, scale=scale, enable_gqa=True)  # (1, H, n, D)
        return out[0].transpose(0, 1), None
    at_once = n if B > 1 else max(1, min(n, ROWS, MASK_CELLS // (group * S)))
    whole = n <= min(at_once, S)
    out, lse = (None, None) if whole else (torch.zeros_like(q), torch.full((n, H), -torch.inf, dtype=_wide(q),
                                                                           device=q.device))
    for begin in range(max(0, n - S), n, at_once):  # of one sequence the first n - S rows, if any, see nothing
        end = min(begin + at_once, n)
        last, r = S - n + end, end - begin  # of one sequence these rows see keys before `last`
        since = 0 if B > 1 else max(0, last - r - part.window + 1)
        seen = keys if whole else [k[:, :, since - S + W: last - S + W] for k in keys]
        rows = (q if whole else q[begin:end]).view(B, r, G, group, D)
        rows = rows.permute(2, 0, 3, 1, 4).reshape(G, B, group * r, D)
        additive = caches[0].dtype == q.dtype and not return_lse
        if (additive and B == 1 and q.dtype == torch.bfloat16 and q.device.type == "cpu" and last <= part.window
                and group * r >= PRODUCTS and last > r):
            piece, sums = _products(rows, seen[0], seen[1], part, r, scale), None
        else:
            mask = None if n == B == 1 else _mask(part, r, since, last, group, q, additive, group * n * S <= MASK_CELLS)
            piece, sums = _attend(rows, *seen, mask=mask, scale=scale, return_lse=return_lse)
        piece = piece.view(G, B, group, r, D).permute(1, 3, 0, 2, 4).reshape(B * r, H, D)
        sums = None if sums is None else sums.view(G, B, group, r).permute(1, 3, 0, 2).reshape(B * r, H)
        if whole:
            return piece, sums
        out[begin:end] = piece
        if return_lse:
            lse[begin:end] = sums
    return out, lse


def _products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: _Part, r: int, scale: float) -> torch.Tensor:
    """The last r new tokens before the keys' end, q (G, 1, group * r, D), against k, v (G, 1, S, D); r < S, no window.

    torch multiplies such matrices several times faster than it attends.
    subtle: a score of 100, rounded to bfloat16, is off by up to a quarter, and so is its key's weight. Qwen2's are so
    high, as all of its keys have one large bias. Softmax does not mind what is taken off all scores of a row, so the
    keys' mean is taken off the keys, as in SageAttention (Zhang et al. 2024): that leaves what makes a difference. It
    is that of the keys before all of these rows, or the bits of a row would depend on what comes after it.
    """
    G, R, S = q.shape[0], q.shape[2], k.shape[2]
    k = k - k[:, :, : S - r].mean(2, keepdim=True)
    scores = torch.baddbmm(q.new_empty(1).expand(G, R, S), q[:, 0], k[:, 0].mT, beta=0, alpha=scale)
    if ("later", r) not in part.masks:  # only among the rows' own keys is there one that a row does not see
        part.masks["later", r] = torch.full((r, r), -torch.inf, dtype=q.dtype, device=q.device).triu_(1)
    scores.view(G, R // r, r, S)[..., S - r:].add_(part.masks["later", r])
    return (scores.softmax(-1) @ v[:, 0])[:, None]


def _attend_one(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, part: _Part,
                scale: float) -> torch.Tensor:
    """The one new token q (1, H, D) of one sequence whose keys lie in few runs: decoding, at its shortest.

    Many keys are plain products, as in `_products`, and with torch's usual order of factors reversed: keys times
    queries, (S, D) (D, group), for which keys need not be brought into another order. 4,097 keys take 0.7 of the
    time of torch's own attention and of the other order. In two runs, of a prefix that others share and what came after
    it, they would have to be copied for those, which takes half as long again.
    """
    (_, H, D), G = q.shape, k_cache.shape[2]
    if part.W < MANY_KEYS or q.dtype != torch.bfloat16 or q.device.type != "cpu":
        k, v = _read(k_cache, part), _read(v_cache, part)  # (G, 1, W, D)
        return F.scaled_dot_product_attention(q.view(G, 1, H // G, D), k, v, scale=scale).view(1, H, D)
    queries = (q.view(G, H // G, D) * scale).mT  # (G, D, group)
    keys, values = ([_run(cache, *run)[:, 0] for run in part.runs] for cache in (k_cache, v_cache))
    # As in `_products`, but keys that are read once are not copied for it: off each query's scores goes about the
    # highest of them, that of 32 keys, and within the product, which adds before it rounds.
    some = max(keys, key=lambda k: k.shape[1])
    low = -(some[:, :: max(1, some.shape[1] // 32)] @ queries).amax(1, keepdim=True)  # (G, 1, group)
    scores = [torch.baddbmm(low.expand(-1, k.shape[1], -1), k, queries) for k in keys]  # (G, W, group)
    if len(keys) == 1:
        return (scores[0].mT.softmax(-1) @ values[0]).view(1, H, D)
    weights = torch.cat(scores, 1).mT.softmax(-1).split([n for _, n in part.runs], -1)
    out = weights[0] @ values[0]
    for w, v in zip(weights[1:], values[1:]):
        out.baddbmm_(w, v)
    return out.view(1, H, D)


def _mask(part: _Part, r: int, since: int, last: int, group: int, q: torch.Tensor, additive: bool,
          keep: bool) -> torch.Tensor:
    """Mask (1, B, group * r, keys) of r new tokens and keys since .. last - 1, the newest rows' last: True where a key
    is not seen; additive: -inf there and 0 elsewhere, in q's dtype. All layers have the same: it is kept if asked.
    """
    kind = r, last, group, additive, q.dtype
    if kind in part.masks:
        return part.masks[kind]
    if part.hidden is not None:
        hidden = part.hidden
    else:
        corner, seen = last - since - r, torch.ones(r, last - since, dtype=torch.bool, device=q.device)
        hidden = seen.tril_(corner).triu_(corner - part.window + 1).logical_not_()[None]
    mask = hidden.repeat(1, group, 1)[None]
    if additive:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(mask, -torch.inf)
    if keep:
        part.masks[kind] = mask
    return mask


def _in_a_row(cache: torch.Tensor) -> bool:  # whether each block begins where the one before it ends
    return cache.stride(0) == cache.shape[1] * cache.stride(1)


def _read(cache: torch.Tensor, part: _Part) -> torch.Tensor:
    """The keys (or values, or scales) of a part, (G, B, W, D): a view, if they lie in one run.

    Slots behind S are cut off before anything is computed: masking their scores would not do, 0 * NaN is NaN.
    """
    if len(part.runs) == 1:
        return _run(cache, *part.runs[0])
    if _in_a_row(cache):
        picked = cache.flatten(0, 1).transpose(0, 1).index_select(1, part.slots)  # 5 times faster than indexing
    else:
        picked = cache[part.slots // cache.shape[1], part.slots % cache.shape[1]].transpose(0, 1)
    return picked.unflatten(1, (part.B, part.W))


def _run(cache: torch.Tensor, slot: int, n: int) -> torch.Tensor:
    """The n keys from this slot on, a view (G, 1, n, D): one operation instead of four, as it runs twice a layer."""
    _, token, head, dim = cache.stride()
    at = cache.storage_offset() + slot * token
    return cache.as_strided((cache.shape[2], 1, n, cache.shape[3]), (head, 0, token, dim), at)


# ------------------------------------------------------------------ one product with keys, one with values


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_scale: torch.Tensor | None = None,
            v_scale: torch.Tensor | None = None, *, mask: torch.Tensor | None, scale: float, return_lse: bool) -> tuple:
    """q (X, Y, R, D) against k, v (X, Y, S, D), scales (X, Y, S, 1), True in the mask where a key is not seen; where
    torch's own attention runs (no codes, no sums) the mask is added to the scores.

    Returns (X, Y, R, D), and the log-sum-exp (X, Y, R) if asked.
    """
    if k.dtype == q.dtype and not return_lse:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale), None
    dtype, rows = _wide(q), q.to(_wide(q)) * scale
    outs, sums = [], []
    for i in range(0, k.shape[-2], PIECE):
        piece = slice(i, i + PIECE)
        scores = rows @ _from_codes(k[..., piece, :], dtype).mT  # (X, Y, R, keys)
        if k_scale is not None:
            scores *= k_scale[..., piece, :].mT
        if mask is not None:
            scores.masked_fill_(mask[..., piece], -torch.inf)
        sums.append(scores.logsumexp(-1, keepdim=True) if return_lse or k.shape[-2] > PIECE else None)
        weights = scores.softmax(-1)
        if sums[-1] is not None and mask is not None:  # a row that sees no key of this piece: zeros, not NaN
            weights.masked_fill_(sums[-1] == -torch.inf, 0)
        if v_scale is not None:
            weights *= v_scale[..., piece, :].mT
        outs.append(weights @ _from_codes(v[..., piece, :], dtype))  # (X, Y, R, D)
    if len(outs) == 1:
        return outs[0].to(q.dtype), sums[0].squeeze(-1) if return_lse else None
    lse = torch.stack(sums).logsumexp(0)
    out = sum(out * (part - lse).exp() for out, part in zip(outs, sums))  # each piece by its share of all weight
    return out.to(q.dtype), lse.squeeze(-1) if return_lse else None  # type: ignore[union-attr]


def _from_codes(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes as floating point, exactly. fp8 on the CPU takes a detour, a fifth as long as torch's own conversion.

    e4m3 is sign, 4 bits of exponent (bias 7), 3 of mantissa; shifted under float16's exponent (bias 15) it is the same
    number times 2 ** -8, subnormals included. Only NaN is lost (480): codes are finite.

    >>> _from_codes(torch.tensor([1.0, -448, 2 ** -9, 0]).to(torch.float8_e4m3fn), torch.float32).tolist()
    [1.0, -448.0, 0.001953125, 0.0]
    """
    if codes.dtype != torch.float8_e4m3fn or codes.device.type != "cpu":
        return codes.to(dtype)
    bits = codes.view(torch.int8).to(torch.int16)  # s s s s s s s s  s e e e e m m m
    bits = bits.bitwise_left_shift_(7).bitwise_and_(-0x4001)  # s 0 e e e e m m  m 0 0 0 0 0 0 0
    return bits.view(torch.float16).to(dtype).mul_(256)


# ------------------------------------------------------------------ demo

if __name__ == "__main__":
    torch.manual_seed(0)
    H, G, D, block_size = 6, 2, 16, 4
    k_cache, v_cache = (torch.full((10, block_size, G, D), math.nan) for _ in range(2))  # never written: NaN
    tables, lengths, counts = [[7, 2, 5], [4]], [9, 3], [2, 3]  # a draft of one checked behind 7 keys; a prompt of 3
    for blocks, S in zip(tables, lengths):
        for t in range(S):
            k_cache[blocks[t // block_size], t % block_size], v_cache[blocks[t // block_size], t % block_size] = (
                torch.randn(2, G, D))
    q = torch.randn(sum(counts), H, D)
    arguments = (q, k_cache, v_cache, torch.tensor([[7, 2, 5], [4, 0, 0]], dtype=torch.int32), torch.tensor(lengths),
                 torch.tensor([0, 2, 5]), D ** -0.5)
    print("Which keys new tokens see, of sequences whose blocks lie anywhere in the pool:")
    for S, n, blocks in zip(lengths, counts, tables):
        print(f"\n{n} new tokens of a sequence of {S} in blocks {blocks}")
        for window in (None, 3):
            print(f"  keys seen, {'no window' if window is None else f'window {window}'}")
            for j in range(n):
                seen = [0 <= S - n + j - t < (window or S) for t in range(S)]
                print(f"    new {j}   " + " ".join("x" if s else "." for s in seen))
    for window in (None, 3):
        fast, lse = paged_attention(*arguments, max_q=3, window=window, return_lse=True)
        slow, lse_slow = reference_attention(*arguments, max_q=3, window=window, return_lse=True)
        print(f"\n{f'Window {window}' if window else 'No window'}: the fast form differs from the plain one by "
              f"{(fast - slow).abs().max():.1e}, in the log-sum-exp by {(lse - lse_slow).abs().max():.1e}.")

    print("\nA softmax in pieces, scores 1 3 | 2 5 | 0 and values 10 20 | 30 40 | 50:")
    scores, values = torch.tensor([1.0, 3, 2, 5, 0]), torch.tensor([10.0, 20, 30, 40, 50])
    parts = [(scores[i: i + 2], values[i: i + 2]) for i in range(0, 5, 2)]
    sums = torch.stack([s.logsumexp(0) for s, _ in parts])
    for (s, v), part in zip(parts, sums):
        print(f"  keys {s.tolist()}: mean of values {s.softmax(0) @ v:.4f}, log-sum-exp {part:.4f}, "
              f"share {(part - sums.logsumexp(0)).exp():.4f}")
    joined = sum((part - sums.logsumexp(0)).exp() * (s.softmax(0) @ v) for (s, v), part in zip(parts, sums))
    print(f"  joined by their shares: {joined:.4f}; all at once: {scores.softmax(0) @ values:.4f}")
