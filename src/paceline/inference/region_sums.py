"""Accumulates PSNR, SSIM and mask overlap over the blocks of an image; the results equal those for the whole image."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.errors import UserError
from paceline.evaluation.image_metrics import PSNR_OF_IDENTICAL, WINDOW, ssim
from paceline.images.regions.region_image import Box

OVERLAP_PX = WINDOW - 1  # how far an SSIM window that starts in a block extends beyond it


class Extent(NamedTuple):
    """A block along one side of an image: what it covers, and where it ends with the overlap for SSIM."""

    start: int
    stop: int
    overlap_stop: int


@dataclass(frozen=True)
class Comparison:
    """A block of an image that is compared with the target: its place, and the part of the image that counts."""

    rows: Extent
    columns: Extent
    inside: Box  # the image without its border

    @property
    def area(self) -> Box:
        """The block with the overlap for SSIM."""
        rows, columns = self.rows, self.columns
        return Box(rows.start, columns.start, rows.overlap_stop - rows.start, columns.overlap_stop - columns.start)

    def sums(self, made: Tensor, real: Tensor, peak: float) -> Sums:
        """Return the sums for a block, given its area as levels [1, c, h, w]."""
        top, left, height, width = self.inside
        own_rows = _part(self.rows, top, top + height)
        own_columns = _part(self.columns, left, left + width)
        squares = (made - real)[..., own_rows, own_columns].square()
        # The first row and column of every SSIM window that starts in this block and ends inside the image.
        first_rows = _part(self.rows, top, top + height - OVERLAP_PX)
        first_columns = _part(self.columns, left, left + width - OVERLAP_PX)
        num_windows = _length(first_rows) * _length(first_columns)
        likeness = 0.0
        if num_windows:
            rows, columns = (slice(one.start, one.stop + OVERLAP_PX) for one in (first_rows, first_columns))
            likeness = ssim(made[..., rows, columns], real[..., rows, columns], peak).item() * num_windows
        return Sums(squares.sum().item(), squares.numel(), likeness, num_windows)

    def own(self, levels: Tensor) -> Tensor:
        """Return the part of a block's area that no other block covers, border included."""
        return levels[..., : self.rows.stop - self.rows.start, : self.columns.stop - self.columns.start]


@dataclass(frozen=True)
class Sums:
    """The sums over one or several blocks of an image."""

    squares: float = 0.0
    num_values: int = 0
    likeness: float = 0.0
    num_windows: int = 0

    def as_tensor(self) -> Tensor:
        """Return the sums as a float64 vector, to be added across processes."""
        return torch.tensor([self.squares, self.num_values, self.likeness, self.num_windows], dtype=torch.float64)

    @classmethod
    def total(cls, parts: Iterable[Sums]) -> Sums:
        """Add up the sums of blocks."""
        listed = list(parts)
        return cls(
            math.fsum(one.squares for one in listed),
            sum(one.num_values for one in listed),
            math.fsum(one.likeness for one in listed),
            sum(one.num_windows for one in listed),
        )

    def psnr(self, peak: float) -> float:
        """Return the peak signal-to-noise ratio in dB."""
        mean = self.squares / self.num_values
        return 10 * math.log10(peak**2 / mean) if mean else PSNR_OF_IDENTICAL

    def ssim(self) -> float:
        """Return the structural similarity, averaged over windows and channels."""
        return self.likeness / self.num_windows


def inside_border(height: int, width: int, border: int) -> Box:
    """Return an image without its border; raise UserError if it is smaller than SSIM's window."""
    if min(height, width) - 2 * border < WINDOW:
        raise UserError(
            f"{width}×{height} pixels is too small to compare; SSIM needs at least {WINDOW}×{WINDOW} inside the border"
        )
    return Box(border, border, height - 2 * border, width - 2 * border)


def extents(length: int, side: int) -> list[Extent]:
    """Return the blocks along a side of an image."""
    return [
        Extent(start, min(length, start + side), min(length, start + side + OVERLAP_PX))
        for start in range(0, length, side)
    ]


def _part(extent: Extent, first: int, last: int) -> slice:
    """Return the rows of a block, counted from its start, that lie between two rows of the image."""
    start = max(extent.start, first)
    return slice(start - extent.start, max(start, min(extent.stop, last)) - extent.start)


def _length(part: slice) -> int:
    return int(part.stop - part.start)
