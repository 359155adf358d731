"""speculative.py - lossless speculative decoding: drafters, and the theorem that makes them harmless.

A decode step reads every weight to produce one token, and reading is what takes the time: a pass over k + 1 rows costs
little more than over one. So something cheap guesses the next k tokens, the drafts; one pass of the model scores them
all; and a rule keeps as many of them as it can *without changing the distribution of the text*:

    context  the sky is             drafts (q)   blue   because   the
    one pass of the target, rows    p_0          p_1    p_2       p_3
    the rule                        blue: yes    because: yes     the: no
    what is kept                    blue   because   of       <- "of" is drawn from what p_2 has left over

Every pass yields at least one token, and k + 1 if all drafts are accepted. p is the target's distribution, q the
draft's (the two founding papers give these letters opposite roles).

The one idea: p and q come out of the same function, `warp` of the sampler, each with a history that includes the drafts
before its row. So greedy, temperature, top-k, top-p, min-p and penalties are all covered by one proof, in `verify`.

- `verify`        the accept-or-reject rule, a pure function on a batch
- `NgramDrafter`  guesses that the text goes on as it did after the same few tokens before; needs no model
- `DraftModel`    a smaller model of the same vocabulary with a KV cache of its own
- `AdaptiveK`     how many drafts are worth asking for
- `speculate`     the whole loop for one sequence, to be read

A drafter is whatever has these two:

    propose(contexts, k, choose) -> (drafts: list[list[int]], q: Tensor (B, K, V) or None)
        contexts  dict seq -> list[int]: prompt and output of B sequences; a list only grows at its end until `forget`
        k         list[int]: the most drafts wanted for each sequence; 0 is legal. K is the longest that came out
        choose    choose(rows, logits (R, V), drafts) -> (ids (R,) int64, q (R, V)): draws the next draft of sequences
                  `rows` (indices into contexts, whose drafts so far are given) by the request's own warp and uniform
        q         None for one-hot drafts: the drafter is certain, and drew nothing
    forget(seq)   drop what is known of a sequence; unknown ids are fine

Drafting by the target's own first layers is not offered: of 30 layers of a small model the first 20 / 24 / 27 agreed
with all of them in 10 / 23 / 44 % of the tokens, at 67 / 80 / 90 % of the cost, a loss at every depth (`speedup`).

Papers: Leviathan, Kalman and Matias 2023 (arXiv 2211.17192); Chen et al. 2023 (2302.01318); prompt lookup, Saxena 2023.
Left out on purpose: trees of drafts, heads trained for drafting (Medusa, EAGLE), rules that accept more and lose the
distribution (typical acceptance).
Shape letters: B sequences, K longest drafts, V the target's vocabulary, R rows.
"""
from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

# Streams of uniforms: one number of TOKEN and ACCEPT belongs to every position of an output. The drafts of a pass that
# begins at position t are drawn from stream DRAFT + 3 * t, of its own, so that no draft's number is used twice.
TOKEN, ACCEPT, DRAFT = 0, 1, 2

# ------------------------------------------------------------------ the rule


def verify(draft: Tensor, q: Tensor | None, p: Tensor, u_accept: Tensor, u_token: Tensor,
           draw: Callable) -> tuple[Tensor, Tensor]:
    """Which drafts are kept, and the token behind them -> n_accepted (B,) int64, next (B,) int64.

    draft     (B, K) int64, padded with -1 at the end
    q         (B, K, V), what each draft was drawn from; None: every draft is certain (one-hot)
    p         (B, K + 1, V), the target's distributions behind 0, 1, .. drafts; rows behind the last draft are ignored
    u_accept  (B, K) and u_token (B, K + 1): independent uniforms in [0, 1), float64
    draw      draw(probs (R, V), u (R,)) -> ids (R,): inverse of the cumulative sum, -1 for a row of NaN

    `next` is -1 where the row that it is drawn from is NaN. A token of zero p is never kept nor drawn.

    **Drawn drafts.** Accept draft d if u_accept * q(d) < p(d), which has probability min(1, p(d) / q(d)); at the first
    rejection draw from what p has beyond q, max(0, p - q), normalised. Claim: the token at this row has distribution p.

        Token x arises in two ways. As the draft, accepted: q(x) min(1, p(x) / q(x)) = min(p(x), q(x)).
        Or by the replacement. A rejection happens with probability 1 - sum_y min(p(y), q(y)); as p sums to 1, that is
        sum_y (p(y) - min(p(y), q(y))) = sum_y max(0, p(y) - q(y)), exactly the sum that normalises the replacement.
        It cancels: x arises so with probability max(0, p(x) - q(x)). And min(p, q) + max(0, p - q) = p.

    **The whole text.** Row i is looked at only if the drafts before it were accepted, so its p is the target's
    distribution behind the very tokens that stand in the text, and by the claim token i follows it. The bonus token,
    behind k accepted drafts, is drawn from p itself. Behind the first rejection nothing is looked at, so the ACCEPT
    and TOKEN uniforms there are unspent, and the next pass may use them; draft uniforms must be fresh in each pass,
    since what is done next may depend on drafts that were withheld. Whether drafts are verified must not depend on
    their values: what there is room for is settled before they are drawn.

    **Certain drafts.** Draw x from p with u_token, as plain decoding would, and accept if it is the draft. Then x is
    the next token in both cases: it has distribution p by construction, and it is the very token that plain decoding
    draws from the same uniform, whatever was guessed and however far. (It is the same law: one-hot q accepts d with
    probability p(d), and max(0, p - q) is p without d.)

    >>> from types import SimpleNamespace
    >>> p, q = torch.tensor([[[0.5, 0.5], [0.25, 0.75]]]), torch.tensor([[[0.9, 0.1]]])
    >>> first = lambda probs, u: (probs.cumsum(1) <= u[:, None] * probs.sum(1, keepdim=True)).sum(1)
    >>> verify(torch.tensor([[0]]), q, p, torch.tensor([[0.55]]), torch.tensor([[0.1, 0.2]]), first)  # 0.495 < 0.5
    (tensor([1]), tensor([0]))
    >>> verify(torch.tensor([[0]]), q, p, torch.tensor([[0.56]]), torch.tensor([[0.1, 0.2]]), first)  # 0.504: no
    (tensor([0]), tensor([1]))
    """
    (B, K), device = draft.shape, p.device
    draft, u_accept, u_token = draft.to(device), u_accept.to(device), u_token.to(device)
    real, b = draft >= 0, torch.arange(B, device=device)                          # (B, K), (B,)
    n_draft = real.sum(1)                                                         # (B,)
    if q is None or K == 0:
        rows = torch.arange(K + 1, device=device) <= n_draft[:, None]             # (B, K + 1), those that count
        x = torch.full((B, K + 1), -1, device=device)
        x[rows] = draw(p[rows], u_token[rows])
        n = ((x[:, :K] == draft) & real).cumprod(1).sum(1)                        # (B,) up to the first difference
        return n, x[b, n]

    at = draft.clamp(min=0)[..., None]                                            # (B, K, 1)
    p_d, q_d = (x[:, :K].gather(2, at).squeeze(2).double() for x in (p, q))       # (B, K)
    # Strictly below: with p = 0 nothing passes, not even u = 0; and with p >= q everything does, as u < 1.
    n = ((u_accept * q_d < p_d) & real).cumprod(1).sum(1)                         # (B,)
    q_n = q[b, n.clamp(max=K - 1)]                                                # (B, V) a copy, so in place from here
    q_n.masked_fill_((n == n_draft)[:, None], 0)                                  # the bonus token has no rival: p - 0
    rest = (p[b, n] - q_n).clamp_(min=0)                                          # (B, V)
    # p and q equal up to rounding: a draft can be rejected with nothing left over. Then p is its own replacement.
    empty = rest.amax(1) == 0                                                     # (B,) NaN is not 0, and stays
    rest[empty] = p[b[empty], n[empty]].to(rest)
    return n, draw(rest, u_token[b, n])


# ------------------------------------------------------------------ drafts without a model


class NgramDrafter:
    """Prompt lookup: find the last n tokens earlier in prompt or output, and propose what came behind them there.

    Longest n first, from `longest` down to `shortest`. Of several places it takes the latest that has k tokens behind
    it, else the one with most behind it, the earliest; the end of the text itself is none. What is found is cut before
    the first id of `ends`: nothing is worth guessing behind an end of text, and the end itself needs no guess.

    Long matches first, as they find the right one of several places. Of the first drafts that a match of 1 / 2 / 3 / 4
    tokens (and no more) or of 5 and more gave, so many came true: Wikipedia text 22 / 47 / 38 / 39 / 54 %; of a chat
    model of 135M parameters summaries 28 / 45 / 46 / 78 / 81 %, texts to be repeated or corrected 35 / 69 / 80 / 82 /
    95 %.
    One or two tokens match in any text, and say little; in a copy the third is there a step later.

    Everything between two steps is a dictionary look-up: each token is indexed once, when it has a successor, under
    the n-grams that end at it. Memory grows with the length of the text, a step does not.
    """

    def __init__(self, longest: int = 5, shortest: int = 3, ends: Iterable[int] = ()):
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams of {shortest} to {longest} tokens: the shortest must be 1 or more, and at most "
                             "the longest")
        self.sizes, self.ends = range(longest, shortest - 1, -1), frozenset(ends or ())
        self._indexes: dict[Hashable, dict[int, _Index]] = {}

    def propose(self, contexts: Mapping[Hashable, list[int]], k: Sequence[int], choose: Callable | None = None):
        """See the head of this file; q is None, choose is not used.

        >>> NgramDrafter().propose({"a": [21, 22, 23, 24, 25, 21, 22, 23]}, [3])
        ([[24, 25, 21]], None)
        """
        return [self._look_up(seq, ids, n) if n > 0 else [] for (seq, ids), n in zip(contexts.items(), k)], None

    def _look_up(self, seq: Hashable, ids: list[int], k: int) -> list[int]:
        indexes = self._indexes.setdefault(seq, {n: _Index(n) for n in self.sizes})
        for index in indexes.values():
            index.grow(ids)
        for index in indexes.values():
            at = index.find(ids, k)
            if at is not None:
                found = ids[at: at + k]
                return found[: next((i for i, x in enumerate(found) if x in self.ends), k)]
        return []

    def forget(self, seq: Hashable) -> None:
        self._indexes.pop(seq, None)


class _Index:
    """Where in one text each n-gram occurs: a chain from the latest place back to the first."""

    def __init__(self, n: int):
        self.n = n
        self.latest: dict[tuple[int, ...], int] = {}  # n-gram -> the place behind its latest occurrence
        self.before: list[int] = [-1] * n  # place -> the place behind the same n-gram's occurrence before, or -1

    def grow(self, ids: list[int]) -> None:
        """Index what is new. A place is an index into ids: the n-gram at the very end has none yet, so no text finds
        itself."""
        for place in range(len(self.before), len(ids)):
            gram = tuple(ids[place - self.n: place])
            self.before.append(self.latest.get(gram, -1))
            self.latest[gram] = place

    def find(self, ids: list[int], k: int) -> int | None:
        place = self.latest.get(tuple(ids[-self.n:]))
        while place is not None and len(ids) - place < k and self.before[place] >= 0:
            place = self.before[place]  # no more than k times: each is at least one token further back
        return place


# ------------------------------------------------------------------ drafts by a smaller model


def check_vocabulary(target: Sequence | Mapping, draft: Sequence | Mapping) -> None:
    """ValueError unless both name the same tokens by the ids they share; each maps ids to text or bytes.

    One may have more ids than the other (many vocabularies are padded); None stands for no token.

    >>> check_vocabulary(["a", "b", "c"], [b"a", b"b"])
    >>> check_vocabulary(["a", "b", "c"], {0: "a", 2: "d"})
    Traceback (most recent call last):
    ValueError: token id 2 is b'c' for the target but b'd' for the draft model (1 of 2 shared ids differ); speculation \
needs a draft model with the target's vocabulary
    """
    both = []
    for tokens in (target, draft):
        pairs = tokens.items() if isinstance(tokens, Mapping) else enumerate(tokens)
        both.append({i: x.encode("utf-8", "surrogatepass") if isinstance(x, str) else bytes(x)
                     for i, x in pairs if x is not None})
    shared = sorted(both[0].keys() & both[1].keys())
    differ = [i for i in shared if both[0][i] != both[1][i]]
    if differ or not shared:
        i = differ[0] if differ else None
        what = "target and draft model share no token id" if i is None else (
            f"token id {i} is {both[0][i]!r} for the target but {both[1][i]!r} for the draft model "
            f"({len(differ)} of {len(shared)} shared ids differ)")
        raise ValueError(f"{what}; speculation needs a draft model with the target's vocabulary")


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two lists have in common at their beginning, by halving: comparing slices is what lists do fast.

    >>> common_prefix([1, 2, 3, 4], [1, 2, 9]), common_prefix([], [1])
    (2, 0)
    """
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class DraftModel:
    """Drafts drawn from a model with a KV cache of its own: one pass a position, for all sequences together.

    model       model(tokens (N,), positions (N,), attend, rows (R,)) -> logits (R, ids)
    cache       a paged KV cache for it: add, extend, commit, rollback, trim, free, recover, tokens, in, max_seq_len
    vocab_size  V of the target. The draft's logits are cut to V ids or filled up with -inf *before* `choose`, so that
                the q of the test is what the draft was drawn from
    draft_vocab_size  how many ids the draft model knows; None: V. A text that holds another one gets no drafts
    vocabularies      (target's, draft's) tokens by id, for `check_vocabulary`
    ends        ids behind which nothing is drafted
    chunk       tokens in a pass at most. A text that is longer gets so far in each call, and drafts when it is there
    salt        salt(seq) -> the salt of its blocks in the cache, where users must not find each other's

    What the cache holds is compared with the committed ids, token by token, and cut to what they have in common. After
    a rejection that drops the rejected drafts; after full acceptance it finds that the last draft, which was never
    fed to the draft model, is still to be computed. There is no count to get wrong.

    A text beyond the cache's max_seq_len gets no drafts. Where blocks run out, the newest sequence gives its own back
    (before it, those not asked for now) and gets no drafts until another sequence is forgotten. Logits that `choose`
    cannot draw from (NaN: id -1) end a sequence's drafts. None of it can change the output.
    """

    def __init__(self, model: Callable, cache, vocab_size: int, *, draft_vocab_size: int | None = None,
                 vocabularies: tuple | None = None, ends: Iterable[int] = (), chunk: int = 512,
                 salt: Callable[..., str] = lambda seq: ""):
        if chunk < 1:
            raise ValueError(f"chunk is {chunk}, but a pass must hold at least 1 token")
        if vocabularies is not None:
            check_vocabulary(*vocabularies)
        self.model, self.cache, self.vocab_size = model, cache, vocab_size
        self.known = vocab_size if draft_vocab_size is None else draft_vocab_size
        self.ends, self.chunk, self.salt = frozenset(ends or ()), chunk, salt
        self._held: dict[Hashable, None] = {}  # sequences in the cache, oldest first
        self._out: set[Hashable] = set()  # sequences that do not fit
        self._broken = False  # a call has begun and not ended

    @torch.inference_mode()
    def propose(self, contexts: Mapping[Hashable, list[int]], k: Sequence[int], choose: Callable):
        """See the head of this file."""
        with self._whole():
            return self._propose(contexts, k, choose)

    def _propose(self, contexts: Mapping[Hashable, list[int]], k: Sequence[int], choose: Callable):
        seqs, row = list(contexts), {seq: b for b, seq in enumerate(contexts)}
        want = {seq: n for seq, n in zip(seqs, map(self._room, contexts.values(), k)) if n > 0}
        plan, late = self._first_pass(self._missing({seq: contexts[seq] for seq in want}), want)
        drafts, passes = [[] for _ in seqs], []
        while plan:  # pass i: whatever a sequence has to compute before its i-th draft, then that draft
            step = self._extend(plan, want)
            if step is None:
                break
            speak = [seq for seq in step.seqs if seq not in late]
            logits = self.model(step.tokens, step.positions, step.attend, step.last(dict.fromkeys(speak, 1)))
            if not speak:
                self.cache.commit(step)
                break
            rows = [row[seq] for seq in speak]
            ids, q = choose(rows, self._fit(logits), [drafts[b] for b in rows])  # logits (R, ids)
            ids = ids.tolist()
            good = [i for i, x in enumerate(ids) if x >= 0]
            self.cache.commit(step, keep={seq: 0 for seq, x in zip(speak, ids) if x < 0})
            passes.append(([rows[i] for i in good], q[good]))
            plan = {}
            for i in good:
                seq = speak[i]
                drafts[rows[i]].append(ids[i])
                # subtle: a drafted end stays in. To withhold it would make the rest of the drafts a choice by value,
                # no longer drawn from q, and the output would hold too few ends.
                if len(drafts[rows[i]]) < want[seq] and ids[i] not in self.ends:
                    plan[seq] = [ids[i]]
        K = max(map(len, drafts), default=0)
        if K == 0:
            return drafts, None
        whole = passes[0][1].new_zeros(len(seqs), K, self.vocab_size)
        for i, (rows, q) in enumerate(passes[:K]):
            whole[rows, i] = q
        return drafts, whole

    def forget(self, seq: Hashable) -> None:
        with self._whole():
            self._free(seq)
            self._out.clear()  # there is room now

    @contextmanager
    def _whole(self):
        """After a call that did not come to its end (an interrupt, wherever it fell; an error) the cache is put in
        order before the next one."""
        if self._broken:
            self.cache.recover()
        self._broken = True
        yield
        self._broken = False

    def _free(self, seq: Hashable) -> None:
        self.cache.free(seq)
        self._held.pop(seq, None)

    def _room(self, ids: list[int], k: int) -> int:
        """How many drafts fit: the first needs the text in the cache, each further one the draft before it."""
        limit = self.cache.max_seq_len
        return (k if limit is None else min(k, limit - len(ids) + 1)) if ids else 0

    def _missing(self, contexts: Mapping[Hashable, list[int]]) -> dict[Hashable, list[int]]:
        """What the cache lacks of each text, at least its last token, as its logits are needed."""
        missing = {}
        for seq, ids in contexts.items():
            if seq in self._out:
                continue
            if seq in self.cache:
                same = min(common_prefix(self.cache.tokens(seq), ids), len(ids) - 1)
                self.cache.trim(seq, same)
            else:
                self._held[seq] = None
                same = self.cache.add(seq, ids, self.salt(seq))
            if max(ids[same:]) < self.known:
                missing[seq] = ids[same:]
            else:
                self._free(seq)
                self._out.add(seq)
        return missing

    def _first_pass(self, missing: dict[Hashable, list[int]], active: Mapping) -> tuple[dict, set]:
        """What of the missing ids one pass computes, `chunk` at most (one each is always allowed) -> plan, late: those
        with more to come. The shortest first, so that who is reading an answer waits for nobody's long text."""
        room, plan = max(self.chunk, len(missing)), missing
        if sum(map(len, missing.values())) > room:
            step = self._extend(missing, active)  # does all of it fit? What does not should cost no pass
            if step is not None:
                self.cache.rollback(step)
            plan = {}
            for left, seq in zip(range(len(missing), 0, -1), sorted(missing, key=lambda seq: len(missing[seq]))):
                plan[seq] = missing[seq][: room - left + 1]
                room -= len(plan[seq])
        return plan, {seq for seq in plan if len(plan[seq]) < len(missing[seq])}

    def _extend(self, plan: dict[Hashable, list[int]], active: Mapping):
        """cache.extend of as much of the plan as fits, or None; what does not fit is taken out of plan and cache."""
        while plan:
            try:
                return self.cache.extend(plan)
            except RuntimeError as error:
                if not hasattr(error, "needed"):  # not the cache's "out of blocks"
                    raise
            victim = ([seq for seq in self._held if seq not in active] or [s for s in self._held if s in plan])[-1]
            self._free(victim)
            if plan.pop(victim, None) is not None:
                self._out.add(victim)
        return None

    def _fit(self, logits: Tensor) -> Tensor:
        """logits (R, ids) -> (R, V)."""
        logits = logits[:, : min(self.known, self.vocab_size)]
        return F.pad(logits, (0, self.vocab_size - logits.size(1)), value=-torch.inf)


# ------------------------------------------------------------------ how many drafts
#
# alpha is the chance that a draft is accepted, costs are in plain passes of the target (one row): draft_cost is that of
# one draft, pass_cost that of a pass over k + 1 rows.


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens of a pass with k drafts: 1 + alpha + .. + alpha^k = (1 - alpha^(k + 1)) / (1 - alpha).

    Draft i is kept if it and all before it are accepted. (The sum, as the closed form is 0 / 0 at alpha = 1.)

    >>> round(expected_tokens(0.8, 4), 4)
    3.3616
    """
    return sum(alpha**i for i in range(k + 1))


def speedup(alpha: float, k: int, draft_cost: float, pass_cost: float = 1.0) -> float:
    """Tokens per time over those of plain decoding (Leviathan et al. 2023, theorem 3.8, where pass_cost is 1).

    >>> round(speedup(0.8, 4, 0.05), 3), round(speedup(0.44, 1, 27 / 30), 2)  # the second: drafts by 27 of 30 layers
    (2.801, 0.76)
    """
    return expected_tokens(alpha, k) / (k * draft_cost + pass_cost)


def best_k(alpha: float, draft_cost: float, pass_cost: Callable | Sequence[float] = lambda rows: 1.0,
           most: int = 8) -> int:
    """The k of 0 .. most with the best speedup, the smallest of equals.

    pass_cost(rows) or pass_cost[rows - 1] is the relative cost of a pass over that many rows.

    >>> best_k(0.9, 0.1, most=20), best_k(0.9, 0.1, [1, 1, 1.2, 1.4, 1.6], most=4), best_k(0.9, 0.1, [1, 2, 3], most=2)
    (10, 4, 0)
    """
    best, most_gain, tokens = 0, 0.0, 0.0
    for k in range(most + 1):
        tokens += alpha**k  # the sum of expected_tokens, as it grows
        gain = tokens / (k * draft_cost + (pass_cost(k + 1) if callable(pass_cost) else pass_cost[k]))
        if gain > most_gain:
            best, most_gain = k, gain
    return best


@dataclass
class _Rate:
    """How the drafts of one sequence have fared. accepted and tried fade: the last 20 or so tries count."""

    accepted: float
    tried: float
    pause: int  # after so many plain steps one draft is tried
    plain: int = 0  # steps since there were drafts
    run: int = 0  # drafts accepted at a time, lately
    trial: bool = False  # the last answer was such a draft


class AdaptiveK:
    """How many drafts to ask for, learned from what became of earlier ones and from what passes cost.

        k(seq, n_batch)                  asked once before each step: drafts for seq, in a batch of n_batch sequences
        record(seq, drafted, accepted)   after it, where there were drafts
        time(rows, seconds)              what a pass of the target over so many rows took
        time_draft(seconds, k)           what the drafter took for at most k drafts a sequence
        forget(seq)

    most   no more drafts than this
    least  a sequence whose drafts are accepted less often drafts no more. 0.6 keeps prose nearly free of drafts by
           n-grams, which come true in bursts and rarely in between: of the rows that are verified for Wikipedia text,
           2 to 3 % are wasted. 0 leaves all to the costs: for a draft model

    The answer is best_k of the measured costs, all sequences of the batch taken alike: n_batch * (k + 1) rows. In a
    busy batch extra rows cost, and it falls to 0. It grows by doubling, to 2 n + 1 where n drafts were accepted lately.
    Below `least` it is 0, but for trials: one draft at the very beginning, then after 20 plain steps, 40, up to 80. One
    that is accepted is followed by the next at once, so that a text which copies gets the most within a few steps. A
    new sequence is taken to be like those before it. No clock and no chance inside: the same calls, the same answers.
    """

    FADE, FADE_ALL = 0.95, 0.995  # memory of a sequence, and of all together
    HOPE, WEIGHT = 0.4, 4.0  # what all are thought to do at first, and how many tries that counts for in a new one
    FIRST, LAST = 20, 80  # pauses: one row in fifty or so goes into trials, and a text that changes is noticed
    ROW, GAIN = 0.05, 1.05  # cost of a row until it is measured; what a step with drafts must gain to be worth it
    STALE = 512  # after so many passes a measurement is dropped: the machine may be another by now

    def __init__(self, most: int = 8, least: float = 0.6):
        if most < 0 or not 0 <= least <= 1:
            raise ValueError(f"most is {most} and least is {least}, but the most drafts are 0 or more, and the least "
                             "acceptance is from 0 to 1")
        self.most, self.least = most, least
        self._rates: dict[Hashable, _Rate] = {}
        self._all = _Rate(self.HOPE * self.WEIGHT, self.WEIGHT, self.FIRST)
        self._passes = 0
        self._times: dict[int, deque[float]] = {}  # rows -> seconds of the last passes
        self._typical: dict[int, float] = {}  # rows -> their median, once there are three
        self._timed: dict[int, int] = {}  # rows -> the number of the last pass
        self._costs: dict[int, list[float]] = {}  # n_batch -> cost of 1 .. most + 1 rows for each sequence, of 1: 1.0
        self._draft_times: deque[float] = deque(maxlen=9)
        self._draft_seconds = 0.0  # their median, once there are three

    def k(self, seq: Hashable, n_batch: int) -> int:
        rate = self._rate(seq)
        k, rate.trial = self._worth(rate, n_batch), False
        if k == 0:
            rate.plain += 1
            # In a busy batch not even drafts that are good and free are worth it, and none is tried.
            rate.trial = rate.plain > rate.pause and self._best(0.95, n_batch, 0.0) > 0
            k = int(rate.trial)
        return k

    def record(self, seq: Hashable, drafted: int, accepted: int) -> None:
        if drafted == 0:
            return
        rate, failed = self._rate(seq), accepted < drafted
        for one, fade in ((rate, self.FADE), (self._all, self.FADE_ALL)):
            for success in [1] * accepted + [0] * failed:  # those behind the first failure were not tried
                one.accepted, one.tried = one.accepted * fade + success, one.tried * fade + 1
        rate.run = max(accepted, rate.run - 1)
        if not rate.trial:
            rate.plain, rate.pause = 0, self.FIRST
        elif failed:
            rate.plain, rate.pause = 0, min(2 * rate.pause, self.LAST)

    def time(self, rows: int, seconds: float) -> None:
        rows, self._passes = self._bucket(rows), self._passes + 1
        times = self._times.setdefault(rows, deque(maxlen=9))
        times.append(seconds)
        self._timed[rows] = self._passes
        before = dict(self._typical)
        if len(times) >= 3:  # one alone may have compiled something, and would never be put right
            self._typical[rows] = median(times)
        for old in [r for r, n in self._timed.items() if n < self._passes - self.STALE]:
            del self._timed[old], self._times[old]
            self._typical.pop(old, None)
        if self._typical != before:
            self._costs.clear()

    def time_draft(self, seconds: float, k: int) -> None:
        self._draft_times.append(seconds / k)
        if len(self._draft_times) >= 3:
            self._draft_seconds = median(self._draft_times)

    def forget(self, seq: Hashable) -> None:
        self._rates.pop(seq, None)

    def _rate(self, seq: Hashable) -> _Rate:
        if seq not in self._rates:
            self._rates[seq] = _Rate(self.WEIGHT * self._all.accepted / self._all.tried, self.WEIGHT,
                                     pause=self.FIRST // 2, plain=self.FIRST // 2)  # due for a trial at once
        return self._rates[seq]

    def _worth(self, rate: _Rate, n_batch: int) -> int:
        alpha, draft_cost = rate.accepted / rate.tried, 0.0
        if alpha < self.least:
            return 0
        if self._draft_seconds and self._typical:
            draft_cost = self._draft_seconds / self._seconds(n_batch)
        return min(self._best(alpha, n_batch, draft_cost), 2 * rate.run + 1)

    def _best(self, alpha: float, n_batch: int, draft_cost: float) -> int:
        if n_batch not in self._costs:
            one = self._seconds(n_batch)
            self._costs[n_batch] = [self._seconds(n_batch * (k + 1)) / one for k in range(self.most + 1)]
        costs = self._costs[n_batch]
        k = best_k(alpha, draft_cost, costs, self.most)
        return k if k and speedup(alpha, k, draft_cost, costs[k]) >= self.GAIN else 0

    def _seconds(self, rows: int) -> float:
        """A pass over so many rows: between two that were measured on the line, else like the nearest one."""
        known = sorted(self._typical)
        i = bisect(known, rows)
        if not known:
            return 1 + self.ROW * (rows - 1)
        if i in (0, len(known)):  # scaled by what a row costs while nothing is known
            near = known[max(i - 1, 0)]
            return self._typical[near] * (1 + self.ROW * (rows - 1)) / (1 + self.ROW * (near - 1))
        (a, b), (low, high) = known[i - 1: i + 1], (self._typical[x] for x in known[i - 1: i + 1])
        return low + (high - low) * (rows - a) / (b - a)

    @staticmethod
    def _bucket(rows: int) -> int:
        """Rows by their first four bits, up to 15 exactly: few enough counts that each is met again."""
        shift = max(rows.bit_length() - 4, 0)
        return rows >> shift << shift


# ------------------------------------------------------------------ the loop, for one sequence


@torch.inference_mode()
def speculate(model: Callable, cache, prompt: Sequence[int], drafter, k: int, warp_one: Callable, draw: Callable,
              uniform: Callable, max_tokens: int, ends: Iterable[int] = ()) -> list[int]:
    """Extend by the drafts, verify, commit what is kept; again. Returns at most max_tokens ids, an end id included.

    warp_one(logits (R, V), outputs: R lists of ids) -> (R, V): the request's distributions behind these outputs
    uniform(positions (a range of R), stream) -> (R,) float64, a pure function of both

    With k = 0 it is plain decoding. With an n-gram drafter the output is the same for every k, with any drafter it is
    the same when greedy, and else it has the same distribution. ValueError if a row of logits cannot be drawn from.
    """
    seq, ids, begin, ends = object(), list(prompt), len(prompt), frozenset(ends)
    limit = begin + max_tokens if cache.max_seq_len is None else min(begin + max_tokens, cache.max_seq_len + 1)

    def choose(rows, logits, drafts):
        output = ids[begin:] + drafts[0]
        q = warp_one(logits, [output])
        return draw(q, uniform(range(len(output), len(output) + 1), DRAFT + 3 * (len(ids) - begin))), q

    cache.add(seq, ids)
    try:
        while len(ids) < limit and not (len(ids) > begin and ids[-1] in ends):
            (d,), q = drafter.propose({seq: ids}, [min(k, limit - len(ids) - 1)], choose)  # the last one is no draft
            step = cache.extend({seq: ids[cache.length(seq):] + d})
            logits = model(step.tokens, step.positions, step.attend, step.last({seq: len(d) + 1}))
            p = warp_one(logits, [ids[begin:] + d[:i] for i in range(len(d) + 1)])  # (len(d) + 1, V)
            at = range(len(ids) - begin, len(ids) - begin + len(d) + 1)
            u_accept, u_token = uniform(at, ACCEPT)[None, :-1], uniform(at, TOKEN)[None]
            n, token = verify(torch.tensor([d], dtype=torch.int64), q, p[None], u_accept, u_token, draw)
            new = [*d[: n.item()], token.item()]
            new = new[: next((i + 1 for i, x in enumerate(new) if x in ends), len(new))]  # nothing behind an end
            if -1 in new:
                raise ValueError(f"output token {len(ids) - begin + len(new) - 1}: the logits have NaN, infinity "
                                 "or nothing finite")
            # What the cache keeps: all before the drafts, and the drafts that stand; `token` was not computed yet.
            cache.commit(step, keep={seq: step.n_new[0] - len(d) + min(n.item(), len(new))})
            ids.extend(new)
        return ids[begin:]
    finally:
        cache.free(seq)
        drafter.forget(seq)


# ------------------------------------------------------------------ demo


def demo():
    print("Tokens a pass, by acceptance rate and number of drafts; * the best k if a draft costs a 20th of a pass:")
    ks = (0, 1, 2, 3, 4, 6, 8, 12)
    print("  alpha   " + "".join(f"k={k:<6}" for k in ks))
    for alpha in (0.3, 0.5, 0.7, 0.8, 0.9, 0.95):
        best = max(ks, key=lambda k: speedup(alpha, k, 0.05))
        print(f"  {alpha:<8}" + "".join(f"{expected_tokens(alpha, k):5.2f}{'*' if k == best else ' '}  " for k in ks))

    words, k = ["the", "sky", "is", "blue", "grey", "."], 3
    V, g = len(words), torch.Generator().manual_seed(6)
    target = (2 * torch.randn(V, V, generator=g)).softmax(1)  # p of the next word, by the last one
    draft = (target.log() + 0.7 * torch.randn(V, V, generator=g)).softmax(1)  # q: something like it

    def draw(probs: Tensor, u: Tensor) -> Tensor:
        return (probs.cumsum(1) <= u[:, None] * probs.sum(1, keepdim=True)).sum(1)

    print("\nThree passes, in which a draft is accepted if u * q < p:")
    text = [0]
    for _ in range(3):
        drafts = []
        for _ in range(k):
            drafts += draw(draft[(text + drafts)[-1:]], torch.rand(1, generator=g)).tolist()
        at = text[-1:] + drafts
        p, q, u = target[at], draft[at[:-1]], torch.rand(2, k + 1, generator=g).double()
        n, token = (x.item() for x in verify(torch.tensor([drafts]), q[None], p[None], u[:1, :k], u[1:], draw))
        print("  behind:", " ".join(words[t] for t in text))
        for i, d in enumerate(drafts[: n + 1]):
            print(f"    {words[d]:5} p {p[i, d]:.2f}  q {q[i, d]:.2f}  u {u[0, i]:.2f}  u * q {u[0, i] * q[i, d]:.2f}  "
                  + ("accepted" if i < n else "rejected"))
        row = (p[n] - q[n]).clamp(min=0) if n < k else p[n]
        left = "  ".join(f"{w} {x:.2f}" for w, x in zip(words, (row / row.sum()).tolist()) if x)
        what = "what p has beyond q" if n < k else "p itself, a bonus"
        print(f"    {words[token]:5} drawn with u {u[1, n]:.2f} from {what}: {left}")
        text += [*drafts[:n], token]

    ids = [0, 1, 2, 3, 5, 0, 1, 2, 4, 5, 0, 1, 2]
    (found,), _ = NgramDrafter().propose({"a": ids}, [3])
    said, drafts = (" ".join(words[t] for t in some) for some in (ids, found))
    print(f"\nDrafts that are looked up in the text itself: {said} -> {drafts}")


if __name__ == "__main__":
    demo()
