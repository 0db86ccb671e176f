"""Computes LPIPS, a perceptual distance, if its package is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from paceline.core.errors import describe_error
from paceline.models.lpips_network import has_lpips, load_lpips

Distance = Callable[[Tensor, Tensor], Tensor]


def perceptual_distance(device: torch.device) -> tuple[Distance | None, tuple[str, ...]]:
    """Return a function that computes LPIPS for images in 0…255 (None if unavailable), and a note if loading failed."""
    if not has_lpips():
        return None, ()
    try:
        network = load_lpips().to(device)
    except Exception as error:
        return None, (f"LPIPS is not measured, because its network cannot be loaded: {describe_error(error)}",)

    def distance(made: Tensor, target: Tensor) -> Tensor:
        one, other = ((levels.float() / 127.5 - 1).expand(-1, 3, -1, -1) for levels in (made, target))
        with torch.autocast(made.device.type, enabled=False):
            return cast(Tensor, network(one, other)).flatten().double()

    return distance, ()
