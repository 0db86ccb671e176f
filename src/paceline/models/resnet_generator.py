"""An image-to-image generator: downsampling by 4, residual blocks, upsampling by 4.

Johnson et al., Perceptual Losses for Real-Time Style Transfer and Super-Resolution (2016), in the variant that
pix2pix, CycleGAN and DeepLIIF use, with their layer numbering, so that their weights can be loaded.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from paceline.models.layers import Norm, ReflectionPad, ToFewChannels, in_full_precision, initialise, normalisation

Padding = Literal["reflect", "zero"]
MULTIPLE_PX = 4  # image sides must be multiples of this


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut around them."""

    def __init__(self, channels: int, norm: Norm, dropout: float, padding: Padding) -> None:
        super().__init__()

        def convolution() -> list[nn.Module]:
            inside = 1 if padding == "zero" else 0
            before: list[nn.Module] = [] if padding == "zero" else [ReflectionPad(1)]
            convolution = nn.Conv2d(channels, channels, 3, padding=inside, bias=norm != "batch")
            return [*before, convolution, normalisation(channels, norm)]

        between = [nn.ReLU(inplace=True), *([nn.Dropout(dropout)] if dropout else [])]
        self.conv_block = nn.Sequential(*convolution(), *between, *convolution())

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = features + self.conv_block(features)
        return out


class ResnetGenerator(nn.Module):
    """Maps images to images of the same size, with values in [-1, 1]; sides must be multiples of 4."""

    def __init__(
        self,
        in_channels: int = 3,
        out_channels: int = 3,
        ngf: int = 64,
        num_blocks: int = 9,
        norm: Norm = "batch",
        dropout: float = 0.0,
        padding: Padding = "reflect",
    ) -> None:
        super().__init__()
        bias = norm != "batch"
        layers: list[nn.Module] = [ReflectionPad(3), nn.Conv2d(in_channels, ngf, 7, bias=bias)]
        layers += [normalisation(ngf, norm), nn.ReLU(inplace=True)]
        for width in (ngf, 2 * ngf):
            layers.append(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=bias))
            layers += [normalisation(2 * width, norm), nn.ReLU(inplace=True)]
        layers += [ResidualBlock(4 * ngf, norm, dropout, padding) for _ in range(num_blocks)]
        for width in (4 * ngf, 2 * ngf):
            layers.append(
                nn.ConvTranspose2d(width, width // 2, 3, stride=2, padding=1, output_padding=1, bias=bias),
            )
            layers += [normalisation(width // 2, norm), nn.ReLU(inplace=True)]
        layers += [ReflectionPad(3), ToFewChannels(ngf, out_channels, 7)]
        self.model = nn.Sequential(*layers)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        return torch.tanh(in_full_precision(self.model(images)))
