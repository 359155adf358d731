"""beams.py - beam search: the likeliest text instead of the likeliest token, over forks of one KV cache.

Greedy decoding takes the best token and never looks back. Beam search keeps the `beams` likeliest beginnings, extends
all of them in one pass of the model, and keeps the best of what came out:

    prompt                 pass 1           pass 2 extends both               and keeps the best two of all
    the -+- cat   -0.51    the cat -+- sat  -0.51 - 0.22 = -0.73  <- 1st      the cat sat
         |                          +- ran  -0.51 - 1.90 = -2.41
         +- dog   -1.14    the dog -+- ran  -1.14 - 0.10 = -1.24  <- 2nd      the dog ran

The one idea: beams are forks. A beam is a sequence in a paged cache; a parent that has several children is forked,
which copies nothing but a list of block numbers, a beam that nobody continues is freed, and copy-on-write parts two
children in the block where they part. So no keys and values are ever reordered, the prompt is computed and stored
once however many beams there are, and beams that have a common beginning go on sharing its blocks.

**The score** of a text is total / length ** length_penalty, where total is the sum of the log-probabilities of its
tokens. Length counts the generated tokens, the end id included, and never the prompt: a sum of two terms and one of
ten, divided by 102 and 110, are hardly normalised at all, and the shorter text would nearly always win. Above 0 the
penalty favours long texts (1 is the mean log-probability of a token, 0 the plain sum), below 0 short ones.

**One step**, with L live beams of g tokens each. Ranked are all L * V continuations, by total (of equal length, so
that is by score); ties go to the lowest beam (they stand in the order of their totals), then to the lowest token id.
- A continuation that ends (an end id, or no room for more) is finished if it is among the first `beams` of them, and
  else dropped. An unlikely end is no answer only because its beam is alive: with one beam it would part the search
  from greedy decoding, with several it would fill the list with ends that nobody would choose.
- The first `beams` that do not end live on. So many must be looked at that they are found behind all the ends that
  may stand before them: `beams` and one for every beam and end id. Of only `beams`, all can be ends, and the search
  would stop in front of a better text.

**When it stops.** With nothing alive; else as `early_stopping` says:
- False: when no live beam can still reach one of the n_best answers. A beam with this total can only lose by further
  tokens, whose log-probabilities are at most 0, so what is attainable is its total at the best of the lengths that it
  can still end at: with a penalty above 0 the longest (as far as max_tokens and the context let it), below 0 the
  next one (or min_tokens, if that is more), with 0 any. This bound is safe: what is returned is what a search
  without stopping would return. (transformers calls this "never".)
- True: as soon as `beams` texts are finished, whatever may still come.
- "heuristic": the total at the *present* length is compared with the worst of `beams` finished ones, as transformers
  does by default. With a penalty above 0 that can end in front of a better text, which becomes better by being longer.
One beam is greedy decoding: it ends with its first end, whatever early_stopping says. (It would otherwise go on behind
an end that it prefers, on its second choice.)

**What is searched** is the distribution that `warp_one` makes of the logits, penalties, temperature and filters
included, as on every other path; without one, the model's own. Sums are float64. At temperature 0 there is one
continuation only, and nothing to search. A token of zero probability is never taken.

**Blocks.** A search of b beams over P prompt tokens and T new ones holds at most P // s + b * (ceil((P + T - 1) / s) -
P // s) blocks of s tokens: the full blocks of the prompt once, the rest for each (`most_blocks`). If that many are not
free the search is refused before anything is computed: whether it runs must not depend on what the text becomes.

Papers: Lowerre 1976 (the Harpy system); normalisation by length, Wu et al. 2016 (arXiv 1609.08144, with another
formula); why likelier is not always better, Stahlberg and Byrne 2019 (1908.10090).
Left out on purpose: stop strings (several ids in a row; give end ids), diverse and sampled beams, a batch of searches.
Shape letters: L live beams, V vocabulary, N tokens and R rows of a pass.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

# ------------------------------------------------------------------ the rules


class Hypothesis(NamedTuple):
    """A finished text."""

    ids: list[int]  # generated, the end id included
    score: float  # total / len(ids) ** length_penalty
    total: float  # sum of the log-probabilities of ids in the distribution that was searched
    finish_reason: str  # "stop": its last id is an end; "length": max_tokens or the context
    logprobs: list[float]  # the model's own of each id, before bans, penalties and temperature


class _Beam(NamedTuple):
    seq: Hashable  # its name in the cache, which holds the prompt and all of ids but the last
    ids: list[int]
    total: float
    logprobs: list[float]


def beam_score(total: float, length: int, length_penalty: float) -> float:
    """Total log-probability of a text by its length in generated tokens; an empty text has 0.

    >>> beam_score(-1.0, 2, 1.0), beam_score(-4.0, 10, 1.0)  # the longer one wins, behind whatever prompt
    (-0.5, -0.4)
    """
    return total / length**length_penalty if length else 0.0


def attainable(total: float, length: int, limit: int, length_penalty: float, min_tokens: int = 0) -> float:
    """The highest score that a live beam of `length` < limit tokens may still finish with.

    >>> [attainable(-6.0, 2, 12, penalty) for penalty in (1.0, 0.0, -1.0)]  # at length 12, at any, at 3
    [-0.5, -6.0, -18.0]
    """
    return beam_score(total, limit if length_penalty > 0 else min(limit, max(length + 1, min_tokens)), length_penalty)


def most_blocks(prompt: int, new: int, beams: int, block_size: int) -> int:
    """Blocks that a search holds at most, of `new` >= 1 tokens behind a prompt; the last token is never stored.

    Not fewer will do in general: beams that part at their first token, and all live on, hold so many.

    >>> most_blocks(prompt=10, new=9, beams=4, block_size=4)  # without sharing it would be 4 * 5
    14
    """
    shared = prompt // block_size if new > 1 else -(-prompt // block_size)
    return shared + beams * (-(-(prompt + new - 1) // block_size) - shared)


def _best(logp: Tensor, before: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k best of all before[l] + logp[l, v], in order -> l, v, and the sums in float64; fewer if fewer are finite.

    Equals come in the order of (l, v), which topk does not promise: it only says where each row can be cut.

    >>> _best(torch.tensor([[-3.0, -1.0, -2.0], [-1.0, -2.0, -1.0]]), torch.tensor([0.0, -1.0]), 4)[:2]
    (tensor([0, 0, 1, 1]), tensor([1, 2, 0, 2]))
    """
    least = logp.topk(min(k, logp.shape[1]), dim=1).values[:, -1:]                        # (L, 1)
    l, v = ((logp >= least) & (logp > -math.inf)).nonzero(as_tuple=True)                  # row by row, ids ascending
    total = before[l].double() + logp[l, v]
    order = total.sort(descending=True, stable=True).indices[:k]                          # (k,)
    return l[order], v[order], total[order]


# ------------------------------------------------------------------ the search


@torch.inference_mode()
def beam_search(model: Callable, cache, prompt_ids: Sequence[int], *, beams: int, max_tokens: int | None = None,
                eos_ids: int | Iterable[int] | None = (), warp_one: Callable | None = None, length_penalty: float = 1.0,
                early_stopping: bool | str = False, n_best: int = 1, min_tokens: int = 0, chunk: int = 512,
                salt: str = "") -> list[Hypothesis]:
    """The n_best texts that were found, the best score first (of equals, the first found); fewer if fewer were found.

    model       model(tokens (N,), positions (N,), attend, rows (R,)) -> logits (R, V)
    cache       a paged KV cache: add, extend, commit, fork, free, n_free, block_size, max_seq_len (of kvcache.py, say)
    max_tokens  most generated tokens, the end id included; None: what the context and the free blocks hold
    eos_ids     ids that end a text, stop ids included
    warp_one    warp_one(logits (R, V), outputs: R lists of ids) -> probabilities (R, V); None: softmax
    n_best      may be more than beams: then some of it is what happened to be found on the way
    min_tokens  so many tokens before an end id may come: until then its logit is -inf, before anything else is done
    chunk       most tokens of the prompt in one pass;  salt  only searches of equal salt share cached prefixes

    Prompt and output are at most max_seq_len + 1 tokens. Whatever happens, no sequence of the search stays in the
    cache. ValueError for senseless arguments, an empty or too long prompt and too few free blocks, before anything is
    computed; and for a row of logits with NaN, +inf or nothing finite. The cache's own error if others take its blocks
    meanwhile.
    """
    prompt, context = list(prompt_ids), cache.max_seq_len
    ends = frozenset(() if eos_ids is None else [eos_ids] if isinstance(eos_ids, int) else eos_ids)
    _check_arguments(prompt, context, length_penalty, early_stopping, beams=(beams, 1, None), n_best=(n_best, 1, None),
                     chunk=(chunk, 1, None), max_tokens=(max_tokens, 0, None), min_tokens=(min_tokens, 0, max_tokens))
    if max_tokens == 0:
        return [Hypothesis([], 0.0, 0.0, "length", [])]
    root, finished = object(), []
    held = {root}  # all that is ours in the cache
    try:
        cached = cache.add(root, prompt, salt)
        limit = _limit(cache, len(prompt), cached, max_tokens, beams)
        for begin in range(cached, len(prompt) - chunk, chunk):
            step = cache.extend({root: prompt[begin: begin + chunk]}, rows=())
            model(step.tokens, step.positions, step.attend, step.rows)
            cache.commit(step)
            cached = begin + chunk
        live, plan = [_Beam(root, [], 0.0, [])], {root: prompt[cached:]}
        while True:
            logits, logp = _pass(model, cache, plan, live, warp_one, ends if len(live[0].ids) < min_tokens else ())
            grown = []
            for rank, beam in enumerate(_continuations(live, logits, logp, beams + len(live) * len(ends))):
                stop = beam.ids[-1] in ends
                if not stop and len(beam.ids) < limit:
                    grown.append(beam)
                elif rank < beams:
                    score = beam_score(beam.total, len(beam.ids), length_penalty)
                    finished.append(Hypothesis(beam.ids, score, beam.total, "stop" if stop else "length",
                                               beam.logprobs))
            grown = grown[:beams]
            finished = sorted(finished, key=lambda h: -h.score)[: max(beams, n_best)]  # stable: the earlier one first
            if not grown or _is_over(finished, grown[0], limit, beams, length_penalty, early_stopping, n_best,
                                     min_tokens):
                return finished[:n_best]
            live = _fork(cache, held, grown)
            plan = {beam.seq: beam.ids[-1:] for beam in live}
    finally:
        for seq in held:  # also with an open step, of which then nothing is published
            cache.free(seq)


def _pass(model: Callable, cache, plan: dict, live: list[_Beam], warp_one: Callable | None,
          banned: Iterable[int]) -> tuple[Tensor, Tensor]:
    """Extend every live beam by its ids in the plan -> logits and the log-probabilities to search, both (L, V), in
    float32 or better. A spoiled row raises ValueError before the step is committed."""
    step = cache.extend(plan)
    logits = model(step.tokens, step.positions, step.attend, step.rows)
    logits = logits if logits.dtype == torch.float64 else logits.float()                  # (L, V)
    allowed, banned = logits, [i for i in banned if 0 <= i < logits.shape[1]]
    if banned:
        allowed = logits.index_fill(1, torch.tensor(banned, device=logits.device), -math.inf)
    logp = allowed.log_softmax(-1) if warp_one is None else warp_one(allowed, [beam.ids for beam in live]).log()
    best = torch.stack((logits.amax(-1), logp.amax(-1)))                                  # (2, L) amax lets NaN through
    bad = (~best.isfinite()).any(0).nonzero().flatten().tolist()
    if bad:
        raise ValueError(f"output token {len(live[0].ids)} of beam {bad[0]}: the logits have NaN, infinity or nothing "
                         "finite; no text can be made of them")
    cache.commit(step)
    return logits, logp.clamp(max=0)  # a probability of 1 + a rounding error would make totals rise


def _continuations(live: list[_Beam], logits: Tensor, logp: Tensor, k: int) -> list[_Beam]:
    """The k best continuations of all beams, in order; each still has the name of its parent's sequence."""
    before = torch.tensor([beam.total for beam in live], dtype=torch.float64, device=logp.device)
    parents, tokens, totals = _best(logp, before, k)                                      # (k,) each
    own = logits[parents, tokens] - logits.logsumexp(-1)[parents]                         # (k,)
    return [_Beam(live[b].seq, [*live[b].ids, token], total, [*live[b].logprobs, lp])
            for b, token, total, lp in zip(*(x.tolist() for x in (parents, tokens, totals, own)))]


def _fork(cache, held: set, grown: list[_Beam]) -> list[_Beam]:
    """Give every child a sequence: the first child of a parent goes on in its own, the others in forks of it. Parents
    without children are freed."""
    live = {}
    for beam in grown:
        seq = beam.seq
        if seq in live:
            seq = object()
            held.add(seq)
            cache.fork(beam.seq, seq)  # before anyone is extended, so it holds what the parent held
        live[seq] = beam._replace(seq=seq)
    for seq in held - live.keys():
        cache.free(seq)
        held.discard(seq)
    return list(live.values())


def _is_over(finished: list[Hypothesis], best: _Beam, limit: int, beams: int, length_penalty: float,
             early_stopping: bool | str, n_best: int, min_tokens: int) -> bool:
    """Whether to stop, `best` being the live beam of the highest total. All are of one length, so what it cannot reach
    no other can."""
    if early_stopping is True or beams == 1:
        return len(finished) >= beams
    n, length = beams if early_stopping else n_best, len(best.ids)
    if len(finished) < n:
        return False
    hope = (beam_score(best.total, length, length_penalty) if early_stopping else
            attainable(best.total, length, limit, length_penalty, min_tokens))
    return hope <= finished[n - 1].score  # an equal would come behind it


# ------------------------------------------------------------------ at the door


def _check_arguments(prompt: list[int], context: int | None, length_penalty: float, early_stopping: bool | str,
                     **numbers: tuple) -> None:
    for name, (value, least, most) in numbers.items():
        if value is None and name == "max_tokens":
            continue
        try:
            right = not isinstance(value, bool) and least <= index(value) and (most is None or value <= most)
        except TypeError:
            right = False
        if not right:
            to = "or more" if most is None else f"to {most}"
            raise ValueError(f"{name} is {value!r:.80}, but must be a whole number, {least} {to}")
    if isinstance(length_penalty, (bool, str)) or not -10 <= length_penalty <= 10:
        raise ValueError(f"length_penalty is {length_penalty!r:.80}, but must be a number from -10 to 10 (0 is the "
                         "plain sum, above 0 favours long texts)")
    if not isinstance(early_stopping, bool) and early_stopping != "heuristic":
        raise ValueError(f"early_stopping is {early_stopping!r:.80}, but must be False (stop when nothing better is "
                         "attainable), True (when as many as beams are finished) or 'heuristic'")
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token")
    if context is not None and len(prompt) > context:
        raise ValueError(f"the prompt has {len(prompt)} tokens, but the context is {context}; shorten it")


def _limit(cache, prompt: int, cached: int, max_tokens: int | None, beams: int) -> int:
    """Most tokens of one text. ValueError if the blocks could run out; `cached` tokens of the prompt have theirs."""
    size, context = cache.block_size, cache.max_seq_len
    blocks = cache.n_free + cached // size
    limit = max_tokens
    if limit is None:
        each = prompt // size + max(0, blocks - prompt // size) // beams  # blocks of one beam
        limit = max(1, each * size + 1 - prompt)
    limit = limit if context is None else min(limit, context + 1 - prompt)
    most = most_blocks(prompt, limit, beams, size)
    if most > blocks:
        raise ValueError(f"a search of {beams} beams over a prompt of {prompt} tokens and {limit} new ones can take "
                         f"{most} blocks of {size} tokens, the prompt's shared, but the KV cache has {blocks} for it; "
                         "lower beams or max_tokens, or make the cache larger")
    return limit


# ------------------------------------------------------------------ demo


def demo():
    from types import SimpleNamespace

    words = ["the", "cat", "dog", "sat", "ran", "off", "."]
    follow = {"the": {"cat": 0.55, "dog": 0.45}, "cat": {"sat": 0.4, "ran": 0.35, ".": 0.25},
              "dog": {"ran": 0.9, "sat": 0.1}, "sat": {".": 0.6, "off": 0.4}, "ran": {"off": 0.8, ".": 0.2},
              "off": {".": 0.95, "the": 0.05}, ".": {".": 1.0}}
    table = torch.tensor([[follow[a].get(b, 0.0) for b in words] for a in words]).log()

    class Tables:
        """Of a paged cache only the block tables, with copy-on-write. It tells what happens to it."""

        block_size, max_seq_len, n_free = 2, None, 99

        def __init__(self, say=print):
            self.say, self.ids, self.blocks, self.names, self.fresh = say, {}, {}, {}, 0

        def add(self, seq, ids, salt):
            self.ids[seq], self.blocks[seq], self.names[seq] = [], [], "A"
            return 0

        def fork(self, parent, child):
            self.ids[child], self.blocks[child] = list(self.ids[parent]), list(self.blocks[parent])
            self.names[child] = chr(ord("A") + len(self.names))
            self.say(f"     {self.names[child]} is forked from {self.names[parent]}")

        def free(self, seq):
            if self.ids.pop(seq, None):
                del self.blocks[seq]
                self.say(f"     {self.names[seq]} is freed")

        def extend(self, plan, rows=None):
            for seq, (i,) in plan.items():
                mine, others = self.blocks[seq], [b for s, more in self.blocks.items() if s != seq for b in more]
                if len(self.ids[seq]) % self.block_size == 0:
                    mine.append(self.fresh)
                elif mine[-1] in others:
                    mine[-1] = self.fresh  # not full, and shared: a copy takes its place
                self.fresh = max(self.fresh, mine[-1] + 1)
                self.ids[seq].append(i)
            for seq in plan:
                ids = self.ids[seq]
                total = sum(table[a, b].item() for a, b in pairwise(ids))
                self.say(f"  {self.names[seq]}  {total:6.2f}  {' '.join(words[i] for i in ids):20} "
                         f"blocks {self.blocks[seq]}")
            last = torch.tensor([self.ids[seq][-1] for seq in plan])
            return SimpleNamespace(tokens=last, positions=None, attend=None, rows=None)

        def commit(self, step):
            held = [b for blocks in self.blocks.values() for b in blocks]
            self.say(f"     {len(held)} entries in {len(self.blocks)} block tables, {len(set(held))} blocks")

    def search(say, beams, penalty):
        return beam_search(lambda tokens, *_: table[tokens], Tables(say), [0], beams=beams, max_tokens=6, eos_ids=6,
                           n_best=beams, length_penalty=penalty)

    print("Three beams behind a prompt of one word; sum of log-probabilities, text, blocks of 2 tokens:")
    found = search(print, 3, 1.0)
    print("\nFinished; the score is sum / length, where the prompt does not count:")
    for h in found:
        print(f"  {h.score:6.3f} = {h.total:6.3f} / {len(h.ids)}  {' '.join(words[i] for i in h.ids)}")
    print("\nThe best of three beams by length penalty, and what greedy decoding says:")
    for penalty in (-2.0, 0.0, 1.0, 4.0):
        print(f"  {penalty:4}    {' '.join(words[i] for i in search(lambda text: None, 3, penalty)[0].ids)}")
    print(f"  greedy  {' '.join(words[i] for i in search(lambda text: None, 1, 1.0)[0].ids)}")
    print(f"\n4 beams, 1,000 tokens of prompt, 200 new ones: at most {most_blocks(1000, 200, 4, 16)} blocks of 16 "
          f"tokens; {4 * most_blocks(1000, 200, 1, 16)} if nothing were shared.")


if __name__ == "__main__":
    demo()
