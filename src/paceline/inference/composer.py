"""Computes whole results from tiles: chooses the tiles, runs them in batches, and joins them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import torch

from paceline.core.errors import CPU_ALLOCATOR, UserError
from paceline.inference.forward import Pixels
from paceline.inference.receptive_field import ReceptiveField
from paceline.inference.tile_error import describe_tile_error
from paceline.inference.tile_runner import Landing, RunnerPool
from paceline.inference.tiling import (
    Tile,
    Tiling,
    choose_tiling,
    needed_bytes,
    plan_tiles,
    tiles_of_training_size,
    tiling_warning,
    usable_bytes,
)

BATCH_PX = 1 << 20  # small tiles are computed together up to this number of pixels, which keeps a GPU busy

Advance = Callable[[int], None]  # called with the number of input pixels just processed


@dataclass(frozen=True)
class Demands:
    """The requested tile size, and the number of devices that share the memory."""

    tile_px: int = 0  # side of a tile; 0 for the largest that fits in memory
    share: int = 1  # number of devices that share the memory


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

    def __init__(self, pool: RunnerPool, demands: Demands, field: ReceptiveField) -> None:
        self.pool, self.demands = pool, demands
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
        if window_px and not self.demands.tile_px:
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
                share=self.demands.share * at_once,
                side=self.demands.tile_px,
                result_bytes=result_bytes,
            )
            if tiling.side_px >= max(height, width) or not self.field.is_measurable:
                return tiling
            self.field = self.image_model.tiled_field

    def tile_error(self, pixels: Pixels, tiling: Tiling) -> str:
        """Return how much tiles change the result, measured on the first image that needs them."""
        try:
            self._measured_error = self._measured_error or describe_tile_error(
                self.image_model, self.field, pixels, tiling, self.device
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return "the effect of the tiles could not be measured, because memory ran out"
        return self._measured_error

    def _smaller(self, tiling: Tiling, height: int, width: int) -> Tiling:
        """Return tiles half as large; raise UserError if they cannot be smaller."""
        self.field = self.image_model.tiled_field
        side = min(tiling.side_px, max(height, width))
        exact = Tiling(side, self.field.tiled_halo_px, tiling_warning(self.field) or tiling.note)
        halved = exact.halved(self.field.multiple_px)
        if halved is None:
            hint = ": use --accelerator cpu" if self.device.type == "cuda" else ""
            raise UserError(f"{self.device}: not enough memory for the smallest tile{hint}")
        return replace(halved, uniform=tiling.uniform, multiple_px=self.field.multiple_px)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that a device or the host ran out of memory.

    On the host, torch raises a plain RuntimeError, in which only the allocator's name is the same on every platform.
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_ALLOCATOR in str(error)
