"""Configure all tests to use a separate cache and one thread per process, which is faster for small networks.

Without a GPU, Triton kernels run in Triton's interpreter.
"""

import os
import signal
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["PACELINE_LOAD_AT_START"] = "0"  # output must not depend on what else the machine does
_cache = tempfile.TemporaryDirectory(prefix="paceline-cache-")
os.environ["XDG_CACHE_HOME"] = _cache.name  # the tests must not change the user's cache
os.environ["TORCH_HOME"] = os.devnull  # not a folder: weights that torch would download are missing at once

# `nohup` and shells that start a command in the background ignore these signals, and child processes inherit that.
for _number, _default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _default)

import preloaded  # noqa: E402, F401
import pytest  # noqa: E402
import torch  # noqa: E402 - reads the number of threads
import torch.distributed  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this variable only when it is imported

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files whose tests start processes first: they take longest, and a long file must not run alone at the end.

    This needs `--no-loadscope-reorder` if several processes share the files.
    """
    items.sort(key=lambda item: not _starts_processes(item.module))  # type: ignore[attr-defined]


@cache
def _starts_processes(module: ModuleType) -> bool:
    return any(getattr(value, "__module__", "") in ("running", "holds", "serving") for value in vars(module).values())


@pytest.fixture(scope="module", autouse=True)
def no_process_group_for_other_modules(request: pytest.FixtureRequest) -> Iterator[None]:
    """Close a process group that a module leaves open, since the tests of the next module could not open their own."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        warnings.warn(f"{request.node.nodeid} leaves a process group open", stacklevel=1)


@pytest.fixture(scope="session")
def tiny() -> str:
    """The path to a tiny recipe whose training steps take about a millisecond."""
    return str(Path(__file__).with_name("tiny.py"))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache folder for one test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
