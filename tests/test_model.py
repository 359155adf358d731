"""model.py, from four sides.

- transformers: tiny models of every family and feature, all weights random (norms and biases too)
- `reference_logits`: the same mathematics in float64 loops that share no code with model.py, to 1e-9,
  dense and through the paged cache at every split of the prompt into chunks
- the published cases of wrong loading (LD), by id
- the door: whatever a config.json or a checkpoint holds, a ValueError comes out, quickly, or the model runs right
"""
import copy
import dataclasses
import itertools
import math
import random
import time
import warnings

import pytest
import torch
import torch.nn.functional as F

from kvcache import PagedKVCache
from model import FEW_ROWS, Config, Llama, RMSNorm, Rotary, causal_attention, rope_frequencies, rotate

V = 61  # vocabulary of the tiny models; prime, so that no shape fits by accident
TINY = dict(hidden_size=48, num_attention_heads=6, num_key_value_heads=2, intermediate_size=80, num_hidden_layers=2,
            vocab_size=V, max_position_embeddings=64, rms_norm_eps=1e-5)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)


def tiny(model_type: str = "llama", **changes) -> dict:
    """A config.json with TINY's numbers where `changes` does not say otherwise."""
    return {"model_type": model_type, **TINY, **changes}


# A config.json of every family and feature, as a real one would spell it.
CONFIGS = {
    "llama2": tiny(num_key_value_heads=6),
    "llama_gqa": tiny(),
    "llama_mqa": tiny(num_key_value_heads=1),
    "llama3": tiny(rope_theta=500000.0, num_key_value_heads=3),
    "llama3.1": tiny(rope_theta=500000.0, rope_scaling=LLAMA3),
    "llama3.2": tiny(rope_parameters={"rope_theta": 500000.0, **LLAMA3}, tie_word_embeddings=True),
    "llama_biases": tiny(attention_bias=True, mlp_bias=True),
    "llama_head_dim": tiny(head_dim=10),
    "tinyllama": tiny(hidden_size=64, num_attention_heads=8, num_key_value_heads=1, intermediate_size=176),
    "smollm2": tiny(hidden_size=72, num_attention_heads=9, num_key_value_heads=3, intermediate_size=192,
                    rope_theta=100000.0, tie_word_embeddings=True),
    "mistral": tiny("mistral", sliding_window=None, num_key_value_heads=3),
    "mistral_wide_window": tiny("mistral", sliding_window=32),
    "mistral_window": tiny("mistral", sliding_window=4),
    "mistral_nemo": tiny("mistral", sliding_window=None, head_dim=6, hidden_size=60),
    "qwen2": tiny("qwen2", rope_theta=1000000.0, sliding_window=48, use_sliding_window=False),
    "qwen2_tied": tiny("qwen2", tie_word_embeddings=True),
    "qwen3": tiny("qwen3", head_dim=16),
    "qwen3_tied": tiny("qwen3", head_dim=16, tie_word_embeddings=True),
    "qwen3_biases": tiny("qwen3", head_dim=8, attention_bias=True),
    "qwen3_indivisible": tiny("qwen3", head_dim=16, hidden_size=50),
    "linear": tiny(rope_scaling={"type": "linear", "factor": 2.5}),
    "yarn": tiny(rope_scaling=YARN),
    "yarn_qwen3": tiny("qwen3", head_dim=16, rope_parameters={**YARN, "rope_theta": 5000.0}),
    "yarn_attention_factor": tiny(rope_scaling={**YARN, "attention_factor": 1.3}),
    "yarn_mscale": tiny(rope_scaling={**YARN, "mscale": 1.2, "mscale_all_dim": 0.7}),
    "yarn_not_truncated": tiny(head_dim=16, rope_scaling={**YARN, "truncate": False, "beta_fast": 4.0,
                                                          "beta_slow": 0.5}),
}


def random_weight(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Norms around 1, biases far from 0, matrices large enough that a feature left out must show."""
    x = torch.randn(shape, generator=generator)
    return 1 + 0.4 * x if "norm" in name else 0.5 * x if name.endswith("bias") else 0.5 * x / shape[-1] ** 0.5


def random_model(config: dict, seed: int = 0, dtype: torch.dtype = torch.float64) -> Llama:
    config, generator = Config.from_dict(config), torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Llama(config).named_parameters()}
    return Llama.from_tensors(config, {n: random_weight(n, s, generator) for n, s in shapes.items()}, dtype)


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
    return (a - b).abs().max().item() if a.numel() else 0.0


pytestmark = pytest.mark.usefixtures("one_thread")


# ------------------------------------------------------------------ against transformers


def transformers_model(config: dict, dtype: torch.dtype):
    transformers = pytest.importorskip("transformers")
    own = transformers.AutoConfig.for_model(**{k: dict(v) if isinstance(v, dict) else v for k, v in config.items()})
    model = transformers.AutoModelForCausalLM.from_config(own, attn_implementation="sdpa").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(random_weight(name, parameter.shape, generator))
    return model.to(dtype)


def own_model(theirs, dtype: torch.dtype, config: dict | None = None) -> Llama:
    tied = theirs.config.tie_word_embeddings
    tensors = {k: v for k, v in theirs.state_dict().items() if not (tied and k == "lm_head.weight")}
    return Llama.from_tensors(Config.from_dict(config or theirs.config.to_dict()), tensors, dtype)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float64, 1e-6)])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name, dtype, tolerance):
    theirs = transformers_model(CONFIGS[name], dtype)
    ids, positions = random_ids(3, 13), torch.arange(5, 18)
    with torch.inference_mode():
        expected = theirs(ids, position_ids=positions.expand(3, -1)).logits
        from_theirs = own_model(theirs, dtype)(ids, positions)
        from_file = own_model(theirs, dtype, CONFIGS[name])(ids, positions)
    assert expected.std() > 0.3
    assert worst(from_theirs, expected) < tolerance  # transformers' norms and rotary are float32 even in float64
    assert worst(from_file, expected) < tolerance


# What a model would compute that overlooked one thing in a config: each must be seen by the comparison above.
OVERSIGHTS = {
    "kv_heads_shared_round_robin": ("llama_gqa", {}, "heads"),
    "window_ignored": ("mistral_window", {"sliding_window": None}, None),
    "window_one_off": ("mistral_window", {"sliding_window": 5}, None),
    "rope_scaling_ignored": ("llama3.1", {"rope_scaling": None}, None),
    "linear_ignored": ("linear", {"rope_scaling": None}, None),
    "yarn_ignored": ("yarn", {"rope_scaling": None}, None),
    "attention_factor_ignored": ("yarn_attention_factor", {"rope_scaling": YARN}, None),
    "mscale_ignored": ("yarn_mscale", {"rope_scaling": YARN}, None),
    "truncate_ignored": ("yarn_not_truncated", {"rope_scaling": {**CONFIGS["yarn_not_truncated"]["rope_scaling"],
                                                                 "truncate": True}}, None),
    "theta_default": ("qwen2", {"rope_theta": 10000.0}, None),
    "eps_default": ("llama_gqa", {"rms_norm_eps": 1e-4}, None),
    "qk_norm_weights_ignored": ("qwen3", {}, "norm"),
    "biases_ignored": ("qwen2", {}, "bias"),
    "positions_off_by_one": ("llama3.2", {}, "positions"),
}


@pytest.mark.parametrize("name", OVERSIGHTS)
def test_the_comparison_with_transformers_sees_every_oversight(name):
    which, changes, fault = OVERSIGHTS[name]
    theirs = transformers_model(CONFIGS[which], torch.float64)
    ours = own_model(theirs, torch.float64, {**CONFIGS[which], **changes})
    ids, positions = random_ids(3, 13), torch.arange(5, 18)
    with torch.inference_mode():
        expected = theirs(ids, position_ids=positions.expand(3, -1)).logits

    def round_robin(layer, q, k, v):
        return causal_attention(layer, q, k.repeat(1, 1, 3, 1), v.repeat(1, 1, 3, 1))

    for parameter_name, parameter in ours.named_parameters():  # they are transformers' own, by reference
        if fault == "bias" and parameter_name.endswith("bias"):
            parameter.zero_()
        if fault == "norm" and parameter_name.endswith("_norm.weight"):
            parameter.fill_(1)
    if fault == "positions":
        positions = positions + (positions >= 10)
    got = ours(ids, positions, round_robin if fault == "heads" else None)
    assert worst(got, expected) > 1e-4


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("scaling", [
    {}, {"rope_type": "linear", "factor": 4.0}, {**LLAMA3, "original_max_position_embeddings": 8192},
    {**LLAMA3, "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 2.5,
     "original_max_position_embeddings": 4096},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {**YARN, "original_max_position_embeddings": 4096}, {"rope_type": "yarn", "factor": 4.0},
    {**YARN, "factor": 1.0}, {**YARN, "original_max_position_embeddings": 1},
    {**YARN, "original_max_position_embeddings": 4096, "beta_fast": 16.0, "beta_slow": 2, "truncate": False},
    {**YARN, "attention_factor": 0.8}, {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}, {**YARN, "mscale": 2.0},
])
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type"])
def test_rope_frequencies_equal_transformers(head_dim, theta, scaling, spelling):
    pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

    config = tiny(head_dim=head_dim, max_position_embeddings=16384)
    if spelling == "rope_parameters":
        config["rope_parameters"] = {"rope_theta": theta, **scaling}
    else:
        old = {"type" if k == "rope_type" and spelling == "type" else k: v for k, v in scaling.items()}
        config.update(rope_theta=theta, rope_scaling=old or None)
    theirs = LlamaRotaryEmbedding(LlamaConfig(**{k: dict(v) if isinstance(v, dict) else v
                                                 for k, v in config.items() if k != "model_type"}))
    inv_freq, factor = rope_frequencies(Config.from_dict(config).rope, head_dim)
    torch.testing.assert_close(inv_freq.float(), theirs.inv_freq, rtol=2e-6, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-12)


def test_a_freshly_built_model_has_exactly_transformers_parameters():
    for name, config in CONFIGS.items():
        theirs = transformers_model(config, torch.float32).state_dict()
        if config.get("tie_word_embeddings"):
            del theirs["lm_head.weight"]
        ours = Llama(Config.from_dict(config)).state_dict()
        assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}, name


# ------------------------------------------------------------------ against loops in float64


def reference_logits(config: Config, weights: dict, ids: torch.Tensor) -> torch.Tensor:
    """(T,) -> (T, V) from the definitions, head by head and pair by pair. Nothing is shared with model.py but the
    frequencies, which the comparison with transformers and LD-05 hold."""
    w = {name: t.double() for name, t in weights.items()}
    inv_freq, sharpness = rope_frequencies(config.rope, config.head_dim)
    D, T = config.head_dim, len(ids)

    def norm(x, name):  # (T, C)
        return x / (x.pow(2).mean(1, keepdim=True) + config.norm_eps).sqrt() * w[name]

    def linear(x, name):  # (T, in) -> (T, out)
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0.0)

    def turned(x, name):  # one head, (T, D); the pair is (i, i + D/2)
        x = norm(x, name) if name in w else x
        out = torch.empty_like(x)
        for i in range(D // 2):
            angle = torch.arange(T) * inv_freq[i]
            c, s, a, b = angle.cos() * sharpness, angle.sin() * sharpness, x[:, i], x[:, i + D // 2]
            out[:, i], out[:, i + D // 2] = a * c - b * s, a * s + b * c
        return out

    x = w["model.embed_tokens.weight"][ids]  # (T, C)
    for n in range(config.n_layer):
        at = f"model.layers.{n}."
        h = norm(x, at + "input_layernorm.weight")
        q, k, v = (linear(h, f"{at}self_attn.{p}_proj") for p in "qkv")
        ks = [turned(k[:, g * D:(g + 1) * D], at + "self_attn.k_norm.weight") for g in range(config.n_kv_head)]
        heads = []
        for head in range(config.n_head):
            g = head // (config.n_head // config.n_kv_head)
            scores = turned(q[:, head * D:(head + 1) * D], at + "self_attn.q_norm.weight") @ ks[g].T / math.sqrt(D)
            distance = torch.arange(T)[:, None] - torch.arange(T)
            hidden = (distance < 0) | (distance >= (config.sliding_window or T))
            scores = scores.masked_fill(hidden, -math.inf)
            heads.append(scores.exp() / scores.exp().sum(1, keepdim=True) @ v[:, g * D:(g + 1) * D])
        x = x + linear(torch.cat(heads, 1), at + "self_attn.o_proj")
        h = norm(x, at + "post_attention_layernorm.weight")
        gate = linear(h, at + "mlp.gate_proj")
        x = x + linear(gate / (1 + (-gate).exp()) * linear(h, at + "mlp.up_proj"), at + "mlp.down_proj")
    return norm(x, "model.norm.weight") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def cache_for(model: Llama, n_blocks: int, block_size: int) -> PagedKVCache:
    """A cache whose every slot is NaN until it is written."""
    c = model.config
    cache = PagedKVCache(c.n_layer, c.n_kv_head, c.head_dim, n_blocks, block_size, dtype=torch.float64)
    for pool in (*cache.k, *cache.v):
        pool.fill_(math.nan)
    return cache


def run_chunks(model: Llama, cache: PagedKVCache, prompts: dict, splits: dict, pause: float = 0, seed: int = 0) -> dict:
    """Logits {seq: (T, V)} of prompts computed chunk by chunk, all sequences packed; each skips a step now and then."""
    rng, done, logits = random.Random(seed), dict.fromkeys(prompts, 0), {seq: [] for seq in prompts}
    splits = {seq: list(chunks) for seq, chunks in splits.items()}
    for seq in prompts:
        cache.add(seq)
    while any(splits.values()):
        ready = [seq for seq in prompts if splits[seq] and rng.random() >= pause]
        rng.shuffle(ready)
        plan = {seq: prompts[seq][done[seq]: done[seq] + splits[seq][0]].tolist() for seq in ready}
        if not plan:
            continue
        step = cache.extend(plan)
        assert step.positions.tolist() == [done[s] + i for s in plan for i in range(len(plan[s]))]
        rows = step.last({seq: len(ids) for seq, ids in plan.items()})
        with torch.inference_mode():
            out = model(step.tokens, step.positions, step.attend, rows)
        cache.commit(step)
        cache.check()
        for seq, part in zip(plan, out.split([len(ids) for ids in plan.values()])):
            logits[seq].append(part)
            done[seq] += splits[seq].pop(0)
    return {seq: torch.cat(parts) for seq, parts in logits.items()}


def compositions(n: int) -> list[tuple[int, ...]]:
    """Every way to cut n tokens into chunks: 2^(n-1) of them.

    >>> compositions(3)
    [(3,), (1, 2), (2, 1), (1, 1, 1)]
    """
    cuts = itertools.chain.from_iterable(itertools.combinations(range(1, n), r) for r in range(n))
    return [tuple(b - a for a, b in zip((0, *cut), (*cut, n))) for cut in cuts]


@pytest.fixture(scope="module")
def eight():
    """For some configs: the model, 128 prompts of 8 ids, and their reference logits."""
    def make(name):
        model, prompts = random_model(CONFIGS[name]), random_ids(128, 8)
        return model, prompts, torch.stack([reference_logits(model.config, model.state_dict(), p) for p in prompts])
    return {name: make(name) for name in ("llama_mqa", "qwen3_biases")}


@pytest.mark.parametrize("name", CONFIGS)
def test_dense_logits_equal_the_loops(name):
    model, ids = random_model(CONFIGS[name]), random_ids(2, 11)
    expected = torch.stack([reference_logits(model.config, model.state_dict(), row) for row in ids])
    assert worst(model(ids), expected) < 1e-9
    assert worst(model(ids[0]), expected[0]) < 1e-9  # packed: one sequence
    rows = torch.tensor([21, 0, 10, 11, 11])
    assert worst(model(ids, rows=rows), expected.flatten(0, 1)[rows]) < 1e-9
    assert worst(model(ids[:, :1]), expected[:, :1]) < 1e-9


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("name", ["llama_mqa", "qwen3_biases"])
def test_b02_every_split_of_a_prompt_packed(eight, name, block_size):
    """B02 (pytorch/pytorch issues #108108 and #144858; huggingface/candle PR #3743): chunks that start in the middle.

    All 128 ways to cut 8 tokens, each on another prompt, packed into the same steps."""
    model, prompts, expected = eight[name]
    cache = cache_for(model, 128 * -(-8 // block_size), block_size)
    got = run_chunks(model, cache, dict(enumerate(prompts)), dict(enumerate(compositions(8))))
    assert worst(torch.stack(list(got.values())), expected) < 1e-9
    cache.check()


def test_b02_every_split_of_a_prompt_alone(eight):
    """B02 (pytorch/pytorch issues #108108 and #144858; huggingface/candle PR #3743): the same, one sequence at a time,
    with equal contents of the cache at the end."""
    model, prompts, expected = eight["llama_mqa"]
    written = []
    for chunks in compositions(8):
        cache = cache_for(model, 4, 4)
        got = run_chunks(model, cache, {"a": prompts[0]}, {"a": chunks})
        assert worst(got["a"], expected[0]) < 1e-9, chunks
        written.append(torch.stack([pool[:2] for pool in (*cache.k, *cache.v)]))
    assert max(worst(w, written[0]) for w in written) < 1e-9


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("name", ["llama_gqa", "llama3.2", "qwen2", "qwen3_indivisible", "yarn_mscale", "mistral"])
def test_random_mixes_of_prompts_chunks_and_pauses(name, block_size):
    model, rng = random_model(CONFIGS[name]), random.Random(block_size)
    prompts = {f"s{i}": random_ids(rng.randint(9, 13), seed=i) for i in range(5)}
    splits = {seq: rng.choice(compositions(len(ids))) for seq, ids in prompts.items()}
    got = run_chunks(model, cache_for(model, 80, block_size), prompts, splits, pause=0.4, seed=block_size)
    for seq, ids in prompts.items():
        assert worst(got[seq], reference_logits(model.config, model.state_dict(), ids)) < 1e-9


@pytest.mark.parametrize("fault", ["top_left_mask", "no_mask", "positions_restart", "history_hidden"])
def test_the_comparison_with_the_loops_sees_every_fault(fault):
    model, ids = random_model(CONFIGS["llama_gqa"]), random_ids(8)
    expected = reference_logits(model.config, model.state_dict(), ids)
    cache = cache_for(model, 8, 4)
    cache.add("a")
    for begin, end in ((0, 3), (3, 8)):
        step = cache.extend({"a": ids[begin:end].tolist()})

        def attend(layer, q, k, v, step=step):
            step.attend(layer, q, k, v)
            n, S = len(q), int(step.kv_len)
            keys, values = (x[layer].flatten(0, 1)[:S].transpose(0, 1) for x in (cache.k, cache.v))
            if fault == "history_hidden":
                keys, values = keys[:, -n:], values[:, -n:]
            mask = torch.ones(n, keys.shape[1]).tril(0 if fault != "positions_restart" else S - n).bool()
            mask = torch.ones_like(mask) if fault == "no_mask" else mask
            out = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, mask, enable_gqa=True)
            return out.transpose(0, 1)

        positions = step.positions - begin if fault == "positions_restart" else step.positions
        out = model(step.tokens, positions, attend)
        cache.commit(step)
    assert worst(out, expected[3:]) > 1e-3


def test_heads_run_on_the_wanted_rows_only():
    model, ids = random_model(CONFIGS["llama_gqa"]), random_ids(6)
    seen = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[0]))
    whole = model(ids)
    for rows in ([], [5], [0, 3, 3, 5]):
        assert worst(model(ids, rows=torch.tensor(rows, dtype=torch.long)), whole[rows]) < 1e-12
    assert seen == [6, 0, 1, 4]


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_half_precision_stays_near_float64(dtype, tolerance):
    for name in ("llama3.1", "qwen3_biases"):
        model, ids = random_model(CONFIGS[name]), random_ids(2, 12)
        half = random_model(CONFIGS[name], dtype=dtype)
        logits = half(ids)
        assert logits.dtype == dtype
        assert (logits.double() - model(ids)).abs().mean() < tolerance * model(ids).std()


# ------------------------------------------------------------------ the parts


def test_rotate_turns_pairs_by_the_angle():
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float64)  # pairs (1, 3) and (2, 4)
    a, b = 0.3, 1.1
    cos = torch.tensor([math.cos(a), math.cos(b)] * 2).double()
    sin = torch.tensor([-math.sin(a), -math.sin(b), math.sin(a), math.sin(b)]).double()
    expected = [1 * math.cos(a) - 3 * math.sin(a), 2 * math.cos(b) - 4 * math.sin(b),
                1 * math.sin(a) + 3 * math.cos(a), 2 * math.sin(b) + 4 * math.cos(b)]
    assert rotate(x, cos, sin).flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_explicit_frequency_factors_divide():
    rope = {"rope_type": "factors", "rope_theta": 10000.0, "factors": [1.0, 2.0, 4.0, 32.0]}
    plain, _ = rope_frequencies({"rope_type": "default", "rope_theta": 10000.0}, 8)
    assert (plain / rope_frequencies(rope, 8)[0]).tolist() == pytest.approx([1, 2, 4, 32])
    with pytest.raises(ValueError, match="list of 4 numbers"):
        rope_frequencies({**rope, "factors": [1.0, 2.0]}, 8)
    with pytest.raises(ValueError, match="RoPE factor is 0"):
        rope_frequencies({**rope, "factors": [1.0, 2.0, 0, 1.0]}, 8)


@pytest.mark.parametrize("name", ["llama_gqa", "llama_biases", "qwen2_tied", "qwen3_biases", "llama_mqa"])
def test_fused_matrices_give_the_same_logits(name):
    model, ids = random_model(CONFIGS[name]), random_ids(2, 9)
    plain, n_parameters = model(ids), sum(p.numel() for p in model.parameters())
    assert model.fuse_() is model
    assert worst(model(ids), plain) < 1e-12
    assert sum(p.numel() for p in model.parameters()) == n_parameters  # the old matrices are gone
    assert worst(model.fuse_()(ids), plain) < 1e-12  # twice is harmless
    cache = cache_for(model, 16, 4)  # q, k and v are now slices of one tensor
    got = run_chunks(model, cache, dict(enumerate(ids)), {0: (4, 1, 4), 1: (9,)})
    assert worst(torch.stack(list(got.values())), plain) < 1e-9


@pytest.mark.parametrize("name", ["llama_gqa", "llama_biases", "qwen2_tied", "qwen3_biases", "llama_mqa"])
def test_bare_blocks_compute_what_the_modules_do(name):
    """Up to FEW_ROWS packed tokens of a fused model go past its modules; a copy of it has weights of its own."""
    model = random_model(CONFIGS[name])
    model.config = dataclasses.replace(model.config, max_seq_len=100)
    for n in (1, 2, FEW_ROWS, FEW_ROWS + 1):
        ids = random_ids(1, n)[0]
        positions, rows, heads = torch.arange(n), torch.tensor([n - 1, 0]), []

        def attend(layer, q, k, v, heads=heads):
            heads.append((layer, q, k, v))
            return causal_attention(layer, q, k, v)

        model.bare_blocks = []
        want = [model(ids, positions, attend), model(ids, positions, attend, rows)]
        model.fuse_()
        seen = {"modules": 0}
        handle = model.model["layers"][0].mlp.register_forward_hook(lambda *a, seen=seen: seen.update(modules=1))
        got, half = [model(ids, positions, attend), model(ids, positions, attend, rows)], len(heads) // 2
        handle.remove()
        assert seen["modules"] == (n > FEW_ROWS)
        for a, b in zip(want, got):
            assert a.shape == b.shape and worst(a, b) < 1e-12
        for one, other in zip(heads[:half], heads[half:]):
            assert one[0] == other[0] and all(a.shape == b.shape and worst(a, b) < 1e-12
                                              for a, b in zip(one[1:], other[1:]))
    ids, twin = random_ids(1, 3)[0], copy.deepcopy(model)
    before = model(ids)
    for p in twin.parameters():
        p.data.zero_()
    assert not twin.fuse_()(ids).any()
    assert torch.equal(model(ids), before)


def test_bare_blocks_end_with_the_weights_that_they_hold():
    """Other weights, another type, gradients: the modules compute then, and fuse_ brings bare blocks back."""
    model, other = (random_model(CONFIGS["llama_gqa"], seed).fuse_() for seed in range(2))
    ids = torch.arange(3)
    want = other(ids)
    assert worst(model(ids), want) > 1e-3 and model.bare_blocks
    model.load_state_dict(other.state_dict())
    assert not model.bare_blocks and worst(model(ids), want) < 1e-12
    assert model.fuse_().bare_blocks and worst(model(ids), want) < 1e-12
    assert (model.float()(ids).double() - want).abs().max() < 1e-3 and not model.bare_blocks
    model.double().fuse_().requires_grad_(True)
    model(ids).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    model.model["embed_tokens"].weight.requires_grad_(False)
    model(ids).sum().backward()
    assert model.model["norm"].weight.grad is not None, "norms are trained behind an embedding that is not"


def test_a_model_built_on_meta_can_be_given_memory_and_weights():
    model, ids = random_model(CONFIGS["llama3.1"], dtype=torch.float32), random_ids(1, 9)
    with torch.device("meta"):
        other = Llama(model.config)
    other.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert worst(other(ids), model(ids)) == 0


def test_fa_08_dense_attention_maps_query_heads_in_groups():
    """FA-08 (HazyResearch/HipKittens #22; onnx #7274; PSAL-POSTECH/ONNXim #34): head h reads KV head h // (H/G)."""
    q, k, v = torch.zeros(3, 6, 4), torch.zeros(3, 2, 4), torch.tensor([0.0, 1.0])[None, :, None].expand(3, 2, 4)
    assert causal_attention(0, q, k, v)[..., 0].tolist() == [[0, 0, 0, 1, 1, 1]] * 3
    assert causal_attention(0, q[None], k[None], v[None])[0, ..., 0].tolist() == [[0, 0, 0, 1, 1, 1]] * 3


# ------------------------------------------------------------------ loading, by case


def test_ld_02_tied_head_is_the_embedding_itself():
    """LD-02 (sglang #1508; vllm #6758, #53020; tinygrad #13796): no lm_head, or a stale one, when the head is tied."""
    model, ids = random_model(CONFIGS["qwen2_tied"], dtype=torch.float32), random_ids(1, 5)
    tensors = dict(model.state_dict())
    embedding = tensors["model.embed_tokens.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clean = Llama.from_tensors(model.config, tensors)
    with pytest.warns(UserWarning, match=r"lm_head\.weight is not used"):
        stale = Llama.from_tensors(model.config, {**tensors, "lm_head.weight": torch.full_like(embedding, 7.0)})
    for loaded in (clean, stale):
        assert loaded.lm_head is None and worst(loaded(ids), model(ids)) == 0
        assert loaded.model["embed_tokens"].weight.data_ptr() == embedding.data_ptr()  # no copy
    with pytest.raises(ValueError, match=r"lacks 1 of \d+ tensors, first lm_head\.weight"):
        Llama.from_tensors(Config.from_dict({**CONFIGS["qwen2_tied"], "tie_word_embeddings": False}), tensors)


@pytest.mark.parametrize("keys, theta, kind, factor", [
    ({"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}, 500000.0, "default", None),
    ({"rope_parameters": {"rope_theta": 500000.0}, "rope_theta": 7.0}, 500000.0, "default", None),
    ({"rope_parameters": {**LLAMA3, "rope_theta": 9.0}, "rope_scaling": {**LLAMA3, "factor": 2.0}}, 9.0, "llama3", 8.0),
    ({"rope_theta": 500000, "rope_scaling": None}, 500000.0, "default", None),
    ({"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, 500000.0, "linear", 2.0),
    ({"rope_theta": 500000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 500000.0, "linear", 2.0),
    ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}}, 10000.0, "yarn", 2.0),
    ({}, 10000.0, "default", None),
    ({"rope_theta": None, "rope_parameters": None, "rope_scaling": {}}, 10000.0, "default", None),
])
def test_ld_04_rope_theta_is_found_in_either_place(keys, theta, kind, factor):
    """LD-04 (vllm #28542, #42624; sglang #14745): rope_theta moved into rope_parameters, which wins."""
    rope = Config.from_dict(tiny(**keys)).rope
    assert (rope["rope_theta"], rope["rope_type"], rope.get("factor")) == (theta, kind, factor)


def test_ld_05_llama3_scaling_has_the_published_numbers():
    """LD-05 (transformers #32330; ml-explore/mlx-examples #907): the blend is linear in frequency."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    expected = {14: 3.211445995e-3, 15: 1.290547928e-3, 16: 4.295567966e-4, 17: 9.708287803e-5, 18: 1.946163818e-5,
                31: 9.418306725e-8}
    inv_freq, factor = rope_frequencies(rope, 64)
    assert {i: inv_freq[i].item() for i in expected} == pytest.approx(expected, rel=1e-9) and factor == 1
    plain, _ = rope_frequencies({"rope_type": "default", "rope_theta": 500000.0}, 128)
    ratios = (rope_frequencies({**rope, "factor": 8.0}, 128)[0] / plain)[29:35].tolist()
    assert ratios == pytest.approx([0.828168, 0.643743, 0.493507, 0.371122, 0.271425, 0.190211], abs=1e-6)


def test_ld_08_qwen2_biases_are_used_although_the_config_never_says_so():
    """LD-08 (OminiX-ai/OminiX-MLX #7; EricLBuehler/candle-vllm #167; ServiceNow/Fast-LLM #398): q/k/v biases of 1."""
    config = Config.from_dict(tiny("qwen2"))
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in Llama(config).named_parameters()}
    assert {n.split(".")[-2] for n in shapes if n.endswith("bias")} == {"q_proj", "k_proj", "v_proj"}
    tensors = {n: torch.full(s, float(n.endswith(("bias", "norm.weight")))) for n, s in shapes.items()}
    seen = []

    def attend(layer, q, k, v):
        seen.extend((q, k, v))
        return torch.zeros_like(q)

    Llama.from_tensors(config, tensors)(random_ids(1), attend=attend)  # position 0: nothing is turned
    assert len(seen) == 6 and all((x == 1).all() for x in seen)
    with pytest.raises(ValueError, match=r"does not explain, first model.layers.1.self_attn.o_proj.bias"):
        Llama.from_tensors(config, {**tensors, "model.layers.1.self_attn.o_proj.bias": torch.ones(48)})
    del tensors["model.layers.0.self_attn.k_proj.bias"]
    with pytest.raises(ValueError, match=r"lacks 1 of .* first model.layers.0.self_attn.k_proj.bias"):
        Llama.from_tensors(config, tensors)


@pytest.mark.parametrize("changes, q, o", [
    (dict(hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128), (2048, 1024), (1024, 2048)),
    (dict(hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=None), (1024, 1024), (1024, 1024)),
    (dict(hidden_size=5120, num_attention_heads=32, num_key_value_heads=8, head_dim=128), (4096, 5120), (5120, 4096)),
])
def test_ld_09_head_dim_is_not_hidden_over_heads(changes, q, o):
    """LD-09 (SafeAILab/EAGLE #315; ServiceNow/Fast-LLM #102; paiml/entrenar #262): Qwen3-0.6B and Mistral-Nemo."""
    for family in ("qwen3", "mistral", "llama"):
        with torch.device("meta"):
            attention = Llama(Config.from_dict(tiny(family, **changes))).model["layers"][0].self_attn
        assert (attention.q_proj.weight.shape, attention.o_proj.weight.shape) == (q, o)


def test_ld_09_scores_are_scaled_by_the_real_head_dim():
    """LD-09 (SafeAILab/EAGLE #315; ServiceNow/Fast-LLM #102): 1/sqrt(128), although hidden / heads is 64."""
    q, k, v = torch.zeros(2, 1, 128), torch.zeros(2, 1, 128), torch.zeros(2, 1, 128)
    q[1, 0, 0], k[0, 0, 0], v[0] = 4.0, 2.0, 1.0  # q.k = 8 for key 0, 0 for key 1
    assert causal_attention(0, q, k, v)[1, 0, 0].item() == pytest.approx(1 / (1 + math.exp(-8 * 0.0883883)), abs=1e-6)
    assert PagedKVCache(1, 1, 128, 1).scale == pytest.approx(0.0883883, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_ld_19_rms_norm_squares_in_float32(dtype):
    """LD-19 (pytorch #133085; meta-llama/llama #1048; transformers #25421): 300^2 overflows in float16."""
    norm = RMSNorm(4, 1e-6).to(dtype)
    assert norm(torch.full((4,), 300.0, dtype=dtype)).tolist() == [1, 1, 1, 1]
    # Llama's order: down-cast first, then the product with the weight, in x's dtype
    norm.weight.data = torch.tensor([1.0, 1.1, 0.3, 2.7], dtype=dtype)
    x = torch.tensor([0.7, -0.3, 1.9, 5.1], dtype=dtype)
    wide = x.double() / x.double().pow(2).mean().add(1e-6).sqrt()
    torch.testing.assert_close(norm(x), wide.to(dtype) * norm.weight)
    assert norm(x).dtype == dtype


def test_ld_20_positions_keep_their_precision_in_a_bfloat16_model():
    """LD-20 (transformers #29285; candle #3520; sglang-jax #1472): in bfloat16 the position 257 is 256."""
    for model in (random_model(tiny(), dtype=torch.bfloat16), Llama(Config.from_dict(tiny())).to(torch.bfloat16),
                  Llama(Config.from_dict(tiny())).half()):
        assert model.rotary.inv_freq.dtype == torch.float64
        cos, sin = model.rotary(torch.tensor([256, 257, 4095]), torch.bfloat16)
        assert cos[:, 0, 0].tolist() == pytest.approx([math.cos(256), math.cos(257), math.cos(4095)], abs=1e-6)
        assert sin[:, 0, -4].tolist() == pytest.approx([math.sin(256), math.sin(257), math.sin(4095)], abs=1e-6)
        assert cos[1, 0, 0].item() == pytest.approx(0.819306, abs=1e-6)
    # and the turned query shows it: a query of ones at position 257
    model = random_model(tiny("qwen2"), dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.fill_(float(name.endswith(("bias", "norm.weight"))))
    seen = []
    model(torch.tensor([1]), torch.tensor([257]), lambda layer, q, k, v: seen.append(q) or q)
    assert seen[0][0, 0, 0].item() == pytest.approx(math.cos(257) - math.sin(257), abs=4e-3)


def test_ld_28_norm_eps_comes_from_the_config():
    """LD-28 (llama.cpp #2373, #2374, #2384): at 1e-3 the eps of 1e-6 and 1e-5 differ by a factor above two."""
    for eps, expected in ((1e-6, 0.707107), (1e-5, 0.301511)):
        config = Config.from_dict(tiny("qwen3", rms_norm_eps=eps))
        model = Llama(config)
        for norm in (m for m in model.modules() if isinstance(m, RMSNorm)):
            x = torch.full((norm.weight.shape[0],), 1e-3)
            assert norm(x).tolist() == pytest.approx([expected] * len(x), abs=1e-6)
    assert Config.from_dict({k: v for k, v in tiny().items() if k != "rms_norm_eps"}).norm_eps == 1e-6


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("changes, message", [
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.75}}, "partial_rotary_factor 0.75"),
])
def test_ld_22_partial_rotary_is_refused(changes, message):
    """LD-22 (pie-project/pie #602, #603; mlx-lm #1698; vllm #43770): it looks right at position 0 only."""
    with pytest.raises(ValueError, match=message):
        Config.from_dict(tiny(**changes))
    assert Config.from_dict(tiny(partial_rotary_factor=1.0)) and Config.from_dict(tiny(partial_rotary_factor=None))


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe", "smollm3",
                                    "granite", "Llama", "", None, 3, ["llama"]])
def test_ld_30_unknown_families_are_refused_whatever_their_tensors_are_called(family):
    """LD-30 (sglang #38363; llm-compressor #2500): Gemma's tensors have Llama's names, but its norm is another."""
    with pytest.raises(ValueError, match="is not supported; this model runs llama, mistral, qwen2, qwen3"):
        Config.from_dict(tiny(family))


def test_ld_30_a_real_gemma_config_is_refused():
    """LD-30 (sglang #38363; llm-compressor #2500): as transformers writes it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("gemma", hidden_size=48, num_hidden_layers=2).to_dict()
    with pytest.raises(ValueError, match="model_type 'gemma' is not supported"):
        Config.from_dict(config)


@pytest.mark.parametrize("changes, message", [
    ({"num_local_experts": 8}, "num_local_experts is 8; mixture-of-experts"),
    ({"num_experts": 4}, "num_experts is 4; mixture-of-experts"),
    ({"n_routed_experts": 4}, "n_routed_experts is 4; mixture-of-experts"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only silu"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized with 'gptq' are not supported"),
    ({"quantization_config": "awq"}, "quantized with None"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic' is not supported; known are"),
    ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "RoPE type 'longrope' is not supported"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}},
     "rope_parameters holds one set for each kind of layer"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": {"type": "yarn", "factor": 4.0}},
     "rope_parameters ask for RoPE type 'default', rope_scaling for 'yarn'; keep one"),
    ({"rope_parameters": [1]}, r"rope_parameters is \[1\], but must be an object"),
    ({"rope_scaling": {"type": "linear"}}, "factor is None"),
    ({"rope_scaling": {"type": "yarn"}}, "factor is None"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1.0}, "rope_theta above 1"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": "false"}}, "truncate is 'false'"),
    ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
    ({"rope_scaling": {**LLAMA3, "low_freq_factor": 5.0}}, "low_freq_factor 5.0 exceeds high_freq_factor 4.0"),
    ({"rope_theta": 0}, "rope_theta is 0"),
    ({"num_key_value_heads": 4}, "6 query heads cannot be shared out among 4"),
    ({"num_key_value_heads": 12}, "6 query heads cannot be shared out among 12"),
    ({"head_dim": 7}, "head_dim is 7; rotary embedding needs an even number"),
    ({"num_attention_heads": 96, "num_key_value_heads": 96}, "head_dim is 0"),
    ({"sliding_window": 0}, "sliding_window is 0"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', but must be true or false"),
    ({"attention_bias": "no"}, "attention_bias is 'no'"),
    ({"hidden_size": 48.0}, "hidden_size is 48.0, but must be a whole number"),
    ({"hidden_size": True}, "hidden_size is True"),
    ({"vocab_size": None}, "vocab_size is None"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
])
def test_what_the_model_would_run_wrongly_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        Config.from_dict(tiny(**changes))


def test_a_sliding_window_limits_the_context_where_only_some_layers_have_it():
    """Mistral's window is every layer's, a mask. Qwen2's is that of some layers: within it, full attention is exact."""
    config = Config.from_dict(tiny("mistral", sliding_window=8))
    assert (config.max_seq_len, config.sliding_window) == (64, 8)
    config = Config.from_dict(tiny("qwen2", sliding_window=8))
    assert (config.max_seq_len, config.sliding_window) == (8, 8)
    model = random_model(tiny("qwen2", sliding_window=8))
    assert model(random_ids(1, 8)).shape == (1, 8, V)
    with pytest.raises(ValueError, match=r"9 tokens exceed this model's context of 8 \(its sliding window\)"):
        model(random_ids(1, 9))
    assert Config.from_dict(tiny("qwen2", sliding_window=8, use_sliding_window=False)).max_seq_len == 64
    wide = random_model(tiny("mistral", sliding_window=100))
    with pytest.raises(ValueError, match=r"65 tokens exceed this model's context of 64$"):
        wide(random_ids(65))


def test_tensors_that_do_not_fit_the_config_are_named():
    model = random_model(tiny(), dtype=torch.float32)
    tensors, ids = dict(model.state_dict()), random_ids(1, 4)
    old = {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # early Llama 2 files hold it
    assert worst(Llama.from_tensors(model.config, old)(ids), model(ids)) == 0
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=rf"{name} has shape \(48, 80\), but the config asks for \(80, 48\)"):
        Llama.from_tensors(model.config, {**tensors, name: tensors[name].T})
    with pytest.raises(ValueError, match=rf"{name} holds torch.int8, not floating-point"):
        Llama.from_tensors(model.config, {**tensors, name: tensors[name].to(torch.int8)})
    with pytest.raises(ValueError, match=r"has 2 tensors that its config does not explain, first score\.weight"):
        Llama.from_tensors(model.config, {**tensors, "score.weight": torch.ones(1), "x": torch.ones(1)})
    with pytest.raises(ValueError, match=r"lacks 21 of 21 tensors, first model.embed_tokens.weight"):
        Llama.from_tensors(model.config, {})


def test_weights_are_taken_one_at_a_time_and_not_copied_where_they_fit():
    source = random_model(tiny(), dtype=torch.float32).state_dict()
    model = Llama.from_tensors(Config.from_dict(tiny()), source)
    assert all(p.data_ptr() == source[n].data_ptr() and not p.requires_grad for n, p in model.named_parameters())
    assert not model.training and list(model.state_dict()) == list(source)
    half = Llama.from_tensors(model.config, source, torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert all(worst(p, source[n].bfloat16()) == 0 for n, p in half.named_parameters())


@pytest.mark.parametrize("changes", [
    {"hidden_size": 2**20, "intermediate_size": 2**20, "vocab_size": 2**24, "num_attention_heads": 2**16,
     "num_key_value_heads": 2**16, "head_dim": 2**14},
    {"num_hidden_layers": 400},
    {"vocab_size": 2**63}, {"hidden_size": 2**40}, {"intermediate_size": 10**30}, {"head_dim": 2**31},
    {"max_position_embeddings": 2**62}, {"num_attention_heads": 2**62, "num_key_value_heads": 1},
])
def test_a_config_that_claims_the_impossible_costs_neither_time_nor_memory(changes):
    begin, tensors = time.perf_counter(), random_model(tiny(), dtype=torch.float32).state_dict()
    with pytest.raises(ValueError):
        Llama.from_tensors(Config.from_dict(tiny(**changes)), tensors)
    assert time.perf_counter() - begin < 10


JUNK = [None, True, False, -1, 0, 1, 2, 3, 7, 8, 64, 2**31, 2**63, 10**400, -10**400, 0.5, 1.0, 1e308, 5e-324, -0.0,
        math.nan, math.inf, -math.inf, "", "x", "llama3", "8", "yarn", "default", "factors", [], [1], [None],
        [1.0] * 4, {}, {"a": 1}, {"rope_type": {}}, {"type": "yarn", "factor": 10**400}, b"x"]
ROPE_KEYS = ["rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast",
             "beta_slow", "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim",
             "truncate", "factors", "partial_rotary_factor"]
KEYS = [*TINY, "head_dim", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window",
        "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act", "num_experts", "quantization_config",
        "partial_rotary_factor", "original_max_position_embeddings", "model_type", "layer_types"]


def accept_or_refuse(config: dict) -> bool:
    """True if accepted; then the numbers must be usable. Anything but a ValueError is a fault."""
    begin = time.perf_counter()
    try:
        c = Config.from_dict(config)
    except ValueError:
        return False
    finally:
        assert time.perf_counter() - begin < 5, config
    cos, sin = Rotary(c)(torch.tensor([0, 1, 10**6]), torch.float32)
    assert cos.isfinite().all() and sin.isfinite().all(), config
    assert c.n_head % c.n_kv_head == 0 and c.head_dim % 2 == 0 and min(c.n_layer, c.vocab_size, c.max_seq_len) > 0
    return True


def test_fuzzed_configs_give_a_valueerror_or_a_usable_config():
    for key, value in itertools.product(KEYS, JUNK):  # every junk value for every key
        accept_or_refuse(tiny(**{key: value}) if key != "model_type" else tiny(value))
    for place, kind, key, value in itertools.product(["rope_scaling", "rope_parameters"],
                                                     ["linear", "llama3", "yarn", "factors"], ROPE_KEYS, JUNK):
        rope = {**LLAMA3, "factors": [1.0] * 4, "rope_type": kind}
        accept_or_refuse(tiny(**{place: {**rope, key: value}}))
    rng, accepted = random.Random(0), 0
    for _ in range(3000):  # several at once
        config = tiny(rng.choice(["llama", "mistral", "qwen2", "qwen3"]))
        for key in rng.sample(KEYS, rng.choice([0, 1, 2, 3])):
            config[key] = rng.choice(JUNK)
        if rng.random() < 0.5:
            values = [*JUNK, 1.5, 2.5, 16.0, 1000.0]
            config[rng.choice(["rope_scaling", "rope_parameters"])] = {
                "rope_type": rng.choice(["linear", "llama3", "yarn", "factors", "x"]),
                **{k: rng.choice(values) for k in rng.sample(ROPE_KEYS[1:], rng.randint(0, 6))}}
        for key in rng.sample(sorted(config), rng.choice([0, 0, 1])):
            del config[key]
        accepted += accept_or_refuse(config)
    assert 300 < accepted < 2700, accepted  # neither side is empty


# ------------------------------------------------------------------ packed weights


class Packed:
    """Stands for packed.py: layers that take a dict of codes and scales."""

    class QuantLinear(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.w, self.bias = weight["codes"].double() * weight["scales"], None

        def forward(self, x):
            return torch.nn.functional.linear(x, self.w, self.bias)

        @staticmethod
        def join(layers):
            if len({layer.w.shape for layer in layers}) > 1:
                return None
            joined = Packed.QuantLinear({"codes": torch.cat([layer.w for layer in layers]), "scales": 1})
            if layers[0].bias is not None:
                joined.bias = torch.cat([layer.bias for layer in layers])
            return joined

    class QuantEmbedding(torch.nn.Module):
        def __init__(self, weight, dtype):
            super().__init__()
            self.w = (weight["codes"].double() * weight["scales"]).to(dtype)

        def forward(self, ids):
            return self.w[ids]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("which", ["all", "up", "v"])
def test_packed_weights_become_the_layers_they_are_given_to(family, tied, which):
    """A dict in place of a tensor: the layer is made by the module that was passed in, biases and a tied head find it,
    and fuse_ joins what is alike: gate with up, q with k and v only if none of them is left in floats."""
    config = Config.from_dict({"model_type": family, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
                               "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 11,
                               "max_position_embeddings": 32, "tie_word_embeddings": tied})
    torch.manual_seed(0)
    floats, given = {}, {}
    for name, p in Llama(config).double().state_dict().items():
        floats[name] = given[name] = p
        pick = {"all": p.dim() == 2, "up": "up_proj" in name, "v": "v_proj.weight" in name}[which]
        if pick:
            codes = torch.randint(-8, 8, p.shape)
            given[name], floats[name] = {"codes": codes, "scales": 0.05}, codes.double() * 0.05
    ids = torch.tensor([[1, 5, 10, 3]])
    want = Llama.from_tensors(config, floats, torch.float64)(ids)
    model = Llama.from_tensors(config, given, torch.float64, packed=Packed)
    assert torch.allclose(model(ids), want, atol=1e-12)
    assert torch.allclose(model.fuse_()(ids), want, atol=1e-12)
    bare = model(ids[0], torch.arange(4), causal_attention)  # what is not joined is put side by side
    assert model.bare_blocks and torch.allclose(bare, want[0], atol=1e-12)
    block = model.model["layers"][0]
    assert (block.self_attn.qkv_proj is None) == (which == "v") and (block.mlp.gate_up_proj is None) == (which == "up")
    assert isinstance(model.model["embed_tokens"], Packed.QuantEmbedding) == (which == "all")
    with pytest.raises(ValueError, match=r"holds integer codes; pass the module packed\.py"):
        Llama.from_tensors(config, given, torch.float64)
    name = next(n for n in given if isinstance(given[n], dict))
    given[name] = {"codes": torch.zeros(3, 5), "scales": 1}
    with pytest.raises(ValueError, match=r"has shape \(3, 5\), but the config asks for"):
        Llama.from_tensors(config, given, torch.float64, packed=Packed)
