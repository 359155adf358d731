"""docs/take.md: each example runs in a folder that holds nothing but the one file it is about."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_copyable import ALONE, ROOT

TEXT = (ROOT / "docs" / "take.md").read_text()
SECTIONS = re.findall(r"^### `(\w+\.py)`\n\n(\*\*Contract\.\*\* .+?)\n\n```python\n(.+?)```$", TEXT,
                      re.MULTILINE | re.DOTALL)
BLOCKS = {name: code for name, _, code in SECTIONS}
GIVEN = {"gguf.py": "model.gguf"}  # what an example finds in its folder: the default model


def test_every_file_that_works_alone_has_its_section():
    assert sorted(BLOCKS) == ALONE and len(SECTIONS) == TEXT.count("\n### ") == TEXT.count("```python")


@pytest.mark.parametrize("name, contract, code", SECTIONS, ids=[name for name, *_ in SECTIONS])
def test_sections_are_short(name, contract, code):
    """A contract in two to four lines, an example of about ten, which checks what it claims and takes one file."""
    assert 1 < len(contract.splitlines()) <= 4 and len(code.splitlines()) <= 25
    assert re.search(rf"^(from|import) {name.removesuffix('.py')}\b", code, re.MULTILINE)
    siblings = {f.removesuffix(".py") for f in ALONE} - {name.removesuffix(".py")}
    assert not siblings & set(re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE))
    assert "assert" in code and max(map(len, code.splitlines())) <= 120


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_the_example_runs_beside_that_file_alone(tmp_path, name, request):
    if "from grammar" in BLOCKS[name]:
        pytest.importorskip("llguidance")
    if "from flash" in BLOCKS[name]:
        pytest.importorskip("triton")
    shutil.copy(ROOT / name, tmp_path)
    if name in GIVEN:
        Path(tmp_path, GIVEN[name]).symlink_to(request.getfixturevalue("default_gguf"))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run([sys.executable, "-B", "-c", BLOCKS[name]], cwd=tmp_path, env=environment, text=True,
                            capture_output=True, timeout=600)
    assert result.returncode == 0, result.stderr
