"""export.py - a composition root: any model that loading.py reads, quantized into a folder that other engines read too.

    python generate.py quantize MODEL --method gptq --bits 4 --group-size 64 --out DIR
    python generate.py --model DIR "Why is the sky blue?"

The way of a model: its weights in floating point, a calibration text, codes for every linear layer (quantize.py, walked
through by calibrate.py), and a folder in one of the layouts of layouts.py with config and tokenizer, written whole or
not at all. What stays in high precision is the embedding, the head and the norms.

The text decides how good codes are, so by default the model writes it itself: what it says is what its layers meet, and
no text that it may be judged by later has been seen. It is 32 sequences of 1,024 tokens, sampled at temperature 1 from
a seed, and kept for the next time.
"""
from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import calibrate
import checkpoint
import layouts
import llm
import loading
import quantize
import vocab
import vocab_files
from batching import Request
from model import Config, Llama, causal_attention

SEQUENCES, LENGTH = 32, 1024  # of the calibration text, if nothing else is said
METHODS = {  # what --method may be: the layouts that hold its codes, the first by default, and its format there
    "rtn": (("compressed-tensors", "gptq", "awq"), None), "gptq": (("compressed-tensors", "gptq", "awq"), None),
    "awq": (("compressed-tensors", "gptq", "awq"), None), "smoothquant": (("compressed-tensors",), "int-quantized"),
    "fp8": (("compressed-tensors",), "float-quantized")}
CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
           "qwen3": "Qwen3ForCausalLM"}

# ------------------------------------------------------------------ the text


def own_text(path: str | None, sequences: int = SEQUENCES, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    """ids (sequences, length) that the model at `path` writes at temperature 1, kept in the user's cache folder.

    Each begins with a token drawn from all ordinary ones, so that they come to speak of different things, and goes on
    over the ends of texts.
    """
    one = llm.load(path, max_batch=min(sequences, 32), context=length)
    what = f"{one.about} {one.fingerprint} {sequences} {length} {seed}".encode()
    folder = checkpoint.cache_folder()
    kept = folder / f"calibration-{hashlib.sha256(what).hexdigest()[:16]}.json"
    try:
        ids = torch.tensor(json.loads(kept.read_text()))
        if ids.shape == (sequences, length):
            return ids
    except (OSError, ValueError, TypeError):
        pass
    print(f"The model writes its calibration text, {sequences} times {length} tokens (some minutes); kept in "
          f"{kept}", file=sys.stderr)
    ordinary = [i for i in range(one.model.config.vocab_size) if i not in one.tokenizer.special_ids]
    firsts = random.Random(seed).choices(ordinary, k=sequences)
    requests = [Request([first], max_tokens=length - 1, ignore_eos=True, sampling={"temperature": 1.0}, seed=seed + i,
                        salt="calibration") for i, first in enumerate(firsts)]
    done, total, begin = 0, sequences * (length - 1), time.monotonic()
    for event in one.new_batcher(max_batch=min(sequences, 32), drafter=None).run(requests):
        done += event.token is not None
        if event.token is not None and done % 512 == 0:
            print(f"\r{done:,} of {total:,} tokens, {done / (time.monotonic() - begin):.0f} a second", end="",
                  file=sys.stderr, flush=True)
    print(file=sys.stderr)
    failed = next((s.error for r in requests for s in r.samples if s.finish_reason == "error"), None)
    if failed is not None:
        raise ValueError(f"the model cannot write its calibration text: {failed}; give one with --calibration FILE")
    ids = torch.tensor([[*r.prompt_ids, *r.samples[0].ids] for r in requests])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".partial", delete=False) as f:
        f.write(json.dumps(ids.tolist()))
    os.replace(f.name, kept)
    return ids


def file_text(tokenizer, file: str, sequences: int = SEQUENCES, length: int = LENGTH) -> torch.Tensor:
    """ids (at most `sequences`, length) from all over a text file. ValueError if it is shorter than one sequence."""
    ids = tokenizer.encode(Path(file).read_text(encoding="utf-8", errors="replace"))
    pieces = len(ids) // length
    if not pieces:
        raise ValueError(f"{file} has {len(ids)} tokens, but one calibration sequence takes {length}; use a longer "
                         "text or a smaller --length")
    n = min(sequences, pieces)
    return torch.tensor([ids[(i * pieces // n) * length:][:length] for i in range(n)])


# ------------------------------------------------------------------ the model


def float_model(path: str | None, dtype: torch.dtype = torch.float32) -> tuple[loading.Source, Llama]:
    """The model at `path` in floating point, not fused: parameters have Hugging Face's names."""
    source = loading.read(checkpoint.resolve(path), dtype, False)
    weights = loading.Weights(source.tensors, False, None, dtype, torch.device("cpu"))
    return source, Llama.from_tensors(Config.from_dict(source.config), weights, dtype)


def quantize_model(model: Llama, how: quantize.Method, ids: torch.Tensor | None, *, rows: int = 4096,
                   skip: Sequence[str] = ("lm_head",), replace=None, progress: bool = False) -> tuple[dict, dict]:
    """calibrate.quantize_ for a Llama, ids (sequences, length), `rows` tokens in each batch."""
    def block(x, layer, module):
        cos, sin = model.rotary(torch.arange(x.shape[1], device=x.device), x.dtype)
        window = model.config.sliding_window
        return module(x, cos, sin, functools.partial(causal_attention, layer, window=window))

    states, stages = [], [functools.partial(block, layer=i, module=m) for i, m in enumerate(model.model["layers"])]
    if how.calibrated:
        with torch.no_grad():
            states = [model.model["embed_tokens"](batch) for batch in ids.split(max(1, rows // ids.shape[1]))]
    return calibrate.quantize_(model, how, stages, states, folds=calibrate.LLAMA_FOLDS, replace=replace, skip=skip,
                               progress=progress)


# ------------------------------------------------------------------ the folder


def tensors_of(model: Llama, weights: Mapping[str, Mapping], layout: str, dtype: torch.dtype, format: str | None):
    """(name, tensor) of all that a folder stores: packed linears in a layout, the rest in dtype."""
    for name, weight in weights.items():
        yield from layouts.write(layout, name, weight, dtype, format).items()
    for name, tensor in model.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        if owner not in weights or leaf == "bias":  # else it is the weight itself, in whatever form a layer keeps it
            yield name, tensor.to(dtype)


def write_folder(out: str, source: loading.Source, model: Llama, weights: Mapping[str, Mapping], layout: str,
                 format: str | None, settings: Mapping, files: Mapping, force: bool) -> None:
    """The quantized folder, whole or not at all."""
    dtype = torch.bfloat16 if layout == "compressed-tensors" else torch.float16  # what engines expect of the scales
    entry = layouts.quantization_config(layout, format=format, **settings)
    config = {k: v for k, v in source.config.items() if k not in ("quantization_config", "torch_dtype")}
    config |= {"architectures": config.get("architectures") or [CLASSES[config["model_type"]]],
               "dtype": str(dtype).removeprefix("torch."), "quantization_config": entry}
    ends = sorted(source.tokenizer.eos_ids)
    generation = source.generation or {"eos_token_id": ends[0] if len(ends) == 1 else ends, "do_sample": False}
    checkpoint.save(out, config, tensors_of(model, weights, layout, dtype, format), generation, force=force,
                    files=files)


def tokenizer_files(path: str, source: loading.Source) -> dict:
    """The tokenizer's files: those of the folder as they are, or made of a GGUF file's metadata."""
    if os.path.isfile(path) and not path.endswith(".safetensors"):
        return vocab_files.tokenizer_files(vocab.read_gguf(source.tensors.metadata))  # type: ignore[attr-defined]
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
             "chat_template.jinja", "added_tokens.json", "vocab.json", "merges.txt")
    folder = Path(path if os.path.isdir(path) else os.path.dirname(path))
    return {name: folder / name for name in names if (folder / name).is_file()}


# ------------------------------------------------------------------ the command line


def calibration(path: str | None, file: str | None, sequences: int = SEQUENCES, length: int = LENGTH) -> torch.Tensor:
    """ids (sequences, length) of a text file, or of the model's own text."""
    if file is None:
        return own_text(path, sequences, length)
    tokenizer = loading.read(checkpoint.resolve(path), torch.float32, False).tokenizer
    return file_text(tokenizer, file, sequences, length)


def _arguments(argv: Sequence[str] | None, parser_class: type) -> argparse.Namespace:
    parser = parser_class(prog="generate.py quantize", description="Quantizes a model into a folder that generate.py, "
                          "transformers, vLLM and SGLang read.", allow_abbrev=False)
    add = parser.add_argument
    add("model", nargs="?", help="as generate.py's --model (default: SmolLM2-135M-Instruct)")
    add("--out", required=True, metavar="DIR", help="the folder to write, whole or not at all")
    add("--method", default="gptq", choices=list(METHODS), help="how codes are chosen (default: gptq)")
    add("--bits", type=int, choices=[4, 8], help="of a weight (default: 4; smoothquant and fp8 have 8)")
    add("--group-size", type=int, metavar="N", help="weights of a row that share a scale, -1: all (default: 128, 64 or "
        "32, the largest that divides every layer)")
    add("--asym", action="store_true", help="with zero points (default: symmetric)")
    add("--layout", choices=["compressed-tensors", "gptq", "awq"], help="of the folder (default: compressed-tensors)")
    add("--no-act-order", action="store_true", help="gptq: columns from left to right, not the largest inputs first")
    add("--damp", type=float, metavar="X", help="gptq: share of the mean diagonal that is added (default: 0.01)")
    add("--calibration", metavar="FILE", help="a text to calibrate on (default: one that the model writes itself)")
    add("--sequences", type=int, default=SEQUENCES, metavar="N", help="of it (default: %(default)s)")
    add("--length", type=int, default=LENGTH, metavar="N", help="tokens of each (default: %(default)s)")
    add("--skip", nargs="*", default=["lm_head"], metavar="NAME", help="linear layers that stay as they are, by the "
        "end or the beginning of their names (default: lm_head; embeddings always stay)")
    add("--dtype", default="float32", choices=["float32", "bfloat16"], help="to calibrate in (default: float32)")
    add("--force", action="store_true", help="replace a model that is in DIR")
    add("--quiet", action="store_true", help="print nothing but errors")
    add("--threads", type=int, metavar="N", help="CPU threads")
    args = parser.parse_args(argv)
    for name in ("sequences", "length", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}, but must be 1 or more")
    return args


def main(argv: Sequence[str] | None, parser_class: type) -> int:
    args = _arguments(argv, parser_class)
    try:
        _run(args)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        print("error: " + (" ".join(str(error).split()) or type(error).__name__), file=sys.stderr)
        return 2
    return 0


def _run(args: argparse.Namespace) -> None:
    begin = time.monotonic()
    if args.threads:
        torch.set_num_threads(args.threads)
    checkpoint.writable(args.out, args.force)
    layouts_of, format = METHODS[args.method]
    layout = args.layout or layouts_of[0]
    if layout not in layouts_of:
        raise ValueError(f"{args.method} is written as {' or '.join(layouts_of)}, not as {layout}")
    if args.method != "gptq" and (args.damp is not None or args.no_act_order):
        raise ValueError("--damp and --no-act-order are gptq's")
    options = {"clip": True, "act_order": not args.no_act_order} if args.method == "gptq" else {}
    options |= {} if args.damp is None else {"damp": args.damp}
    source, model = float_model(args.model, loading.DTYPES[args.dtype])
    if args.method in ("smoothquant", "fp8"):
        if args.bits == 4 or args.group_size not in (None, -1) or args.asym:
            raise ValueError(f"{args.method} has 8 bits, one scale a row and no zero points; leave those flags out")
        bits, size, sym = 8, -1, True
    else:
        bits, size, sym = args.bits or 4, args.group_size or _group_that_divides(model, args.skip), not args.asym
    settings = {"bits": bits, "group_size": size, "sym": sym, "ignore": args.skip}
    layouts.quantization_config(layout, format=format, **settings)  # what cannot be written is said now
    how = quantize.method(args.method, bits, size, sym, **options,
                          scale_dtype=torch.bfloat16 if layout == "compressed-tensors" else torch.float16)
    calibrate.check_groups(calibrate.find_linears(model, args.skip), size)
    if how.calibrated and args.length > model.config.max_seq_len:
        raise ValueError(f"calibration sequences of {args.length} tokens exceed the model's context of "
                         f"{model.config.max_seq_len}; use a smaller --length")
    files = tokenizer_files(checkpoint.resolve(args.model), source)  # which may be refused, too
    ids = calibration(args.model, args.calibration, args.sequences, args.length) if how.calibrated else None
    weights, report = quantize_model(model, how, ids, skip=args.skip, progress=not args.quiet)
    write_folder(args.out, source, model, weights, layout, format, settings, files, args.force)
    if not args.quiet:
        mean = sum(layer.error for layer in report.values()) / len(report)
        worst = max(report, key=lambda name: report[name].error)
        n_bytes = sum(f.stat().st_size for f in Path(args.out).glob("*.safetensors"))
        print(f"{args.out}: {len(weights)} linear layers in {bits} bits ({args.method}, "
              f"{'one scale a row' if size == -1 else f'groups of {size}'}, {layout}), {n_bytes / 1e6:,.1f} MB, in "
              f"{time.monotonic() - begin:.0f} s; relative error of their outputs {mean:.3f} on average, at most "
              f"{report[worst].error:.3f} ({worst}). In high precision: embeddings, norms"
              f"{', ' + ', '.join(args.skip) if args.skip else ''}", file=sys.stderr)


def _group_that_divides(model: Llama, skip: Sequence[str]) -> int:
    widths = {m.in_features for m in calibrate.find_linears(model, skip).values()}
    return next((g for g in (128, 64, 32) if all(w % g == 0 for w in widths)), -1)
