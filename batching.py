"""batching.py - continuous batching: which request gets how many tokens in this step.

The one idea (Yu et al. 2022, "Orca"): decide anew before every pass of the model. A pass reads all weights however few
rows it has, so rows are nearly free, and a row whose request has ended should go to the next request at once, not
when the longest of its batch is done:

    static      A: ppaaaaaaaa        continuous   A: ppaaaaaaaa
                B: ppbb......                     B: ppbbDDDDDDdd
                C:           ppccc                C:     ppccc

Its second half (Agrawal et al. 2023, "Sarathi"): a prompt need not be computed in one piece. A step has a budget of
tokens. Those who are generating get theirs first, one each (more with drafts), and what is left of the budget, or
`chunk` if that is less, goes to pieces of prompts. So nobody who is reading an answer waits for somebody else's prompt.

    step 7   A +1   B +1   C +1   D prompt 0..28          32 tokens, one pass, no row is special
    step 8   A +1   B +1   C +1   D prompt 29..57

There are no states "prefill" and "decode". A sample is a list of ids, of which the cache holds the first so many; the
others are pending. Whoever has one pending id generates, whoever has more catches up, whether it is new or comes back
from preemption; when a step computes the last pending id, the row gives the next one. All bookkeeping follows from two
numbers, so a step that fails is rolled back and nothing has happened.

    batcher = Batcher(model, cache, sampling, vocab_size, eos_ids=[2], decoder=lambda ids, stop: StreamDecoder(...))
    batcher.add(Request(prompt_ids, max_tokens=50, sampling={"temperature": 0.7}, seed=1))
    while batcher.live:
        for event in batcher.step(): print(event.text, end="")

**Order.** First come, first served; priority p overtakes at most 64 p earlier requests, so nobody starves. When
blocks run out the newest is preempted: its blocks are given back, its ids stay, and it returns to its old place in the
queue. Its keys and values are computed again, or come back from a copy if `swap`. Randomness is a function of (seed,
sample, position), so it goes on with the words it would have said. What can never fit is refused by `add`.
**Sharing.** Prefixes that the cache knows are not computed. n samples of one prompt are forked from the first when the
prompt is there: one prompt, n answers.
**Speculation** is nothing special either: a sample's pending id and k drafts are one extension of k + 1 ids, of which
`verify` says how many stay.
**Constraints.** A request may keep to a form: `constraint()` gives each sample a function allowed(ids) -> (V,) bool,
the ids that may come behind those that it has said, an end among them where the answer may end; `warp` applies it
before all else. It depends on nothing but these ids, so refused drafts, steps that are rolled back and preemption need
no care. Row j is asked with the drafts before it; a draft that is not allowed has p = 0 and is never kept, whatever q
it came from (the theorem holds for any p and q), and rows behind it are not asked. An end that min_tokens or ignore_eos
would forbid comes all the same where nothing else may: there the answer stops.
**Bits.** A sum's last bits depend on how it is cut, and a model cuts by how many rows it is given. With `deterministic`
a step is a chunk of one prompt, cut at fixed multiples, or one id of each who is past his own, in turn; what is
computed again is cut as it was, and of others' prompts only whole chunks are found. So all that is left to differ is
how many ids a step of the second kind has: if model and attention do not mind (llm.py tries that out), the bits of an
answer depend on nobody's company.
**Faults.** A row of NaN ends its request with "error" and publishes no block. After an exception the step is rolled
back and its samples run one by one: who fails alone ends with "error", the others never notice.

What is passed in: `model(tokens, positions, attend, rows) -> logits`; a cache with add, extend, commit, rollback, fork,
free, length, in, blocks_needed, n_free, n_blocks, block_size, max_seq_len (export and import_ for swapping), as in
kvcache.py; `sampling`, the module or any object with check, params, stack, warp, draw, logprobs and uniforms.
Left out: chunks of one prompt in several places at once, admission by deadline, threads.

Shapes: B samples that speak, N packed tokens, R rows of logits, K most drafts, V vocabulary.
"""
from __future__ import annotations

import os
import time
import warnings
from bisect import insort
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from operator import index
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

AHEAD = 64  # a request of priority p is served before those that came at most AHEAD * p requests earlier
TOKEN, ACCEPT, DRAFT = 0, 1, 2  # what a uniform is for: a token, accepting a draft, drafting

# ------------------------------------------------------------------ what goes in and what comes out


class Event(NamedTuple):
    """One token of one sample, or its end."""

    id: Hashable  # of the request
    sample: int  # 0 .. n - 1
    token: int | None  # None: an end without a token
    text: str  # what may be shown now; joined, the whole text
    finish_reason: str | None = None  # stop, length, abort or error; None: it goes on
    logprobs: dict | None = None  # {"id", "logprob", "top": [[id, logprob], ..]} if asked for


@dataclass(eq=False)
class Request:
    """What somebody wants. `Batcher.add` checks it and fills `samples`.

    max_tokens  most generated tokens, the stop token included; None: what context and cache hold
    min_tokens  so many before an end-of-text token (or a stop string that is one) may come
    stop        strings that end the text; ignore_eos: the model's own end-of-text tokens do not
    sampling    temperature, top_k, ... as sampling.check knows them; {} is plain sampling at temperature 1
    seed        None: a fresh one; n: how many answers, each with its own randomness
    logprobs    log-probabilities of each token and of so many likeliest ones
    constraint  called once for each sample -> allowed(ids), see above (Grammar.start of grammar.py, say); None: any id.
                An exception of it, or a mask without any id, ends the request with "error"
    salt        only requests of equal salt share cached prefixes
    on_event    called with every Event when its step is done; it may add and abort, and if it raises, this request ends
                with "error"
    """

    prompt_ids: Sequence[int]
    id: Hashable = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    constraint: Callable[[], Callable[[list[int]], torch.Tensor]] | None = None
    priority: int = 0
    salt: str = ""
    on_event: Callable[[Event], Any] | None = None
    samples: list[Sample] = field(default_factory=list, init=False, repr=False)
    limit: int = field(default=0, init=False, repr=False)  # most tokens that it can get
    rank: int = field(default=0, init=False, repr=False)  # its place in the queue, the lowest first
    ends: frozenset[int] = field(default=frozenset(), init=False, repr=False)  # ids that end it
    params: Any = field(default=None, init=False, repr=False)  # sampling's parameters, a row
    penalised: bool = field(default=False, init=False, repr=False)  # they look at what was said before
    forked: bool = field(default=False, init=False, repr=False)  # the prompt is computed, each sample is on its own
    box: deque[Event] | None = field(default=None, init=False, repr=False)  # where its events go, if not to `step`


@dataclass(eq=False)
class Sample:
    """One answer to a request, and its name in the cache."""

    request: Request
    index: int
    context: list[int]  # prompt and answer; the cache holds the first cache.length(self) of them
    ids: list[int] = field(default_factory=list)  # the answer, the stop token included
    finish_reason: str | None = None
    error: str | None = None  # what went wrong, for people
    logprobs: list[dict] = field(default_factory=list)
    cached: int = 0  # prompt tokens that were in the cache when it began
    preempted: int = 0  # how often
    decoder: Any = field(default=None, repr=False)
    allowed: Callable[[list[int]], torch.Tensor] | None = field(default=None, repr=False)  # see Constraints
    fault: tuple[int, str] | None = field(default=None, repr=False)  # behind how many ids it failed, and how
    served: int = -1  # the last step that computed something of it
    swapped: dict | None = field(default=None, repr=False)  # keys and values while it waits

    @property
    def text(self) -> str:
        return self.decoder.text if self.decoder else ""


@dataclass
class Stats:
    """Counted since the batcher was made."""

    steps: int = 0
    computed: int = 0  # tokens that went through the model
    generated: int = 0
    turns: int = 0  # how often a sample had its turn to say something; generated / turns: tokens of a pass
    prompt: int = 0  # prompt tokens of the requests that were begun
    cached: int = 0  # of these, found in the cache
    preempted: int = 0
    drafted: int = 0  # drafts that were verified
    accepted: int = 0
    failed: int = 0  # steps rolled back


class _Head(NamedTuple):
    """One sample that speaks in a step."""

    sample: Sample
    drafts: list[int]  # guesses of what it will say
    q: torch.Tensor | None  # (k, V), the distributions they were drawn from; None: they were not
    row: int  # its first row of logits, behind no draft; the next is behind one, ..


def _order(s: Sample) -> tuple[int, int]:
    return s.request.rank, s.index


class Batcher:
    """Runs requests. Not for use by several threads at once.

    token_budget  most tokens of one step;  chunk  most prompt tokens of a step in which somebody generates
    max_batch     most samples at once;     swap   preempted samples keep a copy of their keys and values
    eos_ids       token ids that end an answer;  decoder(prompt_ids, stop)  an object with push(id) -> text, finish(),
                  text, stopped and stop_ids (StreamDecoder of stream.py); None: ids only
    forward(step) runs a step -> logits (R, V) of step.rows, if not the model itself does (CUDA graphs, say)
    static        None, or a batch at a time, for comparison: nobody joins those who run. "pad": prompts are padded to
                  the longest, and ended answers computed on until the last one ends; "drop": neither
    drafter       propose(contexts, k, choose), forget(sample);  verify  as in speculative.py;  drafts  how many: a
                  number, or an object with k(sample, n_batch), record(sample, drafted, accepted), time(rows, seconds),
                  time_draft(seconds, k) and forget(sample) (AdaptiveK of speculative.py)
    deterministic  None, or the tokens of a chunk, in place of token_budget and chunk: see Bits. It swaps
    """

    def __init__(self, model: Callable | None, cache, sampling, vocab_size: int, *, eos_ids: Iterable[int] = (),
                 decoder: Callable | None = None, token_budget: int = 512, chunk: int | None = None,
                 max_batch: int = 16, swap: bool = False, static: str | None = None, forward: Callable | None = None,
                 drafter=None, verify: Callable | None = None, drafts=4, deterministic: int | None = None,
                 clock: Callable[[], float] = time.perf_counter):
        for name, value in (("token_budget", token_budget), ("chunk", chunk), ("max_batch", max_batch),
                            ("deterministic", deterministic)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, but must be 1 or more")
        if static not in (None, "pad", "drop"):
            raise ValueError(f"static is {static!r}, but must be None, 'pad' or 'drop'")
        if (drafter is None) != (verify is None):
            raise ValueError("speculation takes a drafter and verify; give both or none")
        if deterministic and (drafter or static):
            raise ValueError("drafts and padding change how many rows a step has, and so the bits of what it gives; "
                             "leave out deterministic, or drafter and static")
        self.forward = forward or (lambda step: model(step.tokens, step.positions, step.attend, step.rows))
        self.cache, self.sampling, self.vocab_size, self.eos_ids = cache, sampling, vocab_size, frozenset(eos_ids)
        self.decoder, self.token_budget, self.chunk = decoder, token_budget, chunk or token_budget
        self.max_batch, self.swap, self.static, self.clock = max_batch, swap or bool(deterministic), static, clock
        self.deterministic, self._reads = deterministic, False  # _reads: the last step was a chunk of a prompt
        nothing = dict.fromkeys(("record", "time", "time_draft", "forget"), lambda *_: None)
        self.drafter, self.verify = drafter, verify
        self.drafts = drafts if hasattr(drafts, "k") else SimpleNamespace(k=lambda *_: drafts, **nothing)
        self.live: dict[Hashable, Request] = {}  # requests with a sample that has not ended
        self.waiting: list[Sample] = []  # in order of rank
        self.running: list[Sample] = []  # those in the cache, in the order of their admission
        self.stats = Stats()
        self._number = 0  # of requests so far
        self._leaving: list[Sample] = []  # not to stay in the cache
        self._padding: list[Sample] = []  # in static "pad": ended, and computed on until the batch is done
        self._alone: deque[Sample] = deque()  # to be run one by one, after a step that failed
        self._untold: deque[tuple[Request, Event]] = deque()
        self._events: deque[Event] = deque()  # told, but not returned yet

    # ---- a request's life

    def add(self, request: Request, box: deque[Event] | None = None) -> Hashable:
        """Queue a request -> its id (a number, if it has none). ValueError, in one sentence, if it cannot be served.

        box: takes its events, in place of `step`.

        >>> cache = SimpleNamespace(max_seq_len=8, n_blocks=4, block_size=4)
        >>> Batcher(None, cache, None, vocab_size=10).add(Request([1] * 9))
        Traceback (most recent call last):
        ValueError: the prompt has 9 tokens, but the context is 8; shorten it
        """
        r, (checked, decoders) = request, self.check(request)
        allowed = [None if r.constraint is None else r.constraint() for _ in decoders]
        ends = self.eos_ids if r.constraint is not None or not r.ignore_eos else frozenset()
        ends = ends | (decoders[0].stop_ids if decoders[0] else set())
        r.ends = frozenset(i for i in ends if 0 <= i < self.vocab_size)  # what no row of logits has cannot come
        r.params = self.sampling.params([r.sampling], self.vocab_size)
        off = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
        r.penalised = any(checked.get(name, value) != value for name, value in off.items())
        r.seed = int.from_bytes(os.urandom(8), "little") if r.seed is None else r.seed
        self._number += 1
        r.id = next(i for i in count(self._number) if i not in self.live) if r.id is None else r.id
        r.rank = self._number - AHEAD * r.priority
        r.samples = [Sample(r, i, list(r.prompt_ids), decoder=d, allowed=a)
                     for i, (d, a) in enumerate(zip(decoders, allowed))]
        r.box, self.live[r.id] = box, r
        insort(self.waiting, r.samples[0], key=_order)  # the others are forked from it
        if r.limit == 0:
            self._end(r.samples[0], "length")
            self._deliver()
        return r.id

    def check(self, r: Request) -> tuple[dict, list]:
        """A request's sampling parameters, complete, and its samples' decoders; sets r.limit. Raises as `add`."""
        try:
            hash(r.id)
            r.prompt_ids, r.sampling = [index(i) for i in r.prompt_ids], dict(r.sampling)
            r.min_tokens, r.n, r.priority = map(index, (r.min_tokens, r.n, r.priority))
            r.max_tokens, r.seed, r.logprobs = (x if x is None else index(x)
                                                for x in (r.max_tokens, r.seed, r.logprobs))
        except TypeError as error:
            raise ValueError("prompt ids, max_tokens, min_tokens, seed, n, logprobs and priority are whole numbers, "
                             f"sampling is a map, an id can be a key: {error}") from None
        prompt, context, V = len(r.prompt_ids), self.cache.max_seq_len, self.vocab_size
        if r.samples or (r.id is not None and r.id in self.live):
            raise ValueError(f"request {r.id!r} is already there; each can be added once, under an id of its own")
        if not prompt:
            raise ValueError("the prompt is empty; give at least one token")
        bad = next((i for i in r.prompt_ids if not 0 <= i < V), None)
        if bad is not None:
            raise ValueError(f"token id {bad} is outside the model's vocabulary of {V}")
        if context is not None and prompt > context:
            raise ValueError(f"the prompt has {prompt} tokens, but the context is {context}; shorten it")
        for name, value, least, most in (("max_tokens", r.max_tokens, 0, None), ("logprobs", r.logprobs, 0, V),
                                         ("min_tokens", r.min_tokens, 0, r.max_tokens), ("n", r.n, 1, self.max_batch)):
            if value is not None and not least <= value <= (value if most is None else most):
                to = "or more" if most is None else f"to {most}"
                raise ValueError(f"{name} is {value}, but must be {least} {to}")
        if not isinstance(r.salt, str):
            raise ValueError(f"salt is {r.salt!r}, but must be a text")
        if r.stop and self.decoder is None:
            raise ValueError("stop strings need a decoder, and this batcher has none; use eos_ids")
        if not (r.constraint is None or callable(r.constraint)):
            raise ValueError(f"constraint is {r.constraint!r:.80}, but must be a function that makes functions")
        room = self.cache.n_blocks * self.cache.block_size  # in slots, of which the last token needs none
        r.limit = room + 1 - prompt if r.max_tokens is None else r.max_tokens
        r.limit = r.limit if context is None else min(r.limit, context + 1 - prompt)
        if prompt + max(r.limit, 1) - 1 > room:
            raise ValueError(f"the prompt's {prompt} tokens and {r.max_tokens or 1} new ones do not fit into the KV "
                             f"cache, which has room for {room}; shorten it, lower max_tokens or enlarge the cache")
        decoders = [None if self.decoder is None else self.decoder(r.prompt_ids, r.stop) for _ in range(r.n)]
        return self.sampling.check(r.sampling, V), decoders

    def abort(self, id: Hashable) -> None:
        """End a request in whatever state it is; an unknown or ended one is left alone."""
        for s in self.live[id].samples if id in self.live else ():
            self._end(s, "abort")
        self._sweep()
        self._deliver()

    def _end(self, s: Sample, reason: str, token: int | None = None, text: str = "", *, logprobs: dict | None = None,
             error: str | None = None) -> None:
        """s has ended; what it holds is given back by `_sweep`. Nothing happens if it had ended before."""
        if s.finish_reason is not None:
            return
        s.finish_reason, s.error, s.swapped, s.allowed = reason, error, None, None
        for place in (self.running, self.waiting):
            if s in place:
                place.remove(s)
        self._leaving.append(s)
        if all(x.finish_reason is not None for x in s.request.samples):
            del self.live[s.request.id]
        try:
            text += s.decoder.finish() if s.decoder is not None else ""
        except Exception as failure:
            s.error = s.error or f"{type(failure).__name__}: {failure}"
        self._tell(s, token, text, logprobs)
        if not s.request.forked:  # its siblings were to begin with its prompt
            for x in s.request.samples:
                self._end(x, reason, error=error)

    def _tell(self, s: Sample, token: int | None, text: str, logprobs: dict | None = None) -> None:
        self._untold.append((s.request, Event(s.request.id, s.index, token, text, s.finish_reason, logprobs)))

    def _deliver(self) -> None:
        """Hand on what is untold. Never in the middle of a step: whoever hears it may add and abort."""
        while self._untold:
            r, event = self._untold.popleft()
            (self._events if r.box is None else r.box).append(event)
            if r.on_event is not None:
                try:
                    r.on_event(event)
                except Exception as error:
                    r.on_event, why = None, f"on_event raised {type(error).__name__}: {error}"  # it hears no more
                    if r.id not in self.live:
                        warnings.warn(f"request {r.id!r} had ended when {why}", stacklevel=2)
                    for s in r.samples:
                        self._end(s, "error", error=why)
                    self._sweep()

    def _sweep(self) -> None:
        """Take those who are leaving out of the cache."""
        while self._leaving:
            s = self._leaving[-1]
            if self.static == "pad" and self.running and s.finish_reason in ("stop", "length") and s in self.cache:
                self._padding.append(s)
            else:
                self.cache.free(s)
            self._leaving.pop()
            self._forget(s)
            if not self.running:
                self._leaving, self._padding = self._leaving + self._padding, []

    # ---- who is served

    def _pending(self, s: Sample) -> int:
        """How many ids of s the cache does not hold yet: 1 generates the next one, more catch up first."""
        return len(s.context) - self.cache.length(s)

    def _schedule(self) -> tuple[dict[Sample, list[int]], dict[Sample, tuple]]:
        """The ids that each sample of this step adds to the cache, and which of them, at the end, are drafts."""
        while self._alone:  # a step failed: one by one, to find out with whom
            s = self._alone.popleft()
            plan = {s: self._piece(s, self.token_budget)} if s in self.running else {}
            self._make_room(plan)
            if plan:
                return plan, {}
        if self.deterministic:
            return self._in_turn(), {}
        budget = self.token_budget if self.static is None else self.cache.n_blocks * self.cache.block_size
        generating = sorted((s for s in self.running if self._pending(s) == 1), key=lambda s: s.served)
        plan = {s: s.context[-1:] for s in generating[:budget]}  # not all fit: first who went without last time
        closed = (self._make_room(plan) or self.static is not None) and bool(self.running)
        budget -= len(plan)
        waits = self.waiting or any(self._pending(s) > 1 for s in self.running)  # for the other half
        drafts = {} if self.drafter is None else self._draft(plan, budget // 2 if waits else budget)
        budget -= sum(len(ids) for ids, _ in drafts.values())
        if plan:
            budget = min(budget, self.chunk)
        for s in sorted(self.running, key=_order):
            if budget > 0 and self._pending(s) > 1:
                budget -= self._take(plan, s, budget)
        while budget > 0 and not closed and self.waiting and self._admit():
            budget -= self._take(plan, self.running[-1], budget)
        if not plan and self.running:  # each lacks a block to go on, so the first takes the last one's
            first = min(self.running, key=_order)
            plan[first] = self._piece(first, budget)
            self._make_room(plan)
        if self.static == "pad" and plan:
            self._pad(plan)
        return plan, drafts

    def _in_turn(self) -> dict[Sample, list[int]]:
        """A chunk of one prompt, or an id of each who is past his own; in turn, if there are both."""
        def reading() -> list[Sample]:
            return sorted((s for s in self.running if self.cache.length(s) < len(s.request.prompt_ids)), key=_order)

        while self.waiting and not reading() and self._admit():
            pass
        prompts = reading()
        answers = [s for s in self.running if s not in prompts]
        self._reads = bool(prompts) and not (self._reads and answers)
        plan: dict[Sample, list[int]] = {}
        for samples in (prompts[:1], answers) if self._reads else (answers, prompts[:1]):
            plan = plan or {s: self._piece(s, self.token_budget) for s in samples if s in self.running}
            self._make_room(plan)  # the oldest who runs, by himself if need be, always has room
        return plan

    def _pad(self, plan: dict) -> None:
        """Fill a plan of whole pieces up to a rectangle, with ids that are computed for nobody; if there is room."""
        if any(len(ids) < self._pending(s) for s, ids in plan.items()):
            return
        longest, padded = max(map(len, plan.values())), {}
        for s in [*plan, *self._padding]:
            room = self.cache.max_seq_len - self.cache.length(s) if self.cache.max_seq_len is not None else longest
            ids = plan.get(s, []) + [0] * (min(longest, room) - len(plan.get(s, [])))
            padded.update({s: ids} if ids else {})
        if self._blocks(padded) <= self.cache.n_free:
            plan.update(padded)

    def _piece(self, s: Sample, most: int) -> list[int]:
        begin, prompt = self.cache.length(s), len(s.request.prompt_ids)
        if self.deterministic:
            most = max(1, min(self.deterministic - begin % self.deterministic, prompt - begin))
        return s.context[begin: begin + most]

    def _take(self, plan: dict, s: Sample, most: int) -> int:
        """Add a piece of s to the plan, as much as there are blocks for -> how many ids."""
        ids, begin, size = self._piece(s, most), self.cache.length(s), self.cache.block_size
        lacking = self.cache.blocks_needed(s, len(ids)) - (self.cache.n_free - self._blocks(plan))
        if lacking > 0:
            ids = ids[: max(0, (-(-(begin + len(ids)) // size) - lacking) * size - begin)]
        if ids:
            plan[s] = ids
        return len(ids)

    def _blocks(self, plan: Mapping[Sample, Sequence[int]]) -> int:
        """Free blocks that a plan takes at most (forks of one sample may get along with one fewer)."""
        return sum(self.cache.blocks_needed(s, len(ids)) for s, ids in plan.items())

    def _make_room(self, plan: dict) -> bool:
        """Preempt, the newest first, until there are blocks for the plan -> whether anybody was.

        Nothing of what the preempted have said is lost, nor is it said again: they return to the queue with their ids.
        """
        crowded = False
        while self._blocks(plan) > self.cache.n_free:
            s = max(self.running, key=_order)
            if self.swap:
                with suppress(Exception):  # no memory for a copy: it will be computed again
                    s.swapped = {name: x.cpu() for name, x in self.cache.export(s).items()}
            plan.pop(s, None)
            self.running.remove(s)
            insort(self.waiting, s, key=_order)
            self._leaving.append(s)
            s.preempted, self.stats.preempted, crowded = s.preempted + 1, self.stats.preempted + 1, True
            self._sweep()
        return crowded

    def _admit(self) -> bool:
        """Let the first in the queue begin, if there is a place for it and for all that those before it still lack."""
        s, r = self.waiting[0], self.waiting[0].request
        if sum(1 if x.request.forked else x.request.n for x in [s, *self.running]) > self.max_batch:
            return False
        free = self.cache.n_free - sum(self.cache.blocks_needed(x, self._pending(x)) for x in self.running)
        free -= len(self.running)  # each will want a block soon: who is admitted is not to be preempted at once
        self._leaving.append(s)  # until it is in: a failed admission, or an exception in one, leaves nothing behind
        before, cached = self.cache.n_free, self._begin(s)
        lacking = self.cache.blocks_needed(s, len(s.context) - cached) + before - self.cache.n_free  # held by nobody
        if lacking > free:
            self._sweep()
            return False
        if s.swapped is not None:
            self.cache.free(s)
            try:
                self.cache.import_(s, s.swapped, *self._sharing(r))
            except Exception:  # a copy that cannot be read is worth nothing
                self.cache.free(s)
                self._begin(s)
        self._leaving.pop()
        self.running.append(self.waiting.pop(0))
        s.swapped = None
        if not s.ids and not s.preempted:
            s.cached = cached
            self.stats.prompt, self.stats.cached = self.stats.prompt + len(s.context), self.stats.cached + cached
        return True

    def _begin(self, s: Sample) -> int:
        """Begin s in the cache -> how many of its ids are there."""
        cached = self.cache.add(s, s.context, *self._sharing(s.request))
        if self.deterministic and cached % self.deterministic:
            cached -= cached % self.deterministic
            self.cache.trim(s, cached)
        return cached

    def _sharing(self, r: Request) -> tuple:
        """Whose blocks r may find, and how many of its tokens are in blocks that it finds, or others may."""
        if not self.deterministic:
            return (r.salt,)
        # subtle: what a chunk gives has other bits than what the same ids gave one by one, or in a shorter chunk
        chunk = self.deterministic
        return f"{r.salt} in chunks of {chunk}", len(r.prompt_ids) // chunk * chunk

    # ---- a step

    def step(self) -> list[Event]:
        """One pass of the model for whoever is served now -> what is new, also from `add` and `abort` before it.

        Nothing to do gives []. An exception of the model costs at most the request that it comes from; what is no
        Exception (an interrupt) is raised, and the next call goes on as if this one had not been.
        """
        self._advance()
        events, self._events = list(self._events), deque()
        return events

    def run(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Add requests and step until all that is live has ended, these and those that were there before."""
        for request in requests:
            self.add(request)
        while self.live or self._events:
            if not self._events:
                self._advance()
            while self._events:
                yield self._events.popleft()

    def stream(self, request: Request) -> Iterator[Event]:
        """Add a request -> its own events; those of others, who run meanwhile, are for `step`, `run` or their streams.
        Closing the iterator aborts it."""
        box: deque[Event] = deque()
        self.add(request, box)
        return self._stream(request, box)

    def _stream(self, request: Request, box: deque[Event]) -> Iterator[Event]:
        try:
            while box or self.live.get(request.id) is request:
                if not box:
                    self._advance()
                while box:
                    yield box.popleft()
        finally:
            if self.live.get(request.id) is request:
                self.abort(request.id)

    def _advance(self) -> None:
        """A step, without what is new."""
        try:
            self._try_step()
        except Exception:
            raise
        except BaseException:  # an interrupt may have come between any two lines, those of the cache included
            getattr(self.cache, "recover", lambda: None)()
            raise

    def _try_step(self) -> None:
        self._sweep()  # what an interrupt left over
        plan, drafts = self._schedule()
        if not plan and self.live:
            raise RuntimeError(f"{len(self.running)} samples run and {len(self.waiting)} wait, but no step can be made")
        try:
            if plan:
                self._compute(plan, drafts)
        except Exception as error:  # undone by now. With one sample it is that one's fault; else each runs alone once
            self.stats.failed += 1
            if len(plan) == 1:
                self._end(next(iter(plan)), "error", error=f"{type(error).__name__}: {error}")
            else:
                self._alone.extend(s for s in plan if s.finish_reason is None)
        self._sweep()
        self._deliver()

    def _compute(self, plan: dict[Sample, list[int]], drafts: dict[Sample, tuple]) -> None:
        sure, heads, rows, others, at = {}, [], [], {}, 0  # heads: who speaks; rows: of the tokens, to give logits
        for s, ids in plan.items():
            mine, q = drafts.get(s, ([], None))
            sure[s] = min(len(ids), self._pending(s))  # not drafts, not padding
            last = at + sure[s] - 1
            if s.finish_reason is not None or sure[s] < self._pending(s):
                others[s] = last  # nothing to say yet
            else:  # subtle: the first token of n samples is drawn n times from one row, before there are n sequences
                for x in (s,) if s.request.forked else s.request.samples:
                    heads.append(_Head(x, mine, q, len(rows)))
                    rows += range(last, last + 1 + len(mine))
            at += len(ids)
        begin = self.clock()
        step = self.cache.extend(plan, rows + list(others.values()))
        try:
            with torch.inference_mode():
                logits = self.forward(step)  # (R, V)
                said = self._say(heads, logits[: len(rows)]) if heads else []
                # Nothing of a chunk in the middle of a prompt may be published if its last row is not finite.
                bad = (~logits[len(rows):].amax(-1).isfinite()).tolist() if others else []
            said += [(s, [-1], [None]) for s, spoiled in zip(others, bad) if spoiled and s.finish_reason is None]
            seconds = self.clock() - begin
            self.stats.steps, self.stats.computed = self.stats.steps + 1, self.stats.computed + at
            self.stats.turns += len(said)
            for s in plan:
                s.served = self.stats.steps
            first = [s for s in plan if not s.request.forked]
            keep, tried = {s: 0 if s.finish_reason else n for s, n in sure.items()}, {}
            for s, ids, logprobs in said:
                told = self._hear(s, ids, logprobs)
                if s in drafts:
                    tried[s] = min(told, len(ids) - 1)
                if s in plan:  # a draft that stays is told, and so is the id after it, which is not computed yet
                    keep[s] = 0 if ids[-1] < 0 else sure[s] + min(told, len(ids) - 1)
            self.cache.commit(step, keep)
        except BaseException:
            self.cache.rollback(step)
            raise
        self._fork(first)
        for s, k in tried.items():
            self.drafts.record(s, len(drafts[s][0]), k)
            self.stats.drafted, self.stats.accepted = self.stats.drafted + len(drafts[s][0]), self.stats.accepted + k
        if not others and set(sure.values()) == {1}:
            self.drafts.time(at, seconds)

    def _fork(self, first: Iterable[Sample]) -> None:
        """Those who spoke first, from the row of another, begin with its prompt. (After an exception in between they
        stay in the queue, and compute it themselves.)"""
        for s in first:
            for x in s.request.samples[1:]:
                if x in self.waiting:
                    self._leaving.append(x)  # until it is in
                    self.cache.fork(s, x)
                    self._leaving.pop()
                    self.waiting.remove(x)
                    self.running.append(x)
                    x.cached = s.cached

    # ---- what is said

    def _say(self, heads: list[_Head], logits: torch.Tensor) -> list[tuple]:
        """What the heads say, given their rows of logits (R, V) -> (sample, ids, their logprobs) of each; the last id
        is -1 where a row was spoiled."""
        rows = [(h.sample, h.drafts[:j]) for h in heads for j in range(len(h.drafts) + 1)]
        probs, u = self._warp(logits, rows), self._uniforms(rows, TOKEN)  # (R, V), (R,)
        if len(heads) == len(rows):
            said = [[t] for t in self.sampling.draw(probs, u).tolist()]
        else:
            said = self._verify(heads, rows, probs, u)
        logprobs = [[None] * len(ids) for ids in said]
        asked = [(b, j, h.row + j, t, h.sample.request.logprobs) for b, (h, ids) in enumerate(zip(heads, said))
                 if h.sample.request.logprobs is not None for j, t in enumerate(ids)]
        if asked:  # what the model itself thinks of these ids, and of the `top` likeliest ones
            _, _, at, ids, tops = zip(*asked)
            at, ids = torch.tensor(at, device=logits.device), torch.tensor(ids, device=logits.device)
            found = (x.tolist() for x in self.sampling.logprobs(logits[at], ids, max(tops)))
            for (b, j, _, t, top), mine, best, values in zip(asked, *found):
                logprobs[b][j] = {"id": t, "logprob": mine, "top": [list(x) for x in zip(best[:top], values[:top])]}
        return list(zip((h.sample for h in heads), said, logprobs))

    def _verify(self, heads: list[_Head], rows: list[tuple], p: torch.Tensor, u: torch.Tensor) -> list[list[int]]:
        """Which drafts stay, and what follows: p (R, V) and u (R,) of the rows -> ids of every head."""
        K = max(len(h.drafts) for h in heads)
        draft = torch.tensor([h.drafts + [-1] * (K - len(h.drafts)) for h in heads])  # (B, K)
        at = torch.tensor([[h.row + min(j, len(h.drafts)) for j in range(K + 1)] for h in heads])  # (B, K + 1)
        q, u_accept = None, torch.zeros(draft.shape, dtype=torch.float64)
        if any(h.q is not None for h in heads):
            u_accept = self._uniforms(rows, ACCEPT)[at[:, :K]]
            q = p.new_zeros(len(heads), K, p.shape[-1])
            for b, h in enumerate(heads):
                if h.drafts:
                    q[b, : len(h.drafts)] = h.q[: len(h.drafts)]
        n, following = self.verify(draft.to(p.device), q, p[at.to(p.device)], u_accept, u[at], self.sampling.draw)
        return [[*h.drafts[:k], t] for h, k, t in zip(heads, n.tolist(), following.tolist())]

    def _warp(self, logits: torch.Tensor, rows: list[tuple[Sample, list[int]]]) -> torch.Tensor:
        """Logits (R, V) of rows (sample, drafts before it) to the distributions that were asked for."""
        prompt = output = None
        if any(s.request.penalised for s, _ in rows):
            def padded(lists):
                return torch.nn.utils.rnn.pad_sequence([torch.tensor(x, dtype=torch.int64) for x in lists], True, -1)

            prompt = padded([s.request.prompt_ids if s.request.penalised else [] for s, _ in rows])
            output = padded([s.ids + x if s.request.penalised else [] for s, x in rows])
        mask = self._mask(rows)
        params = self.sampling.stack([s.request.params for s, _ in rows])
        return self.sampling.warp(logits, params, prompt, output, mask if mask is None else mask.to(logits.device))

    def _mask(self, rows: list[tuple[Sample, list[int]]]) -> torch.Tensor | None:
        """Which ids may come in each row: (R, V) bool on the CPU; None: all of them, in all rows."""
        mask = None
        for i, (s, drafts) in enumerate(rows):
            r, young = s.request, len(s.ids) + len(drafts) < s.request.min_tokens
            if s.allowed is None and not young:
                continue
            mask = torch.ones(len(rows), self.vocab_size, dtype=torch.bool) if mask is None else mask
            if s.allowed is not None and r.ends.isdisjoint(drafts):  # what is behind an end is not heard
                # subtle: nobody looks at a row behind a draft that may not be, and no function is asked what follows it
                dead = bool(i and drafts) and rows[i - 1][0] is s and not mask[i - 1, drafts[-1]]
                mask[i] = False if dead else self._allowed(s, drafts)
            if young or (s.allowed is not None and r.ignore_eos):
                others = mask[i].clone()
                others[list(r.ends)] = False
                if s.allowed is None or others.any():
                    mask[i] = others
        return mask

    def _allowed(self, s: Sample, drafts: list[int]) -> torch.Tensor:
        """(V,) bool of a sample with a constraint; what is wrong with that is noted, and costs nobody else anything."""
        try:
            mask = s.allowed(s.ids + drafts)
            if mask.shape != (self.vocab_size,) or mask.dtype != torch.bool:
                raise ValueError(f"a mask is bool ({self.vocab_size},), not {mask.dtype} {tuple(mask.shape)}")
            if mask.any():
                return mask
            why = "no token is allowed"
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        s.fault = len(s.ids) + len(drafts), f"the constraint cannot go on: {why}"
        return torch.zeros(self.vocab_size, dtype=torch.bool)

    def _uniforms(self, rows: list[tuple[Sample, list[int]]], stream: int) -> torch.Tensor:
        # subtle: drafts take new ones in every pass. Those behind a rejected draft have had their influence (on who
        # drafts next, and how much), and must not be drawn again.
        streams = [stream + 3 * len(s.ids) if stream == DRAFT else stream for s, _ in rows]
        return self.sampling.uniforms([s.request.seed for s, _ in rows], [s.index for s, _ in rows],
                                      [len(s.ids) + len(x) for s, x in rows], streams)

    def _hear(self, s: Sample, ids: list[int], logprobs: list) -> int:
        """s says these ids, until one of them ends it -> how many."""
        if ids[0] >= 0 and not s.request.forked:  # the first words of all: the others wait to be forked
            s.request.forked = True
            for x in s.request.samples[1:]:
                insort(self.waiting, x, key=_order)
        for told, (token, lp) in enumerate(zip(ids, logprobs)):
            if s.finish_reason is not None:
                return told
            if token < 0:
                error = ("the model's logits are not finite: damaged weights, or a dtype too narrow for this model "
                         "(try float32)")
                if s.allowed is not None:
                    error = s.fault[1] if s.fault and s.fault[0] == len(s.ids) else (
                        f"logit_bias forbids all that the constraint allows, or {error}")
                self._end(s, "error", error=error)
                return told
            ended = token in s.request.ends
            text = "" if ended or s.decoder is None else s.decoder.push(token)
            s.ids.append(token)
            s.context.append(token)
            self.stats.generated += 1
            if lp is not None:
                s.logprobs.append(lp)
            if ended or (s.decoder is not None and s.decoder.stopped):
                self._end(s, "stop", token, text, logprobs=lp)
            elif len(s.ids) >= s.request.limit:
                self._end(s, "length", token, text, logprobs=lp)
            else:
                self._tell(s, token, text, lp)
        return len(ids)

    # ---- speculation

    def _draft(self, plan: dict[Sample, list[int]], budget: int) -> dict[Sample, tuple]:
        """Have drafts proposed behind the ids in the plan, and add them to it as far as there is room -> (ids, q (k, V)
        or None) of those who have any."""
        ask, context = {}, self.cache.max_seq_len
        for s in plan:
            k = min(self.drafts.k(s, len(plan)), s.request.limit - len(s.ids) - 1, budget)  # the pass itself gives one
            k = k if context is None else min(k, context - len(s.context))
            if k > 0 and (s.request.forked or s.request.n == 1):
                ask[s] = k
                budget -= k
        # subtle: room is kept for what is asked for, before anything is proposed. Drafts that were left out because of
        # what they are would be drawn a second time, and the distribution of the text would change.
        while ask and self._blocks({**plan, **{s: plan[s] + [0] * k for s, k in ask.items()}}) > self.cache.n_free:
            del ask[max(ask, key=_order)]
        if not ask:
            return {}
        names = list(ask)

        def choose(rows: list[int], logits: torch.Tensor, drafts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
            rows = [(names[b], mine) for b, mine in zip(rows, drafts)]
            q = self._warp(logits, rows)
            return self.sampling.draw(q, self._uniforms(rows, DRAFT)), q

        try:
            begin = self.clock()
            with torch.inference_mode():
                proposed, q = self.drafter.propose({s: s.context for s in names}, list(ask.values()), choose)
            seconds = self.clock() - begin
            drafts = self._checked(ask, proposed, q)
            if len(drafts) == len(ask):  # else it may have had something else to do, a long prompt to read
                self.drafts.time_draft(seconds, max(ask.values()))
        except Exception as error:  # no drafts, then: the answer does not depend on them
            warnings.warn(f"the drafter failed, going on without drafts: {type(error).__name__}: {error!s:.200}",
                          stacklevel=2)
            for s in self.running + self.waiting:
                self._forget(s)
            self.drafter = None
            return {}
        plan.update((s, plan[s] + ids) for s, (ids, _) in drafts.items())
        return drafts

    def _checked(self, ask: Mapping[Sample, int], proposed: Sequence, q: torch.Tensor | None) -> dict[Sample, tuple]:
        """What a drafter has proposed, as (ids, q (k, V) or None) of those who have any; ValueError if it is wrong."""
        drafts, V = {}, self.vocab_size
        if len(proposed) != len(ask):
            raise ValueError(f"it was asked for drafts of {len(ask)} samples and gave {len(proposed)}")
        for b, (s, ids) in enumerate(zip(ask, proposed)):
            ids = [index(i) for i in ids[: ask[s]]]
            ids = ids[: ids.index(-1)] if -1 in ids else ids  # choose had nothing to draw from: that one's fault
            if not all(0 <= i < V for i in ids):
                raise ValueError(f"it proposed {ids}, but the vocabulary has {V} ids")
            if q is not None and ids and q[b, : len(ids)].shape != (len(ids), V):
                raise ValueError(f"it proposed {len(ids)} ids, with q of shape {tuple(q.shape)}")
            if ids:
                drafts[s] = ids, None if q is None else q[b]
        return drafts

    def _forget(self, s: Sample) -> None:
        """The drafter, and who decides how much it drafts, need not know of s any more."""
        if self.drafter is not None:
            with suppress(Exception):  # whatever is wrong with a drafter, it costs no answer
                self.drafter.forget(s)
            if s.finish_reason is not None:
                self.drafts.forget(s)


# ------------------------------------------------------------------ demo

def demo() -> None:
    """The same six requests, a batch at a time and continuously. Model, cache and sampling are the least that will do:
    whatever is asked, the answer is letters."""
    class Lengths(dict):  # a cache without keys and values: how many ids of each sample are there
        n_blocks, block_size, max_seq_len, length = 64, 4, None, dict.__getitem__
        n_free = property(lambda self: self.n_blocks - sum(-(-n // 4) for n in self.values()))

        def add(self, s, ids, salt):
            self[s] = 0
            return 0

        def blocks_needed(self, s, n):
            return -(-(self[s] + n) // 4) - -(-self[s] // 4)

        def extend(self, plan, rows):
            return SimpleNamespace(plan=plan, rows=rows)

        def commit(self, step, keep):
            self.update((s, self[s] + n) for s, n in keep.items())

        def free(self, s):
            self.pop(s, None)

    def forward(step):
        for s, ids in step.plan.items():
            name = "ABCDEF"[s.request.id]
            lines[name][batcher.stats.steps] = len(ids) * ("." if s.finish_reason else name if s.ids else name.lower())
        return torch.zeros(len(step.rows), 4)

    sampling = SimpleNamespace(check=lambda r, V: {}, params=lambda r, V: None, stack=len, warp=lambda x, *_: x,
                               uniforms=lambda *_: None, draw=lambda p, u: p.new_zeros(len(p)).int())
    print("Six requests, three at a time: a row for each, a column for each step.")
    for static, title in (("pad", "Static batching, padded"), (None, "Continuous, at most 6 tokens a step")):
        lines: dict[str, dict[int, str]] = {name: {} for name in "ABCDEF"}
        batcher = Batcher(None, Lengths(), sampling, 4, forward=forward, static=static, max_batch=3, token_budget=6)
        for i, (n, m) in enumerate(zip((3, 9, 2, 4, 3, 5), (4, 12, 3, 6, 9, 2))):
            batcher.add(Request([1] * n, id=i, max_tokens=m))
        while batcher.live:
            batcher.step()
        wide = {t: max(len(row.get(t, "")) for row in lines.values()) for t in range(batcher.stats.steps)}
        print(f"\n{title}: {batcher.stats.steps} steps; small letters are prompts, dots are computed for nobody:")
        for name, row in lines.items():
            print(f"  {name}  " + "|".join(row.get(t, "").ljust(n) for t, n in wide.items()).rstrip(" |"))


if __name__ == "__main__":
    demo()
