"""The figures of README.md and docs/, made of benchmarks/*.json: what `python bench.py readme` runs.

A document says where figures go, between two comments that no reader sees,

    <!-- figures: beside -->
    <!-- end -->

and what stands between them is written here, as are the lengths in the table of files and the pictures in docs/*.svg.
The same JSON gives the same text, so a test can hold that running it changes nothing. Where a JSON is not there (yet),
its regions are empty. Each file holds what the last line of a bench.py command says (quantize.json: what it keeps).
"""
from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from benchmarks import quality

ROOT = Path(__file__).resolve().parent.parent
REGION = re.compile(r"(<!-- figures: (\w+) -->\n)(?:(?!<!-- figures).)*?(<!-- end -->\n)", re.DOTALL)
ROW = re.compile(r"^(\| `(\w+\.py)` \| .+? \| )(?:\d+|\?)(?= \| .* \| `\w+(?:::\w+)?` \|$)", re.MULTILINE)
LOAD = ("TTFT p50 s", "TTFT p95 s", "TPOT p50 ms", "TPOT p95 ms", "goodput/s")

# ------------------------------------------------------------------ tables


def table(what: str, columns: Iterable[str], rows: Mapping[str, Mapping], form: Callable[[float], str]) -> list[str]:
    """Markdown. Columns that no row has are left out."""
    columns = [c for c in columns if any(row.get(c) is not None for row in rows.values())]
    lines = [[what, *columns], ["---"] * (1 + len(columns))]
    lines += [[name, *("-" if row.get(c) is None else form(row[c]) for c in columns)] for name, row in rows.items()]
    return ["| " + " | ".join(line) + " |" for line in lines]


def machine(data: Mapping) -> str:
    c = data["card"]
    where = c["gpu"] or f"{c['cpu']}, {c['threads']} threads, {c['capability']}, reads {c['read_GB_per_s']:g} GB/s"
    return f"{data['model']} on {where}, torch {c['torch']}, Python {c['python']}, commit {c['commit']}"


def ours(name: str) -> bool:
    return name.startswith("nanoinfer")


def beside(found: Mapping) -> list[str]:
    """Where we win and lose: the ratios of one run."""
    if "latency" not in found:
        return []
    data = found["latency"]
    first = next(iter(data["tokens_per_s"]))
    rows = dict(sorted(data["ratios"].items(), key=lambda item: ours(item[0])))  # peers first
    columns = [c for c in data["tokens_per_s"][first] if any(c in row for name, row in rows.items() if not ours(name))]
    return [*table(f"{first} against", columns, rows, lambda x: f"**{x:.2f}**" if x >= 1 else f"{x:.2f}"), "",
            f"Bold: {first} is faster. {machine(data)}.", *eagerly(data["tokens_per_s"], columns)]


def eagerly(speeds: Mapping[str, Mapping[str, float]], columns: Iterable[str]) -> list[str]:
    """The same without a compiler, as a share of the better of a peer's settings: ratios of medians."""
    mine = speeds.get("nanoinfer packed")
    peers = [row for name, row in speeds.items() if name.startswith("llama.cpp") and "Q4_0" not in name]
    if mine is None or not peers or mine is next(iter(speeds.values())):
        return []
    shares = [f"{c} {mine[c] / max(row[c] for row in peers):.2f}" for c in columns]
    return ["", f"Without `--compile`, beside llama.cpp's better setting on the same file: {', '.join(shares)}."]


def latency(found: Mapping) -> list[str]:
    if "latency" not in found:
        return []
    data = found["latency"]
    speeds = data["tokens_per_s"]
    first = next(iter(speeds))
    lines = [f"{machine(data)}.", "", *table("tokens/s", speeds[first], speeds, "{:.1f}".format), "",
             f"{first} against each, the medians of the rounds' ratios:", "",
             *table("", speeds[first], data["ratios"], "{:.2f}".format)]
    if data.get("ceilings"):
        lines += ["", "What a decode step reads, and its speed as a share of what the bandwidth above would allow:", "",
                  *table("", ["MB a step", "share"], data["ceilings"], "{:g}".format)]
    return lines


def load_row(row: Mapping) -> dict[str, float | None]:
    """Figures of traffic.summary in the columns LOAD."""
    times = [(row[key] or {}).get(q) for key in ("ttft_s", "tpot_s") for q in ("p50", "p95")]
    return dict(zip(LOAD, (*times[:2], *(t if t is None else 1e3 * t for t in times[2:]), row.get("goodput_per_s"))))


def load(found: Mapping) -> list[str]:
    """Serving, in two sentences and a picture."""
    data = found.get("serve", {})
    medians, options, lines = data.get("medians", {}), data.get("options", {}), []
    if medians.get("mix"):
        ratios = [x for name, x in data["ratios"].items() if name != "continuous"]
        lines.append(f"Continuous batching serves {options['requests']} requests {ratios[0]:.2f} times as fast as "
                     f"padded static batches, {ratios[1]:.2f} times as fast as static batches that drop ended rows.")
    if medians.get("spike"):
        chunked, whole = medians["spike"]["chunked"], medians["spike"]["whole"]
        lines.append(f"While a prompt of {options['long']:,} tokens is computed among {options['streams']} running "
                     f"answers, the 99th percentile between their tokens is {chunked['p99 while']:.0f} ms "
                     f"({chunked['median before']:.0f} before); computed whole, it stops them for "
                     f"{whole['largest while'] / 1e3:.1f} s.")
    if medians.get("load"):
        lines += ["", "![latency against load](docs/load.svg)"]
    return [*lines, "", f"{machine(data)}."] if lines else []


def serving(found: Mapping) -> list[str]:
    data = found.get("serve", {})
    medians, options, lines = data.get("medians", {}), data.get("options", {}), []
    if medians.get("mix"):
        columns = ["tokens/s", "continuous is faster by"]
        rows = {n: dict(zip(columns, (x, data["ratios"][n]))) for n, x in medians["mix"].items()}
        lines += [f"{options['requests']} requests at once, {options['slots']} slots:", "",
                  *table("", columns, rows, "{:.3g}".format), ""]
    if medians.get("spike"):
        rows = medians["spike"]
        lines += [f"A prompt of {options['long']:,} tokens among {options['streams']} running answers, ms between "
                  "their tokens:", "", *table("prompt", rows["whole"], rows, "{:.4g}".format), ""]
    if medians.get("arrivals"):
        rows = {name: {**load_row(row), "cached": row["cached"]} for name, row in medians["arrivals"].items()}
        lines += [f"{options['requests']} requests that arrive at random, {options['rate']:g} a second, behind "
                  f"{options['shared']} common tokens:", "", *table("", [*LOAD, "cached"], rows, "{:.3g}".format), ""]
    if medians.get("load"):
        rows = {rate: load_row(row) for rate, row in medians["load"].items()}
        lines += ["The same requests at several rates, with the prefix cache (docs/load.svg):", "",
                  *table("requests/s", LOAD, rows, "{:.3g}".format), ""]
    return [f"{machine(data)}.", "", *lines[:-1]] if lines else []


def drafts(found: Mapping) -> list[str]:
    if "speculate" not in found:
        return []
    data = found["speculate"]
    rows = data["figures"]
    columns = next(iter(rows.values()))
    return [f"{machine(data)}.", "", *table(f"drafts by {data['draft']}", columns, rows, "{:g}".format)]


def texts(cells: Mapping) -> list[str]:
    return [key.removesuffix(" perplexity") for key in cells.get("float32", {}) if key.endswith(" perplexity")]


def recovered(found: Mapping) -> list[str]:
    """Of RTN's loss what the better methods take back."""
    lines = []
    for what, cells in found.get("quantize", {}).items():
        rows = {text: quality.recovered(cells, text) for text in texts(cells)}
        if any(rows.values()):
            columns = next(iter(rows.values()))
            lines += [*table("share of RTN's loss that is taken back", columns, rows, "{:.0%}".format), "",
                      f"{what[0].upper()}{what[1:]}.", ""]
    return lines[:-1]


def quantized(found: Mapping) -> list[str]:
    lines = []
    for what, cells in found.get("quantize", {}).items():
        columns = list(dict.fromkeys(key for row in cells.values() for key in row))
        lines += [f"{what[0].upper()}{what[1:]}:", "", *table("", columns, cells, "{:.4g}".format), ""]
    return lines[:-1]


REGIONS = {f.__name__: f for f in (beside, latency, load, serving, drafts, recovered, quantized)}

# ------------------------------------------------------------------ pictures

INK, PALE = "#222222", "#cccccc"
COLOURS = {"nanoinfer": ["#1f5fa8", "#4f93d6", "#8fbcec", "#bcd7f5"], "transformers": ["#d98c00"],
           "llama": ["#3c7d3c", "#63a863", "#93c893", "#bfe0bf"]}


def colours(names: Sequence[str]) -> dict[str, str]:
    """A hue for each family, a shade for each of its members."""
    found, used = {}, {family: 0 for family in COLOURS}
    for name in names:
        family = next((f for f in COLOURS if name.startswith(f)), "transformers")
        shades = COLOURS[family]
        found[name] = shades[min(used[family], len(shades) - 1)]
        used[family] += 1
    return found


def text(x: float, y: float, words: str, anchor: str = "start", size: int = 12, weight: str = "normal") -> str:
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
            f'fill="{INK}">{escape(words)}</text>')


def svg(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
                      f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif">',
                      f"<title>{escape(title)}</title>", '<rect width="100%" height="100%" fill="#ffffff"/>',
                      *parts, "</svg>", ""])


def speed_picture(data: Mapping, across: int = 4, wide: int = 235, bar: int = 15) -> str:
    """A panel for each column of the run, a bar for each engine; each panel has a scale of its own."""
    speeds = data["tokens_per_s"]
    columns = [c for c in next(iter(speeds.values())) if c != "matmuls alone"]
    shade, high, parts = colours(list(speeds)), 34 + bar * len(speeds) + 14, []
    for i, name in enumerate(speeds):
        x, y = 14 + 310 * (i % 3), 44 + 18 * (i // 3)
        parts += [f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{shade[name]}"/>', text(x + 18, y, name)]
    top = 60 + 18 * ((len(speeds) - 1) // 3)
    for i, column in enumerate(columns):
        x, y = 14 + wide * (i % across), top + high * (i // across)
        parts.append(text(x, y + 20, column, weight="bold"))
        most = max(row.get(column, 0) for row in speeds.values())
        for j, (name, row) in enumerate(speeds.items()):
            if column in row:
                length, at = (wide - 75) * row[column] / most, y + 28 + bar * j
                parts += [f'<rect x="{x}" y="{at}" width="{length:.1f}" height="{bar - 3}" fill="{shade[name]}"/>',
                          text(x + length + 5, at + 10, f"{row[column]:.1f}", size=11)]
    title = "tokens/s, the same model and machine in one run; longer is faster"
    height = top + high * -(-len(columns) // across) + 16
    parts += [text(14, 22, title, size=14, weight="bold"), text(14, height - 8, machine(data), size=10)]
    return svg(28 + wide * across, height, title, parts)


def even(most: float) -> list[float]:
    """Marks of an axis from 0, in steps of 1, 2 or 5.

    >>> even(2.3), even(100)
    ([0.0, 0.5, 1.0, 1.5, 2.0, 2.5], [0.0, 20.0, 40.0, 60.0, 80.0, 100.0])
    """
    unit = 10.0 ** math.floor(math.log10(most))
    step = next(m * unit for m in (0.1, 0.2, 0.5, 1, 2) if most <= 6 * m * unit)
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def decades(least: float, most: float) -> list[float]:
    """Marks of a logarithmic axis.

    >>> decades(0.3, 12)
    [0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0]
    """
    steps = [float(f"{m}e{e}") for e in range(-6, 9) for m in (1, 2, 5)]
    begin = max(i for i, s in enumerate(steps) if s <= least)
    return steps[begin: next(i for i, s in enumerate(steps) if s >= most) + 1]


def panel(x: float, rates: Sequence[float], lines: Mapping[str, Sequence], limit: float, title: str) -> list[str]:
    """Lines over rates in a frame of 400 x 240. Values that are None are left out."""
    values = [v for line in lines.values() for v in line if v] + [limit]
    across, log = even(max(rates)), max(values) > 20 * min(values)
    marks = decades(min(values), max(values)) if log else even(max(values))
    left, top, wide, high = x + 50, 60, 400, 240

    def at(rate: float, value: float) -> str:
        low, most = (math.log(marks[0]), math.log(marks[-1])) if log else (0.0, marks[-1])
        share = ((math.log(value) if log else value) - low) / (most - low)
        return f"{left + wide * rate / across[-1]:.1f},{top + high * (1 - share):.1f}"

    parts = [text(left, top - 14, title, weight="bold")]
    for mark in marks:
        y = float(at(0, mark).split(",")[1])
        parts += [f'<path d="M{left},{y} h{wide}" stroke="{PALE}"/>', text(left - 6, y + 4, f"{mark:g}", "end", 11)]
    for mark in across:
        parts.append(text(left + wide * mark / across[-1], top + high + 18, f"{mark:g}", "middle", 11))
    parts.append(f'<polyline points="{at(0, limit)} {at(across[-1], limit)}" stroke="{INK}" stroke-dasharray="4 4" '
                 'fill="none"/>')
    for (name, line), colour in zip(lines.items(), (COLOURS["nanoinfer"][0], COLOURS["transformers"][0])):
        points = [at(rate, value) for rate, value in zip(rates, line) if value]
        parts.append(f'<polyline points="{" ".join(points)}" stroke="{colour}" stroke-width="2" fill="none"/>')
        parts += ['<circle cx="{}" cy="{}" r="3.5" fill="{}"/>'.format(*p.split(","), colour) for p in points]
        if points:
            end, height = map(float, points[-1].split(","))
            parts.append(text(end - 8, height - 6, name, "end"))
    return parts


def load_picture(data: Mapping) -> str:
    rows = sorted((float(rate), load_row(row)) for rate, row in data["medians"]["load"].items())
    rates, options = [rate for rate, _ in rows], data["options"]
    parts = []
    for x, (what, limit) in enumerate((("TTFT", options["ttft"]), ("TPOT", options["tpot"]))):
        unit = "s" if what == "TTFT" else "ms"
        lines = {q: [row[f"{what} {q} {unit}"] for _, row in rows] for q in ("p50", "p95")}
        name = "time to first token, s" if what == "TTFT" else "time per token after it, ms"
        parts += panel(14 + 470 * x, rates, lines, limit, f"{name} (dashed: the limit of good)")
    title = (f"latency against load: requests a second, {options['requests']} at each rate, behind "
             f"{options['shared']} common tokens")
    return svg(968, 350, title, [*parts, text(14, 22, title, size=14, weight="bold"),
                                 text(14, 342, machine(data), size=10)])


# ------------------------------------------------------------------ the documents


def read(root: Path = ROOT) -> dict[str, dict]:
    """What has been measured, by the name of the file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((root / "benchmarks").glob("*.json"))}


def filled(document: str, found: Mapping, root: Path = ROOT) -> str:
    """A document with its regions and lengths as they are to be. ValueError for a region that is unknown or open."""
    names = [name for _, name, _ in REGION.findall(document)]
    if len(names) != document.count("<!-- figures:") or len(names) != document.count("<!-- end -->"):
        raise ValueError(f"a region of figures is not closed; whole are {', '.join(names) or 'none'}")
    if unknown := sorted(set(names) - set(REGIONS)):
        raise ValueError(f"no figures are called {unknown[0]}; known are {', '.join(REGIONS)}")
    document = REGION.sub(lambda m: m[1] + "".join(f"{line}\n" for line in REGIONS[m[2]](found)) + m[3], document)
    return ROW.sub(lambda m: m[1] + str((root / m[2]).read_text().count("\n")), document)


def made(root: Path = ROOT) -> dict[Path, str]:
    """Every document and picture, as it is to be."""
    found = read(root)
    documents = [root / "README.md", *sorted(root.glob("docs/*.md"))]
    files = {path: filled(path.read_text(), found, root) for path in documents}
    if "latency" in found:
        files[root / "docs" / "speed.svg"] = speed_picture(found["latency"])
    if found.get("serve", {}).get("medians", {}).get("load"):
        files[root / "docs" / "load.svg"] = load_picture(found["serve"])
    return files


def write(root: Path = ROOT) -> list[str]:
    """Writes what has changed -> its names."""
    changed = {path: new for path, new in made(root).items() if not path.exists() or path.read_text() != new}
    for path, new in changed.items():
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(new)
        os.replace(partial, path)
    return [str(path.relative_to(root)) for path in changed]
