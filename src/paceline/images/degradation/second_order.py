"""Second-order degradation: realistic low-resolution images, made from high-resolution ones.

Wang et al., Real-ESRGAN: Training Real-World Blind Super-Resolution with Pure Synthetic Data (2021). Each image is
blurred, resized, degraded by noise and compressed as JPEG; then the same four steps are repeated with other parameters.
Finally, it is resized to the low resolution, filtered with a sinc kernel, and compressed again; for half of the images,
this compression comes first. Every parameter is computed from the sample's own uniform random numbers.

Blur, resizing and noise have the order of the paper, or a random order for each image and round (as in Zhang et al.,
Designing a Practical Degradation Model for Deep Blind Image Super-Resolution, 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.errors import describe_error
from paceline.core.gpu import float32_products
from paceline.core.text import print_line
from paceline.images.degradation import torch_steps
from paceline.images.degradation.operations import Canvas, Numbers, full_canvas
from paceline.images.degradation.parameters import (
    FIRST,
    SECOND,
    FinalParameters,
    Round,
    RoundParameters,
    draw_final,
    draw_round,
)


class Steps(Protocol):
    """An implementation of the steps: `torch_steps` or `triton_steps`."""

    def apply_round(self, canvas: Canvas, parameters: RoundParameters) -> Canvas:
        """Blur, resize and add noise in the order of each image, then compress."""

    def apply_final(self, canvas: Canvas, parameters: FinalParameters) -> Canvas:
        """Resize to the low resolution, filter with a sinc kernel and compress; some images are compressed first.

        The canvas may be overwritten.
        """


def degrade(
    images: Tensor,
    uniforms: Tensor,
    scale: int,
    first: Round = FIRST,
    second: Round = SECOND,
    orders: Tensor | None = None,
    steps: Steps | None = None,
) -> Tensor:
    """Return low-resolution images in [-1, 1], rounded to 8 bits, from images whose sides are multiples of `scale`.

    `uniforms` are numbers in [0, 1) with the shape [n, NUM_NUMBERS]. `orders` are such numbers with the shape
    [n, NUM_ORDER_NUMBERS]; they select the order of the steps, which is that of the paper if `orders` is None. An image
    depends only on its own rows. `steps` is the implementation; the default is the fastest one for these images.
    """
    # Triton uses the current GPU, so select the one that holds the images.
    current = torch.cuda.device_of(images)  # type: ignore[no-untyped-call, unused-ignore]
    in_float32 = float32_products(tf32=False)  # TF32 has 10 bits, too few for levels that are rounded to 8
    with current, torch.no_grad(), torch.autocast(images.device.type, enabled=False), in_float32:
        levels = (images.to(torch.promote_types(images.dtype, torch.float32)) + 1) * 127.5
        apply = partial(_apply, levels, uniforms.to(levels.dtype), scale, first, second, orders)
        pixels = apply(steps) if steps else _apply_fastest(levels, apply)
        return (pixels.round().clamp(0, 255) / 127.5 - 1).to(images.dtype)


def fastest_steps(levels: Tensor) -> Steps:
    """Return the Triton kernels for float32 images on a CUDA device, and otherwise PyTorch's own operations."""
    if _triton.usable and _fits_triton(levels):
        from paceline.images.degradation import triton_steps

        return triton_steps
    return torch_steps


@dataclass
class _Triton:
    """Whether this process may use Triton. Its kernels fail if, for example, the machine has no C compiler."""

    usable: bool = find_spec("triton") is not None


_triton = _Triton()


def _fits_triton(levels: Tensor) -> bool:
    return levels.is_cuda and levels.dtype == torch.float32


def _apply_fastest(levels: Tensor, apply: Callable[[Steps], Tensor]) -> Tensor:
    """Apply the fastest steps for these images. If Triton fails, print a note once and use PyTorch from then on."""
    if _triton.usable and _fits_triton(levels):
        try:
            return apply(fastest_steps(levels))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers raise many kinds of errors
            _triton.usable = False
            print_line(f"degradation: computed without Triton, since it failed ({describe_error(error)})")
    return apply(torch_steps)


def _apply(
    levels: Tensor, uniforms: Tensor, scale: int, first: Round, second: Round, orders: Tensor | None, steps: Steps
) -> Tensor:
    """Return degraded images with levels from 0 to 255; the given images stay as they are."""
    numbers = Numbers(uniforms)
    rows, columns = levels.shape[-2:]
    first_order, second_order = (None, None) if orders is None else orders.unbind(1)
    canvas = steps.apply_round(full_canvas(levels), draw_round(numbers, first, rows, columns, first_order))
    rows, columns = rows // scale, columns // scale
    canvas = steps.apply_round(canvas, draw_round(numbers, second, rows, columns, second_order))
    return steps.apply_final(canvas, draw_final(numbers, second, rows, columns)).pixels
