"""Classification: cross-entropy, top-1 and top-5 accuracy.

Protocol: one view of every sample, cross-entropy without label smoothing, accuracies in percent. Among equal logits,
the class with the lower index ranks first, so that ties do not depend on the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, DataSpec
from paceline.evaluation.contract import Case, Evaluator


class Accuracy(Evaluator):
    """Loss, top-1 and top-5 accuracy (top-k if there are only k < 5 classes) and the number of samples."""

    classifies = True

    def __init__(self, case: Case, spec: DataSpec, device: torch.device, settings: RunSettings) -> None:
        super().__init__(case, spec, device, settings)
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)  # sums of loss, top-1, top-5, samples

    def update(self, prediction: dict[str, Tensor], batch: Batch) -> None:
        logits = prediction["logits"].detach().double()
        # Self-supervised recipes return their own labels.
        label = prediction["label"] if "label" in prediction else batch["label"]
        loss = F.cross_entropy(logits, label, reduction="sum")
        rank = _rank_of(label, logits)
        top1, top5 = (rank < 1).sum(), (rank < min(5, logits.shape[1])).sum()
        # Filled on the device, since a copy from the host would block.
        count = torch.full_like(loss, len(label))
        self._sums += torch.stack([loss, top1.double(), top5.double(), count])

    def sums(self) -> Tensor:
        return self._sums.clone()

    def results(self, sums: Tensor) -> dict[str, float]:
        loss, top1, top5, count = sums.tolist()
        assert count > 0, "cannot compute the accuracy on an empty split"
        return {"loss": loss / count, "top1": 100 * top1 / count, "top5": 100 * top5 / count, "count": count}

    @classmethod
    def texts(cls, metrics: Mapping[str, float], spec: DataSpec) -> dict[str, str]:
        """Return the accuracies with a percent sign; leave out top-5 if five or fewer classes make it meaningless."""
        texts = super().texts(metrics, spec)
        if spec.num_classes <= 5:
            texts.pop("top5", None)
        return {name: f"{text}%" if name in ("top1", "top5") else text for name, text in texts.items()}


def _rank_of(label: Tensor, logits: Tensor) -> Tensor:
    """Return, for each sample, the number of classes that rank above the correct one."""
    right = logits.gather(1, label[:, None])
    classes = torch.arange(logits.shape[1], device=logits.device)
    # `~(a <= b)` instead of `a > b`: all comparisons with NaN are false, and a NaN must not count as correct.
    before = ~(logits <= right) | ((logits == right) & (classes < label[:, None]))
    return before.sum(dim=1)
