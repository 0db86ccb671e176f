"""Compares a result and its target by region, for `paceline measure` on files that are larger than memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.contracts.pixel_format import PixelFormat
from paceline.core.errors import UserError
from paceline.core.ordered_map import num_cores, ordered_map
from paceline.evaluation.image_metrics import PEAK, PSNR_OF_IDENTICAL, WINDOW, luma, ssim
from paceline.evaluation.overlap import CLASSES, pixel_counts
from paceline.images.decode import PIXEL_LIMIT, BadImage
from paceline.images.regions.open_image import can_be_read_by_region, open_region_image
from paceline.images.regions.region_image import Box, RegionImage

BLOCK_PX = 1024  # side of the blocks that are compared at a time, in float64


@dataclass(frozen=True, eq=False)
class RegionComparison:
    """The metrics of a pair of files."""

    psnr: float
    ssim: float
    counts: Tensor  # pixels per class, as in `evaluation.overlap`; zero unless masks are compared
    pixels: PixelFormat


@dataclass(frozen=True, eq=False)
class _Sums:
    squares: float
    num_values: int
    likeness: float
    num_windows: int
    counts: Tensor


def is_huge(path: Path) -> bool:
    """Return whether an image is too large to be read as a whole, but can be read by region."""
    if not can_be_read_by_region(path):
        return False
    try:
        with open_region_image(path) as image:
            return image.levels[0].height * image.levels[0].width > PIXEL_LIMIT
    except BadImage:
        return False


def compare_regions(result: Path, target: Path, protocol: str, border: int, *, masks: bool) -> RegionComparison:
    """Return the same PSNR and SSIM as for whole images; raise UserError if the files cannot be compared."""
    with ExitStack() as stack:
        made = stack.enter_context(open_region_image(result))
        try:
            real = stack.enter_context(open_region_image(target))
        except BadImage as error:
            raise UserError(f"its target {target} cannot be used: {error}") from None
        _check(made, real, target, protocol, masks)
        pixels = PixelFormat.full(made.format.dtype.name)
        level = made.levels[0]

        def measure(blocks: tuple[Box, Box]) -> _Sums:
            area, own = blocks
            one, other = (_levels(image, area) for image in (made, real))
            counts = torch.zeros(len(CLASSES), 3, dtype=torch.float64)
            if masks:
                shown = [levels[..., : own.height, : own.width] * (PEAK / pixels.span) for levels in (one, other)]
                counts = pixel_counts(shown[0], shown[1])
            if protocol == "y":
                one, other = luma(one, pixels.span), luma(other, pixels.span)
            difference = (one - other)[..., : own.height, : own.width]
            num_windows = (area.height - WINDOW + 1) * (area.width - WINDOW + 1)
            likeness = ssim(one, other, pixels.span).item() * num_windows
            return _Sums(difference.square().sum().item(), difference.numel(), likeness, num_windows, counts)

        blocks = list(_blocks(level.height, level.width, border))
        sums = list(ordered_map(measure, blocks, min(num_cores(), 4)))
    squares = math.fsum(one.squares for one in sums) / sum(one.num_values for one in sums)
    likeness = math.fsum(one.likeness for one in sums) / sum(one.num_windows for one in sums)
    psnr = 10 * math.log10(pixels.span**2 / squares) if squares else PSNR_OF_IDENTICAL
    return RegionComparison(psnr, likeness, sum((one.counts for one in sums[1:]), sums[0].counts), pixels)


def _check(made: RegionImage, real: RegionImage, target: Path, protocol: str, masks: bool) -> None:
    one, other = made.levels[0], real.levels[0]
    if (one.height, one.width) != (other.height, other.width):
        raise UserError(f"is {one.width}×{one.height} pixels, but {target} is {other.width}×{other.height}")
    if (made.format.channels, made.format.dtype) != (real.format.channels, real.format.dtype):
        kinds = [f"{image.format.dtype} with {image.format.channels} channels" for image in (made, real)]
        raise UserError(f"is {kinds[0]}, but {target} is {kinds[1]}")
    if made.format.channels not in (1, 3) and (masks or protocol == "y"):
        flag = "--masks" if masks else "--protocol y"
        raise UserError(f"it has {made.format.channels} channels, but {flag} needs 1 or 3")


def _blocks(height: int, width: int, border: int) -> Iterator[tuple[Box, Box]]:
    """Yield areas that overlap by SSIM's window, and the part of each that no other area contains."""
    if min(height, width) - 2 * border < WINDOW:
        raise UserError(
            f"{width}×{height} pixels is too small to compare; SSIM needs at least {WINDOW}×{WINDOW} inside the border"
        )
    rows, columns = (side - 2 * border - WINDOW + 1 for side in (height, width))  # positions of the window
    for top in range(0, rows, BLOCK_PX):
        for left in range(0, columns, BLOCK_PX):
            down, across = min(BLOCK_PX, rows - top), min(BLOCK_PX, columns - left)
            area = Box(border + top, border + left, down + WINDOW - 1, across + WINDOW - 1)
            own_height = area.height if top + down == rows else down
            own_width = area.width if left + across == columns else across
            yield area, Box(area.top, area.left, own_height, own_width)


def _levels(image: RegionImage, area: Box) -> Tensor:
    return torch.from_numpy(image.read(0, area).astype(np.float64)).permute(2, 0, 1)[None]
