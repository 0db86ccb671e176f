"""Images of different sizes in one tensor of fixed shape.

Random resizing gives every image of a batch its own size. A CUDA graph needs tensors of constant shape. So each image
occupies the top left corner of a canvas that is large enough for the largest size, and its own height and width are
kept in tensors. Pixels outside an image are never read: operations that look beyond the border use `pad`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


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


def with_shape(canvas: Canvas, shape: tuple[int, int]) -> Canvas:
    """Return the same images on a canvas of another shape, which must be large enough for them."""
    height, width = canvas.pixels.shape[-2:]
    return canvas.replaced(F.pad(canvas.pixels, (0, shape[1] - width, 0, shape[0] - height)))


def larger_shape(canvas: Canvas, shape: tuple[int, int]) -> tuple[int, int]:
    """Return the smallest shape that contains both the canvas and `shape`."""
    rows, columns = canvas.pixels.shape[-2:]
    return max(rows, shape[0]), max(columns, shape[1])


def choose(chosen: Tensor, one: Canvas, other: Canvas) -> Canvas:
    """Return the image of `one` where `chosen` [n] is true and that of `other` elsewhere; their shapes are equal."""
    return Canvas(
        torch.where(chosen[:, None, None, None], one.pixels, other.pixels),
        torch.where(chosen, one.height, other.height),
        torch.where(chosen, one.width, other.width),
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
