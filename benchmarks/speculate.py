"""Speculative decoding, measured: what `python bench.py speculate` runs.

Prompts of `benchmarks/speculate.jsonl`: work that copies (edit this code, quote this text, repeat this table) and
open-ended prose, continued with drafts and without, in turn, each from a cold prefix, up to its end. Copies are greedy;
prose is sampled at temperature 0.8 from a seed, since greedily a small model soon repeats itself, which is no prose.
"""
from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence

import speculative
from llm import LLM

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "speculate.jsonl")


def prompts(kinds: Sequence[str]) -> list[dict]:
    with open(FILE, encoding="utf-8") as f:
        return [item for item in map(json.loads, f) if item["kind"] in kinds]


def measure(llm: LLM, item: dict, tokens: int, rounds: int) -> dict:
    """One prompt: speeds with drafts and without, and what became of the drafts."""
    ids, speeds, said, pairs = llm.encode(item["prompt"], raw=True), {True: [], False: []}, {}, []
    for round_ in range(rounds + 1):  # the first warms up and is not counted
        for on in (True, False):
            llm.batcher = batcher = llm.new_batcher(**({} if on else {"drafter": None}))
            if on:
                pairs, learn = [], getattr(batcher.drafts, "record", lambda *_: None)
                if hasattr(batcher.drafts, "k"):
                    batcher.drafts.record = lambda s, drafted, accepted, learn=learn, pairs=pairs: (
                        pairs.append((drafted, accepted)), learn(s, drafted, accepted))
            temperature = 0.0 if item["kind"] == "copy" else 0.8
            answer = llm.answer(ids, max_tokens=tokens, temperature=temperature, seed=0, salt=f"{round_} {on}")
            list(answer)
            if round_:
                speeds[on].append(answer.tokens_per_s)
            said[on] = answer.ids
            if on:
                passes = batcher.stats.turns
    differ = next((i for i, (a, b) in enumerate(zip(said[True], said[False])) if a != b), None)
    return {"task": item["task"], "kind": item["kind"], "tokens": len(said[True]), "passes": passes, "drafts": pairs,
            "ratio": statistics.median(a / b for a, b in zip(speeds[True], speeds[False])),
            "with": statistics.median(speeds[True]), "without": statistics.median(speeds[False]),
            "first difference": differ}


def figures(rows: Sequence[dict]) -> dict:
    """Of one kind of work: the median ratio, and tokens a pass beside the closed form for the acceptance measured.

    alpha is the chance that a draft which was looked at is right: a pass looks at those up to its first failure. The
    closed form is the mean of (1 - alpha^(k + 1)) / (1 - alpha) over all passes, those without drafts included.
    """
    pairs = [pair for r in rows for pair in r["drafts"]]
    passes, tokens = (sum(r[key] for r in rows) for key in ("passes", "tokens"))
    drafted, accepted = sum(k for k, _ in pairs), sum(a for _, a in pairs)
    looked_at = accepted + sum(a < k for k, a in pairs)
    alpha = accepted / looked_at if looked_at else 0.0
    closed = (sum(speculative.expected_tokens(alpha, k) for k, _ in pairs) + passes - len(pairs)) / passes
    return {"ratio": round(statistics.median(r["ratio"] for r in rows), 3),
            "least": round(min(r["ratio"] for r in rows), 3), "tokens a pass": round(tokens / passes, 3),
            "closed form": round(closed, 3), "alpha": round(alpha, 3), "drafts a pass": round(drafted / passes, 3),
            "wasted rows": round((drafted - accepted) / (passes + drafted), 4)}
