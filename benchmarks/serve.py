"""Serving, measured: what `python bench.py serve` runs. Random ids, answers of given lengths: work, not words.

    mix        all requests at once, answers of log-normal length: continuous against static batching
    spike      a long prompt arrives while others are being answered: their inter-token latency, chunked and whole
    arrivals   Poisson arrivals behind a common beginning: latencies, goodput, use of the cache, prefix cache on and off
    load       the same requests at several rates, with the prefix cache: latency against load

One KV cache and one model serve all; only the batcher differs. Rounds alternate, ratios are medians of the rounds'.
"""
from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

import traffic
from batching import Batcher, Request
from llm import LLM

# ------------------------------------------------------------------ one run


def drive(batcher: Batcher, arrivals: Sequence[tuple[float, Request]]) -> dict:
    """Serve requests, each from its second on -> timelines, seconds, share of the pool in use, the batcher's counts."""
    waiting, lines = sorted(arrivals, key=lambda pair: pair[0])[::-1], {}
    begin, used = time.perf_counter(), []
    while waiting or batcher.live:
        now = time.perf_counter() - begin
        while waiting and waiting[-1][0] <= now:
            at, request = waiting.pop()
            lines[batcher.add(request)] = traffic.Timeline(at)
        if not batcher.live:
            time.sleep(min(0.002, waiting[-1][0] - now))
            continue
        events = batcher.step()
        now = time.perf_counter() - begin
        for event in events:
            assert event.finish_reason != "error", "a request failed while it was measured"
            if event.token is not None:
                lines[event.id].times.append(now)
        used.append(1 - batcher.cache.n_free / batcher.cache.n_blocks)
    return {"timelines": list(lines.values()), "wall_s": time.perf_counter() - begin, "pool": statistics.fmean(used),
            "stats": batcher.stats}


def request(ids: Sequence[int], n: int, salt: str) -> Request:
    """An answer of exactly n tokens; a salt of its own keeps it from finding another one's prefix."""
    return Request(list(ids), max_tokens=n, ignore_eos=True, sampling={"temperature": 0}, seed=0, salt=salt)


def some_ids(n: int, vocab_size: int, seed: object) -> list[int]:
    draw = random.Random(repr(seed))
    return [draw.randrange(5, vocab_size) for _ in range(n)]


# ------------------------------------------------------------------ continuous against static


def mix(llm: LLM, requests: int, prompt: int, output: int, sigma: float, slots: int, round_: int) -> dict[str, float]:
    """Output tokens/s of each way of batching, for the same requests, all there at the beginning. As for a file of
    prompts nobody reads along, so that no way cuts prompts short for the sake of those who do."""
    half = llm.context // 2
    sizes = traffic.mix(requests, (prompt, sigma, 1, half), (output, sigma, 1, half), seed=round_)
    found = {}
    ways = [("static, padded", "pad"), ("static, ended rows dropped", "drop"), ("continuous", None)]
    for name, static in ways if round_ % 2 else reversed(ways):
        batcher = llm.new_batcher(max_batch=slots, static=static, chunk=None)
        asked = [(0.0, request(some_ids(p, batcher.vocab_size, (round_, i)), n, f"{name} {round_} {i}"))
                 for i, (p, n) in enumerate(sizes)]
        found[name] = sum(n for _, n in sizes) / drive(batcher, asked)["wall_s"]
    return {name: found[name] for name, _ in ways}


# ------------------------------------------------------------------ a long prompt among running answers


def _gaps(batcher: Batcher, at_least: int, until: Request | None = None) -> list[float]:
    """Seconds of so many steps, and on until a request has ended; everybody who generates gets a token in each."""
    last, seconds = time.perf_counter(), []
    while len(seconds) < at_least or (until is not None and until.samples[0].finish_reason is None):
        alive = len(batcher.running)
        batcher.step()
        assert alive == len(batcher.running) or until is not None, "a stream ended while it was measured"
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
    return seconds


def spike(llm: LLM, streams: int, prompt: int, round_: int) -> dict[str, dict[str, float]]:
    """Gaps between the tokens of running answers, in ms: their median before a long prompt comes, and their 99th
    percentile and maximum while it is computed; and how long that takes."""
    found = {}
    for name, whole in (("chunked", False), ("whole", True))[::1 if round_ % 2 else -1]:
        batcher = llm.new_batcher(max_batch=streams + 1, **({"token_budget": 2**30, "chunk": 2**30} if whole else {}))
        for i in range(streams):
            batcher.add(request(some_ids(64, batcher.vocab_size, i), llm.context - 64, f"{name} {round_} {i}"))
        while any(len(s.ids) < 8 for r in batcher.live.values() for s in r.samples):
            batcher.step()

        before = _gaps(batcher, 40)
        long = request(some_ids(prompt, batcher.vocab_size, round_), 1, f"{name} {round_}")
        batcher.add(long)
        begin = time.perf_counter()
        during = _gaps(batcher, 1, long)
        found[name] = {"median before": 1e3 * statistics.median(before),
                       "p99 while": 1e3 * traffic.percentile(during, 99), "largest while": 1e3 * max(during),
                       "prompt s": time.perf_counter() - begin}
        for id in list(batcher.live):
            batcher.abort(id)
    return {name: found[name] for name in ("chunked", "whole")}


# ------------------------------------------------------------------ arrivals


def arrivals(llm: LLM, rate: float, requests: int, prompt: int, output: int, sigma: float, shared: int, slots: int,
             limits: tuple[float, float], round_: int,
             names: Sequence[str] = ("prefix cache", "without")) -> dict[str, dict]:
    """The same Poisson traffic with the prefix cache and without it: every prompt begins with the same `shared` ids.

    At another rate the same requests come, in the same order, closer together."""
    due = traffic.poisson(rate, requests, seed=round_)
    sizes = traffic.mix(requests, (prompt, sigma, 1, llm.context // 2 - shared), (output, sigma, 1, llm.context // 4),
                        seed=round_)
    found = {}
    for name in names if round_ % 2 else names[::-1]:
        batcher = llm.new_batcher(max_batch=slots)
        common = some_ids(shared, batcher.vocab_size, "common")
        asked = [(at, request(common + some_ids(p, batcher.vocab_size, (round_, i)), n,
                              f"{rate} {round_}" if name == "prefix cache" else f"{rate} {round_} {i}"))
                 for i, (at, (p, n)) in enumerate(zip(due, sizes))]
        run = drive(batcher, asked)
        figures = traffic.summary(run["timelines"], run["wall_s"], *limits)
        stats = run["stats"]
        found[name] = {**figures, "cached": stats.cached / stats.prompt, "preempted": stats.preempted,
                       "pool": run["pool"]}
    return {name: found[name] for name in names}
