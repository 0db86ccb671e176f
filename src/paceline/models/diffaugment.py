"""Random changes of pictures that gradients pass through, so that a discriminator cannot learn few pictures by heart.

Zhao et al., Differentiable Augmentation for Data-Efficient GAN Training (2020): the same kinds of change for
real and fake pictures. The random numbers are given, seven uniform ones per picture.
"""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("color", "translation", "cutout")
NUM_UNIFORMS = 7
# Which of a picture's uniform numbers decides what.
BRIGHTNESS, SATURATION, CONTRAST, SHIFT_ROW, SHIFT_COLUMN, CUTOUT_ROW, CUTOUT_COLUMN = range(NUM_UNIFORMS)

LARGEST_SHIFT = 1 / 8  # of the side
CUTOUT_SIDE = 1 / 2  # of the side


def augment(pictures: Tensor, uniforms: Tensor, kinds: tuple[str, ...]) -> Tensor:
    """The pictures, each changed by its own row of numbers."""
    if "color" in kinds:
        pictures = _change_color(pictures, uniforms)
    if "translation" in kinds:
        pictures = _translate(pictures, uniforms)
    if "cutout" in kinds:
        pictures = _cut_out(pictures, uniforms)
    return pictures


def _change_color(pictures: Tensor, uniforms: Tensor) -> Tensor:
    def row(name: int) -> Tensor:
        return uniforms[:, name, None, None, None]

    pictures = pictures + (row(BRIGHTNESS) - 0.5)
    grey = pictures.mean(1, keepdim=True)
    pictures = (pictures - grey) * (2 * row(SATURATION)) + grey
    mean = pictures.mean((1, 2, 3), keepdim=True)
    return (pictures - mean) * (row(CONTRAST) + 0.5) + mean


def _translate(pictures: Tensor, uniforms: Tensor) -> Tensor:
    """Moves each picture by whole pixels; what comes in from outside is 0, as is the middle grey."""
    height, width = pictures.shape[2:]
    row, shows_row = _shifted(height, uniforms[:, SHIFT_ROW])
    column, shows_column = _shifted(width, uniforms[:, SHIFT_COLUMN])
    sample = torch.arange(len(pictures), device=pictures.device)[:, None, None]
    moved = pictures.permute(0, 2, 3, 1)[sample, row[:, :, None], column[:, None, :]]
    shows_picture = (shows_row[:, :, None] & shows_column[:, None, :])[..., None]
    return torch.where(shows_picture, moved, 0).permute(0, 3, 1, 2)


def _shifted(side: int, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """For each position of the result the one that it shows, and whether that lies inside."""
    largest = int(side * LARGEST_SHIFT + 0.5)
    shift = _pick(uniform, 2 * largest + 1) - largest
    position = torch.arange(side, device=uniform.device) + shift[:, None]
    return position.clamp(0, side - 1), (position >= 0) & (position < side)


def _cut_out(pictures: Tensor, uniforms: Tensor) -> Tensor:
    height, width = pictures.shape[2:]
    in_rows = _covered(height, uniforms[:, CUTOUT_ROW])
    in_columns = _covered(width, uniforms[:, CUTOUT_COLUMN])
    return torch.where((in_rows[:, :, None] & in_columns[:, None, :])[:, None], 0, pictures)


def _covered(side: int, uniform: Tensor) -> Tensor:
    """Which positions a stretch covers whose middle lies anywhere; what reaches over a border is lost."""
    length = int(side * CUTOUT_SIDE + 0.5)
    start = _pick(uniform, side + 1 - length % 2)[:, None] - length // 2
    position = torch.arange(side, device=uniform.device)
    return (position >= start) & (position < start + length)


def _pick(uniform: Tensor, count: int) -> Tensor:
    """A whole number below `count` from a number in [0, 1)."""
    return (uniform * count).to(torch.int64)
