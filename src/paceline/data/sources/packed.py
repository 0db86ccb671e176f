"""A folder written by `paceline pack`, with memory-mapped pixels that need no decoding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.data.file_lists import describe_problems, named_root, too_small
from paceline.data.packed import PackedSplit, read_manifest
from paceline.data.source import Sample, Source
from paceline.data.stream import cropped, cut
from paceline.images.rectangles import Box


class Packed(Source):
    """Samples from a packed folder, with the original data spec. `read_window` reads only the pixels in the window."""

    decodes = False
    reads_any_data = True

    def __init__(self, split: str, settings: RunSettings) -> None:
        root = named_root(settings)
        self.packed = PackedSplit(root, split)
        spec = self.packed.record.spec
        if settings.channels not in (0, spec.channels):
            raise _fixed(f"channels={settings.channels}", root, f"with channels={spec.channels}")
        if settings.size and (settings.size, settings.size) != (spec.height, spec.width):
            raise _fixed(f"size={settings.size}", root, f"with {spec.width}×{spec.height} pixels")
        self.spec = spec
        self.rows = np.arange(len(self.packed.index))  # index rows of the samples in use
        if self.packed.record.mixed:
            first = self.packed.column["image.height"]
            sizes = self.packed.index[:, first : first + 2]
            if settings.bad_images == "skip" and split == "train":
                self._leave_out_small(sizes, settings.crop, root)
            self.sizes = np.ascontiguousarray(sizes[self.rows])
            self.spec = cropped(spec, settings.crop)
        if self.packed.groups:
            self.groups = tuple(self.packed.groups[row] for row in self.rows)

    @classmethod
    def splits_of(cls, settings: RunSettings) -> tuple[str, ...]:
        return tuple(read_manifest(named_root(settings)).splits)

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> Sample:
        return {name: np.array(field) for name, field in self._fields(index).items()}

    def read_window(self, index: int, window: Box) -> Sample:
        return cut(self._fields(index), window, self.spec.scale)

    def numbers_of(self, indices: NDArray[np.int64]) -> Sample | None:
        rows = self.packed.index[self.rows[indices]]
        return {name: rows[:, self.packed.column[name]] for name in self.packed.layout.numbers}

    def checksums_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        columns = [self.packed.column[f"{name}.checksum"] for name in self.packed.layout.images]
        return self.packed.index[self.rows[indices]][:, columns]

    def name_of(self, index: int) -> str:
        return self.packed.names[int(self.rows[index])]

    def _fields(self, index: int) -> Sample:
        row = int(self.rows[index])
        self.packed.check(row)
        images = {name: self.packed.image(name, row) for name in self.packed.layout.images}
        numbers = self.packed.layout.numbers
        return images | {name: self.packed.index[row, self.packed.column[name]] for name in numbers}

    def _leave_out_small(self, sizes: NDArray[np.int64], crop: int, root: Path) -> None:
        is_large = (sizes >= crop).all(axis=1)
        self.rows = np.flatnonzero(is_large)
        if not self.rows.size:
            raise UserError(f"--crop {crop}: larger than every image in {root}; use a smaller crop")
        small = np.flatnonzero(~is_large).tolist()
        problems = [too_small(self.packed.names[row], tuple(sizes[row].tolist()), crop) for row in small]
        if problems:
            self.not_used = tuple(f"{root}/{problem.message}" for problem in problems)
            self.notes = (f"left out {len(problems)} of {len(sizes)} samples in {root}: {describe_problems(problems)}",)


def _fixed(flag: str, root: Path, how: str) -> UserError:
    return UserError(
        f"{flag}: {root} was packed {how}; to change this, pack the original data again into a different folder"
    )
