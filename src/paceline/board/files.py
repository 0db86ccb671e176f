"""Read-only access to the files under one root folder, local or at a URL.

Names are relative to the root and use slashes. Locally, only regular files inside the root are read: a symbolic link
that leads outside, a pipe or a device is treated as missing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from datetime import datetime
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from paceline.core.errors import UserError
from paceline.core.files import is_locked, user_path
from paceline.core.storage.files import open_file_system
from paceline.core.text import redact

UNREADABLE = (FileNotFoundError, PermissionError, IsADirectoryError)  # errors that concern one file, not the storage


class Entry(NamedTuple):
    """One file or subfolder in a folder."""

    name: str  # path relative to the root
    is_folder: bool
    size: int
    changed: float  # Unix time; 0 if the storage does not provide it

    @property
    def basename(self) -> str:
        """The name without its folder."""
        return self.name.rpartition("/")[2]


class LocalFiles:
    """A local folder."""

    local = True

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self._prefix = os.path.join(self.root, "")  # every path inside the root starts with it
        self.shown = str(root)

    def entries(self, folder: str) -> list[Entry]:
        """Return the files and subfolders in a folder; empty if the folder does not exist."""
        path = self._real_path(folder)
        if path is None:
            return []
        try:
            with os.scandir(path) as scanned:
                return sorted(filter(None, (self._entry(one, folder) for one in scanned)))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return []

    def _entry(self, one: os.DirEntry[str], folder: str) -> Entry | None:
        try:
            target = os.path.realpath(one.path) if one.is_symlink() else ""
            if not one.name.isprintable() or (target and not self._inside(target)):
                return None
            status = one.stat()
        except (OSError, ValueError):  # the entry was just removed, or its name cannot be decoded
            return None
        if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
            return None
        if target and stat.S_ISDIR(status.st_mode) and "/." not in f"/{target[len(self._prefix) :]}":
            return None  # the folder itself is found, too
        name = f"{folder}/{one.name}" if folder else one.name
        return Entry(name, stat.S_ISDIR(status.st_mode), status.st_size, status.st_mtime)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Return the bytes [start, end) of a file; raise one of `UNREADABLE` if it cannot be read."""
        with self._open(name) as file:
            file.seek(start)
            return file.read(-1 if end is None else max(0, end - start))

    def is_locked(self, name: str) -> bool | None:
        """Return whether a process has locked a file, or None if that is unknown."""
        try:
            with self._open(name) as file:
                return is_locked(file.fileno())
        except OSError:
            return None

    def _open(self, name: str) -> BufferedReader:
        path = self._real_path(name)
        if path is None:
            raise FileNotFoundError(name)
        # If a pipe has just replaced the file, O_NONBLOCK keeps the call from blocking.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise FileNotFoundError(name)
        return os.fdopen(file, "rb")

    def _real_path(self, name: str) -> str | None:
        """Resolve the symbolic links in a path; return None if it leads outside the root."""
        try:
            path = os.path.realpath(self._prefix + name)
        except (OSError, ValueError):
            return None
        return path if self._inside(path) else None

    def _inside(self, path: str) -> bool:
        return os.path.join(path, "").startswith(self._prefix)


class RemoteFiles:
    """A folder at any URL that fsspec supports."""

    local = False

    def __init__(self, file_system: Any, root: str, shown: str) -> None:
        self._files, self._root, self.shown = file_system, root.rstrip("/"), shown

    def entries(self, folder: str) -> list[Entry]:
        path = self._path(folder)
        self._files.invalidate_cache()
        try:
            found = self._files.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        entries = []
        for one in found:
            last = str(one["name"]).rstrip("/").rpartition("/")[2]
            if last in ("", ".", "..") or not last.isprintable() or str(one["name"]).rstrip("/") == path.rstrip("/"):
                continue
            name = f"{folder}/{last}" if folder else last
            entries.append(Entry(name, one["type"] == "directory", int(one.get("size") or 0), _changed(one)))
        return sorted(entries)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        return bytes(self._files.cat_file(self._path(name), start=start, end=end))

    def is_locked(self, name: str) -> bool | None:
        return None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


Files: TypeAlias = LocalFiles | RemoteFiles


def _changed(details: Mapping[str, object]) -> float:
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = details.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0


def open_files(where: str) -> Files:
    """Return the files under a folder or a URL; raise UserError if there is no such folder."""
    if "://" not in where:
        return _open_local(user_path(where))
    from fsspec.implementations.local import LocalFileSystem

    file_system, root = open_file_system(where, where)
    if isinstance(file_system, LocalFileSystem):
        return _open_local(Path(root))
    return RemoteFiles(file_system, root, redact(where))


def _open_local(root: Path) -> LocalFiles:
    if not root.is_dir():
        what = "not a folder" if root.exists() else "no such folder"
        raise UserError(f"{root}: {what}: pass the folder that contains your runs")
    return LocalFiles(root)
