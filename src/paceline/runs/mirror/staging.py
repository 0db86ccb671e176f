"""A consistent copy of a run's files, taken while training changes the originals."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from paceline.core.checksums import checksum_of_file
from paceline.core.secrets import redact
from paceline.runs.checkpoint import NAME
from paceline.runs.console import LOGS
from paceline.runs.metrics import SAMPLE_NAME, SAMPLES
from paceline.runs.mirror.published import CHANGING, CHECKPOINTS, OBJECTS, Piece
from paceline.runs.status import STATUS

STAGING = ".mirror"
PART_LENGTH = 2**16  # number of characters to redact at a time
MAX_LINE_LENGTH = 2**24


class Staging:
    """A hidden folder in the run folder that holds files until they are sent."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / STAGING
        self._digests: dict[tuple[str, int, int, int], str] = {}

    def take(self) -> dict[str, Path]:
        """Copy a snapshot of the run, except its samples, to the hidden folder; return all of its files by name."""
        self.clear()
        for images in self.checkpoints():
            name = f"{CHECKPOINTS}/{images:012d}"
            _link_all(self.folder / name, self.path / name)
        for name in CHANGING:  # copied after the checkpoints, so that no metrics are missing
            self.copy(name)
        staged = {file.relative_to(self.path).as_posix(): file for file in self.path.rglob("*") if file.is_file()}
        samples = {f"{SAMPLES}/{file.name}": file for file in self._samples()}
        return dict(sorted((staged | samples).items()))

    def copy(self, name: str) -> Path | None:
        """Copy a file that may still grow, and return the copy; None if there is no such file."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(self.folder / name, target)
        except FileNotFoundError:
            return None
        if target.parent.name == LOGS:  # a library may have printed a credential
            _redact_file(target)
        return target

    def describe(self, files: dict[str, Path]) -> dict[str, Piece]:
        """Return the manifest entry for each file; an unchanged file is not read again."""
        keys = {name: _key(name, file) for name, file in files.items()}
        self._digests = {
            keys[name]: self._digests.get(keys[name]) or checksum_of_file(file) for name, file in files.items()
        }
        return {name: _piece(name, self._digests[key], key[-1]) for name, key in keys.items()}

    def clear(self) -> None:
        """Remove the hidden folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def checkpoints(self) -> list[int]:
        """Return the number of images seen at each checkpoint in the run folder."""
        return _checkpoints(self.folder)

    def staged_checkpoints(self) -> list[int]:
        """Return the number of images seen at each checkpoint in the hidden folder."""
        return _checkpoints(self.path)

    def live_files(self) -> Iterator[Path]:
        """Yield the files that users look at during training."""
        yield from (self.folder / name for name in (*CHANGING, STATUS) if (self.folder / name).exists())
        yield from sorted((self.folder / LOGS).glob("rank-*.txt"))
        yield from self._samples()

    def _samples(self) -> list[Path]:
        return sorted(file for file in (self.folder / SAMPLES).glob("*") if SAMPLE_NAME.fullmatch(file.name))


def _redact_file(file: Path) -> None:
    """Hide credentials in a file chunk by chunk, so that a long log does not fill memory or delay training."""
    redacted, part, length = file.with_name(f"{file.name}.redacted"), [""], 0
    with (
        file.open(encoding="utf-8", errors="backslashreplace", newline="") as original,
        redacted.open("w", encoding="utf-8", newline="") as copy,
    ):
        while line := original.readline(MAX_LINE_LENGTH):
            part.append(line)
            length += len(line)
            if length >= PART_LENGTH and not line.rstrip().endswith((":", "=")):  # keeps names and values together
                copy.write(redact("".join(part)))
                part, length = [], 0
        copy.write(redact("".join(part)))
    redacted.replace(file)


def _key(name: str, file: Path) -> tuple[str, int, int, int]:
    found = file.stat()
    return name, found.st_ino, found.st_mtime_ns, found.st_size


def _piece(name: str, found: str, size: int) -> Piece:
    return Piece(f"{OBJECTS}/{found}" if name in CHANGING else name, found, size)


def _checkpoints(folder: Path) -> list[int]:
    return sorted(int(entry.name) for entry in (folder / CHECKPOINTS).glob("*") if NAME.fullmatch(entry.name))


def _link_all(source: Path, target: Path) -> None:
    """Hard-link a folder's files into a new folder, but not if the source is being removed or replaced."""
    target.mkdir(parents=True)
    try:
        before = source.stat().st_ino
        for file in source.iterdir():
            _link(file, target / file.name)
        same = source.stat().st_ino == before  # False if the folder was replaced in the meantime
    except FileNotFoundError:
        same = False
    if not same:
        shutil.rmtree(target)


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except FileNotFoundError:
        raise
    except OSError:  # the file system does not support hard links
        shutil.copyfile(file, target)
