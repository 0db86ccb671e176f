"""Scales images to the values that a network from another library expects."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class InputScaling(nn.Module):
    """Maps images in [-1, 1] to (v - mean) / std, where v is in [0, 1] and mean and std are given per channel.

    If the number of channels differs, the averages of mean and std are used for every channel.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], channels: int) -> None:
        super().__init__()
        if not len(mean) == len(std) == channels:
            mean, std = [sum(mean) / len(mean)] * channels, [sum(std) / len(std)] * channels
        means, deviations = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (mean, std))
        # Not stored with the weights, because the name of the network determines both.
        self.register_buffer("scale", (0.5 / deviations).float(), persistent=False)
        self.register_buffer("shift", ((0.5 - means) / deviations).float(), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scaled images."""
        return images * self.scale + self.shift
