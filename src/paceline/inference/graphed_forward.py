"""The forward pass on a batch of tiles as CUDA graphs, one per shape and pixel format."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.contracts.pixel_format import PixelFormat
from paceline.contracts.recipe import Batch
from paceline.inference.forward import Values
from paceline.parallel.graphed_function import LARGEST_PX, GraphedFunction

TILES = "tiles"
FINITE = ""  # no result has this name

Forward = Callable[[Tensor, PixelFormat], Values]


class GraphedForward:
    """Runs a forward pass eagerly, and captures it for shapes that occur often. Stays eager if a capture fails."""

    def __init__(self, forward: Forward, device: torch.device) -> None:
        self._forward, self._device = forward, device
        self._by_format: dict[PixelFormat, GraphedFunction] = {}

    @property
    def note(self) -> str:
        """Why captures are off, to be printed; empty if they are on."""
        return next((one.note for one in self._by_format.values() if one.note), "")

    def __call__(self, batch: Tensor, stored: PixelFormat) -> Values:
        if stored not in self._by_format:
            self._by_format[stored] = GraphedFunction(lambda inputs: self._run(inputs, stored), self._device)
        small = batch.shape[0] * batch.shape[1] * batch.shape[2] <= LARGEST_PX
        by_name = self._by_format[stored]({TILES: batch}, capture=small)
        return Values(by_name, by_name.pop(FINITE))

    def _run(self, inputs: Batch, stored: PixelFormat) -> Batch:
        values = self._forward(inputs[TILES], stored)
        return {**values.by_name, FINITE: values.finite}
