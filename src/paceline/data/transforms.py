"""Transforms of whole batches on the device: augmentation from the tickets' numbers, then scaling.

Each sample is changed by its own row of numbers alone, with operations that round the same way everywhere. So a batch
and its parts have the same bits, with every loader.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, DataSpec
from paceline.core.errors import UserError
from paceline.data.tickets import CROP_COLUMN, CROP_ROW, CUTOUT_COLUMN, CUTOUT_ROW, FLIP, NUM_UNIFORMS, ROT90
from paceline.data.transfer import are_images

CROP_THEN_FLIP = (2, 1, NUM_UNIFORMS - 3)  # how a row of random numbers is cut for these two
assert (CROP_ROW, CROP_COLUMN, FLIP) == (0, 1, 2)


@dataclass(frozen=True)
class Augment:
    """The random changes of training images; the images of one sample are changed alike."""

    pad_crop: int = 0  # black pixels added on each side before a crop of the original size
    flip: bool = False  # every other image, left to right
    cutout: int = 0  # side of the square that is blanked, in pixels
    rot90: bool = False  # by 0, 1, 2 or 3 quarter turns

    @classmethod
    def from_settings(cls, settings: RunSettings, spec: DataSpec) -> Augment:
        """Return the settings' augmentation; with flip "auto", the source decides whether samples are flipped."""
        flip = spec.flip_allowed if settings.flip == "auto" else settings.flip == "on"
        rot90 = settings.rot90 == "on"
        if rot90 and spec.height != spec.width:
            raise UserError(f"rot90=on: needs square images, not {spec.width}×{spec.height}; --crop makes them so")
        if settings.pad_crop and (settings.crop or spec.scale):
            raise UserError(f"pad_crop={settings.pad_crop}: is for whole images of one size, without --crop")
        return cls(settings.pad_crop, flip, settings.cutout, rot90)


def transform(raw: Batch, augment: Augment | None, dtype: torch.dtype) -> Batch:
    """Return a raw batch with its images augmented and scaled from 0…255 to -1…1, without its random numbers."""
    batch = {name: tensor for name, tensor in raw.items() if name != "uniforms"}
    for name, tensor in batch.items():
        if are_images(tensor):
            batch[name] = _transform_images(tensor, raw["uniforms"], augment or Augment(), dtype)
    return batch


def _transform_images(images: Tensor, uniforms: Tensor, augment: Augment, dtype: torch.dtype) -> Tensor:
    if augment.pad_crop or augment.flip:
        images = _crop_and_flip(images, uniforms, augment)
    if augment.rot90:
        images = _rot90(images, uniforms)
    scaled = _scale(images, dtype)
    if augment.cutout:
        scaled.masked_fill_(_cutout_mask(scaled, uniforms, augment.cutout), 0.0)  # in place: keeps the memory format
    return scaled


def _crop_and_flip(images: Tensor, uniforms: Tensor, augment: Augment) -> Tensor:
    """Crop and flip in one gather: for each pixel of the result, the row and column of the padded image."""
    num, channels, height, width = images.shape
    pad = augment.pad_crop
    sample, row, column, flipped = _grid(num, height, width, images.device)
    place, flip, _ = uniforms.unsqueeze(2).split_with_sizes(CROP_THEN_FLIP, dim=1)
    images = images.permute(0, 2, 3, 1)
    if augment.flip:
        column = torch.where(flip < 0.5, flipped, column)
    if pad:
        framed, inside = _frame(num, height, width, channels, pad, images.device)
        inside.copy_(images)
        images = framed
        top, left = _pick(place, 2 * pad + 1).split_with_sizes((1, 1), dim=1)
        row, column = row + top, column + left
    return images[sample, row, column].permute(0, 3, 1, 2)


def _rot90(images: Tensor, uniforms: Tensor) -> Tensor:
    """Turn each square image anticlockwise by its number of quarter turns, in one gather."""
    num, _, side, _ = images.shape
    sample, row, column, _ = _grid(num, side, side, images.device)
    quarters = _pick(uniforms[:, ROT90], 4)[:, None, None]
    sideways = quarters % 2 == 1
    from_row, from_column = torch.where(sideways, column, row), torch.where(sideways, row, column)
    from_row = torch.where(quarters >= 2, side - 1 - from_row, from_row)
    from_column = torch.where((quarters == 1) | (quarters == 2), side - 1 - from_column, from_column)
    return images.permute(0, 2, 3, 1)[sample, from_row, from_column].permute(0, 3, 1, 2)


# These are cached for the life of the process: launches cost time, and a captured step keeps using the tensors.
@cache
def _grid(num: int, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the numbers of samples, rows, columns and columns from right to left, each along its own dimension."""
    columns = torch.arange(width, device=device)[None, None]
    return (
        torch.arange(num, device=device)[:, None, None],
        torch.arange(height, device=device)[None, :, None],
        columns,
        width - 1 - columns,
    )


@cache
def _frame(num: int, height: int, width: int, channels: int, pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return black images [n, h, w, c] with `pad` more pixels on each side, and the inner part, to be overwritten."""
    shape = (num, height + 2 * pad, width + 2 * pad, channels)
    framed = torch.zeros(shape, dtype=torch.uint8, device=device)
    return framed, framed[:, pad : pad + height, pad : pad + width]


@cache
def _middle(dtype: torch.dtype) -> Tensor:
    """Return the grey between black and white; results computed with it have its dtype."""
    return torch.tensor(127.5, dtype=dtype)


def _scale(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x / 127.5 - 1, where only one operation rounds: the same bits on every device, fused or not."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # The conversion from uint8 needs no pass of its own.
    return ((images - _middle(wide)) * (1 / 127.5)).to(dtype)


def to_eight_bits(images: Tensor) -> Tensor:
    """Return images in -1…1 as they would be saved: uint8."""
    return ((images.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def _cutout_mask(images: Tensor, uniforms: Tensor, side: int) -> Tensor:
    """Return a square per image, its centre anywhere in the image; what reaches over a border is cut off."""
    _, _, height, width = images.shape
    top = _pick(uniforms[:, CUTOUT_ROW], height)[:, None] - side // 2
    left = _pick(uniforms[:, CUTOUT_COLUMN], width)[:, None] - side // 2
    row, column = torch.arange(height, device=top.device), torch.arange(width, device=top.device)
    in_rows, in_columns = (row >= top) & (row < top + side), (column >= left) & (column < left + side)
    return (in_rows[:, :, None] & in_columns[:, None, :])[:, None]


def _pick(uniform: Tensor, count: int) -> Tensor:
    """Return an integer below `count` from a number in [0, 1): floor(u · count), never rounded up to count."""
    return (uniform * count).to(torch.int64)
