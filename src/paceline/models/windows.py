"""Divide an image into windows, for networks that process one window at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

LARGEST_HALO_PX = 64  # for windows that are normalised using their own statistics


class Window(NamedTuple):
    """The extent of a tile along one axis, both without and with its halo."""

    start: int
    stop: int
    halo_start: int
    halo_stop: int


def windows(length: int, side: int, halo: int, fixed: int = 0) -> list[Window]:
    """Return the tiles along a side of the given length; `fixed`, if set, is the size of each tile with its halo."""
    found = []
    for start in range(0, length, side):
        stop = min(start + side, length)
        first, last = max(0, start - halo), min(length, stop + halo)
        if fixed:
            first = max(0, min(first, length - fixed))
            last = min(length, first + fixed)
        found.append(Window(start, stop, first, last))
    return found


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
    side, results = min(window_px) - 2 * halo, dict[str, Tensor]()
    for row in windows(height, side, halo, window_px[0]):
        for column in windows(width, side, halo, window_px[1]):
            tile = images[..., row.halo_start : row.halo_stop, column.halo_start : column.halo_stop]
            for name, made in transform(tile).items():
                if name not in results:
                    results[name] = made.new_empty((*made.shape[:-2], height * scale, width * scale))
                results[name][..., _scaled(row, scale), _scaled(column, scale)] = made[
                    ..., _scaled(row, scale, row.halo_start), _scaled(column, scale, column.halo_start)
                ]
    return results


def _scaled(window: Window, scale: int, origin: int = 0) -> slice:
    return slice((window.start - origin) * scale, (window.stop - origin) * scale)
