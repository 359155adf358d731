"""
Sampling: logits to a distribution to a token.

    probs = warp(logits, params(requests, V), prompt, output, mask)     (R, V), every row sums to 1
    ids   = draw(probs, uniforms(seeds, samples, positions))            (R,)

The one idea: everything that shapes a choice happens in `warp`, a pure function from logits to probabilities, and
everything random is one number u in [0, 1) per token, itself a pure function of (seed, sample, position, stream).
Greedy decoding is a distribution too: one-hot. So there is no sampler state to save, to roll back or to mix up between
requests, and speculative decoding, which needs the exact distributions, calls the very same function.

The order inside `warp`, each step renormalising before the next:

    mask > logit bias > repetition > presence and frequency penalty > temperature > top-k > top-p > min-p

Ties go to the lowest token id. Different rows may carry different parameters, and a row pays only for what it uses.
float64 logits are processed and returned in float64, every other dtype in float32; cumulative sums are float64.
A row that holds NaN or +inf, or no finite logit, comes out as NaN, and `draw` turns it into -1: never a token, and
never a disturbance to the other rows. The caller ends that request with an error.

Papers: top-k, Fan et al. 2018 (arXiv 1805.04833); top-p, Holtzman et al. 2019 (1904.09751); min-p, Nguyen et al. 2024
(2407.01082); repetition penalty, Keskar et al. 2019 (1909.05858); counter-based random numbers, Salmon et al. 2011;
splitmix64, Steele, Lea and Flood 2014.
Left out on purpose: typical, mirostat, XTC and DRY sampling, and any generator that counts how often it was asked.
Shape letters: R rows, V vocabulary, P and O padded lengths of prompts and outputs, M logit biases of all rows together.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

# ------------------------------------------------------------------ parameters, checked at the door

LIMIT = 1e30  # a larger penalty or bias is a mistake, and could overflow float32 where nobody would look for it
RULES = {  # parameter: (the value that switches it off, which values are legal, the same in words); NaN passes no rule
    "temperature": (1.0, lambda t: 0 <= t < math.inf, "a finite number, at least 0 (0 is greedy)"),
    "top_k": (0, lambda k: k >= -1 and k % 1 == 0, "a whole number, at least 1 (0 and -1 are off)"),
    "top_p": (1.0, lambda p: 0 < p <= 1, "a number above 0 and at most 1 (1 is off)"),
    "min_p": (0.0, lambda m: 0 <= m <= 1, "a number from 0 to 1 (0 is off)"),
    "repetition_penalty": (1.0, lambda r: 1 / LIMIT <= r <= LIMIT, f"from {1 / LIMIT:g} to {LIMIT:g} (1 is off)"),
    "presence_penalty": (0.0, lambda x: abs(x) <= LIMIT, f"from {-LIMIT:g} to {LIMIT:g} (0 is off)"),
    "frequency_penalty": (0.0, lambda x: abs(x) <= LIMIT, f"from {-LIMIT:g} to {LIMIT:g} (0 is off)"),
}


class Params(NamedTuple):
    """The parameters of R rows as columns. Best kept on the CPU: `warp` branches on them, and moves what it needs."""
    temperature: Tensor         # (R,) float64, 0 is greedy
    top_k: Tensor               # (R,) int64, 1..V, V is off
    top_p: Tensor               # (R,) float64, in (0, 1], 1 is off
    min_p: Tensor               # (R,) float64, in [0, 1], 0 is off
    repetition_penalty: Tensor  # (R,) float64, > 0, 1 is off
    presence_penalty: Tensor    # (R,) float64, 0 is off
    frequency_penalty: Tensor   # (R,) float64, 0 is off
    bias_rows: Tensor           # (M,) int64: the logit biases of all rows as triples (row, id, value)
    bias_ids: Tensor            # (M,) int64
    bias_values: Tensor         # (M,) float64


def check(request: Mapping, vocab_size: int) -> dict:
    """One request's sampling parameters, complete and legal: the keys of RULES and logit_bias, a map of id to number.

    A missing or None value is off. Raises ValueError.

    >>> check({"temperature": 0.7, "top_k": None, "logit_bias": {3: -5}}, vocab_size=100)["logit_bias"]
    {3: -5.0}
    >>> check({"top_p": 0}, vocab_size=100)
    Traceback (most recent call last):
    ValueError: top_p is 0; it must be a number above 0 and at most 1 (1 is off)
    """
    known = [*RULES, "logit_bias"]
    if unknown := [key for key in request if key not in known]:
        raise ValueError(f"unknown sampling parameter {unknown[0]!r}; known are {', '.join(known)}")
    full: dict = {name: _number(name, off if request.get(name) is None else request[name], legal, rule)
            for name, (off, legal, rule) in RULES.items()}
    full["top_k"] = min(int(full["top_k"]), vocab_size) if full["top_k"] > 0 else vocab_size
    bias = {} if request.get("logit_bias") is None else request["logit_bias"]
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias is {bias!r:.80}; it must map token ids to numbers")
    full["logit_bias"] = {}
    for token, value in bias.items():
        token = int(token) if isinstance(token, str) and token.isdecimal() else token  # the keys of JSON are strings
        token = int(_number("a token id in logit_bias", token, lambda i: 0 <= i < vocab_size and i % 1 == 0,
                            f"a whole number from 0 to {vocab_size - 1}"))
        full["logit_bias"][token] = _number(
            f"logit_bias of token id {token}", value, lambda b: b == -math.inf or abs(b) <= LIMIT,
            f"from {-LIMIT:g} to {LIMIT:g}, or -inf to ban the token")
    return full


def _number(name: str, value, legal, rule: str) -> float:
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not legal(number):
        raise ValueError(f"{name} is {value!r:.80}; it must be {rule}")
    return number


def params(requests: Sequence[Mapping], vocab_size: int, device="cpu") -> Params:
    """Columns for R rows, from one mapping a row with the keys that `check` knows, and with its errors."""
    rows = [check(request, vocab_size) for request in requests]
    biases = [(r, i, value) for r, row in enumerate(rows) for i, value in row["logit_bias"].items()]
    dtypes = [torch.int64 if key == "top_k" else torch.float64 for key in Params._fields[:7]]
    return Params(
        *(torch.tensor([row[key] for row in rows], dtype=dtype, device=device)
          for key, dtype in zip(Params._fields, dtypes)),
        *(torch.tensor([bias[j] for bias in biases], dtype=dtype, device=device)
          for j, dtype in enumerate((torch.int64, torch.int64, torch.float64))))


def stack(rows: Sequence[Params]) -> Params:
    """The parameters of many rows from those of a few each, in this order: cheap enough for every step.

    >>> one, other = (params([{"temperature": t, "logit_bias": {7: 1}}], 9) for t in (0.5, 2))
    >>> both = stack([one, other, one])
    >>> both.temperature.tolist(), both.bias_rows.tolist()
    ([0.5, 2.0, 0.5], [0, 1, 2])
    """
    first, biases = 0, []
    for p in rows:
        if len(p.bias_rows):
            biases.append((p.bias_rows + first, p.bias_ids, p.bias_values))
        first += len(p.temperature)
    columns = [torch.cat(column) for column in zip(*(p[:7] for p in rows))]
    return Params(*columns, *(map(torch.cat, zip(*biases)) if biases else rows[0][7:]))


# ------------------------------------------------------------------ logits to probabilities


def warp(logits: Tensor, params: Params, prompt: Tensor | None = None, output: Tensor | None = None,
         mask: Tensor | None = None) -> Tensor:
    """logits (R, V) of any float dtype -> probabilities (R, V), float32 (float64 for float64), each row summing to 1.

    prompt (R, P) and output (R, O) are int64 token ids padded with -1; only the penalties read them. The repetition
    penalty looks at both, presence and frequency at output alone. mask (R, V) bool is True where a token is allowed.
    A row with NaN, +inf or no finite logit (after the mask) comes out as NaN. Raises ValueError if shapes disagree.

    >>> warp(torch.tensor([[0.0, 2.0, 1.0]] * 2), params([{"temperature": 0}, {"top_k": 1}], 3)).tolist()
    [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]
    """
    _check_shapes(logits, params, prompt, output, mask)
    x = logits if logits.dtype == torch.float64 else logits.float()              # (R, V)
    raw, x = x, _edit(x, params, prompt, output, mask)
    top = x.amax(-1)                                                             # (R,) amax lets NaN and +inf through
    bad = ~top.isfinite()
    if mask is not None:  # which may have hidden them
        bad = bad | ~raw.amax(-1).isfinite()
    if bad.any():  # from here on a bad row is a harmless row of zeros
        x, top = torch.where(bad[:, None], 0.0, x), torch.where(bad, 0.0, top)

    limits = torch.finfo(x.dtype)
    temperature = params.temperature.clamp(max=limits.max)
    greedy = temperature < limits.tiny                                           # (R,) too small to divide by
    if greedy.all():
        probs = _one_hot(x)
    else:
        # subtle: subtract the maximum before dividing. A small temperature then sends the others to -inf and leaves
        # the best at 0; the other way round it sends the best to +inf, and softmax answers NaN.
        temperature = torch.where(greedy, 1.0, temperature).to(x)
        scores = (x - top[:, None]) / temperature[:, None]                       # (R, V), the maximum is 0
        probs = scores.softmax(-1)
        cut = ((params.top_k < x.size(1)) | (params.top_p < 1) | (params.min_p > 0)) & ~greedy
        if cut.any():
            _truncate(scores, probs, cut, params)
        if greedy.any():
            rows = greedy.nonzero().squeeze(1).to(x.device)
            probs[rows] = _one_hot(x[rows])
    return torch.where(bad[:, None], math.nan, probs) if bad.any() else probs


def _one_hot(x: Tensor) -> Tensor:
    """All probability on the largest of each row of x (R, V), the first of them if several are (max promises that)."""
    return torch.zeros_like(x).scatter_(1, x.max(-1, keepdim=True).indices, 1.0)


def _check_shapes(logits, params, prompt, output, mask):
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be floats of shape (R, V), got {logits.dtype} {tuple(logits.shape)}")
    rows = logits.size(0)
    if len(params.temperature) != rows:
        raise ValueError(f"logits have {rows} rows, but params describe {len(params.temperature)}")
    for name, ids in (("prompt", prompt), ("output", output)):
        if ids is not None and (ids.dim() != 2 or ids.size(0) != rows):
            raise ValueError(f"{name} must have shape ({rows}, length), padded with -1, got {tuple(ids.shape)}")
    if mask is not None and (mask.shape != logits.shape or mask.dtype != torch.bool):
        raise ValueError(f"mask must be bool {tuple(logits.shape)}, got {mask.dtype} {tuple(mask.shape)}")


def _edit(x: Tensor, params: Params, prompt, output, mask) -> Tensor:
    """Mask, bias and penalties on a copy of x (R, V); x itself where all of them are off."""
    V = x.size(1)
    if mask is not None:
        x = torch.where(mask, x, -math.inf)
    repeats = params.repetition_penalty != 1                                     # (R,)
    counts = (params.presence_penalty != 0) | (params.frequency_penalty != 0)    # (R,)
    if not (len(params.bias_ids) or repeats.any() or counts.any()):
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    flat = x.view(-1)                                                            # (R * V,) a view: edits land in x

    if len(params.bias_ids):
        at = (params.bias_rows * V + params.bias_ids).to(x.device)
        flat[at] += params.bias_values.to(x)
    if repeats.any():
        seen = [ids.to(x.device) for ids in (prompt, output) if ids is not None]
        at, row, _ = _distinct(torch.cat(seen, 1) if seen else None, repeats, V, x.device)
        old, penalty = flat[at], params.repetition_penalty.to(x)[row]
        flat[at] = torch.where(old > 0, old / penalty, old * penalty)            # both directions mean "less likely"
    if counts.any():
        at, row, n = _distinct(output, counts, V, x.device)
        presence, frequency = params.presence_penalty.to(x), params.frequency_penalty.to(x)
        flat[at] -= presence[row] + frequency[row] * n
    return x


def _distinct(ids: Tensor | None, on: Tensor, vocab_size: int, device):
    """The distinct tokens of each row that is on: flat position row * V + id, row, and number of occurrences."""
    ids = torch.empty(len(on), 0, dtype=torch.int64) if ids is None else ids
    ids = ids.to(device)
    row, column = ((ids >= 0) & on.to(device)[:, None]).nonzero(as_tuple=True)
    token = ids[row, column]
    if len(token) and token.max() >= vocab_size:  # it would land in the next row
        raise ValueError(f"token id {int(token.max())} in prompt or output, but the vocabulary has {vocab_size} tokens")
    at, n = torch.unique(row * vocab_size + token, return_counts=True)
    return at, at // vocab_size, n


# ------------------------------------------------------------------ top-k, top-p, min-p, without sorting the vocabulary
#
# All three keep a head of the row sorted by (score descending, id ascending); they differ in where they cut it. The 128
# best scores nearly always reach the cut, the 1,024 best almost always do; only where both fall short is a row sorted.

WIDTHS = (128, 1024)
CHUNK = 32


def _truncate(scores: Tensor, probs: Tensor, cut: Tensor, params: Params):
    """Truncates and renormalises, in place, those rows of probs (R, V) that `cut` (R,) names; scores have maximum 0."""
    V = scores.size(1)
    rows = cut.nonzero().squeeze(1)                                              # (R',) not settled yet
    for width in (*(w for w in WIDTHS if w < V), V):
        k, p, m = (column[rows].to(scores.device) for column in (params.top_k, params.top_p, params.min_p))
        at = rows.to(scores.device)
        head, ids = _head(scores.index_select(0, at), width)                     # (R', width)
        kept, settled = _cut(head, probs[at[:, None], ids], k, p, m, V)          # (R', width), (R',)
        if not settled.all():
            at, ids, kept, rows = at[settled], ids[settled], kept[settled], rows[~settled.to(rows.device)]
        probs.index_fill_(0, at, 0)
        probs[at[:, None], ids] = kept.to(probs)
        if settled.all():
            return


def _head(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest of each row of x (R, V) and their ids, sorted by (value descending, id ascending)."""
    R, V = x.shape
    if width == V:
        head, ids = x.sort(dim=1, descending=True, stable=True)
        return head, ids
    if V % CHUNK == 0 and 2 * CHUNK * width <= V:
        # No more than `width` chunks hold the `width` largest, and their maxima say which: half the time of one topk.
        chunks = x.reshape(R, -1, CHUNK).amax(-1).topk(width).indices            # (R, width)
        near = (chunks[:, :, None] * CHUNK + torch.arange(CHUNK, device=x.device)).view(R, -1)
        ids = near.gather(1, x.gather(1, near).topk(width).indices)              # (R, width)
    else:
        ids = x.topk(width).indices                                              # (R, width)
    ids = ids.sort(dim=1).values  # topk promises no order among equals, hence by id first
    head, order = x.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return head, ids.gather(1, order)


def _cut(head: Tensor, probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, V: int) -> tuple[Tensor, Tensor]:
    """Top-k, top-p and min-p on heads: scores (R, width), maximum 0, and their probabilities; parameters (R,).

    Returns the probabilities (R, width) float64, renormalised and 0 beyond the cut, and for each row whether its head
    was long enough to know them (R,).

    >>> p = torch.tensor([[0.4, 0.3, 0.25, 0.05]])  # top-k 2 leaves 4/7 and 3/7; top-p 0.55 is content with the first
    >>> _cut((p / 0.4).log(), p, torch.tensor([2]), torch.tensor([0.55]), torch.tensor([0.0]), V=4)
    (tensor([[1., 0., 0., 0.]], dtype=torch.float64), tensor([True]))
    """
    width = head.size(1)
    mass = probs.cumsum(1, dtype=torch.float64)                                  # (R, width)
    total = mass.gather(1, top_k.clamp(max=width)[:, None] - 1)                  # (R, 1) what top-k leaves
    total = torch.where(top_k[:, None] <= width, total, 1.0)
    # Top-p keeps a token if the mass strictly before it is below p: the first token to reach p is the last to stay.
    # 1 touches nothing: the sum can reach 1 by rounding long before the last token.
    nucleus = torch.searchsorted(mass, top_p[:, None] * total).squeeze(1) + 1    # (R,) width + 1 if none reaches it
    size = torch.minimum(top_k, torch.where(top_p < 1, nucleus, V))
    # Min-p compares with the maximum, and renormalising changes no ratio: p / p_max >= m means score >= ln m.
    likely = ((head >= min_p.log().to(head)[:, None]) & (probs > 0)).sum(1)      # (R,) nor is there a point in zeros
    size = torch.minimum(size, likely).clamp(max=width)
    last = size[:, None] - 1                                                     # (R, 1)
    kept = torch.where(torch.arange(width, device=head.device) <= last, probs / mass.gather(1, last), 0.0)
    if width == V:
        return kept, torch.ones_like(size, dtype=torch.bool)
    # subtle: the head must end strictly below the cut. Otherwise tokens outside it may be tied with the last one kept,
    # and have lower ids.
    settled = head.gather(1, last).squeeze(1) > head[:, -1]
    return kept, settled & ((top_k <= width) | (top_k == V) | (top_p == 1))


# ------------------------------------------------------------------ probabilities to a token


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """probs (R, V), u (R,) float64 in [0, 1) -> token ids (R,) int64; -1 for a row without mass, or with NaN.

    The inverse of the cumulative distribution: the first token whose cumulative mass exceeds u times the total. A row
    need not sum to exactly 1, and a token of zero probability is never drawn.

    >>> draw(torch.tensor([[0.25, 0.0, 0.75]] * 3), torch.tensor([0.0, 0.25, 0.999])).tolist()
    [0, 2, 2]
    """
    mass = probs.cumsum(-1, dtype=torch.float64)                                 # (R, V)
    total = mass[:, -1:].contiguous()                                            # (R, 1)
    goal = u.to(mass)[:, None] * total
    ids = torch.searchsorted(mass, goal, right=True)                             # (R, 1)
    last = torch.searchsorted(mass, total)  # u * total can round up to total: then the last token that has mass
    ids = torch.minimum(ids, last).clamp(max=probs.size(1) - 1)
    empty = probs.gather(1, ids) == 0
    if empty.any():  # a GPU adds in parallel, so its sums can creep up by a rounding error where the probability is 0
        ids = torch.where(empty, probs.argmax(-1, keepdim=True), ids)
    return torch.where((total > 0) & total.isfinite(), ids, -1).squeeze(1)


def logprobs(logits: Tensor, ids: Tensor, top: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The model's own log-probabilities: log-softmax of the raw logits, before bias, penalties and temperature.

    logits (R, V), ids (R,) -> that of ids (R,); ids of the `top` best (R, top), ties to the lowest id; theirs (R, top).
    float64 for float64 logits, else float32. A row that `warp` would refuse, or an id of -1, gives NaN (and ids -1).
    Raises ValueError if top is not in 0..V.

    >>> chosen, best, values = logprobs(torch.tensor([[1.0, 3.0, 1.0, 1.0]]), torch.tensor([1]), top=3)
    >>> best.tolist()
    [[1, 0, 2]]
    """
    R, V = logits.shape
    if not 0 <= top <= V:
        raise ValueError(f"{top} log-probabilities a token asked for; it can be from 0 to the vocabulary's {V}")
    x = logits if logits.dtype == torch.float64 else logits.float()              # (R, V)
    bad = ~x.amax(-1, keepdim=True).isfinite()                                   # (R, 1)
    x = torch.where(bad, 0.0, x)
    logp = x.log_softmax(-1)                                                     # (R, V)
    chosen = logp.gather(1, ids.clamp(min=0)[:, None])                           # (R, 1)
    chosen = torch.where(bad | (ids[:, None] < 0), math.nan, chosen).squeeze(1)
    if top == 0 or R == 0:
        return chosen, ids.new_empty(R, top), logp.new_empty(R, top)
    for width in (*(w for w in WIDTHS if top < w < V), V):
        head, best = _head(x, width)                                             # (R, width)
        if width == V or (head[:, top - 1] > head[:, -1]).all():  # as in _cut: no tie reaches beyond the head
            break
    best = best[:, :top]
    return chosen, torch.where(bad, -1, best), torch.where(bad, math.nan, logp.gather(1, best))


# ------------------------------------------------------------------ randomness is an argument

TOKEN, ACCEPT, DRAFT = 0, 1, 2  # streams: the draw of a token, accept or reject a draft, the draw of a draft
MASK64 = 2**64 - 1


def splitmix64(z: int) -> int:
    """One step of splitmix64: a bijection of 64-bit integers whose every output bit depends on every input bit.

    >>> splitmix64(1234567)
    6457827717110365317
    """
    z = (z + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def uniforms(seed, sample=0, position=0, stream=TOKEN) -> Tensor:
    """Float64 uniforms (R,) in [0, 1), a pure function of the four counters and nothing else.

    Each argument is an int, or R of them (sequence or tensor); ints apply to all rows, and four ints give R = 1.
    `sample` tells apart the n answers to one prompt, `position` is the index of the token in the output, `stream` what
    the number is for. Any int is legal; only its lowest 64 bits count. So a token's u does not depend on the batch, on
    chunks, on preemption, or on how many numbers anybody drew before.

    >>> uniforms(42, position=range(3)).tolist() == [uniforms(42, 0, i).item() for i in range(3)]
    True
    """
    columns = [c.tolist() if isinstance(c, Tensor) else list(c) if isinstance(c, Iterable) else c
               for c in (seed, sample, position, stream)]
    lengths = {len(c) for c in columns if isinstance(c, list)}
    if len(lengths) > 1:
        raise ValueError(f"seed, sample, position and stream have different lengths: {sorted(lengths)}")
    R = lengths.pop() if lengths else 1
    values = []
    for words in zip(*(c if isinstance(c, list) else [c] * R for c in columns)):
        state = 0
        for word in words:
            state = splitmix64(state ^ (index(word) & MASK64))
        values.append((state >> 11) * 2.0**-53)  # the top 53 bits are what a float64 holds
    return torch.tensor(values, dtype=torch.float64)


# ------------------------------------------------------------------ demo


def demo():
    tokens = ["the", "a", "my", "this", "some", "purple"]
    logits = torch.tensor([[2.0, 1.5, 0.5, 0.5, -1.0, -2.0]])
    output = torch.tensor([[0, 0, 1]])  # "the" twice and "a" once have been generated already
    samplers = [{}, {"temperature": 0}, {"temperature": 0.5}, {"temperature": 2}, {"top_k": 3}, {"top_p": 0.75},
                {"min_p": 0.2}, {"repetition_penalty": 1.5}, {"frequency_penalty": 0.8}, {"logit_bias": {5: 4.0}}]
    R, V, n = len(samplers), len(tokens), 2000
    print(f"What each setting makes of the same logits of {V} tokens, and {n:,} draws from it:\n")
    probs = warp(logits.expand(R, V), params(samplers, V), output=output.expand(R, 3))
    for sampler, row in zip(samplers, probs):
        drawn = draw(row.expand(n, V), uniforms(seed=1, position=range(n))).bincount(minlength=V) / n
        print(", ".join(f"{key} {value}" for key, value in sampler.items()) or "plain softmax")
        for token, p, share in zip(tokens, row.tolist(), drawn.tolist()):
            print(f"  {token:>7} {p:6.3f}  drawn {share:5.3f}  {'#' * round(40 * p)}")


if __name__ == "__main__":
    demo()
