"""Bicubic resampling on the device, antialiased when downscaling, with Pillow's and MATLAB's kernel (a = -0.5).

`bicubic` is the plain filter. `bicubic_as_saved` rounds to 8 bits after each of its two passes, as Pillow does. So the
result on the device differs by at most 1/255 from a file that Pillow would write, even at hard edges. Images with 16
bits are rounded to 16 bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.contracts.data_spec import EIGHT_BITS, PixelFormat

HALF_MISSED_BY = 1e-4


def bicubic(images: Tensor, height: int, width: int) -> Tensor:
    """Resize images [n, c, h, w] in float32 or wider; values may overshoot the input range."""
    with torch.autocast(images.device.type, enabled=False):
        wide = images.to(torch.promote_types(images.dtype, torch.float32))
        if torch.compiler.is_exporting():
            return _enlarged_by_convolution(wide, height // wide.shape[-2])
        return F.interpolate(wide, (height, width), mode="bicubic", align_corners=False, antialias=True)


def bicubic_as_saved(images: Tensor, height: int, width: int, pixels: PixelFormat = EIGHT_BITS) -> Tensor:
    """Resize images in [-1, 1] and round every value to a level of the pixel format; floats are only clipped."""
    if not pixels.is_integer:
        return bicubic(images, height, width).clamp(-1, 1)
    levels = ((images + 1) * pixels.half).round()
    for size in ((images.shape[-2], width), (height, width)):
        # Round halves up, as Pillow does; the small offset catches halves that rounding errors made slightly too small.
        levels = (bicubic(levels, *size) + (0.5 + HALF_MISSED_BY)).floor().clamp(0, pixels.span)
    return levels / pixels.half - 1


def _enlarged_by_convolution(images: Tensor, factor: int) -> Tensor:
    """Upscale by an integer factor with operations that ONNX supports: one filter for each subpixel position.

    Weights outside the image are dropped and the others sum to one, as in antialiased filters.
    """
    distance = (torch.arange(factor)[:, None] + 0.5) / factor - 0.5 - torch.arange(-2, 3)
    near, far = 1.5 * distance.abs() ** 3 - 2.5 * distance**2 + 1, distance.abs()
    away = -0.5 * far**3 + 2.5 * far**2 - 4 * far + 2
    taps = torch.where(far <= 1, near, torch.where(far < 2, away, 0.0)).to(images)
    kernel = (taps[:, None, :, None] * taps[None, :, None, :]).reshape(factor**2, 1, 5, 5)
    single = images.flatten(0, 1).unsqueeze(1)
    made, share = (F.conv2d(values, kernel, padding=2) for values in (single, torch.ones_like(single)))
    enlarged = F.pixel_shuffle(made / share, factor).squeeze(1)
    return torch.unflatten(enlarged, 0, images.shape[:2])


def cut_to_multiple(images: Tensor, multiple: int) -> Tensor:
    """Crop images at the bottom and right so that their sides are multiples of `multiple`."""
    height, width = (side - side % multiple for side in images.shape[-2:])
    return images[..., :height, :width]
