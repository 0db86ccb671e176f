"""Copy a run's state into a snapshot of named tensors and numbers, and restore it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.core.errors import UserError
from paceline.parallel.shards import first_row, is_sharded, own_rows, select_rows
from paceline.runs.checkpoint import Best, CheckpointNumbers, Rows, ScalerState, Snapshot
from paceline.runs.tensor_files import HostCopy
from paceline.runs.weights import EMA, check_weights, load_weights
from paceline.training.learner import Learner
from paceline.training.step import Step


def take_snapshot(
    images: int, step: Step, best: Best | None, evaluated_at: int, statistics: dict[str, Tensor]
) -> Callable[[], Snapshot]:
    """Copy everything needed to resume from here; return a function that waits for the copies and returns them.

    Training may continue at once: it does not modify the copies. Sharded tensors are not gathered: each process's
    snapshot contains its own rows. `statistics` are those of `EvaluatedWeights`, which a resumed run does not need.
    """
    weights, state, rows = _weights(step) | statistics, _signals(step), _rows(step)
    scalers: dict[str, ScalerState] = {}
    for name, learner in step.learners.items():
        state |= _optimizer_tensors(learner)
        scalers[name] = learner.scaler.state_dict()
    numbers = CheckpointNumbers(best, evaluated_at, scalers)
    own = HostCopy({name: own_rows(tensor) for name, tensor in weights.items()})
    own_state = HostCopy(state)
    return lambda: Snapshot(images, own.wait(), own_state.wait(), numbers, rows)


def check_fits(snapshot: Snapshot, step: Step) -> None:
    """Raise UserError if a snapshot's tensors or scalers do not match this run; nothing is changed."""
    rows = _rows(step)
    own = _like_whole(_weights(step), rows)
    statistics = {f"{EMA}{name}" for name, _ in step.recipe.named_buffers()}
    weights = {name: value for name, value in snapshot.weights.items() if name not in statistics}
    check_weights(weights, own)
    own_state = _signals(step)
    for learner in step.learners.values():
        # The optimizer has no state yet if it creates the state at the first step.
        own_state |= _like_whole(_optimizer_tensors(learner), rows)
        own_state |= _expected_state(learner, snapshot.state)
    differing = sorted(snapshot.state.keys() ^ own_state.keys())
    if differing:
        raise UserError(f"tensor {differing[0]!r} is {'missing' if differing[0] in own_state else 'unknown'}")
    for name, saved in (weights | snapshot.state).items():
        like = own[name] if name in own else own_state[name]
        if saved.shape != like.shape or saved.dtype != like.dtype:
            was, wanted = (f"{_short(t.dtype)} {list(t.shape)}" for t in (saved, like))
            raise UserError(f"tensor {name!r} is {was} instead of {wanted}")
    if snapshot.numbers.scalers.keys() != step.learners.keys():
        raise UserError("the gradient scalers do not match the networks")
    for name, learner in step.learners.items():
        wanted_keys = learner.scaler.state_dict().keys()
        if wanted_keys and snapshot.numbers.scalers[name] and snapshot.numbers.scalers[name].keys() != wanted_keys:
            raise UserError(f"the gradient scaler for network {name!r} has unexpected values")


def restore_snapshot(snapshot: Snapshot, step: Step) -> None:
    """Load a snapshot into the recipe, the learners and the signals."""
    load_weights(step.recipe, snapshot.weights)
    for name, learner in step.learners.items():
        for (key, parameter), ema_tensor in zip(learner.named.items(), learner.ema, strict=False):
            ema_tensor.copy_(select_rows(snapshot.weights[f"{EMA}{name}.{key}"], parameter))
        _restore_optimizer(learner, snapshot.state)
        learner.scaler.load_state_dict(dict(snapshot.numbers.scalers[name]) or learner.scaler.state_dict())
    for name, value in step.signals.items():
        value.copy_(snapshot.state[f"signals/{name}"])


def _weights(step: Step) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = dict(step.recipe.state_dict())
    for name, learner in step.learners.items():
        ema_tensors = zip(learner.named, learner.ema, strict=False)  # `learner.ema` is empty without an EMA
        weights |= {f"{EMA}{name}.{key}": value for key, value in ema_tensors}
    return weights


def _rows(step: Step) -> dict[str, Rows]:
    """Return which rows of each sharded tensor in a snapshot belong to this process."""
    found = {key: _rows_of(tensor) for key, tensor in step.recipe.state_dict().items() if is_sharded(tensor)}
    for name, learner in step.learners.items():
        for key, parameter in learner.named.items():
            if is_sharded(parameter):
                of_rows = (k for k, v in learner.optimizer.state.get(learner.rows[key], {}).items() if v.ndim)
                names = [f"{learner.name}/{key}/{state}" for state in of_rows]
                found |= dict.fromkeys([*names, f"{EMA}{name}.{key}"], _rows_of(parameter))
    return found


def _rows_of(tensor: Tensor) -> Rows:
    return Rows(first_row(tensor), tuple(tensor.shape))


def _like_whole(tensors: dict[str, Tensor], rows: dict[str, Rows]) -> dict[str, Tensor]:
    """Return the tensors, with a meta tensor of the whole shape in place of each sharded one."""
    return {
        name: torch.empty(rows[name].shape, dtype=tensor.dtype, device="meta") if name in rows else tensor
        for name, tensor in tensors.items()
    }


def _signals(step: Step) -> dict[str, Tensor]:
    return {f"signals/{name}": value for name, value in step.signals.items()}


def _expected_state(learner: Learner, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors like the optimizer's state, for each parameter that has an entry in `state`."""
    expected: dict[str, Tensor] = {}
    for name, parameter in learner.named.items():
        prefix = f"{learner.name}/{name}/"
        if any(key.startswith(prefix) for key in state):
            expected |= {prefix + key: like for key, like in learner.state_like(parameter).items()}
    return expected


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _optimizer_tensors(learner: Learner) -> dict[str, Tensor]:
    names = {rows: name for name, rows in learner.rows.items()}
    return {
        f"{learner.name}/{names[rows]}/{key}": value
        for rows, memory in learner.optimizer.state.items()
        for key, value in memory.items()
        if isinstance(value, Tensor)
    }


def _restore_optimizer(learner: Learner, state: dict[str, Tensor]) -> None:
    for name, parameter in learner.named.items():
        prefix = f"{learner.name}/{name}/"
        for key, saved in ((k.removeprefix(prefix), v) for k, v in state.items() if k.startswith(prefix)):
            rows = learner.rows[name]
            own = select_rows(saved, parameter) if saved.shape == parameter.shape else saved
            like = rows if own.shape == rows.shape else own.to(rows.device)
            learner.optimizer.state[rows][key] = torch.empty_like(like, dtype=own.dtype).copy_(own)
