"""
The arithmetic of inference: how many bytes, how many operations, so how long, so how many GPUs, at what cost.

    shape = model("llama-3-70b")                           a preset, or the path of a config.json
    group = CHIPS["h100"].times(8)                         eight of them, with tensor parallelism
    decode_s(shape, batch=256, context=1150, chip=group)   0.0089: seconds a step takes at the least
    print(explain(plan(shape, CHIPS["h100"], Demand(rps=1000, n_in=1000, n_out=300))))

    python roofline.py plan --model llama-3-70b --gpu h100 --rps 1000 --in 1000 --out 300
    python roofline.py draw --model llama-3-8b --gpu h100

The one idea: a chip computes F operations a second, and moves W bytes a second meanwhile, so a pass takes the longer of
the two times. Which one that is, the operations per byte decide, the arithmetic intensity:

    seconds = max(operations / F, bytes / W) + overhead             both are equal at the ridge, F / W operations a byte

A pass reads N weights of 2 bytes once, whatever it does with them. A prompt of P tokens does P multiply-adds with each.
A decode step of B sequences does B, and reads what no batch shares: n cached tokens of s bytes of each sequence.

    prefill   2 N P / 2 N = P                decode   2 N B / (2 N + B n s) <= B

So prompts are limited by compute, and decoding by memory, until B is near the ridge (295 on an H100).

Units: seconds, bytes, bytes/s, FLOP (a multiply-add is two), tokens, bits. In text GB is 1e9 bytes, GiB 2^30.
Counted: 2 FLOP a weight and token, every weight read once a pass (the usual convention; of an untied input embedding,
7% of Llama 3 8B, a pass reads a few rows), and 4 L H D FLOP of attention for each token that a token sees. Not counted:
activations, softmax, norms.

Papers: roofline, Williams et al. 2009; inference, Pope et al. 2022 (arXiv 2211.05102); GQA, Ainslie et al. 2023
(2305.13245); MLA, DeepSeek-AI 2024 (2405.04434); speculation, Leviathan et al. 2023 (2211.17192); pools for prefill and
decode, Zhong et al. 2024 (2401.09670); waiting, Erlang 1917.
Left out on purpose: mixtures of experts, pipeline parallelism, prefill and decode on the same GPUs (chunked prefill),
power. Every result is an estimate to be checked by a measurement.
Letters: L layers, H query heads, G key/value heads, D head_dim, N parameters, P prompt, B batch, n cached tokens.
"""
from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

# ------------------------------------------------------------------ bytes


def bits_per_weight(bits: float, group: int | None = None, scale_bits: float = 16, zero_bits: float = 0) -> float:
    """Bits of a weight with its share of the scale (and zero point) that `group` weights have in common.

    >>> bits_per_weight(4, group=128), bits_per_weight(16)
    (4.125, 16)
    """
    return bits if group is None else bits + (scale_bits + zero_bits) / group


def weight_bytes(n_params: float, bits: float = 16) -> float:
    """
    >>> [weight_bytes(70e9, bits) / 1e9 for bits in (16, 8, 4)]
    [140.0, 70.0, 35.0]
    """
    return n_params * bits / 8


def kv_bytes(n_layer: int, n_kv_head: int, head_dim: int, bits: float = 16) -> float:
    """Bytes of K and V of one token: 2 L G D bits / 8. MHA has G = H, GQA fewer, MQA 1. Llama 3 8B:

    >>> kv_bytes(32, 8, 128)
    131072.0
    """
    return 2 * n_layer * n_kv_head * head_dim * bits / 8


def mla_kv_bytes(n_layer: int, latent: int, rope_dim: int, bits: float = 16) -> float:
    """Bytes of one token with multi-head latent attention: in each layer one latent, which K and V are made from, and
    one rotary key, for all heads together. DeepSeek-V2, whose 128 heads of 128 would take 3,932,160:

    >>> mla_kv_bytes(60, 512, 64)
    69120.0
    """
    return n_layer * (latent + rope_dim) * bits / 8


def score_bytes(tokens: int, n_head: int = 1, batch: int = 1, bits: float = 16) -> float:
    """Bytes of one layer's attention scores, every token's with every token: what FlashAttention never writes."""
    return batch * n_head * tokens**2 * bits / 8


# ------------------------------------------------------------------ a model, from a config.json or by name


@dataclass(frozen=True)
class Shape:
    """What the arithmetic needs to know of a model. Bits count scales too (see bits_per_weight)."""
    name: str
    n_params: float
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    max_seq_len: int = 2**31
    window: int | None = None  # tokens that a token sees at most, itself included
    weight_bits: float = 16
    kv_bits: float = 16

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, (str, type(None))) and not 0 < value < 1e18:
                raise ValueError(f"{f.name} is {value}, but must be a finite number above 0")

    @property
    def weight_bytes(self) -> float:
        return weight_bytes(self.n_params, self.weight_bits)

    @property
    def kv_bytes(self) -> float:
        """Of one token, all layers."""
        return kv_bytes(self.n_layer, self.n_kv_head, self.head_dim, self.kv_bits)

    def sees(self, context: float) -> float:
        """Of `context` tokens those that are kept and read."""
        return context if self.window is None else min(context, self.window)

    def on(self, n: int) -> Shape:
        """As n GPUs with tensor parallelism hold it: of fewer KV heads than GPUs there are copies. ValueError if the
        query heads cannot be shared out."""
        if n < 1 or self.n_head % n:
            raise ValueError(f"{self.n_head} query heads cannot be shared out among {n} GPUs; take a divisor")
        return replace(self, kv_bits=self.kv_bits * max(1, n / self.n_kv_head))


KEYS = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "vocab_size", "max_position_embeddings", "tie_word_embeddings")
PRESETS = {name: dict(zip(KEYS, values)) for name, values in {  # as their config.json has them
    "llama-3-8b": ("llama", 4096, 14336, 32, 32, 8, 128256, 8192, False),
    "llama-3-70b": ("llama", 8192, 28672, 80, 64, 8, 128256, 8192, False),
    "qwen2.5-1.5b": ("qwen2", 1536, 8960, 28, 12, 2, 151936, 32768, True)}.items()}
FAMILIES: dict = {  # whether q, k, v have biases, o has, the feed-forward (or which key says so); q and k have norms
    "llama": ("attention_bias", "attention_bias", "mlp_bias", False), "mistral": (False, False, False, False),
    "qwen2": (True, False, False, False), "qwen3": ("attention_bias", "attention_bias", False, True)}
MAX_CONFIG = 2**20  # bytes of a config.json


def model(name: str | os.PathLike, weight_bits: float = 16, kv_bits: float = 16) -> Shape:
    """A preset by name, or the config.json at a path (or in the folder there). Raises ValueError in one line.

    >>> model("qwen2.5-1.5b").n_params, model("qwen2.5-1.5b").kv_bytes
    (1543714304, 28672.0)
    """
    if name in PRESETS:
        return from_config(PRESETS[name], str(name), weight_bits, kv_bits)
    path = Path(name).expanduser()
    try:
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():  # nor is a pipe, which would be waited for
            raise ValueError(f"there is no model {_quote(str(name))}; known are {', '.join(PRESETS)}, and the path of "
                             "a config.json or of its folder")
        with open(path, "rb") as f:
            text = f.read(MAX_CONFIG + 1)
    except (OSError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())[:300]) from None
    if len(text) > MAX_CONFIG:
        raise ValueError(f"{path} has more than {MAX_CONFIG:,} bytes, which no config.json needs")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:  # bad JSON and bad UTF-8 are ValueErrors
        raise ValueError(f"{path} is not JSON: {' '.join(str(error).split())[:100]}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a JSON {type(config).__name__}, and must hold an object")
    return from_config(config, path.resolve().parent.name or "model", weight_bits, kv_bits)


def from_config(config: Mapping[str, Any], name: str = "model", weight_bits: float = 16, kv_bits: float = 16) -> Shape:
    """The Shape that a config.json's dict describes; unknown keys are ignored. Parameters are counted from the sizes,
    biases and norms included. Raises ValueError for a family that would be counted wrongly, and for wrong values."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"config: model_type {_quote(family)} is not known here; known are {', '.join(FAMILIES)}")
    experts = next((k for k in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(k)), None)
    if experts:
        raise ValueError(f"config: {experts} is {_quote(config[experts])}; a mixture of experts reads only a part of "
                         "its weights in a pass, which is not counted here")
    C, H = _whole(config, "hidden_size", most=2**20), _whole(config, "num_attention_heads", most=2**16)
    G, D = _whole(config, "num_key_value_heads", H, most=2**16), _whole(config, "head_dim", max(1, C // H), most=2**14)
    L, V = _whole(config, "num_hidden_layers", most=1024), _whole(config, "vocab_size", most=2**24)
    F, longest = _whole(config, "intermediate_size", most=2**20), _whole(config, "max_position_embeddings")
    if H % G:
        raise ValueError(f"config: {H} query heads cannot be shared out among {G} key/value heads")
    qkv_bias, o_bias, mlp_bias, qk_norm = (_flag(config, f) if isinstance(f, str) else f for f in FAMILIES[family])
    attention = 2 * C * H * D + 2 * C * G * D + qkv_bias * (H + 2 * G) * D + o_bias * C + qk_norm * 2 * D
    layer = attention + 3 * C * F + mlp_bias * (2 * F + C) + 2 * C
    n_params = L * layer + C + V * C * (1 if _flag(config, "tie_word_embeddings") else 2)
    window = None
    if config.get("sliding_window") is not None and _flag(config, "use_sliding_window", True):
        window = _whole(config, "sliding_window")
        if family != "mistral":  # some layers may have the window and others not: within it all are alike
            longest, window = min(longest, window), None
    return Shape(name, n_params, L, H, G, D, longest, window, weight_bits, kv_bits)


def _quote(value: Any) -> str:
    """What a message quotes of a value from a file: one short line, however long or deeply nested the value is."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # lists in lists in lists; an integer of thousands of digits
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else text[:77] + "..."


def _whole(d: Mapping[str, Any], key: str, default: int | None = None, most: int = 2**31) -> int:
    value = d.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        raise ValueError(f"config: {key} is {_quote(value)}, but must be a whole number from 1 to {most}")
    return value


def _flag(d: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = d.get(key)
    value = default if value is None else value
    if value not in (True, False):  # a string such as "false" would count as true
        raise ValueError(f"config: {key} is {_quote(value)}, but must be true or false")
    return bool(value)


# ------------------------------------------------------------------ a chip, by name or measured


@dataclass(frozen=True)
class Chip:
    name: str
    flops: float      # FLOP/s of dense 16-bit matrix products with 32-bit sums
    bandwidth: float  # bytes/s of its memory
    memory: float     # bytes
    fp8_flops: float | None = None
    count: int = 1    # how many of them the figures are of

    def __post_init__(self):
        for key in ("flops", "bandwidth", "memory"):
            if not 0 < getattr(self, key) < math.inf:
                raise ValueError(f"{key} of {self.name} is {getattr(self, key)}, but must be a finite number above 0")

    @property
    def ridge(self) -> float:
        """FLOP per byte below which memory is the limit, above which compute is."""
        return self.flops / self.bandwidth

    def times(self, n: int) -> Chip:
        """n of them with tensor parallelism: each holds and reads a part of every matrix."""
        return replace(self, flops=n * self.flops, bandwidth=n * self.bandwidth, memory=n * self.memory,
                       fp8_flops=self.fp8_flops and n * self.fp8_flops, count=n * self.count)

    def __str__(self):
        return f"{self.count} x {self.name}" if self.count > 1 else self.name


# From NVIDIA's data sheets (H100 SXM, H200 SXM, B200 as in HGX and DGX, A100 80 GB SXM) and its Ada whitepaper (RTX
# 4090). Where a sheet gives the figure "with sparsity", half of it is the dense one.
CHIPS = {
    "h100": Chip("H100", 989e12, 3.35e12, 80e9, 1979e12),
    "h200": Chip("H200", 989e12, 4.8e12, 141e9, 1979e12),
    "b200": Chip("B200", 2250e12, 8e12, 180e9, 4500e12),
    "a100": Chip("A100", 312e12, 2.039e12, 80e9),
    "rtx-4090": Chip("RTX 4090", 165.2e12, 1.008e12, 24e9, 330.3e12),
}


def machine(flops: float | None = None, bandwidth: float | None = None, memory: float | None = None) -> Chip:
    """This machine's processor. Bandwidth and memory are found out where they are not given.

    flops must be given: a loop in Python measures Python, not the processor's vector units. Time a large matrix
    product of the library that you will use (2 n^3 FLOP); ValueError without.
    """
    if flops is None:
        raise ValueError("the FLOP/s of this machine cannot be measured in plain Python; time a large matrix product "
                         "of your library, and pass what it reached with --flops, in TFLOP/s")
    if memory is None:
        try:
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, OSError, ValueError):
            raise ValueError("this system does not say how much memory it has; give it with --memory, in GB") from None
    return Chip("this machine", flops, memory_bandwidth() if bandwidth is None else bandwidth, memory)


def memory_bandwidth(megabytes: int = 256, rounds: int = 5) -> float:
    """Bytes/s at which all cores together read memory, the best of some rounds: C's memchr goes through a buffer far
    larger than the caches, a slice a thread, looking for a byte that is not there (ctypes lets go of Python's lock)."""
    try:
        search = ctypes.CDLL(None if os.name == "posix" else "msvcrt").memchr
    except (OSError, AttributeError):
        raise ValueError("memory cannot be timed on this system; give its speed with --bandwidth, in GB/s") from None
    search.argtypes, search.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each = (megabytes << 20) // threads
    data = bytearray(b"\1") * (each * threads)  # subtle: fresh zeros may all be one page, which the cache holds
    address = ctypes.addressof(ctypes.c_char.from_buffer(data))
    best = math.inf
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            begin = time.perf_counter()
            list(pool.map(lambda i: search(address + i * each, 2, each), range(threads)))
            best = min(best, time.perf_counter() - begin)
    return len(data) / best


# ------------------------------------------------------------------ operations, and time


def flops_per_token(shape: Shape, context: float = 0) -> float:
    """2 N + 4 L H D n: the products with the weights, and with the K and V of the `context` tokens that it sees.

    >>> flops_per_token(model("llama-3-70b")) / 1e9, round(flops_per_token(model("llama-3-70b"), 500) / 1e9, 1)
    (141.107412992, 142.4)
    """
    return 2 * shape.n_params + 4 * shape.n_layer * shape.n_head * shape.head_dim * shape.sees(context)


def prefill_flops(shape: Shape, prompt: int, cached: int = 0) -> float:
    """Of a prompt whose first `cached` tokens were found in a prefix cache. Token i sees i tokens, itself included."""
    w = prompt if shape.window is None else shape.window
    low, high = min(cached, w), min(prompt, w)
    pairs = high * (high + 1) / 2 - low * (low + 1) / 2 + w * (max(prompt, w) - max(cached, w))
    return (prompt - cached) * flops_per_token(shape) + 4 * shape.n_layer * shape.n_head * shape.head_dim * pairs


def prefill_bytes(shape: Shape, prompt: int, cached: int = 0) -> float:
    """The weights once, K and V of the cached tokens read and of the others written."""
    return shape.weight_bytes + (shape.sees(cached) + prompt - cached) * shape.kv_bytes


def decode_flops(shape: Shape, batch: int, context: float) -> float:
    """Of one step of `batch` sequences that have `context` tokens each, the new one included."""
    return batch * flops_per_token(shape, context)


def decode_bytes(shape: Shape, batch: int, context: float) -> float:
    """Bytes that one step reads: the weights once, and K and V of every sequence.

    >>> decode_bytes(model("llama-3-8b"), batch=64, context=2048) / 1e9
    33.24039168
    """
    return shape.weight_bytes + batch * shape.sees(context) * shape.kv_bytes


def matmul_intensity(shape: Shape, rows: int, kv_tokens: float = 0) -> float:
    """FLOP per byte of the weights' products alone: 2 N rows / (weight bytes + kv_tokens s). A prompt has as many rows
    as tokens; a decode step one a sequence, and reads kv_tokens = B n. (Attention adds operations: see decode_flops.)

    >>> matmul_intensity(model("llama-3-8b"), 1000), round(matmul_intensity(model("llama-3-8b"), 64, 64 * 2048), 1)
    (1000.0, 30.9)
    """
    return rows * flops_per_token(shape) / (shape.weight_bytes + kv_tokens * shape.kv_bytes)


def step_s(flops: float, n_bytes: float, chip: Chip, mfu: float = 1, mbu: float = 1, overhead_s: float = 0) -> float:
    """Seconds of a pass: the longer of computing and moving, plus what neither hides (launches, all-reduces, the host).
    mfu and mbu are the shares of the chip's FLOP/s and bandwidth that are reached; at 1 and 1 this is a lower bound."""
    return max(flops / (mfu * chip.flops), n_bytes / (mbu * chip.bandwidth)) + overhead_s


def prefill_s(shape: Shape, prompt: int, chip: Chip, cached: int = 0, **reached: float) -> float:
    """Seconds of one prompt alone; `reached` as in step_s.

    >>> round(prefill_s(model("llama-3-8b"), 1000, CHIPS["h100"]), 4)
    0.0165
    """
    return step_s(prefill_flops(shape, prompt, cached), prefill_bytes(shape, prompt, cached), chip, **reached)


def decode_s(shape: Shape, batch: int, context: float, chip: Chip, **reached: float) -> float:
    """Seconds of one step, which is the time per output token of each sequence; `reached` as in step_s. With batch 1
    the inverse bounds the tokens/s of one sequence: bandwidth / (bytes of the weights and of its K and V).

    >>> [round(decode_s(model("llama-3-8b"), b, 2048, CHIPS["h100"]), 4) for b in (1, 64)]
    [0.0049, 0.0099]
    """
    return step_s(decode_flops(shape, batch, context), decode_bytes(shape, batch, context), chip, **reached)


def e2e(ttft_s: float, tpot_s: float, n: int) -> float:
    """Seconds until the last of n output tokens: TTFT + (n - 1) TPOT."""
    return ttft_s + (n - 1) * tpot_s


def kv_rows(prompt: int, steps: int, cached: bool = True) -> int:
    """Tokens whose K and V are computed for a prompt and `steps` more: without a cache all of them anew in each pass.

    >>> [kv_rows(4, t) for t in range(5)], [kv_rows(4, t, cached=False) for t in range(5)]
    ([4, 5, 6, 7, 8], [4, 9, 15, 22, 30])
    """
    return prompt + steps if cached else sum(prompt + i for i in range(steps + 1))


def static_utilization(lengths: Sequence[int]) -> float:
    """Share of the slots of a static batch that are at work until its longest answer ends."""
    return sum(lengths) / (len(lengths) * max(lengths))


def occupied(blocks: int, units: int) -> float:
    """Share of a chip's units (SMs) at work, in `blocks` thread blocks of equal length, one a unit at a time.

    >>> round(occupied(32, 132), 3), round(occupied(133, 132), 3)  # the second: a whole wave for one block
    (0.242, 0.504)
    """
    return blocks / (math.ceil(blocks / units) * units)


# ------------------------------------------------------------------ speculation


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


def verify_cost(shape: Shape, batch: int, context: float, chip: Chip, **reached: float) -> Callable[[int], float]:
    """pass_cost of best_k and speedup: a pass over so many rows a sequence beside one over one row. Reading is the same
    for any number of rows, so it is 1 until the products with them take longer: speculation is for small batches.

    >>> costs = [verify_cost(model("llama-3-8b"), batch, 1000, CHIPS["h100"]) for batch in (1, 256)]
    >>> [best_k(0.8, 0.05, cost, most=20) for cost in costs], round(costs[1](9), 1)
    ([8, 3], 2.6)
    """
    n_bytes, one = decode_bytes(shape, batch, context), decode_s(shape, batch, context, chip, **reached)
    return lambda rows: step_s(decode_flops(shape, batch * rows, context), n_bytes, chip, **reached) / one


# ------------------------------------------------------------------ the capacity plan


@dataclass(frozen=True)
class Demand:
    """What is to be served, and what is assumed. Seconds, bytes/s; price in any currency, per GPU and hour."""
    rps: float                       # requests a second
    n_in: int                        # tokens of a prompt, mean
    n_out: int                       # tokens of an answer, mean
    ttft_s: float = 1.0              # limit of the time to first token, of 95 in 100 requests
    tpot_s: float = 0.02             # limit of the time per output token
    hit: float = 0.0                 # share of prompt tokens found in a prefix cache
    price: float = 2.5
    mfu: float = 0.5                 # share of the FLOP/s reached
    mbu: float = 1.0                 # share of the bandwidth reached
    load: float = 0.8                # share of time that a pool is at work: bursts must find room
    reserve: float = 0.1             # share of memory for activations, graphs, fragments
    overhead_s: float | None = None  # of a step; None: 30 us a layer (two all-reduces and the launches)
    link: float = 50e9               # bytes/s between GPUs of the two pools, each (InfiniBand NDR: 400 Gb/s)

    def __post_init__(self):
        for names, legal, rule in (
                (("rps",), lambda x: 0 < x <= 1e6, "above 0 and at most 1,000,000"),
                (("n_in", "n_out"), lambda x: x % 1 == 0 and 1 <= x <= 1e9, "a whole number, at least 1"),
                (("ttft_s", "tpot_s", "link"), lambda x: 0 < x < math.inf, "a finite number above 0"),
                (("mfu", "mbu", "load"), lambda x: 0 < x <= 1, "above 0 and at most 1"),
                (("hit", "reserve"), lambda x: 0 <= x < 1, "at least 0 and below 1"),
                (("price", "overhead_s"), lambda x: x is None or 0 <= x < math.inf, "a finite number, at least 0")):
            for name in names:
                if not legal(getattr(self, name)):  # NaN passes no rule
                    raise ValueError(f"{name} is {getattr(self, name)}, but must be {rule}")

    @property
    def context(self) -> float:
        """Tokens that a decode step finds of a sequence, on average: the prompt and half of the answer."""
        return self.n_in + self.n_out / 2


def kv_room(shape: Shape, chip: Chip, reserve: float = 0.1) -> float:
    """Bytes left for K and V beside the weights and a reserve; below 0 the weights alone do not fit.

    >>> round(kv_room(model("llama-3-70b"), CHIPS["h100"].times(8)) / 1e9, 1)
    434.9
    """
    return chip.memory * (1 - reserve) - shape.weight_bytes


def sequences_that_fit(room: float, shape: Shape, context: float) -> int:
    """How many sequences of `context` tokens fit `room` bytes.

    >>> sequences_that_fit(40e9, model("llama-3-70b"), 32_000), sequences_that_fit(40 * 2**30, model("llama-3-70b"),
    ...                                                                            32_768)
    (3, 4)
    """
    return max(0, int(room / (shape.sees(context) * shape.kv_bytes)))


def wait_s(rate: float, service_s: float, servers: int, share: float = 0.95) -> float:
    """The wait that `share` of requests stay below, where `rate` a second come at random to `servers` that take
    service_s each on average (Erlang's C formula: times of service are random too, so even ones wait less).

    >>> round(wait_s(0.8, 1.0, 1), 1), round(wait_s(8, 1.0, 10), 2), wait_s(2, 1.0, 1)
    (13.9, 1.05, inf)
    """
    work, blocked = rate * service_s, 1.0
    if work >= servers:
        return math.inf
    for n in range(1, servers + 1):  # Erlang's B, one more server at a time
        blocked = work * blocked / (n + work * blocked)
    waits = blocked / (1 - work / servers * (1 - blocked))
    return math.log(waits / (1 - share)) / (servers / service_s - rate) if waits > 1 - share else 0.0


def cost_per_million(gpus: float, price: float, tokens_per_s: float) -> float:
    """Of a million tokens, from the price of a GPU and hour.

    >>> round(cost_per_million(510, 2.5, 3e5), 2), round(cost_per_million(510, 2.5, 1.3e6), 2)
    (1.18, 0.27)
    """
    return gpus * price / (tokens_per_s * 3600) * 1e6


@dataclass(frozen=True)
class Plan:
    """Two pools of replicas, of `group` each. Seconds, bytes, FLOP."""
    shape: Shape
    group: Chip
    demand: Demand
    overhead_s: float
    slots: int                # sequences of the average context that fit beside the weights
    batch: int
    step_s: float             # of a decode step: the time per output token
    prompt_flops: float       # of a prompt, less what is cached
    prompt_s: float           # of a prompt alone
    wait_s: float             # before it, of 95 in 100
    prefill_replicas: int
    decode_replicas: int

    @property
    def gpus(self) -> int:
        return self.group.count * (self.prefill_replicas + self.decode_replicas)


def plan(shape: Shape, chip: Chip, demand: Demand, tp: int | None = None, batch: int | None = None) -> Plan:
    """GPUs for prefill and for decoding, in pools of their own. Of replicas of 1, 2, 4 and 8 GPUs (or tp) and batches
    in powers of two (or batch), the plan with the fewest GPUs is taken, and of those the one with the shortest step.

    Raises ValueError if a request exceeds the model's context, or the weights, the batch or a limit cannot be had.
    """
    if demand.n_in + demand.n_out > shape.max_seq_len + 1:  # the last token is never read
        raise ValueError(f"{demand.n_in:,} + {demand.n_out:,} tokens exceed {shape.name}'s context of "
                         f"{shape.max_seq_len:,}")
    if batch is not None and batch < 1:
        raise ValueError(f"batch is {batch}, but must be at least 1")
    found, refused = [], ""
    for n in [n for n in (1, 2, 4, 8) if shape.n_head % n == 0] if tp is None else [tp]:
        try:
            found += _plans(shape, chip, n, demand, batch)
        except ValueError as error:
            refused = str(error)
    if not found:
        raise ValueError(refused)
    return min(found, key=lambda p: (p.gpus, p.step_s))


def _plans(shape: Shape, chip: Chip, n: int, d: Demand, batch: int | None) -> list[Plan]:
    """One for each batch that a replica of n GPUs can have."""
    held, group, remedy = shape.on(n), chip.times(n), "take more or faster GPUs a replica, or fewer bits, or allow more"
    slots = sequences_that_fit(kv_room(held, group, d.reserve), held, d.context)
    if slots < (batch or 1):
        n_bytes = decode_bytes(held, batch or 1, d.context)
        raise ValueError(f"the weights and a batch of {batch or 1} with {d.context:,.6g} tokens each need "
                         f"{n_bytes / 1e9:,.1f} GB, but {group} has {group.memory * (1 - d.reserve) / 1e9:,.1f} GB for "
                         f"them ({d.reserve:.0%} is kept free); {remedy.replace('allow more', 'a smaller batch')}")
    overhead = 30e-6 * shape.n_layer if d.overhead_s is None else d.overhead_s
    reached = {"mfu": d.mfu, "mbu": d.mbu, "overhead_s": overhead}
    steps = {b: decode_s(held, b, d.context, group, **reached)
             for b in ([batch] if batch else [2**i for i in range(slots.bit_length())])}
    alone, fastest = prefill_s(held, d.n_in, group, _cached(d), **reached), min(steps.values())
    for what, seconds, limit in (("decode step", fastest, d.tpot_s), ("prompt", alone, d.ttft_s)):
        if seconds > limit:
            raise ValueError(f"a {what} takes {si(seconds, 's')} on {group}, above the limit of {si(limit, 's')}; "
                             f"{remedy}")
    flops = prefill_flops(held, d.n_in, _cached(d))
    service = flops / (d.mfu * group.flops)  # prompts share passes: each takes as much of the pool as it computes
    servers = _replicas(d.rps * service / d.load)
    while (wait := wait_s(d.rps, service, servers)) + alone > d.ttft_s:  # ends: with enough of them none waits
        servers = _replicas(servers + max(1, servers // 200))
    return [Plan(shape, group, d, overhead, slots, b, step, flops, alone, wait, servers,
                 _replicas(d.rps * d.n_out * step / b / d.load)) for b, step in steps.items() if step <= d.tpot_s]


def _cached(d: Demand) -> int:
    return min(d.n_in - 1, round(d.hit * d.n_in))  # the last token is always computed


def _replicas(needed: float) -> int:
    if needed > 1e5:
        raise ValueError(f"{needed:,.0f} replicas would be needed; 100,000 are the most that is planned here")
    return max(1, math.ceil(needed - 1e-9))  # rounding is no GPU


# ------------------------------------------------------------------ text


def si(x: float, unit: str) -> str:
    """A number and its unit with a prefix of powers of 1000; `binary` has those of 1024.

    >>> si(989e12, "FLOP/s"), si(0.0089, "s"), si(327680, "B"), binary(327680)
    ('989 TFLOP/s', '8.9 ms', '327.7 kB', '320 KiB')
    """
    k = max(-2, min(5, math.floor(math.log10(x) / 3 + 1e-9))) if x > 0 else 0
    return f"{x / 1000**k:.4g} {('u', 'm', '', 'k', 'M', 'G', 'T', 'P')[k + 2]}{unit}"


def binary(n_bytes: float) -> str:
    k = max(0, min(4, int(math.log2(n_bytes) / 10 + 1e-9))) if n_bytes > 0 else 0
    return f"{n_bytes / 1024**k:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[k]}"


def explain(p: Plan) -> str:
    """The plan step by step, each figure with its formula and unit."""
    d, s, g, held = p.demand, p.shape, p.group, p.shape.on(p.group.count)
    out, both, kv, cached = d.rps * d.n_out, d.rps * (d.n_in + d.n_out), s.kv_bytes, _cached(d)
    room, moved, first = kv_room(s, g, d.reserve), d.n_in * kv, p.wait_s + p.prompt_s
    served, sent = p.prompt_flops / (d.mfu * g.flops), moved / (d.link * g.count)
    F, W, rps = si(g.flops, "FLOP/s"), si(g.bandwidth, "B/s"), f"{d.rps:,.6g}/s"

    def pool(replicas: int, busy: float) -> str:
        more = " (more, for the TTFT)" if replicas > _replicas(busy / d.load) else ""
        return (f"{busy:,.4g} replicas / {d.load:g} load = {busy / d.load:,.4g}, so {replicas:,}{more} x {g.count} = "
                f"{replicas * g.count:,} GPUs")

    lines = [
        ("1 model", f"{s.name}  (GB is 1e9 bytes, GiB is 2^30 bytes, a multiply-add is 2 FLOP)"),
        ("weights", f"{s.n_params:,.0f} parameters x {s.weight_bits:g} bits / 8 = {si(s.weight_bytes, 'B')}"),
        ("K and V", f"2 x {s.n_layer} layers x {s.n_kv_head} KV heads x {s.head_dim} x {s.kv_bits:g} bits / 8 = "
                    f"{kv:,.0f} B = {binary(kv)} a token"),
        ("compute", f"2 x parameters = {si(flops_per_token(s), 'FLOP')} a token"),
        ("attention", f"4 x {s.n_layer} layers x {s.n_head} heads x {s.head_dim} = "
                      f"{si(4 * s.n_layer * s.n_head * s.head_dim, 'FLOP')} for each token that a token sees"),
        ("2 load", f"{d.rps:,.6g} requests/s of {d.n_in:,} tokens in and {d.n_out:,} out"),
        ("prefill", f"{rps} x {d.n_in:,} = {d.rps * d.n_in:,.0f} tokens/s"
                    + (f", of which {cached:,} a prompt are found in a cache" if cached else "")),
        ("decode", f"{rps} x {d.n_out:,} = {out:,.0f} tokens/s"),
        ("3 replica", f"{g}: {F}, {W}, {si(g.memory, 'B')}, ridge {g.ridge:.0f} FLOP/B"),
        ("room", f"{si(g.memory, 'B')} x (1 - {d.reserve:g} reserve) - {si(s.weight_bytes, 'B')} = {si(room, 'B')}"),
        ("holds", f"room / K and V = {room / held.kv_bytes:,.0f} tokens = {p.slots:,} sequences of {d.context:,.6g} "
                  "(in + out / 2)"),
        ("4 prefill", f"{si(p.prompt_flops, 'FLOP')} a prompt / ({d.mfu:g} MFU x {F}) = {si(served, 's')} of a "
                      "replica"),
        ("pool", f"{rps} x {si(served, 's')} = {pool(p.prefill_replicas, d.rps * served)}"),
        ("TTFT", f"wait {si(p.wait_s, 's')} (95% less, Erlang C) + a prompt alone {si(p.prompt_s, 's')} = "
                 f"{si(first, 's')}, limit {si(d.ttft_s, 's')}"),
        ("5 decode", f"step = max(FLOP / ({d.mfu:g} MFU x {F}), bytes / ({d.mbu:g} x {W})) "
                     f"+ {si(p.overhead_s, 's')} overhead"),
        ("", f"bytes = weights + batch x {held.sees(d.context):,.6g} tokens x K and V")]
    around = {p.batch // 4, p.batch // 2, p.batch, 2 * p.batch, 4 * p.batch}
    for b in sorted(b for b in around if 0 < b <= p.slots):
        n_bytes, compute = decode_bytes(held, b, d.context), decode_flops(held, b, d.context) / (d.mfu * g.flops)
        read = n_bytes / (d.mbu * g.bandwidth)
        total = max(compute, read) + p.overhead_s
        lines.append((f"batch {b:,}", f"K and V {si(n_bytes - s.weight_bytes, 'B')}, compute {si(compute, 's')}, "
                      f"memory {si(read, 's')}, step {si(total, 's')}, {b / total:,.0f} tokens/s"
                      + ("  <- taken" if b == p.batch else f"  over {si(d.tpot_s, 's')}" if total > d.tpot_s else "")))
    lines += [
        ("pool", f"{out:,.0f} / {p.batch / p.step_s:,.0f} = {pool(p.decode_replicas, out * p.step_s / p.batch)}"),
        ("6 transfer", f"{d.n_in:,} tokens x {binary(kv)} = {si(moved, 'B')} a prompt, {si(sent, 's')} over "
                       f"{g.count} x {si(d.link, 'B/s')}"),
        ("between", f"{rps} x {si(moved, 'B')} = {si(d.rps * moved, 'B/s')}, into each decode replica "
                    f"{si(d.rps * moved / p.decode_replicas, 'B/s')}"),
        ("7 total", f"{p.gpus:,} GPUs x {d.price:g} an hour (an assumed price) = {p.gpus * d.price:,.2f} an hour"),
        ("output", f"/ {out * 0.0036:,.5g} M tokens an hour = {cost_per_million(p.gpus, d.price, out):.3g} a million"),
        ("and input", f"/ {both * 0.0036:,.5g} M tokens an hour = {cost_per_million(p.gpus, d.price, both):.3g} a "
                      "million"),
        ("a user", f"first token in {si(first, 's')}, then one each {si(p.step_s, 's')}, all {d.n_out:,} in "
                   f"{si(e2e(first, p.step_s, d.n_out) + sent, 's')}")]
    return "\n".join(f"{what if what[:1].isdigit() else '  ' + what:13} {text}" for what, text in lines)


def picture(shape: Shape, chip: Chip, prompts: Sequence[int] = (16, 128, 1024), batches: Sequence[int] | None = None,
            context: int = 1024) -> str:
    """The roofline in text, both axes logarithmic, with a letter for each prompt and each decode batch (by default 1,
    8, 64 and 256, as far as they fit). ValueError for one that does not fit the memory."""
    spare = chip.memory - shape.weight_bytes
    if min([context, *prompts, *(batches or ())]) < 1 or len(prompts) + len(batches or ()) not in range(1, 27):
        raise ValueError("prompts, batches and context must be at least 1, and there can be 1 to 26 points")
    if batches is None:
        batches = [b for b in (1, 8, 64, 256) if b <= sequences_that_fit(spare, shape, context)]
    points = [(f"prefill {n:,}", n, prefill_flops(shape, n), prefill_bytes(shape, n)) for n in prompts]
    points += [(f"decode {b:,} x {context:,}", b, decode_flops(shape, b, context), decode_bytes(shape, b, context))
               for b in batches]
    for name, _, _, n_bytes in points:
        if n_bytes > chip.memory:
            raise ValueError(f"{name} needs {si(n_bytes, 'B')} for weights and K and V, but {chip} has "
                             f"{si(chip.memory, 'B')}; take fewer sequences or tokens, fewer bits, or more GPUs")
    at = [flops / n_bytes for _, _, flops, n_bytes in points]
    width, height = 72, 16  # the roof is in the last row of these
    left, right = math.floor(math.log2(min([*at, 1]))), math.ceil(math.log2(max([*at, 4 * chip.ridge])))
    floor, rise = chip.bandwidth * 2.0**left, math.log2(chip.ridge / 2.0**left) / (height - 1)

    def cell(x: float) -> tuple[int, int]:
        """Row from below and column of what intensity x reaches."""
        row = math.log2(min(chip.flops, x * chip.bandwidth) / floor) / rise
        return round(row), round((math.log2(x) - left) / (right - left) * (width - 1))

    grid = [[" "] * width for _ in range(height + len(at))]  # room for letters above the roof
    for c in range(width):
        x = 2.0 ** (left + c / (width - 1) * (right - left))
        grid[cell(x)[0]][c] = "/" if x < chip.ridge else "-"
    for i, x in enumerate(at):
        row, c = cell(x)
        grid[next(r for r in range(row, len(grid)) if not grid[r][c].isalpha())][c] = chr(ord("a") + i)
    used = max(r for r, cells in enumerate(grid) if any(c != " " for c in cells)) + 1
    lines = [f"{shape.name} on {chip}: {si(chip.flops, 'FLOP/s')}, {si(chip.bandwidth, 'B/s')}, ridge {chip.ridge:.0f} "
             "FLOP/B", ""]
    for r in reversed(range(used)):
        label = si(floor * 2 ** (r * rise), "FLOP/s") if r % 5 == 0 and r < height else ""
        lines.append(f"{label:>14} |{''.join(grid[r])}".rstrip())
    ticks = [" "] * (width + 8)
    for power in range(left, right + 1, max(1, (right - left) // 6)):
        mark, c = f"{2.0**power:g}", cell(2.0**power)[1]
        ticks[c:c + len(mark)] = mark
    lines += [" " * 15 + "+" + "-" * width, " " * 16 + "".join(ticks).rstrip() + "  FLOP/B", ""]
    lines.append(f"{'':22}{'FLOP/B':>8} {'reached at most':>16} {'of peak':>8} {'at least':>10} {'tokens/s':>9}  limit")
    for i, ((name, tokens, flops, n_bytes), x) in enumerate(zip(points, at)):
        seconds, reached = step_s(flops, n_bytes, chip), min(chip.flops, x * chip.bandwidth)
        lines.append(f"{chr(ord('a') + i)} {name:20}{x:8.4g} {si(reached, 'FLOP/s'):>16} {reached / chip.flops:8.1%} "
                     f"{si(seconds, 's'):>10} {tokens / seconds:9,.0f}  {'memory' if x < chip.ridge else 'compute'}")
    return "\n".join(lines)


# ------------------------------------------------------------------ demo and command line


def demo():
    shape, chip = model("llama-3-8b"), CHIPS["h100"]
    print(picture(shape, chip))
    print("\nOne GPU, 8,192 tokens of context in 16 bits: K and V of a sequence, and how many fit beside the weights:")
    for name, heads in (("MHA, 32 heads", 32), ("GQA, 8", 8), ("MQA, 1", 1)):
        held = replace(shape, n_kv_head=heads)
        print(f"  {name:14} {binary(8192 * held.kv_bytes):>8}  {sequences_that_fit(kv_room(held, chip), held, 8192):4}")
    print("\nDrafts that are accepted 8 times in 10 and cost a 20th of a pass: the best k, and what it gains:")
    for batch in (1, 32, 128, 512):
        cost = verify_cost(shape, batch, 500, chip)
        k = best_k(0.8, 0.05, cost, most=20)
        print(f"  batch {batch:4}: k = {k}, {speedup(0.8, k, 0.05, cost(k + 1)):.2f} times as fast")
    print("\nHow many GPUs it takes to serve it:\n" + explain(plan(shape, chip, Demand(rps=50, n_in=1000, n_out=300))))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # one line, not a page of usage
        self.exit(2, f"error: {' '.join(message.split())} (--help lists the flags)\n")


SETTINGS = (  # of `plan`: flag, field of Demand, its unit / the field's, metavar, help
    ("--ttft", "ttft_s", 1, "S", "limit of the time to first token, of 95 in 100"),
    ("--tpot", "tpot_s", 1e3, "MS", "limit of the time per output token"),
    ("--hit", "hit", 1, "0..1", "share of prompt tokens found in a cache"),
    ("--price", "price", 1, "X", "of a GPU and hour"),
    ("--mfu", "mfu", 1, "0..1", "share of the FLOP/s reached"),
    ("--mbu", "mbu", 1, "0..1", "share of the bandwidth reached"),
    ("--load", "load", 1, "0..1", "share of time that a pool is at work"),
    ("--reserve", "reserve", 1, "0..1", "share of memory kept free"),
    ("--overhead", "overhead_s", 1e3, "MS", "of a step; by default 0.03 a layer"),
    ("--link", "link", 1e-9, "GB/s", "of each GPU to the other pool, in 1e9 bytes"))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(description="The arithmetic of inference; without a command, a demo.", allow_abbrev=False)
    commands, common = parser.add_subparsers(dest="command"), _Parser(add_help=False)
    add = common.add_argument
    add("--model", default="llama-3-8b", help=f"{', '.join(PRESETS)}, or a config.json's path (default: %(default)s)")
    add("--gpu", default="h100", help=f"{', '.join(CHIPS)}, or this (this machine) (default: %(default)s)")
    add("--weight-bits", type=float, metavar="N", help="groups' scales included (default: 16, with --fp8 8)")
    add("--kv-bits", type=float, default=16, metavar="N", help="of an element of K and V (default: 16)")
    add("--fp8", action="store_true", help="weights and activations in fp8, at the GPU's speed for that")
    add("--tp", type=int, metavar="N", help="GPUs that share a model (default: plan tries 1, 2, 4, 8; draw: what fits)")
    add("--flops", type=float, metavar="TFLOP/s", help="of one GPU, in place of the data sheet's, in 1e12")
    add("--bandwidth", type=float, metavar="GB/s", help="the same, in 1e9 bytes")
    add("--memory", type=float, metavar="GB", help="the same, in 1e9 bytes")
    p = commands.add_parser("plan", parents=[common], help="GPUs and cost for a load", allow_abbrev=False)
    p.add_argument("--rps", type=float, required=True, metavar="N", help="requests a second")
    p.add_argument("--in", dest="n_in", type=int, required=True, metavar="N", help="tokens of a prompt, on average")
    p.add_argument("--out", dest="n_out", type=int, required=True, metavar="N", help="tokens of an answer, on average")
    p.add_argument("--batch", type=int, metavar="N", help="sequences of a decode step (default: the best power of 2)")
    for flag, key, scale, unit, text in SETTINGS:
        default = getattr(Demand, key)
        text += "" if default is None else f" (default: {default * scale:g})"
        p.add_argument(flag, dest=key, type=lambda x, scale=scale: float(x) / scale,  # type: ignore[misc]
                       default=default, metavar=unit, help=text)
    p = commands.add_parser("draw", parents=[common], help="the roofline, with the model's points", allow_abbrev=False)
    p.add_argument("--prompts", type=int, nargs="+", default=[16, 128, 1024], metavar="N", help="tokens of prefills")
    p.add_argument("--batches", type=int, nargs="+", metavar="N", help="sequences of decode steps")
    p.add_argument("--context", type=int, default=1024, metavar="N", help="tokens of each (default: 1024)")
    return parser.parse_args(argv)


def _chip(a: argparse.Namespace) -> Chip:
    given = {key: value * scale for key, value, scale in (
        ("flops", a.flops, 1e12), ("bandwidth", a.bandwidth, 1e9), ("memory", a.memory, 1e9)) if value is not None}
    name = a.gpu.lower().replace(" ", "-")
    if name != "this" and name not in CHIPS:
        raise ValueError(f"there is no GPU {_quote(a.gpu)}; known are {', '.join(CHIPS)}, and this")
    chip = machine(**given) if name == "this" else replace(CHIPS[name], **given)
    if not a.fp8 or a.flops is not None:  # measured is measured
        return chip
    if chip.fp8_flops is None:
        raise ValueError(f"{chip} has no products in fp8; leave out --fp8 (--weight-bits 8 rounds the weights alone)")
    return replace(chip, flops=chip.fp8_flops)


def main(argv: Sequence[str] | None = None) -> int:
    a = _arguments(argv)
    try:
        if a.command is None:
            demo()
            sys.stdout.flush()
            return 0
        bits = (8 if a.fp8 else 16) if a.weight_bits is None else a.weight_bits
        shape, chip = model(a.model, bits, a.kv_bits), _chip(a)
        if a.command == "plan":
            demand = Demand(**{f.name: getattr(a, f.name) for f in fields(Demand)})
            print(explain(plan(shape, chip, demand, a.tp, a.batch)))
        else:
            least = decode_bytes(shape, 1, max(1, a.context)) / chip.memory
            n = next((n for n in (1, 2, 4) if least <= n), 8) if a.tp is None else a.tp
            print(picture(shape.on(n), chip.times(n), a.prompts, a.batches, a.context))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader went away (| head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
