"""Tensor parallelism, measured: what `python bench.py parallel` runs, under torchrun, once for each number of ranks.

Rank 0 times steps of its own and counts what it exchanges in them, beside the closed form: two all_reduce a layer and
one for the embedding, each of N rows of hidden_size numbers, and the gather of R rows of its share of the logits. What
the process really wrote to its sockets is asked of the system, where it says so (Linux), and compared with what a ring
has to send: 2 (n - 1) / n of what is added up.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

import ranks
from llm import LLM, load

KINDS = ("all_reduce", "gather", "plan")


def launch(n: int, argv: Sequence[str]) -> dict:
    """The figures of so many ranks, each a process of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    command = [*(command if n > 1 else [sys.executable]), "-m", "benchmarks.parallel", *argv]
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{n} ranks ended with code {done.returncode}: {done.stderr.strip()[:500]}")
    return json.loads(done.stdout.splitlines()[-1])


def written() -> int | None:
    """Bytes that this process has written, to sockets too; None where the system does not tell."""
    try:
        with open("/proc/self/io") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("wchar"))
    except (OSError, StopIteration):
        return None


def expected(llm: LLM, size: int, tokens: int, rows: int) -> dict[str, int]:
    """Bytes of one step by the formula: what is added up, and what a rank gives to the gather."""
    c, item = llm.model.config, torch.finfo(llm.dtype).bits // 8
    return {"all_reduce": (2 * c.n_layer + 1) * tokens * c.hidden_size * max(4, item),
            "gather": rows * -(-c.vocab_size // size) * item}


def steps(llm: LLM, group: ranks.Group | None, batch: int, chunk: int, rounds: int) -> dict:
    """Medians of `rounds` steps in which `batch` sequences get `chunk` tokens each: seconds, and bytes and seconds of
    each kind of exchange."""
    cache, rows, size = llm.cache, [], 1 if group is None else group.size
    forward = llm.batcher.forward
    names = [object() for _ in range(batch)]
    for name in names:
        cache.add(name)
    for i in range(rounds + 2):
        step = cache.extend({name: [5 + (i + j) % 1000 for j in range(chunk)] for name in names})
        before: list = None if group is None else [group.bytes.copy(), group.seconds.copy(), written()]
        begin = time.perf_counter()
        with torch.inference_mode():
            int(forward(step).argmax())  # waits for a GPU
        row = {"seconds": time.perf_counter() - begin}
        if group is not None:
            wrote = written()
            row.update((f"{kind} bytes", group.bytes[kind] - before[0][kind]) for kind in KINDS)
            row.update((f"{kind} seconds", group.seconds[kind] - before[1][kind]) for kind in KINDS)
            row["written"] = None if wrote is None else wrote - before[2]
        cache.commit(step)
        rows.append(row)
    for name in names:
        cache.free(name)
    rows = rows[2:]
    found = {key: statistics.median(r[key] for r in rows) if rows[0][key] is not None else None for key in rows[0]}
    if group is not None:
        wanted = expected(llm, size, batch * chunk, batch)
        found.update((f"{kind} formula", n) for kind, n in wanted.items())
        found["ring"] = wanted["all_reduce"] * 2 * (size - 1) / size
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    group = ranks.join() if ranks.launched() else None
    need = max(args.prompt, 1) * (args.rounds + 2)
    llm = load(args.model, dtype=args.dtype, max_batch=max(args.batches), context=need, group=group)
    if group is not None and group.rank:
        llm.follow()
    else:
        found = {f"decode {b}": steps(llm, group, b, 1, args.rounds) for b in args.batches}
        found[f"prompt {args.prompt}"] = steps(llm, group, 1, args.prompt, args.rounds)
        held = sum(t.nbytes for t in (*llm.model.parameters(), *llm.model.buffers()))
        print(json.dumps({"steps": found, "weights": held, "model": llm.name, "kind": llm.weights}), flush=True)
    if group is not None:
        group.close()


if __name__ == "__main__":
    main()
