"""Runs networks on batches of equal tiles on one device, without waiting for the device.

Pixels are transferred as integers, from and to pinned memory, and converted on the device. The copy back overlaps the
next batch. On a GPU, small batches of a shape that occurs often are replayed as a CUDA graph.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.contracts.pixel_format import PixelFormat
from paceline.core.errors import describe_error
from paceline.core.ordered_map import ordered_map
from paceline.data.stored_pixels import TORCH_TYPES, to_pixels
from paceline.inference.forward import (
    Pixels,
    Values,
    check_finite,
    pixel_format,
    to_unit_range,
    transform,
)
from paceline.inference.graphed_forward import GraphedForward
from paceline.inference.image_model import ImageModel
from paceline.inference.levels import LEVELS
from paceline.parallel.precision import Precision, choose_precision
from paceline.parallel.torch_internals import undo_compile
from paceline.training.compile import compile_networks

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
WHOLE = (slice(None), slice(None))

Inner = tuple[slice, slice]  # rows and columns of a tile's result


@dataclass(frozen=True, eq=False)
class Landing:
    """Results that are being copied from the device to the host."""

    results: dict[str, Tensor]  # [n, h, w, c] levels by name
    finite: Tensor
    precision: str
    arrived: torch.cuda.Event | None = None  # None if the results are already there

    def arrays(self) -> dict[str, Pixels]:
        """Wait for the results and return them; raise BadImage if they are not finite."""
        if self.arrived is not None:
            self.arrived.synchronize()
        check_finite(bool(self.finite), self.precision)
        return {name: result.numpy() for name, result in self.results.items()}


class TileRunner:
    """An image model on one device."""

    def __init__(
        self, image_model: ImageModel, device: torch.device, precision: str = "fp32", *, compiled: bool = False
    ) -> None:
        self.image_model, self.device, self.precision = image_model, device, choose_precision(precision, device)
        self._compile_note = ""
        # In full precision, tiles must match the whole image and runs must match each other.
        self.precision.apply(deterministic=precision == "fp32", autotune=False)
        image_model.recipe.to(device)
        if device.type == "cuda" and precision != "fp32":
            image_model.recipe.to(memory_format=torch.channels_last)
        self._untested = compile_networks(image_model.recipe) if compiled else []
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._graphs = GraphedForward(self._forward, device) if device.type == "cuda" else None

    def run(self, tiles: Sequence[Pixels], inner: Inner = WHOLE) -> Landing:
        """Start computing the results for tiles of one shape, and return without waiting for a GPU.

        Only the rows and columns `inner` of the results are copied to the host.
        """
        with self._on_device():
            batch, stored = self._batch(tiles), pixel_format(self.image_model, tiles[0])
            if self._untested:
                self._try_compiled(batch, stored)
            results = self._graphs(batch, stored) if self._graphs else self._forward(batch, stored)
            return self._land(results, inner)

    def difference_from_fp32(self, tile: Pixels) -> float:
        """Return the largest difference between this precision and fp32 for one tile, in 8-bit levels."""
        with self._on_device():
            batch, stored = self._batch([tile]), pixel_format(self.image_model, tile)
            made = self._values(batch, stored, self.precision)
            with choose_precision("fp32", self.device).applied(deterministic=False, autotune=False):
                exact = self._values(batch, stored, choose_precision("fp32", self.device))
            differences = [(made.by_name[name] - values).abs().max() for name, values in exact.by_name.items()]
            return float(torch.stack(differences).max()) * LEVELS

    @property
    def notes(self) -> list[str]:
        """Remarks about failed compilation and failed captures, to be printed."""
        return [note for note in (self._compile_note, self._graphs.note if self._graphs else "") if note]

    def _on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _batch(self, tiles: Sequence[Pixels]) -> Tensor:
        if self._copies is None:
            return torch.from_numpy(np.stack(tiles))
        height, width, channels = tiles[0].shape
        kind = TORCH_TYPES[tiles[0].dtype.name]
        pinned = torch.empty((len(tiles), height, width, channels), dtype=kind, pin_memory=True)
        np.stack(tiles, out=pinned.numpy())
        return pinned.to(self.device, non_blocking=True)

    def _values(self, batch: Tensor, stored: PixelFormat, precision: Precision) -> Values:
        images = to_unit_range(batch, stored)
        if self.device.type == "cuda" and precision.name == "fp32":
            images = images.contiguous()  # without tensor cores, channels_last is slower
        with precision.autocast():
            return transform(self.image_model, images)

    def _forward(self, batch: Tensor, stored: PixelFormat) -> Values:
        """Return pixels instead of values in [-1, 1]."""
        values = self._values(batch, stored, self.precision)
        return Values({name: to_pixels(made, stored) for name, made in values.by_name.items()}, values.finite)

    def _land(self, results: Values, inner: Inner) -> Landing:
        rows, columns = inner
        levels = {name: made[:, rows, columns].contiguous() for name, made in results.by_name.items()}
        if self._copies is None:
            return Landing(levels, results.finite, self.precision.name)
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            host = {name: _to_pinned(made) for name, made in levels.items()}
            finite, arrived = _to_pinned(results.finite), torch.cuda.Event()
            arrived.record()
        for tensor in (*levels.values(), results.finite):
            tensor.record_stream(self._copies)
        return Landing(host, finite, self.precision.name, arrived)

    def _try_compiled(self, batch: Tensor, stored: PixelFormat) -> None:
        """Compile the networks with the first batch. If this fails, they stay eager."""
        networks, self._untested = self._untested, []
        try:
            self._forward(batch, stored)
        except Exception as error:  # a compiler may raise any exception
            for network in networks:
                undo_compile(network)
            self._compile_note = f"--compile: off, because it failed ({describe_error(error)})"


class RunnerPool:
    """Distributes batches of tiles among runners; each runner works on one batch at a time."""

    def __init__(self, runners: Sequence[TileRunner]) -> None:
        self.runners = runners
        self._idle: queue.SimpleQueue[TileRunner] = queue.SimpleQueue()
        for runner in runners:
            self._idle.put(runner)

    def run(self, tiles: Sequence[Pixels], inner: Inner = WHOLE) -> Landing:
        """Run a batch on the next idle runner."""
        runner = self._idle.get()
        try:
            return runner.run(tiles, inner)
        finally:
            self._idle.put(runner)

    def run_all(self, batches: Iterable[Sequence[Pixels]]) -> Iterator[Landing]:
        """Yield the results of batches in order, using all runners."""
        if len(self.runners) == 1:
            return map(self.run, batches)
        return ordered_map(self.run, batches, len(self.runners))


def _to_pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
