"""generate.py - weights to tokens: the composition root and the command line.

    python generate.py "Why is the sky blue?"

Everything else in this folder is one concept in one file, and no file knows another. Here they meet: checkpoint.py or
gguf.py brings weights, layouts.py reads those that others have quantized, packed.py computes on them as they are,
vocab.py reads vocabularies, tokenizer.py makes ids of text and chat.py of a conversation, model.py computes, kvcache.py
remembers, sampling.py chooses, batching.py lets many requests share each pass, speculative.py makes several tokens of
one, graphs.py replays passes on a GPU.
From Python it is three lines:

    import generate
    llm = generate.load()                                  # or a path: a .gguf file, a Hugging Face folder
    print(llm.generate(["Why is the sky blue?"], temperature=0)[0].text)

There is one loop, the batcher's: a single prompt, a conversation, a list and a file of a million prompts all go through
it. `--prompts FILE` answers a file, one JSON object a line, and takes up where a killed run ended.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import signal
import statistics
import sys
import threading
import time
import warnings
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from heapq import heappop, heappush
from typing import NamedTuple

if __name__ == "__main__":  # Ctrl-C while torch is imported just ends the program; `main` then takes over
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch

import attention
import batching
import checkpoint
import flash
import gguf
import graphs as cuda_graphs
import kvcache
import layouts
import packed
import prompts as prompt_files
import sampling
import speculative
import traffic
import vocab
from batching import Batcher, Request
from chat import ChatTemplate
from kvcache import PagedKVCache
from model import Config, Llama
from stream import StreamDecoder
from tokenizer import Tokenizer

CHUNK = 512  # most tokens of one pass
BESIDE = 16  # on a CPU, most prompt tokens of a pass in which somebody is answered: he waits about twice as long
CATCH_UP = 64  # tokens of a pass of the draft model over a text that it has not seen
AHEAD = 1024  # lines of a prompts file read before their time has come
KV_GIB = 2.0  # the KV cache takes at most so much by default; the context shrinks to what fits
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "logit_bias")
REQUEST = ("max_tokens", "min_tokens", "stop", "ignore_eos", "seed", "n", "logprobs", "priority", "salt")

# ------------------------------------------------------------------ loading


def load(path: str | None = None, *, dtype: str = "auto", device: str = "auto", context: int | None = None,
         repack: str | None = None, kv_dtype: str = "auto", kv_memory: float = KV_GIB, max_batch: int = 16,
         token_budget: int = CHUNK, graphs: bool = True, draft: str | None = None, k: int | str = "auto") -> LLM:
    """A model ready to answer.

    path     a .gguf file, a Hugging Face folder (also one quantized by compressed-tensors, GPTQ or AWQ), a .safetensors
             file with config.json beside it, `org/model` for the Hugging Face hub, or None for the default model
             (fetched once, 98 MB)
    dtype    auto: quantized weights stay as they are where there is a kernel for them; activations and all else in
             bfloat16 where the machine multiplies it natively, else float32. float32, bfloat16, float16 and float64
             expand every weight to that
    device   auto (cuda if there is one, else cpu) or a torch device
    context  most tokens of one conversation; None: the model's own, or what fits the KV cache
    kv_dtype    auto (the activations'), int8 or fp8: one byte and a scale, which halves the cache of bfloat16
    kv_memory   GiB that the KV cache may take, at most; what nobody uses keeps earlier prompts
    max_batch, token_budget    most samples and most tokens of one pass of the model
    graphs   on CUDA, replay captured graphs for steps in which every sample gets one token
    draft, k  speculative decoding: drafts by `ngram` (what followed the same words before) or by a smaller model (a
             path) of the same vocabulary; so many of them, auto: as many as pay. The answers stay what they were
    repack   int8 or int4: quantized weights without a kernel (Q6_K, fp8, ...) are rounded once more to run packed too
    """
    if k != "auto" and not (type(k) is int and 1 <= k <= 64):
        raise ValueError(f"k is {k!r}, but must be 'auto' or a number of drafts from 1 to 64")
    if not 0 < kv_memory < 2**20:
        raise ValueError(f"a KV cache of {kv_memory} GiB cannot be; give a number above 0")
    if kv_dtype not in ("auto", "int8", "fp8"):
        raise ValueError(f"kv_dtype {kv_dtype!r} is unknown; known are auto, int8, fp8")
    asked, path = path, checkpoint.resolve(path)
    device = _device(device)
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"dtype {dtype!r} is unknown; known are auto, {', '.join(DTYPES)}")
    keep = dtype == "auto"
    if repack not in (None, "int8", "int4") or (repack and not keep):
        raise ValueError(f"repack {repack!r} must be int8 or int4, and goes with dtype auto only, not {dtype}")
    dtype = DTYPES[dtype] if not keep else torch.bfloat16 if _native_bfloat16(device) else torch.float32
    is_gguf = os.path.isfile(path) and not path.endswith(".safetensors")
    source = _read_gguf(path, dtype, keep) if is_gguf else _read_folder(path)
    config = Config.from_dict(source.config)
    weights = Weights(source.tensors, keep, int(repack[3:]) if repack else None, dtype, device)
    model = Llama.from_tensors(config, weights, dtype, device, packed).fuse_()
    ends = source.generation.get("eos_token_id")
    ends = source.config.get("eos_token_id") if ends is None else ends
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(type(i) is int for i in ends):
        raise ValueError(f"{path}: eos_token_id is {ends}, but must be token ids")
    name = asked if asked and not os.path.exists(asked) else os.path.basename(os.path.abspath(path))
    kv = dtype if kv_dtype == "auto" else kv_dtype
    blocks = kvcache.blocks_that_fit(config, kv, int(kv_memory * 2**30))
    context = _context(context, config, blocks * 16, kv_memory)
    kernel = flash.paged_attention if device.type == "cuda" and flash.triton else attention.paged_attention
    cache = PagedKVCache(config.n_layer, config.n_kv_head, config.head_dim,
                         min(blocks, max(2, max_batch) * -(-context // 16)), 16, max_seq_len=context, dtype=kv,
                         device=device, window=config.sliding_window, attention=kernel)
    llm = LLM(model, source.tokenizer, name, cache, {*ends, *source.tokenizer.eos_ids},
              _sampling_defaults(source.generation), f"{name}: {_about(source, weights, model)}")
    if draft is not None:
        llm.drafter = _drafter(llm, draft, dict(device=str(device), kv_memory=kv_memory, max_batch=max_batch))
        llm.k = k
    llm.options = {"max_batch": max_batch, "token_budget": token_budget, "graphs": graphs}
    llm.batcher = llm.new_batcher()
    return llm


def _drafter(llm: LLM, draft: str, options: dict):
    """What proposes drafts for llm: n-grams, or a smaller model."""
    if draft == "ngram":
        return speculative.NgramDrafter(ends=llm.eos_ids)
    small = load(draft, **options)
    words = [[one.tokenizer.token_bytes(i) or None for i in range(one.model.config.vocab_size)] for one in (llm, small)]
    try:
        speculative.check_vocabulary(*words)
    except ValueError as error:
        raise ValueError(f"{draft} cannot draft for {llm.name}: {error}") from None
    return speculative.DraftModel(small.model, small.cache, len(words[0]), draft_vocab_size=len(words[1]),
                                  ends=llm.eos_ids, chunk=CATCH_UP, salt=lambda sample: sample.request.salt)


class Source(NamedTuple):
    """A model as it lies on disk."""
    config: dict                # in the style of config.json
    tensors: Mapping            # name -> tensor, or packed weight (see packed.py)
    tokenizer: Tokenizer
    generation: dict            # generation_config.json
    kinds: list[str]            # how the weights are stored, for people to read
    nbytes: int                 # of all tensors on disk
    quantized: bool = False     # by one of the methods of layouts.py


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


class Weights(Mapping):
    """What the model takes its weights from. A packed weight is passed on as it is if it may stay packed and there is a
    kernel for it, and expanded otherwise."""

    def __init__(self, tensors: Mapping, keep: bool, repack: int | None, dtype: torch.dtype, device: torch.device):
        self.tensors, self.keep, self.repack, self.dtype, self.device = tensors, keep, repack, dtype, device
        self.sizes, self.packed = {}, set()  # name -> number of weights; names of those that stayed packed
        self.errors, self.bits = {}, set()  # name -> relative error of those packed anew; widths of codes that were met

    def __getitem__(self, name: str) -> torch.Tensor | dict:
        weight = self.tensors[name]
        if not isinstance(weight, Mapping):
            self.sizes[name] = weight.numel()
            return weight
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

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self):
        return len(self.tensors)

    def __contains__(self, name):
        return name in self.tensors


def _about(source: Source, weights: Weights, model: Llama) -> str:
    """One line on what was found and how it runs."""
    stale = "lm_head.weight" if source.config.get("tie_word_embeddings") else None  # may be stored, and is not used
    sizes = {name: size for name, size in weights.sizes.items() if name != stale}
    n, size = sum(sizes.values()), source.nbytes
    share, dtype = sum(sizes.get(x, 0) for x in weights.packed) / n, str(weights.dtype).removeprefix("torch.")
    runs = "packed" if share > 0.99 else f"{share:.0%} packed, the rest in {dtype}" if share else f"in {dtype}"
    if weights.repack and not weights.errors:
        runs += " (there was nothing to repack)"
    elif weights.repack:
        runs += (f" ({sum(sizes.get(x, 0) for x in weights.errors) / n:.0%} repacked to {weights.repack} bits, "
                 f"relative error up to {max(weights.errors.values()):.1%})")
    width = f", {' and '.join(map(str, sorted(weights.bits)))} bits" if source.quantized else ""
    memory = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    return (f"{source.config['model_type']}, {n / 1e6:,.1f} M parameters in {size / 1e6:,.1f} MB, {8 * size / n:.1f} "
            f"bits each ({', '.join(source.kinds)}{width}); runs {runs}, {memory / 1e6:,.1f} MB")


def _device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if str(device).split(":")[0] not in ("cpu", "cuda"):
            raise RuntimeError("it is neither cpu nor cuda nor cuda:N")
        device = torch.device(device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device


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


def _native_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()


def _sampling_defaults(generation: dict) -> dict:
    """The sampling that the model's makers recommend in generation_config.json; greedy if they say nothing."""
    found = {k: generation[k] for k in SAMPLING if isinstance(generation.get(k), (int, float))}
    if not generation.get("do_sample", "temperature" in found):
        found["temperature"] = 0.0
    return found


# ------------------------------------------------------------------ answering


class LLM:
    """A model, its tokenizer, its KV cache and the batcher that everything runs on. `load` makes one."""

    def __init__(self, model: Llama, tokenizer: Tokenizer, name: str, cache: PagedKVCache, eos_ids: set[int],
                 defaults: dict, about: str = ""):
        weight = model.model["norm"].weight
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.cache, self.context = cache, cache.max_seq_len
        self.eos_ids, self.defaults, self.about = eos_ids, defaults, about
        self.device, self.dtype = weight.device, weight.dtype
        is_packed = any(isinstance(m, packed.QuantLinear) for m in model.modules())
        self.weights = "packed" if is_packed else str(weight.dtype).removeprefix("torch.")
        self.drafter, self.k, self.graphs = None, "auto", None
        self.options = {"max_batch": 16, "token_budget": CHUNK, "graphs": True}
        self.batcher = self.new_batcher()

    def new_batcher(self, **options) -> Batcher:
        """A batcher on this model and cache; options are Batcher's, beside `graphs`. Use one at a time."""
        options = {**self.options, **options}
        if self.drafter is not None and "drafter" not in options:
            options.update(drafter=self.drafter, verify=speculative.verify, drafts=self.new_drafts())
        options.setdefault("chunk", min(BESIDE, options["token_budget"]) if self.device.type == "cpu" else None)
        if options.pop("graphs") and self.device.type == "cuda":
            if self.graphs is None or self.graphs.sizes[-1] < options["max_batch"]:  # captured once for all batchers
                self.graphs = cuda_graphs.Graphs(self.model, self.cache, options["max_batch"])
            options["forward"] = self.graphs
        return Batcher(self.model, self.cache, sampling, self.model.config.vocab_size, eos_ids=self.eos_ids,
                       decoder=lambda ids, stop: StreamDecoder(self.tokenizer, stop, ids), **options)

    def new_drafts(self) -> int | speculative.AdaptiveK:
        """How many drafts a batcher asks for: k, or what it will learn."""
        least = {} if isinstance(self.drafter, speculative.NgramDrafter) else {"least": 0.0}
        return speculative.AdaptiveK(**least) if self.k == "auto" else self.k

    def encode(self, prompt: str, *, raw: bool = False, system: str | None = None) -> list[int]:
        """Ids of a prompt: through the chat template, or as it is if raw."""
        if not isinstance(prompt, str):
            raise ValueError(f"a prompt is a text, not {type(prompt).__name__}; for token ids use answer(ids), for a "
                             "conversation answer(encode_chat(messages))")
        if raw and system is not None:
            raise ValueError("a system message needs the chat template, which raw leaves out")
        if raw:
            return self.tokenizer.encode(prompt)
        messages = [{"role": "system", "content": system}] if system is not None else []
        return self.encode_chat([*messages, {"role": "user", "content": prompt}])

    def encode_chat(self, messages: Sequence[dict]) -> list[int]:
        """Ids of a conversation, a list of {"role", "content"}, up to where the model's answer begins."""
        if self.tokenizer.chat_template is None:
            raise ValueError(f"{self.name} has no chat template; use --raw (raw=True) to continue the prompt as it is")
        return self._template.encode(messages, self.tokenizer)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer.chat_template)

    def generate(self, prompts: str | Sequence[str], *, raw: bool = False, system: str | None = None,
                 **options) -> list[Answer]:
        """The answers to one prompt or several, finished; they are computed together. For options see `answer`.

        One that fails has finish_reason "error" and says why in .error; if it is the only one, RuntimeError is raised.
        """
        prompts = [prompts] if isinstance(prompts, str) else prompts
        answers = [self.answer(self.encode(p, raw=raw, system=system), **options) for p in prompts]
        try:
            for answer in answers:  # a wrong option has been found before any work
                answer.begin()
            unfinished = deque(answers)
            while unfinished:
                if unfinished[0].finished:
                    unfinished.popleft()
                else:
                    self.batcher.step()
        finally:
            for answer in answers:
                answer.close()
        if len(answers) == 1:
            answers[0].raise_error()
        return answers

    def answer(self, prompt_ids: Sequence[int], **options) -> Answer:
        """An Answer to the prompt: iterate over it to get its text as it is made.

        max_tokens  most tokens to generate, the stop token included; None: what the context holds
        stop        strings that end the answer; they and what follows are not part of its text
        seed        None draws a fresh one; the same seed, prompt and options give the same answer
        n           how many answers, each with its own randomness: .samples has all, the Answer's text is the first's
        logprobs    also the log-probabilities of so many most likely tokens
        min_tokens, ignore_eos, priority, salt    as in batching.Request
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias
                    defaults from the model's generation_config, else greedy
        Raises ValueError for an empty or too long prompt, ids outside the vocabulary and unknown or senseless options.
        """
        unknown = set(options) - set(SAMPLING) - set(REQUEST)
        if unknown:
            raise ValueError(f"unknown option {min(unknown)!r}; known are {', '.join((*SAMPLING, *REQUEST))}")
        options = {k: v for k, v in options.items() if v is not None}
        if isinstance(options.get("stop", ""), str):
            options["stop"] = [options["stop"]] if "stop" in options else []
        elif not isinstance(options["stop"], (list, tuple)):
            raise ValueError(f"stop is {options['stop']!r:.80}, but must be a text or a list of texts")
        chosen = {**self.defaults, **{k: options.pop(k) for k in SAMPLING if k in options}}
        request = Request(prompt_ids, sampling=chosen, **options)
        self.batcher.check(request)
        return Answer(self, request)


class Answer:
    """One answer (or n of them). Iterate over it once for the pieces of its text; the rest fills up meanwhile.

    Set `abort` at any time (from a signal handler, say) to end it before the next token.
    """

    def __init__(self, llm: LLM, request: Request):
        self.llm, self.request, self.abort = llm, request, False
        self.ttft_s: float | None = None  # time to first token, in seconds
        self.decode_s = 0.0  # spent on the tokens after the first
        self._pieces, self._begun, self._idle_s, self._heard = deque(), None, 0.0, 0.0
        self._batcher: Batcher | None = None
        request.on_event = self._hear

    def __repr__(self) -> str:
        return f"Answer({self.text!r:.60}, {len(self.ids)} tokens, {self.finish_reason})"

    @property
    def samples(self) -> list[batching.Sample]:
        return self.request.samples

    prompt_ids = property(lambda self: self.request.prompt_ids)
    ids = property(lambda self: self._first("ids", []))  # generated, the stop token included
    text = property(lambda self: self._first("text", ""))
    finish_reason = property(lambda self: self._first("finish_reason", None))  # stop, length, abort or error
    error = property(lambda self: self._first("error", None))
    cached = property(lambda self: self._first("cached", 0))  # prompt tokens that were in the KV cache already
    logprobs = property(lambda self: self._first("logprobs", []))  # {"id", "logprob", "top"} a token, if asked for

    def _first(self, name: str, default):
        return getattr(self.samples[0], name) if self.samples else default

    @property
    def tokens_per_s(self) -> float | None:
        """Decoding speed: tokens after the first, by the time they took."""
        return (len(self.ids) - 1) / self.decode_s if len(self.ids) > 1 and self.decode_s > 0 else None

    def _hear(self, event: batching.Event) -> None:
        if event.sample == 0 and event.token is not None:
            self._heard = time.perf_counter()
            seconds = self._heard - self._begun - self._idle_s
            if self.ttft_s is None:
                self.ttft_s = seconds
            self.decode_s = seconds - self.ttft_s
        if event.sample == 0 and event.text:
            self._pieces.append(event.text)

    def begin(self) -> None:
        """Queue it: whoever steps the batcher now computes it too."""
        if self._begun is not None:
            raise ValueError("an answer can be iterated over once; its text and ids are in .text and .ids")
        self._begun, self._batcher = time.perf_counter(), self.llm.batcher
        self._batcher.add(self.request)

    def close(self) -> None:
        """End it, if it has not ended."""
        if self._batcher is not None and self._batcher.live.get(self.request.id) is self.request:
            self._batcher.abort(self.request.id)

    def raise_error(self) -> None:
        if self.error is not None:
            raise RuntimeError(self.error)

    @property
    def finished(self) -> bool:
        return bool(self.samples) and all(s.finish_reason is not None for s in self.samples)

    def __iter__(self) -> Iterator[str]:
        self.begin()
        try:
            while self._pieces or not self.finished:
                if self.abort:
                    self.close()
                elif not self._pieces:
                    self._batcher.step()
                while self._pieces:
                    begin = time.perf_counter()
                    yield self._pieces.popleft()
                    # The time that the reader takes is not counted, unless he had the batcher step meanwhile.
                    self._idle_s += time.perf_counter() - max(begin, self._heard)
        finally:
            self.close()
        self.raise_error()


# ------------------------------------------------------------------ the command line

EXAMPLES = """examples:
  python generate.py "Why is the sky blue?"
  python generate.py                                           a conversation; Ctrl-D ends it
  python generate.py --raw --max-tokens 40 "Once upon a time"
  python generate.py --n 4 --temperature 0.8 "Name a cat."      four answers
  cat notes.txt | python generate.py --system "Summarise in one sentence." --temperature 0.7 --seed 1 --json
  python generate.py --prompts questions.txt --out answers.jsonl           many, 16 at a time; --resume after a kill
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # one line, not a page of usage
        self.exit(2, f"error: {' '.join(message.split())} (--help lists the flags)\n")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(description="Text from a language model.", epilog=EXAMPLES, allow_abbrev=False,
                     formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=110))
    add = parser.add_argument
    add("prompt", nargs="?", help="the question; without one, what is piped in, else a conversation")
    add("--model", metavar="PATH", help="a .gguf file, a Hugging Face folder (also GPTQ, AWQ, compressed-tensors), a "
                                        ".safetensors file with its config.json, or org/model (default: "
                                        "SmolLM2-135M-Instruct, fetched once, 98 MB)")
    add("--raw", action="store_true", help="continue the prompt as it is, without the chat template; "
        "special tokens in it are plain text")
    add("--system", metavar="TEXT", help="system message (default: the template's own)")
    add("--max-tokens", type=int, default=512, metavar="N", help="most tokens to generate (default: 512)")
    own = "(default: the model's generation_config, else {})"
    add("--temperature", type=float, metavar="T", help=f"0 takes the likeliest token {own.format(0)}")
    add("--top-k", type=int, metavar="K", help=f"only the K likeliest tokens; 0 is off {own.format('off')}")
    add("--top-p", type=float, metavar="P", help=f"only the likeliest tokens up to mass P {own.format(1)}")
    add("--min-p", type=float, metavar="P", help=f"only tokens of at least P times the likeliest {own.format(0)}")
    add("--repetition-penalty", type=float, metavar="R", help=f"divides the logits of seen tokens {own.format(1)}")
    add("--presence-penalty", type=float, metavar="A", help="subtracted once from generated tokens (default: 0)")
    add("--frequency-penalty", type=float, metavar="A", help="subtracted for each generated token (default: 0)")
    add("--seed", type=int, metavar="N", help="the same seed gives the same answer (default: a fresh one)")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends the answer; may be given several times")
    add("--logprobs", type=int, metavar="N", help="with --json, log-probabilities of the N likeliest tokens")
    add("--n", type=int, default=1, metavar="N", help="so many answers, each with its own randomness (default: 1)")
    add("--min-tokens", type=int, metavar="N", help="no end before so many tokens (default: 0)")
    add("--ignore-eos", action="store_true", help="go on after the model's end-of-text token")
    add("--prompts", metavar="FILE", help="answer a file: a prompt a line, or JSONL with a prompt, messages or "
        'prompt_ids and parameters of its own a line, and "at", the second of its arrival; - is standard input')
    add("--out", metavar="FILE", help="with --prompts, where the answers go, JSONL (default: standard output)")
    add("--resume", action="store_true", help="with --prompts and --out, answer only what is missing in that file")
    add("--max-batch", type=int, default=16, metavar="N", help="most answers at once (default: 16)")
    add("--token-budget", type=int, default=CHUNK, metavar="N", help=f"most tokens of one pass (default: {CHUNK})")
    add("--no-graphs", action="store_true", help="on CUDA, launch kernels one by one")
    add("--draft", metavar="HOW", help="speculative decoding, which changes no answer: ngram (what followed the same "
        "words before), or the path of a smaller model of the same vocabulary")
    add("--k", default="auto", metavar="N", help="with --draft, so many drafts a pass (default: auto, as many as pay)")
    add("--compare", action="store_true", help="with --draft, answer without it too, and tell how much faster it is")
    add("--context", type=int, metavar="N", help="most tokens of a conversation (default: the model's own, or what the "
                                                 "KV cache has room for)")
    add("--kv-memory", type=float, default=KV_GIB, metavar="GIB",
        help=f"most memory of the KV cache (default: {KV_GIB:g})")
    add("--kv-dtype", default="auto", choices=["auto", "int8", "fp8"], help="of the KV cache; int8 and fp8 halve it "
        "(default: auto, that of the activations)")
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="expand all weights to this type (default: auto, "
        "quantized weights as they are, the rest in bfloat16 where the machine has it, else float32)")
    add("--repack", choices=["int8", "int4"], help="round quantized weights that no kernel takes as they are (Q6_K, "
        "fp8) once more, to run packed (default: expand them)")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: auto)")
    add("--threads", type=int, metavar="N", help=f"CPU threads (default: {torch.get_num_threads()})")
    add("--json", action="store_true", help="print one JSON object instead of streaming text")
    add("--quiet", action="store_true", help="no statistics on standard error")
    add("--debug", action="store_true", help="a traceback with errors")
    args = parser.parse_args(argv)
    if args.threads is not None and args.threads < 1:
        parser.error(f"--threads is {args.threads}, but must be 1 or more")
    if args.logprobs is not None and not args.json and args.prompts is None:
        parser.error("--logprobs needs --json or --prompts")
    if args.system is not None and args.raw:
        parser.error("--system needs the chat template, which --raw leaves out")
    if args.prompts is not None and (args.prompt is not None or args.json):
        parser.error("--prompts takes its prompts from a file and always writes JSON; leave out the prompt and --json")
    if args.prompts is None and (args.out is not None or args.resume):
        parser.error("--out and --resume go with --prompts")
    if args.draft is None and (args.k != "auto" or args.compare):
        parser.error("--k and --compare go with --draft")
    if args.compare and (args.prompts is not None or args.json):
        parser.error("--compare goes with a single prompt, and without --json")
    args.k = int(args.k) if args.k.isdecimal() else args.k
    for name in ("max_batch", "token_budget"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, but must be 1 or more")
    return args


def _options(args: argparse.Namespace) -> dict:
    names = ("max_tokens", "min_tokens", "ignore_eos", "stop", "seed", "n", "logprobs", "temperature", "top_k", "top_p",
             "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    return {name: getattr(args, name) for name in names}


def _say(text: str) -> None:
    if sys.stderr is not None:  # closed
        print(text, file=sys.stderr, flush=True)


@contextmanager
def _ctrl_c_aborts(answer: Answer):
    """Ctrl-C ends the answer after its current token; a second one ends the program."""
    def handler(signum, frame):
        if answer.abort:
            raise KeyboardInterrupt
        answer.abort = True

    old = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)


def _stream(answer: Answer) -> None:
    several = answer.request.n > 1  # told one behind the other when they are done
    with _ctrl_c_aborts(answer):
        for piece in answer:
            if not several:
                sys.stdout.write(piece)
                sys.stdout.flush()
    if several:
        sys.stdout.write("\n\n".join(f"[{s.index + 1}] {s.text}" for s in answer.samples))
    sys.stdout.write("\n")
    sys.stdout.flush()


def _statistics(llm: LLM, answer: Answer) -> str:
    cached = f" ({answer.cached} cached)" if answer.cached else ""
    parts = [llm.name, llm.weights, f"prompt {len(answer.prompt_ids)} tokens{cached}"]
    if answer.ttft_s is not None:
        parts.append(f"first token after {answer.ttft_s:.2f} s")
    speed = f" at {answer.tokens_per_s:.1f} tokens/s" if answer.tokens_per_s else ""
    several = f" and {len(answer.samples) - 1} more answers" if len(answer.samples) > 1 else ""
    return " | ".join([*parts, f"{len(answer.ids)} tokens{speed}{several}", *_drafting(llm), f"{answer.finish_reason}"])


def _drafting(llm: LLM) -> list[str]:
    s = llm.batcher.stats
    if llm.drafter is None or not s.generated:
        return []
    rate = f", {s.accepted / s.drafted:.0%} accepted" if s.drafted else ""
    return [f"{s.drafted} drafts{rate}, {s.generated / s.turns:.2f} tokens a pass"]


def _compare(llm: LLM, prompt_ids: Sequence[int], args: argparse.Namespace) -> str:
    """The same answer with drafts and without, in turn, each on a cold prefix and with everything still to be learned.
    Three rounds, and one before that is not counted."""
    drafting, plain, alike, speeds = llm.batcher, llm.new_batcher(drafter=None), True, {True: [], False: []}
    options = {**_options(args), "seed": 0 if args.seed is None else args.seed, "n": 1}
    try:
        for round_ in range(4):
            said = {}
            for on in (True, False):
                llm.batcher = drafting if on else plain
                if on and args.k == "auto":
                    drafting.drafts = llm.new_drafts()
                answer = llm.answer(prompt_ids, salt=f"compare {round_} {on}", **options)
                list(answer)
                said[on] = answer.ids
                if round_:
                    speeds[on].append(answer.tokens_per_s or 0.0)
            alike = alike and said[True] == said[False]
    finally:
        llm.batcher = drafting
    fast, slow = (statistics.median(speeds[on]) for on in (True, False))
    if not slow:
        return "too short an answer to compare speeds"
    same = "the same tokens" if alike else "not the same tokens (drawn by another rule, or two of them alike)"
    return f"with drafts {fast:.1f} tokens/s, without {slow:.1f}: {fast / slow:.2f} times as fast; {same}"


def _note_idle_flags(llm: LLM, args: argparse.Namespace) -> None:
    idle = [f for f in ("top_k", "top_p", "min_p", "seed") if getattr(args, f) is not None]
    idle += ["n"] if args.n > 1 else []
    if idle and args.temperature is None and llm.defaults.get("temperature") == 0 and not args.quiet:
        _say(f"note: --{idle[0].replace('_', '-')} changes nothing at temperature 0; add --temperature")


def _sample(s: batching.Sample) -> dict:
    """What JSON tells of a sample."""
    found = {"ids": s.ids, "text": s.text, "finish_reason": s.finish_reason}
    if s.request.logprobs is not None:
        found["logprobs"] = s.logprobs
    return found if s.error is None else {**found, "error": s.error}


def _one(llm: LLM, prompt: str, args: argparse.Namespace) -> int:
    answer = llm.answer(llm.encode(prompt, raw=args.raw, system=args.system), **_options(args))
    if not args.quiet:
        _say(llm.about)
    _note_idle_flags(llm, args)
    if args.json:
        with _ctrl_c_aborts(answer):
            for _ in answer:
                pass
        first, *more = [_sample(s) for s in answer.samples]
        result = {"prompt_ids": answer.prompt_ids, **{k: v for k, v in first.items() if k != "logprobs"},
                  "ttft_s": answer.ttft_s, "tokens_per_s": answer.tokens_per_s}
        if args.logprobs is not None:
            result["logprobs"] = first["logprobs"]
        if more:
            result["samples"] = [first, *more]
        unicode = (sys.stdout.encoding or "").lower() in ("utf-8", "utf8")
        print(json.dumps(result, ensure_ascii=not unicode), flush=True)
    else:
        _stream(answer)
    if not args.quiet:
        _say(_statistics(llm, answer))
    if args.compare and answer.finish_reason != "abort":
        _say(_compare(llm, answer.prompt_ids, args))
    return 130 if answer.finish_reason == "abort" else 0


def _fit(llm: LLM, messages: Sequence[dict], room: int) -> tuple[list[int], list[dict]]:
    """Ids of the conversation and what is left of it: the oldest turns go until `room` tokens are free to answer in."""
    system, turns = [m for m in messages[:1] if m["role"] == "system"], list(messages)
    turns = turns[len(system):]
    while True:
        ids = llm.encode_chat([*system, *turns])
        if len(ids) + room <= llm.context or len(turns) == 1:
            break
        del turns[: 2 if turns[1]["role"] == "assistant" else 1]
    if len(ids) > llm.context:
        raise ValueError(f"this message{' and the system message make' if system else ' alone makes'} {len(ids)} "
                         f"tokens, but the context is {llm.context}; shorten it")
    dropped = len(messages) - len(system) - len(turns)
    if dropped:
        _say(f"(no longer within the context of {llm.context} tokens, dropped: the oldest {dropped} message"
             f"{'s' if dropped > 1 else ''})")
    return ids, [*system, *turns]


def _chat(llm: LLM, args: argparse.Namespace) -> int:
    """A conversation. Its history is a prefix that the KV cache knows: of each turn only the new part is computed."""
    with suppress(ImportError):
        import readline  # noqa: F401  line editing in input()
    needs = next((f for f, on in (("--raw", args.raw), ("--json", args.json), ("--n", args.n > 1)) if on), None)
    if needs:
        raise ValueError(f"give a prompt with {needs}; a conversation goes without")
    messages = [{"role": "system", "content": args.system}] if args.system is not None else []
    options, turn = _options(args), 0
    llm.answer(llm.encode_chat([*messages, {"role": "user", "content": ""}]), **options)  # mistakes show now, not later
    _note_idle_flags(llm, args)
    if not args.quiet:
        _say(f"{llm.about}\ncontext {llm.context} tokens; Ctrl-C ends an answer, Ctrl-D the conversation")
    while True:
        try:
            text = input("> ")
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if not text.strip():
            continue
        try:
            asked = [*messages, {"role": "user", "content": text}]
            ids, kept = _fit(llm, asked, min(args.max_tokens, llm.context // 4))
            answer = llm.answer(ids, **options)
            _stream(answer)
        except (ValueError, ArithmeticError, RuntimeError) as error:  # the conversation stays as it was
            if args.debug:
                raise
            _say(f"error: {error}")
            continue
        if answer.text:  # an answer that was ended before it began leaves no trace
            messages = [*kept, {"role": "assistant", "content": answer.text}]
        if args.seed is not None:  # each turn its own randomness, all of it from one seed
            turn += 1
            options["seed"] = args.seed + turn
        if not args.quiet:
            _say(_statistics(llm, answer))


def _load(args: argparse.Namespace) -> LLM:
    return load(args.model, dtype=args.dtype, device=args.device, context=args.context, repack=args.repack,
                kv_dtype=args.kv_dtype, kv_memory=args.kv_memory, max_batch=args.max_batch,
                token_budget=args.token_budget, graphs=not args.no_graphs, draft=args.draft, k=args.k)


class _Job:
    """A file of prompts to a file of answers, as they finish. `at` must ascend, but for AHEAD lines."""

    def __init__(self, llm: LLM, args: argparse.Namespace, lines: Iterator, results: prompt_files.Results, bar):
        self.llm, self.lines, self.results, self.bar = llm, lines, results, bar
        self.raw, self.system, self.quiet = args.raw, args.system, args.quiet
        self.options = {k: v for k, v in _options(args).items() if v is not None and v != []}
        llm.answer([0], **self.options)  # a flag that no line could do with is refused now
        # An answer is known by what it was asked of: the model, by its last norm, and how it runs.
        norm = llm.model.model["norm"].weight.detach().double().cpu().numpy().tobytes()
        self.model = f"{llm.name} {llm.weights} {sorted(llm.defaults.items())} {hashlib.sha256(norm).hexdigest()[:16]}"
        self.read: queue.Queue = queue.Queue(AHEAD)
        self.waiting: list[tuple[float, int, prompt_files.Line]] = []  # a heap of those read, by arrival
        self.ended: deque[tuple] = deque()  # answers to be written
        self.times: list[traffic.Timeline] = []  # of every sample
        self.done = self.broken = 0
        self.begin = time.perf_counter()

    def run(self) -> None:
        threading.Thread(target=self._feed, daemon=True).start()  # standard input may keep us waiting
        batcher, more = self.llm.batcher, True
        while more or self.waiting or batcher.live:
            idle = not (self.waiting or batcher.live)
            while more and len(self.waiting) < AHEAD and (idle or not self.read.empty()):
                line, idle = self.read.get(), False
                if isinstance(line, Exception):
                    raise line
                more = line is not None
                if more:
                    self._take(line)
            now = time.perf_counter() - self.begin
            while self.waiting and self.waiting[0][0] <= now and len(batcher.live) < 2 * batcher.max_batch:
                self._submit(heappop(self.waiting)[2])
            if batcher.live:
                batcher.step()
            elif self.waiting:
                time.sleep(min(0.02, max(0.0, self.waiting[0][0] - now)))
            while self.ended:  # subtle: here, as the batcher takes what a listener raises for the request's own fault
                self._write(*self.ended.popleft())

    def _feed(self) -> None:
        try:
            for line in self.lines:
                self.read.put(line)
            self.read.put(None)
        except Exception as error:
            self.read.put(error)

    def _take(self, line: prompt_files.Line) -> None:
        if line.error is None:  # what is asked of all is asked of this one, and part of what its answer is known by
            own = {"raw": self.raw, "system": None if line.options.get("raw") else self.system}
            own = {k: v for k, v in own.items() if v} if isinstance(line.prompt, str) else {}
            line = line._replace(options={**self.options, **own, "model": self.model, **line.options})
        if self.results.done(line):
            self.done += 1
            self.broken += line.error is not None
        else:
            heappush(self.waiting, (line.at, line.number, line))

    def _submit(self, line: prompt_files.Line) -> None:
        if line.error is not None:
            return self._finish(prompt_files.head(line), line.error)
        options = {k: v for k, v in line.options.items() if k not in ("raw", "system", "model")}
        try:
            if isinstance(line.prompt, str):
                ids = self.llm.encode(line.prompt, raw=line.options.get("raw", False),
                                      system=line.options.get("system"))
            elif isinstance(line.prompt[0], dict):
                ids = self.llm.encode_chat(line.prompt)
            else:
                ids = line.prompt
            answer = self.llm.answer(ids, **options)
            n = answer.request.n
            times = [traffic.Timeline(line.at, array("d")) for _ in range(n)]
            answer.request.on_event = partial(self._hear, line, answer, times, set(range(n)))
            answer.begin()
        except ValueError as error:
            why = f"line {line.number}: {' '.join(str(error).split())}"
            self._finish({**prompt_files.head(line), "error": why, "finish_reason": "error"}, why)

    def _hear(self, line: prompt_files.Line, answer: Answer, times: list[traffic.Timeline], running: set[int],
              event: batching.Event) -> None:
        if event.token is not None:
            times[event.sample].times.append(time.perf_counter() - self.begin)
        if event.finish_reason is not None:
            running.discard(event.sample)
            if not running:
                self.ended.append((line, answer, times))

    def _write(self, line: prompt_files.Line, answer: Answer, times: list[traffic.Timeline]) -> None:
        self.times += times
        record = {**prompt_files.head(line), "prompt_tokens": len(answer.prompt_ids), "cached_tokens": answer.cached,
                  "samples": [_sample(s) for s in answer.samples],
                  **{f"{name}_s": getattr(times[0], name) for name in ("ttft", "tpot", "e2e")}}
        errors = [s.error for s in answer.samples if s.error]
        self._finish(record, f"line {line.number}: {errors[0]}" if errors else None)

    def _finish(self, record: dict, error: str | None) -> None:
        try:
            self.results.write(record)
        except BrokenPipeError:
            raise
        except OSError as failure:
            raise ValueError(f"{self.results.name} cannot be written: {failure.strerror}; make room, then go on with "
                             "--resume") from None
        self.bar.update()
        if error is not None:
            self.broken += 1
            if not self.quiet and sys.stderr is not None:
                self.bar.write(f"error: {error}", file=sys.stderr)

    def about(self) -> str:
        """The summary, for people."""
        s, wall = self.llm.batcher.stats, time.perf_counter() - self.begin
        hits = f", {s.cached / s.prompt:.0%} of them cached" if s.prompt else ""
        before = f"; {self.done} were answered before" if self.done else ""
        parts = [f"{s.prompt:,} prompt tokens{hits}", f"{s.preempted:,} preemptions", *_drafting(self.llm),
                 f"{self.broken} errors{before}"]
        return traffic.describe(traffic.summary(self.times, wall)) + "\n" + "; ".join(parts)


def _many(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    if args.out in (None, "-") and sys.stdout is None:
        raise ValueError("standard output is closed; name a file for the answers with --out")
    lines = prompt_files.read_prompts(args.prompts)
    with prompt_files.Results(args.out, args.resume) as results:
        llm = _load(args)
        if not args.quiet:
            _say(llm.about)
        with tqdm(unit=" prompts", file=sys.stderr, disable=args.quiet or sys.stderr is None or None) as bar:
            job = _Job(llm, args, lines, results, bar)
            try:
                job.run()
            finally:
                bar.close()
                if not args.quiet:
                    _say(job.about())
    return 1 if job.broken else 0


def main(argv: Sequence[str] | None = None) -> int:
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    args = _arguments(argv)
    warnings.showwarning = lambda message, *_, **__: _say(f"note: {message}")
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character gets a question mark
    try:
        if args.threads:
            torch.set_num_threads(args.threads)
        prompt = args.prompt
        if args.prompts is not None:
            return _many(args)
        if sys.stdout is None or (prompt is None and sys.stdin is None):
            raise ValueError("standard output, or standard input without a prompt, is closed")
        if prompt is None and not sys.stdin.isatty():
            prompt = sys.stdin.read() if args.raw else sys.stdin.read().strip("\n")
        if prompt is not None and not prompt.strip() and not args.raw:
            raise ValueError("the prompt is empty")
        llm = _load(args)
        return _chat(llm, args) if prompt is None else _one(llm, prompt, args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader went away (| head): not our error, and nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if args.debug:
            raise
        _say("error: " + (" ".join(str(error).split()) or type(error).__name__))
        return 2


if __name__ == "__main__":
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done; a Ctrl-C now would only print where we are
    sys.exit(code)
