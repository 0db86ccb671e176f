"""The U-Net discriminator of Real-ESRGAN, with one logit per pixel and spectral normalisation.

Wang et al., Real-ESRGAN (2021). Layers have the names of the public checkpoints. Spectral normalisation divides a
weight by its largest singular value. It estimates that value with one step of power iteration per forward pass in
training mode; the iteration's vectors are buffers, so they are part of checkpoints. They depend on the weights alone,
so all processes compute the same vectors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from paceline.models.layers import in_full_precision

SLOPE = 0.2
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
