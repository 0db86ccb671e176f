"""PatchGAN: a discriminator with one logit per overlapping patch, high for real patches.

Isola et al., Image-to-Image Translation with Conditional Adversarial Networks (2017). Layers are numbered as in
pix2pix, so that its weights can be loaded. The discriminator is conditional: it sees each image concatenated with the
generator's input.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.models.layers import Norm, in_full_precision, initialise, normalisation

WIDEST = 8  # maximum number of channels, as a multiple of the first layer's channels


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
