"""The operations of a degradation in PyTorch: blur, resizing, noise and JPEG, for images of different sizes."""

from __future__ import annotations

import math
from functools import cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.contracts.data_spec import EIGHT_BITS, LUMA, PixelFormat


class Canvas(NamedTuple):
    """Images [n, c, h, w] with values from 0 to 255, each in the top left corner of its canvas."""

    pixels: Tensor
    height: Tensor  # height of each image in px, int64 [n]
    width: Tensor  # width of each image in px, int64 [n]

    def replaced(self, pixels: Tensor) -> Canvas:
        """Return a canvas with new pixel values and the same image sizes."""
        return Canvas(pixels, self.height, self.width)


def full_canvas(pixels: Tensor) -> Canvas:
    """Return a canvas on which every image covers the whole tensor."""
    num, _, height, width = pixels.shape
    return Canvas(
        pixels, *(torch.full((num,), side, dtype=torch.int64, device=pixels.device) for side in (height, width))
    )


def pad(canvas: Canvas, margin: int, shape: tuple[int, int], mode: Literal["reflect", "replicate"]) -> Tensor:
    """Return pixels [n, c, *shape] that continue each image beyond its own border.

    `margin` is the number of rows added at the top and of columns added at the left.
    """
    num, channels = canvas.pixels.shape[:2]
    device = canvas.pixels.device
    rows, columns = (
        _source_positions(torch.arange(-margin, side - margin, device=device), length[:, None], mode)
        for side, length in zip(shape, (canvas.height, canvas.width), strict=True)
    )
    sample, channel = torch.arange(num, device=device), torch.arange(channels, device=device)
    return canvas.pixels[
        sample[:, None, None, None], channel[None, :, None, None], rows[:, None, :, None], columns[:, None, None, :]
    ]


def _source_positions(position: Tensor, length: Tensor, mode: str) -> Tensor:
    """Return the position inside an image of this length from which each position of the padded image is read."""
    last = length - 1
    if mode == "replicate":
        return position.clamp(min=0).minimum(last)
    period = (2 * last).clamp(min=1)  # an image of one pixel has nothing to reflect
    return (last - (position.abs() % period - last).abs()).clamp(min=0)


SEED_RANGE = 1 << 24  # float32 numbers drawn from [0, 1) have 24 random bits
FIELD_BITS = 23  # random bits per number of a field: float32 represents (k + 0.5) / 2²³ exactly
MASK = 0xFFFFFFFF
POISSON_INVERSION_BELOW = 5.0  # mean below which the exact inversion is used instead of a normal approximation
POISSON_TERMS = 20  # terms of the inversion; the rest has a probability below 1e-6 for the largest mean


class Numbers:
    """The columns of a table [n, k] of uniform random numbers, each handed out once."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.used = table, 0

    def take(self, count: int) -> tuple[Tensor, ...]:
        """Return the next `count` columns, each a tensor [n]."""
        self.used += count
        assert self.used <= self.table.shape[1], f"{self.table.shape[1]} random numbers are too few"
        return self.table[:, self.used - count : self.used].unbind(1)


# Cached for the life of the process, because a CUDA graph cannot copy values from the CPU.
@cache
def constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return numbers as a tensor on a device."""
    return torch.tensor(values, dtype=dtype, device=device)


def between(uniform: Tensor, low: float, high: float) -> Tensor:
    """Map numbers in [0, 1) to [low, high)."""
    return low + (high - low) * uniform


def pick(uniform: Tensor, count: int) -> Tensor:
    """Map numbers in [0, 1) to integers below `count`."""
    return (uniform * count).long()


def field_keys(first_seed: Tensor, second_seed: Tensor) -> Tensor:
    """Return the 32-bit keys [n] of fields from two seeds per sample, which are numbers in [0, 1)."""
    first, second = (pick(seed, SEED_RANGE) for seed in (first_seed, second_seed))
    return _hashed(_hashed(first) ^ second)


def uniform_field(keys: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return numbers in (0, 1) of the shape [n, *shape] from one key per sample."""
    position = _hashed(torch.arange(math.prod(shape), device=keys.device))
    bits = _hashed(position[None] ^ keys[:, None]) >> (32 - FIELD_BITS)
    return ((bits.to(dtype) + 0.5) * 2.0**-FIELD_BITS).view(-1, *shape)


def to_normal(uniform: Tensor) -> Tensor:
    """Return the standard normal quantiles of numbers in (0, 1)."""
    return math.sqrt(2) * torch.erfinv(2 * uniform - 1)


def to_poisson(uniform: Tensor, normal: Tensor, mean: Tensor) -> Tensor:
    """Return Poisson quantiles of numbers in (0, 1): exact for small means, otherwise within about one count.

    `normal` contains the standard normal quantiles of the same numbers. For larger means, a
    Cornish-Fisher expansion corrects the normal approximation for skewness.
    """
    small = mean.clamp(0, POISSON_INVERSION_BELOW)
    term = (-small).exp()
    total, count = term, torch.zeros_like(mean)
    for number in range(1, POISSON_TERMS + 1):
        count = count + (uniform > total).to(count.dtype)
        term = term * small / number
        total = total + term
    large = (mean + mean.clamp(min=0).sqrt() * normal + (normal.square() - 1) / 6).round().clamp(min=0)
    return torch.where(mean < POISSON_INVERSION_BELOW, count, large)


def _hashed(values: Tensor) -> Tensor:
    """Return a hash of 32-bit integers that are stored as int64; the factors are too small to overflow 63 bits."""
    values = ((values ^ (values >> 16)) * 0x21F0AAAD) & MASK
    values = ((values ^ (values >> 15)) * 0x735A2D97) & MASK
    return values ^ (values >> 15)


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


SIDE = 21  # side of every kernel tensor; smaller kernels are surrounded by zeros
SMALLEST_SIDE = 7
NUM_SIDES = (SIDE - SMALLEST_SIDE) // 2 + 1
SMALLEST_SIGMA = 0.2
# Cumulative probabilities of the kernel families, in this order: isotropic and anisotropic Gaussian, isotropic and
# anisotropic generalised Gaussian, isotropic and anisotropic plateau.
FAMILIES = (0.45, 0.70, 0.82, 0.85, 0.97)
GENERALISED_SHAPE, PLATEAU_SHAPE = (0.5, 4.0), (1.0, 2.0)
SMALL_SINC_SIDE = 13  # sinc kernels below this side have a higher minimum cut-off frequency
NUM_BLUR_NUMBERS = 8
NUM_SINC_NUMBERS = 3


class Shape(NamedTuple):
    """The parameters of Gaussian and plateau kernels, each a tensor [n]."""

    side: Tensor  # odd side of the kernel in px
    sigmas: tuple[Tensor, Tensor]  # standard deviations along the two axes in px
    angle: Tensor  # rotation of the axes in radians
    beta: Tensor  # shape parameter: 1 for a Gaussian
    is_plateau: Tensor  # whether the kernel is of the plateau family


def blur(canvas: Canvas, kernels: Tensor) -> Canvas:
    """Filter each image with its own kernel [n, side, side], normalised, reflecting the image at its border."""
    num, channels, height, width = canvas.pixels.shape
    margin = kernels.shape[-1] // 2
    padded = pad(canvas, margin, (height + 2 * margin, width + 2 * margin), "reflect").flatten(0, 1)[None]
    weights = normalised(kernels).repeat_interleave(channels, dim=0)[:, None]
    return canvas.replaced(F.conv2d(padded, weights, groups=num * channels).view(canvas.pixels.shape))


def normalised(kernels: Tensor) -> Tensor:
    """Return kernels with a sum of 1."""
    return kernels / kernels.sum((1, 2), keepdim=True)


def random_blur_kernels(numbers: Numbers, probability: float, sinc_probability: float, max_sigma: float) -> Tensor:
    """Return a random kernel per sample, [n, SIDE, SIDE]; a fraction 1 - `probability` has no effect."""
    used, kind, *others = numbers.take(NUM_BLUR_NUMBERS)
    side, sigma1, sigma2, angle, beta, sinc = others
    shape = random_shape(kind, side, sigma1, sigma2, angle, beta, max_sigma)
    made = bell_kernels(shape)
    lowest = torch.where(shape.side < SMALL_SINC_SIDE, math.pi / 3, math.pi / 5).to(beta.dtype)
    filters = sinc_kernels(shape.side, lowest + (math.pi - lowest) * beta)
    made = torch.where(_per_kernel(sinc < sinc_probability), filters, made)
    return torch.where(_per_kernel(used < probability), made, identity_kernels(made))


def random_shape(
    kind: Tensor, side: Tensor, sigma1: Tensor, sigma2: Tensor, angle: Tensor, beta: Tensor, max_sigma: float
) -> Shape:
    """Convert uniform random numbers in [0, 1) to the parameters of Gaussian and plateau kernels."""
    family = sum((kind >= bound).long() for bound in FAMILIES)
    assert isinstance(family, Tensor)
    isotropic = family % 2 == 0
    first, second = (between(sigma, SMALLEST_SIGMA, max_sigma) for sigma in (sigma1, sigma2))
    # Half of all shape parameters are below 1 if the range contains 1, as in the paper.
    generalised = torch.where(
        beta < 0.5, between(2 * beta, GENERALISED_SHAPE[0], 1), between(2 * beta - 1, 1, GENERALISED_SHAPE[1])
    )
    shaped = torch.where(family >= 4, between(beta, *PLATEAU_SHAPE), generalised)
    return Shape(
        side=SMALLEST_SIDE + 2 * pick(side, NUM_SIDES),
        sigmas=(first, torch.where(isotropic, first, second)),
        angle=torch.where(isotropic, torch.zeros_like(angle), between(angle, -math.pi, math.pi)),
        beta=torch.where(family < 2, torch.ones_like(beta), shaped),
        is_plateau=family >= 4,
    )


def bell_kernels(shape: Shape) -> Tensor:
    """Return exp(-½ q^β) or, for plateau kernels, 1 / (1 + q^β), where q is the squared distance in sigmas."""
    row, column = _offsets(shape.angle)
    cosine, sine = _per_kernel(shape.angle.cos()), _per_kernel(shape.angle.sin())
    along, across = column * cosine + row * sine, row * cosine - column * sine
    distance = (along / _per_kernel(shape.sigmas[0])).square() + (across / _per_kernel(shape.sigmas[1])).square()
    powered = distance ** _per_kernel(shape.beta)
    values = torch.where(_per_kernel(shape.is_plateau), 1 / (1 + powered), (-0.5 * powered).exp())
    return _cropped(values, shape.side)


def sinc_kernels(side: Tensor, cutoff: Tensor) -> Tensor:
    """Return circular low-pass kernels with a cut-off frequency in radians per pixel, one per sample."""
    row, column = _offsets(cutoff)
    radius, frequency = (row.square() + column.square()).sqrt(), _per_kernel(cutoff)
    away = frequency * torch.special.bessel_j1(frequency * radius) / (2 * math.pi * radius.clamp(min=0.5))
    return _cropped(torch.where(radius == 0, frequency.square() / (4 * math.pi), away), side)


def random_sinc_kernels(numbers: Numbers, probability: float) -> Tensor:
    """Return a sinc kernel per sample; a fraction 1 - `probability` has no effect."""
    used, side, cutoff = numbers.take(NUM_SINC_NUMBERS)
    sides = SMALLEST_SIDE + 2 * pick(side, NUM_SIDES)
    made = sinc_kernels(sides, between(cutoff, math.pi / 3, math.pi))
    return torch.where(_per_kernel(used < probability), made, identity_kernels(made))


def identity_kernels(kernels: Tensor) -> Tensor:
    """Return kernels of the same shape that leave images unchanged."""
    row, column = _offsets(kernels)
    return ((row == 0) & (column == 0)).to(kernels.dtype).expand_as(kernels)


def _offsets(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row and column of each kernel element relative to the centre."""
    offset = torch.arange(-(SIDE // 2), SIDE // 2 + 1, device=like.device, dtype=like.dtype)
    return offset[:, None], offset[None, :]


def _cropped(values: Tensor, side: Tensor) -> Tensor:
    """Set elements outside each kernel's own side to zero."""
    row, column = _offsets(values)
    reach = _per_kernel(side // 2)
    inside = (row.abs() <= reach) & (column.abs() <= reach)
    return torch.where(inside, values, torch.zeros_like(values))


def _per_kernel(values: Tensor) -> Tensor:
    return values[:, None, None]


SMALLEST_NOISE, SMALLEST_POISSON = 1.0, 0.05
GAUSSIAN_PROBABILITY = 0.5  # the other images get Poisson noise
GREY_PROBABILITY = 0.4
NUM_NOISE_NUMBERS = 5
HALF_RANGE = 127.5  # 8-bit levels per unit of images in [-1, 1]


class NoiseParameters(NamedTuple):
    """The parameters of each image's noise, tensors [n]."""

    keys: Tensor  # keys of the fields of random numbers
    strength: Tensor  # standard deviation of Gaussian noise in levels, or the factor of Poisson noise
    is_gaussian: Tensor  # whether the image gets Gaussian instead of Poisson noise
    is_grey: Tensor  # whether all channels get the same noise


def random_noise(numbers: Numbers, max_sigma: float, max_poisson: float) -> NoiseParameters:
    """Return the parameters of Gaussian or Poisson noise of random strength for each image."""
    kind, strength, grey, *seeds = numbers.take(NUM_NOISE_NUMBERS)
    sigma = between(strength, min(SMALLEST_NOISE, max_sigma), max_sigma)
    scale = between(strength, min(SMALLEST_POISSON, max_poisson), max_poisson)
    is_gaussian = kind < GAUSSIAN_PROBABILITY
    return NoiseParameters(
        field_keys(*seeds), torch.where(is_gaussian, sigma, scale), is_gaussian, is_grey=grey < GREY_PROBABILITY
    )


def add_noise(canvas: Canvas, parameters: NoiseParameters) -> Canvas:
    """Add noise to images, and clip the result to 0…255."""
    keys, strength, is_gaussian, is_grey = parameters
    uniform = uniform_field(keys, canvas.pixels.shape[1:], strength.dtype)
    uniform = torch.where(_per_image(is_grey), uniform[:, :1].expand_as(uniform), uniform)  # equal in all channels
    normal = to_normal(uniform)
    poisson = poisson_noise(canvas.pixels, uniform, normal, strength, is_grey)
    noise = torch.where(_per_image(is_gaussian), _per_image(strength) * normal, poisson)
    return canvas.replaced((canvas.pixels + noise).clamp(0, 255))


def add_gaussian_noise(images: Tensor, seeds: Tensor, sigma: float, pixels: PixelFormat = EIGHT_BITS) -> Tensor:
    """Return images in [-1, 1] with Gaussian noise, rounded to the levels of the pixel format.

    `seeds` are two uniform numbers per image, [n, 2], which determine its noise. `sigma` is on a scale from 0 to 255.
    """
    normal = to_normal(uniform_field(field_keys(seeds[:, 0], seeds[:, 1]), images.shape[1:], seeds.dtype))
    if not pixels.is_integer:
        return (images + (sigma / HALF_RANGE) * normal).clamp(-1, 1)
    levels = (images + 1) * pixels.half + sigma * (pixels.half / HALF_RANGE) * normal
    return levels.round().clamp(0, pixels.span) / pixels.half - 1


def poisson_noise(levels: Tensor, uniform: Tensor, normal: Tensor, scale: Tensor, is_grey: Tensor) -> Tensor:
    """Return scale · (k - x), where k is a Poisson number whose mean is the level x.

    Grey noise is computed from the luma of the image, and is the same in all channels.
    """
    levels = levels.clamp(0, 255)
    if levels.shape[1] == 3:
        red, green, blue = levels.split(1, dim=1)
        luma = (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue).expand_as(levels)
        levels = torch.where(_per_image(is_grey), luma, levels)
    return _per_image(scale) * (to_poisson(uniform, normal, levels) - levels)


def _per_image(values: Tensor) -> Tensor:
    return values[:, None, None, None]


AREA, BILINEAR, BICUBIC = range(3)
NUM_FILTERS = 3
BICUBIC_A = -0.75  # the parameter of PyTorch's and OpenCV's bicubic kernel


class Resize(NamedTuple):
    """The sizes and filters with which images are resized."""

    height: Tensor  # new height of each image in px, int64 [n]
    width: Tensor  # new width of each image in px, int64 [n]
    filters: Tensor  # AREA, BILINEAR or BICUBIC, int64 [n]
    shape: tuple[int, int]  # a canvas that is large enough for every new size


def resize_images(canvas: Canvas, resize: Resize) -> Canvas:
    """Resize images, each to its own size with its own filter."""
    (rows, columns), dtype = canvas.pixels.shape[-2:], canvas.pixels.dtype
    vertical = resampling_matrices(canvas.height, resize.height, resize.filters, rows, resize.shape[0], dtype)
    horizontal = resampling_matrices(canvas.width, resize.width, resize.filters, columns, resize.shape[1], dtype)
    pixels = torch.einsum("noi,nciw->ncow", vertical, canvas.pixels)
    return Canvas(torch.einsum("nciw,now->ncio", pixels, horizontal), resize.height, resize.width)


def resampling_matrices(
    old: Tensor, new: Tensor, filters: Tensor, num_in: int, num_out: int, dtype: torch.dtype
) -> Tensor:
    """Return matrices [n, num_out, num_in] that resample the first `old` values to the first `new` values.

    Rows from `new` on repeat the last row.
    """
    old, new = old[:, None, None], new[:, None, None]
    ratio = old.to(dtype) / new.to(dtype)
    target = torch.arange(num_out, device=old.device)[None, :, None].minimum(new - 1).to(dtype)
    source = torch.arange(num_in, device=old.device)[None, None]
    centre = (target + 0.5) * ratio - 0.5
    chosen = filters[:, None, None]
    weights = torch.where(
        chosen == AREA,
        _area(target, ratio, source, old),
        torch.where(chosen == BILINEAR, _bilinear(centre, source, old), _bicubic(centre, source, old)),
    )
    return torch.where(source < old, weights, torch.zeros_like(weights))


def _area(target: Tensor, ratio: Tensor, source: Tensor, old: Tensor) -> Tensor:
    """Return the share of each source pixel in the interval that a target pixel covers."""
    start, stop = target * ratio, ((target + 1) * ratio).minimum(old.to(ratio.dtype))
    overlap = (stop.minimum(source + 1) - start.maximum(source.to(ratio.dtype))).clamp(min=0)
    return overlap / (stop - start)


def _bilinear(centre: Tensor, source: Tensor, old: Tensor) -> Tensor:
    inside = centre.clamp(min=0).minimum((old - 1).to(centre.dtype))
    return (1 - (inside - source).abs()).clamp(min=0)


def _bicubic(centre: Tensor, source: Tensor, old: Tensor) -> Tensor:
    """Return cubic weights; the weights of the two positions beyond a border are added to the border pixel's."""
    weights = _cubic(centre - source)
    first, last = source == 0, source == old - 1
    for beyond in (1, 2):
        weights = weights + first * _cubic(centre + beyond) + last * _cubic(centre - (old - 1 + beyond))
    return weights


def _cubic(distance: Tensor) -> Tensor:
    far = distance.abs()
    near = ((BICUBIC_A + 2) * far - (BICUBIC_A + 3)) * far * far + 1
    away = ((BICUBIC_A * far - 5 * BICUBIC_A) * far + 8 * BICUBIC_A) * far - 4 * BICUBIC_A
    return torch.where(far <= 1, near, torch.where(far < 2, away, torch.zeros_like(far)))
