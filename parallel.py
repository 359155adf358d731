"""parallel.py - one model on several devices: Megatron-style tensor parallelism on PyTorch's own torch.distributed.

    torchrun --nproc-per-node 3 generate.py "Why is the sky blue?"     gloo between CPUs, NCCL between GPUs

The one idea (Shoeybi et al. 2019, "Megatron-LM"): cut the first matrix of a pair by its outputs and the second one by
its inputs. Each rank then computes from end to end with its share of the heads, or of the MLP's units, and the ranks
speak once a pair, to add up what comes out:

            x (whole) --> q k v of my heads --> attention over my KV heads --> o: my columns --> partial sum --+
                                                                                                       all_reduce
            x (whole) <----------------------------------------------------------------------------------------+

    rank 0   q0 q1 q2  k0 v0     gate, up: units 0..511         down: columns 0..511         vocabulary 0..16383
    rank 1   q3 q4 q5  k1 v1     gate, up: units 512..1023      down: columns 512..1023      vocabulary 16384..32767

That is two all_reduce a layer, and one for the embedding, whose rows lie on the rank that has the id. The head's rows
are cut like the embedding's, and its logits are gathered on rank 0. Norms are on every rank. Fewer KV heads than ranks
are replicated: with 2 of them on 4 ranks, ranks 0 and 1 hold the first. The bias behind a sum is rank 0's alone, or it
would be added once a rank. Partial sums in 16 bits are added up in float32 and rounded once.

Nothing of this is in the model or in the cache. A rank's model is an ordinary one of fewer heads, made of slices, with
three kinds of layers wrapped; its cache is an ordinary one of fewer heads.

    group  = join()                                           what torchrun has started
    config = shard_config(whole, group.rank, group.size)
    model  = Llama.from_tensors(config, Shards(tensors, whole, group.rank, group.size))
    parallelize_(model, whole, group).fuse_()
    rank 0:   Batcher(..., forward=Leader(model, cache, group));  group.close()
    others:   follow(model, cache, group)

Rank 0 alone reads, schedules, samples and prints: nothing is decided twice, so ranks cannot disagree. It sends each
step's index tensors, in which the sampled ids are; the others compute what these say, on blocks of the same numbers.
What the cache of rank 0 copies on write, they copy. They wait for the next step as long as it takes, and a connection
that breaks ends everybody: there is no way to go on with a share of a model.

Why not DTensor and `parallelize_module`: it has no rule for the operations on packed 4-bit weights, and it cannot
replicate single KV heads (Shard cuts evenly, Replicate copies all of them). Its process groups are what this file uses.

Left out on purpose: pipeline, sequence and expert parallelism, overlap of communication and computation, elastic
restarts, swapping of preempted samples (`import_` of the cache is not told to the others). A rank that hangs, or a
machine that vanishes without closing its connections, is noticed after PATIENCE only.

Shapes: N packed tokens, R rows of logits, H query heads, G key/value heads, D head_dim, F units of the MLP,
V vocabulary, C hidden_size.
"""
from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

JOIN_S = 60.0  # so long a rank waits for the others to start
PATIENCE = timedelta(minutes=10)  # and so long within a step: for one that hangs, a dead one is noticed at once
FOREVER = timedelta(days=3650)  # between steps: a conversation may rest overnight
STOP, CHECK, STEP = range(3)  # what rank 0 sends
PARTS = 9  # tensors of a step

# ------------------------------------------------------------------ who holds what


def share(n: int, rank: int, size: int) -> tuple[int, int]:
    """The run [begin, end) of n things that a rank holds.

    >>> [share(49152, r, 3) for r in range(3)], [share(10, r, 3) for r in range(3)]
    ([(0, 16384), (16384, 32768), (32768, 49152)], [(0, 3), (3, 6), (6, 10)])
    """
    return n * rank // size, n * (rank + 1) // size


def kv_heads(n_kv_head: int, rank: int, size: int) -> tuple[int, int]:
    """The KV heads [begin, end) that a rank holds: its share, or the one that its query heads need.

    >>> [kv_heads(2, r, 4) for r in range(4)], [kv_heads(8, r, 2) for r in range(2)]
    ([(0, 1), (0, 1), (1, 2), (1, 2)], [(0, 4), (4, 8)])
    """
    if n_kv_head >= size:
        return share(n_kv_head, rank, size)
    return rank * n_kv_head // size, rank * n_kv_head // size + 1


def check_ranks(config, size: int) -> None:
    """ValueError, with the counts that would work, unless `size` ranks can share this model."""
    H, G, units, V = config.n_head, config.n_kv_head, config.intermediate_size, config.vocab_size

    def works(n: int) -> bool:
        return H % n == 0 and units % n == 0 and (G % n == 0 or n % G == 0) and n <= V

    if not works(size):
        counts = ", ".join(str(n) for n in range(1, H + 1) if works(n))
        raise ValueError(f"{H} query heads, {G} key/value heads and {units} units of the MLP cannot be shared out by "
                         f"{size} ranks; the numbers of ranks that work for this model are {counts}")


def shard_config(config, rank: int, size: int):
    """The config of a rank's own, smaller model."""
    check_ranks(config, size)
    begin, end = share(config.vocab_size, rank, size)
    return replace(config, n_head=config.n_head // size, n_kv_head=max(1, config.n_kv_head // size),
                   intermediate_size=config.intermediate_size // size, vocab_size=end - begin)


class Shards(Mapping):
    """Name -> this rank's slice of a tensor, or of a packed weight (codes, scales, ...: see packed.py).

    Slices are copies. Of a memory-mapped tensor nothing else is read, and of one that is decoded when it is asked for,
    nothing else stays in memory. `sizes` counts the weights of what was asked for, before it was cut.
    """

    def __init__(self, tensors: Mapping, config, rank: int, size: int):
        check_ranks(config, size)
        self.tensors, self.rank, self.sizes = tensors, rank, {}
        H, G, D, units = config.n_head, config.n_kv_head, config.head_dim, config.intermediate_size
        q, kv = ((n * D, *(D * i for i in cut)) for n, cut in ((H, share(H, rank, size)), (G, kv_heads(G, rank, size))))
        mlp, vocab = ((n, *share(n, rank, size)) for n in (units, config.vocab_size))
        self.rows = {"q_proj": q, "k_proj": kv, "v_proj": kv, "gate_proj": mlp, "up_proj": mlp, "embed_tokens": vocab,
                     "lm_head": vocab}  # layer -> rows in all, first, end
        self.columns = {"o_proj": q, "down_proj": mlp}

    def __getitem__(self, name: str) -> torch.Tensor | dict:
        weight, (owner, _, leaf) = self.tensors[name], name.rpartition(".")
        shape, layer = (weight["codes"] if isinstance(weight, Mapping) else weight).shape, owner.rpartition(".")[2]
        self.sizes[name] = shape.numel()
        if layer in self.columns and leaf == "bias":
            return weight if self.rank == 0 else torch.zeros_like(weight)
        for dim, cuts, what in ((0, self.rows, "rows"), (1, self.columns, "columns")):
            if layer in cuts:
                total, begin, end = cuts[layer]
                if len(shape) <= dim or shape[dim] != total:  # a slice might fit by chance
                    raise ValueError(f"{name} has shape {tuple(shape)}, but the config asks for {total} {what}")
                return (_rows if dim == 0 else _columns)(weight, begin, end)
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name) -> bool:
        return name in self.tensors


def _rows(weight: torch.Tensor | Mapping, begin: int, end: int) -> torch.Tensor | dict:
    if isinstance(weight, torch.Tensor):
        return weight[begin:end].clone()
    parts = ("codes", "scales", "zeros", "mins")
    return {**weight, **{k: weight[k][begin:end].clone() for k in parts if weight[k] is not None}}


def _columns(weight: torch.Tensor | Mapping, begin: int, end: int) -> torch.Tensor | dict:
    if isinstance(weight, torch.Tensor):
        return weight[:, begin:end].clone(memory_format=torch.contiguous_format)
    K, groups, g_idx = weight["codes"].shape[1], weight["scales"].shape[1], weight["g_idx"]
    if g_idx is not None:  # act-order: columns of any group may be here; the groups that are, in order
        used, mine = torch.unique(g_idx[begin:end], return_inverse=True)
        g_idx = mine.to(g_idx.dtype)
    else:  # subtle: a cut may go through a group. Then groups become as short as they must be, with equal scales.
        run = math.gcd(K // groups, end - begin)
        used = torch.arange(begin // run, end // run, device=weight["scales"].device) * run // (K // groups)
    parts = {k: weight[k][:, used] for k in ("scales", "zeros", "mins") if weight[k] is not None}
    return {**weight, **parts, "codes": _columns(weight["codes"], begin, end), "g_idx": g_idx}


# ------------------------------------------------------------------ layers that speak


class RowParallel(nn.Module):
    """A linear layer of which every rank has some of the inputs: x (*, my inputs) -> (*, all outputs), on all ranks."""

    def __init__(self, inner: nn.Module, group: Group):
        super().__init__()
        self.inner, self.group = inner, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.group.sum(self.inner(x))


class VocabEmbedding(nn.Module):
    """An embedding of which every rank has the ids [begin, end): ids (*) -> (*, C), on all ranks."""

    def __init__(self, inner: nn.Module, begin: int, end: int, group: Group):
        super().__init__()
        self.inner, self.begin, self.end, self.group = inner, begin, end, group

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        others = (ids < self.begin) | (ids >= self.end)
        x = self.inner((ids - self.begin).clamp(0, self.end - self.begin - 1))
        return self.group.sum(x.masked_fill(others[..., None], 0))

    @property
    def weight(self) -> torch.Tensor:  # of a tied head
        return self.inner.weight


def parallelize_(model: nn.Module, config, group: Group) -> nn.Module:
    """Make of a rank's own model, a Llama of slices, its part of the whole one, whose config this is. In place.

    Its logits are (R, my share of V), which Leader and follow bring together.
    """
    for block in model.model["layers"]:
        block.self_attn.o_proj = RowParallel(block.self_attn.o_proj, group)
        block.mlp.down_proj = RowParallel(block.mlp.down_proj, group)
    mine = share(config.vocab_size, group.rank, group.size)
    model.model["embed_tokens"] = VocabEmbedding(model.model["embed_tokens"], *mine, group)
    model.config = config  # what others ask of a model is the whole one's
    return model


# ------------------------------------------------------------------ the ranks


class RankLost(SystemExit):
    """The ranks have lost each other, or the step that they were in. No error to be caught: nothing can be computed
    any more."""


def launched() -> bool:
    """Whether torchrun, or something like it, has started several of us."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "1") and "RANK" in os.environ and "MASTER_ADDR" in os.environ


def join(wait_s: float = JOIN_S) -> Group:
    """The group of all ranks that torchrun started. ValueError if they do not come together within wait_s."""
    wait, gpu = timedelta(seconds=wait_s), torch.cuda.is_available() and dist.is_nccl_available()
    number, ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not (number.isdecimal() and ranks.isdecimal() and int(number) < int(ranks)):
        raise ValueError(f"RANK is {number!r} and WORLD_SIZE {ranks!r}; ranks count from 0 to WORLD_SIZE - 1")
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=wait))
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", store=store, rank=rank, world_size=size,
                                timeout=wait)
        return Group(store, rank, size)
    except (ValueError, RuntimeError) as error:  # DistError is a RuntimeError
        raise ValueError(f"rank {number} did not find the {ranks} ranks that "
                         f"WORLD_SIZE speaks of within {wait_s:g} s ({str(error).splitlines()[0]:.120})") from None


class Group:
    """All ranks: what they exchange, and `bytes`, `calls` and `seconds` of each kind of it on this rank (on a GPU the
    seconds are those of the launch)."""

    def __init__(self, store, rank: int, size: int):
        self.store, self.rank, self.size, self.lost = store, rank, size, False
        self.local_rank = int(os.environ.get("LOCAL_RANK", rank))  # on this machine
        self.work, self.plans = dist.new_group(timeout=PATIENCE), dist.new_group(backend="gloo", timeout=FOREVER)
        self.bytes, self.calls, self.seconds = Counter(), Counter(), Counter()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, on every rank. 16 bits are added up in float32: 256 + 1 + 1 is 258, not 256."""
        total = (x if x.dtype in (torch.float32, torch.float64) else x.float()).contiguous()
        begin = time.perf_counter()
        dist.all_reduce(total, group=self.work)
        self._count("all_reduce", total.nbytes, begin)
        return total.to(x.dtype)

    def gather(self, x: torch.Tensor, total: int) -> torch.Tensor:
        """x (R, share of total) of all ranks side by side, (R, total), on rank 0; x elsewhere."""
        widths = [end - begin for begin, end in (share(total, r, self.size) for r in range(self.size))]
        mine = F.pad(x, (0, max(widths) - x.shape[-1])).contiguous()
        parts = [torch.empty_like(mine) for _ in widths] if self.rank == 0 else None
        begin = time.perf_counter()
        dist.gather(mine, parts, group=self.work)
        self._count("gather", mine.nbytes, begin)
        return torch.cat([p[..., :n] for p, n in zip(parts, widths)], -1) if self.rank == 0 else x

    def announce(self, kind: int, numbers: list[int] | tuple[()] = (), body: torch.Tensor | None = None) -> None:
        """From rank 0 to all others: what comes now, and the body (int64, on the CPU) whose parts have these sizes."""
        begin, header = time.perf_counter(), torch.tensor([kind, *numbers, *[0] * (PARTS + 1 - len(numbers))])
        dist.broadcast(header, 0, group=self.plans)
        if body is not None:
            dist.broadcast(body, 0, group=self.plans)
        self._count("plan", header.nbytes + (0 if body is None else body.nbytes), begin)

    def listen(self) -> tuple[int, int, list[torch.Tensor]]:
        """On all others: the kind of what rank 0 announces, one number, and the parts of its body."""
        header = torch.empty(PARTS + 2, dtype=torch.int64)
        dist.broadcast(header, 0, group=self.plans)
        kind, number, *sizes = header.tolist()
        if kind != STEP:
            return kind, number, []
        body = torch.empty(sum(sizes), dtype=torch.int64)
        dist.broadcast(body, 0, group=self.plans)
        return kind, number, list(body.split(sizes))

    def check(self, **facts) -> None:
        """ValueError, on every rank, unless all ranks say the same of each of these facts (anything that is JSON).
        SystemExit on the others if rank 0 has ended before it came here."""
        digests = [hashlib.sha256(json.dumps(x, sort_keys=True, default=str).encode()).digest() for x in facts.values()]
        mine = torch.tensor([int.from_bytes(d[:7], "little") for d in digests])
        if self.rank == 0:
            self.announce(CHECK)
        elif self.listen()[0] == STOP:
            sys.exit(0)
        said = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(said, mine, group=self.plans)
        for i, name in enumerate(facts):
            others = [str(r) for r, theirs in enumerate(said) if theirs[i] != said[0][i]]
            if others:
                raise ValueError(f"rank{'s' * (len(others) > 1)} {', '.join(others)} of {self.size} and rank 0 differ "
                                 f"in {name.replace('_', ' ')}; start all ranks with the same model and flags")

    def tell(self, message: str) -> None:
        """Print a message on standard error, if no other rank has said anything: what follows is a consequence."""
        try:
            first = self.store.add("told", 1) == 1
        except RuntimeError:  # the store has gone with rank 0, which had hosted it
            first = self.rank == 1
        if first and sys.stderr is not None:
            print(message, file=sys.stderr, flush=True)

    def close(self) -> None:
        """The end for this rank, and if it is rank 0, for all."""
        if self.rank == 0 and not self.lost:
            with suppress(RuntimeError):  # some may have ended already
                self.announce(STOP)
        dist.destroy_process_group()

    def _count(self, kind: str, n_bytes: int, begin: float) -> None:
        self.bytes[kind] += n_bytes
        self.calls[kind] += 1
        self.seconds[kind] += time.perf_counter() - begin  # type: ignore[assignment]


# ------------------------------------------------------------------ one step on all ranks


class Leader:
    """forward(step) -> logits (R, V), on rank 0: every rank computes this step now.

    run(step, rows) computes this rank's part, if not the model itself does (CUDA graphs; then all ranks need them).
    Any exception in the middle of a step is RankLost, since the others cannot be called back out of theirs.
    """

    def __init__(self, model: Callable, cache, group: Group, run: Callable | None = None):
        self.cache, self.group, self.run = cache, group, run or _eagerly(model)
        self.vocab_size = model.config.vocab_size  # type: ignore[attr-defined]
        # subtle: a pool of one number a block, which the cache copies along when it copies a block on write. So after
        # any steps that were planned, computed or not, it says where the content of each block was at the last one.
        self.origin, self.numbers = (torch.arange(cache.n_blocks + 1) for _ in range(2))
        pools, origin = cache._pools(), self.origin
        cache._pools = lambda: [*pools, origin]

    def __call__(self, step, rows: torch.Tensor | None = None) -> torch.Tensor:
        if self.group.lost:
            raise RankLost("the ranks have lost each other before; start all of them again")
        rows, copies = step.rows if rows is None else rows, (self.origin != self.numbers).nonzero()[:, 0]
        parts = [step.tokens, step.positions, step.slots, rows, step.block_table.flatten(), step.kv_len, step.q_start]
        body = torch.cat([p.long() for p in parts]).cpu()
        body = torch.cat([body, self.origin[copies], copies])
        self.group.lost = True  # until this step has been computed
        try:
            self.group.announce(STEP, [step.max_q, *map(len, parts), len(copies), len(copies)], body)
            self.origin.copy_(self.numbers)
            logits = self.group.gather(self.run(step, rows), self.vocab_size)
        except Exception as error:
            raise lost(self.group, error) from error
        self.group.lost = False
        return logits


def follow(model: Callable, cache, group: Group, run: Callable | None = None) -> None:
    """On every rank but 0: take part in each step, until rank 0 closes the group. RankLost if that cannot be."""
    run, attention, memo = run or _eagerly(model), cache.attention, {}
    # The cache's attend_with keeps no memo, as its tensors may change; here they do not within a step.
    cache.attention = lambda *args, **kwargs: attention(*args, **{**kwargs, "memo": memo})
    try:
        with torch.inference_mode():
            while True:
                kind, max_q, parts = group.listen()
                if kind == STOP:
                    return
                *parts, origin, copies = parts
                tokens, positions, slots, rows, *short = parts
                first, n = int(slots[0]), len(slots)
                run_of = slice(first, first + n) if torch.equal(slots, torch.arange(first, first + n)) else None
                on = torch.cat(parts).to(cache.device).split([len(p) for p in parts])
                tokens, positions, slots, rows, *short = on
                block_table, kv_len, q_start = (x.int() for x in short)
                block_table = block_table.view(len(kv_len), -1)
                _copy_blocks(cache, origin.tolist(), copies.tolist())
                memo.clear()
                attend = cache.attend_with(run_of or slots, block_table, kv_len, q_start, max_q)
                step = SimpleNamespace(tokens=tokens, positions=positions, slots=slots, rows=rows, attend=attend,
                                       block_table=block_table, kv_len=kv_len, q_start=q_start, max_q=max_q)
                group.gather(run(step, rows), model.config.vocab_size)  # type: ignore[attr-defined]
    except Exception as error:
        raise lost(group, error) from error
    finally:
        cache.attention = attention


def lost(group: Group, error: Exception) -> RankLost:
    """What to raise, and to say, after an exception in the middle of a step."""
    group.lost, why = True, f"{str(error) or type(error).__name__}".splitlines()[0][:200]
    closed = "Connection closed" in why or "reset by peer" in why or "Broken pipe" in why
    return RankLost(f"another of the {group.size} ranks has ended; start all of them again (rank {group.rank}: {why})"
                    if closed else f"rank {group.rank} of {group.size} failed, and all end with it: {why}")


def _copy_blocks(cache, origin: list[int], copies: list[int]) -> None:
    for pool in (*cache.k, *cache.v, *(cache.k_scale or ()), *(cache.v_scale or ())):
        contents = [pool[block].clone() for block in origin]  # all before any is written: one may be another's origin
        for block, content in zip(copies, contents):
            pool[block].copy_(content)


def _eagerly(model: Callable) -> Callable:
    return lambda step, rows: model(step.tokens, step.positions, step.attend, rows)


# ------------------------------------------------------------------ demo


def _demo_rank(rank: int, size: int, environment: dict) -> None:
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    group = join()
    whole = SimpleNamespace(n_head=4, n_kv_head=2, head_dim=8, intermediate_size=96, vocab_size=50)
    tensors = {"embed_tokens.weight": torch.randn(50, 32), "up_proj.weight": torch.randn(96, 32) / 6,
               "down_proj.weight": torch.randn(32, 96) / 10, "norm.weight": torch.ones(32)}
    mine = Shards(tensors, whole, rank, size)

    def layer(weight):
        made = nn.Linear(*weight.shape[::-1], bias=False, device="meta").requires_grad_(False)
        made.weight = nn.Parameter(weight, requires_grad=False)
        return made

    embed = VocabEmbedding(nn.Embedding.from_pretrained(mine["embed_tokens.weight"]), *share(50, rank, size), group)
    up, down = layer(mine["up_proj.weight"]), RowParallel(layer(mine["down_proj.weight"]), group)
    ids = torch.tensor([3, 49, 20])
    x = embed(ids)
    y = x + down(F.silu(up(x)))
    logits = group.gather(y @ embed.weight.T, 50)
    if rank == 0:
        for name, tensor in mine.items():
            print(f"  {name:20} {tuple(tensors[name].shape)!s:9} on each of {size} ranks {tuple(tensor.shape)}")
        x = tensors["embed_tokens.weight"][ids]
        whole_y = x + F.silu(x @ tensors["up_proj.weight"].T) @ tensors["down_proj.weight"].T
        print(f"\nThe logits {tuple(logits.shape)} differ from one process's by "
              f"{(logits - whole_y @ tensors['embed_tokens.weight'].T).abs().max():.0e}. What was exchanged for them:")
        for kind, n in group.bytes.items():
            print(f"  {kind:10}  {group.calls[kind]} times  {n:4} bytes on rank 0")
    group.close()


def _demo() -> None:
    from torch.multiprocessing import spawn

    print("The KV heads [begin, end) of each rank:")
    for n, size in ((3, 3), (8, 2), (2, 4)):
        print(f"  {n} heads on {size} ranks: {', '.join(str(list(kv_heads(n, r, size))) for r in range(size))}")
    print("\nTwo processes share an embedding, an MLP and a head:")
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # torchrun has one like it
    spawn(_demo_rank, (2, {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
                           "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}), nprocs=2)


if __name__ == "__main__":
    _demo()
