"""A small classifier to start from: `paceline train ./my_recipe.py --data digits`.

A recipe defines networks and losses. Its code does not depend on devices, processes, precision or files, so
the same recipe runs on a CPU, on one GPU or on many, under every strategy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Batch, DataSpec, Evaluation, Loss, Phase, Recipe, UserError, setting


@dataclass(frozen=True)
class MyRecipeSettings:
    """The settings that this recipe adds; set them with `--set name=value`."""

    width: int = setting(32, "output channels of the first convolution", at_least=1)
    label_smoothing: float = setting(
        0.0, "label smoothing: fraction of the target probability spread over all classes", at_least=0, below=1
    )


class MyRecipe(Recipe):
    """One network that predicts the class of an image."""

    Settings = MyRecipeSettings

    # Run and optimizer settings whose defaults this recipe changes.
    defaults = {"epochs": 10, "batch_size": "64", "lr": 5e-3, "schedule": "cosine"}

    # The evaluator computes metrics from the output of `predict`. The checkpoint with the highest accuracy is the best.
    evaluation = Evaluation("accuracy", best="validation/top1", mode="max")

    # A training step runs the phases in order. Each phase updates one network with the loss from `<phase>_loss`.
    phases = (Phase("classifier", network="classifier"),)

    # Networks that are evaluated with the EMA of their weights if EMA is on: `--set ema_half_life="5 epochs"`.
    ema = ("classifier",)

    def __init__(self, settings: MyRecipeSettings, spec: DataSpec) -> None:
        """Create the networks; `spec` describes the data: channels, height, width, classes."""
        super().__init__(settings, spec)
        if spec.num_classes < 2:
            raise UserError("this recipe needs data with at least two classes; choose a different --data")
        width = settings.width
        places = math.ceil(spec.height / 8) * math.ceil(spec.width / 8)  # number of pixels after 8× downsampling
        # Adaptive pooling would work for any size, but its gradient is not deterministic on GPUs.
        self.classifier = nn.Sequential(
            nn.Conv2d(spec.channels, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * width * places, spec.num_classes),
        )

    def classifier_loss(self, batch: Batch) -> Loss:
        """Return the loss terms, each a mean over the samples; the engine sums and logs them."""
        logits = self.classifier(batch["image"])
        loss = F.cross_entropy(logits, batch["label"], label_smoothing=self.settings.label_smoothing)
        return Loss({"cross_entropy": loss})

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return one logit per class for the evaluator."""
        return {"logits": self.classifier(batch["image"])}
