"""generate.py - weights to tokens: the composition root and the command line.

    python generate.py "Why is the sky blue?"

Everything else in this folder is one concept in one file, and no file knows another. Here they meet: checkpoint.py or
gguf.py brings weights, layouts.py reads those that others have quantized, packed.py computes on them as they are,
vocab.py reads vocabularies, tokenizer.py makes ids of text and chat.py of a conversation, model.py computes, kvcache.py
remembers, sampling.py chooses.
From Python it is three lines:

    import generate
    llm = generate.load()                                  # or a path: a .gguf file, a Hugging Face folder
    print(llm.generate(["Why is the sky blue?"], temperature=0)[0].text)

One loop serves them all (`Answer._loop`): extend the sequence by what the cache does not hold yet, draw a token from
the last row's distribution, repeat. A prompt is computed in chunks, so that memory does not grow with its square.
"""
from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from typing import NamedTuple

if __name__ == "__main__":  # Ctrl-C while torch is imported just ends the program; `main` then takes over
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch

import attention
import checkpoint
import flash
import gguf
import kvcache
import layouts
import packed
import sampling
import vocab
from chat import ChatTemplate
from kvcache import PagedKVCache
from model import Config, Llama
from stream import StreamDecoder
from tokenizer import Tokenizer

CHUNK = 512  # prompt tokens computed in one pass
KV_GIB = 2.0  # the KV cache takes at most so much by default; the context shrinks to what fits
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "logit_bias")

# ------------------------------------------------------------------ loading


def load(path: str | None = None, *, dtype: str = "auto", device: str = "auto", context: int | None = None,
         repack: str | None = None, kv_dtype: str = "auto", kv_memory: float = KV_GIB) -> LLM:
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
    kv_memory   GiB that the KV cache may take; what it has room for beyond one context keeps earlier prompts
    repack   int8 or int4: quantized weights without a kernel (Q6_K, fp8, ...) are rounded once more to run packed too
    """
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
    if kv_dtype not in ("auto", "int8", "fp8"):
        raise ValueError(f"kv_dtype {kv_dtype!r} is unknown; known are auto, int8, fp8")
    kv = dtype if kv_dtype == "auto" else kv_dtype
    if not 0 < kv_memory < 2**20:
        raise ValueError(f"a KV cache of {kv_memory} GiB cannot be; give a number above 0")
    blocks = kvcache.blocks_that_fit(config, kv, int(kv_memory * 2**30))
    context = _context(context, config, blocks * 16, kv_memory)
    kernel = flash.paged_attention if device.type == "cuda" and flash.triton else attention.paged_attention
    cache = PagedKVCache(config.n_layer, config.n_kv_head, config.head_dim, min(blocks, 2 * -(-context // 16)), 16,
                         max_seq_len=context, dtype=kv, device=device, window=config.sliding_window,
                         attention=kernel)
    return LLM(model, source.tokenizer, name, cache, {*ends, *source.tokenizer.eos_ids},
               _sampling_defaults(source.generation), f"{name}: {_about(source, weights, model)}")


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
    """A model, its tokenizer and its KV cache. `load` makes one."""

    def __init__(self, model: Llama, tokenizer: Tokenizer, name: str, cache: PagedKVCache, eos_ids: set[int],
                 defaults: dict, about: str = ""):
        weight = model.model["norm"].weight
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.cache, self.context = cache, cache.max_seq_len
        self.eos_ids, self.defaults, self.about = eos_ids, defaults, about
        self.device, self.dtype = weight.device, weight.dtype
        is_packed = any(isinstance(m, packed.QuantLinear) for m in model.modules())
        self.weights = "packed" if is_packed else str(weight.dtype).removeprefix("torch.")

    def encode(self, prompt: str, *, raw: bool = False, system: str | None = None) -> list[int]:
        """Ids of a prompt: through the chat template, or as it is if raw."""
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
        """The answers to one prompt or several, finished. For options see `answer`."""
        prompts = [prompts] if isinstance(prompts, str) else prompts
        encoded = [self.encode(p, raw=raw, system=system) for p in prompts]
        answers = [self.answer(ids, **options) for ids in encoded]  # a wrong option is found before any work
        for answer in answers:
            try:
                for _ in answer:
                    pass
            except FloatingPointError:  # one of several ends with finish_reason "error", the others go on
                if len(answers) == 1:
                    raise
        return answers

    def forget(self, seq: str) -> None:
        """Give back what a conversation kept in the KV cache."""
        self.cache.free(seq)

    def answer(self, prompt_ids: Sequence[int], *, seq: str | None = None, max_tokens: int | None = None,
               stop: Sequence[str] | None = None, seed: int | None = None, logprobs: int | None = None,
               **options) -> Answer:
        """An Answer to the prompt: iterate over it to get its text as it is made.

        seq         name of a conversation kept in the KV cache: what prompt_ids share with it is not computed again.
                    The cache has room for one context, so keep one at a time and `forget` it; None keeps nothing.
        max_tokens  most tokens to generate, the stop token included; None: what the context holds
        stop        strings that end the answer; they and what follows are not part of its text
        seed        None draws a fresh one; the same seed, prompt and options give the same answer
        logprobs    also the log-probabilities of so many most likely tokens
        options     temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty,
                    logit_bias; defaults from the model's generation_config, else greedy
        Raises ValueError for an empty or too long prompt, ids outside the vocabulary and unknown or senseless options.
        """
        V = self.model.config.vocab_size
        try:
            ids = [index(i) for i in prompt_ids]
            max_tokens, seed, logprobs = (x if x is None else index(x) for x in (max_tokens, seed, logprobs))
        except TypeError as error:
            raise ValueError(f"prompt ids, max_tokens, seed and logprobs are whole numbers: {error}") from None
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        bad = next((i for i in ids if not 0 <= i < V), None)
        if bad is not None:
            raise ValueError(f"token id {bad} is outside the model's vocabulary of {V}")
        if len(ids) > self.context:
            own = self.context == self.model.config.max_seq_len
            why = "the model's own" if own else "as --context or --kv-memory says"
            raise ValueError(f"the prompt has {len(ids)} tokens, but the context is {self.context}, {why}; "
                             "shorten it")
        if max_tokens is not None and max_tokens < 0:
            raise ValueError(f"max_tokens is {max_tokens}, but must be 0 or more")
        if logprobs is not None and not 0 <= logprobs <= V:
            raise ValueError(f"logprobs is {logprobs}, but must be 0 to {V}")
        unknown = set(options) - set(SAMPLING)
        if unknown:
            raise ValueError(f"unknown option {min(unknown)!r}; known are {', '.join(SAMPLING)}")
        options = {**self.defaults, **{k: v for k, v in options.items() if v is not None}}
        room = self.context + 1 - len(ids)  # the last token's own K/V is never needed
        limit = room if max_tokens is None else min(max_tokens, room)
        stop = [stop] if isinstance(stop, str) else list(stop or ())
        seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        return Answer(self, ids, seq, limit, StreamDecoder(self.tokenizer, stop, ids), seed, logprobs,
                      sampling.params([options], V))


@dataclass(eq=False)
class Answer:
    """One answer. Iterate over it once for the pieces of its text; the rest of the fields fill up meanwhile.

    Set `abort` at any time (from a signal handler, say) to end it before the next token.
    """

    llm: LLM = field(repr=False)
    prompt_ids: list[int] = field(repr=False)
    seq: str | None
    limit: int
    decoder: StreamDecoder = field(repr=False)
    seed: int
    n_logprobs: int | None
    params: sampling.Params = field(repr=False)
    ids: list[int] = field(default_factory=list)  # generated, the stop token included
    finish_reason: str | None = None  # stop, length, abort or error
    cached: int = 0  # prompt tokens that were in the KV cache already
    logprobs: list[dict] = field(default_factory=list)  # a dict {"id", "logprob", "top"} a token, if asked for
    abort: bool = False
    started: bool = False
    ttft_s: float | None = None  # time to first token, in seconds
    decode_s: float = 0.0  # spent on the tokens after the first

    @property
    def text(self) -> str:
        return self.decoder.text

    @property
    def tokens_per_s(self) -> float | None:
        """Decoding speed: tokens after the first, by the time they took."""
        return (len(self.ids) - 1) / self.decode_s if len(self.ids) > 1 and self.decode_s > 0 else None

    def __iter__(self) -> Iterator[str]:
        if self.started:
            raise ValueError("an answer can be iterated over once; its text and ids are in .text and .ids")
        self.started = True
        cache, seq = self.llm.cache, self.seq if self.seq is not None else self
        try:
            for piece in self._loop(cache, seq):
                if piece:
                    yield piece
            rest = self.decoder.finish()
            if rest:
                yield rest
        except GeneratorExit:  # whoever iterated has stopped
            self.finish_reason = self.finish_reason or "abort"
            raise
        except BaseException:
            self.finish_reason = "error"
            cache.free(seq)  # legal in any state; a conversation is computed anew next time
            raise
        finally:
            if self.seq is None:
                cache.free(seq)

    def _loop(self, cache: PagedKVCache, seq) -> Iterator[str]:
        begin = time.perf_counter()  # of this token; the time that the reader takes with a piece is not counted
        if seq in cache:  # a conversation: what its tokens and the prompt's have in common is kept
            held = cache.tokens(seq)
            self.cached = next((i for i, (a, b) in enumerate(zip(held, self.prompt_ids[:-1])) if a != b),
                               min(len(held), len(self.prompt_ids) - 1))  # at least one token is left to compute
            cache.trim(seq, self.cached)
        else:  # blocks that an earlier prompt with the same beginning has left
            self.cached = cache.add(seq, self.prompt_ids)
        new = self.prompt_ids[self.cached:]
        while len(self.ids) < self.limit and not self.abort:
            logits = self._extend(cache, seq, new)
            if logits is None:
                break
            token = self._draw(logits)
            self.ids.append(token)
            seconds, new = time.perf_counter() - begin, [token]
            if self.ttft_s is None:
                self.ttft_s = seconds
            else:
                self.decode_s += seconds
            if token in self.llm.eos_ids or token in self.decoder.stop_ids:
                self.finish_reason = "stop"
                return
            yield self.decoder.push(token)
            begin = time.perf_counter()
            if self.decoder.stopped:
                self.finish_reason = "stop"
                return
        self.finish_reason = "abort" if self.abort else "length"

    def _extend(self, cache: PagedKVCache, seq, new: list[int]) -> torch.Tensor | None:
        """Compute K/V of the new tokens, chunk by chunk -> logits (1, V) after the last; None if aborted between."""
        for i in range(0, len(new), CHUNK):
            if self.abort:
                return None
            step = cache.extend({seq: new[i: i + CHUNK]})
            try:
                with torch.inference_mode():
                    rows = step.last() if i + CHUNK >= len(new) else step.last({})
                    logits = self.llm.model(step.tokens, step.positions, step.attend, rows)  # (1, V) or (0, V)
            except BaseException:
                cache.rollback(step)
                raise
            cache.commit(step)
        return logits

    def _draw(self, logits: torch.Tensor) -> int:
        p, prompt, output = self.params, None, None
        if p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0:
            prompt, output = torch.tensor([self.prompt_ids]), torch.tensor([self.ids], dtype=torch.int64)
        with torch.inference_mode():
            probs = sampling.warp(logits, p, prompt, output)  # (1, V)
            u = sampling.uniforms(self.seed, 0, len(self.ids))
            token = int(sampling.draw(probs, u))
            if token < 0:
                raise FloatingPointError(
                    f"the model's logits after {len(self.prompt_ids)} + {len(self.ids)} tokens are not finite: "
                    "damaged weights, or a dtype too narrow for this model (try float32)")
            if self.n_logprobs is not None:
                chosen, top_ids, top = sampling.logprobs(logits, torch.tensor([token], device=logits.device),
                                                         self.n_logprobs)
                self.logprobs.append({"id": token, "logprob": chosen.item(),
                                      "top": [[i, x] for i, x in zip(top_ids[0].tolist(), top[0].tolist())]})
        return token


# ------------------------------------------------------------------ the command line

EXAMPLES = """examples:
  python generate.py "Why is the sky blue?"
  python generate.py                                           a conversation; Ctrl-D ends it
  python generate.py --raw --max-tokens 40 "Once upon a time"
  cat notes.txt | python generate.py --system "Summarise in one sentence." --temperature 0.7 --seed 1 --json
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
    if args.logprobs is not None and not args.json:
        parser.error("--logprobs needs --json")
    if args.system is not None and args.raw:
        parser.error("--system needs the chat template, which --raw leaves out")
    return args


def _options(args: argparse.Namespace) -> dict:
    names = ("max_tokens", "stop", "seed", "logprobs", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
             "presence_penalty", "frequency_penalty")
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
    with _ctrl_c_aborts(answer):
        for piece in answer:
            sys.stdout.write(piece)
            sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


def _statistics(llm: LLM, answer: Answer) -> str:
    cached = f" ({answer.cached} cached)" if answer.cached else ""
    parts = [llm.name, llm.weights, f"prompt {len(answer.prompt_ids)} tokens{cached}"]
    if answer.ttft_s is not None:
        parts.append(f"first token after {answer.ttft_s:.2f} s")
    speed = f" at {answer.tokens_per_s:.1f} tokens/s" if answer.tokens_per_s else ""
    return " | ".join([*parts, f"{len(answer.ids)} tokens{speed}", f"{answer.finish_reason}"])


def _note_idle_flags(llm: LLM, args: argparse.Namespace) -> None:
    idle = [f for f in ("top_k", "top_p", "min_p", "seed") if getattr(args, f) is not None]
    if idle and args.temperature is None and llm.defaults.get("temperature") == 0 and not args.quiet:
        _say(f"note: --{idle[0].replace('_', '-')} changes nothing at temperature 0; add --temperature")


def _one(llm: LLM, prompt: str, args: argparse.Namespace) -> int:
    answer = llm.answer(llm.encode(prompt, raw=args.raw, system=args.system), **_options(args))
    if not args.quiet:
        _say(llm.about)
    _note_idle_flags(llm, args)
    if args.json:
        with _ctrl_c_aborts(answer):
            for _ in answer:
                pass
        result = {"prompt_ids": answer.prompt_ids, "ids": answer.ids, "text": answer.text,
                  "finish_reason": answer.finish_reason, "ttft_s": answer.ttft_s, "tokens_per_s": answer.tokens_per_s}
        if args.logprobs is not None:
            result["logprobs"] = answer.logprobs
        unicode = (sys.stdout.encoding or "").lower() in ("utf-8", "utf8")
        print(json.dumps(result, ensure_ascii=not unicode), flush=True)
    else:
        _stream(answer)
    if not args.quiet:
        _say(_statistics(llm, answer))
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
    """A conversation. Its history stays in the KV cache: of each turn only the new part is computed."""
    with suppress(ImportError):
        import readline  # noqa: F401  line editing in input()
    if args.raw or args.json:
        raise ValueError(f"give a prompt with {'--raw' if args.raw else '--json'}; a conversation goes without")
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
            answer = llm.answer(ids, seq="chat", **options)
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
        if sys.stdout is None or (prompt is None and sys.stdin is None):
            raise ValueError("standard output, or standard input without a prompt, is closed")
        if prompt is None and not sys.stdin.isatty():
            prompt = sys.stdin.read() if args.raw else sys.stdin.read().strip("\n")
        if prompt is not None and not prompt.strip() and not args.raw:
            raise ValueError("the prompt is empty")
        llm = load(args.model, dtype=args.dtype, device=args.device, context=args.context,
                   repack=args.repack, kv_dtype=args.kv_dtype, kv_memory=args.kv_memory)
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
    sys.exit(main())
