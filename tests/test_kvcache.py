"""kvcache.py, from three sides.

- `PagedKVCache` in random lives of many sequences, against a plain-Python model of what each sequence holds and the
  dense attention to it, on memory that is NaN wherever nothing was kept; with sabotaged twins that the same test must
  catch
- every operation by itself: what it refuses, that a refusal changes nothing, quantized caches, moves between caches
- the published cases of paged caches (K, B, RT, TP), by id
"""
import hashlib
import itertools
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_attention import assert_near, dense_attention

import kvcache
from attention import _parts, _read, paged_attention
from kvcache import OutOfBlocks, PagedKVCache, Step, blocks_that_fit, kv_bytes_per_token, quantize
from model import Config, Llama, causal_attention

NAN = math.nan


pytestmark = pytest.mark.usefixtures("one_thread")


# ------------------------------------------------------------------ a sequence's life, at random


class Life:
    """A cache, and beside it the plain truth: per sequence its salt and its ids.

    K and V of a token are a function of salt, ids up to it and layer, as they are in a model. After every operation
    each slot that holds no committed token, and no published one, is filled with NaN, the trash block too, so that
    reading anything that was not written, or not any more, shows in the next comparison.
    """

    def __init__(self, cache: PagedKVCache, seed: int):
        self.cache, self.rng, self.generator = cache, random.Random(seed), torch.Generator().manual_seed(seed)
        self.held: dict[str, tuple[str, list[int]]] = {}
        self.names = (f"s{i}" for i in itertools.count())
        self.known, self.past = {}, [[]]
        self.seen = dict.fromkeys(["extend", "full", "commit", "partly", "rollback", "trim", "free", "aborted", "fork",
                                   "found", "moved"], 0)
        self.after()

    def kv(self, salt: str, ids: list[int]) -> torch.Tensor:
        """K and V (S, 2, layers, G, D) of every token."""
        rows, state = [], salt.encode()
        for i in ids:
            state = hashlib.sha256(state + bytes([i])).digest()
            if state not in self.known:
                self.generator.manual_seed(int.from_bytes(state[:6], "little"))
                self.known[state] = torch.randn(2, 2, 2, 4, generator=self.generator, dtype=torch.float64)
            rows.append(self.known[state])
        return torch.stack(rows) if rows else torch.empty(0, 2, 2, 2, 4, dtype=torch.float64)

    def after(self) -> None:
        cache = self.cache
        cache.check()
        for seq, (_, ids) in self.held.items():
            assert seq in cache and cache.tokens(seq) == ids and cache.length(seq) == len(ids)
        tables = [s.blocks for s in cache._sequences.values()]
        assert cache.n_free == cache.n_blocks - len(set().union(*tables))  # none is lost
        dead = torch.ones(cache.n_blocks + 1, cache.block_size, dtype=torch.bool)
        for s in cache._sequences.values():
            for t in range(len(s.tokens)):
                dead[s.blocks[t // cache.block_size], t % cache.block_size] = False
        dead[list(cache._published)] = False
        for pool in (*cache.k, *cache.v):
            pool[dead] = NAN

    def whole(self, seq: str) -> None:
        """What the cache gives back of seq is what was put in."""
        salt, ids = self.held[seq]
        out, expected = self.cache.export(seq), self.kv(salt, ids)
        assert out["tokens"].tolist() == ids
        assert torch.equal(out["k"], expected[:, 0].transpose(0, 1)), f"keys of {seq}"
        assert torch.equal(out["v"], expected[:, 1].transpose(0, 1)), f"values of {seq}"

    def add(self) -> None:
        """A new sequence, often with a prompt that another one, alive or gone, began with."""
        rng, name, salt = self.rng, next(self.names), self.rng.choice(["", "", "", "other"])
        prompt = [rng.randrange(3) for _ in range(rng.choice([0, 1, 3, 8, 20]))]
        if rng.random() < 0.7 and self.held:
            ids = rng.choice([*self.past[-5:], *(ids for _, ids in self.held.values())])
            prompt = ids[: rng.choice([9, 20, 90])] + prompt[:2]
        n = self.cache.add(name, prompt, salt)
        assert n % self.cache.block_size == 0 and 0 <= n <= max(0, len(prompt) - 1)
        self.seen["found"] += n > 0
        self.held[name] = salt, prompt[:n]

    def extend(self) -> None:
        rng, cache = self.rng, self.cache
        seqs = rng.sample(sorted(self.held), rng.randint(1, min(4, len(self.held))))
        plan = {s: [rng.randrange(3) for _ in range(rng.choice([1, 1, 1, 2, 3, 5, 9, 17]))] for s in seqs}
        needed, holders = 0, {}
        for s in cache._sequences.values():
            for block in s.blocks:
                holders[block] = holders.get(block, 0) + 1
        for seq, ids in plan.items():
            S, blocks = len(self.held[seq][1]), cache._sequences[seq].blocks
            more = -(-(S + len(ids)) // cache.block_size) - -(-S // cache.block_size)
            shared = S % cache.block_size > 0 and holders[blocks[-1]] > 1
            if shared:
                holders[blocks[-1]] -= 1
            needed += more + shared
            assert cache.blocks_needed(seq, len(ids)) in (more, more + 1)
        if needed > cache.n_free:
            self.seen["full"] += 1
            with pytest.raises(OutOfBlocks) as error:
                cache.extend(plan)
            assert (error.value.needed, error.value.free) == (needed, cache.n_free)
            return
        free = cache.n_free
        step = cache.extend(plan)
        assert cache.n_free == free - needed
        self.seen["extend"] += 1
        cache.check()
        self.attend(step, plan)
        self.finish(step, plan)

    def attend(self, step: Step, plan: dict) -> None:
        """Run two layers and compare with dense attention."""
        begin = [len(self.held[s][1]) for s in plan]
        assert step.tokens.tolist() == [i for ids in plan.values() for i in ids]
        assert step.positions.tolist() == [b + i for b, ids in zip(begin, plan.values()) for i in range(len(ids))]
        assert step.kv_len.tolist() == [b + len(ids) for b, ids in zip(begin, plan.values())]
        assert (step.seqs, step.n_new) == (tuple(plan), tuple(map(len, plan.values())))
        assert step.q_start.tolist() == [0, *itertools.accumulate(step.n_new)] and step.max_q == max(step.n_new)
        kv = [self.kv(self.held[s][0], self.held[s][1] + ids) for s, ids in plan.items()]
        new = torch.cat([x[b:] for x, b in zip(kv, begin)])  # (N, 2, layers, G, D)
        for layer in (0, 1):
            q = torch.randn(len(step.tokens), 4, 4, generator=self.generator, dtype=torch.float64)
            out = step.attend(layer, q, new[:, 0, layer], new[:, 1, layer]).split(step.n_new)
            for x, rows, got in zip(kv, q.split(step.n_new), out):
                assert_near(got, dense_attention(rows, x[:, 0, layer], x[:, 1, layer], 0.5, self.cache.window))

    def finish(self, step: Step, plan: dict) -> None:
        rng, cache, keep = self.rng, self.cache, {s: len(ids) for s, ids in plan.items()}
        if rng.random() < 0.1:  # a request is aborted during its step; perhaps another takes its name
            self.seen["aborted"] += 1
            gone = rng.choice(sorted(plan))
            cache.free(gone)
            del self.held[gone]
            if rng.random() < 0.5:
                cache.add(gone)
                self.held[gone] = "", []
            plan = {s: ids for s, ids in plan.items() if s != gone}
        kind = rng.choice(["commit", "commit", "partly", "rollback"])
        self.seen[kind] += 1
        if kind == "commit":
            cache.commit(step)
        elif kind == "partly":
            keep = {s: rng.randint(0, n) for s, n in keep.items()}
            omitted = rng.choice([None, *keep])  # left out of the mapping: all of its tokens are kept
            keep = {s: dict(zip(step.seqs, step.n_new))[s] if s == omitted else n for s, n in keep.items()}
            cache.commit(step, {s: n for s, n in keep.items() if s != omitted})
        else:
            keep = dict.fromkeys(keep, 0)
            cache.rollback(step)
        for seq, ids in plan.items():
            self.held[seq][1].extend(ids[:keep[seq]])
        if rng.random() < 0.2:  # twice is harmless
            rng.choice([cache.commit, cache.rollback])(step)

    def one(self, kind: str) -> None:
        rng, cache, seq = self.rng, self.cache, self.rng.choice(sorted(self.held))
        salt, ids = self.held[seq]
        self.seen[kind] += 1
        if kind in ("trim", "free"):
            self.past.append(list(ids))
        if kind == "trim":
            length = rng.randint(0, len(ids))
            cache.trim(seq, length)
            del ids[length:]
        elif kind == "free":
            cache.free(seq)
            cache.free(seq)  # idempotent
            del self.held[seq]
        elif kind == "fork":
            name = next(self.names)
            cache.fork(seq, name)
            self.held[name] = salt, list(ids)
        else:  # out, and in again under another name; if there is no room, that leaves nothing behind
            self.whole(seq)
            data, name, free = cache.export(seq), next(self.names), cache.n_free
            try:
                cache.import_(name, data, salt)
                self.held[name] = salt, list(ids)
            except OutOfBlocks:
                assert name not in cache and cache.n_free == free

    def run(self, n: int) -> None:
        for _ in range(n):
            kind = self.rng.choices(["add", "extend", "trim", "free", "fork", "moved"], [3, 12, 2, 2, 2, 1])[0]
            if kind == "extend" and self.held:
                self.extend()
            elif kind == "add" or not self.held:
                self.add() if len(self.held) < 8 else self.one("free")
            elif kind in ("trim", "free") or len(self.held) < 8:
                self.one(kind)
            self.after()
        for seq in list(self.held):  # nothing that was kept has been touched
            self.whole(seq)
            self.cache.free(seq)
            del self.held[seq]
        self.after()
        assert self.cache.n_free == self.cache.n_blocks


def small_cache(kind: type = PagedKVCache, block_size: int = 4, tokens: int = 96, **options) -> PagedKVCache:
    options = {"attention": paged_attention, **options}
    return kind(2, 2, 4, tokens // block_size, block_size, dtype=torch.float64, **options)


@pytest.mark.parametrize("block_size, tokens, seed", [(1, 96, 0), (2, 96, 1), (4, 96, 2), (4, 400, 3), (4, 24, 4),
                                                      (16, 192, 5), (8, 200, 6)])
def test_random_lives_hold_what_was_written_and_nothing_else(block_size, tokens, seed):
    life = Life(small_cache(block_size=block_size, tokens=tokens, window=[None, 5][seed == 6]), seed)
    life.run(1500)
    life.seen["full"] += 100 * (tokens > 96)
    assert min(life.seen.values()) >= 10, life.seen  # every kind of event happened
    assert life.cache.stats.evicted > 10 and (block_size == 1 or life.cache.stats.copied > 10), life.cache.stats


def test_random_lives_with_the_plain_attention_of_the_file_itself():
    Life(small_cache(attention=kvcache.reference_attention), 7).run(300)


class TakesTwice(PagedKVCache):
    """Now and then hands out a block that another sequence still holds."""

    def _take(self, wish):
        block = super()._take(wish)
        others = [b for s in self._sequences.values() for b in s.blocks]
        if len(others) > 6 and block % 3 == 0:
            self._references[block] = 0
            self._free[block] = None
            self._references[others[0]] += 1
            return others[0]
        return block


class WritesOneLate(PagedKVCache):
    """Writes each K and V one slot behind its own."""

    def _attend(self, slots, *rest, **more):
        slots = torch.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
        return super()._attend((slots + 1) % (self.n_blocks * self.block_size), *rest, **more)


class KeepsOneMore(PagedKVCache):
    """Keeps the first rejected token."""

    def commit(self, step, keep=None):
        keep = keep and {s: min(n, keep.get(s, n) + 1) for s, n in zip(step.seqs, step.n_new)}
        super().commit(step, keep)


class NeverGivesBack(PagedKVCache):
    """Trims the tokens but not the blocks."""

    def trim(self, seq, length):
        s = self._sequences[seq]
        del s.tokens[length:]
        s.published = min(s.published, length // self.block_size)


class ReadsOneMore(PagedKVCache):
    """Attends to one key too many where the block has room for it."""

    def __init__(self, *args, **options):
        def attention(q, k, v, table, kv_len, *rest, **more):
            grown = kv_len + (kv_len % self.block_size > 0).int()
            return paged_attention(q, k, v, table, grown, *rest, **more)
        super().__init__(*args, **{**options, "attention": attention})


class TopLeft(PagedKVCache):
    """Aligns the causal mask to the wrong corner."""

    def __init__(self, *args, **options):
        def attention(q, k, v, table, kv_len, q_start, scale, **more):
            out = torch.zeros_like(q)
            for b, (begin, end) in enumerate(itertools.pairwise(q_start.tolist())):
                at = [int(table[b, t // self.block_size]) * self.block_size + t % self.block_size
                      for t in range(end - begin)]
                out[begin:end] = causal_attention(0, q[begin:end], k.flatten(0, 1)[at], v.flatten(0, 1)[at])
            return out
        super().__init__(*args, **{**options, "attention": attention})


class NoCopyOnWrite(PagedKVCache):
    """Writes into the last block, whoever else holds it."""

    def _tail(self, s):
        return None


class KeepsOldKeys(PagedKVCache):
    """A published block that is overwritten keeps its key."""

    def _unpublish(self, block):
        if self._references[block] == 0:
            super()._unpublish(block)


class IgnoresTheParent(PagedKVCache):
    """Finds a block by its own tokens."""

    def add(self, seq, tokens=(), salt=""):
        n = super().add(seq, tokens, salt)
        s, size = self._sequences[seq], self.block_size
        for block, p in self._published.items():
            if n == 0 and len(tokens) > size and p.tokens == tuple(tokens[:size]):
                self._hold(block)
                s.blocks, s.tokens = [block], list(p.tokens)
                return size
        return n


class PublishesTooSoon(PagedKVCache):
    """Publishes what a step is going to write, accepted or not."""

    def extend(self, plan):
        step = super().extend(plan)
        for seq, ids in plan.items():
            s = self._sequences[seq]
            s.tokens.extend(ids)
            self._publish(s)
            del s.tokens[len(s.tokens) - len(ids):]
        return step


class IgnoresTheSalt(PagedKVCache):
    def add(self, seq, tokens=(), salt=""):
        return super().add(seq, tokens, "")


TWINS = [TakesTwice, WritesOneLate, KeepsOneMore, NeverGivesBack, ReadsOneMore, TopLeft, NoCopyOnWrite, KeepsOldKeys,
         IgnoresTheParent, PublishesTooSoon, IgnoresTheSalt]


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("checked", [True, False])
def test_random_lives_catch_sabotaged_twins(twin, checked, monkeypatch):
    if not checked:  # what the cache holds and computes must give it away, without its own bookkeeping
        monkeypatch.setattr(twin, "check", lambda self: None)
    with pytest.raises(AssertionError):
        Life(small_cache(twin), seed=0).run(1000)


# ------------------------------------------------------------------ what is refused, and changes nothing


def state(cache: PagedKVCache) -> tuple:
    cache.check()
    return ({s: (list(q.tokens), list(q.blocks), q.step, q.new) for s, q in cache._sequences.items()},
            sorted(cache._free), list(cache._references), list(cache._evictable), dict(cache._index))


@pytest.fixture
def busy() -> PagedKVCache:
    """6 blocks of 4: "a" holds 5 tokens in two, "b" 4 in one, "open" has a step of 5 under way; one block is free."""
    cache = PagedKVCache(1, 1, 2, 6, 4, max_seq_len=12)
    for seq in ("a", "b", "open"):
        cache.add(seq)
    cache.commit(cache.extend({"a": [1, 2, 3, 4, 5], "b": [6, 7, 8, 9]}))
    cache.extend({"open": [1, 2, 3, 4, 5]})
    return cache


def open_step(cache: PagedKVCache) -> Step:
    return cache._sequences["open"].step


@pytest.mark.parametrize("plan, error, message", [
    ({}, ValueError, "an empty plan"),
    ({"a": []}, ValueError, "'a' would be extended by no tokens"),
    ({"a": [1], "b": []}, ValueError, "'b' would be extended by no tokens"),
    ({"a": [1], "nobody": [1]}, ValueError, "no sequence 'nobody' in the KV cache; add it first"),
    ({"a": [1], "open": [1]}, ValueError, "'open' has an open step; commit it or roll it back first"),
    ({"a": [1] * 8}, ValueError, "'a' would hold 13 tokens, but the context is 12"),
    ({"b": [1], "a": [1] * 4}, OutOfBlocks, "1 free blocks of 4 tokens, but this step needs 2 more; finish or free"),
    ({"b": [1, 2**70]}, ValueError, f"run from 1 to {2**70}, not within"),
    ({"b": [1, -1]}, ValueError, "new ids of sequence 'b' run from -1 to 1, not within"),
    ({"a": [1], "b": [1, "x"]}, ValueError, "new ids of sequence 'b' are no list of whole numbers"),
    ({"a": [1], "b": [None]}, ValueError, "new ids of sequence 'b' are no list of whole numbers"),
    ({"b": [1.5]}, ValueError, "new ids of sequence 'b' are no list of whole numbers"),
    ({"b": "12"}, ValueError, "new ids of sequence 'b' are no list of whole numbers"),
    ({"b": 5}, ValueError, "new ids of sequence 'b' are no list of whole numbers"),
    ({"b": np.array([1.0])}, ValueError, "new ids of sequence 'b' are no list of whole numbers"),
])
def test_extend_is_all_or_nothing(busy, plan, error, message):
    before = state(busy)
    with pytest.raises(error, match=message):
        busy.extend(plan)
    assert state(busy) == before
    busy.commit(open_step(busy))
    busy.commit(busy.extend({"b": [1], "a": [2]}))  # and everybody can go on
    busy.check()


@pytest.mark.parametrize("ids", [[1, 2, 3], (1, 2, 3), range(1, 4), np.array([1, 2, 3], np.int32),
                                 [np.int64(1), np.uint8(2), 3], torch.tensor([1, 2, 3])])
def test_ids_may_be_whole_numbers_of_any_make(ids):
    cache = PagedKVCache(1, 1, 2, 2, 4)
    cache.add(7)
    step = cache.extend({7: ids})
    cache.commit(step)
    assert step.tokens.tolist() == cache.tokens(7) == [1, 2, 3] and {type(i) for i in cache.tokens(7)} == {int}


@pytest.mark.parametrize("fault", [MemoryError, KeyboardInterrupt, RuntimeError])
def test_a_fault_while_the_step_is_described_leaves_nothing_behind(busy, fault, monkeypatch):
    before = state(busy)

    def fail(*_):
        raise fault("no memory for the tensors")

    monkeypatch.setattr(busy, "_describe", fail)
    with pytest.raises(fault):
        busy.extend({"b": [1], "a": [2]})
    assert state(busy) == before


def test_the_other_doors(busy):
    for call, message in [
        (lambda: busy.add("a"), "'a' is already in the KV cache; free it first or use another id"),
        (lambda: busy.trim("nobody", 0), "no sequence 'nobody'"),
        (lambda: busy.trim("a", 6), "cannot trim sequence 'a' of 5 tokens to 6"),
        (lambda: busy.trim("a", -1), "cannot trim sequence 'a' of 5 tokens to -1"),
        (lambda: busy.trim("open", 0), "'open' has an open step"),
        (lambda: busy.tokens("nobody"), "no sequence 'nobody'"),
        (lambda: busy.length("nobody"), "no sequence 'nobody'"),
        (lambda: busy.blocks_needed("nobody", 1), "no sequence 'nobody'"),
        (lambda: PagedKVCache(1, 1, 2, 0), "at least one block, got 0"),
        (lambda: PagedKVCache(1, 1, 2, 4, 3), "block_size is 3, but must be a power of two"),
        (lambda: PagedKVCache(1, 1, 2, 4, 0), "block_size is 0"),
    ]:
        before = state(busy)
        with pytest.raises(ValueError, match=message):
            call()
        assert state(busy) == before
    busy.free("nobody")
    assert "nobody" not in busy and "a" in busy
    with pytest.raises(AssertionError, match="9 of 5 new tokens"):
        busy.commit(open_step(busy), {"open": 9})
    assert state(busy) == before


def test_a_keep_that_cannot_be_changes_nothing_at_all():
    cache = PagedKVCache(1, 1, 2, 4, 4)
    cache.add("a"), cache.add("b")
    step = cache.extend({"a": [1, 2], "b": [3]})
    before = state(cache)
    with pytest.raises(AssertionError, match="2 of 1 new tokens to be kept of sequence 'b'"):
        cache.commit(step, {"a": 1, "b": 2})
    assert state(cache) == before
    cache.rollback(step)
    assert cache.n_free == 4 and cache.tokens("a") == cache.tokens("b") == []


def test_max_seq_len_is_the_last_length_that_fits():
    cache = PagedKVCache(1, 1, 2, 8, 4, max_seq_len=6)
    cache.add("a")
    cache.commit(cache.extend({"a": [1] * 6}))
    with pytest.raises(ValueError, match="'a' would hold 7 tokens, but the context is 6"):
        cache.extend({"a": [1]})
    cache.trim("a", 5)
    cache.commit(cache.extend({"a": [2]}))
    assert cache.tokens("a") == [1, 1, 1, 1, 1, 2]


# ------------------------------------------------------------------ steps


def test_a_step_says_where_everything_goes():
    cache = PagedKVCache(1, 1, 2, 8, 4)
    cache.add("a"), cache.add("b")
    cache.commit(cache.extend({"a": [1, 2, 3], "b": [4]}))  # a: block 0, b: block 1
    step = cache.extend({"b": [5], "a": [6, 7, 8]})  # b has the block behind a's: a takes the last one
    assert step.tokens.tolist() == [5, 6, 7, 8] and step.positions.tolist() == [1, 3, 4, 5]
    assert step.slots.tolist() == [5, 3, 28, 29]
    assert step.block_table.tolist() == [[1, 8], [0, 7]]  # padded with the trash block
    assert step.kv_len.tolist() == [2, 6] and step.q_start.tolist() == [0, 1, 4]
    assert (step.seqs, step.n_new, step.max_q) == (("b", "a"), (1, 3), 3)
    assert {getattr(step, n).dtype for n in ("tokens", "positions", "slots")} == {torch.int64}
    assert {getattr(step, n).dtype for n in ("block_table", "kv_len", "q_start")} == {torch.int32}
    with pytest.raises(AttributeError):
        step.max_q = 7
    assert cache.tokens("a") == [1, 2, 3]  # not yet


def test_last_picks_rows_from_the_end_of_each_sequence():
    cache = PagedKVCache(1, 1, 2, 8, 4)
    for seq in "abc":
        cache.add(seq)
    step = cache.extend({"a": [1, 2, 3], "b": [4], "c": [5, 6]})
    assert step.last().tolist() == [2, 3, 5]
    assert step.last({"a": 2, "c": 1}).tolist() == [1, 2, 5]  # none of b
    assert step.last({"a": 3, "b": 1, "c": 2}).tolist() == [0, 1, 2, 3, 4, 5]
    assert step.last({}).tolist() == step.last({"a": 0}).tolist() == [] and step.last({}).dtype == torch.int64
    with pytest.raises(AssertionError, match="2 rows asked of sequence 'b', which has 1"):
        step.last({"b": 2})


def test_the_copy_of_the_tokens_is_a_copy_and_the_plan_is_not_kept():
    cache, ids = PagedKVCache(1, 1, 2, 8, 4), [1, 2]
    cache.add("a")
    step = cache.extend({"a": ids})
    ids.append(3)
    cache.commit(step)
    cache.tokens("a").append(9)
    assert cache.tokens("a") == [1, 2]


def test_an_abort_during_a_step_is_legal():
    cache = PagedKVCache(1, 1, 2, 4, 4)
    cache.add("a"), cache.add("b")
    step = cache.extend({"a": [1] * 5, "b": [2]})
    cache.free("a")
    cache.check()
    assert cache.n_free == 3
    cache.add("a")  # another request under the same name, before the old step ends
    cache.commit(step)
    cache.check()
    assert cache.tokens("a") == [] and cache.tokens("b") == [2]
    second = cache.extend({"a": [7]})
    cache.commit(step, {"a": 1}), cache.rollback(step)  # the old step has no say in the new request
    assert cache.tokens("a") == [] and cache.tokens("b") == [2]
    cache.commit(second)
    assert cache.tokens("a") == [7]
    cache.check()


def test_blocks_run_on_where_they_can():
    cache = PagedKVCache(1, 2, 8, 8, 4)
    cache.add("a"), cache.add("b")
    cache.commit(cache.extend({"a": range(4)}))  # block 0
    step = cache.extend({"a": range(4, 16)})  # 1, 2 and 3 behind it
    cache.commit(step)
    assert step.block_table.tolist() == [[0, 1, 2, 3]]
    [part] = _parts(step.block_table, step.kv_len, step.q_start, 4, None, True)
    assert _read(cache.k[0], part).data_ptr() == cache.k[0].data_ptr()  # read in place
    cache.commit(cache.extend({"b": range(20, 36)}))  # the oldest free block and what follows: 4 .. 7
    cache.trim("a", 8)
    cache.free("b")  # evictable now are, the longest unused first, 3, 2, 7, 6, 5, 4
    step = cache.extend({"a": range(40, 52)})
    assert step.block_table.tolist() == [[0, 1, 2, 3, 7]]  # in order, although the tail went first
    cache.rollback(step)


def test_only_a_step_that_stays_as_it_is_has_a_memo():
    """The layers of a step share one; who refills the tensors of attend_with (CUDA graphs) must not find an old one."""
    memos = []

    def attend(*args, memo=None, **more):
        memos.append(memo)
        return kvcache.reference_attention(*args, **more)

    cache = PagedKVCache(2, 1, 2, 8, 4, attention=attend)
    cache.add("a")
    for _ in range(2):
        step = cache.extend({"a": [1, 2]})
        for layer in range(2):
            step.attend(layer, *(torch.zeros(2, 1, 2) for _ in "qkv"))
        cache.commit(step)
    assert memos[0] is memos[1] and memos[2] is memos[3] and memos[0] is not memos[2] and None not in memos
    cache.attend_with(step.slots, step.block_table, step.kv_len, step.q_start, 2)(0, *(torch.zeros(2, 1, 2),) * 3)
    assert memos[4] is None


def test_a_long_prompt_among_short_answers_stays_in_one_run():
    cache, short = PagedKVCache(1, 1, 2, 96, 4), "abcdefgh"
    for seq in short:
        cache.add(seq)
        cache.commit(cache.extend({seq: [ord(seq)] * 7}))
    cache.add("long")
    for i in range(30):  # each answer takes a block every fourth step, the prompt one in each
        cache.commit(cache.extend({**{seq: [i] for seq in short}, "long": range(i, i + 4)} if i < 12
                                  else {"long": range(i, i + 4)}))
    step = cache.extend({"long": [0]})
    blocks = step.block_table[0].tolist()
    assert blocks == list(range(blocks[0], blocks[0] + 31))


def test_runs_come_back_when_the_pool_has_been_full():
    cache = PagedKVCache(1, 1, 2, 8, 4)
    for i in range(4):
        cache.add(i)
        step = cache.extend({i: range(100 * i, 100 * i + 32)})
        assert step.block_table.tolist() == [list(range(8))]
        cache.commit(step)
        cache.free(i)
    assert cache.stats.evicted == 24


def test_caches_hold_one_tensor_a_layer_head_by_head_on_the_cpu():
    cache = PagedKVCache(3, 2, 8, 5, 4, dtype=torch.bfloat16)
    assert len(cache.k) == len(cache.v) == 3 and len({p.data_ptr() for p in cache.k + cache.v}) == 6
    for p in cache.k + cache.v:
        assert p.shape == (6, 4, 2, 8) and p.stride() == (32, 8, 192, 1) and p.dtype == torch.bfloat16


# ------------------------------------------------------------------ the cache, by case


def tiny_model() -> Llama:
    torch.manual_seed(0)
    return Llama(Config(n_layer=2, n_head=4, n_kv_head=2, head_dim=8, hidden_size=32, intermediate_size=48,
                        vocab_size=50, max_seq_len=64)).double().eval().requires_grad_(False)


def model_cache(model: Llama, n_blocks: int = 8, block_size: int = 4) -> PagedKVCache:
    c = model.config
    cache = PagedKVCache(c.n_layer, c.n_kv_head, c.head_dim, n_blocks, block_size, dtype=torch.float64,
                         attention=paged_attention)
    for p in cache.k + cache.v:
        p.fill_(NAN)
    return cache


def advance(model: Llama, cache: PagedKVCache, plan: dict) -> tuple[torch.Tensor, Step]:
    """Logits (B, V) of each sequence's last token, and the committed step."""
    step = cache.extend(plan)
    logits = model(step.tokens, step.positions, step.attend, step.last())
    cache.commit(step)
    return logits, step


def test_k09_positions_go_on_where_the_cache_ends():
    """K09 (Wenyueh/MinivLLM PR #98; unslothai/unsloth PRs #3795 and #3803; transformers issue #18104)."""
    model = tiny_model()
    cold = model(torch.arange(1, 7))[-1]
    cache = model_cache(model)
    cache.add("a")
    advance(model, cache, {"a": [1, 2, 3, 4, 9, 9, 9]})
    cache.trim("a", 4)  # the first block stays, the rest is computed anew
    logits, step = advance(model, cache, {"a": [5, 6]})
    assert step.positions.tolist() == [4, 5] and step.kv_len.tolist() == [6]
    assert (logits[0] - cold).abs().max() < 1e-10

    cache.add("b"), cache.add("c")  # two decoding rows of lengths 3 and 9
    advance(model, cache, {"b": [1, 2, 3], "c": list(range(10, 19))})
    logits, step = advance(model, cache, {"b": [4], "c": [19]})
    assert step.positions.tolist() == [3, 9]
    assert (logits[0] - model(torch.arange(1, 5))[-1]).abs().max() < 1e-10
    assert (logits[1] - model(torch.arange(10, 20))[-1]).abs().max() < 1e-10


def test_k10_a_cached_prefix_in_scattered_blocks():
    """K10 (tanishqkumar/ssd issue #23; tenstorrent/vllm issue #415): 8 of 10 tokens cached in blocks 5 and 2."""
    model, ids = tiny_model(), list(range(1, 11))
    cold = model(torch.tensor(ids))[-1]
    cache = model_cache(model)
    for block in range(8):
        cache.add(block)
        advance(model, cache, {block: [block]})
    for block in (5, 7, 2):
        cache.free(block)
    cache.add("a")
    advance(model, cache, {"a": ids[:4]})
    advance(model, cache, {"a": ids[4:8]})
    cache.free("a")
    assert cache.add("b", ids) == 8
    logits, step = advance(model, cache, {"b": ids[8:]})
    assert step.block_table.tolist() == [[5, 2, 7]]
    assert (logits[0] - cold).abs().max() < 1e-10


def cold(model: Llama, ids: list[int]) -> torch.Tensor:
    """Logits after ids, computed densely and all at once."""
    return model(torch.tensor(ids))[-1]


def answer(model: Llama, cache: PagedKVCache, seq, ids: list[int], chunk: int = 100) -> tuple[int, torch.Tensor]:
    """How many of ids were cached, and the logits after the rest is computed chunk by chunk; seq goes on living."""
    cached = cache.add(seq, ids)
    for i in range(cached, len(ids), chunk):
        logits, step = advance(model, cache, {seq: ids[i: i + chunk]})
        assert step.positions.tolist() == list(range(i, min(i + chunk, len(ids))))
        cache.check()
    return cached, logits[0]


def test_k01_a_prompt_that_is_all_cached_leaves_a_token_to_compute():
    """K01 (vllm PRs #11186, #7753; llama.cpp PR #5420, issue #4902): prompts of 8, 4, 7 and 9 tokens, twice; [1..5]."""
    model = tiny_model()
    for n, reused in ((8, 4), (4, 0), (7, 4), (9, 8)):
        cache, ids = model_cache(model), list(range(1, n + 1))
        first, once = answer(model, cache, "a", ids)
        second, again = answer(model, cache, "b", ids)
        assert (first, second) == (0, reused)
        for logits in (once, again):
            assert (logits - cold(model, ids)).abs().max() < 1e-10
    cache = model_cache(model)
    answer(model, cache, "a", list(range(1, 9)))
    cache.free("a")  # and hits survive it
    found, logits = answer(model, cache, "b", [1, 2, 3, 4, 5])
    assert found == 4 and (logits - cold(model, [1, 2, 3, 4, 5])).abs().max() < 1e-10
    assert (cache.stats.asked, cache.stats.found) == (8 + 5, 4)


def test_k02_a_recycled_block_is_not_found_by_its_old_key():
    """K02 (nano-vllm issue #163, PR #153; MinivLLM PR #87; kvcached issue #362): X, Y, X in a pool of two blocks."""
    model, x, y = tiny_model(), [1, 2, 3, 4, 5], [9, 8, 7, 6, 5, 4, 3]
    cache = model_cache(model, n_blocks=2)
    for i, ids in enumerate((x, y, x)):
        found, logits = answer(model, cache, i, ids)
        assert found == 0 and (logits - cold(model, ids)).abs().max() < 1e-10
        assert len(cache._index) <= 2
        cache.free(i)
        cache.check()
    assert answer(model, cache, "again", x)[0] == 4


def test_k02_a_published_block_that_its_holder_overwrites_is_not_found_either():
    """K02 (nano-vllm issue #163, PR #153), another way there: trimmed into a published block, with children behind."""
    model, ids = tiny_model(), list(range(1, 13))
    cache = model_cache(model, n_blocks=4)
    answer(model, cache, "a", ids)
    cache.trim("a", 6)  # blocks 1 and 2 are still known
    assert cache.add("b", ids) == 8
    cache.free("b")
    logits, _ = advance(model, cache, {"a": [40, 41]})
    cache.check()
    assert (logits[0] - cold(model, [*ids[:6], 40, 41])).abs().max() < 1e-10
    found, logits = answer(model, cache, "b", ids)
    assert found == 4 and (logits - cold(model, ids)).abs().max() < 1e-10


@pytest.mark.parametrize("n, blocks_before, blocks_after", [(6, 2, 4), (8, 2, 5)])
def test_k05_children_do_not_write_into_each_others_blocks(n, blocks_before, blocks_after):
    """K05 (llama.cpp issue #3802, PR #6664; xllm PR #1984; vllm PR #3347): 3 children go on with 11, 12 and 13."""
    for together in (True, False):
        model, prompt = tiny_model(), list(range(1, n + 1))
        cache, ids = model_cache(model, n_blocks=12), {c: [*prompt, 11 + c] for c in range(3)}
        answer(model, cache, "parent", prompt)
        for child in ids:
            cache.fork("parent", child)
        cache.free("parent")
        assert 12 - cache.n_free == blocks_before
        plans = [{c: [x[-1]] for c, x in ids.items()}] if together else [{c: [x[-1]]} for c, x in ids.items()]
        rows = {c: row for plan in plans for c, row in zip(plan, advance(model, cache, plan)[0])}
        assert 12 - cache.n_free == blocks_after and cache.stats.copied == (2 if n == 6 else 0)
        for _ in range(4):
            for child, row in rows.items():
                assert (row - cold(model, ids[child])).abs().max() < 1e-10
                ids[child].append(int(row.argmax()))
            rows = dict(zip(ids, advance(model, cache, {c: [x[-1]] for c, x in ids.items()})[0]))
            cache.check()
        for child in ids:
            cache.free(child)
        cache.check()
        assert cache.n_free == 12


def test_k06_keys_chain_over_what_comes_before():
    """K06 (inference-sim issue #196; vllm PR #2762): equal second blocks, other first ones; and chunks of any size."""
    model, p1, p2 = tiny_model(), [1, 2, 3, 4, 5, 6, 7, 8, 0], [9, 9, 9, 9, 5, 6, 7, 8, 0]
    keys = set()
    for chunk in (9, 4, 3, 1):
        cache = model_cache(model)
        answer(model, cache, "p1", p1, chunk)
        keys.add(frozenset(cache._index))
        found, logits = answer(model, cache, "p2", p2, chunk)
        assert found == 0 and (logits - cold(model, p2)).abs().max() < 1e-10
        assert answer(model, cache, "again", p1)[0] == 8
    assert len(keys) == 1  # and every process has the same
    assert kvcache._key(kvcache._root(""), [1, 2, 3, 4]).hex() == "a78266a60c0811e0066bc93e98af0ef9"


def test_k07_a_collision_of_keys_is_a_miss(monkeypatch):
    """K07 (vllm PRs #12621, #15297, issue #8229; openvino.genai issue #3722): a hash function that is a constant."""
    model, prompts = tiny_model(), [[*range(1, 10)], [*range(11, 20)], [1, 2, 3, 4, 1, 2, 3, 4, 9], [*range(1, 10)]]
    monkeypatch.setattr(kvcache, "_key", lambda parent, tokens: b"same")
    cache = model_cache(model, n_blocks=16)
    for i, ids in enumerate(prompts):
        found, logits = answer(model, cache, i, ids)
        assert found == (0, 0, 4, 4)[i] and (logits - cold(model, ids)).abs().max() < 1e-10
    assert len(cache._index) == 1


def test_k07_salts_that_python_thinks_equal_are_refused_and_others_are_kept_apart():
    """K07 (vllm issue #8229): hash(1) == hash(True) == hash(1.0); a salt is a string."""
    cache = PagedKVCache(1, 1, 2, 8, 4)
    for wrong in (1, True, 1.0, b"a", None):
        with pytest.raises(ValueError, match=r"salt of sequence 'x' is .*, but must be a string"):
            cache.add("x", [1], wrong)
    for salt in ("", "1", "True", "\ud800"):
        assert cache.add(salt, [1, 2, 3, 4, 5], salt) == 0
        cache.commit(cache.extend({salt: [1, 2, 3, 4]}))
    assert len(cache._index) == 4
    assert cache.add("z", [1, 2, 3, 4, 5], "1") == 4
    cache.fork("z", "child")  # which keeps its parent's salt
    cache.commit(cache.extend({"child": [6, 7, 8, 9]}))
    cache.check()
    assert cache.add("y", [1, 2, 3, 4, 6, 7, 8, 9, 0]) == 4 and cache.add("w", [1, 2, 3, 4, 6, 7, 8, 9, 0], "1") == 8


def test_k13_what_is_matched_is_held_until_it_is_used():
    """K13 (mini-sglang PR #52; sglang PR #10637): B cannot take the two blocks that A has matched but not yet used."""
    cache = PagedKVCache(1, 1, 2, 4, 4)
    cache.add("first")
    cache.commit(cache.extend({"first": range(1, 9)}))
    cache.free("first")
    assert cache.n_free == 4 and cache.add("A", range(1, 10)) == 8 and cache.n_free == 2
    cache.add("B")
    with pytest.raises(OutOfBlocks) as error:
        cache.extend({"B": range(20, 32)})
    assert (error.value.needed, error.value.free) == (3, 2)
    assert cache.add("short", [1, 2, 3]) == 0
    cache.free("A"), cache.free("short")
    cache.commit(cache.extend({"B": range(20, 32)}))
    cache.check()


def test_k14_a_chain_is_evicted_from_its_tail():
    """K14 (llm-d-inference-sim issue #704; LMCache issue #443; Megatron-LM PR #5822): 3 blocks, one is needed."""
    cache = PagedKVCache(1, 1, 2, 3, 4)
    cache.add("a")
    cache.commit(cache.extend({"a": range(1, 13)}))
    cache.free("a")
    cache.add("b")
    cache.commit(cache.extend({"b": [40]}))
    cache.free("b")
    assert cache.stats.evicted == 1
    assert cache.add("c", range(1, 10)) == 8 and cache.blocks_needed("c", 1) == 1 and cache.n_free == 1
    cache.check()


def test_a_prefix_used_lately_outlives_an_older_one():
    cache = PagedKVCache(1, 1, 2, 3, 4)
    for seq, ids in (("a", [1, 2, 3, 4, 5]), ("b", [6, 7, 8, 9, 5])):
        cache.add(seq)
        cache.commit(cache.extend({seq: ids[:4]}))
        cache.free(seq)
    assert cache.add("a", [1, 2, 3, 4, 5]) == 4
    cache.free("a")
    cache.add("c")
    cache.commit(cache.extend({"c": [10] * 5}))  # two blocks: the free one and the longest unused
    assert cache.add("a", [1, 2, 3, 4, 5]) == 4 and cache.add("b", [6, 7, 8, 9, 5]) == 0


def test_p18_rejected_drafts_are_not_published():
    """P18 (vllm PRs #18668, #12415, #19006, issue #49449): 7 tokens, drafts at 7 .. 9 rejected, a bonus at 7."""
    model, ids = tiny_model(), [1, 2, 3, 4, 5, 6, 7]
    cache = model_cache(model)
    answer(model, cache, "a", ids)
    step = cache.extend({"a": [20, 21, 22]})
    model(step.tokens, step.positions, step.attend, step.last())
    assert len(cache._index) == 1
    cache.commit(step, {"a": 0})
    assert len(cache._index) == 1
    for prompt in ([*ids, 20, 1], [*ids, 30, 1]):
        found, logits = answer(model, cache, "b", prompt)
        assert found == 4 and (logits - cold(model, prompt)).abs().max() < 1e-10
        cache.free("b")
    advance(model, cache, {"a": [30]})  # the bonus: now block 1 holds accepted tokens
    found, logits = answer(model, cache, "b", [*ids, 30, 1])
    assert found == 8 and (logits - cold(model, [*ids, 30, 1])).abs().max() < 1e-10


@pytest.mark.parametrize("chunks", [[8], [3, 3, 2], [1] * 8])
def test_b02_every_chunking_gives_the_same_logits_and_the_same_cache(chunks):
    """B02 (pytorch issues #108108, #144858; candle PR #3743): a prompt of 8 in chunks of 8, of 3, 3 and 2, and of 1."""
    model, ids = tiny_model(), list(range(1, 9))
    whole, cache = model_cache(model), model_cache(model)
    _, expected = answer(model, whole, "a", ids)
    cache.add("a")
    for n in chunks:
        logits, _ = advance(model, cache, {"a": ids[cache.length("a"):][:n]})
    assert (logits[0] - expected).abs().max() < 1e-10 and (expected - cold(model, ids)).abs().max() < 1e-10
    for name, x in cache.export("a").items():
        assert torch.allclose(x, whole.export("a")[name], rtol=0, atol=1e-12)


def test_k12_lengths_that_fill_their_blocks_exactly():
    """K12 (Wenyueh/MinivLLM PR #87; GeeeekExplorer/nano-vllm PR #66): blocks of 4, lengths 0, 1, 3, 4, 5, 8."""
    for length, blocks, in_last in ((0, 0, 0), (1, 1, 1), (3, 1, 3), (4, 1, 4), (5, 2, 1), (8, 2, 4)):
        for at_once in (True, False):
            cache = PagedKVCache(1, 1, 2, 4, 4)
            cache.add("a")
            for part in ([[0] * length] if at_once else [[0]] * length) if length else []:
                cache.commit(cache.extend({"a": part}))
            assert 4 - cache.n_free == blocks
            assert length - max(0, blocks - 1) * 4 == in_last
            # the next block is taken exactly when a token needs it
            assert cache.blocks_needed("a", 1) == (1 if length % 4 == 0 else 0)
            step = cache.extend({"a": [0]})
            assert 4 - cache.n_free == length // 4 + 1 and step.kv_len.tolist() == [length + 1]
            cache.rollback(step)
            assert 4 - cache.n_free == blocks


def test_k13_counts_return_to_zero_however_often():
    """K13 (Wenyueh/MinivLLM PR #87; sgl-project/mini-sglang PR #52): two of four blocks, taken and freed 100 times."""
    cache = PagedKVCache(1, 1, 2, 4, 4)
    for _ in range(100):
        cache.add("a")
        cache.commit(cache.extend({"a": [0] * 8}))
        assert cache.n_free == 2
        cache.free("a")
        cache.check()
        assert cache.n_free == 4


def test_k19_a_failed_admission_takes_nothing_however_often():
    """K19 (neuralmagic/vllm PR #92; vllm-project/vllm PR #11565): A holds 3 of 4 blocks, B needs 2, 15 times over."""
    cache = PagedKVCache(1, 1, 2, 4, 16)
    cache.add("A"), cache.add("B")
    cache.commit(cache.extend({"A": [0] * 33}))
    for _ in range(15):
        with pytest.raises(OutOfBlocks) as error:
            cache.extend({"A": [1], "B": [0] * 32})
        assert (error.value.needed, error.value.free) == (2, 1) and cache.n_free == 1
        with pytest.raises(OutOfBlocks):
            cache.extend({"B": [0] * 32})
        assert cache.n_free == 1 and cache.length("B") == 0
        cache.commit(cache.extend({"A": [1]}))  # A goes on inside its third block
        cache.check()
    cache.free("A")
    step = cache.extend({"B": [0] * 32})
    assert step.block_table.shape == (1, 2) and cache.n_free == 2


def test_tp_07_padded_slots_write_where_nobody_reads():
    """TP-07 (vllm #43810, #43869): slot -1 would damage the last block, slot 0 the first; ours go behind the pool."""
    cache = PagedKVCache(1, 1, 1, 2, 4)
    for p in (*cache.k, *cache.v):
        p.zero_()
    trash = cache.n_blocks * cache.block_size
    q, new = torch.zeros(2, 1, 1), torch.tensor([1.0, 9.0]).view(2, 1, 1)
    table, kv_len, q_start = torch.tensor([[1], [2]]), torch.tensor([2, 0]), torch.tensor([0, 1, 2])
    out = cache._attend(torch.tensor([5, trash]), table, kv_len, q_start, 1, None, 0, q, new, new)
    for p in (*cache.k, *cache.v):
        assert p.flatten().tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 9, 0, 0, 0]
    assert out.flatten().tolist() == [0.5, 0]  # the padded row attends to nothing


def test_the_trash_block_is_never_given_out_and_never_read():
    cache = PagedKVCache(1, 1, 1, 2, 4, dtype=torch.float64)
    cache.k[0].fill_(NAN), cache.v[0].fill_(NAN)
    cache.add("a"), cache.add("b")
    step = cache.extend({"a": [0] * 4, "b": [0] * 3})
    assert max(step.slots) < 8 and cache.n_free == 0
    zeros = torch.zeros(7, 1, 1, dtype=torch.float64)
    assert step.attend(0, zeros, zeros, zeros + 1).eq(1).all()
    assert cache.k[0][2].isnan().all()


def test_two_sequences_that_compute_the_same_end_up_with_one_copy():
    cache = PagedKVCache(1, 1, 2, 8, 4)
    cache.add("a"), cache.add("b")
    cache.commit(cache.extend({"a": range(10), "b": range(9)}))
    cache.check()
    assert 8 - cache.n_free == 2 + 1 + 1 and cache._sequences["a"].blocks[:2] == cache._sequences["b"].blocks[:2]


def test_rollback_of_a_copy_on_write_keeps_both_sides_whole():
    model, ids = tiny_model(), [1, 2, 3, 4, 5, 6]
    cache = model_cache(model)
    answer(model, cache, "a", ids)
    cache.fork("a", "b")
    cache.rollback(cache.extend({"b": [7, 8, 9]}))
    cache.check()
    for seq, token in (("a", 20), ("b", 21)):
        logits, _ = advance(model, cache, {seq: [token]})
        assert (logits[0] - cold(model, [*ids, token])).abs().max() < 1e-10


def test_a_shared_block_is_copied_for_a_step_only_if_there_is_room():
    cache = PagedKVCache(1, 1, 2, 2, 4)
    cache.add("a")
    cache.commit(cache.extend({"a": range(5)}))
    cache.fork("a", "b")
    before = state(cache)
    assert cache.n_free == 0 and cache.blocks_needed("b", 1) == 1 and cache.blocks_needed("b", 0) == 0
    with pytest.raises(OutOfBlocks) as error:
        cache.extend({"b": [1]})
    assert (error.value.needed, error.value.free) == (1, 0) and state(cache) == before
    cache.free("a")
    cache.commit(cache.extend({"b": [1]}))  # alone, it writes in place
    cache.check()


# ------------------------------------------------------------------ quantized caches


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_are_as_near_as_promised(dtype):
    torch.manual_seed(0)
    x = torch.cat((torch.randn(500, 3, 64), torch.randn(500, 3, 64) * torch.logspace(-4, 4, 64)))
    codes, scales = quantize(x, dtype)
    assert codes.dtype == dtype and codes.shape == x.shape and scales.shape == (1000, 3)
    assert scales.dtype == torch.float32
    error, value = (codes.double() * scales[..., None].double() - x.double()).abs(), x.abs().double()
    step = scales[..., None].double()
    bound = step / 2 if dtype == torch.int8 else torch.maximum(value / 16, step / 1024)
    assert (error <= bound * (1 + 1e-5)).all()
    assert (codes.float().abs().amax(-1) == {torch.int8: 127, torch.float8_e4m3fn: 448}[dtype]).all()


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_rt_01_a_head_of_zeros_is_zeros(dtype):
    """RT-01 (GPTQModel #1531; auto-round #1909; flashinfer #4287): scale 1 and codes 0, also among others."""
    x = torch.randn(4, 2, 8)
    x[1, 0] = 0
    codes, scales = quantize(x, kvcache.CODES[dtype])
    assert scales[1, 0] == 1 and codes[1, 0].float().eq(0).all() and scales.isfinite().all() and scales.gt(0).all()
    cache = PagedKVCache(1, 2, 8, 1, 4, dtype=dtype)
    cache.add("a")
    zeros = torch.zeros(3, 2, 8)
    out = cache.extend({"a": [1, 2, 3]}).attend(0, torch.randn(3, 4, 8), zeros, zeros)
    assert out.eq(0).all()


def test_rt_06_a_scale_is_made_when_k_and_v_are_written_and_a_foreign_one_is_checked():
    """RT-06 (llm-compressor #1928; Model-Optimizer #20; mobius #447): a scale of 0, -1, inf or NaN, or none at all."""
    cache = PagedKVCache(1, 1, 2, 4, 4, dtype="int8")
    for p in cache.k_scale + cache.v_scale:
        p.fill_(NAN)  # whatever was there
    cache.add("a")
    step = cache.extend({"a": [1, 2]})
    out = step.attend(0, torch.ones(2, 1, 2), torch.ones(2, 1, 2), torch.full((2, 1, 2), 3000.0))
    assert out.flatten().tolist() == pytest.approx([3000] * 4)
    cache.commit(step)
    data = cache.export("a")
    for wrong in (0.0, -1.0, math.inf, NAN):
        for name in ("k_scale", "v_scale"):
            bad = {**data, name: data[name].clone()}
            bad[name][0, 1, 0] = wrong
            with pytest.raises(ValueError, match=f"'b' cannot be taken: {name} has scales that are not finite"):
                cache.import_("b", bad)
    with pytest.raises(ValueError, match="v_scale is missing"):
        cache.import_("b", {k: x for k, x in data.items() if k != "v_scale"})
    assert "b" not in cache


def test_rt_08_fp8_is_clamped_before_the_cast_and_nan_stays():
    """RT-08 (ml_dtypes #260, #400; Model-Optimizer #1633; pytorch #178817): nothing but NaN becomes NaN, or 448 inf."""
    x = torch.tensor([447.0, 448, 449, 464, 465, 1000, -1000])
    codes, scale = quantize(x, torch.float8_e4m3fn)
    assert codes.float().isfinite().all() and codes[5].float() == 448 and codes[6].float() == -448
    assert ((codes.float() * scale - x).abs() <= x.abs() / 16).all()
    for dtype in (torch.int8, torch.float8_e4m3fn):
        for bad in (math.inf, -math.inf, NAN):  # the whole head is NaN then: never a plausible number
            codes, scale = quantize(torch.tensor([[1.0, bad, 2.0], [1.0, 2.0, 3.0]]), dtype)
            assert not (codes[0].float() * scale[0]).isfinite().any() or (codes[0].float() * scale[0]).isnan().any()
            assert not scale[0].isfinite() and scale[1].isfinite()


@pytest.mark.parametrize("dtype, bound", [("int8", 0.02), ("fp8", 0.12)])
@pytest.mark.parametrize("chunks", [[40], [1] * 40, [7, 16, 17]])
def test_a_quantized_cache_is_near_and_does_not_depend_on_chunking(dtype, bound, chunks):
    torch.manual_seed(0)
    q, k, v = (torch.randn(40, heads, 64, dtype=torch.float64) for heads in (4, 2, 2))
    stored = [codes.double() * scales[..., None].double() for codes, scales in (quantize(x, kvcache.CODES[dtype])
                                                                                for x in (k, v))]
    for attention in (paged_attention, kvcache.reference_attention):
        cache, out = PagedKVCache(1, 2, 64, 8, 8, dtype=dtype, attention=attention), []
        for p in cache.k_scale + cache.v_scale:
            p.fill_(NAN)
        cache.add("other"), cache.add("a")
        cache.commit(cache.extend({"other": [1]}))
        for n in chunks:
            i = cache.length("a")
            step = cache.extend({"a": [0] * n})
            out.append(step.attend(0, q[i: i + n], k[i: i + n], v[i: i + n]))
            cache.commit(step)
        out = torch.cat(out)
        assert_near(out, dense_attention(q, *stored, 0.125))  # exactly what the codes say, also for the newest tokens
        assert 1e-4 < (out - dense_attention(q, k, v, 0.125)).abs().max() < bound


def test_the_memory_of_a_quantized_cache_really_falls():
    config = SimpleNamespace(n_layer=3, n_kv_head=2, head_dim=64)
    size = {}
    for dtype in (torch.float32, torch.bfloat16, "int8", "fp8"):
        cache = PagedKVCache(3, 2, 64, 9, 16, dtype=dtype)
        size[dtype] = sum({s.data_ptr(): s.nbytes() for s in (p.untyped_storage() for p in cache._pools())}.values())
        assert size[dtype] == 10 * 16 * kv_bytes_per_token(config, dtype)  # with the trash block
    assert size["int8"] == size["fp8"] == size[torch.bfloat16] * 68 / 128 == size[torch.float32] * 68 / 256


def test_a_budget_is_kept_and_used():
    config = SimpleNamespace(n_layer=30, n_kv_head=3, head_dim=64)
    assert kv_bytes_per_token(config, torch.bfloat16) == 2 * 30 * 3 * 64 * 2 == 23040
    for dtype, budget, block_size in itertools.product((torch.bfloat16, "int8", "fp8"), (10**6, 10**8, 2**31), (1, 16)):
        n, block = blocks_that_fit(config, dtype, budget, block_size), block_size * kv_bytes_per_token(config, dtype)
        assert n >= 1 and (n + 1) * block <= budget < (n + 2) * block
    with pytest.raises(ValueError, match="takes 737280 bytes, but the budget is 737279; use smaller blocks"):
        blocks_that_fit(config, torch.bfloat16, 737279)


# ------------------------------------------------------------------ from one cache to another


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, "int8", "fp8"])
@pytest.mark.parametrize("length", [0, 1, 4, 7, 16])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_sequence_moves_to_a_cache_of_another_block_size(dtype, length, block_size):
    torch.manual_seed(0)
    one = PagedKVCache(2, 2, 8, 8, 4, dtype=dtype, attention=paged_attention)
    other = PagedKVCache(2, 2, 8, 64 // block_size, block_size, dtype=dtype, attention=paged_attention)
    for p in one._pools() + other._pools():
        p.fill_(1 if p.dtype == torch.int8 else NAN)
    one.add("a"), other.add("x")
    other.commit(other.extend({"x": [5]}))
    if length:
        step = one.extend({"a": range(length)})
        for layer in (0, 1):
            step.attend(layer, *(torch.randn(length, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)))
        one.commit(step)
    data = one.export("a")
    other.import_("b", data)
    other.check()
    assert other.tokens("b") == one.tokens("a") == list(range(length))
    for name, x in other.export("b").items():
        assert x.dtype == data[name].dtype and torch.equal(x.float(), data[name].float())
    q, k, v = (torch.randn(3, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    outs = [cache.extend({seq: [1, 2, 3]}).attend(1, q, k, v) for cache, seq in ((one, "a"), (other, "b"))]
    assert (outs[0] - outs[1]).abs().max() < 1e-6
    one.free("a")
    assert length == 0 or torch.equal(data["tokens"], torch.arange(length))  # copies, not views


def test_what_is_imported_can_be_found_and_takes_another_type():
    torch.manual_seed(0)
    one, found = PagedKVCache(1, 1, 8, 8, 4), []
    one.add("a")
    step = one.extend({"a": range(10)})
    k, v = torch.randn(2, 10, 1, 8)
    step.attend(0, torch.randn(10, 1, 8), k, v)
    one.commit(step)
    for dtype, tolerance in ((torch.bfloat16, 2e-2), ("int8", 2e-2), ("fp8", 0.2)):
        other = PagedKVCache(1, 1, 8, 8, 4, dtype=dtype)
        other.import_("a", one.export("a"), salt="s")
        found.append((other.add("b", range(10)), other.add("c", range(10), "s")))
        back = PagedKVCache(1, 1, 8, 8, 2)
        back.import_("a", other.export("a"))
        assert (back.export("a")["k"][0] - k).abs().max() < tolerance
        assert (back.export("a")["v"][0] - v).abs().max() < tolerance
        other.import_("again", one.export("a"), salt="s")  # of 10 tokens 8 are there: shared, not written once more
        assert other._sequences["again"].blocks[:2] == other._sequences["a"].blocks[:2]
        other.check()
    assert found == [(0, 8)] * 3


def test_an_import_that_does_not_fit_leaves_nothing_behind(busy):
    data = PagedKVCache(1, 1, 2, 4, 4)
    data.add("x")
    data.commit(data.extend({"x": range(8)}))
    data = data.export("x")
    for change, error, message in [
        ({}, OutOfBlocks, "1 free blocks of 4 tokens, but this step needs 2 more"),
        ({"tokens": torch.arange(7)}, ValueError, "'n' cannot be taken: k is .1, 8, 1, 2., but"),
        ({"k": data["k"][:, :, :, :1]}, ValueError, "'n' cannot be taken: k is .1, 8, 1, 1., but"),
        ({"v": data["v"][0]}, ValueError, "'n' cannot be taken: v is .8, 1, 2., but this"),
        ({"v": data["v"].to(torch.int8)}, ValueError, "k and v are torch.float32 and torch.int8"),
        ({"tokens": -torch.arange(8)}, ValueError, "ids of sequence 'n' run from -7 to 0"),
        ({"tokens": torch.arange(13), "k": torch.zeros(1, 13, 1, 2), "v": torch.zeros(1, 13, 1, 2)}, ValueError,
         "'n' would hold 13 tokens, but the context is 12"),
    ]:
        before = state(busy)
        with pytest.raises(error, match=message):
            busy.import_("n", {**data, **change})
        assert state(busy) == before
    with pytest.raises(ValueError, match="'n' cannot be taken: no tokens"):
        busy.import_("n", {"k": data["k"], "v": data["v"]})
    with pytest.raises(ValueError, match="'a' is already in the KV cache"):
        busy.import_("a", data)
    with pytest.raises(ValueError, match="'open' has an open step"):
        busy.export("open")


def greedy(model: Llama, cache: PagedKVCache, seq, token: int, n: int) -> list[int]:
    tokens = [token]
    for _ in range(n):
        logits, _ = advance(model, cache, {seq: tokens[-1:]})
        tokens.append(int(logits[0].argmax()))
    return tokens


PROMPT = [7, 3, 9, 9, 1, 20, 31, 4, 8, 15]


def one_of_two(rank: int, file: str) -> None:
    """Process 0 computes the prompt and sends its K/V away; process 1 goes on from there."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    model = tiny_model()
    with torch.no_grad():
        if rank == 0:
            cache = model_cache(model, block_size=4)
            _, logits = answer(model, cache, "prompt", PROMPT)
            data = cache.export("prompt")
            for x in (data["tokens"], data["k"], data["v"], logits.argmax()[None]):
                dist.send(torch.tensor(x.shape + (0,) * (4 - x.dim())), 1)
                dist.send(x.contiguous(), 1)
        else:
            received = []
            for dtype in (torch.int64, torch.float64, torch.float64, torch.int64):
                shape = torch.empty(4, dtype=torch.int64)
                dist.recv(shape, 0)
                received.append(torch.empty([n for n in shape.tolist() if n], dtype=dtype))
                dist.recv(received[-1], 0)
            cache = model_cache(model, block_size=8)
            cache.import_("moved", dict(zip(("tokens", "k", "v"), received)))
            Path(file + ".out").write_text(" ".join(map(str, greedy(model, cache, "moved", int(received[3]), 12))))
    dist.destroy_process_group()


def test_one_process_computes_the_prompt_and_another_decodes(tmp_path):
    """Disaggregated prefill over torch.distributed (gloo): the tokens are those of one process that does both."""
    import torch.multiprocessing as mp

    file = str(tmp_path / "rendezvous")
    mp.spawn(one_of_two, (file,), nprocs=2)
    model = tiny_model()
    cache = model_cache(model)
    _, logits = answer(model, cache, "a", PROMPT)
    expected = greedy(model, cache, "a", int(logits.argmax()), 12)
    assert len(set(expected)) > 3
    assert Path(file + ".out").read_text().split() == [*map(str, expected)]


def test_swapped_out_and_in_again_nothing_changes():
    """Preemption by swapping: export, free, other work in between, import, and the same tokens follow."""
    model = tiny_model()
    cache = model_cache(model, n_blocks=6)
    _, logits = answer(model, cache, "a", PROMPT)
    expected = greedy(model, cache, "a", int(logits.argmax()), 12)
    cache.free("a")
    _, logits = answer(model, cache, "a", PROMPT)
    first = greedy(model, cache, "a", int(logits.argmax()), 5)
    data = cache.export("a")
    cache.free("a")
    answer(model, cache, "b", list(range(20, 44)))  # takes every block
    cache.free("b")
    cache.import_("a", data)
    assert [*first[:-1], *greedy(model, cache, "a", first[-1], 7)] == expected


# ------------------------------------------------------------------ what a review found


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("attend", [paged_attention, kvcache.reference_attention])
def test_a_quantized_infinity_never_looks_like_a_number(dtype, bad, where, attend):
    for sign in (1, -1):
        cache = PagedKVCache(1, 1, 4, 8, 4, dtype=dtype, attention=attend)
        cache.add("a")
        step = cache.extend({"a": [1, 2]})
        new = {name: torch.ones(2, 1, 4) for name in "kv"}
        new[where][0, 0, 1] = bad
        out = step.attend(0, sign * torch.ones(2, 1, 4), new["k"], new["v"])
        assert out[1].isnan().any()


def test_autograd_does_not_reach_into_the_pool():
    cache, layer, x = PagedKVCache(1, 1, 4, 8, 4), torch.nn.Linear(4, 4), torch.randn(1, 1, 4)
    cache.add("a")
    for ids in ([1], [2], [3]):
        step = cache.extend({"a": ids})
        step.attend(0, x, layer(x), layer(x))
        cache.commit(step)
        assert not cache.k[0].requires_grad and cache.k[0].grad_fn is None


@pytest.mark.parametrize("change, message", [
    ({"k": [[1.0]]}, "no k, or not as a tensor"), ({"tokens": torch.tensor(3)}, "must be a list of ids"),
    ({"k": "bool", "v": "bool"}, "one type"), ({"k": "complex64", "v": "complex64"}, "one type"),
    ({"k": "float8_e5m2", "v": "float8_e5m2"}, "one type"), ({"k_scale": 1e-300}, "not finite and positive"),
    ({"k_scale": 1e300}, "not finite and positive"), ({"k_scale": 0j}, "not finite and positive"),
    ({"k": "nan codes"}, "not numbers"), ({"v_scale": None}, "v_scale .* missing")])
def test_what_cannot_be_imported_is_refused(change, message):
    def cache(dtype):
        return PagedKVCache(2, 1, 4, 8, 4, dtype=dtype)

    source, target = cache("fp8"), cache("fp8")
    source.add("a")
    step = source.extend({"a": [1, 2, 3]})
    for layer in range(2):
        step.attend(layer, *torch.randn(3, 3, 1, 4))
    source.commit(step)
    good = source.export("a")
    target.import_("good", good)
    assert target.stats == source.stats, "what is handed over is not asked of the prefix cache"
    data = dict(good)
    for name, how in change.items():
        if how == "nan codes":
            data[name] = torch.full((2, 3, 1, 4), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
        elif isinstance(how, str):
            data[name] = torch.zeros(2, 3, 1, 4, dtype=getattr(torch, how))
        elif isinstance(how, (float, complex)):
            dtype = torch.complex128 if isinstance(how, complex) else torch.float64
            data[name] = torch.full((2, 3, 1), how, dtype=dtype)
        else:
            data[name] = how
    with pytest.raises(ValueError, match=message):
        target.import_("bad", data)
    target.check()
    assert "bad" not in target


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int32, torch.bool, torch.complex64, "int4", "bfloat16"])
def test_a_dtype_that_no_cache_has_is_refused(dtype):
    with pytest.raises(ValueError, match="int8 or fp8"):
        PagedKVCache(1, 1, 4, 8, 4, dtype=dtype)
    with pytest.raises(ValueError, match="int8 or fp8"):
        kv_bytes_per_token(SimpleNamespace(n_layer=1, n_kv_head=1, head_dim=4), dtype)


def test_rows_and_keep_that_do_not_fit_the_step(busy):
    before = state(busy)
    for rows in ([3], [-1], [0.5], ["0"]):
        with pytest.raises(ValueError, match="rows must be whole numbers from 0 to 2"):
            busy.extend({"a": [7, 8], "b": [9]}, rows)
        assert state(busy) == before
    step = busy.extend({"a": [7, 8], "b": [9]}, [2, 0, 0])
    assert step.rows.tolist() == [2, 0, 0]
    with pytest.raises(AssertionError, match="not in this step"):
        busy.commit(step, keep={"A": 0})
    busy.rollback(step)
    assert busy.extend({"a": [7, 8], "b": [9]}).rows.tolist() == [1, 2]


def test_an_interrupt_at_any_line_can_be_recovered_from():
    """Ctrl-C in a notebook comes between any two lines: afterwards no block is lost, and what is held is right."""
    import sys

    def life(cache):
        cache.add("a", range(9))
        for ids in (range(9), [9, 10], [11]):
            cache.commit(cache.extend({"a": list(ids)}))
        cache.fork("a", "b")
        cache.commit(cache.extend({"a": [1], "b": [2, 3]}), keep={"b": 1})
        cache.trim("b", 6)
        cache.rollback(cache.extend({"b": [5] * 4}))
        cache.free("a")
        cache.add("c", [*range(9), 7])
        cache.free("c")

    def interrupted(after: int) -> tuple[PagedKVCache, bool]:
        cache, lines = PagedKVCache(1, 1, 4, 16, 4), 0

        def trace(frame, event, _):
            nonlocal lines
            if frame.f_code.co_filename.endswith("kvcache.py"):
                lines += event == "line"
                if lines > after:
                    sys.settrace(None)
                    raise KeyboardInterrupt
                return trace
            return None

        old = sys.gettrace()
        sys.settrace(trace)
        try:
            life(cache)
        except KeyboardInterrupt:
            return cache, True
        finally:
            sys.settrace(old)
        return cache, False

    n, more = 0, True
    while more:
        cache, more = interrupted(n)
        cache.recover()
        cache.check()
        for seq in "abc":
            if seq in cache:
                held = cache.tokens(seq)
                assert held == ([*range(12), 1], [*range(12), 2])[seq == "b"][: len(held)] or seq == "c"
            cache.free(seq)
        cache.check()
        assert cache.n_free == 16
        life(cache)
        n += 1
    assert n > 400, "lines were counted"
