"""bench.py - measures what generate.py composes, side by side with its peers.

    python bench.py latency --peer transformers --peer llama.cpp      prefill and decode speed beside peers
    python bench.py latency --dtype auto --dtype bfloat16             packed weights beside expanded ones
    python bench.py serve                                             many requests: throughput, latencies, batching
    python bench.py speculate                                         drafts by n-grams against plain decoding
    python bench.py prefix                                            time to first token behind a cached beginning
    python bench.py attention                                         paged attention beside torch's own, dense
    python bench.py perplexity FILE                                   quality: windows of 1,024 tokens of a text
    python bench.py quantize FILE pydoc                               what each way of quantizing costs and saves
    python bench.py parallel --ranks 1 3                              one model on several processes: bytes and time
    python bench.py readme                                            the figures of README.md and docs, from the JSON

Machines are noisy and differ, so a figure is worth something only beside another one of the same run: the engines
take turns, each figure is a median, and what to quote is a ratio. A card with the processor, its measured read
bandwidth, the versions and the commit comes first; the last line of standard output is one JSON object with all of it.
Nothing else should run meanwhile. What is quoted is kept in benchmarks/, one file a command:
`python bench.py serve | tail -1 > benchmarks/serve.json`.
"""
from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

import attention
import checkpoint
import export
import flash
import generate
import kvcache
import ranks
import roofline
import traffic
from benchmarks import parallel, quality, readme, serve, speculate
from benchmarks.engines import LlamaCpp, Ours, Transformers

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


# ------------------------------------------------------------------ latency


def latency(args: argparse.Namespace) -> dict:
    path, llms, batch = checkpoint.resolve(args.model), [], max(args.batches)
    alone = [c for c in args.contexts if 1 in args.batches]
    points = [(1, c) for c in alone] + [(b, args.contexts[0]) for b in args.batches if b > 1]
    longest = max(*args.prompts, max(c for _, c in points) + args.tokens + 1)
    peers: dict = {"device": "cpu"} if args.peer else {}  # the peers run there
    for dtype in args.dtype:
        llms.append(_unlike(llms, dtype, generate.load(args.model, dtype=dtype, max_batch=batch,
                                                       kv_memory=args.kv_memory, **peers)))
    if args.compile:  # the first, with which all others are compared
        llms.insert(0, generate.load(args.model, dtype=args.dtype[0], max_batch=batch, kv_memory=args.kv_memory,
                                     compile=batch, **peers))
    llm = llms[0]
    if longest > llm.context:
        raise ValueError(f"contexts reach {longest} tokens here, but the model's is {llm.context}")
    blocks, b, longest_of_all = max((b * -(-n // llm.cache.block_size), b, n) for b, n in [
        (1, longest), *((b, c + args.tokens + 1) for b, c in points)])
    if blocks > llm.cache.n_blocks:
        raise ValueError(f"{b} sequences of {longest_of_all} tokens need {blocks} blocks of the KV cache, which has "
                         f"{llm.cache.n_blocks}; allow it more than {args.kv_memory:g} GiB with --kv-memory")
    engines: list = [Ours(llm) for llm in llms]
    if "transformers" in args.peer:
        engines.append(_peer("transformers", lambda: Transformers(path, llm.dtype)))
    kinds = [kind for name, kind in (("llama.cpp", None), ("llama.cpp-q4_0", "Q4_0")) if name in args.peer]
    if kinds and not os.path.isfile(path):
        raise ValueError("llama.cpp needs a .gguf file; give one with --model")
    for kind in kinds:
        for on in (False, True):
            engines.append(_peer("llama-cpp-python", partial(LlamaCpp, path, on, longest + 8, batch, kind)))
    V = llm.model.config.vocab_size
    ids = [[5 + (i * 7919 + b * 31) % (V - 5) for i in range(longest)] for b in range(batch)]
    columns = [f"prefill {n}" for n in args.prompts]
    columns += [f"decode at {c}" if b == 1 else f"{b} sequences at {c}" for b, c in points] + ["matmuls alone"]
    speeds = {engine.name: {column: [] for column in columns} for engine in engines}
    for round_ in range(args.rounds + 1):  # the first round warms up and is not counted
        for engine in engines:
            measured = _measure(engine, ids, args.prompts, points, args.tokens)
            if round_:
                for column, speed in zip(columns, measured):
                    speeds[engine.name][column].append(speed)
    medians = {name: {c: round(statistics.median(v), 2) for c, v in row.items() if v} for name, row in speeds.items()}
    ratios = {name: {c: round(statistics.median(a / b for a, b in zip(speeds[engines[0].name][c], v)), 3)
                     for c, v in row.items() if v} for name, row in speeds.items() if name != engines[0].name}
    print(f"\ntokens/s, medians of {args.rounds} alternating rounds of {args.tokens} decode steps; \"matmuls alone\" "
          "is a step of nothing but its products\n")
    _table("engine", columns, medians, ".1f")
    if ratios:
        print(f"\n{engines[0].name} against each (median of the rounds' ratios; above 1 is faster)\n")
        _table("peer", columns, ratios, ".2f")
    shares = {}
    if llm.device.type == "cpu":  # whose bandwidth the card has
        shares = _ceilings(engines[: len(llms)], points, columns[len(args.prompts):], medians, args)
    return {"tokens_per_s": medians, "ratios": ratios, "ceilings": shares, "model": llm.name}


def _ceilings(engines: Sequence[Ours], points: Sequence[tuple[int, int]], columns: Sequence[str], medians: dict,
              args: argparse.Namespace) -> dict:
    """What a decode step must read, half-way through a round, and its speed as a share of what the card's bandwidth
    would allow, as roofline.py has it."""
    found, bandwidth = {}, args.bandwidth
    chip = roofline.Chip("this machine", 1, bandwidth * 1e9, 1)  # only its bandwidth is looked at
    for engine in engines:
        shape = _shape(engine)
        for (b, c), column in zip(points, columns):
            n_bytes = roofline.decode_bytes(shape, b, c + (args.tokens + 1) / 2)
            share = medians[engine.name][column] / b * roofline.step_s(0, n_bytes, chip)
            found[f"{engine.name}, {column}"] = {"MB a step": round(n_bytes / 1e6, 1), "share": round(share, 3)}
    print(f"\nwhat a decode step reads (weights, and keys and values), and its speed as a share of what {bandwidth} "
          "GB/s would allow\n")
    _table("", ["MB a step", "share"], found, ".3g")
    return found


def _shape(engine: Ours) -> roofline.Shape:
    """The matrices and the cache of an engine, in the bits that they take here."""
    c = engine.llm.model.config
    n = sum(m.in_features * m.out_features if hasattr(m, "in_features") else m.weight.numel() for m in engine.matrices)
    kv_bits = 8 * engine.kv_bytes / (2 * c.n_layer * c.n_kv_head * c.head_dim)
    return roofline.Shape(engine.name, n, c.n_layer, c.n_head, c.n_kv_head, c.head_dim, c.max_seq_len, c.sliding_window,
                          8 * engine.weight_bytes / n, kv_bits)


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


def _measure(engine, ids: Sequence[Sequence[int]], prompts: Sequence[int], points: Sequence[tuple[int, int]],
             n: int) -> list[float]:
    """Tokens/s of a prefill of so many tokens (the median of three), then of n decode steps of a batch behind a
    context, then of the products of one row alone, where the engine can say."""
    speeds = []
    for length in prompts:
        engine.prefill([ids[0][:length]])  # not counted: another engine has just had the caches and the cores
        speeds.append(length / _median_s(3, lambda n=length: engine.prefill([ids[0][:n]])))
    for batch, context in points:
        tokens = engine.prefill([x[:context] for x in ids[:batch]])
        speeds.append(batch / _median_s(n, lambda t=tokens: t.__setitem__(slice(None), engine.decode(t))))
    if hasattr(engine, "matmuls"):
        speeds.append(1 / _median_s(n, engine.matmuls))
    return speeds


def _median_s(n: int, call: Callable) -> float:
    seconds = []
    for _ in range(n):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


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


# ------------------------------------------------------------------ serving


def serving(args: argparse.Namespace) -> dict:
    llm, slots = generate.load(args.model, dtype=args.dtype[0], max_batch=args.slots), args.slots
    steps = -(-4 * args.long // generate.BESIDE)  # of the spike, in which every stream gets a token; rather more
    needs = {"mix": args.prompt + args.output, "spike": max(args.long + 1, 64 + 8 + 40 + steps + 1),
             **dict.fromkeys(("arrivals", "load"), args.shared + args.prompt + args.output)}
    for part in args.parts:
        if needs[part] > llm.context:
            raise ValueError(f"{part} needs {needs[part]} tokens with these flags, but the model's context is "
                             f"{llm.context}; lower --prompt, --output, --shared or --long")
    found: dict = {"model": llm.name, "weights": llm.weights, "mix": [], "spike": [], "arrivals": [], "load": []}
    rates = sorted(args.rates or [args.rate * x for x in (0.25, 0.5, 1, 2)])
    traffic_like = (args.requests, args.prompt, args.output, args.sigma, args.shared, slots,
                    (args.ttft, args.tpot / 1e3))
    for round_ in range(args.rounds):
        if round_ == 0:
            serve.mix(llm, 2, args.prompt, 8, 0.0, slots, -1)  # warms up, and is not counted
        if "mix" in args.parts:
            found["mix"].append(serve.mix(llm, args.requests, args.prompt, args.output, args.sigma, slots, round_))
        if "spike" in args.parts:
            found["spike"].append(serve.spike(llm, args.streams, args.long, round_))
        if "arrivals" in args.parts:
            found["arrivals"].append(serve.arrivals(llm, args.rate, *traffic_like, round_))
        if "load" in args.parts:
            found["load"].append({f"{rate:g}": serve.arrivals(llm, rate, *traffic_like, round_, ["prefix cache"])[
                "prefix cache"] for rate in rates})
        print(f"round {round_ + 1} of {args.rounds} done", file=sys.stderr, flush=True)
    figures = {part: _medians(rounds) for part, rounds in found.items() if part in args.parts}
    if "mix" in figures:
        print(f"\n{args.requests} requests at once, log-normal prompts and answers (medians {args.prompt} and "
              f"{args.output}, sigma {args.sigma:g}), {slots} slots: output tokens/s\n")
        ratios = {name: statistics.median(r["continuous"] / r[name] for r in found["mix"]) for name in found["mix"][0]}
        found["ratios"] = {name: round(x, 3) for name, x in ratios.items()}
        columns = ["tokens/s", "continuous is faster by"]
        _table("", columns, {n: dict(zip(columns, (x, ratios[n]))) for n, x in figures["mix"].items()}, ".3g")
    if "spike" in figures:
        print(f"\n{args.streams} running answers, and a prompt of {args.long} tokens: ms between tokens\n")
        _table("prompt", list(figures["spike"]["whole"]), figures["spike"], ".3g")
    for name, row in figures.get("arrivals", {}).items():
        print(f"\n{args.rate:g} requests/s, {args.shared} common tokens each, {name}: {row['cached']:.0%} of prompt "
              f"tokens cached, {row['pool']:.1%} of the pool in use, {row['preempted']:g} preemptions\n  "
              + traffic.describe(row).replace("\n", "\n  ")
              + f" | E2E {' / '.join(format(row['e2e_s'][q], '.2f') for q in ('p50', 'p95', 'p99'))} s")
    if "load" in figures:
        print(f"\n{args.requests} requests at each rate, {args.shared} common tokens each, with the prefix cache\n")
        rows = {rate: readme.load_row(row) for rate, row in figures["load"].items()}
        _table("requests/s", readme.LOAD, rows, ".3g")
    return {**found, "medians": figures, "options": {k: v for k, v in vars(args).items()
                                                      if isinstance(v, (int, float, str, list))}}


def speculating(args: argparse.Namespace) -> dict:
    llm = generate.load(args.model, dtype=args.dtype[0], max_batch=1, draft=args.draft,
                        k=int(args.k) if args.k.isdecimal() else args.k)
    rows = []
    for item in speculate.prompts(args.kinds):
        rows.append(speculate.measure(llm, item, args.tokens, args.rounds))
        r = rows[-1]
        print(f"{r['task']:6} {r['with']:6.1f} / {r['without']:.1f} tokens/s = {r['ratio']:.2f}  "
              f"{item['prompt'][:50]!r}", file=sys.stderr, flush=True)
    found = {kind: speculate.figures([r for r in rows if r["kind"] == kind]) for kind in args.kinds}
    print(f"\n{args.tokens} tokens after each prompt, {llm.weights}, drafts by {args.draft}, k {args.k}, medians of "
          f"{args.rounds} rounds with drafts and without in turn; ratio: tokens/s with them over those without\n")
    _table("", list(found[args.kinds[0]]), found, ".3g")
    return {"figures": found, "prompts": rows, "model": llm.name, "weights": llm.weights, "draft": args.draft}


def _medians(rounds: Sequence[dict]) -> dict:
    """The median of each number, over dicts of one shape."""
    first = rounds[0]
    return {key: _medians([r[key] for r in rounds]) if isinstance(value, dict) else
            statistics.median(r[key] for r in rounds) if isinstance(value, (int, float)) else value
            for key, value in first.items()}


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


# ------------------------------------------------------------------ quantizing


def quantizing(args: argparse.Namespace) -> dict:
    texts = {os.path.basename(name): read_text(name) for name in args.texts}
    if args.calibration is not None and os.path.basename(args.calibration) in texts:
        raise ValueError("calibrated on the text that it is judged by, a method looks too good; take another one")
    calibration = partial(export.calibration, args.model, args.calibration, args.sequences, args.length)
    what = f"{args.model or 'the default model'}, calibrated on {args.calibration or 'its own text'}"
    found = quality.Bench(args.model, texts, functools.cache(calibration), what, args.results, window=args.window,
                          windows=args.windows, divergence=args.divergence, sym=not args.asym, tokens=args.tokens,
                          rounds=args.rounds)
    rows = {}
    for name in ["float32", *(args.methods or quality.SETTINGS)]:
        rows[name] = found.row(name)
        print(f"{name}: " + ", ".join(f"{k} {v:.4g}" for k, v in rows[name].items()), file=sys.stderr, flush=True)
    print(f"\n{found.what}\n")
    _table("", list(dict.fromkeys(k for row in rows.values() for k in row)), rows, ".4g")
    shares = {text: quality.recovered(rows, text) for text in texts}
    for text, share in shares.items():
        print(f"\nof RTN's loss on {text} is recovered by " + ", ".join(f"{n} {x:.0%}" for n, x in share.items()))
    return {"what": found.what, "rows": rows, "recovered": shares}


# ------------------------------------------------------------------ several ranks


def several_ranks(args: argparse.Namespace) -> dict:
    """Steps of one model on 1, 2, .. processes of this machine: what they exchange and where the time goes."""
    argv = ["--dtype", args.dtype[0], "--threads", str(args.threads), "--prompt", str(args.prompt), "--rounds",
            str(args.rounds), "--batches", *map(str, args.batches), *(["--model", args.model] if args.model else [])]
    found = {n: parallel.launch(n, argv) for n in args.ranks}
    one = found.get(1, {"steps": {}})["steps"]
    for n, run in found.items():
        print(f"\n{n} rank{'s' * (n > 1)} of {args.threads} thread{'s' * (args.threads > 1)}, {run['kind']}, with "
              f"weights of {run['weights'] / 1e6:.1f} MB on rank 0: ms a step\n")
        rows, moved = {}, {}
        for name, x in run["steps"].items():
            spent = {kind: x.get(f"{kind} seconds", 0.0) for kind in parallel.KINDS}
            rows[name] = {"step": 1e3 * x["seconds"], **{kind: 1e3 * s for kind, s in spent.items()},
                          "computing": 1e3 * (x["seconds"] - sum(spent.values()))}
            if name in one:
                rows[name]["times one rank"] = one[name]["seconds"] / x["seconds"]
            if n > 1:
                moved[name] = {"added up": x["all_reduce bytes"], "formula": x["all_reduce formula"],
                               "gathered": x["gather bytes"], "by formula": x["gather formula"],
                               "plan": x["plan bytes"], "sent, by a ring": x["ring"],
                               "sent": math.nan if x["written"] is None else x["written"]}
        _table("", list(next(iter(rows.values()))), rows, ".3g")
        if moved:
            print("\nbytes a step of rank 0; sent is what it wrote, all of it\n")
            _table("", list(next(iter(moved.values()))), moved, ",.0f")
    return {"ranks": found, "threads": args.threads}


# ------------------------------------------------------------------ the command line


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = generate._Parser(description=__doc__.split("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    common = generate._Parser(add_help=False)
    common.add_argument("--model", metavar="PATH", help="as in generate.py (default: SmolLM2-135M-Instruct)")
    common.add_argument("--dtype", action="append", help="as in generate.py (default: auto); several are compared")
    common.add_argument("--threads", type=int, help="default: one a core; of each process of `parallel` 1")
    p = commands.add_parser("latency", parents=[common], help="prefill and decode speed, beside peers")
    p.add_argument("--peer", action="append", default=[], choices=["transformers", "llama.cpp", "llama.cpp-q4_0"],
                   help="llama.cpp runs the file as it is, llama.cpp-q4_0 rounded once more to its fastest type")
    p.add_argument("--prompts", type=int, nargs="+", default=[128, 512, 2048],
                   help="tokens of the prefills (default: 128 512 2048)")
    p.add_argument("--kv-memory", type=float, default=generate.KV_GIB, help="as in generate.py (default: %(default)s)")
    p.add_argument("--compile", action="store_true", help="also with compiled decode steps (the first --dtype)")
    p.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32], help="sequences at once, one with each "
                   "context, more with the first (default: 1 4 16 32)")
    p.add_argument("--contexts", type=int, nargs="+", default=[16, 512, 4096],
                   help="tokens before decoding (default: 16 512 4096)")
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
    p = commands.add_parser("serve", parents=[common], help="many requests: throughput, latencies, ways of batching")
    parts = ["mix", "spike", "arrivals", "load"]
    p.add_argument("--parts", nargs="+", default=parts, choices=parts)
    p.add_argument("--requests", type=int, default=64, help="default: 64")
    p.add_argument("--slots", type=int, default=16, help="most samples at once (default: 16)")
    p.add_argument("--prompt", type=int, default=64, help="median tokens of a prompt (default: 64)")
    p.add_argument("--output", type=int, default=60, help="median tokens of an answer (default: 60)")
    p.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of lengths (default: 1)")
    p.add_argument("--streams", type=int, default=8, help="spike: running answers (default: 8)")
    p.add_argument("--long", type=int, default=2000, help="spike: tokens of the long prompt (default: 2000)")
    p.add_argument("--rate", type=float, default=1.0, help="arrivals: requests a second (default: 1)")
    p.add_argument("--rates", type=float, nargs="+", help="load: requests a second, one run for each (default: a "
                   "quarter of, half of, one and two times --rate)")
    p.add_argument("--shared", type=int, default=256, help="arrivals: common tokens (default: 256)")
    p.add_argument("--ttft", type=float, default=2.0, help="arrivals: s to the first token that are good (default: 2)")
    p.add_argument("--tpot", type=float, default=150.0, help="arrivals: ms a token that are good (default: 150)")
    p.add_argument("--rounds", type=int, default=5, help="default: 5")
    p.set_defaults(run=serving)
    p = commands.add_parser("speculate", parents=[common], help="speculative against plain decoding")
    p.add_argument("--draft", default="ngram", help="as in generate.py (default: ngram)")
    p.add_argument("--k", default="auto", help="as in generate.py (default: auto)")
    p.add_argument("--kinds", nargs="+", default=["copy", "prose"], choices=["copy", "prose"])
    p.add_argument("--tokens", type=int, default=128, help="of each answer (default: 128)")
    p.add_argument("--rounds", type=int, default=5, help="default: 5")
    p.set_defaults(run=speculating)
    p = commands.add_parser("perplexity", parents=[common], help="of a text, in non-overlapping windows")
    p.add_argument("file", help="a text file, or `pydoc` for the text of Python's own help topics")
    p.add_argument("--window", type=int, default=1024, help="tokens (default: 1024)")
    p.add_argument("--windows", type=int, default=16, help="how many, from the beginning (default: 16)")
    p.set_defaults(run=perplexity)
    p = commands.add_parser("quantize", help="what each way of quantizing a model costs and saves")
    p.add_argument("texts", nargs="+", help="to be judged by: text files, or `pydoc` as above")
    p.add_argument("--model", metavar="PATH", help="as in generate.py (default: SmolLM2-135M-Instruct)")
    p.add_argument("--methods", nargs="+", choices=list(quality.SETTINGS), metavar="NAME",
                   help=f"some of: {', '.join(quality.SETTINGS)} (default: all)")
    p.add_argument("--asym", action="store_true", help="grids with zero points (default: symmetric)")
    p.add_argument("--calibration", metavar="FILE", help="a text (default: one that the model writes)")
    p.add_argument("--sequences", type=int, default=export.SEQUENCES, help="of calibration (default: %(default)s)")
    p.add_argument("--length", type=int, default=export.LENGTH, help="tokens of each (default: %(default)s)")
    p.add_argument("--window", type=int, default=1024, help="tokens (default: 1024)")
    p.add_argument("--windows", type=int, default=16, help="of each text, from its beginning (default: 16)")
    p.add_argument("--divergence", type=int, default=4, help="of these, so many for KL (default: 4)")
    p.add_argument("--results", default="benchmarks/quantize.json", metavar="FILE", help="where complete cells are "
                   "kept; what is there is not measured again (default: %(default)s)")
    p.add_argument("--tokens", type=int, default=16, help="decode steps of a round (default: 16)")
    p.add_argument("--rounds", type=int, default=5, help="of decoding (default: 5)")
    p.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    p.set_defaults(run=quantizing, dtype=None)
    commands.add_parser("readme", help="put the figures of benchmarks/*.json into README.md and docs"
                        ).set_defaults(dtype=None)
    p = commands.add_parser("parallel", parents=[common], help="one model on several processes: bytes and time")
    p.add_argument("--ranks", type=int, nargs="+", default=[1, 3], help="numbers of processes (default: 1 3)")
    p.add_argument("--batches", type=int, nargs="+", default=[1, 16], help="sequences that decode (default: 1 16)")
    p.add_argument("--prompt", type=int, default=128, help="tokens of a piece of a prompt (default: 128)")
    p.add_argument("--rounds", type=int, default=5, help="steps of each kind (default: 5)")
    p.set_defaults(run=several_ranks)
    args = parser.parse_args(argv)
    args.dtype = list(dict.fromkeys(args.dtype or ["auto"]))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    try:
        if ranks.launched():
            raise ValueError("a measurement is one process's, and `parallel` starts its own; leave out torchrun")
        if args.command == "readme":
            print("\n".join(readme.write()) or "nothing has changed")
            return 0
        if len(args.dtype) > 1 and args.run not in (latency, perplexity):
            raise ValueError(f"{args.command} measures one --dtype, not {' and '.join(args.dtype)}; give one")
        if args.threads is None:
            args.threads = 1 if args.run is several_ranks else torch.get_num_threads()
        least = {"window": 2, **dict.fromkeys(("rate", "rates", "ttft", "tpot", "sigma", "kv_memory"), 0)}
        for name, value in vars(args).items():  # a list: its least
            value = min(value) if isinstance(value, list) and value and isinstance(value[0], (int, float)) else value
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if number and not least.get(name, 1) <= value < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} is {value}, but must be {least.get(name, 1)} or more")
        torch.set_num_threads(args.threads)
        head = card()
        args.bandwidth = head["read_GB_per_s"]
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
