"""kvcache.py, from three sides.

- `paged_attention` against `dense_attention`, written out below, for ragged mixes in every layout and dtype, in pools
  that are NaN wherever no valid key lies
- `PagedKVCache` in random lives of many sequences, against a plain-Python model of what each sequence holds and the
  dense attention to it; with sabotaged twins that the same test must catch
- the published cases of paged caches and attention (FA, K, B, TP), by id
"""
import itertools
import math
import random

import numpy as np
import pytest
import torch

from kvcache import OutOfBlocks, PagedKVCache, Step, _gather, paged_attention
from model import Config, Llama, causal_attention

NAN = math.nan


pytestmark = pytest.mark.usefixtures("one_thread")


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q (n, H, D), the last n tokens of a sequence whose keys and values are k and v (S, G, D) -> (n, H, D) float64.

    Row j sees the keys 0 .. S - n + j; a row that sees none is zero.
    """
    (n, H, _), (S, G, _) = q.shape, k.shape
    k, v = (x.double().repeat_interleave(H // G, 1) for x in (k, v))  # (S, H, D): every query head has its own copy
    seen = (torch.arange(S) <= S - n + torch.arange(n)[:, None])[:, None]  # (n, 1, S)
    scores = torch.einsum("nhd,shd->nhs", q.double(), k) * scale
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0)
    return torch.einsum("nhs,shd->nhd", weights, v)


# ------------------------------------------------------------------ attention through a block table


def pool(n_blocks: int, block_size: int, G: int, D: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """(n_blocks, block_size, G, D), all NaN, token by token or head by head in memory."""
    if layout == "token-major":
        return torch.full((n_blocks, block_size, G, D), NAN, dtype=dtype)
    if layout == "head-major":
        return torch.full((G, n_blocks, block_size, D), NAN, dtype=dtype).permute(1, 2, 0, 3)
    assert layout == "gaps"  # every stride has room behind it, the last one too
    return torch.full((2 * n_blocks, block_size + 1, G + 1, 2 * D), NAN, dtype=dtype)[::2, 1:, 1:, ::2]


def ragged(mix: list[tuple[int, int]], block_size: int, G: int, D: int, H: int, dtype: torch.dtype = torch.float64,
           layout: str = "token-major", seed: int = 0, in_order: bool = False) -> tuple[dict, torch.Tensor]:
    """Arguments of paged_attention for sequences of (kv_len, n) and what it must return, (N, H, D) float64.

    Blocks are dealt out at random; everything that is no valid key is NaN, the blocks that pad the table included.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    counts = [-(-S // block_size) for S, _ in mix]
    n_blocks = sum(counts) + 3
    free = list(range(n_blocks))
    if not in_order:
        rng.shuffle(free)
    padding = free.pop()
    k_cache, v_cache = (pool(n_blocks, block_size, G, D, dtype, layout) for _ in range(2))
    q = torch.randn(sum(n for _, n in mix), H, D, generator=generator).to(dtype)
    table, q_start, expected = [], [0], []
    for (S, n), count in zip(mix, counts):
        blocks, free = free[:count], free[count:]
        k, v = (torch.randn(S, G, D, generator=generator).to(dtype) for _ in range(2))
        for t in range(S):
            at = blocks[t // block_size], t % block_size
            k_cache[at], v_cache[at] = k[t], v[t]
        table.append(blocks + [padding] * (max(counts) + 1 - count))
        expected.append(dense_attention(q[q_start[-1]: q_start[-1] + n], k, v, D ** -0.5))
        q_start.append(q_start[-1] + n)
    return dict(q=q, k_cache=k_cache, v_cache=v_cache, block_table=torch.tensor(table, dtype=torch.int32),
                kv_len=torch.tensor([S for S, _ in mix], dtype=torch.int32),
                q_start=torch.tensor(q_start, dtype=torch.int32), scale=D ** -0.5,
                max_q=max(n for _, n in mix)), torch.cat(expected)


def assert_near(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = torch.float64) -> None:
    """Equal to within a few roundings of dtype (expected is float64 from inputs already rounded to dtype)."""
    assert got.shape == expected.shape and got.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    assert (got.double() - expected).abs().max().item() < tolerance  # a NaN fails too


# (kv_len, n): whole prompts, chunks on a warm cache, decode rows, rows without a key, nothing to do
MIX = [(5, 5), (9, 2), (0, 0), (4, 1), (3, 5), (12, 0), (1, 1), (0, 2), (8, 7), (17, 1)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["token-major", "head-major", "gaps"])
@pytest.mark.parametrize("G, H, D", [(1, 1, 8), (3, 3, 16), (2, 6, 64), (1, 5, 80), (3, 9, 4), (4, 8, 7)])
def test_ragged_mixes_equal_dense_attention(dtype, layout, G, H, D):
    for block_size in (1, 4, 16):
        arguments, expected = ragged(MIX, block_size, G, D, H, dtype, layout, seed=block_size)
        assert_near(paged_attention(**arguments), expected, dtype)


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("in_order", [True, False])
def test_every_length_around_the_block_size(block_size, in_order):
    lengths = sorted({0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size, 3 * block_size + 1})
    for S in lengths:
        for n in sorted({0, 1, S - 1, S, S + 1, S + block_size} - {-1}):
            arguments, expected = ragged([(S, n), (6, 3)], block_size, 2, 8, 4, seed=S, in_order=in_order)
            assert_near(paged_attention(**arguments), expected)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_an_empty_step_and_wider_index_types(index_dtype):
    arguments, expected = ragged([(3, 0), (0, 0)], 4, 2, 8, 4)
    assert paged_attention(**arguments).shape == expected.shape == (0, 4, 8)
    arguments, expected = ragged(MIX, 4, 2, 8, 4)
    for name in ("block_table", "kv_len", "q_start"):
        arguments[name] = arguments[name].to(index_dtype)
    assert_near(paged_attention(**arguments), expected)


def test_inputs_are_left_alone():
    arguments, _ = ragged(MIX, 4, 2, 8, 4)
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    paged_attention(**arguments)
    assert all(torch.equal(arguments[k].nan_to_num(-7), v.nan_to_num(-7)) for k, v in before.items())


# ------------------------------------------------------------------ attention, by case


def attend_to(values: list[float], n: int, block_size: int = 4, score: float = 0.0, dtype=torch.float64) -> list[float]:
    """Outputs of the last n tokens of a sequence with these values, where every q.k * scale is `score`."""
    S = len(values)
    blocks = -(-S // block_size) or 1
    k_cache, v_cache = (torch.full((blocks, block_size, 1, 1), NAN, dtype=dtype) for _ in range(2))
    k_cache.flatten()[:S] = score
    v_cache.flatten()[:S] = torch.tensor(values, dtype=dtype)
    out = paged_attention(torch.ones(n, 1, 1, dtype=dtype), k_cache, v_cache,
                          torch.arange(blocks, dtype=torch.int32)[None], torch.tensor([S], dtype=torch.int32),
                          torch.tensor([0, n], dtype=torch.int32), 1.0, max_q=n)
    return out.flatten().tolist()


def test_fa_01_rows_with_nothing_to_attend_to_are_zero():
    """FA-01 (flashinfer #4452; flash-attention #1778; tracel-ai/cubecl #1070): 4 queries, 2 keys."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert attend_to([1, 2], 4, dtype=dtype) == [0, 0, 1, 1.5]
    assert attend_to([], 3) == [0, 0, 0]


def test_fa_02_the_mask_is_aligned_to_the_bottom_right():
    """FA-02 (flash-attention #282, #436, #466; pytorch #108108): top-left would give [1, 1.5]."""
    assert attend_to([1, 2, 3, 4, 5], 2) == pytest.approx([2.5, 3.0])


def test_b02_a_chunk_in_the_middle_sees_its_past_and_not_its_future():
    """B02 (pytorch/pytorch issues #108108 and #144858; huggingface/candle PR #3743): queries at positions 2, 3, 4."""
    assert attend_to([0, 1, 2, 3, 4], 3) == pytest.approx([1.0, 1.5, 2.0])


@pytest.mark.parametrize("chunks", [(5,), (3, 2), (1, 1, 1, 1, 1), (2, 3)])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_fa_03_several_new_tokens_on_a_warm_cache(chunks, block_size):
    """FA-03 (hyprstream #1521; sparkinfer #3; Mikyx-1/TinyLLM #17; candle #3743): always [1, 1.5, 2, 2.5, 3]."""
    cache, values, out = PagedKVCache(1, 1, 1, 5, block_size, dtype=torch.float64), [1.0, 2.0, 3.0, 4.0, 5.0], []
    cache.add("a")
    for n in chunks:
        step = cache.extend({"a": [0] * n})
        new = torch.tensor([values.pop(0) for _ in range(n)], dtype=torch.float64).view(n, 1, 1)
        out += step.attend(0, torch.zeros_like(new), torch.zeros_like(new), new).flatten().tolist()
        cache.commit(step)
    assert out == pytest.approx([1, 1.5, 2, 2.5, 3])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_fa_05_no_finite_constant_stands_for_a_masked_key(n):
    """FA-05 (flashinfer #4267, #4450, #4451; ohdearquant/lattice #361): a valid score of -30000, a masked key."""
    k_cache = torch.tensor([-30000.0, 0.0, 0.0, 0.0]).view(1, 4, 1, 1)
    v_cache = torch.tensor([3.0, 7.0, 7.0, 7.0]).view(1, 4, 1, 1)
    for S in (n, n - 1 or 1):  # n == S is a path of its own
        out = paged_attention(torch.ones(n, 1, 1), k_cache, v_cache, torch.zeros(1, 1, dtype=torch.int32),
                              torch.tensor([S]), torch.tensor([0, n]), 1.0, max_q=n)
        assert out[n - S].item() == 3.0  # the first row that sees a key sees key 0 alone


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("score", [-50.0, 0.0])
def test_fa_06_padding_of_the_last_block_never_counts(block_size, score):
    """FA-06 (66RING/tiny-flash-attention #12; ELS-RD/kernl #73; triton #2059): 17 keys of equal score, v = 1."""
    for n in (1, 5, 17):
        assert attend_to([1.0] * 17, n, block_size, score) == pytest.approx([1.0] * n, abs=1e-12)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_fa_07_nan_in_slots_never_written(n):
    """FA-07 (vllm #641, #936, #53856; flash-attention #1745; pytorch #101967): context 5 in blocks 2, 6."""
    k_cache, v_cache = (torch.full((8, 4, 2, 8), NAN, dtype=torch.float64) for _ in range(2))
    q, k, v = (torch.randn(m, h, 8, dtype=torch.float64) for m, h in ((n, 4), (5, 2), (5, 2)))
    for cache, x in ((k_cache, k), (v_cache, v)):
        cache[2], cache[6, 0] = x[:4], x[4]
    out = paged_attention(q, k_cache, v_cache, torch.tensor([[2, 6, 0]], dtype=torch.int32), torch.tensor([5]),
                          torch.tensor([0, n]), 0.3, max_q=n)
    assert_near(out, dense_attention(q, k, v, 0.3))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_fa_08_query_heads_read_the_kv_head_of_their_group(n):
    """FA-08 (HazyResearch/HipKittens #22; onnx #7274; ONNXim #34): h // 3, where h % 2 would give 0 1 0 1 0 1."""
    v_cache = torch.tensor([0.0, 1.0])[:, None].expand(1, 4, 2, 8).clone()
    out = paged_attention(torch.zeros(n, 6, 8), torch.zeros(1, 4, 2, 8), v_cache, torch.zeros(1, 1, dtype=torch.int32),
                          torch.tensor([3]), torch.tensor([0, n]), 1.0, max_q=n)
    assert out[..., 0].tolist() == [[0, 0, 0, 1, 1, 1]] * n


@pytest.mark.parametrize("n", [1, 2])
def test_fa_16_head_dim_80_is_not_padded_to_128(n):
    """FA-16 (sglang #1281; triton #621): q.k is 4 for key 0, 0 for key 1; sqrt(128) would give 0.587479."""
    cache = PagedKVCache(1, 1, 80, 1, 4)
    cache.add("a")
    step = cache.extend({"a": [1, 2]}) if n == 2 else None
    if n == 1:
        cache.commit(cache.extend({"a": [1]}))
        step = cache.extend({"a": [2]})
    q, k, v = torch.zeros(2, 1, 80), torch.zeros(2, 1, 80), torch.zeros(2, 1, 80)
    q[:, 0, 0], k[0, 0, 0], v[0] = 2.0, 2.0, 1.0
    cache.k[0][0, 0], cache.v[0][0, 0] = k[0], v[0]
    out = step.attend(0, q[-n:], k[-n:], v[-n:])
    assert out[-1].flatten().tolist() == pytest.approx([0.609977] * 80, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fa_17_any_strides_give_the_same_output(dtype):
    """FA-17 (FlagOpen/FlagGems #5235, #5896; flash-attention #2670; pytorch #187506)."""
    for mix in ([(5, 5), (9, 2)], [(9, 1)], [(3, 5)]):
        arguments, _ = ragged(mix, 4, 2, 8, 6, dtype)
        expected = paged_attention(**arguments)
        n = arguments["q"].shape[0]
        packed = torch.randn(n, 10, 8).to(dtype)
        packed[:, :6] = arguments["q"]
        every_other = torch.randn(n, 6, 16).to(dtype)
        every_other[..., ::2] = arguments["q"]
        for q in (packed[:, :6], every_other[..., ::2], arguments["q"].transpose(0, 1).contiguous().transpose(0, 1)):
            assert not q.is_contiguous() or n == 1
            out = paged_attention(**{**arguments, "q": q})
            torch.testing.assert_close(out, expected, rtol=0, atol=2 ** -6 if dtype == torch.bfloat16 else 1e-6)
        only_v = arguments["v_cache"].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        assert torch.equal(paged_attention(**{**arguments, "v_cache": only_v}), expected)


def test_fa_17_the_writer_takes_slices_of_one_packed_qkv():
    """FA-17 (FlagOpen/FlagGems #5235, #5896): q, k and v are views of one tensor, as a fused projection makes them."""
    cache, qkv = PagedKVCache(1, 2, 8, 4, 4, dtype=torch.float64), torch.randn(7, 10, 8, dtype=torch.float64)
    q, k, v = qkv.split((6, 2, 2), 1)
    cache.add("a")
    out = cache.extend({"a": [0] * 7}).attend(0, q, k, v)
    assert_near(out, dense_attention(q, k, v, 8 ** -0.5))


@pytest.mark.parametrize("n", [1, 3, 5, 6])
def test_fa_22_scores_of_float16_queries_do_not_overflow(n):
    """FA-22 (transformers #33317; QwenLM/Qwen3 #910; apache/tvm #16667): 300 * 300 * 128 is far above 65504."""
    k_cache, v_cache = torch.full((2, 4, 2, 128), 300.0).half(), torch.randn(2, 4, 2, 128).half()
    out = paged_attention(torch.full((n, 4, 128), 300.0).half(), k_cache, v_cache,
                          torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([5]), torch.tensor([0, n]),
                          128 ** -0.5, max_q=n)
    mean = torch.cat((v_cache[1], v_cache[0, :1])).float().mean(0).repeat_interleave(2, 0)
    assert out.isfinite().all() and (out[-1] - mean).abs().max() < 2e-3


# ------------------------------------------------------------------ a sequence's life, at random


class Life:
    """A cache, and beside it the plain truth: per sequence a list of (id, slot, K and V of both layers).

    After every operation each slot that holds no committed token is filled with NaN, the trash block too, so that
    reading anything that was not written, or not any more, shows in the next comparison.
    """

    def __init__(self, cache: PagedKVCache, seed: int):
        self.cache, self.rng, self.generator = cache, random.Random(seed), torch.Generator().manual_seed(seed)
        self.held: dict[str, list] = {}
        self.names = (f"s{i}" for i in itertools.count())
        self.seen = dict.fromkeys(["extend", "full", "commit", "partly", "rollback", "trim", "free", "aborted"], 0)
        self.after()

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def after(self) -> None:
        cache, tokens = self.cache, {seq: [t[0] for t in held] for seq, held in self.held.items()}
        cache.check()
        for seq, ids in tokens.items():
            assert seq in cache and cache.tokens(seq) == ids and cache.length(seq) == len(ids)
        used = sum(-(-len(ids) // cache.block_size) for ids in tokens.values())
        assert cache.n_free == cache.n_blocks - used
        live = [slot for held in self.held.values() for _, slot, _ in held]
        assert len(set(live)) == len(live)
        dead = torch.ones((cache.n_blocks + 1) * cache.block_size, dtype=torch.bool)
        dead[live] = False
        for pool in (*cache.k, *cache.v):
            pool[dead.view(-1, cache.block_size)] = NAN

    def extend(self) -> None:
        rng, cache = self.rng, self.cache
        seqs = rng.sample(sorted(self.held), rng.randint(1, min(4, len(self.held))))
        plan = {s: [rng.randrange(100) for _ in range(rng.choice([1, 1, 1, 2, 3, 5, 9, 17]))] for s in seqs}
        needed = {s: -(-(len(self.held[s]) + len(ids)) // cache.block_size) - -(-len(self.held[s]) // cache.block_size)
                  for s, ids in plan.items()}
        assert needed == {s: cache.blocks_needed(s, len(ids)) for s, ids in plan.items()}
        if sum(needed.values()) > cache.n_free:
            self.seen["full"] += 1
            with pytest.raises(OutOfBlocks) as error:
                cache.extend(plan)
            assert (error.value.needed, error.value.free) == (sum(needed.values()), cache.n_free)
            return
        step = cache.extend(plan)
        self.seen["extend"] += 1
        cache.check()
        new = self.attend(step, plan)
        self.finish(step, plan, new)

    def attend(self, step: Step, plan: dict) -> dict:
        """Run two layers, compare with dense attention, and return {seq: [(id, slot, k and v of both layers)]}."""
        begin = [len(self.held[s]) for s in plan]
        assert step.tokens.tolist() == [i for ids in plan.values() for i in ids]
        assert step.positions.tolist() == [b + i for b, ids in zip(begin, plan.values()) for i in range(len(ids))]
        assert step.kv_len.tolist() == [b + len(ids) for b, ids in zip(begin, plan.values())]
        assert (step.seqs, step.n_new) == (tuple(plan), tuple(map(len, plan.values())))
        assert step.q_start.tolist() == [0, *itertools.accumulate(step.n_new)] and step.max_q == max(step.n_new)
        k, v = self.random(2, len(step.tokens), 2, 4), self.random(2, len(step.tokens), 2, 4)
        new, slots, kv = {s: [] for s in plan}, step.slots.tolist(), torch.stack((k, v)).unbind(2)
        for i, (seq, token) in enumerate((s, t) for s, ids in plan.items() for t in ids):
            new[seq].append((token, slots[i], kv[i]))  # (2, layers, G, D)
        for layer in (0, 1):
            q = self.random(len(step.tokens), 4, 4)
            out = step.attend(layer, q, k[layer], v[layer]).split(step.n_new)
            for seq, rows, got in zip(plan, q.split(step.n_new), out):
                keys, values = torch.stack([kv[:, layer] for _, _, kv in self.held[seq] + new[seq]], 1)
                assert_near(got, dense_attention(rows, keys, values, 0.5))
        return new

    def finish(self, step: Step, plan: dict, new: dict) -> None:
        rng, cache, keep = self.rng, self.cache, {s: len(ids) for s, ids in plan.items()}
        if rng.random() < 0.1:  # a request is aborted during its step; perhaps another takes its name
            self.seen["aborted"] += 1
            gone = rng.choice(sorted(plan))
            cache.free(gone)
            del self.held[gone]
            if rng.random() < 0.5:
                cache.add(gone)
                self.held[gone] = []
            new[gone] = []
        kind = rng.choice(["commit", "commit", "partly", "rollback"])
        self.seen[kind] += 1
        if kind == "commit":
            cache.commit(step)
        elif kind == "partly":
            keep = {s: rng.randint(0, n) for s, n in keep.items()}
            omitted = rng.choice([None, *keep])  # left out of the mapping: all of its tokens are kept
            keep = {s: len(plan[s]) if s == omitted else n for s, n in keep.items()}
            cache.commit(step, {s: n for s, n in keep.items() if s != omitted})
        else:
            keep = dict.fromkeys(keep, 0)
            cache.rollback(step)
        for seq, tokens in new.items():
            self.held.get(seq, []).extend(tokens[:keep[seq]])
        if rng.random() < 0.2:  # twice is harmless
            rng.choice([cache.commit, cache.rollback])(step)

    def run(self, n: int) -> None:
        rng, cache = self.rng, self.cache
        for _ in range(n):
            kind = rng.choices(["add", "extend", "trim", "free"], [2, 8, 2, 1])[0] if self.held else "add"
            if kind == "add" and len(self.held) < 8:
                name = next(self.names)
                cache.add(name)
                self.held[name] = []
            elif kind == "extend":
                self.extend()
            elif kind == "trim":
                self.seen["trim"] += 1
                seq = rng.choice(sorted(self.held))
                length = rng.randint(0, len(self.held[seq]))
                cache.trim(seq, length)
                del self.held[seq][length:]
            elif kind == "free":
                self.seen["free"] += 1
                seq = rng.choice(sorted(self.held))
                cache.free(seq)
                cache.free(seq)  # idempotent
                del self.held[seq]
            self.after()
        for seq, held in list(self.held.items()):  # nothing that was kept has been touched
            for which, layer in itertools.product((0, 1), (0, 1)):
                pool = (cache.k, cache.v)[which][layer].flatten(0, 1)
                assert all(torch.equal(pool[slot], kv[which, layer]) for _, slot, kv in held)
            cache.free(seq)
        assert cache.n_free == cache.n_blocks


def small_cache(kind: type = PagedKVCache, block_size: int = 4, **options) -> PagedKVCache:
    return kind(2, 2, 4, 96 // block_size, block_size, dtype=torch.float64, **options)


@pytest.mark.parametrize("block_size, seed", [(1, 0), (2, 1), (4, 2), (4, 3), (16, 4)])
def test_random_lives_hold_what_was_written_and_nothing_else(block_size, seed):
    life = Life(small_cache(block_size=block_size), seed)
    life.run(1500)
    assert min(life.seen.values()) > 10, life.seen  # every kind of event happened


class TakesTwice(PagedKVCache):
    """Now and then hands out a block that another sequence still holds."""

    def _take(self, wish):
        block = super()._take(wish)
        others = [b for s in self._sequences.values() for b in s.blocks]
        if len(others) > 6 and block % 3 == 0:
            self._free[block] = None
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
        del self._sequences[seq].tokens[length:]


class ReadsOneMore(PagedKVCache):
    """Attends to one key too many where the block has room for it."""

    def __init__(self, *args, **options):
        def attention(q, k, v, table, kv_len, *rest, **more):
            grown = kv_len + (kv_len % self.block_size > 0).int()
            return paged_attention(q, k, v, table, grown, *rest, **more)
        super().__init__(*args, attention=attention, **options)


class TopLeft(PagedKVCache):
    """Aligns the causal mask to the wrong corner."""

    def __init__(self, *args, **options):
        def attention(q, k, v, table, kv_len, q_start, scale, *, max_q):
            out = torch.zeros_like(q)
            for b, (begin, end) in enumerate(itertools.pairwise(q_start.tolist())):
                at = [int(table[b, t // self.block_size]) * self.block_size + t % self.block_size
                      for t in range(end - begin)]
                out[begin:end] = causal_attention(0, q[begin:end], k.flatten(0, 1)[at], v.flatten(0, 1)[at])
            return out
        super().__init__(*args, attention=attention, **options)


@pytest.mark.parametrize("twin", [TakesTwice, WritesOneLate, KeepsOneMore, NeverGivesBack, ReadsOneMore, TopLeft])
@pytest.mark.parametrize("checked", [True, False])
def test_random_lives_catch_sabotaged_twins(twin, checked, monkeypatch):
    if not checked:  # what the cache holds and computes must give it away, without its own bookkeeping
        monkeypatch.setattr(twin, "check", lambda self: None)
    with pytest.raises(AssertionError):
        Life(small_cache(twin), seed=0).run(300)


# ------------------------------------------------------------------ what is refused, and changes nothing


def state(cache: PagedKVCache) -> tuple:
    cache.check()
    return ({s: (list(q.tokens), list(q.blocks), q.step, q.new) for s, q in cache._sequences.items()},
            sorted(cache._free), list(cache._references))


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

    def fail(plan):
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
    step = cache.extend({"b": [5], "a": [6, 7, 8]})  # a takes block 2
    assert step.tokens.tolist() == [5, 6, 7, 8] and step.positions.tolist() == [1, 3, 4, 5]
    assert step.slots.tolist() == [5, 3, 8, 9]
    assert step.block_table.tolist() == [[1, 8], [0, 2]]  # padded with the trash block
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
    cache.commit(cache.extend({"a": [0] * 4}))  # block 0
    step = cache.extend({"a": [0] * 12})  # 1, 2 and 3 behind it
    cache.commit(step)
    assert step.block_table.tolist() == [[0, 1, 2, 3]]
    assert _gather(cache.k[0], step.block_table[0].tolist(), 15).data_ptr() == cache.k[0].data_ptr()  # read in place
    cache.trim("a", 8)
    cache.commit(cache.extend({"b": [0] * 16}))  # the oldest free block and what follows: 4 .. 7
    step = cache.extend({"a": [0] * 4})
    assert step.block_table.tolist() == [[0, 1, 2]]  # the wish for 2 is older than the queue
    cache.free("b")
    cache.commit(step)


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
    cache = PagedKVCache(c.n_layer, c.n_kv_head, c.head_dim, n_blocks, block_size, dtype=torch.float64)
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


def test_k10_physical_blocks_in_any_order():
    """K10 (tanishqkumar/ssd issue #23; tenstorrent/vllm issue #415): a prefix in blocks 5 and 2, the rest in 7."""
    model, ids = tiny_model(), list(range(1, 11))
    cold = model(torch.tensor(ids))[-1]
    cache = model_cache(model)
    for block in range(8):
        cache.add(block)
        advance(model, cache, {block: [block]})
    for block in (5, 2, 7):
        cache.free(block)
    cache.add("a")
    advance(model, cache, {"a": ids[:8]})
    logits, step = advance(model, cache, {"a": ids[8:]})
    assert step.block_table.tolist() == [[5, 2, 7]]
    assert (logits[0] - cold).abs().max() < 1e-10


@pytest.mark.parametrize("seed", range(6))
def test_k10_no_permutation_of_blocks_changes_an_output(seed):
    """K10 (tanishqkumar/ssd issue #23; tenstorrent/vllm issue #415): with the pools permuted as the tables are."""
    arguments, expected = ragged([(10, 2), (3, 3), (12, 1)], 4, 2, 8, 4)
    to = torch.randperm(len(arguments["k_cache"]), generator=torch.Generator().manual_seed(seed))
    for name in ("k_cache", "v_cache"):
        moved = torch.empty_like(arguments[name])
        moved[to] = arguments[name]
        arguments[name] = moved
    arguments["block_table"] = to[arguments["block_table"].long()].int()
    assert_near(paged_attention(**arguments), expected)


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
    out = cache._attend(torch.tensor([5, trash]), table, kv_len, q_start, 1, 0, q, new, new)
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
