"""job.py - a composition root: a file of prompts to a file of answers, by one model or by several replicas of it.

    python generate.py --prompts questions.txt --out answers.jsonl --resume

    prompts.read_prompts -> lines, one by one as their time comes -> a model here, or --replicas -> prompts.Results

Each answer is written as soon as it has ended, in whatever order that is. It is known by its line and by all that was
asked of it: the flags, the line's own options, the model and how it runs. So a job that was killed goes on where it
ended, and one with other flags answers anew. An error of a line is its answer; the other lines do not notice.
"""
from __future__ import annotations

import argparse
import json
import queue
import signal
import sys
import threading
import time
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from heapq import heappop, heappush
from types import SimpleNamespace

import torch

import batching
import prompts
import ranks
import replicas
import traffic
from llm import FORM, LLM, Answer

AHEAD = 1024  # lines of a prompts file read before their time has come

# ------------------------------------------------------------------ the job


def run(args: argparse.Namespace, options: dict, load: Callable[..., LLM], group: ranks.Group | None = None) -> int:
    """All of args.prompts to args.out -> the exit code: 1 if a line has an error.

    args are generate.py's, options what they ask of every line, and load(args, group), a function of some module, is
    what makes the model of them, here or in each replica.
    """
    from tqdm import tqdm

    if args.out in (None, "-") and sys.stdout is None:
        raise ValueError("standard output is closed; name a file for the answers with --out")
    lines = prompts.read_prompts(args.prompts)
    bar = partial(tqdm, unit=" prompts", file=sys.stderr, disable=args.quiet or sys.stderr is None or None)
    with ExitStack() as stack:
        results = stack.enter_context(prompts.Results(args.out, args.resume))
        if args.replicas > 1:
            router = replicas.Router(args.replicas)
            pool = stack.enter_context(replicas.Replicas(args.replicas, _replica, [args, options, load], router,
                                                          2 * args.max_batch))
            about, model = pool.start(first_alone=args.compile)[0]
            about = f"{args.replicas} replicas, each {about}"
            job = _Routed(args, options, model, results, stack.enter_context(bar()), batching.Stats())
            work = partial(job.run, pool, lines)
        else:
            llm = load(args, group)
            about, job = llm.about, _Here(llm, args, options, lines, results, stack.enter_context(bar()))
            work = job.run
        if not args.quiet:
            say(about)
        try:
            work()
        finally:
            job.bar.close()
            if not args.quiet:
                say(job.about())
    return 1 if job.broken else 0


# ------------------------------------------------------------------ what is left, and what was written


def _read_ahead(lines: Iterator) -> queue.Queue:
    """What comes of lines, as it comes: standard input may keep us waiting. Behind it None, or the exception in it."""
    read: queue.Queue = queue.Queue(AHEAD)

    def feed() -> None:
        try:
            for line in lines:
                read.put(line)
            read.put(None)
        except Exception as error:
            read.put(error)

    threading.Thread(target=feed, daemon=True).start()
    return read


class _Job:
    """Lines on their way to a file of answers, whoever answers them: which are left, what was written, how it went.

    options is what is asked of every line, model what an answer is known by beside it.
    """

    def __init__(self, args: argparse.Namespace, options: dict, model: str, results: prompts.Results, bar,
                 stats: batching.Stats):
        self.args, self.options, self.model = args, options, model
        self.results, self.bar, self.stats = results, bar, stats
        self.done = self.broken = 0  # answered before; errors
        self.times: list[traffic.Timeline] = []  # of every sample
        self.begin = time.perf_counter()

    def _left(self, line: prompts.Line) -> prompts.Line | None:
        """The line with all that is asked of it, or None if its answer is there already."""
        line = self._completed(line)
        if self.results.done(line):
            self.done += 1
            self.broken += line.error is not None
            return None
        return line

    def _completed(self, line: prompts.Line) -> prompts.Line:
        """What is asked of all is asked of this line too, and is part of what its answer is known by."""
        if line.error is not None:
            return line
        own = {"raw": self.args.raw, "system": None if line.options.get("raw") else self.args.system}
        own = {k: v for k, v in own.items() if v} if isinstance(line.prompt, str) else {}
        shared = {k: v for k, v in self.options.items() if v is not None and v != []}
        if not set(FORM).isdisjoint(line.options):  # a line's own form is in place of the one that is asked of all
            shared = {k: v for k, v in shared.items() if k not in FORM}
        return line._replace(options={**shared, **own, "model": self.model, **line.options})

    def _finish(self, record: dict, error: str | None) -> None:
        try:
            self.results.write(record)
        except BrokenPipeError:
            raise
        except OSError as failure:
            raise ValueError(f"{self.results.name} cannot be written: {failure.strerror}; make room, then go on with "
                             "--resume") from None
        self.bar.update()
        if error is not None:
            self.broken += 1
            if not self.args.quiet and sys.stderr is not None:
                self.bar.write(f"error: {error}", file=sys.stderr)

    def _drafting(self) -> list[str]:
        return []

    def about(self) -> str:
        """What became of it, for people."""
        wall, s = time.perf_counter() - self.begin, self.stats
        hits = f", {s.cached / s.prompt:.0%} of them cached" if s.prompt else ""
        before = f"; {self.done} were answered before" if self.done else ""
        before += (f"; {self.results.changed} had answers to other prompts, options or models, and were asked anew"
                   if self.results.changed else "")
        parts = [f"{s.prompt:,} prompt tokens{hits}", f"{s.preempted:,} preemptions", *self._drafting(),
                 f"{self.broken} errors{before}"]
        return traffic.describe(traffic.summary(self.times, wall)) + "\n" + "; ".join(parts)


# ------------------------------------------------------------------ by a model of this process


class _Here(_Job):
    """They are answered by a model of this process. `at` must ascend, but for AHEAD lines."""

    def __init__(self, llm: LLM, args: argparse.Namespace, options: dict, lines: Iterator, results: prompts.Results,
                 bar):
        self.llm, self.lines = llm, lines
        llm.batcher = llm.new_batcher(chunk=None)  # nobody reads along: long pieces of prompts cost less in all
        llm.answer([0], **options)  # a flag that no line could do with is refused now
        self.waiting: list[tuple[float, int, prompts.Line]] = []  # a heap of those read, by arrival
        self.ended: deque[tuple] = deque()  # answers to be written
        # An answer is known by what it was asked of: the model, and how it runs.
        model = f"{llm.name} {llm.weights} {sorted(llm.defaults.items())} {llm.fingerprint}"
        model += " deterministic" if args.deterministic else ""
        super().__init__(args, options, model, results, bar, llm.batcher.stats)

    def run(self) -> None:
        batcher, more, read = self.llm.batcher, True, _read_ahead(self.lines)
        while more or self.waiting or batcher.live:
            idle = not (self.waiting or batcher.live)
            while more and len(self.waiting) < AHEAD and (idle or not read.empty()):
                line, idle = read.get(), False
                if isinstance(line, Exception):
                    raise line
                more = line is not None
                if more:
                    self._take(line)
            now = time.perf_counter() - self.begin
            while self.waiting and self.waiting[0][0] <= now and len(batcher.live) < 2 * batcher.max_batch:
                self._submit(heappop(self.waiting)[2])
            if batcher.live:
                batcher.step()
            elif self.waiting:
                time.sleep(min(0.02, max(0.0, self.waiting[0][0] - now)))
            while self.ended:  # subtle: here, as the batcher takes what a listener raises for the request's own fault
                self._write(*self.ended.popleft())

    def _take(self, line: prompts.Line) -> None:
        if (left := self._left(line)) is not None:
            heappush(self.waiting, (left.at, left.number, left))

    def _submit(self, line: prompts.Line) -> None:
        if line.error is not None:
            return self._finish(prompts.head(line), line.error)
        options = {k: v for k, v in line.options.items() if k not in ("raw", "system", "model")}
        try:
            if isinstance(line.prompt, str):
                ids = self.llm.encode(line.prompt, raw=line.options.get("raw", False),
                                      system=line.options.get("system"))
            elif isinstance(line.prompt[0], dict):
                ids = self.llm.encode_chat(line.prompt)
            else:
                ids = line.prompt
            answer = self.llm.answer(ids, **options)
            n = answer.request.n
            times = [traffic.Timeline(line.at, array("d")) for _ in range(n)]  # type: ignore[arg-type]
            answer.request.on_event = partial(self._hear, line, answer, times, set(range(n)))
            answer.begin()
        except ValueError as error:
            why = f"line {line.number}: {' '.join(str(error).split())}"
            self._finish({**prompts.head(line), "error": why, "finish_reason": "error"}, why)

    def _hear(self, line: prompts.Line, answer: Answer, times: list[traffic.Timeline], running: set[int],
              event: batching.Event) -> None:
        if event.token is not None:
            times[event.sample].times.append(time.perf_counter() - self.begin)
        if event.finish_reason is not None:
            running.discard(event.sample)
            if not running:
                self.ended.append((line, answer, times))

    def _write(self, line: prompts.Line, answer: Answer, times: list[traffic.Timeline]) -> None:
        self.times += times
        record = {**prompts.head(line), "prompt_tokens": len(answer.prompt_ids), "cached_tokens": answer.cached,
                  "samples": [sample_json(s) for s in answer.samples],
                  **{f"{name}_s": getattr(times[0], name) for name in ("ttft", "tpot", "e2e")}}
        errors = [s.error for s in answer.samples if s.error]
        self._finish(record, f"line {line.number}: {errors[0]}" if errors else None)

    def _drafting(self) -> list[str]:
        return drafting(self.llm)


# ------------------------------------------------------------------ by several replicas


class _Sender:
    """Results, for a replica: what it has answered goes to the process that writes."""

    def __init__(self, send):
        self.write = partial(send, done=True)

    def done(self, line: prompts.Line) -> bool:
        return False


def _replica(number: int, items: Iterator, send, args: argparse.Namespace, options: dict, load: Callable) -> None:
    """One of --replicas: answers the lines that it is sent, each with the time at which that was. On GPUs each replica
    has one of its own, as far as they go."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads or max(1, torch.get_num_threads() // args.replicas))
    if args.device in ("auto", "cuda") and torch.cuda.is_available():
        args.device = f"cuda:{number % torch.cuda.device_count()}"
        torch.cuda.set_device(args.device)
    args.quiet = True
    llm = load(args, None)

    def lines() -> Iterator:
        for n, (now, line) in enumerate(items):
            if n == 0:  # of all replicas, however long each took to load, the clock is that of who sends
                job.begin = time.perf_counter() - now
            yield line

    no_bar = SimpleNamespace(update=lambda: None)
    job = _Here(llm, args, options, lines(), _Sender(send), no_bar)  # type: ignore[arg-type]
    send((llm.about, job.model))
    job.run()
    send((job.times, llm.batcher.stats))


class _Routed(_Job):
    """They are answered by several replicas, and written here."""

    def run(self, pool: replicas.Replicas, lines: Iterator) -> None:
        for _, value in pool.run(self._asked(lines)):
            if isinstance(value, dict):  # a record; the errors of its samples name no line
                errors = [f"line {value['line']}: {s['error']}" for s in value.get("samples", ()) if "error" in s]
                self._finish(value, value.get("error") or next(iter(errors), None))
            else:
                times, stats = value
                self.times += times
                for name in ("prompt", "cached", "preempted"):
                    setattr(self.stats, name, getattr(self.stats, name) + getattr(stats, name))

    def _asked(self, lines: Iterator) -> Iterator[tuple | None]:
        """Of those that have no answer yet and whose time has come, pairs of what to route by, and the time and the
        line; None while there is no such line."""
        read, waiting, more = _read_ahead(lines), [], True
        while more or waiting:
            with suppress(queue.Empty):
                while more and len(waiting) < AHEAD:
                    line = read.get_nowait()
                    if isinstance(line, Exception):
                        raise line
                    more = line is not None
                    left = self._left(line) if more else None
                    if left is not None:
                        heappush(waiting, (left.at, left.number, left))
            now = time.perf_counter() - self.begin
            if not waiting or waiting[0][0] > now:
                yield None
                continue
            line = heappop(waiting)[2]
            if line.error is not None:
                self._finish(prompts.head(line), line.error)
            else:
                prompt, system = line.prompt, line.options.get("system")
                if isinstance(prompt, str):
                    prompt = f"{system}\n{prompt}" if system else prompt
                elif isinstance(prompt[0], dict):
                    prompt = json.dumps(prompt)
                yield prompt, (now, line)  # what its text will begin with is what it is routed by


# ------------------------------------------------------------------ what generate.py tells in the same words


def say(text: str) -> None:
    """A line to standard error."""
    if sys.stderr is not None:  # closed
        print(text, file=sys.stderr, flush=True)


def drafting(llm: LLM) -> list[str]:
    """What became of its drafts: one text, if there were any."""
    s = llm.batcher.stats
    if llm.drafter is None or not s.generated:
        return []
    rate = f", {s.accepted / s.drafted:.0%} accepted" if s.drafted else ""
    return [f"{s.drafted} drafts{rate}, {s.generated / s.turns:.2f} tokens a pass"]


def sample_json(s: batching.Sample) -> dict:
    """What JSON tells of a sample."""
    found = {"ids": s.ids, "text": s.text, "finish_reason": s.finish_reason}
    if s.request.logprobs is not None:
        found["logprobs"] = s.logprobs
    return found if s.error is None else {**found, "error": s.error}
