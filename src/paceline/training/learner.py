"""A learner: one network's optimizer, learning rates, gradient scaler, clipping and EMA."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from paceline.config.settings import LearnerSettings
from paceline.contracts.recipe import Clock
from paceline.core.errors import UserError
from paceline.parallel.batchnorm import sum_over_processes
from paceline.parallel.precision import Precision
from paceline.parallel.shards import is_sharded, own_rows
from paceline.parallel.torch_internals import adam_update, lerp_all, norms_of, undecorated


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


def clip_rows(rows: Sequence[Tensor], maximum: float) -> None:
    """Scale the gradients so that their norm across all processes is at most `maximum`."""
    gradients = _gradients(rows)
    own = nn.utils.get_total_norm(gradients) if gradients else rows[0].new_zeros(())  # a process may have no rows
    nn.utils.clip_grads_with_norm_(rows, maximum, sum_over_processes(own.square().reshape(1))[0].sqrt())


def spread_overflow(rows: Sequence[Tensor]) -> None:
    """Make a gradient infinite in every process if any process has a gradient that is not finite.

    Each process's GradScaler then skips the same steps. The values stay on the device, so the host does not wait.
    """
    gradients = _gradients(rows)
    overflow = torch.stack([~gradient.isfinite().all() for gradient in gradients]).any()
    num_processes = sum_over_processes(overflow.float().reshape(1))[0]
    gradients[0].add_(torch.where(num_processes > 0, torch.inf, 0.0))


def _gradients(rows: Sequence[Tensor]) -> list[Tensor]:
    return [own.grad for own in rows if own.grad is not None and own.numel()]


def relative_rates(network: nn.Module, decay: float) -> dict[str, float]:
    """Return the learning rate of each parameter relative to the last layer's: decay ** (layers after it).

    The layers of a network from timm are its blocks. In any other network, each direct submodule with parameters is a
    layer.
    """
    if decay == 1:
        return {}
    if matcher := getattr(network, "group_matcher", None):  # timm's patterns for the names of each layer's parameters
        models: Any = importlib.import_module("timm.models")
        numbers: dict[str, int] = models.group_parameters(network, matcher(coarse=False), reverse=True)
    else:
        children = {name: name.partition(".")[0] for name, _ in network.named_parameters()}
        order = {child: number for number, child in enumerate(dict.fromkeys(children.values()))}
        numbers = {name: order[child] for name, child in children.items()}
    last = max(numbers.values(), default=0)
    return {name: decay ** (last - number) for name, number in numbers.items()}


RELATIVE_RATE = "relative_rate"  # key of a parameter group: its learning rate divided by the learner's


class Learner:
    """Updates a network's weights from their gradients."""

    def __init__(
        self,
        name: str,
        network: nn.Module,
        settings: LearnerSettings,
        learning_rate: Callable[[int], float],
        precision: Precision,
        ema_half_life: int,
        burn_in: int = 0,
    ) -> None:
        self.name, self.network, self.settings, self.learning_rate = name, network, settings, learning_rate
        # Parameters that the recipe froze stay frozen.
        self.named: dict[str, Tensor] = {key: p for key, p in network.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())
        if not self.parameters:
            raise UserError(f"network {name!r} has no parameter that requires grad: there is nothing to train")
        self.is_sharded = any(map(is_sharded, self.parameters))
        # The optimizer and the EMA use this process's rows of a sharded parameter, since rows are plain tensors.
        self.rows = {key: own_rows(p) if self.is_sharded else p for key, p in self.named.items()}
        rates = relative_rates(network, settings.layer_decay)
        if not burn_in:  # without a burn-in, beta2 is constant
            settings = replace(settings, burn_in_beta2=0.0)
        self.optimizer = make_optimizer(self.rows, settings, precision, rates)
        self.scaler = torch.amp.GradScaler(precision.device_type, enabled=precision.scaled)
        if self.scaler.is_enabled() and not any(own.numel() for own in self.rows.values()):
            raise UserError(
                f"--precision fp16: network {name!r} is too small for this number of devices: at least one "
                "device would hold none of its weights; use --precision bf16, or --strategy ddp"
            )
        self.ema_half_life, self.burn_in = ema_half_life, burn_in
        # In a burn-in, the half-life changes: it is in a tensor, so that it can change in a captured step.
        self.ema_rate = torch.zeros((), device=self.parameters[0].device, dtype=precision.weights) if burn_in else None
        self.ema = [p.detach().clone() for p in self.rows.values()] if ema_half_life else []

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to call `backward` on, scaled up in fp16."""
        return self.scaler.scale(loss)

    def set_rate(self, images: int) -> None:
        """Set the learning rate and the other scheduled values for the next step, given the images seen so far."""
        rate = self.learning_rate(images)
        for group in self.optimizer.param_groups:
            own = rate * group[RELATIVE_RATE]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(own)
            else:
                group["lr"] = own
        clock = Clock(images, 0, self.burn_in)
        if isinstance(self.optimizer, ScheduledAdam):
            self.optimizer.beta2.fill_(clock.anneal(self.settings.burn_in_beta2, self.settings.beta2))
        if self.ema and self.ema_rate is not None:
            half_life = clock.anneal(0.0, self.ema_half_life)
            self.ema_rate.fill_(1 / half_life if half_life else float("inf"))

    def step(self) -> None:
        """Update the weights from their gradients."""
        rows = list(self.rows.values())
        if self.is_sharded:
            for parameter, own in zip(self.parameters, rows, strict=True):
                own.grad = None if parameter.grad is None else own_rows(parameter.grad)
            if self.scaler.is_enabled():
                spread_overflow(rows)
        if self.settings.clip:
            self.scaler.unscale_(self.optimizer)
            if self.is_sharded:
                clip_rows(rows, self.settings.clip)
            else:
                nn.utils.clip_grad_norm_(rows, self.settings.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.clear_gradients()

    def without_gradient(self) -> list[str]:
        """Return the names of the parameters that have no gradient."""
        return [name for name, parameter in self.named.items() if parameter.grad is None]

    def clear_gradients(self) -> None:
        """Remove the gradients, so that the next backward pass starts from none."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.is_sharded:
            for parameter in self.parameters:
                parameter.grad = None

    def state_like(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return tensors with the dtypes and shapes of the optimizer's state for a parameter."""
        if self.settings.optimizer == "sgd":
            return {"momentum_buffer": parameter} if self.settings.momentum else {}
        return {"step": torch.zeros((), dtype=torch.float32), "exp_avg": parameter, "exp_avg_sq": parameter}

    def reset_ema(self) -> None:
        """Reset the EMA to the current weights."""
        for ema_tensor, rows in zip(self.ema, self.rows.values(), strict=False):  # `self.ema` is empty without an EMA
            ema_tensor.copy_(rows.detach())

    def update_ema(self, images: int) -> None:
        """Update the EMA after a step that used this many images."""
        if not self.ema:
            return
        weight: float | Tensor = 1 - 0.5 ** (images / self.ema_half_life)
        if self.ema_rate is not None:
            weight = 1 - torch.exp2(-images * self.ema_rate)
        with torch.no_grad():
            lerp_all(self.ema, list(self.rows.values()), weight)

    @torch.no_grad()
    def are_finite(self) -> Tensor:
        """Return whether this process's weights are finite, as a tensor on the device."""
        rows = [own for own in self.rows.values() if own.numel()]  # a process may have no rows of a small tensor
        if not rows:
            return torch.ones((), dtype=torch.bool, device=self.parameters[0].device)
        return torch.stack(norms_of(rows, float("inf"))).isfinite().all()

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Swap the network's parameters for their EMA inside the context; buffers keep their latest values."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for position, (ema_tensor, rows) in enumerate(zip(self.ema, self.rows.values(), strict=False)):
            if self.is_sharded:  # FSDP gathers weights from this memory, so it must not be replaced
                kept = rows.clone()
                rows.copy_(ema_tensor)
                ema_tensor.copy_(kept)
            else:
                self.ema[position], rows.data = rows.data, ema_tensor


def num_states(settings: LearnerSettings) -> int:
    """Return how many tensors of a parameter's size the optimizer keeps for it."""
    return int(settings.momentum > 0) if settings.optimizer == "sgd" else 2


def make_optimizer(
    named: dict[str, Tensor], settings: LearnerSettings, precision: Precision, rates: Mapping[str, float]
) -> Optimizer:
    """Return the optimizer chosen by the settings, in its fused implementation.

    `rates` are the learning rates of single parameters relative to the learner's rate, if they differ from 1.
    """
    parameters = list(named.values())
    # On a GPU the learning rate is a device tensor, so that it can change in a captured step.
    cuda = precision.device_type == "cuda"
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, parameter in named.items():
        rate, is_decayed = rates.get(name, 1.0), settings.decay_norms or parameter.ndim > 1
        if (rate, not is_decayed) not in groups:
            groups[rate, not is_decayed] = {
                "params": [],
                "weight_decay": settings.weight_decay if is_decayed else 0.0,
                "lr": torch.tensor(settings.lr * rate, device=parameter.device) if cuda else settings.lr * rate,
                RELATIVE_RATE: rate,
            }
        groups[rate, not is_decayed]["params"].append(parameter)
    ordered = [groups[key] for key in sorted(groups)]
    betas = (settings.beta1, settings.beta2)
    if settings.burn_in_beta2 and settings.optimizer != "sgd":
        beta2 = torch.tensor(settings.burn_in_beta2, device=parameters[0].device, dtype=precision.weights)
        return ScheduledAdam(ordered, settings.beta1, beta2, is_decoupled=settings.optimizer == "adamw")
    match settings.optimizer:
        case "sgd":
            nesterov = settings.nesterov and settings.momentum > 0
            sgd = undecorated(SGD)(ordered, lr=settings.lr, momentum=settings.momentum, nesterov=nesterov, fused=True)
            if settings.momentum:  # torch leaves the buffer uninitialised if the fp16 scaler skips the first step
                for parameter in parameters:
                    sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            return sgd
        case "adam":
            return undecorated(Adam)(ordered, lr=settings.lr, betas=betas, fused=True, capturable=cuda)
    return undecorated(AdamW)(ordered, lr=settings.lr, betas=betas, fused=True, capturable=cuda)
