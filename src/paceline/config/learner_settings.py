"""Settings that each network of a recipe can have: optimizer, schedule and EMA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.config.setting import setting


@dataclass(frozen=True)
class LearnerSettings:
    """The settings of optimizers, schedules and EMA. Each can be set for a single network: `--set NETWORK.lr=0.1`."""

    optimizer: Literal["sgd", "adam", "adamw"] = setting("adam", "optimizer")
    lr: float = setting(1e-3, "peak learning rate", flag=True, at_least=0)
    momentum: float = setting(0.9, "momentum for sgd", at_least=0, below=1)
    nesterov: bool = setting(True, "use Nesterov momentum for sgd")
    beta1: float = setting(0.9, "decay rate of the first moment, for adam and adamw", at_least=0, below=1)
    beta2: float = setting(0.999, "decay rate of the second moment, for adam and adamw", at_least=0, below=1)
    burn_in_beta2: float = setting(
        0.0, "initial value of beta2, which rises to beta2 during the burn-in; 0: constant", at_least=0, below=1
    )
    burn_in_lr: float = setting(
        1.0, "learning rate at the start of the burn-in, as a multiple of the scheduled rate", above=0
    )
    weight_decay: float = setting(0.0, "weight decay", at_least=0)
    layer_decay: float = setting(
        1.0,
        "layer-wise decay: factor on the learning rate for each layer further from the output; 1 disables it",
        above=0,
        at_most=1,
    )
    decay_norms: bool = setting(True, "also apply weight decay to biases and normalisation layers")
    schedule: Literal["constant", "step", "cosine", "linear"] = setting("constant", "learning rate schedule")
    warmup: str = setting("0 images", "length of the warm-up, during which the learning rate rises linearly from zero")
    hold: str = setting("0%", "for the linear schedule: how long to keep the peak rate before it decays to zero")
    milestones: str = setting(
        "50%", "for the step schedule: comma-separated points at which the rate is multiplied by gamma"
    )
    gamma: float = setting(0.1, "for the step schedule: factor applied to the learning rate at each milestone", above=0)
    clip: float = setting(0.0, "clip gradients to this norm; 0 disables clipping", at_least=0)
    ema_half_life: str = setting(
        "0 images",
        "half-life of the exponential moving average (EMA) of the weights; 0 disables EMA; during a burn-in, the "
        "half-life rises from zero",
    )
