"""Computes LPIPS, a perceptual distance, if its package is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

Distance = Callable[[Tensor, Tensor], Tensor]


def perceptual_distance(device: torch.device) -> tuple[Distance | None, tuple[str, ...]]:
    """Return a function that computes LPIPS for images in 0…255 (None if unavailable), and a note if loading failed."""
    if importlib.util.find_spec("lpips") is None:
        return None, ()
    try:
        network = _lpips_network().to(device)
    except Exception as error:
        return None, (f"LPIPS will not be measured: {str(error).splitlines()[0]}",)

    def distance(made: Tensor, target: Tensor) -> Tensor:
        one, other = ((levels.float() / 127.5 - 1).expand(-1, 3, -1, -1) for levels in (made, target))
        with torch.autocast(made.device.type, enabled=False):
            return cast(Tensor, network(one, other)).flatten().double()

    return distance, ()


@lru_cache(maxsize=1)
def _lpips_network() -> torch.nn.Module:
    import lpips

    network: torch.nn.Module = lpips.LPIPS(net="alex", verbose=False)
    return network.eval().requires_grad_(False)
