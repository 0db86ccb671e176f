"""Runs networks on tiles, and composes whole results, which halos make equal to the result for the whole image."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.contracts.data_spec import LUMA, PixelFormat
from paceline.contracts.recipe import Batch
from paceline.core.errors import CPU_ALLOCATOR, UserError, describe_error
from paceline.core.ordered_map import ordered_map
from paceline.data.loader import free_bytes
from paceline.data.stream import TORCH_TYPES, stored, to_pixels, to_unit_range
from paceline.images.decode import BadImage
from paceline.images.rectangles import Box, Span, Tile, fixed_halo, split_side
from paceline.inference.receptive_field import ReceptiveField
from paceline.inference.trained import TrainedModel
from paceline.parallel.graphed_function import LARGEST_PX, GraphedFunction
from paceline.parallel.precision import Precision, choose_precision
from paceline.parallel.torch_internals import undo_compile
from paceline.training.compile import compile_networks

Pixels = npt.NDArray[Any]  # [h, w, c]; uint8, uint16 or float32


def pixel_format(image_model: TrainedModel, pixels: Tensor) -> PixelFormat:
    """Return the format of pixels: with the range that the networks were trained on, if one was declared."""
    return PixelFormat.of(str(pixels.dtype).removeprefix("torch."), image_model.spec.value_range)


def from_pixels(tiles: Tensor, pixels: PixelFormat) -> Tensor:
    """Convert [n, h, w, c] pixels to [n, c, h, w] values in [-1, 1], exactly as for training."""
    images = to_unit_range(stored(tiles).permute(0, 3, 1, 2), pixels, torch.float32)
    # The strides of a single image would otherwise select other kernels, which round differently.
    return images[0][None] if len(images) == 1 else images


TILES = "tiles"  # the input of a forward pass
FINITE = ""  # whether all results are finite; no result has this name


@torch.no_grad()
def transform(image_model: TrainedModel, images: Tensor) -> Batch:
    """Return the networks' results [n, h, w, c] for [n, c, h, w] images, in [-1, 1], and whether they are finite.

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
    return found | {FINITE: torch.stack(finite).all()}  # a tensor, so that reading it can wait


WHOLE = (slice(None), slice(None))

Inner = tuple[slice, slice]  # rows and columns of a tile's result
Read = Callable[[Box], Pixels]  # returns a part of an image


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

    def difference(self, read: Read, part: Box, near: Box, far: Box, precision: Precision) -> tuple[str, str]:
        """Return the largest and the mean difference between two results for a part of an image, in 8-bit levels.

        The first is computed from the area `near` in a precision, the second from the area `far` in fp32.
        """
        results, deterministic = [], self.precision.name == "fp32"
        for area, used in ((near, precision), (far, choose_precision("fp32", self.device))):
            inner = part.moved_from(area).scaled(self.image_model.output_scale).slices
            with self._on_device(), used.applied(deterministic=deterministic, autotune=False), used.autocast():
                batch = self._batch([read(area)])
                values = transform(self.image_model, from_pixels(batch, pixel_format(self.image_model, batch)))
            results.append(torch.cat([values[name][0][inner] for name in values if name != FINITE], -1))
        change = (results[0] - results[1]).abs() * 255 / 2  # the results are in [-1, 1]
        largest, mean = (float(f"{value.item():.2g}") for value in (change.max(), change.mean()))
        return f"{largest:g}", f"{mean:g}"  # 260 instead of 2.6e+02

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

    def _forward(self, inputs: Batch) -> Batch:
        """Return pixels instead of values in [-1, 1], and whether they are finite."""
        pixels = pixel_format(self.image_model, inputs[TILES])
        images = from_pixels(inputs[TILES], pixels)
        if self.device.type == "cuda" and self.precision.name == "fp32":
            images = images.contiguous()  # without tensor cores, channels_last is slower
        with self.precision.autocast():
            results = transform(self.image_model, images)
        return {name: to_pixels(made, pixels) if name else made for name, made in results.items()}

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


SHARE_OF_FREE = 0.5  # fraction of the free memory to use; other processes need some, too
HOST_BYTES = 2.2e9  # memory budget for the result and one tile together, when computing on the host
TILE_BYTES_ON_HOST = (0.5e9, 1.2e9)  # minimum and maximum memory for a tile; larger tiles are hardly faster
WORKSPACE = 1.5  # multiplies the size of intermediate results, since convolutions need extra memory
INEXACT_HALO_PX = 64  # used if no halo gives the exact result, or if the exact halo does not fit in memory
SMALLEST_TILE_PX = 32
LARGEST_TENSOR = 2**31 - 1  # elements; beyond this, indices need 64 bits, and convolutions on GPUs are much slower


@dataclass(frozen=True)
class Tiling:
    """How an image is split into tiles."""

    side_px: int  # side of a tile in input pixels, excluding its halo
    halo_px: int
    note: str = ""  # a warning about the result, to be printed
    window_px: tuple[int, int] | None = None  # height and width of every tile including its halo, even at the edges
    multiple_px: int = 1  # tiles of one shape start at multiples of this
    uniform: bool = False  # whether tiles at the edges have a wider halo inside the image, so that shapes repeat

    def spans(self, length: int, fixed: int = 0, start: int = 0, total: int = 0) -> list[Span]:
        """Return the tiles along a side, or a part of it; if `fixed` is given, each has that size, halo included."""
        found = split_side(
            length, self.side_px, self.halo_px, fixed, multiple=self.multiple_px, start=start, total=total
        )
        full = self.side_px + 2 * self.halo_px
        if fixed or not self.uniform or length <= full:
            return found
        return [self._full_size(span, length, full) for span in found]

    def _full_size(self, span: Span, length: int, full: int) -> Span:
        """Return a tile at the image's edge with a wider halo; its end is the edge, or else its size is `full`."""
        if span.halo_stop - span.halo_start == full:
            return span
        if span.halo_start == 0 and span.halo_stop < length:
            return span._replace(halo_stop=full)
        return span._replace(halo_start=(length - full) // self.multiple_px * self.multiple_px)


def choose_tiling(
    field: ReceptiveField,
    size: tuple[int, int],
    device: torch.device,
    *,
    share: int = 1,
    side: int = 0,
    result_bytes: int = 0,
) -> Tiling:
    """Return tiles with the given side length; if none is given, the largest tiles that fit in memory.

    The memory is shared by `share` processes. `result_bytes` is the size of the result in the host's memory.
    """
    free = usable_bytes(device) / share
    usual = free
    if device.type == "cpu":
        least, most = TILE_BYTES_ON_HOST
        usual = min(free, max(least, min(most, HOST_BYTES - result_bytes)) / share)
    exact, warning = not field.obstacles, tiling_warning(field)
    if side:
        side = _rounded_up(side, field.multiple_px)
        return Tiling(side, usable_halo(field), warning if side < max(size) else "")
    num_pixels, most_pixels = size[0] * size[1], LARGEST_TENSOR / share / field.elements_per_px
    fits = needed_bytes(field, num_pixels) <= (usual if exact or field.is_measurable else free)
    if fits and (num_pixels <= most_pixels or not exact):
        return Tiling(_rounded_up(max(size), field.multiple_px), 0)
    for budget in (usual, free) if exact else ():
        fitting = largest_side(field, budget, field.tiled_halo_px, most_pixels)
        if fitting >= max(field.multiple_px, SMALLEST_TILE_PX):
            return Tiling(fitting, field.tiled_halo_px)
    halo = inexact_halo(field)
    fitting = max(largest_side(field, free, halo), _rounded_up(SMALLEST_TILE_PX, field.multiple_px))
    note = warning or f"a tile with its halo of {field.halo_px} pixels does not fit in memory: seams may be visible"
    return Tiling(fitting, halo, note)


def tiles_of_training_size(window: tuple[int, int], size: tuple[int, int]) -> Tiling:
    """Return tiles whose size including the halo is the training size; a single tile if the image is no larger."""
    if size[0] <= window[0] and size[1] <= window[1]:
        return Tiling(max(size), 0)
    halo = fixed_halo(window)
    size_px = f"{window[1]}×{window[0]}-pixel"
    note = f"each {size_px} window (the training size) is normalised separately: seams may be visible"
    return Tiling(min(window) - 2 * halo, halo, note, window)


def tiling_warning(field: ReceptiveField) -> str:
    """Return why tiles would change the result; empty if they would not."""
    return f"{field.obstacles[0]}: seams may be visible" if field.obstacles else ""


def plan_tiles(tiling: Tiling, size: tuple[int, int], part: Box | None = None) -> list[Tile]:
    """Return the tiles of an image or of a part of it, row by row. Halos may extend beyond the part."""
    fixed, part = tiling.window_px or (0, 0), part or Box(0, 0, *size)
    rows = tiling.spans(part.height, fixed[0], part.top, size[0])
    columns = tiling.spans(part.width, fixed[1], part.left, size[1])
    return [Tile(row, column) for row in rows for column in columns]


def usable_bytes(device: torch.device) -> float:
    """Return how much memory tiles may use. Memory that PyTorch keeps for reuse counts as free."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return (free_bytes(device) + kept) * SHARE_OF_FREE


def needed_bytes(field: ReceptiveField, pixels: float) -> float:
    """Return the memory that a network needs for an image with this number of pixels."""
    return pixels * field.bytes_per_px * WORKSPACE


def largest_side(field: ReceptiveField, budget: float, halo: int, most_pixels: float = math.inf) -> int:
    """Return the side of the largest square tile, without its halo, that fits in a memory budget."""
    side = math.isqrt(int(min(budget / max(needed_bytes(field, 1), 1), most_pixels))) - 2 * halo
    return side // field.multiple_px * field.multiple_px


def inexact_halo(field: ReceptiveField) -> int:
    """Return the halo for networks whose tiles change the result, however wide the halo is."""
    usual = _rounded_up(INEXACT_HALO_PX, field.multiple_px)
    return min(usual, field.tiled_halo_px) if field.is_traced else usual


def usable_halo(field: ReceptiveField) -> int:
    """Return the halo of tiles in the same image, which is exact unless tiles always change the result."""
    return inexact_halo(field) if field.obstacles else field.tiled_halo_px


def _rounded_up(side: int, multiple: int) -> int:
    return math.ceil(side / multiple) * multiple


BATCH_PX = 1 << 20  # small tiles are computed together up to this number of pixels, which keeps a GPU busy

Advance = Callable[[int], None]  # called with the number of input pixels just processed


@dataclass(eq=False)
class Composition:
    """The results for one image. Parts still being copied from the device are added when they are used."""

    size: tuple[int, int]  # height and width of the results
    tiling: Tiling
    num_tiles: int
    _results: dict[str, Pixels] = field(default_factory=dict)
    _coming: list[tuple[Landing, int, Tile, int]] = field(default_factory=list)  # with index in the batch, and scale

    def add(self, landing: Landing, index: int, tile: Tile, scale: int) -> None:
        """Add a tile's results. Results of earlier tiles are first fetched from the device."""
        self._take()
        self._coming.append((landing, index, tile, scale))

    def results(self) -> dict[str, Pixels]:
        """Return the results by name, each [h, w, c]; wait for them if necessary."""
        self._take()
        return self._results

    def _take(self) -> None:
        while self._coming:
            landing, index, tile, scale = self._coming.pop()
            inner, target = tile.inner(scale), tile.target(scale)
            for name, made in landing.arrays().items():
                if self.num_tiles == 1:
                    self._results[name] = made[index]
                    continue
                if name not in self._results:
                    self._results[name] = np.empty((*self.size, made.shape[-1]), made.dtype)
                self._results[name][target] = made[index][inner]


class Composer:
    """Applies an image model to images of any size."""

    def __init__(self, pool: RunnerPool, field: ReceptiveField, tile_px: int = 0, share: int = 1) -> None:
        """Use tiles with this side; if it is 0, the largest that fit in memory, which `share` devices share."""
        self.pool, self.tile_px, self.share = pool, tile_px, share
        self.image_model, self.device = pool.runners[0].image_model, pool.runners[0].device
        self.field = field
        self._measuring, self._tile_change = threading.Lock(), ""
        self._is_precision_measured = pool.runners[0].precision.name == "fp32"

    @property
    def batches_images(self) -> bool:
        """Whether equal images are computed together. On the host, this would not be faster."""
        return self.device.type == "cuda" and not self.field.obstacles and not self.image_model.recipe.window_px

    def compose(self, images: Sequence[Pixels], result_bytes: int, advance: Advance) -> list[Composition]:
        """Compute the results for images of one shape. If memory runs out, try again with smaller tiles."""
        tiling, size = self._tiling(images[0], result_bytes), (images[0].shape[0], images[0].shape[1])
        while True:
            try:
                results = self._computed(images, tiling, advance)
                results[0].tiling = self.with_changes(
                    tiling, lambda area: images[0][area.slices], Box(0, 0, *size), size
                )
                return results
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            torch.cuda.empty_cache()
            tiling = self._smaller(tiling, *size)

    def with_changes(self, tiling: Tiling, read: Read, box: Box, size: tuple[int, int]) -> Tiling:
        """Add to the note how much inexact tiles and the precision change results, each measured once."""
        runner, side, notes = self.pool.runners[0], tiling.side_px, [tiling.note] * bool(tiling.note)
        with self._measuring:
            try:
                if tiling.note and not tiling.window_px and side < max(box.height, box.width):
                    self._tile_change = self._tile_change or self._measure_tiles(tiling, read, box, size)
                    notes.append(self._tile_change)
                if not self._is_precision_measured:
                    self._is_precision_measured, part = True, box.centre(side)
                    where = "this image" if part == box else f"{part.width}×{part.height} pixels at the centre"
                    largest, _ = runner.difference(read, part, part, part, runner.precision)
                    notes.append(f"{runner.precision.name} changes {where} by at most {largest} of 255 levels")
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                notes.append("the difference could not be measured, because memory ran out")
        return replace(tiling, note="; ".join(notes))

    def _measure_tiles(self, tiling: Tiling, read: Read, box: Box, size: tuple[int, int]) -> str:
        """Compare a tile with the same pixels computed from an area that extends half a tile further on each side.

        If that area does not fit in memory, a tile half as large is used, which overestimates the change.
        """
        centre, runner, fp32 = box.centre(tiling.side_px), self.pool.runners[0], choose_precision("fp32", self.device)
        what = "tiles change"
        for _ in range(2):
            tile = min(plan_tiles(tiling, size, box), key=lambda tile: math.dist(tile.own[:2], centre[:2]))
            half = _rounded_up(tiling.side_px // 2, tiling.multiple_px)
            larger = tile.area.grown(half, size)
            if needed_bytes(self.field, larger.num_pixels) <= usable_bytes(self.device):
                break
            tiling, what = replace(tiling, side_px=half), "tiles half as large change"
        largest, mean = runner.difference(read, tile.own, tile.area, larger, fp32)
        return f"{what} the centre by at most {largest} of 255 levels (mean {mean})"

    def _computed(self, images: Sequence[Pixels], tiling: Tiling, advance: Advance) -> list[Composition]:
        height, width = images[0].shape[:2]
        scale, tiles = self.image_model.output_scale, plan_tiles(tiling, (height, width))
        made = [Composition((height * scale, width * scale), tiling, len(tiles)) for _ in images]
        batches = list(self._batches(tiles, len(images)))
        pixels = ([images[number][tile.area.slices] for number, tile in batch] for batch in batches)
        for batch, landing in zip(batches, self.pool.run_all(pixels), strict=True):
            for index, (number, tile) in enumerate(batch):
                made[number].add(landing, index, tile, scale)
            advance(sum(tile.own.num_pixels for _, tile in batch))
        return made

    def _batches(self, tiles: Sequence[Tile], num_images: int) -> Iterator[list[tuple[int, Tile]]]:
        """Yield the tiles of all images, each with its image's number, in batches of one shape."""
        parts = [(n, tile) for n in range(num_images) for tile in tiles]
        if self.batches_images:
            parts.sort(key=lambda part: part[1].area[2:])
        for shape, some in groupby(parts, key=lambda part: part[1].area[2:]):
            group, count = list(some), self._tiles_at_once(*shape)
            for start in range(0, len(group), count):
                yield group[start : start + count]

    def _tiles_at_once(self, height: int, width: int) -> int:
        if not self.batches_images:
            return 1
        fitting = int(usable_bytes(self.device) / max(needed_bytes(self.field, height * width), 1))
        return max(1, min(BATCH_PX // (height * width), fitting))

    def _tiling(self, pixels: Pixels, result_bytes: int) -> Tiling:
        """Return the tiles for an image, with a warning if they change the result."""
        (height, width), window_px = pixels.shape[:2], self.image_model.recipe.window_px
        if window_px and not self.tile_px:
            return tiles_of_training_size(window_px, (height, width))
        at_once = 3 if pixels.shape[-1] > self.image_model.spec.channels else 1  # a grey network gets RGB as 3 images
        tiling = self.choose_tiling(height, width, at_once, result_bytes)
        return replace(tiling, uniform=self.batches_images, multiple_px=self.field.multiple_px)

    def choose_tiling(self, height: int, width: int, at_once: int, result_bytes: int) -> Tiling:
        """Return the tiles for an image. If it needs several and their halo is not known yet, measure the halo."""
        while True:
            tiling = choose_tiling(
                self.field,
                (height, width),
                self.device,
                share=self.share * at_once,
                side=self.tile_px,
                result_bytes=result_bytes,
            )
            if tiling.side_px >= max(height, width) or not self.field.is_measurable:
                return tiling
            self.field = self.image_model.tiled_field

    def _smaller(self, tiling: Tiling, height: int, width: int) -> Tiling:
        """Return tiles half as large; raise UserError if they cannot be smaller."""
        self.field = self.image_model.tiled_field
        multiple = self.field.multiple_px
        side = min(tiling.side_px, max(height, width)) // 2 // multiple * multiple
        if side < max(multiple, SMALLEST_TILE_PX // 2):
            hint = ": use --accelerator cpu" if self.device.type == "cuda" else ""
            raise UserError(f"{self.device}: not enough memory for the smallest tile{hint}")
        note = tiling_warning(self.field) or tiling.note
        return Tiling(side, self.field.tiled_halo_px, note, multiple_px=multiple, uniform=tiling.uniform)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that a device or the host ran out of memory.

    On the host, torch raises a plain RuntimeError, in which only the allocator's name is the same on every platform.
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_ALLOCATOR in str(error)
