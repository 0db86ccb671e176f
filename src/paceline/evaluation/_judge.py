"""The judge contract: predictions in, sums that add up over parts out, numbers at the end.

A judge never waits for the device while it sees batches. Its sums are added over all ranks before they
become results, so a number does not depend on how the samples were spread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.recipe import Batch, Facts


class Judge:
    """Subclass it in a file of its own: the file's name is the judge's name."""

    def __init__(self, facts: Facts, device: torch.device) -> None:
        self.facts, self.device = facts, device

    def update(self, prediction: dict[str, Tensor], batch: Batch) -> None:
        """Adds the samples of one batch, each of which must come once."""
        raise NotImplementedError

    def sums(self) -> Tensor:
        """What has been added up so far, as a tensor of the caller's own: float64, one dimension, on the device."""
        raise NotImplementedError

    def results(self, sums: Tensor) -> dict[str, float]:
        """The numbers behind sums over all samples, by name."""
        raise NotImplementedError
