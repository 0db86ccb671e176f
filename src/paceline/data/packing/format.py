"""A packed folder: every picture decoded once, its pixels one after another in a file for each field.

`pack.json` says what the folder holds, with a checksum of its own, and is written last. Beside it each split has a
folder with `FIELD.pixels` (uint8), `index.npy` (a row per sample: where each picture lies, its size and checksum, then
the numbers) and `names.json`. While it is being made, `packing.json` says of what, and `index.partial` grows by whole
samples.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch

from paceline.core.checksums import checksum_of_content, checksum_of_file
from paceline.core.errors import UserError
from paceline.data.source import Source

FORMAT, VERSION = "paceline pack", 2
MANIFEST, UNFINISHED = "pack.json", "packing.json"
PLACE = ("offset", "height", "width", "checksum")  # the index's columns for each field of pictures


class Layout(NamedTuple):
    """What a sample consists of."""

    pictures: dict[str, int]  # channels by field
    numbers: tuple[str, ...]

    @classmethod
    def of(cls, source: Source) -> Layout:
        """The layout of a source's samples."""
        sample = source.read(0)
        pictures = {name: int(field.shape[-1]) for name, field in sample.items() if field.ndim == 3}
        return cls(pictures, tuple(name for name in sample if name not in pictures))

    @property
    def columns(self) -> list[str]:
        """The columns of the index."""
        return [f"{name}.{what}" for name in self.pictures for what in PLACE] + list(self.numbers)


class PackedSplit:
    """A split of a packed folder, checked as far as that costs nothing; the pixels stay in the file."""

    def __init__(self, root: Path, split: str) -> None:
        manifest = read_manifest(root)
        if split not in manifest["splits"]:
            raise UserError(f"{root}: has no split {split!r}; it holds {', '.join(manifest['splits'])}")
        self.root, self.about, folder = root, manifest["splits"][split], root / split
        self.layout = Layout(self.about["pictures"], tuple(self.about["numbers"]))
        for name, listed in self.about["files"].items():
            _check_file(folder / name, listed, root)
        self.index = np.load(folder / "index.npy", allow_pickle=False)
        self.names: list[str] = load_json(folder / "names.json", root)
        self.column = {name: number for number, name in enumerate(self.layout.columns)}
        self.files = {name: pixels_file(folder, name) for name in self.layout.pictures}
        self.pixels = {
            name: np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray) for name, file in self.files.items()
        }
        # In memory that worker processes share: what one of them has checked, the others need not.
        self._checked = torch.zeros(len(self.index), dtype=torch.bool).share_memory_().numpy()

    def picture(self, name: str, number: int) -> np.ndarray:
        """One picture as it lies in the file, [height, width, channels]."""
        first = self.column[f"{name}.offset"]
        offset, height, width = self.index[number, first : first + 3].tolist()
        channels = self.layout.pictures[name]
        return self.pixels[name][offset : offset + height * width * channels].reshape(height, width, channels)

    def check(self, number: int) -> None:
        """Refuses a sample whose pixels are not those that were packed; looks once."""
        if self._checked[number]:
            return
        for name, file in self.files.items():
            if crc32(self.picture(name, number).data) != self.index[number, self.column[f"{name}.checksum"]]:
                raise _damaged(file, self.root, f"{self.names[number]} is damaged (its checksum differs)")
        self._checked[number] = True


def read_manifest(root: Path) -> dict[str, Any]:
    """What a packed folder says about itself."""
    file = root / MANIFEST
    if not file.is_file():
        if (root / UNFINISHED).is_file():
            raise UserError(f"{root}: packing was not finished; the same `paceline pack` goes on with it")
        raise UserError(f"{root}: not a packed folder (it has no {MANIFEST}); paceline pack SRC {root} makes one")
    return load_manifest(file, root)


def load_manifest(file: Path, root: Path) -> dict[str, Any]:
    """What the file says of a packed folder, or of one that is being made."""
    manifest = load_json(file, root)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{file}: not written by `paceline pack`")
    if manifest.get("version") != VERSION:
        raise _damaged(file, root, f"version {manifest.get('version')} of the format, and this is {VERSION}")
    if manifest.pop("sha256", None) != checksum_of_content(manifest):
        raise _damaged(file, root, "damaged (its checksum differs)")
    return manifest


def write_manifest(file: Path, made_from: Mapping[str, Any], splits: Mapping[str, Any]) -> None:
    """Says what a packed folder holds, with a checksum of that."""
    manifest = {"format": FORMAT, "version": VERSION, "made_from": dict(made_from), "splits": dict(splits)}
    write_json(file, manifest | {"sha256": checksum_of_content(manifest)})


def pixels_file(folder: Path, name: str) -> Path:
    """Where the pixels of a field are, in the folder of a split."""
    return folder / f"{name}.pixels"


def load_json(file: Path, root: Path) -> Any:
    """What is written in a file of a packed folder."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise _damaged(file, root, f"damaged ({' '.join(str(error).split())})") from None


def write_json(file: Path, content: Any) -> None:
    """Writes beside, then renames: a file is there as a whole or not at all."""
    beside = file.with_name(f"{file.name}.new")
    with open(beside, "w") as opened:
        json.dump(content, opened)
        opened.flush()
        os.fsync(opened.fileno())
    beside.rename(file)


def _check_file(file: Path, listed: Mapping[str, Any], root: Path) -> None:
    found = file.stat().st_size if file.is_file() else -1
    if found < 0:
        raise _damaged(file, root, "missing")
    if found != listed["bytes"]:
        raise _damaged(file, root, f"{found:,} bytes instead of {listed['bytes']:,}")
    if "sha256" in listed and checksum_of_file(file) != listed["sha256"]:
        raise _damaged(file, root, "damaged (its checksum differs)")


def _damaged(file: Path, root: Path, what: str) -> UserError:
    return UserError(f"{file}: {what}; remove {root}, then pack again")
