"""attention.py: `paged_attention` and `reference_attention`, both against `dense_attention`, written out below.

- ragged mixes in every layout and dtype, in pools that are NaN wherever no valid key lies: whole prompts, chunks,
  decode rows, with and without a window, quantized or not, with the log-sum-exp
- what is there for speed: many sequences in one batch, chunks by groups of rows, pieces of keys
- the published cases of attention (FA, K, B), by id
"""
import itertools
import math
import random

import pytest
import torch

import attention
from attention import _batches, _from_codes, _parts, _read, paged_attention, reference_attention
from kvcache import PagedKVCache

NAN = math.nan


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=[paged_attention, reference_attention], ids=["paged", "reference"])
def attend(request):
    return request.param


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
          window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """q (n, H, D), the last n tokens of a sequence with keys and values k and v (S, G, D) -> (n, H, D), lse (n, H).

    In float64. Row j sees the keys 0 .. S - n + j, of these the last `window`; a row that sees none is zero.
    """
    (n, H, _), (S, G, _) = q.shape, k.shape
    k, v = (x.double().repeat_interleave(H // G, 1) for x in (k, v))  # (S, H, D): every query head has its own copy
    at = S - n + torch.arange(n)[:, None]
    seen = ((torch.arange(S) <= at) & (torch.arange(S) > at - (window or S + n)))[:, None]  # (n, 1, S)
    scores = (torch.einsum("nhd,shd->nhs", q.double(), k) * scale).masked_fill(~seen, -math.inf)
    weights = scores.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0)
    return torch.einsum("nhs,shd->nhd", weights, v), scores.exp().sum(-1).log()


def dense_attention(*args) -> torch.Tensor:
    return dense(*args)[0]


# ------------------------------------------------------------------ attention through a block table


def pool(n_blocks: int, block_size: int, G: int, D: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """(n_blocks, block_size, G, D), all NaN (int8: 127), token by token or head by head in memory."""
    fill = 127 if dtype == torch.int8 else NAN
    if layout == "token-major":
        return torch.full((n_blocks, block_size, G, D), fill, dtype=dtype)
    if layout == "head-major":
        return torch.full((G, n_blocks, block_size, D), fill, dtype=dtype).permute(1, 2, 0, 3)
    assert layout == "gaps"  # every stride has room behind it, the last one too
    return torch.full((2 * n_blocks, block_size + 1, G + 1, 2 * D), fill, dtype=dtype)[::2, 1:, 1:, ::2]


def ragged(mix: list[tuple[int, int]], block_size: int, G: int, D: int, H: int, dtype: torch.dtype = torch.float64,
           layout: str = "token-major", seed: int = 0, in_order: bool = False, window: int | None = None,
           codes: torch.dtype | None = None) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """Arguments of paged_attention for sequences of (kv_len, n) and what it must return, (N, H, D) and (N, H) float64.

    Blocks are dealt out at random; everything that is no valid key is NaN, the blocks that pad the table included.
    With `codes` the caches hold codes of that type, and scales, which are NaN where no key is.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    counts = [-(-S // block_size) for S, _ in mix]
    n_blocks = sum(counts) + 3
    free = list(range(n_blocks))
    if not in_order:
        rng.shuffle(free)
    padding = free.pop()
    k_cache, v_cache = (pool(n_blocks, block_size, G, D, codes or dtype, layout) for _ in range(2))
    scales = [pool(n_blocks, block_size, G, 1, torch.float32, layout)[..., 0] for _ in range(2)] if codes else []
    q = torch.randn(sum(n for _, n in mix), H, D, generator=generator).to(dtype)
    table, q_start, expected = [], [0], []
    for (S, n), count in zip(mix, counts):
        blocks, free = free[:count], free[count:]
        k, v = (torch.randn(S, G, D, generator=generator).to(dtype) for _ in range(2))
        if codes:
            k, v = ((x * 40).to(codes) for x in (k, v))
            s = torch.rand(2, S, G, generator=generator) / 20 + 0.01
        for t in range(S):
            at = blocks[t // block_size], t % block_size
            k_cache[at], v_cache[at] = k[t], v[t]
            for cache, new in zip(scales, s if codes else ()):
                cache[at] = new[t]
        if codes:
            k, v = (x.double() * y[..., None].double() for x, y in zip((k, v), s))
        table.append(blocks + [padding] * (max(counts) + 1 - count))
        expected.append(dense(q[q_start[-1]: q_start[-1] + n], k, v, D ** -0.5, window))
        q_start.append(q_start[-1] + n)
    return dict(q=q, k_cache=k_cache, v_cache=v_cache, block_table=torch.tensor(table, dtype=torch.int32),
                kv_len=torch.tensor([S for S, _ in mix], dtype=torch.int32),
                q_start=torch.tensor(q_start, dtype=torch.int32), scale=D ** -0.5, max_q=max(n for _, n in mix),
                window=window, **dict(zip(("k_scale", "v_scale"), scales))), *map(torch.cat, zip(*expected))


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
def test_ragged_mixes_equal_dense_attention(attend, dtype, layout, G, H, D):
    for block_size in (1, 4, 16):
        arguments, expected, _ = ragged(MIX, block_size, G, D, H, dtype, layout, seed=block_size)
        assert_near(attend(**arguments), expected, dtype)


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("in_order", [True, False])
def test_every_length_around_the_block_size(attend, block_size, in_order):
    lengths = sorted({0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size, 3 * block_size + 1})
    for S in lengths:
        for n in sorted({0, 1, S - 1, S, S + 1, S + block_size} - {-1}):
            arguments, expected, _ = ragged([(S, n), (6, 3)], block_size, 2, 8, 4, seed=S, in_order=in_order)
            assert_near(attend(**arguments), expected)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_an_empty_step_and_wider_index_types(attend, index_dtype):
    arguments, expected, _ = ragged([(3, 0), (0, 0)], 4, 2, 8, 4)
    assert attend(**arguments).shape == expected.shape == (0, 4, 8)
    arguments, expected, _ = ragged(MIX, 4, 2, 8, 4)
    for name in ("block_table", "kv_len", "q_start"):
        arguments[name] = arguments[name].to(index_dtype)
    assert_near(attend(**arguments), expected)


def test_inputs_are_left_alone(attend):
    arguments, *_ = ragged(MIX, 4, 2, 8, 4)
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    attend(**arguments)
    assert all(torch.equal(arguments[k].nan_to_num(-7), v.nan_to_num(-7)) for k, v in before.items())


# many sequences of few new tokens, which share batches: of like length, and not
MANY = [(S, n) for S in (1, 2, 5, 31, 32, 33, 40, 64, 65, 70) for n in (1, 2, 3) if n <= S] + [(90, 60), (1, 3), (7, 0)]


@pytest.mark.parametrize("mix", [MIX, MANY, [(33, 1)] * 3 + [(40, 1)], [(21, 4)] * 3, [(37, 1)], [(37, 5)], [(37, 37)]])
@pytest.mark.parametrize("codes", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("window", [None, 1, 3, 16, 1000])
def test_windows_codes_and_log_sum_exps(attend, mix, codes, window):
    for block_size, layout in ((1, "token-major"), (4, "head-major"), (16, "gaps")):
        arguments, expected, sums = ragged(mix, block_size, 2, 8, 6, layout=layout, window=window, codes=codes)
        out, lse = attend(**arguments, return_lse=True)
        assert_near(out, expected)
        assert lse.shape == sums.shape and torch.allclose(lse, sums, rtol=0, atol=1e-12)
        assert_near(attend(**arguments), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("codes", [None, torch.int8, torch.float8_e4m3fn])
def test_other_types_with_and_without_codes(attend, dtype, codes):
    for mix in (MIX, MANY, [(37, 1)]):
        arguments, expected, sums = ragged(mix, 4, 2, 8, 6, dtype, codes=codes, window=9)
        out, lse = attend(**arguments, return_lse=True)
        assert_near(attend(**arguments), expected, dtype)
        assert_near(out, expected, dtype)
        assert lse.dtype == torch.float32 and torch.allclose(lse.double(), sums, rtol=0, atol=1e-4)


@pytest.mark.parametrize("codes", [None, torch.int8])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("cells, piece", [(1, 1), (7, 2), (40, 5), (200, 1000), (10**9, 3)])
def test_rows_and_keys_may_be_cut_anywhere(monkeypatch, codes, window, cells, piece):
    monkeypatch.setattr(attention, "MASK_CELLS", cells)
    monkeypatch.setattr(attention, "PIECE", piece)
    for mix in ([(30, 17)], [(30, 30)], [(9, 12)], MIX, MANY):
        arguments, expected, sums = ragged(mix, 4, 2, 8, 6, window=window, codes=codes)
        out, lse = paged_attention(**arguments, return_lse=True)
        assert_near(out, expected)
        assert torch.allclose(lse, sums, rtol=0, atol=1e-12)
        assert_near(paged_attention(**arguments), expected)


def test_no_mask_grows_with_rows_times_keys(monkeypatch):
    """512 rows behind 64k keys made a mask of 100 million cells; now none is larger than MASK_CELLS."""
    sizes = []
    ones = torch.ones

    def watched(*shape, **options):
        sizes.append(math.prod(shape))
        return ones(*shape, **options)

    monkeypatch.setattr(torch, "ones", watched)
    monkeypatch.setattr(attention, "MASK_CELLS", 3000)
    arguments, expected, _ = ragged([(900, 64)], 16, 1, 4, 3)
    assert_near(paged_attention(**arguments), expected)
    assert sum(sizes) > 10 * 1000 and max(sizes) * 3 <= 3000  # 3 query heads share a row of the mask


@pytest.mark.parametrize("codes", [None, torch.int8])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("mix", [[(30, 17)], [(9, 9)], [(40, 1)], MIX, MANY], ids=str)
def test_layers_share_what_a_step_has_in_common(mix, window, codes):
    """With a memo every layer, whatever its keys, its strides and its kind of call, gives the bits it gives alone."""
    memo, layers = {}, []
    for seed, layout in ((1, "head-major"), (2, "head-major"), (1, "token-major")):
        arguments, *_ = ragged(mix, 4, 2, 8, 6, window=window, codes=codes, layout=layout, in_order=True, seed=seed)
        layers.append(arguments)
    index = {name: layers[0][name] for name in ("block_table", "kv_len", "q_start")}
    for n, arguments in enumerate(layers):
        arguments.update(index)
        for more in ({}, {"return_lse": True}):
            alone, shared = paged_attention(**arguments, **more), paged_attention(**arguments, **more, memo=memo)
            for a, b in zip(*([x] if torch.is_tensor(x) else x for x in (alone, shared))):
                assert torch.equal(a, b), n
    parts = memo["parts"]
    paged_attention(**layers[0], memo=memo)
    assert memo["parts"] is parts  # worked out once


def test_a_memo_of_other_tensors_is_noticed_where_rows_differ():
    memo, (one, *_), (other, *_) = {}, ragged([(9, 3)], 4, 2, 8, 6), ragged([(9, 4)], 4, 2, 8, 6)
    paged_attention(**one, memo=memo)
    with pytest.raises(AssertionError, match="q has 4 rows, but q_start ends at 3"):
        paged_attention(**other, memo=memo)


def test_batches_hold_every_sequence_once_and_lengths_alike():
    rng = random.Random(0)
    for _ in range(200):
        lengths = [rng.choice([0, 1, 5, 40, 100, 900, 1024, 1025, 5000]) for _ in range(rng.randint(0, 12))]
        counts = [rng.choice([0, 1, 1, 1, 2, 8, 9]) for _ in lengths]
        batches = _batches([0, *itertools.accumulate(counts)], lengths)
        assert sorted(b for batch in batches for b in batch) == [b for b, n in enumerate(counts) if n and lengths[b]]
        for batch in batches:
            assert batch == sorted(batch) and len({counts[b] for b in batch}) == 1
            S = [lengths[b] for b in batch]
            if len(batch) > 1:
                assert counts[batch[0]] <= min(S) and max(S) <= min(1024, max(32, 2 * min(S)))
    assert _batches([0, 1, 2, 3, 4], [255, 256, 300, 270]) == [[0, 1, 2, 3]]


def test_what_lies_in_a_run_is_read_in_place():
    arguments, *_ = ragged([(13, 1)], 4, 2, 8, 4, layout="head-major", in_order=True)
    caches, table = (arguments["k_cache"], arguments["v_cache"]), arguments["block_table"][0]
    for window in (None, 8):
        [part] = _parts(table[None], torch.tensor([13]), torch.tensor([0, 1]), 4, window, True)
        first = 0 if window is None else 5
        for cache in caches:
            view = _read(cache, part)
            assert view.data_ptr() == cache[table[0] + first // 4, first % 4].data_ptr()
            assert view.shape == (2, 1, 13 - first, 8)
    [part] = _parts(torch.tensor([[2, 1, 0]]), torch.tensor([12]), torch.tensor([0, 1]), 4, 7, True)
    assert part.runs == ((5, 3), (0, 4)) and torch.equal(_read(caches[0], part)[0, 0, :3], caches[0][1, 1:, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 1, 6, 30, 43])
@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 5, 12])
def test_one_row_reads_few_runs_where_they_lie(monkeypatch, pieces, window, dtype):
    """A prefix that others share lies in one run, what came after it in another; with more than four they are copied,
    and in other types than bfloat16. Around the fewest keys for it, with and without a last block that is full."""
    monkeypatch.setattr(attention, "MANY_KEYS", 9)
    for S in (8, 9, 10, 44, 45, 48):
        arguments, expected, _ = ragged([(S, 1)], 4, 3, 16, 9, window=window, layout="head-major", in_order=True)
        count = -(-S // 4)
        cuts = sorted(random.Random(S).sample(range(1, count), min(pieces, count) - 1))
        parts = [range(a, b) for a, b in zip((0, *cuts), (*cuts, count))][::-1]  # the last one first in the pool
        order = [i for part in parts for i in part]  # place in the pool -> block of the sequence
        table = [order.index(i) for i in range(count)]
        for name in ("k_cache", "v_cache"):
            moved = pool(*arguments[name].shape, dtype, "head-major")
            moved[: count] = arguments[name][torch.tensor(order)].to(dtype)
            arguments[name] = moved
        arguments.update(block_table=torch.tensor([table], dtype=torch.int32), q=arguments["q"].to(dtype))
        copies = []
        monkeypatch.setattr(attention, "_read", lambda *a, copies=copies: copies.append(a) or _read(*a))
        assert_near(paged_attention(**arguments), reference_attention(**arguments).double(), dtype)
        assert (paged_attention(**arguments).double() - expected).abs().max() < 0.05  # inputs rounded, too
        seen = min(S, window or S)
        blocks = table[(S - seen) // 4:]
        runs = 1 + sum(b != a + 1 for a, b in itertools.pairwise(blocks))
        assert bool(copies) == (dtype != torch.bfloat16 or seen < 9 or runs > 4)


@pytest.mark.parametrize("offset", [0, 30, 200, -200])
@pytest.mark.parametrize("n, runs", [(1, 1), (1, 2), (128, 1)])
def test_high_scores_are_as_exact_as_low_ones(monkeypatch, n, runs, offset):
    """Qwen2's keys share a large bias (transformers #33317, llama.cpp #7805): scores of 200, rounded to bfloat16, would
    make every weight wrong by a quarter. Plain products, of one row and of a prompt's."""
    monkeypatch.setattr(attention, "MANY_KEYS", 1000)
    torch.manual_seed(0)
    S, size, G, D = 1600, 16, 3, 64
    q = torch.randn(n, 3 * G, D)
    q[..., 0] = 8.0
    pools = torch.full((2, G, 150, size, D), NAN, dtype=torch.bfloat16)
    blocks = [*range(60), *range(60 + 5 * (runs - 1), 100 + 5 * (runs - 1))]
    k, v = torch.randn(2, G, S, D)
    k[..., 0] += offset
    for pool_, x in zip(pools, (k, v)):
        pool_[:, blocks] = x.bfloat16().view(G, 100, size, D)
    arguments = dict(q=q.bfloat16(), k_cache=pools[0].movedim(0, 2), v_cache=pools[1].movedim(0, 2), scale=D ** -0.5,
                     block_table=torch.tensor([blocks], dtype=torch.int32), kv_len=torch.tensor([S]),
                     q_start=torch.tensor([0, n]), max_q=n)
    exact = reference_attention(**{**arguments, "q": q.bfloat16().double(), "k_cache": arguments["k_cache"].double(),
                                   "v_cache": arguments["v_cache"].double()})
    off = (paged_attention(**arguments).double() - exact).norm() / exact.norm()
    assert off < 0.01, off  # 0.04 and more with scores as they are, from 30 on


def test_every_code_of_fp8_is_read_exactly():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 127 != 127].view(torch.float8_e4m3fn)  # NaN, which no finite scale comes with
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(_from_codes(codes, dtype), codes.to(dtype)) and _from_codes(codes, dtype).dtype == dtype
    assert torch.equal(_from_codes(codes.view(2, 127).mT, torch.float32), codes.to(torch.float32).view(2, 127).mT)


def test_nan_in_a_scale_or_a_key_does_not_pass_for_a_number(attend):
    for n in (1, 3):
        for codes in (None, torch.int8):
            arguments, *_ = ragged([(6, n)], 4, 1, 8, 2, codes=codes)
            at = int(arguments["block_table"][0, 0])
            (arguments["k_scale"] if codes else arguments["v_cache"])[at, 2] = NAN
            assert attend(**arguments).isnan().all()


def test_a_window_of_nothing_is_refused():
    arguments, *_ = ragged([(3, 1)], 4, 1, 8, 2)
    with pytest.raises(ValueError, match="window is 0, but counts the token itself"):
        paged_attention(**{**arguments, "window": 0})


# ------------------------------------------------------------------ attention, by case


def attend_to(attend, values: list[float], n: int, block_size: int = 4, score: float = 0.0, dtype=torch.float64,
              **more) -> list[float]:
    """Outputs of the last n tokens of a sequence with these values, where every q.k * scale is `score`."""
    S = len(values)
    blocks = -(-S // block_size) or 1
    k_cache, v_cache = (torch.full((blocks, block_size, 1, 1), NAN, dtype=dtype) for _ in range(2))
    k_cache.flatten()[:S] = score
    v_cache.flatten()[:S] = torch.tensor(values, dtype=dtype)
    out = attend(torch.ones(n, 1, 1, dtype=dtype), k_cache, v_cache,
                          torch.arange(blocks, dtype=torch.int32)[None], torch.tensor([S], dtype=torch.int32),
                          torch.tensor([0, n], dtype=torch.int32), 1.0, max_q=n, **more)
    return [x.flatten().tolist() for x in out] if more.get("return_lse") else out.flatten().tolist()


def test_fa_01_rows_with_nothing_to_attend_to_are_zero(attend):
    """FA-01 (flashinfer #4452; flash-attention #1778; tracel-ai/cubecl #1070): 4 queries, 2 keys."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert attend_to(attend, [1, 2], 4, dtype=dtype) == [0, 0, 1, 1.5]
    assert attend_to(attend, [], 3) == [0, 0, 0]
    out, lse = attend_to(attend, [1, 2], 4, return_lse=True)
    assert out == [0, 0, 1, 1.5] and lse == pytest.approx([-math.inf, -math.inf, 0, 0.693147], abs=1e-6)
    assert attend_to(attend, [], 2, return_lse=True) == [[0, 0], [-math.inf, -math.inf]]


def test_fa_02_the_mask_is_aligned_to_the_bottom_right(attend):
    """FA-02 (flash-attention #282, #436, #466; pytorch #108108): top-left would give [1, 1.5]."""
    assert attend_to(attend, [1, 2, 3, 4, 5], 2) == pytest.approx([2.5, 3.0])


def test_b02_a_chunk_in_the_middle_sees_its_past_and_not_its_future(attend):
    """B02 (pytorch/pytorch issues #108108 and #144858; huggingface/candle PR #3743): queries at positions 2, 3, 4."""
    assert attend_to(attend, [0, 1, 2, 3, 4], 3) == pytest.approx([1.0, 1.5, 2.0])


@pytest.mark.parametrize("chunks", [(5,), (3, 2), (1, 1, 1, 1, 1), (2, 3)])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_fa_03_several_new_tokens_on_a_warm_cache(attend, chunks, block_size):
    """FA-03 (hyprstream #1521; sparkinfer #3; Mikyx-1/TinyLLM #17; candle #3743): always [1, 1.5, 2, 2.5, 3]."""
    cache = PagedKVCache(1, 1, 1, 5, block_size, dtype=torch.float64, attention=attend)
    values, out = [1.0, 2.0, 3.0, 4.0, 5.0], []
    cache.add("a")
    for n in chunks:
        step = cache.extend({"a": [0] * n})
        new = torch.tensor([values.pop(0) for _ in range(n)], dtype=torch.float64).view(n, 1, 1)
        out += step.attend(0, torch.zeros_like(new), torch.zeros_like(new), new).flatten().tolist()
        cache.commit(step)
    assert out == pytest.approx([1, 1.5, 2, 2.5, 3])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_fa_05_no_finite_constant_stands_for_a_masked_key(attend, n):
    """FA-05 (flashinfer #4267, #4450, #4451; ohdearquant/lattice #361): a valid score of -30000, a masked key."""
    k_cache = torch.tensor([-30000.0, 0.0, 0.0, 0.0]).view(1, 4, 1, 1)
    v_cache = torch.tensor([3.0, 7.0, 7.0, 7.0]).view(1, 4, 1, 1)
    for S in (n, n - 1 or 1):  # n == S is a path of its own
        out = attend(torch.ones(n, 1, 1), k_cache, v_cache, torch.zeros(1, 1, dtype=torch.int32),
                              torch.tensor([S]), torch.tensor([0, n]), 1.0, max_q=n)
        assert out[n - S].item() == 3.0  # the first row that sees a key sees key 0 alone


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("score", [-50.0, 0.0])
def test_fa_06_padding_of_the_last_block_never_counts(attend, block_size, score):
    """FA-06 (66RING/tiny-flash-attention #12; ELS-RD/kernl #73; triton #2059): 17 keys of equal score, v = 1."""
    for n in (1, 5, 17):
        assert attend_to(attend, [1.0] * 17, n, block_size, score) == pytest.approx([1.0] * n, abs=1e-12)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_fa_07_nan_in_slots_never_written(attend, n):
    """FA-07 (vllm #641, #936, #53856; flash-attention #1745; pytorch #101967): context 5 in blocks 2, 6."""
    k_cache, v_cache = (torch.full((8, 4, 2, 8), NAN, dtype=torch.float64) for _ in range(2))
    q, k, v = (torch.randn(m, h, 8, dtype=torch.float64) for m, h in ((n, 4), (5, 2), (5, 2)))
    for cache, x in ((k_cache, k), (v_cache, v)):
        cache[2], cache[6, 0] = x[:4], x[4]
    out = attend(q, k_cache, v_cache, torch.tensor([[2, 6, 0]], dtype=torch.int32), torch.tensor([5]),
                          torch.tensor([0, n]), 0.3, max_q=n)
    assert_near(out, dense_attention(q, k, v, 0.3))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_fa_08_query_heads_read_the_kv_head_of_their_group(attend, n):
    """FA-08 (HazyResearch/HipKittens #22; onnx #7274; ONNXim #34): h // 3, where h % 2 would give 0 1 0 1 0 1."""
    v_cache = torch.tensor([0.0, 1.0])[:, None].expand(1, 4, 2, 8).clone()
    out = attend(torch.zeros(n, 6, 8), torch.zeros(1, 4, 2, 8), v_cache, torch.zeros(1, 1, dtype=torch.int32),
                          torch.tensor([3]), torch.tensor([0, n]), 1.0, max_q=n)
    assert out[..., 0].tolist() == [[0, 0, 0, 1, 1, 1]] * n


@pytest.mark.parametrize("n", [1, 2])
def test_fa_16_head_dim_80_is_not_padded_to_128(attend, n):
    """FA-16 (sglang #1281; triton #621): q.k is 4 for key 0, 0 for key 1; sqrt(128) would give 0.587479."""
    cache = PagedKVCache(1, 1, 80, 1, 4, attention=attend)
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
def test_fa_17_any_strides_give_the_same_output(attend, dtype):
    """FA-17 (FlagOpen/FlagGems #5235, #5896; flash-attention #2670; pytorch #187506)."""
    for mix in ([(5, 5), (9, 2)], [(9, 1)], [(3, 5)]):
        arguments, *_ = ragged(mix, 4, 2, 8, 6, dtype)
        expected = attend(**arguments)
        n = arguments["q"].shape[0]
        packed = torch.randn(n, 10, 8).to(dtype)
        packed[:, :6] = arguments["q"]
        every_other = torch.randn(n, 6, 16).to(dtype)
        every_other[..., ::2] = arguments["q"]
        for q in (packed[:, :6], every_other[..., ::2], arguments["q"].transpose(0, 1).contiguous().transpose(0, 1)):
            assert not q.is_contiguous() or n == 1
            out = attend(**{**arguments, "q": q})
            torch.testing.assert_close(out, expected, rtol=0, atol=2 ** -6 if dtype == torch.bfloat16 else 1e-6)
        only_v = arguments["v_cache"].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
        assert torch.equal(attend(**{**arguments, "v_cache": only_v}), expected)


def test_fa_17_the_writer_takes_slices_of_one_packed_qkv(attend):
    """FA-17 (FlagOpen/FlagGems #5235, #5896): q, k and v are views of one tensor, as a fused projection makes them."""
    cache = PagedKVCache(1, 2, 8, 4, 4, dtype=torch.float64, attention=attend)
    qkv = torch.randn(7, 10, 8, dtype=torch.float64)
    q, k, v = qkv.split((6, 2, 2), 1)
    cache.add("a")
    out = cache.extend({"a": [0] * 7}).attend(0, q, k, v)
    assert_near(out, dense_attention(q, k, v, 8 ** -0.5))


@pytest.mark.parametrize("n", [1, 3, 5, 6])
def test_fa_22_scores_of_float16_queries_do_not_overflow(attend, n):
    """FA-22 (transformers #33317; QwenLM/Qwen3 #910; apache/tvm #16667): 300 * 300 * 128 is far above 65504."""
    k_cache, v_cache = torch.full((2, 4, 2, 128), 300.0).half(), torch.randn(2, 4, 2, 128).half()
    out = attend(torch.full((n, 4, 128), 300.0).half(), k_cache, v_cache,
                          torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([5]), torch.tensor([0, n]),
                          128 ** -0.5, max_q=n)
    mean = torch.cat((v_cache[1], v_cache[0, :1])).float().mean(0).repeat_interleave(2, 0)
    assert out.isfinite().all() and (out[-1] - mean).abs().max() < 2e-3


@pytest.mark.parametrize("seed", range(6))
def test_k10_no_permutation_of_blocks_changes_an_output(attend, seed):
    """K10 (tanishqkumar/ssd issue #23; tenstorrent/vllm issue #415): with the pools permuted as the tables are."""
    arguments, expected, _ = ragged([(10, 2), (3, 3), (12, 1)], 4, 2, 8, 4)
    to = torch.randperm(len(arguments["k_cache"]), generator=torch.Generator().manual_seed(seed))
    for name in ("k_cache", "v_cache"):
        moved = torch.empty_like(arguments[name])
        moved[to] = arguments[name]
        arguments[name] = moved
    arguments["block_table"] = to[arguments["block_table"].long()].int()
    assert_near(attend(**arguments), expected)


@pytest.mark.parametrize("chunks", [(7,), (3, 4), (1,) * 7, (4, 1, 2)])
def test_fa_20_a_window_counts_the_token_itself(attend, chunks):
    """FA-20 (transformers #29623, #39408; vllm #3385): window 4, 7 tokens, v = 0..6; one too many ends in 2, 3, 4."""
    out, done = [], 0
    for n in chunks:
        done += n
        out += attend_to(attend, [float(i) for i in range(done)], n, window=4)
    assert out == pytest.approx([0, 0.5, 1, 1.5, 2.5, 3.5, 4.5])


def test_k16_a_window_of_four_at_positions_3_4_and_5(attend):
    """K16 (mlx-lm PR #390; transformers issue #37574; vllm PR #14097): W + 1 keys would give 3.0 at position 5."""
    for S, mean in ((4, 1.5), (5, 2.5), (6, 3.5)):
        assert attend_to(attend, [float(i) for i in range(S)], 1, window=4) == pytest.approx([mean])


@pytest.mark.parametrize("n", [1, 2])
def test_rt_09_products_of_codes_do_not_wrap(attend, n):
    """RT-09 (triton-lang/triton #3566): [100, 100] . [100, 100] is 20000 and -128 stays below zero."""
    codes, scales = torch.full((1, 4, 1, 2), 100, dtype=torch.int8), torch.ones(1, 4, 1)
    codes[0, 1] = -128
    q = torch.full((n, 1, 2), 100.0)
    out, lse = attend(q, codes, codes, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2]), torch.tensor([0, n]),
                      1.0, max_q=n, k_scale=scales, v_scale=scales, return_lse=True)
    assert lse[-1].item() == 20000 and out[-1].tolist() == [[100, 100]]
    out = attend(-q, codes, codes, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2]), torch.tensor([0, n]),
                 1.0, max_q=n, k_scale=scales, v_scale=scales)
    assert out[-1].tolist() == [[-128, -128]]


SABOTAGE = {
    "one key too many in the window": lambda a: {"window": a["window"] + 1},
    "a mask aligned to the top left": lambda a: {"kv_len": a["q_start"].diff().minimum(a["kv_len"])},
    "a key behind the last": lambda a: {"kv_len": a["kv_len"] + (a["kv_len"] % a["k_cache"].shape[1] > 0).int()},
    "heads in another order": lambda a: {"q": a["q"].unflatten(1, (3, 2)).transpose(1, 2).flatten(1, 2)},
    "no scale for values": lambda a: {"v_scale": torch.ones_like(a["v_scale"])},
    "keys of a neighbour": lambda a: {"block_table": a["block_table"].roll(1, 0)},
}


@pytest.mark.parametrize("how", SABOTAGE)
def test_sabotaged_twins_are_caught(how):
    def spoilt(**arguments):
        return paged_attention(**{**arguments, **SABOTAGE[how](arguments)})

    with pytest.raises(AssertionError):
        test_windows_codes_and_log_sum_exps(spoilt, MIX, torch.int8, 3)


@pytest.mark.parametrize("window", [1, 5, 16, 100])
@pytest.mark.parametrize("run", [True, False], ids=["in a run", "scattered"])
def test_blocks_behind_the_window_are_not_looked_at(window, run):
    """Their numbers may be anything: only the window's blocks are read, in place if they are a run."""
    S, block_size, G, D = 70, 4, 2, 8
    k, v = torch.randn(2, 40, block_size, G, D, dtype=torch.float64)
    table = torch.arange(10, 28) if run else torch.randperm(40)[:18]
    q = torch.randn(2, 2 * G, D, dtype=torch.float64)

    def attend(kernel, table, q, lengths):
        starts = torch.arange(len(lengths) + 1) * (len(q) // len(lengths))
        return kernel(q, k, v, table.int(), torch.tensor(lengths), starts, D**-0.5, max_q=2, window=window)

    wanted = attend(reference_attention, table[None], q, [S])
    first = max(0, S - 2 - window + 1) // block_size
    torn = table.clone()
    torn[:first] = 39 - torch.arange(first)
    torch.testing.assert_close(attend(paged_attention, torn[None], q, [S]), wanted, rtol=0, atol=1e-12)
    many = torch.stack([torn, torn, table.roll(1)])
    short = torch.cat([q, q, torch.randn_like(q)])
    torch.testing.assert_close(attend(paged_attention, many, short, [S, S, 9]),
                               attend(reference_attention, many, short, [S, S, 9]), rtol=0, atol=1e-12)


def test_rows_that_belong_to_nobody_are_noticed():
    k = v = torch.zeros(1, 4, 1, 8)
    with pytest.raises(AssertionError, match="q has 5 rows, but q_start ends at 3"):
        paged_attention(torch.zeros(5, 1, 8), k, v, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([3]),
                        torch.tensor([0, 3]), 1.0, max_q=3)


@pytest.mark.parametrize("window", [None, 1, 40, 130, 200, 500, 501])
@pytest.mark.parametrize("n, S", [(128, 128), (200, 200), (500, 500), (129, 500), (130, 131)])
def test_long_prompts_in_bfloat16(n, S, window):
    """Plain products take the place of torch's attention there, in pieces of rows: never where a window hides a key."""
    arguments, *_ = ragged([(S, n)], 6, 2, 16, 16, window=window, layout="head-major", in_order=True)
    arguments = {k: v.bfloat16() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in arguments.items()}
    off = (paged_attention(**arguments).float() - reference_attention(**arguments).float()).abs().max()
    assert off < 0.04, off
