"""Adam whose second-moment decay rate changes during training, also inside a captured step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.parallel.torch_internals import adam_update


class ScheduledAdam(Optimizer):
    """Adam or AdamW with beta2 in a tensor, since torch's fused Adam only accepts a number.

    Args:
        groups: Parameter groups, each with "params", "lr" (a number or a tensor) and "weight_decay".
        beta1: The decay rate of the first moment.
        beta2: The decay rate of the second moment, a scalar tensor on the parameters' device. The caller changes it.
        is_decoupled: Whether weight decay is applied to the weights (AdamW) instead of the gradients.
    """

    EPSILON = 1e-8

    def __init__(self, groups: list[dict[str, Any]], beta1: float, beta2: Tensor, *, is_decoupled: bool) -> None:
        super().__init__(groups, {})
        self.beta1, self.beta2, self.is_decoupled = beta1, beta2, is_decoupled

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights from their gradients. Nothing waits for the device."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
                    self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
            decay, gradients = group["weight_decay"], [parameter.grad for parameter in parameters]
            if decay and self.is_decoupled:
                for parameter in parameters:
                    parameter.mul_(1 - group["lr"] * decay)
            elif decay:
                gradients = [g + decay * parameter for g, parameter in zip(gradients, parameters, strict=True)]
            states = [self.state[parameter] for parameter in parameters]
            adam_update(
                parameters,
                gradients,
                [state["step"] for state in states],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                group["lr"],
                self.beta1,
                self.beta2,
                self.EPSILON,
            )
