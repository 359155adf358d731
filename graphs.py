"""graphs.py - decode steps replayed as CUDA graphs, so that the GPU does not wait for Python.

    run = Graphs(model, cache, max_batch=32)
    run.warm_up()                                capture now, else at the first step of each size
    logits = run(step)                           (R, V), of the step's own rows; or run(step, rows)

The one idea: a decode step launches some thirty kernels a layer, and each launch costs the host several microseconds,
most of them in Python and PyTorch. With one new token a sequence many of these kernels take less than that, and the GPU
idles. A CUDA graph is a recording of launches: captured once, it is started by one call ever after.

A recording repeats what was launched, to the letter. So what must be known is what is baked into it:

    baked in                                          not baked in
    addresses: of inputs, weights, the cache's K/V    what lies there: ids, slots, tables, lengths, K and V
    shapes, grids, numbers that Python computed       numbers that kernels read from tensors

Inputs therefore live in buffers that stay where they are. A step is copied into them, never put in their place, and
sequences may come, go, grow and move between replays. (Weights that were replaced are noticed, see `_moved`.) Shapes
must stay what they were, so there is a graph for each of a few batch sizes, the buckets 1, 2, 4, 8, ..., max_batch, and
a step of 5 runs in the one of 8. The three rows too many cost little, since decoding reads the same weights for 5 rows
as for 8. They are padding:

    row          0   1   2   3   4    5   6   7
    token        7  21   3   9  40    0   0   0       position 0, one key: what the row itself has just written,
    writes to   its own slot ......   T   T   T       in T, the first slot of the cache's trash block

Slot 0 or -1 instead of T would be somebody's (-1 is the pool's last slot). One key, not none: attention over no keys is
0 / 0 in many a kernel, and one NaN reaches every row where a number is taken over all of them (the scale of quantized
activations, a check for NaN). That key was just written, so it is finite; T's old content may be anything.

All else runs eagerly, as if this file were not there: steps in which a sequence has more than one new token (chunks of
prompts, drafts to verify), more than max_batch sequences, block tables for more than max_len tokens, and everything,
after a warning, if capturing fails. A prompt's chunk of one token is a decode step like any other.

The model is any model(tokens, positions, attend, rows) -> logits that neither waits for the GPU nor branches on what
tensors hold. Of the cache these are used: n_blocks, block_size, max_seq_len, device, a block n_blocks behind the pool
that nobody reads, and attend_with(slots, block_table, kv_len, q_start, max_q) -> attend; of a step its index tensors,
max_q, rows and attend.

References: Gray 2019, "Getting Started with CUDA Graphs"; Nguyen et al. 2021, "Accelerating PyTorch with CUDA Graphs".
Left out: graphs for several context lengths (launch grids are made for max_len: choose it no longer than needed),
sampling inside the graph, graphs of a part of the model.

Shapes: B sequences of a step, b of a bucket, R rows, V vocabulary.
"""
from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

# ------------------------------------------------------------------ one graph


def cuda_graph(device: torch.device) -> Callable[[Callable[[], Tensor]], Callable[[], Tensor]]:
    """capture(fn) -> replay, for graphs that are replayed one at a time on this device.

    fn() -> tensor is run three times here, twice for real. replay() repeats its kernels on the current stream and
    returns the same tensor each time, overwritten. All graphs take their memory for intermediate results from one
    pool: none is in use between replays, so they may overlap.
    """
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def capture(fn: Callable[[], Tensor]) -> Callable[[], Tensor]:
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        stream.wait_stream(before)
        try:
            # subtle: this outer `with` puts the caller's stream back also where ending a spoilt capture raises.
            with torch.cuda.stream(stream):
                for _ in range(2):  # compiles kernels, loads libraries: what may not happen during a capture
                    fn()
                # thread_local: what other threads do on the GPU meanwhile is no reason to fail
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    out = fn()
        finally:
            before.wait_stream(stream)

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    return capture


# ------------------------------------------------------------------ graphs for all batch sizes


def bucket_sizes(max_batch: int) -> list[int]:
    """The batch sizes that get a graph: powers of two, and max_batch itself.

    >>> bucket_sizes(8), bucket_sizes(20)
    ([1, 2, 4, 8], [1, 2, 4, 8, 16, 20])
    """
    return [1 << i for i in range((max_batch - 1).bit_length())] + [max_batch]


class Graphs:
    """run(step, rows) -> logits (R, V): a decode step by graph, any other eagerly. Runs in inference mode.

    max_batch  the most sequences in a graph
    max_len    the most tokens of a sequence in a graph; None: max_seq_len, or what the pool holds if that is less
    capture    fn -> replay, as cuda_graph(device) makes it, which is the default; tests pass a stand-in for the CPU

    `replayed` and `eager` count the steps of each kind. ValueError if max_batch or max_len is below 1, or if the cache
    is not on a CUDA device and there is no stand-in. One Graphs serves one thread.
    """

    def __init__(self, model: Callable, cache, max_batch: int, max_len: int | None = None,
                 capture: Callable | None = None):
        if max_batch < 1 or (max_len is not None and max_len < 1):
            raise ValueError(f"max_batch is {max_batch} and max_len {max_len}, but both must be 1 or more")
        if capture is None and cache.device.type != "cuda":
            raise ValueError(f"CUDA graphs need a CUDA device, but the cache is on {cache.device}; "
                             "call the model directly there")
        self.model, self.cache = model, cache
        self.capture = capture or cuda_graph(cache.device)
        self.sizes, self.graphs, self.broken = bucket_sizes(max_batch), {}, False
        self.watched: list[tuple] = []  # where the captured weights lie
        self.replayed = self.eager = 0
        longest = [n for n in (max_len, cache.max_seq_len, cache.n_blocks * cache.block_size) if n is not None]
        self.width, trash = -(-min(longest) // cache.block_size), cache.n_blocks  # blocks; the trash block

        def buffer(pad: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((max_batch, *shape), pad, dtype=dtype, device=cache.device)

        # One set for all buckets: a bucket's graph reads the first b rows. Rows from `live` on are padding.
        self.live = 0
        self.tokens, self.positions, self.slots = buffer(0), buffer(0), buffer(trash * cache.block_size)
        self.block_table, self.kv_len = buffer(trash, self.width, dtype=torch.int32), buffer(1, dtype=torch.int32)
        self.padding = ((self.tokens, 0), (self.positions, 0), (self.slots, trash * cache.block_size),
                        (self.block_table, trash), (self.kv_len, 1))
        self.q_start = torch.arange(max_batch + 1, dtype=torch.int32, device=cache.device)  # one new token each, so
        self.rows = torch.arange(max_batch, device=cache.device)  # these two never change

    @torch.inference_mode()
    def __call__(self, step, rows: Tensor | None = None) -> Tensor:
        """Logits (R, V) of these rows (R,) of the step, of step.rows if None. They are the caller's to keep."""
        B, rows = len(step.kv_len), step.rows if rows is None else rows
        fits = step.max_q == 1 and self.sizes[-1] >= B and step.block_table.shape[1] <= self.width
        replay = self._graph(B) if fits else None
        if replay is None:
            return self._eagerly(step, rows)
        self._fill(step)
        logits = replay()[:B][rows]  # a copy, as the next replay overwrites the output
        if self._moved():  # asked here, while the GPU computes
            self._forget()
            return self._eagerly(step, rows)  # which writes the same slots once more
        self.replayed += 1
        return logits

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture all graphs now. The largest first: what it needed then holds the intermediate results of all."""
        for size in reversed(self.sizes):
            self._graph(size)

    def _eagerly(self, step, rows: Tensor) -> Tensor:
        self.eager += 1
        return self.model(step.tokens, step.positions, step.attend, rows)

    def _graph(self, B: int) -> Callable[[], Tensor] | None:
        """replay() of the smallest bucket for B sequences, captured if need be; None if that failed."""
        b = next(size for size in self.sizes if size >= B)
        if b not in self.graphs and not self.broken:
            # subtle: capturing runs the model. With the last step still in the buffers it would write that step's
            # keys and values again, into slots that may be another sequence's by now.
            self._pad(0)
            self.watched = self.watched or _watch(self.model)
            attend = self.cache.attend_with(self.slots[:b], self.block_table[:b], self.kv_len[:b],
                                            self.q_start[:b + 1], 1)
            fn = partial(self.model, self.tokens[:b], self.positions[:b], attend, self.rows[:b])
            try:
                self.graphs[b] = self.capture(fn)
            except Exception as error:
                self.broken = True  # after a failure the allocator's pool is in no state for another try
                warnings.warn(f"no CUDA graph for {b} sequences: {type(error).__name__}: {error}. Steps without a graph"
                              " run eagerly, more slowly. If memory is short, lower max_batch, max_len or the cache's "
                              "n_blocks; else the model waits for the GPU somewhere", stacklevel=4)
        return self.graphs.get(b)

    def _fill(self, step) -> None:
        """Copy a step into the first rows, in place. Past its own table a row keeps old block numbers: kv_len says
        where its keys end."""
        B, width = step.block_table.shape
        self._pad(B)
        self.live = B
        self.tokens[:B].copy_(step.tokens)
        self.positions[:B].copy_(step.positions)
        self.slots[:B].copy_(step.slots)
        self.block_table[:B, :width].copy_(step.block_table)
        self.kv_len[:B].copy_(step.kv_len)

    def _pad(self, begin: int) -> None:
        """Rows from `begin` on become padding; those that are already are left alone."""
        if begin < self.live:
            for buffer, pad in self.padding:
                buffer[begin: self.live] = pad
            self.live = begin

    def _moved(self) -> bool:
        """Whether a weight is no longer the tensor that was captured, or no longer where it was."""
        return any(table.get(name) is not x or (kept is not None and x.data_ptr() != kept.data_ptr())
                   for table, name, x, kept in self.watched)

    def _forget(self) -> None:
        warnings.warn("the model's weights were replaced after CUDA graphs had been captured; capturing anew. Change "
                      "weights in place, or before the first step", stacklevel=4)
        self.graphs, self.watched = {}, []


def _watch(model: Callable) -> list[tuple]:
    """(table, name, what it holds, its data) of every parameter, buffer and submodule. The data is held, so that a
    graph never reads memory that was given away; the cache never replaces its K and V."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return [(table, name, x, x.detach() if isinstance(x, Tensor) else None)
            for module in modules for table in (module._parameters, module._buffers, module._modules)
            for name, x in table.items() if x is not None]


# ------------------------------------------------------------------ demo


def _demo() -> None:
    import time
    from types import SimpleNamespace

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    L, C, V, size = 12, 64, 100, 4
    draw = partial(torch.randn, dtype=torch.float64, device=device)
    embedding, weights = draw(V, C), [[draw(C, n) / C ** 0.5 for n in (3 * C, C)] for _ in range(L)]

    def model(tokens, positions, attend, rows):  # attention and one matrix a layer
        x = embedding[tokens] + positions[:, None] / 100
        for layer, (qkv, out) in enumerate(weights):
            x = x + attend(layer, *(x @ qkv).split(C, -1)).tanh() @ out
        return x[rows] @ embedding.T

    cache = SimpleNamespace(n_blocks=64, block_size=size, max_seq_len=32, device=device)
    k_pool, v_pool = ([draw(65 * size, C) for _ in range(L)] for _ in "kv")

    def attention(slots, block_table, kv_len, q_start, max_q, layer, q, k, v):  # one head, one new token a sequence
        k_pool[layer][slots], v_pool[layer][slots] = k, v
        at = torch.arange(block_table.shape[1] * size, device=device)
        slot = block_table[:, at // size].long() * size + at % size  # (B, S)
        scores = (k_pool[layer][slot] @ q[:, :, None])[..., 0] / C ** 0.5
        weights = scores.masked_fill(at >= kv_len[:, None], -torch.inf).softmax(-1)
        return (weights[:, None] @ v_pool[layer][slot])[:, 0]

    cache.attend_with = lambda *tensors: partial(attention, *tensors)

    def decode(B: int, t: int):  # the step in which each of B sequences of t tokens gets one more; 8 blocks for each
        table = torch.arange(8 * B, dtype=torch.int32, device=device).view(B, 8)[:, : t // size + 1]
        slots = table[:, t // size].long() * size + t % size
        kv_len, q_start = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([t + 1] * B, [*range(B + 1)]))
        return SimpleNamespace(
            tokens=torch.randint(V, (B,), device=device), positions=torch.full((B,), t, device=device), slots=slots,
            block_table=table, kv_len=kv_len, max_q=1, rows=torch.arange(B, device=device),
            attend=cache.attend_with(slots, table, kv_len, q_start, 1))

    def stand_in(fn):  # a CPU has no graphs: this one runs the same function on the same buffers
        return fn

    run = Graphs(model, cache, max_batch=6, capture=None if device.type == "cuda" else stand_in)
    print(f"Decode steps of 1 to 8 sequences on {device}, each in the smallest graph that holds it (sizes {run.sizes}, "
          f"tables of {run.width} blocks);\npadding writes to slot {64 * size}, behind the pool:\n")
    print("sequences  runs in  padding  graphs captured  largest difference from eager")
    for t, B in enumerate((1, 3, 2, 4, 6, 5, 8, 3)):
        step, eager = decode(B, t), run.eager
        graph, plain = run(step), model(step.tokens, step.positions, step.attend, step.rows)
        bucket = next((b for b in run.sizes if b >= B), 0) if run.eager == eager else 0
        print(f"{B:9}  {bucket or 'eager':>7}  {max(bucket - B, 0):7}  {sorted(run.graphs)!s:15}  "
              f"{(graph - plain).abs().max():.1e}")
    print(f"\n{run.replayed} steps were replayed, {run.eager} ran eagerly.")
    if device.type == "cuda":
        for name, f in (("eager", lambda s: model(s.tokens, s.positions, s.attend, s.rows)), ("replay", run)):
            step, took = decode(4, 20), []
            for _ in range(50):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                f(step)
                torch.cuda.synchronize()
                took.append(time.perf_counter() - begin)
            print(f"a step of 4 sequences, {L} layers, {name:6}: {sorted(took)[25] * 1e6:6.0f} us")


if __name__ == "__main__":
    _demo()
