"""batching.py, from four sides.

- random traffic, and beside it the plain truth: each answer by itself, by dense passes of the model over all its ids;
  with sabotaged twins of the batcher that the same test must catch
- faults at every place where the batcher calls something: an exception, an interrupt, before or after the fact
- what is refused, ends, callbacks, streams, order and fairness, each by itself
- the published cases (B, K, S, D, P), by id

`cache.check()` holds after every step, and `sound` after every step of the batcher itself.
"""
import codecs
import gc
import itertools
import os
import random
import resource
import sys
import time
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
import torch

import sampling
import speculative
from attention import paged_attention
from batching import Batcher, Event, Request
from kvcache import PagedKVCache
from model import Config, Llama
from stream import StreamDecoder

pytestmark = pytest.mark.usefixtures("one_thread")

V, CONTEXT = 64, 96

# ------------------------------------------------------------------ a model, a tokenizer, and the truth


class Toy:
    """The least that can be called a transformer, for many thousands of passes: two layers of attention and nothing
    else. What the second one caches of a token depends on all tokens before it."""

    def __init__(self, seed: int = 0):
        g = torch.Generator().manual_seed(seed)
        self.embedding, self.place, self.q, self.k, self.v, self.o, self.head = (
            scale * torch.randn(shape, generator=g, dtype=torch.float64) for scale, shape in (
                (1, (V, 16)), (1, (CONTEXT, 16)), (0.4, (2, 16, 16)), (0.4, (2, 16, 8)), (0.4, (2, 16, 8)),
                (0.4, (2, 16, 16)), (0.5, (16, V))))

    def __call__(self, tokens, positions=None, attend=None, rows=None):
        """As model.Llama; without attend and positions tokens is one whole sequence (1, T) -> (1, T, V)."""
        whole = attend is None
        tokens = tokens[0] if whole else tokens
        x = self.embedding[tokens] + self.place[torch.arange(len(tokens)) if whole else positions]  # (N, 16)
        for layer in range(2):
            h = x / x.square().mean(-1, keepdim=True).sqrt()
            q, k, v = h @ self.q[layer], h @ self.k[layer], h @ self.v[layer]
            q, k, v = q.view(-1, 2, 8), k.view(-1, 1, 8), v.view(-1, 1, 8)
            out = self.dense(q, k, v) if whole else attend(layer, q, k, v)
            x = x + out.flatten(1) @ self.o[layer]
        x = x if rows is None else x[rows]
        logits = x / x.square().mean(-1, keepdim=True).sqrt() @ self.head
        return logits[None] if whole else logits

    @staticmethod
    def dense(q, k, v):
        scores = torch.einsum("nhd,sd->hns", q, k[:, 0]) * 8 ** -0.5
        scores = scores + torch.full(scores.shape[1:], -torch.inf).triu(1)
        return torch.einsum("hns,sd->nhd", scores.softmax(-1), v[:, 0])


def tiny_llama() -> Llama:
    torch.manual_seed(0)
    model = Llama(Config(n_layer=2, n_head=2, n_kv_head=1, head_dim=8, hidden_size=32, intermediate_size=48,
                         vocab_size=V, max_seq_len=CONTEXT)).double().requires_grad_(False)
    for p in model.parameters():
        if p.dim() > 1:
            p.normal_(0, 0.3)
    return model


MODEL, LLAMA = Toy(), tiny_llama()


class Pieces:
    """Ids as text: single bytes, words, halves of characters, and two special tokens."""

    special, special_ids = {"<end>": 62, "<stop>": 63}, {62, 63}
    table = (*(bytes([97 + i]) for i in range(26)),
             b" the", b" cat", b"ab", b"ba", b"aab", b"\n", b" ", b"bb",
             b"\xf0\x9f", b"\x98\x80", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"\xff", b"",
             *(bytes([65 + i]) for i in range(20)), b"", b"")

    def token_bytes(self, id: int, first: bool = False) -> bytes:
        return self.table[id]


TOKENIZER = Pieces()
EOS = (5, 62)


def text_decoder(prompt_ids, stop):
    return StreamDecoder(TOKENIZER, stop, prompt_ids)


def plain_text(prompt: list[int], ids: list[int], stop) -> tuple[str, bool]:
    """The text of an answer, and whether a stop string has ended it: decoded as a whole."""
    def data(tokens):
        return b"".join(TOKENIZER.token_bytes(i) for i in tokens)

    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    utf8.decode(data(prompt)[-4:])  # this alphabet's characters begin in the prompt or in the answer
    text, ends = "", []
    for i in ids:
        text += utf8.decode(data([i]))
    for s in stop:
        if s in text:
            ends.append((text.index(s) + len(s), -len(s)))
    if ends:
        end, length = min(ends)
        return text[: end + length], True
    return text + (utf8.decode(b"", True) if data(ids) else ""), False


@torch.inference_mode()
def solo(r: Request, sample: int = 0, model=MODEL, eos=EOS, room: int = 10**9) -> list[int]:
    """The ids of one answer to a request, computed alone and without any cache."""
    prompt, ids, (ends, most) = list(r.prompt_ids), [], limits(r, eos, room)
    params = sampling.params([r.sampling], V)
    while len(ids) < most and not (ids and ids[-1] in ends) and not (r.stop and plain_text(prompt, ids, r.stop)[1]):
        logits = model(torch.tensor([prompt + ids]))[0, -1:]
        mask = torch.ones(1, V, dtype=torch.bool)
        mask[0, list(ends)] = len(ids) >= r.min_tokens
        probs = sampling.warp(logits, params, torch.tensor([prompt]), torch.tensor([ids], dtype=torch.int64), mask)
        ids.append(int(sampling.draw(probs, sampling.uniforms(r.seed, sample, len(ids)))))
    return ids


def cache_for(n_blocks: int, block_size: int, **options) -> PagedKVCache:
    cache = PagedKVCache(2, 1, 8, n_blocks, block_size, max_seq_len=CONTEXT, dtype=torch.float64, **options)
    for pool in (*cache.k, *cache.v):
        pool.fill_(torch.nan)  # what is read before it is written shows
    return cache


def batcher_for(n_blocks: int = 64, block_size: int = 4, *, model=MODEL, twin=Batcher, attention=None, vocab: int = V,
                **options):
    options.setdefault("decoder", text_decoder)
    options.setdefault("eos_ids", EOS)
    cache = cache_for(n_blocks, block_size, **({} if attention is None else {"attention": attention}))
    return twin(model, cache, sampling, vocab, **options)


def sound(b: Batcher) -> None:
    """What holds of a batcher between two steps."""
    b.cache.check()
    live = [s for r in b.live.values() for s in r.samples if s.finish_reason is None]
    assert all(b.live[r.id] is r and any(s.finish_reason is None for s in r.samples) for r in b.live.values())
    assert not set(b.running) & set(b.waiting) and len(set(b.running)) == len(b.running)
    for s in live:
        born = s.index == 0 or s.request.forked
        assert (s in b.running) + (s in b.waiting) == born, "a sample is lost, or in two places"
    assert set(b.running) | set(b.waiting) <= set(live), "a sample that has ended is still scheduled"
    assert set(b.cache._sequences) == {*b.running, *b._padding}, "the cache holds what nobody runs"
    assert b.waiting == sorted(b.waiting, key=lambda s: (s.request.rank, s.index))
    assert sum(1 if s.request.forked else s.request.n for s in b.running) <= b.max_batch
    for s in b.running:
        assert b.cache.tokens(s) == s.context[: b.cache.length(s)] and b._pending(s) >= 1
        assert s.context == list(s.request.prompt_ids) + s.ids


def step(b: Batcher) -> list[Event]:
    events = b.step()
    sound(b)
    return events


class Log:
    """All events, and what they add up to."""

    def __init__(self):
        self.tokens, self.text, self.ends, self.logprobs = (defaultdict(list) for _ in range(4))

    def hear(self, events) -> None:
        for e in events:
            key = e.id, e.sample
            assert not self.ends[key], f"an event after the end of {key}"
            if e.token is not None:
                self.tokens[key].append(e.token)
            self.text[key].append(e.text)
            if e.logprobs is not None:
                self.logprobs[key].append(e.logprobs)
            if e.finish_reason is not None:
                self.ends[key].append(e.finish_reason)

    def agrees(self, r: Request) -> None:
        """Each event of a request came exactly once."""
        for s in r.samples:
            key = r.id, s.index
            assert self.tokens[key] == s.ids and "".join(self.text[key]) == s.text
            assert self.ends[key] == [s.finish_reason] and self.logprobs[key] == s.logprobs


@torch.inference_mode()
def right(r: Request, model=MODEL, eos=EOS, room: int = 10**9) -> None:
    """Each id of the answers is the one that a dense pass over all ids before it gives, and the end is where it should
    be. That is `solo` by induction, in one pass."""
    prompt, ends = list(r.prompt_ids), limits(r, eos, room)
    for s in r.samples:
        n, logprobs = len(s.ids), []
        if n:
            logits = model(torch.tensor([prompt + s.ids[:-1]]))[0, len(prompt) - 1:]  # (n, V)
            output = torch.tensor([s.ids[:i] + [-1] * (n - i) for i in range(n)])
            mask = torch.ones(n, V, dtype=torch.bool)
            mask[: r.min_tokens, list(ends[0])] = False
            params = sampling.params([r.sampling] * n, V)
            probs = sampling.warp(logits, params, torch.tensor([prompt] * n), output, mask)
            drawn = sampling.draw(probs, sampling.uniforms(r.seed, s.index, range(n))).tolist()
            assert s.ids == drawn, f"{r.id}/{s.index} of {r}"
            logprobs = logits.log_softmax(-1)
        text, cut = plain_text(prompt, s.ids[:-1] if n and s.ids[-1] in ends[0] else s.ids, r.stop)
        assert not set(s.ids[:-1]) & ends[0] and not (r.stop and plain_text(prompt, s.ids[:-1], r.stop)[1])
        reason = "stop" if cut or (n and s.ids[-1] in ends[0]) else "length" if n == ends[1] else "abort"
        assert s.text == text and s.finish_reason == reason and s.error is None, f"{r.id}/{s.index} of {r}"
        assert len(s.logprobs) == (0 if r.logprobs is None else n)
        for have, row in zip(s.logprobs, logprobs):
            best = sorted(range(V), key=lambda i: (-float(row[i]), i))[: r.logprobs]
            assert [i for i, _ in have["top"]] == best
            wanted = [float(row[i]) for i in [have["id"], *best]]
            assert [have["logprob"], *(x for _, x in have["top"])] == pytest.approx(wanted, abs=1e-9)
        assert [x["id"] for x in s.logprobs] == (s.ids if r.logprobs is not None else [])


def limits(r: Request, eos=EOS, room: int = 10**9) -> tuple[set[int], int]:
    """The ids that end an answer, and the most that it can have."""
    most = min(CONTEXT + 1, room + 1) - len(r.prompt_ids)
    stop_ids = {TOKENIZER.special[s] for s in r.stop if s in TOKENIZER.special}
    return (set() if r.ignore_eos else set(eos)) | stop_ids, most if r.max_tokens is None else min(most, r.max_tokens)


def drain(b: Batcher, *requests: Request, log: Log | None = None, most: int = 3000) -> Log:
    """Add requests, step until nothing is live, and look at everything in between and at the end."""
    log = log or Log()
    for r in requests:
        b.add(r)
    for _ in range(most):
        log.hear(step(b))
        if not b.live:
            break
    assert not b.live, f"not done after {most} steps"
    over(b)
    for r in requests:
        log.agrees(r)
    return log


def over(b: Batcher) -> None:
    """Nothing is left of anybody."""
    assert b.step() == []
    assert not b.live and not b.waiting and not b.running and not b._alone and not b._leaving and not b._padding
    assert b.cache.n_free == b.cache.n_blocks and not b.cache._sequences


# ------------------------------------------------------------------ drafters


class Guesses:
    """Random drafts, certain (q None) or drawn from a distribution of their own."""

    def __init__(self, seed: int = 0, drawn: bool = False):
        self.rng, self.drawn, self.heard, self.model = random.Random(seed), drawn, set(), Toy(7)

    def propose(self, contexts, k, choose):
        self.heard |= set(contexts)
        if not self.drawn:
            return [[self.rng.randrange(V) for _ in range(self.rng.randint(0, n))] for n in k], None
        drafts, q = [[] for _ in k], torch.zeros(len(k), max(k), V, dtype=torch.float64)
        for i in range(max(k)):
            rows = [b for b, n in enumerate(k) if i < n]
            logits = torch.stack([self.model(torch.tensor([[*ids, *d][-3:]]))[0, -1]
                                  for ids, d in zip(contexts.values(), drafts)])
            ids, q[rows, i] = choose(rows, logits[rows], [list(drafts[b]) for b in rows])
            for b, t in zip(rows, ids.tolist()):
                drafts[b].append(t)
        return drafts, q

    def forget(self, seq):
        self.heard.discard(seq)


class Oracle(Guesses):
    """Knows what comes: the drafts are right up to a random place."""

    def __init__(self, seed: int = 0):
        super().__init__(seed)
        self.answers = {}

    def propose(self, contexts, k, choose):
        self.heard |= set(contexts)
        drafts = []
        for s, n in zip(contexts, k):
            key = s.request.id, s.index
            if key not in self.answers:
                self.answers[key] = solo(s.request, s.index)
            mine = self.answers[key][len(s.ids): len(s.ids) + n]
            if mine and self.rng.random() < 0.4:
                mine[self.rng.randrange(len(mine))] = self.rng.randrange(V)
            drafts.append(mine)
        return drafts, None


def drafter_for(kind: str, seed: int = 0):
    if kind == "model":
        return speculative.DraftModel(MODEL, cache_for(40, 4), V, ends=EOS)
    return {"none": lambda: None, "guess": lambda: Guesses(seed), "drawn": lambda: Guesses(seed, True),
            "oracle": lambda: Oracle(seed), "ngram": lambda: speculative.NgramDrafter(3, 1)}[kind]()


# ------------------------------------------------------------------ random traffic


SAMPLERS = [{"temperature": 0}, {}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.5, "top_p": 0.8},
            {"temperature": 0, "repetition_penalty": 1.5}, {"frequency_penalty": 0.6, "presence_penalty": 0.3},
            {"temperature": 0.8, "repetition_penalty": 1.3, "min_p": 0.05, "logit_bias": {7: 2.0, 9: float("-inf")}}]
STOPS = [(), (), (), ("aab",), ("ab", "b\n"), ("<stop>",), ("é", "the"), (" cat", "zq")]


def random_request(rng: random.Random, i: int, most: int, greedy: bool = False) -> Request:
    """most: prompt and answer together."""
    begin = [[], [1, 2, 3, 4, 5, 6, 7, 8, 9], [11] * 16][rng.randrange(3)][: most // 2]
    n = rng.randint(0 if begin else 1, max(1, min(24, most - len(begin) - 1)))
    prompt = begin + [rng.randrange(V) for _ in range(n)]
    max_tokens = rng.choice([0, 1, *(rng.randint(2, 24) for _ in range(5))])
    max_tokens = min(max_tokens, most + 1 - len(prompt))
    samplers = [s for s in SAMPLERS if s.get("temperature") == 0] if greedy else SAMPLERS
    return Request(prompt, id=f"r{i}", max_tokens=max_tokens, min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
                   stop=rng.choice(STOPS), ignore_eos=rng.random() < 0.3, sampling=rng.choice(samplers),
                   seed=rng.randrange(100), n=rng.choice([1, 1, 1, 2, 3]), logprobs=rng.choice([None, None, 0, 3]),
                   priority=rng.choice([0, 0, 0, 1, -1]), salt=rng.choice(["", "", "x"]))


def traffic(seed: int, n: int, twin=Batcher, drafter: str | None = None, model=MODEL, **options) -> Counter:
    """n requests at random through a batcher of random settings -> what happened. AssertionError if anything differs
    from the solo runs, is lost or left over."""
    rng = random.Random(seed)
    block_size = options.pop("block_size", None) or rng.choice([1, 2, 4, 8, 16])
    barely = -(-48 // block_size)
    n_blocks = rng.choice([barely, barely + 1, barely + 2, 2 * barely, 8 * barely])
    drafter = drafter or rng.choice(["none", "none", "guess", "oracle", "ngram", "drawn", "model"])
    settings = {"token_budget": rng.choice([2, 5, 11, 64, 512]), "chunk": rng.choice([None, 1, 2, 5, 64, 512]),
                "max_batch": rng.choice([3, 4, 8, 16]), "swap": rng.random() < 0.4,
                "static": rng.choice([None] * 8 + ["pad", "drop"]), "attention": rng.choice([None, paged_attention]),
                **options}
    if drafter != "none":
        settings.update(drafter=drafter_for(drafter, seed), verify=speculative.verify,
                        drafts=rng.choice([1, 3, 6, speculative.AdaptiveK(5, least=0)]))
    b, log, done, happened = batcher_for(n_blocks, block_size, twin=twin, model=model, **settings), Log(), [], Counter()
    greedy = drafter in ("drawn", "model")  # otherwise only the distribution is the same
    for i in range(n):
        r = random_request(rng, i, min(48, CONTEXT), greedy)
        b.add(r)
        done.append(r)
        for _ in range(rng.choice([0, 0, 0, 1, 3])):
            log.hear(step(b))
            if rng.random() < 0.08 and b.live:
                b.abort(rng.choice(list(b.live)))
                sound(b)
                happened["aborted"] += 1
    for _ in range(20000):
        if not b.live:
            break
        log.hear(step(b))
    log.hear(b.step())
    over(b)
    assert b.stats.failed == 0
    if drafter != "none":
        assert not getattr(b.drafter, "heard", ()) and b.drafter is settings["drafter"]
        assert not getattr(b.drafter, "_held", ()) and not getattr(b.drafts, "_rates", ())
    for r in done:
        log.agrees(r)
        right(r, model=model)
    happened.update(requests=n, steps=b.stats.steps, preempted=b.stats.preempted, cached=b.stats.cached,
                    accepted=b.stats.accepted, forked=sum(r.n > 1 for r in done))
    return happened


def test_random_traffic_equals_solo_runs():
    """160 requests: aborts, preemption by recompute and swap, prefix hits, n > 1, speculation, all chunks and pools."""
    happened = Counter()
    for seed, drafter in enumerate(["none", "oracle", "none", "guess", "ngram", "none", "drawn", "model"]):
        happened += traffic(seed, 20, drafter=drafter, model=LLAMA if seed == 2 else MODEL)
    assert happened["requests"] == 160
    for what in ("aborted", "preempted", "cached", "accepted", "forked"):
        assert happened[what] >= 5, f"{what} is hardly tried: {happened}"


@pytest.mark.slow
def test_more_random_traffic_equals_solo_runs():
    """350 requests more: 510 in all."""
    happened = Counter()
    for seed in range(100, 114):
        happened += traffic(seed, 25)
    for what in ("aborted", "preempted", "cached", "accepted", "forked"):
        assert happened[what] >= 20, f"{what} is hardly tried: {happened}"


class Forgets(Batcher):
    """B03: after preemption only the prompt is there."""

    def _make_room(self, plan):
        crowded = super()._make_room(plan)
        for s in self.waiting:
            if s.ids:
                del s.context[len(s.request.prompt_ids):]
        return crowded


class WrongRow(Batcher):
    """B05: of several rows the neighbour's."""

    def _say(self, heads, logits):
        return super()._say(heads, logits.roll(1, 0))


class SkipsOne(Batcher):
    """B05: a chunk that was cut counts as a whole one, so that a token never reaches the model."""

    def _piece(self, s, most):
        ids = super()._piece(s, most)
        return ids[:1] + ids[2:] if len(ids) > 2 else ids


class Leaks(Batcher):
    """Who is aborted keeps its blocks."""

    def abort(self, id):
        for s in self.live[id].samples:
            self._end(s, "abort")
        self._leaving.clear()
        self._deliver()


class Counts(Batcher):
    """A random number is the next one of a generator."""

    def _uniforms(self, rows, stream):
        self.n = getattr(self, "n", 0) + 1
        return sampling.uniforms(self.n, range(len(rows)))


class KeepsDrafts(Batcher):
    """P18: what was rejected stays in the cache."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        commit = self.cache.commit
        self.cache.commit = lambda step, keep=None: commit(step)


class Deaf(Batcher):
    """P09: penalties look at the committed output only, not at the drafts before a row."""

    def _warp(self, logits, rows):
        return super()._warp(logits, [(s, []) for s, _ in rows])


class Unfair(Batcher):
    """Siblings draw with the same numbers."""

    def _uniforms(self, rows, stream):
        return sampling.uniforms([s.request.seed for s, _ in rows], 0, [len(s.ids) + len(x) for s, x in rows], stream)


@pytest.mark.parametrize("twin, drafter", [(Forgets, "none"), (WrongRow, "none"), (SkipsOne, "none"), (Leaks, "none"),
                                           (Counts, "none"), (Unfair, "none"), (KeepsDrafts, "guess"),
                                           (Deaf, "oracle")])
def test_a_sabotaged_batcher_is_caught(twin, drafter):
    for seed in range(8):
        try:
            traffic(seed, 10, twin, drafter)
        except (AssertionError, ValueError, RuntimeError):
            return
    raise AssertionError(f"{twin.__doc__} Nobody noticed.")


# ------------------------------------------------------------------ faults


class Trip:
    """Raises once, at the call number `at` of all that it wraps: before the call, or after it."""

    def __init__(self, at: int = 0, error: type = KeyboardInterrupt, after: bool = False):
        self.at, self.error, self.after, self.names, self.where = at, error, after, [], None

    def wrap(self, call, name: str, after: bool = True):
        def wrapped(*args, **kwargs):
            self.names.append(name)
            hit = len(self.names) == self.at
            if hit and not (self.after and after):
                self.where = f"before {name}"
                raise self.error(name)
            out = call(*args, **kwargs)
            if hit:
                self.where = f"after {name}"
                raise self.error(name)
            return out

        return wrapped

    def all_of(self, thing, *names: str):
        for name in names:
            setattr(thing, name, self.wrap(getattr(thing, name), name, after=name != "extend"))
        return thing


def life_with(trip: Trip, kind: int = 0) -> tuple[Batcher, list[Request], Log]:
    """A small traffic in which everything happens, and at one place an exception."""
    sampler = trip.all_of(SimpleNamespace(**{name: getattr(sampling, name) for name in (
        "check", "params", "stack", "warp", "draw", "uniforms", "logprobs")}),
        "stack", "warp", "draw", "uniforms", "logprobs")

    def decoder(prompt_ids, stop):
        # a text decoder that has taken an id and then is interrupted cannot be asked again
        d = text_decoder(prompt_ids, stop)
        d.push = trip.wrap(d.push, "push", after=False)
        return d

    cache = cache_for(9 if kind % 2 else 11, 4)
    options = {"swap": kind % 2 == 1}
    if kind >= 2:
        options.update(drafter=trip.all_of(Oracle(1), "propose", "forget"), verify=speculative.verify, drafts=3)
    b = Batcher(trip.wrap(MODEL, "model"), cache, sampler, V, eos_ids=EOS, decoder=decoder, token_budget=9, chunk=5,
                max_batch=5, **options)
    trip.all_of(cache, "add", "extend", "commit", "fork", "free", "export", "import_", "blocks_needed")
    hear = trip.wrap(lambda event: None, "callback")
    shared = [1, 2, 3, 4, 5, 6, 7, 8]
    requests = [Request([*shared, 20], id=0, max_tokens=12, ignore_eos=True, seed=1, on_event=hear),
                Request([*shared, 21, 22], id=1, max_tokens=6, n=3, seed=2, logprobs=2, ignore_eos=True),
                Request([30] * 5, id=2, max_tokens=14, sampling=SAMPLERS[4], ignore_eos=True, on_event=hear),
                Request(shared, id=3, max_tokens=9, seed=4, stop=("ab",), n=2, min_tokens=4),
                Request([9], id=4, max_tokens=5, seed=5, n=2, sampling=SAMPLERS[5])]
    for r in requests:
        b.add(r)
    log = Log()
    for _ in range(400):
        try:
            log.hear(step(b))
        except trip.error:
            cache.check()
            continue
        if not b.live:
            break
    else:
        raise AssertionError(f"not done after 400 steps; {trip.where}")
    over(b)
    return b, requests, log


def survives(at: int, error: type, after: bool, kind: int) -> None:
    """Everybody's answer after an exception at one place. (Of an error in sampling, decoding or a callback nobody else
    notices anything.)"""
    trip = Trip(at, error, after)
    b, requests, log = life_with(trip, kind)
    failed = [r for r in requests if any(s.finish_reason == "error" for s in r.samples)]
    assert trip.where and len(failed) <= (0 if error is KeyboardInterrupt else 1), trip.where
    for r in requests:
        log.agrees(r)
        if r in failed:
            assert all(s.ids == solo(r, s.index)[: len(s.ids)] for s in r.samples)
            assert any(trip.where.split()[1] in s.error for s in r.samples if s.error)
        else:
            right(r)


def places(kind: int) -> dict[str, list[int]]:
    """The numbers of the calls in that life, by name."""
    trip, found = Trip(), defaultdict(list)
    b, _, _ = life_with(trip, kind)
    assert b.stats.preempted and b.stats.cached and b.stats.failed == 0
    for number, name in enumerate(trip.names, 1):
        found[name].append(number)
    assert len(found) == (14, 16, 16, 18)[kind]
    return found


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("kind", range(4))
@pytest.mark.filterwarnings("ignore:the drafter failed")
def test_an_exception_anywhere(kind, error):
    """Raised by the model, the cache, sampling, a decoder, a drafter or a callback, before or after it did its work:
    an interrupt costs nobody anything; any other error at most one request, and the others do not notice."""
    for i, numbers in enumerate(places(kind).values()):
        if (i + kind) % 4 == 0:
            survives(numbers[len(numbers) * (1 + kind) // 6], error, i % 8 < 4, kind)


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.filterwarnings("ignore:the drafter failed")
def test_an_exception_really_anywhere(error):
    for kind in range(4):
        for i, (name, numbers) in enumerate(places(kind).items()):
            survives(random.Random(f"{kind} {name}").choice(numbers), error, (i + kind) % 2 == 0, kind)


def test_an_interrupt_between_any_two_lines_of_the_cache():
    """Ctrl-C comes where it will, also half-way through a block's publication: whoever goes on loses nothing."""
    def life(at: int) -> bool:
        b, lines = batcher_for(12, max_batch=3, token_budget=9), 0
        requests = [Request([1, 2, 3, 4, 5, i % 2], id=i, n=1 + i % 2, max_tokens=6, seed=i, ignore_eos=True)
                    for i in range(4)]

        def trace(frame, event, _):
            nonlocal lines
            if not frame.f_code.co_filename.endswith("kvcache.py"):
                return None
            lines += event == "line"
            if lines > at:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        for r in requests:
            b.add(r)
        before, hit = sys.gettrace(), False
        try:
            sys.settrace(trace)
            while b.live:
                b.step()
        except KeyboardInterrupt:
            hit = True
        finally:
            sys.settrace(before)
        while b.live:
            step(b)
        b.step()  # hands on what is still untold
        for r in requests:
            right(r)
        over(b)
        return hit

    at = 0
    while life(at):
        at += 97
    assert at > 1000, "there were lines to stop at"



# ------------------------------------------------------------------ scripted models


def scripted(row_of):
    """forward(step) whose row of logits is row_of(sample, how many tokens it has said, its last token)."""
    def forward(step):
        owner = [s for s, n in zip(step.seqs, step.n_new) for _ in range(n)]
        return torch.stack([row_of(owner[r], int(step.positions[r]) + 1 - len(owner[r].request.prompt_ids),
                                   int(step.tokens[r])) for r in step.rows.tolist()])

    return forward


def sure(token: int, vocab: int = V) -> torch.Tensor:
    return 50.0 * torch.nn.functional.one_hot(torch.tensor(token), vocab).double()


def says(answers: dict):
    """A model that answers request `id` with answers[id], and then with zeros."""
    return scripted(lambda s, i, _: sure(([*answers[s.request.id]] + [0] * 99)[i]))


def pieces(*texts: str, **special: int):
    """A tokenizer of these texts, by id, and special ones."""
    return SimpleNamespace(special=special, special_ids=set(special.values()),
                           token_bytes=lambda i, first=False: texts[i].encode() if i < len(texts) else b"")


def speaking(tokenizer, answers: dict, **options) -> Batcher:
    return batcher_for(forward=says(answers), decoder=lambda ids, stop: StreamDecoder(tokenizer, stop, ids), **options)


def watch(b: Batcher) -> list[dict]:
    """The plans of all steps from now on: sample -> (first position, ids)."""
    plans, extend = [], b.cache.extend

    def spy(plan, rows=None):
        plans.append({s: (b.cache.length(s), list(ids)) for s, ids in plan.items()})
        return extend(plan, rows)

    b.cache.extend = spy
    return plans


# ------------------------------------------------------------------ faults, one by one


class Poison(Toy):
    """Fails wherever token 33 is; or gives NaN for it."""

    def __init__(self, nan: bool):
        super().__init__()
        self.nan = nan
        if nan:
            self.embedding[33] = torch.nan

    def __call__(self, tokens, *args, **kwargs):
        if not self.nan and (tokens == 33).any():
            raise RuntimeError("no such thing as 33")
        return super().__call__(tokens, *args, **kwargs)


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("budget", [3, 512])
def test_a_fault_of_one_request_is_its_own(nan, budget):
    """In the first, the middle or the last chunk of a prompt; others in the same steps get what they would have got."""
    b = batcher_for(model=Poison(nan), token_budget=budget, block_size=2)
    good = [Request([i, i + 1, i + 2], id=i, max_tokens=8, seed=i, ignore_eos=True, n=1 + i % 2) for i in range(4)]
    bad = [Request([50] * i + [33] + [51] * (9 - i), id=f"bad{i}", n=1 + i % 2, seed=0) for i in (0, 4, 9)]
    drain(b, *(r for pair in itertools.zip_longest(good, bad) for r in pair if r))
    for r in good:
        right(r)
    for r in bad:
        assert all((s.finish_reason, s.ids) == ("error", []) for s in r.samples)
        assert ("not finite" if nan else "RuntimeError: no such thing as 33") in r.samples[0].error
    assert nan == (b.stats.failed == 0)
    again = Request(bad[2].prompt_ids, max_tokens=1)  # what was spoiled is not in the prefix cache
    drain(b, again)
    assert again.samples[0].finish_reason == "error" and again.samples[0].cached <= 8


def test_nan_among_accepted_drafts_ends_the_answer_behind_them():
    b = batcher_for(forward=scripted(lambda s, i, t: sure(10 + i) if i < 3 else sure(1) * torch.nan), drafts=4,
                    drafter=SimpleNamespace(propose=lambda c, k, choose: ([[10, 11, 12, 13][len(s.ids):][:n] for s, n
                                                                          in zip(c, k)], None), forget=lambda s: None),
                    verify=speculative.verify)
    r = Request([1, 2], max_tokens=9)
    drain(b, r)
    assert (r.samples[0].ids, r.samples[0].finish_reason) == ([10, 11, 12], "error")


def test_a_drafter_that_fails_costs_no_request_anything():
    def propose(contexts, k, choose):
        raise IndexError("drafter")

    b = batcher_for(drafter=SimpleNamespace(propose=propose, forget=lambda s: None), verify=speculative.verify)
    r = Request([1, 2, 3], max_tokens=6, seed=3, ignore_eos=True)
    with pytest.warns(UserWarning, match="going on without drafts: IndexError: drafter"):
        drain(b, r)
    right(r)


def test_swapped_copies_that_cannot_be_read_are_computed_again_and_aborted_ones_dropped():
    for fault in (None, "import_", "export"):
        b = batcher_for(9, 4, swap=True)
        if fault is not None:
            setattr(b.cache, fault, lambda *_: 1 / 0)
        requests = [Request([i] * 8, id=i, max_tokens=14, seed=i, ignore_eos=True) for i in range(3)]
        for r in requests:
            b.add(r)
        while not b.stats.preempted:
            step(b)
        swapped = next(s for s in b.waiting if s.preempted)
        assert (swapped.swapped is None) == (fault == "export") and swapped.ids
        if fault is None:
            assert len(swapped.swapped["tokens"]) == len(swapped.context) - 1
            b.abort(swapped.request.id)
            assert swapped.swapped is None
        drain(b)
        for r in requests:
            right(r)


def test_blocks_that_somebody_else_holds():
    """What cannot go on for lack of blocks is told, nothing hangs; when they are back it goes on."""
    b = batcher_for(4, 4)
    r = Request([1, 2, 3], max_tokens=9, seed=0, ignore_eos=True)
    b.add(r)
    step(b)
    b.cache.add("mine", [])
    b.cache.commit(b.cache.extend({"mine": [9] * 12}))
    for _ in range(20):
        try:
            b.step()
        except RuntimeError as error:
            assert str(error) == "0 samples run and 1 wait, but no step can be made"
            break
    b.cache.free("mine")
    drain(b)
    right(r)


# ------------------------------------------------------------------ callbacks and streams


def test_a_callback_that_raises_ends_its_request_only():
    b, heard = batcher_for(max_batch=4), []

    def hear(event):
        heard.append(event)
        if len(heard) == 3:
            raise KeyError("full")

    r = Request([1, 2], id="r", max_tokens=9, n=2, seed=0, on_event=hear, ignore_eos=True)
    other = Request([1, 2], id="o", max_tokens=9, seed=0, ignore_eos=True)
    log = drain(b, r, other)
    right(other)
    assert len(heard) == 3 and {s.finish_reason for s in r.samples} == {"error"}
    assert r.samples[0].error == "on_event raised KeyError: 'full'"
    assert log.ends["r", 0] == log.ends["r", 1] == ["error"]


def test_callbacks_may_add_and_abort():
    b, log = batcher_for(), Log()
    more = [Request([7, 8], id=f"more{i}", max_tokens=3, seed=i, ignore_eos=True) for i in range(3)]

    def hear(event):
        if event.sample == 1 and len(r.samples[1].ids) == 2:
            b.abort("victim")
            b.abort("r")
        if event.finish_reason is not None and more:
            b.add(more.pop())

    r = Request([1, 2], id="r", max_tokens=9, n=3, seed=0, on_event=hear, ignore_eos=True)
    victim = Request([3], id="victim", max_tokens=50, seed=0, ignore_eos=True)
    added = list(more)
    drain(b, victim, r, log=log)
    assert {s.finish_reason for s in (*r.samples, *victim.samples)} == {"abort"}
    for x in (r, victim, *added):
        right(x)
        log.agrees(x)
    assert len(victim.samples[0].ids) == 2, "aborted before the step in which its third token would have come"


def test_a_callback_that_steps_gets_what_comes_next():
    b, inner = batcher_for(), []
    r = Request([1], id="r", max_tokens=5, seed=0, ignore_eos=True, on_event=lambda e: inner.extend(b.step()))
    b.add(r)
    events = step(b) + inner
    assert sorted(map(id, events)) == sorted(set(map(id, events))) and len(events) == 5
    right(r)
    over(b)


def test_streams_side_by_side():
    """Each gets its own events, exactly once; those of others are not lost for `step`."""
    b = batcher_for()
    a, c = (Request([i], id=i, max_tokens=8, seed=i, ignore_eos=True, n=i) for i in (1, 2))
    plain = Request([3], id=3, max_tokens=20, seed=3, ignore_eos=True)
    b.add(plain)
    one, two, log = b.stream(a), b.stream(c), Log()
    for events in itertools.zip_longest(one, two):
        log.hear(e for e in events if e)
        assert {e.id for e in events if e} <= {1, 2}
    log.hear(b.run([]))
    for r in (a, c, plain):
        log.agrees(r)
        right(r)
    over(b)


def test_a_stream_left_half_way_is_aborted_and_one_never_begun_leaves_nothing():
    b = batcher_for()
    r, other = (Request([i], id=i, max_tokens=20, seed=i, ignore_eos=True) for i in (1, 2))
    b.add(other)
    stream = b.stream(r)
    assert next(stream).id == 1
    stream.close()
    sound(b)
    assert r.samples[0].finish_reason == "abort" and list(b.live) == [2]
    never = b.stream(Request([4], id=4, max_tokens=2, seed=0, ignore_eos=True))
    for _ in b.run([]):
        pass
    del never
    again = Request([4], id=4, max_tokens=2, seed=0, ignore_eos=True)
    assert [e.id for e in b.stream(again)] == [4, 4], "no event of the one before it"
    right(again)
    right(other)
    over(b)
    with pytest.raises(ValueError, match="already there"):
        b.stream(again)


def test_run_left_half_way_goes_on_and_loses_nothing():
    b, log = batcher_for(), Log()
    requests = [Request([i], id=i, max_tokens=5, seed=i, n=2, ignore_eos=True) for i in range(3)]
    for i, event in enumerate(b.run(requests)):
        log.hear([event])
        if i == 7:
            break
    log.hear(b.run([]))
    for r in requests:
        log.agrees(r)
        right(r)
    over(b)


def test_an_interrupted_reader_finds_its_stream_aborted_and_the_others_whole():
    trip = Trip(4)
    b = batcher_for(model=trip.wrap(MODEL, "model"))
    a, c = (Request([i], id=i, max_tokens=8, seed=i, ignore_eos=True) for i in (1, 2))
    b.add(c)
    with pytest.raises(KeyboardInterrupt):
        list(b.stream(a))
    assert a.samples[0].finish_reason == "abort"
    drain(b)
    right(a)
    right(c)


def test_abort_between_any_two_steps():
    for swap, at in itertools.product((False, True), range(0, 24, 4)):
        b = batcher_for(8, 4, token_budget=6, swap=swap, max_batch=6)
        requests = [Request([i] * 9, id=i, max_tokens=9, seed=i, n=1 + i % 3, ignore_eos=True) for i in range(4)]
        for r in requests:
            b.add(r)
        for _ in range(at):
            step(b)
        for r in requests[at % 4:: 2]:
            b.abort(r.id)
            b.abort(r.id)
            sound(b)
        drain(b)
        for r in requests:
            right(r)


# ------------------------------------------------------------------ order, fairness, costs


def test_priority_overtakes_but_nobody_starves():
    """Of requests that keep coming with priority 1, at most 64 that came later are served before one of priority 0."""
    b = batcher_for(max_batch=1, eos_ids=())
    order = []
    b.add(Request([1], id="first", max_tokens=1, on_event=lambda e: order.append(e.id)))
    for i in range(5):
        b.add(Request([1], id=i, max_tokens=1, on_event=lambda e: order.append(e.id)))
    for i in range(150):
        b.add(Request([1], id=f"high{i}", max_tokens=1, priority=1, on_event=lambda e: order.append(e.id)))
    b.add(Request([1], id="low", max_tokens=1, priority=-1, on_event=lambda e: order.append(e.id)))
    drain(b)
    assert order[0] == "high0" and 50 <= order.index("first") <= 64
    assert [x for x in order if not isinstance(x, str)] == list(range(5)) and order[-1] == "low"
    assert [x for x in order if str(x).startswith("high")] == [f"high{i}" for i in range(150)]


def test_decoding_never_waits_for_a_prompt_and_a_prompt_not_for_ever():
    b = batcher_for(200, 4, token_budget=8, chunk=3, eos_ids=())
    readers = [Request([i], id=i, max_tokens=30, seed=i) for i in range(3)]
    for r in readers:
        b.add(r)
    step(b)
    long = Request([9] * 60, id="long", max_tokens=2, seed=0)
    late = [Request([i], id=i, max_tokens=4, seed=i) for i in range(10, 40)]
    b.add(long)
    plans, steps = watch(b), 0
    while not long.samples[0].ids:
        for r in readers:
            n = len(r.samples[0].ids)
            assert r.samples[0].finish_reason or n == steps + 1, "a reader waited"
        if steps % 2 == 0 and late:
            b.add(late.pop())
        step(b)
        steps += 1
    assert steps <= 22 and all(sum(len(ids) for _, ids in plan.values()) <= 8 for plan in plans)
    assert max(len(plan[long.samples[0]][1]) for plan in plans) == 3
    drain(b)


def test_the_oldest_is_never_preempted():
    for seed in range(2):
        rng, b = random.Random(seed), batcher_for(10, 4, eos_ids=(), swap=seed == 1)
        requests = [Request([rng.randrange(V)] * rng.randint(1, 12), id=i, max_tokens=rng.randint(10, 24), seed=i)
                    for i in range(12)]
        for r in requests:
            b.add(r)
        while b.live:
            oldest = min(b.live)
            before = requests[oldest].samples[0].preempted
            step(b)
            assert requests[oldest].samples[0].preempted == before
        assert b.stats.preempted > 3
        for r in requests:
            right(r, eos=())


def test_one_sampling_call_and_one_extension_a_step():
    calls = Counter()
    counting = SimpleNamespace(check=sampling.check, params=sampling.params)
    for name in ("warp", "draw", "stack", "uniforms", "logprobs"):
        def count(*args, name=name):
            calls[name] += 1
            return getattr(sampling, name)(*args)

        setattr(counting, name, count)
    b = batcher_for(200)
    b.sampling = counting
    plans = watch(b)
    for i in range(12):
        b.add(Request([i] * (1 + i), id=i, max_tokens=10, ignore_eos=True, logprobs=i % 3, sampling=SAMPLERS[i % 7]))
    drain(b)
    assert calls == dict.fromkeys(("warp", "draw", "stack", "uniforms", "logprobs"), len(plans))
    assert len(plans) == b.stats.steps == 10


@pytest.mark.parametrize("static", ["pad", "drop"])
def test_static_batches(static):
    b = batcher_for(40, 4, static=static, max_batch=4)
    requests = [Request([i] * (1 + 3 * i), id=i, max_tokens=4 + i, seed=i, n=1 + (i == 2), ignore_eos=i % 2 == 0)
                for i in range(6)]
    plans = watch(b)
    drain(b, *requests)
    for r in requests:
        right(r)
    assert {s.request.id for s in plans[0]} == {0, 1, 2}, "four samples"
    first = next(i for i, plan in enumerate(plans) if any(s.request.id == 3 for s in plan))
    assert all({s.request.id for s in plan} <= {0, 1, 2} for plan in plans[:first]), "nobody joins"
    if static == "pad":
        assert {len(ids) for _, ids in plans[0].values()} == {7} and {len(plan) for plan in plans[1:first]} == {4}
    b = batcher_for(12, 4, static=static, eos_ids=())  # what does not fit together is put off to the next batch
    tight = [Request([i] * 9, id=i, max_tokens=16, seed=i, n=1 + i) for i in range(4)]
    drain(b, *tight)
    for r in tight:
        right(r, eos=())
    for seed in range(2):
        traffic(seed, 12, drafter="oracle" if seed else "none", static=static)


def test_samples_of_one_prompt_share_its_blocks():
    b = batcher_for(20, 4, eos_ids=(), token_budget=8)
    r = Request(list(range(20)), id="r", max_tokens=6, n=4, seed=0)
    b.add(r)
    for used in (2, 4, 5, 9):  # 20 tokens are 5 blocks; then each sample has one of its own
        step(b)
        assert b.cache.n_blocks - b.cache.n_free == used
    assert b.stats.computed == 20 + 4
    drain(b)
    right(r, eos=())
    assert len({tuple(s.ids) for s in r.samples}) == 4


def test_equal_prompts_of_one_step_are_both_computed_and_end_up_in_the_same_blocks():
    b = batcher_for(20, 4, eos_ids=())
    twins = [Request(list(range(17)), id=i, max_tokens=3, seed=i) for i in range(2)]
    for r in twins:
        b.add(r)
    step(b)
    assert b.stats.computed == 34 and [r.samples[0].cached for r in twins] == [0, 0], "not written yet"
    assert b.cache.n_blocks - b.cache.n_free == 4 + 2, "four that are full, and one each"
    drain(b)
    for r in twins:
        right(r, eos=())


P, Q = (torch.rand(4, 4, generator=torch.Generator().manual_seed(i), dtype=torch.float64) + 0.05 for i in (1, 2))
P, Q = P / P.sum(1, keepdim=True), Q / Q.sum(1, keepdim=True)  # the next token, given the last


class SomebodyElsesQ(Batcher):
    """Of what drafts were drawn from, the neighbour's is passed on."""

    def _verify(self, heads, rows, p, u):
        drawn = [h for h in heads if h.drafts]
        other = {id(h): x for h, x in zip(drawn, [*drawn[1:], drawn[0]])}
        return super()._verify([h._replace(q=other[id(h)].q) if h.drafts else h for h in heads], rows, p, u)


def chi_square(twin) -> float:
    """How far three tokens each of 1,200 answers with drawn drafts are from the model's distribution: 64 cells."""
    def propose(contexts, k, choose):
        drafts, q, last = [[] for _ in k], torch.zeros(len(k), max(k), 4).double(), [x[-1] for x in contexts.values()]
        for i in range(max(k)):
            rows = [b for b, n in enumerate(k) if i < n]
            ids, q[rows, i] = choose(rows, Q[[last[b] for b in rows]].log(), [list(drafts[b]) for b in rows])
            for b, t in zip(rows, ids.tolist()):
                drafts[b].append(t)
                last[b] = t
        return drafts, q

    def forward(step):
        return P[step.tokens[step.rows]].log()

    b = batcher_for(400, 4, twin=twin, forward=forward, vocab=4, decoder=None, eos_ids=(), max_batch=100, drafts=2,
                    verify=speculative.verify, drafter=SimpleNamespace(propose=propose, forget=lambda s: None))
    requests = [Request([2], id=i, max_tokens=4, seed=i, n=1 + i % 2) for i in range(800)]
    for r in requests:
        b.add(r)
    while b.live:
        b.step()
    found = Counter(tuple(s.ids[:3]) for r in requests for s in r.samples)
    assert b.stats.accepted > 300
    return sum((found[x] - 1200 * e) ** 2 / (1200 * e) for x in itertools.product(range(4), repeat=3)
               for e in [float(P[2, x[0]] * P[x[0], x[1]] * P[x[1], x[2]])])


def test_drawn_drafts_leave_the_distribution_as_it_is():
    """64 cells, 63 degrees of freedom: above 135 by chance once in a million times; seeds are fixed."""
    assert chi_square(Batcher) < 135
    assert chi_square(SomebodyElsesQ) > 135


# ------------------------------------------------------------------ what is refused, and ends


@pytest.mark.parametrize("change, message", [
    ({"prompt_ids": []}, "the prompt is empty; give at least one token"),
    ({"prompt_ids": [1, V]}, "token id 64 is outside the model's vocabulary of 64"),
    ({"prompt_ids": [-1]}, "token id -1 is outside"), ({"prompt_ids": [1.5]}, "whole numbers"),
    ({"prompt_ids": "abc"}, "whole numbers"), ({"prompt_ids": 7}, "whole numbers"),
    ({"prompt_ids": [1] * 97}, "the prompt has 97 tokens, but the context is 96; shorten it"),
    ({"max_tokens": -1}, "max_tokens is -1, but must be 0 or more"), ({"max_tokens": 2.5}, "whole numbers"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, but must be 0 to 4"), ({"min_tokens": -1}, "min_tokens"),
    ({"n": 0}, "n is 0, but must be 1 to 4"), ({"n": 5}, "n is 5, but must be 1 to 4"), ({"logprobs": V + 1},
    "logprobs"), ({"seed": "x"}, "whole numbers"), ({"id": []}, "an id can be a key"), ({"salt": 3}, "salt is 3"),
    ({"stop": "ab"}, "stop must be a list"), ({"stop": [""]}, "stop must be a list"),
    ({"sampling": {"top_p": 0}}, "top_p is 0"), ({"sampling": {"topp": 0.5}}, "unknown sampling parameter 'topp'"),
    ({"sampling": None}, "sampling is a map"), ({"sampling": {"logit_bias": {V: 1}}}, "logit_bias"),
])
def test_what_is_refused(change, message):
    b = batcher_for(max_batch=4)
    r = Request(**{"prompt_ids": [1, 2], "seed": 0, "ignore_eos": True, **change})
    with pytest.raises(ValueError, match=message):
        b.add(r)
    over(b)
    good = Request([1, 2], seed=0, max_tokens=2, ignore_eos=True)
    for name in change:
        setattr(r, name, getattr(good, name))
    r.max_tokens = 2
    drain(b, r)  # and put right, the same request can be added
    right(r)


def test_what_a_batcher_refuses():
    for change, message in [({"token_budget": 0}, "token_budget is 0"), ({"chunk": 0}, "chunk is 0"),
                            ({"max_batch": 0}, "max_batch is 0"), ({"static": "padded"}, "static is 'padded'"),
                            ({"drafter": Guesses()}, "a drafter and verify")]:
        with pytest.raises(ValueError, match=message):
            batcher_for(**change)
    with pytest.raises(ValueError, match="stop strings need a decoder"):
        batcher_for(decoder=None).add(Request([1], stop=["x"]))


def test_the_context_is_the_end():
    """Prompt and answer hold context + 1 tokens at most: the last one's K/V is never needed."""
    for prompt, max_tokens, n in [(96, None, 1), (96, 5, 1), (95, None, 2), (90, 7, 7), (90, 8, 7), (1, None, 96)]:
        b = batcher_for(24, 4, eos_ids=())
        r = Request([3] * prompt, id="r", max_tokens=max_tokens, seed=1)
        drain(b, r)
        assert (len(r.samples[0].ids), r.samples[0].finish_reason) == (n, "length")
        right(r, eos=())
    b = batcher_for(5, 4, eos_ids=())
    b.cache.max_seq_len = None  # then the pool is
    r = Request([3] * 5, seed=1)
    drain(b, r)
    assert len(r.samples[0].ids) == 16
    right(r, eos=(), room=20)


def test_ids_are_made_and_seeds_are_fresh():
    b = batcher_for(eos_ids=())
    requests = [Request([1], max_tokens=12, id=i) for i in (None, 2, None, None)]
    drain(b, *requests)
    assert len({r.id for r in requests}) == 4 and len({tuple(r.samples[0].ids) for r in requests}) == 4


# ------------------------------------------------------------------ the published cases: scheduling


def test_b01_what_can_never_fit_is_refused():
    """B01 (vllm-project/vllm issue 39734, PR 35570; MinivLLM issue 94; nano-vllm issue 274): it waited at the head of
    the queue for ever, or was preempted for ever, or killed the engine."""
    b = batcher_for(2, 4, eos_ids=())
    with pytest.raises(ValueError, match=r"the prompt's 12 tokens and 1 new ones do not fit .* room for 8"):
        b.add(Request([1] * 12))
    with pytest.raises(ValueError, match="the prompt's 8 tokens and 4 new ones"):
        b.add(Request([1] * 8, max_tokens=4))
    small, full = Request([1] * 3, id=3, max_tokens=2, seed=0), Request([2] * 8, id=4, max_tokens=1, seed=0)
    whole = Request([2] * 8, id=5, seed=0)  # max_tokens None: what fits, one token
    drain(b, small, full, whole, most=20)
    for r in (small, full, whole):
        right(r, eos=(), room=8)
    assert len(whole.samples[0].ids) == 1 and whole.samples[0].finish_reason == "length"


@pytest.mark.parametrize("swap", [False, True])
def test_b03_a_preempted_request_goes_on_with_what_it_has_said(swap):
    """B03 (FastDeploy PR 3080; vllm-project/vllm PR 5349; nano-vllm PR 217): only the prompt was computed again, a
    token was lost or came twice, or output was taken for prompt by the penalties."""
    b, log = batcher_for(12, 4, eos_ids=(), swap=swap), Log()
    old = Request([40, 41], id="old", max_tokens=40, seed=0)
    new = Request([1, 2, 3, 4], id="new", max_tokens=10, seed=1, logprobs=1, sampling={"frequency_penalty": 0.5})
    b.add(old)
    b.add(new)
    for said in (5, 9):  # 9 and 13 ids: the next one begins a block
        while len(new.samples[0].ids) < said:
            log.hear(b.step())
        b.cache.add("hog")
        b.cache.commit(b.cache.extend({"hog": [0] * 4 * b.cache.n_free}))
        for _ in range(2):
            log.hear(b.step())
            b.cache.check()
        assert b.waiting == new.samples and (new.samples[0].swapped is not None) == swap
        b.cache.free("hog")
    drain(b, log=log)
    assert new.samples[0].preempted == 2 and len(log.tokens["new", 0]) == 10
    for r in (old, new):
        log.agrees(r)
        right(r, eos=())


def test_b05_chunks_join_and_a_token_comes_from_the_last_row():
    """B05 (tenstorrent/vllm PR 448; SharpMind issue 57): the prompt's length was taken for the chunk's, or a capped
    chunk advanced by its nominal size."""
    for budget, chunk in ((7, 3), (3, None), (1, None), (512, 1)):
        b = batcher_for(token_budget=budget, chunk=chunk, eos_ids=())
        plans = watch(b)
        requests = [Request([n] * n, id=n, max_tokens=3, seed=n) for n in (5, 8, 3)]
        for r in requests:
            b.add(r)
        seen = dict.fromkeys((5, 8, 3), 0)
        while b.live:
            events = step(b)
            for s, (begin, ids) in plans[-1].items():
                assert begin == seen[s.request.id] and ids == s.context[begin: begin + len(ids)], "a gap or an overlap"
                seen[s.request.id] += len(ids)
            spoke = {e.id for e in events if e.token is not None}
            assert spoke == {s.request.id for s in plans[-1] if seen[s.request.id] >= s.request.id}
        for r in requests:
            right(r, eos=())
    b = batcher_for(token_budget=3, eos_ids=())
    plans = watch(b)
    drain(b, Request([8] * 8, max_tokens=1))
    assert [(begin, len(ids)) for plan in plans for begin, ids in plan.values()] == [(0, 3), (3, 3), (6, 2)]


@pytest.mark.parametrize("after", [0, 1, 2, 3, 9])
def test_b06_abort_in_the_middle_of_a_prompt(after):
    """B06 (sgl-project/sglang PRs 36926, 2238, issue 38981; vllm-project/vllm PR 29987): blocks and locks stayed, or a
    page was freed twice."""
    b, log = batcher_for(8, 4, token_budget=4, eos_ids=()), Log()
    r = Request([*range(10)], id="r", max_tokens=3, seed=0)
    b.add(r)
    for _ in range(after):
        log.hear(step(b))
    for _ in range(2):
        b.abort("r")
        b.abort("nobody")
        sound(b)
    log.hear(b.step())
    log.agrees(r)
    assert log.ends["r", 0] == ["length" if after == 9 else "abort"]
    assert b.cache.n_free == 8 and not b.live
    same = Request([*range(10)], id="r", max_tokens=3, seed=0)
    drain(b, same)
    assert same.samples[0].cached == 4 * min(after, 2), "whole blocks that were computed, and no others"
    right(same, eos=())
    large = Request([50] * 30, max_tokens=3, seed=0)
    drain(b, large)
    right(large, eos=())


def test_b08_an_id_that_is_taken():
    """B08 (vllm-project/vllm issues 10583, 15041, PR 11036): two requests shared one entry; a hang, a crash."""
    b, log = batcher_for(eos_ids=()), Log()
    first = Request([1, 2], id="r", max_tokens=20, seed=0, sampling=SAMPLERS[5], stop=["zz"])
    b.add(first)
    for _ in range(2):
        log.hear(step(b))
    with pytest.raises(ValueError, match="request 'r' is already there"):
        b.add(Request([3], id="r"))
    with pytest.raises(ValueError, match="already there"):
        b.add(first)
    drain(b, log=log)
    log.agrees(first)
    right(first, eos=())
    again = Request([1, 2], id="r", max_tokens=20, seed=0, sampling=SAMPLERS[5], stop=["zz"])
    drain(b, again)
    assert again.samples[0].ids == first.samples[0].ids and again.samples[0].text == first.samples[0].text


def test_b09_an_empty_prompt_is_refused():
    """B09 (vllm-project/vllm issues 7283, 7632, 1130): an assertion in the step loop, and all others died."""
    b = batcher_for()
    healthy = Request([1], id="h", max_tokens=5, seed=0, ignore_eos=True)
    b.add(healthy)
    for prompt in ([], [-1], [V], [0.5], ["1"], [None]):
        with pytest.raises(ValueError):
            b.add(Request(prompt))
    drain(b)
    right(healthy)


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
@pytest.mark.parametrize("n", [1, 3])
def test_b10_max_tokens(max_tokens, n):
    """B10 (huggingface/transformers PRs 28579, 28621; sgl-project/sglang PRs 4998, 772): 0 gave a token, or leaked."""
    b = batcher_for(8, 4, eos_ids=())
    r = Request([1, 2, 3, 4], id="r", max_tokens=max_tokens, n=n, seed=0)
    used = []
    forward = b.forward
    b.forward = lambda step: used.append(8 - b.cache.n_free) or forward(step)
    drain(b, r)
    right(r, eos=())
    assert [len(s.ids) for s in r.samples] == [max_tokens] * n and r.samples[0].finish_reason == "length"
    assert used == [1, 1 + n][:max_tokens], "no pass, and no block, for a token that nobody wants"
    with pytest.raises(ValueError, match="max_tokens is -1"):
        b.add(Request([1], max_tokens=-1))


@pytest.mark.parametrize("eos_ids", [[2, 4], [2, 4, 6, 10**6, -1]])
def test_b13_min_tokens_and_ignore_eos(eos_ids):
    """B13 (NVIDIA/TensorRT-LLM PRs 12358, 12166; vllm-project/vllm PR 32163; sgl-project/sglang PR 31378): the prompt
    counted, the last vocabulary entry was masked, or only the user's own stop ids were. Ids beyond the vocabulary that
    a config names mask nothing else."""
    row = torch.tensor([0.0, 1, 5, 2, 4, 3])
    b = batcher_for(forward=scripted(lambda *_: row), vocab=6, eos_ids=eos_ids, decoder=None)
    greedy = {"temperature": 0}
    r = Request([1] * 10, id="m", min_tokens=3, max_tokens=6, sampling=greedy)
    i = Request([1] * 10, id="i", ignore_eos=True, max_tokens=6, sampling=greedy)
    drain(b, r, i)
    assert (r.samples[0].ids, r.samples[0].finish_reason) == ([5, 5, 5, 2], "stop")
    assert (i.samples[0].ids, i.samples[0].finish_reason) == ([2] * 6, "length")


@pytest.mark.parametrize("model", [MODEL, LLAMA])
def test_b15_the_answer_does_not_depend_on_who_else_is_there(model):
    """B15 (vllm-project/vllm issues 5898, 15437; imp issue 1314; mlx-vlm issue 2242): near ties flip with the shape of
    the batch, and faults of the scheduler hide behind that. In float64 there is nothing to hide behind."""
    def run(order, arrive=0, **options):
        b = batcher_for(eos_ids=(), model=model, **options)
        requests = [Request([*range(5, 5 + n)], id=n, max_tokens=8, sampling={"temperature": 0}) for n in order]
        for r in requests:
            b.add(r)
            for _ in range(arrive):
                step(b)
        drain(b)
        return {r.id: r.samples[0].ids for r in requests}

    alone = {n: run([n])[n] for n in range(1, 7)}
    for n, ids in alone.items():
        cold = Request([*range(5, 5 + n)], max_tokens=8, sampling={"temperature": 0}, seed=0)
        assert ids == solo(cold, model=model, eos=())
    for other in (run(range(1, 7)), run(range(6, 0, -1)), run(range(1, 7), arrive=2), run(range(1, 7), chunk=2),
                  run(range(1, 7), token_budget=2), run(range(1, 7), attention=paged_attention)):
        assert other == alone


def test_b16_every_step_gets_somewhere():
    """B16 (vllm-project/vllm issue 15996; nanovllm-voxcpm issue 37; nano-vllm issue 274): empty plans for ever."""
    b = batcher_for(token_budget=4, eos_ids=())
    requests = [Request([i], id=i, max_tokens=3 + i, seed=i) for i in range(5)]
    for r in requests[:4]:
        b.add(r)
    step(b)
    b.add(requests[4])
    plans = watch(b)
    while requests[0].samples[0].finish_reason is None:
        step(b)
    step(b)
    assert [len(plan) for plan in plans] == [4, 4, 4] and requests[4].samples[0] in plans[-1]
    drain(b)
    for r in requests:
        right(r, eos=())

    b = batcher_for(token_budget=3, eos_ids=())
    for i in range(4):
        b.add(Request([i], id=i, max_tokens=20, seed=i))
    for _ in range(4):
        step(b)
    plans = watch(b)
    for _ in range(12):
        step(b)
    for s in b.running:
        assert all(s in one or s in two for one, two in itertools.pairwise(plans)), "at least every second step"
    for i in list(b.live):
        b.abort(i)
    assert {e.finish_reason for e in step(b)} == {"abort"}
    over(b)


# ------------------------------------------------------------------ the published cases: the cache


def test_k01_a_prompt_that_is_cached_as_a_whole():
    """K01 (vllm-project/vllm PRs 11186, 7753; ggml-org/llama.cpp PR 5420): no token was left to compute."""
    for n, found in ((4, 0), (7, 4), (8, 4), (9, 8)):
        b = batcher_for(eos_ids=())
        for expected in (0, found):
            r = Request([*range(1, n + 1)], max_tokens=3, sampling={"temperature": 0})
            drain(b, r)
            right(r, eos=())
            assert r.samples[0].cached == expected
        assert b.stats.cached == found and b.stats.computed == 2 * (n + 2) - found
    b = batcher_for(eos_ids=())
    for prompt, expected in (([*range(1, 9)], 0), ([*range(1, 6)], 4)):
        r = Request(prompt, max_tokens=1, seed=0)
        drain(b, r)
        assert r.samples[0].cached == expected
    other = Request([*range(1, 9)], max_tokens=1, seed=0, salt="somebody else")
    drain(b, other)
    assert other.samples[0].cached == 0


@pytest.mark.parametrize("prompt, blocks", [(6, 4), (8, 5)])
def test_k05_siblings_do_not_write_into_each_others_block(prompt, blocks):
    """K05 (ggml-org/llama.cpp issue 3802, PR 6664; xLLM PR 1984; vllm-project/vllm PR 3347): one beam read another's
    keys. A shared block that is not full is copied by all who write but the last."""
    b = batcher_for(12, 4, eos_ids=())

    def draw(probs, u):  # the children are forced to differ
        return sampling.draw(probs, u) if b.stats.steps else torch.tensor([11, 12, 13])

    b.sampling = SimpleNamespace(**{**vars(sampling), "draw": draw})
    r = Request([*range(prompt)], id="r", max_tokens=6, n=3, sampling={"temperature": 0})
    b.add(r)
    step(b)
    assert b.cache.n_blocks - b.cache.n_free == 2 and [s.ids for s in r.samples] == [[11], [12], [13]]
    step(b)
    assert b.cache.n_blocks - b.cache.n_free == blocks and b.cache.stats.copied == (2 if prompt == 6 else 0)
    drain(b)
    for s, token in zip(r.samples, (11, 12, 13)):
        cold = Request([*range(prompt), token], max_tokens=5, sampling={"temperature": 0}, seed=0)
        assert s.ids[1:] == solo(cold, eos=())


def test_k19_a_failed_admission_leaves_nothing_behind():
    """K19 (neuralmagic/vllm PR 92; vllm-project/vllm PR 11565): who could not be scheduled kept its blocks."""
    b = batcher_for(4, 16, eos_ids=())
    a = Request([1] * 33, id="a", max_tokens=15, seed=0)
    waiting = Request([2] * 32, id="b", max_tokens=1, seed=0)
    b.add(a)
    step(b)
    b.add(waiting)
    for _ in range(13):
        step(b)
        assert b.cache.n_free == 1 and waiting.samples[0] not in b.cache
    step(b)
    assert a.samples[0].finish_reason == "length"
    step(b)
    assert waiting.samples[0].finish_reason == "length"
    over(b)
    right(waiting, eos=())


# ------------------------------------------------------------------ the published cases: sampling


def test_s07_a_seed_does_not_know_its_neighbours():
    """S07 (vllm-project/vllm issue 51226, PR 1637; tt-metal issue 53802; mlx-vlm issue 1818): one request without a
    seed switched the whole batch to another generator; equal seeds differed; a missing seed was a constant."""
    def run(*seeds):
        b = batcher_for(eos_ids=())
        requests = [Request([1, 2, 3], id=i, max_tokens=16, seed=s, sampling={"temperature": 0.8})
                    for i, s in enumerate(seeds)]
        drain(b, *requests)
        return [r.samples[0].ids for r in requests]

    a = run(42)[0]
    assert run(42, None)[0] == run(None, 42)[1] == a and run(42, 42) == [a, a]
    assert len({tuple(run(None)[0]) for _ in range(3)} | {tuple(a)}) == 4


@pytest.mark.parametrize("temperature", [0, 1])
def test_s12_a_row_without_a_best_token_is_an_error_and_never_token_0(temperature):
    """S12 (colibri issue 369; huggingface/transformers PRs 45413, 17937; vllm-project/vllm issue 53029)."""
    inf, nan = torch.inf, torch.nan
    rows = [[-inf] * 4, [nan, 1, 2, 3], [0.0, 1, 2, 300], [inf, 1, 2, 0]]
    b = batcher_for(forward=scripted(lambda s, *_: torch.tensor(rows[s.request.id])), vocab=4, decoder=None, eos_ids=())
    requests = [Request([1], id=i, max_tokens=2, seed=i, sampling={"temperature": temperature}) for i in range(4)]
    drain(b, *requests)
    assert [r.samples[0].finish_reason for r in requests] == ["error", "error", "length", "error"]
    assert [r.samples[0].ids for r in requests] == [[], [], [3, 3], []]
    assert all("not finite" in requests[i].samples[0].error for i in (0, 1, 3))


def test_s22_a_bias_outside_the_vocabulary_is_refused_at_the_door():
    """S22 (vllm-project/vllm PR 16529; sgl-project/sglang issue 7670): it raised in the step loop and stopped all."""
    row = torch.tensor([0.0, 1, 2, 3, 4])
    b = batcher_for(forward=scripted(lambda *_: row), vocab=5, decoder=None, eos_ids=())
    innocent = Request([1], id="innocent", max_tokens=4, sampling={"temperature": 0})
    b.add(innocent)
    for token in (5, -1):
        with pytest.raises(ValueError, match=rf"{token}"):
            b.add(Request([1], sampling={"logit_bias": {token: 3.0}}))
    biased = Request([1], id="biased", max_tokens=4, sampling={"temperature": 0, "logit_bias": {4: -100}})
    drain(b, biased)
    assert innocent.samples[0].ids == [4] * 4 and biased.samples[0].ids == [3] * 4


@pytest.mark.parametrize("drafts", [0, 2])
def test_s24_logprobs_are_the_models_own(drafts):
    """S24 (vllm-project/vllm issue 9453): reported before or after penalties, temperature and truncation? Before; and
    the same with speculation."""
    row = torch.tensor([1.5, 0.5, 0.0, -1.0], dtype=torch.float64)
    options = {} if not drafts else {"drafts": drafts, "verify": speculative.verify, "drafter": SimpleNamespace(
        propose=lambda contexts, k, choose: ([[0] * n for n in k], None), forget=lambda s: None)}
    b = batcher_for(forward=scripted(lambda *_: row), vocab=4, decoder=None, eos_ids=(), **options)
    requests = [Request([1], id=i, max_tokens=3, logprobs=3, seed=i, sampling={**x, "logit_bias": {0: 50}})
                for i, x in enumerate([{}, {"temperature": 0.5}, {"temperature": 0.5, "top_k": 2}])]
    log = drain(b, *requests)
    for r in requests:
        assert r.samples[0].ids == [0, 0, 0] and log.logprobs[r.id, 0] == r.samples[0].logprobs
        for x in r.samples[0].logprobs:
            assert x["id"] == 0 and x["logprob"] == pytest.approx(-0.514675, abs=1e-6)
            assert [i for i, _ in x["top"]] == [0, 1, 2]
            assert [p for _, p in x["top"]] == pytest.approx([-0.514675, -1.514675, -2.014675], abs=1e-6)
    assert (b.stats.accepted > 0) == (drafts > 0)
    unlikely = Request([1], max_tokens=1, logprobs=1, sampling={"logit_bias": {3: 100}})
    drain(b, unlikely)
    assert unlikely.samples[0].logprobs[0]["id"] == 3 and unlikely.samples[0].logprobs[0]["top"][0][0] == 0


# ------------------------------------------------------------------ the published cases: text


@pytest.mark.parametrize("texts, stop, text", [
    (["klm", "n", "op", "q", "!"], "klmnopq", ""), (["ok", "\nQ2", ":", " hi", "!"], "\nQ2:", "ok"),
    (["6 7 8 9 0", "!", "!", "!", "!"], " 7 8 9", "6")])
def test_d03_a_stop_string_over_several_tokens(texts, stop, text):
    """D03 (vllm-project/vllm issue 3574; SwiftLM issue 126; mlx-knife issue 68; ggml-org/llama.cpp issue 11538):
    missed, or its beginning had been streamed."""
    b = speaking(pieces(*texts), {"r": range(5)}, eos_ids=())
    r, log = Request([V - 1], id="r", max_tokens=5, stop=[stop]), Log()
    b.add(r)
    while b.live:
        log.hear(step(b))
        assert text.startswith("".join(log.text["r", 0])), "streamed, and to be taken back"
    assert r.samples[0].text == text == "".join(log.text["r", 0]) and r.samples[0].finish_reason == "stop"
    assert r.samples[0].ids == [0, 1, 2, 3][: {"": 4, "ok": 3, "6": 1}[text]]


def test_d05_every_one_of_several_end_tokens_ends_it():
    """D05 (vllm-project/vllm issue 4180; exllamav2 PR 449; textgen issue 5885; ggml-org/llama.cpp issue 6772)."""
    for eos, ids, reason in (([2, 4, 5], [7, 4], "stop"), ({4}, [7, 4], "stop"), ((), [7, 4, 7, 7], "length")):
        b = speaking(TOKENIZER, {"r": [7, 4, 7, 7]}, eos_ids=eos)
        r = Request([1], id="r", max_tokens=4)
        drain(b, r)
        assert (r.samples[0].ids, r.samples[0].finish_reason) == (ids, reason)


def test_d12_a_stop_string_that_is_a_special_token():
    """D12 (vllm-project/vllm issue 2123; koboldcpp issues 791, 812): special tokens are not in the text, so comparing
    text never matched. Text that spells it ends the answer too; min_tokens keeps the token back."""
    tokenizer = pieces("<|im", "", "", "_end|>", "", "", "", "seven", **{"<|im_end|>": 2})
    for answer, ids, text, more in (([7, 2, 7], [7, 2], "seven", {}), ([7, 0, 3, 7], [7, 0, 3], "seven", {}),
                                    ([7, 2, 7], [7, 2, 7], "sevenseven", {"stop": ()})):
        b = speaking(tokenizer, {"r": answer}, eos_ids=())
        r = Request([1], id="r", max_tokens=len(answer), **{"stop": ["<|im_end|>"], "ignore_eos": True, **more})
        drain(b, r)
        assert (r.samples[0].ids, r.samples[0].text) == (ids, text)
        assert r.samples[0].finish_reason == ("length" if more else "stop")
    b = speaking(tokenizer, {"r": [2] * 5}, eos_ids=())
    r = Request([1], id="r", max_tokens=5, min_tokens=3, stop=["<|im_end|>"], seed=0)
    drain(b, r)
    assert len(r.samples[0].ids) == 4 and r.samples[0].ids.index(2) == 3


def test_d15_nobody_gets_the_rest_of_somebody_elses_character():
    """D15 (waybarrios/vllm-mlx PRs 109, 195; exo PR 1691): decoders that were shared or not renewed."""
    tokenizer = SimpleNamespace(special={}, special_ids=set(), token_bytes=lambda i, first=False: data[i])
    data = [*(bytes([x]) for x in "😀ж".encode()), b"o", b"k", *[b""] * V]
    b = speaking(tokenizer, {"a": [0, 1, 2, 3], "b": [6, 7], "x": [0, 1, 2, 3], "y": [4, 5, 0, 1, 2, 3]}, eos_ids=())
    b.add(Request([8], id="a", max_tokens=4))
    for _ in range(2):
        step(b)
    b.abort("a")
    b.step()
    later = Request([8], id="b", max_tokens=2)
    drain(b, later)
    assert later.samples[0].text == "ok"
    x, y = Request([8], id="x", max_tokens=4, n=2), Request([8], id="y", max_tokens=6)
    log = drain(b, x, y)
    assert [s.text for s in (*x.samples, *y.samples)] == ["😀", "😀", "ж😀"]
    assert log.text["x", 1] == ["", "", "", "😀"]


def test_d16_ids_text_logprobs_and_reason_follow_one_rule():
    """D16 (PocketLLM PR 133; lmdeploy PR 1823; SkyRL PR 778): some layers count the stop token, others drop it. Ids and
    logprobs hold it, text does not; a next turn finds the blocks of this one."""
    b = speaking(TOKENIZER, {"r": [7, 8, 5], "s": [9] * 3, "t": [9] * 3}, block_size=2)
    r = Request([1, 2, 3], id="r", logprobs=0)
    drain(b, r)
    assert (r.samples[0].ids, r.samples[0].text, r.samples[0].finish_reason) == ([7, 8, 5], "hi", "stop")
    assert [x["id"] for x in r.samples[0].logprobs] == [7, 8, 5] and b.stats.generated == 3
    s, t = Request([1, 2, 3, 7, 8], id="s", max_tokens=1), Request([1, 2, 3, 7, 8, 5], id="t", max_tokens=1)
    drain(b, s, t)
    assert s.samples[0].cached == t.samples[0].cached == 4
    b = batcher_for(block_size=2)
    r = Request([1, 2, 3], max_tokens=9, seed=3)
    drain(b, r)
    for more in (r.samples[0].ids[:-1], r.samples[0].ids):
        following = Request([1, 2, 3, *more], max_tokens=5, seed=5, ignore_eos=True)
        drain(b, following)
        right(following)
        assert following.samples[0].cached == (len(following.prompt_ids) - 1) // 2 * 2


# ------------------------------------------------------------------ the published cases: speculation


def offering(propose, **options) -> dict:
    """Options of a batcher whose drafts are propose(sample)."""
    return {"verify": speculative.verify, "drafter": SimpleNamespace(
        propose=lambda contexts, k, choose: ([propose(s)[:n] for s, n in zip(contexts, k)], None),
        forget=lambda s: None), **options}


@pytest.mark.parametrize("at", range(4))
def test_p05_an_end_among_accepted_drafts(at):
    """P05 (huggingface/transformers issue 47912, PRs 47931, 31301; koboldcpp issue 1276; vllm-project/vllm PR 12193):
    the whole block was appended before the stop test, which looked at the last token only."""
    answer = [9, 10, 11, 20, 21, 22]
    answer[1 + at] = 5
    b = batcher_for(forward=says({"r": answer}), block_size=1, eos_ids=[5],
                    **offering(lambda s: answer[len(s.ids):], drafts=3))
    r = Request([1, 2], id="r", max_tokens=20, sampling={"frequency_penalty": 0.1}, logprobs=1)
    log = drain(b, r)
    assert r.samples[0].ids == answer[: at + 2] == log.tokens["r", 0] and r.samples[0].finish_reason == "stop"
    assert b.stats.steps == 2 and b.stats.generated == at + 2 == len(r.samples[0].logprobs)
    found = b.cache.add("next", [1, 2, *answer, 0])
    assert found == 2 + min(at + 2, 4), "what is behind the end is not in the cache, nor the bonus token"


def test_p09_penalties_count_the_drafts_before_a_row():
    """P09 (sgl-project/sglang PR 33643; vllm-project/vllm PR 33251, issue 6718; TensorRT-LLM PR 17701): only the last
    of an accepted run was counted, one was counted twice, or the penalty was applied at the first position only."""
    seen = []

    def warp(logits, params, prompt, output, mask):
        probs = sampling.warp(logits, params, prompt, output, mask)
        seen.append(probs.log() - probs.log()[:, :1])
        return probs

    answers = {"r": [7, 7, 8, 4, 4, 4, 1, 1]}
    b = batcher_for(forward=scripted(lambda *_: torch.zeros(V, dtype=torch.float64)), eos_ids=(), decoder=None,
                    **offering(lambda s: answers["r"][len(s.ids):], drafts=2))
    b.sampling = SimpleNamespace(**{**vars(sampling), "warp": warp, "draw": lambda probs, u: torch.tensor(
        answers["r"][len(r.samples[0].ids):][: len(u)])})
    r = Request([7, 4], id="r", max_tokens=8, sampling={"frequency_penalty": 1.0})
    drain(b, r)
    one, two, three = seen[:3]
    assert torch.equal(one, torch.zeros(1, V).double())  # the prompt does not count
    for row, counts in zip(two, ({7: 1}, {7: 2}, {7: 2, 8: 1})):
        wanted = torch.zeros(V).double()
        wanted[list(counts)] = -torch.tensor(list(counts.values())).double()
        assert torch.allclose(row, wanted, atol=1e-12)
    assert [round(float(x), 9) for x in three[:, 4]] == [-1, -2, -3]


def test_p14_no_drafts_beyond_the_context_or_the_limit():
    """P14 (vllm-project/vllm issues 42533, 48894, PR 43049; huggingface/transformers PR 28555): positions beyond the
    table, or more tokens than were asked for."""
    asked = []

    class Spy(Guesses):
        def propose(self, contexts, k, choose):
            asked.extend((CONTEXT - len(s.context), s.request.limit - len(s.ids), n) for s, n in zip(contexts, k))
            return [[1] * (n + 3) for n in k], None  # more than was asked for

    for prompt, max_tokens in ((94, None), (95, None), (96, None), (10, 1), (10, 2), (10, 3), (10, 4), (90, 6)):
        b = batcher_for(100, 2, eos_ids=(), drafter=Spy(), verify=speculative.verify, drafts=4)
        plans = watch(b)
        r = Request([1] * prompt, max_tokens=max_tokens, sampling={"logit_bias": {1: 30}}, seed=0)
        drain(b, r)
        right(r, eos=())
        assert len(r.samples[0].ids) == min(max_tokens or 99, CONTEXT + 1 - prompt)
        assert all(begin + len(ids) <= CONTEXT for plan in plans for begin, ids in plan.values())
    assert asked and all(1 <= n <= min(4, context, left - 1) for context, left, n in asked)


def test_p18_rejected_drafts_are_not_in_the_prefix_cache():
    """P18 (vllm-project/vllm PRs 18668, 12415, 19006, issue 49449): when may a block be published whose tail may still
    be rejected? When its tokens are accepted and computed."""
    greedy = {"temperature": 0}
    prompt = [1, 2, 3, 4, 5, 6]
    cold = solo(Request(prompt, max_tokens=3, sampling=greedy, seed=0), eos=())
    wrong = [(x + 1) % V for x in (cold[1], cold[1], cold[1])]
    b = batcher_for(16, 4, eos_ids=(), **offering(lambda s: wrong, drafts=3))
    r = Request(prompt, id="r", max_tokens=9, sampling=greedy)
    b.add(r)
    for _ in range(2):
        step(b)
    assert b.stats.drafted == 3 and b.stats.accepted == 0 and r.samples[0].ids == cold[:2]
    assert b.cache.length(r.samples[0]) == 7 and len(b.cache._published) == 1
    step(b)
    assert b.cache.length(r.samples[0]) == 8 and len(b.cache._published) == 2
    for tail, found in (([*cold[:1], wrong[0], 9], 4), ([*cold[:2], 9], 8)):
        other = Request([*prompt, *tail], max_tokens=4, sampling=greedy)
        b.add(other)
        while other.samples[0].finish_reason is None:
            step(b)
        right(other, eos=())
        assert other.samples[0].cached == found
    drain(b)
    right(r, eos=())


# ------------------------------------------------------------------ a soak


class Unreliable(Toy):
    """Raises in the middle of a step now and then, or gives NaN for one sequence."""

    def __init__(self, rng: random.Random):
        super().__init__()
        self.rng = rng

    def __call__(self, tokens, positions, attend, rows):
        if self.rng.random() < 0.01:
            count = itertools.count()
            at = self.rng.randrange(2)

            def broken(layer, q, k, v):
                if next(count) == at:
                    raise self.rng.choice([RuntimeError, MemoryError, KeyboardInterrupt])("in the middle")
                return attend(layer, q, k, v)

            return super().__call__(tokens, positions, broken, rows)
        return super().__call__(tokens, positions, attend, rows)


def megabytes() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.slow
def test_soak():
    """Random traffic for NANOINFER_SOAK_SECONDS, one minute if it is not set, with faults: aborts, NaN of one sequence,
    a pool that runs dry, exceptions and interrupts in the middle of a step, callbacks that raise, streams left
    half-way. Nothing leaks, nobody else's answer changes, memory is flat."""
    seconds, rng = float(os.environ.get("NANOINFER_SOAK_SECONDS", 60)), random.Random(11)
    faulty = Unreliable(rng)
    spoil = set()  # requests whose row is to be NaN

    def forward(step):
        logits = faulty(step.tokens, step.positions, step.attend, step.rows)
        owner = [s for s, n in zip(step.seqs, step.n_new) for _ in range(n)]
        for i, r in enumerate(step.rows.tolist()):
            if owner[r].request.id in spoil:
                logits[i] = torch.nan
        return logits

    def lives():
        for drafter, swap, n_blocks in itertools.cycle([("none", False, 14), ("guess", True, 15), ("oracle", False, 40),
                                                        ("ngram", True, 14), ("model", False, 20)]):
            options = {} if drafter == "none" else {"drafter": drafter_for(drafter, rng.randrange(99)), "drafts": 3,
                                                    "verify": speculative.verify}
            yield batcher_for(n_blocks, 4, forward=forward, swap=swap, token_budget=rng.choice([4, 16, 64]),
                              max_batch=8, **options), drafter == "model"

    begin, total, reasons, sizes = time.monotonic(), Counter(), Counter(), []
    for b, greedy in lives():
        log, open_, streams, done = Log(), {}, {}, 0
        while time.monotonic() - begin < seconds and done < 300:
            while len(b.live) < 12:
                total["requests"] += 1
                r = random_request(rng, total["requests"], 48, greedy)
                if rng.random() < 0.02:
                    r.on_event = lambda e: 1 / 0
                open_[r.id] = r
                if rng.random() < 0.03:
                    spoil.add(r.id)
                if rng.random() < 0.1:
                    streams[r.id] = b.stream(r)
                else:
                    b.add(r)
            try:
                if streams and rng.random() < 0.3:
                    id = rng.choice(list(streams))
                    event = next(streams[id], None)
                    if event is None or rng.random() < 0.05:
                        streams.pop(id).close()
                else:
                    log.hear(b.step())
            except KeyboardInterrupt:
                total["interrupts"] += 1
            if rng.random() < 0.03 and b.live:
                b.abort(rng.choice(list(b.live)))
            sound(b)
            for r in [r for r in open_.values() if r.samples and r.id not in b.live]:
                done += 1
                del open_[r.id]
                for s in r.samples:
                    reasons[s.finish_reason] += 1
                if r.id not in spoil and not any(s.finish_reason == "error" for s in r.samples):
                    right(r)
                spoil.discard(r.id)
                for s in r.samples:
                    for held in (log.tokens, log.text, log.ends, log.logprobs):
                        held.pop((r.id, s.index), None)
        for id in list(b.live):
            b.abort(id)
        for stream in streams.values():
            stream.close()
        total.update(steps=b.stats.steps, preempted=b.stats.preempted, failed=b.stats.failed, cached=b.stats.cached)
        b.step()
        over(b)
        spoil.clear()
        sizes.append((time.monotonic() - begin, megabytes()))
        del b, log, open_, streams
        gc.collect()
        if time.monotonic() - begin >= seconds:
            break
    warm = [mb for t, mb in sizes if t > 0.3 * seconds]
    print(f"\n{dict(total)}, {dict(reasons)}, {sizes[0][1]:.1f} -> {warm[0]:.1f} -> {sizes[-1][1]:.1f} MB")
    assert sizes[-1][1] - warm[0] < 8, f"memory grows: {sizes}"
    assert all(reasons[x] for x in ("stop", "length", "abort", "error")) and total["interrupts"] and total["failed"]
