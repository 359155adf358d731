"""What serving is measured by: requests that arrive by themselves, and the figures of how they fared.

    arrivals = poisson(rate=2.0, n=100, seed=0)                          seconds: two requests a second on average
    lengths  = mix(100, prompt=(200, 1.0, 1, 2000), output=(80, 0.8, 1, 500), seed=0)    [(prompt, output), ..], tokens
    ..                                                                   serve them; one Timeline each
    print(describe(summary(timelines, wall_s, ttft_s=0.5, tpot_s=0.05)))

The one idea: load is offered, not taken. Users do not wait with their question until the server is free, so arrivals
are drawn beforehand and a request's clock starts when it was due, not when the server got to it. Measured the other
way (each client asks when its last answer is complete) a slow server slows its own load down, and the waiting, which is
what users feel, is left out of the figures. And since waiting is mostly short and sometimes very long, it is told by
percentiles: the demo shows a queue whose mean still looks harmless when one request in a hundred waits a minute.

Four times of a request, all in seconds, from its arrival a and the times t_1 <= .. <= t_n of its n output tokens:

    TTFT   t_1 - a                        time to first token: waiting and the prompt's computation
    TPOT   (t_n - t_1) / (n - 1)          time per output token after the first: the speed of reading
    ITL    t_2 - t_1, .., t_n - t_(n-1)   inter-token latencies, each gap by itself: where an answer stutters
    E2E    t_n - a = TTFT + (n - 1) TPOT  end to end

Goodput: requests a second that met both a TTFT and a TPOT limit. Throughput can always be bought with latency (larger
batches, longer queues); goodput cannot.

Papers: goodput, Zhong et al. 2024 (DistServe, arXiv 2401.09670); the waiting time of one server, Kendall 1953 (M/M/1)
and Lindley 1952; percentiles by linear interpolation, Hyndman and Fan 1996 (their type 7).
Left out on purpose: bursts and times of day (pass arrivals of your own), confidence intervals.
"""
from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import index

# ------------------------------------------------------------------ what arrives


def poisson(rate: float, n: int, seed: int = 0) -> list[float]:
    """Arrival times in seconds of n requests at `rate` a second on average, ascending; the first comes after one gap.

    Gaps are independent and exponential, which is how many users who know nothing of each other arrive. An infinite
    rate is all at once. The same arguments give the same times in every process.

    >>> [round(t, 3) for t in poisson(2.0, 4, seed=1)]
    [0.069, 0.498, 0.683, 0.988]
    >>> poisson(float("inf"), 3)
    [0.0, 0.0, 0.0]
    """
    n = _at_least(0, "n", n)
    if not rate > 0:
        raise ValueError(f"rate is {rate}, but must be requests per second, above 0 (infinite: all at once)")
    rng, now, times = random.Random(f"arrivals {seed}"), 0.0, []
    for _ in range(n):
        now -= math.log(1 - rng.random()) / rate  # random() can be 0, but never 1
        times.append(now)
    return times


def lognormal_lengths(n: int, median: float, sigma: float, least: int, most: int, seed: int | str = 0) -> list[int]:
    """n lengths in tokens: exp(a normal number of mean log(median) and deviation sigma), rounded, held to least..most.

    Lengths of prompts and answers are about so: most are short, few are very long. sigma 0 is the median every time;
    at sigma 1 one length in six is above 2.7 medians. What falls outside is moved to the limit, not drawn again.

    >>> lognormal_lengths(8, median=100, sigma=1.0, least=1, most=300)
    [43, 75, 68, 149, 43, 126, 84, 44]
    """
    n, least = _at_least(0, "n", n), _at_least(0, "least", least)
    most = _at_least(least, "most", most)
    if not 0 < median < math.inf or not 0 <= sigma < math.inf:
        raise ValueError(f"median is {median} and sigma {sigma}, but they must be finite, above 0 and at least 0")
    rng, lengths = random.Random(f"lengths {seed}"), []
    for _ in range(n):
        exponent = math.log(median) + sigma * rng.normalvariate(0, 1)
        lengths.append(most if exponent > math.log(most + 1) else max(least, min(most, round(math.exp(exponent)))))
    return lengths


def mix(n: int, prompt: Sequence[float], output: Sequence[float], seed: int = 0) -> list[tuple[int, int]]:
    """n pairs (prompt tokens, output tokens), each drawn from its own (median, sigma, least, most), independently.

    >>> mix(3, prompt=(200, 1.0, 1, 2000), output=(80, 0.5, 1, 500))
    [(334, 46), (135, 47), (283, 52)]
    """
    # subtle: one seed for both would make every long prompt have a long answer. Each list has a generator of its own,
    # as have the arrivals; a name and the seed, hashed, are its state.
    return list(zip(lognormal_lengths(n, *prompt, seed=f"of prompts {seed}"),  # type: ignore[misc, arg-type]
                    lognormal_lengths(n, *output, seed=f"of outputs {seed}")))  # type: ignore[misc, arg-type]


def _at_least(least: int, name: str, value: int) -> int:
    try:
        value = index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r:.40}, but must be a whole number") from None
    if value < least:
        raise ValueError(f"{name} is {value}, but must be at least {least}")
    return value


# ------------------------------------------------------------------ one request


@dataclass
class Timeline:
    """When one request was due and when its tokens came, in seconds of one clock.

    Tokens that come together (speculative decoding) have one time, and gaps of 0 between them. A figure that a request
    does not have is None: all of them without a token, TPOT with one token.

    >>> t = Timeline(arrival=1.0, times=[1.5, 1.75, 2.5])
    >>> t.ttft, t.tpot, t.itl, t.e2e
    (0.5, 0.5, [0.25, 0.75], 1.5)
    """
    arrival: float
    times: list[float] = field(default_factory=list)  # of each output token; append them as they come

    @property
    def ttft(self) -> float | None:
        return self.times[0] - self.arrival if self.times else None

    @property
    def tpot(self) -> float | None:
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else None

    @property
    def itl(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:])]

    @property
    def e2e(self) -> float | None:
        return self.times[-1] - self.arrival if self.times else None


# ------------------------------------------------------------------ all requests


def percentile(values: Iterable[float], q: float) -> float | None:
    """The value that q percent of the values are at most, 0 <= q <= 100, on a straight line between the two closest
    ranks (numpy's default); None of no values. Of n values the 99th says little unless n is some hundreds.

    >>> percentile([4, 1, 3, 2], 50), percentile([], 50)
    (2.5, None)
    """
    if not 0 <= q <= 100:
        raise ValueError(f"a percentile goes from 0 to 100, not {q}")
    values = sorted(values)
    if any(math.isnan(x) for x in values):
        raise ValueError("there is no percentile of NaN")
    if not values:
        return None
    rank = (len(values) - 1) * q / 100
    low = math.floor(rank)
    share = rank - low
    if share == 0 or values[low] == values[low + 1]:  # infinite values have no difference
        return values[low]
    return values[low] + (values[low + 1] - values[low]) * share


def goodput(timelines: Iterable[Timeline], ttft_s: float, tpot_s: float, wall_s: float) -> float:
    """Requests a second that met both limits (at most ttft_s and tpot_s). One token meets every TPOT, none nothing.

    >>> fast, slow = Timeline(0, [0.1, 0.2]), Timeline(0, [0.1, 0.9])
    >>> goodput([fast, slow, Timeline(0, [0.2]), Timeline(0)], ttft_s=0.2, tpot_s=0.1, wall_s=4)
    0.5
    """
    _check_clock(wall_s)
    met = sum(t.ttft is not None and t.ttft <= ttft_s and (t.tpot is None or t.tpot <= tpot_s) for t in timelines)
    return met / wall_s


def summary(timelines: Iterable[Timeline], wall_s: float, ttft_s: float | None = None,
            tpot_s: float | None = None) -> dict:
    """The figures of a run of wall_s seconds as one dict that JSON can hold.

    requests, answered      all of them; those with at least one token (the others were refused, aborted or failed)
    tokens, wall_s, tokens_per_s, requests_per_s        output tokens; answered requests per second
    ttft_s, tpot_s, itl_s, e2e_s    each {"mean", "p50", "p95", "p99"} over the requests that have it (ITL: over all
                                    gaps of all requests), None of none
    goodput_per_s, limits           if ttft_s or tpot_s is given; one that is not is no limit
    Raises ValueError if wall_s is not above 0, or a clock goes backwards.
    """
    timelines = list(timelines)
    _check_clock(wall_s)
    for i, t in enumerate(timelines):
        if not all(a <= b for a, b in zip([t.arrival, *t.times], t.times)):
            raise ValueError(f"request {i}: its times go backwards or are NaN; give arrival and tokens by one clock, "
                             "such as time.perf_counter()")
    tokens, answered = sum(len(t.times) for t in timelines), sum(bool(t.times) for t in timelines)
    found: dict = {"requests": len(timelines), "answered": answered, "tokens": tokens, "wall_s": wall_s,
                   "tokens_per_s": tokens / wall_s, "requests_per_s": answered / wall_s}
    for name in ("ttft", "tpot", "e2e"):
        found[f"{name}_s"] = _spread([x for t in timelines if (x := getattr(t, name)) is not None])
    found["itl_s"] = _spread([gap for t in timelines for gap in t.itl])
    if ttft_s is not None or tpot_s is not None:
        limits = {"ttft_s": ttft_s, "tpot_s": tpot_s}
        numbers = [math.inf if x is None else x for x in limits.values()]
        found |= {"goodput_per_s": goodput(timelines, *numbers, wall_s), "limits": limits}  # type: ignore[call-arg]
    return found


def _check_clock(wall_s: float) -> None:
    if not 0 < wall_s < math.inf:
        raise ValueError(f"wall_s is {wall_s}, but must be the seconds that the run took, above 0")


def _spread(values: list[float]) -> dict[str, float | None]:
    values = sorted(values)  # once; sorting what is sorted is cheap
    mean = math.fsum(values) / len(values) if values else None
    return {"mean": mean, **{f"p{q}": percentile(values, q) for q in (50, 95, 99)}}


def describe(found: dict) -> str:
    """A summary for people, on one line (on two with limits).

    >>> print(describe(summary([Timeline(0, [0.2, 0.3]), Timeline(0.5, [0.9, 1.1])], wall_s=1.1, ttft_s=0.3)))
    2 requests, 4 tokens in 1.1 s: 3.6 tokens/s | TTFT 0.30 / 0.39 / 0.40 s | TPOT 150 / 195 / 199 ms (p50 / p95 / p99)
    goodput 0.91 of 1.82 requests/s (TTFT at most 0.3 s)
    """
    def three(name, scale, digits):
        if found[name]["p50"] is None:
            return "-"
        return " / ".join(f"{found[name][q] * scale:,.{digits}f}" for q in ("p50", "p95", "p99"))

    plural, silent = "" if found["requests"] == 1 else "s", found["requests"] - found["answered"]
    without = f" ({silent:,} without an answer)" if silent else ""
    tpot = found["tpot_s"]["p50"]
    text = (f"{found['requests']:,} request{plural}{without}, {found['tokens']:,} tokens in {found['wall_s']:,.1f} s: "
            f"{found['tokens_per_s']:,.1f} tokens/s | TTFT {three('ttft_s', 1, 2)} s | "
            f"TPOT {three('tpot_s', 1e3, 1 if tpot is not None and tpot < 0.01 else 0)} ms (p50 / p95 / p99)")
    if "limits" in found:
        limits = [f"{name} at most {found['limits'][key] * scale:g} {unit}" for name, key, scale, unit in (
            ("TTFT", "ttft_s", 1, "s"), ("TPOT", "tpot_s", 1e3, "ms")) if found["limits"][key] is not None]
        text += (f"\ngoodput {found['goodput_per_s']:,.2f} of {found['requests_per_s']:,.2f} requests/s "
                 f"({', '.join(limits)})")
    return text


# ------------------------------------------------------------------ demo


def one_server(arrivals: Sequence[float], services: Sequence[float]) -> list[Timeline]:
    """A server that takes requests one by one in the order of their arrival, each for its service time; one token each.
    It begins when both the request and the server are there (Lindley's recursion).

    >>> [t.e2e for t in one_server([0.0, 1.0, 9.0], [3.0, 3.0, 3.0])]
    [3.0, 5.0, 3.0]
    """
    free, timelines = 0.0, []
    for arrival, service in zip(arrivals, services):
        free = max(free, arrival) + service
        timelines.append(Timeline(arrival, [free]))
    return timelines


def demo():
    n, edges = 200_000, (1, 2, 4, 8, 16, 32, 64, math.inf)
    print("One server, requests of 1 s on average (exponential), Poisson arrivals: seconds from arrival to answer\n")
    times = poisson(1.0, n, seed=1)
    services = [b - a for a, b in zip([0.0, *times], times)]  # the gaps of such arrivals are exponential times
    for load in (0.5, 0.8, 0.95):
        found = sorted(t.e2e for t in one_server(poisson(load, n, seed=2), services))
        mean, theory = math.fsum(found) / n, 1 / (1 - load)  # M/M/1: the time is exponential, and so its percentiles
        print(f"load {load:.0%}: mean {mean:.1f}, p50 {percentile(found, 50):.1f}, p99 {percentile(found, 99):.1f} s "
              f"(theory: {theory:.1f}, {theory * math.log(2):.1f}, {theory * math.log(100):.1f})")
        below = 0
        for edge in edges:
            count = bisect_left(found, edge)
            share, below = (count - below) / n, count
            print(f"  {f'below {edge:2.0f} s' if edge < math.inf else 'longer    '} {share:6.1%} "
                  f"{'#' * round(60 * share) or '.' * (share > 0)}")
    print("\nFrom 50% to 95% load the server does 1.9 times the work, and one request in a hundred takes ten times as "
          f"long.\nNear full load a queue forgets slowly: even {n:,} requests leave p99 uncertain by a fifth.\n\n"
          "16 answers of a server that takes 1 ms a prompt token and 25 ms an answer's, whatever else it does:")
    runs = []
    for arrival, (prompt, output) in zip(poisson(2.0, 16), mix(16, (200, 1.0, 1, 2000), (80, 0.8, 1, 500))):
        first = arrival + prompt / 1000
        runs.append(Timeline(arrival, [first + 0.025 * i for i in range(output)]))
    print(describe(summary(runs, max(t.times[-1] for t in runs), ttft_s=0.4, tpot_s=0.05)))


if __name__ == "__main__":
    demo()
