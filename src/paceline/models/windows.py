"""Divide an image into windows, for networks that process one window at a time."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from paceline.images.rectangles import Tile, split_side

LARGEST_HALO_PX = 64  # for windows that are normalised using their own statistics


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
    for row in split_side(height, side, halo, window_px[0]):
        for column in split_side(width, side, halo, window_px[1]):
            tile = Tile(row, column)
            for name, made in transform(images[..., *tile.source]).items():
                if name not in results:
                    results[name] = made.new_empty((*made.shape[:-2], height * scale, width * scale))
                results[name][..., *tile.target(scale)] = made[..., *tile.inner(scale)]
    return results
