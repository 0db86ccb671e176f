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

from paceline.engine.tensors import pack, unpack
from paceline.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Snapshot:
    """Everything that a run needs to go on: what is saved is listed here and nowhere else."""

    images: int
    weights: dict[str, Tensor]  # the recipe's networks; moving averages as averaged/NETWORK.PARAMETER
    state: dict[str, Tensor]  # what the optimizers and facts remember
    numbers: dict[str, Any]  # scalers, the best value so far


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
        """Writes a checkpoint that is either whole or not there."""
        final, beside = self.path(snapshot.images), self.folder / f".writing-{snapshot.images:012d}"
        if final.exists() and not problems(final):
            return final
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            beside.mkdir()
            files, notes = {}, {}
            for name, tensors in (("weights", snapshot.weights), ("state", snapshot.state)):
                files[f"{name}.safetensors"], notes[f"{name}.safetensors"] = pack(tensors)
            files["state.json"] = json.dumps({"images": snapshot.images, **snapshot.numbers}, indent=1).encode()
            digests = {name: sha256(content).hexdigest() for name, content in files.items()}
            manifest = {"format": FORMAT, "sha256": digests, "tensors": notes}
            files[MANIFEST] = json.dumps(manifest | {"seal": _seal(manifest)}, indent=1).encode()
            for name, content in files.items():
                _write_synced(beside / name, content)
            _sync_folder(beside)
            if final.exists():
                self._set_aside(final)
            beside.rename(final)
            _sync_folder(self.folder)
        except OSError as error:
            shutil.rmtree(beside, ignore_errors=True)
            reason = error.strerror or error
            raise UserError(f"cannot write checkpoint {final}: {reason}; {self.what_is_left()}") from error
        return final

    def what_is_left(self) -> str:
        """Where the run can go on from, for the one who reads why it ended."""
        kept = self.all()
        return f"the checkpoint at {kept[-1]:,} images is unharmed" if kept else "no checkpoint was written yet"

    def latest(self, report: Callable[[str], None]) -> Snapshot | None:
        """The newest checkpoint that is whole; `report` gets a line for each damaged one, and one must be whole."""
        there = self.all()
        for images in reversed(there):
            damage = problems(self.path(images))
            if not damage:
                return load(self.path(images))
            if images == there[0]:
                raise UserError(
                    f"checkpoint {self.path(images)} is damaged ({damage[0]}), and none before it is left; "
                    f"to start again, move {self.folder} away or choose another --out"
                )
            report(f"checkpoint {self.path(images)} is damaged ({damage[0]}); using the one before it")
        return None

    def prune(self, keep: int, best: int | None) -> None:
        """Removes all but the last `keep` and the best."""
        for images in self.all()[:-keep]:
            if images != best:
                self._remove(self.path(images))

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
        going = path.with_name(f".removing-{path.name}")
        path.rename(going)
        shutil.rmtree(going)

    def _sweep(self) -> None:
        for pattern in (".writing-*", ".removing-*"):
            for leftover in self.folder.glob(pattern):
                shutil.rmtree(leftover)


def problems(path: Path) -> list[str]:
    """What is wrong with a checkpoint's folder; nothing, if its files are those of its manifest."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            return [f"{MANIFEST} has format {manifest['format']}, this version reads {FORMAT}"]
        if manifest.pop("seal") != _seal(manifest):
            return [f"{MANIFEST} does not match its own SHA-256"]
        digests = manifest["sha256"]
        found = {name: sha256((path / name).read_bytes()).hexdigest() for name in digests}
        return [f"{name} does not match its SHA-256" for name in digests if found[name] != digests[name]]
    except FileNotFoundError as error:
        return [f"{Path(error.filename).name} is missing"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{MANIFEST} cannot be read: {error}"]


def load(path: Path) -> Snapshot:
    """A checkpoint from its folder; refuses one that is damaged."""
    damage = problems(path)
    if damage:
        raise UserError(f"checkpoint {path} is damaged: {damage[0]}")
    notes = json.loads((path / MANIFEST).read_bytes())["tensors"]
    numbers = json.loads((path / "state.json").read_bytes())
    weights, state = (unpack(path / file, notes[file]) for file in ("weights.safetensors", "state.safetensors"))
    return Snapshot(numbers.pop("images"), weights, state, numbers)


def _seal(manifest: dict[str, Any]) -> str:
    return sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


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
