"""Read a checkpoint and compare its files with its manifest, which contains the SHA-256 of each file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from paceline.config.run_format import RUN_FORMAT
from paceline.core.checksums import checksum_of_content
from paceline.core.errors import UserError
from paceline.core.small_files import open_bounded, parse_json, read_bounded, why
from paceline.runs.snapshot import INVALID, CheckpointNumbers, Snapshot
from paceline.runs.tensor_file import map_tensors
from paceline.runs.tensors import TensorNotes, apply_notes, unpack
from paceline.runs.written_files import STATE, TENSORS, WEIGHTS

MANIFEST = "manifest.json"
NUMBERS = "state.json"
MAX_TENSOR_BYTES = 2**40
UNREADABLE_TENSORS = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError)


class Damaged(UserError):
    """Raised for a checkpoint that is missing, or whose files do not match its manifest."""

    def __init__(self, path: Path, reason: str) -> None:
        is_missing = not path.exists()
        super().__init__(f"checkpoint {path} is {'missing' if is_missing else f'damaged: {reason}'}")
        self.reason = reason
        self.problem = f"checkpoint {path} is {'missing' if is_missing else f'damaged ({reason})'}"


@dataclass(frozen=True)
class _Manifest:
    """The content of manifest.json."""

    sha256: Mapping[str, str]  # by file name
    notes: Mapping[str, TensorNotes]  # properties of the tensors, by file name


def is_whole(path: Path) -> bool:
    """Return whether a checkpoint's files match its manifest. Large files are not read into memory."""
    try:
        manifest = _read_manifest(path)
        for name in manifest.sha256:
            _check_file(path, name, manifest)
    except Damaged:
        return False
    return True


def check_weights(path: Path) -> None:
    """Raise Damaged if a checkpoint cannot be used for inference. The file with the training state is not read."""
    manifest = _read_manifest(path)
    _check_file(path, WEIGHTS, manifest)
    _parse_numbers(path, _read_file(path, NUMBERS, manifest))


def load(path: Path) -> Snapshot:
    """Return the checkpoint in a folder; raise Damaged if its files do not match its manifest."""
    return _load(path, TENSORS)


def load_without_state(path: Path) -> Snapshot:
    """Return a checkpoint for inference. The file with the training state is not read, and may be missing."""
    return _load(path, (WEIGHTS,))


def _load(path: Path, names: Sequence[str]) -> Snapshot:
    manifest = _read_manifest(path)
    files = {name: _read_file(path, name, manifest) for name in (*names, NUMBERS)}
    numbers, tensors = _parse_numbers(path, files[NUMBERS]), dict[str, dict[str, Tensor]]()
    for name in names:
        with _reporting_damage(path, name):
            tensors[name] = unpack(files.pop(name), manifest.notes[name])
    return Snapshot(int(path.name), tensors[WEIGHTS], tensors.get(STATE, {}), numbers)


def load_mapped(path: Path, *, check: bool = True, names: Sequence[str] = TENSORS) -> Snapshot:
    """Return a checkpoint whose tensors are read when they are used, for a process that needs only some rows of them.

    Only the tensor files in `names` are opened. With `check=False`, their SHA-256 is not computed, because another
    process has done so. Do not keep such a snapshot: its files stay open, and so they stay on the disk if the
    checkpoint is removed.
    """
    manifest = _read_manifest(path)
    numbers, tensors = _parse_numbers(path, _read_file(path, NUMBERS, manifest)), dict[str, dict[str, Tensor]]()
    for name in names:
        if check:
            _check_file(path, name, manifest)
        with _reporting_damage(path, name):
            tensors[name] = apply_notes(map_tensors(path / name), manifest.notes[name])
    return Snapshot(int(path.name), tensors[WEIGHTS], tensors.get(STATE, {}), numbers)


def _read_manifest(path: Path) -> _Manifest:
    with _reporting_damage(path, MANIFEST):
        manifest = parse_json(read_bounded(path / MANIFEST))
        if manifest["format"] != RUN_FORMAT:
            raise Damaged(
                path,
                f"{MANIFEST} has format {manifest['format']}, but this version of Paceline reads format {RUN_FORMAT}",
            )
        if manifest.pop("seal") != checksum_of_content(manifest):
            raise Damaged(path, f"{MANIFEST} does not match its recorded SHA-256")
        digests = {name: manifest["sha256"][name] for name in (*TENSORS, NUMBERS)}
        return _Manifest(digests, {name: TensorNotes.from_json(manifest["tensors"][name]) for name in TENSORS})


def _read_file(path: Path, name: str, manifest: _Manifest) -> bytes:
    """Return the content of a file; raise Damaged if it does not match the manifest."""
    with _reporting_damage(path, name):
        content = read_bounded(path / name, MAX_TENSOR_BYTES)
    _compare(path, name, hashlib.sha256(content).hexdigest(), manifest)
    return content


def _check_file(path: Path, name: str, manifest: _Manifest) -> None:
    """Raise Damaged if a file does not match the manifest."""
    with _reporting_damage(path, name), open_bounded(path / name, MAX_TENSOR_BYTES) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _compare(path, name, digest, manifest)


def _compare(path: Path, name: str, digest: str, manifest: _Manifest) -> None:
    if digest != manifest.sha256[name]:
        raise Damaged(path, f"{name} does not match its recorded SHA-256")


def _parse_numbers(path: Path, content: bytes) -> CheckpointNumbers:
    try:
        return CheckpointNumbers.from_json(parse_json(content), int(path.name))
    except INVALID as error:
        raise Damaged(path, f"{NUMBERS} cannot be read: {why(error)}") from None


@contextmanager
def _reporting_damage(path: Path, name: str) -> Iterator[None]:
    """Turn errors that a missing or damaged file causes into Damaged."""
    try:
        yield
    except Damaged:
        raise
    except FileNotFoundError:
        raise Damaged(path, f"{name} is missing") from None
    except OSError as error:
        raise Damaged(path, f"{name} cannot be read: {error.strerror}") from None
    except UNREADABLE_TENSORS as error:
        raise Damaged(path, f"{name} cannot be read: {why(error)}") from None
