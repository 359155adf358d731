"""generate.py - weights to tokens: the command line.

    python generate.py "Why is the sky blue?"
    python generate.py --prompts questions.txt --out answers.jsonl

What it does is composed in llm.py, and for a file of prompts in job.py. llm.py's `load` is here too, so that from
Python it is three lines:

    import generate
    llm = generate.load()                                  # or a path: a .gguf file, a Hugging Face folder
    print(llm.generate(["Why is the sky blue?"], temperature=0)[0].text)

`--prompts FILE` answers a file, one JSON object a line, and takes up where a killed run ended.
"""
from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import warnings
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

if __name__ == "__main__":  # Ctrl-C while torch is imported just ends the program; `main` then takes over
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "RANK" in os.environ:  # one of several: what torch's C++ would print of a lost connection is told in a line
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

import torch

import job
import ranks
from job import drafting, sample_json, say
from llm import BEAMS, BESIDE, CHUNK, KV_GIB, LLM, Answer, load
from loading import DTYPES

__all__ = ["BESIDE", "CHUNK", "KV_GIB", "LLM", "Answer", "load", "main"]

MOST_SCHEMA = 1 << 20  # characters of a schema that are read; grammar.py takes fewer

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
        quiet = ranks.launched() and os.environ["RANK"] != "0"
        self.exit(2, None if quiet else f"error: {' '.join(message.split())} (--help lists the flags)\n")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(description="Text from a language model.", epilog=EXAMPLES, allow_abbrev=False,
                     formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=110))
    _add_what_is_asked(parser)
    _add_how_it_runs(parser)
    args = parser.parse_args(argv)
    _check(args, parser)
    if args.json_schema is not None:
        args.json_schema = _schema(args.json_schema, parser)
    args.k = int(args.k) if args.k.isdecimal() else args.k
    return args


def _add_what_is_asked(parser: argparse.ArgumentParser) -> None:
    """The prompt, the model, and the flags that are an answer's own."""
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


def _add_how_it_runs(parser: argparse.ArgumentParser) -> None:
    """The flags of a file of prompts, of the machine, and of what is printed."""
    add = parser.add_argument
    add("--prompts", metavar="FILE", help="answer a file: a prompt a line, or JSONL with a prompt, messages or "
        'prompt_ids and parameters of its own a line, and "at", the second of its arrival; - is standard input')
    add("--out", metavar="FILE", help="with --prompts, where the answers go, JSONL (default: standard output)")
    add("--resume", action="store_true", help="with --prompts and --out, answer only what is missing in that file")
    add("--max-batch", type=int, default=16, metavar="N", help="most answers at once (default: 16)")
    add("--replicas", type=int, default=1, metavar="N", help="with --prompts, so many copies of the model, each in a "
        "process and, if there are GPUs, on one of its own; who shares a beginning shares a replica (default: 1)")
    add("--token-budget", type=int, default=CHUNK, metavar="N", help=f"most tokens of one pass (default: {CHUNK})")
    add("--compile", action="store_true", help="on a CPU, run decode steps compiled, 1.2 to 1.6 times as fast; the "
        "first time compiling takes a minute or two (needs a C++ compiler)")
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


def _check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """An error for flags that do not go together, or cannot be meant."""
    many, beams = args.prompts is not None, args.beams is not None
    wrong = [
        (args.threads is not None and args.threads < 1, f"--threads is {args.threads}, but must be 1 or more"),
        (args.logprobs is not None and not args.json and not many, "--logprobs needs --json or --prompts"),
        (args.system is not None and args.raw, "--system needs the chat template, which --raw leaves out"),
        (many and (args.prompt is not None or args.json), "--prompts takes its prompts from a file and always writes "
         "JSON; leave out the prompt and --json"),
        (not many and (args.out is not None or args.resume), "--out and --resume go with --prompts"),
        (args.draft is None and (args.k != "auto" or args.compare), "--k and --compare go with --draft"),
        (not beams and (args.length_penalty is not None or args.early_stopping), "--length-penalty and "
         "--early-stopping go with --beams"),
        (beams and args.draft is not None, "--beams keeps no single text that drafts could go on with; leave out "
         "--draft"),
        (beams and args.deterministic, "--beams cuts its prompt and shares its blocks in its own way; leave it out, or "
         "--deterministic"),
        (beams and many, "--beams searches for one answer at a time; give a prompt in place of --prompts"),
        (args.compare and (many or args.json), "--compare goes with a single prompt, and without --json"),
        (args.replicas > 1 and (not many or ranks.launched()), "--replicas goes with --prompts, and without "
         "torchrun, whose processes share one model"),
        *((getattr(args, name) < 1, f"--{name.replace('_', '-')} is {getattr(args, name)}, but must be 1 or more")
          for name in ("max_batch", "token_budget", "replicas"))]
    for is_so, why in wrong:
        if is_so:
            parser.error(why)


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
    """What the flags ask of an answer: options of LLM.answer."""
    names = ("max_tokens", "min_tokens", "ignore_eos", "stop", "seed", "n", "logprobs", "temperature", "top_k", "top_p",
             "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "json_schema", "regex", *BEAMS)
    return {name: getattr(args, name) for name in names}


def _load(args: argparse.Namespace, group: ranks.Group | None = None) -> LLM:
    """The model that the flags ask for."""
    several = args.prompts or args.n > 1 or (args.beams or 1) > 1  # samples in a step: a second function to compile
    return load(args.model, dtype=args.dtype, device=args.device, context=args.context, repack=args.repack,
                quantize=args.quantize, kv_dtype=args.kv_dtype, kv_memory=args.kv_memory, max_batch=args.max_batch,
                token_budget=args.token_budget, graphs=not args.no_graphs, draft=args.draft, k=args.k,
                compile=(args.max_batch if several else 1) if args.compile else 0, deterministic=args.deterministic,
                group=group)


# ------------------------------------------------------------------ one prompt


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
    more = len(answer.samples) - 1
    several = f" and {more} more answer{'s' * (more > 1)}" if more else ""
    parts += [f"{len(answer.ids)} tokens{speed}{several}", *drafting(llm)]
    return " | ".join([*parts, *(f"score {score:.4f}" for score in answer.scores[:1]), f"{answer.finish_reason}"])


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
            say("note: --seed changes nothing with --beams, which draws nothing")
    elif idle and args.temperature is None and llm.defaults.get("temperature") == 0 and not args.quiet:
        say(f"note: --{idle[0].replace('_', '-')} changes nothing at temperature 0; add --temperature")


def _one(llm: LLM, prompt: str, args: argparse.Namespace) -> int:
    answer = llm.answer(llm.encode(prompt, raw=args.raw, system=args.system), **_options(args))
    if not args.quiet:
        say(llm.about)
    _note_idle_flags(llm, args)
    if args.json:
        with _ctrl_c_aborts(answer):
            for _ in answer:
                pass
        first, *more = [sample_json(s) for s in answer.samples]
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
        say(_statistics(llm, answer))
        if answer.finish_reason == "length" and (args.json_schema or args.regex):
            say("note: the answer was cut before it had the form that was asked for; raise --max-tokens, or let the "
                'form end sooner (a schema with "additionalProperties": false)')
    if args.compare and answer.finish_reason != "abort":
        say(_compare(llm, answer.prompt_ids, args))
    return 130 if answer.finish_reason == "abort" else 0


# ------------------------------------------------------------------ a conversation


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
        say(f"(no longer within the context of {llm.context} tokens, dropped: the oldest {dropped} message"
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
    torchrun = llm.group is not None and "TORCHELASTIC_RUN_ID" in os.environ  # a Ctrl-C ends it, and it all ranks
    if not args.quiet:
        keys = "Ctrl-C ends an answer, Ctrl-D the conversation"
        keys = "Ctrl-D ends the conversation; Ctrl-C ends torchrun, with a traceback of its own" if torchrun else keys
        say(f"{llm.about}\ncontext {llm.context} tokens; {keys}")
    while True:
        try:
            text = input("> ")
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            if torchrun:
                return 130
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
            say(f"error: {error}")
            continue
        if torchrun and answer.finish_reason == "abort":
            return 130
        if answer.text:  # an answer that was ended before it began leaves no trace
            messages = [*kept, {"role": "assistant", "content": answer.text}]
        if args.seed is not None:  # each turn its own randomness, all of it from one seed
            turn += 1
            options["seed"] = args.seed + turn
        if not args.quiet:
            say(_statistics(llm, answer))


# ------------------------------------------------------------------ the program


def _answer(args: argparse.Namespace, group: ranks.Group | None) -> int:
    """A file of prompts, one prompt or a conversation, whichever is asked for -> the exit code."""
    prompt = args.prompt
    if args.prompts is not None:
        return job.run(args, _options(args), _load, group)
    if sys.stdout is None or (prompt is None and sys.stdin is None):
        raise ValueError("standard output, or standard input without a prompt, is closed")
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read() if args.raw else sys.stdin.read().strip("\n")
    if prompt is not None and not prompt.strip() and not args.raw:
        raise ValueError("the prompt is empty")
    llm = _load(args, group)
    return _chat(llm, args) if prompt is None else _one(llm, prompt, args)


def _follow(args: argparse.Namespace, group: ranks.Group) -> int:
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
        if ranks.launched():
            _Parser().error("quantize is the work of one process, which writes one folder; leave out torchrun")
        import export  # which is as much again to import

        return export.main(argv[1:], _Parser)
    args = _arguments(argv)
    warnings.showwarning = lambda message, *_, **__: say(f"note: {message}")
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):  # a terminal that cannot show a character gets a question mark
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    group = None
    try:
        torch.set_num_threads(args.threads or min(torch.get_num_threads(), _cores()))
        if ranks.launched():
            group = ranks.join()
            if group.rank:
                return _follow(args, group)
        return _answer(args, group)
    except KeyboardInterrupt:
        if group is not None:
            group.tell(None)  # the others need not say that they have lost us
        return 130
    except ranks.RankLost as lost:
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
        else:
            say(message)
        return 2
    finally:
        if group is not None:
            group.close()


if __name__ == "__main__":
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done; a Ctrl-C now would only print where we are
    sys.exit(code)
