"""The 2015 Inception network in float16 on a GPU, with each weight stored as the sum of two float16 numbers.

The rounding error of a single float16 weight is the same for every image. It does not average out, and changes FID by
about 0.3 %. Rounding errors of activations differ from image to image, so one float16 number is enough for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.evaluation.features import half_kernels as kernels
from paceline.evaluation.features.inception_network import AveragedConvReLU, Branches, ConvReLU, Mean

Shape = tuple[int, int, int]  # height, width, channels


class Layer(Protocol):
    """A layer or block of the network, applied to float16 images [n, h, w, c]."""

    def shape(self, before: Shape) -> Shape:
        """Return the output shape for one image."""

    def fill(self, out: Tensor, x: Tensor) -> None:
        """Write the output to `out`, which may be a slice of a wider tensor's channels."""


class Half:
    """The whole network, from float32 images [n, 3, h, w] to float32 features [n, c]."""

    def __init__(self, network: nn.Sequential) -> None:
        first, *middle, mean = network
        assert isinstance(first, ConvReLU) and isinstance(mean, Mean)
        # The first layer stays in float32, since three input channels are too few for tensor cores.
        self.first, self.mean = first, mean
        self.middle = InRow([_in_float16(module) for module in middle])

    def __call__(self, images: Tensor) -> Tensor:
        # Triton computes on the current GPU, so make it the one that holds the images.
        with torch.cuda.device_of(images):  # type: ignore[no-untyped-call, unused-ignore]
            x = self.first(images).permute(0, 2, 3, 1).to(torch.float16, memory_format=torch.contiguous_format)
            features: Tensor = self.mean(_output_of(self.middle, x).permute(0, 3, 1, 2))
            return features


class Convolution:
    """A convolution followed by ReLU."""

    def __init__(self, layer: ConvReLU) -> None:
        self.weights = kernels.two_halves(layer.weight, layer.bias)
        self.stride, self.padding = layer.stride[0], layer.padding

    def shape(self, before: Shape) -> Shape:
        height, width = (
            (side + 2 * padding - taps) // self.stride + 1
            for side, padding, taps in zip(before[:2], self.padding, self.weights.kernel, strict=True)
        )
        return height, width, self.weights.channels[1]

    def fill(self, out: Tensor, x: Tensor) -> None:
        kernels.convolve(x, self.weights, out, self.stride, self.padding, relu=True)


class AveragedConvolution(Convolution):
    """A 1×1 convolution, a 3×3 average pool in float32, then ReLU."""

    def fill(self, out: Tensor, x: Tensor) -> None:
        sums = torch.empty(out.shape, dtype=torch.float32, device=x.device)
        kernels.convolve(x, self.weights, sums, self.stride, self.padding, relu=False)
        kernels.pool(sums, out, 1, 1, average=True)


class LargestOfNine:
    """A 3×3 max pool."""

    def __init__(self, layer: nn.MaxPool2d) -> None:
        assert layer.kernel_size == 3 and isinstance(layer.stride, int) and isinstance(layer.padding, int)
        self.stride, self.padding = layer.stride, layer.padding

    def shape(self, before: Shape) -> Shape:
        height, width = ((side + 2 * self.padding - 3) // self.stride + 1 for side in before[:2])
        return height, width, before[2]

    def fill(self, out: Tensor, x: Tensor) -> None:
        kernels.pool(x, out, self.stride, self.padding, average=False)


class InRow:
    """Layers applied in sequence."""

    def __init__(self, parts: Sequence[Layer]) -> None:
        self.parts = parts

    def shape(self, before: Shape) -> Shape:
        for part in self.parts:
            before = part.shape(before)
        return before

    def fill(self, out: Tensor, x: Tensor) -> None:
        *others, last = self.parts
        for part in others:
            x = _output_of(part, x)
        last.fill(out, x)


class SideBySide:
    """Layers with the same input, whose outputs are concatenated as channels."""

    def __init__(self, parts: Sequence[Layer]) -> None:
        self.parts = parts

    def shape(self, before: Shape) -> Shape:
        shapes = [part.shape(before) for part in self.parts]
        return *shapes[0][:2], sum(channels for *_, channels in shapes)

    def fill(self, out: Tensor, x: Tensor) -> None:
        widths = [part.shape(_shape_of(x))[2] for part in self.parts]
        for part, channels in zip(self.parts, torch.split(out, widths, dim=3), strict=True):
            part.fill(channels, x)


def _in_float16(module: nn.Module) -> Layer:
    if isinstance(module, AveragedConvReLU):
        return AveragedConvolution(module)
    if isinstance(module, ConvReLU):
        return Convolution(module)
    if isinstance(module, Branches):
        return SideBySide([_in_float16(branch) for branch in module.branches])
    if isinstance(module, nn.Sequential):
        return InRow([_in_float16(part) for part in module])
    assert isinstance(module, nn.MaxPool2d)
    return LargestOfNine(module)


def _output_of(part: Layer, x: Tensor) -> Tensor:
    out = torch.empty(len(x), *part.shape(_shape_of(x)), dtype=x.dtype, device=x.device)
    part.fill(out, x)
    return out


def _shape_of(x: Tensor) -> Shape:
    _, height, width, channels = x.shape
    return height, width, channels
