"""Shared parts of convolutional networks: normalisation, padding, initial weights, full-precision outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.gpu import run_concurrently

Norm = Literal["batch", "instance", "none"]


def normalisation(channels: int, norm: Norm) -> nn.Module:
    """Return a normalisation layer; "none" returns an Identity, so that the layers after it keep their indices."""
    match norm:
        case "batch":
            return nn.BatchNorm2d(channels)
        case "instance":
            return nn.InstanceNorm2d(channels)
    return nn.Identity()


class NormByImage(nn.Module):
    """Mixin for a BatchNorm that, in eval mode, normalises each image using that image's own statistics."""

    weight: Tensor
    bias: Tensor
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            trained: Tensor = super().forward(input)
            return trained
        return F.instance_norm(input, weight=self.weight, bias=self.bias, eps=self.eps)


class BatchNormByImage(NormByImage, nn.BatchNorm2d):  # type: ignore[misc]
    """BatchNorm in training; in evaluation, each image is normalised using its own statistics."""


def normalise_by_image(network: nn.Module) -> None:
    """Make each BatchNorm in a network normalise each image using its own statistics when in eval mode."""
    for module in network.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = BatchNormByImage


class ReflectionPad(nn.ReflectionPad2d):
    """Reflection padding whose gradient is deterministic, even on GPUs, if deterministic algorithms are enabled."""

    def forward(self, input: Tensor) -> Tensor:
        deterministic = input.is_cuda and torch.are_deterministic_algorithms_enabled()
        return self.repeatable(input) if deterministic else super().forward(input)

    def repeatable(self, images: Tensor) -> Tensor:
        """Pad images by concatenation, so that the gradients are deterministic."""
        pad = self.padding[0]
        for dim in (-1, -2):
            last = images.shape[dim] - pad - 1
            before, after = images.narrow(dim, 1, pad).flip(dim), images.narrow(dim, last, pad).flip(dim)
            images = torch.cat([before, images, after], dim)
        return images


class FromOnePixel(nn.ConvTranspose2d):
    """A transposed convolution of a single pixel, computed as a matrix product with channels last."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        bias = None if self.bias is None else self.bias.repeat(math.prod(self.kernel_size))
        rows = F.linear(input.flatten(1), _channels_last(self.weight).t(), bias)
        return torch.unflatten(rows, 1, (*self.kernel_size, self.out_channels)).permute(0, 3, 1, 2)


class ToOnePixel(nn.Conv2d):
    """A convolution whose kernel covers the whole image, computed as a matrix product with channels last."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(_channels_last(input), _channels_last(self.weight), self.bias)[:, :, None, None]


class ToFewChannels(nn.Conv2d):
    """A convolution with a large kernel to a few channels, with stride 1.

    Libraries compute such convolutions slowly, since they divide the work by output channels. Here, each row of the
    kernel has output channels of its own, which are shifted and added: the same sum, several times as fast.
    """

    def forward(self, input: Tensor) -> Tensor:
        (height, _), (above, beside) = self.kernel_size, (int(pad) for pad in self.padding)
        if not torch.compiler.is_compiling() and input.shape[-2] < height:  # too few rows to be shifted
            return in_full_precision(super().forward(input))
        rows = self.weight.permute(2, 0, 1, 3).flatten(0, 1).unsqueeze(2)
        parts = F.conv2d(input, rows, padding=(0, beside)).unflatten(1, (height, self.out_channels)).unbind(1)
        total = parts[0].new_zeros(()) if self.bias is None else self.bias[:, None, None]
        total = in_full_precision(total)  # half precision would round each sum
        for row, part in enumerate(parts):
            total = total + F.pad(part, (0, 0, above - row, above - (height - 1 - row)))
        return total


def _channels_last(batch: Tensor) -> Tensor:
    """Flatten each sample to a row, channels last; no copy if the memory format is already channels_last."""
    return batch.permute(0, 2, 3, 1).flatten(1)


def in_full_precision(values: Tensor) -> Tensor:
    """Convert half-precision values to float32; half precision rounds pixels more coarsely than 8-bit images do."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


# The class name that restoration networks use for this layer. Their own versions compute it, and its gradient, in a
# dozen elementwise operations of a custom autograd function, which torch.compile cannot fuse.
REPLACED_CLASS = "LayerNorm2d"


class ChannelNorm(nn.Module):
    """Normalises each pixel of images [n, c, h, w] across its channels."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = weight, bias, eps

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.permute(0, 2, 3, 1)  # already contiguous in memory format channels_last
        return F.layer_norm(pixels, self.weight.shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


def fuse_channel_norms(network: nn.Module) -> nn.Module:
    """Replace a network's LayerNorm2d modules with ChannelNorm, with the same parameters; return the network."""
    for name, module in list(network.named_modules()):
        if type(module).__name__ == REPLACED_CLASS and not isinstance(module, nn.LayerNorm):
            fused = ChannelNorm(module.get_parameter("weight"), module.get_parameter("bias"), float(module.eps))
            network.set_submodule(name, fused)
    return network


def initialise(network: nn.Module) -> None:
    """Initialise a network with small random weights, as DCGAN and pix2pix do."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(module.weight, 0.0, 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.02)
            nn.init.zeros_(module.bias)


def initialise_leaky(network: nn.Module, slope: float) -> None:
    """Initialise weights to preserve the variance of activations through leaky ReLUs (He et al. 2015)."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.kaiming_normal_(module.weight, a=slope)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def apply_concurrently(networks: Sequence[Callable[[Tensor], Tensor]], images: Tensor) -> list[Tensor]:
    """Return each network's output for the same images, computed concurrently on a GPU."""
    return run_concurrently([partial(network, images) for network in networks], images.device)
