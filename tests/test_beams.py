"""beams.py: the true best text where the search is wide enough, transformers' answers where the rules are the same.

- exhaustive search over all texts of small random models, dense and in float64, beside a paged cache that is checked
  before and after every pass
- transformers' beam search on tiny random Llamas; where ours stops later, the case that shows why
- the published cases (S), by id
- blocks: what the formula promises, sharing, all given back after every kind of end
- sabotaged twins: what the tests above must notice
"""
import inspect
import itertools
import math
import random

import pytest
import torch

import beams
from beams import attainable, beam_score, beam_search, most_blocks
from kvcache import OutOfBlocks, PagedKVCache
from model import Config, Llama
from sampling import params, warp

pytestmark = pytest.mark.usefixtures("one_thread")

F64 = torch.float64


def mutant(old, new, function="beam_search"):
    """beam_search with one piece of the file replaced: a sabotaged twin."""
    source = inspect.getsource(beams)
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
    space = {"__name__": "sabotaged"}
    exec(source.replace(old, new), space)
    return space[function]


class CheckedCache(PagedKVCache):
    """Checks its bookkeeping before and after every pass; keeps the plan, and the most blocks that were held."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.most, self.entries, self.passes, self.plan = 0, 0, [], None

    def extend(self, plan, rows=None):
        step = super().extend(plan, rows)
        self.plan = {seq: self.tokens(seq) + list(ids) for seq, ids in plan.items()}  # what a row stands behind
        self.passes.append(len(step.tokens))
        self.most = max(self.most, self.n_blocks - self.n_free)
        self.entries = max(self.entries, sum(len(s.blocks) for s in self._sequences.values()))
        self.check()
        return step

    def commit(self, step, keep=None):
        super().commit(step, keep)
        self.check()

    def is_clean(self):
        self.check()
        return not self._sequences and self.n_free == self.n_blocks


def no_layers(n_blocks=64, block_size=4, **more):
    return CheckedCache(n_layer=1, n_kv_head=1, head_dim=1, n_blocks=n_blocks, block_size=block_size, **more)


class Tree:
    """A "model" whose logits are a function of the whole text, as the cache has it, behind a prompt of P tokens."""

    def __init__(self, cache, P, logits):
        self.cache, self.P, self.logits = cache, P, logits

    def __call__(self, tokens, positions, attend, rows):
        texts = [ids[self.P:] for ids in self.cache.plan.values()]
        return torch.stack([self.logits(tuple(t)) for t in texts])[: len(rows)]


def over_tree(logits, prompt=(0,), cache=None, run=beam_search, **options):
    """A search over a function of texts -> hypotheses; `logits` gets a tuple of ids."""
    cache = no_layers() if cache is None else cache
    found = run(Tree(cache, len(prompt), logits), cache, prompt, **options)
    assert cache.is_clean()
    return found


def llama(seed, vocab_size=5, scale=6.0, max_seq_len=64):
    torch.manual_seed(seed)
    net = Llama(Config(n_layer=2, n_head=2, n_kv_head=1, head_dim=8, hidden_size=16, intermediate_size=32,
                       vocab_size=vocab_size, max_seq_len=max_seq_len)).double()
    with torch.no_grad():
        for weight in net.parameters():
            if weight.dim() == 2:
                weight.mul_(scale)
    return net.requires_grad_(False)


def cache_for(net, n_blocks=400, block_size=4, **more):
    c = net.config
    return CheckedCache(c.n_layer, c.n_kv_head, c.head_dim, n_blocks, block_size, dtype=F64, **more)


def search(net, prompt, cache=None, run=beam_search, **options):
    cache = cache_for(net) if cache is None else cache
    found = run(net, cache, prompt, **options)
    assert cache.is_clean()
    return found


def every_text(net, prompt, max_tokens, ends, penalty, warp_one=None, min_tokens=0):
    """(score, ids) of all texts, the best first: dense, without a cache, each prefix computed anew."""
    found, open_ = [], [((), 0.0)]
    while open_:
        rows = net(torch.tensor([[*prompt, *ids] for ids, _ in open_]))[:, -1]
        if len(open_[0][0]) < min_tokens:
            rows[:, sorted(ends)] = -math.inf
        logp = rows.log_softmax(-1) if warp_one is None else warp_one(rows, [list(ids) for ids, _ in open_]).log()
        longer = []
        for (ids, total), row in zip(open_, logp.tolist()):
            for token, lp in enumerate(row):
                text, new = (*ids, token), total + lp
                if new == -math.inf:
                    continue
                if token in ends or len(text) == max_tokens:
                    found.append((new / len(text)**penalty, text))
                else:
                    longer.append((text, new))
        open_ = longer
    return sorted(found, key=lambda x: -x[0])


def brief(found):
    return [(h.ids, round(h.score, 4)) for h in found]


# ------------------------------------------------------------------ the published cases


def s09(text):
    """Token 1 twice, the second of which ends (sum -1), or ten of token 2 and 3 (sum -4)."""
    row = torch.full((5,), -math.inf, dtype=F64)
    n = len(text)
    if n == 0:
        row[1], row[2] = -0.5, -0.4
    elif text[0] == 1:
        row[4], row[3] = -0.5, math.log(1 - math.exp(-0.5))
    else:
        row[4 if n == 9 else 2] = -0.4
    return row


def given(logp):
    """A warp_one that takes the logits for log-probabilities, whether they sum to 1 or not."""
    return {"warp_one": lambda logits, outputs: logits.exp()} if logp else {}


@pytest.mark.parametrize("prompt", [1, 100, 300])
def test_s09_the_prompt_is_no_part_of_the_length(prompt):
    """S09 (vllm-project/vllm #2606, PR #7007; huggingface/transformers #25455): the better mean wins, whatever the
    prompt; divided by prompt and output, A's -1.0 / 102 would beat B's -4.0 / 110."""
    assert (beam_score(-1.0, 2, 1.0), beam_score(-4.0, 10, 1.0)) == (-0.5, -0.4)
    options = dict(beams=4, max_tokens=12, eos_ids=[4], n_best=2, **given(logp=True))
    ids = [0] * prompt
    b, a = over_tree(s09, ids, no_layers(200), **options)
    assert (b.ids, a.ids) == ([2] * 9 + [4], [1, 4]) and (b.score, a.score) == pytest.approx((-0.4, -0.5))
    assert (b.total, a.total) == pytest.approx((-4.0, -1.0))
    if prompt > 1:
        faulty = mutant("beam_score(beam.total, len(beam.ids), length_penalty)",
                        "beam_score(beam.total, len(prompt) + len(beam.ids), length_penalty)")
        assert over_tree(s09, ids, no_layers(200), run=faulty, **options)[0].ids == [1, 4]


def s10(text):
    a, b, end = {(): (.6, .32, .08), (0,): (.4, .15, .45), (1,): (.06, .04, .9), (0, 1): (.1, .1, .8),
                 (1, 0): (.1, .1, .8)}.get(text, (.01, .01, .98))
    return torch.tensor([a, b, end], dtype=F64).log()


def test_s10_beams_differ_from_the_first_step_and_two_ends_leave_two_alive():
    """S10 (facebookresearch/fairseq #4901, OpenNMT/OpenNMT-py #920, NVIDIA/TensorRT-LLM PR #15621)."""
    options = dict(eos_ids=2, max_tokens=6)
    seen, cache = [], no_layers()

    def watched(text):
        seen.append(text)
        return s10(text)

    found = over_tree(watched, cache=cache, beams=2, n_best=3, **options)
    assert brief(found) == [([0, 0, 2], -0.4824), ([1, 2], -0.6224), ([0, 2], -0.6547)]
    assert seen[:5] == [(), (0,), (1,), (0, 0), (0, 1)]
    assert all(h.finish_reason == "stop" for h in found)
    assert brief(over_tree(s10, beams=1, **options)) == [([0, 2], -0.6547)]  # greedy
    too_few = mutant("beams + len(live) * len(ends))", "beams)")
    assert brief(over_tree(s10, beams=2, run=too_few, **options))[0] == ([1, 2], -0.6224)
    everything = []
    for n in range(1, 7):
        for text in itertools.product(range(3), repeat=n):
            if 2 not in text[:-1] and (text[-1] == 2 or n == 6):
                everything.append((sum(s10(text[:i])[t].item() for i, t in enumerate(text)) / n, text))
    assert max(everything)[1] == (0, 0, 2)


@pytest.mark.parametrize("row", [[-math.inf] * 4, [math.nan, 1, 2, 3], [math.inf, 1, 2, 0]])
@pytest.mark.parametrize("warped", [False, True])
@pytest.mark.parametrize("at", [0, 2])
def test_s12_a_spoiled_row_is_an_error_and_publishes_nothing(row, warped, at):
    """S12 (JustVugg/colibri #369; huggingface/transformers PRs #45413, #17937): never a token of such a row."""
    def logits(text):
        spoiled = len(text) == at and text[-1:] in ((), (2,))
        return torch.tensor(row if spoiled else [0.0, 0.1, 0.3, 0.2], dtype=F64)

    def warp_one(logits, outputs):
        return warp(logits, params([{"temperature": 0.7}] * len(outputs), 4))

    cache = no_layers(block_size=1)
    with pytest.raises(ValueError, match=f"output token {at} of beam 0: the logits have NaN, infinity or noth"):
        over_tree(logits, cache=cache, beams=4, max_tokens=5, warp_one=warp_one if warped else None)
    assert cache.is_clean()
    assert len(cache._published) == (0 if at == 0 else 1 + 4)  # the prompt and four first tokens


def test_s12_what_a_ban_hides_is_still_an_error():
    """S12: NaN at an end id that may not come yet is seen all the same."""
    with pytest.raises(ValueError, match="output token 0 of beam 0"):
        over_tree(lambda text: torch.tensor([0.0, math.nan]), beams=2, max_tokens=3, eos_ids=[1], min_tokens=2)


def test_s20_filters_hold_on_this_path_too():
    """S20 (ggml-org/llama.cpp #4091, PR #3841): temperature, then truncation, and the score is of what is left."""
    def warped(request):
        return lambda logits, outputs: warp(logits, params([request] * len(outputs), 3))

    logits = torch.tensor([2, 1.2, 0], dtype=F64)
    for request, ids, p in (({"temperature": 0.5, "top_p": 0.75}, [[0]], [1.0]),
                            ({"temperature": 2, "min_p": 0.2}, [[0], [1], [2]], [0.4906, 0.3289, 0.1805])):
        found = over_tree(lambda text: logits, beams=3, n_best=3, max_tokens=1, warp_one=warped(request))
        assert [h.ids for h in found] == ids
        assert [math.exp(h.total) for h in found] == pytest.approx(p, abs=1e-4)


def test_s24_logprobs_are_the_model_s_own():
    """S24 (vllm-project/vllm #9453): -0.514675 whatever temperature and top-k; the total is of what is searched."""
    logits = torch.tensor([1.5, 0.5, 0, -1])

    def find(request, **more):
        return over_tree(lambda text: logits, beams=2, max_tokens=1,
                         warp_one=lambda x, outputs: warp(x, params([request] * len(outputs), 4)), **more)[0]

    for request, total in (({}, -0.514675), ({"temperature": 0.5}, -0.175515),
                           ({"temperature": 0.5, "top_k": 2}, -0.126928)):
        h = find(request)
        assert h.ids == [0] and h.logprobs == pytest.approx([-0.514675], abs=1e-6)
        assert h.total == pytest.approx(total, abs=1e-6)
    h = find({}, min_tokens=1, eos_ids=[1])  # without token 1 the others have more, but not by the model's own account
    assert h.logprobs == pytest.approx([-0.514675], abs=1e-6)
    assert h.total == pytest.approx(1.5 - math.log(math.exp(1.5) + 1 + math.exp(-1)), abs=1e-6)


# ------------------------------------------------------------------ against all texts

PENALTIES = (-1.5, 0.0, 0.7, 1.0, 2.0)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("ends", [[], [4], [1, 3]])
def test_a_search_that_is_wide_enough_finds_the_true_best(penalty, ends):
    for seed in range(3):
        net, prompt, T = llama(seed), [1, 2, 3, 4, 0, 2, 1][: 3 + seed], 4
        best = every_text(net, prompt, T, set(ends), penalty)[:6]
        found = search(net, prompt, beams=5**(T - 1), max_tokens=T, eos_ids=ends, length_penalty=penalty, n_best=6)
        assert [tuple(h.ids) for h in found] == [ids for _, ids in best]
        assert [h.score for h in found] == pytest.approx([s for s, _ in best], abs=1e-9)
        for h in found:
            assert h.finish_reason == ("stop" if h.ids[-1] in ends else "length")
            assert h.total == pytest.approx(sum(h.logprobs)) and len(h.logprobs) == len(h.ids)


@pytest.mark.parametrize("request_", [{"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.8}, {"repetition_penalty": 1.7},
                                      {"frequency_penalty": 0.9, "presence_penalty": 0.3, "temperature": 1.5},
                                      {"logit_bias": {0: 2.0, 3: -math.inf}}])
def test_the_sampler_s_distribution_is_what_is_searched(request_):
    prompt, T, V = [1, 2, 3, 3], 4, 5

    def warp_one(logits, outputs):
        width, R = max(map(len, outputs)), len(outputs)
        padded = torch.tensor([x + [-1] * (width - len(x)) for x in outputs], dtype=torch.int64).view(R, width)
        return warp(logits, params([request_] * R, V), torch.tensor(prompt).expand(R, -1), padded)

    for seed, least in ((0, 0), (1, 3)):
        net = llama(seed)
        best = every_text(net, prompt, T, {4}, 1.0, warp_one, least)[:3]
        found = search(net, prompt, beams=V**(T - 1), max_tokens=T, eos_ids=[4], n_best=3, warp_one=warp_one,
                       min_tokens=least)
        assert [tuple(h.ids) for h in found] == [ids for _, ids in best]
        assert [h.score for h in found] == pytest.approx([s for s, _ in best], abs=1e-9)
        assert all(len(h.ids) >= least for h in found)


def never_stopping():
    return mutant("    n, length = beams if early_stopping else n_best, len(best.ids)\n",
                  "    return False\n    n, length = 0, 0\n")


@pytest.mark.parametrize("penalty", PENALTIES)
def test_stopping_early_loses_nothing(penalty):
    """The default stops, and finds what a search that never stops finds. The heuristic can miss it."""
    endless, saved, lost = never_stopping(), 0, 0
    for seed in range(6):
        rng = random.Random(seed)
        n = rng.choice([2, 3, 5])
        options = dict(beams=n, max_tokens=rng.choice([4, 9]), eos_ids=[3, 4], n_best=rng.choice([1, n]),
                       length_penalty=penalty, min_tokens=rng.choice([0, 0, 3]))
        net, passes = llama(seed, scale=rng.choice([3.0, 6.0])), []
        answers = []
        for run, more in ((endless, {}), (beam_search, {}), (beam_search, {"early_stopping": "heuristic"}),
                          (beam_search, {"early_stopping": True})):
            cache = cache_for(net)
            answers.append(search(net, [1, 2, seed % 5], cache, run, **options, **more))
            passes.append(len(cache.passes))
        assert brief(answers[0]) == brief(answers[1])
        assert passes[0] >= passes[1]
        if options["n_best"] == n:  # with fewer it may stop before as many as beams are finished
            assert passes[1] >= passes[3] and (penalty <= 0 or passes[1] >= passes[2])
        saved += passes[0] - passes[1]
        lost += answers[2][0].score < answers[1][0].score - 1e-9
    assert saved > 0
    assert penalty > 0 or lost == 0


@pytest.mark.parametrize("penalty", [-2.0, -0.5, 0.0, 0.5, 1.0, 3.0])
def test_attainable_is_a_bound_and_is_reached(penalty):
    rng = random.Random(3)
    for _ in range(300):
        length, total, least = rng.randint(1, 6), -5 * rng.random(), rng.choice([0, 0, 5])
        limit = rng.randint(length + 1, 9)
        ends = [beam_score(total, n, penalty) for n in range(min(limit, max(length + 1, least)), limit + 1)]
        assert attainable(total, length, limit, penalty, least) == max(ends)


def greedy(net, prompt, n, ends):
    ids = list(prompt)
    while len(ids) < len(prompt) + n:
        ids.append(net(torch.tensor([ids]))[0, -1].argmax().item())
        if ids[-1] in ends:
            break
    return ids[len(prompt):]


@pytest.mark.parametrize("early_stopping", [False, True, "heuristic"])
def test_one_beam_is_greedy_decoding(early_stopping):
    lengths = set()
    for seed in range(5):
        net = llama(seed, 12, scale=4.0)
        for penalty, n in itertools.product((-1.0, 0.0, 1.0, 3.0), (1, 7)):
            (h,) = search(net, [seed, 3], beams=1, max_tokens=n, eos_ids=[2, 5, 7], length_penalty=penalty,
                          early_stopping=early_stopping)
            assert h.ids == greedy(net, [seed, 3], n, {2, 5, 7})
            lengths.add(len(h.ids))
    assert len(lengths) > 2


def test_equals_go_to_the_lowest_beam_and_then_to_the_lowest_id():
    found = over_tree(lambda text: torch.zeros(300), beams=3, max_tokens=2, n_best=3)
    assert [h.ids for h in found] == [[0, 0], [0, 1], [0, 2]]
    found = over_tree(lambda text: torch.tensor([0.0, 1.0, 0.0, 1.0]), beams=2, max_tokens=3, n_best=2)
    assert [h.ids for h in found] == [[1, 1, 1], [1, 1, 3]]


def test_fewer_continuations_than_beams():
    """At temperature 0 there is one; with V tokens V at first. Nothing of zero probability is made up."""
    def one_hot(logits, outputs):
        return warp(logits, params([{"temperature": 0}] * len(outputs), 3))

    found = over_tree(lambda text: torch.tensor([0.0, 2.0, 1.0]), beams=4, n_best=4, max_tokens=3, warp_one=one_hot)
    assert [(h.ids, h.total) for h in found] == [([1, 1, 1], 0.0)]
    found = over_tree(lambda text: torch.tensor([0.0, 2.0, 1.0]), beams=50, n_best=50, max_tokens=2,
                      cache=no_layers(200))
    assert len(found) == 9 and [h.ids for h in found[:2]] == [[1, 1], [1, 2]]
    found = over_tree(lambda text: torch.tensor([0.0, -math.inf]), beams=3, eos_ids=[0], max_tokens=9, n_best=3)
    assert [(h.ids, h.finish_reason) for h in found] == [([0], "stop")]  # nobody is left


@pytest.mark.parametrize("ends", [None, 2, [2, 4, 5], {2, 99}])
def test_d05_all_end_ids_end_a_text(ends):
    """D05 (vllm-project/vllm #4180): a bare integer, several, none, and one outside the vocabulary."""
    script = [7, 4, 2, 7, 7]

    def logits(text):
        return torch.nn.functional.one_hot(torch.tensor(script[len(text)]), 8).double() * 9

    known = {2, 4, 5, 99} & {ends} if not isinstance(ends, (list, set)) else set(ends)
    h = over_tree(logits, beams=3, max_tokens=5, eos_ids=ends)[0]
    assert h.ids == script[: next((i + 1 for i, t in enumerate(script) if t in known), 5)]
    assert h.finish_reason == ("stop" if known else "length")
    if known:
        h = over_tree(logits, beams=3, max_tokens=5, eos_ids=ends, min_tokens=4)[0]
        assert len(h.ids) >= 4 and not known & set(h.ids[:3])


# ------------------------------------------------------------------ against transformers

THEIRS = {False: "never", True: True, "heuristic": False}  # our early_stopping: transformers'


def hf_llama(seed, vocab_size=40):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                      num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
                                      bos_token_id=None, eos_token_id=None, pad_token_id=0, tie_word_embeddings=False)
    theirs = transformers.LlamaForCausalLM(config).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in theirs.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 0.5)
        theirs.lm_head.weight.mul_(1.5)
    ours = Llama.from_tensors(Config.from_dict(config.to_dict()), theirs.state_dict(), torch.float32, "cpu")
    return theirs, ours


def theirs_search(net, prompt, beams, max_tokens, ends, penalty, early_stopping, n_best):
    out = net.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                       num_beams=beams, num_return_sequences=n_best, max_new_tokens=max_tokens, do_sample=False,
                       eos_token_id=ends, pad_token_id=0, length_penalty=penalty, early_stopping=early_stopping,
                       output_scores=True, return_dict_in_generate=True)
    found = []
    for row, score in zip(out.sequences[:, len(prompt):].tolist(), out.sequences_scores.tolist()):
        end = next((i + 1 for i, t in enumerate(row) if t in ends), len(row))
        found.append((row[:end], score))
    return found


@pytest.mark.parametrize("early_stopping", [False, True, "heuristic"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
def test_the_same_as_transformers(early_stopping, penalty):
    ended = 0
    for seed in range(5):
        theirs, ours = hf_llama(seed)
        rng = random.Random(seed)
        beams_, T, ends = rng.choice([2, 3, 4]), rng.choice([1, 6, 12]) if seed else 12, rng.sample(range(40), 10)
        prompt = [rng.randrange(1, 40) for _ in range(rng.choice([1, 5, 9]))]
        expected = theirs_search(theirs, prompt, beams_, T, ends, penalty, THEIRS[early_stopping], beams_)
        cache = CheckedCache(2, 1, 8, 64, 4)
        found = search(ours, prompt, cache, beams=beams_, max_tokens=T, eos_ids=ends, length_penalty=penalty,
                       early_stopping=early_stopping, n_best=beams_)
        assert [h.ids for h in found] == [ids for ids, _ in expected], (seed, penalty, early_stopping)
        assert [h.score for h in found] == pytest.approx([s for _, s in expected], abs=1e-4)
        ended += sum(h.finish_reason == "stop" for h in found)
    assert ended > (3 if penalty <= 1 else 0)


def test_where_the_heuristic_stops_in_front_of_a_better_text():
    """transformers' default stops at the first two ends, as the mean so far is worse than theirs; the default here goes
    on, for a long text of near-certain tokens raises its mean."""
    def logits(text):
        if not text:
            p = [.3, .2, .5]
        elif text[0] == 1:
            p = [.001, .998, .001] if len(text) < 7 else [.001, .001, .998]
        else:
            p = [.05, .05, .9]
        return torch.tensor(p, dtype=F64).log()

    options = dict(beams=2, max_tokens=8, eos_ids=[2])
    (hasty,), (patient,) = (over_tree(logits, early_stopping=e, **options) for e in ("heuristic", False))
    assert patient.ids == [1] * 7 + [2] and hasty.ids == [0, 2]
    assert patient.score > hasty.score + 0.3
    assert over_tree(logits, early_stopping=True, **options)[0].ids == hasty.ids


def test_transformers_default_misses_what_ours_finds():
    """The same on a random Llama, through transformers itself: its default, and its "never"."""
    theirs, ours = hf_llama(8)
    ends, prompt, better = list(range(2, 8)), [1, 2, 3], []
    for early_stopping in ("heuristic", False):
        expected = theirs_search(theirs, prompt, 3, 12, ends, 1.0, THEIRS[early_stopping], 1)
        (h,) = search(ours, prompt, CheckedCache(2, 1, 8, 64, 4), beams=3, max_tokens=12, eos_ids=ends,
                      early_stopping=early_stopping)
        assert [(h.ids, pytest.approx(h.score, abs=1e-4))] == expected
        better.append(h.score)
    assert better[1] > better[0] + 0.01


# ------------------------------------------------------------------ blocks


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_forks_share_and_hold_no_more_than_the_formula(size):
    """And the answers do not depend on the block size, nor on the chunks in which the prompt was computed."""
    net = llama(2, 12, scale=2.5)
    for P, T in itertools.product({1, size - 1, size, size + 1} - {0}, {1, 2, size + 1}):
        prompt, n = [(5 * i + 1) % 12 for i in range(P)], most_blocks(P, T, 4, size)
        options = dict(beams=4, max_tokens=T, n_best=4, eos_ids=[7])
        cache = cache_for(net, n, size)
        found = search(net, prompt, cache, chunk=3, **options)
        assert cache.most <= n
        assert brief(found) == brief(search(net, prompt, cache_for(net, 400, 4), **options))
        if n > 1:
            small = cache_for(net, n - 1, size)
            with pytest.raises(ValueError, match=f"can take {n} blocks of {size} tokens.* cache has {n - 1} for it"):
                search(net, prompt, small, **options)
            assert small.passes == [] and small.is_clean()


def test_the_formula_is_sharp():
    """Beams that part at the first token and all live on hold exactly so many blocks."""
    def logits(text):  # four first tokens, each with a way of its own
        row = torch.full((4,), -50.0, dtype=F64)
        if not text:
            return torch.zeros(4, dtype=F64)
        row[text[0]] = 0.0
        return row

    for size, P, T in itertools.product((1, 2, 4), (1, 3, 4, 5), (1, 2, 3, 8)):
        cache = no_layers(most_blocks(P, T, 4, size), size)
        over_tree(logits, [9] * P, cache, beams=4, max_tokens=T)
        assert cache.most == cache.n_blocks, (size, P, T)


def test_sharing_measured():
    """Eight beams behind 40 tokens: a third of the blocks that eight sequences would take."""
    net = llama(5, 12, scale=2.5)
    cache = cache_for(net, block_size=4)
    search(net, [3, 1, 4, 1, 5, 9, 2, 6] * 5, cache, beams=8, max_tokens=17)
    assert cache.entries == 8 * 14 and cache.most <= 10 + 8 * 4
    assert cache.stats.copied > 0


def test_the_prompt_is_computed_once_and_found_again():
    net, prompt = llama(1, 12), [3, 1, 4, 1, 5, 9, 2, 6, 5]
    cache = cache_for(net)
    first = search(net, prompt, cache, beams=3, max_tokens=4, chunk=4)
    assert cache.passes == [4, 4, 1, 3, 3, 3]
    del cache.passes[:]
    again = search(net, prompt, cache, beams=3, max_tokens=4)
    assert cache.passes == [1, 3, 3, 3] and brief(first) == brief(again)
    del cache.passes[:]
    search(net, prompt, cache, beams=3, max_tokens=4, salt="other")
    assert cache.passes[0] == 9
    search(net, prompt + first[0].ids, cache, beams=1, max_tokens=1)
    assert cache.stats.found == 8 + 12


@pytest.mark.parametrize("context", [4, 5, 9])
def test_prompt_and_output_are_at_most_the_context_and_one(context):
    net = llama(1, 12, max_seq_len=context)
    for P in (1, context - 1, context):
        h = search(net, [1] * P, cache_for(net, max_seq_len=context), beams=3)[0]
        assert len(h.ids) == context + 1 - P and h.finish_reason == "length"
    with pytest.raises(ValueError, match=f"{context + 1} tokens, but the context is {context}; shorten"):
        search(net, [1] * (context + 1), cache_for(net, max_seq_len=context), beams=3)


def test_without_max_tokens_a_search_takes_what_the_pool_has_room_for():
    for size, n in itertools.product((1, 4), (1, 2, 3, 5, 8)):
        for beams_, P in itertools.product((1, 2, 3), (1, 3, 4, 5)):
            def run(cache, beams_=beams_, P=P):
                return over_tree(lambda text: torch.arange(3.0), [1] * P, cache, beams=beams_)

            cache = no_layers(n, size)
            if most_blocks(P, 1, beams_, size) > n:
                with pytest.raises(ValueError, match="lower beams or max_tokens"):
                    run(cache)
                continue
            T = len(run(cache)[0].ids)
            assert most_blocks(P, T, beams_, size) <= n < most_blocks(P, T + 1, beams_, size)


def test_others_blocks_are_counted_and_left_alone():
    net, prompt = llama(1, 12), [1, 2, 3, 4, 5]
    cache = cache_for(net, 12)
    cache.add("other", [7] * 9)
    step = cache.extend({"other": [7] * 9})
    net(step.tokens, step.positions, step.attend, step.rows)
    cache.commit(step)
    before = cache.export("other")
    with pytest.raises(ValueError, match="can take 10 blocks of 4 tokens, the prompt's shared, but the KV cache has 9"):
        beam_search(net, cache, prompt, beams=3, max_tokens=9)
    beam_search(net, cache, prompt, beams=3, max_tokens=8)
    cache.check()
    assert list(cache._sequences) == ["other"] and cache.n_free == 9
    assert all(torch.equal(x, before[name]) for name, x in cache.export("other").items())
    cache.add("hit", [*prompt[:4], 9])  # a prefix held by somebody else costs nothing
    beam_search(net, cache, prompt, beams=3, max_tokens=8)


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [RuntimeError, Stop, KeyboardInterrupt])
def test_whatever_happens_everything_is_given_back(error):
    """An exception out of every call to model, cache or warp_one, at every moment."""
    net = llama(3, 12, scale=2.5)
    reached = set()
    for at in range(60):
        calls, cache = itertools.count(), cache_for(net, 40)

        def hurt(function, name, after, calls=calls, at=at):
            def wrapped(*args, **kwargs):
                now = next(calls) == at
                out = function(*args, **kwargs) if after or not now else None
                if now:
                    reached.add(name)
                    raise error(name)
                return out
            return wrapped

        for name in ("add", "extend", "commit", "fork"):
            setattr(cache, name, hurt(getattr(cache, name), name, after=at % 2))
        model = hurt(net, "model", True)
        warp_one = hurt(lambda logits, outputs: logits.softmax(-1), "warp_one", True)
        try:
            beam_search(model, cache, [1, 2, 3, 4, 5, 6], beams=4, max_tokens=4, warp_one=warp_one, chunk=4)
            assert at > 20
            break
        except error:
            assert cache.is_clean()
    assert reached == {"add", "extend", "commit", "fork", "model", "warp_one"}


def test_blocks_taken_by_others_meanwhile():
    net = llama(3, 12)
    cache = cache_for(net, most_blocks(5, 6, 3, 4))

    def model(tokens, positions, attend, rows):
        if len(tokens) == 3 and "thief" not in cache:
            cache.add("thief")
            cache.extend({"thief": [0] * 4 * cache.n_free})
        return net(tokens, positions, attend, rows)

    with pytest.raises(OutOfBlocks, match=r"\d free blocks of 4 tokens, but this step needs \d more"):
        beam_search(model, cache, [1, 2, 3, 4, 5], beams=3, max_tokens=6)
    cache.free("thief")
    assert cache.is_clean()


# ------------------------------------------------------------------ at the door


@pytest.mark.parametrize(("options", "why"), [
    ({"beams": 0}, "beams is 0, but must be a whole number, 1 or more"),
    ({"beams": 2.0}, "beams is 2.0"), ({"beams": True}, "beams is True"),
    ({"max_tokens": -1}, "max_tokens is -1, but must be a whole number, 0 or more"),
    ({"n_best": 0}, "n_best is 0"), ({"chunk": 0}, "chunk is 0"), ({"chunk": None}, "chunk is None"),
    ({"min_tokens": 4}, "min_tokens is 4, but must be a whole number, 0 to 3"),
    ({"length_penalty": math.nan}, "length_penalty is nan, but must be a number from -10 to 10"),
    ({"length_penalty": math.inf}, "length_penalty is inf"), ({"length_penalty": "1"}, "length_penalty is '1'"),
    ({"early_stopping": "never"}, "early_stopping is 'never', but must be False"), ({"early_stopping": 1}, "is 1, but"),
    ({"prompt": []}, "the prompt is empty"), ({"prompt": [1.5]}, "no list of whole numbers"),
])
def test_mistakes_are_told_before_anything_is_computed(options, why):
    cache = no_layers()
    options = {"prompt": [0], "beams": 2, "max_tokens": 3, **options}
    with pytest.raises(ValueError, match=why):
        over_tree(lambda text: torch.zeros(3), cache=cache, **options)
    assert cache.passes == [] and cache.is_clean()


def test_no_tokens_at_all():
    assert over_tree(None, beams=3, max_tokens=0, n_best=2) == [([], 0.0, 0.0, "length", [])]


def test_half_precision_logits_are_added_in_float64():
    """Sums of bfloat16 would be off by 0.1 after a few tokens."""
    logits = torch.randn(40, 7, generator=torch.Generator().manual_seed(1)).bfloat16()
    (h,) = over_tree(lambda text: logits[len(text)], beams=2, max_tokens=40)
    exact = logits.double().log_softmax(-1).amax(-1)
    assert h.total == pytest.approx(exact.sum().item(), abs=1e-5)


# ------------------------------------------------------------------ sabotaged twins


def wide_enough(run):
    """Whether `run` passes what beam_search must pass: exhaustive search, and the K/V of the right parent."""
    for seed in range(3):
        net, prompt, T = llama(seed), [1, 2, 3, 4, 0][: 3 + seed], 4
        best = every_text(net, prompt, T, {4}, 1.0)[:30]
        found = search(net, prompt, beams=125, max_tokens=T, eos_ids=[4], n_best=30, run=run)
        if [tuple(h.ids) for h in found] != [ids for _, ids in best]:
            return False
        if any(abs(h.score - score) > 1e-9 for h, (score, _) in zip(found, best)):
            return False
    return True


@pytest.mark.parametrize(("old", "new"), [
    ("cache.fork(beam.seq, seq)", "cache.fork(next(reversed(live)), seq)"),  # forked from a neighbour
    ("live[seq] = beam._replace(seq=seq)", "live[seq] = beam._replace(seq=seq, ids=grown[0].ids)"),
    ("return l[order], v[order]", "return l[order].flip(0), v[order]"),  # parents mixed up
    ("beam_score(beam.total, len(beam.ids), length_penalty)",
     "beam_score(beam.total, len(prompt) + len(beam.ids), length_penalty)"),
    ("total = before[l].double() + logp[l, v]", "total = 0 * before[l].double() + logp[l, v]"),
])
def test_a_sabotaged_search_is_noticed(old, new):
    assert wide_enough(beam_search)
    assert not wide_enough(mutant(old, new))
