"""sampling.py against a plain float64 reference, transformers, chi-squares, and the cases of public bug reports."""
import math
import random

import pytest
import torch

import sampling
from sampling import ACCEPT, TOKEN, check, draw, logprobs, params, uniforms, warp

# ------------------------------------------------------------------ helpers


def run(logits, prompt=None, output=None, mask=None, dtype=torch.float32, **request):
    """warp for one row given as a list."""
    def row(ids):
        return None if ids is None else torch.tensor([ids])
    logits = torch.tensor([logits], dtype=dtype)
    return warp(logits, params([request], logits.size(1)), row(prompt), row(output), row(mask))[0]


def logs(probs):
    return [math.log(p) if p else -math.inf for p in probs]


def kept(probs):
    return set(probs.nonzero().squeeze(1).tolist())


def softmax(logits):
    return torch.tensor(logits, dtype=torch.float64).softmax(0).float()


def reference(logits, request, prompt=(), output=(), mask=None):
    """The contract in plain Python floats. Returns the probabilities and how close any comparison came to a tie."""
    x = [a if mask is None or mask[i] else -math.inf for i, a in enumerate(logits)]
    for i, b in (request.get("logit_bias") or {}).items():
        x[i] += b
    penalty = request.get("repetition_penalty") or 1.0
    for i in set(prompt) | set(output):
        x[i] = x[i] / penalty if x[i] > 0 else x[i] * penalty
    for i in set(output):
        x[i] -= request.get("presence_penalty") or 0.0
        x[i] -= (request.get("frequency_penalty") or 0.0) * output.count(i)
    t, top, margin = request.get("temperature"), max(x), math.inf
    t = 1.0 if t is None else t
    if t < 1e-37:
        return [float(i == x.index(top)) for i in range(len(x))], margin
    scores = [(a - top) / t for a in x]
    order = sorted(range(len(x)), key=lambda i: (-scores[i], i))
    weight = [math.exp(s) for s in scores]
    k = request.get("top_k") or 0
    if k > 0:
        order = order[:k]
    p = request.get("top_p") or 1.0
    if p < 1:
        total, before, chosen = math.fsum(weight[i] for i in order), 0.0, []
        for i in order:
            margin = min(margin, abs(before / total - p))
            if before / total < p:
                chosen.append(i)
            before += weight[i]
        order = chosen
    m = request.get("min_p") or 0.0
    if m > 0:
        margin = min([margin] + [abs(weight[i] - m) for i in order])
        order = [i for i in order if weight[i] >= m]
    total = math.fsum(weight[i] for i in order)
    keep = set(order)
    return [weight[i] / total if i in keep else 0.0 for i in range(len(x))], margin


def random_request(rng, V):
    def maybe(chance, value):
        return value() if rng.random() < chance else None
    ks = [0, -1, 1, 2, 5, 63, 64, 127, 128, 129, 700, 1024, V - 1, V, V + 3, 10**6] if V > 1 else [0, 1, 2]
    return {
        "temperature": rng.choice([0, 0.3, 0.7, 1.0, 1.0, 1.5, 3.0, None]),
        "top_k": maybe(0.5, lambda: rng.choice(ks)),
        "top_p": maybe(0.5, lambda: rng.choice([1e-4, rng.random() * 0.999 + 1e-6, 0.9, 0.99, 0.99999, 1.0])),
        "min_p": maybe(0.3, lambda: rng.choice([0.0, rng.random() ** 4, 0.05, 1.0])),
        "repetition_penalty": maybe(0.3, lambda: rng.choice([0.5, 1.3])),
        "presence_penalty": maybe(0.3, lambda: rng.choice([-0.6, 0.6])),
        "frequency_penalty": maybe(0.3, lambda: rng.choice([-0.2, 0.3])),
        "logit_bias": maybe(0.3, lambda: {rng.randrange(V): rng.choice([3.0, -100.0]) for _ in range(3)}),
    }


def random_batch(rng, R, V, kind):
    g = torch.Generator().manual_seed(rng.randrange(2**32))
    logits = torch.randn(R, V, generator=g, dtype=torch.float64) * 3
    if kind == "ties":
        logits = logits.round()
    elif kind == "flat":
        logits = logits / 30
    logits = logits.float().double()  # exact in float32, so that both dtypes see the same numbers
    requests = [random_request(rng, V) for _ in range(R)]
    prompt, output = torch.randint(-1, V, (2, R, 9), generator=g)
    mask = torch.rand(R, V, generator=g) < 0.8
    mask[:, rng.randrange(V)] = True
    return logits, requests, prompt, output, mask if rng.random() < 0.3 else None


def chi_square_limit(dof):
    """The value a chi-square variable exceeds with probability 1e-9 (Wilson and Hilferty's approximation)."""
    return dof * (1 - 2 / (9 * dof) + 5.9978 * math.sqrt(2 / (9 * dof))) ** 3


def chi_square(counts, expected):
    assert expected.min() >= 10, "too few draws for the approximation"
    return float(((counts.double() - expected) ** 2 / expected).sum())


# ------------------------------------------------------------------ against the reference


@pytest.mark.parametrize("kind", ["plain", "ties", "flat"])
@pytest.mark.parametrize("V, R, rounds", [(1, 5, 3), (2, 5, 10), (3, 7, 20), (50, 8, 20), (1023, 6, 3), (1024, 6, 3),
                                          (1025, 6, 3), (8192, 6, 1), (50000, 3, 1)])
def test_warp_equals_the_reference_with_different_parameters_in_every_row(V, R, rounds, kind):
    rng = random.Random(f"{V} {kind}")
    compared = 0
    for _ in range(rounds):
        logits, requests, prompt, output, mask = random_batch(rng, R, V, kind)
        got64 = warp(logits, params(requests, V), prompt, output, mask)
        got32 = warp(logits.float(), params(requests, V), prompt, output, mask)
        assert got64.dtype == torch.float64 and got32.dtype == torch.float32
        assert got64.sum(-1).sub(1).abs().max() < 1e-12 and got32.sum(-1).sub(1).abs().max() < 1e-4
        for r in range(R):
            wanted, margin = reference(
                logits[r].tolist(), requests[r], [i for i in prompt[r].tolist() if i >= 0],
                [i for i in output[r].tolist() if i >= 0], None if mask is None else mask[r].tolist())
            wanted = torch.tensor(wanted, dtype=torch.float64)
            if margin > 1e-12:  # else a comparison was decided by rounding alone
                assert torch.allclose(got64[r], wanted, rtol=1e-9, atol=1e-30), requests[r]
            if margin > 2e-6:
                assert torch.allclose(got32[r].double(), wanted, rtol=2e-4, atol=1e-30), requests[r]
                compared += 1
    assert compared >= 0.5 * R * rounds


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_processed_in_float32(dtype):
    logits = (torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    p = params([{"top_p": 0.9}, {"top_k": 40}, {"temperature": 0}, {"min_p": 0.05}], 3000)
    assert torch.equal(warp(logits, p), warp(logits.float(), p))
    assert warp(logits, p).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["plain", "ties", "flat"])
@pytest.mark.parametrize("V", [3, 1025, 8192, 20000])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(V, kind, dtype):
    rng = random.Random(V)
    R = 9
    logits, requests, prompt, output, mask = random_batch(rng, R, V, kind)
    logits = logits.to(dtype)
    together = warp(logits, params(requests, V), prompt, output, mask)
    u = uniforms(1, position=range(R))
    drawn = draw(together, u)
    for rows in [[r] for r in range(R)] + [list(range(R - 1, -1, -1)), [4, 4, 2]]:
        part = warp(logits[rows], params([requests[r] for r in rows], V), prompt[rows], output[rows],
                    None if mask is None else mask[rows])
        assert torch.equal(part, together[rows])
        assert torch.equal(draw(part, u[rows]), drawn[rows])


def test_warp_leaves_its_arguments_alone():
    logits = torch.randn(2, 50)
    before = logits.clone()
    warp(logits, params([{"logit_bias": {3: 1}, "repetition_penalty": 2, "top_k": 4}] * 2, 50), torch.tensor([[1]] * 2))
    assert torch.equal(logits, before)


def test_transformers_agrees_where_the_semantics_are_the_same():
    process = pytest.importorskip("transformers.generation.logits_process")
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits = torch.randn(4, 2000, generator=g) * 2
        history = torch.randint(0, 2000, (4, 100), generator=g)
        x = process.RepetitionPenaltyLogitsProcessor(1.3)(history, logits)
        x = process.TemperatureLogitsWarper(0.8)(history, x)
        x = process.TopKLogitsWarper(300)(history, x)
        x = process.TopPLogitsWarper(0.93)(history, x)
        x = process.MinPLogitsWarper(0.01)(history, x)
        request = {"repetition_penalty": 1.3, "temperature": 0.8, "top_k": 300, "top_p": 0.93, "min_p": 0.01}
        got = warp(logits, params([request] * 4, 2000), prompt=history)
        torch.testing.assert_close(got, x.softmax(-1))


def test_only_the_rows_that_need_it_are_sorted_in_full(monkeypatch):
    seen, head = [], sampling._head
    monkeypatch.setattr(sampling, "_head", lambda x, width: seen.append((len(x), width)) or head(x, width))
    V = 20000
    peaked, flat = torch.arange(V, dtype=torch.float32) / -20, torch.arange(V) / -1e6
    warp(torch.stack([peaked, flat, peaked]), params([{}, {"temperature": 0.7}, {"temperature": 0, "top_k": 9}], V))
    assert seen == []  # nothing to truncate: no sorting of any kind
    nucleus = {"top_p": 0.9}
    warp(torch.stack([peaked, flat, peaked]), params([nucleus, {}, {"top_k": 50, "min_p": 0.1}], V))
    assert seen == [(2, 128)]
    seen.clear()
    warp(torch.stack([peaked, flat, peaked / 4]), params([nucleus] * 3, V))
    assert seen == [(3, 128), (2, 1024), (1, V)]
    seen.clear()
    mask = torch.zeros(1, V, dtype=torch.bool)
    mask[0, :3] = True
    warp(flat[None], params([{"top_k": 50}], V), mask=mask)  # fewer tokens allowed than top_k asks for
    assert seen == [(1, 128)]


# ------------------------------------------------------------------ top-k, top-p, min-p, temperature: the cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_s01_top_p_keeps_the_token_that_crosses_and_never_nothing(dtype):
    """S01 (ggml-org/llama.cpp PR #1953; skyzh/tiny-llm issue #32; vllm-project/vllm #1623): a token stays if and
    only if the mass strictly before it is below p."""
    got = run(logs([0.35, 0.3, 0.2, 0.15]), top_p=0.8, dtype=dtype)
    torch.testing.assert_close(got, torch.tensor([7 / 17, 6 / 17, 4 / 17, 0], dtype=dtype))
    for p in (0.5, 0.0001, 1e-300):
        assert run(logs([0.9, 0.06, 0.03, 0.01]), top_p=p, dtype=dtype).tolist() == [1, 0, 0, 0]
    with pytest.raises(ValueError, match="top_p is 0"):
        check({"top_p": 0}, 4)


@pytest.mark.parametrize("dtype, temperature", [
    (torch.float16, 1e-4), (torch.float16, 1e-5), (torch.float32, 2e-38), (torch.float32, 1e-46),
    (torch.float64, 1e-307), (torch.float64, 5e-324)])
def test_s02_a_tiny_temperature_is_greedy_and_never_nan(dtype, temperature):
    """S02 (vllm-project/vllm issues #3063 and #1623): subtract the maximum before dividing; below the smallest normal
    number there is no dividing at all."""
    assert run([3, 2.5, 12], dtype=dtype, temperature=temperature).tolist() == [0, 0, 1]
    assert run([3, 2.5, 12, -math.inf], dtype=dtype, temperature=temperature, top_p=0.9).tolist() == [0, 0, 1, 0]


def test_s02_a_huge_temperature_is_uniform_over_what_is_possible():
    """S02 (vllm-project/vllm issue #3063), the other end: dividing by more than float32 holds must not make NaN."""
    for t in (1e37, 1e39, 1e300):
        assert run([3, 2.5, 12, -math.inf], temperature=t).tolist() == pytest.approx([1 / 3] * 3 + [0])


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-8, 1e-320])
def test_sm_01_temperature_zero_is_the_argmax(temperature):
    """SM-01 (google-deepmind/gemma #562; ggml-org/llama.cpp #684): division by a zero temperature gives NaN."""
    assert run([1, 2], temperature=temperature).tolist() == [0, 1]


def test_s13_top_p_works_on_what_top_k_left_renormalised():
    """S13 (ml-explore/mlx-lm PR #388; vllm-project/vllm PR #1885): top-p must not see the mass that top-k removed."""
    assert kept(run(logs([0.05, 0.25, 0.3, 0.4]), top_k=2, top_p=0.55)) == {3}
    assert run(logs([0.3, 0.25, 0.25, 0.2]), top_k=1, top_p=0.8).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("top_k", [127, 128, 129, 150, 1023, 1025, 1500])
@pytest.mark.parametrize("top_p", [0.2, 0.6, 0.98])
def test_s13_holds_where_top_k_is_wider_than_the_head_that_is_looked_at_first(top_k, top_p):
    """S13 (ml-explore/mlx-lm PR #388), at the widths where a longer head has to be sorted."""
    logits = [-i / 100 if top_k < 1000 else -i / 1000 for i in range(5000)]
    got = run(logits, top_k=top_k, top_p=top_p, dtype=torch.float64)
    wanted, _ = reference(logits, {"top_k": top_k, "top_p": top_p})
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("top_p, wanted", [(0.75, {1, 2}), (0.7500001, {0, 1, 2}), (1.0, {0, 1, 2, 3})])
def test_s14_top_p_at_exact_equality_and_at_one(top_p, wanted, dtype):
    """S14 (huggingface/transformers issue #18976; BlinkDL/ChatRWKV PR #170): dyadic probabilities, exact in floats."""
    assert kept(run([0.0, math.log(4), math.log(2), 0.0], top_p=top_p, dtype=dtype)) == wanted


def test_s14_top_p_one_touches_nothing_even_where_the_sum_reaches_one_early():
    """S14 (BlinkDL/ChatRWKV PR #170): with p = 1 a float sum that reaches 1 early must not drop the tail."""
    logits = [0.0] + [-25.0] * 500 + [-60.0] * 500
    for extra in ({}, {"top_k": 10**6}, {"top_k": 1000}, {"min_p": 1e-40}):
        probs = run(logits, top_p=1.0, **extra)
        assert len(kept(probs)) == (1000 if extra.get("top_k") == 1000 else 1001)
    assert torch.equal(run(logits, top_p=1.0), torch.tensor(logits).softmax(0))


def test_s16_sums_over_a_large_vocabulary_are_not_in_half_precision():
    """S16 (NVIDIA/Megatron-LM PR #7182; deepseek-ai/DeepSpec issue #31): bfloat16 sums stall in the tail."""
    V = 131072
    logits = torch.zeros(2, V, dtype=torch.bfloat16)
    logits[1, 0] = math.log(V - 1)  # bfloat16 rounds it, so the expected count follows the rounded value
    probs = warp(logits, params([{"top_p": 0.9}] * 2, V))
    assert (probs > 0).sum(-1)[0] == 117965 == math.ceil(0.9 * V)
    assert kept(probs[0]) == set(range(117965))  # all tied: the lowest ids
    weight = math.exp(float(logits[1, 0]))
    assert abs(int((probs[1] > 0).sum()) - (1 + math.ceil(0.9 * (weight + V - 1) - weight))) <= 1
    exact = torch.zeros(1, V)
    exact[0, 0] = math.log(V - 1)
    assert abs(int((warp(exact, params([{"top_p": 0.9}], V)) > 0).sum()) - 104858) <= 1


def test_s19_min_p_compares_probabilities_with_the_largest_wherever_it_is():
    """S19 (state-spaces/mamba PR #1010; semantics of vllm-project/vllm PR #1642)."""
    got = run([-5, -1, -3], min_p=0.1)
    torch.testing.assert_close(got, torch.tensor([0, 0.880797, 0.119203]), atol=1e-6, rtol=0)
    assert kept(run([-5, -1, -3], min_p=0)) == {0, 1, 2}
    assert run([-5, -1, -3], min_p=1).tolist() == [0, 1, 0]


def test_s20_temperature_comes_before_truncation():
    """S20 (ggml-org/llama.cpp issue #4091 and PR #3841; vllm-project/vllm-metal PR #728): one order, on every path."""
    assert kept(run([2, 1.2, 0], temperature=0.5, top_p=0.75)) == {0}
    assert kept(run([2, 1.2, 0], temperature=2, min_p=0.2)) == {0, 1, 2}
    logits = torch.tensor([[2, 1.2, 0]] * 2)
    batch = warp(logits, params([{"temperature": 0.5, "top_p": 0.75}, {"temperature": 2, "min_p": 0.2}], 3))
    assert torch.equal(batch[0], run([2, 1.2, 0], temperature=0.5, top_p=0.75))
    assert torch.equal(batch[1], run([2, 1.2, 0], temperature=2, min_p=0.2))


@pytest.mark.parametrize("top_k, wanted", [(0, 5), (-1, 5), (None, 5), (4, 4), (5, 5), (6, 5), (10**6, 5)])
def test_s21_top_k_off_at_and_above_the_vocabulary(top_k, wanted):
    """S21 (abetlen/llama-cpp-python issue #220; ml-explore/mlx-lm PR #1377; vllm-project/vllm PR #14234): 0 is off, not
    "one candidate", and k above V is V."""
    probs = run([0.1, 0.4, 0.2, 0.4, 0.3], top_k=top_k)
    assert kept(probs) == ({1, 2, 3, 4} if wanted == 4 else {0, 1, 2, 3, 4})


def test_s21_temperature_zero_does_not_sample_and_top_k_one_is_the_same_token():
    """S21 (vllm-project/vllm issue #5404; llama-farm/llamafarm PR #818): T = 0 takes the lowest id among maxima."""
    greedy = run([0.1, 0.4, 0.2, 0.4, 0.3], temperature=0)
    assert greedy.tolist() == [0, 1, 0, 0, 0] == run([0.1, 0.4, 0.2, 0.4, 0.3], top_k=1).tolist()
    assert draw(greedy.expand(100, 5), uniforms(range(100))).tolist() == [1] * 100


@pytest.mark.parametrize("V", [2, 50, 1024, 1025, 50000, 65536])
def test_top_k_keeps_exactly_k_and_of_tied_tokens_the_lowest_ids(V):
    g = torch.Generator().manual_seed(V)
    logits = torch.randint(-2, 3, (3, V), generator=g).float()  # five values: every cut falls into a tie
    logits[1] = 0
    orders = [sorted(range(V), key=lambda i, x=x: (-x[i], i)) for x in logits.tolist()]
    for k in {1, 2, 40, 127, 128, 1000, 1024, 1025, V // 2, V - 1} & set(range(1, V)):
        probs = warp(logits, params([{"top_k": k}] * 3, V))
        for row, order in zip(probs, orders):
            assert kept(row) == set(order[:k])


# ------------------------------------------------------------------ penalties, bias, mask: the cases


def test_s04_repetition_penalty_moves_positive_and_negative_logits_down():
    """S04 (huggingface/transformers issue #2302 and PR #2303): dividing a negative logit rewards repetition."""
    got = run([2, -2, 0, -math.inf], prompt=[0, 1, 2, 3], repetition_penalty=1.5)
    torch.testing.assert_close(got, softmax([4 / 3, -3, 0, -math.inf]))


def test_s05_repetition_sees_prompt_and_output_the_other_two_only_output():
    """S05 (vllm-project/vllm-metal PR #69; osaurus-ai/vmlx-swift issue #295; xLLM-AI/xllm PR #449)."""
    got = run([1.0] * 10, prompt=[5, 5, 7], output=[7, 7, 9], repetition_penalty=2.0, frequency_penalty=0.5,
              presence_penalty=0.25)
    wanted = [1.0] * 10
    wanted[5], wanted[7], wanted[9] = 0.5, -0.75, -0.25
    torch.testing.assert_close(got, softmax(wanted))
    prompt_only = run([1.0] * 10, prompt=[5, 5, 7], frequency_penalty=0.5, presence_penalty=0.25)
    torch.testing.assert_close(prompt_only, softmax([1.0] * 10))


def test_s18_repetition_penalty_counts_a_token_once():
    """S18 (huggingface/transformers.js PR #1062): the penalty is per distinct token, not per occurrence."""
    got = run([2, -2, 1], output=[0, 0, 0, 1], repetition_penalty=2)
    torch.testing.assert_close(got, softmax([1, -4, 1]))


def test_s22_a_logit_bias_outside_the_vocabulary_is_refused_when_the_request_is_added():
    """S22 (vllm-project/vllm PR #16529; sgl-project/sglang issue #7670): refused at the door, and -1 does not wrap."""
    for i in (5, -1, 2**70, "7", 1.5, True, None):
        with pytest.raises(ValueError, match="token id in logit_bias is"):
            check({"logit_bias": {i: 3.0}}, 5)
    logits = torch.tensor([[0.0, 1, 2, 3, 4]] * 2)
    innocent = {"temperature": 0.9}
    both = warp(logits, params([{"logit_bias": {"4": -100}}, innocent], 5))
    torch.testing.assert_close(both[0], softmax([0.0, 1, 2, 3, -96]))
    assert torch.equal(both[1], warp(logits[:1], params([innocent], 5))[0])


def test_bias_comes_before_penalties_and_minus_infinity_bans():
    got = run([1.0, 0, 0], output=[0], repetition_penalty=2.0, logit_bias={0: -3.0})
    torch.testing.assert_close(got, softmax([-4.0, 0, 0]))
    assert run([1.0, 0, 0], logit_bias={0: -math.inf}).tolist() == [0, 0.5, 0.5]


def test_padding_of_prompt_and_output_is_no_token():
    got = warp(torch.zeros(2, 4), params([{"repetition_penalty": 2.0, "presence_penalty": 1.0}] * 2, 4),
               torch.tensor([[-1, -1], [3, -1]]), torch.tensor([[-1], [0]]))
    assert got[0].tolist() == [0.25] * 4
    torch.testing.assert_close(got[1], softmax([-1.0, 0, 0, 0]))


def test_a_token_id_above_the_vocabulary_never_reaches_the_next_row():
    with pytest.raises(ValueError, match=r"token id 4 .* 4 tokens"):
        warp(torch.zeros(2, 4), params([{"presence_penalty": 1.0}] * 2, 4), output=torch.tensor([[4], [-1]]))


def test_the_mask_comes_first():
    assert run([5.0, 1, 1], mask=[False, True, True], top_k=1).tolist() == [0, 1, 0]
    assert run([5.0, 1, 1], mask=[False, True, True], temperature=0).tolist() == [0, 1, 0]
    assert run([5.0, 1, 1], mask=[False, True, True], logit_bias={0: 100}).tolist() == [0, 0.5, 0.5]


# ------------------------------------------------------------------ rows without an answer


@pytest.mark.parametrize("request_", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.9, "min_p": 0.1},
                                      {"repetition_penalty": 2.0, "logit_bias": {0: 1.0}}])
def test_s12_nan_inf_or_nothing_finite_never_becomes_a_token(request_):
    """S12 (JustVugg/colibri issue #369; huggingface/transformers PRs #45413 and #17937; vllm-project/vllm issue
    #53029): arg-max of such a row is 0; here it is NaN, then -1, and the other rows do not notice."""
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[-inf] * 4, [nan, 1, 2, 3], [0, 1, 2, 3], [inf, 1, 2, 0], [0, 1, nan, -inf], [9, 9, 9, 9]])
    history = torch.tensor([[0, 1]] * 6)
    mask = torch.ones(6, 4, dtype=torch.bool)
    mask[1, 0] = mask[3, 0] = False  # a mask over the fault does not make the row trustworthy
    mask[5] = False
    for m in (mask, None):
        probs = warp(logits, params([request_] * 6, 4), history, history, m)
        bad = [0, 1, 3, 4] + ([5] if m is not None else [])
        assert probs[bad].isnan().all()
        ids = draw(probs, uniforms(0, position=range(6))).tolist()
        assert [i for i, t in enumerate(ids) if t == -1] == bad
        alone = warp(logits[2:3], params([request_], 4), history[:1], history[:1])
        assert torch.equal(probs[2:3], alone)
        if request_ == {"temperature": 0}:
            assert ids[2] == 3
        chosen, best, values = logprobs(logits, torch.tensor(ids), top=2)
        assert chosen[bad].isnan().all() and chosen[2].isfinite() and best[2].tolist() == [3, 2]
        assert (best[:2] == -1).all() and values[:2].isnan().all()


# ------------------------------------------------------------------ draw


def test_draw_at_the_ends_and_on_the_edges():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    for u, wanted in [(0.0, 1), (0.2499999, 1), (0.25, 3), (0.7499999, 3), (0.75, 4), (1 - 2**-53, 4), (1.0, 4)]:
        assert draw(probs, torch.tensor([u], dtype=torch.float64)).tolist() == [wanted]


def test_draw_needs_no_normalised_rows_and_refuses_empty_ones():
    probs = torch.tensor([[0.0, 3.0, 1.0], [0, 0, 0], [1e-30, 0, 0], [math.nan, 1, 0], [math.inf, 1, 0]])
    assert draw(probs, torch.full((5,), 0.9)).tolist() == [2, -1, 0, -1, -1]
    assert draw(probs[:0], torch.empty(0)).tolist() == []


def test_s16_draw_adds_in_float64():
    """S16 (NVIDIA/Megatron-LM PR #7182; deepseek-ai/DeepSpec issue #31), the draw: a u just below or above the border
    of two tokens falls on the right one, also deep in a large vocabulary."""
    V = 131072
    row = torch.randn(1, V, generator=torch.Generator().manual_seed(0)).softmax(-1)
    border = row[0].double().cumsum(0)
    below = torch.arange(1000, V - 1, V // 40)
    u = torch.cat([border[below] - 1e-11, border[below] + 1e-11]) / border[-1]
    assert torch.equal(draw(row.expand(len(u), V), u), torch.cat([below, below + 1]))


@pytest.mark.parametrize("V", [1, 2, 1000, 131072])
def test_a_token_of_zero_probability_is_never_drawn(V):
    g = torch.Generator().manual_seed(V)
    R = 64 if V > 1000 else 2000
    probs = torch.rand(R, V, generator=g) * (torch.rand(R, V, generator=g) < 0.3)
    probs[:, V // 2] += 1e-8
    probs[::2, V * 9 // 10:] = 0  # rows that end in nothing
    probs[:, V // 2] += (probs.sum(1) == 0)
    probs = probs / probs.sum(1, keepdim=True)  # rounds to a little less or more than 1
    for u in (torch.zeros(R), torch.full((R,), 1 - 2**-53, dtype=torch.float64), torch.rand(R, generator=g)):
        ids = draw(probs, u)
        assert (probs.gather(1, ids[:, None]) > 0).all()


def test_draw_follows_the_distribution_and_a_wrong_one_is_noticed():
    """Chi-square of draw and uniforms against warp's probabilities, false alarm below 1e-9, and three saboteurs."""
    n, V = 100_000, 20
    request = {"temperature": 0.8, "top_k": 15, "top_p": 0.97}
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(3))
    row = warp(logits, params([request], V))[0]
    seen = sorted(kept(row))
    expected = row[seen].double() * n
    limit = chi_square_limit(len(seen) - 1)

    def statistic(probs, u):
        counts = draw(probs.expand(n, V), u).bincount(minlength=V)
        return chi_square(counts[seen], expected) if counts.sum() == counts[seen].sum() else math.inf

    by_position, by_seed = uniforms(7, position=range(n)), uniforms(range(n), sample=1, position=2)
    assert statistic(row, by_position) < limit
    assert statistic(row, by_seed) < limit
    assert statistic(warp(logits, params([{**request, "temperature": 0.85}], V))[0], by_position) > limit
    assert statistic(warp(logits, params([{"temperature": 0.8}], V))[0], by_position) > limit
    assert statistic(row, (by_position * 64).floor() / 64) > limit  # a generator of six bits


# ------------------------------------------------------------------ uniforms


def test_uniforms_are_the_same_on_every_platform():
    """Golden values, from a second spelling of splitmix64 with the constants in decimal."""
    def mix(z):
        z = (z + 11400714819323198485) % 2**64
        z = (z ^ z // 2**30) * 13787848793156543929 % 2**64
        z = (z ^ z // 2**27) * 10723151780598845931 % 2**64
        return z ^ z // 2**31
    assert sampling.splitmix64(1234567) == 6457827717110365317  # the generator's published test vector
    for words in [(0, 0, 0, 0), (42, 1, 2, 1), (2**64 - 1, 3, 10**6, 0)]:
        h = mix(mix(mix(mix(words[0]) ^ words[1]) ^ words[2]) ^ words[3])
        assert uniforms(*words).item() == (h // 2**11) / 2**53
    assert uniforms(42).item() == 0.7553888514674879


def test_uniforms_take_ints_sequences_and_tensors():
    wanted = [uniforms(5, s, p, ACCEPT).item() for s, p in [(0, 3), (1, 4)]]
    assert uniforms(5, [0, 1], torch.tensor([3, 4]), ACCEPT).tolist() == wanted
    assert uniforms([5, 5], range(2), (3, 4), torch.tensor([1, 1])).tolist() == wanted
    assert uniforms(5).shape == (1,) and uniforms([]).shape == (0,) and uniforms(5).dtype == torch.float64
    assert uniforms(torch.tensor(5)).tolist() == uniforms(5).tolist()
    with pytest.raises(ValueError, match="different lengths"):
        uniforms([1, 2], [1, 2, 3])
    with pytest.raises(TypeError):
        uniforms(1.5)


def test_any_int_is_a_seed():
    seeds = [0, 1, -1, 2**63, 2**64 - 2, 5 - 2**63, 10**30]
    values = uniforms(seeds).tolist()
    assert len(set(values)) == len(seeds) and all(0 <= u < 1 for u in values)
    assert uniforms(-1).item() == uniforms(2**64 - 1).item()  # the lowest 64 bits count


def _uniformity(values):
    """Chi-squares of the leading byte, the next byte, and of neighbours in an 8 x 8 grid, each over its limit."""
    byte = (values * 256).long()
    next_byte = (values * 65536).long() % 256
    cell = (values * 8).long()
    results = []
    next_cell, after_next = cell[:-1] * 8 + cell[1:], cell[:-2] * 8 + cell[2:]
    for labels, cells in [(byte, 256), (next_byte, 256), (next_cell, 64), (after_next, 64)]:
        expected = torch.full((cells,), len(labels) / cells, dtype=torch.float64)
        results.append(chi_square(labels.bincount(minlength=cells), expected) / chi_square_limit(cells - 1))
    return max(results)


@pytest.mark.parametrize("counter", ["seed", "sample", "position", "stream"])
@pytest.mark.parametrize("stride", [1, 2**16, 2**40])
def test_adjacent_counters_give_independent_uniforms(counter, stride):
    n = 20_000
    values = uniforms(**{"seed": 9, counter: [i * stride for i in range(n)]})
    assert _uniformity(values) < 1
    other = uniforms(**{"seed": 9, counter: [i * stride + (stride > 1) for i in range(n)],
                        **({"stream": ACCEPT} if counter != "stream" else {"position": 1})})
    pairs = torch.stack([values, other], 1).flatten()  # neighbours are now the same counter in two streams
    assert _uniformity(pairs) < 1


def test_a_weak_generator_is_noticed():
    n = 20_000
    weyl = torch.tensor([(i * 0x9E3779B97F4A7C15 % 2**64) / 2**64 for i in range(n)], dtype=torch.float64)
    assert _uniformity(weyl) > 1  # equidistributed, but neighbours are locked to each other
    assert _uniformity(torch.stack([uniforms(1, position=range(n), stream=TOKEN)] * 2, 1).flatten()) > 1


def test_s07_a_seeded_request_does_not_depend_on_its_neighbours():
    """S07 (vllm-project/vllm issue #51226 and PR #1637; tenstorrent/tt-metal issue #53802; Blaizzy/mlx-vlm issue
    #1818): equal seeds give equal tokens in any company, and different seeds give different ones."""
    V, steps = 60, 16
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(0))  # a model: next-token logits by last token

    def generate(seeds):
        output = [[] for _ in seeds]
        for position in range(steps):
            logits = torch.stack([table[ids[-1] if ids else 0] for ids in output])
            probs = warp(logits, params([{"temperature": 0.8}] * len(seeds), V))
            for ids, token in zip(output, draw(probs, uniforms(seeds, 0, [position] * len(seeds))).tolist()):
                ids.append(token)
        return output
    alone = generate([42])[0]
    assert generate([42, 1001])[0] == alone
    assert generate([1001, 42])[1] == alone
    assert generate([42, 42]) == [alone, alone]
    assert generate([1001])[0] != generate([1002])[0]
    assert len(set(alone)) > 1


# ------------------------------------------------------------------ logprobs


def test_s24_logprobs_are_raw():
    """S24 (vllm-project/vllm issue #9453): the model's own, whatever temperature and truncation do to the choice."""
    logits = torch.tensor([[1.5, 0.5, 0, -1]])
    chosen, best, values = logprobs(logits, torch.tensor([0]), top=3)
    assert chosen.tolist() == pytest.approx([-0.514675], abs=1e-6)
    assert best.tolist() == [[0, 1, 2]]
    assert values[0].tolist() == pytest.approx([-0.514675, -1.514675, -2.014675], abs=1e-6)
    assert logprobs(logits, torch.tensor([3]), top=1)[0].tolist() == pytest.approx([-3.014675], abs=1e-6)


@pytest.mark.parametrize("V", [1, 5, 130, 1025, 40000])
def test_top_logprobs_are_the_best_with_ties_to_the_lowest_id(V):
    g = torch.Generator().manual_seed(V)
    logits = torch.stack([torch.randn(V, generator=g), torch.randint(0, 3, (V,), generator=g), torch.zeros(V)])
    logits = logits.bfloat16()
    exact = logits.double().log_softmax(-1)
    ids = torch.tensor([0, V // 2, V - 1])
    for top in {0, 1, 5, 20, 128, V} & set(range(V + 1)):
        chosen, best, values = logprobs(logits, ids, top)
        assert chosen.dtype == values.dtype == torch.float32
        torch.testing.assert_close(chosen.double(), exact.gather(1, ids[:, None]).squeeze(1), atol=2e-5, rtol=0)
        for r, row in enumerate(logits.tolist()):
            assert best[r].tolist() == sorted(range(V), key=lambda i, row=row: (-row[i], i))[:top]
        torch.testing.assert_close(values.double(), exact.gather(1, best), atol=2e-5, rtol=0)
    assert logprobs(logits.double(), ids, 1)[0].dtype == torch.float64
    with pytest.raises(ValueError, match=f"vocabulary's {V}"):
        logprobs(logits, ids, V + 1)


# ------------------------------------------------------------------ errors at the door


@pytest.mark.parametrize("request_", [
    {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": "hot"},
    {"temperature": True}, {"temperature": [1]}, {"temperature": 10**400}, {"top_k": -2}, {"top_k": 1.5},
    {"top_k": math.inf}, {"top_k": math.nan}, {"top_k": True}, {"top_k": "5"}, {"top_p": 0}, {"top_p": -0.1},
    {"top_p": 1.0001}, {"top_p": math.nan}, {"min_p": -0.1}, {"min_p": 1.1}, {"min_p": math.nan},
    {"repetition_penalty": 0}, {"repetition_penalty": -1}, {"repetition_penalty": math.inf},
    {"repetition_penalty": math.nan}, {"presence_penalty": math.nan}, {"presence_penalty": math.inf},
    {"frequency_penalty": math.nan}, {"frequency_penalty": -math.inf}, {"logit_bias": {0: math.nan}},
    {"logit_bias": {0: math.inf}}, {"logit_bias": {0: "x"}}, {"logit_bias": {0: None}}, {"logit_bias": [1, 2]}])
def test_an_illegal_value_is_refused_by_name_and_number(request_):
    (name, value), = request_.items()
    with pytest.raises(ValueError, match=f"{name}.* is .*; it must") as e:
        check(request_, 100)
    assert "\n" not in str(e.value) and len(str(e.value)) < 200
    shown = next(iter(value.values())) if isinstance(value, dict) else value
    assert repr(shown)[:20] in str(e.value)
    with pytest.raises(ValueError, match=name):
        params([{}, request_], 100)


def test_none_is_off_and_unknown_names_are_refused():
    names = [*sampling.RULES, "logit_bias"]
    assert check(dict.fromkeys(names), 7) == check({}, 7) == {
        "temperature": 1, "top_k": 7, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0,
        "frequency_penalty": 0, "logit_bias": {}}
    with pytest.raises(ValueError, match=r"unknown sampling parameter 'temprature'; known are temperature"):
        check({"temprature": 1}, 7)


def test_shapes_that_disagree_are_refused():
    p = params([{}, {}], 5)
    for arguments in [(torch.zeros(5), p), (torch.zeros(3, 5), p), (torch.zeros(2, 5, dtype=torch.int64), p),
                      (torch.zeros(2, 5), p, torch.zeros(3, 1, dtype=torch.int64)),
                      (torch.zeros(2, 5), p, None, torch.zeros(2, dtype=torch.int64)),
                      (torch.zeros(2, 5), p, None, None, torch.zeros(2, 5)),
                      (torch.zeros(2, 5), p, None, None, torch.ones(2, 4, dtype=torch.bool))]:
        with pytest.raises(ValueError, match=r"shape|rows|mask"):
            warp(*arguments)


def test_no_rows_at_all():
    probs = warp(torch.zeros(0, 5), params([], 5))
    assert probs.shape == (0, 5) and draw(probs, uniforms([])).shape == (0,)
    chosen, best, values = logprobs(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), 2)
    assert (chosen.shape, best.shape, values.shape) == ((0,), (0, 2), (0, 2))


def test_odd_memory_layouts():
    x = torch.randn(1, 40)
    p = params([{"top_k": 3, "repetition_penalty": 1.2}, {"top_p": 0.5}, {"temperature": 0}], 40)
    history = torch.tensor([[1, 2]]).expand(3, 2)
    wanted = warp(x.repeat(3, 1), p, history.contiguous())
    assert torch.equal(warp(x.expand(3, 40), p, history), wanted)
    assert torch.equal(warp(x.repeat(3, 1).t().contiguous().t(), p, history), wanted)
    u = uniforms(3, position=range(3))
    assert torch.equal(draw(wanted.t().contiguous().t(), u), draw(wanted, u))


def test_demo_runs(capsys):
    sampling.demo()
    assert "repetition_penalty 1.5" in capsys.readouterr().out
