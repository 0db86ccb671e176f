"""Second-order degradation: realistic low-resolution images, made from high-resolution ones.

Wang et al., Real-ESRGAN: Training Real-World Blind Super-Resolution with Pure Synthetic Data (2021). Each image is
blurred, resized, made noisy and compressed as JPEG; then the same four steps are repeated with other parameters.
Finally, it is resized to the low resolution, filtered with a sinc kernel, and compressed again; for half of the images,
this compression comes first. Every parameter is computed from the sample's own uniform random numbers.

Blur, resizing and noise have the order of the paper, or a random order for each image and round (as in Zhang et al.,
Designing a Practical Degradation Model for Deep Blind Image Super-Resolution, 2021). A batch has images with different
orders, and a CUDA graph cannot branch. So all images pass through the sequence resize, noise, resize, blur, resize,
noise, resize, which contains each of the six orders, and every image uses each of the three steps once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.images.degradation.canvas import Canvas, choose, full_canvas, with_shape
from paceline.images.degradation.jpeg import jpeg
from paceline.images.degradation.kernels import (
    NUM_BLUR_NUMBERS,
    NUM_SINC_NUMBERS,
    blur,
    random_blur_kernels,
    random_sinc_kernels,
)
from paceline.images.degradation.noise import NUM_NOISE_NUMBERS, Noise, random_noise
from paceline.images.degradation.numbers import Numbers, between, constant, pick
from paceline.images.degradation.resizing import NUM_FILTERS, Resizing, make_resizing, resize

NUM_RESIZE_NUMBERS = 3
NUM_JPEG_NUMBERS = 1
NUM_ROUND_NUMBERS = NUM_BLUR_NUMBERS + NUM_RESIZE_NUMBERS + NUM_NOISE_NUMBERS + NUM_JPEG_NUMBERS
NUM_FINAL_NUMBERS = 1 + 1 + NUM_SINC_NUMBERS + NUM_JPEG_NUMBERS  # order, filter, sinc kernel, quality
NUM_NUMBERS = 2 * NUM_ROUND_NUMBERS + NUM_FINAL_NUMBERS
NUM_ORDER_NUMBERS = 2  # one for each round
FINAL_SINC_PROBABILITY = 0.8
# The six orders of a round's steps, and which of the four resizes and of the two noises of the sequence each one uses.
ORDERS = (
    "resize noise blur",
    "resize blur noise",
    "noise resize blur",
    "noise blur resize",
    "blur resize noise",
    "blur noise resize",
)
RESIZE_USED, NOISE_USED = (0, 0, 1, 2, 2, 3), (0, 1, 0, 0, 1, 1)


@dataclass(frozen=True)
class Round:
    """The ranges and probabilities of one round of degradation."""

    blur_probability: float
    sinc_probability: float  # the probability that a blur kernel is a sinc kernel
    max_blur_sigma: float  # in px
    up_probability: float
    down_probability: float  # the size of the remaining images does not change
    smallest_scale: float
    largest_scale: float
    max_noise_sigma: float  # in levels
    max_poisson: float  # factor of the Poisson noise
    jpeg_quality: tuple[int, int]


# The values in section 4.1 of the paper and in the appendix.
FIRST = Round(1.0, 0.1, 3.0, 0.2, 0.7, 0.15, 1.5, 30.0, 3.0, (30, 95))
SECOND = Round(0.8, 0.1, 1.5, 0.3, 0.4, 0.3, 1.2, 25.0, 2.5, (30, 95))


def degrade(
    images: Tensor,
    uniforms: Tensor,
    scale: int,
    first: Round = FIRST,
    second: Round = SECOND,
    orders: Tensor | None = None,
) -> Tensor:
    """Return low-resolution images in [-1, 1], rounded to 8 bits, from images whose sides are multiples of `scale`.

    `uniforms` are numbers in [0, 1) with the shape [n, NUM_NUMBERS]. `orders` are such numbers with the shape
    [n, NUM_ORDER_NUMBERS]; they select the order of the steps, which is that of the paper if `orders` is None. An image
    depends only on its own rows.
    """
    with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
        wide = torch.promote_types(images.dtype, torch.float32)
        numbers = Numbers(uniforms.to(wide))
        canvas = full_canvas((images.to(wide) + 1) * 127.5)
        rows, columns = images.shape[-2:]
        first_order, second_order = (None, None) if orders is None else orders.unbind(1)
        canvas = _round(canvas, numbers, first, rows, columns, first_order)
        canvas = _round(canvas, numbers, second, rows // scale, columns // scale, second_order)
        canvas = _final(canvas, numbers, second, rows // scale, columns // scale)
        return (canvas.pixels.round().clamp(0, 255) / 127.5 - 1).to(images.dtype)


def _round(canvas: Canvas, numbers: Numbers, settings: Round, height: int, width: int, order: Tensor | None) -> Canvas:
    """Blur, resize relative to `height` × `width` and add noise, then compress; `order` permutes the first three."""
    kernels = random_blur_kernels(
        numbers, settings.blur_probability, settings.sinc_probability, settings.max_blur_sigma
    )
    direction, amount, chosen = numbers.take(NUM_RESIZE_NUMBERS)
    scale = random_scale(direction, amount, settings)
    sizes = [(scale * side).long().clamp(min=1) for side in (height, width)]
    largest = (int(height * settings.largest_scale), int(width * settings.largest_scale))
    shape = largest
    if order is not None:  # an image may be resized at any time, so the canvas is large enough for both sizes
        rows, columns = canvas.pixels.shape[-2:]
        shape = (max(rows, largest[0]), max(columns, largest[1]))
        canvas = with_shape(canvas, shape)
    resizing = make_resizing(canvas, sizes[0], sizes[1], pick(chosen, NUM_FILTERS), shape)
    channels = canvas.pixels.shape[1]
    noise = random_noise((channels, *shape), numbers, settings.max_noise_sigma, settings.max_poisson)
    if order is None:
        canvas = noise.apply(resizing.apply(blur(canvas, kernels)))
    else:
        canvas = with_shape(_in_random_order(canvas, kernels, resizing, noise, order), largest)
    return jpeg(canvas, _quality(numbers, settings))


def _in_random_order(canvas: Canvas, kernels: Tensor, resizing: Resizing, noise: Noise, order: Tensor) -> Canvas:
    """Blur, resize and add noise, in the order that each image's number in [0, 1) selects from ORDERS."""
    number = pick(order, len(ORDERS))
    resize_used, noise_used = (constant(used, number.device, torch.int64)[number] for used in (RESIZE_USED, NOISE_USED))
    for turn in range(2):
        canvas = _apply_where(resize_used == 2 * turn, resizing.apply, canvas)
        canvas = _apply_where(noise_used == turn, noise.apply, canvas)
        canvas = _apply_where(resize_used == 2 * turn + 1, resizing.apply, canvas)
        canvas = blur(canvas, kernels) if turn == 0 else canvas
    return canvas


def _apply_where(chosen: Tensor, step: Callable[[Canvas], Canvas], canvas: Canvas) -> Canvas:
    """Apply a step to the images for which `chosen` [n] is true."""
    if chosen.device.type == "cpu" and not chosen.any():  # on a GPU, this check would interrupt the capture of a step
        return canvas
    return choose(chosen, step(canvas), canvas)


def random_scale(direction: Tensor, amount: Tensor, settings: Round) -> Tensor:
    """Return a scale above 1, below 1 or equal to 1 for each image."""
    up, down = between(amount, 1, settings.largest_scale), between(amount, settings.smallest_scale, 1)
    is_up, is_down = direction < settings.up_probability, direction >= 1 - settings.down_probability
    return torch.where(is_up, up, torch.where(is_down, down, torch.ones_like(up)))


def _final(canvas: Canvas, numbers: Numbers, settings: Round, height: int, width: int) -> Canvas:
    """Resize to the low resolution, filter with a sinc kernel and compress; half of the images are compressed first."""
    order, chosen = numbers.take(2)
    kernels = random_sinc_kernels(numbers, FINAL_SINC_PROBABILITY)
    quality, jpeg_first = _quality(numbers, settings), (order < 0.5)[:, None, None, None]
    canvas = canvas.replaced(torch.where(jpeg_first, jpeg(canvas, quality).pixels, canvas.pixels))
    rows, columns = (torch.full_like(canvas.height, side) for side in (height, width))
    canvas = blur(resize(canvas, rows, columns, pick(chosen, NUM_FILTERS), (height, width)), kernels)
    return canvas.replaced(torch.where(jpeg_first, canvas.pixels, jpeg(canvas, quality).pixels))


def _quality(numbers: Numbers, settings: Round) -> Tensor:
    low, high = settings.jpeg_quality
    (uniform,) = numbers.take(NUM_JPEG_NUMBERS)
    return low + pick(uniform, high - low + 1)
