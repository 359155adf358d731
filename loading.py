"""loading.py - a composition root: from a model of any kind on disk to one that is ready to compute, and its KV cache.

    path -> Source (config, tensors, tokenizer) -> Weights -> Llama, fused, on its device -> PagedKVCache

checkpoint.py or gguf.py brings weights, layouts.py reads those that others have quantized, packed.py computes on them
as they are, vocab.py reads vocabularies for tokenizer.py, parallel.py cuts a rank's share. What is decided here is how
this machine runs the model: in which type, what stays packed, by which attention, and how much cache there is.
`llm.py` answers with what `ready` gives; `export.py` begins with what `read` gives.
"""
from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch

import attention
import checkpoint
import flash
import gguf
import kvcache
import layouts
import packed
import parallel
import ranks
import vocab
from kvcache import PagedKVCache
from model import Config, Llama
from tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
BLOCK = 16  # tokens of a block of the KV cache

# ------------------------------------------------------------------ what lies on disk


class Source(NamedTuple):
    """A model as it lies on disk."""
    config: dict                # in the style of config.json
    tensors: Mapping            # name -> tensor, or packed weight (see packed.py)
    tokenizer: Tokenizer
    generation: dict            # generation_config.json
    kinds: list[str]            # how the weights are stored, for people to read
    nbytes: int                 # of all tensors on disk
    quantized: bool = False     # by one of the methods of layouts.py


def read(path: str, dtype: torch.dtype, keep: bool) -> Source:
    """The model at a resolved path. Of a GGUF file the weights come in dtype, or in codes if they are to be kept."""
    is_gguf = os.path.isfile(path) and not path.endswith(".safetensors")
    return _read_gguf(path, dtype, keep) if is_gguf else _read_folder(path)


def _read_gguf(path: str, dtype: torch.dtype, keep: bool) -> Source:
    file = gguf.GGUF(path, dtype, packed=keep)
    kinds = sorted(file.types, key=file.types.get, reverse=True)
    return Source(file.config, file, Tokenizer(**vocab.read_gguf(file.metadata)), {}, kinds, file.nbytes)


def _read_folder(path: str) -> Source:
    folder = checkpoint.load(path)
    method = folder.config.get("quantization_config")
    if not method and any(name.endswith((".qweight", ".weight_packed")) for name in folder.tensors):
        raise ValueError(f"{path} holds packed weights, but its config.json has no quantization_config that says how")
    tensors = layouts.read(folder.config, folder.tensors) if method else folder.tensors
    config = {k: v for k, v in folder.config.items() if k != "quantization_config"}
    tokenizer = Tokenizer(**vocab.read_folder(path if os.path.isdir(path) else os.path.dirname(path) or "."))
    stored = list(folder.tensors.values())  # views of the mapped files: nothing is read
    kinds = [method["quant_method"]] if method else sorted({str(t.dtype).removeprefix("torch.") for t in stored})
    return Source(config, tensors, tokenizer, folder.generation, kinds, sum(t.nbytes for t in stored), bool(method))


# ------------------------------------------------------------------ its weights, as they are to run


class Weights(Mapping):
    """What the model takes its weights from. A packed weight is passed on as it is if it may stay packed and there is a
    kernel for it, and expanded otherwise."""

    def __init__(self, tensors: Mapping, keep: bool, repack: int | None, dtype: torch.dtype, device: torch.device,
                 quantize: int | None = None):
        self.tensors, self.keep, self.repack, self.dtype, self.device = tensors, keep, repack, dtype, device
        self.quantize, self.rounded = quantize, {}  # name -> relative error of those quantized here
        self.sizes, self.packed = {}, set()  # name -> number of weights; names of those that stayed packed
        self.errors, self.bits = {}, set()  # name -> relative error of those packed anew; widths of codes that were met

    def __getitem__(self, name: str) -> torch.Tensor | Mapping:
        weight = self.tensors[name]
        if not isinstance(weight, Mapping):
            self.sizes[name] = weight.numel()
            return self._rounded(name, weight) if self.quantize and name.endswith("_proj.weight") else weight
        self.sizes[name] = weight["codes"].numel()
        self.bits.add(weight["bits"])
        if self.repack and not packed.fast(weight, self.device) and weight["codes"].shape[1] % 32 == 0:
            again, error = packed.repack(layouts.dequantize(weight), self.repack)
            if packed.fast(again, self.device):
                weight, self.errors[name] = again, error
        if not (self.keep and packed.fast(weight, self.device)):
            return layouts.dequantize(weight, self.dtype)
        self.packed.add(name)
        return weight

    def _rounded(self, name: str, weight: torch.Tensor) -> torch.Tensor | dict:
        if weight.dim() != 2 or weight.shape[1] % 32 or not weight.is_floating_point():
            return weight
        again, error = packed.repack(weight.to(self.device), self.quantize)
        if not packed.fast(again, self.device):
            return weight
        self.packed.add(name)
        self.rounded[name] = error
        return again

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self):
        return len(self.tensors)

    def __contains__(self, name):
        return name in self.tensors


def _about(source: Source, weights: Weights, model: Llama, group: ranks.Group | None = None) -> str:
    """One line on what was found and how it runs."""
    stale = "lm_head.weight" if source.config.get("tie_word_embeddings") else None  # may be stored, and is not used
    sizes = {name: size for name, size in weights.sizes.items() if name != stale}
    n, size = sum(sizes.values()), source.nbytes
    whole = n if group is None else sum(k for name, k in weights.tensors.sizes.items() if name != stale)  # type: ignore
    share, dtype = sum(sizes.get(x, 0) for x in weights.packed) / n, str(weights.dtype).removeprefix("torch.")
    runs = "packed" if share > 0.99 else f"{share:.0%} packed, the rest in {dtype}" if share else f"in {dtype}"
    if weights.repack and not weights.errors:
        runs += " (there was nothing to repack)"
    elif weights.repack:
        runs += (f" ({sum(sizes.get(x, 0) for x in weights.errors) / n:.0%} repacked to {weights.repack} bits, "
                 f"relative error up to {max(weights.errors.values()):.1%})")
    if weights.rounded:
        runs += (f" ({sum(sizes.get(x, 0) for x in weights.rounded) / n:.0%} quantized now to {weights.quantize} bits, "
                 f"relative error up to {max(weights.rounded.values()):.1%})")
    elif weights.quantize:
        runs += " (there was nothing to quantize)"
    width = f", {' and '.join(map(str, sorted(weights.bits)))} bits" if source.quantized else ""
    memory = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    each = "" if group is None else f" on each of {group.size} ranks"
    return (f"{source.config['model_type']}, {whole / 1e6:,.1f} M parameters in {size / 1e6:,.1f} MB, "
            f"{8 * size / whole:.1f} bits each ({', '.join(source.kinds)}{width}); runs {runs}, {memory / 1e6:,.1f} MB"
            f"{each}")


# ------------------------------------------------------------------ what is asked for, and the machine


def _check(dtype: str, kv_dtype: str, kv_memory: float, **rounding: str | None) -> None:
    """ValueError for options that cannot be meant, whatever the model and the machine."""
    if not 0 < kv_memory < 2**20:
        raise ValueError(f"a KV cache of {kv_memory} GiB cannot be; give a number above 0")
    if kv_dtype not in ("auto", "int8", "fp8"):
        raise ValueError(f"kv_dtype {kv_dtype!r} is unknown; known are auto, int8, fp8")
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"dtype {dtype!r} is unknown; known are auto, {', '.join(DTYPES)}")
    for name, to in rounding.items():
        if to not in (None, "int8", "int4") or (to and dtype != "auto"):
            raise ValueError(f"{name} {to!r} must be int8 or int4, and goes with dtype auto only, not {dtype}")


def _device(device: str, group: ranks.Group | None = None) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if str(device).startswith("cuda:") and group is not None:
        raise ValueError(f"under torchrun each rank has a GPU of its own; take --device cuda, not {device}")
    if device == "cuda" and group is not None:
        device = f"cuda:{group.local_rank}"
    try:
        if str(device).split(":")[0] not in ("cpu", "cuda"):
            raise RuntimeError("it is neither cpu nor cuda nor cuda:N")
        device = torch.device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def _native_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()


def _check_together(device: torch.device, group: ranks.Group | None, kv_dtype: str, compile: int,
                    deterministic: bool) -> None:
    """ValueError for options that do not go together."""
    if compile and (device.type != "cpu" or group is not None or kv_dtype != "auto"):
        raise ValueError("compiled decode steps are for one process on a CPU with a KV cache in floating point; leave "
                         "out --compile, or --device, torchrun and --kv-dtype")
    for given, why in ((compile, "a compiled step may sum in another order than others; leave out --compile"),
                       (group, "several ranks sum in an order that depends on how many they are; leave out torchrun"),
                       (device.type != "cpu", "kernels of a GPU split their sums by how many rows and sequences there "
                        "are; take --device cpu")):
        if deterministic and given:
            raise ValueError(f"--deterministic cannot be kept: {why}")


# ------------------------------------------------------------------ ready to compute


class Ready(NamedTuple):
    """A model that can compute, with all that goes with it."""
    model: Llama                # this rank's share, if there are several
    cache: PagedKVCache
    tokenizer: Tokenizer
    name: str
    eos_ids: set[int]
    generation: dict            # generation_config.json
    about: str                  # one line for people
    fingerprint: str            # what tells it from others, see checkpoint.py


def ready(path: str | None, *, dtype: str, device: str, context: int | None, repack: str | None,
          quantize: str | None, kv_dtype: str, kv_memory: float, max_batch: int, graphs: bool, compile: int,
          deterministic: bool, group: ranks.Group | None) -> Ready:
    """The model at a path, in memory and on the device, and a cache for it. The options are those of llm.load."""
    _check(dtype, kv_dtype, kv_memory, repack=repack, quantize=quantize)
    asked, path = path, checkpoint.resolve(path)
    device = _device(device, group)
    _check_together(device, group, kv_dtype, compile, deterministic)
    if group is not None and device.type == "cuda":
        torch.cuda.set_device(device)  # kernels, and NCCL, take the current one
    keep = dtype == "auto"
    dtype = DTYPES[dtype] if not keep else torch.bfloat16 if _native_bfloat16(device) else torch.float32
    source, fingerprint = read(path, dtype, keep), checkpoint.identify(path)
    config = Config.from_dict(source.config)
    mine, tensors = config, source.tensors
    if group is not None:
        flags = [str(dtype), keep, kv_dtype, kv_memory, context, max_batch, graphs, repack, quantize, device.type]
        mine, tensors = _share(source, config, fingerprint, group, flags)
    weights = Weights(tensors, keep, int(repack[3:]) if repack else None, dtype, device,
                      int(quantize[3:]) if quantize else None)
    model = Llama.from_tensors(mine, weights, dtype, device, packed)
    if isinstance(source.tensors, gguf.GGUF):
        source.tensors.close()  # its pages count as ours as long as they are mapped, and fuse_ is where memory peaks
    model = (model if group is None else parallel.parallelize_(model, config, group)).fuse_(pack=not compile)
    if deterministic and isinstance(model.lm_head, packed.QuantLinear):
        model.lm_head.pack_(1)  # one way through it for any number of rows
    ends = _ends(source, path)
    name = asked if asked and not os.path.exists(asked) else os.path.basename(os.path.abspath(path))
    kv = dtype if kv_dtype == "auto" else kv_dtype
    cache = _cache(mine, kv, kv_memory, context, max_batch, device, deterministic)
    return Ready(model, cache, source.tokenizer, name, ends, source.generation,
                 f"{name}: {_about(source, weights, model, group)}", fingerprint)


def _share(source: Source, config: Config, fingerprint: str, group: ranks.Group,
           flags: list) -> tuple[Config, parallel.Shards]:
    """This rank's smaller config and its slices, if all ranks are about to load the same model in the same way."""
    mine = parallel.shard_config(config, group.rank, group.size)
    group.check(the_config=source.config, the_weights=fingerprint, the_flags=flags)
    return mine, parallel.Shards(source.tensors, config, group.rank, group.size)


def _ends(source: Source, path: str) -> set[int]:
    """The ids that end a text: those that the model's files name, and the tokenizer's."""
    ends = source.generation.get("eos_token_id")
    ends = source.config.get("eos_token_id") if ends is None else ends
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(type(i) is int for i in ends):
        raise ValueError(f"{path}: eos_token_id is {ends}, but must be token ids")
    return {*ends, *source.tokenizer.eos_ids}


def _cache(config: Config, kv: torch.dtype | str, gib: float, context: int | None, max_batch: int, device: torch.device,
           deterministic: bool) -> PagedKVCache:
    """A KV cache of at most so many GiB, and the attention that reads it here."""
    blocks = kvcache.blocks_that_fit(config, kv, int(gib * 2**30))
    context = _context(context, config, blocks * BLOCK, gib)
    kernel = flash.paged_attention if device.type == "cuda" and flash.triton else attention.paged_attention
    kernel = partial(kernel, alone=True) if deterministic else kernel  # type: ignore[call-arg]
    return PagedKVCache(config.n_layer, config.n_kv_head, config.head_dim,
                        min(blocks, max(2, max_batch) * -(-context // BLOCK)), BLOCK, max_seq_len=context, dtype=kv,
                        device=device, window=config.sliding_window, attention=kernel)


def _context(context: int | None, config: Config, fits: int, gib: float) -> int:
    """Tokens of one conversation: as asked for, else the model's own, or what the KV cache has room for."""
    if context is None and fits:
        return min(config.max_seq_len, fits)
    if context is None or fits < context <= config.max_seq_len:
        raise ValueError(f"a KV cache of {gib:g} GiB holds {fits} tokens, fewer than the {context or 1} of one "
                         "conversation; allow it more with --kv-memory, or take --kv-dtype int8")
    if not 1 <= context <= config.max_seq_len:
        raise ValueError(f"a context of {context} tokens was asked for; this model has 1 to {config.max_seq_len}")
    return context
