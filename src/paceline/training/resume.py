"""Resuming: what a snapshot of a run contains, and which checkpoint all processes resume from.

Hosts need no shared file system. The first process on each host writes to the run folder; hosts that share the folder
have a single writer. If a host is lost, the others still have a copy of the run. Each writer looks for its newest
intact checkpoint, and the process with the newest one overall broadcasts it to the others. If weights are sharded, the
processes share a folder, so each process opens the checkpoint and reads only its own rows. If no writer can use the
best checkpoint, the run continues without one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from paceline.config.resolve import Config
from paceline.core.errors import UserError
from paceline.core.files import write_file
from paceline.parallel.shards import first_row, is_sharded, own_rows, select_rows
from paceline.parallel.world import World
from paceline.runs.checkpoint import (
    TENSORS,
    WEIGHTS,
    Best,
    CheckpointNumbers,
    Damaged,
    Rows,
    ScalerState,
    Snapshot,
    load,
    load_mapped,
    load_without_state,
)
from paceline.runs.checkpoint import check_weights as check_weights_file
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import METRICS
from paceline.runs.tensor_files import HostCopy
from paceline.runs.weights import DATA_SPEC_FILE, EMA, check_weights, load_weights
from paceline.training.learner import Learner
from paceline.training.step import Step

Held = TypeVar("Held")


def claim_folder(folder: RunFolder, world: World, check: Callable[[], None]) -> None:
    """Choose one writer process per distinct folder; if a writer fails, raise UserError on every process."""

    def claim() -> None:
        folder.check_free()
        folder.claim()
        check()

    several = world.place.num_nodes > 1
    # The name is always new, so that a network file system cannot return a cached result.
    marker = folder.path / f".rendezvous-{world.broadcast(os.urandom(8).hex())}" if several else None
    _run_on_some(world, claim if world.is_first else None)
    if marker is None:
        return
    if world.is_first:
        marker.touch()
    world.wait_for_all()
    claims = world.place.local_rank == 0 and not world.is_first and not marker.exists()
    _run_on_some(world, claim if claims else None)
    if world.is_first:
        marker.unlink()


def check_settings(folder: RunFolder, world: World, config: Config) -> None:
    """Raise UserError on every process if the run on any host was trained with different settings."""
    _run_on_some(world, partial(folder.check_settings, config) if world.place.local_rank == 0 else None)


def newest_snapshot(
    folder: RunFolder,
    world: World,
    report: Callable[[str], None],
    check: Callable[[Snapshot], None] = lambda snapshot: None,
    *,
    mapped: bool = False,
) -> Snapshot | None:
    """Return the newest usable checkpoint on any host, and save it in every host's run folder.

    A checkpoint is usable if it is intact and `check` raises no UserError. With `mapped`, each process that finds the
    checkpoint in the folder gets a snapshot from `load_mapped`. If no host can use the best checkpoint, this is
    reported, and the snapshot has no best checkpoint.
    """
    own: Snapshot | None = None
    damage = ""
    if folder.is_mine:
        try:
            own = folder.checkpoints.latest(report, check, load_mapped if mapped else load)
        except UserError as error:
            damage = str(error)
    snapshot, holder = _share_snapshot(folder, world, own, mapped=mapped)
    if snapshot is None:
        raise_on_all(world, damage)
        return None
    if world.place.num_nodes > 1:
        _catch_up(folder, world, snapshot, holder)
        if holder and world.is_first:
            report(f"received the checkpoint at {snapshot.images:,} images from rank {holder}'s host")
    if folder.is_mine:
        folder.checkpoints.set_aside_after(snapshot.images)
    return _without_unusable_best(folder, world, snapshot, report)


def _without_unusable_best(
    folder: RunFolder, world: World, snapshot: Snapshot, report: Callable[[str], None]
) -> Snapshot:
    """Return the snapshot, without its best checkpoint if no writer can use it; unusable copies are set aside."""
    images = snapshot.best_images
    if images == snapshot.images:
        return snapshot
    problem = ""
    if folder.is_mine:
        try:
            check_weights_file(folder.checkpoints.path(images))
        except Damaged as damage:
            problem = damage.problem
            folder.checkpoints.set_aside(images)
    found = world.gather_strings("usable" if folder.is_mine and not problem else problem)
    if "usable" in found:
        return snapshot
    if world.is_first:
        report(f"the best {next(filter(None, found))}; the last one counts as the best until the next evaluation")
    return replace(snapshot, numbers=replace(snapshot.numbers, best=None))


def checkpoint_at(
    folder: RunFolder, world: World, images: int, *, mapped: bool = False, state: bool = False
) -> tuple[Snapshot | None, str]:
    """Return the checkpoint at `images` on every process, sent by a host that has it.

    If no host has it, return None and the reason, which are also the same on every process. The training state is read
    only if `state` is true. For `mapped`, see `newest_snapshot`.
    """
    own, problem, names = None, "", TENSORS if state else (WEIGHTS,)
    if folder.is_mine:
        try:
            path = folder.checkpoints.path(images)
            own = load_mapped(path, names=names) if mapped else load(path) if state else load_without_state(path)
        except Damaged as damage:
            problem = damage.problem
    snapshot, _ = _share_snapshot(folder, world, own, mapped=mapped, names=names)
    return snapshot, next(filter(None, world.gather_strings(problem)), "")


def _share_snapshot(
    folder: RunFolder, world: World, own: Snapshot | None, *, mapped: bool, names: Sequence[str] = TENSORS
) -> tuple[Snapshot | None, int]:
    """Return the newest snapshot that any process has, and the rank of that process; None if no process has one."""
    images = own.images if own else -1
    if mapped:
        newest, holder = _find_newest(world, images)
        if newest < 0:
            return None, holder
        found = own if images == newest else _open_checked(folder, newest, names)
        if not world.sum(torch.tensor([float(found is None)], device=world.device)).item():
            return found, holder
    return share_newest(world, own, images)


def _open_checked(folder: RunFolder, images: int, names: Sequence[str]) -> Snapshot | None:
    """Return a checkpoint that another process has checked; None if it is not in this process's folder."""
    try:
        return load_mapped(folder.checkpoints.path(images), check=False, names=names)
    except Damaged:
        return None


def share_newest(world: World, own: Held | None, images: int) -> tuple[Held | None, int]:
    """Return the value from the process with the most images seen, and its rank; None if all processes pass -1."""
    newest, holder = _find_newest(world, images)
    return (world.broadcast(own, holder) if newest >= 0 else None), holder  # type: ignore[return-value]


def _find_newest(world: World, images: int) -> tuple[int, int]:
    """Return the largest number of images seen on any process, and the first rank that has it."""
    held = world.gather(torch.tensor([images], device=world.device)).flatten()
    holder = int(held.argmax())
    return int(held[holder]), holder


def _catch_up(folder: RunFolder, world: World, snapshot: Snapshot, holder: int) -> None:
    """Copy the checkpoint, the earlier best checkpoint, the metrics and the settings to hosts that lack them."""
    best_images = snapshot.best_images
    best = checkpoint_at(folder, world, best_images, state=True)[0] if best_images < snapshot.images else None
    files = (folder.path / METRICS, folder.config_file, folder.path / DATA_SPEC_FILE, folder.protocols_file)
    held = [file.read_bytes() if file.exists() else b"" for file in files] if world.rank == holder else []
    history = world.broadcast(held, holder)
    if folder.is_mine and world.rank != holder:  # write settings before checkpoints, which need them
        for file, content in zip(files, history, strict=True):  # type: ignore[call-overload]
            if content:
                write_file(file, content)
    if folder.is_mine and best:
        folder.checkpoints.save(best)
    if folder.is_mine and world.rank != holder:
        folder.checkpoints.save(snapshot)
    world.wait_for_all()


def _run_on_some(world: World, work: Callable[[], None] | None) -> None:
    """Run `work` on the processes where it is not None; if it raises UserError, raise the error on every process."""
    message = ""
    if work:
        try:
            work()
        except UserError as error:
            message = str(error)
    raise_on_all(world, message)


def raise_on_all(world: World, message: str) -> None:
    """Raise UserError on every process with the first non-empty message, if any."""
    for problem in filter(None, world.gather_strings(message)):
        raise UserError(problem)


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
            was, wanted = (f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (saved, like))
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

    def rows_of(tensor: Tensor) -> Rows:
        return Rows(first_row(tensor), tuple(tensor.shape))

    rows = {key: rows_of(tensor) for key, tensor in step.recipe.state_dict().items() if is_sharded(tensor)}
    for name, learner in step.learners.items():
        for key, parameter in learner.named.items():
            if is_sharded(parameter):
                state = learner.optimizer.state.get(learner.rows[key], {})
                names = [f"{name}/{key}/{state_key}" for state_key, value in state.items() if value.ndim]
                rows |= dict.fromkeys([*names, f"{EMA}{name}.{key}"], rows_of(parameter))
    return rows


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
