"""A folder of runs and a board that serves it, shared by all tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from made_runs import make_folder
from serving import Served, serve

from paceline.board import gallery


@pytest.fixture(scope="module", autouse=True)
def complete_scans() -> Iterator[None]:
    """Let a scan read all metrics, however slow the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gallery, "FIRST_READING_SECONDS", 60.0)
        yield


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs in every state."""
    return make_folder(tmp_path_factory.mktemp("board"))


@pytest.fixture(scope="session")
def board(root: Path) -> Iterator[Served]:
    """A board that serves the runs in `root`."""
    with serve(root) as served:
        yield served
