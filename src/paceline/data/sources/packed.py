"""A folder written by `paceline pack`, with memory-mapped pixels that need no decoding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.data.file_lists import named_root, note_left_out, too_small
from paceline.data.packing import PackedSamples, read_manifest
from paceline.data.stream import cropped


class Packed(PackedSamples):
    """Samples from a packed folder, with the original data spec. `read_window` reads only the pixels in the window."""

    reads_any_data = True

    def __init__(self, split: str, settings: RunSettings) -> None:
        super().__init__(named_root(settings), split)
        spec = self.spec
        if settings.channels not in (0, spec.channels):
            raise _fixed(f"channels={settings.channels}", self.root, f"with channels={spec.channels}")
        if settings.size and (settings.size, settings.size) != (spec.height, spec.width):
            raise _fixed(f"size={settings.size}", self.root, f"with {spec.width}×{spec.height} pixels")
        if self.record.mixed:
            first = self.column["image.height"]
            sizes = self.index[:, first : first + 2]
            if settings.bad_images == "skip" and split == "train":
                self._leave_out_small(sizes, settings.crop)
            self.sizes = np.ascontiguousarray(sizes[self.rows])
            self.spec = cropped(spec, settings.crop)
        self.groups = tuple(self.groups[row] for row in self.rows) if self.groups else ()

    @classmethod
    def splits_of(cls, settings: RunSettings) -> tuple[str, ...]:
        return tuple(read_manifest(named_root(settings)).splits)

    def _leave_out_small(self, sizes: NDArray[np.int64], crop: int) -> None:
        is_large = (sizes >= crop).all(axis=1)
        self.rows = np.flatnonzero(is_large)
        if not self.rows.size:
            raise UserError(f"--crop {crop}: larger than every image in {self.root}; use a smaller crop")
        problems = [too_small(self.names[row], sizes[row]) for row in np.flatnonzero(~is_large)]
        if problems:
            self.not_used = tuple(f"{self.root}/{problem}" for problem in problems)
            self.notes = (note_left_out(self.root, problems, self.rows.size),)


def _fixed(flag: str, root: Path, how: str) -> UserError:
    return UserError(
        f"{flag}: {root} was packed {how}; to change this, pack the original data again into a different folder"
    )
