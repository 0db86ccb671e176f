"""pix2pix's U-Net: downsampling to one pixel and back, with skip connections at every level.

Isola et al., Image-to-Image Translation with Conditional Adversarial Networks (2017), with its layer numbering,
so that the weights of pix2pix and DeepLIIF can be loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.models.layers import Norm, in_full_precision, initialise, normalisation

MIN_LEVELS = 5  # minimum number of downsamplings by 2; the first four add channels
WIDEST = 8  # maximum number of channels, as a multiple of the first level's channels


class Level(nn.Module):
    """Downsamples by 2, runs the levels below and upsamples by 2; returns its input concatenated with the result."""

    def __init__(
        self, outer: int, inner: int, below: nn.Module | None, norm: Norm, dropout: float, in_channels: int = 0
    ) -> None:
        super().__init__()
        self.outermost = in_channels > 0
        bias = norm != "batch"
        down: list[nn.Module] = [] if self.outermost else [nn.LeakyReLU(0.2)]
        down.append(nn.Conv2d(in_channels or outer, inner, 4, stride=2, padding=1, bias=bias))
        # The features of the outermost level and the single pixel at the bottom are not normalised.
        down += [] if self.outermost or below is None else [normalisation(inner, norm)]
        width = inner if below is None else 2 * inner  # the level below also returns its input
        up: list[nn.Module] = [nn.ReLU(inplace=True)]
        up.append(nn.ConvTranspose2d(width, outer, 4, stride=2, padding=1, bias=self.outermost or bias))
        up += [] if self.outermost else [normalisation(outer, norm)]
        up += [nn.Dropout(dropout)] if dropout else []
        self.model = nn.Sequential(*down, *([] if below is None else [below]), *up)

    def forward(self, features: Tensor) -> Tensor:
        result: Tensor = self.model(features)
        return result if self.outermost else torch.cat([features, result], 1)


class UnetGenerator(nn.Module):
    """Maps images to images of the same size, with values in [-1, 1]; sides must be multiples of 2 ** `num_levels`."""

    def __init__(
        self,
        in_channels: int = 3,
        out_channels: int = 3,
        ngf: int = 64,
        num_levels: int = 8,
        norm: Norm = "batch",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        assert num_levels >= MIN_LEVELS, num_levels
        wide = WIDEST * ngf
        level = Level(wide, wide, None, norm, dropout=0.0)
        for _ in range(num_levels - MIN_LEVELS):
            level = Level(wide, wide, level, norm, dropout)
        for inner in (wide, wide // 2, wide // 4):
            level = Level(inner // 2, inner, level, norm, dropout=0.0)
        self.model = Level(out_channels, ngf, level, norm, dropout=0.0, in_channels=in_channels)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        return torch.tanh(in_full_precision(self.model(images)))
