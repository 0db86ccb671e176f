"""The format of a packed folder: decoded images, concatenated in one file per field.

Packed folders may come from others, so everything except the pixels is checked before use.

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

from paceline.contracts.data_spec import INPUT
from paceline.core.checksums import checksum_of_file
from paceline.core.errors import UserError
from paceline.core.small_files import why
from paceline.data.packing.manifest import (
    LOW,
    MANIFEST,
    PLACE,
    FileRecord,
    SplitRecord,
    damaged,
    load_json,
    read_manifest,
)

INDEX, NAMES, GROUPS = "index.npy", "names.json", "groups.json"
PIXELS = ".pixels"


class PackedSplit:
    """A split of a packed folder. Opening it runs only cheap checks; the pixels are memory-mapped."""

    def __init__(self, root: Path, split: str) -> None:
        splits = read_manifest(root).splits
        if split not in splits:
            raise UserError(f"{root}: has no split {split!r}; available: {', '.join(splits)}")
        self.root, self.record, folder = root, splits[split], root / split
        self.layout = self.record.layout
        self.column = {name: number for number, name in enumerate(self.layout.columns)}
        self.files = {name: pixels_file(folder, name) for name in self.layout.images}
        expected = {*(file.name for file in self.files.values()), INDEX, NAMES}
        if self.record.files.keys() - {GROUPS} != expected:
            raise damaged(root / MANIFEST, root, f"damaged (wrong files for the split {split!r})")
        for name, listed in self.record.files.items():
            _check_file(folder / name, listed, root)
        self.index = _read_index(folder / INDEX, self.record, root)
        self.names = _read_strings(folder / NAMES, self.record, root)
        self.groups = tuple(_read_strings(folder / GROUPS, self.record, root)) if GROUPS in self.record.files else ()
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
    return folder / f"{name}{PIXELS}"


def _read_index(file: Path, record: SplitRecord, root: Path) -> NDArray[np.int64]:
    """Return the rows of an index; raise UserError unless they list each image in order and fit the manifest."""
    try:
        # A mapped file cannot be larger than it claims, and np.load would also read pickled objects and zip files.
        stored = np.lib.format.open_memmap(file, mode="r")
    except Exception as error:  # a damaged header can raise any exception
        raise damaged(file, root, f"damaged ({why(error)})") from None
    layout, spec = record.layout, record.spec
    shape = (record.count, len(layout.columns))
    if stored.shape != shape or stored.dtype != np.int64:
        actual = f"{stored.dtype} of shape {list(stored.shape)}"
        raise damaged(file, root, f"damaged ({actual} instead of int64 of shape {list(shape)})")
    index: NDArray[np.int64] = np.array(stored, order="C")
    sizes = {}
    for number, (name, channels) in enumerate(layout.images.items()):
        offset, height, width, checksum = index[:, number * len(PLACE) : (number + 1) * len(PLACE)].T
        bytes_per_px, total = channels * np.dtype(spec.dtype).itemsize, record.files[f"{name}{PIXELS}"].bytes
        sizes[name] = np.stack([height, width])
        are_valid = (offset >= 0) & (offset < total) & (height > 0) & (width > 0) & (width <= total)
        are_valid &= height <= total // bytes_per_px // np.maximum(width, 1)  # no product can overflow
        ends = offset + height * width * bytes_per_px
        are_valid &= checksum >> 32 == 0
        if not are_valid.all() or offset[0] or (ends[:-1] != offset[1:]).any() or ends[-1] != total:
            raise damaged(file, root, f"damaged (images of {name!r} that are not in {name}{PIXELS}, or not in order)")
    whole = sizes[INPUT]
    for name, size in sizes.items():
        expected = whole if record.mixed or name in record.aligned - {LOW} else size[:, :1]
        if (size * spec.scale != whole if name == LOW else size != expected).any():
            raise damaged(file, root, f"damaged (images of {name!r} whose sizes do not fit together)")
    if not record.mixed and whole[:, 0].tolist() != [spec.height, spec.width]:
        raise damaged(file, root, "damaged (images whose size differs from the data spec)")
    labels = index[:, layout.columns.index("label")] if spec.num_classes else index[:0, 0]
    if (labels < 0).any() or (labels >= spec.num_classes).any():
        raise damaged(file, root, f"damaged (labels that are not from 0 to {spec.num_classes - 1})")
    return index


def _read_strings(file: Path, record: SplitRecord, root: Path) -> list[str]:
    """Return the texts in a JSON file, one for each sample."""
    read = load_json(file, root, record.files[file.name].bytes)
    if not isinstance(read, list) or len(read) != record.count or not all(isinstance(text, str) for text in read):
        raise damaged(file, root, f"damaged (not a list of {record.count:,} names)")
    return read


def _check_file(file: Path, listed: FileRecord, root: Path) -> None:
    found = file.stat().st_size if file.is_file() else -1
    if found < 0:
        raise damaged(file, root, "missing")
    if found != listed.bytes:
        raise damaged(file, root, f"has {found:,} bytes instead of {listed.bytes:,}")
    if (listed.sha256 or not file.name.endswith(PIXELS)) and checksum_of_file(file) != listed.sha256:
        raise damaged(file, root, "damaged (checksum mismatch)")
