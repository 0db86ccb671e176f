"""The state files in a run folder: status.json (running, finished, stopped or failed, and why) and mirror.json.

A killed process cannot update its status, which stays "running". Readers then check the lock, which is released when
the process dies, or how long ago a file was last written.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.core.files import read_bounded, write_json

STATUS = "status.json"
MIRROR_STATE = "mirror.json"
STATES = ("running", "finished", "stopped", "failed")
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"not a finite number: {value}")
    return number


@dataclass(frozen=True)
class Status:
    """The state of a run, written by its own process."""

    state: str
    since: float  # Unix time at which the state was recorded
    total_images: int = 0  # length of training in images; 0 if unknown
    reason: str = ""  # one-line reason for a failure
    host: str = ""
    pid: int = 0

    @classmethod
    def now(cls, state: str, total_images: int, reason: str = "") -> Status:
        """Return a status for this process with the current time."""
        assert state in STATES, state
        return cls(state, round(time.time(), 3), total_images, reason, socket.gethostname(), os.getpid())

    @classmethod
    def parse(cls, content: bytes) -> Status | None:
        """Parse a status file; return None if it cannot be read."""
        try:
            read: Any = json.loads(content)
            return cls(
                state=str(read["state"]),
                since=_finite(read["since"]),
                total_images=int(read.get("total_images", 0)),
                reason=str(read.get("reason", "")),
                host=str(read.get("host", "")),
                pid=int(read.get("pid", 0)),
            )
        except _UNREADABLE:
            return None

    @classmethod
    def of(cls, folder: Path) -> Status | None:
        """Return the status of a run, or None if it has none."""
        file = folder / STATUS
        try:
            return cls.parse(read_bounded(file))
        except OSError:
            return None

    def write(self, folder: Path) -> None:
        """Write the status to a run folder, replacing the old one."""
        write_json(folder / STATUS, asdict(self), durable=False)


@dataclass(frozen=True)
class MirrorState:
    """The progress of a run's mirror."""

    url: str
    images: int = 0  # images seen at the newest published checkpoint; 0 if there is none
    since: float = 0.0  # Unix time when `images` was last set
    error: str = ""  # one-line reason why uploads are failing

    @classmethod
    def parse(cls, content: bytes) -> MirrorState | None:
        """Parse a mirror state file; return None if it cannot be read."""
        try:
            read: Any = json.loads(content)
            return cls(str(read["url"]), int(read["images"]), _finite(read["since"]), str(read["error"]))
        except _UNREADABLE:
            return None

    def write(self, folder: Path) -> None:
        """Write the mirror's state to a run folder, replacing the old one."""
        write_json(folder / MIRROR_STATE, asdict(self), durable=False)
