"""Windows: the part of an image that training sees, computed from the ticket's numbers and the image's size alone.

The host and the device compute the same windows: one multiplication in float32, then integers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.data.tickets import CROP_COLUMN, CROP_ROW

MAX_NAMED = 3  # of the images that are too small


class Window(NamedTuple):
    """A part of a sample's "image", in pixels; the fields that belong to it are cut alike."""

    top: int
    left: int
    height: int
    width: int


def cut(sample: dict[str, NDArray[Any]], window: Window, scale: int) -> dict[str, NDArray[Any]]:
    """Return the window of every image of a sample; for "low", position and sides are divided by the scale."""
    parts = {}
    for name, field in sample.items():
        if field.ndim == 3:
            top, left, height, width = (side // scale for side in window) if name == "low" and scale else window
            field = field[top : top + height, left : left + width]
        parts[name] = field
    return parts


def corners(uniforms: Tensor, sizes: Tensor, crop: int, scale: int) -> Tensor:
    """Return top and left of each sample's window, int64 [n, 2]; multiples of the scale where there is one."""
    step = max(1, scale)
    places = torch.div(sizes - crop, step, rounding_mode="floor") + 1
    # A product below `places`, which float32 never rounds up to it.
    return (uniforms[:, CROP_ROW : CROP_COLUMN + 1] * places.to(torch.float32)).to(torch.int64) * step


def windows(uniforms: NDArray[np.float32], sizes: NDArray[np.int64], crop: int, scale: int) -> list[Window]:
    """Return the window of each sample, computed on the host."""
    found = corners(torch.from_numpy(uniforms), torch.from_numpy(sizes), crop, scale)
    return [Window(top, left, crop, crop) for top, left in found.tolist()]


def cropped(spec: DataSpec, crop: int) -> DataSpec:
    """Return the spec of what training sees."""
    return dataclasses.replace(spec, height=crop, width=crop) if crop else spec


def check_crop(sizes: NDArray[np.int64], crop: int, scale: int, name_of: Callable[[int], str]) -> None:
    """Raise UserError for a crop that does not fit every image, and for no crop where sizes differ."""
    smallest = int(sizes.min())
    if not crop:
        other = np.flatnonzero((sizes != sizes[0]).any(axis=1))
        if other.size:
            first, second = (f"{name_of(i)} {_size(sizes[i])}" for i in (0, int(other[0])))
            raise UserError(
                f"--crop 0: images of different sizes ({first}, {second}) cannot share a batch; "
                f"give the side of a window that fits all, at most {smallest}"
            )
        return
    if scale and crop % scale:
        raise UserError(f"--crop {crop}: must be a multiple of {scale}, by which the low-resolution files are smaller")
    small = np.flatnonzero((sizes < crop).any(axis=1))
    if small.size:
        named = ", ".join(f"{name_of(int(i))} {_size(sizes[i])}" for i in small[:MAX_NAMED])
        more = f" and {small.size - MAX_NAMED} more" if small.size > MAX_NAMED else ""
        raise UserError(
            f"--crop {crop}: smaller than {crop}×{crop} pixels: {named}{more}; leave these out (--bad-images skip), "
            f"or crop at most {smallest - smallest % max(1, scale)}"
        )


def _size(size: NDArray[np.int64]) -> str:
    return f"{size[1]}×{size[0]}"
