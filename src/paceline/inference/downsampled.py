"""Downsamples an image, enlarges it with networks and with bicubic interpolation, and compares the results."""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from paceline.evaluation.image_metrics import PEAK, PSNR_OF_IDENTICAL, WINDOW, luma, ssim
from paceline.images.decode import BadImage
from paceline.images.grids import captioned, side_by_side
from paceline.images.image_file import ImageData

ROWS_AT_ONCE = 256  # image rows compared at a time, in float64


def shrink(image: ImageData, scale: int) -> tuple[Image.Image, Image.Image]:
    """Return an 8-bit copy of the image, cropped to multiples of the scale, and a downsampled copy."""
    pixels = (image.pixels >> 8).astype(np.uint8) if image.deep else image.pixels
    least = math.ceil((WINDOW + 2 * scale) / scale) * scale
    height, width = pixels.shape[:2]
    if min(height, width) < least:
        raise BadImage(f"{width}×{height} pixels; at least {least}×{least} are needed to downsample by {scale}")
    height, width = height - height % scale, width - width % scale
    cut = pixels[:height, :width]
    original = Image.fromarray(cut[..., 0] if cut.shape[-1] == 1 else cut)
    return original, original.resize((width // scale, height // scale), Image.Resampling.BICUBIC)


def compare(
    original: Image.Image, small: Image.Image, made: Image.Image, scale: int, protocol: str
) -> tuple[dict[str, Image.Image], dict[str, float]]:
    """Return the images to write (the first shows all side by side), and the PSNR and SSIM of each enlarged image."""
    enlarged = {
        "lr": small.resize(original.size, Image.Resampling.NEAREST),
        "bicubic": small.resize(original.size, Image.Resampling.BICUBIC),
        "sr": made,
    }
    metrics: dict[str, float] = {}
    captions: dict[str, str] = {}
    for name, image in enlarged.items():
        psnr, likeness = measure(image, original, scale, protocol)
        metrics |= {f"{name}_psnr[{protocol}]": psnr, f"{name}_ssim[{protocol}]": likeness}
        captions[name] = f"{name}  {psnr:.2f} dB  {likeness:.4f}"
    shown = [captioned(image.convert("RGB"), captions[name], room=True) for name, image in enlarged.items()]
    shown.append(captioned(original.convert("RGB"), "original"))
    return {"": side_by_side(shown), "lr": small, "bicubic": enlarged["bicubic"], "sr": made}, metrics


def measure(made: Image.Image, original: Image.Image, border: int, protocol: str) -> tuple[float, float]:
    """Return PSNR and SSIM, computed a few rows at a time; with protocol "y", only luma is compared."""
    width, height = original.size
    rows = height - 2 * border - WINDOW + 1  # number of rows whose SSIM window fits inside the image
    squares = likeness = 0.0
    count = 0
    for first in range(0, rows, ROWS_AT_ONCE):
        num = min(ROWS_AT_ONCE, rows - first)
        box = (border, border + first, width - border, border + first + num + WINDOW - 1)
        one, other = (_levels(image.crop(box), protocol) for image in (made, original))
        likeness += ssim(one, other).item() * num
        own = slice(None) if first + num == rows else slice(num)  # the next block covers the other rows
        difference = (one - other)[..., own, :]
        squares += difference.square().sum().item()
        count += difference.numel()
    psnr = 10 * math.log10(PEAK**2 * count / squares) if squares else PSNR_OF_IDENTICAL
    return psnr, likeness / rows


def _levels(image: Image.Image, protocol: str) -> Tensor:
    array = np.asarray(image).astype(np.float64)
    levels = torch.from_numpy(array[..., np.newaxis] if array.ndim == 2 else array).permute(2, 0, 1).unsqueeze(0)
    return luma(levels) if protocol == "y" else levels
