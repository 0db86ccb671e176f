"""Processes images of any size in tiles. Halos around the tiles make the result the same as for the whole image."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from paceline.data.memory import free_bytes
from paceline.inference.receptive_field import ReceptiveField
from paceline.models.windows import Window, fixed_halo, windows

SHARE_OF_FREE = 0.5  # fraction of the free memory to use; other processes need some, too
HOST_BYTES = 2.2e9  # memory budget for the result and one tile together, when computing on the host
TILE_BYTES_ON_HOST = (0.5e9, 1.2e9)  # minimum and maximum memory for a tile; larger tiles are hardly faster
WORKSPACE = 1.5  # multiplies the size of intermediate results, since convolutions need extra memory
INEXACT_HALO_PX = 64  # used if no halo gives the exact result, or if the exact halo does not fit in memory
SMALLEST_TILE_PX = 32
LARGEST_TENSOR = 2**31 - 1  # elements; beyond this, indices need 64 bits, and convolutions on GPUs are much slower


class Tile(NamedTuple):
    """A rectangle of an image, with its halo."""

    row: Window
    column: Window

    @property
    def num_pixels(self) -> int:
        """The number of pixels, excluding the halo."""
        return (self.row.stop - self.row.start) * (self.column.stop - self.column.start)

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width, including the halo."""
        return self.row.halo_stop - self.row.halo_start, self.column.halo_stop - self.column.halo_start

    @property
    def source(self) -> tuple[slice, slice]:
        """The rows and columns of the image that the tile is computed from."""
        row, column = self
        return slice(row.halo_start, row.halo_stop), slice(column.halo_start, column.halo_stop)

    def inner(self, scale: int) -> tuple[slice, slice]:
        """Return the rows and columns of the tile's result that are not halo."""
        row, column = (
            slice((window.start - window.halo_start) * scale, (window.stop - window.halo_start) * scale)
            for window in self
        )
        return row, column

    def target(self, scale: int) -> tuple[slice, slice]:
        """Return the rows and columns of the whole result that the tile fills."""
        row, column = (slice(window.start * scale, window.stop * scale) for window in self)
        return row, column


@dataclass(frozen=True)
class Tiling:
    """How an image is split into tiles."""

    side_px: int  # side of a tile in input pixels, excluding its halo
    halo_px: int
    note: str = ""  # a warning about the result, to be printed
    window_px: tuple[int, int] | None = None  # height and width of every tile including its halo, even at the edges
    multiple_px: int = 1  # tiles of one shape start at multiples of this
    uniform: bool = False  # whether tiles at the edges have a wider halo inside the image, so that shapes repeat

    def halved(self, multiple: int) -> Tiling | None:
        """Return the same tiling with tiles half as large; None if they cannot be smaller."""
        side = self.side_px // 2 // multiple * multiple
        return replace(self, side_px=side) if side >= max(multiple, SMALLEST_TILE_PX // 2) else None

    def windows(self, length: int, fixed: int = 0) -> list[Window]:
        """Return the tiles along a side of this length; if `fixed` is given, each has that size, halo included."""
        found = windows(length, self.side_px, self.halo_px, fixed)
        full = self.side_px + 2 * self.halo_px
        if fixed or not self.uniform or length <= full:
            return found
        return [self._full_size(window, length, full) for window in found]

    def _full_size(self, window: Window, length: int, full: int) -> Window:
        """Return a window at the image's edge with a wider halo; its end is the edge, or else its size is `full`."""
        if window.halo_stop - window.halo_start == full:
            return window
        if window.halo_start == 0 and window.halo_stop < length:
            return window._replace(halo_stop=full)
        return window._replace(halo_start=(length - full) // self.multiple_px * self.multiple_px)


def choose_tiling(
    field: ReceptiveField,
    size: tuple[int, int],
    device: torch.device,
    *,
    share: int = 1,
    side: int = 0,
    result_bytes: int = 0,
) -> Tiling:
    """Return tiles with the given side length; if none is given, the largest tiles that fit in memory.

    The memory is shared by `share` processes. `result_bytes` is the size of the result in the host's memory.
    """
    free = usable_bytes(device) / share
    usual = free
    if device.type == "cpu":
        least, most = TILE_BYTES_ON_HOST
        usual = min(free, max(least, min(most, HOST_BYTES - result_bytes)) / share)
    exact, warning = not field.obstacles, tiling_warning(field)
    if side:
        tiling = Tiling(_rounded_up(side, field.multiple_px), field.tiled_halo_px if exact else inexact_halo(field))
        return replace(tiling, note=warning if tiling.side_px < max(size) else "")
    num_pixels, most_pixels = size[0] * size[1], LARGEST_TENSOR / share / field.elements_per_px
    fits = needed_bytes(field, num_pixels) <= (usual if exact or field.is_measurable else free)
    if fits and (num_pixels <= most_pixels or not exact):
        return Tiling(_rounded_up(max(size), field.multiple_px), 0)
    for budget in (usual, free) if exact else ():
        fitting = largest_side(field, budget, field.tiled_halo_px, most_pixels)
        if fitting >= max(field.multiple_px, SMALLEST_TILE_PX):
            return Tiling(fitting, field.tiled_halo_px)
    halo = inexact_halo(field)
    fitting = max(largest_side(field, free, halo), _rounded_up(SMALLEST_TILE_PX, field.multiple_px))
    note = warning or f"a tile with its halo of {field.halo_px} pixels does not fit in memory: seams may be visible"
    return Tiling(fitting, halo, note)


def tiles_of_training_size(window: tuple[int, int], size: tuple[int, int]) -> Tiling:
    """Return tiles whose size including the halo is the training size; a single tile if the image is no larger."""
    if size[0] <= window[0] and size[1] <= window[1]:
        return Tiling(max(size), 0)
    halo = fixed_halo(window)
    size_px = f"{window[1]}×{window[0]}-pixel"
    note = f"each {size_px} window (the training size) is normalised separately: seams may be visible"
    return Tiling(min(window) - 2 * halo, halo, note, window)


def tiling_warning(field: ReceptiveField) -> str:
    """Return why tiles would change the result; empty if they would not."""
    return f"{field.obstacles[0]}: seams may be visible" if field.obstacles else ""


def plan_tiles(tiling: Tiling, size: tuple[int, int]) -> list[Tile]:
    """Return the tiles of an image, row by row."""
    fixed = tiling.window_px or (0, 0)
    rows, columns = (tiling.windows(length, side) for length, side in zip(size, fixed, strict=True))
    return [Tile(row, column) for row in rows for column in columns]


def usable_bytes(device: torch.device) -> float:
    """Return how much memory tiles may use. Memory that PyTorch keeps for reuse counts as free."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return (free_bytes(device) + kept) * SHARE_OF_FREE


def needed_bytes(field: ReceptiveField, pixels: float) -> float:
    """Return the memory that a network needs for an image with this number of pixels."""
    return pixels * field.bytes_per_px * WORKSPACE


def largest_side(field: ReceptiveField, budget: float, halo: int, most_pixels: float = math.inf) -> int:
    """Return the side of the largest square tile, without its halo, that fits in a memory budget."""
    side = math.isqrt(int(min(budget / max(needed_bytes(field, 1), 1), most_pixels))) - 2 * halo
    return side // field.multiple_px * field.multiple_px


def inexact_halo(field: ReceptiveField) -> int:
    """Return the halo for networks whose tiles change the result, however wide the halo is."""
    usual = _rounded_up(INEXACT_HALO_PX, field.multiple_px)
    return min(usual, field.tiled_halo_px) if field.is_traced else usual


def _rounded_up(side: int, multiple: int) -> int:
    return math.ceil(side / multiple) * multiple
