"""Checkpoints: written beside, synced, then renamed; each file's SHA-256 in a manifest; no pickle.

    checkpoints/000000045000/  weights.safetensors  state.safetensors  state.json  manifest.json

A checkpoint whose manifest does not match is refused by name and the one before it is used.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.core.checksums import checksum_of_content
from paceline.core.errors import UserError, unknown
from paceline.runs.tensors import pack, unpack

FORMAT = 1
MANIFEST = "manifest.json"
NUMBERS = "state.json"
TENSORS = ("weights.safetensors", "state.safetensors")
REPLACED = ".replaced-"  # before the name of a checkpoint while another takes its place


@dataclass(frozen=True)
class Snapshot:
    """Everything that a run needs to go on: what is saved is listed here and nowhere else."""

    images: int
    weights: dict[str, Tensor]  # the recipe's networks; moving averages as ema/NETWORK.PARAMETER
    state: dict[str, Tensor]  # what the optimizers and facts remember
    numbers: dict[str, Any]  # scalers, the best value so far


class Damaged(UserError):
    """A checkpoint whose files are not those of its manifest, and why."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"checkpoint {path} is damaged: {reason}")
        self.reason = reason


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self) -> list[int]:
        """The images seen at each checkpoint, rising; whether they are valid is not asked."""
        if not self.folder.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.folder.iterdir() if entry.name.isdigit())

    def path(self, images: int) -> Path:
        """The folder of one checkpoint."""
        return self.folder / f"{images:012d}"

    def save(self, snapshot: Snapshot) -> Path:
        """Writes a checkpoint that is either whole or not there; one with other numbers is replaced."""
        final, beside = self.path(snapshot.images), self.folder / f".writing-{snapshot.images:012d}"
        numbers = json.dumps({"images": snapshot.images, **snapshot.numbers}, indent=1).encode()
        whole = final.exists() and is_whole(final)
        if whole and (final / NUMBERS).read_bytes() == numbers:
            return final
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            beside.mkdir()
            files, notes = {}, {}
            for name, tensors in zip(TENSORS, (snapshot.weights, snapshot.state), strict=True):
                files[name], notes[name] = pack(tensors)
            files[NUMBERS] = numbers
            digests = {name: sha256(content).hexdigest() for name, content in files.items()}
            manifest = {"format": FORMAT, "sha256": digests, "tensors": notes}
            files[MANIFEST] = json.dumps(manifest | {"seal": checksum_of_content(manifest)}, indent=1).encode()
            for name, content in files.items():
                _write_synced(beside / name, content)
            _sync_folder(beside)
            replaced = final.rename(final.with_name(REPLACED + final.name)) if whole else None
            if final.exists():
                self._set_aside(final)
            beside.rename(final)
            _sync_folder(self.folder)
            if replaced:
                shutil.rmtree(replaced)
        except OSError as error:
            shutil.rmtree(beside, ignore_errors=True)
            reason = error.strerror or error
            raise UserError(f"cannot write checkpoint {final}: {reason}; {self.what_is_left()}") from error
        return final

    def bring_back(self) -> None:
        """Checkpoints that were to be replaced, where a kill came before the new one had its name; for the writer."""
        for old in self.folder.glob(f"{REPLACED}*"):
            final = old.with_name(old.name.removeprefix(REPLACED))
            if not final.exists():
                old.rename(final)

    def what_is_left(self) -> str:
        """Where the run can go on from, for the one who reads why it ended."""
        kept = self.all()
        return f"the checkpoint at {kept[-1]:,} images is unharmed" if kept else "no checkpoint was written yet"

    def latest(self, report: Callable[[str], None]) -> Snapshot | None:
        """The newest checkpoint that is whole; `report` gets a line for each damaged one, and one must be whole."""
        there = self.all()
        for images in reversed(there):
            try:
                return load(self.path(images))
            except Damaged as damage:
                found = f"checkpoint {self.path(images)} is damaged ({damage.reason})"
                if images == there[0]:
                    raise UserError(
                        f"{found}, and none before it is left; "
                        f"to start again, move {self.folder} away or choose another --out"
                    ) from None
                report(f"{found}; using the one before it")
        return None

    def prune(self, keep: int, best: int | None) -> None:
        """Removes all but the last `keep`, the best, and what those last name as theirs: a run may fall back to one."""
        last = self.all()[-keep:]
        wanted = {*last, best, *map(self._best_of, last)}
        for images in self.all():
            if images not in wanted:
                self._remove(self.path(images))

    def _best_of(self, images: int) -> int | None:
        """The best checkpoint when this one was written, if it can say so."""
        try:
            return json.loads((self.path(images) / NUMBERS).read_bytes())["best"].get("images")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def drop_after(self, images: int) -> None:
        """Sets aside what lies after the checkpoint that the run goes on from: damaged, or it would be that one."""
        for later in self.all():
            if later > images:
                self._set_aside(self.path(later))

    def _set_aside(self, path: Path) -> None:
        """Keeps a damaged checkpoint under another name, for whoever wants to save something of it."""
        aside = path.with_name(f"damaged-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)

    def _remove(self, path: Path) -> None:
        """Renames first, so that no kill leaves half a checkpoint under its name."""
        shutil.rmtree(path.rename(path.with_name(f".removing-{path.name}")))

    def _sweep(self) -> None:
        for pattern in (".writing-*", ".removing-*", f"{REPLACED}*"):
            for leftover in self.folder.glob(pattern):
                shutil.rmtree(leftover)


def is_whole(path: Path) -> bool:
    """Whether a checkpoint's files are those of its manifest."""
    try:
        _read(path)
    except Damaged:
        return False
    return True


def load(path: Path) -> Snapshot:
    """A checkpoint from its folder; refuses one that is damaged."""
    files, notes = _read(path)
    numbers = json.loads(files[NUMBERS])
    weights, state = (unpack(files.pop(name), notes[name]) for name in TENSORS)
    return Snapshot(numbers.pop("images"), weights, state, numbers)


def choose_checkpoint(checkpoints: Checkpoints, which: str) -> Snapshot:
    """The checkpoint that `best`, `last` or a number of images means."""
    last = checkpoints.latest(print)
    if last is None:
        raise UserError(f"{checkpoints.folder}: has no checkpoint yet")
    if which == "last":
        return last
    if which == "best":
        best = last.numbers.get("best", {}).get("images", last.images)
        return last if best == last.images else load(checkpoints.path(best))
    if not which.isdigit():
        raise unknown("checkpoint", which, ["best", "last", *map(str, checkpoints.all())])
    if int(which) not in checkpoints.all():
        kept = ", ".join(map(str, sorted(checkpoints.all())))
        raise UserError(f"--checkpoint {which}: none was kept at so many images; there are: best, last, {kept}")
    return load(checkpoints.path(int(which)))


def _read(path: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The files of a checkpoint, each read once and verified, and the notes on its tensors."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            raise Damaged(path, f"{MANIFEST} has format {manifest['format']}, this version reads {FORMAT}")
        if manifest.pop("seal") != checksum_of_content(manifest):
            raise Damaged(path, f"{MANIFEST} does not match its own SHA-256")
        files = {name: (path / name).read_bytes() for name in manifest["sha256"]}
    except Damaged:
        raise
    except FileNotFoundError as error:
        raise Damaged(path, f"{Path(error.filename).name} is missing") from None
    except OSError as error:
        raise Damaged(path, f"{Path(error.filename or path).name} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(path, f"{MANIFEST} cannot be read: {error}") from None
    for name, content in files.items():
        if sha256(content).hexdigest() != manifest["sha256"][name]:
            raise Damaged(path, f"{name} does not match its SHA-256")
    return files, manifest["tensors"]


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
