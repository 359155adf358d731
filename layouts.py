"""
Quantized weights on disk: the layouts of compressed-tensors, GPTQ and AWQ, to plain data and back.

    weights = read(config, tensors)            "X.weight" of a quantized linear X is a dict, all else is as it is
    tensors |= write("gptq", "model.layers.0.mlp.up_proj", weight)
    config["quantization_config"] = quantization_config("gptq", bits=4, group_size=128, sym=True)

The dict, a packed weight:

    codes   (N, K)  uint8 or int8 (float8_e4m3fn for fp8)   N = out_features, K = in_features
    scales  (N, G)  floating point, one a group of a row; G = 1 is "per channel"
    zeros   (N, G)  integer zero points, in units of a code; None is 0
    mins    (N, G)  floating point, added; None is 0 (always None here: no layout has them)
    g_idx   (K,)    group of each column; None: K / G neighbours each
    bits    int     2..8, the width of a code
    W[n, k] = scales[n, g(k)] * (codes[n, k] - zeros[n, g(k)]) + mins[n, g(k)]

The one idea: all of these formats hold the same integers in different orders, so one packer of little-endian bit
streams serves them all. Codes 0..7 of 4 bits in a 32-bit word, highest bits on the left:

    compressed-tensors  7 6 5 4 3 2 1 0   neighbours in a row:     weight_packed  [N, K/8]
    GPTQ                7 6 5 4 3 2 1 0   the same, transposed:    qweight        [K/8, N]
    AWQ                 7 5 3 1 6 4 2 0   neighbours in a column:  qweight        [K, N/8]
    zero points         as the codes, but always along a column:   weight_zero_point [N/8, G], qzeros [G, N/8]
    3 bits              a a 9 9 9 8 8 8 ..   32 codes in 3 words; the third bit of code a (10) begins the next word

Codes are stored unsigned, signed ones raised by 2^(bits-1). GPTQ in version 1 stores zero points less one; version 2
and the others do not. Symmetric means zero points of 2^(bits-1) throughout: the dict has signed codes and no zeros.

Read: compressed-tensors pack-quantized (2 to 8 bits), int-quantized, float-quantized (fp8); gptq and gptq_v2 of 2, 3, 4
and 8 bits with act-order; awq gemm. Written: the same with 4 or 8 bits, GPTQ always as version 1. Nothing a file says
is believed: shapes and settings must agree with each other, or it is a ValueError; a tensor is decoded when asked for.
Refused by name: other methods, nvfp4, mxfp4, marlin, sparse weights, transforms.
Left out on purpose: choosing codes (quantize.py), computing on them (packed.py), files (checkpoint.py), and whatever is
not a weight: scales of activations and of the KV cache are passed over, those stay as precise as they are.

Formats: github.com/vllm-project/compressed-tensors; AutoGPTQ and GPTQModel (qlinear); AutoAWQ (packing_utils).
"""
from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# ------------------------------------------------------------------ bit streams in 32-bit words


def pack(codes: Tensor, bits: int, dim: int) -> Tensor:
    """
    Unsigned codes to int32 words along `dim`: code i takes bits i * bits and up of a little-endian stream, and may
    straddle two words; the last word is filled with zeros. A code that `bits` cannot hold is a ValueError: it would
    spill into its neighbour.

    >>> [hex(word) for word in pack(torch.arange(8), 4, 0).tolist()]
    ['0x76543210']
    >>> [hex(word) for word in pack(torch.full((11,), 7), 3, 0).tolist()]
    ['-0x1', '0x1']
    """
    if not 1 <= bits <= 8 or codes.is_floating_point() or codes.dtype == torch.bool:
        raise ValueError(f"only integers of 1 to 8 bits are packed, not {codes.dtype} of {bits} bits")
    least, most = _range(codes)
    if least < 0 or most >> bits:
        raise ValueError(f"codes go from {least} to {most}, but {bits} bits hold 0 to {(1 << bits) - 1}")
    codes = codes.movedim(dim, -1)
    n, (per, width) = codes.shape[-1], _period(bits)
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, -n % per)).unflatten(-1, (-1, per))
    words = torch.zeros(*codes.shape[:-1], width, dtype=torch.int32, device=codes.device)
    for i in range(per):
        word, shift = divmod(i * bits, 32)
        code = codes[..., i].int()
        words[..., word] |= code << shift
        if shift + bits > 32:
            words[..., word + 1] |= code >> 32 - shift
    return words.flatten(-2)[..., :-(-n * bits // 32)].movedim(-1, dim).contiguous()


def unpack(words: Tensor, bits: int, dim: int, n: int) -> Tensor:
    """
    The inverse of `pack`: n codes, uint8, along `dim`. ValueError unless the words are just those that n codes take.

    >>> unpack(torch.tensor([0x76543210], dtype=torch.int32), 4, 0, 8)
    tensor([0, 1, 2, 3, 4, 5, 6, 7], dtype=torch.uint8)
    """
    if not 1 <= bits <= 8 or words.dtype != torch.int32 or words.shape[dim] != -(-n * bits // 32):
        raise ValueError(f"{n} codes of {bits} bits take {-(-n * bits // 32)} words of int32, "
                         f"not {words.shape[dim]} of {words.dtype}")
    words, (per, width) = words.movedim(dim, -1), _period(bits)
    if short := -words.shape[-1] % width:
        words = torch.nn.functional.pad(words, (0, short))
    words = words.unflatten(-1, (-1, width))
    codes = torch.empty(*words.shape[:-1], per, dtype=torch.uint8, device=words.device)
    for i in range(per):  # of all periods at once, one code each: no temporary is larger than the words
        word, shift = divmod(i * bits, 32)
        low = min(bits, 32 - shift)  # so many bits lie in this word; >> fills with copies of the sign, hence the mask
        code = words[..., word] >> shift & (1 << low) - 1
        if low < bits:
            code |= (words[..., word + 1] & (1 << bits - low) - 1) << low
        codes[..., i] = code
    return codes.flatten(-2)[..., :n].movedim(-1, dim).contiguous()


def _period(bits: int) -> tuple[int, int]:  # (codes, words) after which a code begins a word again
    return 32 // math.gcd(bits, 32), bits // math.gcd(bits, 32)


def _range(t: Tensor) -> tuple[int, ...]:
    return tuple(int(end) for end in t.aminmax()) if t.numel() else (0, 0)


def dequantize(weight: Mapping, dtype: torch.dtype = torch.float32) -> Tensor:
    """
    The (N, K) matrix that a packed weight stands for, computed in float32 and rounded once.

    >>> dequantize({"codes": torch.tensor([[0, 1, 2, 3]], dtype=torch.uint8), "scales": torch.tensor([[2.0, 0.5]]),
    ...             "zeros": torch.tensor([[1, 2]]), "mins": None, "g_idx": None, "bits": 4})
    tensor([[-2.0000,  0.0000,  0.0000,  0.5000]])
    """
    codes, scales, zeros, mins, g_idx = (weight[key] for key in ("codes", "scales", "zeros", "mins", "g_idx"))
    columns = _neighbours(codes.shape[1], scales.shape[1], codes.device) if g_idx is None else g_idx.long()
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for i in range(0, len(codes), 1024):  # rows at a time: only the result is as large as the matrix
        rows = slice(i, i + 1024)
        w = codes[rows].float()
        if zeros is not None:
            w -= zeros[rows].float()[:, columns]
        w *= scales[rows].float()[:, columns]
        if mins is not None:
            w += mins[rows].float()[:, columns]
        out[rows] = w
    return out


# ------------------------------------------------------------------ reading: which tensors are whose

MARKS = {"compressed-tensors": {"weight_packed", "weight_scale"}, "gptq": {"qweight"}, "awq": {"qweight"}}
PARTS = {  # of a linear that has one of the marks; scales of activations are among them, and not used
    "compressed-tensors": {"weight", "weight_packed", "weight_shape", "weight_scale", "weight_zero_point",
                           "weight_g_idx", "input_scale", "input_zero_point", "output_scale", "output_zero_point"},
    "gptq": {"weight", "qweight", "qzeros", "scales", "g_idx"}, "awq": {"weight", "qweight", "qzeros", "scales"},
}
OF_CACHE = (".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point")  # passed over where the config speaks of them


class Weights(Mapping):
    """Tensors and packed weights by Hugging Face name. Nothing is held: each look-up reads and decodes anew."""

    def __init__(self, tensors: Mapping[str, Tensor], linears: dict, decode: Callable, hidden: set, unlisted: set):
        self._tensors, self._linears, self._decode = tensors, linears, decode  # linears: {X: {part: name in tensors}}
        used = hidden.union(*(parts.values() for parts in linears.values()))
        self._linear = {f"{x}.weight": x for x in linears}
        self._plain = {name for name in tensors if name not in used}
        self._names = [name for name in tensors if name in self._plain - unlisted] + list(self._linear)

    def __getitem__(self, name: str) -> Tensor | dict:
        if name in self._linear:
            x = self._linear[name]
            return self._decode(x, {part: self._tensors[stored] for part, stored in self._linears[x].items()})
        if name not in self._plain:
            raise KeyError(name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name) -> bool:
        return name in self._linear or name in self._plain

    def __repr__(self) -> str:
        return f"<{len(self)} weights, {len(self._linear)} of them packed>"


def read(config: Mapping, tensors: Mapping[str, Tensor]) -> Weights:
    """
    The weights of a quantized checkpoint by Hugging Face name: a packed weight for "X.weight" of a quantized linear X,
    any other tensor as it is. `config` is its config.json, or of an old GPTQ model its quantize_config.json.

    A linear is quantized if and only if its packed tensors are there; settings that say otherwise, or a missing tensor,
    are a ValueError now, and contents that cannot be are one when the weight is asked for. What no layout explains
    keeps its name, for the caller to report. Codes are signed and zeros None where the config says symmetric; else
    codes are unsigned and zeros a tensor (both signed if stored as int8).
    GPTQ files may hold a bias of zeros for linears that have none. Such a bias is not listed, so that it is no surplus,
    but is there when asked for, so that a model with biases finds it. Biases apart, nothing is decoded here.
    """
    quant = config.get("quantization_config") or config.get("compression_config")
    if quant is None and "bits" in config and "group_size" in config:
        quant = {"quant_method": "gptq", **config}
    if not isinstance(quant, Mapping):
        raise ValueError("the config has no quantization_config, so its weights are not quantized")
    method = quant.get("quant_method")
    if not isinstance(method, str) or method not in OPENERS:
        raise ValueError(f"weights quantized with {_quote(method)} are not read, only with {', '.join(OPENERS)}; "
                         "use the unquantized checkpoint or one in these layouts")
    linears = {}
    for name in tensors:
        x, _, part = name.rpartition(".")
        if part in PARTS[method]:
            linears.setdefault(x, {})[part] = name
    linears = {x: parts for x, parts in linears.items() if MARKS[method] & parts.keys()}
    for x, parts in linears.items():
        if "weight" in parts and {"weight_packed", "qweight"} & parts.keys():
            raise ValueError(f"{x!r:.100} has both a weight and packed weights, so which one counts is unknown")
    decode = OPENERS[method](quant, linears)
    hidden, unlisted = set(), set()
    if quant.get("kv_cache_scheme") is not None:
        hidden = {name for name in tensors if name.endswith(OF_CACHE)}
    if method == "gptq":
        biases = {f"{x}.bias" for x in linears if f"{x}.bias" in tensors}
        unlisted = {bias for bias in biases if tensors[bias].dtype in FLOATS and not tensors[bias].any()}
    return Weights(tensors, linears, decode, hidden, unlisted)


# ------------------------------------------------------------------ what must hold

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _quote(value: Any) -> str:
    """What a message quotes of a value from a file: one short line, however long or deeply nested the value is."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # lists in lists in lists; an integer of thousands of digits
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else text[:77] + "..."


def _one_of(key: str, value, allowed: tuple):
    if not any(type(value) is type(a) and value == a for a in allowed):  # 4.0 is no whole number of bits, nor is True
        wanted = " or ".join(map(repr, allowed))
        raise ValueError(f"quantization_config: {key} is {_quote(value)}, but must be {wanted}")
    return value


def _group_size(value) -> int:
    if type(value) is not int or not (value == -1 or 0 < value < 1 << 31):
        raise ValueError(f"quantization_config: group_size is {_quote(value)}, but must be -1 or a number of columns")
    return value


def _name_list(settings: Mapping, key: str) -> Sequence[str]:
    names = settings.get(key) or []
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"quantization_config: {key} is {_quote(names)}, but must be a list of names")
    return names


def _all_present(linears: dict, needed: tuple) -> None:
    for x, parts in linears.items():
        for part in needed:
            if part not in parts:
                raise ValueError(f"{x!r:.100} has {', '.join(sorted(parts))}, but no {part}: the file is incomplete")


def _matrix(name: str, t: Tensor, dtypes: tuple, shape: tuple | None = None) -> tuple[int, int]:
    """The shape of t. It must be the one given, or else have two dimensions that are not 0."""
    if t.dtype not in dtypes or (tuple(t.shape) != shape if shape else t.dim() != 2 or 0 in t.shape):
        wanted = f"{' or '.join(map(str, dtypes))} of shape {shape or '(rows, columns)'}"
        raise ValueError(f"{name:.100} is {t.dtype} of shape {tuple(t.shape)}, but must be {wanted}")
    return tuple(t.shape)  # type: ignore[return-value]  # of two dimensions, as was checked


def _finite(name: str, scales: Tensor) -> Tensor:
    if not scales.isfinite().all():
        raise ValueError(f"{name:.100} holds scales that are not finite numbers")
    return scales


def _codes_fit(name: str, codes: Tensor, bits: int) -> None:
    if codes.dtype == torch.float8_e4m3fn:
        if (codes.view(torch.uint8) & 127 == 127).any():  # what a cast makes of numbers beyond the range
            raise ValueError(f"{name:.100} holds NaN; weights must be clamped to +-448 before they become fp8")
        return
    (least, most), low = _range(codes), -(1 << bits - 1) if codes.dtype == torch.int8 else 0
    if least < low or most >= low + (1 << bits):
        raise ValueError(f"{name:.100} holds {least} to {most}, which are not {bits} bits")


def _neighbours(k: int, groups: int, device=None) -> Tensor:
    if not groups or k % groups:
        raise ValueError(f"{k} columns do not divide into {groups} groups; give g_idx, the group of each column")
    return torch.arange(k, device=device) // (k // groups)


def _checked_g_idx(name: str, g_idx: Tensor, k: int, groups: int) -> Tensor | None:
    """None if it says what holds without it."""
    _matrix(name, g_idx, (torch.int32, torch.int64), (k,))
    least, most = _range(g_idx)
    if least < 0 or most >= groups:
        raise ValueError(f"{name:.100} names groups {least} to {most}, but there are {groups}")
    return None if k % groups == 0 and torch.equal(g_idx.long(), _neighbours(k, groups, g_idx.device)) else g_idx


def _symmetric(name: str, zeros: Tensor, middle: int) -> None:
    if _range(zeros) != (middle, middle):
        raise ValueError(f"{name:.100} has zero points from {zeros.min()} to {zeros.max()}, but the config says "
                         f"symmetric, all {middle}: one of them, or the version of the format, is wrong")


def _signed(codes: Tensor, bits: int) -> Tensor:  # in place: uint8 wraps round below 0, and as int8 that is right
    return codes.sub_(1 << bits - 1).view(torch.int8)


def _packed(codes: Tensor, scales: Tensor, zeros: Tensor | None, g_idx: Tensor | None, bits: int) -> dict:
    return {"codes": codes, "scales": scales, "zeros": zeros, "mins": None, "g_idx": g_idx, "bits": bits}


# ------------------------------------------------------------------ GPTQ and AWQ

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble i of a word holds output AWQ_ORDER[i] of its eight
AWQ_BACK = [0, 4, 1, 5, 2, 6, 3, 7]   # output j of the eight lies in nibble AWQ_BACK[j]


def _open_gptq(quant: Mapping, linears: dict) -> Callable:
    bits, size = _one_of("bits", quant.get("bits"), (2, 3, 4, 8)), _group_size(quant.get("group_size"))
    symmetric, act_order = (_one_of(key, quant.get(key), (True, False, None)) for key in ("sym", "desc_act"))
    version = quant.get("checkpoint_format") or quant.get("format") or "gptq"
    _one_of("checkpoint_format", version, ("gptq", "gptq_v2"))
    _one_of("is_marlin_format", quant.get("is_marlin_format"), (False, None))
    dynamic = quant.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(str(rule).startswith("-:") for rule in dynamic):  # "-:" leaves out
        raise ValueError("quantization_config: dynamic gives some linears other settings, which is not supported")
    _all_present(linears, ("qweight", "qzeros", "scales") + (("g_idx",) if act_order else ()))

    def decode(x: str, t: Mapping[str, Tensor]) -> dict:
        rows, n = _matrix(f"{x}.qweight", t["qweight"], (torch.int32,))
        k = t["g_idx"].numel() if "g_idx" in t else rows * 32 // bits
        if k * bits != rows * 32:
            raise ValueError(f"{x:.100}.qweight has {rows} rows of 32 bits, which are not {k} columns of {bits} bits")
        groups = 1 if size == -1 else -(-k // size)
        _matrix(f"{x}.scales", t["scales"], FLOATS, (groups, n))
        _matrix(f"{x}.qzeros", t["qzeros"], (torch.int32,), (groups, -(-n * bits // 32)))
        if "g_idx" in t:
            g_idx = _checked_g_idx(f"{x}.g_idx", t["g_idx"], k, groups)
        else:
            short = size != -1 and k % size  # the last group
            g_idx = torch.arange(k, device=t["qweight"].device) // size if short else None
        zeros = unpack(t["qzeros"], bits, 1, n).t().int().contiguous()  # (N, G)
        if version == "gptq":
            zeros = zeros + 1 & (1 << bits) - 1  # stored less one, and 0 less one as all ones
        codes = unpack(t["qweight"].t(), bits, 1, k)  # (N, K)
        if symmetric:
            _symmetric(f"{x}.qzeros", zeros, 1 << bits - 1)
            codes, zeros = _signed(codes, bits), None
        return _packed(codes, _finite(f"{x}.scales", t["scales"]).t().contiguous(), zeros, g_idx, bits)
    return decode


def _write_gptq(name: str, codes: Tensor, scales: Tensor, zeros: Tensor | None, g_idx: Tensor | None,
                bits: int) -> dict[str, Tensor]:
    (n, k), groups = codes.shape, scales.shape[1]
    if bits not in (2, 3, 4, 8) or codes.dtype != torch.uint8 or n * bits % 32 or k * bits % 32:
        raise ValueError(f"{name} is {n} x {k} of {bits} bits; gptq takes 2, 3, 4 or 8 bits, rows and columns that "
                         "fill words of 32 bits: compressed-tensors takes any")
    if zeros is None:
        zeros = torch.full_like(scales, 1 << bits - 1, dtype=torch.int32)
    elif not zeros.all():
        raise ValueError(f"{name} has a zero point of 0, which gptq cannot hold, since it stores them less one: use "
                         "compressed-tensors or awq, or zero points from 1 on")
    g_idx = _neighbours(k, groups, codes.device) if g_idx is None else g_idx
    return {f"{name}.qweight": pack(codes.t(), bits, 0), f"{name}.qzeros": pack(zeros.t() - 1, bits, 1),
            f"{name}.scales": scales.t().contiguous(), f"{name}.g_idx": g_idx.int()}


def _open_awq(quant: Mapping, linears: dict) -> Callable:
    _one_of("bits", quant.get("bits"), (4,))
    version = quant.get("version") or quant.get("format") or "gemm"
    _one_of("version", version.lower() if isinstance(version, str) else version, ("gemm",))
    size = _group_size(quant.get("group_size"))
    has_zeros = _one_of("zero_point", quant.get("zero_point", True), (True, False))
    _all_present(linears, ("qweight", "scales") + (("qzeros",) if has_zeros else ()))
    for entry in _name_list(quant, "modules_to_not_convert"):
        for x in linears:
            if f".{entry}." in f".{x}.":
                raise ValueError(f"{x:.100} has packed tensors, but modules_to_not_convert names {entry!r:.100}")

    def decode(x: str, t: Mapping[str, Tensor]) -> dict:
        k, words = _matrix(f"{x}.qweight", t["qweight"], (torch.int32,))
        n, groups = 8 * words, 1 if size == -1 else k // size
        if size != -1 and k % size:
            raise ValueError(f"{x:.100}.qweight has {k} rows, which are not groups of {size}")
        _matrix(f"{x}.scales", t["scales"], FLOATS, (groups, n))

        def outputs(words):  # (rows, N/8) -> (N, rows)
            return unpack(words, 4, 1, n).unflatten(1, (-1, 8))[..., AWQ_BACK].flatten(1).t().contiguous()

        codes, zeros = outputs(t["qweight"]), None
        if "qzeros" in t:
            _matrix(f"{x}.qzeros", t["qzeros"], (torch.int32,), (groups, words))
            zeros = outputs(t["qzeros"]).int()
        if not has_zeros:
            if zeros is not None and zeros.any():  # they may be there, unfilled
                _symmetric(f"{x}.qzeros", zeros, 8)
            codes, zeros = _signed(codes, 4), None
        return _packed(codes, _finite(f"{x}.scales", t["scales"]).t().contiguous(), zeros, None, 4)
    return decode


def _write_awq(name: str, codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> dict[str, Tensor]:
    if bits != 4 or codes.dtype != torch.uint8 or len(codes) % 8:
        raise ValueError(f"{name} has {len(codes)} rows of {bits} bits; awq takes only 4 bits and multiples of 8 rows: "
                         "compressed-tensors takes any")
    zeros = torch.full_like(scales, 8, dtype=torch.int32) if zeros is None else zeros

    def words(t):  # (N, rows) -> (rows, N/8)
        return pack(t.t().unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4, 1)

    return {f"{name}.qweight": words(codes), f"{name}.qzeros": words(zeros), f"{name}.scales": scales.t().contiguous()}


# ------------------------------------------------------------------ compressed-tensors

STORED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


class Scheme(NamedTuple):
    """How the weights of a config group are stored."""
    bits: int
    kind: str                     # "int" or "float"
    symmetric: bool
    strategy: str                 # what shares a scale: "tensor", "channel" (a row), "group" (in a row) or "block"
    block: tuple[int, int] | None  # rows and columns of a group or block
    needs_g_idx: bool             # groups are not of neighbouring columns


def _read_scheme(weights: Mapping) -> Scheme:
    if not isinstance(weights, Mapping):
        raise ValueError(f"quantization_config: the weights of a config group are {_quote(weights)}")
    kind, size = _one_of("type", weights.get("type", "int"), ("int", "float")), weights.get("group_size")
    bits = _one_of("num_bits", weights.get("num_bits", 8), tuple(range(2, 9)) if kind == "int" else (8,))
    symmetric = _one_of("symmetric", weights.get("symmetric", True), (True, False) if kind == "int" else (True,))
    _one_of("dynamic", weights.get("dynamic"), (False, None))
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    _one_of("strategy", strategy, ("tensor", "channel", "group", "block"))
    block = {"group": (1, size), "block": weights.get("block_structure")}.get(strategy)
    if strategy in ("group", "block") and not (isinstance(block, (list, tuple)) and len(block) == 2 and
                                               all(type(b) is int and 0 < b < 1 << 31 for b in block)):
        key = "group_size" if strategy == "group" else "block_structure"
        raise ValueError(f"quantization_config: {key} is {_quote(weights.get(key))}, which makes no {strategy}")
    order = _one_of("actorder", weights.get("actorder"), ("group", "weight", "static", "dynamic", True, False, None))
    return Scheme(bits, kind, symmetric, strategy, block and tuple(block), order in ("group", "dynamic", True))


def _open_compressed(quant: Mapping, linears: dict) -> Callable:
    _one_of("quantization_status", quant.get("quantization_status"), ("compressed", "frozen", None))
    for key in ("sparsity_config", "transform_config"):
        value = quant.get(key) or {}
        if not isinstance(value, Mapping) or value.get("format", "dense") != "dense" or value.get("config_groups"):
            raise ValueError(f"quantization_config: {key} {_quote(value)} is not supported")
    groups = quant.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()):
        raise ValueError("quantization_config: config_groups must hold a description of each group of linears")
    for settings in (quant, *groups.values()):
        _one_of("format", settings.get("format") or "mixed-precision", STORED)
    schemes = [(_name_list(g, "targets"), _read_scheme(g["weights"])) for g in groups.values()
               if g.get("weights") is not None]
    ignored, scheme_of = _name_list(quant, "ignore"), {}
    for x, parts in linears.items():
        if entry := next((e for e in ignored if _matches(e, x)), None):
            raise ValueError(f"{x!r:.100} has packed tensors, but the config ignores it ({entry!r:.100})")
        found = [(_matches(e, x), scheme) for targets, scheme in schemes for e in targets]
        closeness, scheme = max(found, key=lambda f: f[0], default=(0, None))
        if not closeness:
            raise ValueError(f"{x!r:.100} has packed tensors, but no config group has it among its targets")
        if (packed := "weight_packed" in parts) and scheme.kind == "float":
            raise ValueError(f"{x!r:.100} has packed tensors, but its config group says floating point")
        codes = ("weight_packed", "weight_shape") if packed or "weight" not in parts else ("weight",)
        _all_present({x: parts}, (*codes, *(("weight_g_idx",) if scheme.needs_g_idx else ())))
        _all_present({x: parts}, ("weight_scale",) if scheme.symmetric else ("weight_scale", "weight_zero_point"))
        scheme_of[x] = scheme
    return lambda x, t: _decode_compressed(x, t, scheme_of[x])


def _matches(entry: str, x: str) -> int:
    """
    How closely an entry of `targets` or `ignore` means the linear x: 3 by name, 2 by pattern, 1 by class, 0 not at all.

    >>> [_matches(e, "model.layers.1.mlp.up_proj") for e in ("Linear", "re:.*[.]mlp[.](up|gate)_proj$", "lm_head")]
    [1, 2, 0]
    """
    if not entry.startswith("re:"):
        return 3 if entry == x else int(entry == "Linear")
    # Patterns come from strangers, and some would keep `re` busy for ever: the ways to match are bounded beforehand.
    ways = math.log(len(x) + 1) * len(re.findall(r"[*+?{]", entry)) + math.log(entry.count("|") + 1) * entry.count("(")
    if re.search(r"\)[*+{]", entry) or len(entry) > 1000 or ways > math.log(10**8):
        raise ValueError(f"quantization_config: the pattern {entry!r:.100} is too intricate to be tried")
    try:
        return 2 * bool(re.match(entry[3:], x))
    except (re.error, OverflowError, RecursionError) as e:
        raise ValueError(f"quantization_config: the pattern {entry!r:.100} is not valid: {e}") from None


def _decode_compressed(x: str, t: Mapping[str, Tensor], scheme: Scheme) -> dict:
    bits, kind, symmetric, strategy, block, _ = scheme
    if packed := "weight_packed" in t:
        rows, words = _matrix(f"{x}.weight_packed", t["weight_packed"], (torch.int32,))
        _matrix(f"{x}.weight_shape", t["weight_shape"], (torch.int64, torch.int32), (2,))
        n, k = t["weight_shape"].tolist()
        if n != rows or k < 1 or -(-k * bits // 32) != words:  # before anything of that size is made
            raise ValueError(f"{x:.100}.weight_shape says {n} x {k}, which in {bits} bits is not the "
                             f"{rows} x {words} words of weight_packed")
        codes = unpack(t["weight_packed"], bits, 1, k)
    else:
        codes = t["weight"]
        n, k = _matrix(f"{x}.weight", codes, (torch.int8 if kind == "int" else torch.float8_e4m3fn,))
        _codes_fit(f"{x}.weight", codes, bits)
    if strategy == "group" and k % block[1]:
        raise ValueError(f"{x:.100} has {k} columns, which are not groups of {block[1]}")
    shape = {"tensor": (1,), "channel": (n, 1)}.get(strategy) or (-(-n // block[0]), -(-k // block[1]))

    def by_row(part, dtypes):  # what is stored once for many rows, once for each: (N, G)
        value = t[part].reshape(1) if strategy == "tensor" and t[part].numel() == 1 else t[part]
        _matrix(f"{x}.{part}", value, dtypes, shape)
        of_row = torch.arange(n, device=value.device) // (block[0] if block else 1)
        return value.repeat(n, 1) if strategy == "tensor" else value[of_row]

    scales, zeros, middle = _finite(f"{x}.weight_scale", by_row("weight_scale", FLOATS)), None, 0
    if "weight_zero_point" in t:
        if packed and strategy != "tensor":
            _matrix(f"{x}.weight_zero_point", t["weight_zero_point"], (torch.int32,), (-(-n * bits // 32), shape[1]))
            zeros, middle = unpack(t["weight_zero_point"], bits, 0, n).int(), 1 << bits - 1
        else:
            zeros = by_row("weight_zero_point", (torch.int8, torch.float8_e4m3fn)).float().int()
    if symmetric:
        if zeros is not None:  # early files hold them
            _symmetric(f"{x}.weight_zero_point", zeros, middle)
        zeros = None
    if packed and (zeros is None or not middle):
        codes = _signed(codes, bits)
    if "weight_g_idx" in t:
        g_idx = _checked_g_idx(f"{x}.weight_g_idx", t["weight_g_idx"], k, scales.shape[1])
    else:
        short = strategy == "block" and k % block[1]
        g_idx = torch.arange(k, device=codes.device) // block[1] if short else None
    return _packed(codes, scales, zeros, g_idx, bits)


def _write_compressed(name: str, codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int,
                      format: str | None) -> dict[str, Tensor]:
    fp8 = codes.dtype == torch.float8_e4m3fn
    format = format or ("float-quantized" if fp8 else "pack-quantized")
    if fp8 != (format == "float-quantized"):
        raise ValueError(f"{name} has codes of {codes.dtype}, which {format} does not store")
    if format != "pack-quantized":
        if scales.shape[1] != 1 or zeros is not None or bits != 8:
            raise ValueError(f"{name}: {format} is written for 8 bits with one scale a row and no zero points; "
                             "pack-quantized takes groups, zero points and fewer bits")
        return {f"{name}.weight": codes if fp8 else _signed(codes, 8), f"{name}.weight_scale": scales}
    stored = {f"{name}.weight_packed": pack(codes, bits, 1), f"{name}.weight_scale": scales,
              f"{name}.weight_shape": torch.tensor(codes.shape, device="cpu")}
    return stored if zeros is None else {**stored, f"{name}.weight_zero_point": pack(zeros, bits, 0)}


OPENERS = {"compressed-tensors": _open_compressed, "gptq": _open_gptq, "awq": _open_awq}

# ------------------------------------------------------------------ writing

FORMATS = {("compressed-tensors", "pack-quantized"): (4, 8), ("compressed-tensors", "int-quantized"): (8,),
           ("compressed-tensors", "float-quantized"): (8,), ("gptq", None): (4, 8), ("awq", None): (4,)}


def write(layout: str, name: str, weight: Mapping, scale_dtype: torch.dtype | None = None,
          format: str | None = None) -> dict[str, Tensor]:
    """
    The tensors, by full name, that a file stores for the linear `name` in a layout: "compressed-tensors", "gptq"
    (always version 1) or "awq". They are read back bit for bit. What a layout cannot express is a ValueError.

    The scales must be exact in scale_dtype (None: the dtype they have): rounded here, they would no longer be those
    that the codes were chosen for. Engines expect float16 with GPTQ and AWQ. `format`, of compressed-tensors only:
    "pack-quantized", "int-quantized" (int8 weights for int8 activations) or "float-quantized"; by default the last for
    fp8 codes and the first for others. Zero points are stored for unsigned codes, and for signed ones that have zeros.
    """
    if layout not in OPENERS or (format is not None and (layout, format) not in FORMATS):
        raise ValueError(f"there is no layout {layout!r:.100} with format {format!r:.100}, only {', '.join(OPENERS)}")
    codes, scales, zeros, g_idx, bits = _stored(name, weight, scale_dtype)
    if layout == "gptq":
        return _write_gptq(name, codes, scales, zeros, g_idx, bits)
    if g_idx is not None:
        raise ValueError(f"{name}: {layout} has no groups other than of equally many neighbouring columns; gptq has")
    if layout == "awq":
        return _write_awq(name, codes, scales, zeros, bits)
    return _write_compressed(name, codes, scales, zeros, bits, format)


def _stored(name: str, weight: Mapping, scale_dtype: torch.dtype | None) -> tuple:
    """Checks a packed weight; its parts as files hold them: codes and zeros unsigned, zeros None if symmetric."""
    codes, scales, zeros, g_idx, bits = (weight[key] for key in ("codes", "scales", "zeros", "g_idx", "bits"))
    if weight["mins"] is not None:
        raise ValueError(f"{name} has a floating-point minimum, which none of these layouts holds: quantize it anew "
                         "with integer zero points, or keep it in GGUF")
    n, k = _matrix(f"{name} codes", codes, (torch.uint8, torch.int8, torch.float8_e4m3fn))
    _codes_fit(f"{name} codes", codes, bits)
    _matrix(f"{name} scales", scales, FLOATS, (n, scales.shape[-1]))
    exact = _finite(f"{name} scales", scales).to(scale_dtype or scales.dtype).contiguous()
    if exact.dtype not in FLOATS or not torch.equal(exact.float(), scales.float()):
        raise ValueError(f"{name} has scales that {scale_dtype} does not hold exactly: round them to it before "
                         "choosing codes, or store them in another dtype")
    if g_idx is None:
        _neighbours(k, scales.shape[1])  # raises if there is no such order
    else:
        g_idx = _checked_g_idx(f"{name} g_idx", g_idx, k, scales.shape[1])
    offset = 1 << bits - 1 if codes.dtype == torch.int8 else 0
    if zeros is not None or codes.dtype == torch.uint8:
        zeros = torch.zeros_like(scales, dtype=torch.int32) if zeros is None else zeros
        _matrix(f"{name} zeros", zeros, (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64), scales.shape)
        zeros = zeros.int() + offset
        if codes.dtype == torch.float8_e4m3fn or _range(zeros)[0] < 0 or _range(zeros)[1] >> bits:
            raise ValueError(f"{name} has zero points outside the range of its codes")
    return codes.view(torch.uint8) + offset if offset else codes, exact, zeros, g_idx, bits


def quantization_config(layout: str, bits: int, group_size: int = -1, sym: bool = True,
                        ignore: tuple | list = ("lm_head",), format: str | None = None, desc_act: bool = False) -> dict:
    """
    The entry "quantization_config" of config.json for a model whose linears, all but those in `ignore`, were written
    by `write`. group_size -1 is one scale a row. Only keys that every version of the engines knows. Of a GPTQ model,
    quantize_config.json holds a copy. ValueError for what the layout does not have.

    >>> quantization_config("awq", 4, 128, sym=False)["version"]
    'gemm'
    """
    format = format or ("pack-quantized" if layout == "compressed-tensors" else None)
    if (layout, format) not in FORMATS or bits not in FORMATS[layout, format]:
        raise ValueError(f"{layout!r} with format {format!r} and {bits} bits is not written; these are: " + ", ".join(
            f"{' '.join(filter(None, key))} {' or '.join(map(str, b))}" for key, b in FORMATS.items()))
    if group_size != -1 and (group_size < 1 or format in ("int-quantized", "float-quantized")):
        raise ValueError(f"group_size is {group_size}; it must be -1, or at least 1 where the format has groups")
    if desc_act and layout != "gptq":
        raise ValueError(f"{layout} is written without act-order; only gptq has it")
    if layout == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm",
                "modules_to_not_convert": None if list(ignore) == ["lm_head"] else list(ignore)}
    if layout == "gptq":
        if set(ignore) - {"lm_head"}:
            raise ValueError(f"a gptq config cannot name {list(ignore)} as left out; compressed-tensors can")
        return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": desc_act, "sym": sym,
                "checkpoint_format": "gptq", "damp_percent": 0.01, "lm_head": "lm_head" not in ignore}
    if not sym and format != "pack-quantized":
        raise ValueError(f"{format} is written symmetric only; pack-quantized can have zero points")
    kind = "float" if format == "float-quantized" else "int"
    scales = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    activations = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    return {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
            "ignore": list(ignore), "kv_cache_scheme": None, "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, "symmetric": sym, **scales,
                                                   "dynamic": False},
                "input_activations": None if format == "pack-quantized" else activations, "output_activations": None}}}


# ------------------------------------------------------------------ demo


def demo() -> None:
    row = torch.arange(8, dtype=torch.uint8)

    def show(words):
        return " ".join(f"{word & 0xFFFFFFFF:08x}" for word in words.flatten().tolist())

    print("Codes 0 to 7 as 32-bit words, whose lowest bits are the last digit:")
    weight = _packed(row.repeat(8, 1), torch.ones(8, 1), torch.full((8, 1), 8), None, 4)
    print(f"  compressed-tensors  {show(write('compressed-tensors', 'x', weight)['x.weight_packed'][0])}   of a row")
    print(f"  gptq                {show(write('gptq', 'x', weight)['x.qweight'][:, 0])}   of a row")
    weight["codes"] = weight["codes"].t().contiguous()
    print(f"  awq                 {show(write('awq', 'x', weight)['x.qweight'][0])}   of a column")
    print(f"  3 bits, four times  {show(pack(row.repeat(4), 3, 0))}")
    print("\nEight zero points of 8:")
    for layout, part in (("compressed-tensors", "weight_zero_point"), ("gptq", "qzeros"), ("awq", "qzeros")):
        print(f"  {layout:<19} {show(write(layout, 'x', weight)['x.' + part])}")

    print("\nOne random weight, 64 x 256, symmetric in groups of 64, written and read again:")
    w = torch.randn(64, 4, 64, generator=torch.Generator().manual_seed(0))
    scales = w.abs().amax(-1).div(7.5).half()
    codes = (w / scales[..., None].float()).round().clamp(-8, 7).to(torch.int8).flatten(1)
    weight = _packed(codes, scales, None, None, 4)
    for layout in OPENERS:
        stored = write(layout, "x", weight)
        back = read({"quantization_config": quantization_config(layout, 4, 64)}, stored)["x.weight"]
        same = torch.equal(dequantize(back), dequantize(weight))  # type: ignore[arg-type]
        print(f"  {layout:<19} {sum(t.nbytes for t in stored.values())} bytes, {'the same' if same else 'ANOTHER'} "
              f"matrix: {', '.join(f'{key[2:]} {tuple(t.shape)}' for key, t in stored.items())}")


if __name__ == "__main__":
    demo()
