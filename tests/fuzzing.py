"""Seeded mutations of bytes and of JSON trees, and the guards under which a reader meets them.

A case is written "seed input:mutation:mutation...", a mutation being the seed of one random change: so a case is made
again from its name, and a failing one is shrunk by leaving mutations out. Cases run in a forked child with little
memory and time: what allocates a claimed size, hangs or crashes the interpreter fails like a wrong exception. Linux.
"""
import contextlib
import faulthandler
import json
import mmap
import os
import random
import re
import resource
import signal
import tempfile
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

HEADROOM = 512 << 20  # bytes of address space that a child may take on top of what it starts with
SECONDS = 2.0  # of processor time for one input: a busy machine makes nothing fail
FACTOR, SLACK = 40, 1 << 20  # bytes of Python objects: so many times the input's, and so many at any rate
MESSAGE = 1000  # characters of an error's message
INTEGERS = (0, 1, -1, 2, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**62 + 1, 2**63 - 1, 2**63, 2**64 - 1)
SNIPPETS = (b"\0" * 8, b"\xff" * 8, b"\x80", b"\xc3(", b"null", b"NaN", b"1e999", b"-1", b"9" * 30, b"9" * 5000, b'""',
            b"[]", b"{}", b'"', b"\\", b",", b"\\ud800", b"\\n\\u001b[2J", b"\n", b"[" * 2000, b'{"a":' * 990, b"../x")
NUMBERS = (*INTEGERS, 0.0, 0.5, 1.0, 1.0 + 2**-52, 1e-320, 1e-15, 1e15, 1e308, -1e308, 10**400, float("nan"),
           float("inf"))
TEXTS = ("", " ", "0", "x", "true", "a b", "\0", "\n", "\x1b[2J", "\ud800", "\u202e", "é" * 200, "x" * 5000,
         "x" * 100_000, "..", "../x", "/etc/passwd", "default", "<|e|>", "(a+)+$", "e\u0301")
CONSTANTS = (None, True, False, [], {}, [None], [[]], [0], {"": None}, {"type": "x"})


def mutate_bytes(rng: random.Random, data: bytes, seeds=(), front: float = 1.0) -> bytes:
    """One change; `front` above 1 prefers the beginning, where headers are."""
    n, way = len(data), rng.randrange(12)
    if not n:
        return rng.choice(SNIPPETS)
    at = int(n * rng.random() ** front)
    to = min(n, at + rng.randint(1, rng.choice((1, 4, 8, 40, 400))))
    if way < 2:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1:]
    if way < 6:  # a little-endian number, at random or where a small one seems to stand: a byte or two, then zeros
        zeros, width = data.find(b"\0\0\0", at), rng.choice((4, 8))
        at = zeros - rng.choice((1, 1, 2)) if zeros > 1 and rng.random() < 0.7 else at
        old = int.from_bytes(data[at:at + width], "little")
        new = rng.choice((*INTEGERS, old + 1, old - 1, 2 * old, n, n - at, rng.randrange(64))) % 2**(8 * width)
        return data[:at] + new.to_bytes(width, "little") + data[at + width:]
    if way == 6:
        return data[:rng.choice((at, at, n - 1, n // 2))]
    if way == 7:
        return data[:at] + data[to:]
    if way == 8:
        return data[:to] + data[at:to] * rng.choice((1, 1, 2, 30)) + data[to:]
    if way == 9 and seeds:  # the rest, or a stretch, of another input
        other = rng.choice(seeds)
        start = int(len(other) * rng.random() ** front)
        return data[:at] + (other[start:] if rng.random() < 0.3 else other[start:start + to - at] + data[to:])
    piece = rng.choice((rng.choice(SNIPPETS), rng.randbytes(rng.randint(1, 9))))
    return data[:at] + piece + data[rng.choice((at, to, min(n, at + len(piece)))):]


def mutate_value(rng: random.Random, value: Any, seeds=()) -> Any:
    """Another value in place of this one: a neighbour of it, what another seed has there, or anything at all."""
    if isinstance(value, bytes) and rng.random() < 0.9:
        return mutate_bytes(rng, value, [s for s in seeds if isinstance(s, bytes)])
    way, text = rng.random(), rng.choice(TEXTS)
    if way < 0.15 and seeds:
        return rng.choice(seeds)
    if way < 0.35 and isinstance(value, (int, float)):
        return rng.choice((value + 1, value - 1, -value, 2 * value, value % 7, str(value), [value]))
    if way < 0.45 and isinstance(value, str) and value:
        at = rng.randrange(len(value))
        return rng.choice((value[:at], value[at:], value * 2, value[:at] + text + value[at:], value.upper()))
    if way < 0.95:
        return rng.choice((rng.choice(NUMBERS), text, rng.choice(CONSTANTS)))
    key, tree = rng.choice((None, "type", "a")), []
    for _ in range(rng.choice((3, 100, rng.randrange(800, 1000), 2000))):
        tree = [tree] if key is None else {key: tree}
    return tree


def mutate_entry(rng: random.Random, node: Any, key: Any, keep_type: bool) -> Any:
    """Deletes, doubles, swaps or renames an entry; or makes a list of a dict, wraps it, or takes the entry for it."""
    is_dict, way, copy = isinstance(node, dict), rng.randrange(5 if keep_type else 9), node.copy()
    other = rng.choice(list(node)) if is_dict else rng.randrange(len(node))
    if way == 0:
        del copy[key]
    elif way == 1:
        copy[key], copy[other] = copy[other], copy[key]
    elif way == 2:
        copy.update({f"{key}_": copy[key]}) if is_dict else copy.insert(other, copy[key])
    elif way == 3:  # another name, maybe one in use; a longer list
        new = rng.choice((other, f"{key}.", rng.choice(TEXTS)))
        copy = {new if k == key else k: v for k, v in node.items()} if is_dict else node + node[key:] * 50
    elif way == 4:
        copy = {k: node[key] for k in node} if is_dict else [node[key]] * len(node)
    elif way == 5:
        copy = list(node.values()) if is_dict else {str(i): v for i, v in enumerate(node)}
    else:
        copy = node[key] if way == 6 else [node] if way == 7 else {str(key): node}
    return copy


def mutate_tree(rng: random.Random, node: Any, seeds=(), root: bool = True) -> Any:
    """One change at a random place of a tree of dicts, lists and leaves; only the path to it is copied."""
    if not isinstance(node, (dict, list)) or not node or (not root and rng.random() < 0.1):
        return node if root else mutate_value(rng, node, seeds)
    key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
    if rng.random() < 0.2:
        return mutate_entry(rng, node, key, root)
    twins = [s[key] for s in seeds if type(s) is type(node) and (key in s if isinstance(s, dict) else key < len(s))]
    copy = node.copy()
    copy[key] = mutate_tree(rng, node[key], twins, False)
    return copy


class Target(NamedTuple):
    seeds: list
    mutate: Callable  # (rng, value, seeds) -> value
    check: Callable  # (value, stages): whatever it raises outside of a stage is a failure
    message: int = MESSAGE
    slack: int = SLACK


class Stages:
    """Counts the inputs that pass each stage. A refusal has to be our kind of error: one short, printable line."""

    def __init__(self, message: int):
        self.counts, self.message = Counter(), message

    @contextlib.contextmanager
    def __call__(self, name: str, *also: type[BaseException]):
        try:
            yield
        except (ValueError, *also) as error:
            kind, text, link = type(error), str(error), error
            assert kind in (ValueError, *also), f"{kind.__name__} is a ValueError, but not one of ours"
            good = 8 < len(text) <= self.message and (text.isprintable() or self.message > MESSAGE)
            assert good, f"a message of {len(text)} characters: {text[:300]!r}"
            while link := link.__cause__ or link.__context__:  # nor may it hide an allocation that failed
                out = isinstance(link, MemoryError) or re.search(r"bad_alloc|can.?.t allocate|out of memory", str(link))
                assert not out, f"memory ran out behind a ValueError: {link}"
        else:
            self.counts[name] += 1


def draw(seed: int, i: int, n_seeds: int) -> str:
    """The i-th case of a campaign."""
    rng = random.Random(seed << 40 | i)
    base, n_ops = rng.randrange(n_seeds), rng.choice((1, 1, 1, 2, 4))
    return ":".join(map(str, (base, *(rng.getrandbits(32) for _ in range(n_ops)))))


def build(target: Target, case: str) -> Any:
    base, *ops = map(int, case.split(":"))
    value = target.seeds[base]
    for op in ops:
        value = target.mutate(random.Random(op), value, target.seeds)
    return value


def size_of(value: Any) -> int:
    """About the bytes of a value in a file, without recursion."""
    total, stack = 0, [value]
    while stack:
        node = stack.pop()
        stack += [*node, *node.values()] if isinstance(node, dict) else node if isinstance(node, list) else []
        total += len(node) if isinstance(node, (bytes, str)) else getattr(node, "nbytes", 4)
    return total


def _child(target: Target, cases, log, at: mmap.mmap) -> None:
    faulthandler.enable(log)
    faulthandler.register(signal.SIGPROF, log, chain=True)  # out of time, be it in C: the traceback, then death
    with open("/proc/self/statm") as f:
        limit = int(f.read().split()[0]) * resource.getpagesize() + HEADROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    stages = Stages(target.message)
    for i, case in cases:
        at[:] = i.to_bytes(8, "little")
        value = build(target, case)
        if traced := i % 16 == 0:  # tracing is slow
            tracemalloc.start()
        signal.setitimer(signal.ITIMER_PROF, SECONDS * (5 if traced else 1))
        target.check(value, stages)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if traced:
            peak, size = tracemalloc.get_traced_memory()[1], size_of(value)
            tracemalloc.stop()
            assert peak < FACTOR * size + target.slack, f"{peak:,} bytes allocated for an input of {size:,}"
    log.write(json.dumps(stages.counts))


def _forked(target: Target, cases, first: int) -> tuple[dict | None, str, int]:
    """Runs cases in a child: their counts, or None, what went wrong, and the number of the case."""
    with tempfile.TemporaryFile("w+") as log, mmap.mmap(-1, 8) as at:
        at[:] = first.to_bytes(8, "little")
        if not (pid := os.fork()):
            status = 1
            try:
                _child(target, cases, log, at)
                status = 0
            except BaseException as error:
                log.write("".join(traceback.format_exception(error, limit=-6))[-4000:])
            finally:
                with contextlib.suppress(BaseException):
                    log.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        log.seek(0)
        text = log.read() + (f"the process was ended by {signal.Signals(-status).name}" if status < 0 else "")
        return (None, text, int.from_bytes(at[:], "little")) if status else (json.loads(text), "", 0)


def difference(a: Any, b: Any) -> str:
    """Where two inputs differ, between their common beginning and end."""
    try:
        a, b = (x if isinstance(x, bytes) else ascii(x) for x in (a, b))
    except RecursionError:
        return "it is nested too deeply to be shown"
    n = min(len(a), len(b))
    start = next((i for i in range(n) if a[i] != b[i]), n)
    end = next((i for i in range(n - start) if a[-1 - i] != b[-1 - i]), n - start)
    return f"at {start} of {len(a)}: {a[start:len(a) - end]!r:.300} -> {b[start:len(b) - end]!r:.300}"


def campaign(name: str, target: Target, seed: int, n: int, first: int = 0, case: str = "") -> dict:
    """Cases first .. first + n - 1, or the one given: {"inputs", counts of stages} or {"failure": the smallest, ..}."""
    numbered = ((i, case or draw(seed, i, len(target.seeds))) for i in range(first, first + n))
    counts, text, at = _forked(target, numbered, first)
    if counts is not None:
        return {"inputs": n, **counts}
    case, k = case or draw(seed, at, len(target.seeds)), 1
    while k < len(parts := case.split(":")):  # leave out mutations, one by one, as long as it fails
        fewer = ":".join(parts[:k] + parts[k + 1:])
        counts, less, _ = _forked(target, [(at, fewer)], at)
        case, text, k = (fewer, less, 1) if counts is None else (case, text, k + 1)
    change = difference(target.seeds[int(parts[0])], build(target, case))
    return {"at": at, "case": case, "failure": f"{name}, input {at} of seed {seed}, {len(parts) - 1} mutations of seed "
            f"input {parts[0]}: {change}\nagain: python tests/test_fuzz.py {name} {case}\n{text}"}
