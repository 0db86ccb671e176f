"""The operations of a degradation as Triton kernels, for float32 images on a GPU."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.contracts.data_spec import LUMA
from paceline.images.degradation import operations
from paceline.images.degradation.operations import SIDE, Canvas, NoiseParameters, Resize, constant
from paceline.images.degradation.second_order import FinalParameters, RoundParameters

# Triton determines the types of kernel arguments itself.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"


ROWS, COLUMNS = 32, 32  # size of a tile
STEPS = ("blur", "resize", "noise")
BLUR_STEP, RESIZE_STEP = (tl.constexpr(STEPS.index(name)) for name in ("blur", "resize"))
KERNEL_SIDE, REACH = tl.constexpr(operations.SIDE), tl.constexpr(operations.SIDE // 2)
AREA, BILINEAR = tl.constexpr(operations.AREA), tl.constexpr(operations.BILINEAR)
BICUBIC_A = tl.constexpr(operations.BICUBIC_A)
RED, GREEN, BLUE = (tl.constexpr(weight) for weight in LUMA)
POISSON_INVERSION_BELOW = tl.constexpr(operations.POISSON_INVERSION_BELOW)
POISSON_TERMS = tl.constexpr(operations.POISSON_TERMS)
FIELD_SHIFT, FIELD_UNIT = tl.constexpr(32 - operations.FIELD_BITS), tl.constexpr(2.0**-operations.FIELD_BITS)
SQRT_2 = tl.constexpr(math.sqrt(2))
ROUNDER = tl.constexpr(1.5 * 2**23)  # float32 numbers of this size are integers, so adding it rounds halves to even


@triton.jit(
    do_not_specialize=["source_width", "source_plane", "target_width", "target_plane", "field_width", "field_plane"]
)
def apply_steps(
    source, target, steps, heights, widths, operations, reaches, new_heights, new_widths, filters,
    keys, strengths, gaussian, grey,
    source_width, source_plane, target_width, target_plane, field_width, field_plane,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write one tile of an image after its step to `target`."""
    channel, image = tl.program_id(1), tl.program_id(2)
    step = tl.load(steps + image)
    height, width = tl.load(heights + image).to(tl.int32), tl.load(widths + image).to(tl.int32)
    rows, columns = height, width
    if step == RESIZE_STEP:
        rows, columns = tl.load(new_heights + image).to(tl.int32), tl.load(new_widths + image).to(tl.int32)
    across = tl.cdiv(target_width, COLUMNS)
    top, left = tl.program_id(0) // across * ROWS, tl.program_id(0) % across * COLUMNS
    if (top >= rows) | (left >= columns):
        return
    row, column = top + tl.arange(0, ROWS)[:, None], left + tl.arange(0, COLUMNS)[None, :]
    first = source + image.to(tl.int64) * CHANNELS * source_plane
    plane = first + channel * source_plane
    if step == BLUR_STEP:
        weights, reach = operations + image * (KERNEL_SIDE * KERNEL_SIDE), tl.load(reaches + image).to(tl.int32)
        values = _blurred(plane, source_width, row, column, height, width, weights, reach)
    elif step == RESIZE_STEP:
        kind = tl.load(filters + image)
        values = _resized(plane, source_width, row, column, height, width, rows, columns, kind)
    else:
        at = tl.max_contiguous(tl.minimum(column, width - 1), [1, COLUMNS]) + tl.minimum(row, height - 1) * source_width
        is_grey = tl.load(grey + image)
        position = row * field_width + column + tl.where(is_grey, 0, channel) * field_plane
        uniform = _uniform(position, tl.load(keys + image))
        level, normal, strength = tl.load(plane + at), _normal(uniform), tl.load(strengths + image)
        if tl.load(gaussian + image):
            added = strength * normal
        else:
            mean = level
            if CHANNELS == 3:  # noqa: SIM102 - this condition is known when the kernel is compiled
                if is_grey:
                    red, green = tl.load(first + at), tl.load(first + source_plane + at)
                    blue = tl.load(first + 2 * source_plane + at)
                    mean = _clamped(red) * RED + _clamped(green) * GREEN + _clamped(blue) * BLUE
            mean = _clamped(mean)
            added = strength * (_poisson(uniform, normal, mean) - mean)
        values = _clamped(level + added)
    result = target + (image.to(tl.int64) * CHANNELS + channel) * target_plane
    tl.store(result + row * target_width + column, values, mask=(row < rows) & (column < columns))


@triton.jit
def _blurred(plane, stride, row, column, height, width, weights, reach):
    """Return the average of a tile's neighbours with relative weights, reflecting the image at its border."""
    centre = weights + REACH * KERNEL_SIDE + REACH
    row_folds, column_folds = _num_further_folds(height), _num_further_folds(width)
    sums = tl.zeros((row.shape[0], column.shape[1]), dtype=tl.float32)
    weight_sum = 0.0
    for down in range(-reach, reach + 1):
        start = plane + tl.maximum(_reflected(row + down, height, row_folds), 0) * stride
        for right in range(-reach, reach + 1):
            at = tl.maximum(_reflected(column + right, width, column_folds), 0)
            at = tl.max_contiguous(at, [1, column.shape[1]])
            weight = tl.load(centre + down * KERNEL_SIDE + right)
            sums += weight * tl.load(start + at)
            weight_sum += weight
    return sums / weight_sum


@triton.jit
def _num_further_folds(length):
    """Return how many reflections a pixel's neighbours need after the first: none, unless the image is very small."""
    last = tl.maximum(length - 1, 1)
    return (last + (REACH - 1)) // last - 1


@triton.jit
def _reflected(position, length, num_further_folds):
    """Return positions inside an image of this length; each fold reflects at both borders once.

    Positions far beyond the border, which belong to no pixel of the image, may become negative.
    """
    last = length - 1
    position = last - tl.abs(last - tl.abs(position))
    for _ in range(num_further_folds):
        position = last - tl.abs(last - tl.abs(position))
    return position


@triton.jit
def _resized(plane, stride, row, column, height, width, rows, columns, kind):
    """Return a tile of an image of `rows` × `columns`, made from an image of `height` × `width`."""
    row_ratio, column_ratio = _ratio(height, rows), _ratio(width, columns)
    row, column = tl.minimum(row, rows - 1).to(tl.float32), tl.minimum(column, columns - 1).to(tl.float32)
    first_row, first_column = _first_tap(row, row_ratio, height, kind), _first_tap(column, column_ratio, width, kind)
    sums = tl.zeros((row.shape[0], column.shape[1]), dtype=tl.float32)
    for down in range(_num_taps(row_ratio, kind)):
        row_weight = _tap_weight(row, first_row + down, row_ratio, height, kind)
        start = plane + tl.minimum(tl.maximum(first_row + down, 0), height - 1) * stride
        for right in range(_num_taps(column_ratio, kind)):
            weight = _tap_weight(column, first_column + right, column_ratio, width, kind)
            at = tl.minimum(tl.maximum(first_column + right, 0), width - 1)
            at = tl.max_contiguous(at, [1, column.shape[1]])
            sums += row_weight * (weight * tl.load(start + at))
    return sums


@triton.jit
def _ratio(old, new):
    return tl.math.div_rn(old.to(tl.float32), new.to(tl.float32))


@triton.jit
def _num_taps(ratio, kind):
    """Return how many pixels in a row contribute to a new pixel."""
    return tl.where(kind == AREA, tl.floor(ratio).to(tl.int32) + 2, tl.where(kind == BILINEAR, 2, 4))


@triton.jit
def _first_tap(target, ratio, old, kind):
    """Return the first pixel that contributes to each new pixel; it may be beyond the border."""
    centre = (target + 0.5) * ratio - 0.5
    cubic = tl.floor(centre) - 1
    linear = tl.floor(_inside(centre, old))
    return tl.where(kind == AREA, tl.floor(target * ratio), tl.where(kind == BILINEAR, linear, cubic)).to(tl.int32)


@triton.jit
def _tap_weight(target, source, ratio, old, kind):
    """Return the weights of the filters in `resizing`; pixels beyond the border have the weight of their distance."""
    source = source.to(tl.float32)
    centre = (target + 0.5) * ratio - 0.5
    start, stop = target * ratio, tl.minimum((target + 1) * ratio, old.to(tl.float32))
    area = tl.maximum(tl.minimum(stop, source + 1) - tl.maximum(start, source), 0.0) / (stop - start)
    linear = tl.maximum(1 - tl.abs(_inside(centre, old) - source), 0.0)
    far = tl.abs(centre - source)
    near = (far * (BICUBIC_A + 2) - (BICUBIC_A + 3)) * far * far + 1
    away = ((far * BICUBIC_A - 5 * BICUBIC_A) * far + 8 * BICUBIC_A) * far - 4 * BICUBIC_A
    cubic = tl.where(far <= 1, near, tl.where(far < 2, away, 0.0))
    return tl.where(kind == AREA, area, tl.where(kind == BILINEAR, linear, cubic))


@triton.jit
def _inside(centre, old):
    return tl.minimum(tl.maximum(centre, 0.0), (old - 1).to(tl.float32))


@triton.jit
def _uniform(position, key):
    """Return the numbers in (0, 1) of `numbers.uniform_field`."""
    bits = _hashed(_hashed(position.to(tl.uint32)) ^ key.to(tl.uint32)) >> FIELD_SHIFT
    return (bits.to(tl.float32) + 0.5) * FIELD_UNIT


@triton.jit
def _hashed(values):
    """Return the hash of `numbers`; products of 32-bit integers keep their lower 32 bits."""
    values = (values ^ (values >> 16)) * 0x21F0AAAD
    values = (values ^ (values >> 15)) * 0x735A2D97
    return values ^ (values >> 15)


@triton.jit
def _normal(uniform):
    """Return standard normal quantiles.

    They are √2 · erfinv(2u - 1), with the polynomials of Giles, Approximating the erfinv function (2010).
    """
    w = -tl.log(4 * uniform * (1 - uniform))
    x = w - 2.5
    middle = 2.81022636e-08 * x + 3.43273939e-07
    middle = middle * x - 3.5233877e-06
    middle = middle * x - 4.39150654e-06
    middle = middle * x + 0.00021858087
    middle = middle * x - 0.00125372503
    middle = middle * x - 0.00417768164
    middle = middle * x + 0.246640727
    middle = middle * x + 1.50140941
    x = tl.sqrt(w) - 3
    tail = -0.000200214257 * x + 0.000100950558
    tail = tail * x + 0.00134934322
    tail = tail * x - 0.00367342844
    tail = tail * x + 0.00573950773
    tail = tail * x - 0.0076224613
    tail = tail * x + 0.00943887047
    tail = tail * x + 1.00167406
    tail = tail * x + 2.83297682
    return (2 * uniform - 1) * SQRT_2 * tl.where(w < 5, middle, tail)


@triton.jit
def _poisson(uniform, normal, mean):
    """Return the Poisson quantiles of `numbers.to_poisson`."""
    small = tl.minimum(mean, POISSON_INVERSION_BELOW)
    term = tl.exp(-small)
    total, count = term, tl.zeros_like(mean)
    for number in tl.static_range(1, POISSON_TERMS + 1):
        count += (uniform > total).to(tl.float32)
        term = term * small / number
        total += term
    large = tl.maximum(rounded(mean + tl.sqrt(mean) * normal + (normal * normal - 1) / 6), 0.0)
    return tl.where(mean < POISSON_INVERSION_BELOW, count, large)


@triton.jit
def rounded(values):
    """Round to integers, and halves to even integers."""
    return (values + ROUNDER) - ROUNDER


@triton.jit
def _clamped(levels):
    return tl.minimum(tl.maximum(levels, 0.0), 255.0)


TILE = 32  # side of an area in pixels
BLOCK, HALF, ROUNDING = tl.constexpr(operations.BLOCK), tl.constexpr(operations.HALF), tl.constexpr(operations.ROUNDING)
# The DCT of several blocks beside each other is one product with this block-diagonal matrix.
BASIS = tuple(
    operations.DCT[row % operations.BLOCK * operations.BLOCK + column % operations.BLOCK]
    if row // operations.BLOCK == column // operations.BLOCK
    else 0.0
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
    tables = [
        operations.quantisation_tables(quality, base, torch.float32)
        for base in (operations.LUMA_TABLE, operations.CHROMA_TABLE)
    ]
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


BLUR, RESIZE, NOISE = range(len(STEPS))

# The distance of each element of a kernel from the centre, in rows or columns, whichever is larger.
DISTANCE = tuple(max(abs(row - SIDE // 2), abs(column - SIDE // 2)) for row in range(SIDE) for column in range(SIDE))


class ImageSteps:
    """The parameters of each image's blur, resizing and noise, and the kernel that applies one of them."""

    def __init__(self, kernels: Tensor, resize: Resize, noise: NoiseParameters, field_shape: tuple[int, int]) -> None:
        distance = constant(DISTANCE, kernels.device, torch.int64).view(SIDE, SIDE)
        reach = torch.where(kernels != 0, distance, 0).amax(dim=(1, 2))  # so that small kernels take less time
        self.tensors = kernels.contiguous(), reach, resize.height, resize.width, resize.filters, *noise
        self.resize, self.field_shape = resize, field_shape

    def apply(self, canvas: Canvas, steps: Tensor, shape: tuple[int, int]) -> Canvas:
        """Apply the step BLUR, RESIZE or NOISE to each image, on a new canvas of `shape`."""
        num, channels, rows, columns = canvas.pixels.shape
        pixels = canvas.pixels.new_empty((num, channels, *shape))
        tiles = triton.cdiv(shape[0], ROWS) * triton.cdiv(shape[1], COLUMNS)
        apply_steps[tiles, channels, num](
            canvas.pixels.contiguous(),
            pixels,
            steps,
            canvas.height,
            canvas.width,
            *self.tensors,
            *(columns, rows * columns, shape[1], math.prod(shape), self.field_shape[1], math.prod(self.field_shape)),
            **dict(CHANNELS=channels, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4, enable_fp_fusion=True),
        )
        resized = steps == RESIZE
        height = torch.where(resized, self.resize.height, canvas.height)
        return Canvas(pixels, height, torch.where(resized, self.resize.width, canvas.width))


def apply_round(canvas: Canvas, parameters: RoundParameters) -> Canvas:
    """Blur, resize, add noise and compress."""
    resize, (rows, columns) = parameters.resize, canvas.pixels.shape[-2:]
    batch = ImageSteps(parameters.kernels, resize, parameters.noise, resize.shape)
    between = max(rows, resize.shape[0]), max(columns, resize.shape[1])
    for step, shape in ((BLUR, between), (RESIZE, between), (NOISE, resize.shape)):
        canvas = batch.apply(canvas, torch.full_like(canvas.height, step), shape)
    compress_in_place(canvas, parameters.quality, torch.ones_like(parameters.noise.is_grey))
    return canvas


def apply_final(canvas: Canvas, parameters: FinalParameters) -> Canvas:
    """Resize to the low resolution, filter with a sinc kernel and compress; some images are compressed first."""
    compress_in_place(canvas, parameters.quality, parameters.jpeg_first)
    nothing, no = torch.zeros_like(parameters.quality), torch.zeros_like(parameters.jpeg_first)
    silent = NoiseParameters(nothing, strength=nothing.to(canvas.pixels.dtype), is_gaussian=no, is_grey=no)
    batch = ImageSteps(parameters.kernels, parameters.resize, silent, parameters.resize.shape)
    for step in (RESIZE, BLUR):
        canvas = batch.apply(canvas, torch.full_like(canvas.height, step), parameters.resize.shape)
    compress_in_place(canvas, parameters.quality, ~parameters.jpeg_first)
    return canvas
