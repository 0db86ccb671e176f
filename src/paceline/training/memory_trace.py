"""Follows the memory of one training step with fake tensors that need as much as on a GPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.config.resolve import Config
from paceline.contracts.recipe import Batch, Loss, Phase, Recipe
from paceline.core.errors import UserError
from paceline.data.source import Source
from paceline.data.stream import cut
from paceline.images.rectangles import Box
from paceline.parallel.blocks import Mode, recompute_blocks
from paceline.parallel.place import Place
from paceline.parallel.precision import Precision
from paceline.parallel.strategy import Strategy
from paceline.parallel.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    has_no_result,
    real_tensors,
)
from paceline.parallel.world import World
from paceline.runs.recipe import make_recipe
from paceline.training.build import make_learners
from paceline.training.graph import culprit, first_line
from paceline.training.learner import Learner
from paceline.training.step import Step

BLOCK_BYTES = 512  # the CUDA allocator rounds every size up to a multiple of this


class Kind(StrEnum):
    """What memory is used for."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    EMA = "EMA"
    ACTIVATIONS = "activations"
    BATCH = "batch"
    BUFFERS = "buffers"
    GRAPHS = "CUDA graphs"


class Column(NamedTuple):
    """What memory is used for, and for which network; the name is empty if it belongs to no network."""

    kind: Kind
    network: str = ""


class Timeline(NamedTuple):
    """The live bytes after each allocation, and the phase in which it was made."""

    columns: tuple[Column, ...]
    live: NDArray[np.float64]  # [allocations, columns]
    phases: tuple[str, ...]  # one per allocation


class _Storage(NamedTuple):
    alive: weakref.ref[torch.UntypedStorage]
    size: int
    column: Column
    since: int  # the row of the timeline that includes it first


class StorageLog(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Counts the live bytes of all tensors on one device by column. New tensors count as activations."""

    def __init__(self, device: torch.device, *, is_fake: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.device, self.is_fake = device, is_fake
        self.live: dict[Column, int] = {}
        self.phase = ""
        self._storages: dict[int, _Storage] = {}
        self._rows: list[tuple[str, tuple[int, ...]]] = []
        self._moves: list[tuple[int, int, Column, int]] = []  # corrections of the rows [start, end)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_fake and has_no_result(func):
            return None  # fused optimizers have no implementation for fake tensors
        for tensor in _tensors(args):
            self._find(tensor)
        result = func(*args, **(kwargs or {}))
        self.mark(_tensors(result), Column(Kind.ACTIVATIONS), only_new=True)
        return result

    def _find(self, tensor: Tensor) -> None:
        """Count a tensor that was created before the log was active as a buffer, from the start of the timeline."""
        if self.is_fake and self.device.type == "cpu" and not isinstance(tensor, FakeTensor):
            return  # frozen weights that were read from a file: their fake copies are counted
        if tensor.device == self.device and id(storage := tensor.untyped_storage()) not in self._storages:
            column = Column(Kind.BUFFERS)
            self._count(storage, column)
            self._moves.append((0, len(self._rows), column, self._storages[id(storage)].size))

    def mark(self, tensors: Iterable[Tensor], column: Column, *, only_new: bool = False) -> None:
        """Count the memory of tensors in a column, from now on; with `only_new`, skip memory that is known."""
        changed = False
        for tensor in tensors:
            if tensor.device == self.device:
                storage = tensor.untyped_storage()
                if not (only_new and id(storage) in self._storages):
                    changed |= self._count(storage, column)
        if changed:
            self._rows.append((self.phase, tuple(self.live.values())))

    def relabel_remaining(self, old: Column, new: Column) -> None:
        """Move all memory of a column that is still in use to another column, from its allocation on."""
        for key, storage in list(self._storages.items()):
            if storage.column == old:
                self._add(old, -storage.size)
                self._storages[key] = storage._replace(column=new)
                self._add(new, storage.size)
                end = len(self._rows)
                self._moves += [(storage.since, end, old, -storage.size), (storage.since, end, new, storage.size)]

    def restart(self) -> None:
        """Forget the timeline so far; it starts again with the memory that is in use."""
        self._storages = {key: storage._replace(since=0) for key, storage in self._storages.items()}
        self._moves.clear()
        self._rows = [(self.phase, tuple(self.live.values()))]

    def timeline(self) -> Timeline:
        """Return the timeline since the last restart."""
        columns = tuple(self.live)
        live = np.zeros((len(self._rows), len(columns)))
        for number, (_, sizes) in enumerate(self._rows):
            live[number, : len(sizes)] = sizes  # columns are only ever appended
        for start, end, column, size in self._moves:
            live[start:end, columns.index(column)] += size
        return Timeline(columns, live, tuple(phase for phase, _ in self._rows))

    def _count(self, storage: torch.UntypedStorage, column: Column) -> bool:
        key, known = id(storage), self._storages.get(id(storage))
        if known:
            if known.column == column:
                return False
            self._add(known.column, -known.size)
            alive, size = known.alive, known.size
        else:
            alive, size = weakref.ref(storage, self._forgetter(key)), self._rounded(storage.nbytes())
        self._storages[key] = _Storage(alive, size, column, len(self._rows))
        self._add(column, size)
        return True

    def _forgetter(self, key: int) -> Callable[[object], None]:
        def forget(_: object) -> None:
            storage = self._storages.pop(key)
            self._add(storage.column, -storage.size)

        return forget

    def _add(self, column: Column, size: int) -> None:
        self.live[column] = self.live.get(column, 0) + size

    def _rounded(self, size: int) -> int:
        return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments or results of an operation."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


# Autocast on a GPU runs these operations in float32, and on a CPU in the precision of their inputs.
IN_FLOAT32 = {
    F.layer_norm,
    F.group_norm,
    F.softmax,
    F.log_softmax,
    F.cross_entropy,
    F.l1_loss,
    F.mse_loss,
    F.smooth_l1_loss,
    F.softplus,
    F.normalize,
    torch.layer_norm,
    torch.softmax,
    Tensor.softmax,
    torch.pow,
    Tensor.pow,
    torch.norm,
    Tensor.norm,
}
_DROPOUT = signature(F.dropout)


class LikeCuda(TorchFunctionMode):
    """Runs operations as on a GPU: with its autocast list, and with dropout masks of one byte per value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            return func(*map(_in_float32, args), **{name: _in_float32(value) for name, value in kwargs.items()})
        if func is F.dropout:
            bound = _DROPOUT.bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.arguments["training"] and not bound.arguments["inplace"]:
                return torch.native_dropout(bound.arguments["input"], bound.arguments["p"], True)[0]
        return func(*args, **kwargs)


def _in_float32(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value


EPOCH_IMAGES = 2**20  # any number: the memory of a step does not depend on the length of the run


@dataclass(frozen=True)
class Trace:
    """The memory of one step on one device."""

    samples: int  # per micro-batch
    recipe: Recipe  # with fake weights, which require grad unless the recipe froze them
    timeline: Timeline
    recomputes: bool  # whether activations are recomputed in the backward pass


def trace_step(
    config: Config, sources: Mapping[str, Source], precision: Precision, samples: int, *, recompute: bool = False
) -> Trace:
    """Follow the memory of a step with this many samples in each micro-batch; raise UserError if it needs real data.

    With `recompute`, the networks recompute activations if they can.
    """
    for_gpu = config.run.accelerator != "cpu"
    device = torch.device("cuda", 0) if precision.device_type == "cuda" else torch.device("cpu")
    log = StorageLog(device, is_fake=True)
    mode = LikeCuda if for_gpu and device.type == "cpu" else nullcontext
    with _fake_mode(), mode():
        recipe = _fake_recipe(config, sources)
        with log:
            strategy = _OneDevice(log, config, precision, recipe, mode if recompute else None)
            total = samples * config.run.accumulate * max(phase.repeat for phase in recipe.phases)
            learners = make_learners(
                config.with_run(batch_size=str(total)), recipe, precision, epoch=EPOCH_IMAGES, step=total, total=total
            )
            step = Step(recipe, learners, strategy, lambda batch: batch, samples * config.run.accumulate, total)
            mark_recipe(log, recipe, learners)
            fetched = _batches(config, sources["train"], recipe, precision, samples, device)
            log.mark((t for some in fetched for batch in some for t in batch.values()), Column(Kind.BATCH))
            recipe.train()
            log.restart()
            _learn(step, fetched, log)
            gc.collect()
            log.relabel_remaining(Column(Kind.ACTIVATIONS), Column(Kind.BUFFERS))  # constants that recipes keep
            strategy.trainable.release()
            return Trace(samples, recipe, log.timeline(), strategy.recomputes)


@cache
def _fake_mode() -> FakeTensorMode:
    """Return the mode of all traces in this process; tensors of different modes cannot be combined."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _learn(step: Step, fetched: list[list[Batch]], log: StorageLog) -> None:
    """Run all phases, including those that are not due in every step."""
    step.set_rates(0)
    try:
        step.learn(step.recipe.phases, [[dict(batch) for batch in some] for some in fetched])
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"phase {log.phase!r} needs the values of tensors at {culprit(error)}, so its memory cannot be computed "
            f"in advance: {first_line(error)}; use operations with fixed shapes that do not read values on the host"
        ) from error


def _fake_recipe(config: Config, sources: Mapping[str, Source]) -> Recipe:
    """Return the recipe, without its weights if its networks can be built from fake tensors."""
    try:
        return make_recipe(config, sources)
    except (UserError, RuntimeError):  # some networks read numbers from tensors when they are built
        with real_tensors():
            return make_recipe(config, sources)


class _OneDevice(Strategy):
    """One device whose memory a log follows."""

    def __init__(
        self, log: StorageLog, config: Config, precision: Precision, recipe: Recipe, recompute_in: Mode | None
    ) -> None:
        self.log, self.recompute_in = log, recompute_in
        super().__init__(config.with_run(devices=1).run, World(Place(), log.device), precision, recipe)

    def _place(self, recipe: Recipe) -> None:
        """Replace the recipe's tensors with fake ones on the device, which `Module.to` cannot do."""
        placed: dict[int, Tensor] = {}  # a tensor that several modules share stays shared
        for module in recipe.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in placed:
                    placed[id(parameter)] = nn.Parameter(self._placed(parameter), parameter.requires_grad)
                module._parameters[name] = placed[id(parameter)]  # type: ignore[assignment]
            for name, buffer in module.named_buffers(recurse=False):
                if id(buffer) not in placed:
                    placed[id(buffer)] = self._placed(buffer)
                module._buffers[name] = placed[id(buffer)]

    def _placed(self, tensor: Tensor) -> Tensor:
        dtype = self.precision.weights if tensor.is_floating_point() else tensor.dtype
        last = self.settings.accelerator != "cpu" and tensor.ndim == 4
        layout = torch.channels_last if last else torch.preserve_format
        return tensor.detach().to(self.world.device, dtype, copy=True, memory_format=layout)

    def _recompute(self, recipe: Recipe) -> bool:
        return self.recompute_in is not None and recompute_blocks(recipe, self.recompute_in) > 0

    def forward(self, phase: Phase, batch: Batch) -> Loss:
        self.log.phase = phase.name
        return super().forward(phase, batch)


def mark_recipe(log: StorageLog, recipe: Recipe, learners: Mapping[str, Learner]) -> None:
    """Label the recipe's weights and buffers, the learners' state and, when they are computed, the gradients."""
    log.mark(recipe.parameters(), Column(Kind.WEIGHTS))  # frozen weights belong to no network
    log.mark(recipe.buffers(), Column(Kind.BUFFERS))
    for name, network in recipe.networks.items():
        log.mark(network.parameters(), Column(Kind.WEIGHTS, name))
        log.mark(learners[name].ema, Column(Kind.EMA, name))
        log.mark(_create_state(learners[name]), Column(Kind.OPTIMIZER, name))
        for parameter in learners[name].parameters:
            parameter.register_post_accumulate_grad_hook(partial(_mark_gradient, log, Column(Kind.GRADIENTS, name)))


def _mark_gradient(log: StorageLog, column: Column, parameter: Tensor) -> None:
    assert parameter.grad is not None
    log.mark([parameter.grad], column)


def _create_state(learner: Learner) -> list[Tensor]:
    """Create the state that the optimizer would create in its first step; return its tensors."""
    for rows in learner.rows.values():
        state = learner.optimizer.state[rows]
        if not state:
            likes = learner.state_like(rows)
            state |= {name: torch.zeros_like(like, device=rows.device) for name, like in likes.items()}
    return [value for state in learner.optimizer.state.values() for value in state.values()]


def _batches(
    config: Config, source: Source, recipe: Recipe, precision: Precision, samples: int, device: torch.device
) -> list[list[Batch]]:
    """Return finished micro-batches for each repetition of a phase."""
    sample, crop = {name: np.asarray(field) for name, field in source.read(0).items()}, config.run.crop
    if crop:
        sample = cut(sample, Box(0, 0, crop, crop), source.spec.scale)

    def make() -> Batch:
        batch = {"index": torch.zeros(samples, dtype=torch.int64, device=device)}
        for name, field in sample.items():
            images = field.ndim == 3
            shape = (field.shape[2], *field.shape[:2]) if images else field.shape
            dtype = precision.weights if images else torch.from_numpy(np.atleast_1d(field)).dtype
            layout = torch.channels_last if images else torch.contiguous_format
            batch[name] = torch.empty((samples, *shape), dtype=dtype, device=device, memory_format=layout)
        for name, draw in recipe.draws.items():
            batch[name] = torch.empty((samples, *draw.shape), dtype=precision.weights, device=device)
        return batch

    repeats = max(phase.repeat for phase in recipe.phases)
    return [[make() for _ in range(config.run.accumulate)] for _ in range(repeats)]
