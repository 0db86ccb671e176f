"""File locks for a single writer, released when the process dies; symbolic links are not followed."""

from __future__ import annotations

import fcntl
import math
import os
import socket
import time
from contextlib import ExitStack
from pathlib import Path

from paceline.core.small_files import read_bounded

LOCK = ".lock"  # name of the lock file in the locked folder
MAX_OWNER_BYTES = 300  # a process ID and a host name
READER_SECONDS = 1.0  # how long to wait for readers, which hold a shared lock only briefly


class InUse(Exception):
    """Raised if another process holds the lock. The message is its process ID, and its host if that is another one.

    `is_elsewhere` is true if the process runs on another host. If that host goes down, the shared file system may
    keep the lock for some time.
    """

    def __init__(self, process: str, host: str) -> None:
        self.is_elsewhere = host not in ("", socket.gethostname())
        super().__init__(f"{process} on host {host}" if self.is_elsewhere else process)


class Lock:
    """A lock on a folder, acquired by the constructor and held until `release`."""

    def __init__(self, folder: Path, name: str = LOCK, *, wait_seconds: float = READER_SECONDS) -> None:
        """Acquire the lock; raise InUse if another process still holds it after `wait_seconds`."""
        self.file = folder / name
        until = time.monotonic() + wait_seconds
        while not self._take():
            if time.monotonic() > until:
                raise InUse(*self._owner())
            time.sleep(0.01 if wait_seconds < math.inf else 0.1)

    @property
    def is_in_place(self) -> bool:
        """Whether this process's lock file is still in the folder."""
        try:
            return os.path.samestat(os.fstat(self._opened), os.lstat(self.file))
        except OSError:
            return False

    def release(self, remove: bool = False) -> None:
        """Release the lock, including in child processes that inherited it; with `remove`, delete the lock file."""
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
                    return False  # the previous owner has removed this file, so a new lock file is used
            except (BlockingIOError, FileNotFoundError):
                return False
            os.ftruncate(opened, 0)
            os.pwrite(opened, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
            unless_taken.pop_all()
        self._opened = opened
        return True

    def _owner(self) -> tuple[str, str]:
        """Return the process and the host in the lock file; "?" and an empty host if they cannot be read."""
        try:
            process, _, host = read_bounded(self.file, MAX_OWNER_BYTES).decode(errors="replace").strip().partition(" ")
        except OSError:
            return "?", ""
        return process or "?", host


def is_locked(descriptor: int) -> bool | None:
    """Return whether a writer has locked an open file, or None if the file system does not support locks.

    The check acquires a shared lock for a moment. A writer that starts at that moment waits until it is released.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def is_folder_locked(folder: Path) -> bool:
    """Return whether a process has locked a folder; False if there is no lock, or its file system does not tell."""
    try:
        opened = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return bool(is_locked(opened))
    finally:
        os.close(opened)
