"""Follows the memory of one training step on one device, computed with fake tensors, which have no data.

Neither a GPU nor the memory itself is needed. The step is the run's own, with its learners, autocast and EMA. Without a
GPU, autograd cannot run on fake CUDA tensors, so the step runs on fake CPU tensors (see `like_cuda`). Recipes and
losses cache constants for the life of a process. After a trace, these caches contain fake tensors, so the process must
not train afterwards.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor, nn

from paceline.config.resolve import Config
from paceline.contracts.recipe import Batch, Loss, Phase, Recipe
from paceline.core.errors import UserError
from paceline.data.crop import Window, cut
from paceline.data.source import Source
from paceline.parallel.place import Place
from paceline.parallel.precision import Precision
from paceline.parallel.recompute import Mode, recompute_blocks
from paceline.parallel.strategy import Strategy
from paceline.parallel.torch_internals import FakeTensorMode, real_tensors
from paceline.parallel.world import World
from paceline.runs.recipe import make_recipe
from paceline.training.build import make_learners
from paceline.training.graph import culprit, first_line
from paceline.training.learner import Learner
from paceline.training.like_cuda import LikeCuda
from paceline.training.step import Step
from paceline.training.storage_log import Column, Kind, StorageLog, Timeline

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

    def place(self, recipe: Recipe) -> None:
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
        sample = cut(sample, Window(0, 0, crop, crop), source.spec.scale)

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
