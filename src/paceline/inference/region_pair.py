"""Compares a result and its target by region, for `paceline measure` on files that are larger than memory."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.contracts.pixel_format import PixelFormat
from paceline.core.errors import UserError
from paceline.core.ordered_map import num_cores, ordered_map
from paceline.evaluation.image_metrics import PEAK, luma
from paceline.evaluation.overlap import CLASSES, pixel_counts
from paceline.images.decode import BadImage
from paceline.images.regions.open_image import open_any_image
from paceline.images.regions.region_image import Box, RegionImage
from paceline.inference.region_sums import Comparison, Sums, extents, inside_border

BLOCK_PX = 1024  # side of the blocks that are compared at a time, in float64


@dataclass(frozen=True, eq=False)
class RegionComparison:
    """The metrics of a pair of files."""

    psnr: float
    ssim: float
    counts: Tensor  # pixels per class, as in `evaluation.overlap`; zero unless masks are compared
    pixels: PixelFormat
    channels: int


def compare_regions(result: Path, target: Path, protocol: str, border: int, *, masks: bool) -> RegionComparison:
    """Return the same PSNR and SSIM as for whole images; raise UserError if the files cannot be compared."""
    with ExitStack() as stack:
        made = stack.enter_context(open_any_image(result))
        try:
            real = stack.enter_context(open_any_image(target))
        except BadImage as error:
            raise UserError(f"its target {target} cannot be used: {error}") from None
        _check(made, real, target, protocol, masks)
        pixels = PixelFormat.full(made.format.dtype.name)
        level = made.levels[0]
        inside = inside_border(level.height, level.width, border)
        counts = torch.zeros(len(CLASSES), 3, dtype=torch.float64)

        def measure(block: Comparison) -> tuple[Sums, Tensor | None]:
            one, other = (_levels(image, block.area) for image in (made, real))
            found = None
            if masks:
                shown = [block.own(levels) * (PEAK / pixels.span) for levels in (one, other)]
                found = pixel_counts(shown[0], shown[1])
            if protocol == "y":
                one, other = luma(one, pixels.span), luma(other, pixels.span)
            return block.sums(one, other, pixels.span), found

        blocks = (
            Comparison(rows, columns, inside)
            for rows in extents(level.height, BLOCK_PX)
            for columns in extents(level.width, BLOCK_PX)
        )
        total = Sums()
        for sums, found in ordered_map(measure, blocks, min(num_cores(), 4)):
            total = Sums.total([total, sums])
            counts += 0 if found is None else found
    return RegionComparison(total.psnr(pixels.span), total.ssim(), counts, pixels, made.format.channels)


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


def _levels(image: RegionImage, area: Box) -> Tensor:
    return torch.from_numpy(image.read(0, area).astype(np.float64)).permute(2, 0, 1)[None]
