"""The steps of a second-order degradation in PyTorch's own operations, for any device and precision.

A batch has images with different orders of blur, resizing and noise, and a CUDA graph cannot branch. So all images pass
through the sequence resize, noise, resize, blur, resize, noise, resize, which contains each of the six orders, and
every image uses each of the three steps once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.images.degradation.operations import (
    Canvas,
    Noise,
    Resizing,
    blur,
    choose,
    constant,
    jpeg,
    larger_shape,
    make_noise,
    make_resizing,
    with_shape,
)
from paceline.images.degradation.parameters import FinalParameters, Resize, RoundParameters

# Which of the four resizes and of the two noises of the sequence each of ORDERS uses.
RESIZE_USED, NOISE_USED = (0, 0, 1, 2, 2, 3), (0, 1, 0, 0, 1, 1)


def apply_round(canvas: Canvas, parameters: RoundParameters) -> Canvas:
    """Blur, resize and add noise in the order of each image, then compress."""
    shape = parameters.resize.shape
    if parameters.order is None:
        resizing, noise = _prepared(canvas, parameters, shape)
        canvas = noise.apply(resizing.apply(blur(canvas, parameters.kernels)))
    else:  # an image may be resized at any time, so the canvas is large enough for both sizes
        canvas = with_shape(canvas, larger_shape(canvas, shape))
        resizing, noise = _prepared(canvas, parameters, (canvas.pixels.shape[-2], canvas.pixels.shape[-1]))
        canvas = with_shape(in_random_order(canvas, parameters.kernels, resizing, noise, parameters.order), shape)
    return jpeg(canvas, parameters.quality)


def apply_final(canvas: Canvas, parameters: FinalParameters) -> Canvas:
    """Resize to the low resolution, filter with a sinc kernel and compress; some images are compressed first."""
    jpeg_first, quality = parameters.jpeg_first[:, None, None, None], parameters.quality
    canvas = canvas.replaced(torch.where(jpeg_first, jpeg(canvas, quality).pixels, canvas.pixels))
    canvas = blur(_make_resizing(canvas, parameters.resize, parameters.resize.shape).apply(canvas), parameters.kernels)
    return canvas.replaced(torch.where(jpeg_first, canvas.pixels, jpeg(canvas, quality).pixels))


def in_random_order(canvas: Canvas, kernels: Tensor, resizing: Resizing, noise: Noise, order: Tensor) -> Canvas:
    """Blur, resize and add noise, in the order that each image's number selects from ORDERS."""
    resize_used, noise_used = (constant(used, order.device, torch.int64)[order] for used in (RESIZE_USED, NOISE_USED))
    for turn in range(2):
        canvas = _apply_where(resize_used == 2 * turn, resizing.apply, canvas)
        canvas = _apply_where(noise_used == turn, noise.apply, canvas)
        canvas = _apply_where(resize_used == 2 * turn + 1, resizing.apply, canvas)
        canvas = blur(canvas, kernels) if turn == 0 else canvas
    return canvas


def _prepared(canvas: Canvas, parameters: RoundParameters, shape: tuple[int, int]) -> tuple[Resizing, Noise]:
    noise = make_noise(parameters.noise, (canvas.pixels.shape[1], *shape))
    return _make_resizing(canvas, parameters.resize, shape), noise


def _make_resizing(canvas: Canvas, resize: Resize, shape: tuple[int, int]) -> Resizing:
    return make_resizing(canvas, resize.height, resize.width, resize.filters, shape)


def _apply_where(chosen: Tensor, step: Callable[[Canvas], Canvas], canvas: Canvas) -> Canvas:
    """Apply a step to the images for which `chosen` [n] is true."""
    if chosen.device.type == "cpu" and not chosen.any():  # on a GPU, this check would interrupt the capture of a step
        return canvas
    return choose(chosen, step(canvas), canvas)
