"""Deterministic answers: the bits of a request's logits, in company and alone.

- random traffic: every row of logits of every request must have the bits that it has alone on an empty cache, whoever
  comes before, beside and after it, wherever its blocks lie, whatever is cached, preempted, aborted, or fails
- sabotaged twins: the batcher or the attention without one of its rules must be caught by the same test
- the parts by themselves: attention alone, what the cache shares, which steps are made, what is refused
- the default model, long prompts and short ones (slow)
"""
import json
import random
from collections import Counter, OrderedDict
from functools import partial

import pytest
import torch
from tiny import tiny_folder

import generate
import llm as composition
import packed
import sampling
from attention import paged_attention
from batching import Batcher, Request
from kvcache import PagedKVCache, reference_attention
from model import Config, Llama

pytestmark = pytest.mark.usefixtures("one_thread")

V, CONTEXT, MOST = 96, 400, 8
CHUNKS = (64, 100)  # of 100 tokens blocks of 16 do not divide; both are long enough for torch to take other ways
ALONE = partial(paged_attention, alone=True)

# ------------------------------------------------------------------ models, and what is said of a request


def llama(kind: str) -> Llama:
    heads = {"n_head": 16, "n_kv_head": 4, "head_dim": 8, "qk_norm": True} if kind == "qk_norm" else {
        "n_head": 4, "n_kv_head": 2, "head_dim": 16}
    config = Config(n_layer=2, hidden_size=64, intermediate_size=128, vocab_size=V, max_seq_len=CONTEXT, **heads)
    generator = torch.Generator().manual_seed(0)
    weights: dict = {name: torch.randn(p.shape, generator=generator) * (0.15 if p.dim() > 1 else 0.5) + (p.dim() == 1)
                     for name, p in Llama(config).named_parameters()}
    if kind == "packed":
        weights = {name: packed.repack(w, 4)[0] if name.endswith("_proj.weight") else w for name, w in weights.items()}
    return Llama.from_tensors(config, weights, torch.bfloat16, "cpu", packed).fuse_()


def settled(kind: str) -> Llama:
    """Such a model, tried out as `load` does; a machine whose kernels it would refuse cannot be tested."""
    if kind == "packed" and not packed._int4_block():
        pytest.skip("no 4-bit kernel on this machine")
    net = llama(kind)
    try:
        composition._alike(net, MOST)
    except ValueError as refused:
        pytest.skip(str(refused))
    return net


@pytest.fixture(scope="module", params=["packed", "bfloat16", "qk_norm"])
def model(request) -> Llama:
    return settled(request.param)


def cache_for(net: Llama, n_blocks: int, block_size: int, rng: random.Random, attention=ALONE, kv=torch.bfloat16):
    c = net.config
    cache = PagedKVCache(c.n_layer, c.n_kv_head, c.head_dim, n_blocks, block_size, max_seq_len=CONTEXT, dtype=kv,
                         attention=attention)
    free = list(range(n_blocks))
    rng.shuffle(free)  # as a pool is after a while
    cache._free = OrderedDict.fromkeys(free)
    return cache


class Tape:
    """forward(step) that keeps the bits of each row: of a request's id, a sample and a position."""

    def __init__(self, net: Llama, trouble=lambda step: None):
        self.net, self.trouble, self.bits, self.steps = net, trouble, {}, []

    def __call__(self, step) -> torch.Tensor:
        logits = self.net(step.tokens, step.positions, step.attend, step.rows)
        starts, lengths = step.q_start.tolist(), step.kv_len.tolist()
        self.steps.append([(s.request.id, len(s.request.prompt_ids), n, end)
                           for s, n, end in zip(step.seqs, step.n_new, lengths)])
        for row, t in zip(logits, step.rows.tolist()):
            b = max(i for i, start in enumerate(starts[:-1]) if start <= t)
            s, at = step.seqs[b], int(step.positions[t])
            index = s.index if at >= len(s.request.prompt_ids) else 0  # whoever reads the prompt
            key, bits = (s.request.id, index, at), row.view(torch.int16).numpy().tobytes()
            assert self.bits.setdefault(key, bits) == bits, f"{key}: other bits when it was computed again"
        self.trouble(step)
        return logits


def bits_alone(net: Llama, r: dict, chunk: int, kv) -> tuple[dict, list]:
    """The bits of a request on an empty cache, and what its samples say."""
    tape, request = Tape(net), Request(**r)
    b = Batcher(None, cache_for(net, 128, 16, random.Random(0), kv=kv), sampling, V, forward=tape, max_batch=MOST,
                deterministic=chunk)
    list(b.run([request]))
    return tape.bits, [(s.ids, s.logprobs) for s in request.samples]


def some_requests(rng: random.Random, net: Llama, chunk: int, kv, n: int, most: int, answer: tuple) -> list[tuple]:
    """(request, what it is alone) of requests that begin alike, for some way that is no multiple of anything, or go on
    with what others were answered."""
    stem, found = [rng.randrange(V) for _ in range(most)], []
    for i in range(n):
        length = rng.choice([1, 2, chunk - 1, chunk, chunk + 1, 2 * chunk, rng.randint(1, 50), rng.randint(1, most)])
        begin = stem[: rng.choice([0, length, rng.randint(0, length)])]
        if found and rng.random() < 0.4:
            r, (_, said) = rng.choice(found)
            begin = r["prompt_ids"] + said[0][0]
        prompt = (begin + [rng.randrange(V) for _ in range(max(1, length - len(begin)))])[: most - 60]
        r = dict(prompt_ids=prompt, id=i, max_tokens=rng.randint(*answer), seed=i,
                 n=rng.choice([1, 1, 1, 2]), sampling={"temperature": rng.choice([0, 1.0])}, logprobs=2,
                 priority=rng.choice([0, 0, 1]))
        found.append((r, bits_alone(net, r, chunk, kv)))
    return found


def in_company(net: Llama, seed: int, twin=Batcher, attention=ALONE, rules=True) -> Counter:
    """Random traffic -> what happened. AssertionError if a bit of any request is not what it is alone. rules: or if a
    step is made otherwise than it should be."""
    rng = random.Random(seed)
    chunk, block_size = rng.choice(CHUNKS), rng.choice([4, 16])
    kv = rng.choice([torch.bfloat16, torch.bfloat16, "int8"])
    tight = rng.random() < 0.5  # in the pool, for long answers
    most = rng.choice([110, 180, 280])  # tokens of one, of which 60 may be its answer
    n_blocks = -(-most // block_size) * (1 if tight else rng.choice([1, 2, 4])) + rng.choice([0, 1, 5])
    asked = some_requests(rng, net, chunk, kv, 10, most, (50, 60) if tight else (1, 10))

    def trouble(step):
        if len(step.seqs) > 1 and rng.random() < 0.05:
            raise rng.choice([RuntimeError, KeyboardInterrupt])("something else is wrong")

    tape = Tape(net, trouble)
    b = twin(None, cache_for(net, n_blocks, block_size, rng, attention, kv), sampling, V, forward=tape,
             max_batch=rng.choice([2, MOST, MOST]), deterministic=chunk)
    b.swap = rng.random() < 0.5  # else computed again, which is to make no difference either
    happened, requests, aborted = Counter(), [], set()

    def step():
        try:
            b.step()
        except KeyboardInterrupt:
            happened["interrupted"] += 1
        b.cache.check()

    for r, _ in asked:
        requests.append(Request(**r))
        b.add(requests[-1])
        for _ in range(rng.choice([0, 0, 1, 3, 15])):
            step()
        if b.live and rng.random() < 0.1:
            aborted.add(gone := rng.choice(list(b.live)))
            b.abort(gone)
    while b.live:
        step()
    for request, (r, (bits, said)) in zip(requests, asked):
        mine = {key: x for key, x in tape.bits.items() if key[0] == request.id}
        if request.id not in aborted:
            assert [(s.ids, s.logprobs) for s in request.samples] == said and all(not s.error for s in request.samples)
            assert {key for key in bits if key[2] >= len(request.prompt_ids) - 1} <= set(mine)
        assert all(bits[key] == x for key, x in mine.items()), f"{request.id}: other bits than alone"
        happened["forked"] += r["n"] > 1
    happened.update(preempted=b.stats.preempted, cached=b.stats.cached, failed=b.stats.failed, aborted=len(aborted),
                    evicted=b.cache.stats.evicted, copied=b.cache.stats.copied, swapped=b.swap * b.stats.preempted)
    if rules:
        check_steps(tape.steps, chunk)
    return happened


def check_steps(steps: list, chunk: int) -> None:
    """Each is a chunk of one prompt, cut at multiples, or one id of each who is past his prompt."""
    for seqs in steps:
        for _, prompt, n, end in seqs:
            reads = end <= prompt
            assert not reads or (len(seqs) == 1 and (end - n) % chunk == 0 and end in (prompt, end - n + chunk))
            assert reads or n == 1


# ------------------------------------------------------------------ random traffic


def test_bits_do_not_depend_on_the_company(model):
    happened = Counter()
    for seed in range(12):
        happened += in_company(model, seed)
    assert happened["preempted"] > happened["swapped"]
    for what in ("swapped", "cached", "failed", "interrupted", "forked", "evicted", "copied", "aborted"):
        assert happened[what], f"{what} is not tried: {happened}"


class FindsAnyLength(Batcher):
    """Goes on in the middle of a chunk that others have begun."""

    def _begin(self, s):
        return self.cache.add(s, s.context, *self._sharing(s.request))


class SharesAll(Batcher):
    """Others find what was computed in shorter chunks, and one by one."""

    def _sharing(self, r):
        return (r.salt,)


class CutsAsItComes(Batcher):
    """What is computed again is computed at once."""

    def _piece(self, s, most):
        return s.context[self.cache.length(s):][:most]


class ReadsBeside(Batcher):
    """Prompts beside those who answer, as without `deterministic`."""

    def _schedule(self):
        self.deterministic = None
        return super()._schedule()


@pytest.mark.parametrize("options", [dict(twin=FindsAnyLength), dict(twin=SharesAll), dict(twin=CutsAsItComes),
                                     dict(twin=ReadsBeside), dict(attention=paged_attention)],
                         ids=["finds any length", "shares all", "cuts as it comes", "reads beside", "attention"])
def test_a_batcher_that_lacks_a_rule_is_caught(options):
    """By the bits alone. In bfloat16, where few things make a difference."""
    net = settled("qk_norm")
    with pytest.raises(AssertionError, match=r"other bits|assert"):
        for seed in range(12):
            in_company(net, seed, rules=False, **options)


def test_they_take_turns():
    """Who answers waits for one chunk at a time, and a prompt for one token of those who answer."""
    net = llama("bfloat16")
    tape = Tape(net)
    b = Batcher(None, cache_for(net, 128, 16, random.Random(0)), sampling, V, forward=tape, deterministic=64)
    b.add(Request([1] * 70, id="A", max_tokens=20))
    for _ in range(4):
        b.step()
    for name in "BC":
        b.add(Request([ord(name)] * 150, id=name, max_tokens=3))
    while b.live:
        b.step()
    steps = ["".join(name if end > prompt else name.lower() for name, prompt, _, end in seqs) for seqs in tape.steps]
    assert " ".join(steps).startswith("a a A A b A b A b AB c AB c A c AC AC A"), steps


# ------------------------------------------------------------------ the parts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("window", [None, 40])
def test_attention_alone(dtype, window, monkeypatch):
    """The bits of a sequence's rows, whoever is in the step and wherever the blocks lie; and they are right."""
    monkeypatch.setattr("attention.MANY_KEYS", 1000)  # so that 1,100 in one run, and scattered ones, go different ways
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    H, G, D, size, n_blocks = 6, 3, 16, 16, 400
    q_dtype = torch.float32 if dtype == torch.int8 else dtype

    def pools():
        return torch.empty(2, G, n_blocks, size, D, dtype=dtype).movedim(1, 3), torch.rand(2, n_blocks, size, G)

    def attend(names, order, attention):  # of sequences by number; order: where their blocks lie
        (caches, scales), table, free = pools(), [], list(order)
        for name in names:
            S, _, (k, v), s, _ = sequences[name]
            table.append([free.pop(0) for _ in range(-(-S // size))])
            for i, block in enumerate(table[-1]):
                at = slice(i * size, min(S, (i + 1) * size))
                for j, x in enumerate((k, v)):
                    caches[j, block, : len(x[at])] = x[at]
                scales[:, block, : len(k[at])] = s[:, at]
        width = max(map(len, table))
        counts, q = [sequences[x][1] for x in names], torch.cat([sequences[x][4] for x in names])
        start = torch.tensor([0, *counts]).cumsum(0).int()
        lengths = torch.tensor([sequences[x][0] for x in names], dtype=torch.int32)
        codes = dict(k_scale=scales[0], v_scale=scales[1]) if dtype == torch.int8 else {}
        table = torch.tensor([t + [0] * (width - len(t)) for t in table], dtype=torch.int32)
        out = attention(q, *caches, table, lengths, start, 0.25, max_q=max(counts), window=window, **codes)
        return dict(zip(names, out.split(counts)))

    sequences = []
    for i in range(16):
        S = rng.choice([1, 15, 16, 17, 200, 500, 1100]) if i else 1100
        n = rng.choice([1, 1, 2, S]) if i else 1
        kv = torch.randn(2, S, G, D, generator=generator) * (30 if dtype == torch.int8 else 1)
        q = torch.randn(min(n, S), H, D, generator=generator)
        sequences.append((S, min(n, S), kv.to(dtype), torch.rand(2, S, G, generator=generator) / 30, q.to(q_dtype)))
    alone, usually = ({i: attend([i], range(n_blocks), f)[i] for i in range(16)} for f in (ALONE, paged_attention))
    differ = 0
    for _ in range(8):
        names, order = rng.sample(range(16), rng.randint(1, 8)), rng.sample(range(n_blocks), n_blocks)
        found, usual = attend(names, order, ALONE), attend(names, order, paged_attention)
        right = attend(names, order, reference_attention)
        for name in names:
            assert torch.equal(found[name], alone[name]), f"{name} among {names}"
            assert torch.allclose(found[name], right[name], atol=0.04 if dtype == torch.bfloat16 else 1e-4)
            differ += not torch.equal(usual[name], usually[name])
    assert differ or dtype != torch.bfloat16 or window, "they have the same bits anyway: this test has no power"


def test_what_a_cache_shares():
    cache = PagedKVCache(1, 1, 8, n_blocks=40, block_size=4)

    def life(name, ids, shared, salt=""):
        found = cache.add(name, ids, salt, shared)
        step = cache.extend({name: ids[found:]})
        step.attend(0, *(torch.randn(len(ids) - found, 1, 8) for _ in range(3)))
        cache.commit(step)
        cache.check()
        return found

    ids = list(range(30))
    assert life("A", ids, 13) == 0
    assert cache.add("B", ids) == 12, "of the first 13 tokens three whole blocks"
    assert life("C", ids, 0) == 0 and life("D", ids, 8) == 8
    cache.fork("A", "E")
    cache.commit(cache.extend({"E": [1, 2, 3, 4, 5]}))
    cache.check()
    assert cache.add("F", [*ids, 1, 2, 3, 4, 5]) == 12, "a fork shares as much as its parent"
    cache.free("B")
    assert life("B", ids, 100) == 12 and cache.add("G", ids) == 28
    data = cache.export("A")
    cache.free("A")
    cache.import_("A", data, "", 13)
    cache.check()
    assert cache._sequences["A"].blocks[:3] == cache._sequences["B"].blocks[:3]
    assert not set(cache._sequences["A"].blocks[3:]) & set(cache._sequences["B"].blocks), "its own, not others'"
    assert all(torch.equal(a, b) for a, b in zip(cache.export("A").values(), data.values()))


# ------------------------------------------------------------------ composed


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model", scale=1.5, hidden_size=64, intermediate_size=128,
                       max_position_embeddings=400)


def load(folder: str, **options):
    try:
        return generate.load(folder, device="cpu", deterministic=True, **options)
    except ValueError as refused:  # which is right where it is so
        pytest.skip(str(refused))


def test_from_python(folder):
    """The same log-probabilities, to the bit; prompts of more than a chunk, which others have begun."""
    begin = "all begin alike, and go on in ways of their own. " * 3
    prompts = [begin + "one", "two", begin + begin[:100], begin[:129] + "four", begin + "one" * 30, "six"]
    options = dict(raw=True, max_tokens=12, logprobs=5, seed=3, temperature=0.9)
    model = load(folder, dtype="bfloat16", token_budget=64)
    assert model.options["deterministic"] == 64 and load(folder, dtype="bfloat16").options["deterministic"] == 256
    alone = [load(folder, dtype="bfloat16", token_budget=64, max_batch=1).generate(p, **options)[0] for p in prompts]
    for order in (prompts, prompts[::-1], prompts):
        together = dict(zip(order, model.generate(order, **options)))
        for p, a in zip(prompts, alone):
            assert together[p].ids == a.ids and together[p].logprobs == a.logprobs
    assert [together[p].cached for p in prompts] == [128, 0, 192, 128, 192, 0], "in multiples of a chunk"
    assert not model.cache._sequences and model.new_batcher(max_batch=24).max_batch == model.alike == 24


def test_from_the_command_line(folder, tmp_path):
    prompts, found = ["a", "b" * 130, "b" * 200, "c", "b" * 129], []
    for turn, (order, batch) in enumerate([(prompts, "1"), (prompts[::-1], "8")]):
        asked, out = tmp_path / f"{turn}.jsonl", tmp_path / f"out{turn}.jsonl"
        asked.write_text("".join(json.dumps({"prompt": p, "id": p, "logprobs": 3}) + "\n" for p in order))
        code = generate.main(["--model", folder, "--dtype", "bfloat16", "--device", "cpu", "--raw", "--deterministic",
                              "--token-budget", "64", "--max-batch", batch, "--max-tokens", "9", "--quiet", "--prompts",
                              str(asked), "--out", str(out)])
        if code == 2:
            pytest.skip("this machine's kernels mind how many rows they get")
        found.append({r["id"]: r["samples"] for r in map(json.loads, out.read_text().splitlines())})
    assert found[0] == found[1] and len(found[0]) == 5


def test_what_is_refused(folder, capsys):
    with pytest.raises(ValueError, match="drafts change how many rows a step has; leave out --draft"):
        generate.load(folder, deterministic=True, device="cpu", draft="ngram")
    with pytest.raises(ValueError, match="leave out --compile"):
        generate.load(folder, deterministic=True, device="cpu", compile=1)
    with pytest.raises(ValueError, match="leave out torchrun"):
        generate.load(folder, deterministic=True, device="cpu", group=object())
    with pytest.raises(ValueError, match="leave out --beams or --deterministic"):
        load(folder, dtype="bfloat16").answer([1, 2], beams=2)
    with pytest.raises(SystemExit, match="2"):
        generate.main(["--beams", "2", "--deterministic", "x"])
    assert "--deterministic" in capsys.readouterr().err
    for wrong in (dict(drafter=1, verify=1), dict(static="pad")):
        with pytest.raises(ValueError, match="change how many rows a step has"):
            Batcher(None, None, None, V, deterministic=64, **wrong)
    with pytest.raises(ValueError, match="deterministic is -1"):
        Batcher(None, None, None, V, deterministic=-1)


def test_rows_that_mind_their_number_are_refused():
    """Tried out, not believed: from six rows on, this model's head is another one."""
    net = settled("bfloat16")
    usual = net.head
    net.head = lambda x: usual(x) * (1 + 2 ** -7 * (len(x) > 5))
    assert composition._alike(net, 5) == 5
    with pytest.raises(ValueError, match=r"6 rows of this model, in bfloat16 .* lower --max-batch to 5$"):
        composition._alike(net, 8)


@pytest.mark.slow
def test_the_default_model(default_gguf):
    """Packed: long prompts and short ones, alone and together, in both orders and with a pool that is too small."""
    text = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 40
    options = dict(max_tokens=24, ignore_eos=True, logprobs=3, temperature=0.8, seed=5, raw=True)
    prompts = [text[:3000], "Why?", text[:1200] + "And then", text[:2500], "A list of five cats:", text[:1199]]
    model = load(default_gguf, kv_memory=0.06)
    if model.weights != "packed":
        pytest.skip("nothing stays packed on this machine")
    alone = [load(default_gguf, max_batch=1).generate(p, **options)[0] for p in prompts]
    for order in (prompts, prompts[::-1]):
        together = dict(zip(order, model.generate(order, **options)))
        for p, a in zip(prompts, alone):
            assert together[p].ids == a.ids and together[p].logprobs == a.logprobs
    assert model.batcher.stats.cached > 256 and all(s.cached % 256 == 0 for a in together.values() for s in a.samples)
