"""Triton kernels for JPEG compression and decompression of float32 images, with the same steps as in `jpeg`.

One kernel codes the luma of an area of 32×32 pixels and its chroma of 16×16 pixels. The other upsamples the chroma,
which needs the neighbouring areas, and restores the colours. Only images that are `used` are read and written.
"""

# Triton determines the types of kernel arguments itself.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.images.degradation import jpeg
from paceline.images.degradation.canvas import Canvas
from paceline.images.degradation.numbers import constant
from paceline.images.degradation.triton_kernels import rounded

TILE = 32  # side of an area in pixels
BLOCK, HALF, ROUNDING = tl.constexpr(jpeg.BLOCK), tl.constexpr(jpeg.HALF), tl.constexpr(jpeg.ROUNDING)
# The DCT of several blocks beside each other is one product with this block-diagonal matrix.
BASIS = tuple(
    jpeg.DCT[row % jpeg.BLOCK * jpeg.BLOCK + column % jpeg.BLOCK] if row // jpeg.BLOCK == column // jpeg.BLOCK else 0.0
    for row in range(TILE)
    for column in range(TILE)
)


def compress_in_place(canvas: Canvas, quality: Tensor, used: Tensor) -> None:
    """Round, compress and decompress the images for which `used` [n] is true, each with its own quality."""
    num, channels, rows, columns = canvas.pixels.shape
    grid = triton.cdiv(rows, TILE), triton.cdiv(columns, TILE)
    device, plane = canvas.pixels.device, (grid[0] * TILE, grid[1] * TILE)
    luma = torch.empty((num, *plane), dtype=torch.uint8, device=device)
    chroma = torch.empty((num, 2, plane[0] // 2, plane[1] // 2), dtype=torch.uint8, device=device)
    tables = [jpeg.quantisation_tables(quality, base, torch.float32) for base in (jpeg.LUMA_TABLE, jpeg.CHROMA_TABLE)]
    basis = constant(BASIS, device, torch.float32)
    common = canvas.pixels, luma, chroma, used, canvas.height, canvas.width
    options = {"CHANNELS": channels, "TILE": TILE, "num_warps": 4, "enable_fp_fusion": True}
    _code[grid[0] * grid[1], num](
        *common, *tables, basis, columns, rows * columns, plane[1], plane[0] * plane[1], **options
    )
    _restore[grid[0] * grid[1], num](*common, columns, rows * columns, plane[1], plane[0] * plane[1], **options)


@triton.jit(do_not_specialize=["width", "plane", "padded_width", "padded_plane"])
def _code(
    pixels, luma, chroma, used, heights, widths, luma_tables, chroma_tables, basis,
    width, plane, padded_width, padded_plane, CHANNELS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the compressed and decompressed luma and chroma of an area."""
    image = tl.program_id(1)
    if tl.load(used + image) == 0:
        return
    rows, columns = tl.load(heights + image).to(tl.int32), tl.load(widths + image).to(tl.int32)
    across = padded_width // TILE
    top, left = tl.program_id(0) // across * TILE, tl.program_id(0) % across * TILE
    if (top >= rows) | (left >= columns):
        return
    pixels += image.to(tl.int64) * CHANNELS * plane
    row, column = top + tl.arange(0, TILE)[:, None], left + tl.arange(0, TILE)[None, :]
    at = tl.max_contiguous(tl.minimum(column, columns - 1), [1, TILE]) + tl.minimum(row, rows - 1) * width
    if CHANNELS == 3:
        red, green, blue = _level(pixels + at), _level(pixels + plane + at), _level(pixels + 2 * plane + at)
        grey = (19595 * red + 38470 * green + 7471 * blue + HALF) >> 16
    else:
        grey = _level(pixels + at)
    coded = _coded(grey, luma_tables + image * (BLOCK * BLOCK), basis, TILE, TILE)
    luma += image.to(tl.int64) * padded_plane
    tl.store(luma + row * padded_width + column, coded.to(tl.uint8))
    if CHANNELS == 3:
        row, column = top // 2 + tl.arange(0, TILE // 2)[:, None], left // 2 + tl.arange(0, TILE // 2)[None, :]
        # libjpeg repeats the last row after the subsampling, but the last column before it.
        last_row = tl.minimum(row, (rows + 1) // 2 - 1)
        blueness = tl.zeros((TILE // 2, TILE // 2), dtype=tl.int32)
        redness = tl.zeros((TILE // 2, TILE // 2), dtype=tl.int32)
        for part in tl.static_range(4):
            down, right = tl.minimum(2 * last_row + part // 2, rows - 1), tl.minimum(2 * column + part % 2, columns - 1)
            at = tl.max_contiguous(right, [1, TILE // 2]) + down * width
            red, green, blue = _level(pixels + at), _level(pixels + plane + at), _level(pixels + 2 * plane + at)
            blueness += ((-11059 * red - 21709 * green + 32768 * blue + (HALF - 1)) >> 16) + 128
            redness += ((32768 * red - 27439 * green - 5329 * blue + (HALF - 1)) >> 16) + 128
        bias = 1 + column % 2  # halves are rounded down and up in alternate columns
        tables = chroma_tables + image * (BLOCK * BLOCK)
        chroma += image.to(tl.int64) * (padded_plane // 2) + row * (padded_width // 2) + column
        coded = _coded((blueness + bias) >> 2, tables, basis, TILE // 2, TILE)
        tl.store(chroma, coded.to(tl.uint8))
        coded = _coded((redness + bias) >> 2, tables, basis, TILE // 2, TILE)
        tl.store(chroma + padded_plane // 4, coded.to(tl.uint8))


@triton.jit
def _level(place):
    """Return levels, rounded to 8 bits."""
    return tl.minimum(tl.maximum(rounded(tl.load(place)), 0.0), 255.0).to(tl.int32)


@triton.jit
def _coded(levels, tables, basis, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """Transform the 8×8 blocks of an area, quantise the coefficients, and transform back to 0…255."""
    one, other = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    steps = tl.load(tables + one % BLOCK * BLOCK + other % BLOCK)
    matrix, transposed = tl.load(basis + one * STRIDE + other), tl.load(basis + other * STRIDE + one)
    coefficients = _product(_product(matrix, (levels - 128).to(tl.float32)), transposed)
    # libjpeg rounds halves away from zero when it quantises, and up when it restores pixels.
    sizes = tl.floor(tl.math.div_rn(tl.abs(coefficients), steps) + ROUNDING) * steps
    restored = _product(_product(transposed, tl.where(coefficients < 0, -sizes, sizes)), matrix)
    return tl.minimum(tl.maximum(tl.floor(restored + (128 + ROUNDING)), 0.0), 255.0)


@triton.jit
def _product(one, other):
    return tl.dot(one, other, input_precision="ieee")


@triton.jit(do_not_specialize=["width", "plane", "padded_width", "padded_plane"])
def _restore(
    pixels, luma, chroma, used, heights, widths,
    width, plane, padded_width, padded_plane, CHANNELS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write an area of an image from its luma and chroma."""
    image = tl.program_id(1)
    if tl.load(used + image) == 0:
        return
    rows, columns = tl.load(heights + image).to(tl.int32), tl.load(widths + image).to(tl.int32)
    across = padded_width // TILE
    top, left = tl.program_id(0) // across * TILE, tl.program_id(0) % across * TILE
    if (top >= rows) | (left >= columns):
        return
    row, column = top + tl.arange(0, TILE)[:, None], left + tl.arange(0, TILE)[None, :]
    inside = (row < rows) & (column < columns)
    pixels += image.to(tl.int64) * CHANNELS * plane + row * width + column
    luma += image.to(tl.int64) * padded_plane
    grey = tl.load(luma + row * padded_width + column).to(tl.int32)
    if CHANNELS == 3:
        chroma += image.to(tl.int64) * (padded_plane // 2)
        blueness = _doubled(chroma, row, column, rows, columns, padded_width // 2) - 128
        redness = _doubled(chroma + padded_plane // 4, row, column, rows, columns, padded_width // 2) - 128
        _store(pixels, grey + ((91881 * redness + HALF) >> 16), inside)
        _store(pixels + plane, grey + ((-22554 * blueness - 46802 * redness + HALF) >> 16), inside)
        _store(pixels + 2 * plane, grey + ((116130 * blueness + HALF) >> 16), inside)
    else:
        _store(pixels, grey, inside)


@triton.jit
def _doubled(plane, row, column, rows, columns, stride):
    """Upsample by 2 with weights of 3/4 and 1/4, which libjpeg calls fancy upsampling."""
    last_row, last_column = (rows + 1) // 2 - 1, (columns + 1) // 2 - 1
    near_row = tl.minimum(row // 2, last_row) * stride
    near_column = tl.max_contiguous(tl.minimum(column // 2, last_column), [1, column.shape[1]])
    far_row = tl.minimum(tl.maximum(row // 2 + row % 2 * 2 - 1, 0), last_row) * stride
    far_column = tl.minimum(tl.maximum(column // 2 + column % 2 * 2 - 1, 0), last_column)
    far_column = tl.max_contiguous(far_column, [1, column.shape[1]])
    near = 3 * _chroma(plane, near_row, near_column) + _chroma(plane, far_row, near_column)
    far = 3 * _chroma(plane, near_row, far_column) + _chroma(plane, far_row, far_column)
    return (3 * near + far + 8 - column % 2) >> 4


@triton.jit
def _chroma(plane, row, column):
    return tl.load(plane + row + column).to(tl.int32)


@triton.jit
def _store(pixels, levels, inside):
    tl.store(pixels, tl.minimum(tl.maximum(levels, 0), 255).to(tl.float32), mask=inside)
