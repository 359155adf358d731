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

    step   = cache.extend({"a": ids, "b": ids})     all or nothing: reserves slots, fills this step's index tensors
    logits = model(step.tokens, step.positions, step.attend, rows=step.last())
    cache.commit(step)                              or commit(step, keep={"a": 1}); or, after an error, rollback(step)

The cache owns the K/V tensors, lengths, block tables and reference counts; everybody else asks by sequence id. Each
layer has one K and one V tensor of its own (one tensor for all layers would make a compiled step copy the pool), which
is never zeroed: whatever a slot held before is not read. On the CPU a tensor is laid out head by head, so that
attention reads a head's keys in one run; its logical shape is (n_blocks, block_size, G, D) all the same. One block
behind the pool takes the writes of padded slots, so that a step of fixed size (a CUDA graph) harms nobody.

Shapes: B sequences, N packed tokens, H query heads, G key/value heads, D head_dim, S cached length.
"""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import index

import torch
import torch.nn.functional as F

# ------------------------------------------------------------------ attention through a block table


def paged_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor,
                    kv_len: torch.Tensor, q_start: torch.Tensor, scale: float, *, max_q: int) -> torch.Tensor:
    """Attention of N packed new tokens to the cached keys of their own sequences, their own included.

    q            (N, H, D), sequence b's rows are q_start[b] .. q_start[b + 1]
    k_cache, v_cache   (n_blocks, block_size, G, D), any strides; H is a multiple of G, head h reads KV head h // (H/G)
    block_table  (B, max_blocks) int32;  kv_len (B,) keys of each sequence, the new ones included;  q_start (B + 1,)
    scale        multiplies q.k, usually D ** -0.5;  max_q: most new tokens of one sequence (kernels size grids by it)
    Returns (N, H, D).

    Of a sequence's n new tokens the j-th sees keys 0 .. kv_len - n + j: the mask is aligned to the bottom right.

            keys  0 1 2 3 4
        new 0     x x x x .        kv_len 5, n 2 (torch's is_causal=True would align it top left)
        new 1     x x x x x

    A row that sees no key at all (kv_len < n) gives zeros. Left out: sliding windows, quantized caches, log-sum-exp.
    """
    starts, lengths, tables = q_start.tolist(), kv_len.tolist(), block_table.tolist()
    out = None
    for b, S in enumerate(lengths):
        n = starts[b + 1] - starts[b]
        if n == 0 or S == 0:
            continue
        blocks = tables[b][: -(-S // k_cache.shape[1])]
        k, v = _gather(k_cache, blocks, S), _gather(v_cache, blocks, S)  # (1, G, S, D)
        if n == len(q):  # one sequence has every row: nothing to put together
            return _attend_one(q, k, v, scale)
        out = torch.zeros_like(q) if out is None else out
        out[starts[b]: starts[b + 1]] = _attend_one(q[starts[b]: starts[b + 1]], k, v, scale)
    return torch.zeros_like(q) if out is None else out


def _gather(cache: torch.Tensor, blocks: list[int], S: int) -> torch.Tensor:
    """The first S keys (or values) of one sequence, (1, G, S, D): in place if its blocks lie in one run, else copied.

    Slots behind S are cut off before anything is computed: masking their scores would not do, 0 * NaN is NaN.
    """
    _, block_size, G, D = cache.shape
    block, token, head, dim = cache.stride()
    if block == block_size * token and blocks == list(range(blocks[0], blocks[0] + len(blocks))):
        # A view, made in one operation instead of four: this runs twice a layer and step.
        return cache.as_strided((1, G, S, D), (0, head, token, dim), cache.storage_offset() + blocks[0] * block)
    part = cache[torch.tensor(blocks, device=cache.device)]  # (blocks, block_size, G, D)
    return part.flatten(0, 1)[:S].transpose(0, 1)[None]


def _attend_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q (n, H, D) against k, v (1, G, S, D) -> (n, H, D), one sequence, bottom-right causal."""
    (n, H, D), (_, G, S, _) = q.shape, k.shape
    group = H // G
    # The query heads of a group become rows of their KV head: measured 6 times faster than enable_gqa at one row.
    if n == 1:
        return F.scaled_dot_product_attention(q.view(1, G, group, D), k, v, scale=scale).reshape(1, H, D)
    if n == S:  # a whole prompt: torch's own causal mask is right here and needs no (n, S) matrix
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, is_causal=True, scale=scale,
                                             enable_gqa=True)  # (1, H, n, D)
        return out[0].transpose(0, 1)
    rows = q.view(n, G, group, D).permute(1, 2, 0, 3).reshape(1, G, group * n, D)
    mask = torch.ones(n, S, dtype=torch.bool, device=q.device).tril(S - n).repeat(group, 1)  # (group * n, S)
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)  # (1, G, group * n, D)
    return out.view(G, group, n, D).permute(2, 0, 1, 3).reshape(n, H, D)


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


@dataclass(eq=False)
class _Sequence:
    tokens: list[int] = field(default_factory=list)  # committed: their K/V is in the pool
    blocks: list[int] = field(default_factory=list)  # the block table
    step: Step | None = None  # the open step, if any
    new: tuple[int, ...] = ()  # its ids


def _whole_numbers(seq: Hashable, ids: Sequence[int]) -> tuple[int, ...]:
    try:
        ids = tuple(map(index, ids))  # int() would turn 2.7 into 2 and "5" into 5
    except TypeError as error:
        raise ValueError(f"the new ids of sequence {seq!r} are no list of whole numbers: {error}") from None
    if ids and not 0 <= min(ids) <= max(ids) < 2**31:
        raise ValueError(f"the new ids of sequence {seq!r} run from {min(ids)} to {max(ids)}, not within 0 .. 2^31")
    return ids


# ------------------------------------------------------------------ the cache


class PagedKVCache:
    """K and V of every layer for all sequences, in `n_blocks` blocks of `block_size` tokens.

    n_blocks * block_size tokens fit, of all sequences together; one sequence may hold `max_seq_len` (None: no limit).
    `attention` has paged_attention's signature; pass a kernel's to use that.
    """

    def __init__(self, n_layer: int, n_kv_head: int, head_dim: int, n_blocks: int, block_size: int = 16, *,
                 max_seq_len: int | None = None, dtype: torch.dtype = torch.float32,
                 device: str | torch.device = "cpu", attention: Callable = paged_attention):
        if block_size not in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            raise ValueError(f"block_size is {block_size}, but must be a power of two from 1 to 256")
        if n_blocks < 1:
            raise ValueError(f"the KV cache needs at least one block, got {n_blocks}")
        self.n_blocks, self.block_size, self.max_seq_len = n_blocks, block_size, max_seq_len
        self.device, self.attention = torch.device(device), attention
        self.scale = head_dim ** -0.5
        G, D, blocks = n_kv_head, head_dim, n_blocks + 1  # the last block is the trash block

        def pool() -> torch.Tensor:  # logically (blocks, block_size, G, D)
            if self.device.type == "cpu":
                return torch.empty(G, blocks, block_size, D, dtype=dtype).permute(1, 2, 0, 3)
            return torch.empty(blocks, block_size, G, D, dtype=dtype, device=device)

        self.k = [pool() for _ in range(n_layer)]
        self.v = [pool() for _ in range(n_layer)]
        self._sequences: dict[Hashable, _Sequence] = {}
        self._references = [0] * n_blocks  # how many block tables hold each block
        self._free = OrderedDict.fromkeys(range(n_blocks))  # an ordered set: any block can be taken out in O(1)

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
        """Blocks that a plan can take now."""
        return len(self._free)

    def blocks_needed(self, seq: Hashable, n: int) -> int:
        """How many blocks `extend({seq: n ids})` would take from the free ones."""
        s = self._get(seq)
        return self._blocks_for(len(s.tokens) + n) - len(s.blocks)

    # ---- a sequence's life

    def add(self, seq: Hashable) -> None:
        """Begin an empty sequence. ValueError if the id is taken."""
        if seq in self._sequences:
            raise ValueError(f"sequence {seq!r} is already in the KV cache; free it first or use another id")
        self._sequences[seq] = _Sequence()

    def extend(self, plan: Mapping[Hashable, Sequence[int]]) -> Step:
        """Reserve slots for plan[seq] new ids of each sequence and describe the step that computes them.

        All or nothing: raises OutOfBlocks if the pool is too full, ValueError if a sequence is unknown, has an open
        step, would pass max_seq_len or is given no ids or no whole numbers; then nothing has changed.
        """
        if not plan:
            raise ValueError("an empty plan: there is nothing to extend")
        plan = {seq: _whole_numbers(seq, ids) for seq, ids in plan.items()}
        needed = 0
        for seq, ids in plan.items():
            s, total = self._get(seq), self.length(seq) + len(ids)
            if not ids:
                raise ValueError(f"sequence {seq!r} would be extended by no tokens; leave it out of the plan")
            if s.step is not None:
                raise ValueError(f"sequence {seq!r} has an open step; commit it or roll it back first")
            if self.max_seq_len is not None and total > self.max_seq_len:
                raise ValueError(f"sequence {seq!r} would hold {total} tokens, but the context is {self.max_seq_len}")
            needed += self.blocks_needed(seq, len(ids))
        if needed > len(self._free):
            raise OutOfBlocks(needed, len(self._free), self.block_size)
        try:
            for seq, ids in plan.items():
                s = self._sequences[seq]
                for _ in range(self.blocks_needed(seq, len(ids))):
                    s.blocks.append(self._take(s.blocks[-1] + 1 if s.blocks else None))
            step = self._describe(plan)
        except BaseException:  # an interrupt, no memory for the tensors
            for seq in plan:
                self._shrink(self._sequences[seq])
            raise
        for seq, ids in plan.items():
            self._sequences[seq].step, self._sequences[seq].new = step, ids
        return step

    def commit(self, step: Step, keep: Mapping[Hashable, int] | None = None) -> None:
        """Accept the first keep[seq] of the step's new tokens of each sequence (all, where keep does not say).

        Sequences freed meanwhile are passed over, so an abort during a step is legal.
        """
        kept = [n if keep is None else keep.get(seq, n) for seq, n in zip(step.seqs, step.n_new)]
        for seq, n, k in zip(step.seqs, step.n_new, kept):  # before anything changes
            assert 0 <= k <= n, f"{k} of {n} new tokens to be kept of sequence {seq!r}"
        for seq, k in zip(step.seqs, kept):
            s = self._sequences.get(seq)
            if s is None or s.step is not step:
                continue
            s.tokens.extend(s.new[:k])
            s.step, s.new = None, ()
            self._shrink(s)

    def rollback(self, step: Step) -> None:
        """Undo extend: as if the step had never been planned. For use after any exception."""
        self.commit(step, keep=dict.fromkeys(step.seqs, 0))

    def trim(self, seq: Hashable, length: int) -> None:
        """Forget all but the first `length` tokens of seq."""
        s = self._get(seq)
        if s.step is not None:
            raise ValueError(f"sequence {seq!r} has an open step; commit it or roll it back first")
        if not 0 <= length <= len(s.tokens):
            raise ValueError(f"cannot trim sequence {seq!r} of {len(s.tokens)} tokens to {length}")
        del s.tokens[length:]
        self._shrink(s)

    def free(self, seq: Hashable) -> None:
        """Forget seq and give its blocks back, in any state. Unknown and freed ids are fine."""
        s = self._sequences.pop(seq, None)
        if s is not None:
            for block in s.blocks:
                self._release(block)

    def check(self) -> None:
        """AssertionError unless all bookkeeping agrees; for tests and debugging."""
        counts = [0] * self.n_blocks
        for seq, s in self._sequences.items():
            total = len(s.tokens) + len(s.new)
            assert len(s.blocks) == self._blocks_for(total), f"{seq!r}: {len(s.blocks)} blocks for {total} tokens"
            assert (s.step is None) == (not s.new), f"{seq!r}: new tokens without a step, or a step without"
            assert len(set(s.blocks)) == len(s.blocks), f"{seq!r} holds a block twice: {s.blocks}"
            for block in s.blocks:
                counts[block] += 1
        assert counts == self._references, "reference counts differ from the block tables"
        for block, count in enumerate(counts):
            assert (count == 0) == (block in self._free), f"block {block} is held {count} times and free or lost"

    # ---- bookkeeping

    def _get(self, seq: Hashable) -> _Sequence:
        if seq not in self._sequences:
            raise ValueError(f"no sequence {seq!r} in the KV cache; add it first")
        return self._sequences[seq]

    def _blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_size)

    def _take(self, wish: int | None) -> int:
        """A free block: the wished one if it is free (runs of blocks are read in place), else the oldest."""
        if wish in self._free:
            del self._free[wish]
            block = wish
        else:
            block, _ = self._free.popitem(last=False)
        self._references[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[block] = None

    def _shrink(self, s: _Sequence) -> None:
        while len(s.blocks) > self._blocks_for(len(s.tokens)):
            self._release(s.blocks.pop())

    def _describe(self, plan: Mapping[Hashable, Sequence[int]]) -> Step:
        """The index tensors of a step; the plan's blocks are already in the block tables."""
        tokens, positions, slots, q_start, kv_len, tables = [], [], [], [0], [], []
        for seq, ids in plan.items():
            s = self._sequences[seq]
            begin, end = len(s.tokens), len(s.tokens) + len(ids)
            tokens.extend(ids)
            positions.extend(range(begin, end))
            slots.extend(s.blocks[t // self.block_size] * self.block_size + t % self.block_size
                         for t in range(begin, end))
            q_start.append(len(tokens))
            kv_len.append(end)
            tables.append(s.blocks)
        width = max(map(len, tables))
        trash = self.n_blocks
        tables = [t + [trash] * (width - len(t)) for t in tables]

        def tensor(x: list, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(x, dtype=dtype).to(self.device, non_blocking=True)

        first, n = slots[0], len(slots)
        run = slice(first, first + n) if slots == list(range(first, first + n)) else None
        slots, block_table = tensor(slots, torch.int64), tensor(tables, torch.int32)
        kv_len, q_start = tensor(kv_len, torch.int32), tensor(q_start, torch.int32)
        n_new = tuple(len(ids) for ids in plan.values())
        attend = partial(self._attend, slots if run is None else run, block_table, kv_len, q_start, max(n_new))
        return Step(tensor(tokens, torch.int64), tensor(positions, torch.int64), slots, block_table, kv_len, q_start,
                    tuple(plan), n_new, max(n_new), attend)

    def _attend(self, slots, block_table, kv_len, q_start, max_q, layer: int, q: torch.Tensor, k: torch.Tensor,
                v: torch.Tensor) -> torch.Tensor:
        """q (N, H, D), k and v (N, G, D) of this step's tokens -> (N, H, D)."""
        for pool, new in ((self.k[layer], k), (self.v[layer], v)):
            pool = pool.flatten(0, 1)  # (slots, G, D): a view, whatever the layout
            if isinstance(slots, slice):  # one run, the usual case for one sequence: a plain copy, 7 times faster
                pool[slots] = new
            else:
                pool.index_copy_(0, slots, new)
        return self.attention(q, self.k[layer], self.v[layer], block_table, kv_len, q_start, self.scale, max_q=max_q)


# ------------------------------------------------------------------ demo

if __name__ == "__main__":
    torch.manual_seed(0)
    cache = PagedKVCache(n_layer=1, n_kv_head=2, head_dim=8, n_blocks=8, block_size=4)

    def picture(title: str) -> None:
        cells = {}
        for name, s in cache._sequences.items():
            for i, block in enumerate(s.blocks):
                held = s.tokens[i * 4: i * 4 + 4]
                cells[block] = f"{name}: " + " ".join(map(str, held)) + " ." * (4 - len(held))
        print(f"\n{title}")
        for block in range(cache.n_blocks):
            print(f"  block {block}  {cells.get(block, 'free')}")
        for name, s in cache._sequences.items():
            print(f"  block table of {name}: {s.blocks}   {len(s.tokens)} tokens")

    def run(plan: dict) -> torch.Tensor:  # a "model" of one layer whose q, k and v are random
        step = cache.extend(plan)
        q, k, v = (torch.randn(len(step.tokens), heads, 8) for heads in (6, 2, 2))
        out = step.attend(0, q, k, v)
        cache.commit(step)
        return out

    cache.add("A")
    cache.add("B")
    run({"A": [10, 11, 12, 13, 14], "B": [20, 21]})
    picture("two prompts in one step: 7 packed tokens, no padding")
    for t in range(3):
        run({"A": [15 + t], "B": [22 + t]})
    picture("three decode steps later: each took a block only when it needed one")
    cache.trim("A", 4)
    picture("A trimmed to 4 tokens (as after rejected drafts)")
    try:
        cache.extend({"A": list(range(40))})
    except OutOfBlocks as error:
        print(f"\ntoo much: {error}")
    cache.free("A")
    cache.free("B")
    cache.check()
    print(f"\nafter free: {cache.n_free} of {cache.n_blocks} blocks free")
