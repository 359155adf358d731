"""replicas.py - several copies of a model over one stream of requests: who gets which.

The one idea: a prompt is cheap where its beginning is known already. Each replica has a prefix cache of its own, so a
request goes where the longest beginning of its prompt went before, and not where the next free place is: with random
routing every replica computes, and keeps, every common beginning.

    prompts   system A + question 1, system B + question 2, system A + question 3, system C + ...
    random    replica 0: A B C D ...   replica 1: A B C D ...      each beginning computed twice, each cache full of all
    routed    replica 0: A C ...       replica 1: B D ...

The one exception (Zheng et al. 2024, "SGLang", whose router does the same): where that replica has `slack` requests
more to do than the idlest one, the idlest gets it, and knows this beginning from then on. So a beginning that
everybody has does not end up on one replica alone.

A prompt is cut into blocks, and a block is known by a hash of all that is before it and of itself, as in a paged KV
cache. The router keeps the hashes of what it sent where, the latest `most` of each replica, and looks at nothing else:
the prompts may be texts or lists of ids, and nobody asks a replica what its cache holds.

`Replicas` runs each replica in a process of its own, sends items and hands on what comes back. A process that dies
ends it, with the number of the replica. A Ctrl-C is for the process that started them: it ends them, and they say
nothing.
Left out on purpose: replicas on other machines, moving requests that have begun, weighing prompts by their length.
"""
from __future__ import annotations

import signal
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import count
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

GRACE_S = 5.0  # so long a process that is told to end may take
POLL_S = 0.02  # how often to ask for items that are slow to come

# ------------------------------------------------------------------ who gets which


class Router:
    """route(prompt) -> the replica, from 0 to n - 1; done(replica) when it has answered.

    block   characters or ids of a block: what two prompts share beyond whole blocks does not count
    slack   so many more requests than the idlest one a replica may have for the sake of a known beginning
    most    hashes kept for each replica; the blocks of its KV cache are a good number

    >>> router = Router(2, block=4, slack=8)
    >>> [router.route(text) for text in ("You are a cat. Hello", "You are Bob", "You are a cat. Miau", "Hi", "You a")]
    [0, 0, 0, 1, 0]
    """

    def __init__(self, n: int, block: int = 64, slack: int = 8, most: int = 1 << 16):
        for name, value, least in (("n", n, 1), ("block", block, 1), ("slack", slack, 0), ("most", most, 1)):
            if value < least:
                raise ValueError(f"{name} is {value}, but must be {least} or more")
        self.block, self.slack, self.most = block, slack, most
        self.load = [0] * n  # requests under way
        self.known: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(n)]  # the latest last

    def route(self, prompt: str | Sequence[int]) -> int:
        keys = self._keys(prompt)
        known = [next((i for i, key in enumerate(keys) if key not in seen), len(keys)) for seen in self.known]
        # of equals, who has the emptier cache: else new beginnings pile up where answers are short
        best = max(range(len(known)), key=lambda r: (known[r], -self.load[r], -len(self.known[r])))
        if self.load[best] > min(self.load) + self.slack:
            best = min(range(len(known)), key=lambda r: (self.load[r], -known[r]))
        for key in reversed(keys):  # a beginning is forgotten after what comes behind it
            self.known[best][key] = None
            self.known[best].move_to_end(key)
        while len(self.known[best]) > self.most:
            self.known[best].popitem(last=False)
        self.load[best] += 1
        return best

    def done(self, replica: int) -> None:
        self.load[replica] -= 1

    def _keys(self, prompt: str | Sequence[int]) -> list[bytes]:
        keys, key = [], b""
        for end in range(self.block, min(len(prompt), self.block * self.most) + 1, self.block):
            part = prompt[end - self.block: end]
            data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else repr(list(part)).encode()
            key = blake2b(key + data, digest_size=16).digest()
            keys.append(key)
        return keys


# ------------------------------------------------------------------ replicas in processes


class Gone(Exception):
    """Nobody is there any more at the other end."""


class Replicas:
    """n processes, each of which runs work(replica, items, send, *args), a function of some module.

    items is what comes for this replica, until there is no more; send(value) hands something on, send(value, True) says
    also that an item is done. Used in a `with`, at whose end the processes end: start(), then run(pairs of items).
    """

    def __init__(self, n: int, work: Callable, args: Sequence, router: Router, ahead: int):
        self.n, self.work, self.args, self.router, self.ahead = n, work, args, router, ahead
        self.processes, self.pipes = [], []

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(GRACE_S)
            process.kill()  # one that is stopped, say; of one that has ended nothing comes
            process.join()

    def start(self, first_alone: bool = False) -> list[Any]:
        """Start the processes -> the first value that each one sends.

        first_alone: the others start when the first one has sent its value. What it makes and keeps on disk (a compiled
        function) they find there, and do not all make at once.
        """
        said, context = [], get_context("spawn")
        for replica in range(self.n):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(self.work, replica, there, self.args), daemon=True)
            with _without_ctrl_c():
                process.start()
                self.processes.append(process)
                self.pipes.append(here)
            there.close()
            if first_alone and replica == 0:
                said.append(self._first(0))
        return said + [self._first(replica) for replica in range(len(said), self.n)]

    def run(self, items: Iterable[tuple[str | Sequence[int], Any] | None]) -> Iterator[tuple[int, Any]]:
        """Send pairs (prompt, item) on their way, `ahead` a replica at most -> pairs (replica, value) as they come
        back, until all replicas have ended. Where items are slow to come, None among them says that there is none yet:
        then answers and deaths are seen to meanwhile. RuntimeError if a replica dies."""
        end: Any = object()
        items, live, more = iter(items), dict(zip(self.pipes, count())), True
        while live:
            idle = False
            while more and not idle and sum(self.router.load) < self.ahead * len(self.pipes):
                pair = next(items, end)
                more, idle = pair is not end, pair is None
                for pipe in [] if idle else [self.pipes[self.router.route(pair[0])]] if more else self.pipes:
                    with suppress(OSError):  # it has died, as reading from it will show
                        pipe.send(pair[1:] if more else None)
            for pipe in wait(list(live), POLL_S if idle else None):
                replica = live[pipe]
                message = self._receive(replica)
                if message is None:
                    del live[pipe]
                    continue
                value, done = message
                if done:
                    self.router.done(replica)
                yield replica, value

    def _first(self, replica: int) -> Any:
        message = self._receive(replica)
        if message is None:
            raise RuntimeError(f"replica {replica} of {self.n} has ended before it said anything")
        return message[0]

    def _receive(self, replica: int) -> tuple[Any, bool] | None:
        try:
            message = self.pipes[replica].recv()
        except (EOFError, OSError):
            self.processes[replica].join()
            raise RuntimeError(f"replica {replica} of {self.n} has died with code "
                               f"{self.processes[replica].exitcode}") from None
        if isinstance(message, Exception):
            raise message
        return message


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Ctrl-C waits. A process that is started meanwhile never gets it, not even while Python starts."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # subtle: a process of multiprocessing's own; who starts it lets signals in again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(work: Callable, replica: int, pipe: Connection, args: Sequence) -> None:
    def items() -> Iterator[Any]:
        while True:
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                raise Gone from None
            if message is None:
                return
            yield message[0]

    def put(message: Any) -> None:
        try:
            pipe.send(message)
        except OSError:
            raise Gone from None

    try:
        work(replica, items(), lambda value, done=False: put((value, done)), *args)
        put(None)
    except Gone:
        pass
    except Exception as error:
        with suppress(Gone):
            put(ValueError(str(error) or type(error).__name__))


# ------------------------------------------------------------------ demo


def _demo() -> None:
    """Prefix caches that hold 300 blocks each, and 2,000 prompts with 40 beginnings of 20 blocks."""
    import random

    def hits(n: int, choose: Callable) -> float:
        caches, found, asked, draw = [OrderedDict() for _ in range(n)], 0, 0, random.Random(0)
        keys = Router(1, block=4)._keys
        for i in range(2000):
            prompt = [draw.randrange(40), *[0] * 79, *[i] * 8]
            replica, blocks = choose(prompt), keys(prompt)
            cache = caches[replica]
            n_known = next((j for j, key in enumerate(blocks) if key not in cache), len(blocks))
            found, asked = found + n_known, asked + len(blocks)
            for key in reversed(blocks):
                cache[key] = None
                cache.move_to_end(key)
            while len(cache) > 300:
                cache.popitem(last=False)
        return found / asked

    print("Of the 22 blocks of 2,000 prompts, 20 have been in some cache before. The share that is found:\n")
    print("replicas  random  routed")
    for n in (1, 2, 4, 8):
        router, draw = Router(n, block=4), random.Random(1)

        def routed(prompt, router=router, n=n):
            replica = router.route(prompt)
            if sum(router.load) > 16 * n:  # so many are under way at any time
                router.done(max(range(n), key=router.load.__getitem__))
            return replica

        print(f"{n:8}  {hits(n, lambda _, n=n, draw=draw: draw.randrange(n)):6.1%}  {hits(n, routed):6.1%}")


if __name__ == "__main__":
    _demo()
