"""A test recipe whose blocks have tied weights: with each other, and with a layer outside of them."""

from __future__ import annotations

from typing import Any, ClassVar

from plain_classifier import PlainClassifier
from torch import Tensor, nn

from paceline.contracts.recipe import DataSpec, NoSettings


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Tied(PlainClassifier):
    """A classifier: the first two blocks share a weight, and the third shares one with the last layer but one."""

    defaults: ClassVar[dict[str, Any]] = {"data": "digits", "size": 8, "batch_size": "12", "images": 36, "lr": 0.1}

    def __init__(self, settings: NoSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        pixels, blocks, last = spec.channels * spec.height * spec.width, [Block() for _ in range(4)], nn.Linear(6, 6)
        blocks[1].layers[0].weight = blocks[0].layers[0].weight
        last.weight = blocks[2].layers[0].weight
        head = nn.Sequential(last, nn.ReLU(), nn.Linear(6, spec.num_classes))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(pixels, 6), nn.Sequential(*blocks), head)
