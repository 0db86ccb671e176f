"""Processes images of any size in tiles. Halos around the tiles make the result the same as for the whole image."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.data.memory import free_bytes
from paceline.images.decode import BadImage
from paceline.inference.image_model import ImageModel
from paceline.inference.receptive_field import ReceptiveField
from paceline.models.windows import Window, fixed_halo, windows

SHARE_OF_FREE = 0.5  # fraction of the free memory to use; other processes need some, too
HOST_BYTES = 2.2e9  # memory budget for the result and one tile together, when computing on the host
TILE_BYTES_ON_HOST = (0.5e9, 1.2e9)  # minimum and maximum memory for a tile; larger tiles are hardly faster
WORKSPACE = 1.5  # multiplies the size of intermediate results, since convolutions need extra memory
INEXACT_HALO_PX = 64  # used if no halo gives the exact result, or if the exact halo does not fit in memory
SMALLEST_TILE_PX = 32
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601 weights, as in Pillow's greyscale conversion

Pixels = npt.NDArray[Any]  # [h, w, c]; uint8, uint16 or float32
Paste = Callable[
    [str, int, int, npt.NDArray[np.float32]], None
]  # arguments: result name, top, left, and [h, w, c] values in [-1, 1]
Advance = Callable[[int], None]  # called with the number of input pixels just processed


@dataclass(frozen=True)
class Tiling:
    """How an image is split into tiles."""

    side_px: int  # side of a tile in input pixels, excluding its halo
    halo_px: int
    note: str = ""  # a warning about the result, to be printed
    window_px: tuple[int, int] | None = None  # height and width of every tile including its halo, even at the edges

    def halved(self, multiple: int) -> Tiling | None:
        """Return the same tiling with tiles half as large; None if they cannot be smaller."""
        side = self.side_px // 2 // multiple * multiple
        return replace(self, side_px=side) if side >= max(multiple, SMALLEST_TILE_PX // 2) else None

    def windows(self, length: int, fixed: int = 0) -> list[Window]:
        """Return the tiles along a side of this length; if `fixed` is given, each has that size, halo included."""
        return windows(length, self.side_px, self.halo_px, fixed)


def choose_tiling(
    field: ReceptiveField,
    size: tuple[int, int],
    device: torch.device,
    *,
    share: int = 1,
    side: int = 0,
    result_bytes: int = 0,
) -> Tiling:
    """Return tiles with the given side length; if none is given, the largest tiles that fit in memory.

    The memory is shared by `share` processes. `result_bytes` is the size of the result in the host's memory.
    """
    free = free_bytes(device) * SHARE_OF_FREE / share
    usual = free
    if device.type == "cpu":
        least, most = TILE_BYTES_ON_HOST
        usual = min(free, max(least, min(most, HOST_BYTES - result_bytes)) / share)
    exact, warning = not field.obstacles, tiling_warning(field)
    if side:
        tiling = Tiling(_rounded_up(side, field.multiple_px), field.tiled_halo_px if exact else _inexact_halo(field))
        return replace(tiling, note=warning if tiling.side_px < max(size) else "")
    if needed_bytes(field, size[0] * size[1]) <= (usual if exact or field.is_measurable else free):
        return Tiling(_rounded_up(max(size), field.multiple_px), 0)
    for budget in (usual, free) if exact else ():
        fitting = _largest_side(field, budget, field.tiled_halo_px)
        if fitting >= max(field.multiple_px, SMALLEST_TILE_PX):
            return Tiling(fitting, field.tiled_halo_px)
    halo = _inexact_halo(field)
    fitting = max(_largest_side(field, free, halo), _rounded_up(SMALLEST_TILE_PX, field.multiple_px))
    note = warning or f"a tile with its halo of {field.halo_px} pixels does not fit in memory: seams may be visible"
    return Tiling(fitting, halo, note)


def tiles_of_training_size(window: tuple[int, int], size: tuple[int, int]) -> Tiling:
    """Return tiles whose size including the halo is the training size; a single tile if the image is no larger."""
    if size[0] <= window[0] and size[1] <= window[1]:
        return Tiling(max(size), 0)
    halo = fixed_halo(window)
    size_px = f"{window[1]}×{window[0]}-pixel"
    note = f"each {size_px} window (the training size) is normalised separately: seams may be visible"
    return Tiling(min(window) - 2 * halo, halo, note, window)


def tiling_warning(field: ReceptiveField) -> str:
    """Return why tiles would change the result; empty if they would not."""
    return f"{field.obstacles[0]}: seams may be visible" if field.obstacles else ""


def apply_in_tiles(image_model: ImageModel, pixels: Pixels, tiling: Tiling, paste: Paste, advance: Advance) -> int:
    """Apply networks to an image tile by tile, paste each result, and return the number of tiles."""
    height, width = pixels.shape[:2]
    scale, count = image_model.output_scale, 0
    fixed = tiling.window_px or (0, 0)
    for row in tiling.windows(height, fixed[0]):
        for column in tiling.windows(width, fixed[1]):
            tile = pixels[row.halo_start : row.halo_stop, column.halo_start : column.halo_stop]
            rows, columns = (
                slice((window.start - window.halo_start) * scale, (window.stop - window.halo_start) * scale)
                for window in (row, column)
            )
            for name, made in transform(image_model, to_unit_range(tile, image_model.spec.value_range)).items():
                paste(name, row.start * scale, column.start * scale, made[rows, columns].cpu().numpy())
            count += 1
            advance((row.stop - row.start) * (column.stop - column.start))
    return count


def to_unit_range(pixels: Pixels, value_range: tuple[float, float] | None = None) -> Tensor:
    """Convert an image [h, w, c] to a [1, c, h, w] tensor with values in [-1, 1].

    `value_range` is needed for floats; integers have their full range by default.
    """
    low, high = value_range or (0, np.iinfo(pixels.dtype).max)
    values = torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1).unsqueeze(0)
    return (values - low if low else values) / ((high - low) / 2) - 1


@torch.no_grad()
def transform(image_model: ImageModel, image: Tensor) -> dict[str, Tensor]:
    """Return the networks' results for one image by name, each [h, w, c].

    The image and the networks may have different numbers of channels. Results of the same kind as the input then keep
    the image's channels: a grey image is repeated in three channels, whose results are averaged, and networks for grey
    images process each colour separately. Results in other modalities have the networks' channels, and networks for
    grey images process the luma of a colour image.
    """
    own, expected = image.shape[1], image_model.spec.channels
    same_kind = not image_model.spec.panels
    image = image.to(next(image_model.recipe.parameters()).device)
    if own < expected:
        image = image.expand(-1, expected, -1, -1)
    elif own > expected:
        luma = image.new_tensor(LUMA).view(1, 3, 1, 1)
        image = image.transpose(0, 1) if same_kind else (image * luma).sum(1, keepdim=True)
    found = {}
    for name, made in image_model.recipe.image_to_image(image).items():
        if not made.isfinite().all():
            raise BadImage("the networks' output is not finite; the weights may be damaged")
        made = made.transpose(0, 1) if len(made) > 1 else made
        made = made.mean(1, keepdim=True) if own < made.shape[1] and same_kind else made
        found[name] = made[0].permute(1, 2, 0).float().clamp(-1, 1)
    return found


def needed_bytes(field: ReceptiveField, pixels: float) -> float:
    """Return the memory that a network needs for an image with this number of pixels."""
    return pixels * field.bytes_per_px * WORKSPACE


def _largest_side(field: ReceptiveField, budget: float, halo: int) -> int:
    side = math.isqrt(int(budget / max(needed_bytes(field, 1), 1))) - 2 * halo
    return side // field.multiple_px * field.multiple_px


def _inexact_halo(field: ReceptiveField) -> int:
    usual = _rounded_up(INEXACT_HALO_PX, field.multiple_px)
    return min(usual, field.tiled_halo_px) if field.is_traced else usual


def _rounded_up(side: int, multiple: int) -> int:
    return math.ceil(side / multiple) * multiple
