"""The README and docs say what is: every command and block runs or is named as covered elsewhere, every figure is that
of the JSON it came from, and the table of files has their true lengths."""
import doctest
import json
import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from tiny import tiny_folder

import bench
from benchmarks import readme

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = {p.name: p.read_text() for p in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
ROWS = re.findall(r"^\| `(\w+\.py)` \| .+? \| (\d+) \| .* \| `(\w+)(?:::(\w+))?` \|$", README, re.MULTILINE)
FILES = sorted(p.name for p in ROOT.glob("*.py"))

# How each command that the documents name is covered, by how it begins. The first that fits counts.
CI = "run by .ci/run, in an environment that it makes for this"
MEASURED = "measured once; its figures are compared with the JSON that it left in benchmarks/"
COVERED = {
    "python3 -m venv": CI, ". .venv/bin/activate": "the commands run in an environment that is active",
    "uv pip": "installing, as above", "python -m pytest": CI,
    **{f"python bench.py {name}": MEASURED for name in ("latency", "serve", "speculate", "quantize", "attention",
                                                        "prefix", "perplexity", "parallel")},
    "python bench.py readme": "test_running_it_changes_nothing",
    "python tests/test_flash.py table": "test_flash.py::test_table",
    **dict.fromkeys(("vllm serve", "python -m sglang"), "another engine's, which needs a GPU; from its documentation"),
    "python .ci/coverage": "all tests once more, under a tracer; by hand",
    "python generate.py --device cuda": "for those who have one; needs a GPU",
}
NAMES = {"python generate.py quantize"}  # spoken of, without what they need
# What the others find in their folder (besides the files of this one), and what is added so that they take seconds.
GIVEN = {"path/to/model.gguf": "the default model", "path/to/folder": "a tiny one", "path/to/model": "a tiny one",
         "path/to/quantized": "a tiny one, quantized", "notes.txt": "Cats sleep. Dogs bark. Birds sing.\n",
         "questions.txt": "Why is the sky blue?\n\nWhy is grass green?\n",
         "cat.json": '{"type": "object", "properties": {"lives": {"enum": [7, 9]}}, "required": ["lives"],'
                     ' "additionalProperties": false}'}
ADDED = {"python generate.py quantize": "--sequences 2 --length 32", "--json-schema": "--max-tokens 40",
         "generate.py": "--max-tokens 12"}

# ------------------------------------------------------------------ the table of files


def test_every_file_has_its_row():
    assert sorted(row[0] for row in ROWS) == FILES


@pytest.mark.parametrize("name, lines, test_file, test", ROWS, ids=[row[0] for row in ROWS])
def test_lengths_and_tests_are_true(name, lines, test_file, test):
    length = (ROOT / name).read_text().count("\n")
    assert int(lines) == length, f"{name} has {length} lines: run python bench.py readme"
    source = (ROOT / "tests" / f"{test_file}.py").read_text()
    assert not test or f"def {test}(" in source


# ------------------------------------------------------------------ commands


def commands(text: str) -> list[str]:
    """Lines of bash blocks, without their comments, and commands in the text."""
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines += re.findall(r"`((?:python|python3|torchrun|uv|cat|pip) [^`]+)`", outside)
    return [c for c in (re.sub(r"\s+# .*", "", line).strip() for line in lines) if c and c not in NAMES]


ALL = [(name, command) for name, text in DOCUMENTS.items() for command in commands(text)]
RUN = list(dict.fromkeys(c for _, c in ALL if not any(c.startswith(how) for how in COVERED)))


def test_commands_are_found():
    """Were the pattern wrong, there would be nothing to run, and all would pass."""
    assert len(RUN) >= 15 and "cat notes.txt | python generate.py --system" in " ".join(RUN)
    for text in DOCUMENTS.values():
        assert text.count("```") % 2 == 0
        assert set(re.findall(r"^```(\w+)", text, re.MULTILINE)) <= {"bash", "python"}, "another language needs a test"


def test_installing_is_what_ci_does():
    ci = (ROOT / ".ci" / "run").read_text()
    setups = [c for c in commands(README) if c.startswith("python3 -m venv")]
    assert len(setups) == 2, "the newcomer's two"
    for command in setups:
        make, install, use = command.split(" && ")
        assert make in ci and install.split(" -r ")[0] in ci.replace("install -q", "install")
        for name in re.findall(r"[\w-]+\.(?:txt|py)\b", command):
            assert (ROOT / name).exists(), name
        assert use in ci or use.replace(".venv/bin/python", "python") in RUN or "generate.py" in use
    for command in {c for _, c in ALL if c.startswith("python -m pytest")}:
        assert command.replace("python", ".venv/bin/python", 1) in ci, command
    assert "-r requirements.txt" in (ROOT / "requirements-dev.txt").read_text()


def test_measured_commands_are_ones_that_bench_takes():
    measured = [c for _, c in ALL if COVERED.get(next((how for how in COVERED if c.startswith(how)), "")) == MEASURED]
    assert len(measured) >= 4
    for command in measured:
        bench._arguments(shlex.split(command)[2:])
    for name, data in readme.read(ROOT).items():
        assert name == "quantize" or data["command"] == name, f"benchmarks/{name}.json is of another command"


def test_every_option_that_is_named_exists():
    import generate

    with pytest.raises(SystemExit):
        generate.main(["--help"])
    known = set(re.findall(r"--[\w-]+", "".join((ROOT / name).read_text() for name in (
        "generate.py", "export.py", "bench.py", "roofline.py"))))
    used = {option for text in DOCUMENTS.values() for option in re.findall(r"(?<=[\s`(\"])--[a-z][\w-]+", text)}
    others = {"--torch-backend", "--dist", "--nproc-per-node", "--tensor-parallel-size", "--model-path"}
    assert used - known <= others


@pytest.fixture(scope="session")
def given(tmp_path_factory, default_gguf) -> Path:
    """A folder with all that GIVEN names."""
    import generate

    folder = tmp_path_factory.mktemp("given")
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path/to/model.gguf").symlink_to(default_gguf)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 512}
    for name in ("folder", "model"):
        tiny_folder(folder / "path/to" / name, **sizes)
    assert generate.main(["quantize", str(folder / "path/to/model"), "--method", "rtn", "--out",
                          str(folder / "path/to/quantized"), "--quiet"]) == 0
    for name, text in GIVEN.items():
        if not name.startswith("path/"):
            (folder / name).write_text(text)
    return folder


@pytest.fixture
def house(tmp_path, given) -> Path:
    """A folder as one who has cloned this one sees it: its files, and those that are given."""
    for path in [*ROOT.glob("*.py"), ROOT / "benchmarks", *given.iterdir()]:
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def run(command: list[str], folder: Path, **more) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "PATH": path, **more}
    result = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=600,
                            stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr
    return result


def look(command: str, out: str, err: str, folder: Path) -> None:
    """What a reader would look for behind some of the commands."""
    if command.endswith("--json"):
        assert json.loads(out)["text"]
    if "--prompts" in command:
        answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
        assert [a["samples"][0]["finish_reason"] for a in answers] == ["length"] * 2 and "TTFT" in err
    elif "--json-schema" in command:
        assert json.loads(out) in ({"lives": 7}, {"lives": 9})
    elif "--out DIR" in command:
        config = json.loads((folder / "DIR" / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    elif "--compare" in command:
        assert "times" in err
    else:
        assert out.strip()


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_every_other_command_runs(command, house, tmp_path_factory):
    if "--json-schema" in command:
        pytest.importorskip("llguidance")
    added = next((more for how, more in ADDED.items() if how in command), "")
    demo = command.startswith("python ") and not command.startswith("python generate.py")
    cache = {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))} if "--out DIR" in command else {}
    done = run(["bash", "-c", f"set -o pipefail; {command}{'' if demo else f' {added}'}"], house, **cache)
    look(command, done.stdout, done.stderr, house)


@pytest.mark.slow
def test_the_first_command_says_what_it_found(house):
    """Of the newcomer's first command what comes after installing, and the line that the README shows of it."""
    command = next(c for c in commands(README) if c.startswith("python3 -m venv")).split(" && ")[-1]
    done = run(["bash", "-c", command.replace(".venv/bin/python", "python") + " --max-tokens 8"], house)
    shown = re.search(r"^SmolLM2-135M-Instruct\S+: llama, .*$", README, re.MULTILINE)[0]
    said = next(line for line in done.stderr.splitlines() if line.startswith("SmolLM2"))
    if "runs packed" in said and torch.ops.mkldnn._is_mkldnn_bf16_supported():  # elsewhere the head takes less
        assert said == shown
    assert said.split(";")[0] == shown.split(";")[0] and done.stdout.startswith("The answer to")


# ------------------------------------------------------------------ Python


PYTHON = [(name, i, code) for name, text in DOCUMENTS.items() if name != "take.md"  # which has a test of its own
          for i, code in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL))]


@pytest.mark.slow
@pytest.mark.parametrize("name, i, code", PYTHON, ids=[f"{name} {i}" for name, i, _ in PYTHON])
def test_python_blocks_run(name, i, code, house):
    out = run([sys.executable, "-c", code], house).stdout
    assert len(out) > 20 or "print" not in code
    if "cache.extend" in code:  # the loop written out says what the batcher does with the same settings
        import generate

        options = {"temperature": 0.7, "top_p": 0.9, "seed": 1, "max_tokens": 20}
        assert options.pop("max_tokens") == 20 and "range(20)" in code
        answer, = generate.load().generate(["Why is the sky blue?"], max_tokens=20, **options)
        assert answer.text.strip() == out.strip()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    folder = ROOT if name == "README.md" else ROOT / "docs"
    for target in re.findall(r"\]\(([^)\s]+)\)", DOCUMENTS[name]):
        path, _, anchor = target.partition("#")
        if path.startswith("https://"):
            continue
        assert not path or (folder / path).exists(), target
        text = (folder / path).read_text() if path else DOCUMENTS[name]
        headings = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.+)$", text, re.M)]
        assert not anchor or anchor in headings, target
    for path in re.findall(r"`((?:docs|tests|benchmarks)/[\w.]+)`", DOCUMENTS[name]):
        assert (ROOT / path).exists() or path.endswith((".json", ".svg")), path  # these come with their measurement


# ------------------------------------------------------------------ figures


def test_running_it_changes_nothing():
    """Tables, lengths and pictures are those that `python bench.py readme` makes of benchmarks/*.json."""
    made = readme.made()
    stale = [path.name for path, text in made.items() if not path.exists() or path.read_text() != text]
    assert not stale, f"{', '.join(stale)}: run python bench.py readme"
    assert {p for p in (ROOT / "docs").glob("*.svg")} == {p for p in made if p.suffix == ".svg"}


def test_ratios_are_those_of_the_json():
    """The table of the README once more, by other means."""
    data = json.loads((ROOT / "benchmarks" / "latency.json").read_text())
    region = README.split("<!-- figures: beside -->")[1].split("<!-- end -->")[0]
    head, _, *lines = (line.strip("| ").split(" | ") for line in region.strip().splitlines() if line.startswith("|"))
    assert {line[0] for line in lines} == set(data["ratios"])
    for name, *cells in lines:
        for column, cell in zip(head[1:], cells):
            ratio = data["ratios"][name].get(column)
            assert cell == "-" if ratio is None else cell.strip("*") == f"{ratio:.2f}"
            assert ratio is None or cell.startswith("**") == (ratio >= 1), "bold is where we win"
    assert data["card"]["commit"] in region and data["card"]["cpu"] in region


def house_of(tmp_path: Path, text: str, **results: dict) -> Path:
    """A folder with a README of this text and these results."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "README.md").write_text(text)
    for name, data in results.items():
        (tmp_path / "benchmarks" / f"{name}.json").write_text(json.dumps(data))
    return tmp_path


def test_only_regions_and_lengths_are_written(tmp_path, capsys, monkeypatch):
    text = ("before\n| `a.py` | an idea | ? | paper | `test_a` |\n<!-- figures: beside -->\nstale\n<!-- end -->\n"
            "between\n<!-- figures: load -->\n<!-- end -->\nafter\n")
    root = house_of(tmp_path, text, latency=json.loads((ROOT / "benchmarks" / "latency.json").read_text()))
    (root / "a.py").write_text("1\n2\n3\n")
    assert readme.write(root) == ["README.md", "docs/speed.svg"] and readme.write(root) == []
    new = (root / "README.md").read_text()
    assert new.startswith("before\n| `a.py` | an idea | 3 | paper | `test_a` |\n<!-- figures: beside -->\n| ")
    assert new.endswith("<!-- end -->\nbetween\n<!-- figures: load -->\n<!-- end -->\nafter\n") and "stale" not in new
    assert sorted(p.name for p in root.iterdir()) == ["README.md", "a.py", "benchmarks", "docs"]
    monkeypatch.setattr(readme, "write", lambda: ["README.md"])
    assert bench.main(["readme"]) == 0 and capsys.readouterr().out == "README.md\n"


@pytest.mark.parametrize("text, says", [
    ("<!-- figures: weather -->\n<!-- end -->\n", "no figures are called weather"),
    ("<!-- figures: load -->\n", "not closed"),
    ("<!-- figures: load -->\n<!-- figures: load -->\n<!-- end -->\n", "not closed")])
def test_what_is_no_region_is_said(tmp_path, text, says):
    root = house_of(tmp_path, text)
    with pytest.raises(ValueError, match=says):
        readme.write(root)
    assert (root / "README.md").read_text() == text


def test_latency_against_load(tmp_path, capsys):
    """bench.py serve runs the same requests at each rate; what it says becomes a table, sentences and a picture."""
    folder = tiny_folder(tmp_path / "m", max_position_embeddings=512)
    flags = ["--model", folder, "--dtype", "float32", "--requests", "5", "--slots", "3", "--prompt", "8", "--output",
             "4", "--streams", "2", "--long", "40", "--shared", "16", "--rounds", "1"]
    assert bench.main(["serve", *flags, "--parts", "mix", "spike", "load", "--rates", "80", "40"]) == 0
    out = capsys.readouterr().out
    data = json.loads(out.splitlines()[-1])
    assert list(data["medians"]["load"]) == ["40", "80"] and "| requests/s | TTFT p50 s" in out
    assert len({row["tokens"] for row in data["medians"]["load"].values()}) == 1, "the same requests"
    regions = "".join(f"<!-- figures: {name} -->\n<!-- end -->\n" for name in ("load", "serving"))
    root = house_of(tmp_path, regions, serve=data)
    assert readme.write(root) == ["README.md", "docs/load.svg"]
    text = (root / "README.md").read_text()
    first, after = (data["medians"]["load"]["80"][key] for key in ("ttft_s", "tpot_s"))
    assert f"| 80 | {first['p50']:.3g} | {first['p95']:.3g} | {1e3 * after['p50']:.3g} |" in text
    assert f"serves 5 requests {data['ratios']['static, padded']:.2f} times as fast as padded" in text
    assert text.count("](docs/load.svg)") == 1 and "commit" in text
    assert bench.main(["serve", *flags, "--rates", "2", "-1"]) == 2
    assert "--rates is -1.0, but must be 0 or more" in capsys.readouterr().err


def test_marks_of_axes():
    assert doctest.testmod(readme) == (0, 2)


def test_pictures_are_whole_and_to_scale(tmp_path):
    """Well-formed, nothing outside the frame, bars as long as the speeds, points in the order of the figures."""
    speeds = {"nanoinfer packed": {"prefill 9": 100.0, "16 sequences at 256": 8.0, "matmuls alone": 1.0},
              "nanoinfer packed compiled": {"prefill 9": 50.0}, "llama.cpp & co": {"prefill 9": 25.0}}
    card = {"cpu": "a <CPU>", "threads": 2, "capability": "AVX2", "read_GB_per_s": 9.0, "gpu": None, "torch": "2",
            "python": "3", "commit": "abc"}
    times = {"p50": 1.0, "p95": 50.0}
    rows = {str(r): {"ttft_s": {"p50": r, "p95": 40 * r}, "tpot_s": times, "goodput_per_s": 1} for r in (0.5, 1, 2)}
    pictures = [readme.speed_picture({"tokens_per_s": speeds, "card": card, "model": "m"}),
                readme.load_picture({"medians": {"load": rows}, "card": card, "model": "m",
                                     "options": {"ttft": 2.0, "tpot": 150.0, "requests": 9, "shared": 3}})]
    for picture in pictures:
        tree = ElementTree.fromstring(picture)
        wide, high = float(tree.get("width")), float(tree.get("height"))
        for item in tree.iter():
            assert all(0 <= float(item.get(key, 0)) <= most for key, most in (
                ("x", wide), ("y", high), ("cx", wide), ("cy", high))), item.attrib
    bars = [float(w) for w in re.findall(r'width="([\d.]+)" height="12" fill="#\w+"/>\n<text', pictures[0])][3:]
    assert bars[0] == 2 * bars[1] == 4 * bars[2] == bars[3], "the last is the only one of its panel"
    assert "a &lt;CPU&gt;" in pictures[0] and "matmuls" not in pictures[0]
    heights = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', pictures[1])]
    assert heights[0] > heights[1] > heights[2] > heights[3] > heights[4] > heights[5], "larger is higher"
    assert abs((heights[0] - heights[1]) - (heights[1] - heights[2])) < 0.2, "an axis of ratios: even steps"


def test_quantizing_is_told_with_what_is_recovered(tmp_path):
    cells = {"float32": {"bits": 32.0, "MB": 538.1, "t perplexity": 20.0}, "rtn 4 bits g64": {"t perplexity": 28.0},
             "gptq 4 bits g64": {"bits": 4.25, "t perplexity": 24.0}, "awq 4 bits g64": {"t perplexity": 26.0}}
    root = house_of(tmp_path, "<!-- figures: recovered -->\n<!-- end -->\n<!-- figures: quantized -->\n<!-- end -->\n",
                    quantize={"the default model, 16 windows": cells})
    readme.write(root)
    text = (root / "README.md").read_text()
    assert "| t | 50% | 25% |" in text and "The default model, 16 windows." in text
    assert "| gptq 4 bits g64 | 4.25 | - | 24 |" in text
