"""Batch transforms on the device: augmentation using each sample's random numbers, then scaling.

Each sample depends only on its own row of random numbers, and all operations round the same way on every device. So a
sample is bit-identical with every loader, however samples are batched.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import permutations

import torch
from torch import Tensor

from paceline.config.settings import RunSettings
from paceline.contracts.data_spec import EIGHT_BITS, PixelFormat
from paceline.contracts.recipe import Batch, DataSpec
from paceline.core.errors import UserError
from paceline.data.stream import (
    COLOURS,
    CROP_COLUMN,
    CROP_ROW,
    CUTOUT_COLUMN,
    CUTOUT_ROW,
    FLIP,
    NUM_UNIFORMS,
    ROT90,
    are_images,
    lowest,
    stored,
    to_pixels,
    to_unit_range,
)

CROP_THEN_FLIP = (2, 1, NUM_UNIFORMS - 3)  # sizes into which a row of random numbers is split: crop, flip, rest
RGB = 3  # number of channels of a colour image
assert (CROP_ROW, CROP_COLUMN, FLIP) == (0, 1, 2)


@dataclass(frozen=True)
class Augment:
    """Random augmentation for training; all images of a sample are changed in the same way."""

    pad_crop: int = 0  # black pixels added on each side before cropping to the original size
    flip: bool = False  # whether to flip each image left to right with probability 1/2
    cutout: int = 0  # side of the blanked square in pixels; 0 for no square
    rot90: bool = False  # whether to rotate each image by a random number of quarter turns
    swap_colours: bool = False  # whether to put the three channels of each image in random order

    @classmethod
    def from_settings(cls, settings: RunSettings, spec: DataSpec) -> Augment:
        """Return the augmentation for the settings; flip="auto" flips only if the data spec allows it."""
        flip = spec.flip_allowed if settings.flip == "auto" else settings.flip == "on"
        rot90 = settings.rot90 == "on"
        if rot90 and spec.height != spec.width:
            raise UserError(
                f"rot90=on: needs square images, not {spec.width}×{spec.height}; use --crop to get square images"
            )
        if settings.pad_crop and (settings.crop or spec.scale):
            raise UserError(
                f"pad_crop={settings.pad_crop}: not supported with --crop or low-resolution files; use --set pad_crop=0"
            )
        swap_colours = settings.swap_colours == "on"
        if swap_colours and spec.channels != RGB:
            raise UserError(f"swap_colours=on: needs images with three channels, not {spec.channels}")
        return cls(settings.pad_crop, flip, settings.cutout, rot90, swap_colours)


def transform(raw: Batch, augment: Augment | None, dtype: torch.dtype, pixels: PixelFormat = EIGHT_BITS) -> Batch:
    """Augment the images of a raw batch, scale their pixels to -1…1, and drop the random numbers."""
    batch = {name: tensor for name, tensor in raw.items() if name != "uniforms"}
    for name, tensor in batch.items():
        if are_images(tensor):
            batch[name] = _transform_images(stored(tensor), raw["uniforms"], augment or Augment(), pixels, dtype)
    return batch


def _transform_images(
    images: Tensor, uniforms: Tensor, augment: Augment, pixels: PixelFormat, dtype: torch.dtype
) -> Tensor:
    if augment.pad_crop or augment.flip:
        images = _crop_and_flip(images, uniforms, augment, lowest(pixels))
    if augment.rot90:
        images = _rot90(images, uniforms)
    if augment.swap_colours:
        images = _swap_colours(images, uniforms)
    scaled = to_unit_range(images, pixels, dtype)
    if augment.cutout:
        scaled.masked_fill_(_cutout_mask(scaled, uniforms, augment.cutout), 0.0)  # in place, to keep the memory format
    return scaled


def _crop_and_flip(images: Tensor, uniforms: Tensor, augment: Augment, black: float) -> Tensor:
    """Crop and flip with one gather, which reads each output pixel from its place in the padded image."""
    num, channels, height, width = images.shape
    pad = augment.pad_crop
    sample, row, column, flipped = _grid(num, height, width, images.device)
    place, flip, _ = uniforms.unsqueeze(2).split_with_sizes(CROP_THEN_FLIP, dim=1)
    images = images.permute(0, 2, 3, 1)
    if augment.flip:
        column = torch.where(flip < 0.5, flipped, column)
    if pad:
        framed, inside = _frame((num, height, width, channels), pad, images.dtype, black, images.device)
        inside.copy_(images)
        images = framed
        top, left = _pick(place, 2 * pad + 1).split_with_sizes((1, 1), dim=1)
        row, column = row + top, column + left
    return images[sample, row, column].permute(0, 3, 1, 2)


def _rot90(images: Tensor, uniforms: Tensor) -> Tensor:
    """Rotate each square image anticlockwise by a random number of quarter turns, with one gather."""
    num, _, side, _ = images.shape
    sample, row, column, _ = _grid(num, side, side, images.device)
    quarters = _pick(uniforms[:, ROT90], 4)[:, None, None]
    sideways = quarters % 2 == 1
    from_row, from_column = torch.where(sideways, column, row), torch.where(sideways, row, column)
    from_row = torch.where(quarters >= 2, side - 1 - from_row, from_row)
    from_column = torch.where((quarters == 1) | (quarters == 2), side - 1 - from_column, from_column)
    return images.permute(0, 2, 3, 1)[sample, from_row, from_column].permute(0, 3, 1, 2)


def _swap_colours(images: Tensor, uniforms: Tensor) -> Tensor:
    """Reorder the channels of each image; all six orders are equally likely."""
    orders = _colour_orders(images.device)
    order = orders[_pick(uniforms[:, COLOURS], len(orders))][:, None, None]
    pixels = images.permute(0, 2, 3, 1)
    return pixels.gather(3, order.expand(pixels.shape)).permute(0, 3, 1, 2)


# Cached for the life of the process: kernel launches take time, and a CUDA graph keeps using these tensors.
@cache
def _grid(num: int, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the indices of samples, rows, columns and reversed columns, each along its own dimension."""
    columns = torch.arange(width, device=device)[None, None]
    return (
        torch.arange(num, device=device)[:, None, None],
        torch.arange(height, device=device)[None, :, None],
        columns,
        width - 1 - columns,
    )


@cache
def _colour_orders(device: torch.device) -> Tensor:
    return torch.tensor(list(permutations(range(RGB))), device=device)


@cache
def _frame(
    shape: tuple[int, int, int, int], pad: int, dtype: torch.dtype, black: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return black images [n, h, w, c] padded by `pad` on each side, and a view of the area inside the padding."""
    num, height, width, channels = shape
    framed = torch.full((num, height + 2 * pad, width + 2 * pad, channels), black, dtype=dtype, device=device)
    return framed, framed[:, pad : pad + height, pad : pad + width]


def to_eight_bits(images: Tensor) -> Tensor:
    """Convert images in [-1, 1] to uint8, the format in which sample images are saved."""
    return to_pixels(images, EIGHT_BITS)


def _cutout_mask(images: Tensor, uniforms: Tensor, side: int) -> Tensor:
    """Return a mask with one square per image, centred anywhere in the image and clipped at the borders."""
    _, _, height, width = images.shape
    top = _pick(uniforms[:, CUTOUT_ROW], height)[:, None] - side // 2
    left = _pick(uniforms[:, CUTOUT_COLUMN], width)[:, None] - side // 2
    row, column = torch.arange(height, device=top.device), torch.arange(width, device=top.device)
    in_rows, in_columns = (row >= top) & (row < top + side), (column >= left) & (column < left + side)
    return (in_rows[:, :, None] & in_columns[:, None, :])[:, None]


def _pick(uniform: Tensor, count: int) -> Tensor:
    """Map a number u in [0, 1) to an integer below `count`: floor(u · count), which never rounds up to `count`."""
    return (uniform * count).to(torch.int64)
