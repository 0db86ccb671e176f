"""The loss and the prediction of test recipes that differ in their networks only."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.contracts.recipe import Batch, Evaluation, Loss, Phase, Recipe


class PlainClassifier(Recipe):
    """A recipe that trains the network `classifier` with the cross-entropy loss."""

    evaluation = Evaluation("accuracy")
    phases = (Phase("classifier", "classifier"),)
    classifier: nn.Module

    def classifier_loss(self, batch: Batch) -> Loss:
        return Loss({"cross_entropy": F.cross_entropy(self.classifier(batch["image"]), batch["label"])})

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        return {"logits": self.classifier(batch["image"])}
