"""Write a checkpoint's tensors from several processes, each of which has some rows of the sharded tensors.

The first process creates the files and later completes the checkpoint. No process ever has a whole sharded tensor.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from torch import Tensor

from paceline.runs.snapshot import Rows, Snapshot
from paceline.runs.tensor_file import reserve, write_rows
from paceline.runs.tensors import ALIASES, TensorNotes, find_notes
from paceline.runs.written_files import TENSORS, WriteTensors, Written


class Writers(Protocol):
    """The processes that write a checkpoint together."""

    @property
    def rank(self) -> int:
        """The position of this process; process 0 creates the files."""

    def exchange(self, text: str) -> list[str]:
        """Return the texts of all processes, in rank order."""


@contextmanager
def joint_writer(writers: Writers) -> Iterator[WriteTensors]:
    """Yield a function with which process 0 writes a checkpoint's tensors, while the others call `help_write`.

    If the function is not called, the other processes write nothing.
    """
    announced = False

    def write(folder: Path, snapshot: Snapshot, metadata: Mapping[str, str]) -> dict[str, Written]:
        nonlocal announced
        notes = {
            name: _reserve(folder / name, tensors, snapshot.rows, metadata if name == TENSORS[0] else {})
            for name, tensors in zip(TENSORS, (snapshot.weights, snapshot.state), strict=True)
        }
        announced = True
        writers.exchange(str(folder))
        problems = writers.exchange(_write_own(folder, snapshot, snapshot.weights, snapshot.state))
        for rank, problem in enumerate(problems):
            if problem:
                raise OSError(errno.EIO, problem if rank == writers.rank else f"{problem} (rank {rank})")
        return {name: Written(_digest(folder / name), note) for name, note in notes.items()}

    try:
        yield write
    finally:
        if not announced:
            writers.exchange("")


def help_write(snapshot: Snapshot, writers: Writers) -> None:
    """Write this process's rows of the sharded tensors to the files that process 0 creates."""
    folder = writers.exchange("")[0]
    if folder:
        own = ({name: t for name, t in part.items() if name in snapshot.rows} for part in _parts(snapshot))
        writers.exchange(_write_own(Path(folder), snapshot, *own))


def _parts(snapshot: Snapshot) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return snapshot.weights, snapshot.state


def _write_own(folder: Path, snapshot: Snapshot, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    """Write tensors to the checkpoint's files; return why this failed, or "" if it did not."""
    first = {name: rows.first for name, rows in snapshot.rows.items()}
    try:
        for name, tensors in zip(TENSORS, (weights, state), strict=True):
            write_rows(folder / name, tensors, first)
    except OSError as error:
        return error.strerror or str(error)
    except Exception as error:  # the other processes wait for this one, so every error must be reported to them
        return f"{type(error).__name__}: {error}"
    return ""


def _reserve(
    path: Path, tensors: Mapping[str, Tensor], rows: Mapping[str, Rows], metadata: Mapping[str, str]
) -> TensorNotes:
    notes = find_notes(tensors)
    shapes = {
        name: (tensor.dtype, rows[name].shape if name in rows else tuple(tensor.shape))
        for name, tensor in tensors.items()
        if name not in notes.aliases
    }
    aliases = {ALIASES: json.dumps(notes.aliases)} if notes.aliases and metadata else {}
    reserve(path, shapes, {**metadata, **aliases})
    return notes


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
