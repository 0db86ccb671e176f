"""Computes networks with a small halo in parts, so that a model with a large halo can use large tiles.

DeepLIIF, for example, feeds the results of networks with a halo of 84 pixels into networks with a halo of 1,533 pixels.
Tiles should be much larger than the large halo, but the networks with the small halo would need too much memory for
that: their feature maps have the full resolution. So they process each tile in parts, which gives the same results.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from paceline.inference.image_model import ImageModel
from paceline.inference.receptive_field import ReceptiveField, receptive_field, uncounted
from paceline.inference.tiling import Tiling, largest_side, plan_tiles, usable_bytes

LARGE_HALO_PX, SMALL_HALO_PX = 1024, 256
LARGEST_PART_PX = 4096
HALOS_PER_PART = 8  # smaller parts would mostly compute halos
MEMORY_SHARE = 0.25  # of the memory that tiles may use


class _InParts(nn.Module):
    """Mixin for a network that computes parts of the images. The results are as large as the images."""

    division: Tiling

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        with uncounted():
            if max(height, width) <= self.division.side_px:
                at_once: Tensor = super().forward(images)
                return at_once
            whole: Tensor | None = None
            for tile in plan_tiles(self.division, (height, width)):
                made = super().forward(images[..., *tile.source])
                whole = made.new_empty((*made.shape[:2], height, width)) if whole is None else whole
                whole[..., *tile.target(1)] = made[..., *tile.inner(1)]
            assert whole is not None
            return whole


@cache
def _class_in_parts(network: type[nn.Module]) -> type[nn.Module]:
    return type(network.__name__, (_InParts, network), {})


def compute_in_parts(image_model: ImageModel, device: torch.device) -> ReceptiveField:
    """Compute networks with a small halo in parts if the model's halo is large; return the model's receptive field.

    The networks must still be on the CPU.
    """
    field, channels = image_model.receptive_field, image_model.spec.channels
    if field.obstacles or field.halo_px < LARGE_HALO_PX:
        return field
    for network in _networks(image_model.recipe):
        if any(id(weight) in field.used for weight in network.parameters()):
            division = _parts_of(network, channels, device)
            if division:
                kind: Any = type(network)
                network.__class__ = _class_in_parts(kind)
                network.division = division  # type: ignore[assignment]
    return receptive_field(image_model.recipe.image_to_image, channels, image_model.output_scale)


def _networks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the networks of a recipe, including those in a ModuleDict or ModuleList."""
    for child in module.children():
        if isinstance(child, nn.ModuleDict | nn.ModuleList):
            yield from _networks(child)
        else:
            yield child


def _parts_of(network: nn.Module, channels: int, device: torch.device) -> Tiling | None:
    """Return how a network's images are divided; None if its halo is not small, or if parts would not fit in memory."""
    own = receptive_field(lambda images: {"": network(images)}, channels)
    side = min(LARGEST_PART_PX, largest_side(own, usable_bytes(device) * MEMORY_SHARE, own.tiled_halo_px))
    if own.obstacles or own.halo_px > SMALL_HALO_PX or side < HALOS_PER_PART * own.tiled_halo_px:
        return None
    return Tiling(side // own.multiple_px * own.multiple_px, own.tiled_halo_px)
