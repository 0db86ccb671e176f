"""Records which networks already have compiled kernels in the cache, since compiling them again is much faster.

For each set of networks, an empty marker file is created in the cache folder, so that it is deleted with the kernels.
Another file beside it stores how long their step takes, so that it is measured only once.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from torch import nn

from paceline.config.resolve import Config
from paceline.contracts.recipe import Batch
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
    return Path(folder) / FOLDER / sha256("\n".join(parts).encode()).hexdigest()


def was_compiled(marker: Path | None) -> bool:
    """Return whether the marker file exists."""
    return marker is not None and marker.exists()


def remember(marker: Path | None) -> None:
    """Create the marker file. A folder that cannot be written is ignored, because this must not stop a run."""
    if marker:
        with suppress(OSError):
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()


def recorded_time(marker: Path | None) -> float:
    """Return how many seconds a step of these networks takes without compiling; 0 if this was never measured."""
    if marker:
        with suppress(OSError, ValueError):
            seconds = float(_time_file(marker).read_text())
            return seconds if math.isfinite(seconds) else 0.0
    return 0.0


def remember_time(marker: Path | None, seconds: float) -> None:
    """Store how many seconds a step takes. A folder that cannot be written is ignored."""
    if marker:
        with suppress(OSError):
            marker.parent.mkdir(parents=True, exist_ok=True)
            _time_file(marker).write_text(str(seconds))


def _time_file(marker: Path) -> Path:
    return marker.with_suffix(".seconds")
