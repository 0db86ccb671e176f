"""Measures how much tiles change the result of a network that reads the whole image, for example by pooling."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.inference.forward import Pixels, pixel_format, tensor_of, to_unit_range, transform
from paceline.inference.image_model import ImageModel
from paceline.inference.levels import LEVELS, in_levels
from paceline.inference.receptive_field import ReceptiveField
from paceline.inference.tiling import Tiling, needed_bytes, usable_bytes


class _Area(NamedTuple):
    """A rectangle of pixels: the rows top … bottom and the columns left … right."""

    top: int
    bottom: int
    left: int
    right: int

    def grown(self, margin: int, size: tuple[int, int]) -> _Area:
        """Return the area with a margin, as far as the image reaches."""
        height, width = size
        return _Area(
            max(0, self.top - margin),
            min(height, self.bottom + margin),
            max(0, self.left - margin),
            min(width, self.right + margin),
        )

    @property
    def num_pixels(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)


def describe_tile_error(
    image_model: ImageModel, field: ReceptiveField, pixels: Pixels, tiling: Tiling, device: torch.device
) -> str:
    """Return a phrase with the largest and the mean change at the image's centre, in 8-bit levels.

    A tile is compared with the same pixels computed from an area that extends half a tile further on each side. If
    that area does not fit in memory, a tile half as large is compared with a full tile, which overestimates the change.
    """
    size, side = (pixels.shape[0], pixels.shape[1]), tiling.side_px
    tile = _central(size, side, field.multiple_px)
    larger = tile.grown(tiling.halo_px + max(side // 2, field.multiple_px), size)
    what = "tiles change"
    if needed_bytes(field, larger.num_pixels) > usable_bytes(device):
        larger = tile.grown(tiling.halo_px, size)
        side = max(field.multiple_px, side // 2 // field.multiple_px * field.multiple_px)
        tile, what = _central(size, side, field.multiple_px), "tiles half as large change"
    near = _result(image_model, pixels, tile.grown(tiling.halo_px, size), tile)
    far = _result(image_model, pixels, larger, tile)
    change = (near - far).abs() * LEVELS
    largest, mean = in_levels(float(change.max())), in_levels(float(change.mean()))
    return f"{what} the centre by at most {largest} of 255 levels (mean {mean})"


def _central(size: tuple[int, int], side: int, multiple: int) -> _Area:
    """Return a tile near the centre of the image, aligned to a multiple."""
    starts = [max(0, (length - side) // 2 // multiple * multiple) for length in size]
    (top, left), (height, width) = starts, size
    return _Area(top, min(height, top + side), left, min(width, left + side))


def _result(image_model: ImageModel, pixels: Pixels, context: _Area, tile: _Area) -> Tensor:
    """Return the results for a tile, computed from a larger area."""
    scale = image_model.output_scale
    seen = pixels[context.top : context.bottom, context.left : context.right]
    rows = slice((tile.top - context.top) * scale, (tile.bottom - context.top) * scale)
    columns = slice((tile.left - context.left) * scale, (tile.right - context.left) * scale)
    device = next(image_model.recipe.parameters()).device
    values = transform(image_model, to_unit_range(tensor_of(seen).to(device), pixel_format(image_model, seen)))
    return torch.stack([made[0, rows, columns] for made in values.by_name.values()])
