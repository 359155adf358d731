"""generate.py - weights to tokens: the command line.

    python generate.py "Why is the sky blue?"
    python generate.py --prompts questions.txt --out answers.jsonl

What it does is composed in llm.py, whose `load` is here too, so that from Python it is three lines:

    import generate
    llm = generate.load()                                  # or a path: a .gguf file, a Hugging Face folder
    print(llm.generate(["Why is the sky blue?"], temperature=0)[0].text)

`--prompts FILE` answers a file, one JSON object a line, and takes up where a killed run ended.
"""
from __future__ import annotations

import argparse
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__":  # Ctrl-C while torch is imported just ends the program; `main` then takes over
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "RANK" in os.environ:  # one of several: what torch's C++ would print of a lost connection is told in a line
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

import torch

import batching
import parallel
import prompts as prompt_files
import replicas
import traffic
from llm import BEAMS, BESIDE, CHUNK, DTYPES, FORM, KV_GIB, LLM, Answer, load

__all__ = ["BESIDE", "CHUNK", "KV_GIB", "LLM", "Answer", "load", "main"]

MOST_SCHEMA = 1 << 20  # characters of a schema that are read; grammar.py takes fewer
AHEAD = 1024  # lines of a prompts file read before their time has come

# ------------------------------------------------------------------ the command line

EXAMPLES = """examples:
  python generate.py "Why is the sky blue?"
  python generate.py                                           a conversation; Ctrl-D ends it
  python generate.py --raw --max-tokens 40 "Once upon a time"
  python generate.py --n 4 --temperature 0.8 "Name a cat."      four answers
  python generate.py --json-schema cat.json "Describe a cat, as JSON."
  cat notes.txt | python generate.py --system "Summarise in one sentence." --temperature 0.7 --seed 1 --json
  python generate.py quantize path/to/model --out DIR          its weights in 4 bits, for other engines too
  python generate.py --prompts questions.txt --out answers.jsonl           many, 16 at a time; --resume after a kill
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # one line, not a page of usage, and one of several ranks says it
        quiet = parallel.launched() and os.environ["RANK"] != "0"
        self.exit(2, None if quiet else f"error: {' '.join(message.split())} (--help lists the flags)\n")


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
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json-schema", metavar="FILE", help="the answer is JSON that this schema describes (needs "
                      "llguidance, as --regex does; say it in the prompt, too)")
    form.add_argument("--regex", metavar="PATTERN", help="the answer is a text that this pattern matches as a whole")
    add("--logprobs", type=int, metavar="N", help="with --json, log-probabilities of the N likeliest tokens")
    add("--n", type=int, default=1, metavar="N", help="so many answers, each with its own randomness (default: 1)")
    add("--beams", type=int, metavar="N", help="search for the likeliest text with so many beams, in place of drawing; "
        "--n tells the best N")
    add("--length-penalty", type=float, metavar="X", help="with --beams, the score is the log-probability by tokens to "
        "the power X: above 0 favours long texts (default: 1)")
    add("--early-stopping", action="store_true", default=None, help="with --beams, end with as many texts as beams, "
        "though better ones may come")
    add("--min-tokens", type=int, metavar="N", help="no end before so many tokens (default: 0)")
    add("--ignore-eos", action="store_true", help="go on after the model's end-of-text token")
    add("--prompts", metavar="FILE", help="answer a file: a prompt a line, or JSONL with a prompt, messages or "
        'prompt_ids and parameters of its own a line, and "at", the second of its arrival; - is standard input')
    add("--out", metavar="FILE", help="with --prompts, where the answers go, JSONL (default: standard output)")
    add("--resume", action="store_true", help="with --prompts and --out, answer only what is missing in that file")
    add("--max-batch", type=int, default=16, metavar="N", help="most answers at once (default: 16)")
    add("--replicas", type=int, default=1, metavar="N", help="with --prompts, so many copies of the model, each in a "
        "process and, if there are GPUs, on one of its own; who shares a beginning shares a replica (default: 1)")
    add("--token-budget", type=int, default=CHUNK, metavar="N", help=f"most tokens of one pass (default: {CHUNK})")
    add("--compile", action="store_true", help="on a CPU, run decode steps compiled, 1.5 to 2 times as fast; the first "
        "time compiling takes a minute or two (needs a C++ compiler)")
    add("--no-graphs", action="store_true", help="on CUDA, launch kernels one by one")
    add("--draft", metavar="HOW", help="speculative decoding, which changes no answer: ngram (what followed the same "
        "words before), or the path of a smaller model of the same vocabulary")
    add("--k", default="auto", metavar="N", help="with --draft, so many drafts a pass (default: auto, as many as pay)")
    add("--compare", action="store_true", help="with --draft, answer without it too, and tell how much faster it is")
    add("--deterministic", action="store_true", help="on a CPU, packed or in bfloat16: an answer is the same to the "
        "last bit whoever else is answered and whatever is cached; slower with several at once")
    add("--context", type=int, metavar="N", help="most tokens of a conversation (default: the model's own, or what the "
                                                 "KV cache has room for)")
    add("--kv-memory", type=float, default=KV_GIB, metavar="GIB",
        help=f"most memory of the KV cache (default: {KV_GIB:g})")
    add("--kv-dtype", default="auto", choices=["auto", "int8", "fp8"], help="of the KV cache; int8 and fp8 halve it "
        "(default: auto, that of the activations)")
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="expand all weights to this type (default: auto, "
        "quantized weights as they are, the rest in bfloat16 where the machine has it, else float32)")
    add("--quantize", choices=["int8", "int4"], help="round floating-point weights as they are loaded (see also "
        "`generate.py quantize --help`)")
    add("--repack", choices=["int8", "int4"], help="round quantized weights that no kernel takes as they are (Q6_K, "
        "fp8) once more, to run packed (default: expand them)")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: auto)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: one for each physical core)")
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
    if args.beams is None and (args.length_penalty is not None or args.early_stopping):
        parser.error("--length-penalty and --early-stopping go with --beams")
    if args.beams is not None and args.draft is not None:
        parser.error("--beams keeps no single text that drafts could go on with; leave out --draft")
    if args.beams is not None and args.deterministic:
        parser.error("--beams cuts its prompt and shares its blocks in its own way; leave it out, or --deterministic")
    if args.beams is not None and args.prompts is not None:
        parser.error("--beams searches for one answer at a time; give a prompt in place of --prompts")
    if args.compare and (args.prompts is not None or args.json):
        parser.error("--compare goes with a single prompt, and without --json")
    if args.json_schema is not None:
        args.json_schema = _schema(args.json_schema, parser)
    args.k = int(args.k) if args.k.isdecimal() else args.k
    if args.replicas > 1 and (args.prompts is None or parallel.launched()):
        parser.error("--replicas goes with --prompts, and without torchrun, whose processes share one model")
    for name in ("max_batch", "token_budget", "replicas"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}, but must be 1 or more")
    return args


def _schema(path: str, parser: argparse.ArgumentParser) -> str:
    """The JSON of a file, in one spelling; what is wrong with it as a schema shows with the model."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return json.dumps(json.loads(file.read(MOST_SCHEMA)), separators=(",", ":"))
    except OSError as error:
        parser.error(f"--json-schema {path} cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        parser.error(f"--json-schema {path} is no JSON: {error!s:.200}")


def _options(args: argparse.Namespace) -> dict:
    names = ("max_tokens", "min_tokens", "ignore_eos", "stop", "seed", "n", "logprobs", "temperature", "top_k", "top_p",
             "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "json_schema", "regex", *BEAMS)
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
        parts.append(f"{'found' if answer.scores else 'first token'} after {answer.ttft_s:.2f} s")
    speed = f" at {answer.tokens_per_s:.1f} tokens/s" if answer.tokens_per_s else ""
    several = f" and {len(answer.samples) - 1} more answers" if len(answer.samples) > 1 else ""
    parts += [f"{len(answer.ids)} tokens{speed}{several}", *_drafting(llm)]
    return " | ".join([*parts, *(f"score {score:.4f}" for score in answer.scores[:1]), f"{answer.finish_reason}"])


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
    if args.beams is not None:
        if args.seed is not None and not args.quiet:
            _say("note: --seed changes nothing with --beams, which draws nothing")
    elif idle and args.temperature is None and llm.defaults.get("temperature") == 0 and not args.quiet:
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
        for told, score in zip((first, *more), answer.scores):
            told["score"] = score
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


def _load(args: argparse.Namespace, group: parallel.Group | None = None) -> LLM:
    several = args.prompts or args.n > 1 or (args.beams or 1) > 1  # samples in a step: a second function to compile
    return load(args.model, dtype=args.dtype, device=args.device, context=args.context, repack=args.repack,
                quantize=args.quantize, kv_dtype=args.kv_dtype, kv_memory=args.kv_memory, max_batch=args.max_batch,
                token_budget=args.token_budget, graphs=not args.no_graphs, draft=args.draft, k=args.k,
                compile=(args.max_batch if several else 1) if args.compile else 0, deterministic=args.deterministic,
                group=group)


def _completed(line: prompt_files.Line, args: argparse.Namespace, model: str) -> prompt_files.Line:
    """What is asked of all is asked of this line too, and is part of what its answer is known by."""
    if line.error is not None:
        return line
    own = {"raw": args.raw, "system": None if line.options.get("raw") else args.system}
    own = {k: v for k, v in own.items() if v} if isinstance(line.prompt, str) else {}
    shared = {k: v for k, v in _options(args).items() if v is not None and v != []}
    if not set(FORM).isdisjoint(line.options):  # a line's own form is in place of the one that is asked of all
        shared = {k: v for k, v in shared.items() if k not in FORM}
    return line._replace(options={**shared, **own, "model": model, **line.options})


def _summary(times: list[traffic.Timeline], wall: float, s: batching.Stats, drafting: list[str], errors: int,
             before: int) -> str:
    """What became of a file of prompts, for people."""
    hits = f", {s.cached / s.prompt:.0%} of them cached" if s.prompt else ""
    before = f"; {before} were answered before" if before else ""
    parts = [f"{s.prompt:,} prompt tokens{hits}", f"{s.preempted:,} preemptions", *drafting, f"{errors} errors{before}"]
    return traffic.describe(traffic.summary(times, wall)) + "\n" + "; ".join(parts)


def _read_ahead(lines: Iterator) -> queue.Queue:
    """What comes of lines, as it comes: standard input may keep us waiting. Behind it None, or the exception in it."""
    read: queue.Queue = queue.Queue(AHEAD)

    def feed() -> None:
        try:
            for line in lines:
                read.put(line)
            read.put(None)
        except Exception as error:
            read.put(error)

    threading.Thread(target=feed, daemon=True).start()
    return read


class _Job:
    """A file of prompts to a file of answers, as they finish. `at` must ascend, but for AHEAD lines."""

    def __init__(self, llm: LLM, args: argparse.Namespace, lines: Iterator, results: prompt_files.Results, bar):
        self.llm, self.lines, self.results, self.bar = llm, lines, results, bar
        llm.batcher = llm.new_batcher(chunk=None)  # nobody reads along: long pieces of prompts cost less in all
        self.args, self.quiet = args, args.quiet
        llm.answer([0], **_options(args))  # a flag that no line could do with is refused now
        # An answer is known by what it was asked of: the model, and how it runs.
        self.model = f"{llm.name} {llm.weights} {sorted(llm.defaults.items())} {llm.fingerprint}"
        self.model += " deterministic" if args.deterministic else ""
        self.waiting: list[tuple[float, int, prompt_files.Line]] = []  # a heap of those read, by arrival
        self.ended: deque[tuple] = deque()  # answers to be written
        self.times: list[traffic.Timeline] = []  # of every sample
        self.done = self.broken = 0
        self.begin = time.perf_counter()

    def run(self) -> None:
        batcher, more, read = self.llm.batcher, True, _read_ahead(self.lines)
        while more or self.waiting or batcher.live:
            idle = not (self.waiting or batcher.live)
            while more and len(self.waiting) < AHEAD and (idle or not read.empty()):
                line, idle = read.get(), False
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

    def _take(self, line: prompt_files.Line) -> None:
        line = _completed(line, self.args, self.model)
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
            times = [traffic.Timeline(line.at, array("d")) for _ in range(n)]  # type: ignore[arg-type]
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
        return _summary(self.times, time.perf_counter() - self.begin, self.llm.batcher.stats, _drafting(self.llm),
                        self.broken, self.done)


class _Sender:
    """Results, for a replica: what it has answered goes to the process that writes."""

    def __init__(self, send):
        self.write = partial(send, done=True)

    def done(self, line: prompt_files.Line) -> bool:
        return False


def _replica(number: int, lines: Iterator, send, args: argparse.Namespace) -> None:
    """One of --replicas: answers the lines that it is sent. On GPUs each has one of its own, as far as they go."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads or max(1, torch.get_num_threads() // args.replicas))
    if args.device in ("auto", "cuda") and torch.cuda.is_available():
        args.device = f"cuda:{number % torch.cuda.device_count()}"
        torch.cuda.set_device(args.device)
    args.quiet = True
    llm = _load(args)
    job = _Job(llm, args, lines, _Sender(send), SimpleNamespace(update=lambda: None))  # type: ignore[arg-type]
    send((llm.about, job.model))
    job.run()
    send((job.times, llm.batcher.stats))


class _Routed:
    """A file of prompts to several replicas, and what they answer to one file."""

    _finish: Callable = _Job._finish

    def __init__(self, args: argparse.Namespace, results: prompt_files.Results, model: str, bar):
        self.args, self.results, self.model, self.bar, self.quiet = args, results, model, bar, args.quiet
        self.done = self.broken = 0
        self.times: list[traffic.Timeline] = []
        self.stats, self.begin = batching.Stats(), time.perf_counter()

    def run(self, pool: replicas.Replicas, lines: Iterator) -> None:
        for _, value in pool.run(self._asked(lines)):
            if isinstance(value, dict):  # a record; the errors of its samples name no line
                errors = [f"line {value['line']}: {s['error']}" for s in value.get("samples", ()) if "error" in s]
                self._finish(value, value.get("error") or next(iter(errors), None))
            else:
                times, stats = value
                self.times += times
                for name in ("prompt", "cached", "preempted"):
                    setattr(self.stats, name, getattr(self.stats, name) + getattr(stats, name))

    def _asked(self, lines: Iterator) -> Iterator[tuple | None]:
        """Pairs of what to route by, and a line, of those that have no answer yet; None while there is no line."""
        read = _read_ahead(lines)
        while True:
            try:
                line = read.get_nowait()
            except queue.Empty:
                yield None
                continue
            if isinstance(line, Exception):
                raise line
            if line is None:
                return
            line = _completed(line, self.args, self.model)
            if self.results.done(line):
                self.done += 1
                self.broken += line.error is not None
            elif line.error is not None:
                self._finish(prompt_files.head(line), line.error)
            else:
                messages = isinstance(line.prompt, list) and isinstance(line.prompt[0], dict)
                yield json.dumps(line.prompt) if messages else line.prompt, line

    def about(self) -> str:
        return _summary(self.times, time.perf_counter() - self.begin, self.stats, [], self.broken, self.done)


def _many(args: argparse.Namespace, group: parallel.Group | None = None) -> int:
    from tqdm import tqdm

    if args.out in (None, "-") and sys.stdout is None:
        raise ValueError("standard output is closed; name a file for the answers with --out")
    lines = prompt_files.read_prompts(args.prompts)
    bar = partial(tqdm, unit=" prompts", file=sys.stderr, disable=args.quiet or sys.stderr is None or None)
    with ExitStack() as stack:
        results = stack.enter_context(prompt_files.Results(args.out, args.resume))
        if args.replicas > 1:
            router = replicas.Router(args.replicas)
            pool = stack.enter_context(replicas.Replicas(args.replicas, _replica, [args], router, 2 * args.max_batch))
            about, model = pool.first()[0]
            about = f"{args.replicas} replicas, each {about}"
            job = _Routed(args, results, model, stack.enter_context(bar()))
            run = partial(job.run, pool, lines)
        else:
            llm = _load(args, group)
            about, job = llm.about, _Job(llm, args, lines, results, stack.enter_context(bar()))
            run = job.run
        if not args.quiet:
            _say(about)
        try:
            run()
        finally:
            job.bar.close()
            if not args.quiet:
                _say(job.about())
    return 1 if job.broken else 0


def _follow(args: argparse.Namespace, group: parallel.Group) -> int:
    """What a rank does that is not rank 0: it reads nothing, says nothing and ends with rank 0."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C comes to all: rank 0, or torchrun itself, ends the others
    warnings.simplefilter("ignore")
    _load(args, group).follow()
    return 0


def _cores() -> int:
    """Physical cores that this process may use. A second thread on a core shares its multipliers, and a product is done
    when its slowest thread is."""
    try:
        return len({Path(f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list").read_text()
                    for i in os.sched_getaffinity(0)})
    except (AttributeError, OSError):  # not Linux: torch's own number
        return torch.get_num_threads()


def main(argv: Sequence[str] | None = None) -> int:
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["quantize"]:
        import export  # which is as much again to import

        return export.main(argv[1:], _Parser)
    args = _arguments(argv)
    warnings.showwarning = lambda message, *_, **__: _say(f"note: {message}")
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # a terminal that cannot show a character gets a question mark
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    group = None
    try:
        torch.set_num_threads(args.threads or min(torch.get_num_threads(), _cores()))
        if parallel.launched():
            group = parallel.join()
            if group.rank:
                return _follow(args, group)
        prompt = args.prompt
        if args.prompts is not None:
            return _many(args, group)
        if sys.stdout is None or (prompt is None and sys.stdin is None):
            raise ValueError("standard output, or standard input without a prompt, is closed")
        if prompt is None and not sys.stdin.isatty():
            prompt = sys.stdin.read() if args.raw else sys.stdin.read().strip("\n")
        if prompt is not None and not prompt.strip() and not args.raw:
            raise ValueError("the prompt is empty")
        llm = _load(args, group)
        return _chat(llm, args) if prompt is None else _one(llm, prompt, args)
    except KeyboardInterrupt:
        return 130
    except parallel.RankLost as lost:
        group.tell(f"error: {lost}")
        return 2
    except BrokenPipeError:  # the reader went away (| head): not our error, and nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if args.debug:
            raise
        message = "error: " + (" ".join(str(error).split()) or type(error).__name__)
        if group is not None:
            group.tell(message)
        elif not parallel.launched() or os.environ["RANK"] == "0":
            _say(message)
        return 2
    finally:
        if group is not None:
            group.close()


if __name__ == "__main__":
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done; a Ctrl-C now would only print where we are
    sys.exit(code)
