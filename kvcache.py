"""kvcache.py - the paged KV cache: keys and values of many sequences in one pool of small blocks.

The one idea (Kwon et al. 2023, "PagedAttention"): a sequence's keys and values need not lie in one piece. The pool
is cut into blocks of `block_size` tokens; a sequence owns a list of block numbers, its block table; token t of the
sequence lies in slot `table[t // block_size] * block_size + t % block_size`. So memory is taken as a sequence grows
and no more than a part of its last block is ever reserved in vain.

    tokens of A   [the sky is blue | because of  .  . ]        block table of A: 3 1
    tokens of B   [hello .  .  .   ]                           block table of B: 0
    pool          0: hello . . .   1: because of . .   2: free   3: the sky is blue   trash

There is one operation, "extend sequence i by these ids": a prefill, a chunk of one, a decode step and the check of a
draft are the same thing with other counts.

    cached = cache.add("a", prompt)                 begins a sequence; so many tokens of its prompt are there already
    step   = cache.extend({"a": prompt[cached:]})   all or nothing: reserves slots, fills this step's index tensors
    logits = model(step.tokens, step.positions, step.attend, step.rows)
    cache.commit(step)                              or commit(step, keep={"a": 1}); or, after an error, rollback(step)

**Sharing.** Block tables may hold the same block; a count says how many do.

- Prefix cache: a full block whose tokens are committed is published under a key that chains over everything before
  it, key = hash(key of the block before, tokens), and over an optional salt, which keeps users apart. A hit compares
  tokens and parent as well, so a collision is a miss. A published block that nobody holds any more is evictable: it
  stays until its room is needed, the longest unused first, and the tail of a chain before its front, as a block is
  worth nothing without those before it. Two sequences that compute the same block end up holding one.
- Copy-on-write: `fork` shares all blocks with a child, for parallel samples and beams. Who writes into a block that
  others hold copies it first.

         free  --take-->  used (count 1, 2, ..)  --count 0, published-->  evictable  --evict-->  free
                               ^------------------- found by a prefix ---------'

**Quantized.** dtype "int8" or "fp8" (e4m3) stores codes and one float32 scale for each token and head: absmax / 127 or
absmax / 448, all zero: 1. Attention reads codes and scales, also for the tokens of the same step, so results do not
depend on chunking. NaN or inf in K or V make that token's head NaN: never a plausible number. KIVI (Liu et al. 2024)
scales keys by channel over groups of tokens, since a few channels of K are always large, which matters at 2 bits. But
a group is complete only every so many tokens: the newest stay in 16 bits, and whether a token is read quantized depends
on when it is asked for. At 8 bits one scale for each token and head is enough, and keeps every token for itself.

The cache owns the K/V tensors, lengths, block tables and counts; everybody else asks by sequence id. Each layer has
one K and one V tensor, never zeroed: whatever a slot held before is not read. On the CPU a tensor is laid out head by
head, so that attention reads a head's keys in one run; its logical shape is (n_blocks, block_size, G, D) all the same.
Unquantized ones are parts of one tensor there, `pool` (L, 2, G, n_blocks + 1, block_size, D): a compiled step takes it
as one argument, and reads only, since writing into it would make that step copy it. One block behind the others takes
the writes of padded slots, so that a step of fixed size (a CUDA graph) harms nobody.

Left out: blocks behind a sliding window are not given back; nothing is swapped by itself (see `export`, `import_`).

Shapes: B sequences, N packed tokens, H query heads, G key/value heads, D head_dim, S cached length, L layers.
"""
from __future__ import annotations

import hashlib
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import index
from typing import Any, NamedTuple

import torch

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# ------------------------------------------------------------------ attention, plain


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


# ------------------------------------------------------------------ one step


class OutOfBlocks(RuntimeError):
    """The pool has too few free blocks for a plan. `needed` and `free` count blocks; nothing was changed."""

    def __init__(self, needed: int, free: int, block_size: int):
        self.needed, self.free = needed, free
        super().__init__(f"the KV cache has {free} free blocks of {block_size} tokens, but this step needs {needed} "
                         "more; finish or free a sequence, or make the pool larger")


@dataclass(frozen=True, eq=False)
class Step:
    """What one pass of the model computes, as index tensors on the cache's device. Read it, do not change it."""

    tokens: torch.Tensor  # (N,) int64, the new ids of all sequences, packed
    positions: torch.Tensor  # (N,) int64, each token's place in its sequence
    slots: torch.Tensor  # (N,) int64, where its K and V are written
    block_table: torch.Tensor  # (B, max_blocks) int32, padded with the trash block
    kv_len: torch.Tensor  # (B,) int32, keys of each sequence after this step's writes
    q_start: torch.Tensor  # (B + 1,) int32, sequence b's tokens are q_start[b] .. q_start[b + 1]
    seqs: tuple[Hashable, ...]  # the sequences in packed order
    n_new: tuple[int, ...]  # new tokens of each
    max_q: int  # the largest of n_new
    rows: torch.Tensor  # (R,) int64, the tokens whose logits are wanted: of each sequence the last, or as asked
    attend: Callable  # attend(layer, q, k, v) -> out: writes K/V into their slots, then attends

    def last(self, counts: Mapping[Hashable, int] | None = None) -> torch.Tensor:
        """Indices (R,) of the last counts[seq] tokens of each sequence; of the last one of every sequence if None."""
        rows, end = [], 0
        for seq, n in zip(self.seqs, self.n_new):
            end += n
            want = 1 if counts is None else counts.get(seq, 0)
            assert 0 <= want <= n, f"{want} rows asked of sequence {seq!r}, which has {n} in this step"
            rows.extend(range(end - want, end))
        return torch.tensor(rows, dtype=torch.int64, device=self.tokens.device)


@dataclass
class Stats:
    """Counted since the cache was made."""

    asked: int = 0  # tokens given to `add`
    found: int = 0  # of these, tokens that were in the cache
    evicted: int = 0  # published blocks that made room
    copied: int = 0  # blocks copied on write


class _Published(NamedTuple):
    """Why a block may be given to others: what it holds, and behind what."""

    key: bytes
    parent: int | None  # the block before it, itself published; None: it is the first
    salt: str
    tokens: tuple[int, ...]
    children: set[int]  # published blocks behind it


@dataclass(eq=False)
class _Sequence:
    salt: str = ""
    tokens: list[int] = field(default_factory=list)  # committed: their K/V is in the pool
    blocks: list[int] = field(default_factory=list)  # the block table
    published: int = 0  # the first so many blocks are published
    step: Step | None = None  # the open step, if any
    new: tuple[int, ...] = ()  # its ids
    shared: int = sys.maxsize  # blocks behind so many tokens are neither found nor published


def _key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a block, from the key of the block before it: the same in every process."""
    return hashlib.blake2b(parent + struct.pack(f"<{len(tokens)}q", *tokens), digest_size=16).digest()


def _root(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"salt").digest()


def _whole_numbers(seq: Hashable, ids: Sequence[int]) -> tuple[int, ...]:
    try:
        ids = tuple(map(index, ids))  # int() would turn 2.7 into 2 and "5" into 5
    except TypeError as error:
        raise ValueError(f"the new ids of sequence {seq!r} are no list of whole numbers: {error}") from None
    if ids and not 0 <= min(ids) <= max(ids) < 2**31:
        raise ValueError(f"the new ids of sequence {seq!r} run from {min(ids)} to {max(ids)}, not within 0 .. 2^31")
    return ids


# ------------------------------------------------------------------ sizes and codes


def _stored_as(dtype: torch.dtype | str) -> torch.dtype:
    dtype = CODES.get(dtype, dtype)  # type: ignore[arg-type]  # a dtype is no key of it
    if dtype not in FLOATS and dtype not in LARGEST:
        raise ValueError(f"dtype of the KV cache is {dtype!r}, but must be torch.float64, float32, float16, bfloat16, "
                         "or int8 or fp8")
    return dtype


def kv_bytes_per_token(config, dtype: torch.dtype | str) -> int:
    """Bytes of K and V of one token; config has n_layer, n_kv_head and head_dim. Scales are counted.

    >>> from types import SimpleNamespace
    >>> small = SimpleNamespace(n_layer=30, n_kv_head=3, head_dim=64)
    >>> kv_bytes_per_token(small, torch.bfloat16), kv_bytes_per_token(small, "int8")
    (23040, 12240)
    """
    dtype = _stored_as(dtype)
    head = config.head_dim * dtype.itemsize + (4 if dtype in LARGEST else 0)
    return 2 * config.n_layer * config.n_kv_head * head


def blocks_that_fit(config, dtype: torch.dtype | str, n_bytes: int, block_size: int = 16) -> int:
    """The n_blocks whose pool takes at most n_bytes, the trash block included. ValueError if not even one fits."""
    block = block_size * kv_bytes_per_token(config, dtype)
    if n_bytes < 2 * block:
        raise ValueError(f"a KV cache of one block of {block_size} tokens (and one that is never read) takes "
                         f"{2 * block} bytes, but the budget is {n_bytes}; use smaller blocks or a larger budget")
    return n_bytes // block - 1


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x (..., D) -> codes (..., D) of dtype int8 or float8_e4m3fn, scales (...) float32; x is about codes * scales.

    The error is at most scale / 2 with int8; with fp8 a 16th of the value, or scale / 1024 if that is more.

    >>> codes, scales = quantize(torch.tensor([[0.0, 0.0], [2.54, -1.0]]), torch.int8)
    >>> codes.tolist(), [round(s, 4) for s in scales.tolist()]
    ([[0, 0], [127, -50]], [1.0, 0.02])
    """
    largest, x = LARGEST[dtype], x.to(torch.promote_types(x.dtype, torch.float32))
    scales = (x.abs().amax(-1) / largest).float()
    scales.masked_fill_(scales == 0, 1).masked_fill_(scales == torch.inf, torch.nan)  # inf is not to look like a number
    codes = (x / scales[..., None]).clamp_(-largest, largest)  # explicit: casts to fp8 differ in what is too large
    return (codes.round_() if dtype == torch.int8 else codes).to(dtype), scales


# ------------------------------------------------------------------ the cache


class PagedKVCache:
    """K and V of every layer for all sequences, in `n_blocks` blocks of `block_size` tokens.

    n_blocks * block_size tokens fit, of all sequences together; one sequence may hold `max_seq_len` (None: no limit).
    dtype      of the stored K and V: a floating-point type, or "int8" or "fp8" for codes with scales
    window     every token attends to so many keys at most, itself included; None: to all
    attention  takes reference_attention's arguments; the default is slow, pass attention.py's or a kernel
    """

    def __init__(self, n_layer: int, n_kv_head: int, head_dim: int, n_blocks: int, block_size: int = 16, *,
                 max_seq_len: int | None = None, dtype: torch.dtype | str = torch.float32, window: int | None = None,
                 device: str | torch.device = "cpu", attention: Callable = reference_attention):
        if block_size not in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            raise ValueError(f"block_size is {block_size}, but must be a power of two from 1 to 256")
        if n_blocks < 1:
            raise ValueError(f"the KV cache needs at least one block, got {n_blocks}")
        if window is not None and window < 1:
            raise ValueError(f"window is {window}, but counts the token itself and must be 1 or more")
        dtype = _stored_as(dtype)
        self.n_blocks, self.block_size, self.max_seq_len = n_blocks, block_size, max_seq_len
        self.dtype, self.window, self.device, self.attention = dtype, window, torch.device(device), attention
        self._along: list[torch.Tensor] = []  # see copy_along
        self.scale, self.stats = head_dim ** -0.5, Stats()
        G, D, blocks = n_kv_head, head_dim, n_blocks + 1  # the last block is the trash block

        def pools(*each: int, dtype: torch.dtype) -> list[torch.Tensor]:  # logically (blocks, block_size, G, ...)
            if self.device.type == "cpu":
                return [torch.empty(G, blocks, block_size, *each, dtype=dtype).movedim(0, 2) for _ in range(n_layer)]
            return [torch.empty(blocks, block_size, G, *each, dtype=dtype, device=device) for _ in range(n_layer)]

        quantized, self.pool = dtype in LARGEST, None
        if self.device.type == "cpu" and not quantized:
            self.pool = torch.empty(n_layer, 2, G, blocks, block_size, D, dtype=dtype)
            self.k, self.v = ([layer[i].movedim(0, 2) for layer in self.pool] for i in (0, 1))
        else:
            self.k, self.v = pools(D, dtype=dtype), pools(D, dtype=dtype)
        self.k_scale, self.v_scale = (pools(dtype=torch.float32) if quantized else None for _ in range(2))
        self._by_slot = {name: [x.flatten(0, 1) for x in getattr(self, name) or ()]  # (slots, G, ..): views, made once
                         for name in ("k", "v", "k_scale", "v_scale")}
        self._sequences: dict[Hashable, _Sequence] = {}
        self._references = [0] * n_blocks  # how many block tables hold each block
        self._free = OrderedDict.fromkeys(range(n_blocks))  # an ordered set: any block can be taken out in O(1)
        self._evictable: OrderedDict[int, None] = OrderedDict()  # published and held by nobody, longest unused first
        self._published: dict[int, _Published] = {}
        self._index: dict[bytes, int] = {}  # key -> published block

    # ---- what others may ask

    def __contains__(self, seq: Hashable) -> bool:
        return seq in self._sequences

    def tokens(self, seq: Hashable) -> list[int]:
        """The ids of seq whose K/V is cached (a copy)."""
        return list(self._get(seq).tokens)

    def length(self, seq: Hashable) -> int:
        return len(self._get(seq).tokens)

    @property
    def n_free(self) -> int:
        """Blocks that a plan can take now, those included that hold a prefix which nobody uses."""
        return len(self._free) + len(self._evictable)

    def blocks_needed(self, seq: Hashable, n: int) -> int:
        """How many blocks `extend({seq: n ids})` would take from the free ones, a copy on write included."""
        s = self._get(seq)
        tail = self._tail(s)
        copy = n > 0 and tail is not None and self._references[tail] > 1
        return self._blocks_for(len(s.tokens) + n) - len(s.blocks) + copy

    # ---- a sequence's life

    def add(self, seq: Hashable, tokens: Sequence[int] = (), salt: str = "", shared: int = sys.maxsize) -> int:
        """Begin a sequence with as much of these tokens as is cached -> how many that is.

        The longest cached prefix in whole blocks, at most len(tokens) - 1, so that a token is left to compute. `salt`
        keeps apart what must not be shared: only sequences of equal salt find each other's blocks. Of the first
        `shared` tokens only are blocks found, here, and published, later on. ValueError if the id is taken.
        """
        if seq in self._sequences:
            raise ValueError(f"sequence {seq!r} is already in the KV cache; free it first or use another id")
        if not isinstance(salt, str):
            raise ValueError(f"the salt of sequence {seq!r} is {salt!r}, but must be a string")
        ids, s, key = _whole_numbers(seq, tokens), _Sequence(salt, shared=shared), _root(salt)
        for end in range(self.block_size, min(len(ids), shared + 1), self.block_size):  # not to len(ids): see above
            block = ids[end - self.block_size: end]
            key = _key(key, block)
            found = self._find(key, s, block)
            if found is None:
                break
            s.blocks.append(found)
        for block in s.blocks:
            self._hold(block)
        s.published, s.tokens = len(s.blocks), list(ids[: len(s.blocks) * self.block_size])
        self._sequences[seq] = s
        self.stats.asked += len(ids)
        self.stats.found += len(s.tokens)
        return len(s.tokens)

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Begin `child` with all that `parent` holds; nothing is copied until one writes into a block they share."""
        s = self._closed(parent)
        if child in self._sequences:
            raise ValueError(f"sequence {child!r} is already in the KV cache; free it first or use another id")
        for block in s.blocks:
            self._hold(block)
        self._sequences[child] = _Sequence(s.salt, list(s.tokens), list(s.blocks), s.published, shared=s.shared)

    def extend(self, plan: Mapping[Hashable, Sequence[int]], rows: Sequence[int] | None = None) -> Step:
        """Reserve slots for plan[seq] new ids of each sequence and describe the step that computes them.

        rows: which of the packed new tokens are to give logits (step.rows), None: the last of every sequence.
        All or nothing: raises OutOfBlocks if the pool is too full, ValueError if a sequence is unknown, has an open
        step, would pass max_seq_len or is given no ids or no whole numbers; then nothing has changed.
        """
        if not plan:
            raise ValueError("an empty plan: there is nothing to extend")
        plan = {seq: _whole_numbers(seq, ids) for seq, ids in plan.items()}
        n_rows = sum(map(len, plan.values()))
        if rows is not None and not all(isinstance(r, int) and 0 <= r < n_rows for r in rows):
            raise ValueError(f"rows must be whole numbers from 0 to {n_rows - 1}, the new tokens of this step")
        needed, copiers, leaving = 0, set(), {}  # leaving: how many of this plan give up a shared block
        for seq, ids in plan.items():
            s, total = self._closed(seq), self.length(seq) + len(ids)
            if not ids:
                raise ValueError(f"sequence {seq!r} would be extended by no tokens; leave it out of the plan")
            if self.max_seq_len is not None and total > self.max_seq_len:
                raise ValueError(f"sequence {seq!r} would hold {total} tokens, but the context is {self.max_seq_len}")
            needed += self._blocks_for(total) - len(s.blocks)
            tail = self._tail(s)
            if tail is not None and self._references[tail] - leaving.get(tail, 0) > 1:  # the last may write in place
                leaving[tail] = leaving.get(tail, 0) + 1
                copiers.add(seq)
        needed += len(copiers)
        if needed > self.n_free:
            raise OutOfBlocks(needed, self.n_free, self.block_size)
        tables, taken = {}, []
        try:
            for seq, ids in plan.items():
                s = self._sequences[seq]
                kept = s.blocks[:-1] if seq in copiers else s.blocks
                new = []
                for _ in range(self._blocks_for(len(s.tokens) + len(ids)) - len(kept)):
                    last = new[-1] if new else kept[-1] if kept else None
                    new.append(self._take(None if last is None else last + 1))
                    taken.append(new[-1])
                tables[seq] = kept + sorted(new)  # evicted blocks come last first; runs of blocks are read in place
            step = self._describe(plan, tables, rows)
            for seq in copiers:
                old = self._sequences[seq].blocks
                for pool in (*self._pools(), *self._along):
                    pool[tables[seq][len(old) - 1]].copy_(pool[old[-1]])
        except BaseException:  # an interrupt, no memory for the tensors
            for block in taken:
                self._release(block)
            raise
        for seq, ids in plan.items():
            s = self._sequences[seq]
            tail, s.blocks, s.step, s.new = self._tail(s), tables[seq], step, ids  # type: ignore[assignment]
            if seq in copiers:
                self._release(tail)
            elif tail in self._published:  # to be overwritten, and nobody else holds it
                self._unpublish(tail)
        self.stats.copied += len(copiers)
        return step

    def commit(self, step: Step, keep: Mapping[Hashable, int] | None = None) -> None:
        """Accept the first keep[seq] of the step's new tokens of each sequence (all, where keep does not say).

        Blocks that are full now are published. Sequences freed meanwhile are passed over: an abort during a step is
        legal.
        """
        kept = [n if keep is None else keep.get(seq, n) for seq, n in zip(step.seqs, step.n_new)]
        assert keep is None or keep.keys() <= set(step.seqs), f"{keep.keys() - set(step.seqs)} are not in this step"
        for seq, n, k in zip(step.seqs, step.n_new, kept):  # before anything changes
            assert 0 <= k <= n, f"{k} of {n} new tokens to be kept of sequence {seq!r}"
        for seq, k in zip(step.seqs, kept):
            s = self._sequences.get(seq)
            if s is None or s.step is not step:
                continue
            s.tokens.extend(s.new[:k])
            s.step, s.new = None, ()
            self._shrink(s)
            self._publish(s)

    def rollback(self, step: Step) -> None:
        """Undo extend: no token of the step is kept. For use after any exception. (A copy on write remains.)"""
        self.commit(step, keep=dict.fromkeys(step.seqs, 0))

    def trim(self, seq: Hashable, length: int) -> None:
        """Forget all but the first `length` tokens of seq."""
        s = self._closed(seq)
        if not 0 <= length <= len(s.tokens):
            raise ValueError(f"cannot trim sequence {seq!r} of {len(s.tokens)} tokens to {length}")
        del s.tokens[length:]
        self._shrink(s)

    def free(self, seq: Hashable) -> None:
        """Forget seq and give its blocks back, in any state; published ones can still be found until they are evicted.

        Unknown and freed ids are fine. While a step of seq is open, free it only when the model is done with the step:
        its blocks may go to somebody else at once.
        """
        s = self._sequences.pop(seq, None)
        for block in reversed(s.blocks if s else []):  # so a chain is evicted from its tail
            self._release(block)

    def recover(self) -> None:
        """After an interrupt at any moment (KeyboardInterrupt): every open step is undone, the prefix cache is
        forgotten, and all else is recounted from the block tables."""
        self._published.clear()
        self._index.clear()
        self._evictable.clear()
        self._references = [0] * self.n_blocks
        for s in self._sequences.values():
            s.step, s.new, s.published = None, (), 0
            del s.tokens[len(s.blocks) * self.block_size:]
            del s.blocks[self._blocks_for(len(s.tokens)):]
            for block in s.blocks:
                self._references[block] += 1
        self._free = OrderedDict.fromkeys(b for b, n in enumerate(self._references) if not n)

    # ---- to another cache

    def export(self, seq: Hashable) -> dict[str, torch.Tensor]:
        """tokens (S,), k and v (L, S, G, D) as stored, of a quantized cache also k_scale and v_scale (L, S, G): copies.

        For swapping out (keep them on the host, free the sequence) and for another process that goes on decoding.
        """
        s = self._closed(seq)
        t = torch.arange(len(s.tokens), device=self.device)
        blocks = torch.tensor(s.blocks, dtype=torch.int64, device=self.device)
        at = blocks[t // self.block_size], t % self.block_size
        names = ("k", "v") if self.k_scale is None else ("k", "v", "k_scale", "v_scale")
        return {"tokens": torch.tensor(s.tokens, dtype=torch.int64),
                **{name: torch.stack([pool[at] for pool in getattr(self, name)]) for name in names}}

    def import_(self, seq: Hashable, data: Mapping[str, torch.Tensor], salt: str = "",
                shared: int = sys.maxsize) -> None:
        """Begin seq with what `export` gave, from a cache of any block size, dtype or device.

        Codes of the same type are taken bit for bit, everything else is converted; salt and shared are `add`'s. All or
        nothing: ValueError if the id is taken or the tensors do not fit this cache or each other, OutOfBlocks if there
        is no room.
        """
        L, (_, _, G, D) = len(self.k), self.k[0].shape
        names, tokens = _handed_over(seq, data, L, G, D)
        quantized, counted = "k_scale" in names, (self.stats.asked, self.stats.found)
        try:
            cached = self.add(seq, tokens[:shared + 1], salt)
        finally:  # what is handed over is not asked of the prefix cache
            self.stats.asked, self.stats.found = counted
        try:
            self._sequences[seq].shared = shared
            if not tokens:
                return
            step = self.extend({seq: tokens[cached:]})
            for layer in range(L):
                new = {name: data[name][layer, cached:].to(self.device) for name in names}
                if quantized and data["k"].dtype == self.dtype:
                    for name, x in new.items():
                        _store(self._by_slot[name][layer], step.slots, x)
                    continue
                if quantized:
                    new = {name: new[name].float() * new[name + "_scale"][..., None] for name in ("k", "v")}
                self._write(layer, step.slots, new["k"], new["v"])
            self.commit(step)
        except BaseException:
            self.free(seq)
            raise

    # ---- for tests and debugging

    def check(self) -> None:
        """AssertionError unless all bookkeeping agrees."""
        size, counts = self.block_size, [0] * self.n_blocks
        for seq, s in self._sequences.items():
            total = len(s.tokens) + len(s.new)
            assert len(s.blocks) == self._blocks_for(total), f"{seq!r}: {len(s.blocks)} blocks for {total} tokens"
            assert (s.step is None) == (not s.new), f"{seq!r}: new tokens without a step, or a step without"
            assert len(set(s.blocks)) == len(s.blocks), f"{seq!r} holds a block twice: {s.blocks}"
            assert s.published * size <= len(s.tokens), f"{seq!r} has published more than it holds"
            for i, block in enumerate(s.blocks):
                counts[block] += 1
                p = self._published.get(block)
                assert p or i >= s.published, f"{seq!r}: block {block} is not published"
                if i < s.published:
                    held = (s.blocks[i - 1] if i else None, s.salt, tuple(s.tokens[i * size: (i + 1) * size]))
                    assert p[1:4] == held, f"{seq!r}: block {block} is published as something else"
        assert counts == self._references, "reference counts differ from the block tables"
        for block, count in enumerate(counts):
            states = [count > 0, block in self._free, block in self._evictable]
            assert sum(states) == 1, f"block {block}, held {count} times: used, free, evictable are {states}"
            assert count > 0 or (block in self._evictable) == (block in self._published), f"block {block} is lost"
        assert self._index == {p.key: block for block, p in self._published.items()}, "keys and blocks differ"
        age = {block: i for i, block in enumerate(self._evictable)}
        for block, p in self._published.items():
            parent = None if p.parent is None else self._published[p.parent]
            assert p.key == _key(parent.key if parent else _root(p.salt), p.tokens), f"block {block}: not its key"
            assert len(p.tokens) == size and (parent is None or (block in parent.children and parent.salt == p.salt))
            for child in p.children:
                assert self._published[child].parent == block, f"block {child} is not behind block {block}"
                assert age.get(child, -1) < age.get(block, self.n_blocks), f"block {block} would go before {child}"
                assert not (block in age and child not in age), f"block {child} is used, but not {block} before it"

    # ---- bookkeeping of blocks

    def _get(self, seq: Hashable) -> _Sequence:
        if seq not in self._sequences:
            raise ValueError(f"no sequence {seq!r} in the KV cache; add it first")
        return self._sequences[seq]

    def _closed(self, seq: Hashable) -> _Sequence:
        s = self._get(seq)
        if s.step is not None:
            raise ValueError(f"sequence {seq!r} has an open step; commit it or roll it back first")
        return s

    def _blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_size)

    def _tail(self, s: _Sequence) -> int | None:
        """The block into which the next token of s goes, if it has begun."""
        return s.blocks[len(s.tokens) // self.block_size] if len(s.tokens) % self.block_size else None

    def _take(self, wish: int | None) -> int:
        """The wished block if it is free (runs are read in place), else another free one, else an evicted one.

        Whoever begins takes the oldest free block; whoever cannot go on in a run, the youngest: so short answers do not
        take block after block out of the way of a long prompt that is computed among them.
        """
        if wish in self._free:
            del self._free[wish]
            block = wish
        elif self._free:
            block, _ = self._free.popitem(last=wish is not None)
        else:
            block, _ = self._evictable.popitem(last=False)
            self._unpublish(block)
            self.stats.evicted += 1
        self._references[block] = 1
        return block

    def _hold(self, block: int) -> None:
        if self._references[block] == 0:
            del self._evictable[block]
        self._references[block] += 1

    def _release(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            (self._evictable if block in self._published else self._free)[block] = None

    def _shrink(self, s: _Sequence) -> None:
        while len(s.blocks) > self._blocks_for(len(s.tokens)):
            self._release(s.blocks.pop())
        s.published = min(s.published, len(s.tokens) // self.block_size)

    # ---- bookkeeping of prefixes

    def _find(self, key: bytes, s: _Sequence, tokens: tuple[int, ...]) -> int | None:
        """The published block that goes behind s.blocks and holds these tokens."""
        block = self._index.get(key)
        if block is None:
            return None
        parent = s.blocks[-1] if s.blocks else None
        return block if self._published[block][1:4] == (parent, s.salt, tokens) else None

    def _publish(self, s: _Sequence) -> None:
        """Publish the full blocks of s.

        subtle: where an equal block is published already, s takes that one and gives its own back. So whoever holds a
        published block holds the published ones before it, and a block never becomes evictable before those behind it:
        the order in which blocks are given back is enough to evict chains from the tail.
        """
        while (s.published + 1) * self.block_size <= min(len(s.tokens), s.shared):
            i = s.published
            tokens = tuple(s.tokens[i * self.block_size: (i + 1) * self.block_size])
            parent = s.blocks[i - 1] if i else None
            key = _key(self._published[parent].key if i else _root(s.salt), tokens)
            block = self._index.get(key)
            if block is None:
                self._index[key] = s.blocks[i]
                self._published[s.blocks[i]] = _Published(key, parent, s.salt, tokens, set())
                if i:
                    self._published[parent].children.add(s.blocks[i])
            elif self._published[block][1:4] == (parent, s.salt, tokens):
                self._hold(block)
                self._release(s.blocks[i])
                s.blocks[i] = block
            else:  # two contents of one key: this one, and what comes behind it, stays private
                return
            s.published += 1

    def _unpublish(self, block: int) -> None:
        """Forget what a block holds, and all blocks behind it, which nobody holds: they become free."""
        parent = self._published[block].parent
        if parent is not None:
            self._published[parent].children.discard(block)
        doomed = [block]
        for b in doomed:
            p = self._published.pop(b)
            del self._index[p.key]
            doomed.extend(p.children)
            if b != block:
                assert self._references[b] == 0, f"block {b} is used, but not block {p.parent} before it"
                del self._evictable[b]
                self._free[b] = None

    # ---- tensors

    def copy_along(self, pool: torch.Tensor) -> None:
        """From now on, whenever a block is copied on write, its row of this pool (n_blocks + 1, ...) is copied too."""
        self._along.append(pool)

    def _pools(self) -> list[torch.Tensor]:
        return [*self.k, *self.v, *(self.k_scale or ()), *(self.v_scale or ())]

    def _describe(self, plan: Mapping[Hashable, Sequence[int]], tables: Mapping[Hashable, list[int]],
                  rows: Sequence[int] | None) -> Step:
        """The index tensors of a step of these ids and block tables, all of them in one copy to the device."""
        tokens, positions, slots, q_start, kv_len = [], [], [], [0], []
        for seq, ids in plan.items():
            begin, blocks = len(self._sequences[seq].tokens), tables[seq]
            end = begin + len(ids)
            tokens.extend(ids)
            positions.extend(range(begin, end))
            slots.extend(blocks[t // self.block_size] * self.block_size + t % self.block_size
                         for t in range(begin, end))
            q_start.append(len(tokens))
            kv_len.append(end)
        width = max(map(len, tables.values()))
        padded = [block for t in tables.values() for block in (*t, *[self.n_blocks] * (width - len(t)))]  # with trash
        rows = [end - 1 for end in q_start[1:]] if rows is None else rows
        run = slots[0] + len(slots) == slots[-1] + 1 and slots == list(range(slots[0], slots[-1] + 1))
        run = slice(slots[0], slots[-1] + 1) if run else None
        parts = [tokens, positions, slots, rows, padded, kv_len, q_start]
        sizes = [len(part) for part in parts]
        flat: Any = torch.tensor([x for part in parts for x in part], dtype=torch.int64)
        flat = flat.to(self.device, non_blocking=True)
        tokens, positions, slots, rows, short = flat.split_with_sizes((*sizes[:4], sum(sizes[4:])))
        block_table, kv_len, q_start = short.int().split_with_sizes(sizes[4:])
        block_table, n_new = block_table.view(-1, width), tuple(len(ids) for ids in plan.values())
        attend = partial(self._attend, slots if run is None else run, block_table, kv_len, q_start, max(n_new), {})
        return Step(tokens, positions, slots, block_table, kv_len, q_start, tuple(plan), n_new, max(n_new), rows,
                    attend)

    def attend_with(self, slots: torch.Tensor | slice, block_table: torch.Tensor, kv_len: torch.Tensor,
                    q_start: torch.Tensor, max_q: int) -> Callable:
        """attend(layer, q, k, v) over index tensors like a Step's, for one who refills his own (CUDA graphs)."""
        return partial(self._attend, slots, block_table, kv_len, q_start, max_q, None)

    def _write(self, layer: int, slots: torch.Tensor | slice, k: torch.Tensor, v: torch.Tensor) -> None:
        """k and v (N, G, D) into these slots of a layer, quantized if the cache is."""
        pools = self._by_slot
        if self.k_scale is not None:
            (k, v), scales = quantize(torch.stack((k, v)), self.dtype)
            _store(pools["k_scale"][layer], slots, scales[0])
            _store(pools["v_scale"][layer], slots, scales[1])
        _store(pools["k"][layer], slots, k)
        _store(pools["v"][layer], slots, v)

    def _attend(self, slots, block_table, kv_len, q_start, max_q, memo: dict | None, layer: int, q: torch.Tensor,
                k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q (N, H, D), k and v (N, G, D) of this step's tokens -> (N, H, D). memo: of tensors that do not change."""
        self._write(layer, slots, k, v)
        scales = {} if self.k_scale is None else {"k_scale": self.k_scale[layer], "v_scale": self.v_scale[layer]}
        return self.attention(q, self.k[layer], self.v[layer], block_table, kv_len, q_start, self.scale, max_q=max_q,
                              window=self.window, memo=memo, **scales)


def _handed_over(seq: Hashable, data: Mapping[str, torch.Tensor], L: int, G: int, D: int) -> tuple[list, list[int]]:
    """Names of the tensors that `import_` takes from data, and its ids. ValueError, naming seq, if it is not right."""
    def refuse(why: str) -> None:
        raise ValueError(f"the imported sequence {seq!r} cannot be taken: {why}")

    missing = [name for name in ("tokens", "k", "v") if not isinstance(data.get(name), torch.Tensor)]
    if missing:
        refuse(f"no {' and no '.join(missing)}, or not as a tensor")
    if data["tokens"].dim() != 1:
        refuse(f"its tokens are {tuple(data['tokens'].shape)}, but must be a list of ids")
    dtype, other = data["k"].dtype, data["v"].dtype
    if dtype != other or dtype not in (*FLOATS, *LARGEST):
        refuse(f"k and v are {dtype} and {other}, but must both be of one type that a KV cache can have")
    names, n = ["k", "v", *(("k_scale", "v_scale") if dtype in LARGEST else ())], len(data["tokens"])
    for name in names:
        x, shape = data.get(name), (L, n, G) if name.endswith("scale") else (L, n, G, D)
        if not isinstance(x, torch.Tensor) or x.shape != shape:
            what = tuple(x.shape) if isinstance(x, torch.Tensor) else "missing"
            refuse(f"{name} is {what}, but this cache takes {shape}")
        if name.endswith("scale") and not (x.dtype in FLOATS and ((x.float() > 0) & x.float().isfinite()).all()):
            refuse(f"{name} has scales that are not finite and positive as float32")
        if x.dtype == torch.float8_e4m3fn and (x.view(torch.uint8) & 127 == 127).any():
            refuse(f"{name} has codes that are not numbers")
    return names, data["tokens"].tolist()


def _store(pool: torch.Tensor, slots: torch.Tensor | slice, x: torch.Tensor) -> None:
    """x (N, G, ...) into slots of a pool (slots, G, ...)."""
    x = x.detach() if x.requires_grad else x
    if isinstance(slots, slice):  # one run, the usual case for one sequence: a plain copy, 7 times faster
        pool[slots] = x
    elif pool.dtype == torch.float8_e4m3fn:  # which index_copy_ does not know
        pool.view(torch.uint8).index_copy_(0, slots, x.view(torch.uint8))
    else:
        pool.index_copy_(0, slots, x.to(pool.dtype))


# ------------------------------------------------------------------ demo

if __name__ == "__main__":
    torch.manual_seed(0)
    # 64 chats of one server: log-normal around 300 tokens, most between 100 and 900, none above the context of 4096.
    lengths = torch.randn(64).mul(0.75).add(5.7).exp().round().clamp(8, 4096).long().tolist()
    used = sum(lengths)
    print(f"What is reserved in vain for {len(lengths)} sequences of {min(lengths)} to {max(lengths):,} tokens:")
    print(f"  reserved in one piece of 4096 each:  {1 - used / (4096 * len(lengths)):6.1%} of the slots hold nothing")
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        slots = sum(-(-n // size) * size for n in lengths)
        print(f"  blocks of {size:3}:                       {1 - used / slots:6.1%}")

    cache = PagedKVCache(n_layer=1, n_kv_head=2, head_dim=8, n_blocks=8, block_size=4)

    def picture(title: str) -> None:
        cells = {}
        for name, s in cache._sequences.items():
            for i, block in enumerate(s.blocks):
                held = s.tokens[i * 4: i * 4 + 4]
                owners, _ = cells.get(block, ("", None))
                cells[block] = owners + name, " ".join(map(str, held)) + " ." * (4 - len(held))
        print(f"\n{title}:")
        for block in range(cache.n_blocks):
            name, text = cells.get(block, ("", "free"))
            if block in cache._evictable:
                text = " ".join(map(str, cache._published[block].tokens)) + "   evictable"
            print(f"  block {block}  {name:3}  {text}")
        for name, s in cache._sequences.items():
            print(f"  block table of {name}: {s.blocks}")

    def run(plan: dict) -> None:  # a "model" of one layer whose q, k and v are random
        step = cache.extend(plan)
        q, k, v = (torch.randn(len(step.tokens), heads, 8) for heads in (6, 2, 2))
        step.attend(0, q, k, v)
        cache.commit(step)

    cache.add("A")
    run({"A": [10, 11, 12, 13, 14, 15]})
    picture("A prompt of 6 tokens in blocks of 4")
    cache.fork("A", "B")
    picture("Forked, so A and B hold the same blocks")
    run({"A": [20], "B": [30]})
    picture("Each with a token of its own; the first to write took a copy of the block that was not full")
    run({"A": [21, 22], "B": [31]})
    cache.free("A")
    picture("A is gone; its full block stays until the room is needed")
    found = cache.add("C", [10, 11, 12, 13, 14, 15, 20, 21, 99])
    picture(f"C begins like A did; {found} of its 9 tokens need not be computed")
    try:
        cache.extend({"B": list(range(40))})
    except OutOfBlocks as error:
        print(f"\nToo much: {error}.")
    for name in "BC":
        cache.free(name)
    cache.check()
    print(f"All freed: {cache.n_free} of {cache.n_blocks} blocks can be taken. Of {cache.stats.asked} tokens that were "
          f"asked for {cache.stats.found} were found, and {cache.stats.copied} block was copied on write.")

    class SmolLM2:  # 135M
        n_layer, n_kv_head, head_dim = 30, 3, 64

    print("\nBytes of one token, and the largest error of 1,000 random heads, as a share of a head's greatest number:")
    x = torch.randn(1000, 64)
    for name in ("bfloat16", "int8", "fp8"):
        codes, scales = quantize(x, CODES[name]) if name in CODES else (x.bfloat16(), torch.ones(1000))
        error = (codes.float() * scales[:, None] - x).abs().amax(1) / x.abs().amax(1)
        print(f"  {name:8}  {kv_bytes_per_token(SmolLM2, CODES.get(name, torch.bfloat16)):6}  {error.max():.4f}")
