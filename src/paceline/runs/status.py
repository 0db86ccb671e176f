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
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from paceline.core.files import read_bounded, write_json

STATUS = "status.json"
MIRROR_STATE = "mirror.json"
STATES = ("running", "finished", "stopped", "failed")
_TYPES: dict[Any, Callable[[Any], Any]] = {"str": str, "int": int, "float": float}
Record = TypeVar("Record", "Status", "MirrorState")


def _parse(kind: type[Record], content: bytes) -> Record | None:
    """Return the record in a JSON file; None if it cannot be read, or lacks a field that has no default."""
    try:
        read = json.loads(content)
        record = kind(**{one.name: _TYPES[one.type](read[one.name]) for one in fields(kind) if one.name in read})
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return record if math.isfinite(record.since) else None


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
        return _parse(cls, content)

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
        return _parse(cls, content)

    def write(self, folder: Path) -> None:
        """Write the mirror's state to a run folder, replacing the old one."""
        write_json(folder / MIRROR_STATE, asdict(self), durable=False)
