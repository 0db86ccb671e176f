"""Configure all tests to use a separate cache and one thread per process, which is faster for small networks.

Without a GPU, Triton kernels run in Triton's interpreter.
"""

import os
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["PACELINE_LOAD_AT_START"] = "0"  # output must not depend on what else the machine does
_cache = tempfile.TemporaryDirectory(prefix="paceline-cache-")
os.environ["XDG_CACHE_HOME"] = _cache.name  # the tests must not change the user's cache

import pytest  # noqa: E402
import torch  # noqa: E402 - reads the number of threads

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this variable only when it is imported

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> str:
    """The path to a tiny recipe whose training steps take about a millisecond."""
    return str(Path(__file__).with_name("tiny.py"))
