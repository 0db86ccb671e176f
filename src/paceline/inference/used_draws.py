"""Determines which draws (random inputs) a recipe reads in `predict`; other draws are for training only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from paceline.contracts.recipe import Batch, Recipe


def used_draws(recipe: Recipe, batch: Batch) -> tuple[str, ...]:
    """Return the names of the draws (random inputs) that `predict` reads from a batch."""
    recording = _RecordingBatch(batch)
    with torch.no_grad():
        recipe.predict(recording)
    return tuple(name for name in recipe.draws if name in recording.read)


class _RecordingBatch(dict[str, Tensor]):
    """A batch that records which of its fields are read. Copying it counts as reading all of them."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        """Iterate as usual. Because this class defines __iter__, dict() copies it by calling __getitem__."""
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        self.read.append(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self.read.append(name)
        return super().pop(name, *default)

    def items(self) -> Any:
        return dict(self).items()

    def values(self) -> Any:
        return dict(self).values()

    def copy(self) -> Batch:
        return dict(self)

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)
