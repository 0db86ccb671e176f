"""One folder of runs and one board over it, shared by all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from made_runs import make_folder
from serving import Served, serve


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every kind."""
    return make_folder(tmp_path_factory.mktemp("board"))


@pytest.fixture(scope="session")
def board(root: Path) -> Iterator[Served]:
    """A board over these runs."""
    with serve(root) as served:
        yield served
