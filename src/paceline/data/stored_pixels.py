"""How images are stored in tensors, and how pixels become values in [-1, 1] and back.

8-bit pixels are stored as uint8 and floating-point pixels as float32. torch has few operations for uint16, so 16-bit
pixels are stored as int16, with 32,768 subtracted. torch can gather int16 on every device, also in a CUDA graph.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from paceline.contracts.pixel_format import PixelFormat

TORCH_TYPES = {"uint8": torch.uint8, "uint16": torch.uint16, "float32": torch.float32}  # by pixel type
SHIFT = 32768  # subtracted from 16-bit pixels
IMAGE_TYPES = (torch.uint8, torch.uint16, torch.int16, torch.float32)  # uint16 only until `stored` is called


def stored(images: Tensor) -> Tensor:
    """Return images with 16-bit pixels shifted to int16; other images are returned unchanged."""
    return (images.to(torch.int32) - SHIFT).to(torch.int16) if images.dtype == torch.uint16 else images


def to_unit_range(images: Tensor, pixels: PixelFormat, dtype: torch.dtype) -> Tensor:
    """Return stored images with values in [-1, 1].

    For integers, only the multiplication rounds, so the result is identical on all devices, fused or not.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if images.is_floating_point():
        images = images.to(wide)
    # The subtraction also converts from integers, which saves a separate pass.
    return ((images - _middle(pixels, wide)) * (1 / pixels.half)).to(dtype)


def to_pixels(images: Tensor, pixels: PixelFormat) -> Tensor:
    """Convert images in [-1, 1] to pixels as in image files, rounded for integers."""
    levels = (images.float() + 1) * pixels.half
    levels = (levels.round_() if pixels.is_integer else levels).clamp_(0, pixels.span)
    return (levels + pixels.low if pixels.low else levels).to(TORCH_TYPES[pixels.dtype])


def lowest(pixels: PixelFormat) -> float:
    """Return the stored value that becomes -1."""
    return pixels.low - SHIFT if pixels.dtype == "uint16" else pixels.low


@cache
def _middle(pixels: PixelFormat, dtype: torch.dtype) -> Tensor:
    """Return the stored value that becomes 0 as a tensor of the given dtype."""
    return torch.tensor(pixels.middle - (SHIFT if pixels.dtype == "uint16" else 0), dtype=dtype)
