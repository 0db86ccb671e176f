"""A recipe with a fault in one rank: it is slow, hangs, stops, fails, ends early, or skips a collective operation."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, DataSpec, Evaluation, Loss, Phase, Recipe
from paceline.core.errors import UserError

WORK_SECONDS = 0.04  # the own work of a healthy rank in a step
ALL = -2  # as `faulty_rank`
SLOW_SECONDS = 0.12  # far above what other programs on the machine delay a healthy rank by


@dataclass(frozen=True)
class FaultySettings:
    """Which rank has which fault, and when."""

    fault: Literal["none", "slow", "stop", "skip", "kill", "exit", "unused", "hang", "error"] = setting(
        "none", "the fault"
    )
    faulty_rank: int = setting(1, "the rank that has the fault; -2 for all ranks")
    slow_rank: int = setting(-1, "a rank that takes much longer in every step")
    at: int = setting(20, "the call at which the rank stops or skips")


class Scale(nn.Module):
    """Multiplies by a trained factor, unless it is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.is_used = nn.Parameter(torch.ones(())), True

    def forward(self, logits: Tensor) -> Tensor:
        return logits * self.factor if self.is_used else logits


class Faulty(Recipe):
    """A classifier with two BatchNorms, whose statistics the ranks exchange."""

    Settings = FaultySettings
    evaluation = Evaluation("accuracy")
    defaults: ClassVar[dict[str, Any]] = {
        "data": "digits",
        "size": 8,
        "batch_size": "16",
        "images": 1600,
        "optimizer": "sgd",
        "lr": 0.05,
        "log_every": "6 steps",
        "evaluate_every": "1000 steps",
        "save_every": "1000 steps",
    }
    phases = (Phase("classifier", "classifier"),)

    def __init__(self, settings: FaultySettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        self.settings, self.calls = settings, 0
        self.rank = int(os.environ.get("RANK", 0))
        if settings.fault == "hang" and settings.faulty_rank in (self.rank, ALL):
            time.sleep(3600)  # before the ranks compare their networks
        self.classifier = nn.Sequential(
            *(nn.Conv2d(spec.channels, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(4 * (spec.height // 2) * (spec.width // 2), spec.num_classes)),
            Scale(),
        )

    def classifier_loss(self, batch: Batch) -> Loss:
        self.calls += 1
        chosen, is_due = self.settings, self.calls == self.settings.at
        is_faulty = chosen.faulty_rank in (self.rank, ALL)
        is_slower = is_faulty and chosen.fault == "slow"
        is_slow = self.rank == chosen.slow_rank
        time.sleep(SLOW_SECONDS if is_slow else WORK_SECONDS * (1.3 if is_slower else 1))
        if is_faulty and is_due and chosen.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if is_faulty and is_due and chosen.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if is_faulty and is_due and chosen.fault == "exit":
            sys.exit(0)
        if is_due and chosen.fault == "error":
            if is_faulty:
                raise UserError("a sample is damaged")
            time.sleep(3600)  # until the launcher ends this rank
        if is_faulty and is_due and chosen.fault == "skip":
            self.classifier[1].eval()  # uses the running statistics, without an exchange
        if is_faulty and is_due and chosen.fault == "unused":
            self.classifier[-1].is_used = False
        loss = F.cross_entropy(self.classifier(batch["image"]), batch["label"])
        self.classifier.train()
        self.classifier[-1].is_used = True
        return Loss({"cross_entropy": loss})

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        return {"logits": self.classifier(batch["image"])}
