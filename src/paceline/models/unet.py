"""A U-Net that restores images: it works at several resolutions and adds a correction to its input.

Images can have any height and width: they are padded by replicating their borders, and the results are cropped.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.layers import in_full_precision, initialise_leaky

SLOPE = 0.2  # negative slope of the leaky ReLUs


class UNet(nn.Module):
    """Maps images to images of the same size, with `depth` downsamplings by 2; each doubles the number of channels."""

    def __init__(self, channels: int = 3, width: int = 48, depth: int = 3) -> None:
        super().__init__()
        widths = [width * 2**number for number in range(depth + 1)]
        self.multiple = 2**depth
        self.head = nn.Conv2d(channels, width, 3, padding=1)
        self.encoders = nn.ModuleList(_convolutions(broad, broad) for broad in widths[:-1])
        self.downs = nn.ModuleList(nn.Conv2d(narrow, broad, 2, stride=2) for narrow, broad in pairwise(widths))
        self.bottom = _convolutions(widths[-1], widths[-1])
        self.ups = nn.ModuleList(
            nn.ConvTranspose2d(broad, narrow, 2, stride=2) for narrow, broad in list(pairwise(widths))[::-1]
        )
        self.decoders = nn.ModuleList(_convolutions(2 * narrow, narrow) for narrow in widths[-2::-1])
        self.tail = nn.Conv2d(width, channels, 3, padding=1)
        initialise_leaky(self, SLOPE)
        self.tail.weight.data.mul_(0.01)  # makes the initial network close to the identity

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        padding = (0, -width % self.multiple, 0, -height % self.multiple)
        features = self.head(F.pad(images, padding, mode="replicate") if any(padding) else images)
        kept = []
        for encoder, down in zip(self.encoders, self.downs, strict=True):
            kept.append(encoder(features))
            features = down(kept[-1])
        features = self.bottom(features)
        for up, decoder in zip(self.ups, self.decoders, strict=True):
            features = decoder(torch.cat([up(features), kept.pop()], dim=1))
        return images + in_full_precision(self.tail(features))[..., :height, :width]


def _convolutions(narrow: int, broad: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(narrow, broad, 3, padding=1),
        nn.LeakyReLU(SLOPE),
        nn.Conv2d(broad, broad, 3, padding=1),
        nn.LeakyReLU(SLOPE),
    )
