"""Whole results from tiles: halos make them match the result of the whole image; where not, the error is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import CPU_ALLOCATOR, UserError
from paceline.data.whole_source import free_bytes
from paceline.images.rectangles import Box, Span, Tile, fixed_halo, split_side
from paceline.inference.receptive_field import ReceptiveField
from paceline.inference.runner import (
    LEVELS,
    Landing,
    Pixels,
    RunnerPool,
    from_pixels,
    in_levels,
    pixel_format,
    tensor_of,
    transform,
)

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
    note: str = ""
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
        self._measured_error = ""

    @property
    def batches_images(self) -> bool:
        """Whether equal images are computed together. On the host, this would not be faster."""
        return self.device.type == "cuda" and not self.field.obstacles and not self.image_model.recipe.window_px

    def compose(self, images: Sequence[Pixels], result_bytes: int, advance: Advance) -> list[Composition]:
        """Compute the results for images of one shape. If memory runs out, try again with smaller tiles."""
        tiling = self._tiling(images[0], result_bytes)
        while True:
            try:
                return self._computed(images, tiling, advance)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            torch.cuda.empty_cache()
            tiling = self._smaller(tiling, *images[0].shape[:2])

    def _computed(self, images: Sequence[Pixels], tiling: Tiling, advance: Advance) -> list[Composition]:
        height, width = images[0].shape[:2]
        scale, tiles = self.image_model.output_scale, plan_tiles(tiling, (height, width))
        made = [Composition((height * scale, width * scale), tiling, len(tiles)) for _ in images]
        batches = list(self._batches(tiles, len(images)))
        pixels = ([images[number][tile.source] for number, tile in batch] for batch in batches)
        for batch, landing in zip(batches, self.pool.run_all(pixels), strict=True):
            for index, (number, tile) in enumerate(batch):
                made[number].add(landing, index, tile, scale)
            advance(sum(tile.num_pixels for _, tile in batch))
        return made

    def _batches(self, tiles: Sequence[Tile], num_images: int) -> Iterator[list[tuple[int, Tile]]]:
        """Yield the tiles of all images, each with its image's number, in batches of one shape."""
        parts = sorted(((n, tile) for n in range(num_images) for tile in tiles), key=lambda part: part[1].shape)
        if not self.batches_images:
            parts = [(n, tile) for n in range(num_images) for tile in tiles]
        for shape, some in groupby(parts, key=lambda part: part[1].shape):
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
        if tiling.side_px < max(height, width) and self.field.obstacles:
            tiling = replace(tiling, note=f"{tiling.note}; {self.tile_error(pixels, tiling)}")
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

    def tile_error(self, pixels: Pixels, tiling: Tiling) -> str:
        """Return how much tiles change the result, measured on the first image that needs them."""
        try:
            self._measured_error = self._measured_error or self._measure_error(pixels, tiling)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return "the effect of the tiles could not be measured, because memory ran out"
        return self._measured_error

    def _measure_error(self, pixels: Pixels, tiling: Tiling) -> str:
        """Return a phrase with the largest and the mean change at the image's centre, in 8-bit levels.

        A tile is compared with the same pixels computed from an area that extends half a tile further on each side. If
        that area does not fit in memory, a tile half as large is compared with a full tile, which overestimates the
        change.
        """
        size, side, multiple = (pixels.shape[0], pixels.shape[1]), tiling.side_px, self.field.multiple_px
        tile, what = _central(size, side, multiple), "tiles change"
        larger = tile.grown(tiling.halo_px + max(side // 2, multiple), size)
        if needed_bytes(self.field, larger.num_pixels) > usable_bytes(self.device):
            larger = tile.grown(tiling.halo_px, size)
            side = max(multiple, side // 2 // multiple * multiple)
            tile, what = _central(size, side, multiple), "tiles half as large change"
        near, far = (self._result(pixels, area, tile) for area in (tile.grown(tiling.halo_px, size), larger))
        change = (near - far).abs() * LEVELS
        largest, mean = in_levels(float(change.max())), in_levels(float(change.mean()))
        return f"{what} the centre by at most {largest} of 255 levels (mean {mean})"

    def _result(self, pixels: Pixels, context: Box, tile: Box) -> Tensor:
        """Return the results for a tile, computed from a larger area."""
        rows, columns = tile.moved_from(context).scaled(self.image_model.output_scale).slices
        seen = tensor_of(pixels[context.slices]).to(self.device)
        values = transform(self.image_model, from_pixels(seen, pixel_format(self.image_model, seen)))
        return torch.stack([made[0, rows, columns] for made in values.by_name.values()])

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


def _central(size: tuple[int, int], side: int, multiple: int) -> Box:
    """Return a tile near the centre of the image, aligned to a multiple."""
    top, left = (max(0, (length - side) // 2 // multiple * multiple) for length in size)
    return Box(top, left, side, side).grown(0, size)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that a device or the host ran out of memory.

    On the host, torch raises a plain RuntimeError, in which only the allocator's name is the same on every platform.
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_ALLOCATOR in str(error)
