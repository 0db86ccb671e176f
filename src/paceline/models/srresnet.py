"""SRResNet, which upscales images 2, 4 or 8 times (or restores them at the same size), and SRGAN's discriminator.

Ledig et al., Photo-Realistic Single Image Super-Resolution Using a Generative Adversarial Network (2017).
The same network reaches a higher PSNR without normalisation layers and with bicubic upscaling added to a linear
output. Both changes are available as settings.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from paceline.images.resample import bicubic
from paceline.models.layers import Norm, ToFewChannels, in_full_precision, initialise_leaky, normalisation

SCALES = (1, 2, 4, 8)
PRELU_SLOPE = 0.25  # initial negative slope of each PReLU
Output = Literal["tanh", "residual"]
PReluKind = Literal["shared", "channel"]


class Block(nn.Module):
    """Two convolutions with a shortcut around them."""

    def __init__(self, width: int, norm: Norm, slopes: int = 1) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), normalisation(width, norm)
        self.act = nn.PReLU(slopes)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), normalisation(width, norm)

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = features + self.norm2(self.conv2(self.act(self.norm1(self.conv1(features)))))
        return out


class Doubling(nn.Module):
    """Upsamples features by 2."""

    def __init__(self, width: int, slopes: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, 4 * width, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)
        self.act = nn.PReLU(slopes)

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.act(self.shuffle(self.conv(features)))
        return out


class SRResNet(nn.Module):
    """Maps images in [-1, 1] to images that are `scale` times as high and wide.

    With `shared`, all blocks use the same weights, and so do all doublings. `output` is "tanh" or "residual"; with
    "residual", the output is a correction added to the bicubic upscaling. Each PReLU has one slope; with
    `prelu="channel"`, one slope per channel.
    """

    def __init__(
        self,
        scale: int = 4,
        channels: int = 3,
        width: int = 64,
        num_blocks: int = 16,
        shared: bool = False,
        norm: Norm = "batch",
        output: Output = "tanh",
        prelu: PReluKind = "shared",
    ) -> None:
        super().__init__()
        assert scale in SCALES, scale
        slopes = width if prelu == "channel" else 1
        num_doublings = scale.bit_length() - 1
        self.scale, self.output = scale, output
        self.block_uses = num_blocks if shared else 1
        self.doubling_uses = num_doublings if shared else 1
        self.head = nn.Sequential(nn.Conv2d(channels, width, 9, padding=4), nn.PReLU(slopes))
        blocks = min(1, num_blocks) if shared else num_blocks
        self.blocks = nn.Sequential(*(Block(width, norm, slopes) for _ in range(blocks)))
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), normalisation(width, norm))
        doublings = min(1, num_doublings) if shared else num_doublings
        self.doublings = nn.Sequential(*(Doubling(width, slopes) for _ in range(doublings)))
        self.tail = ToFewChannels(width, channels, 9, padding=4)
        if output == "residual":  # makes the initial output close to the bicubic upscaling
            initialise_leaky(self, PRELU_SLOPE)
            self.tail.weight.data.mul_(0.01)
            for block in (module for module in self.blocks if isinstance(module, Block) and norm == "none"):
                block.conv2.weight.data.mul_(0.1)  # makes a deep stack without normalisation start near the identity

    def forward(self, low: Tensor) -> Tensor:
        # SRGAN's network takes images in 0…1. A correction is learned faster from values around zero.
        seen = low * 0.5 + 0.5 if self.output == "tanh" else low
        first = in_full_precision(self.head(seen))  # the sum over many blocks needs more precision than bf16 has
        features = first
        for _ in range(self.block_uses):
            features = self.blocks(features)
        features = first + self.body(features)
        for _ in range(self.doubling_uses):
            features = self.doublings(features)
        result = in_full_precision(self.tail(features))
        if self.output == "tanh":
            return torch.tanh(result)
        return result + (low if self.scale == 1 else bicubic(low, *result.shape[-2:]))


class Discriminator(nn.Module):
    """Maps images of any size to one logit each, high for real images; features are averaged over the image."""

    def __init__(self, channels: int = 3, width: int = 64, norm: Norm = "batch") -> None:
        super().__init__()
        widths = [width * 2 ** (number // 2) for number in range(8)]  # by default 64, 64, 128, 128, …, 512
        layers: list[nn.Module] = []
        for number, (narrow, broad) in enumerate(pairwise([channels, *widths])):
            layers.append(nn.Conv2d(narrow, broad, 3, stride=1 + number % 2, padding=1))
            layers += [normalisation(broad, norm)] if number else []
            layers.append(nn.LeakyReLU(0.2, inplace=True))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(widths[-1], 2 * widths[-1]), nn.LeakyReLU(0.2, inplace=True), nn.Linear(2 * widths[-1], 1)
        )

    def forward(self, images: Tensor) -> Tensor:
        return in_full_precision(self.classifier(self.features(images).mean((2, 3))).flatten())
