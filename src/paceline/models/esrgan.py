"""The networks of ESRGAN and Real-ESRGAN: RRDBNet and the U-Net discriminator."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from paceline.images.resample import bicubic
from paceline.models.layers import in_full_precision

Output = Literal["image", "residual"]

SLOPE = 0.2  # negative slope of each leaky ReLU
RESIDUAL_SCALE = 0.2  # factor of each residual, which keeps deep stacks stable
INITIAL_SCALE = 0.1  # factor of the initial weights in dense blocks (He initialisation)
INITIAL_RESIDUAL_SCALE = 0.01  # factor of the last layer's initial weights with output="residual"
NETWORK_SCALE = 4
SCALES = (1, 2, 4)


class DenseBlock(nn.Module):
    """Five convolutions, each of which receives the outputs of all previous ones."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, growth, 3, padding=1)
        self.conv2 = nn.Conv2d(width + growth, growth, 3, padding=1)
        self.conv3 = nn.Conv2d(width + 2 * growth, growth, 3, padding=1)
        self.conv4 = nn.Conv2d(width + 3 * growth, growth, 3, padding=1)
        self.conv5 = nn.Conv2d(width + 4 * growth, width, 3, padding=1)
        for convolution in (self.conv1, self.conv2, self.conv3, self.conv4, self.conv5):
            nn.init.kaiming_normal_(convolution.weight)
            convolution.weight.data.mul_(INITIAL_SCALE)
            assert convolution.bias is not None
            nn.init.zeros_(convolution.bias)

    def forward(self, features: Tensor) -> Tensor:
        seen = features
        for convolution in (self.conv1, self.conv2, self.conv3, self.conv4):
            made = F.leaky_relu(convolution(seen), SLOPE)
            seen = torch.cat([seen.to(made.dtype), made], dim=1)
        out: Tensor = features + self.conv5(seen) * RESIDUAL_SCALE
        return out


class ResidualInResidual(nn.Module):
    """Three dense blocks with a shortcut around them."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.rdb1, self.rdb2, self.rdb3 = (DenseBlock(width, growth) for _ in range(3))

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = features + self.rdb3(self.rdb2(self.rdb1(features))) * RESIDUAL_SCALE
        return out


class RRDBNet(nn.Module):
    """Maps images in [-1, 1] to images that are `scale` (1, 2 or 4) times as high and wide."""

    def __init__(
        self,
        scale: int = 4,
        channels: int = 3,
        width: int = 64,
        num_blocks: int = 23,
        growth: int = 32,
        output: Output = "image",
    ) -> None:
        super().__init__()
        assert scale in SCALES, scale
        self.scale, self.shrink, self.output = scale, NETWORK_SCALE // scale, output
        self.conv_first = nn.Conv2d(channels * self.shrink**2, width, 3, padding=1)
        self.body = nn.Sequential(*(ResidualInResidual(width, growth) for _ in range(num_blocks)))
        self.conv_body = nn.Conv2d(width, width, 3, padding=1)
        self.conv_up1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv_up2 = nn.Conv2d(width, width, 3, padding=1)
        self.conv_hr = nn.Conv2d(width, width, 3, padding=1)
        self.conv_last = nn.Conv2d(width, channels, 3, padding=1)
        if output == "residual":  # makes the initial output close to the bicubic upscaling
            self.conv_last.weight.data.mul_(INITIAL_RESIDUAL_SCALE)
            assert self.conv_last.bias is not None
            nn.init.zeros_(self.conv_last.bias)

    def forward(self, low: Tensor) -> Tensor:
        seen = low * 0.5 + 0.5  # public checkpoints take and return values in 0…1
        height, width = low.shape[-2:]
        if self.shrink > 1:
            seen = F.pad(seen, (0, -width % self.shrink, 0, -height % self.shrink), mode="replicate")
            seen = F.pixel_unshuffle(seen, self.shrink)
        first = in_full_precision(self.conv_first(seen))  # the sum over many blocks needs more precision than bf16 has
        features = first + self.conv_body(self.body(first))
        for convolution in (self.conv_up1, self.conv_up2):
            features = F.leaky_relu(convolution(F.interpolate(features, scale_factor=2, mode="nearest")), SLOPE)
        result = in_full_precision(self.conv_last(F.leaky_relu(self.conv_hr(features), SLOPE))) * 2
        if self.shrink > 1:
            result = result[..., : height * self.scale, : width * self.scale]
        if self.output == "image":
            return result - 1
        return result + (low if self.scale == 1 else bicubic(low, height * self.scale, width * self.scale))


SIDES_MULTIPLE_OF = 8  # three layers halve the image


class UNetDiscriminator(nn.Module):
    """Maps images to logits of the same height and width, [n, 1, h, w]; high for real pixels.

    The sides of the images must be multiples of 8.
    """

    def __init__(self, channels: int = 3, width: int = 64) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(channels, width, 3, padding=1)
        self.conv1 = _normalised(width, 2 * width, side=4, stride=2)
        self.conv2 = _normalised(2 * width, 4 * width, side=4, stride=2)
        self.conv3 = _normalised(4 * width, 8 * width, side=4, stride=2)
        self.conv4 = _normalised(8 * width, 4 * width)
        self.conv5 = _normalised(4 * width, 2 * width)
        self.conv6 = _normalised(2 * width, width)
        self.conv7 = _normalised(width, width)
        self.conv8 = _normalised(width, width)
        self.conv9 = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        full = F.leaky_relu(self.conv0(images), SLOPE)
        half = F.leaky_relu(self.conv1(full), SLOPE)
        quarter = F.leaky_relu(self.conv2(half), SLOPE)
        eighth = F.leaky_relu(self.conv3(quarter), SLOPE)
        features = F.leaky_relu(self.conv4(_doubled(eighth)), SLOPE) + quarter
        features = F.leaky_relu(self.conv5(_doubled(features)), SLOPE) + half
        features = F.leaky_relu(self.conv6(_doubled(features)), SLOPE) + full
        features = F.leaky_relu(self.conv8(F.leaky_relu(self.conv7(features), SLOPE)), SLOPE)
        return in_full_precision(self.conv9(features))


def _normalised(narrow: int, broad: int, side: int = 3, stride: int = 1) -> nn.Module:
    convolution = nn.Conv2d(narrow, broad, side, stride=stride, padding=1, bias=False)
    normalised: nn.Module = spectral_norm(convolution)
    return normalised


def _doubled(features: Tensor) -> Tensor:
    """Upsample by 2 with bilinear interpolation, whose gradient on GPUs is not deterministic by default."""
    if features.is_cuda and torch.are_deterministic_algorithms_enabled():
        return double_repeatably(features)
    return F.interpolate(features, scale_factor=2, mode="bilinear", align_corners=False)


def double_repeatably(features: Tensor) -> Tensor:
    """Upsample by 2 with bilinear interpolation, as sums of shifted features with deterministic gradients."""
    for dim in (2, 3):
        length = features.shape[dim]
        first, last = features.narrow(dim, 0, 1), features.narrow(dim, length - 1, 1)
        before = torch.cat([first, features.narrow(dim, 0, length - 1)], dim)
        after = torch.cat([features.narrow(dim, 1, length - 1), last], dim)
        near = 0.75 * features
        features = torch.stack([near + 0.25 * before, near + 0.25 * after], dim + 1).flatten(dim, dim + 1)
    return features
