"""R3GAN's generator and discriminator: residual networks without normalisation.

Huang et al., The GAN is dead; long live the GAN! A Modern Baseline GAN (2025). Each stage has one resolution, from 4×4
pixels to the image size, and several residual blocks. Bilinear resampling connects the stages. The weights are
initialised so that activations keep their variance at any depth (Zhang et al., Fixup, 2019).

The discriminator can also return the gradients of its scores with respect to the images, for penalties. It computes
them with ordinary layers, so that a penalty needs no double backward, and can be compiled and sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.layers import in_full_precision

SIZES_PX = (16, 32, 64, 128)
SMALLEST_PX = 4
SMALL_MAP_PX = 16  # largest side of a feature map that is resampled with one matrix product instead of two
SLOPE = 0.2  # of the leaky ReLU for negative values

PullBack = Callable[[Tensor], Tensor]  # maps gradients with respect to a layer's output to those of its input


class Differentiable(Protocol):
    """A layer of the discriminator."""

    def linearise(self, features: Tensor) -> tuple[Tensor, PullBack]:
        """Return the layer's output, and a function that maps the gradient of the output to that of the input."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that the generator and the discriminator have in common."""

    size_px: int  # side of the images
    channels: int  # of the images
    nz: int = 64  # length of the noise vector
    width: int = 512  # channels of the feature maps with a side up to full_width_px
    full_width_px: int = 8  # above this side, each doubling of the side halves the number of channels
    num_blocks: int = 2  # per stage
    expansion: int = 2  # channels inside a block relative to its input
    group_size: int = 16  # channels per group of the 3×3 convolutions
    num_classes: int = 0

    def __post_init__(self) -> None:
        assert self.size_px in SIZES_PX

    @property
    def sides_px(self) -> list[int]:
        """The side of each stage's feature maps, from 4 pixels to the image size."""
        return [SMALLEST_PX << number for number in range((self.size_px // SMALLEST_PX).bit_length())]

    @property
    def widths(self) -> list[int]:
        """The number of channels of each stage, from 4×4 pixels to the image size."""
        return [max(1, self.width * self.full_width_px // max(side, self.full_width_px)) for side in self.sides_px]


class Generator(nn.Module):
    """Maps noise [n, nz], and classes [n] if there are any, to images; real images have values in [-1, 1]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        sides, widths = sizes.sides_px, sizes.widths
        self.embedding = nn.Embedding(sizes.num_classes, sizes.nz) if sizes.num_classes else None
        self.basis = nn.Parameter(torch.randn(widths[0], SMALLEST_PX, SMALLEST_PX))
        self.modulation = nn.Linear(sizes.nz * (2 if sizes.num_classes else 1), widths[0], bias=False)
        self.stages = nn.ModuleList()
        for number, after in enumerate(widths):
            # Projecting before upsampling gives the same result as after it, at a quarter of the cost.
            grow = [] if number == 0 else [*_project(widths[number - 1], after), Upsample(sides[number - 1])]
            self.stages.append(nn.Sequential(*grow, *_blocks(after, sizes)))
        self.to_image = Pointwise(widths[-1], sizes.channels, bias=False)
        initialise(self, len(widths) * sizes.num_blocks)
        if self.embedding is not None:
            nn.init.normal_(self.embedding.weight, 0.0, 1 / math.sqrt(sizes.num_classes))

    def forward(self, noise: Tensor, label: Tensor | None = None) -> Tensor:
        if self.embedding is not None:
            assert label is not None
            noise = torch.cat([noise, self.embedding(label)], dim=1)
        features = self.basis * self.modulation(noise)[:, :, None, None]
        for stage in self.stages:
            features = stage(features)
        # Copied, because FSDP warns about networks that return a view. contiguous() would not copy greyscale images.
        return in_full_precision(self.to_image(features)).clone(memory_format=torch.contiguous_format)


class Discriminator(nn.Module):
    """Maps each image, and its class if there is one, to a score. Only differences between scores are meaningful."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        sides, widths = sizes.sides_px[::-1], sizes.widths[::-1]
        self.from_image = Pointwise(sizes.channels, widths[0], bias=False)
        self.stages = nn.ModuleList()
        for number, before in enumerate(widths):
            last = number == len(widths) - 1
            shrink = [] if last else [Downsample(sides[number]), *_project(before, widths[number + 1])]
            self.stages.append(nn.Sequential(*_blocks(before, sizes), *shrink))
        self.basis = nn.Parameter(torch.randn(widths[-1], SMALLEST_PX, SMALLEST_PX) / SMALLEST_PX)
        self.head = nn.Linear(widths[-1], widths[-1] if sizes.num_classes else 1, bias=False)
        self.embedding = nn.Embedding(sizes.num_classes, widths[-1]) if sizes.num_classes else None
        initialise(self, len(widths) * sizes.num_blocks)
        if self.embedding is not None:
            # Small values, so that Adam's steps, whose size does not depend on the gradient, change them quickly.
            nn.init.normal_(self.embedding.weight, 0.0, 1 / math.sqrt(sizes.num_classes * widths[-1]))

    def forward(
        self, images: Tensor, label: Tensor | None = None, *, with_gradients: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the scores; `with_gradients` adds the gradient of each score with respect to its image."""
        features, pull_backs = images, []
        for layer in chain([self.from_image], *self.stages):
            features, pull_back = cast(Differentiable, layer).linearise(features)
            pull_backs.append(pull_back)
        pooled = (in_full_precision(features) * self.basis).sum((2, 3))
        with torch.autocast(images.device.type, enabled=False):  # scores are compared, so they must not be rounded
            if self.embedding is None:
                direction = self.head.weight  # [1, channels]: the same for all images
            else:
                assert label is not None
                direction = self.embedding(label) @ self.head.weight
            scores = (pooled * direction).sum(1)
        if not with_gradients:
            return scores
        gradients = (direction[:, :, None, None] * self.basis).to(features.dtype).expand_as(features)
        for pull_back in reversed(pull_backs):
            gradients = pull_back(gradients)
        # Copied, because FSDP warns about networks that return a view. contiguous() would not copy greyscale images.
        return scores, in_full_precision(gradients).clone(memory_format=torch.contiguous_format)


class Block(nn.Module):
    """A residual block with an inverted bottleneck: 1×1 convolution, grouped 3×3 convolution, 1×1 convolution."""

    def __init__(self, channels: int, inner: int, group_size: int) -> None:
        super().__init__()
        self.expand = Pointwise(channels, inner)
        self.mix = nn.Conv2d(inner, inner, 3, padding=1, groups=inner // group_size)
        self.reduce = Pointwise(inner, channels, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        return self.linearise(features)[0]

    def linearise(self, features: Tensor) -> tuple[Tensor, PullBack]:
        expanded = self.expand(features)
        mixed = self.mix(F.leaky_relu(expanded, SLOPE))
        output = features + self.reduce(F.leaky_relu(mixed, SLOPE))

        def pull_back(gradient: Tensor) -> Tensor:
            inner = _leaky_relu_gradient(self.reduce.transpose(gradient), mixed)
            inner = F.conv_transpose2d(inner, self.mix.weight, padding=1, groups=self.mix.groups)
            return gradient + self.expand.transpose(_leaky_relu_gradient(inner, expanded))

        return output, pull_back


class Pointwise(nn.Linear):
    """A 1×1 convolution, computed as a matrix product with channels last."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def transpose(self, gradient: Tensor) -> Tensor:
        """Return the gradient with respect to the input."""
        return F.linear(gradient.permute(0, 2, 3, 1), self.weight.T).permute(0, 3, 1, 2)

    def linearise(self, features: Tensor) -> tuple[Tensor, PullBack]:
        return self(features), self.transpose


class Resample(nn.Module):
    """Maps the rows and the columns of feature maps with a matrix [new side, side].

    Matrix products have deterministic gradients on GPUs. One product maps all pixels of a small feature map.
    """

    matrix: Tensor

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        is_small = max(matrix.shape) <= SMALL_MAP_PX
        self.register_buffer("matrix", torch.kron(matrix, matrix) if is_small else matrix, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return _resample(images, self.matrix)

    def linearise(self, features: Tensor) -> tuple[Tensor, PullBack]:
        return self(features), lambda gradient: _resample(gradient, self.matrix.T)


class Upsample(Resample):
    """Bilinear upsampling by 2 of feature maps with the given side."""

    def __init__(self, side_px: int) -> None:
        super().__init__(_bilinear(side_px))


class Downsample(Resample):
    """Downsampling by 2 of feature maps with the given side, with the weights (1, 3, 3, 1)/8 in each direction.

    It is the transpose of bilinear upsampling, scaled so that a constant map stays the same.
    """

    def __init__(self, side_px: int) -> None:
        super().__init__(_bilinear(side_px // 2).T / 2)


def initialise(network: nn.Module, num_blocks: int) -> None:
    """Initialise the layers so that the variance of activations does not depend on the depth (Fixup).

    The last layer in a block is zero. The m-1 = 2 layers before it are scaled by num_blocks^(-1/(2m-2)).
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            fan_in = module.weight[0].numel()
            nn.init.normal_(module.weight, 0.0, 1 / math.sqrt(fan_in))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    gain = nn.init.calculate_gain("leaky_relu", SLOPE) * num_blocks ** (-1 / 4)
    for block in (module for module in network.modules() if isinstance(module, Block)):
        with torch.no_grad():
            block.expand.weight.mul_(gain)
            block.mix.weight.mul_(gain)
            block.reduce.weight.zero_()


def _resample(images: Tensor, matrix: Tensor) -> Tensor:
    count, channels, height, width = images.shape
    pixels = images.permute(0, 2, 3, 1)
    if matrix.shape[1] == height * width:
        side = math.isqrt(len(matrix))
        mapped = _map(matrix, pixels.reshape(count, height * width, channels))
    else:
        side = len(matrix)
        rows = _map(matrix, pixels.reshape(count, height, width * channels))
        mapped = _map(matrix, rows.reshape(count * side, width, channels))
    return mapped.reshape(count, side, side, channels).permute(0, 3, 1, 2)


def _map(matrix: Tensor, vectors: Tensor) -> Tensor:
    """Multiply each matrix [old, channels] in a batch by the same matrix [new, old]."""
    return torch.bmm(matrix.to(vectors.dtype).expand(vectors.shape[0], -1, -1), vectors)


def _leaky_relu_gradient(gradient: Tensor, input: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.leaky_relu_backward(gradient, input.detach(), SLOPE, False)
    return found


def _bilinear(side_px: int) -> Tensor:
    """Return the matrix [2 · side, side] of bilinear upsampling in one direction."""
    identity = torch.eye(side_px)[None]
    return F.interpolate(identity, scale_factor=2, mode="linear", align_corners=False)[0].T.contiguous()


def _blocks(channels: int, sizes: Sizes) -> list[nn.Module]:
    inner = channels * sizes.expansion
    return [Block(channels, inner, math.gcd(sizes.group_size, inner)) for _ in range(sizes.num_blocks)]


def _project(before: int, after: int) -> list[nn.Module]:
    return [] if before == after else [Pointwise(before, after, bias=False)]
