"""Detects gradient penalties in a loss: gradients that are computed with `create_graph=True`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paceline.core.errors import UserError


class RejectPenalty(TorchFunctionMode):
    """A context in which `torch.autograd.grad(..., create_graph=True)` raises a UserError.

    The context makes every operation slower, so use it only for the first forward pass of a phase.
    """

    def __init__(self, message: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._message = message

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func is torch.autograd.grad and given.get("create_graph"):
            raise UserError(self._message)
        return func(*args, **given)
