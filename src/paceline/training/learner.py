"""A learner: one network's optimizer, schedule, scaler, clipping and moving average."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from paceline.config.settings import LearnerSettings
from paceline.core.errors import UserError
from paceline.parallel.precision import Precision
from paceline.parallel.torch_internals import lerp_all, norms_of


class Learner:
    """Turns a network's gradients into new weights."""

    def __init__(
        self,
        name: str,
        network: nn.Module,
        settings: LearnerSettings,
        learning_rate: Callable[[int], float],
        precision: Precision,
        ema_half_life: int,
    ) -> None:
        self.name, self.network, self.settings, self.learning_rate = name, network, settings, learning_rate
        # What the recipe's author froze stays as it is.
        self.named: dict[str, Tensor] = {key: p for key, p in network.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())
        if not self.parameters:
            raise UserError(f"network {name!r} has no parameter that requires grad: there is nothing to learn")
        self.optimizer = make_optimizer(self.parameters, settings, precision)
        self.scaler = torch.amp.GradScaler(precision.device_type, enabled=precision.scaled)
        self.ema_half_life = ema_half_life
        self.ema = [p.detach().clone() for p in self.parameters] if ema_half_life else []

    def scale(self, loss: Tensor) -> Tensor:
        """The loss whose gradients `step` takes; larger than the given one in fp16."""
        return self.scaler.scale(loss)

    def set_rate(self, images: int) -> None:
        """Sets the learning rate for the images seen before the coming step."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.learning_rate(images))
            else:
                group["lr"] = self.learning_rate(images)

    def step(self) -> None:
        """Updates the weights from their gradients."""
        if self.settings.clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def reset_ema(self) -> None:
        """Has the average begin at the weights as they are."""
        for ema_tensor, parameter in zip(self.ema, self.parameters, strict=False):  # there may be none
            ema_tensor.copy_(parameter.detach())

    def update_ema(self, images: int) -> None:
        """Moves the average towards the weights by the images of one step."""
        if not self.ema:
            return
        with torch.no_grad():
            lerp_all(self.ema, self.parameters, 1 - 0.5 ** (images / self.ema_half_life))

    @torch.no_grad()
    def is_finite(self) -> bool:
        """Whether all weights are numbers; waits for the device."""
        return bool(torch.stack(norms_of(self.parameters, float("inf"))).isfinite().all())

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Inside, the network's parameters are their moving average; its buffers are the latest."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for position, ema_tensor in enumerate(self.ema):
            parameter = self.parameters[position]
            self.ema[position], parameter.data = parameter.data, ema_tensor


def make_optimizer(parameters: list[Tensor], settings: LearnerSettings, precision: Precision) -> Optimizer:
    """The optimizer that the settings name, fused on devices that have it."""
    decayed = [p for p in parameters if settings.decay_norms or p.ndim > 1]
    spared = [p for p in parameters if not settings.decay_norms and p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    # On a GPU the rate lies there too, so that a captured step can be given another one.
    cuda = precision.device_type == "cuda"
    rate = torch.tensor(settings.lr, device=parameters[0].device) if cuda else settings.lr
    betas = (settings.beta1, settings.beta2)
    match settings.optimizer:
        case "sgd":
            nesterov = settings.nesterov and settings.momentum > 0
            sgd = SGD(groups, lr=rate, momentum=settings.momentum, nesterov=nesterov, fused=True)
            if settings.momentum:  # torch leaves it uninitialised where fp16's scaler skips the very first step
                for parameter in parameters:
                    sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            return sgd
        case "adam":
            return Adam(groups, lr=rate, betas=betas, fused=True, capturable=cuda)
    return AdamW(groups, lr=rate, betas=betas, fused=True, capturable=cuda)
