"""graphs.py on the CPU, against eager steps. A tape stands in for a CUDA graph: it repeats the recorded operations on
the recorded tensors, and nothing of the Python that called them. With a GPU the same runs with real graphs."""
import inspect
import random
import warnings
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import graphs
from graphs import Graphs, bucket_sizes
from kvcache import PagedKVCache, reference_attention
from model import Config, Llama

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = Config(n_layer=2, n_head=4, n_kv_head=2, head_dim=8, hidden_size=32, intermediate_size=48, vocab_size=60,
              max_seq_len=64)
BLOCK = 4
WAITS = {torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}

# ------------------------------------------------------------------ stand-ins


class Tape(TorchDispatchMode):
    """One capture: the operations that fn called, what is no result of theirs held by address."""

    def __init__(self, fn):
        super().__init__()
        self.ops, self.made = [], set()
        fn()  # warm-up
        with self:
            self.out = fn()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in WAITS:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        # detach() is another name for the same memory: a Parameter that is given other data does not take it along.
        args, kwargs = tree_map(lambda x: x if not isinstance(x, torch.Tensor) or id(x) in self.made else x.detach(),
                                (args, kwargs or {}))
        self.ops.append((func, args, kwargs, result))
        self.made |= {id(x) for x in tree_leaves(result) if isinstance(x, torch.Tensor)}
        return result

    def replay(self):
        now = {}
        for func, args, kwargs, result in self.ops:
            args, kwargs = tree_map(lambda x: now.get(id(x), x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs))):
                now[id(old)] = new
        assert now[id(self.out)].isfinite().all(), "a row of the bucket is not finite"
        return self.out.copy_(now[id(self.out)])  # one tensor for all replays, as a CUDA graph has


class Capture:
    """capture(fn) -> replay for the CPU; remembers the batch size of every capture."""

    def __init__(self):
        self.sizes = []

    def __call__(self, fn):
        tape = Tape(fn)
        self.sizes.append(len(tape.out))
        return tape.replay


def masked_attention(q, k_cache, v_cache, block_table, kv_len, q_start, scale, *, max_q, window=None, k_scale=None,
                     v_scale=None, memo=None):
    """paged_attention; of one new token a sequence without asking any tensor for a number, so that it can be taped."""
    if max_q > 1:
        return reference_attention(q, k_cache, v_cache, block_table, kv_len, q_start, scale, max_q=max_q,
                                   window=window, k_scale=k_scale, v_scale=v_scale)
    table = block_table.long()
    k, v = k_cache[table].to(q.dtype), v_cache[table].to(q.dtype)  # (B, blocks, block_size, G, D)
    if k_scale is not None:
        k, v = k * k_scale[table][..., None].to(q.dtype), v * v_scale[table][..., None].to(q.dtype)
    at = torch.arange(table.shape[1] * k_cache.shape[1], device=q.device)
    hidden = at >= kv_len[:, None]
    if window is not None:
        hidden = hidden | (at < kv_len[:, None] - window)
    k, v = (x.flatten(1, 2).masked_fill(hidden[..., None, None], 0) for x in (k, v))  # (B, S, G, D)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bhd,bshd->bhs", q, k) * scale
    return torch.einsum("bhs,bshd->bhd", scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1), v)


# ------------------------------------------------------------------ a world to run in


def bits(x):
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x  # codes may be NaN


class World:
    """A tiny model, a cache full of noise, a runner; every step is checked against an eager one."""

    def __init__(self, runner=Graphs, *, max_batch=8, n_blocks=44, dtype=torch.float64, capture=None, device="cpu",
                 compute=torch.float64, tolerance=1e-12, attention=masked_attention, window=None, max_seq_len=64,
                 **options):
        torch.manual_seed(0)
        self.model, self.tolerance = Llama(TINY).to(device, compute).eval(), tolerance
        self.cache = PagedKVCache(2, 2, 8, n_blocks, BLOCK, max_seq_len=max_seq_len, dtype=dtype, attention=attention,
                                  window=window, device=device)
        for pool in self.pools():
            if pool.dtype in (torch.int8, torch.float8_e4m3fn):
                pool.view(torch.int8).random_(-100, 100)
            else:
                pool.normal_().abs_()
                pool[n_blocks] = torch.nan  # what nobody has written may be anything
        self.capture = Capture() if device == "cpu" and capture is None else capture
        self.run = runner(self.model, self.cache, max_batch, capture=self.capture, **options)

    def pools(self):
        cache = self.cache
        return [*cache.k, *cache.v, *(cache.k_scale or ()), *(cache.v_scale or ())]

    def eager(self, step, rows=None):
        with torch.inference_mode():
            return self.model(step.tokens, step.positions, step.attend, step.rows if rows is None else rows)

    def step(self, plan, rows=None):
        """Extend, run both ways from the same pools, compare, commit -> the runner's logits."""
        step = self.cache.extend(plan)
        before = [pool.clone() for pool in self.pools()]
        logits = self.run(step, rows)
        after = [pool.clone() for pool in self.pools()]
        for pool, x in zip(self.pools(), before):
            pool.copy_(x)
        want = self.eager(step, rows)
        torch.testing.assert_close(logits, want, rtol=self.tolerance, atol=self.tolerance)
        others = torch.ones(self.cache.n_blocks * BLOCK, dtype=torch.bool, device=logits.device)
        others[step.slots] = False
        for pool, old, new in zip(self.pools(), before, after):
            pool, old, new = (x[:-1].flatten(0, 1) for x in (pool, old, new))  # without the trash block
            assert torch.equal(bits(old)[others], bits(new)[others]), "a slot of no token of this step has changed"
            exact = self.tolerance < 1e-9 or pool.itemsize > 1  # else a code may fall to the other side of a tie
            rtol, atol = (self.tolerance, self.tolerance) if exact else (0.13, 1)
            torch.testing.assert_close(pool[step.slots].double(), new[step.slots].double(), rtol=rtol, atol=atol)
        for pool, new in zip(self.pools(), after):
            pool.copy_(new)
        self.cache.commit(step)
        self.cache.check()
        return logits

    def begin(self, **prompts):
        """Sequences that hold these prompts."""
        for name, ids in prompts.items():
            self.cache.add(name)
            self.step({name: ids})


def random_life(world: World, seed: int, sizes: list[int]) -> None:
    """Decode steps of so many sequences each; between them sequences end, begin, and are forked."""
    rng, alive, count = random.Random(seed), [], 0

    def token():
        return rng.randrange(TINY.vocab_size)

    for B in sizes:
        for name in [n for n in alive if world.cache.length(n) > 14 or rng.random() < 0.15]:
            alive.remove(name)
            world.cache.free(name)
        while len(alive) < B:
            name, count = f"s{count}", count + 1
            if alive and rng.random() < 0.3:
                world.cache.fork(rng.choice(alive), name)
            else:
                world.cache.add(name)
                if n := rng.randrange(10):  # else its first token comes with the others' next ones
                    world.step({name: [token() for _ in range(n)]})
            alive.append(name)
        world.step({name: [token()] for name in rng.sample(alive, B)})


# ------------------------------------------------------------------ buckets


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 8, 9, 31, 32, 33, 100, 1000])
def test_bucket_sizes(most):
    sizes = bucket_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    for B in range(1, most + 1):
        assert min(size for size in sizes if size >= B) < 2 * B


@pytest.mark.parametrize("wrong", [{"max_batch": 0}, {"max_batch": -1}, {"max_batch": 2, "max_len": 0}])
def test_sizes_below_one_are_refused(wrong):
    with pytest.raises(ValueError, match="must be 1 or more"):
        World(**wrong)


def test_without_a_gpu_the_default_is_refused():
    world = World()
    with pytest.raises(ValueError, match=r"need a CUDA device, but the cache is on cpu; call the model"):
        Graphs(world.model, world.cache, 4)


# ------------------------------------------------------------------ equal to eager


@pytest.mark.parametrize("B", range(1, 10))
def test_every_batch_size(B):
    world = World()
    world.begin(**{f"s{i}": [i + 1] * (i + 2) for i in range(B)})
    for t in range(6):
        world.step({f"s{i}": [10 * t + i % 10] for i in range(B)})
    eager = 0 if B <= 8 else 6
    assert world.capture.sizes == ([] if eager else [min(s for s in (1, 2, 4, 8) if s >= B)])
    assert (world.run.replayed, world.run.eager) == (6 - eager, B + eager)


@pytest.mark.parametrize("seed, options", [
    (0, {}), (1, {}), (2, {"max_batch": 6}), (3, {"max_batch": 1}), (4, {"dtype": "int8"}), (5, {"dtype": "fp8"}),
    (6, {"window": 5}), (7, {"max_len": 9})])
def test_sequences_come_and_go(seed, options):
    world, rng = World(**options), random.Random(seed)
    random_life(world, seed, [rng.randint(1, 9) for _ in range(10)])
    assert len(world.capture.sizes) == len(set(world.capture.sizes)) == len(world.run.graphs)
    assert sorted(world.capture.sizes) == sorted(world.run.graphs)
    assert world.run.replayed and not world.run.broken


def test_rows_of_all_kinds():
    world = World()
    world.begin(a=[1, 2, 3], b=[4], c=[5, 6])
    plan = {"a": [7], "b": [8], "c": [9]}
    for rows in ([0, 1, 2], [2], [], [2, 0, 0, 1, 1], [-1]):
        assert len(world.step(plan, torch.tensor(rows, dtype=torch.int64))) == len(rows)
    step = world.cache.extend(plan, rows=[1])
    assert torch.equal(world.run(step), world.run(step, torch.tensor([1]))), "the step's own rows are the default"
    with pytest.raises(IndexError):  # never the logits of padding
        world.run(step, torch.tensor([3]))


def test_logits_are_the_callers_to_keep():
    world = World()
    world.begin(a=[1, 2, 3], b=[4])
    first = world.step({"a": [5], "b": [6]})
    kept = first.clone()
    second = world.step({"a": [7], "b": [8]})
    assert torch.equal(first, kept) and not torch.equal(first, second)


def test_needs_no_inference_mode_around_it():
    world = World()
    world.cache.add("a")
    for ids in ([1, 2], [3]):  # eager, graph
        step = world.cache.extend({"a": ids})
        assert not world.run(step).requires_grad
        world.cache.commit(step)
    with torch.inference_mode():
        step = world.cache.extend({"a": [4]})
        world.run(step)
    assert world.run.replayed == 2


def test_any_callable_is_a_model():
    world = World()
    world.run.model = partial(world.model)
    world.begin(a=[1, 2, 3])
    world.step({"a": [4]})
    assert world.run.replayed == 1 and world.run.watched == []


def test_warm_up_captures_all_the_largest_first_and_writes_to_the_trash_block_only():
    world = World(max_batch=6)
    before = [pool.clone() for pool in world.pools()]
    world.run.warm_up()
    world.run.warm_up()
    assert world.capture.sizes == [6, 4, 2, 1]
    for pool, old in zip(world.pools(), before):
        assert torch.equal(pool[:-1], old[:-1]) and pool[-1, 0].isfinite().all()
    random_life(world, 1, [1, 2, 3, 4, 5, 6] * 2)
    assert world.capture.sizes == [6, 4, 2, 1]


# ------------------------------------------------------------------ the cases


class PadsWithSlotZero(Graphs):
    def _fill(self, step):
        super()._fill(step)
        self.slots[self.live:] = 0


class PadsWithTheTableOfRowZero(Graphs):
    def _fill(self, step):
        super()._fill(step)
        self.slots[self.live:] = self.slots[0]


class PadsWithNoKeys(Graphs):
    def _fill(self, step):
        super()._fill(step)
        self.kv_len[self.live:] = 0


class LeavesOldRows(Graphs):
    def _pad(self, begin):
        self.live = min(self.live, begin)


class CapturesOverTheLastStep(Graphs):
    def _pad(self, begin):
        if begin:
            super()._pad(begin)


class ForgetsBlockTable(Graphs):
    def _fill(self, step):
        table = self.block_table.clone()
        super()._fill(step)
        self.block_table.copy_(table)


class ForgetsLengths(Graphs):
    def _fill(self, step):
        super()._fill(step)
        self.kv_len[:self.live] = 2


class Rebinds(Graphs):
    name = "tokens"

    def _fill(self, step):
        held = getattr(self, self.name)
        before = held.clone()
        super()._fill(step)
        filled = held.clone()
        held.copy_(before)
        setattr(self, self.name, filled)


class IgnoresTheWidth(Graphs):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.real, self.width = self.width, 10**6

    def _fill(self, step):
        super()._fill(SimpleNamespace(**{**vars(step), "block_table": step.block_table[:, :self.real]}))


class KeepsOldWeights(Graphs):
    def _moved(self):
        return False


def test_their_life_is_fine_without_sabotage():
    assert short_life(Graphs).run.replayed and short_life(Graphs, max_len=6).run.eager


def short_life(runner, **options):
    world = World(runner, **options)
    random_life(world, 3, [1, 2, 3, 6, 5, 3, 1, 2, 5])
    return world


@pytest.mark.parametrize("runner", [
    PadsWithSlotZero, PadsWithTheTableOfRowZero, PadsWithNoKeys, LeavesOldRows, CapturesOverTheLastStep,
    ForgetsBlockTable, ForgetsLengths, IgnoresTheWidth,
    *(type(f"Rebinds_{x}", (Rebinds,), {"name": x}) for x in ("tokens", "positions", "slots", "kv_len"))])
def test_these_tests_notice(runner):
    options = {"max_len": 6} if runner is IgnoresTheWidth else {}
    with pytest.raises(AssertionError):
        short_life(runner, **options)


def test_padding_writes_to_the_trash_block():
    """TP-07 (vllm #43810, #43869): padded slots 0 or -1 write into a live block, the first or the last of the pool."""
    world = World(max_batch=4, n_blocks=3)
    world.begin(a=[1, 2, 3], b=[4, 1], c=[5, 2])  # blocks 0, 1 and 2: no block is free that could be damaged unseen
    run = world.run
    for plan in ({"a": [6]}, {"a": [7], "b": [8], "c": [9]}, {"b": [1], "c": [1]}, {"b": [2], "a": [3], "c": [4]}):
        for name in plan:
            world.cache.trim(name, min(world.cache.length(name), 3))
        world.step(plan)  # compares all slots
        assert run.slots[len(plan):].tolist() == [12] * (4 - len(plan))
    assert sorted(run.graphs) == [1, 2, 4]


@pytest.mark.parametrize("change", ["replaced", "data", "fused", "moved"])
def test_weights_replaced_after_capture(change):
    """TP-08 (pytorch #114844; vllm #53915): a graph reads the memory it was captured with, whatever is there now."""
    def replace(model):
        with torch.no_grad():
            if change == "replaced":
                model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)
            elif change == "data":
                model.model["norm"].weight.data = model.model["norm"].weight.data * 2
            elif change == "moved":
                model.float().double()
            else:
                model.model["layers"][0].mlp.up_proj.weight.mul_(2)
                model.fuse_()

    for runner in (Graphs, KeepsOldWeights):
        world = World(runner)
        world.begin(a=[1, 2, 3], b=[4, 0])
        world.step({"a": [5], "b": [6]})
        replace(world.model)
        if runner is KeepsOldWeights:
            if change in ("replaced", "data"):  # the others leave equal numbers at the old place
                with pytest.raises(AssertionError):
                    world.step({"a": [7], "b": [8]})
            continue
        with pytest.warns(UserWarning, match="weights were replaced") as caught:
            world.step({"a": [7], "b": [8]})
        assert len(caught) == 1 and caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            world.step({"a": [9], "b": [10]})
            world.step({"a": [9], "b": [10]})
        assert world.capture.sizes == [2, 2] and world.run.replayed == 3


def test_weights_changed_in_place():
    """TP-08, the other side: the graph stays, and computes with the new numbers."""
    world = World()
    world.begin(a=[1, 2, 3])
    world.step({"a": [5]})
    with torch.no_grad():
        for p in world.model.parameters():
            p.mul_(1.5)
    world.model.load_state_dict({k: v * 0.9 for k, v in world.model.state_dict().items()})
    world.step({"a": [6]})
    assert world.capture.sizes == [1] and world.run.replayed == 2


@pytest.mark.parametrize("chunk", [8, 1])
def test_chunks_of_a_prompt(chunk):
    """TP-10 (kekzl/imp #986): three equal chunks. Captured with the first one's offset and length, later ones would
    lose what came before. Chunks of one token are decode steps: one graph serves all three."""
    world, ids = World(), torch.randint(TINY.vocab_size, (3 * chunk,), generator=torch.Generator().manual_seed(1))
    world.cache.add("a")
    for i in range(0, 3 * chunk, chunk):
        logits = world.step({"a": ids[i: i + chunk].tolist()})
        with torch.inference_mode():
            torch.testing.assert_close(logits, world.model(ids[None, : i + chunk])[0, -1:], rtol=1e-12, atol=1e-12)
    assert world.capture.sizes == ([1] if chunk == 1 else [])
    assert (world.run.replayed, world.run.eager) == ((3, 0) if chunk == 1 else (0, 3))


def test_a_decode_step_with_a_chunk_in_it_is_eager():
    world = World()
    world.begin(a=[1, 2, 3], b=[4, 0])
    world.step({"a": [5], "b": [6, 7]})
    world.step({"b": [6, 7], "a": [5]})
    assert world.capture.sizes == [] and world.run.eager == 4


def test_live_rows_do_not_depend_on_padding():
    """TP-11 (flash-attention #2470): two live sequences in a graph of four, beside other rows and other trash."""
    def twice(before, poison):
        world = World(max_batch=4)
        world.run.sizes = [4]
        world.begin(a=[1, 2, 3], b=[4], c=[5, 6], d=[7])
        for plan in before:
            world.step(plan)
        for pool in world.pools():
            pool[-1] = poison
        return torch.stack([world.step({"a": [8 + t], "b": [9]}) for t in range(3)])

    want = twice([], torch.nan)
    assert want.isfinite().all()
    for before, poison in [([], 1e6), ([], -torch.inf), ([{"c": [1], "d": [2]}], torch.nan),
                           ([{"c": [1], "d": [2]}, {"d": [3]}, {"d": [4], "c": [3]}], 0.5)]:
        assert torch.equal(twice(before, poison), want)

    world = World(max_batch=4)  # nor on the live rows beside them
    world.run.sizes = [4]
    world.begin(a=[1, 2, 3], b=[4], c=[5, 6], d=[7])
    for t in range(3):
        got = world.step({"a": [8 + t], "b": [9], "c": [10 + t]})
        assert torch.equal(got[:2], want[t])


def test_a_context_beyond_the_graphs():
    """TP-13 (vllm #9285): captured for 8 tokens, a sequence of 9. It runs eagerly, and by graph again when it is
    gone."""
    world = World(max_len=8)
    world.begin(a=[1, 2, 3, 4, 5, 6], b=[1, 0])
    for t in range(4):  # the tables of 7 and 8 tokens fit, those of 9 and 10 do not
        world.step({"b": [t], "a": [t]})
        assert world.run.replayed == min(t + 1, 2)
    world.cache.free("a")
    world.step({"b": [9]})
    assert world.run.replayed == 3 and world.run.width == 2


@pytest.mark.parametrize("max_len, max_seq_len, width", [(None, 64, 16), (None, None, 44), (9, 64, 3), (8, None, 2),
                                                        (10**9, None, 44), (10**9, 64, 16), (1, 64, 1)])
def test_tables_are_no_wider_than_the_cache(max_len, max_seq_len, width):
    assert World(max_len=max_len, max_seq_len=max_seq_len).run.width == width


# ------------------------------------------------------------------ when capturing fails


def test_a_failed_capture():
    """Graphs captured before go on, everything else is eager; one warning, which names the remedy."""
    class Full(Capture):
        def __call__(self, fn):
            if len(self.sizes) == 1:
                fn()  # the warm-up went well
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().__call__(fn)

    world = World(capture=Full())
    world.begin(a=[1, 2, 3], b=[4, 0], c=[5, 0])
    world.step({"a": [1], "b": [2]})
    with pytest.warns(UserWarning, match=r"no CUDA graph for 4 sequences: OutOfMemoryError: .*lower max_batch") as seen:
        world.step({"a": [1], "b": [2], "c": [3]})
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        random_life(world, 1, [1, 2, 3, 4, 5, 2])
        world.run.warm_up()
    assert sorted(world.run.graphs) == [2] and world.run.replayed == 3


def test_a_model_that_waits_for_the_gpu():
    world = World()
    world.run.model = lambda tokens, *rest: world.model(tokens, *rest) + 0 * int(tokens[0])
    world.begin(a=[1, 2, 3])
    with pytest.warns(UserWarning, match="not permitted when stream is capturing"):
        world.step({"a": [1]})
    world.step({"a": [2]})
    assert world.run.eager == 3


def test_an_interrupt_is_no_failed_capture():
    def interrupted(fn):
        raise KeyboardInterrupt

    world = World(capture=interrupted)
    world.begin(a=[1, 0])
    with pytest.raises(KeyboardInterrupt):
        world.run(world.cache.extend({"a": [2]}))
    world.run.capture = Capture()
    world.begin(b=[3, 0])
    world.step({"b": [4]})
    assert world.run.replayed == 1


def test_a_models_own_error_is_not_hidden():
    world = World()
    world.begin(a=[1, 0])
    world.run.model = lambda *args: 1 / 0
    with pytest.warns(UserWarning, match="ZeroDivisionError"), pytest.raises(ZeroDivisionError):
        world.run(world.cache.extend({"a": [2]}))


# ------------------------------------------------------------------ CUDA's own


@pytest.mark.parametrize("spoilt", [False, True])
def test_calls_of_cuda(spoilt, monkeypatch):
    """The order of calls, on a torch.cuda that does nothing: warm-up on a side stream that has waited for the caller's,
    one pool for all graphs, the caller's stream back in any case."""
    log = mock.Mock()
    streams = [log.caller]
    log.Stream.return_value = log.side

    class Within:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            streams.append(self.stream)

        def __exit__(self, *error):
            streams.pop()

    class Recording:
        def __init__(self, *args, **kwargs):
            bound = inspect.signature(real).bind(*args, **kwargs).arguments
            assert bound["pool"] is log.graph_pool_handle.return_value and bound["stream"] is log.side
            self.graph = bound["cuda_graph"]

        def __enter__(self):
            log.begin()
            streams.append(log.side)

        def __exit__(self, *error):
            log.end()
            if spoilt:
                raise RuntimeError("capture invalidated")  # as torch's: the stream is not put back
            streams.pop()

    real = torch.cuda.graph
    for name, x in {"Stream": log.Stream, "graph_pool_handle": log.graph_pool_handle, "stream": Within,
                    "current_stream": lambda device: streams[-1], "graph": Recording,
                    "CUDAGraph": log.CUDAGraph}.items():
        monkeypatch.setattr(torch.cuda, name, x)
    monkeypatch.setattr(Within, "__exit__", lambda self, *error: streams.__setitem__(slice(1, None), []))

    def fn():
        assert streams[-1] is log.side
        log.fn()
        return torch.ones(2)

    capture = graphs.cuda_graph(torch.device("cuda:1"))
    order = ["side.wait_stream", "fn", "fn", "begin", "fn", "end", "caller.wait_stream"]
    for _ in range(2):
        log.reset_mock()
        if spoilt:
            with pytest.raises(RuntimeError, match="invalidated"):
                capture(fn)
        else:
            replay = capture(fn)
            graph = log.CUDAGraph.return_value
            assert replay() is replay() and graph.replay.call_count == 2
        assert streams == [log.caller]
        calls = [name for name, *_ in log.mock_calls]
        assert [c for c in calls if c in order] == order
    log.graph_pool_handle.assert_not_called()  # since the reset: one pool, made at the beginning


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kernel", ["masked", "flash"])
@pytest.mark.parametrize("kv_dtype", [torch.float32, "int8", "fp8"])
def test_on_a_gpu(kernel, kv_dtype):
    attention = masked_attention
    if kernel == "flash":
        flash = pytest.importorskip("flash")
        if flash.triton is None:
            pytest.skip("no triton")
        attention = flash.paged_attention
    tolerance = 1e-3 if kv_dtype == torch.float32 else 5e-2
    for warm in (False, True):
        world = World(device="cuda", compute=torch.float32, dtype=kv_dtype, tolerance=tolerance, attention=attention)
        if warm:
            world.run.warm_up()
        random_life(world, 5, [1, 2, 3, 8, 9, 5, 6, 7, 3, 4, 1, 2, 5, 8])
        assert world.run.replayed >= 13 and not world.run.broken and sorted(world.run.graphs) == [1, 2, 4, 8]
    if kv_dtype != torch.float32:
        return
    for runner in (PadsWithSlotZero, ForgetsBlockTable, LeavesOldRows, CapturesOverTheLastStep):
        with pytest.raises(AssertionError):
            short_life(runner, device="cuda", compute=torch.float32, dtype=kv_dtype, tolerance=tolerance,
                       attention=attention)
