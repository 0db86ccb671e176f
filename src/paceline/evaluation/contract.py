"""Evaluators reduce predictions to sums, and these to metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from paceline.config.resolve import Config
from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, DataSpec, Recipe
from paceline.core.files import Lock
from paceline.core.registry import load_class
from paceline.core.text import four_digits
from paceline.data.source import Source
from paceline.evaluation.protocol import Protocol


@dataclass(frozen=True)
class OpenedRun:
    """A finished run with its trained weights."""

    config: Config
    spec: DataSpec  # data spec of the training data
    recipe: Recipe  # recipe with the weights from the best checkpoint
    data_name: str  # name of the training data


OpenRun = Callable[[str], OpenedRun]  # opens the run folder at a path


@dataclass(frozen=True)
class Case:
    """The samples of one evaluation, available as `Evaluator.case`.

    Attributes:
        source: The samples.
        split: The split that the samples belong to: "train", "validation" or "test".
        count: The number of predictions that the evaluator will receive.
        open_run: A function that opens a finished run folder, for evaluators that need another run's network.
        output_scale: The height and width of the recipe's output relative to its input.
        crop: The side of the crops that are evaluated, in pixels; 0 if the images are evaluated whole.
        by_region: Whether images are too large to be predicted as a whole, so that only sums over regions are known.

    Examples:
        The engine creates cases. To test your own evaluator, create one yourself:

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
    crop: int = field(default=0, repr=False)
    by_region: bool = field(default=False, repr=False)


class Evaluator:
    """Computes metrics from predictions. Subclass it in a separate file.

    The file name is the name of the evaluator; a recipe selects it with `Recipe.evaluation`. Implement `update`, `sums`
    and `results`. The sums are added across ranks before they are passed to `results`, so a metric does not depend on
    the number of devices.

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

        from paceline import Evaluation


        class Confident(MyRecipe):
            evaluation = Evaluation("./confidence.py", best="validation/confidence")
        ```

        `my_recipe.py` is the example file of `Recipe`.

        >>> result = paceline.train("./confident.py", images=512)
        >>> 10 <= result.metrics["test/confidence"] <= 100
        True
    """

    classifies: ClassVar[bool] = False
    """Whether the evaluator compares a prediction's class "logits" with the sample's "label"."""

    needs_samples: bool = False
    """Whether the evaluator processes all samples in the split before it receives predictions."""
    notes: tuple[str, ...] = ()
    """Warnings and remarks about the metrics, for commands to print."""
    label: str = ""
    """A label that is added to metric names in [brackets]."""

    def __init__(self, case: Case, spec: DataSpec, device: torch.device, settings: RunSettings) -> None:
        """Prepare to evaluate the samples of a `Case`; raise UserError if this is not possible."""
        self.case, self.spec, self.device, self.settings = case, spec, device, settings

    def protocol(self) -> Protocol:
        """Return the conditions under which metrics are measured.

        Two metrics are comparable if their conditions are equal. By default, there are no conditions, and all
        measurements are comparable.
        """
        return {}

    def lock_samples(self) -> Lock | None:
        """Return a lock to hold while all samples are processed; None if not needed.

        Use a lock if other runs can use the result, so that only one of them processes the samples.

        Raises:
            InUse: If another run is processing the same samples. The caller waits, and then creates a new evaluator.
        """
        return None

    def update_samples(self, batch: Batch) -> None:
        """Add a batch of the samples that predictions are compared with."""
        raise NotImplementedError

    def sample_sums(self) -> Tensor:
        """Return the sums over the samples added so far, in the format of `sums`."""
        raise NotImplementedError

    def end_samples(self, sums: Tensor) -> None:
        """Receive the sums over the samples on all ranks."""
        raise NotImplementedError

    def update(self, prediction: dict[str, Tensor], batch: Batch) -> None:
        """Add the predictions for one batch. Each sample must be added exactly once."""
        raise NotImplementedError

    def sums(self) -> Tensor:
        """Return a copy of the sums so far as a 1-D float64 tensor on the device."""
        raise NotImplementedError

    def results(self, sums: Tensor) -> dict[str, float]:
        """Return the metrics by name, given the sums over all samples."""
        raise NotImplementedError

    @classmethod
    def texts(cls, metrics: Mapping[str, float], spec: DataSpec) -> dict[str, str]:
        """Return the metrics to print during training, with their units.

        By default, these are all metrics except "count".

        Examples:
            >>> paceline.Evaluator.texts({"loss": 0.25, "count": 100}, paceline.DataSpec(3, 32, 32))
            {'loss': '0.2500'}
        """
        return {name: four_digits(value) for name, value in metrics.items() if name != "count"}


def is_classifier(recipe_class: type[Recipe]) -> bool:
    """Return whether a recipe is a classifier, as declared by its evaluator."""
    name = recipe_class.evaluation.evaluator
    return bool(name) and load_class("evaluator", name, Evaluator).classifies
