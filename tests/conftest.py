"""Configuration of all tests: one thread per process, which is faster for small networks, and a separate cache.

Without a GPU, Triton kernels run in Triton's interpreter.
"""

import os
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
_cache = tempfile.TemporaryDirectory(prefix="paceline-cache-")
os.environ["XDG_CACHE_HOME"] = _cache.name  # keeps the tests out of the user's cache

import pytest  # noqa: E402
import torch  # noqa: E402 - reads the number of threads

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it once, at import

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> str:
    """The path of a recipe whose steps take a millisecond."""
    return str(Path(__file__).with_name("tiny.py"))
