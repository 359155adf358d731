"""bench.py - measures what generate.py composes, side by side with its peers.

    python bench.py latency --peer transformers --peer llama.cpp      prefill and decode speed, batch 1
    python bench.py latency --dtype auto --dtype bfloat16             packed weights beside expanded ones
    python bench.py prefix                                            time to first token behind a cached beginning
    python bench.py attention                                         paged attention beside torch's own, dense
    python bench.py perplexity FILE                                   quality: windows of 1,024 tokens of a text

Machines are noisy and differ, so a figure is worth something only beside another one of the same run: the engines
take turns, each figure is a median, and what to quote is a ratio. A card with the processor, its measured read
bandwidth, the versions and the commit comes first; the last line of standard output is one JSON object with all of it.
Nothing else should run meanwhile.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch

import attention
import checkpoint
import flash
import generate
import kvcache
import packed
from model import linear

# ------------------------------------------------------------------ the card


def card() -> dict:
    """What the figures were measured on."""
    def quoted(command: list[str]) -> str | None:
        try:
            where = os.path.dirname(os.path.abspath(__file__))
            return subprocess.run(command, cwd=where, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    try:
        with open("/proc/cpuinfo") as f:
            cpu = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), None)
    except OSError:
        cpu = None
    changed = quoted(["git", "status", "--porcelain", "--untracked-files=normal"])
    commit = quoted(["git", "rev-parse", "--short", "HEAD"])
    return {"cpu": cpu or platform.processor() or platform.machine(), "cores": os.cpu_count(),
            "threads": torch.get_num_threads(), "read_GB_per_s": round(read_bandwidth(), 1),
            "capability": torch.backends.cpu.get_cpu_capability(), "python": platform.python_version(),
            "torch": torch.__version__, "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "commit": commit + (" with changes" if changed else "") if commit else None}


def read_bandwidth(megabytes: int = 512) -> float:
    """GB/s (1e9 bytes) at which all threads together read memory: the sum of a tensor far larger than the caches."""
    x = torch.ones(megabytes * 2**20 // 4)
    seconds = []
    for _ in range(7):
        begin = time.perf_counter()
        x.sum()
        seconds.append(time.perf_counter() - begin)
    return x.numel() * 4 / statistics.median(seconds) / 1e9


# ------------------------------------------------------------------ engines: prefill(ids) and decode(token)


class Ours:
    def __init__(self, llm: generate.LLM):
        self.llm, self.cache = llm, llm.cache
        self.name = f"nanoinfer {llm.weights}"
        tied = [llm.model.model["embed_tokens"]] if llm.model.lm_head is None else []
        self.matrices = [m for m in llm.model.modules() if isinstance(m, (torch.nn.Linear, packed.QuantLinear))] + tied

    @torch.inference_mode()
    def _extend(self, ids: Sequence[int]) -> int:
        step = self.cache.extend({"bench": ids})
        logits = self.llm.model(step.tokens, step.positions, step.attend, step.last())
        self.cache.commit(step)
        return int(logits.argmax())

    def prefill(self, ids: Sequence[int]) -> int:
        """Forget everything, compute ids, return the likeliest next token."""
        self.cache.free("bench")
        self.cache.add("bench")
        for i in range(0, len(ids), generate.CHUNK):
            token = self._extend(ids[i: i + generate.CHUNK])
        return token

    def decode(self, token: int) -> int:
        """Compute one more token, return the likeliest next one."""
        return self._extend([token])

    @torch.inference_mode()
    def matmuls(self) -> None:
        """Only the products of a decode step, each matrix once: what is left if all else were free."""
        for m in self.matrices:
            tied = isinstance(m, torch.nn.Embedding)
            x = torch.ones(1, m.embedding_dim if tied else m.in_features, dtype=self.llm.dtype, device=self.llm.device)
            linear(x, m.weight, None, self.llm.model.amx) if tied else m(x)


class Transformers:
    """transformers on the same weights, in the same dtype, with its own default attention."""

    def __init__(self, model_path: str, dtype: torch.dtype):
        import transformers

        warnings.filterwarnings("ignore", category=FutureWarning)  # an argument's name is about to change
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.name = f"transformers {transformers.__version__} {str(dtype).removeprefix('torch.')}"
        with tempfile.TemporaryDirectory() as folder:
            if os.path.isfile(model_path):
                import gguf

                with gguf.GGUF(model_path) as file:
                    weights = {name: file.tensor(name, dtype) for name in file}
                    checkpoint.save(os.path.join(folder, "m"), file.config, weights)
                model_path = os.path.join(folder, "m")
            self.model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).eval()

    @torch.inference_mode()
    def _extend(self, ids: Sequence[int]) -> int:
        out = self.model(torch.tensor([ids]), past_key_values=self.past, use_cache=True, logits_to_keep=1)
        self.past = out.past_key_values
        return int(out.logits[0, -1].argmax())

    def prefill(self, ids: Sequence[int]) -> int:
        self.past = None
        return self._extend(ids)

    def decode(self, token: int) -> int:
        return self._extend([token])


class LlamaCpp:
    """llama.cpp through llama-cpp-python on the same GGUF file."""

    def __init__(self, model_path: str, flash: bool, context: int):
        import llama_cpp
        import numpy

        self.logits = lambda: numpy.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.model.ctx, -1),
                                                       (self.model.n_vocab(),))
        threads = torch.get_num_threads()
        self.name = f"llama.cpp ({llama_cpp.__version__}) flash {'on' if flash else 'off'}"
        self.model = llama_cpp.Llama(model_path, n_ctx=context, n_batch=512, n_ubatch=512, n_threads=threads,
                                     n_threads_batch=threads, flash_attn=flash, verbose=False)

    def _extend(self, ids: Sequence[int]) -> int:
        self.model.eval(ids)
        return int(self.logits().argmax())

    def prefill(self, ids: Sequence[int]) -> int:
        self.model.reset()
        return self._extend(ids)

    def decode(self, token: int) -> int:
        return self._extend([token])


# ------------------------------------------------------------------ latency


def latency(args: argparse.Namespace) -> dict:
    path, llms = checkpoint.resolve(args.model), []
    for dtype in args.dtype:
        llms.append(_unlike(llms, dtype, generate.load(args.model, dtype=dtype)))
    llm = llms[0]
    longest = max(args.prompt, max(args.contexts) + args.tokens)
    if longest > llm.context or min(args.contexts) < 1:
        raise ValueError(f"contexts must be from 1 on and reach {longest} tokens here; the model's is {llm.context}")
    engines: list = [Ours(llm) for llm in llms]
    if "transformers" in args.peer:
        engines.append(_peer("transformers", lambda: Transformers(path, llm.dtype)))
    if "llama.cpp" in args.peer:
        if not os.path.isfile(path):
            raise ValueError("llama.cpp needs a .gguf file; give one with --model")
        for flash in (False, True):
            engines.append(_peer("llama-cpp-python", lambda f=flash: LlamaCpp(path, f, longest + 8)))
    ids = [5 + (i * 7919) % (llm.model.config.vocab_size - 5) for i in range(longest)]
    columns = [f"prefill {args.prompt}", *(f"decode at {c}" for c in args.contexts), "matmuls alone"]
    speeds = {engine.name: {column: [] for column in columns} for engine in engines}
    for round_ in range(args.rounds + 1):  # the first round warms up and is not counted
        for engine in engines:
            measured = _measure(engine, ids, args.prompt, args.contexts, args.tokens)
            if round_:
                for column, speed in zip(columns, measured):
                    speeds[engine.name][column].append(speed)
    medians = {name: {c: round(statistics.median(v), 2) for c, v in row.items() if v} for name, row in speeds.items()}
    ratios = {name: {c: round(statistics.median(a / b for a, b in zip(speeds[engines[0].name][c], v)), 3)
                     for c, v in row.items() if v} for name, row in speeds.items() if name != engines[0].name}
    print(f"\ntokens/s, batch 1, medians of {args.rounds} alternating rounds of {args.tokens} decode steps; \"matmuls "
          "alone\" is a step of nothing but its products\n")
    _table("engine", columns, medians, ".1f")
    if ratios:
        print(f"\n{engines[0].name} against each (median of the rounds' ratios; above 1 is faster)\n")
        _table("peer", columns, ratios, ".2f")
    return {"tokens_per_s": medians, "ratios": ratios, "model": llm.name}


def _unlike(before: Sequence, dtype: str, llm: generate.LLM) -> generate.LLM:
    """llm, unless this model runs in the same way as one before it: as auto, an unquantized one is its own twin."""
    if any(llm.weights == other.weights for other in before):
        raise ValueError(f"--dtype {dtype} runs {llm.name} in {llm.weights}, as another --dtype does; give one of them")
    return llm


def _peer(package: str, make: Callable):
    try:
        return make()
    except ImportError:
        raise ValueError(f"the peer needs a package that is not installed: pip install {package}") from None


def _measure(engine, ids: Sequence[int], prompt: int, contexts: Sequence[int], n: int) -> list[float]:
    """Tokens/s of a prefill of `prompt` tokens (the median of three), then of n decode steps behind each context, then
    of the products alone, where the engine can say."""
    engine.prefill(ids[:prompt])  # not counted: another engine has just had the caches and the cores
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        engine.prefill(ids[:prompt])
        seconds.append(time.perf_counter() - begin)
    speeds = [prompt / statistics.median(seconds)]
    for context in contexts:
        token, seconds = engine.prefill(ids[:context]), []
        for _ in range(n):
            begin = time.perf_counter()
            token = engine.decode(token)
            seconds.append(time.perf_counter() - begin)
        speeds.append(1 / statistics.median(seconds))
    if hasattr(engine, "matmuls"):
        seconds = []
        for _ in range(n):
            begin = time.perf_counter()
            engine.matmuls()
            seconds.append(time.perf_counter() - begin)
        speeds.append(1 / statistics.median(seconds))
    return speeds


def _table(what: str, columns: Sequence[str], figures: dict[str, dict[str, float]], form: str) -> None:
    head = [what, *columns]
    rows = [[name, *(format(row[c], form) if c in row else "-" for c in columns)] for name, row in figures.items()]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, ["-" * w for w in widths], *rows):
        print("| " + " | ".join(cell.ljust(w) if i == 0 else cell.rjust(w)
                                for i, (cell, w) in enumerate(zip(row, widths))) + " |")


# ------------------------------------------------------------------ attention


def attention_speed(args: argparse.Namespace) -> dict:
    """One layer's attention through a block table (flash.py on a GPU, attention.py on a CPU) beside torch's own on
    contiguous K/V of one sequence: decode steps behind each context, and prompts. Results are compared first."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernel = flash.paged_attention if device.type == "cuda" else attention.paged_attention
    H, G, D, dtype, size = args.heads, args.kv_heads, args.head_dim, torch.bfloat16, 16
    rows, found = [(1, S) for S in args.contexts] + [(n, n) for n in args.prompts], {}
    for n, S in rows:
        cache = kvcache.PagedKVCache(1, G, D, -(-S // size), size, dtype=dtype, device=device, attention=kernel)
        cache.add("a")
        if n < S:
            step = cache.extend({"a": [1] * (S - n)})
            step.attend(0, *(torch.randn(S - n, heads, D, dtype=dtype, device=device) for heads in (H, G, G)))
            cache.commit(step)
        step = cache.extend({"a": [1] * n})
        q = torch.randn(n, H, D, dtype=dtype, device=device)
        out = step.attend(0, q, *(torch.randn(n, G, D, dtype=dtype, device=device) for _ in range(2)))
        k, v = (x[0][: -(-S // size)].flatten(0, 1)[:S].transpose(0, 1)[None].contiguous() for x in (cache.k, cache.v))
        dense = q.transpose(0, 1)[None]  # (1, H, n, D)
        call = partial(torch.nn.functional.scaled_dot_product_attention, dense, k, v, is_causal=n > 1, enable_gqa=True)
        error = (out.float() - call()[0].transpose(0, 1).float()).abs().max().item()
        if error > 0.05:
            raise ValueError(f"{n} rows behind {S} keys: paged and dense attention differ by {error:.3f}")
        paged = partial(kernel, q, cache.k[0], cache.v[0], step.block_table, step.kv_len, step.q_start, D**-0.5,
                        max_q=n)
        ours, theirs = _times_us((paged, call), device)
        moved, flops = 4 * S * G * D, 4 * H * D * (n * S - n * (n - 1) / 2)  # bytes of K and V; without the masked half
        found[f"{n} rows, {S} keys"] = {"paged us": round(ours, 1), "dense us": round(theirs, 1),
                                        "GB/s": round(moved / ours / 1e3, 2), "TFLOP/s": round(flops / ours / 1e6, 4)}
    print(f"\none layer, {H} query and {G} key/value heads of {D}, bfloat16, {device}; medians\n")
    _table("", ["paged us", "dense us", "GB/s", "TFLOP/s"], found, ".3g")
    if device.type == "cpu":
        print("\nno GPU here: flash.py was not timed")
    return {"us": found, "heads": [H, G, D], "device": str(device)}


def _times_us(calls: Sequence[Callable], device: torch.device) -> list[float]:
    """Medians in microseconds of calls that take turns, by the device's own clock."""
    times = [[] for _ in calls]
    for round_ in range(31):
        for call, seconds in zip(calls, times):
            if device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                torch.cuda.synchronize()
                took = start.elapsed_time(end) / 1e3
            else:
                begin = time.perf_counter()
                call()
                took = time.perf_counter() - begin
            if round_:
                seconds.append(took)
    return [1e6 * statistics.median(seconds) for seconds in times]


# ------------------------------------------------------------------ prefix cache


def prefix(args: argparse.Namespace) -> dict:
    """Time to first token of a prompt whose first `--prompt` tokens an earlier one had too, against the same prompt
    where nothing is cached; and whether the two answers are the same."""
    knows, cold = (generate.load(args.model, dtype=args.dtype[0]) for _ in range(2))
    V, shared, tail = knows.model.config.vocab_size, args.prompt, 20
    if shared + tail + args.tokens > knows.context:
        raise ValueError(f"{shared} + {tail} + {args.tokens} tokens exceed the model's context of {knows.context}")
    seconds, alike = {"cached": [], "cold": []}, 0
    for round_ in range(args.rounds + 1):  # the first warms up and is not counted; each has a beginning of its own
        begin = [5 + (i * 7919 + round_ * 104729) % (V - 5) for i in range(shared)]
        before, prompt = (begin + [5 + (i * 31 + j) % (V - 5) for i in range(tail)] for j in (0, 7))
        list(knows.answer(before, max_tokens=1))
        answers = {"cached": knows.answer(prompt, max_tokens=args.tokens, temperature=0),
                   "cold": cold.answer(prompt, max_tokens=args.tokens, temperature=0)}
        for name, answer in answers.items():
            list(answer)
            if round_:
                seconds[name].append(answer.ttft_s)
        alike += bool(round_) and answers["cached"].ids == answers["cold"].ids
    ttft = {name: statistics.median(s) for name, s in seconds.items()}
    ratio = statistics.median(a / b for a, b in zip(seconds["cold"], seconds["cached"]))
    print(f"\n{shared} shared tokens and {tail} of its own, {knows.weights}: first token after "
          f"{1e3 * ttft['cold']:.0f} ms, with {answers['cached'].cached} tokens cached after "
          f"{1e3 * ttft['cached']:.0f} ms, {ratio:.1f} times sooner; the same {args.tokens} tokens in {alike} of "
          f"{args.rounds} rounds (they can differ only where two are a rounding apart)")
    return {"ttft_s": ttft, "ratio": round(ratio, 2), "equal": alike, "rounds": args.rounds, "shared": shared,
            "cached": answers["cached"].cached, "model": knows.name, "weights": knows.weights}


# ------------------------------------------------------------------ perplexity


@torch.inference_mode()
def window_loss(model, ids: torch.Tensor) -> float:
    """Mean negative log-likelihood, in nats, of ids[1:] given what precedes each within the window. ids (T,)."""
    logits = model(ids[None])[0, :-1]  # (T - 1, V)
    losses = [torch.nn.functional.cross_entropy(rows.float(), targets, reduction="sum")
              for rows, targets in zip(logits.split(256), ids[1:].split(256))]
    return float(sum(losses)) / (len(ids) - 1)


def read_text(name: str) -> str:
    """A file's text; `pydoc` is the text of Python's own help topics, which every installation has."""
    if name == "pydoc" and not os.path.exists(name):
        from pydoc_data.topics import topics

        return "\n\n".join(topics[key] for key in sorted(topics))
    with open(name, encoding="utf-8", errors="replace") as f:
        return f.read()


def perplexity(args: argparse.Namespace) -> dict:
    text, found, llm = read_text(args.file), {}, None
    for dtype in args.dtype:
        llm = _unlike([llm] if llm else [], dtype, generate.load(args.model, dtype=dtype))
        ids = torch.tensor(llm.tokenizer.encode(text), device=llm.device)
        windows = [w for w in ids.split(args.window)[: args.windows] if len(w) == args.window]
        if not windows:
            raise ValueError(f"{args.file} has {len(ids)} tokens, fewer than one window of {args.window}")
        losses = []
        for i, window in enumerate(windows):
            losses.append(window_loss(llm.model, window))
            print(f"\r{llm.weights}: window {i + 1}/{len(windows)}, perplexity so far "
                  f"{math.exp(statistics.fmean(losses)):.3f}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        if not math.isfinite(sum(losses)):
            raise ValueError("the model's logits are not finite: damaged weights, or a dtype too narrow for this model")
        found[llm.weights] = round(math.exp(statistics.fmean(losses)), 4)
    print(f"\n{len(windows)} windows of {args.window} tokens")
    (first, reference), *_ = found.items()
    for weights, value in found.items():
        beside = f", {value / reference - 1:+.3%} beside {first}" if weights != first else ""
        print(f"perplexity {value:.3f}, {weights}{beside}")
    return {"file": os.path.basename(args.file), "windows": len(windows), "window": args.window, "model": llm.name,
            "perplexity": found}


# ------------------------------------------------------------------ the command line


def main(argv: Sequence[str] | None = None) -> int:
    parser = generate._Parser(description=__doc__.split("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", metavar="PATH", help="as in generate.py (default: SmolLM2-135M-Instruct)")
    common.add_argument("--dtype", action="append", help="as in generate.py (default: auto); several are compared")
    common.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    p = commands.add_parser("latency", parents=[common], help="prefill and decode speed, batch 1, beside peers")
    p.add_argument("--peer", action="append", default=[], choices=["transformers", "llama.cpp"])
    p.add_argument("--prompt", type=int, default=512, help="tokens of the prefill (default: 512)")
    p.add_argument("--contexts", type=int, nargs="+", default=[16, 512], help="before decoding (default: 16 512)")
    p.add_argument("--tokens", type=int, default=32, help="decode steps per round (default: 32)")
    p.add_argument("--rounds", type=int, default=5, help="default: 5")
    p.set_defaults(run=latency)
    p = commands.add_parser("attention", help="paged attention beside torch's own, one layer")
    p.add_argument("--heads", type=int, default=9, help="query heads (default: 9, as the default model)")
    p.add_argument("--kv-heads", type=int, default=3, help="default: 3")
    p.add_argument("--head-dim", type=int, default=64, help="default: 64")
    p.add_argument("--contexts", type=int, nargs="+", default=[16, 512, 4096], help="default: 16 512 4096")
    p.add_argument("--prompts", type=int, nargs="+", default=[512], help="computed whole (default: 512)")
    p.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    p.set_defaults(run=attention_speed, dtype=None)
    p = commands.add_parser("prefix", parents=[common], help="time to first token behind a cached beginning")
    p.add_argument("--prompt", type=int, default=1000, help="tokens that two prompts share (default: 1000)")
    p.add_argument("--tokens", type=int, default=16, help="of each answer (default: 16)")
    p.add_argument("--rounds", type=int, default=5, help="default: 5")
    p.set_defaults(run=prefix)
    p = commands.add_parser("perplexity", parents=[common], help="of a text, in non-overlapping windows")
    p.add_argument("file", help="a text file, or `pydoc` for the text of Python's own help topics")
    p.add_argument("--window", type=int, default=1024, help="tokens (default: 1024)")
    p.add_argument("--windows", type=int, default=16, help="how many, from the beginning (default: 16)")
    p.set_defaults(run=perplexity)
    args = parser.parse_args(argv)
    args.dtype = list(dict.fromkeys(args.dtype or ["auto"]))
    try:
        for name in ("threads", "prompt", "tokens", "rounds", "window", "windows"):
            least = 2 if name == "window" else 1
            if getattr(args, name, least) < least:
                raise ValueError(f"--{name} is {getattr(args, name)}, but must be {least} or more")
        torch.set_num_threads(args.threads)
        head = card()
        for key, value in head.items():
            print(f"{key:14} {value}")
        result = args.run(args)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print("\n" + json.dumps({"command": args.command, **result, "card": head}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
