"""A learner: one network's optimizer, schedule, gradient scaler, clipping and EMA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from paceline.config.settings import LearnerSettings
from paceline.contracts.phase import Clock
from paceline.core.errors import UserError
from paceline.models.layer_rates import relative_rates
from paceline.parallel.precision import Precision
from paceline.parallel.shards import is_sharded, own_rows
from paceline.parallel.torch_internals import lerp_all, norms_of, undecorated
from paceline.training.scheduled_adam import ScheduledAdam
from paceline.training.sharded_gradients import clip_rows, spread_overflow

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
