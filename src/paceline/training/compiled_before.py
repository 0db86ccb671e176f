"""Remembers which networks have compiled kernels in the cache, because compiling is then much faster.

For each set of networks, an empty marker file is created in the cache folder, so that it is deleted with the kernels.
"""

from __future__ import annotations

import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from torch import nn

from paceline.config.resolve import Config
from paceline.contracts.recipe import Batch
from paceline.runs.compile_table import compile_cache
from paceline.runs.machine_record import identity
from paceline.training.compile import CACHE_VARIABLE

FOLDER = "paceline"  # inside the cache folder


def marker_of(config: Config, networks: list[nn.Module], batch: Batch) -> Path | None:
    """Return the marker file for networks and the shapes of a batch; None if there is no cache folder."""
    folder = os.environ.get(CACHE_VARIABLE)
    if not folder:
        return None
    shapes = sorted(f"{name} {tuple(value.shape)} {value.dtype}" for name, value in batch.items())
    parts = [str(identity()), config.run.precision, config.run.strategy, *map(str, networks), *shapes]
    return _folder_of(folder, config.recipe_name) / _digest("\n".join(parts))


def was_compiled(recipe: str) -> bool:
    """Return whether any networks of a recipe were compiled, so that another run of it will probably be compiled."""
    folder = os.environ.get(CACHE_VARIABLE) or compile_cache()
    return folder is not None and _folder_of(folder, recipe).is_dir()


def remember(marker: Path | None) -> None:
    """Create the marker file. A folder that cannot be written is ignored, because this must not stop a run."""
    if marker:
        with suppress(OSError):
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()


def _folder_of(kernels: str | Path, recipe: str) -> Path:
    return Path(kernels) / FOLDER / _digest(recipe)  # the name of a recipe may be a path


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
