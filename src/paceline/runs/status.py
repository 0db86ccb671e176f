"""The state of a run in its folder: status.json (running, finished, stopped or failed, and why) and mirror.json.

A process that is killed cannot write its end: its file still has the state running. Readers then check the lock, which
dies with the process, or how long nothing was written.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.core.files import write_json

STATUS = "status.json"
MIRROR_STATE = "mirror.json"
STATES = ("running", "finished", "stopped", "failed")
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Status:
    """The state of a run, written by its own process."""

    state: str
    since: float  # Unix time
    total_images: int = 0  # the length of training; 0 where it is not known
    reason: str = ""  # why the run failed, in one line
    host: str = ""
    pid: int = 0

    @classmethod
    def now(cls, state: str, total_images: int, reason: str = "") -> Status:
        """Return a status of this process at this moment."""
        assert state in STATES, state
        return cls(state, round(time.time(), 3), total_images, reason, socket.gethostname(), os.getpid())

    @classmethod
    def parse(cls, content: bytes) -> Status | None:
        """Return the status in a file's content, None where it cannot be read."""
        try:
            read: Any = json.loads(content)
            return cls(
                state=str(read["state"]),
                since=float(read["since"]),
                total_images=int(read.get("total_images", 0)),
                reason=str(read.get("reason", "")),
                host=str(read.get("host", "")),
                pid=int(read.get("pid", 0)),
            )
        except _UNREADABLE:
            return None

    @classmethod
    def of(cls, folder: Path) -> Status | None:
        """Return the status of a run, None where it has none."""
        file = folder / STATUS
        return cls.parse(file.read_bytes()) if file.is_file() else None

    def write(self, folder: Path) -> None:
        """Replace the status in a run's folder."""
        write_json(folder / STATUS, asdict(self), durable=False)


@dataclass(frozen=True)
class MirrorState:
    """How far a run's mirror is."""

    url: str
    images: int = 0  # seen at the newest checkpoint that is published there; 0 where none is
    since: float = 0.0  # Unix time of that
    error: str = ""  # why nothing can be sent at the moment, in one line

    @classmethod
    def parse(cls, content: bytes) -> MirrorState | None:
        """Return the state in a file's content, None where it cannot be read."""
        try:
            read: Any = json.loads(content)
            return cls(str(read["url"]), int(read["images"]), float(read["since"]), str(read["error"]))
        except _UNREADABLE:
            return None

    def write(self, folder: Path) -> None:
        """Replace the mirror's state in a run's folder."""
        write_json(folder / MIRROR_STATE, asdict(self), durable=False)
