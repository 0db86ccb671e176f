"""Records the finished parts of a file that is being written, so that a killed command can resume.

Parts have a fixed order. A part is recorded after it has been written, with its length and checksum. Anything after
the last recorded part, in the file or in the journal, is discarded. The journal is locked, so that only one command
writes the file.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import zlib
from array import array
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UserError
from paceline.core.text import printable
from paceline.core.types import JsonObject

RECORD = struct.Struct("<IIB")
BYTES_AT_ONCE = 1 << 24


class Part(NamedTuple):
    """A finished part of a file."""

    offset: int
    length: int
    flag: int  # a number from 0 to 255 that belongs to the part


class Parts:
    """The finished parts of a file, in a few bytes each, since a large file has many."""

    def __init__(self) -> None:
        self._offsets, self._lengths, self._flags = array("Q"), array("Q"), array("B")

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, number: int) -> Part:
        return Part(self._offsets[number], self._lengths[number], self._flags[number])

    def append(self, part: Part) -> None:
        """Add a part at the end."""
        self._offsets.append(part.offset)
        self._lengths.append(part.length)
        self._flags.append(part.flag)

    def truncate(self, num_parts: int) -> None:
        """Remove all parts from this number on."""
        for column in (self._offsets, self._lengths, self._flags):
            del column[num_parts:]

    def places(self, numbers: NDArray[np.int64]) -> tuple[bytes, bytes]:
        """Return the offsets and lengths of parts as 64-bit numbers."""
        offsets, lengths = (np.frombuffer(column, np.uint64)[numbers] for column in (self._offsets, self._lengths))
        return offsets.astype("<u8").tobytes(), lengths.astype("<u8").tobytes()


class JournaledFile:
    """A file that grows part by part. Its header is reserved when it is created."""

    def __init__(self, path: Path, journal: Path, purpose: JsonObject, header_bytes: int) -> None:
        self.path, self._journal = path, journal
        self.parts = Parts()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._log = _open_locked(journal, flags | os.O_APPEND)
        self._opened = [self._log]
        first_line = json.dumps(purpose, sort_keys=True).encode() + b"\n"
        records = _read(journal, first_line) if path.is_file() else b""
        self._file = os.open(path, flags | (0 if records else os.O_TRUNC), 0o666)
        self._opened.append(self._file)
        if records:
            self._resume(records, header_bytes)
        self._end = self.parts[-1].offset + self.parts[-1].length if self.parts else header_bytes
        os.ftruncate(self._file, self._end)
        os.ftruncate(self._log, 0 if not records else len(first_line) + RECORD.size * len(self.parts))
        if not records:
            _write(self._log, first_line)

    def append(self, content: bytes, flag: int = 0) -> None:
        """Write the next part, then record it."""
        _write_at(self._file, content, self._end)
        _write(self._log, RECORD.pack(len(content), zlib.crc32(content), flag))
        self.parts.append(Part(self._end, len(content), flag))
        self._end += len(content)

    def read(self, number: int) -> bytes:
        """Return a finished part."""
        part = self.parts[number]
        return os.pread(self._file, part.length, part.offset)

    def truncate(self, num_parts: int) -> None:
        """Discard all parts from this number on."""
        if num_parts < len(self.parts):
            removed = len(self.parts) - num_parts
            self._end = self.parts[num_parts].offset
            self.parts.truncate(num_parts)
            os.ftruncate(self._log, os.fstat(self._log).st_size - RECORD.size * removed)
            os.ftruncate(self._file, self._end)

    def complete(self, header: bytes, trailer: bytes) -> None:
        """Write the header and what follows the last part to the disk."""
        _write_at(self._file, trailer, self._end)
        _write_at(self._file, header, 0)
        os.fsync(self._file)

    def publish(self, target: Path) -> None:
        """Give a complete file its name, and remove the journal."""
        os.replace(self.path, target)
        self._journal.unlink()
        self.close()  # last, since this releases the lock

    @property
    def end(self) -> int:
        """The position after the last part."""
        return self._end

    def close(self) -> None:
        """Close the files, unless they are already closed; what has been written so far is kept."""
        while self._opened:
            os.close(self._opened.pop())

    def _resume(self, records: bytes, header_bytes: int) -> None:
        """Keep the recorded parts, up to the first damaged one."""
        offset = header_bytes
        for length, checksum, flag in RECORD.iter_unpack(records):
            content = os.pread(self._file, length, offset)
            if len(content) < length or zlib.crc32(content) != checksum:
                return
            self.parts.append(Part(offset, length, flag))
            offset += length


def purpose_of(journal: Path) -> JsonObject | None:
    """Return the purpose that a journal states for its file; None if there is no journal."""
    try:
        with journal.open("rb") as file:
            found = json.loads(file.readline(BYTES_AT_ONCE))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _open_locked(journal: Path, flags: int) -> int:
    """Open and lock a journal; raise UserError if another command uses it."""
    opened = os.open(journal, flags, 0o666)
    if not _lock(opened) or not _is_in_place(opened, journal):
        os.close(opened)
        raise UserError(f"{printable(journal)}: another command is writing this result; wait until it ends")
    return opened


def _lock(opened: int) -> bool:
    """Lock a file; return whether no other process has locked it."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # some file systems do not support locks
    return True


def _is_in_place(opened: int, journal: Path) -> bool:
    """Return whether an open journal still exists; a command that finishes removes its journal."""
    try:
        return os.path.samestat(os.fstat(opened), os.lstat(journal))
    except FileNotFoundError:
        return False


def _read(journal: Path, first_line: bytes) -> bytes:
    """Return the complete records of a journal; none if it does not exist or has another purpose."""
    try:
        content = journal.read_bytes()
    except OSError:
        return b""
    if not content.startswith(first_line):
        return b""
    records = content[len(first_line) :]
    return records[: len(records) // RECORD.size * RECORD.size]


def _write(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]


def _write_at(file: int, content: bytes, offset: int) -> None:
    while content:
        written = os.pwrite(file, content, offset)
        content, offset = content[written:], offset + written
