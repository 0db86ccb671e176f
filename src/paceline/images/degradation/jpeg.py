"""JPEG compression and decompression of batches on the device, without the lossless entropy coding.

The steps and their rounding follow ITU-T T.81 and libjpeg's defaults: full-range YCbCr, chroma subsampled 2×2, the
example quantisation tables scaled by quality, and triangular chroma upsampling. The DCT uses floating-point numbers
and libjpeg's uses integers, so a coefficient close to the middle between two quantisation steps may round differently.
Compared with files written by Pillow, at least 98 % of all values differ by at most two levels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.images.degradation.canvas import Canvas, pad
from paceline.images.degradation.numbers import constant

BLOCK = 8
MCU = 16  # side of the pixel area that one chroma block covers
HALF = 32768  # one half in units of 1/65536
ROUNDING = 0.5 + 1e-4  # the small offset catches halves that rounding errors made slightly too small
DCT = tuple(  # the orthonormal 8-point DCT matrix, row by row
    math.sqrt((2 if k else 1) / BLOCK) * math.cos((2 * n + 1) * k * math.pi / (2 * BLOCK))
    for k in range(BLOCK)
    for n in range(BLOCK)
)
# Tables K.1 and K.2 of ITU-T T.81.
LUMA_TABLE = (
    *(16, 11, 10, 16, 24, 40, 51, 61),
    *(12, 12, 14, 19, 26, 58, 60, 55),
    *(14, 13, 16, 24, 40, 57, 69, 56),
    *(14, 17, 22, 29, 51, 87, 80, 62),
    *(18, 22, 37, 56, 68, 109, 103, 77),
    *(24, 35, 55, 64, 81, 104, 113, 92),
    *(49, 64, 78, 87, 103, 121, 120, 101),
    *(72, 92, 95, 98, 112, 100, 103, 99),
)
CHROMA_TABLE = (
    *(17, 18, 24, 47, 99, 99, 99, 99),
    *(18, 21, 26, 66, 99, 99, 99, 99),
    *(24, 26, 56, 99, 99, 99, 99, 99),
    *(47, 66, 99, 99, 99, 99, 99, 99),
    *([99] * 32),
)


def jpeg(canvas: Canvas, quality: Tensor) -> Canvas:
    """Round each image to 8 bits, then compress and decompress it with its own integer `quality`, 1 to 100."""
    height, width = canvas.pixels.shape[-2:]
    rounded = canvas.replaced(canvas.pixels.round().clamp(0, 255))
    levels = pad(rounded, 0, (_round_up(height), _round_up(width)), "replicate")
    made = _code_colours(levels, canvas, quality) if levels.shape[1] > 1 else _coded(levels, quality, LUMA_TABLE)
    return canvas.replaced(made[..., :height, :width])


def quantisation_tables(quality: Tensor, base: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return libjpeg's quantisation table [n, 8, 8] for each quality."""
    percent = torch.where(quality < 50, 5000 // quality.clamp(min=1), 200 - 2 * quality)
    scaled = (constant(base, quality.device, torch.int64) * percent[:, None] + 50) // 100
    return scaled.clamp(1, 255).view(-1, BLOCK, BLOCK).to(dtype)


def _code_colours(levels: Tensor, canvas: Canvas, quality: Tensor) -> Tensor:
    """Code RGB images: luma at full size, chroma at half the height and width.

    The factors are libjpeg's integers in units of 1/65536, whose products with levels are exact in float32.
    """
    red, green, blue = levels.split(1, dim=1)
    luma = _coded(_shifted(19595 * red + 38470 * green + 7471 * blue + HALF), quality, LUMA_TABLE)
    blueness = _shifted(-11059 * red - 21709 * green + 32768 * blue + (HALF - 1)) + 128
    redness = _shifted(32768 * red - 27439 * green - 5329 * blue + (HALF - 1)) + 128
    halved = Canvas(_halve(torch.cat([blueness, redness], dim=1)), (canvas.height + 1) // 2, (canvas.width + 1) // 2)
    # libjpeg repeats the last row after the subsampling, but the last column before it.
    whole = torch.full_like(halved.width, halved.pixels.shape[-1])
    rows, columns = halved.pixels.shape[-2:]
    repeated = pad(Canvas(halved.pixels, halved.height, whole), 0, (rows, columns), "replicate")
    coded = halved.replaced(_coded(repeated, quality, CHROMA_TABLE))
    blueness, redness = (_double(coded) - 128).split(1, dim=1)
    made = [
        luma + _shifted(91881 * redness + HALF),
        luma + _shifted(-22554 * blueness - 46802 * redness + HALF),
        luma + _shifted(116130 * blueness + HALF),
    ]
    return torch.cat(made, dim=1).clamp(0, 255)


def _coded(planes: Tensor, quality: Tensor, base: tuple[int, ...]) -> Tensor:
    """Transform planes [n, c, h, w] in 8×8 blocks, quantise the coefficients, and transform back to 0…255."""
    num, channels, height, width = planes.shape
    blocks = (planes - 128).view(num, channels, height // BLOCK, BLOCK, width // BLOCK, BLOCK)
    basis = constant(DCT, planes.device, planes.dtype).view(BLOCK, BLOCK)
    coefficients = _transformed(blocks, basis)
    steps = quantisation_tables(quality, base, planes.dtype)[:, None, None, :, None, :]
    # libjpeg rounds halves away from zero when it quantises, and up when it restores pixels.
    quantised = coefficients.sign() * (coefficients.abs() / steps + ROUNDING).floor() * steps
    return (_transformed(quantised, basis.t()).reshape(planes.shape) + (128 + ROUNDING)).floor().clamp(0, 255)


def _transformed(blocks: Tensor, basis: Tensor) -> Tensor:
    """Multiply 8×8 blocks [n, c, rows, 8, columns, 8] by a basis on both sides.

    The products are added one by one, because a matrix product would use TF32 if the run's precision allows it.
    """
    for dim, shape in ((3, (BLOCK, 1, 1)), (5, (BLOCK,))):
        total = blocks.narrow(dim, 0, 1) * basis[:, 0].view(shape)
        for number in range(1, BLOCK):
            total = torch.addcmul(total, blocks.narrow(dim, number, 1), basis[:, number].view(shape))
        blocks = total
    return blocks


def _halve(planes: Tensor) -> Tensor:
    """Average 2×2 pixels; halves are rounded down and up in alternate columns, as by libjpeg."""
    sums = planes[..., 0::2, :] + planes[..., 1::2, :]
    sums = sums[..., 0::2] + sums[..., 1::2]
    bias = 1 + torch.arange(sums.shape[-1], device=planes.device) % 2
    return ((sums + bias) / 4).floor()


def _double(canvas: Canvas) -> Tensor:
    """Upsample by 2 with weights of 3/4 and 1/4, which libjpeg calls fancy upsampling."""
    height, width = canvas.pixels.shape[-2:]
    padded = pad(canvas, 1, (height + 2, width + 2), "replicate")
    near = 3 * padded[..., 1:-1, :]
    rows = torch.stack([near + padded[..., :-2, :], near + padded[..., 2:, :]], dim=-2).flatten(-3, -2)
    near = 3 * rows[..., 1:-1]
    columns = torch.stack([near + rows[..., :-2] + 8, near + rows[..., 2:] + 7], dim=-1).flatten(-2)
    return (columns / 16).floor()


def _shifted(values: Tensor) -> Tensor:
    """Return the integer part of values in units of 1/65536."""
    return (values / 65536).floor()


def _round_up(side: int) -> int:
    return -(-side // MCU) * MCU
