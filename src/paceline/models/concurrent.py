"""Runs several independent networks on the same images, concurrently on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from paceline.core.gpu import run_concurrently


def apply_concurrently(networks: Sequence[Callable[[Tensor], Tensor]], images: Tensor) -> list[Tensor]:
    """Return each network's output for the same images."""
    return run_concurrently([partial(network, images) for network in networks], images.device)
