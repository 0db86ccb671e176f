"""A recipe whose loss can wait for the device, or run out of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, DataSpec, Loss, Phase, Recipe


@dataclass(frozen=True)
class SyncingSettings:
    """What is wrong with the loss."""

    problem: Literal["none", "item", "shape", "memory"] = setting("none", "problem of the loss")
    width: int = setting(8, "features")


class Syncing(Recipe):
    """A classifier with two layers."""

    Settings = SyncingSettings
    defaults: ClassVar[dict[str, Any]] = {"data": "digits", "size": 8, "batch_size": "16", "images": 64}
    phases = (Phase("classifier", "classifier"),)

    def __init__(self, settings: SyncingSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        self.problem = settings.problem
        pixels = spec.channels * spec.height * spec.width
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(pixels, settings.width), nn.ReLU(), nn.Linear(settings.width, spec.num_classes)
        )

    def classifier_loss(self, batch: Batch) -> Loss:
        logits, label = self.classifier(batch["image"]), batch["label"]
        if self.problem == "item" and logits.mean().item() > 10:
            logits = logits / 2
        if self.problem == "shape":
            logits, label = logits[label > 4], label[label > 4]
        if self.problem == "memory" and type(logits) is torch.Tensor:  # not in the forecast
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nGPU 0 has …")
        return Loss({"cross_entropy": F.cross_entropy(logits, label)})
