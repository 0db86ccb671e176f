"""A test recipe whose networks use a convolution and a BatchNorm under several names."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.nn.functional as F
from plain_classifier import PlainClassifier
from torch import Tensor, nn

from paceline.contracts.recipe import DataSpec, NoSettings


class Block(nn.Module):
    """A block that applies its convolution and its BatchNorm twice, each under two names."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1 = self.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn1 = self.bn2 = norm

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class SharedModules(PlainClassifier):
    """A classifier with two blocks, which share a BatchNorm; the first block is used twice."""

    defaults: ClassVar[dict[str, Any]] = {"data": "digits", "size": 8, "batch_size": "12", "images": 36, "lr": 0.05}

    def __init__(self, settings: NoSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        norm = nn.BatchNorm2d(4)
        first, second = Block(norm), Block(norm)
        start = nn.Conv2d(spec.channels, 4, 3, bias=False)
        end = (nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, spec.num_classes))
        self.classifier = nn.Sequential(start, first, second, first, *end)
