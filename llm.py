"""llm.py - weights to tokens from Python: a model of any kind on disk, ready to answer.

    import llm
    model = llm.load()                                     # or a path: a .gguf file, a Hugging Face folder
    print(model.generate(["Why is the sky blue?"], temperature=0)[0].text)

Everything else in this folder is one concept in one file, and no file knows another. Here they meet: loading.py brings
a model from disk, ready to compute, with its KV cache; tokenizer.py makes ids of text and chat.py of a conversation,
sampling.py chooses, batching.py lets many requests share each pass, speculative.py makes several tokens of one,
grammar.py keeps an answer to a form, stream.py gives text as it comes, graphs.py replays passes on a GPU, compiled.py
compiles them for a CPU, parallel.py shares them out. There is one loop, the batcher's: one prompt, a list and n answers
to each go through it; only beams.py, where nothing is drawn, has its own, over the same cache. `generate.py` is the
command line on top.
"""
from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch

import batching
import checkpoint
import compiled
import grammar
import graphs as cuda_graphs
import loading
import packed
import ranks
import sampling
import speculative
from batching import Batcher, Request, Sample
from beams import Hypothesis, beam_search, most_blocks
from chat import ChatTemplate
from kvcache import PagedKVCache
from model import Llama
from stream import StreamDecoder
from tokenizer import Tokenizer

CHUNK = 512  # most tokens of one pass
BESIDE = 12  # on a CPU, most prompt tokens of a pass in which somebody is answered: he waits two to three times as long
CUT = 256  # tokens of a chunk if deterministic: prefixes are found in multiples of it
CATCH_UP = 64  # tokens of a pass of the draft model over a text that it has not seen
KV_GIB = 2.0  # the KV cache takes at most so much by default; the context shrinks to what fits
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "logit_bias")
REQUEST = ("max_tokens", "min_tokens", "stop", "ignore_eos", "seed", "n", "logprobs", "priority", "salt")
FORM = ("json_schema", "regex")
BEAMS = ("beams", "length_penalty", "early_stopping")
DRAWING = ("temperature", "top_k", "top_p", "min_p")  # recommended for drawing: a search has them only if asked for

# ------------------------------------------------------------------ loading


def load(path: str | None = None, *, dtype: str = "auto", device: str = "auto", context: int | None = None,
         repack: str | None = None, quantize: str | None = None, kv_dtype: str = "auto", kv_memory: float = KV_GIB,
         max_batch: int = 16, token_budget: int = CHUNK, graphs: bool = True, compile: int = 0,
         draft: str | None = None, k: int | str = "auto", deterministic: bool = False,
         group: ranks.Group | None = None) -> LLM:
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
    compile  on a CPU, decode steps of up to so many samples run as one compiled function: 1.2 to 1.6 times as fast,
             once it has been compiled (a minute at first, needs a C++ compiler) and kept in the cache folder
    draft, k  speculative decoding: drafts by `ngram` (what followed the same words before) or by a smaller model (a
             path) of the same vocabulary; so many of them, auto: as many as pay. The answers stay what they were
    repack   int8 or int4: quantized weights without a kernel (Q6_K, fp8, ...) are rounded once more to run packed too
    quantize    int8 or int4: floating-point weights of linear layers are rounded to that as they are loaded, to the
             nearest in groups of 32; embeddings and an untied head stay. `generate.py quantize` chooses better codes
    deterministic   on a CPU, an answer's logits have the same bits whoever else is answered, whatever is cached and
             however often it is preempted; slower with several at once. For packed weights and bfloat16: in float32
             torch sums in another order for another number of rows, and load refuses a max_batch above 1
    group    ranks.join() where torchrun has started several of us: this rank's share of the model. Rank 0's answers,
             and all others `follow`. kv_memory is then each rank's, and each takes the GPU of its LOCAL_RANK
    """
    if k != "auto" and not (type(k) is int and 1 <= k <= 64):
        raise ValueError(f"k is {k!r}, but must be 'auto' or a number of drafts from 1 to 64")
    if deterministic and draft:
        raise ValueError("--deterministic cannot be kept: drafts change how many rows a step has; leave out --draft")
    ready = loading.ready(path, dtype=dtype, device=device, context=context, repack=repack, quantize=quantize,
                          kv_dtype=kv_dtype, kv_memory=kv_memory, max_batch=max_batch, graphs=graphs, compile=compile,
                          deterministic=deterministic, group=group)
    llm = LLM(ready.model, ready.tokenizer, ready.name, ready.cache, ready.eos_ids,
              _sampling_defaults(ready.generation), ready.about, ready.fingerprint)
    if draft is not None and (group is None or group.rank == 0):
        llm.drafter = _drafter(llm, draft, dict(device=str(llm.device), kv_memory=kv_memory, max_batch=max_batch))
        llm.k = k
    llm.options = {"max_batch": max_batch, "token_budget": token_budget, "graphs": graphs,
                   "deterministic": min(CUT, token_budget) if deterministic else None}
    if compile:
        llm.compiled = compiled.Compiled(llm.model, llm.cache, str(checkpoint.cache_folder() / "compiled"), compile,
                                         lambda text: print(text, file=sys.stderr, flush=True))
    if group is not None:
        llm.join(group)
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


@torch.inference_mode()
def _alike(model: Llama, most: int) -> int:
    """`most`, if a row's logits have the same bits in a pass of 1 row and of any number up to so many; else ValueError.
    It is tried out: which numbers of rows torch's kernels treat alike depends on the machine and on the shapes."""
    group, before = model.config.n_head // model.config.n_kv_head, None
    tokens = torch.randint(model.config.vocab_size, (most,), generator=torch.Generator().manual_seed(0))

    def attend(layer, q, k, v):  # as far as rows are concerned
        return q + (k + v).repeat_interleave(group, 1)

    for n in range(1, most + 1):  # the last n of them; as bytes, since NaN does not equal itself
        bits = model(tokens[-n:], torch.arange(most - n, most), attend, torch.arange(n)).view(torch.uint8)  # (n, ..)
        if before is not None and not torch.equal(bits[1:], before):
            dtype = str(model.model["norm"].weight.dtype).removeprefix("torch.")
            other = ", or take packed weights or --dtype bfloat16" if dtype == "float32" else ""
            raise ValueError(f"--deterministic cannot be kept: {n} rows of this model, in {dtype} and on this machine, "
                             f"have other bits than each by itself; lower --max-batch to {n - 1}{other}")
        before = bits
    return most


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
                 defaults: dict, about: str = "", fingerprint: str = ""):
        weight = model.model["norm"].weight
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.cache, self.context = cache, cache.max_seq_len
        self.eos_ids, self.defaults, self.about, self.fingerprint = eos_ids, defaults, about, fingerprint
        self.device, self.dtype = weight.device, weight.dtype
        is_packed = any(isinstance(m, packed.QuantLinear) for m in model.modules())
        self.weights = "packed" if is_packed else str(weight.dtype).removeprefix("torch.")
        self.drafter, self.k, self.graphs = None, "auto", None  # type: Any, Any, Any
        self.alike = 0  # steps of so many rows have been tried out, see deterministic
        self.compiled: compiled.Compiled | None = None
        self.group: ranks.Group | None = None
        self.leader: ranks.Leader | None = None
        self.options = {"max_batch": 16, "token_budget": CHUNK, "graphs": True}
        self.batcher = self.new_batcher()

    def join(self, group: ranks.Group) -> None:
        """Compute together with the other ranks of the group from now on."""
        self.group = group
        if self.options["graphs"] and self.device.type == "cuda":  # the same ones on all ranks
            self.graphs = cuda_graphs.Graphs(self.model, self.cache, self.options["max_batch"])
        if group.rank == 0:
            self.leader = ranks.Leader(self.model, self.cache, group, self.graphs)

    def follow(self) -> None:
        """On every rank but 0: compute what rank 0 says, until it has no more to do."""
        ranks.follow(self.model, self.cache, self.group, self.graphs)

    def new_batcher(self, **options) -> Batcher:
        """A batcher on this model and cache; options are Batcher's, beside `graphs`. Use one at a time."""
        options = {**self.options, **options}
        if self.drafter is not None and "drafter" not in options:
            options.update(drafter=self.drafter, verify=speculative.verify, drafts=self.new_drafts())
        if options.get("deterministic") and options["max_batch"] > self.alike:
            self.alike = _alike(self.model, options["max_batch"])
        options.setdefault("chunk", min(BESIDE, options["token_budget"]) if self.device.type == "cpu" else None)
        if options.pop("graphs") and self.device.type == "cuda" and self.group is None:
            if self.graphs is None or self.graphs.sizes[-1] < options["max_batch"]:  # captured once for all batchers
                self.graphs = cuda_graphs.Graphs(self.model, self.cache, options["max_batch"])
            options["forward"] = self.graphs
        if self.leader is not None or self.compiled is not None:
            options["forward"] = self.leader or self.compiled
        return Batcher(self.model, self.cache, sampling, self.model.config.vocab_size, eos_ids=self.eos_ids,
                       decoder=lambda ids, stop: StreamDecoder(self.tokenizer, stop, ids), **options)

    def new_drafts(self) -> int | speculative.AdaptiveK:
        """How many drafts a batcher asks for: k, or what it will learn."""
        least: dict = {} if isinstance(self.drafter, speculative.NgramDrafter) else {"least": 0.0}
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

    @cached_property
    def _vocabulary(self) -> grammar.Vocabulary:
        return grammar.Vocabulary(self.tokenizer, self.model.config.vocab_size, self.eos_ids)

    def generate(self, prompts: str | Sequence[str], *, raw: bool = False, system: str | None = None,
                 **options) -> list[Answer]:
        """The answers to one prompt or several, finished; they are computed together (but each beam search by itself).
        For options see `answer`.

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
                    unfinished[0].advance()
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
        json_schema, regex    the text is JSON that a schema (a dict, or its text) describes, or one that a regex
                    matches as a whole; max_tokens can still cut it short. Needs llguidance; see grammar.py
        min_tokens, ignore_eos, priority, salt    as in batching.Request
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias
                    defaults from the model's generation_config, else greedy
        beams, length_penalty, early_stopping
                    the likeliest text instead of the likeliest tokens, by a search with so many beams: a BeamAnswer,
                    whose samples are the n best; see beams.py. Of the defaults it has the penalties alone
        Raises ValueError for an empty or too long prompt, ids outside the vocabulary and unknown or senseless options.
        """
        known = (*SAMPLING, *REQUEST, *FORM, *BEAMS)
        if unknown := set(options) - set(known):
            raise ValueError(f"unknown option {min(unknown)!r}; known are {', '.join(known)}")
        options = {k: v for k, v in options.items() if v is not None}
        if isinstance(options.get("stop", ""), str):
            options["stop"] = [options["stop"]] if "stop" in options else []
        elif not isinstance(options["stop"], (list, tuple)):
            raise ValueError(f"stop is {options['stop']!r:.80}, but must be a text or a list of texts")
        form = {name: options.pop(name) for name in FORM if name in options}
        if len(form) > 1:
            raise ValueError("json_schema and regex are both given; an answer can keep to one form")
        for name, value in form.items():
            options["constraint"] = getattr(self._vocabulary, name)(value).start
        search = {name: options.pop(name) for name in BEAMS if name in options}
        if search and "beams" not in search:
            raise ValueError(f"{min(search)} is of a beam search; say with how many beams")
        if search and self.options.get("deterministic"):
            raise ValueError("a beam search cuts its prompt and shares its blocks in its own way, and so is not "
                             "deterministic to the bit; leave out --beams or --deterministic")
        chosen = {k: v for k, v in self.defaults.items() if not (search and k in DRAWING)}
        chosen.update((k, options.pop(k)) for k in SAMPLING if k in options)
        request = Request(prompt_ids, sampling=chosen, **options)
        self.batcher.check(request)
        return BeamAnswer(self, request, **search) if search else Answer(self, request)


class Answer:
    """One answer (or n of them). Iterate over it once for the pieces of its text; the rest fills up meanwhile.

    Set `abort` at any time (from a signal handler, say) to end it before the next token.
    """

    scores: Sequence[float] = ()  # of the samples, if they were searched for

    def __init__(self, llm: LLM, request: Request):
        self.llm, self.request, self.abort = llm, request, False
        self.ttft_s: float | None = None  # time to first token, in seconds
        self.decode_s = 0.0  # spent on the tokens after the first
        self._pieces, self._begun, self._idle_s, self._heard = deque(), None, 0.0, 0.0  # type: Any, Any, float, float
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
        self._queue()

    def _queue(self) -> None:
        self._batcher.add(self.request)

    def advance(self) -> None:
        """A step of the batcher, for this answer and all others that are queued."""
        self._batcher.step()

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
                    self.advance()
                while self._pieces:
                    begin = time.perf_counter()
                    yield self._pieces.popleft()
                    # The time that the reader takes is not counted, unless he had the batcher step meanwhile.
                    self._idle_s += time.perf_counter() - max(begin, self._heard)
        finally:
            self.close()
        self.raise_error()


# ------------------------------------------------------------------ searching


class _AbortedError(Exception):
    """Whoever asked has set `abort`."""


class _Steps:
    """A cache for beam_search, whose last step is kept: Batcher's `forward` wants all of it, and not four tensors."""

    def __init__(self, cache: PagedKVCache):
        self.cache, self.last = cache, None  # type: PagedKVCache, Any

    def __getattr__(self, name: str):
        return getattr(self.cache, name)

    def extend(self, plan: dict, rows: Sequence[int] | None = None):
        self.last = self.cache.extend(plan, rows)
        return self.last


class BeamAnswer(Answer):
    """An answer that is searched for. Its text is known when the search is over, and comes in one piece.

    .samples are the n best texts that were found, .scores their scores. `abort` ends the search before its next pass,
    and no text is left. `advance` is the whole search: requests of the batcher wait meanwhile, with their blocks.
    """

    def __init__(self, llm: LLM, request: Request, beams: int, length_penalty: float = 1.0,
                 early_stopping: bool | str = False):
        super().__init__(llm, request)
        r, cache, self.scores, self._cache, self._passes = request, llm.cache, [], _Steps(llm.cache), 0
        self.search: dict[str, Any] = {"beams": beams, "length_penalty": length_penalty,
                                       "early_stopping": early_stopping, "n_best": r.n}
        beam_search(None, cache, r.prompt_ids, max_tokens=0, **self.search)  # computes nothing, but checks all this
        wrong = [
            (r.n > beams, f"n is {r.n}, but a search with {beams} beams is for {beams} texts at most; raise beams"),
            (beams > 1 and r.sampling.get("temperature") == 0, "temperature is 0, which leaves one continuation of a "
             "text and nothing to search; leave it out, or take beams=1"),
            (r.logprobs, f"logprobs is {r.logprobs}, but a search keeps the log-probabilities of its texts' own tokens "
             "only; take 0"),
            (r.stop, "stop strings cannot end the texts of a beam search, only end-of-text tokens can; leave out stop")]
        for is_so, why in wrong:
            if is_so:
                raise ValueError(why)
        new = 1 if r.max_tokens is None else r.limit
        if new and (most := most_blocks(len(r.prompt_ids), new, beams, cache.block_size)) > cache.n_blocks:
            raise ValueError(f"{beams} beams of {new} tokens behind a prompt of {len(r.prompt_ids)} can take {most} "
                             f"blocks of the KV cache, which has {cache.n_blocks}; lower beams or max_tokens, or "
                             "allow it more memory")
        vocab_size = llm.batcher.vocab_size
        ends = llm.eos_ids if r.constraint is not None or not r.ignore_eos else ()
        r.ends = frozenset(i for i in ends if i < vocab_size)
        self._params, self._prompt = sampling.params([r.sampling], vocab_size), torch.tensor([r.prompt_ids])  # (1, P)
        self._allowed = None if r.constraint is None else r.constraint()

    @property
    def tokens_per_s(self) -> float | None:
        """Passes after the prompt's, by the time they took: each gives all beams a token."""
        return (self._passes - 1) / self.decode_s if self._passes > 1 and self.decode_s > 0 else None

    def _queue(self) -> None:
        """The batcher has nothing to do with it."""

    def close(self) -> None:
        if self._begun is not None and not self.finished:
            self._end("abort")

    def advance(self) -> None:
        """The search, from begin to end. An exception ends it with "error"; what is none (an interrupt) is raised."""
        r, cache = self.request, self.llm.cache
        before = cache.stats.found
        try:
            found = beam_search(self._pass, self._cache, r.prompt_ids, max_tokens=r.max_tokens, eos_ids=r.ends,
                                warp_one=self._warp, chunk=self._batcher.token_budget, salt=r.salt, **self.search)
        except _AbortedError:
            self._end("abort")
        except ValueError as error:  # says all by itself
            self._end("error", str(error))
        except Exception as error:
            self._end("error", f"{type(error).__name__}: {error}")
        except BaseException:  # it may have come between any two lines of the cache
            cache.recover()
            raise
        else:
            now = time.perf_counter()
            self.ttft_s, self.decode_s = now - self._begun, now - self._heard if self._passes else 0.0
            self.scores = [h.score for h in found]
            r.samples = [self._sample(i, h, cache.stats.found - before) for i, h in enumerate(found)]
            self._pieces.extend(filter(None, [self.text]))

    def _end(self, reason: str, error: str | None = None) -> None:
        r = self.request
        r.samples = [Sample(r, i, list(r.prompt_ids), finish_reason=reason, error=error) for i in range(r.n)]

    def _sample(self, i: int, h: Hypothesis, cached: int) -> Sample:
        r = self.request
        decoder = self._batcher.decoder(r.prompt_ids, ())
        for token in h.ids[:-1] if h.finish_reason == "stop" else h.ids:
            decoder.push(token)
        decoder.finish()
        logprobs = [] if r.logprobs is None else [{"id": token, "logprob": x, "top": []}
                                                  for token, x in zip(h.ids, h.logprobs)]
        return Sample(r, i, [*r.prompt_ids, *h.ids], h.ids, h.finish_reason, logprobs=logprobs, cached=cached,
                      decoder=decoder)

    def _pass(self, tokens: torch.Tensor, positions: torch.Tensor, attend, rows: torch.Tensor) -> torch.Tensor:
        """The model, for beam_search: as the batcher runs it, be it replayed or shared out."""
        if self.abort:
            raise _AbortedError
        logits = self._batcher.forward(self._cache.last)
        if len(rows):  # not a piece in the middle of the prompt
            self._heard, self._passes = self._heard if self._passes else time.perf_counter(), self._passes + 1
        return logits

    def _warp(self, logits: torch.Tensor, outputs: list[list[int]]) -> torch.Tensor:
        """logits (L, V) of L beams and their ids so far -> the probabilities (L, V) that are searched."""
        L, said = len(outputs), torch.tensor(outputs, dtype=torch.int64)  # (L, T)
        mask = self._mask(outputs)
        return sampling.warp(logits, sampling.stack([self._params] * L), self._prompt.expand(L, -1), said,
                             mask if mask is None else mask.to(logits.device))

    def _mask(self, outputs: list[list[int]]) -> torch.Tensor | None:
        """Which ids may come behind each beam: (L, V) bool on the CPU, by the rules of batching.py; None: all."""
        r, young = self.request, len(outputs[0]) < self.request.min_tokens
        if self._allowed is None and not young:
            return None
        if self._allowed is None:
            mask = torch.ones(len(outputs), self._batcher.vocab_size, dtype=torch.bool)
        else:
            try:
                mask = torch.stack([self._allowed(ids) for ids in outputs])
            except Exception as error:
                raise ValueError(f"the constraint cannot go on: {error}") from None
        if young or r.ignore_eos:  # an end comes all the same where a constraint allows nothing else
            others = mask.clone()
            others[:, list(r.ends)] = False
            mask = torch.where(others.any(1, keepdim=True), others, mask)
        return mask
