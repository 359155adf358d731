"""The layout question, settled by trial: does one whole decode step compile well on these caches and these weights?

The cache has one K and one V tensor a layer because a compiled step writes in place into tensors that are its own
inputs, while with one tensor for all layers functionalization copies the pool each step. Kept as a test (the compiled
step gives eager's tokens) and as a measurement:

    python tests/test_spike.py            eager against compiled, bfloat16 and packed int4, alternating in one run
"""
import statistics
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import gguf
from kvcache import PagedKVCache
from model import Config, Llama

PROMPT = [1, 4093, 198, 4898, 314, 260, 6376, 4461, 47, 2, 198, 1, 520, 9531, 198]
WINDOW = 640  # keys that the compiled step attends to, a fixed number: those not written yet are masked


class Int4Linear(nn.Module):
    """x @ W.T with W = codes * scales + zeros, codes 0..15 in groups of 32, through torch's packed CPU kernel."""

    def __init__(self, codes, scales, zeros):
        super().__init__()
        self.packed = torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        # The kernel computes (code - 8) * scale + zero. (K / 32, N, 2)
        self.scales_zeros = torch.stack((scales, zeros + 8 * scales), -1).transpose(0, 1).bfloat16().contiguous()

    def forward(self, x):
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, 32, self.scales_zeros)


class Int8AsTwoInt4(nn.Module):
    """A Q8_0 matrix exactly, as two int4 ones: code = 16 high + low, high -8..7, low 0..15."""

    def __init__(self, codes, scales):
        super().__init__()
        high = codes.int() >> 4
        low = codes.int() - 16 * high
        self.high, self.low = Int4Linear(high + 8, 16 * scales, -128 * scales), Int4Linear(low, scales, 0 * scales)

    def forward(self, x):
        return self.high(x) + self.low(x)


def load(path: str, packed: bool) -> Llama:
    """The default model in bfloat16, its matrices optionally as packed int4 straight from the file's codes."""
    with gguf.GGUF(path) as file:
        model = Llama.from_tensors(Config.from_dict(file.config), file, torch.bfloat16)
        if not packed:
            return model.fuse_()

        def join(*names):
            parts = [file.codes(f"{name}.weight") for name in names]
            return Int4Linear(*(torch.cat([p[k] for p in parts]) for k in ("codes", "scales", "mins")))

        for i, block in enumerate(model.model["layers"]):
            a, m, at = block.self_attn, block.mlp, f"model.layers.{i}."
            a.qkv_proj = join(*(f"{at}self_attn.{x}_proj" for x in "qkv"))
            m.gate_up_proj = join(*(f"{at}mlp.{x}_proj" for x in ("gate", "up")))
            a.q_proj = a.k_proj = a.v_proj = m.gate_proj = m.up_proj = None
            a.o_proj, m.down_proj = join(f"{at}self_attn.o_proj"), join(f"{at}mlp.down_proj")
        head = file.codes("model.embed_tokens.weight")
        model.lm_head = Int8AsTwoInt4(head["codes"], head["scales"])
    return model


def new_cache(model: Llama) -> PagedKVCache:
    c = model.config
    cache = PagedKVCache(c.n_layer, c.n_kv_head, c.head_dim, WINDOW // 16, 16, dtype=torch.bfloat16)
    for pool in (*cache.k, *cache.v):
        # subtle: a step of fixed size reads slots that nobody has written. Masking their scores does not help against
        # a NaN that happens to lie there (0 * NaN is NaN), so such a step needs a pool that was zeroed once.
        pool.zero_()
    return cache


def whole_step(model: Llama):
    """step(token (1,), position (1,), mask (1, WINDOW), k, v) -> logits (1, V): k and v are the caches' own tensors.

    The sequence lies at the pool's beginning, so that slot = position.
    """
    H, G, D = model.config.n_head, model.config.n_kv_head, model.config.head_dim

    def step(token, position, mask, k, v):
        def attend(layer, q, k_new, v_new):
            keys, values = k[layer].flatten(0, 1), v[layer].flatten(0, 1)  # (slots, G, D)
            keys.index_copy_(0, position, k_new)
            values.index_copy_(0, position, v_new)
            out = F.scaled_dot_product_attention(
                q.view(1, G, H // G, D), keys[:WINDOW].transpose(0, 1)[None], values[:WINDOW].transpose(0, 1)[None],
                attn_mask=mask, scale=D ** -0.5)
            return out.reshape(1, H, D)

        return model(token, position, attend)

    return step


@torch.inference_mode()
def prefill(model, cache, ids):
    cache.add("a")
    step = cache.extend({"a": ids})
    logits = model(step.tokens, step.positions, step.attend, step.last())
    cache.commit(step)
    return int(logits.argmax())


@torch.inference_mode()
def eager_steps(model, cache, token, n, forced=None):
    """n greedy steps from `token` on (or along the `forced` tokens): the logits (n, V) and the seconds of each."""
    logits, seconds = [], []
    for i in range(n):
        begin = time.perf_counter()
        step = cache.extend({"a": [token]})
        logits.append(model(step.tokens, step.positions, step.attend, step.last())[0])
        token = int(logits[-1].argmax()) if forced is None else forced[i]
        cache.commit(step)
        seconds.append(time.perf_counter() - begin)
    return torch.stack(logits), seconds


@torch.inference_mode()
def compiled_steps(step, cache, token, n, forced=None):
    """The same through the compiled step, which shares the cache's tensors."""
    logits, seconds = [], []
    for i in range(n):
        begin = time.perf_counter()
        position = cache.length("a") + i
        mask = (torch.arange(WINDOW) <= position)[None]
        logits.append(step(torch.tensor([token]), torch.tensor([position]), mask, cache.k, cache.v)[0].clone())
        token = int(logits[-1].argmax()) if forced is None else forced[i]
        seconds.append(time.perf_counter() - begin)
    return torch.stack(logits), seconds


def same_but_for_ties(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The likeliest tokens of logits a and b (n, V) are equal, but for steps where a's two best are a rounding apart:
    logits near 20 are 0.125 apart in bfloat16."""
    a, b = a.float(), b.float()
    gap = a.max(-1).values - a.gather(1, b.argmax(-1, keepdim=True))[:, 0]
    return bool((gap <= 0.25).all()) and int((gap == 0).sum()) >= len(a) - 3


@pytest.mark.slow
def test_whole_step_compiles_in_place_and_gives_eagers_tokens(default_gguf):
    model = load(default_gguf, packed=True)
    cache = new_cache(model)
    first = prefill(model, cache, PROMPT)
    keys, addresses = cache.k[29].flatten(0, 1), [k.data_ptr() for k in cache.k]
    eager, _ = eager_steps(model, cache, first, 24)
    tokens = eager.argmax(-1).tolist()
    by_eager = keys[len(PROMPT): len(PROMPT) + 24].clone()
    cache.trim("a", len(PROMPT))
    keys[len(PROMPT):] = 1e4  # what the compiled step does not write itself would be noticed
    step = torch.compile(whole_step(model), fullgraph=True, dynamic=False)
    compiled, _ = compiled_steps(step, cache, first, 24, forced=tokens)
    assert same_but_for_ties(eager, compiled)
    assert [k.data_ptr() for k in cache.k] == addresses
    assert torch.allclose(by_eager.float(), keys[len(PROMPT): len(PROMPT) + 24].float(), atol=0.25, rtol=0.1)
    assert not same_but_for_ties(eager, compiled.roll(1, 0)), "the comparison would notice other logits"


if __name__ == "__main__":
    import checkpoint

    path, prompt = checkpoint.default_model(), (PROMPT * 40)[:512]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, context 512, ms per step, medians of 5 x 20")
    for packed in (False, True):
        model = load(path, packed)
        step = torch.compile(whole_step(model), fullgraph=True, dynamic=False)
        caches = new_cache(model), new_cache(model)
        firsts = [prefill(model, cache, prompt) for cache in caches]
        begin = time.perf_counter()
        compiled_steps(step, caches[1], firsts[1], 2)
        compile_s, times = time.perf_counter() - begin, ([], [])
        for _ in range(5):
            times[0].extend(eager_steps(model, caches[0], firsts[0], 20)[1])
            caches[0].trim("a", 512)
            times[1].extend(compiled_steps(step, caches[1], firsts[1], 20)[1])
        eager, compiled = (1e3 * statistics.median(t) for t in times)
        print(f"{'int4' if packed else 'bfloat16':9} eager {eager:.2f}   compiled {compiled:.2f}   "
              f"eager/compiled {eager / compiled:.2f}   compiling took {compile_s:.0f} s")
