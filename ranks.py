"""ranks.py - several processes that compute in step on torch.distributed: rank 0 decides, the others do the same.

    torchrun --nproc-per-node 3 generate.py "Why is the sky blue?"     gloo between CPUs, NCCL between GPUs

The one idea: nothing is decided twice, so ranks cannot disagree. Rank 0 alone reads, schedules, samples and prints. It
sends each step's index tensors, in which the sampled ids are; the others compute what these say, on blocks of the same
numbers in caches of their own. What the cache of rank 0 copies on write, they copy.

    rank 0   schedule --> step --> announce ~~~+--> compute --> gather --> sample --> schedule ...
                                               |        (sums within, see `sum`)
    others   listen .......................... +--> compute --> gather --> listen ................

    group = join()                                            what torchrun has started
    rank 0:   Batcher(..., forward=Leader(model, cache, group));  group.close()
    others:   follow(model, cache, group)

And nobody waits for the dead. All ranks meet first, within seconds, or one says who is missing and all end. They check
that they hold the same model, as they say themselves. Between steps they wait as long as it takes; a connection that
breaks ends everybody, with one line in all: there is no way to go on with a share of a model.

Of the model, a rank's part of one: model(tokens, positions, attend, rows) -> logits (R, its `share` of V), and
config.vocab_size, the V of all. Of the cache: n_blocks, copy_along, attend_with, attention, device and the pools k, v,
k_scale, v_scale.

Left out on purpose: elastic restarts, swapping of preempted samples (`import_` of the cache is not told to the others).
A rank that hangs, or a machine that vanishes without closing its connections, is noticed after PATIENCE only.

Shapes: N packed tokens, R rows of logits, V vocabulary.
"""
from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import islice
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

JOIN_S = 20.0  # so long a rank waits for the others to come: torchrun starts all at once, and torch loads in seconds
PATIENCE = timedelta(minutes=10)  # and so long within a step: for one that hangs, a dead one is noticed at once
FOREVER = timedelta(days=3650)  # between steps: a conversation may rest overnight
POLL_S, LINGER_S = 0.05, 0.5  # how often those who wait look up; how long a host of the store stays to be asked
STOP, CHECK, STEP = range(3)  # what rank 0 announces
PARTS = 9  # tensors of a step

# ------------------------------------------------------------------ the ranks meet


class RankLost(SystemExit):
    """The ranks have lost each other, or the step that they were in. No error to be caught: nothing can be computed
    any more."""


def launched() -> bool:
    """Whether torchrun, or something like it, has started several of us."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "1") and "RANK" in os.environ


def join(wait_s: float | None = None) -> Group:
    """The group of all ranks that torchrun, or who sets its variables by hand, has started.

    If they do not come together within wait_s (None: $JOIN_SECONDS, else JOIN_S), one rank raises a ValueError that
    says why, and the others end with SystemExit.
    """
    rank, size, wait_s = _numbers(wait_s)
    wait, gpu = timedelta(seconds=wait_s), torch.cuda.is_available() and dist.is_nccl_available()
    agent, where = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True", ("MASTER_ADDR", "MASTER_PORT")
    host, port = (os.environ.get(name, "") for name in where)
    if not host or not (port.isdecimal() and int(port) < 2**16):
        raise ValueError(f"{where[0]} is {host!r} and {where[1]} {port!r}; set them to where rank 0 can be reached")
    try:  # as torch's rendezvous makes it, which would wait for all in there
        store = dist.TCPStore(host, int(port), None, rank == 0 and not agent, wait, wait_for_workers=False)
    except RuntimeError as error:
        raise ValueError(f"rank {rank} has found no rank 0 at {host}:{port} within {wait_s:g} s; start it, or wait "
                         f"longer for slow machines: JOIN_SECONDS={5 * wait_s:.0f}" if rank or agent else
                         f"rank 0 cannot be found at port {port} ({_reason(error)}); set another MASTER_PORT") from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # of --max-restarts, in the same store
    store = dist.PrefixStore(f"ranks {attempt}", store)
    try:
        why = _meet(store, rank, size, wait_s)
        if why is None:
            dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", store=store, rank=rank, world_size=size,
                                    timeout=wait)
            return Group(store, rank, size)
    except RuntimeError as error:
        why = f"rank {rank} lost the others while they came together ({_reason(error)}); start all of them again"
    first = why and _first(store, "end", rank)
    if rank == 0 and not agent:
        time.sleep(LINGER_S)  # the others ask the store that is hosted here
    if first:
        raise ValueError(why)
    sys.exit(2)


def _numbers(wait_s: float | None) -> tuple[int, int, float]:
    rank, size, wait = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "JOIN_SECONDS"))
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise ValueError(f"RANK is {rank!r} and WORLD_SIZE {size!r}; ranks count from 0 to WORLD_SIZE - 1")
    if wait and not (wait.isdecimal() and 0 < int(wait) <= 86400):
        raise ValueError(f"JOIN_SECONDS is {wait!r}, but must be a whole number from 1 to 86400")
    return int(rank), int(size), wait_s if wait_s is not None else float(wait or JOIN_S)


def _meet(store, rank: int, size: int, wait_s: float) -> str | None:
    """None as soon as all ranks are here; what is wrong if they are not, or not the ones that this one expects; "" if
    another rank has found that out."""
    begin, others = time.monotonic(), int(store.compare_set("size", "", str(size)))
    if others != size:
        return f"WORLD_SIZE is {size} on rank {rank} and {others} on another one; start all ranks with the same number"
    if store.add(f"rank {rank}", 1) > 1:
        return f"two processes have RANK {rank}; give each of the {size} a number of its own, from 0 to {size - 1}"
    here = store.add("here", 1)
    while here < size:
        if store.check(["end"]):
            return ""
        if time.monotonic() - begin > wait_s:
            missing = islice((r for r in range(size) if not store.check([f"rank {r}"])), 5)
            return (f"within {wait_s:g} s only {here} of the {size} ranks that WORLD_SIZE speaks of have come, but not "
                    f"{', '.join(map(str, missing))}{', ...' if size - here > 5 else ''}; start them too, or wait "
                    f"longer for slow machines: JOIN_SECONDS={5 * wait_s:.0f}")
        time.sleep(POLL_S)
        here = store.add("here", 0)
    return None


def _first(store, key: str, rank: int) -> bool:
    """Whether nobody has said so before."""
    try:
        return store.add(key, 1) == 1
    except RuntimeError:  # the store has gone with rank 0, which had hosted it
        return rank == 1


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


# ------------------------------------------------------------------ what they exchange


def share(n: int, rank: int, size: int) -> tuple[int, int]:
    """The run [begin, end) of n things that a rank holds.

    >>> [share(49152, r, 3) for r in range(3)], [share(10, r, 3) for r in range(3)]
    ([(0, 16384), (16384, 32768), (32768, 49152)], [(0, 3), (3, 6), (6, 10)])
    """
    return n * rank // size, n * (rank + 1) // size


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

    def announce(self, kind: int, number: int = 0, parts: Sequence[torch.Tensor] = ()) -> None:
        """From rank 0 to all others: what comes now, with a number and at most PARTS runs of
        whole numbers, on the CPU."""
        sizes = [*map(len, parts), *[0] * (PARTS - len(parts))]
        begin, header = time.perf_counter(), torch.tensor([kind, number, *sizes])
        body = torch.cat([p.long() for p in parts]) if sum(sizes) else header[:0]
        dist.broadcast(header, 0, group=self.plans)
        if len(body):
            dist.broadcast(body, 0, group=self.plans)
        self._count("plan", header.nbytes + body.nbytes, begin)

    def listen(self) -> tuple[int, int, list[torch.Tensor]]:
        """On all others: what rank 0 announces, the kind, the number and the parts (int64, on the CPU)."""
        header = torch.empty(PARTS + 2, dtype=torch.int64)
        dist.broadcast(header, 0, group=self.plans)
        kind, number, *sizes = header.tolist()
        body = torch.empty(sum(sizes), dtype=torch.int64)
        if len(body):
            dist.broadcast(body, 0, group=self.plans)
        return kind, number, list(body.split(sizes))

    def check(self, **facts) -> None:
        """ValueError, on every rank, unless all ranks say the same of each of these facts (anything that is JSON).
        SystemExit on the others if rank 0 has ended before it came here, RankLost if a rank dies here."""
        digests = [hashlib.sha256(json.dumps(x, sort_keys=True, default=str).encode()).digest() for x in facts.values()]
        mine = torch.tensor([int.from_bytes(d[:7], "little") for d in digests])
        said = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            if self.rank == 0:
                self.announce(CHECK)
            elif self.listen()[0] == STOP:
                sys.exit(0)
            dist.all_gather(said, mine, group=self.plans)
        except RuntimeError as error:
            raise lost(self, error) from error
        for i, name in enumerate(facts):
            others = [str(r) for r, theirs in enumerate(said) if theirs[i] != said[0][i]]
            if others:
                raise ValueError(f"rank{'s' * (len(others) > 1)} {', '.join(others)} of {self.size} and rank 0 differ "
                                 f"in {name.replace('_', ' ')}; start all ranks with the same model and flags")

    def tell(self, message: str | None) -> None:
        """Print a message on standard error, if no other rank has said anything: what follows is a consequence. None:
        nothing went wrong, and nobody is to say anything."""
        if _first(self.store, "told", self.rank) and message is not None and sys.stderr is not None:
            print(message, file=sys.stderr, flush=True)

    def close(self) -> None:
        """The end for this rank, and if it is rank 0, for all."""
        if self.rank == 0 and not self.lost:
            with suppress(RuntimeError):  # some may have ended already
                self.announce(STOP)
        self.work = self.plans = None  # the last references: the connections are closed now
        dist.destroy_process_group()
        if self.rank == 0 and self.lost:
            time.sleep(LINGER_S)  # the others, who notice it, ask the store, which may be hosted here, if all is said

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
        self.group, self.run = group, run or _eagerly(model)
        self.vocab_size = model.config.vocab_size  # type: ignore[attr-defined]
        # subtle: one number a block, which the cache copies along when it copies a block on write. So after any steps
        # that were planned, computed or not, it says where the content of each block was at the last one.
        self.origin, self.numbers = (torch.arange(cache.n_blocks + 1) for _ in range(2))
        cache.copy_along(self.origin)

    def __call__(self, step, rows: torch.Tensor | None = None) -> torch.Tensor:
        if self.group.lost:
            raise RankLost("the ranks have lost each other before; start all of them again")
        rows, copies = step.rows if rows is None else rows, (self.origin != self.numbers).nonzero()[:, 0]
        parts = [step.tokens, step.positions, step.slots, rows, step.block_table.flatten(), step.kv_len, step.q_start]
        body = torch.cat([p.long() for p in parts]).cpu()  # one copy from the device
        parts = [*body.split([len(p) for p in parts]), self.origin[copies], copies]
        self.group.lost = True  # until this step has been computed
        try:
            self.group.announce(STEP, step.max_q, parts)
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
                _copy_blocks(cache, origin.tolist(), copies.tolist())
                memo.clear()
                step = _step(cache, max_q, parts)
                group.gather(run(step, step.rows), model.config.vocab_size)  # type: ignore[attr-defined]
    except Exception as error:
        raise lost(group, error) from error
    finally:
        cache.attention = attention


def _step(cache, max_q: int, parts: list[torch.Tensor]) -> SimpleNamespace:
    """What rank 0's cache has planned, on this one's cache and device."""
    slots, first = parts[2], int(parts[2][0])
    run = slice(first, first + len(slots)) if torch.equal(slots, torch.arange(first, first + len(slots))) else None
    tokens, positions, slots, rows, *short = torch.cat(parts).to(cache.device).split([len(p) for p in parts])
    block_table, kv_len, q_start = (x.int() for x in short)
    block_table = block_table.view(len(kv_len), -1)
    attend = cache.attend_with(slots if run is None else run, block_table, kv_len, q_start, max_q)
    return SimpleNamespace(tokens=tokens, positions=positions, slots=slots, rows=rows, attend=attend,
                           block_table=block_table, kv_len=kv_len, q_start=q_start, max_q=max_q)


def lost(group: Group, error: Exception) -> RankLost:
    """What to raise, and to say, after an exception in the middle of a step."""
    group.lost, why = True, _reason(error)
    if "Connection closed" in why or "reset by peer" in why or "Broken pipe" in why:
        return RankLost(f"another of the {group.size} ranks has ended; start all of them again (rank {group.rank} lost "
                        "its connection)")
    return RankLost(f"rank {group.rank} of {group.size} failed, and all end with it: {why}")


def _copy_blocks(cache, origin: list[int], copies: list[int]) -> None:
    for pool in (*cache.k, *cache.v, *(cache.k_scale or ()), *(cache.v_scale or ())):
        contents = [pool[block].clone() for block in origin]  # all before any is written: one may be another's origin
        for block, content in zip(copies, contents):
            pool[block].copy_(content)


def _eagerly(model: Callable) -> Callable:
    return lambda step, rows: model(step.tokens, step.positions, step.attend, rows)


# ------------------------------------------------------------------ demo


def _demo_rank(rank: int, port: int) -> None:
    """Chooses the next token from logits of which each rank has a share, as a sum over inputs that they share, too."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                      TORCHELASTIC_USE_AGENT_STORE="True")
    torch.set_num_threads(1)
    group = join()
    embedding, head = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
    group.check(the_weights=[embedding.tolist(), head.tolist()])
    inputs, outputs = (slice(*share(n, rank, group.size)) for n in (16, 7))
    token = 3
    for step in range(5):
        if step == 4 and rank == 1:
            os._exit(1)
        try:
            if rank == 0:
                group.announce(STEP, step, [torch.tensor([token])])
            else:
                token = int(group.listen()[2][0])  # whatever it would have chosen
            x = group.sum(embedding[token, inputs] @ torch.eye(16)[inputs])
            logits = group.gather((x @ head[outputs].T)[None], 7)
        except RuntimeError as error:
            print(f"step {step}: {lost(group, error)}")
            break
        if rank == 0:
            said, token = token, int(logits.argmax())
            print(f"step {step}: token {said}, {group.bytes['plan'] // (step + 2)} bytes announced, "
                  f"{group.bytes['all_reduce'] // (step + 1)} added up, {logits.shape[1]} logits, so token {token}")
    group.close()


def _demo() -> None:
    from multiprocessing import get_context

    print("Two ranks: 0 decides, 1 does the same, until it dies at step 4.")
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # torchrun has one like it
    ranks = [get_context("spawn").Process(target=_demo_rank, args=(rank, store.port)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


if __name__ == "__main__":
    _demo()
