"""Crop windows: the regions of images that are used for training.

A window depends only on the sample's random numbers and the image's size. The host and the device compute exactly the
same window, because the only floating-point operation is a multiplication in float32.
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

MAX_NAMED = 3  # maximum number of images listed in an error message


class Window(NamedTuple):
    """A region of a sample's "image", in pixels; the sample's other images are cropped to match."""

    top: int
    left: int
    height: int
    width: int


def cut(sample: dict[str, NDArray[Any]], window: Window, scale: int) -> dict[str, NDArray[Any]]:
    """Crop every image of a sample to the window, which is divided by the scale for the low-resolution image."""
    parts = {}
    for name, field in sample.items():
        if field.ndim == 3:
            top, left, height, width = (side // scale for side in window) if name == "low" and scale else window
            field = field[top : top + height, left : left + width]
        parts[name] = field
    return parts


def corners(uniforms: Tensor, sizes: Tensor, crop: int, scale: int) -> Tensor:
    """Return the top-left corners of the samples' windows, int64 [n, 2]. If scale > 0, they are multiples of it."""
    step = max(1, scale)
    places = torch.div(sizes - crop, step, rounding_mode="floor") + 1
    # The product is below `places`; float32 never rounds it up to `places`.
    return (uniforms[:, CROP_ROW : CROP_COLUMN + 1] * places.to(torch.float32)).to(torch.int64) * step


def windows(uniforms: NDArray[np.float32], sizes: NDArray[np.int64], crop: int, scale: int) -> list[Window]:
    """Return each sample's window, computed on the host."""
    found = corners(torch.from_numpy(uniforms), torch.from_numpy(sizes), crop, scale)
    return [Window(top, left, crop, crop) for top, left in found.tolist()]


def cropped(spec: DataSpec, crop: int) -> DataSpec:
    """Return the data spec with the size of the crops, or unchanged if there is no crop."""
    return dataclasses.replace(spec, height=crop, width=crop) if crop else spec


def check_crop(sizes: NDArray[np.int64], crop: int, scale: int, name_of: Callable[[int], str]) -> None:
    """Raise UserError if the crop is larger than an image, or if there is no crop and sizes differ."""
    smallest = int(sizes.min())
    if not crop:
        other = np.flatnonzero((sizes != sizes[0]).any(axis=1))
        if other.size:
            first, second = (f"{name_of(i)} {_size(sizes[i])}" for i in (0, int(other[0])))
            raise UserError(
                f"--crop 0: images of different sizes ({first}, {second}) cannot share a batch; "
                f"set --crop to a size that fits every image, at most {smallest}"
            )
        return
    if scale and crop % scale:
        raise UserError(f"--crop {crop}: must be a multiple of {scale}, the scale of the low-resolution files")
    small = np.flatnonzero((sizes < crop).any(axis=1))
    if small.size:
        named = ", ".join(f"{name_of(int(i))} {_size(sizes[i])}" for i in small[:MAX_NAMED])
        more = f" and {small.size - MAX_NAMED} more" if small.size > MAX_NAMED else ""
        raise UserError(
            f"--crop {crop}: larger than some images: {named}{more}; leave these out with --bad-images skip, "
            f"or use a crop of at most {smallest - smallest % max(1, scale)}"
        )


def _size(size: NDArray[np.int64]) -> str:
    return f"{size[1]}×{size[0]}"
