"""The steps of a second-order degradation as Triton kernels, for float32 images on a CUDA device.

A round has three slots. In each slot, the next step in each image's own order is applied.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from paceline.images.degradation.canvas import Canvas, larger_shape
from paceline.images.degradation.kernels import SIDE
from paceline.images.degradation.noise import NoiseParameters
from paceline.images.degradation.numbers import constant
from paceline.images.degradation.parameters import ORDERS, FinalParameters, Resize, RoundParameters
from paceline.images.degradation.triton_jpeg import compress_in_place
from paceline.images.degradation.triton_kernels import COLUMNS, ROWS, STEPS, apply_steps

BLUR, RESIZE, NOISE = range(len(STEPS))
# The step in each of the three slots, for each of ORDERS.
SLOTS = tuple(zip(*(map(STEPS.index, order.split()) for order in ORDERS), strict=True))

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
    """Blur, resize and add noise in the order of each image, then compress."""
    resize, order, field = parameters.resize, parameters.order, parameters.resize.shape
    if order is None:
        slots = [torch.full_like(canvas.height, step) for step in (BLUR, RESIZE, NOISE)]
    else:
        slots = [constant(steps, order.device, torch.int64)[order] for steps in SLOTS]
        field = larger_shape(canvas, field)
    batch = ImageSteps(parameters.kernels, resize, parameters.noise, field)
    between = larger_shape(canvas, resize.shape)
    for steps, shape in zip(slots, (between, between, resize.shape), strict=True):
        canvas = batch.apply(canvas, steps, shape)
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
