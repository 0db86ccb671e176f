"""Rejects networks that do not fit in memory before their weights are allocated.

Linux lets a process allocate more memory than the machine has. Without this check, a network that is far too large
would fill the memory before it fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paceline.core.errors import UserError
from paceline.core.host_memory import free_host_bytes

LARGE_BYTES = 2**28  # the free memory is not looked up for smaller tensors
FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)


class WeightsLimit(TorchFunctionMode):
    """A context in which a recipe is built: raises UserError for a tensor that is larger than the free memory."""

    def __init__(self, recipe_name: str) -> None:
        super().__init__()
        self._recipe_name = recipe_name

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func in FACTORIES and str(given.get("device")) != "meta":  # a tensor on the device "meta" has no data
            self._check(_bytes_of(args, given))
        return func(*args, **given)

    def _check(self, size: int) -> None:
        if size > LARGE_BYTES and size > (free := free_host_bytes()):
            raise UserError(
                f"recipe {self._recipe_name!r}: one layer needs {size / 1e9:,.1f} GB of memory, but "
                f"{free / 1e9:.1f} GB is free; choose a smaller network, for example with fewer channels"
            )


def _bytes_of(args: Sequence[Any], given: Mapping[str, Any]) -> int:
    """Return the size of the tensor that a call such as `torch.empty(2, 3)` or `torch.empty((2, 3))` creates."""
    sizes = given.get("size", args)
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = sizes[0]
    dtype: torch.dtype = given.get("dtype") or torch.get_default_dtype()
    return math.prod(map(int, sizes)) * dtype.itemsize
