"""replicas.py: who gets which, what that does for real prefix caches, and processes that answer or die."""
import itertools
import json
import os
import random
import signal
from collections import Counter

import pytest
from tiny import tiny_folder

import generate
from kvcache import PagedKVCache
from replicas import Replicas, Router

pytestmark = pytest.mark.usefixtures("one_thread")

# ------------------------------------------------------------------ the router


def test_equal_beginnings_meet():
    router, draw = Router(4, block=8, slack=10**6), random.Random(0)
    beginnings = [[draw.randrange(100) for _ in range(24)] for _ in range(12)]
    seen = {}
    for _ in range(300):
        which = draw.randrange(12)
        replica = router.route(beginnings[which] + [draw.randrange(100) for _ in range(draw.randrange(20))])
        assert seen.setdefault(which, replica) == replica
    shares = Counter(seen.values()).values()
    assert len(shares) == 4 and max(shares) <= 4, "new beginnings go where there is least to do"


@pytest.mark.parametrize("slack", [0, 3])
def test_no_replica_gets_more_than_slack_ahead(slack):
    """A beginning that everybody has must not end up on one replica."""
    router, draw, under_way = Router(3, block=4, slack=slack), random.Random(0), []
    for i in range(200):
        before = list(router.load)
        under_way.append(router.route("the same beginning of all " + str(i)))
        assert before[under_way[-1]] <= min(before) + slack
        if draw.random() < 0.8:
            router.done(under_way.pop(draw.randrange(len(under_way))))
    assert min(router.load) >= 0 and sum(router.load) == len(under_way)


@pytest.mark.parametrize("prompt", ["", "ab", "abcd", "abcde", [], [1], list(range(4)), list(range(9)), "\ud800" * 5])
def test_prompts_of_all_sizes_are_routed(prompt):
    router = Router(2, block=4)
    first = router.route(prompt)
    whole_blocks = len(prompt) >= 4
    assert (router.route(prompt) == first) == whole_blocks, "what has no whole block is known to nobody"


def test_texts_and_ids_are_not_confused_and_the_memory_is_bounded():
    router = Router(2, block=2, slack=100, most=10)
    assert router.route("12") != router.route([1, 2])
    for i in range(100):
        router.route([i] * 30)
    assert all(len(known) <= 10 for known in router.known)
    for wrong in ({"n": 0}, {"block": 0}, {"slack": -1}, {"most": 0}):
        with pytest.raises(ValueError, match="but must be"):
            Router(**{"n": 1, **wrong})


def hit_rate(n: int, choose) -> float:
    """Of the prompt tokens of a workload: 30 beginnings of 64 tokens, ten questions to each in random order, on n real
    caches that hold half of all beginnings each, and some questions."""
    draw = random.Random(0)
    beginnings = [[draw.randrange(1000) for _ in range(64)] for _ in range(30)]
    order = [i for i in range(30) for _ in range(10)]
    draw.shuffle(order)
    caches = [PagedKVCache(1, 1, 2, 15 * 8 + 40, 8) for _ in range(n)]
    for i, which in enumerate(order):
        prompt = beginnings[which] + [draw.randrange(1000) for _ in range(20)]
        cache = caches[choose(prompt)]
        step = cache.extend({i: prompt[cache.add(i, prompt):]})
        cache.commit(step)
        cache.free(i)
        cache.check()
    return sum(c.stats.found for c in caches) / sum(c.stats.asked for c in caches)


def test_routing_by_prefix_finds_more_than_random_routing():
    """Four replicas: 270 of 300 prompts could find 64 of their 84 tokens if each beginning went to one replica, which
    would make 69 %. A router that looks at something else (the end) is no better than chance."""
    draw, router, backwards = random.Random(1), Router(4, block=8), Router(4, block=8)

    def answered(router, prompt):
        replica = router.route(prompt)
        if sum(router.load) > 16:
            router.done(max(range(4), key=router.load.__getitem__))
        return replica

    by_chance = hit_rate(4, lambda _: draw.randrange(4))
    routed = hit_rate(4, lambda prompt: answered(router, prompt))
    by_the_end = hit_rate(4, lambda prompt: answered(backwards, prompt[::-1]))
    assert routed > 0.6 and by_chance < 0.4 and by_the_end < 0.4, (routed, by_chance, by_the_end)


# ------------------------------------------------------------------ processes


def echo(replica, items, send, how):
    send(f"replica {replica}")
    for item in items:
        if how == "raises" and item == 7:
            raise ValueError("seven cannot be done")
        if how == "dies" and item == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        send(2 * item, True)
    send("end")


def test_items_come_back_done():
    with Replicas(2, echo, ["well"], Router(2, slack=0), ahead=3) as pool:
        assert pool.first() == ["replica 0", "replica 1"]
        values = list(pool.run((str(i), i) for i in range(20)))
        assert sorted(v for _, v in values if v != "end") == [2 * i for i in range(20)]
        assert [v for _, v in values].count("end") == 2 and {r for r, _ in values} == {0, 1}
        assert pool.router.load == [0, 0]


@pytest.mark.parametrize("how, why", [("raises", "seven cannot be done"), ("dies", "of 2 has died with code -9")])
def test_a_replica_that_fails_ends_all_with_its_reason(how, why):
    with Replicas(2, echo, [how], Router(2), ahead=3) as pool:
        pool.first()
        with pytest.raises((RuntimeError, ValueError), match=why):
            list(pool.run((str(i), i) for i in range(20)))
    assert not any(process.is_alive() for process in pool.processes)


def test_answers_come_while_the_next_item_is_slow():
    """The second item is not there before the first has been answered: whoever waits for it waits for ever."""
    with Replicas(2, echo, ["well"], Router(2), ahead=3) as pool:
        pool.first()
        answered = []

        def slow():
            yield "first", 1
            while not answered:
                yield None
            yield "second", 2

        for _, value in pool.run(slow()):
            answered.append(value)
        assert sorted(v for v in answered if v != "end") == [2, 4]


def test_a_death_is_noticed_while_the_next_item_is_slow():
    with Replicas(2, echo, ["dies"], Router(2), ahead=3) as pool:
        pool.first()
        with pytest.raises(RuntimeError, match="has died with code -9"):
            list(pool.run(itertools.chain([("seven", 7)], itertools.repeat(None))))


# ------------------------------------------------------------------ --replicas


@pytest.mark.slow
def test_a_file_of_prompts_is_answered_as_by_one_and_resumed(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    lines = [{"prompt": "hello " * (i % 4) + str(i), "n": 1 + i % 3, "seed": i, "temperature": i % 2, "max_tokens": 5}
             for i in range(20)]
    lines += [{"prompt": "x" * 500}, {"prompt": 3}, {"messages": [{"role": "user", "content": "hi"}], "seed": 1}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    argv = ["--model", tiny_folder(tmp_path / "model"), "--dtype", "float64", "--prompts", str(tmp_path / "in.jsonl")]

    def answers(name, *flags):
        assert generate.main([*argv, "--out", str(tmp_path / name), *flags]) == 1  # two lines are broken
        records = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        return len(records), {r["line"]: [s["ids"] for s in r["samples"]] if "samples" in r else r["error"]
                              for r in records}, capsys.readouterr().err

    _, one, _ = answers("one")
    n, two, said = answers("two", "--replicas", "2")
    assert two == one and n == 23 and "2 errors" in said and said.count("error: line") == 2
    whole = (tmp_path / "two").read_text().splitlines(keepends=True)
    (tmp_path / "two").write_text("".join(whole[:9]) + whole[9][:20])  # killed while it wrote
    _, again, said = answers("two", "--replicas", "2", "--resume")
    assert again == one and "were answered before" in said
    _, again, said = answers("two", "--resume")
    assert again == one and "were answered before" in said, "one process goes on where two ended"
