"""Reads a result and its target for `paceline measure`, in the depth that both files have."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from paceline.contracts.pixel_format import EIGHT_BITS, PixelFormat
from paceline.core.errors import UserError
from paceline.images.decode import BadImage, decode
from paceline.images.deep_image import GREY_AND_RGB, read_deep, to_format
from paceline.images.planes import PlanesHeader, UnusablePlanes, read_planes_header

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
