"""The evaluator contract: predictions in, sums that add up over parts out, metrics at the end.

An evaluator never waits for the device while it reads batches. Its sums are added over all ranks before they become
metrics, so that a metric does not depend on how the samples were distributed. An evaluator that compares predictions
with the samples themselves (`needs_samples`) reads all of these first, in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.config.resolve import Config
from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, DataSpec, Recipe
from paceline.core.registry import load_class
from paceline.data.source import Source
from paceline.evaluation.protocol import Protocol


@dataclass(frozen=True)
class OpenedRun:
    """A finished run with its trained weights."""

    config: Config
    spec: DataSpec  # of the training data
    recipe: Recipe  # with the weights of the best checkpoint


OpenRun = Callable[[str], OpenedRun]  # by the run's folder


@dataclass(frozen=True)
class Case:
    """What is evaluated, and on which samples."""

    source: Source
    split: str
    count: int  # predictions that will come
    open_run: OpenRun
    output_scale: int = 1  # how many times as high and wide as its input the recipe's output is


class Evaluator:
    """Measures predictions. Subclass it in a file of its own: the file's name is the evaluator's name."""

    classifies: ClassVar[bool] = False  # reads "logits" of a prediction, one per class, against "label"

    needs_samples: bool = False  # it reads the samples themselves before the predictions
    notes: tuple[str, ...] = ()  # warnings and remarks on its metrics, to be printed
    label: str = ""  # what the names of its metrics have in [brackets]

    def __init__(self, case: Case, spec: DataSpec, device: torch.device, settings: RunSettings) -> None:
        """Prepare for one case; raise UserError where it cannot be evaluated."""
        self.case, self.spec, self.device, self.settings = case, spec, device, settings

    def protocol(self) -> Protocol:
        """Return all that two measurements must share for their metrics to be comparable; empty where all do."""
        return {}

    def update_samples(self, batch: Batch) -> None:
        """Add a batch of the samples that predictions are compared with."""
        raise NotImplementedError

    def sample_sums(self) -> Tensor:
        """Return the sums over the samples so far; like `sums`."""
        raise NotImplementedError

    def end_samples(self, sums: Tensor) -> None:
        """Accept the sums over all samples, of all ranks."""
        raise NotImplementedError

    def update(self, prediction: dict[str, Tensor], batch: Batch) -> None:
        """Add the predictions of one batch; each sample must come once."""
        raise NotImplementedError

    def sums(self) -> Tensor:
        """Return the sums so far as a tensor of the caller's own: float64, one dimension, on the device."""
        raise NotImplementedError

    def results(self, sums: Tensor) -> dict[str, float]:
        """Return the metrics by name, given the sums over all samples."""
        raise NotImplementedError


def is_classifier(recipe_class: type[Recipe]) -> bool:
    """Return whether a recipe predicts logits of classes: its evaluator declares it."""
    return bool(recipe_class.evaluator) and load_class("evaluator", recipe_class.evaluator, Evaluator).classifies
