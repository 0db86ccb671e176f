"""File locks that allow one writer at a time and are released when their process dies. Links are not followed."""

from __future__ import annotations

import fcntl
import math
import os
import time
from contextlib import ExitStack
from pathlib import Path

from paceline.core.small_files import read_bounded

LOCK = ".lock"  # file name in the locked folder
MAX_OWNER_BYTES = 100
READER_SECONDS = 1.0  # how long to wait for readers, which hold a shared lock only briefly


class InUse(Exception):
    """Another process holds the lock; the message is its process ID."""


class Lock:
    """A folder's lock, held from construction until `release`."""

    def __init__(self, folder: Path, name: str = LOCK, *, wait_seconds: float = READER_SECONDS) -> None:
        """Take the lock; raise InUse if it is still held after the wait, OSError if it cannot be created."""
        self.file = folder / name
        until = time.monotonic() + wait_seconds
        while not self._take():
            if time.monotonic() > until:
                raise InUse(self._owner())
            time.sleep(0.01 if wait_seconds < math.inf else 0.1)

    @property
    def is_in_place(self) -> bool:
        """Whether the lock file of this process is still in the folder."""
        try:
            return os.path.samestat(os.fstat(self._opened), os.lstat(self.file))
        except OSError:
            return False

    def release(self, remove: bool = False) -> None:
        """Release the lock, including in child processes that inherited it; with `remove`, delete its file."""
        if remove:
            self.file.unlink(missing_ok=True)
        fcntl.flock(self._opened, fcntl.LOCK_UN)
        os.close(self._opened)

    def _take(self) -> bool:
        opened = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        with ExitStack() as unless_taken:
            unless_taken.callback(os.close, opened)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(opened), os.lstat(self.file)):
                    return False  # the previous holder removed this file, and others lock a new one
            except (BlockingIOError, FileNotFoundError):
                return False
            os.ftruncate(opened, 0)
            os.pwrite(opened, f"{os.getpid()}\n".encode(), 0)
            unless_taken.pop_all()
        self._opened = opened
        return True

    def _owner(self) -> str:
        try:
            return read_bounded(self.file, MAX_OWNER_BYTES).decode(errors="replace").strip() or "?"
        except OSError:
            return "?"


def is_locked(descriptor: int) -> bool | None:
    """Return whether a writer holds the lock of an open file; None if the file system has no locks.

    This briefly takes a shared lock; a writer that starts at that moment waits for it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False
