"""Several networks on the same images. They are independent, so a GPU may run them at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from paceline.core.streams import run_concurrently


def apply_concurrently(networks: Sequence[Callable[[Tensor], Tensor]], images: Tensor) -> list[Tensor]:
    """Return each network's output for the same images."""
    return run_concurrently([partial(network, images) for network in networks], images.device)
