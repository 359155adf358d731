"""roofline.py: the worked numbers of the field, one by one, as they are stated; counts against transformers, sums term
by term, waiting times against a simulation; whatever a config.json holds, one line says what is wrong with it."""
import heapq
import json
import math
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import roofline as r
from roofline import CHIPS, Chip, Demand, Shape, kv_bytes, model, step_s, weight_bytes

ROOT = Path(__file__).resolve().parent.parent
GB, KiB, MiB, GiB = 1e9, 2**10, 2**20, 2**30
H100 = CHIPS["h100"]
NODE = H100.times(8)
L8 = replace(model("llama-3-8b"), n_params=8.0e9)     # the rounded counts that the numbers were made with
L70 = replace(model("llama-3-70b"), n_params=70.6e9)
QWEN = replace(model("qwen2.5-1.5b"), n_params=1.54e9)


def holds(value, stated, digits=2):
    """Equal when both are rounded to so many significant digits."""
    return f"{value:.{digits}g}" == f"{stated:.{digits}g}"


# ------------------------------------------------------------------ the worked numbers


def n1():
    assert kv_bytes(32, 32, 128) == 524_288 == 0.5 * MiB


def n2():
    """4k tokens of N1, and 32 such chats, beside 14 GB of weights."""
    one = 4096 * kv_bytes(32, 32, 128)
    assert one == 2 * GiB and 32 * one == 64 * GiB and weight_bytes(7e9) == 14 * GB


def n3():
    assert round(1 / step_s(0, 14 * GB, Chip("", 1, 3.3e12, 1)), 1) == 235.7
    assert round(1 / step_s(0, 14 * GB, H100), 1) == 239.3


def n4():
    assert kv_bytes(80, 64, 128) / kv_bytes(80, 8, 128) == 8


def n5():
    assert [weight_bytes(70e9, bits) / GB for bits in (16, 8, 4, 3)] == [140, 70, 35, 26.25]


def n6():
    """The same question has two answers: it depends on the G of GB."""
    assert kv_bytes(80, 8, 128) == 320 * KiB
    assert r.sequences_that_fit(40 * GiB, L70, 32_768) == 4
    assert r.sequences_that_fit(40 * GB, L70, 32_768) == r.sequences_that_fit(40 * GB, L70, 32_000) == 3
    assert holds(40 * GB / (32_000 * L70.kv_bytes), 3.81, 3)


def n7():
    assert round(H100.ridge, 1) == 295.2 and holds(H100.ridge, 300, 1)


def n8():
    assert kv_bytes(32, 8, 128) == L8.kv_bytes == 131_072 == 128 * KiB


def n9():
    assert holds(8000 * L8.kv_bytes / GB, 1.049, 4) and holds(100 * 8000 * L8.kv_bytes / GB, 104.9, 4)


def n10():
    sizes = [8192 * kv_bytes(32, heads, 128) for heads in (32, 8, 1)]
    assert sizes == [4 * GiB, GiB, 128 * MiB]


def n11():
    """Of the arithmetic a batch of 1 uses a third of a percent."""
    assert weight_bytes(8e9) == 16 * GB
    seconds = r.decode_s(L8, 1, 0, H100)
    assert holds(1 / seconds, 209.4, 4) and holds(1 / seconds, 200, 1)
    assert holds(r.matmul_intensity(L8, 1) / H100.ridge, 0.00339, 3)


def n12():
    assert r.score_bytes(32_000, bits=8) == 1.024e9  # a byte an entry


def n13():
    """Steps of a prompt of 4, K and V computed so far."""
    assert [r.kv_rows(4, t) for t in range(5)] == [4, 5, 6, 7, 8]
    assert [r.kv_rows(4, t, cached=False) for t in range(5)] == [4, 9, 15, 22, 30]


def n14():
    """The online softmax, by flash.py: the same in one tile and in two."""
    import torch

    from flash import online_softmax

    scores, values = torch.tensor([-0.45, -1.45]), torch.tensor([0.75, 0.13])
    for tile in (1, 2):
        m, l, out = list(online_softmax(scores, values, tile))[-1]
        assert (round(m, 2), round(l, 3), round(out, 3)) == (-0.45, 1.368, 0.583)
        assert out == pytest.approx((scores.double().softmax(0) @ values.double()).item())


def n15():
    """As the clock of traffic.py has it: from the arrival to the last token."""
    from traffic import Timeline

    t = Timeline(1.0, [1.5, 1.75, 2.0, 2.25, 2.5])
    assert r.e2e(t.ttft, t.tpot, 5) == t.e2e == 1.5 and r.e2e(0.5, 9, 1) == 0.5


def n16():
    seconds = r.decode_s(L8, 1, 0, H100)
    assert holds(seconds, 0.004776, 4) and holds(1 / seconds, 210)
    assert holds(r.decode_s(model("llama-3-8b"), 1, 0, H100), 0.0048), "with the exact count"


def n17():
    assert holds(64 * 2048 * L8.kv_bytes / GB, 17.18, 4)
    seconds = r.decode_s(L8, 64, 2048, H100)
    assert holds(seconds, 0.009904, 4) and holds(64 / seconds, 6462, 4)
    assert holds(64 * r.flops_per_token(L8) / H100.flops, 0.001035, 4)


def n18():
    """At the peak, and at 40 to 54% of it."""
    flops = 1000 * r.flops_per_token(L8)
    assert flops == 16e12 and holds(flops / H100.flops, 0.01618, 4)
    assert holds(r.prefill_s(L8, 1000, H100), 0.016), "with attention"
    assert r.prefill_s(L8, 1000, H100, mfu=0.54) > 0.030 and r.prefill_s(L8, 1000, H100, mfu=0.42) < 0.040


def n19():
    card = Chip("RTX 5060", 1e15, 448e9, 8e9)
    small, four = step_s(0, 3.1 * GB, card), step_s(0, 4.1 * GB, card)
    assert holds(small, 0.006920, 4) and holds(1 / small, 144.5, 4)
    assert holds(four, 0.00915, 3) and holds(1 / four, 109.3, 4)


def n20():
    """12, 28, 128 and 320 KiB a token; GiB at 32,768 tokens."""
    for sizes, kib, gib in (((24, 2, 64), 12, 0.375), ((28, 2, 128), 28, 0.875), ((32, 8, 128), 128, 4),
                            ((80, 8, 128), 320, 10)):
        assert kv_bytes(*sizes) == kib * KiB and 32_768 * kv_bytes(*sizes) == gib * GiB
    assert [model(name).kv_bytes for name in r.PRESETS] == [128 * KiB, 320 * KiB, 28 * KiB]


def n21():
    assert holds(r.static_utilization([2000, *[50] * 7]), 0.147, 3)


def n22():
    one = 1000 * L70.kv_bytes
    assert holds(one / 1e6, 327.7, 4) and holds(1000 * one / GB, 327.7, 4) and Demand(1, 1, 1).link == 50 * GB


def n23():
    assert holds(r.expected_tokens(0.8, 4), 3.3616, 5) and holds(r.speedup(0.8, 4, 0.05), 2.801, 4)


def n24():
    """Twelve cells, in test_best_k; the near tie, in the sum and in the closed form."""
    assert holds(r.speedup(0.7, 5, 0.05), 2.352936, 7) and holds(r.speedup(0.7, 6, 0.05), 2.352938, 7)
    assert (1 - 0.7**7) / (0.3 * 1.3) > (1 - 0.7**6) / (0.3 * 1.25)


def n25():
    assert r.bits_per_weight(4, group=128) == 4.125


def n26():
    """GB in 16, 8 and 4.125 bits."""
    bits = (16, 8, r.bits_per_weight(4, 128))
    assert [weight_bytes(8e9, b) / GB for b in bits] == [16, 8, 4.125]
    assert [round(weight_bytes(70.6e9, b) / GB, 1) for b in bits] == [141.2, 70.6, 36.4]


def n27():
    assert r.score_bytes(8192) == 128 * MiB and r.score_bytes(8192, n_head=32, batch=8) == 32 * GiB


def n28():
    assert holds(r.occupied(32, 132), 0.242, 3) and holds(1 - r.occupied(32, 132), 0.76)


def n29():
    attention = r.flops_per_token(L70, 500) - r.flops_per_token(L70)
    assert holds(r.flops_per_token(L70) / GB, 141.2, 4) and holds(attention / GB, 1.3)
    assert holds(attention / r.flops_per_token(L70), 0.009, 1)


def n30():
    text = r.explain(r.plan(L70, H100, Demand(1000, 1000, 300)))
    assert "1,000/s x 1,000 = 1,000,000 tokens/s" in text and "1,000/s x 300 = 300,000 tokens/s" in text


def n31():
    """Without attention, as stated: 285 GPUs of pure compute, 357 at 80% load, 36 ms on eight."""
    work = 1e6 * r.flops_per_token(L70)
    assert holds(work / 1e15, 141, 3) and holds(work / (0.5 * H100.flops), 285.5, 4)
    assert holds(work / (0.5 * H100.flops) / 0.8, 356.9, 4)
    assert holds(1000 * r.flops_per_token(L70) / (0.5 * NODE.flops), 0.0357, 3)
    assert holds(r.prefill_s(L70, 1000, NODE, mfu=0.5), 0.036), "with attention"


def n32():
    room = r.kv_room(L70, NODE, reserve=0.1)
    assert NODE.memory == 640 * GB and holds(room / GB, 434.8, 4) and holds(room / L70.kv_bytes / 1e6, 1.327, 4)
    assert holds(room / L70.kv_bytes / 1150, 1153.8, 5) and r.sequences_that_fit(room, L70, 1150) == 1153


def n33():
    """K and V in GB, ms of memory and of compute (without attention), tokens/s of the rounded step. One overhead, 30 us
    a layer, gives the three stated steps, with attention as without. (Hundredths of ms are those of 141 GB of weights.)
    """
    for batch, kv, memory, compute, step, speed in (
            (128, 48.2, 7.06, 4.57, 9, 14.2), (256, 96.5, 8.86, 9.14, 12, 21.3), (512, 192.9, 12.46, 18.27, 21, 24.4)):
        n_bytes, flops = r.decode_bytes(L70, batch, 1150), batch * r.flops_per_token(L70)
        assert round((n_bytes - L70.weight_bytes) / GB, 1) == kv
        assert round(1e3 * n_bytes / NODE.bandwidth, 1) == {128: 7.1, 256: 8.9, 512: 12.5}[batch]
        assert round(1e3 * r.decode_bytes(replace(L70, n_params=70.5e9), batch, 1150) / NODE.bandwidth, 2) == memory
        assert round(1e3 * flops / (0.5 * NODE.flops), 2) == compute
        assert round(1e3 * step_s(flops, n_bytes, NODE, mfu=0.5, overhead_s=80 * 30e-6)) == step
        assert round(1e3 * r.decode_s(L70, batch, 1150, NODE, mfu=0.5, overhead_s=80 * 30e-6)) == step
        assert round(batch / step, 1) == speed


def n34():
    replicas = math.ceil(3e5 / 21e3)
    assert (replicas, 8 * replicas, 8 * replicas / 0.8) == (15, 120, 150)


def n35():
    assert 510 * 2.5 == 1275 and 3e5 * 3600 == 1.08e9
    assert holds(r.cost_per_million(510, 2.5, 3e5), 1.181, 4) and holds(r.cost_per_million(510, 2.5, 1.3e6), 0.2724, 4)


def n36():
    """FP8 weights and activations; K and V stay in 16 bits (in 8 the memory's time would be 4.4 ms)."""
    half, fast = replace(L70, weight_bits=8), replace(NODE, flops=2 * NODE.flops)
    assert holds(1e6 * r.flops_per_token(L70) / (0.5 * 2 * H100.flops) / 0.8, 180)
    assert holds(1e3 * r.decode_bytes(half, 256, 1150) / NODE.bandwidth, 6.23, 3)
    assert holds(1e3 * r.decode_bytes(replace(half, kv_bits=8), 256, 1150) / NODE.bandwidth, 4.4)
    assert holds(1e3 * 256 * r.flops_per_token(half) / (0.5 * fast.flops), 4.57, 3)
    assert round(1e3 * r.decode_s(half, 256, 1150, fast, mfu=0.5, overhead_s=0.001)) == 7
    assert 8 <= 3e5 / (256 / 0.007) <= 10


def n37():
    """A prompt of 100k is 100 times one of 1k (the products; attention comes on top); half of it cached, half."""
    long = 100_000 * r.flops_per_token(L70)
    assert long / (1000 * r.flops_per_token(L70)) == 100 and r.prefill_flops(L70, 100_000) > 1.5 * long
    assert holds(r.prefill_flops(L70, 1000) / r.prefill_flops(L70, 1000, cached=500), 2, 2)
    assert holds(1e6 * L70.kv_bytes / 15 / GB, 21.8, 3)


def n38():
    """Qwen2.5-1.5B on 8 GB: 3.5 to 4 GB of K and V, then a step of 32 sequences of 2,048 tokens."""
    card = Chip("RTX 5060", 1e15, 448e9, 8e9)
    assert [int(room * GB / QWEN.kv_bytes / 1000) for room in (3.5, 4)] == [122, 139]
    assert holds(130_000 / 2048, 63.5, 3) and holds(32 * 2048 * QWEN.kv_bytes / GB, 1.879, 4)
    seconds = step_s(0, 3.1 * GB + 32 * 2048 * QWEN.kv_bytes, card)
    assert holds(seconds, 0.01111, 4) and holds(32 / seconds, 2879, 3)
    assert holds(32 * r.flops_per_token(QWEN) / GB, 98.6, 3)


def n39():
    assert holds(100_000 * L70.kv_bytes / GB, 32.8, 3)


def n40():
    """The toy's step, by speculative.py's rule: "the" is kept, "dog" is replaced by "cat", and nothing follows."""
    import torch

    from sampling import draw
    from speculative import verify

    words = ["the", "cat", "sat", "dog"]
    target = torch.eye(4, dtype=torch.float64)[[0, 1, 2, 2]][None]  # the, cat, sat, and one more
    drafts = torch.tensor([[words.index(w) for w in ("the", "dog", "sat")]])
    for q in (None, torch.eye(4, dtype=torch.float64)[drafts[0]][None]):
        n, after = verify(drafts, q, target, torch.full((1, 3), 0.5), torch.full((1, 4), 0.5), draw)
        assert [words[i] for i in [*drafts[0, :n].tolist(), after.item()]] == ["the", "cat"]


def n41():
    """A prompt's intensity is its length; a decode step's at most its batch, and less the longer the contexts."""
    for P in (1, 7, 1000):
        assert r.matmul_intensity(L8, P) == pytest.approx(P)
    for B in (1, 64, 256):
        found = [r.matmul_intensity(L8, B, B * n) for n in (0, 1, 2048, 100_000)]
        formula = [2 * 8e9 * B / (2 * 8e9 + B * n * 131_072) for n in (0, 1, 2048, 100_000)]
        assert found == pytest.approx(formula) and found == sorted(found, reverse=True) and found[0] == pytest.approx(B)


NUMBERS = [globals()[f"n{i}"] for i in range(1, 42)]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda f: f.__name__.upper())
def test_worked_number(number):
    number()


@pytest.mark.parametrize(("alpha", "cells"), [
    (0.6, [(4, 1.92), (3, 1.67), (2, 1.40)]), (0.7, [(6, 2.35), (4, 1.98), (3, 1.58)]),
    (0.8, [(8, 3.09), (6, 2.47), (4, 1.87)]), (0.9, [(13, 4.67), (10, 3.43), (7, 2.37)])])
def test_best_k(alpha, cells):
    for cost, (k, gain) in zip((0.05, 0.1, 0.2), cells):
        assert r.best_k(alpha, cost, most=40) == k and round(r.speedup(alpha, k, cost), 2) == gain
        closed = [(1 - alpha ** (j + 1)) / ((1 - alpha) * (j * cost + 1)) for j in range(41)]
        assert closed[k] == max(closed) == pytest.approx(r.speedup(alpha, k, cost))


# ------------------------------------------------------------------ counted another way


@pytest.mark.parametrize(("family", "changes"), [
    ("Llama", {}), ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("Llama", {"head_dim": 24}), ("Mistral", {"sliding_window": 64}), ("Qwen2", {}), ("Qwen3", {"head_dim": 32}),
    ("Qwen3", {"attention_bias": True, "tie_word_embeddings": True}), ("Qwen2", {"num_key_value_heads": 1})])
def test_parameters_are_as_many_as_transformers_makes(tmp_path, family, changes):
    transformers = pytest.importorskip("transformers")
    import torch

    config = getattr(transformers, f"{family}Config")(**{
        "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "vocab_size": 301, "max_position_embeddings": 128, **changes})
    with torch.device("meta"):
        theirs = getattr(transformers, f"{family}ForCausalLM")(config)
    config.save_pretrained(tmp_path)
    ours = model(tmp_path)
    assert ours == replace(model(tmp_path / "config.json"), name=ours.name)
    assert ours.n_params == sum(p.numel() for p in theirs.parameters())
    heads, dim = config.num_key_value_heads, getattr(config, "head_dim", None) or 96 // 6
    assert ours.kv_bytes == 3 * 2 * heads * dim * 2
    assert ours.window == (64 if family == "Mistral" else None)


def test_presets_have_the_published_sizes():
    assert [model(name).n_params for name in r.PRESETS] == [8_030_261_248, 70_553_706_496, 1_543_714_304]


def test_mla_and_quantized_caches():
    """DeepSeek-V2 keeps 576 numbers a layer; int8 with a float32 scale a head of 64 is 8.5 bits."""
    assert r.mla_kv_bytes(60, 512, 64) == 60 * (512 + 64) * 2 == kv_bytes(60, 128, 128) * 9 / 512
    assert kv_bytes(30, 3, 64, r.bits_per_weight(8, 64, scale_bits=32)) == 12_240, "as kvcache.py counts it"
    assert r.bits_per_weight(4, 32, 16, 16) == 5 and weight_bytes(3, 3) == 9 / 8


@pytest.mark.parametrize("window", [None, 1, 3, 7, 50])
@pytest.mark.parametrize(("prompt", "cached"), [(1, 0), (2, 1), (7, 0), (7, 3), (8, 7), (40, 13)])
def test_operations_token_by_token(prompt, cached, window):
    shape = Shape("tiny", 1000, 2, 4, 2, 8, window=window)
    each = [2 * 1000 + 4 * 2 * 4 * 8 * min(i, window or i) for i in range(cached + 1, prompt + 1)]
    assert r.prefill_flops(shape, prompt, cached) == sum(each)
    assert r.decode_flops(shape, 3, prompt) == 3 * each[-1]
    kept = min(prompt, window or prompt)
    assert r.decode_bytes(shape, 3, prompt) == 2000 + 3 * kept * 2 * 2 * 2 * 8 * 2
    assert r.prefill_bytes(shape, prompt, cached) == 2000 + (min(cached, window or cached) + len(each)) * 128


def test_a_prompt_in_chunks_costs_the_same_operations():
    """A chunk behind cached tokens is a prompt of which those are cached."""
    chunks = sum(r.prefill_flops(L8, end, end - 250) for end in (250, 500, 750, 1000))
    assert chunks == pytest.approx(r.prefill_flops(L8, 1000), rel=1e-12)


def test_a_step_takes_the_longer_of_two_times():
    chip = Chip("", 100, 10, 1)
    assert step_s(100, 1, chip) == 1 and step_s(1, 100, chip) == 10 and chip.ridge == 10
    assert step_s(100, 10, chip, overhead_s=0.5) == 1.5, "they are equal at the ridge"
    assert step_s(100, 10, chip, mfu=0.5) == 2 and step_s(100, 10, chip, mbu=0.25) == 4
    assert chip.times(4) == Chip("", 400, 40, 4, count=4) and str(H100.times(2)) == "2 x H100"
    assert step_s(100, 10, chip.times(4)) == 0.25


def test_tensor_parallelism_copies_the_keys_that_it_cannot_share_out():
    assert L70.on(8) == L70 and L70.on(16).kv_bytes == 2 * L70.kv_bytes and QWEN.on(4).kv_bytes == 2 * QWEN.kv_bytes
    for n in (0, -2, 3, 128):
        with pytest.raises(ValueError, match="cannot be shared out among"):
            L70.on(n)


def test_verifying_drafts_is_free_only_in_small_batches():
    cost = [r.verify_cost(L8, batch, 500, H100) for batch in (1, 64, 1024)]
    assert cost[0](9) == 1 and all(c(1) == 1 for c in cost) and 1 < cost[1](40) < cost[2](40) <= 40
    ks = [r.best_k(0.8, 0.05, c, most=20) for c in cost]
    assert ks[0] == 8 and ks[2] <= 1 and ks == sorted(ks, reverse=True)


# ------------------------------------------------------------------ waiting


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (1, 0.9), (3, 0.8), (10, 0.95)])
def test_waiting_against_a_simulation(servers, load):
    """Of 200,000 simulated requests, a share near 95% waits less; the formula of another load must not say so. Times of
    service that are all alike wait less, as the docstring promises."""
    n, rng = 200_000, random.Random(7)
    for even in (False, True):
        free, now, waits = [0.0] * servers, 0.0, []
        for _ in range(n):
            now += rng.expovariate(load * servers)
            begin = max(now, heapq.heappop(free))
            heapq.heappush(free, begin + (1.0 if even else rng.expovariate(1)))
            waits.append(begin - now)

        def below(rate, waits=waits):
            limit = r.wait_s(rate, 1.0, servers)
            return sum(w <= limit for w in waits) / n

        right, wrong = below(load * servers), below(load * servers * 0.9)
        assert right > 0.96 if even else (abs(right - 0.95) < 0.012 and wrong < 0.938)


def test_waiting_at_the_edges():
    assert r.wait_s(5, 1.0, 5) == r.wait_s(6, 1.0, 5) == math.inf and r.wait_s(1e-6, 1.0, 1) == 0
    assert r.wait_s(800, 1.0, 1000) == 0 and r.wait_s(90_000, 1, 100_000) == 0


# ------------------------------------------------------------------ the plan


def test_the_plan_of_a_70b_model_is_the_published_one():
    """About 510 GPUs, 360 and 150, 12 ms at batch 256, $1.2 and $0.27 a million; attention and whole replicas are
    counted here, so prefill has 46 replicas of 8."""
    p = r.plan(model("llama-3-70b"), H100, Demand(rps=1000, n_in=1000, n_out=300))
    assert (p.group.count, p.batch, p.prefill_replicas, p.decode_replicas, p.gpus) == (8, 256, 46, 18, 512)
    assert round(1e3 * p.step_s) == 12 and p.slots == 1154 and p.wait_s + p.prompt_s < 0.05
    assert holds(r.cost_per_million(p.gpus, 2.5, 3e5), 1.2) and holds(r.cost_per_million(p.gpus, 2.5, 1.3e6), 0.27)


LOADS = [Demand(0.1, 500, 100), Demand(20, 2000, 400, hit=0.6), Demand(300, 100, 50, mfu=0.3, mbu=0.7, load=0.6),
         Demand(7, 7000, 1, tpot_s=0.05, ttft_s=3), Demand(50, 1, 1000, overhead_s=0.0, reserve=0.3)]


@pytest.mark.parametrize("demand", LOADS)
@pytest.mark.parametrize("gpu", ["h100", "b200", "a100", "rtx-4090"])
def test_no_other_plan_that_keeps_the_limits_is_smaller(demand, gpu):
    """Every number of GPUs and every batch, tried one by one from the definitions."""
    shape, chip, d = model("llama-3-8b"), CHIPS[gpu], demand
    best = math.inf
    for n in (1, 2, 4, 8):
        g, seen = chip.times(n), d.n_in + d.n_out / 2
        room = g.memory * (1 - d.reserve) - shape.weight_bytes
        over = 0.00003 * 32 if d.overhead_s is None else d.overhead_s
        new = d.n_in - min(d.n_in - 1, round(d.hit * d.n_in))
        flops = sum(2 * shape.n_params + 4 * 32 * 4096 * i for i in range(d.n_in - new + 1, d.n_in + 1))
        alone = max(flops / d.mfu / g.flops, (16 * shape.n_params / 8 + d.n_in * 131_072) / d.mbu / g.bandwidth) + over
        work = flops / d.mfu / g.flops
        pools = max(1, math.ceil(d.rps * work / d.load))
        while alone <= d.ttft_s and alone + r.wait_s(d.rps, work, pools) > d.ttft_s:
            pools += 1
        for b in (2**i for i in range(20)):
            read = shape.weight_bytes + b * seen * 131_072
            step = max(b * (2 * shape.n_params + 4 * 32 * 4096 * seen) / d.mfu / g.flops, read / d.mbu / g.bandwidth)
            if b * seen * 131_072 <= room and step + over <= d.tpot_s and alone <= d.ttft_s:
                best = min(best, n * (pools + max(1, math.ceil(d.rps * d.n_out * (step + over) / b / d.load))))
    found = r.plan(shape, chip, demand)
    assert found.gpus == best and found.step_s <= d.tpot_s and found.wait_s + found.prompt_s <= d.ttft_s
    assert found.batch <= found.slots and "  <- taken" in r.explain(found)


def test_more_load_needs_no_fewer_gpus():
    gpus = [r.plan(L8, H100, Demand(rps, 1000, 300)).gpus for rps in (0.001, 1, 10, 100, 1000, 10_000)]
    assert gpus == sorted(gpus) and gpus[0] == 2
    assert r.plan(L8, H100, Demand(100, 1000, 300, hit=0.9)).gpus < r.plan(L8, H100, Demand(100, 1000, 300)).gpus


@pytest.mark.parametrize(("change", "message"), [
    ({"rps": 0}, "rps is 0, but must be"), ({"rps": math.nan}, "rps is nan"), ({"rps": 1e7}, "at most 1,000,000"),
    ({"n_in": 0}, "n_in is 0"), ({"n_out": 1.5}, "n_out is 1.5"), ({"mfu": 1.1}, "mfu"),
    ({"hit": 1}, "hit is 1"), ({"price": -1}, "price is -1"), ({"tpot_s": math.inf}, "tpot_s is inf")])
def test_a_demand_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        Demand(**{"rps": 1, "n_in": 10, "n_out": 10, **change})


@pytest.mark.parametrize(("arguments", "message"), [
    ((L8, H100, Demand(1, 8000, 194)), r"8,000 \+ 194 tokens exceed llama-3-8b's context of 8,192"),
    ((L70, H100, Demand(1, 100, 10), 1), "batch of 1 with 105 tokens each need 141.2 GB, but H100 has 72.0 GB"),
    ((L70, H100, Demand(1, 1000, 300), 2, 64), "64 with 1,150 tokens each need 165.3 GB, but 2 x H100 has 144.0 GB"),
    ((L8, H100, Demand(1, 100, 10, tpot_s=0.001)), r"takes 1\.\d+ ms on 8 x H100, above the limit of 1 ms;"),
    ((L8, H100, Demand(1, 8000, 10, ttft_s=0.01)), "a prompt takes .* above the limit of 10 ms"),
    ((L8, CHIPS["a100"], Demand(1e6, 8000, 9), 1), "are the most"), ((L8, H100, Demand(1, 1, 1), 1, 0), "batch is 0"),
    ((L8, H100, Demand(1, 1, 1), -2), "cannot be shared out among -2 GPUs")])
def test_a_plan_that_cannot_be_had(arguments, message):
    with pytest.raises(ValueError, match=message):
        r.plan(*arguments)
    r.plan(L8, H100, Demand(1, 8000, 193, ttft_s=9))  # the whole context, and one token that is never read


# ------------------------------------------------------------------ config.json, from anyone

GOOD = dict(r.PRESETS["llama-3-8b"])


def broken(tmp_path, text) -> str:
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else json.dumps(text).encode())
    with pytest.raises(ValueError) as error:
        model(path)
    message = str(error.value)
    assert "\n" not in message and message.isprintable() and len(message) < 400
    return message


@pytest.mark.parametrize("key", [k for k in r.KEYS if k not in ("model_type", "tie_word_embeddings")])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, [], {}, 10**30, "x" * 10_000, math.nan])
def test_a_value_of_the_wrong_kind(tmp_path, key, value):
    assert key in broken(tmp_path, {**GOOD, key: value})


@pytest.mark.parametrize(("change", "message"), [
    ({"model_type": "gpt2"}, "model_type 'gpt2' is not known here; known are llama"), ({"model_type": None}, "None"),
    ({"model_type": ["llama"]}, "not known"), ({"n_routed_experts": 64}, "mixture of experts"),
    ({"num_key_value_heads": 5}, "32 query heads cannot be shared out among 5"), ({"hidden_size": None}, "hidden_size"),
    ({"tie_word_embeddings": "false"}, "must be true or false"), ({"attention_bias": 2}, "attention_bias is 2"),
    ({"sliding_window": -1}, "sliding_window"), ({"head_dim": 2**40}, "head_dim")])
def test_a_config_that_would_be_counted_wrongly(tmp_path, change, message):
    assert message in broken(tmp_path, {**GOOD, **change})


@pytest.mark.parametrize(("text", "message"), [
    (b"", "is not JSON"), (b"\xff\xfe", "is not JSON"), (b"[" * 200_000, "is not JSON"), (b"[1]", "holds a JSON list"),
    (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not JSON"), (b" " * (2**20 + 1), "more than 1,048,576 bytes"),
    (b'{"model_type": "\\u001b[2J\\n"}', "not known")])
def test_a_file_that_is_no_config(tmp_path, text, message):
    assert message in broken(tmp_path, text)


def test_other_fields_are_ignored_and_files_are_files(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GOOD, "surprise": [[{}]], "torch_dtype": 7, "auto_map": {"x": "evil.py"}}))
    assert replace(model(path), name="llama-3-8b") == model("llama-3-8b")
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", tmp_path / "absent", tmp_path / "absent" / "config.json", "a\0b", "x" * 5000, ""):
        with pytest.raises(ValueError) as error:
            model(name)
        assert "\n" not in str(error.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="there is no model"):
        model(tmp_path / "empty")


def test_windows_as_the_model_reads_them():
    """Mistral's is every layer's; where some layers may have none, the context ends within it, as in model.py."""
    config = {**GOOD, "sliding_window": 100}
    assert (r.from_config({**config, "model_type": "mistral"}).window, r.from_config(config).max_seq_len) == (100, 100)
    assert r.from_config({**config, "use_sliding_window": False}).max_seq_len == 8192
    assert r.from_config({**GOOD, "sliding_window": None}).window is None


def test_shapes_and_chips_are_finite():
    for change in ({"n_params": math.nan}, {"weight_bits": 0}, {"kv_bits": -1}, {"n_layer": math.inf}):
        with pytest.raises(ValueError, match=f"{next(iter(change))} is "):
            replace(L8, **change)
    for change in ({"flops": 0}, {"bandwidth": math.inf}, {"memory": math.nan}):
        with pytest.raises(ValueError, match=f"{next(iter(change))} of H100 is "):
            replace(H100, **change)


# ------------------------------------------------------------------ this machine


def test_memory_bandwidth_is_of_memory():
    """Within a factor of 4 of what torch's own sum reads (both vary with what else runs); no cache's speed."""
    import time

    import torch

    x, best = torch.ones(2**25), math.inf
    for _ in range(7):
        begin = time.perf_counter()
        x.sum()
        best = min(best, time.perf_counter() - begin)
    theirs = 4 * 2**25 / best
    assert theirs / 4 < r.memory_bandwidth(128, rounds=7) < 4 * theirs


def test_this_machine():
    with pytest.raises(ValueError, match="cannot be measured in plain Python"):
        r.machine()
    chip = r.machine(1e12, 2e10)
    assert (chip.flops, chip.bandwidth, chip.name) == (1e12, 2e10, "this machine") and chip.memory > 2**28
    assert r.machine(1e12, 2e10, 5e9).memory == 5e9


# ------------------------------------------------------------------ text


def test_units_are_never_ambiguous():
    """Every size is in B, kB, MB, GB, TB or KiB, MiB, GiB; and powers change where they should."""
    assert [r.si(x, "B") for x in (0, 1, 999, 1000, 1e6, 1e9, 1e12, 1e15, 1e19)] == [
        "0 B", "1 B", "999 B", "1 kB", "1 MB", "1 GB", "1 TB", "1 PB", "1e+04 PB"]
    assert [r.si(x, "s") for x in (1e-3, 1e-6, 2.5e-7)] == ["1 ms", "1 us", "0.25 us"]
    assert [r.binary(x) for x in (0, 1, 1023, 1024, 2**20, 2**30, 2**40)] == [
        "0 B", "1 B", "1023 B", "1 KiB", "1 MiB", "1 GiB", "1 TiB"]
    text = r.explain(r.plan(L70, H100, Demand(1000, 1000, 300)))
    units = set(re.findall(r"\d ([kKMGTP]?i?B(?:/s)?)\b", text))
    assert {"B", "KiB", "MB", "GB", "GB/s", "TB/s"} == units and max(map(len, text.split("\n"))) <= 120


@pytest.mark.parametrize("gpu", CHIPS)
@pytest.mark.parametrize("name", r.PRESETS)
def test_points_lie_on_the_roof(gpu, name):
    """Letters stand where their figures say: left of the ridge on the slope, right of it on the flat."""
    chip = CHIPS[gpu].times(8)
    text = r.picture(model(name), chip)
    rows = text.split("\n")
    figures = re.finditer(r"(?m)^([a-z]) .*?  +([\d.]+(?:e\+\d+)?) .*(memory|compute)$", text)
    table = {m[1]: (float(m[2]), m[3]) for m in figures}
    assert len(table) == 7 - (model(name).weight_bytes + 256 * 1024 * model(name).kv_bytes > chip.memory)
    plot = [row[16:] for row in rows if len(row) > 15 and row[15] == "|"]
    at = {c: (x, y) for y, row in enumerate(plot) for x, c in enumerate(row) if c in table}
    assert set(at) == set(table), "none hides another"
    order = sorted(table, key=lambda c: table[c][0])
    assert [at[c][0] for c in order] == sorted(at[c][0] for c in order)
    for x, bound in table.values():
        assert (x < chip.ridge) == (bound == "memory")
    assert max(map(len, rows)) <= 120


def test_pictures_that_cannot_be_drawn():
    with pytest.raises(ValueError, match=r"decode 4,096 x 1,024 needs 565.8 GB .* but H100 has 80 GB; take fewer"):
        r.picture(L8, H100, batches=[1, 4096])
    for arguments in ({"context": 0}, {"prompts": [0]}, {"batches": [-1]}, {"prompts": [1] * 27}):
        with pytest.raises(ValueError, match="at least 1"):
            r.picture(L8, H100, **arguments)
    assert "256" not in r.picture(L8, CHIPS["rtx-4090"], context=8000).split("tokens/s")[1], "those that fit are drawn"
    many = r.picture(L8, H100, prompts=[5000] * 13, batches=[1] * 13)
    assert all(f"\n{c} " in many for c in "abcdefghijklmnopqrstuvwxyz")


# ------------------------------------------------------------------ the command


def run(*arguments):
    """Without site packages: the standard library is all that it needs."""
    return subprocess.run([sys.executable, "-I", "-S", "-W", "error", str(ROOT / "roofline.py"), *arguments], text=True,
                          capture_output=True, timeout=60)


def test_the_plan_command():
    result = run("plan", "--model", "llama-3-70b", "--gpu", "h100", "--rps", "1000", "--in", "1000", "--out", "300")
    assert (result.returncode, result.stderr) == (0, "")
    for part in ("2 x 80 layers x 8 KV heads x 128 x 16 bits / 8 = 327,680 B = 320 KiB a token",
                 "640 GB x (1 - 0.1 reserve) - 141.1 GB = 434.9 GB", "46 x 8 = 368 GPUs", "18 x 8 = 144 GPUs",
                 "512 GPUs x 2.5 an hour (an assumed price) = 1,280.00 an hour", "327.7 GB/s", "1.19 a million"):
        assert part in result.stdout, part


def test_a_reader_that_goes_away_is_no_error():
    for arguments in ((), ("plan", "--rps", "1", "--in", "5", "--out", "1")):
        command = subprocess.Popen([sys.executable, "-I", "-S", str(ROOT / "roofline.py"), *arguments],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        command.stdout.close()
        assert (command.wait(60), command.stderr.read()) == (0, b"")
        command.stderr.close()


def test_the_demo_and_the_drawing():
    demo, drawing = run(), run("draw", "--model", "qwen2.5-1.5b", "--gpu", "RTX 4090", "--batches", "1", "32")
    assert demo.returncode == drawing.returncode == 0 and "best k" in demo.stdout
    assert "qwen2.5-1.5b on RTX 4090" in drawing.stdout and "decode 32 x 1,024" in drawing.stdout


@pytest.mark.parametrize(("arguments", "expected"), [
    ("plan --rps 1 --in 5 --out 1 --tp 1 --price 4", "GPUs x 4 an hour"),
    ("plan --rps 1 --in 500 --out 9 --tpot 6 --tp 1 --batch 2", "<- taken"),
    ("plan --rps 1 --in 500 --out 9 --overhead 3 --link 25 --hit 0.5", "+ 3 ms overhead"),
    ("plan --rps 9 --in 500 --out 9 --hit 0.5", "of which 250 a prompt are found in a cache"),
    ("plan --rps 1 --in 5 --out 1 --fp8", "x 8 bits / 8 = 8.03 GB"),
    ("plan --rps 1 --in 5 --out 1 --fp8 --tp 1", "H100: 1.979 PFLOP/s"),
    ("plan --model llama-3-70b --rps 900 --in 500 --out 300 --tpot 12", "over 12 ms"),
    ("plan --rps 1 --in 5 --out 1 --weight-bits 4.125", "x 4.125 bits / 8 = 4.141 GB"),
    ("plan --rps 1 --in 5 --out 1 --flops 800 --fp8 --tp 1", "800 TFLOP/s"),
    ("draw --gpu this --flops 0.4 --bandwidth 30 --memory 64", "400 GFLOP/s, 30 GB/s, ridge 13 FLOP/B"),
    ("draw --model llama-3-70b", "llama-3-70b on 2 x H100")])
def test_flags(arguments, expected, capsys):
    assert r.main(arguments.split()) == 0
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    ("draw --model llama-9", "there is no model 'llama-9'; known are llama-3-8b, llama-3-70b, qwen2.5-1.5b"),
    ("draw --gpu h1000", "there is no GPU 'h1000'; known are h100"), ("draw --gpu this", "with --flops, in TFLOP/s"),
    ("draw --batches 4096", "take fewer sequences"), ("draw --tp 3", "take a divisor"), ("draw --tp 0", "among 0 GPUs"),
    ("draw --weight-bits 0", "weight_bits is 0.0"), ("draw --bandwidth nan", "bandwidth of H100 is nan"),
    ("draw --gpu a100 --fp8", "A100 has no products in fp8"), ("draw --context -5", "at least 1"),
    ("plan --rps -1 --in 1 --out 1", "rps is -1.0"), ("plan --rps 1 --in 1 --out 1 --load 0", "load is 0.0")])
def test_mistakes_take_one_line(arguments, message, capsys):
    assert r.main(arguments.split()) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.startswith("error: ") and said.err.count("\n") == 1 and said.out == ""


def test_flags_that_are_missing_or_unknown(capsys):
    for arguments in ("plan --rps 1", "plan --rps x --in 1 --out 1", "draw --gp h100", "fly"):
        with pytest.raises(SystemExit) as stop:
            r.main(arguments.split())
        assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1
