"""traffic.py: arrivals and lengths have the law they say, and figures are what their formulas say."""
import json
import math
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import traffic
from traffic import Timeline, describe, goodput, lognormal_lengths, mix, one_server, percentile, poisson, summary

ROOT = Path(__file__).resolve().parent.parent
N = 4000
ALARM = 1e-9  # chance that a correct generator is refused, of each test; seeds are fixed, so it is asked once

# ------------------------------------------------------------------ arrivals


def gaps(times):
    return [b - a for a, b in zip([0.0, *times], times)]


def too_far(values, cdf) -> bool:
    """Kolmogorov-Smirnov: whether the largest distance from the law has a chance below ALARM, by the bound of Massart
    1990, P(D > d) <= 2 exp(-2 n d^2), which holds for every n."""
    values, n = sorted(values), len(values)
    d = max(max((i + 1) / n - cdf(x), cdf(x) - i / n) for i, x in enumerate(values))
    return 2 * math.exp(-2 * n * d * d) < ALARM


def too_even_or_uneven(times, rate) -> bool:
    """Counts in 400 windows have variance = mean; their ratio times 399 is about chi-square, here taken as normal."""
    width, windows = len(times) / rate / 400, [0] * 400
    for t in times:
        if t < 400 * width:
            windows[int(t / width)] += 1
    ratio = statistics.pvariance(windows) / statistics.fmean(windows)
    return abs(ratio - 1) > 6.5 * math.sqrt(2 / 400)


def exponential(rate):
    return lambda x: 1 - math.exp(-rate * x)


@pytest.mark.parametrize("rate", [0.01, 1, 37.5])
@pytest.mark.parametrize("seed", [0, 1, 2**70, -5])
def test_gaps_are_exponential_and_independent(rate, seed):
    times = poisson(rate, N, seed)
    assert len(times) == N and times == sorted(times) and times[0] > 0
    assert not too_far(gaps(times), exponential(rate)) and not too_even_or_uneven(times, rate)
    assert abs(times[-1] * rate / N - 1) < 6.5 / math.sqrt(N)
    assert abs(np.corrcoef(gaps(times)[1:], gaps(times)[:-1])[0, 1]) < 6.5 / math.sqrt(N)


def test_the_tests_of_arrivals_have_power():
    """Sabotaged twins of the same rate: uniform gaps, even ones, 20 % too many, exponential ones in order of size."""
    rng, right = random.Random(5), gaps(poisson(2.0, N, 3))
    uniform = [rng.random() for _ in range(N)]
    assert too_far(uniform, exponential(2)) and too_far([0.5] * N, exponential(2)) and too_far(right, exponential(2.4))
    for wrong in (uniform, [0.5] * N, sorted(right), [x for pair in zip(right[::2], right[::2]) for x in pair]):
        times = list(np.cumsum(wrong))
        assert too_even_or_uneven(times, 2.0)
    assert not too_even_or_uneven(list(np.cumsum(right)), 2.0)


def test_arrivals_at_the_edges():
    assert poisson(1.0, 0) == [] and len(poisson(1.0, 1)) == 1
    assert poisson(math.inf, 3, 7) == [0.0, 0.0, 0.0]
    assert poisson(2.0, 5, 1) == poisson(2.0, 9, 1)[:5], "more requests are the same and more"
    assert poisson(2.0, 5, 1) != poisson(2.0, 5, 2)
    assert [2 * t for t in poisson(2.0, 50)] == pytest.approx(poisson(1.0, 50)), "another rate is another clock"
    for rate in (0, -1, math.nan, -math.inf):
        with pytest.raises(ValueError, match="but must be requests per second, above 0"):
            poisson(rate, 3)
    for n in (-1, 2.5, "3", None):
        with pytest.raises(ValueError, match="n is "):
            poisson(1.0, n)


# ------------------------------------------------------------------ lengths

NORMAL = statistics.NormalDist()


@pytest.mark.parametrize(("median", "sigma"), [(1e6, 1.0), (3e7, 0.3), (2e5, 0.05)])
def test_lengths_are_lognormal(median, sigma):
    """Medians so large that rounding is nothing."""
    found = lognormal_lengths(N, median, sigma, 0, 10**12, seed=4)
    z = [math.log(x / median) / sigma for x in found]
    assert all(type(x) is int for x in found) and not too_far(z, NORMAL.cdf)
    assert abs(np.corrcoef(z[1:], z[:-1])[0, 1]) < 6.5 / math.sqrt(N)


def test_the_test_of_lengths_has_power():
    """Sabotaged twins: a normal number of the same median and deviation, sigma a third too large, the mean taken
    for the median."""
    rng, median, sigma = random.Random(6), 1e6, 0.5
    for wrong in ([abs(median * (1 + sigma * rng.gauss(0, 1))) + 1 for _ in range(N)],
                  [rng.lognormvariate(math.log(median), 1.35 * sigma) for _ in range(N)],
                  [rng.lognormvariate(math.log(median) - sigma**2 / 2, sigma) for _ in range(N)]):
        assert too_far([math.log(x / median) / sigma for x in wrong], NORMAL.cdf)
    right = [rng.lognormvariate(math.log(median), sigma) for _ in range(N)]
    assert not too_far([math.log(x / median) / sigma for x in right], NORMAL.cdf)


def test_short_lengths_are_rounded_and_held_to_their_limits():
    """Shares of each length against the lognormal's mass between the halves, all the tails' mass at the limits."""
    median, sigma, least, most, n = 6.0, 0.7, 3, 12, 20_000
    found = lognormal_lengths(n, median, sigma, least, most, seed=9)
    assert set(found) == set(range(least, most + 1))
    edges = [0.0, *(NORMAL.cdf(math.log((x + 0.5) / median) / sigma) for x in range(least, most)), 1.0]
    mass = dict(zip(range(least, most + 1), np.diff(edges)))

    def chi_square(lengths):
        return sum((lengths.count(x) - n * p) ** 2 / (n * p) for x, p in mass.items())

    assert chi_square(found) < 62, "9 degrees of freedom: above 62 has a chance of 6e-10"
    cut = [x for x in lognormal_lengths(4 * n, median, sigma, 0, 10**6, seed=9) if least <= x <= most][:n]
    assert len(cut) == n and chi_square(cut) > 62, "drawing again instead of holding to the limits is another law"


def test_lengths_at_the_edges():
    assert lognormal_lengths(0, 5, 1, 1, 9) == [] and lognormal_lengths(3, 5, 0, 1, 9) == [5, 5, 5]
    assert lognormal_lengths(3, 50, 0, 1, 9) == [9, 9, 9] and lognormal_lengths(3, 0.1, 0, 2, 9) == [2, 2, 2]
    assert set(lognormal_lengths(200, 5, 1e300, 1, 9)) == {1, 9}, "no overflow"
    assert lognormal_lengths(3, 5, 1, 0, 0) == [0, 0, 0]
    for arguments in ((3, 0, 1, 1, 9), (3, math.inf, 1, 1, 9), (3, 5, -1, 1, 9), (3, 5, math.nan, 1, 9),
                      (-1, 5, 1, 1, 9), (3, 5, 1, -1, 9), (3, 5, 1, 9, 8), (3, 5, 1, 1.5, 9), (3, 5, 1, 1, math.inf)):
        with pytest.raises(ValueError, match=r"must be|but they must"):
            lognormal_lengths(*arguments)


def correlation(a, b) -> float:
    return float(np.corrcoef(np.argsort(np.argsort(a)), np.argsort(np.argsort(b)))[0, 1])


def test_arrivals_prompts_and_answers_of_one_seed_are_independent():
    """And the twin that seeds both lists alike would have them equal."""
    for seed in (0, 1, 12345):
        prompt, output = zip(*mix(N, (2e5, 1.0, 0, 10**9), (8e4, 0.7, 0, 10**9), seed))
        between = gaps(poisson(1.0, N, seed))
        pairs = [(prompt, output), (prompt, between), (output, between), (prompt[1:], between[:-1])]
        assert all(abs(correlation(a, b)) < 6.5 / math.sqrt(N) for a, b in pairs)
        alike = lognormal_lengths(N, 8e4, 0.7, 0, 10**9, seed=f"of prompts {seed}")
        assert correlation(prompt, alike) > 0.99
    assert mix(5, (9, 1, 1, 99), (9, 1, 1, 99), 1) != mix(5, (9, 1, 1, 99), (9, 1, 1, 99), 2)


def test_the_same_in_every_process():
    code = ("import json, traffic; print(json.dumps([traffic.poisson(3.0, 5, 8), "
            "traffic.mix(5, (200, 1, 1, 999), (80, 1, 1, 99), 8)]))")
    found = {subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
                            env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")}
    here = [poisson(3.0, 5, 8), [list(pair) for pair in mix(5, (200, 1, 1, 999), (80, 1, 1, 99), 8)]]
    assert [json.loads(text) for text in found] == [here]


# ------------------------------------------------------------------ one request


def test_the_figures_of_a_request():
    t = Timeline(10.0, [12.0, 12.5, 12.5, 14.0])
    assert (t.ttft, t.tpot, t.itl, t.e2e) == (2.0, pytest.approx(2 / 3), [0.5, 0.0, 1.5], 4.0)
    assert t.e2e == pytest.approx(t.ttft + (len(t.times) - 1) * t.tpot) and sum(t.itl) == t.times[-1] - t.times[0]
    t = Timeline(1.0, [3.0])
    assert (t.ttft, t.tpot, t.itl, t.e2e) == (2.0, None, [], 2.0)
    t = Timeline(1.0)
    assert (t.ttft, t.tpot, t.itl, t.e2e) == (None, None, [], None)
    t.times.append(1.5)
    assert t.ttft == 0.5 and Timeline(0).times == [], "each has a list of its own"


# ------------------------------------------------------------------ all requests


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 20, 99, 100, 101, 1000])
def test_percentile_is_numpys(n):
    rng = random.Random(n)
    values = [rng.choice((rng.gauss(0, 1), rng.randrange(3))) for _ in range(n)]
    kept = list(values)
    for q in (0, 1, 5, 25, 33.3, 50, 75, 95, 99, 99.9, 100):
        assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), rel=1e-12, abs=1e-12)
    assert values == kept and percentile(iter(values), 50) == pytest.approx(statistics.median(values))
    if n > 1:
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        assert [percentile(values, q) for q in range(1, 100)] == pytest.approx(cuts)


def test_percentile_at_the_edges():
    assert percentile([], 99) is None and percentile([7], 99) == 7
    assert percentile([1, math.inf, math.inf], 90) == math.inf and percentile([1, 2, math.inf], 50) == 2
    assert percentile([-math.inf] * 2, 50) == -math.inf
    for q in (-1, 100.1, math.nan):
        with pytest.raises(ValueError, match="from 0 to 100"):
            percentile([1], q)
    with pytest.raises(ValueError, match="NaN"):
        percentile([1, math.nan], 50)


def some_runs(rng, n):
    runs = []
    for arrival in poisson(5.0, n, rng.randrange(1000)):
        times, now = [], arrival
        for _ in range(rng.choice((0, 1, 2, 5, 50))):
            now += rng.choice((0.0, rng.expovariate(10)))
            times.append(now)
        runs.append(Timeline(arrival, times))
    return runs


@pytest.mark.parametrize("n", [0, 1, 2, 50])
def test_a_summary_against_numpy(n):
    runs = some_runs(random.Random(n), n)
    found = summary(iter(runs), wall_s=4.0, ttft_s=0.05, tpot_s=0.06)
    json.dumps(found, allow_nan=False)
    some = [t for t in runs if t.times]
    tokens = sum(len(t.times) for t in runs)
    assert (found["requests"], found["answered"], found["tokens"], found["wall_s"]) == (n, len(some), tokens, 4.0)
    assert (found["tokens_per_s"], found["requests_per_s"]) == (tokens / 4, len(some) / 4)
    lists = {"ttft_s": [t.times[0] - t.arrival for t in some], "e2e_s": [t.times[-1] - t.arrival for t in some],
             "tpot_s": [np.diff(t.times).mean() for t in some if len(t.times) > 1],
             "itl_s": [x for t in some for x in np.diff(t.times)]}
    for name, values in lists.items():
        want = {"mean": np.mean(values), **{f"p{q}": np.percentile(values, q) for q in (50, 95, 99)}} if values else {
            "mean": None, "p50": None, "p95": None, "p99": None}
        assert found[name] == pytest.approx(want, abs=1e-12), name
    met = sum(t.times[0] - t.arrival <= 0.05 and (len(t.times) == 1 or np.diff(t.times).mean() <= 0.06) for t in some)
    assert found["goodput_per_s"] == met / 4 == goodput(runs, 0.05, 0.06, 4.0)
    assert "goodput_per_s" not in summary(runs, 4.0)
    only = summary(runs, 4.0, ttft_s=0.05)
    assert only["limits"] == {"ttft_s": 0.05, "tpot_s": None} and only["goodput_per_s"] == goodput(runs, 0.05, 1e9, 4.0)
    assert describe(found) and describe(only)


def test_what_cannot_be_measured():
    for wall in (0, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match="wall_s"):
            summary([], wall)
        with pytest.raises(ValueError, match="wall_s"):
            goodput([], 1, 1, wall)
    for bad in (Timeline(2.0, [1.0]), Timeline(0, [1.0, 0.5]), Timeline(0, [math.nan]), Timeline(math.nan, [1.0])):
        with pytest.raises(ValueError, match="request 1: its times go backwards or are NaN"):
            summary([Timeline(0, [1.0]), bad], 1.0)


def test_the_line_for_people():
    runs = [Timeline(0, [0.21 + 0.024 * i for i in range(1000)]), Timeline(0, [0.5]), Timeline(0)]
    assert describe(summary(runs, 12.3)) == (
        "3 requests (1 without an answer), 1,001 tokens in 12.3 s: 81.4 tokens/s | TTFT 0.35 / 0.49 / 0.50 s | "
        "TPOT 24 / 24 / 24 ms (p50 / p95 / p99)")
    assert describe(summary([], 1.0)) == ("0 requests, 0 tokens in 1.0 s: 0.0 tokens/s | TTFT - s | TPOT - ms "
                                          "(p50 / p95 / p99)")
    text = describe(summary([Timeline(0, [0.1, 0.1042])], 2.0, ttft_s=0.5, tpot_s=0.05))
    assert text == ("1 request, 2 tokens in 2.0 s: 1.0 tokens/s | TTFT 0.10 / 0.10 / 0.10 s | TPOT 4.2 / 4.2 / 4.2 ms "
                    "(p50 / p95 / p99)\ngoodput 0.50 of 0.50 requests/s (TTFT at most 0.5 s, TPOT at most 50 ms)")


# ------------------------------------------------------------------ a queue whose law is known


def test_a_single_server_has_the_times_of_m_m_1():
    """The time from arrival to answer is exponential of rate 1 - load. Requests far apart are nearly independent: at
    load 0.5 every 40th is taken. The twin with even service times (M/D/1) waits half as long, and must fail."""
    n, load = 80_000, 0.5
    arrivals = poisson(load, n, 21)
    services = gaps(poisson(1.0, n, 22))
    found = [t.e2e for t in one_server(arrivals, services)]
    assert not too_far(found[40::40], exponential(1 - load))
    assert percentile(found, 99) == pytest.approx(math.log(100) / (1 - load), rel=0.1)
    even = [t.e2e for t in one_server(arrivals, [1.0] * n)]
    assert too_far(even[40::40], exponential(1 - load))
    assert statistics.fmean(even) == pytest.approx(1 + load / (2 * (1 - load)), rel=0.05), "Pollaczek-Khinchine"


def test_a_single_server_against_a_clock_that_ticks():
    """Times in whole ticks, simulated tick by tick."""
    rng = random.Random(2)
    for _ in range(200):
        arrivals = sorted(rng.randrange(30) for _ in range(rng.randrange(8)))
        services = [rng.randrange(1, 6) for _ in arrivals]
        waiting, left, done = list(range(len(arrivals))), list(services), {}
        for tick in range(200):
            if waiting and arrivals[waiting[0]] <= tick:
                left[waiting[0]] -= 1
                if not left[waiting[0]]:
                    done[waiting.pop(0)] = tick + 1
        assert [t.times for t in one_server(arrivals, services)] == [[done[i]] for i in range(len(arrivals))]


def test_no_state_of_the_process_is_touched():
    before = random.getstate()
    poisson(1.0, 10), mix(10, (9, 1, 1, 99), (9, 1, 1, 99))
    assert random.getstate() == before and not hasattr(traffic, "rng")
