"""Data types that describe malicious images and run folders in tests."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple


class HostileImage(NamedTuple):
    """A damaged or malicious image file, and whether commands must accept or reject the file."""

    name: str
    path: Path
    verdict: Literal["ok", "rejected", "not-an-image"]


class HostileRun(NamedTuple):
    """A malicious run folder, and the files outside the folder that no command may change."""

    name: str
    path: Path
    victims: list[Path]
