"""Resizing of each image to its own size, as products with resampling matrices.

Like the degradations in the paper, bilinear and bicubic filters do not adapt to the scale when they shrink an image, so
they alias; the area filter averages. Under precisions that allow TF32, the products round values to 11 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.images.degradation.canvas import Canvas

AREA, BILINEAR, BICUBIC = range(3)
NUM_FILTERS = 3
BICUBIC_A = -0.75  # the parameter of PyTorch's and OpenCV's bicubic kernel


class Resizing(NamedTuple):
    """How each image of a batch is resized."""

    vertical: Tensor  # resampling matrices [n, rows out, rows in]
    horizontal: Tensor  # resampling matrices [n, columns out, columns in]
    height: Tensor  # height of each resized image in px, int64 [n]
    width: Tensor  # width of each resized image in px, int64 [n]

    def apply(self, canvas: Canvas) -> Canvas:
        """Resize the images of a canvas whose image sizes are those that the matrices were made for."""
        pixels = torch.einsum("noi,nciw->ncow", self.vertical, canvas.pixels)
        return Canvas(torch.einsum("nciw,now->ncio", pixels, self.horizontal), self.height, self.width)


def make_resizing(canvas: Canvas, height: Tensor, width: Tensor, filters: Tensor, shape: tuple[int, int]) -> Resizing:
    """Return how to resize each image to its own `height` and `width`, on a canvas of `shape`."""
    rows, columns = canvas.pixels.shape[-2:]
    return Resizing(
        resampling_matrices(canvas.height, height, filters, rows, shape[0], canvas.pixels.dtype),
        resampling_matrices(canvas.width, width, filters, columns, shape[1], canvas.pixels.dtype),
        height,
        width,
    )


def resize(canvas: Canvas, height: Tensor, width: Tensor, filters: Tensor, shape: tuple[int, int]) -> Canvas:
    """Resize each image to its own `height` and `width`, on a canvas of `shape`, with AREA, BILINEAR or BICUBIC."""
    return make_resizing(canvas, height, width, filters, shape).apply(canvas)


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
