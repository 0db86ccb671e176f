"""Rejects networks that do not fit in memory, together with what training adds, before the memory is allocated.

Linux lets a process allocate more memory than the machine has. Without this check, a network that is far too large
would fill the memory, and the kernel would kill the run without a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paceline.config.resolve import Config
from paceline.config.spans import Span
from paceline.contracts.recipe import Recipe
from paceline.core.errors import UserError
from paceline.core.host_memory import free_host_bytes, own_host_bytes
from paceline.parallel.shards import own_rows
from paceline.training.learner import num_states

LARGE_BYTES = 2**28  # the free memory is looked up each time after so many bytes
FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)


class WeightsLimit(TorchFunctionMode):
    """A context in which a recipe is built: raises UserError before its layers fill the memory."""

    def __init__(self, recipe_name: str) -> None:
        super().__init__()
        self._recipe_name = recipe_name
        self._before = own_host_bytes()
        self._unchecked = 0  # bytes of new tensors since the free memory was looked up; some may already be released

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
        self._unchecked += size
        if self._unchecked <= LARGE_BYTES:
            return
        self._unchecked, free = 0, free_host_bytes()
        if size > free - LARGE_BYTES:
            earlier = max(0, own_host_bytes() - self._before)  # of the layers before this one
            needed = f"one layer needs {size / 1e9:,.1f}"
            if size <= free + earlier:
                needed = f"the networks need more than {(size + earlier) / 1e9:,.1f}"
            raise UserError(
                f"recipe {self._recipe_name!r}: {needed} GB of memory, but {(free + earlier) / 1e9:.1f} GB is free; "
                "choose a smaller network, for example with fewer channels"
            )


def check_training_fits(config: Config, recipe: Recipe, num_sharing: int) -> None:
    """Raise UserError if a host's memory is too small for what training on the CPU adds to the weights.

    `num_sharing` is the number of processes on the host. The networks are updated one after another, so only the
    largest gradients count.
    """
    gradients, states = [0], 0
    for name, network in recipe.networks.items():
        settings = config.learner_of(name)
        size = sum(own_rows(parameter).nbytes for parameter in network.parameters() if parameter.requires_grad)
        gradients.append(size)
        has_ema = name in recipe.ema and Span.parse(settings.ema_half_life, "ema_half_life").amount > 0
        states += size * (num_states(settings) + has_ema)
    needed = num_sharing * (max(gradients) + states)
    is_known = own_host_bytes() > 0  # otherwise, the free memory is a guess
    if is_known and needed > LARGE_BYTES and needed > (free := free_host_bytes()):
        raise UserError(
            f"recipe {config.recipe_name!r}: gradients, optimizer state and EMA need {needed / 1e9:,.1f} GB of memory, "
            f"but {free / 1e9:.1f} GB is free; choose a smaller network, for example with fewer channels"
        )


def _bytes_of(args: Sequence[Any], given: Mapping[str, Any]) -> int:
    """Return the size of the tensor that a call such as `torch.empty(2, 3)` or `torch.empty((2, 3))` creates."""
    sizes = given.get("size", args)
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = sizes[0]
    dtype: torch.dtype = given.get("dtype") or torch.get_default_dtype()
    return math.prod(map(int, sizes)) * dtype.itemsize
