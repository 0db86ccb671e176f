"""The flight recorder: the last collective operations that this process started, readable after it hangs.

The record is a small memory-mapped file that another process can read at any time, even if this process is stopped or
has been killed. If no launcher has provided a file, or the file cannot be written, the record is only available within
this process. Recording an operation takes about a microsecond.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

RECORD_FILE = "PACELINE_FLIGHT_RECORD"  # environment variable with the path of the file
CAPACITY = 256  # operations kept
_HEADER = struct.Struct("<qqqq")  # rank, number of ranks, operations started, whether stacks can be requested
NAME_BYTES = 160
INCOMPLETE = ", without "  # in the name of an exchange of gradients, followed by the parameters that have no gradient
_OPERATION = struct.Struct(f"<qq{NAME_BYTES}s")  # number, training step, name
_LOGS_BYTES = 1024  # path of the logs folder, after the header
_START = _HEADER.size + _LOGS_BYTES
_SIZE = _START + CAPACITY * _OPERATION.size


class Operation(NamedTuple):
    """A collective operation that a process has started."""

    number: int  # 1 for the first operation of the process
    step: int  # training step, or -1 outside the training loop
    name: str

    def __str__(self) -> str:
        return f"{self.name!r} ({f'step {self.step}, ' if self.step >= 0 else ''}operation {self.number})"


@dataclass(frozen=True)
class Record:
    """What one process has recorded."""

    rank: int
    size: int
    dumps_stacks: bool
    logs: str
    operations: tuple[Operation, ...] = field(repr=False)  # the last ones, in order

    @property
    def last(self) -> Operation | None:
        """The last operation that the process started; None if there is none."""
        return self.operations[-1] if self.operations else None

    @classmethod
    def parse(cls, content: bytes) -> Record | None:
        """Parse a record; None if the content is too short."""
        if len(content) < _SIZE:
            return None
        rank, size, count, dumps = _HEADER.unpack_from(content)
        found = []
        for number in range(max(1, count - CAPACITY + 1), count + 1):
            kept, step, name = _OPERATION.unpack_from(content, _START + (number % CAPACITY) * _OPERATION.size)
            if kept == number:  # otherwise the process was writing this entry
                found.append(Operation(number, step, _text(name)))
        return cls(rank, size, bool(dumps), _text(content[_HEADER.size : _START]), tuple(found))

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """Return the record in a file; None if there is none."""
        try:
            return cls.parse(path.read_bytes())
        except OSError:
            return None


def num_started(path: Path) -> int | None:
    """Return the number of operations in a record, without reading them; None if there is no record."""
    try:
        with path.open("rb") as file:
            return int(_HEADER.unpack(file.read(_HEADER.size))[2])
    except (OSError, struct.error):
        return None


class FlightRecorder:
    """Records the collective operations of this process."""

    def __init__(self, path: str = "") -> None:
        self._memory = _map_file(path) if path else mmap.mmap(-1, _SIZE)
        self._rank, self._size, self._count, self._dumps_stacks = -1, 1, 0, False
        self.step = -1  # the current training step
        self.where = "start-up"  # the current part of the run, such as a phase
        self._write_header()

    def set_rank(self, rank: int, size: int) -> None:
        """Record this process's rank, and the number of ranks."""
        self._rank, self._size = rank, size
        self._write_header()

    def join(self, rank: int, size: int) -> None:
        """Record that this process joins a process group, which is its first collective operation."""
        self.set_rank(rank, size)
        self.start("join the process group")

    def announce_logs(self, folder: str, dumps_stacks: bool) -> None:
        """Record the logs folder, and whether a signal makes this process write its stacks there."""
        encoded = os.fsencode(folder)[: _LOGS_BYTES - 1]
        self._memory[_HEADER.size : _START] = encoded.ljust(_LOGS_BYTES, b"\0")
        self._dumps_stacks = dumps_stacks
        self._write_header()

    def start(self, what: str) -> int:
        """Record that this process starts a collective operation; return the operation's number."""
        self._count += 1
        self._write_operation(self._count, what)
        self._write_header()
        return self._count

    def rename(self, number: int, what: str) -> None:
        """Change the name of an operation of the current step, because it was not what it should have been."""
        if number > self._count - CAPACITY:
            self._write_operation(number, what)

    def record(self) -> Record:
        """Return what has been recorded."""
        found = Record.parse(self._memory[:])
        assert found is not None
        return found

    def _write_operation(self, number: int, what: str) -> None:
        name = f"{self.where}: {what}".encode()[:NAME_BYTES]
        _OPERATION.pack_into(self._memory, _START + (number % CAPACITY) * _OPERATION.size, number, self.step, name)

    def _write_header(self) -> None:
        _HEADER.pack_into(self._memory, 0, self._rank, self._size, self._count, self._dumps_stacks)


def _map_file(path: str) -> mmap.mmap:
    """Map the file. If it cannot be written, for example because the disk is full, map memory without a file."""
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            # Without space on the disk, a process that writes to the mapped file would be killed.
            os.posix_fallocate(file.fileno(), 0, _SIZE)
            return mmap.mmap(file.fileno(), _SIZE)
    except OSError:
        return mmap.mmap(-1, _SIZE)


def _text(content: bytes) -> str:
    return content.rstrip(b"\0").decode(errors="replace")


_recorder: FlightRecorder | None = None


def recorder() -> FlightRecorder:
    """Return this process's flight recorder."""
    global _recorder
    if _recorder is None:
        _recorder = FlightRecorder(os.environ.get(RECORD_FILE, ""))
    return _recorder


def start_operation(what: str) -> None:
    """Record that this process starts a collective operation."""
    recorder().start(what)
