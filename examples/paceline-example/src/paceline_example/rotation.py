"""Rotation: a network learns to predict by which multiple of 90° an image was rotated; no labels are needed.

This is the self-supervised method from "Unsupervised Representation Learning by Predicting Image Rotations" (Gidaris et
al.).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Batch, DataSpec, Draw, Evaluation, Loss, Phase, Recipe, UserError, setting

NUM_ROTATIONS = 4


@dataclass(frozen=True)
class RotationSettings:
    """The settings of the network."""

    width: int = setting(32, "output channels of the first convolution", at_least=1)


class Rotation(Recipe):
    """A recipe with one network, one phase and a cross-entropy loss over four rotations."""

    Settings = RotationSettings
    evaluation = Evaluation("accuracy", best="validation/top1")
    defaults: ClassVar[dict[str, Any]] = {"epochs": 10, "batch_size": "64", "lr": 2e-3, "schedule": "cosine"}
    small: ClassVar[dict[str, Any]] = {"width": 4, "batch_size": "16"}
    phases = (Phase("classifier", network="classifier"),)
    draws = {"rotation": Draw((), "uniform")}  # the engine adds these random numbers to each batch
    ema = ("classifier",)

    def __init__(self, settings: RotationSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        if spec.height != spec.width:
            raise UserError(f"rotation needs square images, not {spec.height}×{spec.width}: use --crop N to crop them")
        width, places = settings.width, math.ceil(spec.height / 8) ** 2
        self.classifier = nn.Sequential(
            nn.Conv2d(spec.channels, width, 3, stride=2, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * width * places, NUM_ROTATIONS),
        )

    def classifier_loss(self, batch: Batch) -> Loss:
        """Return the cross-entropy between the logits and the rotation."""
        images, quarters = rotate(batch)
        return Loss({"cross_entropy": F.cross_entropy(self.classifier(images), quarters)})

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return a logit per rotation, and the true rotation as the label."""
        images, quarters = rotate(batch)
        return {"logits": self.classifier(images), "label": quarters}


def rotate(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the rotated images and how many quarter turns each was rotated by."""
    quarters = (batch["rotation"] * NUM_ROTATIONS).long()
    rotated = torch.stack([batch["image"].rot90(number, (2, 3)) for number in range(NUM_ROTATIONS)])
    return rotated[quarters, torch.arange(len(quarters), device=quarters.device)], quarters
