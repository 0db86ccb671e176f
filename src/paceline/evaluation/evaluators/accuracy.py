"""Classification: cross-entropy, top-1 and top-5 accuracy.

The protocol: every sample once, one view of it, cross-entropy without label smoothing, accuracies in
percent. Of equal logits the class with the lower index ranks first, so a tie does not depend on the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, DataSpec
from paceline.evaluation.contract import Case, Evaluator


class Accuracy(Evaluator):
    """Loss, top-1 and top-5 accuracy (top-k for the k classes of smaller data) and the number of samples."""

    classifies = True

    def __init__(self, case: Case, spec: DataSpec, device: torch.device, settings: RunSettings) -> None:
        super().__init__(case, spec, device, settings)
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, top-1, top-5, samples

    def update(self, prediction: dict[str, Tensor], batch: Batch) -> None:
        logits = prediction["logits"].detach().double()
        label = prediction["label"] if "label" in prediction else batch["label"]  # of self-supervised recipes
        loss = F.cross_entropy(logits, label, reduction="sum")
        rank = _rank_of(label, logits)
        top1, top5 = (rank < 1).sum(), (rank < min(5, logits.shape[1])).sum()
        # Filled on the device: a tensor made from the Python number would wait for a copy.
        count = torch.full_like(loss, len(label))
        self._sums += torch.stack([loss, top1.double(), top5.double(), count])

    def sums(self) -> Tensor:
        return self._sums.clone()

    def results(self, sums: Tensor) -> dict[str, float]:
        loss, top1, top5, count = sums.tolist()
        assert count > 0, "an empty split has no accuracy"
        return {"loss": loss / count, "top1": 100 * top1 / count, "top5": 100 * top5 / count, "count": count}


def _rank_of(label: Tensor, logits: Tensor) -> Tensor:
    """Return the number of classes that rank above the right one, per sample."""
    right = logits.gather(1, label[:, None])
    classes = torch.arange(logits.shape[1], device=logits.device)
    # "Not at most" rather than "more": a NaN, which compares false with all, then never counts as right.
    before = ~(logits <= right) | ((logits == right) & (classes < label[:, None]))
    return before.sum(dim=1)
