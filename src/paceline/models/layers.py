"""What convolutional networks have in common: normalisation, padding, first weights, wide results."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Literal["batch", "instance", "none"]


def normalisation(channels: int, norm: Norm) -> nn.Module:
    """A layer that normalises; where there is none, one that does nothing keeps the numbers of the others."""
    match norm:
        case "batch":
            return nn.BatchNorm2d(channels)
        case "instance":
            return nn.InstanceNorm2d(channels)
    return nn.Identity()


class ReflectionPad(nn.ReflectionPad2d):
    """Mirrors the borders outward; on GPUs too in a way that repeats to the bit, where that is asked for."""

    def forward(self, input: Tensor) -> Tensor:
        asked = input.is_cuda and torch.are_deterministic_algorithms_enabled()
        return self.repeatable(input) if asked else super().forward(input)

    def repeatable(self, pictures: Tensor) -> Tensor:
        """The same from copies, whose gradients are added in a fixed order."""
        pad = self.padding[0]
        for dim in (-1, -2):
            last = pictures.shape[dim] - pad - 1
            before, after = pictures.narrow(dim, 1, pad).flip(dim), pictures.narrow(dim, last, pad).flip(dim)
            pictures = torch.cat([before, pictures, after], dim)
        return pictures


class FromOnePixel(nn.ConvTranspose2d):
    """A transposed convolution of a single pixel, computed as the matrix product that it is, channels last."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        bias = None if self.bias is None else self.bias.repeat(math.prod(self.kernel_size))
        rows = F.linear(input.flatten(1), _channels_last(self.weight).t(), bias)
        return rows.unflatten(1, (*self.kernel_size, self.out_channels)).permute(0, 3, 1, 2)


class ToOnePixel(nn.Conv2d):
    """A convolution whose window is all of the picture, computed as the matrix product that it is, channels last."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(_channels_last(input), _channels_last(self.weight), self.bias)[:, :, None, None]


def _channels_last(batch: Tensor) -> Tensor:
    """A row for each sample; no copy where its memory has the channels last already."""
    return batch.permute(0, 2, 3, 1).flatten(1)


def in_full_precision(values: Tensor) -> Tensor:
    """Values of half precision as float32: pixels would lose more to rounding there than to eight bits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def initialise(network: nn.Module) -> None:
    """Small random weights, as DCGAN and pix2pix start with."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(module.weight, 0.0, 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.02)
            nn.init.zeros_(module.bias)


def initialise_leaky(network: nn.Module, slope: float) -> None:
    """Weights with which leaky rectifiers of this slope keep the size of what passes (He et al. 2015)."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.kaiming_normal_(module.weight, a=slope)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
