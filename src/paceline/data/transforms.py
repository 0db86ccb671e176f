"""What happens to pictures on the device, in whole batches: augmentation from the tickets' numbers, then scaling.

Each sample is changed by its own row of numbers alone, with operations that round the same way everywhere, so a
batch and its parts, on any loader, give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.config import RunSettings
from paceline.data.loader import are_pictures
from paceline.recipe import Batch, Facts

# Which of a ticket's uniform numbers decides what.
CROP_ROW, CROP_COLUMN, FLIP, CUTOUT_ROW, CUTOUT_COLUMN = range(5)


@dataclass(frozen=True)
class Augment:
    """The random changes made to training pictures; pictures that belong together are changed alike."""

    pad_crop: int = 0  # black pixels added on each side before a crop of the old size
    flip: bool = False  # mirror every other picture, left to right
    cutout: int = 0  # side of the square that is blanked

    @classmethod
    def from_settings(cls, settings: RunSettings, facts: Facts) -> Augment:
        """What the settings ask for; with flip "auto", the source says whether a mirrored sample is still one."""
        flip = facts.mirror if settings.flip == "auto" else settings.flip == "on"
        return cls(settings.pad_crop, flip, settings.cutout)


def prepare(raw: Batch, augment: Augment | None, dtype: torch.dtype) -> Batch:
    """A loader's batch with its pictures augmented and scaled from 0…255 to -1…1, and without its random numbers."""
    batch = {name: tensor for name, tensor in raw.items() if name != "uniforms"}
    for name, tensor in batch.items():
        if are_pictures(tensor):
            batch[name] = _prepare_pictures(tensor, raw["uniforms"], augment or Augment(), dtype)
    return batch


def _prepare_pictures(pictures: Tensor, uniforms: Tensor, augment: Augment, dtype: torch.dtype) -> Tensor:
    if augment.pad_crop or augment.flip:
        pictures = _crop_and_flip(pictures, uniforms, augment)
    scaled = _scale(pictures, dtype)
    return _cut_out(scaled, uniforms, augment.cutout) if augment.cutout else scaled


def _crop_and_flip(pictures: Tensor, uniforms: Tensor, augment: Augment) -> Tensor:
    """One gather: for each pixel of the result, the row and column of the padded picture that it shows."""
    num, _, height, width = pictures.shape
    device, pad = pictures.device, augment.pad_crop
    row = torch.arange(height, device=device).expand(num, height)
    column = torch.arange(width, device=device).expand(num, width)
    if augment.flip:
        column = torch.where(uniforms[:, FLIP, None] < 0.5, width - 1 - column, column)
    if pad:
        row = row + _pick(uniforms[:, CROP_ROW], 2 * pad + 1)[:, None] - pad
        column = column + _pick(uniforms[:, CROP_COLUMN], 2 * pad + 1)[:, None] - pad
    sample = torch.arange(num, device=device)[:, None, None]
    rows, columns = row.clamp(0, height - 1)[:, :, None], column.clamp(0, width - 1)[:, None, :]
    moved = pictures.permute(0, 2, 3, 1)[sample, rows, columns]
    if pad:
        shows_picture = ((row >= 0) & (row < height))[:, :, None] & ((column >= 0) & (column < width))[:, None, :]
        moved = moved * shows_picture[..., None]
    return moved.permute(0, 3, 1, 2)


def _scale(pictures: Tensor, dtype: torch.dtype) -> Tensor:
    """x / 127.5 - 1, written so that only one operation rounds: the same bits on every device, fused or not."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return ((pictures.to(wide) - 127.5) * (1 / 127.5)).to(dtype)


def _cut_out(pictures: Tensor, uniforms: Tensor, side: int) -> Tensor:
    """Blanks a square whose centre lies anywhere in the picture; what reaches over a border is lost."""
    _, _, height, width = pictures.shape
    top = _pick(uniforms[:, CUTOUT_ROW], height)[:, None] - side // 2
    left = _pick(uniforms[:, CUTOUT_COLUMN], width)[:, None] - side // 2
    row, column = torch.arange(height, device=top.device), torch.arange(width, device=top.device)
    in_rows, in_columns = (row >= top) & (row < top + side), (column >= left) & (column < left + side)
    return pictures.masked_fill((in_rows[:, :, None] & in_columns[:, None, :])[:, None], 0.0)


def _pick(uniform: Tensor, count: int) -> Tensor:
    """A whole number below `count` from a number in [0, 1): floor(u · count), which float32 never rounds up to it."""
    return (uniform * count).to(torch.int64)
