"""Rectangles of images, and how an image is divided into tiles, with halos or in windows of a fixed size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_HALO_PX = 64  # for windows that are normalised using their own statistics


class Box(NamedTuple):
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int

    @property
    def bottom(self) -> int:
        """The row after the last one."""
        return self.top + self.height

    @property
    def right(self) -> int:
        """The column after the last one."""
        return self.left + self.width

    @property
    def num_pixels(self) -> int:
        """The number of pixels."""
        return self.height * self.width

    @property
    def slices(self) -> tuple[slice, slice]:
        """The rows and the columns."""
        return slice(self.top, self.bottom), slice(self.left, self.right)

    def scaled(self, scale: int) -> Box:
        """Return the rectangle in an image that is `scale` times as large."""
        return Box(*(side * scale for side in self))

    def moved_from(self, origin: Box) -> Box:
        """Return the rectangle in an image that starts at the corner of `origin`."""
        return self._replace(top=self.top - origin.top, left=self.left - origin.left)

    def intersection(self, other: Box) -> Box:
        """Return the part that lies inside another rectangle, which must overlap."""
        top, left = max(self.top, other.top), max(self.left, other.left)
        return Box(top, left, min(self.bottom, other.bottom) - top, min(self.right, other.right) - left)

    def grown(self, margin: int, size: tuple[int, int]) -> Box:
        """Return the rectangle with a margin on all sides, as far as an image of this height and width reaches."""
        whole = Box(self.top - margin, self.left - margin, self.height + 2 * margin, self.width + 2 * margin)
        return whole.intersection(Box(0, 0, *size))

    def centre(self, side_px: int) -> Box:
        """Return the centre, with sides of at most `side_px`."""
        height, width = min(side_px, self.height), min(side_px, self.width)
        return Box(self.top + (self.height - height) // 2, self.left + (self.width - width) // 2, height, width)


class Span(NamedTuple):
    """The extent of a tile along one side of an image, both without and with its halo."""

    start: int
    stop: int
    halo_start: int
    halo_stop: int


class Tile(NamedTuple):
    """A rectangle of an image, with its halo."""

    row: Span
    column: Span

    @property
    def own(self) -> Box:
        """The rectangle without its halo."""
        row, column = self
        return Box(row.start, column.start, row.stop - row.start, column.stop - column.start)

    @property
    def area(self) -> Box:
        """The rectangle with its halo."""
        row, column = self
        height, width = row.halo_stop - row.halo_start, column.halo_stop - column.halo_start
        return Box(row.halo_start, column.halo_start, height, width)

    def inner(self, scale: int) -> tuple[slice, slice]:
        """Return the rows and columns of the tile's result that are not halo."""
        return self.own.moved_from(self.area).scaled(scale).slices

    def target(self, scale: int) -> tuple[slice, slice]:
        """Return the rows and columns of the whole result that the tile fills."""
        return self.own.scaled(scale).slices


def split_side(
    length: int,
    side: int,
    halo: int,
    fixed: int = 0,
    *,
    multiple: int = 1,
    after: int = 0,
    start: int = 0,
    total: int = 0,
) -> list[Span]:
    """Return the tiles along a side: `length` pixels from `start` on, in an image of `total` (by default, `length`).

    Halos end at multiples of `multiple`, and are wider by `after` at the end of a tile. If `fixed` is set, each tile
    has this size, halo included.
    """
    end, total, spans = start + length, total or length, []
    for first in range(start, end, side):
        stop = min(end, first + side)
        halo_start = max(0, (first - halo) // multiple * multiple)
        halo_stop = min(total, -(-(stop + halo + after) // multiple) * multiple)
        if fixed:
            halo_start = max(0, min(first - halo, total - fixed))
            halo_stop = min(total, halo_start + fixed)
        spans.append(Span(first, stop, halo_start, halo_stop))
    return spans


def fixed_halo(window_px: tuple[int, int]) -> int:
    """Return how many pixels at each edge of a fixed-size window belong to the halo."""
    return min(LARGEST_HALO_PX, min(window_px) // 8)


def in_windows(
    transform: Callable[[Tensor], dict[str, Tensor]], images: Tensor, window_px: tuple[int, int] | None, scale: int = 1
) -> dict[str, Tensor]:
    """Transform [n, c, h, w] images in windows of a fixed size, or whole if they fit in one window or no size is set.

    The results are `scale` times as tall and wide as the images.
    """
    height, width = images.shape[-2:]
    if window_px is None or (height <= window_px[0] and width <= window_px[1]):
        return transform(images)
    halo = fixed_halo(window_px)
    side = min(window_px) - 2 * halo
    results: dict[str, Tensor] = {}
    for row in split_side(height, side, halo, window_px[0]):
        for column in split_side(width, side, halo, window_px[1]):
            tile = Tile(row, column)
            for name, made in transform(images[..., *tile.area.slices]).items():
                if name not in results:
                    results[name] = made.new_empty((*made.shape[:-2], height * scale, width * scale))
                results[name][..., *tile.target(scale)] = made[..., *tile.inner(scale)]
    return results
