"""DCGAN's generator and discriminator, for images of 32×32 or 64×64 pixels.

Radford et al., Unsupervised Representation Learning with Deep Convolutional Generative Adversarial
Networks (2015), with the module names from PyTorch's example. The smallest feature map has sides of
`smallest_px` pixels: 4 in the paper. Some projects for 32×32 images use 2, which adds a layer.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from paceline.models.layers import FromOnePixel, ToOnePixel, in_full_precision, initialise

SIZES_PX = (32, 64)
Activation = Literal["relu", "mish"]
Norm = Literal["batch", "none"]


class Generator(nn.Module):
    """Maps latents [n, nz] to images in [-1, 1]."""

    def __init__(
        self,
        size_px: int,
        channels: int,
        nz: int = 100,
        ngf: int = 64,
        smallest_px: int = 4,
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        widths = _widths(size_px, smallest_px, ngf)[::-1]
        layers: list[nn.Module] = [FromOnePixel(nz, widths[0], smallest_px, bias=False)]
        for wide, narrow in zip(widths, [*widths[1:], channels], strict=True):
            layers += [nn.BatchNorm2d(wide), nn.ReLU(inplace=True) if activation == "relu" else nn.Mish()]
            layers.append(nn.ConvTranspose2d(wide, narrow, 4, stride=2, padding=1, bias=False))
        self.main = nn.Sequential(*layers)
        initialise(self)

    def forward(self, noise: Tensor) -> Tensor:
        # In full precision: tanh in half precision would round pixels more coarsely than 8-bit images do.
        return torch.tanh(in_full_precision(self.main(noise[:, :, None, None])))


class Discriminator(nn.Module):
    """Maps each image to one logit, high for real images."""

    def __init__(
        self,
        size_px: int,
        channels: int,
        ndf: int = 64,
        smallest_px: int = 4,
        norm: Norm = "batch",
        spectral: bool = False,
    ) -> None:
        super().__init__()
        widths = _widths(size_px, smallest_px, ndf)
        layers: list[nn.Module] = []
        for number, (narrow, wide) in enumerate(pairwise([channels, *widths])):
            layers.append(nn.Conv2d(narrow, wide, 4, stride=2, padding=1, bias=norm == "none"))
            if norm == "batch" and number > 0:
                layers.append(nn.BatchNorm2d(wide))
            layers.append(nn.LeakyReLU(0.2, inplace=True))
        layers.append(ToOnePixel(widths[-1], 1, smallest_px, bias=norm == "none"))
        self.main = nn.Sequential(*layers)
        initialise(self)
        if spectral:
            for layer in layers:
                if isinstance(layer, nn.Conv2d):
                    # In training, each forward pass updates the norm estimate from the weights only, so replicas agree.
                    spectral_norm(layer)

    def forward(self, images: Tensor) -> Tensor:
        return in_full_precision(self.main(images).flatten())


def _widths(size_px: int, smallest_px: int, base: int) -> list[int]:
    """Return the number of channels after each downsampling by 2."""
    assert size_px in SIZES_PX
    return [base * 2**number for number in range((size_px // smallest_px).bit_length() - 1)]
