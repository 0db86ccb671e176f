"""Types of hostile input. Each list of cases has its own module, and one test per command uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple


class HostileImage(NamedTuple):
    """A file in a folder of images, and what every command must do with it."""

    name: str
    path: Path
    verdict: Literal["ok", "rejected", "not-an-image"]


class HostileRun(NamedTuple):
    """A run folder from a stranger, and the files outside it that no command may change."""

    name: str
    path: Path
    victims: list[Path]
