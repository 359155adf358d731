"""model.py - a Llama-style decoder: the architecture and nothing else.

    tokens -> embedding -> n_layer x [ x + attention(norm(x)),  x + mlp(norm(x)) ] -> norm -> head -> logits

The one idea of this file is what it does *not* know: pages, masks, lengths, schedules and kernels. Once a layer the
model hands q, k and v of the new tokens to a function `attend(layer, q, k, v) -> out`, and whoever calls the model
decides what that means. With none given it is dense causal attention, so the file works alone:

    Llama(config)(tokens)                                       tokens (B, T)  -> logits (B, T, V)
    model(tokens, positions, attend=step.attend, rows=rows)     tokens (N,)    -> logits (R, V)

In the second form N tokens of any mix of sequences are packed one behind the other (prefill chunks, decode steps,
drafts to verify: the model cannot tell), and the head, a fifth of a small model's work, runs on `rows` only.

On a CPU, where few rows are all overhead, `fuse_` adds a second form of the same block (Block.bare, at the end of it):
leave that, and all that says oneDNN, for a second reading.

One set of formulas covers Llama 2 / 3 / 3.1 / 3.2, SmolLM2, TinyLlama, Mistral, Qwen2 / 2.5 and Qwen3: what differs is
a line of the table FAMILIES and the frequencies of the rotary embedding. What is not implemented is refused by name
(mixture of experts, partial rotary, unknown families and RoPE types).

Papers: RMSNorm (Zhang and Sennrich 2019), rotary embedding (Su et al. 2021), SwiGLU (Shazeer 2020), grouped-query
attention (Ainslie et al. 2023), YaRN (Peng et al. 2023). Parameter names are Hugging Face's, so state dicts fit.

Shapes: B sequences, T time, N packed tokens, C hidden_size, H query heads, G key/value heads, D head_dim,
R rows, V vocabulary; "*" is (B, T) or (N,).
"""
from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

# ------------------------------------------------------------------ the blueprint

# Family: bias on q/k/v, bias on o, bias in the MLP, RMSNorm on each head's q and k. A string names the config key
# that decides. Qwen2 has q/k/v biases although its config never says so.
FAMILIES: dict[str, tuple[bool | str, bool | str, bool | str, bool]] = {
    "llama": ("attention_bias", "attention_bias", "mlp_bias", False),
    "mistral": (False, False, False, False),
    "qwen2": (True, False, False, False),
    "qwen3": ("attention_bias", "attention_bias", False, True),
}


@dataclass(frozen=True)
class Config:
    """What the architecture needs to know. `rope` is {"rope_type", "rope_theta", ...}, read by `rope_frequencies`."""

    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float = 1e-6
    rope: dict = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # keys that a token sees, itself included; None: all before it

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Config:
        """Config from the dict of a Hugging Face config.json.

        Reads `rope_parameters` (newer) before `rope_scaling` and `rope_theta` (older). Where the dict is silent:
        rope_theta 10000, as many KV heads as heads, head_dim hidden_size / heads, untied head.
        Raises ValueError, naming what it is, for anything that this file would run wrongly.
        """
        _refuse_unsupported(d)
        hidden, n_head = _whole(d, "hidden_size", most=2**20), _whole(d, "num_attention_heads", most=2**16)
        n_kv_head = _whole(d, "num_key_value_heads", n_head, most=2**16)
        head_dim = _whole(d, "head_dim", hidden // n_head, most=2**14)
        if n_head % n_kv_head:
            raise ValueError(f"config: {n_head} query heads cannot be shared out among {n_kv_head} key/value heads")
        if head_dim % 2:
            raise ValueError(f"config: head_dim is {head_dim}; rotary embedding needs an even number")
        max_seq_len = _whole(d, "max_position_embeddings")
        window = d.get("sliding_window") if _flag(d, "use_sliding_window", True) else None
        if window is not None:
            window = _whole(d, "sliding_window")
            if d["model_type"] != "mistral":  # some layers may have the window and others not: within it all are alike
                max_seq_len = min(max_seq_len, window)
        flags = [_flag(d, f) if isinstance(f, str) else f for f in FAMILIES[d["model_type"]]]
        config = cls(
            n_layer=_whole(d, "num_hidden_layers", most=1024), n_head=n_head, n_kv_head=n_kv_head, head_dim=head_dim,
            hidden_size=hidden, intermediate_size=_whole(d, "intermediate_size", most=2**20),
            vocab_size=_whole(d, "vocab_size", most=2**24), max_seq_len=max_seq_len, rope=_rope_dict(d),
            norm_eps=_positive(d, "rms_norm_eps", 1e-6), sliding_window=window,
            tie_embeddings=_flag(d, "tie_word_embeddings"),
            qkv_bias=flags[0], o_bias=flags[1], mlp_bias=flags[2], qk_norm=flags[3],
        )
        rope_frequencies(config.rope, head_dim)  # an unknown or incomplete rope type is refused here, not at first use
        return config


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


def _positive(d: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = d.get(key)
    value = default if value is None else value
    # The bounds keep every power, product and quotient that this file forms of such numbers finite.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e-15 <= value <= 1e15:
        raise ValueError(f"config: {key} is {_quote(value)}, but must be a number from 1e-15 to 1e15")
    return float(value)


def _flag(d: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = d.get(key)
    value = default if value is None else value
    if value not in (True, False):  # a string such as "false" would count as true
        raise ValueError(f"config: {key} is {_quote(value)}, but must be true or false")
    return bool(value)


def _refuse_unsupported(d: Mapping[str, Any]) -> None:
    family = d.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        # Gemma's tensors, for one, have exactly Llama's names, but its norm multiplies by (1 + weight).
        raise ValueError(f"config: model_type {_quote(family)} is not supported; this model runs {', '.join(FAMILIES)}")
    experts = next((k for k in ("num_local_experts", "num_experts", "n_routed_experts") if d.get(k)), None)
    if experts:
        raise ValueError(f"config: {experts} is {_quote(d[experts])}; mixture-of-experts models are not supported")
    if d.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"config: hidden_act {_quote(d['hidden_act'])} is not supported, only silu")
    if d.get("quantization_config"):
        method = d["quantization_config"].get("quant_method") if isinstance(d["quantization_config"], dict) else None
        raise ValueError(f"config: weights quantized with {_quote(method)} are not supported; "
                         "use the unquantized checkpoint")


def _rope_dict(d: Mapping[str, Any]) -> dict:
    """One dict {"rope_type", "rope_theta", ...} from either spelling; rope_parameters wins, then rope_scaling."""
    found = []
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(d.get(key) or {}, Mapping):
            raise ValueError(f"config: {key} is {_quote(d[key])}, but must be an object")
        rope = dict(d.get(key) or {})
        if any(isinstance(v, Mapping) for v in rope.values()):
            raise ValueError(f"config: {key} holds one set for each kind of layer, which is not supported")
        if rope:
            found.append({**rope, "rope_type": rope.get("rope_type") or rope.get("type") or "default"})
    rope = found[0] if found else {"rope_type": "default"}
    if found and found[-1]["rope_type"] != rope["rope_type"]:  # transformers would let rope_scaling win: ask instead
        raise ValueError(f"config: rope_parameters ask for RoPE type {_quote(rope['rope_type'])}, rope_scaling for "
                         f"{_quote(found[-1]['rope_type'])}; keep one of the two")
    rope["rope_theta"] = _positive(rope, "rope_theta", _positive(d, "rope_theta", 10000.0))
    partial_rotary = rope.get("partial_rotary_factor", d.get("partial_rotary_factor"))
    if partial_rotary not in (None, 1, 1.0):
        raise ValueError(f"config: partial_rotary_factor {_quote(partial_rotary)} is not supported, only full rotation")
    if rope["rope_type"] in ("llama3", "yarn") and rope.get("original_max_position_embeddings") is None:
        rope["original_max_position_embeddings"] = d.get("original_max_position_embeddings",
                                                         d.get("max_position_embeddings"))
    return rope


# ------------------------------------------------------------------ rotary position embedding


def rope_frequencies(rope: Mapping[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies (D/2,) float64 on the CPU and the factor that multiplies cos and sin (1 except for YaRN).

    Pair i of a head turns by position * theta^(-2i/D). The scalings stretch the slow pairs for longer contexts:
      linear   every frequency divided by `factor`
      llama3   wavelengths above original/low_freq_factor divided by `factor`, those below original/high_freq_factor
               kept, and between them a blend that is linear in *frequency*
      yarn     pairs that turn more than beta_fast times in the original context kept, less than beta_slow times
               divided, a ramp over the pair's index between; attention sharpened by 0.1 ln(factor) + 1
      factors  frequency i divided by factors[i] (GGUF's rope_freqs)
    Raises ValueError for any other type and for missing parameters.
    """
    kind, theta = rope.get("rope_type", "default"), _positive(rope, "rope_theta")
    inv = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    if kind in ("default", "none"):
        return inv, 1.0
    if kind == "linear":
        return inv / _positive(rope, "factor"), 1.0
    if kind == "factors":
        factors = rope.get("factors")
        if not isinstance(factors, (list, tuple)) or len(factors) != len(inv):
            raise ValueError(f"config: RoPE factors must be a list of {len(inv)} numbers, one for each pair")
        factors = [_positive({"RoPE factor": f}, "RoPE factor") for f in factors]
        return inv / torch.tensor(factors, dtype=torch.float64, device="cpu"), 1.0
    if kind == "llama3":
        factor, low, high, original = (_positive(rope, k) for k in (
            "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
        if low > high:
            raise ValueError(f"config: low_freq_factor {low} exceeds high_freq_factor {high}")
        turns = original * inv / (2 * math.pi)  # how often each pair turns within the original context
        keep = ((turns - low) / (high - low)).clamp(0, 1) if high != low else (turns > low).double()
        return inv / factor * (1 - keep) + inv * keep, 1.0
    if kind == "yarn":
        return _yarn(rope, inv, head_dim)
    raise ValueError(f"config: RoPE type {_quote(kind)} is not supported; known are default, linear, llama3, yarn, "
                     "factors")


def _yarn(rope: Mapping[str, Any], inv: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, float]:
    factor, original = _positive(rope, "factor"), _positive(rope, "original_max_position_embeddings")
    if rope["rope_theta"] <= 1:
        raise ValueError(f"config: YaRN needs a rope_theta above 1, got {rope['rope_theta']}")

    def index(turns: float) -> float:  # the (fractional) pair that turns so often within the original context
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low = index(_positive(rope, "beta_fast", 32.0))
    high = index(_positive(rope, "beta_slow", 1.0))
    if _flag(rope, "truncate", True):
        low, high = float(math.floor(low)), float(math.ceil(high))  # floats: with a theta near 1, beyond any integer
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    keep = 1 - ((torch.arange(len(inv), dtype=torch.float64, device="cpu") - low) / (high - low)).clamp(0, 1)

    def sharpen(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0

    usual = sharpen(1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        usual = sharpen(_positive(rope, "mscale")) / sharpen(_positive(rope, "mscale_all_dim"))
    return inv / factor * (1 - keep) + inv * keep, _positive(rope, "attention_factor", usual)


class Rotary(nn.Module):
    """positions (*) -> cos, sin (*, 1, D) float32 (float64 in a float64 model), made once a step for all layers.

    subtle: in bfloat16 the position 257 is 256. So the frequencies are no buffer that `model.to(bfloat16)` would
    cast: they stay float64, only their device follows the positions', and the angles are float64 too.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.inv_freq, self.attention_factor = rope_frequencies(config.rope, config.head_dim)  # (D/2,)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        if self.inv_freq.device != positions.device:  # once, at first use on a GPU
            self.inv_freq = self.inv_freq.to(positions.device)
        angles = positions[..., None, None].double() * self.inv_freq  # (*, 1, D/2)
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        # sin carries the sign of the rotation, so that `rotate` is one multiply-add: (*, 1, D)
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (x[i], x[i + D/2]) of x (*, heads, D) by its angle: Hugging Face's half-split layout.

    Computed in the dtype of cos and sin (at least float32), returned in x's.
    """
    wide = x.to(cos.dtype)
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


# ------------------------------------------------------------------ the layers

FEW_ROWS = 64  # on a CPU, up to so many rows go through `Block.bare`: with more, the products are what takes the time


class Linear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight is None:
            return _packed_linear(self.packed, self.bias, x)
        return F.linear(x, self.weight, self.bias)

    def bare(self) -> Callable:
        """forward as a function: without what a module call and its look-ups cost, see Block.bare."""
        if self.weight is None:
            return partial(_packed_linear, self.packed, self.bias)
        return partial(F.linear, weight=self.weight, bias=self.bias)

    def pack_(self) -> Linear:
        """Keep the weight in the order in which oneDNN computes, in place of the usual one. Returns self.

        F.linear brings a bfloat16 matrix into that order anew in each call, which on a CPU costs more than the product
        itself: for one row of 3072 x 576 188 us instead of 74, for 16 rows 268 instead of 130, to the same bits.
        """
        if _onednn_packs(self.weight):
            self.register_buffer("packed", torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None))
            self.weight: Any = None
        return self

    def reset_parameters(self):  # drawing random numbers on meta would import 900 modules (1.5 s) to draw none
        if not self.weight.is_meta:
            super().reset_parameters()


def _packed_linear(packed: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _onednn_packs(weight: torch.Tensor | None) -> bool:
    """Whether oneDNN has an order of its own for this weight: bfloat16 on a CPU that multiplies it natively."""
    return (weight is not None and weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
            and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Embedding(nn.Embedding):
    def reset_parameters(self):  # as in Linear
        if not self.weight.is_meta:
            super().reset_parameters()


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in at least float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps  # type: Any, float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype == torch.float64 else x.float()  # squares of half precision overflow from 256 on
        total = wide.square().sum(-1, keepdim=True)  # times 1 / n, below, takes a third of the time that `mean` divides
        wide = wide * total.mul_(1 / x.shape[-1]).add_(self.eps).rsqrt_()
        return (wide * self.weight).to(x.dtype)

    def bare(self) -> Callable:
        """This norm of x and -x side by side, (*, 2, n) -> (*, n).

        torch has no RMSNorm in one piece for a CPU, but it has a LayerNorm, and of x and -x the mean is 0 and the
        variance is mean(x^2): 1 operation instead of 9, for one row 3 us instead of 12.
        """
        return partial(_norm_of_pair, torch.stack((self.weight, self.weight)).detach(), self.eps)


def _norm_of_pair(weight: torch.Tensor, eps: float, x: torch.Tensor) -> torch.Tensor:
    return torch.layer_norm(x, weight.shape, weight, None, eps).select(-2, 0)


def causal_attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                     window: int | None = None) -> torch.Tensor:
    """Dense causal attention over whole sequences: q (*, H, D), k and v (*, G, D) -> (*, H, D); (N,) is one. With a
    window a token sees so many keys, its own and those just before it."""
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))  # (.., H, T, D), (.., G, T, D)
    T, mask = q.shape[-2], None
    if window is not None and window < T:
        mask = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().triu(1 - window)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out.transpose(-3, -2)


class Attention(nn.Module):
    """Grouped-query attention: H query heads share G key/value heads, H/G to one.

        H = 6, G = 2:   q0 q1 q2   q3 q4 q5        G = H is multi-head attention,
                          \\ | /      \\ | /         G = 1 is multi-query attention.
                           kv0        kv1
    """

    def __init__(self, c: Config):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = c.n_head, c.n_kv_head, c.head_dim
        self.q_proj = Linear(c.hidden_size, c.n_head * c.head_dim, bias=c.qkv_bias)
        self.k_proj = Linear(c.hidden_size, c.n_kv_head * c.head_dim, bias=c.qkv_bias)
        self.v_proj = Linear(c.hidden_size, c.n_kv_head * c.head_dim, bias=c.qkv_bias)
        self.o_proj = Linear(c.n_head * c.head_dim, c.hidden_size, bias=c.o_bias)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.qkv_proj: Linear | None = None  # set by Llama.fuse_

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Callable) -> torch.Tensor:
        H, G, D = self.n_head, self.n_kv_head, self.head_dim
        if self.qkv_proj is not None:
            qk, v = self.qkv_proj(x).split_with_sizes(((H + G) * D, G * D), -1)  # `split` is 1 us of Python
        else:
            qk, v = torch.cat((self.q_proj(x), self.k_proj(x)), -1), self.v_proj(x)
        qk, v = qk.view(*x.shape[:-1], H + G, D), v.view(*x.shape[:-1], G, D)  # (*, H + G, D), (*, G, D)
        if self.q_norm is not None:
            qk = torch.cat((self.q_norm(qk[..., :H, :]), self.k_norm(qk[..., H:, :])), -2)
        q, k = rotate(qk, cos, sin).split_with_sizes((H, G), -2)  # (*, H, D), (*, G, D)
        return self.o_proj(attend(q, k, v).flatten(-2))  # (*, H, D) -> (*, C)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, c: Config):
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)
        self.gate_up_proj: Linear | None = None  # set by Llama.fuse_

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate_up_proj is not None:
            gate, up = self.gate_up_proj(x).chunk(2, -1)  # (*, 2F) -> (*, F) twice
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(F.silu(gate).mul_(up))


class Block(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Callable) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))

    def bare(self) -> Callable:
        """forward without its modules, for few rows on a CPU: bare(x (N, 2, C), sign, cos, sin, attend) -> (N, 2, C).

        x is the residual stream and its negative, which is what the norms take, and sign is [[1], [-1]], by which what
        a layer adds goes to both. See `_bare_block`. It holds the weights as they are now.
        """
        a, m = self.self_attn, self.mlp
        qkv = _bare(a.q_proj, a.k_proj, a.v_proj) if a.qkv_proj is None else _bare(a.qkv_proj)
        gate_up = _bare(m.gate_proj, m.up_proj) if m.gate_up_proj is None else _bare(m.gate_up_proj)
        qk_norms = None if a.q_norm is None else (a.q_norm.bare(), a.k_norm.bare())
        return partial(_bare_block, (a.n_head, a.n_kv_head, a.head_dim), self.input_layernorm.bare(), qkv, qk_norms,
                       _bare(a.o_proj), self.post_attention_layernorm.bare(), gate_up, _bare(m.down_proj))


def _bare(*layers: nn.Module) -> Callable:
    """A function that computes what these linear layers do, side by side."""
    functions = [layer.bare() if hasattr(layer, "bare") else layer for layer in layers]
    return functions[0] if len(functions) == 1 else partial(_side_by_side, functions)


def _side_by_side(functions: list[Callable], x: torch.Tensor) -> torch.Tensor:
    return torch.cat([f(x) for f in functions], -1)


def _bare_block(heads: tuple[int, int, int], norm: Callable, qkv: Callable, qk_norms: tuple | None, o: Callable,
                mlp_norm: Callable, gate_up: Callable, down: Callable, x: torch.Tensor, sign: torch.Tensor,
                cos: torch.Tensor, sin: torch.Tensor, attend: Callable) -> torch.Tensor:
    """The formulas of Attention, MLP and Block once more, in one place and in the fewest operations.

    With one row every operation waits for the next, and nine module calls and their look-ups are as long as a dozen
    operations: a step of one token of the 4-bit SmolLM2-135M takes 6.6 ms instead of 8.2.
    """
    H, G, D = heads
    qk, v = qkv(norm(x)).view(-1, H + 2 * G, D).split_with_sizes((H + G, G), -2)  # (N, H + G, D), (N, G, D)
    if qk_norms is not None:
        q, k = (f(part[:, :, None] * sign) for f, part in zip(qk_norms, qk.split_with_sizes((H, G), -2)))
        qk = torch.cat((q, k), -2)
    q, k = rotate(qk, cos, sin).split_with_sizes((H, G), -2)
    x = torch.addcmul(x, o(attend(q, k, v).flatten(-2)).unsqueeze(1), sign)
    gate, up = gate_up(mlp_norm(x)).chunk(2, -1)
    return torch.addcmul(x, down(F.silu(gate).mul_(up)).unsqueeze(1), sign)


class Llama(nn.Module):
    """The decoder. Parameter names and `state_dict()` are Hugging Face's (a tied head has no entry of its own)."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.model = nn.ModuleDict({
            "embed_tokens": Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            "norm": RMSNorm(config.hidden_size, config.norm_eps),
        })
        self.lm_head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = Rotary(config)
        self.bare_blocks: list[Callable] = []  # set by fuse_ on a CPU: each block's bare form, and the last norm's

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None, attend: Callable | None = None,
                rows: torch.Tensor | None = None) -> torch.Tensor:
        """tokens (B, T) or packed (N,) integers -> logits (*, V), or (R, V) where rows (R,) are given.

        positions  (N,) or (T,), counted within each sequence; 0 .. T-1 if None
        attend     attend(layer, q (*, H, D), k (*, G, D), v (*, G, D)) -> (*, H, D); dense and causal if None
        rows       (R,) indices into the flattened tokens whose logits are wanted; the others never meet the head
        Raises ValueError if whole sequences (no attend) are longer than max_seq_len.
        """
        if attend is None:
            c = self.config
            attend = partial(causal_attention, window=c.sliding_window)
            if tokens.shape[-1] > c.max_seq_len:
                why = " (its sliding window)" if c.sliding_window == c.max_seq_len else ""
                raise ValueError(f"{tokens.shape[-1]} tokens exceed this model's context of {c.max_seq_len}{why}")
        if positions is None:
            positions = torch.arange(tokens.shape[-1], device=tokens.device)
        return self.head(self.hidden(tokens, positions, attend, rows))

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Callable,
               rows: torch.Tensor | None = None) -> torch.Tensor:
        """What the head is given: (*, C), or (R, C) of the rows."""
        x = self.model["embed_tokens"](tokens)  # (*, C)
        cos, sin = self.rotary(positions, x.dtype)  # (N, 1, D) or (T, 1, D)
        # subtle: while torch.export traces, even asking for the number of rows would fix it to this side of FEW_ROWS
        if not torch.compiler.is_compiling() and self._goes_bare(x):
            sign = x.new_tensor([[1.0], [-1.0]])
            x = x[:, None] * sign  # (N, 2, C)
            for layer, block in enumerate(self.bare_blocks[:-1]):
                x = block(x, sign, cos, sin, partial(attend, layer))
            return self.bare_blocks[-1](x if rows is None else x[rows])
        for layer, block in enumerate(self.model["layers"]):
            x = block(x, cos, sin, partial(attend, layer))
        if rows is not None:
            x = x.flatten(0, -2)[rows]  # (R, C)
        return self.model["norm"](x)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """(*, C) -> logits (*, V)."""
        return F.linear(x, self.model["embed_tokens"].weight) if self.lm_head is None else self.lm_head(x)

    @classmethod
    def from_tensors(cls, config: Config, tensors: Mapping[str, torch.Tensor | Mapping],
                     dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", packed=None) -> Llama:
        """A model for inference on the given weights, taken from the mapping one at a time and cast to dtype.

        Where dtype and device already fit, the tensors are used as they are, not copied. Every tensor is used or
        accounted for: a missing, surplus or misshapen one is a ValueError. Of a tied checkpoint a stale lm_head is
        passed over with a warning.
        A weight may also be a dict of integer codes, scales, ...: then its layer is what `packed`, the module packed.py
        or one like it, makes of that, QuantLinear(weight) or QuantEmbedding(weight, dtype).
        """
        with torch.device("meta"):  # no memory yet
            model = cls(config)
        wanted = dict(model.named_parameters())
        missing = [name for name in wanted if name not in tensors]
        if missing:
            raise ValueError(f"the checkpoint lacks {len(missing)} of {len(wanted)} tensors, first {missing[0]}")
        surplus = [n for n in tensors if n not in wanted and not n.endswith("rotary_emb.inv_freq")]
        if config.tie_embeddings and "lm_head.weight" in surplus:
            surplus.remove("lm_head.weight")
            head, embedding = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
            plain = isinstance(head, torch.Tensor) and isinstance(embedding, torch.Tensor)
            if not plain or head.dtype != embedding.dtype or not torch.equal(head, embedding):  # type: ignore
                warnings.warn("the head is tied to the embedding: the checkpoint's own lm_head.weight is not used",
                              stacklevel=2)
        if surplus:
            raise ValueError(f"the checkpoint has {len(surplus)} tensors that its config does not explain, "
                             f"first {surplus[0]}")
        for name, parameter in wanted.items():
            tensor = tensors[name]
            shape = (tensor["codes"] if isinstance(tensor, Mapping) else tensor).shape
            if shape != parameter.shape:
                raise ValueError(f"{name} has shape {tuple(shape)}, but the config asks for {tuple(parameter.shape)}")
            if isinstance(tensor, Mapping):
                model._set_packed(name, tensor, dtype, device, packed)
                continue
            if not tensor.is_floating_point():  # codes without their scales, say
                raise ValueError(f"{name} holds {tensor.dtype}, not floating-point weights")
            owner, _, leaf = name.rpartition(".")
            tensor = tensor.to(device, dtype)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
        return model.eval()

    def _set_packed(self, name: str, weight: Mapping, dtype: torch.dtype, device, packed) -> None:
        """The layer that computes with a weight of codes takes the place of the one that was to hold its floats."""
        if packed is None:
            raise ValueError(f"{name} holds integer codes; pass the module packed.py, or dequantize them")
        weight = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in weight.items()}
        owner, _, leaf = name.removesuffix(".weight").rpartition(".")
        try:
            if leaf != "embed_tokens":
                setattr(self.get_submodule(owner), leaf, packed.QuantLinear(weight))
                return
            self.model["embed_tokens"] = packed.QuantEmbedding(weight, dtype)
            if self.config.tie_embeddings:
                self.lm_head = packed.QuantLinear(weight)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def fuse_(self, pack: bool = True) -> Llama:
        """Join q/k/v and gate/up into one matrix each: seven matmuls a layer become four. In place, returns self.

        On a CPU, few rows then go past the modules, whose hooks they do not meet (see Block.bare), until the model is
        moved or given other weights.

        pack: also bring bfloat16 weights, and an 8-bit head, into the order in which oneDNN reads them on a CPU (see
        Linear.pack_), which torch.export cannot look into. A tied head then has a copy of its own.
        The last call before running: parameter names are no longer Hugging Face's afterwards, and in oneDNN's order
        weights can be neither copied nor saved. The old matrices are let go layer by layer, so that memory rises by one
        layer only. Packed matrices of unlike layouts stay apart.
        """
        for block in self.model["layers"]:
            a, m = block.self_attn, block.mlp
            if a.qkv_proj is None and (joined := _join(a.q_proj, a.k_proj, a.v_proj)) is not None:
                a.qkv_proj, a.q_proj, a.k_proj, a.v_proj = joined, None, None, None
            if m.gate_up_proj is None and (joined := _join(m.gate_proj, m.up_proj)) is not None:
                m.gate_up_proj, m.gate_proj, m.up_proj = joined, None, None
        embedding = getattr(self.model["embed_tokens"], "weight", None)
        if pack and self.lm_head is None and _onednn_packs(embedding):
            with torch.device("meta"):
                self.lm_head = Linear(embedding.shape[1], embedding.shape[0], bias=False)
            self.lm_head.weight = nn.Parameter(embedding.detach(), requires_grad=False)
        for x in self.modules() if pack else ():
            if (isinstance(x, Linear) or x is self.lm_head) and hasattr(x, "pack_"):
                x.pack_()
        norm = self.model["norm"]
        if norm.weight.device.type == "cpu":
            self.bare_blocks = [*(block.bare() for block in self.model["layers"]), norm.bare()]
        return self

    def _goes_bare(self, x: torch.Tensor) -> bool:
        trained = torch.is_grad_enabled() and self.model["norm"].weight.requires_grad  # bare norms know no gradient
        return bool(self.bare_blocks) and x.dim() == 2 and len(x) <= FEW_ROWS and not trained

    def _apply(self, fn: Callable, recurse: bool = True) -> Llama:  # to(), cuda(), ...: new tensors
        self.bare_blocks = []
        return super()._apply(fn, recurse)

    def load_state_dict(self, *args, **kwargs):
        self.bare_blocks = []
        return super().load_state_dict(*args, **kwargs)


def _join(*linears: nn.Module) -> nn.Module | None:
    """One layer whose outputs are those of `linears`, one behind the other; None if they differ in kind."""
    if not all(isinstance(x, Linear) for x in linears):
        return linears[0].join(linears) if all(type(x) is type(linears[0]) for x in linears) else None
    with torch.device("meta"):
        joined = Linear(linears[0].in_features, sum(x.out_features for x in linears), linears[0].bias is not None)
    joined.weight = nn.Parameter(torch.cat([x.weight for x in linears]), requires_grad=False)
    if joined.bias is not None:
        joined.bias = nn.Parameter(torch.cat([x.bias for x in linears]), requires_grad=False)
    return joined


# ------------------------------------------------------------------ demo

if __name__ == "__main__":
    torch.manual_seed(0)
    tiny = Config(n_layer=2, n_head=6, n_kv_head=2, head_dim=16, hidden_size=96, intermediate_size=256,
                  vocab_size=100, max_seq_len=64, tie_embeddings=True)
    net = Llama(tiny).eval()
    print(f"A Llama of {sum(p.numel() for p in net.parameters()):,} parameters; of two layers the first:")
    for name, parameter in net.state_dict().items():
        if "layers.1" not in name:
            print(f"  {name:48} {tuple(parameter.shape)}")

    ids = torch.randint(100, (1, 7))

    def show(layer, q, k, v):
        if layer == 0:
            print(f"\nWhat attend gets once a layer: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; "
                  f"{q.shape[-2] // k.shape[-2]} query heads share one key/value head.")
        return causal_attention(layer, q, k, v)

    with torch.inference_mode():
        whole = net(ids)
        packed = net(ids[0], attend=show, rows=torch.tensor([6]))
        cut = net(ids[:, :5])
    print(f"Tokens (B, T) {tuple(ids.shape)} give logits {tuple(whole.shape)}; packed (N,) with rows=[6] they give "
          f"{tuple(packed.shape)}, and the last row agrees to {(whole[0, 6] - packed[0]).abs().max():.1e}.")
    print(f"Causal: without the last two tokens the first five rows change by {(whole[:, :5] - cut).abs().max():.1e}.")
