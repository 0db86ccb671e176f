"""The format of a packed folder: decoded images, concatenated in one file per field.

`pack.json` describes the contents and is written last. Each split has its own folder with `FIELD.pixels` (in the data
spec's data type), `index.npy` (one row per sample: offset in bytes, size and checksum of each image, then the
labels), `names.json` and, if the samples have groups, `groups.json`. While packing is in progress, `packing.json`
describes the source, and `index.partial` has a row for each complete sample.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.checksums import checksum_of_file
from paceline.core.errors import UserError
from paceline.data.packing.manifest import FileRecord, damaged, load_json, read_manifest

GROUPS = "groups.json"


class PackedSplit:
    """A split of a packed folder. Opening it runs only cheap checks; the pixels are memory-mapped."""

    def __init__(self, root: Path, split: str) -> None:
        splits = read_manifest(root).splits
        if split not in splits:
            raise UserError(f"{root}: has no split {split!r}; available: {', '.join(splits)}")
        self.root, self.record, folder = root, splits[split], root / split
        self.layout = self.record.layout
        for name, listed in self.record.files.items():
            _check_file(folder / name, listed, root)
        self.index: NDArray[np.int64] = np.load(folder / "index.npy", allow_pickle=False)
        self.names: list[str] = load_json(folder / "names.json", root)
        has_groups = GROUPS in self.record.files
        self.groups: tuple[str, ...] = tuple(load_json(folder / GROUPS, root)) if has_groups else ()
        self.column = {name: number for number, name in enumerate(self.layout.columns)}
        self.files = {name: pixels_file(folder, name) for name in self.layout.images}
        self.pixels = {
            name: np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray) for name, file in self.files.items()
        }
        # Stored in shared memory, so that a sample checked by one worker is not checked again by another.
        checked = torch.zeros(len(self.index), dtype=torch.bool)
        self._checked = checked.share_memory_().numpy()  # type: ignore[no-untyped-call, unused-ignore]

    def image(self, name: str, number: int) -> NDArray[Any]:
        """Return one image as stored in the file, [height, width, channels]."""
        first = self.column[f"{name}.offset"]
        offset, height, width = self.index[number, first : first + 3].tolist()
        channels, dtype = self.layout.images[name], np.dtype(self.record.spec.dtype)
        stored = self.pixels[name][offset : offset + height * width * channels * dtype.itemsize]
        return stored.view(dtype).reshape(height, width, channels)

    def check(self, number: int) -> None:
        """Raise UserError if a sample's pixels differ from what was packed; each sample is checked only once."""
        if self._checked[number]:
            return
        for name, file in self.files.items():
            if crc32(self.image(name, number).data) != self.index[number, self.column[f"{name}.checksum"]]:
                raise damaged(file, self.root, f"{self.names[number]} is damaged (checksum mismatch)")
        self._checked[number] = True


def pixels_file(folder: Path, name: str) -> Path:
    """Return the pixel file for a field in a split's folder."""
    return folder / f"{name}.pixels"


def _check_file(file: Path, listed: FileRecord, root: Path) -> None:
    found = file.stat().st_size if file.is_file() else -1
    if found < 0:
        raise damaged(file, root, "missing")
    if found != listed.bytes:
        raise damaged(file, root, f"has {found:,} bytes instead of {listed.bytes:,}")
    if listed.sha256 and checksum_of_file(file) != listed.sha256:
        raise damaged(file, root, "damaged (checksum mismatch)")
