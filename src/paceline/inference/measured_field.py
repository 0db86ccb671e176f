"""Measures the receptive field of networks that divide images into windows, which cannot be traced.

Part of a random strip is replaced, and the rows of the result that change show how far the replaced pixels reach. The
network runs in float64, and a tile computed with the measured halo is compared with the result for the whole strip.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.contracts.recipe import Recipe
from paceline.inference.receptive_field import ReceptiveField

WINDOW_SIZES = ("window_size", "win_size", "split_size", "stripe_size")  # attributes of modules that use windows
STRIP_LENGTHS_PX = (256, 512, 1024)
SHORTEST_SIDE_PX = 16  # some networks pad smaller images
INVISIBLE = 1e-12  # smaller changes are rounding errors
SAME = 1e-9  # largest difference between a tile and the same part of the whole strip, in float64


def window_multiple(network: nn.Module) -> int:
    """Return the least common multiple of the sizes of the windows into which a network divides images."""
    sizes = {size for module in network.modules() for name in WINDOW_SIZES for size in _sizes(vars(module).get(name))}
    return math.lcm(*sizes)


def measured_field(recipe: Recipe, channels: int, field: ReceptiveField) -> ReceptiveField:
    """Return the receptive field with a measured halo; if tiles still differ, with the reason as an obstacle."""
    exact = copy.deepcopy(recipe).double().eval()
    device = next(exact.parameters()).device
    strips = _Strips(exact.image_to_image, channels, field.multiple_px, recipe.output_scale, device)
    with torch.no_grad():
        reaches = [strips.reach(dim) for dim in (-2, -1)]
        if None in reaches:
            beyond = f"the result depends on pixels more than {STRIP_LENGTHS_PX[-1] // 2} pixels away"
            return replace(field, obstacles=(beyond,), is_traced=True)
        halo = max(reach for reach in reaches if reach is not None)
        measured = replace(field, halo_px=halo, obstacles=(), is_traced=True)
        if not all(strips.tile_is_same(dim, measured.tiled_halo_px) for dim in (-2, -1)):
            return replace(measured, obstacles=("the result depends on the position in the image",))
    return measured


class _Strips:
    """Long narrow random images, and a function that maps images to images."""

    def __init__(
        self,
        image_to_image: Callable[[Tensor], dict[str, Tensor]],
        channels: int,
        multiple: int,
        scale: int,
        device: torch.device,
    ) -> None:
        self.image_to_image, self.channels, self.scale, self.device = image_to_image, channels, scale, device
        self.multiple = multiple
        self.side = math.ceil(SHORTEST_SIDE_PX / multiple) * multiple
        self.generator = torch.Generator().manual_seed(0)

    def reach(self, dim: int) -> int | None:
        """Return how many pixels beyond a tile's edge affect the tile; None if more than half of the longest strip."""
        for length in STRIP_LENGTHS_PX:
            middle = max(2, length // 2 // self.multiple) * self.multiple
            strip, other = (self._strip(dim, 2 * middle) for _ in range(2))
            start, other_start = (one.narrow(dim, 0, middle) for one in (strip, other))
            end, other_end = (one.narrow(dim, middle, middle) for one in (strip, other))
            whole = self._rows(strip, dim)
            with_other_end = self._rows(torch.cat([start, other_end], dim), dim)
            with_other_start = self._rows(torch.cat([other_start, end], dim), dim)
            unchanged_before = int(_first(with_other_end, whole))
            unchanged_after = int(_first(with_other_start.flip(0), whole.flip(0)))
            reach = math.ceil((middle * self.scale - min(unchanged_before, unchanged_after)) / self.scale)
            if reach <= middle - self.multiple:
                return max(0, reach)
        return None

    def tile_is_same(self, dim: int, halo: int) -> bool:
        """Return whether the middle of a strip is the same if it is computed from a tile with this halo."""
        length = 2 * halo + 4 * self.multiple
        strip = self._strip(dim, length)
        whole = self._rows(strip, dim)
        tile = self._rows(strip.narrow(dim, self.multiple, length - 2 * self.multiple), dim)
        inner = slice(halo * self.scale, (halo + 2 * self.multiple) * self.scale)
        offset = self.multiple * self.scale
        wanted = whole[inner.start + offset : inner.stop + offset]
        return bool((tile[inner] - wanted).abs().max() < SAME)

    def _strip(self, dim: int, length: int) -> Tensor:
        shape = [1, self.channels, self.side, self.side]
        shape[dim] = length
        # Values from -0.5 to 0.5: results beyond [-1, 1] would be clipped, which hides changes.
        return (torch.rand(shape, dtype=torch.float64, generator=self.generator) - 0.5).to(self.device)

    def _rows(self, strip: Tensor, dim: int) -> Tensor:
        """Return all results for a strip, with its long side as the first dimension."""
        results = [made.movedim(dim, 0).flatten(1) for made in self.image_to_image(strip).values()]
        return torch.cat(results, dim=1)


def _first(rows: Tensor, others: Tensor) -> Tensor:
    """Return the index of the first row that differs; the number of rows if none does."""
    differs = (rows - others).abs().amax(1) > INVISIBLE
    return torch.where(differs.any(), differs.int().argmax(), torch.tensor(len(differs), device=rows.device))


def _sizes(value: object) -> Iterator[int]:
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, int) and not isinstance(one, bool) and one > 0:
            yield one
