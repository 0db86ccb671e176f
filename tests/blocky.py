"""A test recipe whose network has repeated blocks with BatchNorm, dropout and spectral normalisation."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from plain_classifier import PlainClassifier
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from paceline.contracts.recipe import DataSpec, Evaluation, NoSettings

WIDTH = 5  # not a multiple of the number of processes, so that their parts differ in size


class Block(nn.Module):
    """A residual block whose forward pass draws random numbers and changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm2d(WIDTH), nn.Dropout(0.2)
        self.conv = spectral_norm(nn.Conv2d(WIDTH, WIDTH, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.relu(self.conv(self.norm(x))))


class Blocky(PlainClassifier):
    """A classifier with four blocks."""

    evaluation = Evaluation("accuracy", best="validation/top1")
    defaults: ClassVar[dict[str, Any]] = {
        "data": "digits",
        "size": 8,
        "batch_size": "12",
        "images": 240,
        "optimizer": "adam",
        "lr": 0.01,
        "clip": 1,
        "ema_half_life": "60 images",
        "log_every": "5 steps",
        "evaluate_every": "10 steps",
        "save_every": "4 steps",
    }
    ema = ("classifier",)

    def __init__(self, settings: NoSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        body = nn.Sequential(*(Block() for _ in range(4)))
        head = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(4 * WIDTH, spec.num_classes))
        self.classifier = nn.Sequential(nn.Conv2d(spec.channels, WIDTH, 3, padding=1), body, head)
