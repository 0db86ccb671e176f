"""R3GAN's generator and discriminator: residual networks without normalisation.

Huang et al., The GAN is dead; long live the GAN! A Modern Baseline GAN (2025). Each stage has one resolution, from 4×4
pixels to the image size, and several residual blocks. Bilinear resampling connects the stages. The weights are
initialised so that activations keep their variance at any depth (Zhang et al., Fixup, 2019).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.layers import in_full_precision
from paceline.models.twice_differentiable import SmoothConv2d

SIZES_PX = (16, 32, 64, 128)
SMALLEST_PX = 4
FULL_WIDTH_UP_TO_PX = 8  # above this side, each doubling of the side halves the number of channels
SLOPE = 0.2  # of the leaky ReLU for negative values
EXPANSION = 2  # channels inside a block relative to its input


class Generator(nn.Module):
    """Maps noise [n, nz], and classes [n] if there are any, to images; real images have values in [-1, 1]."""

    def __init__(
        self, size_px: int, channels: int, nz: int, width: int, num_blocks: int, group_size: int, num_classes: int = 0
    ) -> None:
        super().__init__()
        widths = _widths(size_px, width)
        self.embedding = nn.Embedding(num_classes, nz) if num_classes else None
        self.basis = nn.Parameter(torch.randn(widths[0], SMALLEST_PX, SMALLEST_PX))
        self.modulation = nn.Linear(nz * (2 if num_classes else 1), widths[0], bias=False)
        self.stages = nn.ModuleList()
        for number, after in enumerate(widths):
            grow = [] if number == 0 else [Upsample(SMALLEST_PX << (number - 1)), *_project(widths[number - 1], after)]
            self.stages.append(nn.Sequential(*grow, *_blocks(after, num_blocks, group_size, nn.Conv2d)))
        self.to_image = Pointwise(widths[-1], channels, bias=False)
        initialise(self, len(widths) * num_blocks)

    def forward(self, noise: Tensor, label: Tensor | None = None) -> Tensor:
        if self.embedding is not None:
            assert label is not None
            noise = torch.cat([noise, self.embedding(label)], dim=1)
        features = self.basis * self.modulation(noise)[:, :, None, None]
        for stage in self.stages:
            features = stage(features)
        # A copy in the usual layout, because FSDP warns about networks that return a view.
        return in_full_precision(self.to_image(features)).contiguous()


class Discriminator(nn.Module):
    """Maps each image, and its class if there is one, to a score. Only differences between scores are meaningful."""

    def __init__(
        self, size_px: int, channels: int, nz: int, width: int, num_blocks: int, group_size: int, num_classes: int = 0
    ) -> None:
        super().__init__()
        widths = _widths(size_px, width)[::-1]
        self.from_image = Pointwise(channels, widths[0], bias=False)
        self.stages = nn.ModuleList()
        for number, before in enumerate(widths):
            last = number == len(widths) - 1
            shrink = [] if last else [nn.AvgPool2d(2), *_project(before, widths[number + 1])]
            self.stages.append(nn.Sequential(*_blocks(before, num_blocks, group_size, SmoothConv2d), *shrink))
        self.basis = nn.Parameter(torch.randn(widths[-1], SMALLEST_PX, SMALLEST_PX) / SMALLEST_PX)
        self.head = nn.Linear(widths[-1], nz if num_classes else 1, bias=False)
        self.embedding = nn.Embedding(num_classes, nz) if num_classes else None
        initialise(self, len(widths) * num_blocks)

    def forward(self, images: Tensor, label: Tensor | None = None) -> Tensor:
        features = self.from_image(images)
        for stage in self.stages:
            features = stage(features)
        pooled = (in_full_precision(features) * self.basis).sum((2, 3))
        with torch.autocast(images.device.type, enabled=False):  # scores are compared, so they must not be rounded
            directions: Tensor = self.head(pooled)
            if self.embedding is None:
                return directions[:, 0]
            assert label is not None
            products: Tensor = directions * self.embedding(label)
            return products.sum(1) / math.sqrt(directions.shape[1])


class Block(nn.Module):
    """A residual block with an inverted bottleneck: 1×1 convolution, grouped 3×3 convolution, 1×1 convolution."""

    def __init__(self, channels: int, group_size: int, convolution: type[nn.Conv2d]) -> None:
        super().__init__()
        inner = channels * EXPANSION
        self.expand = Pointwise(channels, inner)
        self.mix = convolution(inner, inner, 3, padding=1, groups=inner // group_size)
        self.reduce = Pointwise(inner, channels, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        inner = F.leaky_relu(self.expand(features), SLOPE)
        inner = F.leaky_relu(self.mix(inner), SLOPE)
        change: Tensor = self.reduce(inner)
        return features + change


class Pointwise(nn.Linear):
    """A 1×1 convolution, computed as a matrix product with channels last."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Upsample(nn.Module):
    """Bilinear upsampling by 2, computed as matrix products, so that its gradient is deterministic on GPUs."""

    shares: Tensor

    def __init__(self, side_px: int) -> None:
        super().__init__()
        identity = torch.eye(side_px)[None]
        shares = F.interpolate(identity, scale_factor=2, mode="linear", align_corners=False)[0].T
        self.register_buffer("shares", shares, persistent=False)  # [2 · side, side]

    def forward(self, images: Tensor) -> Tensor:
        count, channels, height, width = images.shape
        rows = self.shares @ images.permute(0, 2, 3, 1).reshape(count, height, width * channels)
        both = self.shares @ rows.reshape(count * 2 * height, width, channels)
        return both.reshape(count, 2 * height, 2 * width, channels).permute(0, 3, 1, 2)


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


def _widths(size_px: int, width: int) -> list[int]:
    """Return the number of channels of each stage, from 4×4 pixels to the image size."""
    assert size_px in SIZES_PX
    sides = [SMALLEST_PX << number for number in range((size_px // SMALLEST_PX).bit_length())]
    return [max(1, width * FULL_WIDTH_UP_TO_PX // max(side, FULL_WIDTH_UP_TO_PX)) for side in sides]


def _blocks(channels: int, count: int, group_size: int, convolution: type[nn.Conv2d]) -> list[nn.Module]:
    return [Block(channels, math.gcd(group_size, channels * EXPANSION), convolution) for _ in range(count)]


def _project(before: int, after: int) -> list[nn.Module]:
    return [] if before == after else [Pointwise(before, after, bias=False)]
