"""Runs networks on batches of equal tiles on one device, without waiting for the host."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.contracts.data_spec import LUMA, PixelFormat
from paceline.contracts.recipe import Batch
from paceline.core.errors import describe_error
from paceline.core.ordered_map import ordered_map
from paceline.data.stream import TORCH_TYPES, stored, to_pixels, to_unit_range
from paceline.images.decode import BadImage
from paceline.inference.trained import TrainedModel
from paceline.parallel.graphed_function import LARGEST_PX, GraphedFunction
from paceline.parallel.precision import Precision, choose_precision
from paceline.parallel.torch_internals import undo_compile
from paceline.training.compile import compile_networks

Pixels = npt.NDArray[Any]  # [h, w, c]; uint8, uint16 or float32


class Values(NamedTuple):
    """The networks' results for a batch of tiles."""

    by_name: dict[str, Tensor]  # [n, h, w, c] each, in [-1, 1]
    finite: Tensor  # a boolean; a tensor, so that reading it can wait until the results are used


def pixel_format(image_model: TrainedModel, pixels: Tensor) -> PixelFormat:
    """Return the format of pixels: with the range that the networks were trained on, if one was declared."""
    return PixelFormat.of(str(pixels.dtype).removeprefix("torch."), image_model.spec.value_range)


def from_pixels(tiles: Tensor, pixels: PixelFormat) -> Tensor:
    """Convert [n, h, w, c] pixels to [n, c, h, w] values in [-1, 1], exactly as for training."""
    images = to_unit_range(stored(tiles).permute(0, 3, 1, 2), pixels, torch.float32)
    # The strides of a single image would otherwise select other kernels, which round differently.
    return images[0][None] if len(images) == 1 else images


@torch.no_grad()
def transform(image_model: TrainedModel, images: Tensor) -> Values:
    """Return the networks' results for [n, c, h, w] images in [-1, 1].

    The images and the networks may have different numbers of channels. Results of the same kind as the input then keep
    the images' channels: grey images are repeated in three channels, whose results are averaged, and networks for grey
    images process each colour separately. Results in other modalities have the networks' channels, and networks for
    grey images process the luma of colour images.
    """
    (count, own), expected = images.shape[:2], image_model.spec.channels
    same_kind = not image_model.spec.panels
    if own < expected:
        images = images.expand(-1, expected, -1, -1)
    elif own > expected:
        luma = images.new_tensor(LUMA).view(1, 3, 1, 1)
        images = images.flatten(0, 1).unsqueeze(1) if same_kind else (images * luma).sum(1, keepdim=True)
    found, finite = {}, []
    for name, made in image_model.recipe.image_to_image(images).items():
        finite.append(made.isfinite().all())
        made = made.view(count, own, *made.shape[2:]) if len(made) > count else made
        made = made.mean(1, keepdim=True) if own < made.shape[1] and same_kind else made
        found[name] = made.permute(0, 2, 3, 1).float().clamp(-1, 1)
    return Values(found, torch.stack(finite).all())


def tensor_of(pixels: Pixels) -> Tensor:
    """Return pixels [h, w, c] as a tensor [1, h, w, c]."""
    return torch.from_numpy(np.stack([pixels]))


TILES = "tiles"  # the input of a forward pass
FINITE = ""  # whether all results are finite; no result has this name
LEVELS = 255 / 2  # 8-bit levels per unit of the value range [-1, 1]


def in_levels(difference: float) -> str:
    """Format a difference with two significant digits, such as "0.13", "2.6" or "260"."""
    return f"{float(f'{difference:.2g}'):g}"


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
        if not self.finite:
            hint = "use --precision fp32" if self.precision != "fp32" else "the weights may be damaged"
            raise BadImage(f"the networks' output is not finite; {hint}")
        return {name: result.numpy() for name, result in self.results.items()}


class TileRunner:
    """An image model on one device."""

    def __init__(
        self, image_model: TrainedModel, device: torch.device, precision: str = "fp32", *, compiled: bool = False
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
        self._graphs = GraphedFunction(self._forward, device) if device.type == "cuda" else None

    def run(self, tiles: Sequence[Pixels], inner: Inner = WHOLE) -> Landing:
        """Start computing the results for tiles of one shape, and return without waiting for a GPU.

        Only the rows and columns `inner` of the results are copied to the host.
        """
        with self._on_device():
            inputs = {TILES: self._batch(tiles)}
            if self._untested:
                self._try_compiled(inputs)
            if self._graphs is None:
                return self._land(self._forward(inputs), inner)
            is_small = inputs[TILES].shape[:3].numel() <= LARGEST_PX
            return self._land(self._graphs(inputs, capture=is_small), inner)

    def difference_from_fp32(self, tile: Pixels) -> float:
        """Return the largest difference between this precision and fp32 for one tile, in 8-bit levels."""
        with self._on_device():
            batch, fp32 = self._batch([tile]), choose_precision("fp32", self.device)
            made = self._values(batch, self.precision)
            with fp32.applied(deterministic=False, autotune=False):
                exact = self._values(batch, fp32)
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

    def _values(self, batch: Tensor, precision: Precision) -> Values:
        images = from_pixels(batch, pixel_format(self.image_model, batch))
        if self.device.type == "cuda" and precision.name == "fp32":
            images = images.contiguous()  # without tensor cores, channels_last is slower
        with precision.autocast():
            return transform(self.image_model, images)

    def _forward(self, inputs: Batch) -> Batch:
        """Return pixels instead of values in [-1, 1], and whether they are finite."""
        values, stored = self._values(inputs[TILES], self.precision), pixel_format(self.image_model, inputs[TILES])
        return {name: to_pixels(made, stored) for name, made in values.by_name.items()} | {FINITE: values.finite}

    def _land(self, results: Batch, inner: Inner) -> Landing:
        rows, columns = inner
        finite = results.pop(FINITE)
        levels = {name: made[:, rows, columns].contiguous() for name, made in results.items()}
        if self._copies is None:
            return Landing(levels, finite, self.precision.name)
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            host = {name: _to_pinned(made) for name, made in levels.items()}
            host_finite, arrived = _to_pinned(finite), torch.cuda.Event()
            arrived.record()
        for tensor in (*levels.values(), finite):
            tensor.record_stream(self._copies)
        return Landing(host, host_finite, self.precision.name, arrived)

    def _try_compiled(self, inputs: Batch) -> None:
        """Compile the networks with the first batch. If this fails, they stay eager."""
        networks, self._untested = self._untested, []
        try:
            self._forward(inputs)
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
