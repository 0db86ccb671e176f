"""Reads a result and its target for `paceline measure`, in the depth that both files have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from paceline.contracts.pixel_format import EIGHT_BITS, PixelFormat
from paceline.core.errors import UserError
from paceline.images.decode import BadImage, decode
from paceline.images.deep_image import read_deep, to_format
from paceline.images.planes import UnusablePlanes, read_planes_header

Limits = tuple[float, float] | None


def read_pair(result: Path, target: Path, limits: Limits) -> tuple[Tensor, Tensor, PixelFormat]:
    """Return both images as levels [1, c, h, w] from 0 to the peak, and their pixel format.

    Grey and RGB images are compared in 8 bits, stacks of planes in the depth of the deeper file, and floating-point
    images in the range `limits`. Raise UserError if the images cannot be compared.
    """
    try:
        is_deep = _is_deep(target)
    except BadImage as error:
        raise UserError(f"its target {target} cannot be used: {error}") from None
    if not is_deep and not _is_deep(result):
        return *_read_plain(result, target), EIGHT_BITS
    one = read_deep(result).pixels
    try:
        other = read_deep(target).pixels
    except BadImage as error:
        raise UserError(f"its target {target} cannot be used: {error}") from None
    if one.shape != other.shape:
        raise UserError(f"is {_described(one)}, but {target} is {_described(other)}")
    pixels = _common_format(one, other, limits)
    made, real = (_levels(to_format(array, pixels), pixels) for array in (one, other))
    return made, real, pixels


def _is_deep(path: Path) -> bool:
    """Return whether an image has neither 1 nor 3 channels, has planes, or has floating-point pixels."""
    try:
        header = read_planes_header(path)
    except UnusablePlanes:
        return False  # the first page may be a grey or RGB image
    return header is not None and (header.is_stack or header.dtype.kind == "f")


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
