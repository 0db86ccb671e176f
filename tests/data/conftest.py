"""Small data sets for the tests in this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from made_data import write_packed, writers

from paceline.config.resolve import settings_of
from paceline.config.settings import RunSettings

torch.set_num_threads(1)

MakeData = Callable[..., RunSettings]


@pytest.fixture
def make_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeData:
    """Write a few samples in a source's layout and return settings that point to them."""

    def make(name: str, **asked: int) -> RunSettings:
        root = tmp_path / name
        root.mkdir()
        if name == "packed":
            write_packed(root, asked)
        else:
            writers.get(name, lambda *_: None)(root, monkeypatch)  # a source that generates its samples needs no files
        place = {} if name == "digits" else {"data_root": str(root)}
        return settings_of(name)(data=name, workers=0, **place, **asked)  # type: ignore[arg-type]

    return make
