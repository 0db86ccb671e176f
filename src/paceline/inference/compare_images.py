"""Reads results and their targets for `paceline measure`, as a whole or by region."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from paceline.contracts.data_spec import EIGHT_BITS, PixelFormat
from paceline.core.errors import UserError
from paceline.core.ordered_map import num_cores, ordered_map
from paceline.evaluation.image_metrics import CLASSES, PEAK, luma, pixel_counts
from paceline.images.decode import BadImage, decode
from paceline.images.deep import GREY_AND_RGB, PlanesHeader, UnusablePlanes, read_deep, read_planes_header, to_format
from paceline.images.regions.open_image import open_any_image
from paceline.images.regions.region_image import Box, RegionImage
from paceline.inference.evaluate_regions import Comparison, Sums, extents, inside_border

Limits = tuple[float, float] | None


class Pair(NamedTuple):
    """A result and its target, as levels [1, c, h, w] from 0 to the peak."""

    made: Tensor
    real: Tensor
    pixels: PixelFormat
    are_colours: bool  # whether both are grey or RGB images


def read_pair(result: Path, target: Path, limits: Limits) -> Pair:
    """Return both images.

    Grey and RGB images are compared in 8 bits, stacks of planes in the depth of the deeper file, and floating-point
    images in the range `limits`. Raise UserError if the images cannot be compared.
    """
    try:
        headers = [_header(target)]
    except BadImage as error:
        raise UserError(f"its target {target} cannot be used: {error}") from None
    headers.append(_header(result))
    if not any(header and (header.is_stack or header.dtype.kind == "f") for header in headers):
        return Pair(*_read_plain(result, target), EIGHT_BITS, are_colours=True)
    one = read_deep(result).pixels
    try:
        other = read_deep(target).pixels
    except BadImage as error:
        raise UserError(f"its target {target} cannot be used: {error}") from None
    if one.shape != other.shape:
        raise UserError(f"is {_described(one)}, but {target} is {_described(other)}")
    pixels = _common_format(one, other, limits)
    made, real = (_levels(to_format(array, pixels), pixels) for array in (one, other))
    have_positions = any(header and header.are_positions for header in headers)
    return Pair(made, real, pixels, one.shape[-1] in GREY_AND_RGB and not have_positions)


def _header(path: Path) -> PlanesHeader | None:
    try:
        return read_planes_header(path)
    except UnusablePlanes:
        return None  # the first page may be a grey or RGB image


def _read_plain(result: Path, target: Path) -> tuple[Tensor, Tensor]:
    one = decode(result)
    try:
        other = decode(target)
    except BadImage as error:
        raise UserError(f"its target {target} cannot be used: {error}") from None
    if one.size != other.size:
        sizes = f"{one.width}×{one.height} pixels, but {target} is {other.width}×{other.height}"
        raise UserError(f"is {sizes}")
    mode = "L" if one.mode == other.mode == "L" else "RGB"
    return _plain_levels(one, mode), _plain_levels(other, mode)


def _plain_levels(image: Image.Image, mode: str) -> Tensor:
    levels = torch.from_numpy(np.array(image.convert(mode), dtype=np.float64)).view(image.height, image.width, -1)
    return levels.permute(2, 0, 1)[None]


def _common_format(one: NDArray[Any], other: NDArray[Any], limits: Limits) -> PixelFormat:
    names = {array.dtype.name for array in (one, other)}
    if names <= {"uint8", "uint16"}:
        return PixelFormat.full("uint16" if "uint16" in names else "uint8")
    if limits is None:
        raise UserError("has floating-point pixels; set their range with --value-range LOW,HIGH")
    return PixelFormat("float32", *limits)


def _levels(array: NDArray[Any], pixels: PixelFormat) -> Tensor:
    return torch.from_numpy(array.astype(np.float64) - pixels.low).permute(2, 0, 1)[None]


def _described(array: NDArray[Any]) -> str:
    height, width, channels = array.shape
    return f"{width}×{height} pixels with {channels} channel{'s' * (channels > 1)}"


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
            one, other = (_region_levels(image, block.area) for image in (made, real))
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


def _region_levels(image: RegionImage, area: Box) -> Tensor:
    return torch.from_numpy(image.read(0, area).astype(np.float64)).permute(2, 0, 1)[None]
