"""What a run says of itself: in status.json whether it is running, finished, stopped or failed, and why.

A process that is killed says nothing more: its file still says running, and the lock that died with it, or the
silence since, tells the rest to who looks. In mirror.json it says how its mirror fares.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STATUS = "status.json"
MIRROR_STATE = "mirror.json"
STATES = ("running", "finished", "stopped", "failed")


@dataclass(frozen=True)
class Status:
    """A run's own word."""

    state: str
    since: float  # Unix time
    total_images: int = 0  # the length of training; 0 where it is not known
    why: str = ""  # of a run that failed, in one line
    host: str = ""
    process: int = 0

    @classmethod
    def now(cls, state: str, total_images: int, why: str = "") -> Status:
        """What this process says at this moment."""
        assert state in STATES, state
        return cls(state, round(time.time(), 3), total_images, why, socket.gethostname(), os.getpid())

    @classmethod
    def parse(cls, content: bytes) -> Status | None:
        """What a file says, or nothing where it says nothing that can be read."""
        try:
            said: Any = json.loads(content)
            return cls(
                state=str(said["state"]),
                since=float(said["since"]),
                total_images=int(said.get("total_images", 0)),
                why=str(said.get("why", "")),
                host=str(said.get("host", "")),
                process=int(said.get("process", 0)),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return None

    @classmethod
    def of(cls, folder: Path) -> Status | None:
        """What a run says of itself, if anything."""
        file = folder / STATUS
        return cls.parse(file.read_bytes()) if file.is_file() else None

    def write(self, folder: Path) -> None:
        """Replaces the folder's file in one step."""
        _replace(folder / STATUS, asdict(self))


@dataclass(frozen=True)
class MirrorState:
    """How far a run's mirror is, as the run says in mirror.json."""

    url: str
    images: int = 0  # seen at the newest checkpoint that is published there; 0 where none is
    since: float = 0.0  # Unix time of that
    trouble: str = ""  # why nothing more comes there just now, in one line

    @classmethod
    def parse(cls, content: bytes) -> MirrorState | None:
        """What a file says, or nothing where it says nothing that can be read."""
        try:
            said: Any = json.loads(content)
            return cls(str(said["url"]), int(said["images"]), float(said["since"]), str(said["trouble"]))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return None

    def write(self, folder: Path) -> None:
        """Replaces the folder's file in one step."""
        _replace(folder / MIRROR_STATE, asdict(self))


def _replace(file: Path, content: dict[str, Any]) -> None:
    beside = file.with_suffix(".writing")
    beside.write_text(json.dumps(content, ensure_ascii=False) + "\n")
    beside.replace(file)
