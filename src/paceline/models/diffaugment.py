"""Differentiable augmentation, which keeps a discriminator from memorising a small training set.

Zhao et al., Differentiable Augmentation for Data-Efficient GAN Training (2020). Real and fake images get the same kinds
of augmentation. The caller passes the random numbers: seven uniform numbers per image.
"""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("color", "translation", "cutout")
NUM_UNIFORMS = 7
# For each augmentation, the column that holds its random number.
BRIGHTNESS, SATURATION, CONTRAST, SHIFT_ROW, SHIFT_COLUMN, CUTOUT_ROW, CUTOUT_COLUMN = range(NUM_UNIFORMS)

LARGEST_SHIFT = 1 / 8  # as a fraction of the image side
CUTOUT_SIDE = 1 / 2  # as a fraction of the image side


def augment(images: Tensor, uniforms: Tensor, kinds: tuple[str, ...]) -> Tensor:
    """Augment each image with its own row of random numbers in [0, 1)."""
    if "color" in kinds:
        images = _change_color(images, uniforms)
    if "translation" in kinds:
        images = _translate(images, uniforms)
    if "cutout" in kinds:
        images = _cut_out(images, uniforms)
    return images


def _change_color(images: Tensor, uniforms: Tensor) -> Tensor:
    def row(name: int) -> Tensor:
        return uniforms[:, name, None, None, None]

    images = images + (row(BRIGHTNESS) - 0.5)
    grey = images.mean(1, keepdim=True)
    images = (images - grey) * (2 * row(SATURATION)) + grey
    mean = images.mean((1, 2, 3), keepdim=True)
    return (images - mean) * (row(CONTRAST) + 0.5) + mean


def _translate(images: Tensor, uniforms: Tensor) -> Tensor:
    """Shift each image by whole pixels; uncovered pixels become 0, which is mid-grey."""
    height, width = images.shape[2:]
    row, row_inside = _shifted(height, uniforms[:, SHIFT_ROW])
    column, column_inside = _shifted(width, uniforms[:, SHIFT_COLUMN])
    sample = torch.arange(len(images), device=images.device)[:, None, None]
    moved = images.permute(0, 2, 3, 1)[sample, row[:, :, None], column[:, None, :]]
    is_inside = (row_inside[:, :, None] & column_inside[:, None, :])[..., None]
    return torch.where(is_inside, moved, 0).permute(0, 3, 1, 2)


def _shifted(side: int, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the source position for each output position, and whether it is inside the image."""
    largest = int(side * LARGEST_SHIFT + 0.5)
    shift = _pick(uniform, 2 * largest + 1) - largest
    position = torch.arange(side, device=uniform.device) + shift[:, None]
    return position.clamp(0, side - 1), (position >= 0) & (position < side)


def _cut_out(images: Tensor, uniforms: Tensor) -> Tensor:
    height, width = images.shape[2:]
    in_rows = _covered(height, uniforms[:, CUTOUT_ROW])
    in_columns = _covered(width, uniforms[:, CUTOUT_COLUMN])
    return torch.where((in_rows[:, :, None] & in_columns[:, None, :])[:, None], 0, images)


def _covered(side: int, uniform: Tensor) -> Tensor:
    """Return a mask of the positions covered by a randomly centred interval, which may cross the border."""
    length = int(side * CUTOUT_SIDE + 0.5)
    start = _pick(uniform, side + 1 - length % 2)[:, None] - length // 2
    position = torch.arange(side, device=uniform.device)
    return (position >= start) & (position < start + length)


def _pick(uniform: Tensor, count: int) -> Tensor:
    """Map a number in [0, 1) to an integer below `count`."""
    return (uniform * count).to(torch.int64)
