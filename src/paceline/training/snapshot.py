"""Copy a run's state into a snapshot of named tensors and numbers, and restore it."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.runs.snapshot import Best, CheckpointNumbers, ScalerState, Snapshot
from paceline.runs.tensors import copy_to_host
from paceline.runs.weights import EMA, load_weights
from paceline.training.learner import Learner
from paceline.training.step import Step


def take_snapshot(images: int, step: Step, best: Best | None, evaluated_at: int) -> Snapshot:
    """Return everything needed to resume from here, as copies that training does not modify."""
    weights: dict[str, Tensor] = dict(step.recipe.state_dict())
    state: dict[str, Tensor] = {}
    scalers: dict[str, ScalerState] = {}
    for name, learner in step.learners.items():
        ema_tensors = zip(learner.named, learner.ema, strict=False)  # empty without an EMA
        weights |= {f"{EMA}{name}.{key}": value for key, value in ema_tensors}
        state |= _optimizer_tensors(learner)
        scalers[name] = learner.scaler.state_dict()
    state |= {f"signals/{name}": value for name, value in step.signals.items()}
    numbers = CheckpointNumbers(best, evaluated_at, scalers)
    return Snapshot(images, copy_to_host(weights), copy_to_host(state), numbers)


def restore_snapshot(snapshot: Snapshot, step: Step) -> None:
    """Load a snapshot into the recipe, the learners and the signals."""
    load_weights(step.recipe, snapshot.weights)
    for name, learner in step.learners.items():
        for key, ema_tensor in zip(learner.named, learner.ema, strict=False):
            ema_tensor.copy_(snapshot.weights[f"{EMA}{name}.{key}"])
        _restore_optimizer(learner, snapshot.state)
        learner.scaler.load_state_dict(dict(snapshot.numbers.scalers[name]) or learner.scaler.state_dict())
    for name, value in step.signals.items():
        value.copy_(snapshot.state[f"signals/{name}"])


def _optimizer_tensors(learner: Learner) -> dict[str, Tensor]:
    names = {parameter: name for name, parameter in learner.named.items()}
    return {
        f"{learner.name}/{names[parameter]}/{key}": value
        for parameter, memory in learner.optimizer.state.items()
        for key, value in memory.items()
        if isinstance(value, Tensor)
    }


def _restore_optimizer(learner: Learner, state: dict[str, Tensor]) -> None:
    for name, parameter in learner.named.items():
        prefix = f"{learner.name}/{name}/"
        for key, saved in ((k.removeprefix(prefix), v) for k, v in state.items() if k.startswith(prefix)):
            like = parameter if saved.shape == parameter.shape else saved.to(parameter.device)
            learner.optimizer.state[parameter][key] = torch.empty_like(like, dtype=saved.dtype).copy_(saved)
