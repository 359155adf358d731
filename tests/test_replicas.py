"""replicas.py: who gets which, what that does for real prefix caches, and processes that answer or die."""
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import tiny_folder

import generate
import job
from batching import Stats
from kvcache import PagedKVCache
from prompts import read_prompts
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
        if how == "ends" and item == 7:
            raise EOFError
        if how == "breaks" and item == 7:
            raise BrokenPipeError("the pipe of something else")
        send(2 * item, True)
    send("end")


def test_items_come_back_done():
    with Replicas(2, echo, ["well"], Router(2, slack=0), ahead=3) as pool:
        assert pool.start() == ["replica 0", "replica 1"]
        values = list(pool.run((str(i), i) for i in range(20)))
        assert sorted(v for _, v in values if v != "end") == [2 * i for i in range(20)]
        assert [v for _, v in values].count("end") == 2 and {r for r, _ in values} == {0, 1}
        assert pool.router.load == [0, 0]


@pytest.mark.parametrize("how, why", [
    ("raises", "seven cannot be done"), ("dies", "of 2 has died with code -9"), ("ends", "EOFError"),
    ("breaks", "the pipe of something else")])  # the last two are the work's own, though a pipe raises them too
def test_a_replica_that_fails_ends_all_with_its_reason(how, why):
    with Replicas(2, echo, [how], Router(2), ahead=3) as pool:
        pool.start()
        with pytest.raises((RuntimeError, ValueError), match=why):
            list(pool.run((str(i), i) for i in range(20)))
    assert not any(process.is_alive() for process in pool.processes)


def test_answers_come_while_the_next_item_is_slow():
    """The second item is not there before the first has been answered: whoever waits for it waits for ever."""
    with Replicas(2, echo, ["well"], Router(2), ahead=3) as pool:
        pool.start()
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
        pool.start()
        with pytest.raises(RuntimeError, match="has died with code -9"):
            list(pool.run(itertools.chain([("seven", 7)], itertools.repeat(None))))


def quiet_end(replica, items, send, folder):
    """Says what became of it, in a file."""
    send("here")
    try:
        send([item for item in items])
    except Exception as error:
        with open(os.path.join(folder, str(replica)), "w") as file:
            file.write(type(error).__name__)
        raise


def test_replicas_end_by_themselves_when_nobody_is_there_any_more(tmp_path, capfd):
    """As when the process that started them is killed: the pipe ends, and they do, without a word."""
    pool = Replicas(2, quiet_end, [str(tmp_path)], Router(2), ahead=1)
    assert pool.start() == ["here"] * 2
    for pipe in pool.pipes:
        pipe.close()
    for process in pool.processes:
        process.join()
        assert process.exitcode == 0
    assert [(tmp_path / str(r)).read_text() for r in range(2)] == ["Gone"] * 2 and capfd.readouterr() == ("", "")


def late(replica, items, send, folder):
    """Says which files it finds, and leaves one of its own."""
    found = sorted(os.listdir(folder))
    (Path(folder) / str(replica)).touch()
    send(found)


@pytest.mark.parametrize("first_alone", [True, False])
def test_the_first_can_be_alone_at_first(tmp_path, first_alone):
    """What it makes, the others find."""
    with Replicas(3, late, [str(tmp_path)], Router(3), ahead=1) as pool:
        first, *others = pool.start(first_alone)
        assert first == [] or not first_alone
        assert all("0" in found for found in others) or not first_alone
        assert list(pool.run([])) == []
    assert len(os.listdir(tmp_path)) == 3


def test_one_that_ends_without_a_word_is_told():
    with (Replicas(1, silent, [], Router(1), ahead=1) as pool,
          pytest.raises(RuntimeError, match="replica 0 of 1 has ended before it said anything")):
        pool.start()


def silent(replica, items, send):
    pass


def test_a_first_one_that_fails_is_the_only_one(tmp_path):
    """Its reason is told, and no other has been started."""
    with (Replicas(3, echo, [], Router(3), ahead=1) as pool, pytest.raises(ValueError, match="missing 1 required")):
        pool.start(first_alone=True)
    assert len(pool.processes) == 1 and not pool.processes[0].is_alive()


FILES = {"slow.py": """
import multiprocessing, os, time
if multiprocessing.current_process().name != "MainProcess":
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(600)
def work(*_):
    pass
""", "starts.py": """
import signal
import slow
from replicas import Replicas, Router
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started without it
    with Replicas(2, slow.work, [], Router(2), ahead=1) as pool:
        try:
            pool.start()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
"""}


def test_ctrl_c_while_replicas_start_says_nothing(tmp_path):
    """A terminal's Ctrl-C goes to all processes of the group, at any moment: here into an import, as that of torch,
    which comes before anything that they could do about it themselves."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    with subprocess.Popen([sys.executable, "starts.py"], cwd=tmp_path, env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            for child in [int(process.stdout.readline()) for _ in range(2)]:
                if os.path.exists(f"/proc/{child}/status"):  # Linux tells which signals never come to it
                    status = Path(f"/proc/{child}/status").read_text()
                    blocked = int(re.search(r"^SigBlk:\s*(\w+)$", status, re.MULTILINE)[1], 16)
                    assert blocked & 1 << (signal.SIGINT - 1)
        finally:
            os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (out, err) == ("interrupted\n", "") and process.returncode == 0


def say_first(replica, items, send):
    send(replica)
    list(items)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="there are no such signals here")
def test_a_stopped_replica_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr("replicas.GRACE_S", 0.1)
    with Replicas(2, say_first, [], Router(2), ahead=1) as pool:
        assert len(pool.start()) == 2
        os.kill(pool.processes[0].pid, signal.SIGSTOP)
    assert not any(process.is_alive() for process in pool.processes)


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


def routed(written: list) -> job._Routed:
    args = SimpleNamespace(raw=False, system=None, quiet=True)
    results = SimpleNamespace(done=lambda line: False, write=written.append, name="out")
    return job._Routed(args, {}, "a model", results, SimpleNamespace(update=lambda: None), Stats())


def test_lines_come_when_it_is_their_time(tmp_path):
    """In the order of arrival, whatever their order in the file; none before its time, when it would hold a place of
    those that are due. An error is written in its turn."""
    lines = [{"prompt": "1", "at": 1500}, {"prompt": "2"}, {"prompt": "3", "at": 90}, {"prompt": "4", "at": 1200},
             {"prompt": "5", "at": 90}, {"prompt": 6, "at": 1300}, {"prompt": "7", "at": 10**6}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    written = []
    ours = routed(written)
    asked, said = ours._asked(read_prompts(str(tmp_path / "in.jsonl"))), []
    for since, wanted in ((1000, "235"), (2000, "41")):
        ours.begin = time.perf_counter() - since
        said.extend(next(iter(item for item in asked if item is not None)) for _ in wanted)
        assert [next(asked) for _ in range(3)] == [None] * 3, "of those that are left, nobody's time has come"
        assert "".join(prompt for prompt, _ in said[-len(wanted):]) == wanted
    assert all(now >= line.at for _, (now, line) in said) and [r["line"] for r in written] == [6]


def test_a_replica_takes_the_clock_of_who_sends(monkeypatch):
    """However long it took to load: times of arrival, and what is measured from them, mean the same on all."""
    monkeypatch.setattr(job.signal, "signal", lambda *_: None)
    monkeypatch.setattr(job.torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(job.warnings, "simplefilter", lambda _: None)

    class Here:
        def __init__(self, llm, args, options, lines, results, bar):
            self.lines, self.model, self.times, self.begin = lines, "a model", [], None

        def run(self):
            self.times = list(self.lines)

    made = []
    monkeypatch.setattr(job, "_Here", lambda *args: made.append(Here(*args)) or made[-1])
    said, args = [], SimpleNamespace(threads=1, replicas=2, device="cpu", quiet=False)
    before = time.perf_counter()
    job._replica(0, iter([(100.0, "one"), (900.0, "two")]), said.append, args, {},
                 lambda *_: SimpleNamespace(about="", batcher=SimpleNamespace(stats=None)))
    assert before - 100 <= made[0].begin <= time.perf_counter() - 100 and said[1][0] == ["one", "two"]


@pytest.mark.parametrize("replicas, compile", [(1, True), (3, False), (3, True)])
def test_of_replicas_that_compile_one_does_it(monkeypatch, tmp_path, replicas, compile):
    """The others start when it is ready, and find its library."""
    told = []

    class Pool(Replicas):
        def start(self, first_alone=False):
            told.append(first_alone)
            raise ValueError("enough")

    monkeypatch.setattr(job.replicas, "Replicas", Pool)
    monkeypatch.setattr(generate, "_load", lambda *_: (_ for _ in ()).throw(ValueError("enough")))
    (tmp_path / "in").write_text("hello\n")
    assert generate.main(["--prompts", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--quiet", "--replicas",
                          str(replicas), *(["--compile"] if compile else [])]) == 2
    assert told == ([] if replicas == 1 else [compile])
