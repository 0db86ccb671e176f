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

    Like torch's fused optimizers, it unscales gradients and skips a step after an overflow on the device. For other
    optimizers, a GradScaler makes the host wait in every step to find out whether there was an overflow.

    Args:
        groups: Parameter groups, each with "params", "lr" (a number or a tensor) and "weight_decay".
        beta1: The decay rate of the first moment.
        beta2: The decay rate of the second moment, a scalar tensor on the parameters' device. The caller changes it.
        is_decoupled: Whether weight decay is applied to the weights (AdamW) instead of the gradients.
    """

    EPSILON = 1e-8
    _step_supports_amp_scaling = True  # GradScaler sets `grad_scale` and `found_inf` for the duration of a step

    def __init__(self, groups: list[dict[str, Any]], beta1: float, beta2: Tensor, *, is_decoupled: bool) -> None:
        super().__init__(groups, {})
        self.beta1, self.beta2, self.is_decoupled = beta1, beta2, is_decoupled

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights from their gradients. Nothing waits for the device."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        overflow: Tensor | None = getattr(self, "found_inf", None)
        is_skipped = None if overflow is None else overflow > 0
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
                    self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
            gradients = [parameter.grad for parameter in parameters]
            if scale is not None:
                inverse = scale.double().reciprocal().float()  # as in GradScaler
                gradients = [gradient * inverse for gradient in gradients]
            lr, decay = group["lr"], group["weight_decay"]
            if decay and self.is_decoupled:
                for parameter in parameters:
                    parameter.mul_(_unless(is_skipped, 1 - lr * decay, 1.0))
            elif decay:
                gradients = [g + decay * parameter for g, parameter in zip(gradients, parameters, strict=True)]
            self._update(parameters, gradients, lr, is_skipped)

    def _update(
        self, parameters: list[Tensor], gradients: list[Tensor], lr: float | Tensor, is_skipped: Tensor | None
    ) -> None:
        """Update parameters that have made the same number of steps."""
        states = [self.state[parameter] for parameter in parameters]
        steps, means = [state["step"] for state in states], [state["exp_avg"] for state in states]
        step = (steps[0] + 1).to(self.beta2.dtype)
        # In a skipped step, each gradient is replaced with its mean, so the mean does not change.
        gradients = [_unless(is_skipped, one, mean) for one, mean in zip(gradients, means, strict=True)]
        adam_update(
            parameters,
            gradients,
            steps,
            means,
            [state["exp_avg_sq"] for state in states],
            made=1.0 if is_skipped is None else [torch.where(is_skipped, 0.0, 1.0)] * len(steps),
            rate=_unless(is_skipped, lr / (1 - self.beta1**step), 0.0),
            beta1=self.beta1,
            beta2=_unless(is_skipped, self.beta2, 1.0),
            root_factor=(1 - self.beta2**step).rsqrt(),
            epsilon=self.EPSILON,
        )


def _unless(is_skipped: Tensor | None, value: Any, otherwise: float | Tensor) -> Any:
    """Return `value`, or `otherwise` if the GradScaler skips the step. `is_skipped` is None without a GradScaler."""
    return value if is_skipped is None else torch.where(is_skipped, otherwise, value)
