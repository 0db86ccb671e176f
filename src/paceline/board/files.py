"""The files under one root, on this machine or behind a URL: listed and read, never written.

Names are relative to the root, with slashes. On this machine nothing is read whose real place is outside of the
root, and only plain files are: a symbolic link to elsewhere, a pipe or a device is as if it were not there.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from paceline.core.errors import UserError
from paceline.core.secrets import redact
from paceline.runs.mirror.destination import open_file_system


class Entry(NamedTuple):
    """What a folder holds under one name."""

    name: str  # relative to the root
    is_folder: bool
    size: int
    changed: float  # Unix time; 0 where the storage does not say

    @property
    def last(self) -> str:
        """The name inside its folder."""
        return self.name.rpartition("/")[2]


class Files(Protocol):
    """How the board sees a root."""

    shown: str  # the root, for people
    local: bool

    def entries(self, folder: str) -> list[Entry]:
        """What a folder holds; nothing where there is no such folder."""

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """The bytes of a file from `start` to before `end`; FileNotFoundError where it may not be read."""

    def sample(self, name: str, starts: Iterable[int], length: int) -> list[bytes]:
        """Short pieces of a large file."""

    def is_locked(self, name: str) -> bool | None:
        """Whether a process holds a file's lock; None where that cannot be known."""


class LocalFiles:
    """A folder of this machine."""

    local = True

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self.shown = str(root)

    def entries(self, folder: str) -> list[Entry]:
        place = self._place(folder)
        if place is None:
            return []
        entries: list[Entry] = []
        try:
            with os.scandir(place) as found:
                for one in found:
                    entry = self._entry(one, folder)
                    if entry:
                        entries.append(entry)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return []
        return sorted(entries)

    def _entry(self, one: os.DirEntry[str], folder: str) -> Entry | None:
        try:
            if not one.name.isprintable() or (one.is_symlink() and not self._inside(os.path.realpath(one.path))):
                return None
            facts = one.stat()
        except (OSError, ValueError):  # gone meanwhile, or a name that is no text
            return None
        if not (stat.S_ISDIR(facts.st_mode) or stat.S_ISREG(facts.st_mode)):
            return None
        name = f"{folder}/{one.name}" if folder else one.name
        return Entry(name, stat.S_ISDIR(facts.st_mode), facts.st_size, facts.st_mtime)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        file = self._open(name)
        try:
            size = os.fstat(file).st_size if end is None else end
            return _read_all(file, start, size - start)
        finally:
            os.close(file)

    def sample(self, name: str, starts: Iterable[int], length: int) -> list[bytes]:
        file = self._open(name)
        try:
            return [os.pread(file, length, start) for start in starts]
        finally:
            os.close(file)

    def is_locked(self, name: str) -> bool | None:
        """Asks for a share of the lock for a moment, which a writer that begins just then waits out."""
        try:
            file = self._open(name)
        except OSError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            return None
        finally:
            os.close(file)

    def _open(self, name: str) -> int:
        place = self._place(name)
        if place is None:
            raise FileNotFoundError(name)
        # Not blocking, so that a pipe that was put there just now cannot hold us.
        file = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise FileNotFoundError(name)
        return file

    def _place(self, name: str) -> str | None:
        """The real path of a name, where that is inside the root."""
        try:
            place = os.path.realpath(self.root / name)
        except (OSError, ValueError):
            return None
        return place if self._inside(place) else None

    def _inside(self, place: str) -> bool:
        return Path(place).is_relative_to(self.root)


def _read_all(file: int, start: int, length: int) -> bytes:
    parts = []
    while length > 0 and (part := os.pread(file, length, start)):
        parts.append(part)
        start, length = start + len(part), length - len(part)
    return b"".join(parts)


class RemoteFiles:
    """A folder behind any URL that fsspec knows."""

    local = False

    def __init__(self, file_system: Any, root: str, shown: str) -> None:
        self._files, self._root, self.shown = file_system, root.rstrip("/"), shown

    def entries(self, folder: str) -> list[Entry]:
        place = self._place(folder)
        self._files.invalidate_cache()
        try:
            found = self._files.ls(place, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        entries = []
        for one in found:
            last = str(one["name"]).rstrip("/").rpartition("/")[2]
            if last in ("", ".", "..") or not last.isprintable() or str(one["name"]).rstrip("/") == place.rstrip("/"):
                continue
            name = f"{folder}/{last}" if folder else last
            entries.append(Entry(name, one["type"] == "directory", int(one.get("size") or 0), _changed(one)))
        return sorted(entries)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        return self._files.cat_file(self._place(name), start=start, end=end)

    def sample(self, name: str, starts: Iterable[int], length: int) -> list[bytes]:
        starts = list(starts)
        return self._files.cat_ranges(
            [self._place(name)] * len(starts), starts, [start + length for start in starts], on_error="raise"
        )

    def is_locked(self, name: str) -> bool | None:
        return None

    def _place(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def _changed(facts: dict[str, Any]) -> float:
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value: Any = facts.get(name)
        if hasattr(value, "timestamp"):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0


def open_files(where: str) -> Files:
    """The files of a folder or of a URL; says in one line why there are none."""
    if "://" not in where:
        return _open_local(Path(where))
    from fsspec.implementations.local import LocalFileSystem

    file_system, root = open_file_system(where, where)
    if isinstance(file_system, LocalFileSystem):
        return _open_local(Path(root))
    return RemoteFiles(file_system, root, redact(where))


def _open_local(root: Path) -> LocalFiles:
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; give the folder that holds your runs")
    return LocalFiles(root)
