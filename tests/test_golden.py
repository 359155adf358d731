"""The default model says what transformers makes it say: golden ids, in float32, greedy, on the dequantized file.

Measured with transformers 5 on SmolLM2-135M-Instruct.Q4_1.gguf. The prompt is "Why is the sky blue?" in the chat
template with its default system message; the answer begins "The answer to this question lies in the intricate dance of
light and color. The sky appears blue because of a phenomenon known as Rayleigh scattering."
"""
import pytest
import torch

import generate
import speculative
from batching import Request, Stats
from gguf import GGUF
from kvcache import PagedKVCache
from llm import _drafter
from model import Config, Llama

PROMPT = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198,
    1, 4093, 198, 4898, 314, 260, 6376, 4461, 47, 2, 198, 1, 520, 9531, 198,
]
ANSWER = [
    504, 2988, 288, 451, 1962, 5721, 281, 260, 7564, 7180, 282, 1420, 284, 2380, 30, 378, 6376, 4541, 4461, 975, 282,
    253, 7613, 1343, 347, 13739, 43464, 24484, 30, 669, 4149, 645, 1420, 13242, 6756, 282, 1512, 28, 527, 15802, 260,
    9895, 20518, 282, 1420, 28, 2755, 260, 4461, 1420, 28, 281, 253, 970, 338, 4461, 4541, 288, 325, 260,
]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(default_gguf) -> Llama:
    with GGUF(default_gguf) as file:
        return Llama.from_tensors(Config.from_dict(file.config), file)


def test_the_default_model_continues_greedily_with_the_golden_ids(model):
    """Prefill, then one token a step, through the paged cache. Two sequences share the steps: the prompt of one is
    computed whole, that of the other in three chunks beside the first one's decoding."""
    c = model.config
    cache = PagedKVCache(c.n_layer, c.n_kv_head, c.head_dim, n_blocks=12, block_size=16, max_seq_len=c.max_seq_len)
    chunks = {"whole": [PROMPT], "chunked": [PROMPT[:7], PROMPT[7:23], PROMPT[23:]]}
    answers = {seq: [] for seq in chunks}
    for seq in chunks:
        cache.add(seq)
    while plan := {s: chunks[s].pop(0) if chunks[s] else answers[s][-1:]
                   for s in chunks if chunks[s] or len(answers[s]) < len(ANSWER)}:
        step = cache.extend(plan)
        with torch.inference_mode():
            logits = model(step.tokens, step.positions, step.attend, step.last())
        cache.commit(step)
        for seq, row in zip(step.seqs, logits):
            if not chunks[seq]:
                answers[seq].append(int(row.argmax()))
    assert answers["whole"] == ANSWER
    assert answers["chunked"] == ANSWER
    assert cache.tokens("whole") == cache.tokens("chunked") == PROMPT + ANSWER[:-1]


def test_one_dense_pass_predicts_every_golden_id(model):
    ids = torch.tensor(PROMPT + ANSWER)
    with torch.inference_mode():
        logits = model(ids[None])[0, len(PROMPT) - 1: -1]
    assert logits.argmax(-1).tolist() == ANSWER
    top = logits.topk(2).values
    assert (top[:, 0] - top[:, 1]).min() > 1e-3  # no tie that rounding could decide


def test_the_whole_way_from_a_question_to_the_golden_ids(default_gguf):
    """Chat template, tokenizer, chunked prefill, cache, sampler: what `python generate.py` does, in float32."""
    llm = generate.load(default_gguf, dtype="float32")
    answer, = llm.generate("Why is the sky blue?", temperature=0, max_tokens=60)
    assert answer.prompt_ids == PROMPT and answer.ids == ANSWER and answer.finish_reason == "length"
    assert answer.text.startswith("The answer to this question lies in the intricate dance of light and color. The sky")


@pytest.mark.slow
def test_greedy_tokens_are_the_same_with_every_drafter(default_gguf):
    """200 prompts, 16 at a time, with n-grams and with a draft model: token for token what plain decoding says, but
    where the two likeliest tokens are closer than rounding."""
    from pydoc_data.topics import topics

    llm = generate.load(default_gguf, dtype="float32", context=256)
    text = llm.tokenizer.encode("\n".join(topics[key] for key in sorted(topics))[:20000])
    prompts = [text[17 * i: 17 * i + 4 + i % 13] for i in range(200)]

    def say(drafter, drafts) -> tuple[list[list[int]], Stats]:
        how = {} if drafter is None else {"verify": speculative.verify, "drafts": drafts}
        batcher = llm.new_batcher(drafter=drafter, **how)
        requests = [Request(p, max_tokens=8, sampling={"temperature": 0}, ignore_eos=True) for p in prompts]
        for _ in batcher.run(requests):
            pass
        llm.cache.check()
        return [r.samples[0].ids for r in requests], batcher.stats

    wanted, _ = say(None, 0)
    small = _drafter(llm, default_gguf, {"context": 256, "max_batch": 16})
    for drafter in (speculative.NgramDrafter(longest=3, shortest=2), small):
        found, stats = say(drafter, 3)
        assert stats.accepted > 5
        for prompt, a, b in zip(prompts, wanted, found):
            j = next((j for j, (x, y) in enumerate(zip(a, b)) if x != y), None)
            if j is not None:
                with torch.inference_mode():
                    best = llm.model(torch.tensor([prompt + a[:j]]))[0, -1].topk(2).values
                assert best[0] - best[1] < 1e-3, f"{prompt} differs at {j}, and it is no tie"
    assert stats.accepted > 0.8 * stats.drafted, "the draft model is the same one, its weights packed"
