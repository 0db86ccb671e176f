"""Second-order degradation: realistic low-resolution images, made from high-resolution ones.

Wang et al., Real-ESRGAN: Training Real-World Blind Super-Resolution with Pure Synthetic Data (2021). Each image is
blurred, resized, degraded by noise and compressed as JPEG; then the same four steps are repeated with other parameters.
Finally, it is resized to the low resolution, filtered with a sinc kernel, and compressed again; for half of the images,
this compression comes first. Every parameter is computed from the sample's own uniform random numbers, in the ranges of
the paper. All tensors of parameters have one entry per image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.errors import describe_error
from paceline.core.gpu import float32_products
from paceline.core.text import print_line
from paceline.images.degradation.operations import (
    NUM_BLUR_NUMBERS,
    NUM_FILTERS,
    NUM_NOISE_NUMBERS,
    NUM_SINC_NUMBERS,
    Canvas,
    NoiseParameters,
    Numbers,
    Resize,
    add_noise,
    between,
    blur,
    full_canvas,
    jpeg,
    pick,
    random_blur_kernels,
    random_noise,
    random_sinc_kernels,
    resize_images,
)

NUM_RESIZE_NUMBERS = 3
NUM_JPEG_NUMBERS = 1
NUM_ROUND_NUMBERS = NUM_BLUR_NUMBERS + NUM_RESIZE_NUMBERS + NUM_NOISE_NUMBERS + NUM_JPEG_NUMBERS
NUM_FINAL_NUMBERS = 1 + 1 + NUM_SINC_NUMBERS + NUM_JPEG_NUMBERS  # order, filter, sinc kernel, quality
NUM_NUMBERS = 2 * NUM_ROUND_NUMBERS + NUM_FINAL_NUMBERS
FINAL_SINC_PROBABILITY = 0.8


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


@dataclass(frozen=True)
class RoundParameters:
    """The parameters of one round for each image of a batch."""

    kernels: Tensor  # relative weights [n, SIDE, SIDE]
    resize: Resize
    noise: NoiseParameters
    quality: Tensor  # int64 [n]


@dataclass(frozen=True)
class FinalParameters:
    """The parameters of the last resizing, sinc filter and compression for each image of a batch."""

    jpeg_first: Tensor  # whether the compression comes before the other two steps, bool [n]
    resize: Resize
    kernels: Tensor  # relative weights [n, SIDE, SIDE]
    quality: Tensor  # int64 [n]


def draw_round(numbers: Numbers, settings: Round, height: int, width: int) -> RoundParameters:
    """Return the parameters of a round; sizes are relative to `height` × `width`."""
    kernels = random_blur_kernels(
        numbers, settings.blur_probability, settings.sinc_probability, settings.max_blur_sigma
    )
    direction, amount, chosen = numbers.take(NUM_RESIZE_NUMBERS)
    scale = random_scale(direction, amount, settings)
    sizes = [(scale * side).long().clamp(min=1) for side in (height, width)]
    largest = (int(height * settings.largest_scale), int(width * settings.largest_scale))
    return RoundParameters(
        kernels,
        Resize(sizes[0], sizes[1], pick(chosen, NUM_FILTERS), largest),
        random_noise(numbers, settings.max_noise_sigma, settings.max_poisson),
        _quality(numbers, settings),
    )


def draw_final(numbers: Numbers, settings: Round, height: int, width: int) -> FinalParameters:
    """Return the parameters of the last steps, which produce images of `height` × `width`."""
    order, chosen = numbers.take(2)
    rows, columns = (torch.full_like(order, side, dtype=torch.int64) for side in (height, width))
    return FinalParameters(
        order < 0.5,
        Resize(rows, columns, pick(chosen, NUM_FILTERS), (height, width)),
        random_sinc_kernels(numbers, FINAL_SINC_PROBABILITY),
        _quality(numbers, settings),
    )


def random_scale(direction: Tensor, amount: Tensor, settings: Round) -> Tensor:
    """Return a scale above 1, below 1 or equal to 1 for each image."""
    up, down = between(amount, 1, settings.largest_scale), between(amount, settings.smallest_scale, 1)
    is_up, is_down = direction < settings.up_probability, direction >= 1 - settings.down_probability
    return torch.where(is_up, up, torch.where(is_down, down, torch.ones_like(up)))


def _quality(numbers: Numbers, settings: Round) -> Tensor:
    low, high = settings.jpeg_quality
    (uniform,) = numbers.take(NUM_JPEG_NUMBERS)
    return low + pick(uniform, high - low + 1)


def apply_round(canvas: Canvas, parameters: RoundParameters) -> Canvas:
    """Blur, resize, add noise and compress."""
    resize = parameters.resize
    canvas = resize_images(blur(canvas, parameters.kernels), resize)
    return jpeg(add_noise(canvas, parameters.noise), parameters.quality)


def apply_final(canvas: Canvas, parameters: FinalParameters) -> Canvas:
    """Resize to the low resolution, filter with a sinc kernel and compress; some images are compressed first."""
    jpeg_first, quality = parameters.jpeg_first[:, None, None, None], parameters.quality
    canvas = canvas.replaced(torch.where(jpeg_first, jpeg(canvas, quality).pixels, canvas.pixels))
    canvas = blur(resize_images(canvas, parameters.resize), parameters.kernels)
    return canvas.replaced(torch.where(jpeg_first, canvas.pixels, jpeg(canvas, quality).pixels))


class Steps(NamedTuple):
    """An implementation of the steps."""

    apply_round: Callable[[Canvas, RoundParameters], Canvas]
    apply_final: Callable[[Canvas, FinalParameters], Canvas]  # may change the canvas


TORCH_STEPS = Steps(apply_round, apply_final)


@dataclass
class _Triton:
    """Whether this process may use Triton. Its kernels fail if, for example, the machine has no C compiler."""

    usable: bool = find_spec("triton") is not None


_triton = _Triton()


def degrade(
    images: Tensor,
    uniforms: Tensor,
    scale: int,
    first: Round = FIRST,
    second: Round = SECOND,
    steps: Steps | None = None,
) -> Tensor:
    """Return low-resolution images in [-1, 1], rounded to 8 bits, from images whose sides are multiples of `scale`.

    `uniforms` are numbers in [0, 1) with the shape [n, NUM_NUMBERS]. An image depends only on its own row. `steps` is
    the implementation. By default, it is the fastest one for these images; if Triton fails, a note is printed once, and
    PyTorch is used from then on.
    """

    def apply(steps: Steps) -> Tensor:
        numbers = Numbers(uniforms.to(levels.dtype))
        rows, columns = levels.shape[-2:]
        canvas = steps.apply_round(full_canvas(levels), draw_round(numbers, first, rows, columns))
        rows, columns = rows // scale, columns // scale
        canvas = steps.apply_round(canvas, draw_round(numbers, second, rows, columns))
        return steps.apply_final(canvas, draw_final(numbers, second, rows, columns)).pixels

    # Triton uses the current GPU, so select the one that holds the images.
    current = torch.cuda.device_of(images)  # type: ignore[no-untyped-call, unused-ignore]
    in_float32 = float32_products(tf32=False)  # TF32 has 10 bits, too few for levels that are rounded to 8
    with current, torch.no_grad(), torch.autocast(images.device.type, enabled=False), in_float32:
        levels = (images.to(torch.promote_types(images.dtype, torch.float32)) + 1) * 127.5
        fastest = fastest_steps(levels)
        try:
            pixels = apply(steps or fastest)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers raise many kinds of errors
            if steps or fastest is TORCH_STEPS:
                raise
            _triton.usable = False
            print_line(f"degradation: computed without Triton, since it failed ({describe_error(error)})")
            pixels = apply(TORCH_STEPS)
        return (pixels.round().clamp(0, 255) / 127.5 - 1).to(images.dtype)


def fastest_steps(levels: Tensor) -> Steps:
    """Return the Triton kernels for float32 images on a CUDA device, and otherwise PyTorch's own operations."""
    if _triton.usable and levels.is_cuda and levels.dtype == torch.float32:
        from paceline.images.degradation import triton_steps

        return Steps(triton_steps.apply_round, triton_steps.apply_final)
    return TORCH_STEPS
