"""A small, fast recipe for tests, with settings that simulate failures and delays."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, DataSpec, Evaluation, Loss, Phase, Recipe


@dataclass(frozen=True)
class TinySettings:
    """Settings that change the network or simulate failures and delays."""

    width: int = setting(4, "channels")
    norm: Literal["batch", "none"] = setting("batch", "normalisation")
    dropout: float = setting(0.0, "chance that a feature is dropped")
    unused: bool = setting(False, "a layer that no loss uses")
    record: str = setting("", "folder where every loss notes the samples that it saw")
    pause: float = setting(0.0, "seconds that every loss takes longer")
    evaluation_pause: float = setting(0.0, "seconds that every prediction takes longer")
    holds: str = setting("", "folder; losses, predictions and saves wait for its files (see holds.py)")
    slow_sync: float = setting(0.0, "seconds that every fsync takes longer")
    not_finite_at: int = setting(-1, "the call whose loss is not a number")
    huge_at: int = setting(-1, "the call whose loss is finite but huge")
    bad_gradient_at: int = setting(-1, "the call whose loss is a number and its gradient is not")


class Tiny(Recipe):
    """A classifier with one convolution and one linear layer."""

    Settings = TinySettings
    evaluation = Evaluation("accuracy", best="validation/top1")
    defaults: ClassVar[dict[str, Any]] = {
        "data": "digits",
        "size": 8,
        "batch_size": "16",
        "images": 480,
        "optimizer": "sgd",
        "lr": 0.05,
        "schedule": "cosine",
        "pad_crop": 1,
        "log_every": "3 steps",
        "evaluate_every": "8 steps",
        "save_every": "5 steps",
    }
    small: ClassVar[dict[str, Any]] = {"batch_size": "16"}
    phases = (Phase("classifier", "classifier"),)
    ema = ("classifier",)

    def __init__(self, settings: TinySettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        self.settings, self.calls, self.predictions = settings, 0, 0
        self.seen: list[tuple[str, Batch]] = []  # batches passed to `predict`, recorded for tests
        self.watched = False
        width = settings.width
        self.classifier = nn.Sequential(
            nn.Conv2d(spec.channels, width, 3, stride=2, padding=1),
            nn.BatchNorm2d(width) if settings.norm == "batch" else nn.Identity(),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(settings.dropout),
            nn.Linear(width * (spec.height // 2) * (spec.width // 2), spec.num_classes),
        )
        if settings.unused:
            self.classifier.spare = nn.Linear(2, 2)  # type: ignore[assignment]
            self.classifier.forward = lambda x: nn.Sequential(*list(self.classifier)[:-1])(x)  # type: ignore[method-assign]
        if settings.slow_sync or settings.holds:
            _slow_down_sync(settings.slow_sync, settings.holds)

    def classifier_loss(self, batch: Batch) -> Loss:
        self.calls += 1
        if self.settings.pause:
            time.sleep(self.settings.pause)
        wait_while_held(self.settings.holds, "loss", self.calls)
        if self.settings.record:
            _note(Path(self.settings.record), batch["index"].tolist())
        loss = F.cross_entropy(self.classifier(batch["image"]), batch["label"])
        if self.calls - 1 == self.settings.not_finite_at:
            loss = loss * float("nan")
        if self.calls - 1 == self.settings.huge_at:
            loss = loss + 1e12
        if self.calls - 1 == self.settings.bad_gradient_at:
            weight = self.classifier[0].weight
            loss = loss + (weight - weight.detach()).abs().sum().sqrt()  # adds zero with an infinite gradient
        return Loss({"cross_entropy": loss})

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        if self.watched:
            self.seen.append(("predict", dict(batch)))
        if self.settings.evaluation_pause:
            time.sleep(self.settings.evaluation_pause)
        self.predictions += 1
        wait_while_held(self.settings.holds, "prediction", self.predictions)
        return {"logits": self.classifier(batch["image"])}


def _note(folder: Path, samples: list[int]) -> None:
    """Append one line in a single write, so that a killed process never leaves a partial line."""
    folder.mkdir(exist_ok=True)
    name = f"rank-{os.environ.get('RANK', '0')}-of-{os.environ.get('WORLD_SIZE', '1')}"
    with open(folder / name, "ab", buffering=0) as file:
        file.write(" ".join(map(str, samples)).encode() + b"\n")


def wait_while_held(folder: str, kind: str, number: int) -> None:
    """Wait while `folder` has a file named `kind`, unless its text is a number that is not below `number`."""
    while folder and number > _num_allowed(Path(folder, kind)):
        Path(folder, f"{kind}-waits-{os.environ.get('RANK', '0')}").touch()
        time.sleep(0.01)


def _num_allowed(file: Path) -> float:
    try:
        return int(file.read_text() or 0)
    except FileNotFoundError:
        return math.inf


def _slow_down_sync(seconds: float, holds: str) -> None:
    """Slow down os.fsync, so that tests can interrupt a save; a save also waits while it is held."""
    sync = os.fsync

    def slow(file: Any) -> None:
        time.sleep(seconds)
        descriptor = file if isinstance(file, int) else file.fileno()
        if "/.writing-" in os.readlink(f"/proc/self/fd/{descriptor}"):
            wait_while_held(holds, "save", 1)
        sync(file)

    if sync.__name__ != "slow":
        os.fsync = slow
