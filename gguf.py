"""
A GGUF file, read in the form of a Hugging Face checkpoint: a plain config dict and float tensors by Hugging Face names.

    with GGUF("model.gguf") as gguf:
        gguf.config["hidden_size"], gguf.metadata["tokenizer.ggml.tokens"][:3]
        gguf["model.layers.0.self_attn.q_proj.weight"]            # float32, decoded now
        gguf.tensor("model.norm.weight", dtype=torch.bfloat16)
        gguf.codes("model.layers.0.mlp.up_proj.weight")           # the stored integers, scales, minimums

The one idea: a GGUF file is a header and flat blocks. The header is read once and believed nowhere: every count,
length, offset and shape is checked against the bytes that are there, and against the config, before anything is
allocated for it. The blocks stay on disk (memory-mapped) until a tensor is asked for, and are decoded piece by piece
into the one tensor that is returned: loading a model never holds two copies of it, and every tensor handed out owns
its memory.

    "GGUF" | version | n_tensors | n_kv | key-value pairs  | tensor infos               | padding | tensor data
       4   |    4    |     8     |  8   | key, type, value | name, dims, type, offset   |         | each aligned

Q4_1, as an example, keeps 32 weights of a row in 20 bytes: half d, half m, then 16 bytes of which byte j holds the
codes of weight j (low four bits) and weight j + 16 (high four bits); a weight is d * code + m.

Read: versions 2 and 3, little-endian; llama, qwen2, qwen3; F64, F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to
Q6_K, Q8_K, IQ4_NL, IQ4_XS, in any mixture: "Q4_K_M" in a file's name is a recipe, and a tensor's type is its own.
Refused by name: other types and architectures, mixtures of experts, split files, adapters, shapes that vary by layer.
Left out on purpose: writing, the tokenizer (it takes `metadata`), computing on packed codes (it takes `codes`).

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; block layouts: ggml-common.h and ggml-quants.c there;
meaning of the keys, order of q and k rows: llama.cpp (llama-model.cpp, llama-context.cpp, convert_hf_to_gguf.py).
"""

import collections.abc
import math
import mmap
import os
import struct
import sys
from typing import NamedTuple

import torch

# ------------------------------------------------------------------ block types

BLOCK = {  # type id: (name, weights in a block, bytes of a block), all that ggml defines today
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1),
    25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}
REMOVED = (4, 5, 31, 32, 33, 36, 37, 38)  # once Q4_2, Q4_3, and rearrangements made for one processor

# A block function takes uint8 (n, bytes of a block). Those in CODES return integer codes (n, weights), float32 scales
# (n, groups) and float32 minimums (n, groups) or None: a weight is scale * code + minimum. Those in FLOATS return
# float32 (n, weights). A new type is a new entry.


def _half(b):  # (n, 2 m) uint8 -> (n, m) float32
    return b.contiguous().view(torch.float16).float()


def _fields(b, bits, run):
    """
    The numbers of 1, 2 or 4 bits in uint8 (n, bytes), as uint8 (n, bytes * 8 / bits). Neighbours in a row of weights
    are not neighbours in a byte: the lowest bits of `run` bytes are `run` weights, their next bits the next `run`.

    >>> _fields(torch.tensor([[0x50, 0x61, 0x72, 0x83]], dtype=torch.uint8), bits=4, run=4).tolist()
    [[0, 1, 2, 3, 5, 6, 7, 8]]
    """
    b = b.contiguous().view(len(b), b.shape[1] // run, 1, run)
    if run < 8:  # few bytes and short runs: one shift by a tensor; else shifts by numbers, which cost less a byte
        fields = b >> torch.arange(0, 8, bits, dtype=torch.uint8, device=b.device).view(-1, 1)
    else:
        fields = torch.cat([b, *(b >> shift for shift in range(bits, 8, bits))], dim=2)  # (n, runs, 8 / bits, run)
    return fields.bitwise_and_((1 << bits) - 1).flatten(1)


def _five(b):  # 4 bytes of fifth bits, bit j of the little-endian word for weight j, then 16 bytes of the other four
    return _fields(b[:, 4:], 4, 16) | _fields(b[:, :4], 1, 1) << 4


def _q2_k(b):  # 16 scales (low four bits) and minimums (high four), codes, d, dmin
    d, dmin = _half(b[:, 80:]).chunk(2, dim=1)
    return _fields(b[:, 16:80], 2, 32), d * (b[:, :16] & 15), -(dmin * (b[:, :16] >> 4))


def _q3_k(b):  # third bits of the codes, their low two, low four bits of 16 scales, their high two, d
    codes = _fields(b[:, 32:96], 2, 32) | _fields(b[:, :32], 1, 32) << 2
    scales = _fields(b[:, 96:104], 4, 8) | _fields(b[:, 104:108], 2, 4) << 4
    return codes.view(torch.int8) - 4, _half(b[:, 108:]) * (scales.view(torch.int8) - 32), None


def _q4_k_scales(b):  # d, dmin, then eight scales and eight minimums of six bits in 12 bytes
    d, dmin = _half(b[:, :4]).chunk(2, dim=1)
    scales, mins, low = b[:, 4:8], b[:, 8:12], b[:, 12:16]  # 0 to 3 whole; of 4 to 7 low four bits, top two above those
    scales = torch.cat([scales & 63, (low & 15) | (scales >> 6 << 4)], dim=1)
    mins = torch.cat([mins & 63, (low >> 4) | (mins >> 6 << 4)], dim=1)
    return d * scales, -(dmin * mins)


def _q6_k(b):  # low four bits of the codes, high two, 16 signed scales, d
    codes = _fields(b[:, :128], 4, 64) | _fields(b[:, 128:192], 2, 32) << 4
    return codes.view(torch.int8) - 32, _half(b[:, 208:]) * b[:, 192:208].view(torch.int8), None


def _iq4(b):  # four bits are a place in a table of int8 whose steps are finer near 0: the codes are its entries
    table, codes = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), _fields(b, 4, 16)
    table = torch.tensor(table, dtype=torch.int8, device=b.device)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)  # table[codes] would wake all threads


def _iq4_xs(b):  # d, high two bits of eight scales, their low four, codes
    scales = _fields(b[:, 4:8], 4, 1) | _fields(b[:, 2:4], 2, 1) << 4
    return _iq4(b[:, 8:]), _half(b[:, :2]) * (scales.view(torch.int8) - 32), None


def _floats(codes_of):
    def floats(b):
        codes, scales, mins = codes_of(b)
        weights = codes.float().unflatten(1, (scales.shape[1], -1)).mul_(scales.unsqueeze(-1))  # (n, groups, weights)
        if mins is not None:
            weights.add_(mins.unsqueeze(-1))  # rounded twice, as in ggml: fused, it would differ
        return weights.flatten(1)
    return floats


CODES = {  # type id: (bits of a code, weights in a group, block function)
    2: (4, 32, lambda b: (_fields(b[:, 2:], 4, 16).view(torch.int8) - 8, _half(b[:, :2]), None)),  # d, codes
    3: (4, 32, lambda b: (_fields(b[:, 4:], 4, 16), *_half(b[:, :4]).chunk(2, dim=1))),  # d, m, codes
    6: (5, 32, lambda b: (_five(b[:, 2:]).view(torch.int8) - 16, _half(b[:, :2]), None)),
    7: (5, 32, lambda b: (_five(b[:, 4:]), *_half(b[:, :4]).chunk(2, dim=1))),
    8: (8, 32, lambda b: (b[:, 2:].view(torch.int8), _half(b[:, :2]), None)),
    10: (2, 16, _q2_k), 11: (3, 16, _q3_k),
    12: (4, 32, lambda b: (_fields(b[:, 16:], 4, 32), *_q4_k_scales(b))),
    13: (5, 32, lambda b: (_fields(b[:, 48:], 4, 32) | _fields(b[:, 16:48], 1, 32) << 4, *_q4_k_scales(b))),
    14: (6, 16, _q6_k), 15: (8, 256, lambda b: (b[:, 4:260].view(torch.int8), b[:, :4].view(torch.float32), None)),
    20: (8, 32, lambda b: (_iq4(b[:, 2:]), _half(b[:, :2]), None)), 23: (8, 32, _iq4_xs),
}
FLOATS = {
    0: lambda b: b.view(torch.float32), 1: lambda b: b.view(torch.float16).float(),
    28: lambda b: b.view(torch.float64).float(), 30: lambda b: b.view(torch.bfloat16).float(),
    **{kind: _floats(codes_of) for kind, (_, _, codes_of) in CODES.items()},
}
READABLE = ", ".join(BLOCK[kind][0] for kind in sorted(FLOATS))


def dequantize(raw: torch.Tensor, kind: int | str, shape) -> torch.Tensor:
    """
    Raw blocks, uint8 of any shape, to float32 of `shape`, bit for bit as the `gguf` package decodes them; `kind` is a
    type id or name. ValueError for a type that is not read here, or if `raw` does not hold exactly `shape` weights.

    >>> block = bytes.fromhex("003c f0e1d2c3b4a5968778695a4b3c2d1e0f")  # d = 1, then 16 pairs of codes, offset by 8
    >>> dequantize(torch.tensor(list(block), dtype=torch.uint8), "Q4_0", (2, 16)).int().tolist()[0]
    [-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7]
    """
    kind = next((i for i, block in BLOCK.items() if kind in (i, block[0])), kind)
    if kind not in FLOATS:
        raise ValueError(f"type {BLOCK[kind][0] if kind in BLOCK else kind} is not read here; types read: {READABLE}")
    name, weights, size = BLOCK[kind]
    if raw.dtype != torch.uint8 or raw.numel() * weights != math.prod(shape) * size:
        raise ValueError(f"{raw.numel()} values of {raw.dtype} are not {tuple(shape)} weights of type {name}, "
                         f"which keeps {weights} in {size} bytes of uint8")
    return FLOATS[kind](raw.reshape(-1, size).contiguous()).reshape(shape)


# ------------------------------------------------------------------ the header

# Key-value types: id -> struct letter. 8 is a string, 9 an array of one of the others; arrays of arrays are refused.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9
MAX_HEADER = 1 << 26  # bytes: big tokenizers take 10 to 20 MB, and a Python object up to 10 times its bytes in the file
MAX_COUNT = 1 << 16  # keys or tensors: real files have tens of keys, and some ten tensors a layer


class TensorInfo(NamedTuple):
    name: str  # as in the file
    shape: tuple  # torch order, rows first; GGUF writes the row length first
    type_id: int
    type_name: str
    offset: int  # bytes from the start of the file
    nbytes: int


def _show(value):
    """What a message may quote of a value from the file: one short printable line, whatever it holds."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return repr(value if not isinstance(value, str) or len(value) <= 64 else value[:61] + "...")


class _Cursor:
    """Walks through the header. What a read claims is checked against what is left before anything is made of it."""

    def __init__(self, data):
        self.data, self.pos, self.end = data, 4, min(len(data), MAX_HEADER)
        self.limit = "the file" if len(data) <= MAX_HEADER else f"the {MAX_HEADER} bytes that a header may take"

    def take(self, n, what):
        if n > self.end - self.pos:
            left = f"{self.end - self.pos} are left of {self.limit}"
            raise ValueError(f"{what} claims {n} bytes at byte {self.pos}, but {left}")
        self.pos += n
        return self.pos - n

    def number(self, letter, what):
        return struct.unpack_from("<" + letter, self.data, self.take(struct.calcsize("<" + letter), what))[0]

    def numbers(self, kind, n, what):
        if kind not in SCALARS:
            nature = "an array in an array" if kind == ARRAY else "an unknown one"
            raise ValueError(f"{what} has value type {kind}, {nature}")
        start = self.take(n * struct.calcsize("<" + SCALARS[kind]), what)
        raw = self.data[start:self.pos]
        values = memoryview(raw).cast(SCALARS[kind]).tolist() if n else []
        if kind == BOOL and n and max(raw) > 1:
            raise ValueError(f"{what} holds a bool that is neither 0 nor 1")
        return [v == 1 for v in values] if kind == BOOL else values

    def strings(self, n, what):
        """n strings, each a u64 length and its UTF-8 bytes. A flat loop, since token lists hold up to 260,000."""
        self.take(8 * n, what)
        data, pos, end, out = self.data, self.pos - 8 * n, self.end, []
        for i in range(n):
            start = pos + 8
            pos = start + int.from_bytes(data[start - 8:start], "little")
            if pos > end:
                raise ValueError(f"{what}: string {i} claims {pos - start} bytes at byte {start}, past the end")
            try:
                out.append(data[start:pos].decode())
            except UnicodeDecodeError:
                raise ValueError(f"{what}: string {i} at byte {start} is not UTF-8") from None
        self.pos = pos
        return out

    def value(self, what):
        kind = self.number("I", what)
        if kind == ARRAY:
            kind, n = self.number("I", what), self.number("Q", what)
            return self.strings(n, what) if kind == STRING else self.numbers(kind, n, what)
        return self.strings(1, what)[0] if kind == STRING else self.numbers(kind, 1, what)[0]

    def tensor_info(self, i):
        name = self.strings(1, f"the name of tensor {i}")[0]
        what = f"tensor {_show(name)}"
        n_dims = self.number("I", what)
        if not 1 <= n_dims <= 4:
            raise ValueError(f"{what} has {n_dims} dimensions; 1 to 4 are possible")
        shape = tuple(self.number("Q", what) for _ in range(n_dims))[::-1]
        kind, offset = self.number("I", what), self.number("Q", what)
        if kind not in BLOCK:
            fate = "has removed" if kind in REMOVED else "does not define"
            raise ValueError(f"{what} has type id {kind}, which GGML {fate}")
        type_name, weights, size = BLOCK[kind]
        if 0 in shape or shape[-1] % weights:
            raise ValueError(f"{what} has shape {shape}: no dimension may be 0, and rows of type {type_name} "
                             f"must be a multiple of the {weights} weights in a block")
        return TensorInfo(name, shape, kind, type_name, offset, math.prod(shape) // weights * size)  # ints: no overflow


def read_header(data) -> tuple[int, int, dict, dict, int]:
    """
    (version, alignment, metadata with arrays as lists, TensorInfo by name, first byte of tensor data) of a GGUF file,
    `data` being its bytes or a mapping of them. ValueError, naming the field or tensor, for all that the format does
    not allow. Whether the tensors lie in the file is check_layout's question.
    """
    if data[:4] != b"GGUF":
        raise ValueError(f"not a GGUF file: it starts with {bytes(data[:4])!r} in place of b'GGUF'")
    c = _Cursor(data)
    version = c.number("I", "the version")
    if version not in (2, 3):
        swapped = version and version & 0xFFFF == 0
        raise ValueError("a big-endian GGUF file; convert it to little-endian with gguf_convert_endian.py" if swapped
                         else f"GGUF version {version} is not read, only versions 2 and 3: convert the model anew")
    n_tensors, n_kv = c.number("Q", "the tensor count"), c.number("Q", "the key count")
    for n, smallest, what in ((n_tensors, 33, "tensors"), (n_kv, 14, "keys")):  # bytes of the smallest possible entry
        if n > MAX_COUNT or n * smallest > c.end - c.pos:
            raise ValueError(f"the header counts {n} {what}, in {c.end - c.pos} bytes; at most {MAX_COUNT} are read")
    metadata, infos = {}, {}
    for i in range(n_kv):
        key = c.strings(1, f"key {i}")[0]
        if not key or key in metadata:
            raise ValueError(f"key {i}, {_show(key)}, is " + ("there twice" if key else "empty"))
        metadata[key] = c.value(f"key {_show(key)}")
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 65536 or alignment & (alignment - 1):
        raise ValueError(f"key 'general.alignment' must be a power of two from 8 to 65536, not {_show(alignment)}")
    for i in range(n_tensors):
        info = c.tensor_info(i)
        if info.name in infos:
            raise ValueError(f"tensor {_show(info.name)} is there twice")
        infos[info.name] = info
    start = -(-c.pos // alignment) * alignment
    infos = {name: info._replace(offset=start + info.offset) for name, info in infos.items()}
    return version, alignment, metadata, infos, start


def check_layout(infos: dict, data_start: int, alignment: int, size: int) -> None:
    """ValueError unless every tensor is aligned, lies within the `size` bytes of the file, and overlaps no other."""
    previous, end = None, data_start  # type: TensorInfo, int
    for info in sorted(infos.values(), key=lambda info: info.offset):
        what = f"tensor {_show(info.name)}"
        if info.offset % alignment:
            raise ValueError(f"{what} starts at byte {info.offset}, which is not aligned to {alignment} bytes")
        if info.offset + info.nbytes > size:
            raise ValueError(f"{what} takes bytes {info.offset} to {info.offset + info.nbytes} of a file of {size}: "
                             "it is cut off or damaged, fetch it again")
        if info.offset < end:
            raise ValueError(f"{what} starts at byte {info.offset}, inside tensor {_show(previous.name)}")
        previous, end = info, info.offset + info.nbytes


# ------------------------------------------------------------------ from metadata to config

ARCHITECTURES = ("llama", "qwen2", "qwen3")
NEUTRAL = {  # keys that would change what is computed, and the values with which they change nothing
    "expert_count": (0,), "logit_scale": (0, 1), "embedding_scale": (0, 1), "residual_scale": (0, 1),
    "attention.scale": (0,), "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,), "attention.causal": (1,),
    "attn_logit_softcapping": (0,), "final_logit_softcapping": (0,), "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_ext_factor": (1, -1),
}


class _Keys:
    """The metadata of one architecture, typed: what is missing, of another type or out of range is a ValueError."""

    def __init__(self, metadata):
        self.metadata, self.arch = metadata, ""
        self.arch = self.text("general.architecture", ...)

    def get(self, key, default, kinds, rule, fits):
        key = key if key.startswith(("general.", "split.", "tokenizer.")) else f"{self.arch}.{key}"
        if key not in self.metadata:
            if default is ...:
                raise ValueError(f"key {_show(key)} is missing")
            return default
        value = self.metadata[key]
        if type(value) not in kinds or not fits(value):
            hint = "; one value per layer is not supported" if isinstance(value, list) else ""
            raise ValueError(f"key {_show(key)} must be {rule}, not {_show(value)}{hint}")
        return value

    def text(self, key, default):
        return self.get(key, default, (str,), "a string", lambda v: True)

    def whole(self, key, default=..., low=1):
        return self.get(key, default, (int,), f"a whole number from {low} to 2^31 - 1", lambda v: low <= v < 2**31)

    def real(self, key, default=..., zero=False):
        rule = "a finite number, at least 0" if zero else "a finite number above 0"
        value = self.get(key, default, (int, float), rule, lambda v: 0 < v < math.inf or (zero and v == 0))
        return value if value is None else float(value)


def _refuse_by_key(keys):
    kind = keys.text("general.type", "model")
    if kind != "model":
        lora = ", a LoRA to be merged into its base model first" if kind == "adapter" else ""
        raise ValueError(f"general.type is {_show(kind)}{lora}; only files of type 'model' are read")
    if keys.arch not in ARCHITECTURES:
        raise ValueError(f"architecture {_show(keys.arch)} is not supported, only {', '.join(ARCHITECTURES)}")
    if (parts := keys.whole("split.count", 1, low=0)) > 1:
        raise ValueError(f"one of {parts} parts (split.count); join them with llama-gguf-split --merge first")
    for key, neutral in NEUTRAL.items():
        value = keys.metadata.get(f"{keys.arch}.{key}", neutral[0])
        if value not in neutral:
            experts = " (a mixture of experts)" if key == "expert_count" else ""
            raise ValueError(f"key '{keys.arch}.{key}' is {_show(value)}{experts}, which is not supported")


def read_config(metadata: dict, infos: dict) -> dict:
    """
    The config.json of the original checkpoint, as far as the model needs it, from the metadata and the tensors' names
    and shapes. ValueError for what is not supported and for values that cannot be; nothing is filled in but what
    llama.cpp fills in too. `rope_freqs.weight`, being data, is worked in by GGUF.
    """
    keys = _Keys(metadata)
    _refuse_by_key(keys)
    hidden, n_head = keys.whole("embedding_length"), keys.whole("attention.head_count")
    n_kv_head = keys.whole("attention.head_count_kv", n_head)
    head_dim = keys.whole("attention.key_length", 0) or hidden // n_head
    rope_dim, v_dim = keys.whole("rope.dimension_count", head_dim), keys.whole("attention.value_length", head_dim)
    if n_head % n_kv_head:
        raise ValueError(f"{n_head} heads (attention.head_count) cannot share {n_kv_head} key-value heads equally")
    if hidden % n_head and f"{keys.arch}.attention.key_length" not in metadata:
        raise ValueError(f"hidden size {hidden} is no multiple of {n_head} heads, and attention.key_length is missing")
    if v_dim != head_dim or head_dim % 2 or rope_dim % 2 or rope_dim > head_dim:
        raise ValueError(f"heads of {head_dim} with values of {v_dim} and {rope_dim} rotated: "
                         "the first two must be equal, all even, the last no larger")
    embedding = infos.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError("tensor 'token_embd.weight' is missing or no matrix: this file holds no model")
    vocab, tokens = embedding.shape[0], metadata.get("tokenizer.ggml.tokens", [])
    named = max(keys.whole("vocab_size", vocab), len(tokens) if isinstance(tokens, list) else 0)
    if named != vocab:
        raise ValueError(f"tensor 'token_embd.weight' has {vocab} rows, but the metadata speaks of {named} tokens")
    config = {
        "model_type": keys.arch, "hidden_size": hidden, "intermediate_size": keys.whole("feed_forward_length"),
        "num_hidden_layers": keys.whole("block_count"), "num_attention_heads": n_head,
        "num_key_value_heads": n_kv_head, "head_dim": head_dim, "vocab_size": vocab,
        "max_position_embeddings": keys.whole("context_length"), "hidden_act": "silu",
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"), "rope_parameters": _rope_parameters(keys),
        "tie_word_embeddings": "output.weight" not in infos, **_special_ids(keys, vocab),
    }
    if keys.arch == "llama" and any(f"blk.0.attn_{x}.bias" in infos for x in "qkv"):
        config["attention_bias"] = True
    if rope_dim != head_dim:
        config["partial_rotary_factor"] = rope_dim / head_dim
    if window := keys.whole("attention.sliding_window", 0, low=0):
        config["sliding_window"] = window
    return config


def _special_ids(keys, vocab):
    """bos_token_id, and eos_token_id as one id or a list: end of text, of turn and of message all end an answer."""
    found = {}
    for role in ("bos", "eos", "eot", "eom"):
        key = f"tokenizer.ggml.{role}_token_id"
        if keys.metadata.get(key) in (None, -1, 2**32 - 1):  # the last two are how converters write "none"
            continue
        found[role] = keys.whole(key, low=0)
        if found[role] >= vocab:
            raise ValueError(f"key {key!r} is {found[role]}, outside the vocabulary of {vocab} tokens")
    ends = list(dict.fromkeys(found[role] for role in ("eos", "eot", "eom") if role in found))
    return {"bos_token_id": found.get("bos"), "eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None}


def _rope_parameters(keys):
    """
    RoPE in Hugging Face terms. As in llama.cpp, a missing scaling type means linear, a missing or zero factor none.
    YaRN multiplies cos and sin by 1 + 0.1 ln(factor) unless the file says otherwise: `attn_factor` multiplies that
    (llama-context.cpp), `yarn_attn_factor` is the original config's attention_factor (convert_hf_to_gguf.py).
    """
    rope = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base", 10000.0)}
    kind, scale = keys.text("rope.scaling.type", "linear"), keys.real("rope.scaling.attn_factor", 1.0)
    factor = keys.real("rope.scaling.factor", 0, zero=True) or keys.real("rope.scale_linear", 0, zero=True) or 1.0
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"rope.scaling.type {_show(kind)} is not supported, only none, linear and yarn")
    if kind != "yarn" and scale != 1.0:
        raise ValueError(f"rope.scaling.attn_factor {scale:g} is supported with YaRN only")
    if kind == "linear" and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        context = keys.whole("rope.scaling.original_context_length", keys.whole("context_length"))
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}
        optional = {"attention_factor": keys.real("rope.scaling.yarn_attn_factor", None),
                    "beta_fast": keys.real("rope.scaling.yarn_beta_fast", None),
                    "beta_slow": keys.real("rope.scaling.yarn_beta_slow", None)}
        if scale != 1.0:
            optional["attention_factor"] = scale * (1 + 0.1 * math.log(max(factor, 1.0)))
        rope |= {name: value for name, value in optional.items() if value is not None}
    return rope


# ------------------------------------------------------------------ names, shapes and row order

# GGUF name, Hugging Face name, shape in letters: D hidden, F feed-forward, Q all query heads, K all key-value heads,
# H one head. GGUF prefixes them with "blk.N.", Hugging Face with "model.layers.N.".
LAYER = (
    ("attn_norm.weight", "input_layernorm.weight", "D"), ("attn_q.weight", "self_attn.q_proj.weight", "QD"),
    ("attn_k.weight", "self_attn.k_proj.weight", "KD"), ("attn_v.weight", "self_attn.v_proj.weight", "KD"),
    ("attn_output.weight", "self_attn.o_proj.weight", "DQ"),
    ("ffn_norm.weight", "post_attention_layernorm.weight", "D"), ("ffn_gate.weight", "mlp.gate_proj.weight", "FD"),
    ("ffn_up.weight", "mlp.up_proj.weight", "FD"), ("ffn_down.weight", "mlp.down_proj.weight", "DF"),
)
QKV_BIAS = (("attn_q.bias", "self_attn.q_proj.bias", "Q"), ("attn_k.bias", "self_attn.k_proj.bias", "K"),
            ("attn_v.bias", "self_attn.v_proj.bias", "K"))
O_BIAS = (("attn_output.bias", "self_attn.o_proj.bias", "D"),)
QK_NORM = (("attn_q_norm.weight", "self_attn.q_norm.weight", "H"),
           ("attn_k_norm.weight", "self_attn.k_norm.weight", "H"))


def expected_tensors(config: dict):
    """Yields (GGUF name, Hugging Face name, shape) of every tensor that a model of this config has, in model order."""
    n_head, n_kv_head, head_dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    hidden, vocab, ffn = config["hidden_size"], config["vocab_size"], config["intermediate_size"]
    size = {"D": hidden, "F": ffn, "Q": n_head * head_dim, "K": n_kv_head * head_dim, "H": head_dim}
    llama_bias = QKV_BIAS + O_BIAS if config.get("attention_bias") else ()  # in Hugging Face's llama it means all four
    layer = LAYER + {"llama": llama_bias, "qwen2": QKV_BIAS, "qwen3": QK_NORM}[config["model_type"]]
    yield "token_embd.weight", "model.embed_tokens.weight", (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        for name, hf_name, letters in layer:
            yield f"blk.{i}.{name}", f"model.layers.{i}.{hf_name}", tuple(size[x] for x in letters)
    yield "output_norm.weight", "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "output.weight", "lm_head.weight", (vocab, hidden)


def unpermute(rows: torch.Tensor, n_head: int) -> torch.Tensor:
    """
    Rows of q or k, (n_head * head_dim, ...), from the order of llama.cpp's llama to Hugging Face's. RoPE turns pairs of
    rows of a head; the former has the two of a pair side by side, the latter half a head apart.

    >>> unpermute(torch.tensor([0, 4, 1, 5, 2, 6, 3, 7]), n_head=1)
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    pairs = rows.unflatten(0, (n_head, -1, 2))  # (H, D/2, 2, ...)
    return pairs.transpose(1, 2).reshape(rows.shape)  # (H, 2, D/2, ...) -> (H * D, ...)


# ------------------------------------------------------------------ the file

# Weights decoded at a time. Up to 32,767 torch stays on one thread, in its cache: on a shared machine, waiting for a
# second thread many times over can take seconds. Matrices of LARGE weights and more are worth all threads; the default
# model's embedding, of 28 million, is not.
SMALL_STEP, LARGE_STEP, LARGE = 30720, 1 << 22, 1 << 25


class GGUF(collections.abc.Mapping):
    """
    An open GGUF file: a Mapping from Hugging Face names to tensors of `dtype`, each decoded when asked for and owned by
    the caller; `len`, `in` and iteration over the names decode nothing. With `packed`, a matrix whose type has integer
    codes comes as `codes(name)` instead. On opening, whatever is damaged, unsupported or
    contradictory is one ValueError with the file and the key or tensor in it; a missing file is a FileNotFoundError.

    path, version, alignment; metadata: every key of the file; infos: TensorInfo by GGUF name; config: a dict in the
    style of config.json. A context manager. After `close`, which may be repeated, tensors handed out stay valid. The
    file must not be shortened while it is open: the system ends a process that reads a mapping past its file.
    """

    def __init__(self, path: str, dtype: torch.dtype = torch.float32, packed: bool = False):
        self.path, self.dtype, self.packed = os.fspath(path), dtype, packed
        if not os.path.exists(self.path):
            raise FileNotFoundError(f"{self.path}: no such file")
        if not os.path.isfile(self.path) or os.path.getsize(self.path) == 0:
            raise ValueError(f"{self.path}: empty or no file; pass the path of one .gguf file")
        if sys.byteorder != "little":
            raise ValueError(f"{self.path}: GGUF blocks are read as they are, which takes a little-endian machine")
        with open(self.path, "rb") as f:
            self._data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self.version, self.alignment, self.metadata, self.infos, data_start = read_header(self._data)
            self.config = read_config(self.metadata, self.infos)
            self._names = self._match_tensors()  # TensorInfo by Hugging Face name
            check_layout(self.infos, data_start, self.alignment, len(self._data))
            if "rope_freqs.weight" in self.infos:
                self.config["rope_parameters"] = self._rope_factors(self.config["rope_parameters"])
        except ValueError as error:
            self.close()
            raise ValueError(f"{self.path}: {error}") from None

    def _match_tensors(self):
        """The file has every tensor that the config calls for, in that shape and a type that is read, and no other."""
        names, known = {}, {"rope_freqs.weight"}
        kind, layers = self.config["model_type"], self.config["num_hidden_layers"]
        for name, hf_name, shape in expected_tensors(self.config):  # lazily: 2^31 claimed layers end at the first gap
            if name not in self.infos:
                raise ValueError(f"tensor {name!r} is missing; a {kind} of {layers} layers needs it")
            if self.infos[name].shape != shape:
                raise ValueError(f"tensor {name!r} has shape {self.infos[name].shape}, the metadata calls for {shape}")
            names[hf_name] = self.infos[name]
            known.add(name)
        for info in self.infos.values():
            if info.name not in known:
                raise ValueError(f"tensor {_show(info.name)} is not part of {kind} as it is run here: without it, "
                                 "the model would be another")
            if info.type_id not in FLOATS:
                raise ValueError(f"tensor {info.name!r} has type {info.type_name}, which is not read; take a file "
                                 f"that uses only {READABLE}")
        return names

    def _rope_factors(self, rope):
        """The inverse frequencies are divided by rope_freqs.weight; there the converter puts Llama 3.1's scaling."""
        info, n = self.infos["rope_freqs.weight"], self.config["head_dim"] // 2
        if "partial_rotary_factor" in self.config or rope["rope_type"] == "yarn" or info.shape != (n,):
            raise ValueError(f"tensor 'rope_freqs.weight' of shape {info.shape} is supported in shape ({n},), with "
                             "full rotation and without YaRN")
        factors = [f * rope.get("factor", 1.0) for f in self._decode(info).tolist()]  # linear on top
        if not all(0 < f < math.inf for f in factors):
            raise ValueError("tensor 'rope_freqs.weight' holds numbers that are not finite and above 0")
        return {"rope_type": "factors", "rope_theta": rope["rope_theta"], "factors": factors}

    def _pieces(self, info, heads=0):
        """
        Yields (first row, row after the last, uint8 (blocks, block bytes)), whole rows, copied: no tensor ever looks
        into the mapping. The rows of q and k, of so many `heads`, are put in order here, while they are few bytes.
        """
        if self._data.closed:
            raise ValueError(f"{self.path}: this file has been closed")
        n_rows, row_bytes = math.prod(info.shape[:-1]), info.nbytes // math.prod(info.shape[:-1])
        order = unpermute(torch.arange(n_rows, device="cpu"), heads).tolist() if heads else []
        step = max(1, (SMALL_STEP if math.prod(info.shape) < LARGE else LARGE_STEP) // info.shape[-1])
        for first in range(0, n_rows, step):
            last = min(first + step, n_rows)
            spans = [(row, row + 1) for row in order[first:last]] or [(first, last)]
            piece = bytearray().join(self._data[info.offset + a * row_bytes:info.offset + b * row_bytes]
                                     for a, b in spans)
            yield first, last, torch.frombuffer(piece, dtype=torch.uint8).view(-1, BLOCK[info.type_id][2])

    def _decode(self, info, dtype=torch.float32, heads=0):
        out = torch.empty(info.shape, dtype=dtype, device="cpu")  # whatever the default device is
        rows = out.view(-1, info.shape[-1])
        for first, last, blocks in self._pieces(info, heads):
            rows[first:last] = FLOATS[info.type_id](blocks).view(last - first, -1)
        return out

    def _find(self, name):
        """TensorInfo, and how many heads the rows are to be unpermuted for; 0: they are in order."""
        if name not in self._names:
            raise KeyError(f"{self.path}: no tensor {name!r}; names are those of Hugging Face")
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        return self._names[name], self.config[heads] if heads and self.config["model_type"] == "llama" else 0

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The tensor of this Hugging Face name, decoded in float32, rounded to `dtype`, in Hugging Face's row order."""
        info, heads = self._find(name)
        if not dtype.is_floating_point:
            raise ValueError(f"{self.path}: tensor {name!r} as {dtype}? Weights are floats; codes() gives integers")
        if heads and len(info.shape) == 1:  # a bias
            return unpermute(self._decode(info, dtype), heads)
        return self._decode(info, dtype, heads)

    def codes(self, name: str) -> dict:
        """
        The stored integers of a tensor (N, K), without a second rounding, in Hugging Face's row order: codes (N, K),
        scales (N, G) float32, mins (N, G) float32 or None, bits, and None for zeros and g_idx. With scales and mins
        spread over the K / G columns of a group, codes * scales + mins (no sum where mins is None) is `tensor(name)`,
        bit for bit. Groups are of 32, but of 16 in Q2_K, Q3_K and Q6_K, and of 256 in Q8_K. Codes are uint8 from 0 on
        where there are mins (Q4_1, Q5_1, Q2_K, Q4_K, Q5_K), else int8: -8..7 in Q4_0, -16..15 in Q5_0, -4..3 in Q3_K,
        -32..31 in Q6_K, -128..127 in Q8_0 and Q8_K, and in IQ4_NL and IQ4_XS the 16 entries of their table.
        """
        info, heads = self._find(name)
        if info.type_id not in CODES or len(info.shape) != 2:
            raise ValueError(f"{self.path}: tensor {name!r} of shape {info.shape} has type {info.type_name}; "
                             "integer codes exist for matrices of " + ", ".join(BLOCK[kind][0] for kind in CODES))
        (bits, _, codes_of), out = CODES[info.type_id], []
        for first, last, blocks in self._pieces(info, heads):
            parts = [part if part is None else part.reshape(last - first, -1) for part in codes_of(blocks)]
            out = out or [part if part is None else part.new_empty(info.shape[0], part.shape[1]) for part in parts]
            for whole, part in zip(out, parts):
                if part is not None:
                    whole[first:last] = part
        codes, scales, mins = out
        return {"codes": codes, "scales": scales, "zeros": None, "mins": mins, "g_idx": None, "bits": bits}

    @property
    def types(self) -> dict:
        """What the model's tensors are stored in: {type name: number of weights}, the most frequent first."""
        count = collections.Counter()
        for info in self._names.values():
            count[info.type_name] += math.prod(info.shape)
        return dict(count.most_common())

    @property
    def nbytes(self) -> int:
        """Bytes of the model's tensors in the file."""
        return sum(info.nbytes for info in self._names.values())

    def __getitem__(self, name):
        info, _ = self._find(name)
        packed = self.packed and len(info.shape) == 2 and info.type_id in CODES
        return self.codes(name) if packed else self.tensor(name, self.dtype)

    def __contains__(self, name):  # Mapping's own would decode the tensor to find out
        return name in self._names

    def __iter__(self):
        return iter(self._names)

    def __len__(self):
        return len(self._names)

    def close(self):
        self._data.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


# ------------------------------------------------------------------ demo


def _demo():
    """Writes a file byte by byte, a few keys and one tensor of two Q4_1 blocks, and reads it back."""
    import tempfile

    def string(text):
        return struct.pack("<Q", len(text)) + text.encode()

    pairs = [string("general.architecture") + struct.pack("<I", STRING) + string("llama"),
             string("llama.block_count") + struct.pack("<II", 4, 1),
             string("tokenizer.ggml.tokens") + struct.pack("<IIQ", ARRAY, STRING, 2) + string("a") + string("b")]
    info = string("blk.0.demo.weight") + struct.pack("<IQQIQ", 2, 32, 2, 3, 0)  # 2 dims, 2 rows of 32, Q4_1, offset 0
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs)) + b"".join(pairs) + info
    block_0 = struct.pack("<ee", 0.5, -2.0) + bytes(range(16))
    block_1 = struct.pack("<ee", 0.25, 1.0) + bytes(range(0, 256, 16))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "demo.gguf")
        with open(path, "wb") as f:
            f.write(head + bytes(-len(head) % 32) + block_0 + block_1)
        with open(path, "rb") as f:
            data = f.read()
    version, alignment, metadata, infos, start = read_header(data)
    check_layout(infos, start, alignment, len(data))
    (tensor,) = infos.values()
    print(f"A file of {len(data)} bytes: version {version}, {len(metadata)} keys, tensor data from byte {start} on.")
    print("\n".join(f"  {key} = {value}" for key, value in metadata.items()))
    print(f"  {tensor.name}: {tensor.type_name}, {tensor.shape}, {tensor.nbytes} bytes at {tensor.offset}")
    print("\nIts two rows, a block each, from bytes to weights:")
    raw = torch.frombuffer(bytearray(data[tensor.offset:tensor.offset + tensor.nbytes]), dtype=torch.uint8).view(2, 20)
    for block, weights in zip(raw, dequantize(raw, "Q4_1", tensor.shape)):
        codes, d, m = CODES[3][2](block.view(1, 20))
        print(f"\n  block  {bytes(block.tolist()).hex(' ')}\n  d, m   {d.item()}, {m.item()}")
        print("  codes ", *codes[0].tolist())
        print("  d*c+m ", *(f"{w:g}" for w in weights.tolist()))
    rows = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    print("\nThe rows of a head of 8 of q as the file has them:", *rows.tolist(), "- and as a checkpoint has them:",
          *unpermute(rows, 1).tolist())


if __name__ == "__main__":
    _demo()
