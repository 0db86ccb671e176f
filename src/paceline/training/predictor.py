"""A recipe's predictions during training: eager, or CUDA graphs for batches that recur in every evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch

from paceline.contracts.recipe import Batch, Recipe
from paceline.core.printable import print_line
from paceline.parallel.graphed_function import LARGEST_PX, GraphedFunction
from paceline.parallel.precision import Precision
from paceline.training.compile import eager

MIN_FREE = 0.25  # fraction of the GPU's memory; a graph keeps the memory of its activations


class Predictor:
    """Calls `Recipe.predict`. Use it inside `evaluating`."""

    def __init__(self, recipe: Recipe, precision: Precision, device: torch.device, *, captures: bool) -> None:
        self._recipe, self._precision = recipe, precision
        self._graphed = GraphedFunction(self._run, device, MIN_FREE) if captures and device.type == "cuda" else None
        self._addresses: tuple[int, ...] = ()  # of the weights that the graphs use
        self._num_pixels: dict[tuple[torch.Size, ...], int] = {}  # of the largest input or prediction, by input shapes
        self._noted = False

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the recipe in evaluation mode; inside the context, its weights must not change."""
        if self._graphed:
            tensors = chain(self._recipe.parameters(), self._recipe.buffers())
            addresses = tuple(tensor.data_ptr() for tensor in tensors)
            if addresses != self._addresses:
                self._graphed.clear()
                self._addresses = addresses
        self._recipe.eval()
        yield
        self._recipe.train()

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Batch:
        """Return the recipe's predictions for a batch."""
        if not self._graphed:
            return self._run(batch)
        shapes = tuple(field.shape for field in batch.values())
        made = self._graphed(batch, capture=self._num_pixels.get(shapes, LARGEST_PX + 1) <= LARGEST_PX)
        if shapes not in self._num_pixels:
            images = [field for field in (*batch.values(), *made.values()) if field.ndim == 4]
            self._num_pixels[shapes] = max((len(one) * one.shape[-2] * one.shape[-1] for one in images), default=0)
        if self._graphed.note and not self._noted:
            self._noted = True
            print_line(f"evaluation: eager. {self._graphed.note}")
        return made

    def _run(self, batch: Batch) -> Batch:
        with eager(), self._precision.autocast():
            return self._recipe.predict(batch)
