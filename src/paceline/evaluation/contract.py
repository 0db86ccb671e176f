"""The judge contract: predictions in, sums that add up over parts out, numbers at the end.

A judge never waits for the device while it sees batches. Its sums are added over all ranks before they
become results, so a number does not depend on how the samples were spread. A judge that compares predictions
with the samples themselves (`needs_samples`) is shown all of these first, in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.config.resolve import Config
from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, DataSpec, Recipe
from paceline.data.source import Source


@dataclass(frozen=True)
class OpenedRun:
    """What a finished run learned."""

    config: Config
    spec: DataSpec  # of the data that it learned from
    recipe: Recipe  # with the weights that were judged best


@dataclass(frozen=True)
class Case:
    """What is to be judged, and on what."""

    source: Source
    split: str
    count: int  # predictions that will come
    open_run: Callable[[str], OpenedRun]  # by its folder
    output_scale: int = 1  # how many times as high and wide the recipe makes pictures


class Evaluator:
    """Subclass it in a file of its own: the file's name is the judge's name."""

    needs_samples: bool = False  # after `begin`: it has to see the samples themselves before the predictions
    notes: tuple[str, ...] = ()  # after `begin`: what a person should know about the numbers
    label: str = ""  # after `begin`: what the names of its numbers have in [brackets]

    def __init__(self, spec: DataSpec, device: torch.device, settings: RunSettings) -> None:
        self.spec, self.device, self.settings = spec, device, settings

    def begin(self, case: Case) -> None:
        """Prepares for one case, and refuses one that cannot be judged."""

    def protocol(self) -> dict[str, Any]:
        """All that another measurement must share for its numbers to be comparable; nothing, where all do."""
        return {}

    def update_samples(self, batch: Batch) -> None:
        """Adds samples to what predictions are compared with."""
        raise NotImplementedError

    def sample_sums(self) -> Tensor:
        """What the samples added up to so far; like `sums`."""
        raise NotImplementedError

    def end_samples(self, sums: Tensor) -> None:
        """Takes the sums over all samples, of all ranks."""
        raise NotImplementedError

    def update(self, prediction: dict[str, Tensor], batch: Batch) -> None:
        """Adds the samples of one batch, each of which must come once."""
        raise NotImplementedError

    def sums(self) -> Tensor:
        """What has been added up so far, as a tensor of the caller's own: float64, one dimension, on the device."""
        raise NotImplementedError

    def results(self, sums: Tensor) -> dict[str, float]:
        """The numbers behind sums over all samples, by name."""
        raise NotImplementedError
