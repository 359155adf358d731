"""What quantizing costs and saves: what `python bench.py quantize` runs. One cell is one method with one setting.

    bits      a weight of the linear layers takes, scales and zero points included; MB of the whole model
    text      perplexity over windows of a text
    KL        to the distributions of the float32 model, over the first windows of each text, in nats
    tokens/s  of decoding at batch 1, where a kernel computes on the codes, beside the float32 model's in the same run

Every cell that is complete is in the results file, written whole, so that a run which was stopped goes on where it was.
"""
from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F

import attention
import export
import generate
import kvcache
import packed
import quantize
from benchmarks.engines import Ours

# name -> (method, bits, group size): int8 is rtn with 8 bits a row
SETTINGS = {f"{method} {bits} bits {'a row' if size == -1 else f'g{size}'}": (method, bits, size)
            for bits, size in ((4, -1), (4, 64), (3, 64)) for method in ("rtn", "gptq", "awq")}
SETTINGS |= {"int8": ("rtn", 8, -1), "fp8": ("fp8", 8, -1), "nf4": ("nf4", 4, 64),
             "smoothquant": ("smoothquant", 8, -1)}

# ------------------------------------------------------------------ one model


def stored_bits(weight: Mapping) -> float:
    """Bits on disk of a packed weight, or of nf4's, scales in 16 bits."""
    if "absmax" in weight:
        return 8 * weight["packed"].numel() + 32 * weight["absmax"].numel()
    zeros = weight["zeros"]
    return (weight["codes"].numel() * weight["bits"] + 16 * weight["scales"].numel()
            + (0 if zeros is None else weight["bits"] * zeros.numel()))


def sizes(model, weights: Mapping[str, Mapping]) -> dict[str, float]:
    """Bits a quantized weight, and MB (1e6 bytes) of the whole model with the rest in 16 bits."""
    n = sum(math.prod(w.get("shape") or w["codes"].shape) for w in weights.values())
    bits = sum(map(stored_bits, weights.values()))
    rest = sum(t.numel() for name, t in model.state_dict().items() if name.rpartition(".")[0] not in weights)
    return {"bits": bits / n, "MB": (bits / 8 + 2 * rest) / 1e6}


@torch.inference_mode()
def losses(model, windows: Sequence[torch.Tensor], reference: Sequence[torch.Tensor] = (),
           keep: Callable | None = None) -> tuple[list[float], list[float]]:
    """Mean negative log-likelihood of each window, and mean KL(reference || model) of the first ones, in nats."""
    found, divergence = [], []
    for i, ids in enumerate(windows):
        logits = model(ids[None])[0, :-1].float()
        logprobs = logits.log_softmax(-1)
        found.append(float(F.nll_loss(logprobs, ids[1:])))
        if keep is not None:
            keep(logprobs)
        if i < len(reference):
            divergence.append(float(F.kl_div(logprobs, reference[i], reduction="batchmean", log_target=True)))
    return found, divergence


def decode_speed(llm: generate.LLM, other: generate.LLM, tokens: int, rounds: int) -> tuple[float, float]:
    """Tokens/s of decoding of llm, and the median of the rounds' ratios to `other`, taking turns."""
    speeds = {id(one): [] for one in (llm, other)}
    for round_ in range(rounds + 1):
        for one in (llm, other):
            engine = Ours(one)
            last = engine.prefill([[5 + 7 * i for i in range(16)]])
            begin = time.perf_counter()
            for _ in range(tokens):
                last = engine.decode(last)
            if round_:
                speeds[id(one)].append(tokens / (time.perf_counter() - begin))
            one.cache.free(("bench", 0))
    mine, its = speeds[id(llm)], speeds[id(other)]
    return statistics.median(mine), statistics.median(a / b for a, b in zip(mine, its))


def answering(model, tokenizer, name: str) -> generate.LLM:
    """An LLM around a model that is there already, with a small cache."""
    c = model.config
    cache = kvcache.PagedKVCache(c.n_layer, c.n_kv_head, c.head_dim, 64, 16, max_seq_len=min(512, c.max_seq_len),
                                 attention=attention.paged_attention)
    return generate.LLM(model.fuse_(), tokenizer, name, cache, set(tokenizer.eos_ids), {})


# ------------------------------------------------------------------ cells


class Bench:
    """The cells of one model, one calibration text and one set of texts; each is measured once and kept."""

    def __init__(self, path: str | None, texts: Mapping[str, str], ids: Callable[[], torch.Tensor], what: str,
                 results: str, *, window: int, windows: int, divergence: int, sym: bool, tokens: int, rounds: int):
        self.path, self.ids, self.sym, self.tokens, self.rounds = path, ids, sym, tokens, rounds
        self.results, self.divergence = Path(results), divergence
        self.source, self.full = export.float_model(path)
        self.windows = {}
        for name, text in texts.items():
            tokens_of_it = torch.tensor(self.source.tokenizer.encode(text))
            self.windows[name] = [w for w in tokens_of_it.split(window)[:windows] if len(w) == window]
            if not self.windows[name]:
                raise ValueError(f"{name} has {len(tokens_of_it)} tokens, fewer than one window of {window}")
        self.reference: dict[str, list] = {}  # log-probabilities of the float32 model, the first windows of each text
        self.what = f"{what}, {windows} windows of {window}, {'symmetric' if sym else 'asymmetric'}"
        self.kept = json.loads(self.results.read_text()) if self.results.is_file() else {}

    def row(self, name: str) -> dict:
        """The cell of this name, measured now if it is not in the file yet."""
        cells = self.kept.setdefault(self.what, {})
        if name not in cells:
            cells[name] = self._full() if name == "float32" else self._quantized(name)
            partial = self.results.with_name(f".{self.results.name}.partial")
            partial.write_text(json.dumps(self.kept, indent=1) + "\n")
            os.replace(partial, self.results)
        return cells[name]

    def _known(self) -> None:
        """What the float32 model says, once a run: KL needs it."""
        for text, windows in self.windows.items():
            if text not in self.reference:
                kept = self.reference[text] = []
                losses(self.full, windows[: self.divergence], keep=kept.append)

    def _judge(self, model) -> dict:
        found = {}
        for text, windows in self.windows.items():
            nll, divergence = losses(model, windows, self.reference.get(text, ()))
            found[f"{text} perplexity"] = math.exp(statistics.fmean(nll))
            if divergence:
                found[f"{text} KL"] = statistics.fmean(divergence)
        return found

    def _full(self) -> dict:
        return {"bits": 32.0, "MB": 4e-6 * sum(p.numel() for p in self.full.parameters()), **self._judge(self.full)}

    def _quantized(self, name: str) -> dict:
        method, bits, size = SETTINGS[name]
        options = {"act_order": True, "clip": True} if method == "gptq" else {}
        how = quantize.method(method, bits, size, bits == 8 or self.sym, scale_dtype=torch.bfloat16, **options)
        ids = self.ids() if how.calibrated else None
        self._known()
        source, model = export.float_model(self.path)
        begin = time.perf_counter()
        weights, _ = export.quantize_model(model, how, ids)
        found = {"seconds": time.perf_counter() - begin, **sizes(model, weights), **self._judge(model)}
        if all("codes" in w and packed.fast(w) for w in weights.values()) and method != "smoothquant":
            for layer, weight in weights.items():
                bias = model.get_submodule(layer).bias
                model.set_submodule(layer, packed.QuantLinear(weight, None if bias is None else bias.data))
            llm = answering(model, source.tokenizer, name)
            found["tokens/s"], found["beside float32"] = decode_speed(llm, self.beside, self.tokens, self.rounds)
        return found

    @cached_property
    def beside(self) -> generate.LLM:
        source, model = export.float_model(self.path)
        return answering(model, source.tokenizer, "float32")


def recovered(rows: Mapping[str, Mapping], text: str) -> dict[str, float]:
    """Share of RTN's loss of perplexity that each method takes back at the same bits and groups."""
    full, found = rows["float32"][f"{text} perplexity"], {}
    for name, row in rows.items():
        method, _, rest = name.partition(" ")
        if method in ("gptq", "awq") and f"rtn {rest}" in rows:
            lost = rows[f"rtn {rest}"][f"{text} perplexity"] - full
            found[name] = 1 - (row[f"{text} perplexity"] - full) / lost
    return found
