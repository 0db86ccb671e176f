"""The networks of pix2pix: two image-to-image generators and the PatchGAN discriminator."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from paceline.models.layers import Norm, ReflectionPad, ToFewChannels, in_full_precision, initialise, normalisation

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


class PatchDiscriminator(nn.Module):
    """Maps images and their conditions to logits [n, 1, h, w]."""

    def __init__(self, in_channels: int = 6, ndf: int = 64, num_layers: int = 3, norm: Norm = "batch") -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(in_channels, ndf, 4, stride=2, padding=1), nn.LeakyReLU(0.2, inplace=True)]
        width = ndf
        for number in range(1, num_layers + 1):
            wider = ndf * min(2**number, WIDEST)
            stride = 2 if number < num_layers else 1
            layers.append(nn.Conv2d(width, wider, 4, stride=stride, padding=1, bias=norm != "batch"))
            layers += [normalisation(wider, norm), nn.LeakyReLU(0.2, inplace=True)]
            width = wider
        layers.append(nn.Conv2d(width, 1, 4, padding=1))
        self.model = nn.Sequential(*layers)
        initialise(self)

    def forward(self, condition: Tensor, images: Tensor) -> Tensor:
        return in_full_precision(self.model(torch.cat([condition, images], 1)))


def smallest_side_px(num_layers: int) -> int:
    """Return the smallest image side, in pixels, that yields at least one logit."""
    return 3 << num_layers  # the last two layers each shrink the feature map by one pixel
