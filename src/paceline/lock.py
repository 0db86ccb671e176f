"""One writer at a time: the lock of a file, which dies with the process that holds it."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import ExitStack
from pathlib import Path

LOCK = ".lock"  # in a folder that has one writer
READERS_LOOK_SECONDS = 1.0  # who only looks whether a folder is in use has a share of its lock for a moment


class InUse(Exception):
    """Another process holds the lock; the text is its number."""


class Lock:
    """A folder's lock, held from here on until it is released."""

    def __init__(self, folder: Path) -> None:
        """Raises InUse where another process is the folder's writer, OSError where the folder cannot be written."""
        self.file = folder / LOCK
        until = time.monotonic() + READERS_LOOK_SECONDS
        while not self._take():
            if time.monotonic() > until:
                raise InUse(self._owner())
            time.sleep(0.01)

    def release(self, remove: bool = False) -> None:
        """Lets go of it, also for child processes that were started meanwhile; its file stays unless it is removed."""
        if remove:
            self.file.unlink(missing_ok=True)
        fcntl.flock(self._opened, fcntl.LOCK_UN)
        os.close(self._opened)

    def _take(self) -> bool:
        opened = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o644)
        with ExitStack() as unless_taken:
            unless_taken.callback(os.close, opened)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(opened), os.stat(self.file)):
                    return False  # its holder has removed it since, and others lock a new one
            except (BlockingIOError, FileNotFoundError):
                return False
            os.ftruncate(opened, 0)
            os.pwrite(opened, f"{os.getpid()}\n".encode(), 0)
            unless_taken.pop_all()
        self._opened = opened
        return True

    def _owner(self) -> str:
        try:
            return self.file.read_text().strip() or "?"
        except OSError:
            return "?"
