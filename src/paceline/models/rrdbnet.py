"""RRDBNet, the generator of ESRGAN and Real-ESRGAN: residual-in-residual dense blocks without normalisation.

Wang et al., ESRGAN: Enhanced Super-Resolution Generative Adversarial Networks (2018). Parameters have the names of the
public checkpoints, so that their tensors can be loaded unchanged. For ×2, the image is first rearranged to half its
size with four times the channels, and the network upscales it by 4, as in Real-ESRGAN.

The network of the papers has no connection from its input to its output, so it must learn to copy the image. With
`output="residual"`, the output is added to the bicubically upscaled image instead, for short training runs.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
