"""The README says what is: its table names every file with its true length and a test that exists."""
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
ROWS = re.findall(r"^\| `(\w+\.py)` \| .+? \| (\d+) \| .* \| `(\w+)(?:::(\w+))?` \|$", README, re.MULTILINE)
FILES = sorted(p.name for p in ROOT.glob("*.py"))


def test_every_file_has_its_row():
    assert sorted(row[0] for row in ROWS) == FILES


@pytest.mark.parametrize("name, lines, test_file, test", ROWS, ids=[row[0] for row in ROWS])
def test_lengths_and_tests_are_true(name, lines, test_file, test):
    assert int(lines) == (ROOT / name).read_text().count("\n"), f"{name}: correct the table in README.md"
    source = (ROOT / "tests" / f"{test_file}.py").read_text()
    assert not test or f"def {test}(" in source


def test_the_two_commands_name_files_that_exist():
    commands = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    assert len(commands) == 2 and "generate.py" in commands[0] and "pytest" in commands[1]
    for command in commands:
        for name in re.findall(r"[\w-]+\.(?:txt|py)\b", command):
            assert (ROOT / name).exists(), name


def test_every_flag_that_the_readme_uses_exists():
    import generate

    with pytest.raises(SystemExit):
        generate.main(["--help"])
    known = set(re.findall(r"--[\w-]+", "".join((ROOT / name).read_text() for name in (
        "generate.py", "export.py", "bench.py"))))
    used = set()
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL):
        used |= set(re.findall(r"(?<=\s)--[\w-]+", re.sub(r"#.*", "", block)))
    assert used - known <= {"--torch-backend", "--dist"}
