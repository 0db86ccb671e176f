"""Blur kernels of a second-order degradation, one kernel per sample (Wang et al., Real-ESRGAN, 2021, section 3).

Gaussian kernels are isotropic or anisotropic. Generalised Gaussian kernels have heavier or lighter tails, and plateau
kernels have a flat top; a shape parameter β controls both. Sinc kernels cut off high frequencies and cause ringing.
The elements of a kernel are relative weights. `normalised` scales them to a sum of 1, and so does every blur.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.images.degradation.canvas import Canvas, pad
from paceline.images.degradation.numbers import Numbers, between, pick

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
    made = torch.where(_column(sinc < sinc_probability), sinc_kernels(shape.side, _cutoff(shape.side, beta)), made)
    return torch.where(_column(used < probability), made, identity_kernels(made))


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
    cosine, sine = _column(shape.angle.cos()), _column(shape.angle.sin())
    along, across = column * cosine + row * sine, row * cosine - column * sine
    distance = (along / _column(shape.sigmas[0])).square() + (across / _column(shape.sigmas[1])).square()
    powered = distance ** _column(shape.beta)
    values = torch.where(_column(shape.is_plateau), 1 / (1 + powered), (-0.5 * powered).exp())
    return _cropped(values, shape.side)


def sinc_kernels(side: Tensor, cutoff: Tensor) -> Tensor:
    """Return circular low-pass kernels with a cut-off frequency in radians per pixel, one per sample."""
    row, column = _offsets(cutoff)
    radius, frequency = (row.square() + column.square()).sqrt(), _column(cutoff)
    away = frequency * torch.special.bessel_j1(frequency * radius) / (2 * math.pi * radius.clamp(min=0.5))
    return _cropped(torch.where(radius == 0, frequency.square() / (4 * math.pi), away), side)


def random_sinc_kernels(numbers: Numbers, probability: float) -> Tensor:
    """Return a sinc kernel per sample; a fraction 1 - `probability` has no effect."""
    used, side, cutoff = numbers.take(NUM_SINC_NUMBERS)
    sides = SMALLEST_SIDE + 2 * pick(side, NUM_SIDES)
    made = sinc_kernels(sides, between(cutoff, math.pi / 3, math.pi))
    return torch.where(_column(used < probability), made, identity_kernels(made))


def identity_kernels(kernels: Tensor) -> Tensor:
    """Return kernels of the same shape that leave images unchanged."""
    row, column = _offsets(kernels)
    return ((row == 0) & (column == 0)).to(kernels.dtype).expand_as(kernels)


def _cutoff(side: Tensor, uniform: Tensor) -> Tensor:
    lowest = torch.where(side < SMALL_SINC_SIDE, math.pi / 3, math.pi / 5).to(uniform.dtype)
    return lowest + (math.pi - lowest) * uniform


def _offsets(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row and column of each kernel element relative to the centre."""
    offset = torch.arange(-(SIDE // 2), SIDE // 2 + 1, device=like.device, dtype=like.dtype)
    return offset[:, None], offset[None, :]


def _cropped(values: Tensor, side: Tensor) -> Tensor:
    """Set elements outside each kernel's own side to zero."""
    row, column = _offsets(values)
    reach = _column(side // 2)
    inside = (row.abs() <= reach) & (column.abs() <= reach)
    return torch.where(inside, values, torch.zeros_like(values))


def _column(values: Tensor) -> Tensor:
    return values[:, None, None]
