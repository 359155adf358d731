"""Answers that keep to a form: the protocol in batching.py with automata written by hand, and grammar.py's matchers.

- the distribution under a mask against the exact one, with a twin that masks too late and must be caught
- random traffic of constrained and free requests beside solo runs: drafts of all kinds, preemption, aborts, n > 1
- ends, faults, and what is refused
- llguidance's masks against `regex`'s partial matches, token by token; schemas against jsonschema; strangers' grammars
"""
import importlib
import itertools
import json
import random
import resource
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import regex
import test_batching as toys
import torch
from test_batching import EOS, MODEL, Log, V, batcher_for, drafter_for, drain, limits, over, plain_text, sound
from tiny import tiny_folder

import generate
import grammar
import sampling
import speculative
from batching import Batcher, Request
from grammar import Grammar, Matcher, Vocabulary

pytestmark = pytest.mark.usefixtures("one_thread")

# ------------------------------------------------------------------ an automaton, and the truth


class Automaton:
    """A form at random: in each state some ids may come, each leads to a state; in some states it may end. `start`
    counts, `asked` has all that it was asked for."""

    def __init__(self, seed: int, states: int = 6, wide: int = 8):
        rng = random.Random(seed)
        letters = [i for i in range(V) if i not in EOS and i not in (62, 63)]
        self.next = [{i: rng.randrange(states) for i in rng.sample(letters, rng.randint(1, wide))}
                     for _ in range(states)]
        self.final = [rng.random() < 0.3 for _ in range(states)]
        self.next.append({})  # a state with nothing behind it but the end
        self.final.append(True)
        for row in self.next[:-1]:
            row[rng.choice(letters)] = rng.choice([states, rng.randrange(states)])
        self.asked, self.started = [], 0

    def start(self):
        self.started += 1
        return self.allowed

    def allowed(self, ids):
        assert not set(ids) & set(EOS), "asked for what follows an end"
        self.asked.append(list(ids))
        mask, state = torch.zeros(V, dtype=torch.bool), 0
        for i in ids:
            state = self.next[state][i]  # KeyError: asked for what follows an id that is not allowed
        mask[list(self.next[state])] = True
        mask[list(EOS)] = self.final[state]
        return mask


def permitted(r: Request, ids: list[int], ends) -> torch.Tensor:
    """The rule of batching.py, said once more."""
    mask = torch.ones(V, dtype=torch.bool) if r.constraint is None else r.constraint.__self__.allowed(ids)
    without = mask.clone()
    without[list(ends)] = False
    if len(ids) < r.min_tokens or (r.ignore_eos and r.constraint is not None):
        mask = without if without.any() else mask
    return mask


@torch.inference_mode()
def solo(r: Request, sample: int) -> tuple[list[int], str]:
    """One answer, alone and without a cache, and why it ends."""
    prompt, ids, (ends, most) = list(r.prompt_ids), [], limits(r)
    ends = ends | (set(EOS) if r.constraint else set())
    params = sampling.params([r.sampling], V)
    while len(ids) < most:
        probs = sampling.warp(MODEL(torch.tensor([prompt + ids]))[0, -1:], params, torch.tensor([prompt]),
                              torch.tensor([ids], dtype=torch.int64), permitted(r, ids, ends)[None])
        ids.append(int(sampling.draw(probs, sampling.uniforms(r.seed, sample, len(ids)))))
        if ids[-1] in ends or (r.stop and plain_text(prompt, ids, r.stop)[1]):
            return ids, "stop"
    return ids, "length"


def agree(requests) -> None:
    for r in requests:
        for s in r.samples:
            ids, reason = solo(r, s.index)
            if s.finish_reason == "abort":
                assert ids[: len(s.ids)] == s.ids
            else:
                assert (s.ids, s.finish_reason) == (ids, reason), r
            assert s.error is None and s.allowed is None


def some_request(rng: random.Random, i: int, greedy: bool) -> Request:
    r = toys.random_request(rng, i, 48, greedy)
    r.sampling = {k: v for k, v in r.sampling.items() if k != "logit_bias"}
    if rng.random() < 0.6:
        r.constraint = Automaton(rng.randrange(50)).start
    return r


def traffic(seed: int, drafter: str, n: int = 10, twin=Batcher) -> Counter:
    rng = random.Random(seed)
    options = {} if drafter == "none" else {"drafter": drafter_for(drafter, seed), "verify": speculative.verify,
                                            "drafts": rng.choice([1, 3, 6])}
    if drafter == "oracle":
        knows = {}

        def propose(contexts, k, choose):
            drafts = []
            for s, most in zip(contexts, k):
                known = knows.setdefault((s.request.id, s.index), solo(s.request, s.index)[0])
                drafts.append(known[len(s.ids): len(s.ids) + most])
                if drafts[-1] and rng.random() < 0.3:
                    drafts[-1][rng.randrange(len(drafts[-1]))] = rng.randrange(V)
            return drafts, None

        options["drafter"] = SimpleNamespace(propose=propose, forget=lambda s: None)
    b = batcher_for(rng.choice([12, 13, 60]), 4, twin=twin, swap=rng.random() < 0.4, max_batch=rng.choice([3, 8]),
                    token_budget=rng.choice([3, 11, 64]), **options)
    log, done, happened = Log(), [], Counter()
    for i in range(n):
        done.append(some_request(rng, i, drafter in ("drawn", "model")))
        b.add(done[-1])
        for _ in range(rng.choice([0, 0, 1, 3])):
            log.hear(toys.step(b))
            if rng.random() < 0.15 and b.live:
                b.abort(rng.choice(list(b.live)))
                happened["aborted"] += 1
    for _ in range(5000):
        if not b.live:
            break
        log.hear(toys.step(b))
    log.hear(b.step())
    over(b)
    assert b.stats.failed == 0 and (b.drafter is None) == (drafter == "none")
    for r in done:
        log.agrees(r)
        if r.constraint:
            assert r.constraint.__self__.started == r.n, "each sample has its own"
    agree(done)
    kept = [r for r in done if r.constraint]
    happened.update(preempted=b.stats.preempted, accepted=b.stats.accepted, rejected=b.stats.drafted - b.stats.accepted,
                    forked=sum(r.n > 1 for r in kept), constrained=len(kept),
                    finished=sum(s.finish_reason == "stop" for r in kept for s in r.samples))
    return happened


def test_constrained_and_free_requests_equal_their_solo_runs():
    happened = Counter()
    for seed, drafter in enumerate(["none", "ngram", "guess", "oracle", "drawn", "model", "none"]):
        happened += traffic(seed, drafter)
    for what in ("aborted", "preempted", "accepted", "rejected", "forked", "constrained", "finished"):
        assert happened[what] >= 4, f"{what} is hardly tried: {happened}"


@pytest.mark.slow
def test_more_constrained_and_free_requests_equal_their_solo_runs():
    for seed in range(100, 124):
        traffic(seed, ["none", "ngram", "guess", "oracle", "drawn", "model"][seed % 6])


class Blind(Batcher):
    """The mask of a row does not know the drafts before it."""

    def _allowed(self, s, drafts):
        return super()._allowed(s, [])


class Late(Batcher):
    """Of a step's rows the masks are the neighbours'."""

    def _mask(self, rows):
        mask = super()._mask(rows)
        return None if mask is None else mask.roll(1, 0)


class Free(Batcher):
    """The first of several samples alone is constrained."""

    def add(self, request, box=None):
        id = super().add(request, box)
        for s in request.samples[1:]:
            s.allowed = None
        return id


@pytest.mark.parametrize("twin, drafter", [(Blind, "oracle"), (Late, "none"), (Free, "none")])
def test_a_sabotaged_batcher_is_caught(twin, drafter):
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(6):
            traffic(seed, drafter, twin=twin)


@pytest.mark.parametrize("drafter", ["ngram", "guess", "oracle", "drawn", "model"])
def test_greedy_answers_are_the_same_with_and_without_drafts(drafter):
    said = []
    for how in ("none", drafter):
        form = Automaton(3)
        requests = [Request([1, 2, i], id=f"r{i}", max_tokens=30, sampling={"temperature": 0}, seed=0,
                            constraint=form.start) for i in range(6)]
        options = {} if how == "none" else {"drafter": drafter_for(how), "verify": speculative.verify, "drafts": 4}
        if how == "oracle":
            options["drafter"].answers = {(r.id, 0): solo(r, 0)[0] for r in requests}
        b = batcher_for(**options)
        drain(b, *requests)
        agree(requests)
        said.append([(s.ids, s.finish_reason) for r in requests for s in r.samples])
    assert said[0] == said[1] and (b.stats.drafted or drafter == "ngram")


def test_nobody_makes_a_mask_where_nobody_needs_one(monkeypatch):
    b, seen = batcher_for(), []
    warp = sampling.warp
    monkeypatch.setattr(sampling, "warp", lambda *args: seen.append(args[4]) or warp(*args))
    drain(b, Request([1, 2], max_tokens=4, seed=0))
    assert seen and all(mask is None for mask in seen)
    del seen[:]
    form = Automaton(1)
    drain(b, Request([1], id="c", max_tokens=6, seed=0, constraint=form.start), Request([2], max_tokens=6, seed=0))
    both = [mask for mask in seen if mask is not None and len(mask) == 2]
    assert both and all(mask[1].all() and not mask[0].all() for mask in both), "the free one may say anything"


# ------------------------------------------------------------------ the distribution

P = torch.rand(5, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.2
Q = torch.rand(5, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64) + 0.05
P, Q = P / P.sum(1, keepdim=True), Q / Q.sum(1, keepdim=True)
MAY = {0: (1, 2, 3), 1: (0, 2, 4), 2: (0, 1, 2, 3), 3: (1, 4), 4: (0, 2, 3)}  # what may follow what


def after(ids):
    mask = torch.zeros(5, dtype=torch.bool)
    mask[list(MAY[ids[-1] if ids else 2])] = True
    return mask


class TopFirst(Batcher):
    """The mask comes behind top-k, and what is left is renormalised."""

    def _warp(self, logits, rows):
        mask, self._mask = self._mask(rows), lambda rows: None
        try:
            probs = super()._warp(logits, rows)
        finally:
            del self._mask
        return probs * mask / (probs * mask).sum(1, keepdim=True) if mask is not None else probs


class Unmasked(Batcher):
    """Drafts are verified against the distribution without the mask."""

    def _mask(self, rows):
        return super()._mask(rows) if len(rows) == len({s for s, _ in rows}) else None


def chi_square(twin, drafts: str) -> float:
    """How far three tokens each of 1,050 constrained answers under top-k 3 are from the exact distribution."""
    k, exact = 3, torch.zeros(5, 5, dtype=torch.float64)
    for i, may in MAY.items():
        best = sorted(may, key=lambda j: -float(P[i, j]))[:k]  # of those that may come
        exact[i, best] = P[i, best] / P[i, best].sum()

    def propose(contexts, n, choose):
        mine, q, last = [[] for _ in n], torch.zeros(len(n), max(n), 5).double(), [x[-1] for x in contexts.values()]
        for i in range(max(n)):
            rows = [b for b, most in enumerate(n) if i < most]
            if drafts == "masked":
                ids, q[rows, i] = choose(rows, Q[[last[b] for b in rows]].log(), [list(mine[b]) for b in rows])
            else:  # a drafter that knows of no form, and draws by itself
                q[rows, i] = Q[[last[b] for b in rows]]
                ids = torch.multinomial(q[rows, i], 1, generator=dice).squeeze(1)
            for b, t in zip(rows, ids.tolist()):
                mine[b].append(t)
                last[b] = t
        return mine, q

    dice = torch.Generator().manual_seed(0)
    options = {} if drafts == "none" else {"verify": speculative.verify, "drafts": 2,
                                           "drafter": SimpleNamespace(propose=propose, forget=lambda s: None)}
    b = batcher_for(400, 4, twin=twin, forward=lambda step: P[step.tokens[step.rows]].log(), vocab=5, decoder=None,
                    eos_ids=(), max_batch=100, **options)
    requests = [Request([2], id=i, max_tokens=4, seed=i, n=1 + i % 2, sampling={"top_k": k}, constraint=lambda: after)
                for i in range(700)]
    for r in requests:
        b.add(r)
    while b.live:
        b.step()
    found, total = Counter(tuple(s.ids[:3]) for r in requests for s in r.samples), 0.0
    for x in itertools.product(range(5), repeat=3):
        e = 1050 * float(exact[2, x[0]] * exact[x[0], x[1]] * exact[x[1], x[2]])
        total += (found[x] - e) ** 2 / e if e > 0 else 1e9 * found[x]
    assert drafts == "none" or b.stats.accepted > 100
    return total


def test_the_distribution_under_a_form_is_the_exact_one_renormalised():
    """At most 27 cells of mass, 26 degrees of freedom: above 80 by chance less than once in a million times."""
    assert chi_square(Batcher, "none") < 80
    assert chi_square(TopFirst, "none") > 80


def test_drafts_leave_it_as_it_is_masked_or_not():
    """`verify` is right for any q, also one with mass on what is forbidden, where p is 0."""
    assert chi_square(Batcher, "masked") < 80
    assert chi_square(Batcher, "unmasked") < 80
    assert chi_square(Unmasked, "unmasked") > 80


# ------------------------------------------------------------------ ends and faults


def line(*ids: int):
    """A form that is one text and then an end."""
    def allowed(said):
        mask = torch.zeros(V, dtype=torch.bool)
        assert said == list(ids[: len(said)])
        mask[[ids[len(said)]] if len(said) < len(ids) else list(EOS)] = True
        return mask

    return lambda: allowed


@pytest.mark.parametrize("options", [{}, {"min_tokens": 10}, {"ignore_eos": True}, {"min_tokens": 10, "n": 3},
                                     {"ignore_eos": True, "stop": ("zq",), "sampling": {"temperature": 0}}])
def test_where_only_an_end_is_allowed_the_answer_stops(options):
    """With min_tokens and ignore_eos too: there is nothing else that it could say."""
    r = Request([1, 2], max_tokens=10, seed=0, constraint=line(7, 8, 9), **options)
    drain(batcher_for(), r)
    for s in r.samples:
        assert s.ids[:3] == [7, 8, 9] and s.ids[3] in EOS and s.finish_reason == "stop" and len(s.ids) == 4


def test_where_more_is_allowed_min_tokens_and_ignore_eos_hold():
    def allowed(said):  # any number of 7, and an end at any time
        mask = torch.zeros(V, dtype=torch.bool)
        mask[[7, 5]] = True
        return mask

    for options, ids in (({"min_tokens": 4, "sampling": {"logit_bias": {7: -50}}}, [7] * 4 + [5]),
                         ({"ignore_eos": True, "sampling": {"logit_bias": {7: -50}}}, [7] * 6)):
        r = Request([1], max_tokens=6, seed=0, constraint=lambda: allowed, **options)
        drain(batcher_for(eos_ids=(5,)), r)
        assert r.samples[0].ids == ids


def test_max_tokens_and_stop_strings_cut_a_form_short():
    one, other = (Request([1], seed=0, constraint=line(0, 1, 2, 3), **options)
                  for options in ({"max_tokens": 2}, {"max_tokens": 9, "stop": ("bc",)}))
    drain(batcher_for(), one, other)
    assert [(s.ids, s.finish_reason) for r in (one, other) for s in r.samples] == [([0, 1], "length"),
                                                                                     ([0, 1, 2], "stop")]


@pytest.mark.parametrize("drafter", ["none", "guess", "drawn", "oracle"])
@pytest.mark.parametrize("at", [0, 2])
def test_a_form_that_fails_ends_its_own_request_only(drafter, at):
    """Whatever it does: raises, has no token to offer, or gives something else than a mask."""
    def failing(how):
        def allowed(said):
            if len(said) < at:
                return torch.ones(V, dtype=torch.bool)
            if how == "raises":
                raise KeyError("lost")
            return {"nothing": torch.zeros(V, dtype=torch.bool), "short": torch.ones(V - 1, dtype=torch.bool),
                    "numbers": torch.ones(V), "none": None}[how]

        return lambda: allowed

    hows = {"raises": "KeyError: 'lost'", "nothing": "no token is allowed",
            "short": "a mask is bool (64,), not torch.bool (63,)",
            "numbers": "a mask is bool (64,), not torch.float32", "none": "AttributeError"}
    broken = [Request([3, 4, i], id=how, max_tokens=9, ignore_eos=True, seed=i, constraint=failing(how), n=1 + i % 2,
                      sampling={"temperature": 0}) for i, how in enumerate(hows)]
    fine = [Request([3, 4, i], id=i, max_tokens=9, seed=i, sampling={"temperature": 0}) for i in range(3)]
    fine.append(Request([3, 4], id="c", max_tokens=9, seed=1, sampling={"temperature": 0},
                        constraint=Automaton(1).start))
    options = {} if drafter == "none" else {"drafter": drafter_for(drafter), "verify": speculative.verify, "drafts": 3}
    if drafter == "oracle":
        rng = random.Random(0)
        options["drafter"] = SimpleNamespace(forget=lambda s: None, propose=lambda contexts, k, choose: (
            [[rng.randrange(V) for _ in range(n)] for n in k], None))
    b = batcher_for(**options)
    drain(b, *broken, *fine)
    agree(fine)
    for r, message in zip(broken, hows.values()):
        for s in r.samples:
            assert s.finish_reason == "error" and s.error.startswith("the constraint cannot go on: ") and (
                message in s.error), s.error
            assert len(s.ids) == at
    assert b.stats.failed == 0, "no step was lost"


def test_a_bias_that_forbids_all_that_is_allowed():
    r = Request([1], seed=0, max_tokens=5, constraint=line(7, 8), sampling={"logit_bias": {8: float("-inf")}})
    drain(batcher_for(), r)
    s, = r.samples
    assert (s.ids, s.finish_reason) == ([7], "error") and s.error.startswith("logit_bias forbids all that")


def test_an_interrupt_in_a_form_costs_nothing():
    form, once = line(*range(10, 20))(), []

    def allowed(ids):
        if len(ids) == 3 and not once:
            once.append(1)
            raise KeyboardInterrupt
        return form(ids)

    r = Request([1, 2], seed=0, max_tokens=12, constraint=lambda: allowed)
    b = batcher_for()
    b.add(r)
    with pytest.raises(KeyboardInterrupt):
        while b.live:
            b.step()
    while b.live:
        b.step()
        sound(b)
    over(b)
    s, = r.samples
    assert once and s.ids[:-1] == list(range(10, 20)) and s.finish_reason == "stop"


def test_what_is_no_constraint_is_refused():
    b = batcher_for()
    with pytest.raises(ValueError, match="constraint is 3, but must be a function"):
        b.add(Request([1], constraint=3))

    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        b.add(Request([1], constraint=broken))
    over(b)


# ------------------------------------------------------------------ llguidance


class Bytes:
    """A tokenizer of all bytes and a few longer tokens; 256 is the end, 257 another control token, 258 has no bytes."""

    words = (b"<end>", b"<im>", b"", b"ab", b"abc", b" the", b'{"', b'": ', b'"}', b"\xc3\xa9x", b"12", b"\n\n",
             b"a\xc3")
    vocab_size, special_ids, eos_ids = 256 + len(words), {256, 257}, [256]

    def token_bytes(self, id: int, first: bool = False) -> bytes:
        return bytes([id]) if id < 256 else self.words[id - 256] if id < self.vocab_size else b""


@pytest.fixture(scope="module")
def small():
    pytest.importorskip("llguidance")
    return Vocabulary(Bytes(), vocab_size=Bytes.vocab_size + 5, eos_ids=[256, 260])


def spelled(ids) -> bytes:
    return b"".join(map(Bytes().token_bytes, ids))


def test_without_llguidance_the_error_says_how_to_get_it(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(grammar, "import_module", missing)
    with pytest.raises(ValueError, match="pip install llguidance"):
        Vocabulary(Bytes())
    grammar.demo()
    assert importlib.import_module("grammar") is grammar


REGEXES = ["ab+c?", "(abc|ab|a)*", "a{2,3}(12|2)*", "é+x?", "[^a]", ".{2}", "", r"a/b|\n\n", r"\d{2}(\.\d+)?", "^abc$",
           "[ab]*12[ab]*", "😀|é", r"\\|/"]


RARE = ("[^a]", ".{2}", r"\d{2}(\.\d+)?")  # they take characters that the tails below do not make


def follows(pattern: str, data: bytes) -> tuple[bool, bool]:
    """Whether data begins a text that the pattern matches as a whole, and whether it is one: by another library."""
    for tail in (b"", *(bytes(t) for n in (1, 2, 3) for t in itertools.product((0x80, 0xA9, 0x98, 0x9F), repeat=n))):
        try:
            text = (data + tail).decode()
        except UnicodeDecodeError:
            continue
        if regex.fullmatch(pattern, text, partial=True):
            return True, not tail and regex.fullmatch(pattern, text) is not None
    return False, False


@pytest.mark.parametrize("pattern", REGEXES)
def test_masks_of_a_regex_are_exact(small, pattern):
    """Each mask along random walks: an id is allowed if and only if its bytes go on with the text; `regex` says so."""
    rng, seen = random.Random(0), 0
    for _ in range(4):
        allowed, ids = small.regex(pattern).start(), []
        for _ in range(6):
            mask, data = allowed(ids), spelled(ids)
            assert mask.shape == (small.size,) and mask.dtype == torch.bool
            may = mask.nonzero().squeeze(1).tolist()
            assert (256 in may) == (260 in may) == follows(pattern, data)[1], "it may end where it is whole"
            wrong = [i for i in range(small.size) if i not in (256, 260) and mask[i] != (
                i not in (257, 258) and i < Bytes.vocab_size and follows(pattern, data + Bytes().token_bytes(i))[0])
                and (i < 128 or i >= 256 or pattern not in RARE)]
            assert not wrong, (data, [(i, Bytes().token_bytes(i)) for i in wrong])
            seen += 1
            may = [i for i in may if i not in (256, 260)]
            if not may:
                break
            ids = [*ids, rng.choice(may)]
    assert seen >= 4


def test_half_characters(small):
    allowed = small.regex("é+").start()
    assert allowed([]).nonzero().squeeze(1).tolist() == [0xC3]
    assert allowed([0xC3]).nonzero().squeeze(1).tolist() == [0xA9]  # no end in the middle of a character
    assert allowed([0xC3, 0xA9]).nonzero().squeeze(1).tolist() == [0xC3, 256, 260]
    both = small.regex("aéx|ab").start()
    assert both([]).nonzero().squeeze(1).tolist() == [97, 259, 268]  # a, ab, and a with half of é
    assert both([268]).nonzero().squeeze(1).tolist() == [0xA9]


def test_a_matcher_is_a_function_of_ids_that_goes_over_no_token_twice(small):
    form, rng, know = small.regex("(ab|abc|12)*(x|y{3})"), random.Random(1), {}
    allowed = form.start()
    ids = []
    for _ in range(300):  # at random: forward, back over drafts, elsewhere
        mask = allowed(ids)
        assert torch.equal(mask, know.setdefault(tuple(ids), form.start()(ids)))
        may = [i for i in mask.nonzero().squeeze(1).tolist() if i not in (256, 260)]
        back = rng.choice([0, 0, 0, 0, 1, 3])
        ids = ids[: len(ids) - back] if back or not may else [*ids, rng.choice(may)]
    assert allowed.consumed - allowed.undone == len(allowed._ids)

    allowed, text = form.start(), list(b"ababab12")
    for n in range(len(text) + 1):
        allowed(text[:n])
    assert (allowed.consumed, allowed.undone) == (8, 0)
    for n in range(1, 4):  # three drafts behind it, of which one stays
        allowed(text + list(b"abc")[:n])
    allowed([*text, 97])
    assert (allowed.consumed, allowed.undone) == (11, 2)
    with pytest.raises(RuntimeError, match="token id 120 is not allowed behind 9 tokens"):
        allowed([*text, 97, 120])
    assert allowed(text).any() and allowed.consumed == 11 + 8, "after an error it starts anew"


def test_an_interrupted_matcher_starts_anew(small, monkeypatch):
    allowed = small.regex("a{5}").start()
    allowed([97])

    def interrupt(matcher):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(grammar, "_complain", interrupt)
        with pytest.raises(KeyboardInterrupt):
            allowed([97, 97])
    assert allowed([97, 97]).nonzero().squeeze(1).tolist() == [97]


def walk(allowed, tokens, rng, most: int, short: bool = True) -> list[int]:
    """Ids at random among the allowed ones, to an end; behind `most` of them the rest as soon as it can."""
    ids = []
    while len(ids) < 40 * most:
        may = allowed(ids).nonzero().squeeze(1).tolist()
        if tokens.eos_ids[0] in may and (rng.random() < 0.3 or len(ids) > most):
            return ids
        may = [i for i in may if i not in (256, 260)]
        if not may:
            return ids
        closing = [i for i in may if tokens.token_bytes(i) in (b'"', b"}", b"]", b'"}', b",", b":")]
        ids.append(rng.choice(closing if closing and rng.random() < 0.5 + (len(ids) > most) else may))
    return ids


SCHEMAS = [
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer",
     "minimum": 0, "maximum": 150}}, "required": ["name", "age"], "additionalProperties": False},
    {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 4},
    {"enum": ["red", "grün", 3, None, {"a": [True]}]},
    {"anyOf": [{"type": "string", "pattern": "^[a-z]{2,4}$"}, {"type": "boolean"}]},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "required": ["v"], "additionalProperties": False,
     "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "maxItems": 2,
                                                       "items": {"$ref": "#/$defs/tree"}}}}}},
    {"type": "string", "format": "date"},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_whatever_a_schema_allows_is_valid(small, schema):
    jsonschema, rng, ended = pytest.importorskip("jsonschema"), random.Random(0), 0
    for text in (schema, json.dumps(schema)):
        form = small.json_schema(text)
        for _ in range(10):
            ids = walk(form.start(), Bytes(), rng, 30)
            if len(ids) < 40 * 30:
                jsonschema.validate(json.loads(spelled(ids)), schema)
                ended += 1
    assert ended >= 10


def test_white_space_is_bounded_and_a_schema_may_say_otherwise(small):
    def longest(schema):
        allowed, n = small.json_schema(schema).start(), 0
        while n < 100 and allowed([ord("["), *[32] * n])[32]:
            n += 1
        return n

    plain = {"type": "array", "items": {"type": "integer"}}
    assert longest(plain) == grammar.MOST_SPACE
    assert longest({**plain, "x-guidance": {"whitespace_pattern": " ?"}}) == 1
    assert longest({**plain, "x-guidance": {"whitespace_flexible": False}}) == 0


@pytest.mark.parametrize("what, value, message", [
    ("json_schema", "{", "json_schema is no JSON"), ("json_schema", "[1]", "must be an object"),
    ("json_schema", {"type": "strin"}, "json_schema cannot be followed: Invalid type: strin"),
    ("json_schema", {"not": {}}, "Unimplemented keys"), ("json_schema", False, "Unsatisfiable schema"),
    ("json_schema", {"type": "string", "minLength": 3, "maxLength": 2}, "Unsatisfiable"),
    ("json_schema", {"$ref": "#"}, "json_schema cannot be followed: no token can follow"),
    ("json_schema", {"$ref": "http://127.0.0.1:9/a.json"}, "retriever"),
    ("json_schema", {"$ref": "file:///etc/passwd"}, "retriever"), ("json_schema", {1, 2}, "json_schema is no JSON"),
    ("json_schema", '{"a":' * 5_000 + "1" + "}" * 5_000, "is no JSON|cannot be followed"),
    ("json_schema", {"enum": ["x" * 70_000]}, "json_schema: 70,014 characters, but there may be 65,536"),
    ("json_schema", {"allOf": [{"pattern": "x*" * 1_000}, {"patternProperties": {"y*" * 1_100: {}}}]}, "regexes of js"),
    ("json_schema", {"x-guidance": {"whitespace_pattern": "x*" * 2_049}}, "together: 4,098 characters, but there may"),
    ("json_schema", {"const": "\ud800"}, "cannot be followed"), ("json_schema", {"x-guidance": 3}, "cannot be follow"),
    ("regex", "(", "regex cannot be followed: .*unclosed group"), ("regex", 3, "regex is 3, but must be a text"),
    ("regex", "a\\", "half an escape"), ("regex", "(?=a)b", "look-around"), ("regex", r"(a)\1", "backreferences"),
    ("regex", "a" * 5_000, "may be 4,096"), ("regex", "\ud800", "surrogate"), ("regex", r"[^\s\S]", "no token can"),
    ("regex", "(" * 2_000 + ")" * 2_000, "nest"),
])
def test_what_cannot_be_followed_is_one_clear_sentence(small, what, value, message):
    with pytest.raises(ValueError, match=message) as error:
        getattr(small, what)(value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_a_grammar_cannot_be_broken_out_of(small):
    """The pattern goes into a line of another language; it stays a pattern."""
    for pattern in ("a/\nb: /c", "a/ | /b", "a\\/b", "/", "a\nstart: /b/", "%llguidance", "\\\\/ b", "a//b\t#c"):
        allowed, ids = small.regex(pattern).start(), []
        while not allowed(ids)[256]:
            ids.append(next(i for i in range(256) if allowed(ids)[i]))
        assert regex.fullmatch(pattern, spelled(ids).decode())


@pytest.mark.parametrize("what, value", [
    ("regex", "a{1000000}"), ("regex", "((a{1000}){1000}){1000}"), ("regex", "(.*a){200}b"), ("regex", "(x+x+)+y"),
    ("regex", "(a|b)*a(a|b){40}"), ("regex", r"(\p{L}|\d){1,500}(a|b){100}"), ("regex", "(a|aa)+" * 200),
    ("regex", "x*" * 2_048), ("regex", "[a-z]{0,200}" * 300), ("regex", "(?i)" + "[^a]?b" * 680),
    ("json_schema", {"type": "array", "minItems": 100_000, "items": {}}),
    ("json_schema", {"properties": {f"p{i}": {"type": "string", "maxLength": i} for i in range(900)}}),
    ("json_schema", {"allOf": [{"anyOf": [{"properties": {f"a{i}_{j}": {"type": "integer"}}} for j in range(6)]}
                               for i in range(12)]}),
])
def test_a_hostile_grammar_is_bounded_in_time_and_memory(small, what, value):
    """It is refused, or followed in bounded steps, or ends with an error; the bounds are generous."""
    before, begin, rng = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time(), random.Random(0)
    try:
        allowed, ids, worst = getattr(small, what)(value).start(), [], 0.0
        for _ in range(300):
            start = time.process_time()
            may = [i for i in allowed(ids).nonzero().squeeze(1).tolist() if i not in (256, 260)]
            worst = max(worst, time.process_time() - start)
            if not may:
                break
            ids.append(rng.choice(may))
        assert worst < 1.5
    except (ValueError, RuntimeError) as error:
        assert "\n" not in str(error)
    assert time.process_time() - begin < 15
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kB


def test_what_a_vocabulary_refuses():
    pytest.importorskip("llguidance")
    with pytest.raises(ValueError, match="names no end-of-text token"):
        Vocabulary(Bytes(), eos_ids=[])
    with pytest.raises(ValueError, match="names no end-of-text token"):
        Vocabulary(Bytes(), eos_ids=[5_000])
    assert issubclass(Matcher, object) and Grammar.start.__doc__


# ------------------------------------------------------------------ in llm.py: a tiny model, and the default one


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    pytest.importorskip("llguidance")
    return generate.load(tiny_folder(tmp_path_factory.mktemp("tiny") / "model"), dtype="float64", device="cpu")


def test_a_random_model_says_what_it_is_told_to(tiny):
    answers = tiny.generate(["a", "b", "c"], raw=True, regex="(yes|no|nön), [0-9]{3}", temperature=1.5, seed=3, n=3)
    texts = [s.text for a in answers for s in a.samples]
    assert all(regex.fullmatch("(yes|no|nön), [0-9]{3}", text) for text in texts) and len(set(texts)) > 3
    assert all(s.finish_reason == "stop" and s.ids[-1] == 258 for a in answers for s in a.samples)
    free, = tiny.generate("a", raw=True, max_tokens=20, temperature=0)
    mixed = [tiny.answer(tiny.encode("a", raw=True), max_tokens=20, temperature=0, **options)
             for options in ({}, {"json_schema": {"enum": ["abc", 12]}}, {"regex": "x{30}"}, {})]
    for a in mixed:
        a.begin()
    while tiny.batcher.live:
        tiny.batcher.step()
    assert [mixed[0].ids, mixed[3].ids] == [free.ids] * 2
    assert json.loads(mixed[1].text) in ("abc", 12)
    assert (mixed[2].text, mixed[2].finish_reason) == ("x" * 20, "length")


def test_options_that_cannot_be_are_found_at_the_door(tiny):
    for options, message in (({"regex": "("}, "regex cannot be followed"), ({"json_schema": {"type": 3}}, "cannot be"),
                             ({"regex": "a", "json_schema": {}}, "both given")):
        with pytest.raises(ValueError, match=message):
            tiny.answer([1], **options)


@pytest.fixture(scope="module")
def smollm(default_gguf):
    pytest.importorskip("llguidance")
    return generate.load(default_gguf, device="cpu")


PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer",
          "minimum": 0, "maximum": 120}, "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "milk"]},
          "maxItems": 3}}, "required": ["name", "age", "likes"], "additionalProperties": False}


def test_the_default_model_answers_in_json(smollm):
    """Greedy and drawn, beside a free request, then with drafts."""
    jsonschema = pytest.importorskip("jsonschema")
    prompts = [f"Describe {who} as JSON with the keys name, age and likes." for who in
               ("a girl from Zürich", "my cat 😀")]
    kinds = [{"json_schema": PERSON, "temperature": 0}, {"json_schema": PERSON, "temperature": 1.0, "seed": 4},
             {"regex": r"It is (red|blue)\. [A-Z][a-zäöü]{2,8}!", "temperature": 0.8, "seed": 1}]
    answers = [smollm.answer(smollm.encode(p), max_tokens=120, **kind) for p in prompts for kind in kinds]
    answers.append(smollm.answer(smollm.encode("Say hello."), temperature=0, max_tokens=12))
    for a in answers:
        a.begin()
    while smollm.batcher.live:
        smollm.batcher.step()
    assert "hello" in answers.pop().text.lower()
    for i, a in enumerate(answers):
        assert (a.finish_reason, a.error) == ("stop", None), a
        if i % 3 == 2:
            assert regex.fullmatch(kinds[2]["regex"], a.text)
        else:
            jsonschema.validate(json.loads(a.text), PERSON)
        assert not set(a.ids[:-1]) & smollm.tokenizer.special_ids
    smollm.drafter = speculative.NgramDrafter(3, 1, ends=smollm.eos_ids)
    plain, smollm.batcher = smollm.batcher, smollm.new_batcher()
    try:
        for a in smollm.generate(f"{prompts[0]} {answers[0].text}", max_tokens=120, **kinds[0]):
            jsonschema.validate(json.loads(a.text), PERSON)
        assert smollm.batcher.stats.drafted and smollm.batcher.drafter
    finally:
        smollm.drafter, smollm.batcher = None, plain
    assert smollm.cache.n_free == smollm.cache.n_blocks


def test_masks_take_little_beside_a_step(smollm):
    """One mask in half a millisecond or so; 50 times that would be worth knowing."""
    form = smollm._vocabulary.json_schema(PERSON)
    text = smollm.tokenizer.encode('{"name": "Ann", "age": 7, "likes": ["tea"]}')
    allowed, begin = form.start(), time.process_time()
    for n in range(len(text)):
        assert allowed(text[:n])[text[n]]
    assert (time.process_time() - begin) / len(text) < 0.025
