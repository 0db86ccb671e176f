"""Computes networks with a small halo in parts, within the tiles of a model whose halo is large.

DeepLIIF feeds the results of networks with a small halo into networks whose halo is 1,533 pixels wide. Tiles must be
much larger than this halo. The feature maps of the former networks, which have the full resolution, would limit the
size of the tiles. Computed in parts with halos of their own, they have the same values and need less memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from paceline.inference.image_model import ImageModel
from paceline.inference.receptive_field import ReceptiveField, receptive_field, uncounted
from paceline.inference.tiling import Tiling, largest_side, plan_tiles, usable_bytes

LARGE_HALO_PX, SMALL_HALO_PX = 1024, 256
LARGEST_PART_PX = 4096
HALOS_PER_PART = 8  # smaller parts would mostly compute halos
MEMORY_SHARE = 0.25  # of the memory that tiles may use

Forward = Callable[[Tensor], Tensor]


class _InParts:
    """A network's forward pass on parts of the images. The results are as large as the images."""

    def __init__(self, forward: Forward, tiling: Tiling) -> None:
        self._forward, self._tiling = forward, tiling

    def __call__(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        with uncounted():
            if max(height, width) <= self._tiling.side_px:
                return self._forward(images)
            whole: Tensor | None = None
            for tile in plan_tiles(self._tiling, (height, width)):
                made = self._forward(images[..., *tile.source])
                whole = made.new_empty((*made.shape[:2], height, width)) if whole is None else whole
                whole[..., *tile.target(1)] = made[..., *tile.inner(1)]
            assert whole is not None
            return whole


def compute_in_parts(image_model: ImageModel, device: torch.device) -> ReceptiveField:
    """Compute networks with a small halo in parts if the model's halo is large; return the model's receptive field."""
    field, channels = image_model.receptive_field, image_model.spec.channels
    if field.obstacles or field.halo_px < LARGE_HALO_PX:
        return field
    for network in _networks(image_model.recipe):
        if any(id(weight) in field.used for weight in network.parameters()):
            tiling = _parts_of(network, channels, device)
            if tiling:
                network.forward = _InParts(network.forward, tiling)
    return receptive_field(image_model.recipe.image_to_image, channels, image_model.output_scale)


def _networks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the networks of a recipe, which may be in containers."""
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
