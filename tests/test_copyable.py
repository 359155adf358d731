"""Every file but the six composition roots is one that you can take away: alone in an empty folder it imports without
doing anything, runs its demo and passes its doctests."""
import ast
import doctest
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOTS = {"loading.py", "llm.py", "export.py", "job.py", "generate.py", "bench.py"}
FILES = sorted(p.name for p in ROOT.glob("*.py"))
ALONE = [name for name in FILES if name not in ROOTS]

# What an import must leave alone, printed as one line before and after.
WATCH = """
import os, random, sys, threading, warnings
import torch
def state():
    return (random.getstate(), torch.initial_seed(), torch.get_num_threads(), torch.get_default_dtype(),
            torch.is_grad_enabled(), threading.active_count(), sorted(os.environ.items()), sorted(os.listdir(".")),
            len(warnings.filters))
for module in {before!r}:
    __import__(module)
before = state()
import {name}
assert state() == before, "importing {name} changed something"
siblings = {siblings!r} & set(sys.modules)
assert not siblings, f"importing {name} pulled in {{siblings}}"
"""


def alone(tmp_path: Path, name: str, *command: str) -> subprocess.CompletedProcess:
    shutil.copy(ROOT / name, tmp_path)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run([sys.executable, "-W", "error", "-B", *command], cwd=tmp_path, env=environment, text=True,
                          capture_output=True, timeout=120)


def imports(name: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def test_the_files_are_found():
    assert {"model.py", "checkpoint.py", "gguf.py", "tokenizer.py", "sampling.py", "kvcache.py"} <= set(ALONE)
    assert set(FILES) >= ROOTS


@pytest.mark.parametrize("name", ALONE)
def test_no_sibling_is_imported(name):
    siblings = {f.removesuffix(".py") for f in FILES}
    assert not imports(name) & siblings


@pytest.mark.parametrize("name", ALONE)
def test_importing_does_nothing(tmp_path, name):
    outside = sorted(imports(name) - {"__future__"} - {"numpy", "huggingface_hub", "tqdm", "fcntl", "jinja2"})
    siblings = {f.removesuffix(".py") for f in FILES} - {name.removesuffix(".py")}
    code = WATCH.format(name=name.removesuffix(".py"), before=outside, siblings=siblings)
    result = alone(tmp_path, name, "-c", code)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ALONE)
def test_the_demo_runs_in_an_empty_folder(tmp_path, name):
    result = alone(tmp_path, name, name)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) >= 5, "a demo shows something"
    assert os.listdir(tmp_path) == [name], "a demo leaves nothing behind"


@pytest.mark.parametrize("name", FILES)
def test_doctests(name):
    module = importlib.import_module(name.removesuffix(".py"))
    assert doctest.testmod(module).failed == 0


def functions(name: str) -> dict[str, str]:
    source = (ROOT / name).read_text()
    return {node.name: ast.get_source_segment(source, node) for node in ast.parse(source).body
            if isinstance(node, ast.FunctionDef)}


def test_twins_are_equal():
    """A helper that two files both need is repeated, not imported; under one name it must be the same text."""
    seen = {}
    for name in ALONE:
        for function, text in functions(name).items():
            if function in seen and function not in ("demo", "_demo", "load", "main", "dequantize", "paged_attention"):
                assert text == seen[function][1], f"{function} differs between {seen[function][0]} and {name}"
            seen[function] = (name, text)
