"""The evaluator contract: predictions are reduced to sums, and the sums of all ranks to metrics.

An evaluator never waits for the device while it reads batches. Its sums are added over all ranks before they become
metrics, so that a metric does not depend on how the samples were distributed. An evaluator that compares predictions
with the samples themselves (`needs_samples`) reads all samples first, in the same way.
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
    spec: DataSpec  # describes the training data
    recipe: Recipe  # has the weights of the best checkpoint


OpenRun = Callable[[str], OpenedRun]  # takes the path of a run folder


@dataclass(frozen=True)
class Case:
    """What is evaluated, and on which samples."""

    source: Source
    split: str
    count: int  # expected number of predictions
    open_run: OpenRun
    output_scale: int = 1  # ratio of the output's height and width to the input's


class Evaluator:
    """Measures predictions. Put each subclass in a separate file: the file name is the evaluator's name."""

    classifies: ClassVar[bool] = False  # compares the predicted "logits", one per class, with "label"

    needs_samples: bool = False  # whether it reads all samples before the predictions
    notes: tuple[str, ...] = ()  # warnings and remarks about its metrics, to be printed
    label: str = ""  # appended to its metrics' names in [brackets]

    def __init__(self, case: Case, spec: DataSpec, device: torch.device, settings: RunSettings) -> None:
        """Prepare for one case; raise UserError if it cannot be evaluated."""
        self.case, self.spec, self.device, self.settings = case, spec, device, settings

    def protocol(self) -> Protocol:
        """Return everything that must agree for two measurements to be comparable; empty if all are comparable."""
        return {}

    def update_samples(self, batch: Batch) -> None:
        """Add a batch of the samples that predictions are compared with."""
        raise NotImplementedError

    def sample_sums(self) -> Tensor:
        """Return the sums over the samples so far, in the format of `sums`."""
        raise NotImplementedError

    def end_samples(self, sums: Tensor) -> None:
        """Receive the sums over all samples of all ranks."""
        raise NotImplementedError

    def update(self, prediction: dict[str, Tensor], batch: Batch) -> None:
        """Add the predictions of one batch. Each sample must be added exactly once."""
        raise NotImplementedError

    def sums(self) -> Tensor:
        """Return the sums so far as a new one-dimensional float64 tensor on the device."""
        raise NotImplementedError

    def results(self, sums: Tensor) -> dict[str, float]:
        """Return the metrics by name, given the sums over all samples."""
        raise NotImplementedError


def is_classifier(recipe_class: type[Recipe]) -> bool:
    """Return whether a recipe predicts class logits, as its evaluator declares."""
    return bool(recipe_class.evaluator) and load_class("evaluator", recipe_class.evaluator, Evaluator).classifies
