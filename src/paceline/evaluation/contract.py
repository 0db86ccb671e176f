"""The evaluator contract: predictions are reduced to sums, and the sums of all ranks to metrics.

An evaluator never waits for the device while it reads batches. Its sums are added over all ranks before they become
metrics, so that a metric does not depend on how the samples were distributed. An evaluator that compares predictions
with the samples themselves (`needs_samples`) reads all samples first, in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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
    """What is evaluated, and on which samples: `Evaluator.case`.

    Attributes:
        source: The samples.
        split: The split that they are from: "train", "validation" or "test".
        count: The number of predictions that will come.
        open_run: Opens a finished run by its folder, for an evaluator that needs another network.
        output_scale: How many times as high and wide as its input the recipe's output is.

    Examples:
        A run constructs it. A test of your own evaluator can, too:

        >>> import numpy as np
        >>> source = paceline.ArraySource({"image": np.zeros((2, 8, 8, 1), np.uint8)}, paceline.DataSpec(1, 8, 8))
        >>> def open_run(folder):
        ...     raise NotImplementedError("needs no other run")
        >>> paceline.Case(source, "test", count=2, open_run=open_run)
        Case(source=ArraySource(2 samples, 1×8×8), split='test', count=2, output_scale=1)
    """

    source: Source
    split: str
    count: int
    open_run: OpenRun = field(repr=False)
    output_scale: int = 1


class Evaluator:
    """Measures predictions. Subclass it in a file of its own.

    The file's name is the evaluator's name; a recipe names it in `Recipe.evaluator`. Implement `update`, `sums` and
    `results`. Sums are added over all ranks before `results` sees them, so that a metric does not depend on the number
    of devices.

    Examples:
        ```python
        # confidence.py
        import torch

        from paceline import Evaluator


        class Confidence(Evaluator):
            classifies = True

            def __init__(self, case, spec, device, settings):
                super().__init__(case, spec, device, settings)
                self._sums = torch.zeros(2, dtype=torch.float64, device=device)  # probabilities, samples

            def update(self, prediction, batch):
                largest = prediction["logits"].double().softmax(dim=1).amax(dim=1)
                self._sums += torch.stack([largest.sum(), torch.ones_like(largest).sum()])

            def sums(self):
                return self._sums.clone()

            def results(self, sums):
                confidence, count = sums.tolist()
                return {"confidence": 100 * confidence / count, "count": count}
        ```

        ```python
        # confident.py
        from my_recipe import MyRecipe

        from paceline import Best


        class Confident(MyRecipe):
            evaluator, best = "./confidence.py", Best("validation/confidence")
        ```

        `my_recipe.py` is the file in the example of `Recipe`.

        >>> result = paceline.train("./confident.py", images=512)
        >>> 10 <= result.metrics["test/confidence"] <= 100
        True
    """

    classifies: ClassVar[bool] = False
    """Whether it reads "logits" of a prediction, one per class, against "label"."""

    needs_samples: bool = False
    """Whether it reads the samples themselves before the predictions."""
    notes: tuple[str, ...] = ()
    """Warnings and remarks on its metrics, to be printed."""
    label: str = ""
    """What the names of its metrics have in [brackets]."""

    def __init__(self, case: Case, spec: DataSpec, device: torch.device, settings: RunSettings) -> None:
        """Prepare for one case; raise UserError if it cannot be evaluated."""
        self.case, self.spec, self.device, self.settings = case, spec, device, settings

    def protocol(self) -> Protocol:
        """Return what two measurements must share to be comparable.

        It is empty if all are.
        """
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
        """Return a copy of the sums so far: float64, one dimension, on the device."""
        raise NotImplementedError

    def results(self, sums: Tensor) -> dict[str, float]:
        """Return the metrics by name, given the sums over all samples."""
        raise NotImplementedError


def is_classifier(recipe_class: type[Recipe]) -> bool:
    """Return whether a recipe predicts class logits, as its evaluator declares."""
    return bool(recipe_class.evaluator) and load_class("evaluator", recipe_class.evaluator, Evaluator).classifies
