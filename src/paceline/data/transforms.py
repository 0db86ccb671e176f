"""What happens to pictures on the device, in whole batches: augmentation from the tickets' numbers, then scaling.

Each sample is changed by its own row of numbers alone, with operations that round the same way everywhere, so a
batch and its parts, on any loader, give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, DataSpec
from paceline.core.errors import UserError
from paceline.data.loader import are_pictures
from paceline.data.tickets import CROP_COLUMN, CROP_ROW, CUTOUT_COLUMN, CUTOUT_ROW, FLIP, NUM_UNIFORMS, ROT90

CROP_THEN_FLIP = (2, 1, NUM_UNIFORMS - 3)  # how a row of random numbers is cut for these two
assert (CROP_ROW, CROP_COLUMN, FLIP) == (0, 1, 2)


@dataclass(frozen=True)
class Augment:
    """The random changes made to training pictures; pictures that belong together are changed alike."""

    pad_crop: int = 0  # black pixels added on each side before a crop of the old size
    flip: bool = False  # mirror every other picture, left to right
    cutout: int = 0  # side of the square that is blanked
    rot90: bool = False  # by 0, 1, 2 or 3 quarters

    @classmethod
    def from_settings(cls, settings: RunSettings, spec: DataSpec) -> Augment:
        """What the settings ask for; with flip "auto", the source says whether a mirrored sample is still one."""
        flip = spec.flip_allowed if settings.flip == "auto" else settings.flip == "on"
        rot90 = settings.rot90 == "on"
        if rot90 and spec.height != spec.width:
            raise UserError(f"rot90=on: needs square pictures, not {spec.width}×{spec.height}; --crop makes them so")
        if settings.pad_crop and (settings.crop or spec.scale):
            raise UserError(f"pad_crop={settings.pad_crop}: is for whole pictures of one size, without --crop")
        return cls(settings.pad_crop, flip, settings.cutout, rot90)


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
    if augment.rot90:
        pictures = _rot90(pictures, uniforms)
    scaled = _scale(pictures, dtype)
    if augment.cutout:
        scaled.masked_fill_(_cutout_mask(scaled, uniforms, augment.cutout), 0.0)  # in place: keeps the memory format
    return scaled


def _crop_and_flip(pictures: Tensor, uniforms: Tensor, augment: Augment) -> Tensor:
    """One gather: for each pixel of the result, the row and column of the padded picture that it shows."""
    num, channels, height, width = pictures.shape
    pad = augment.pad_crop
    sample, row, column, mirrored = _grid(num, height, width, pictures.device)
    place, flip, _ = uniforms.unsqueeze(2).split(CROP_THEN_FLIP, dim=1)
    pictures = pictures.permute(0, 2, 3, 1)
    if augment.flip:
        column = torch.where(flip < 0.5, mirrored, column)
    if pad:
        framed, inside = _frame(num, height, width, channels, pad, pictures.device)
        inside.copy_(pictures)
        pictures = framed
        top, left = _pick(place, 2 * pad + 1).split(1, dim=1)
        row, column = row + top, column + left
    return pictures[sample, row, column].permute(0, 3, 1, 2)


def _rot90(pictures: Tensor, uniforms: Tensor) -> Tensor:
    """Each square picture turned anticlockwise by its number of quarters, in one gather."""
    num, _, side, _ = pictures.shape
    sample, row, column, _ = _grid(num, side, side, pictures.device)
    quarters = _pick(uniforms[:, ROT90], 4)[:, None, None]
    sideways = quarters % 2 == 1
    from_row, from_column = torch.where(sideways, column, row), torch.where(sideways, row, column)
    from_row = torch.where(quarters >= 2, side - 1 - from_row, from_row)
    from_column = torch.where((quarters == 1) | (quarters == 2), side - 1 - from_column, from_column)
    return pictures.permute(0, 2, 3, 1)[sample, from_row, from_column].permute(0, 3, 1, 2)


# What follows is kept for ever, since launches cost and a captured step goes on to use it.
@cache
def _grid(num: int, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The numbers of samples, rows and columns, and the columns from right to left, each along its own dimension."""
    columns = torch.arange(width, device=device)[None, None]
    return (
        torch.arange(num, device=device)[:, None, None],
        torch.arange(height, device=device)[None, :, None],
        columns,
        width - 1 - columns,
    )


@cache
def _frame(num: int, height: int, width: int, channels: int, pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Black pictures [n, h, w, c] with `pad` pixels more on each side, and the part inside, to be overwritten."""
    shape = (num, height + 2 * pad, width + 2 * pad, channels)
    framed = torch.zeros(shape, dtype=torch.uint8, device=device)
    return framed, framed[:, pad : pad + height, pad : pad + width]


@cache
def _middle(dtype: torch.dtype) -> Tensor:
    """The grey between black and white; its dtype is that of what is computed with it."""
    return torch.tensor(127.5, dtype=dtype)


def _scale(pictures: Tensor, dtype: torch.dtype) -> Tensor:
    """x / 127.5 - 1, written so that only one operation rounds: the same bits on every device, fused or not."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # The conversion from uint8 needs no pass of its own.
    return ((pictures - _middle(wide)) * (1 / 127.5)).to(dtype)


def to_eight_bits(pictures: Tensor) -> Tensor:
    """Pictures in -1…1 as they would be saved: uint8."""
    return ((pictures.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def _cutout_mask(pictures: Tensor, uniforms: Tensor, side: int) -> Tensor:
    """A square per picture, its centre anywhere in the picture; what reaches over a border is lost."""
    _, _, height, width = pictures.shape
    top = _pick(uniforms[:, CUTOUT_ROW], height)[:, None] - side // 2
    left = _pick(uniforms[:, CUTOUT_COLUMN], width)[:, None] - side // 2
    row, column = torch.arange(height, device=top.device), torch.arange(width, device=top.device)
    in_rows, in_columns = (row >= top) & (row < top + side), (column >= left) & (column < left + side)
    return (in_rows[:, :, None] & in_columns[:, None, :])[:, None]


def _pick(uniform: Tensor, count: int) -> Tensor:
    """A whole number below `count` from a number in [0, 1): floor(u · count), which float32 never rounds up to it."""
    return (uniform * count).to(torch.int64)
