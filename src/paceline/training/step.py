"""One training step, the same under every strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from paceline.contracts.recipe import Batch, Clock, Loss, Phase, Recipe
from paceline.core.errors import UserError
from paceline.core.gpu import run_concurrently
from paceline.core.watch import INCOMPLETE, recorder
from paceline.data.loader import StepData
from paceline.parallel.batchnorm import waiting
from paceline.parallel.strategy import Strategy
from paceline.training.learner import Learner
from paceline.training.log import Annotate, Entry


class GradientWait:
    """Adds the wait at the end of a network's backward passes to `waiting`.

    DistributedDataParallel exchanges gradients in C++ and waits for them at the end of the backward pass. Hooks on the
    parameters record when the last of this process's own gradients is complete.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._ready_at = 0.0  # when the last gradient was complete
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: Tensor) -> None:
        self._ready_at = perf_counter()

    def end_backward(self) -> None:
        """Add the time since the last gradient was complete; call this at the end of a backward pass."""
        if self._ready_at:
            waiting.seconds += perf_counter() - self._ready_at
        self._ready_at = 0.0


Finish = Callable[[Batch], Batch]  # turns a fetched batch into the recipe's input, on the device
Watch = Callable[[Phase, Learner], None]  # called after the backward pass of a phase, before its update

_NO_RANGE: AbstractContextManager[None] = nullcontext()


def no_range(name: str) -> AbstractContextManager[object]:
    """Return a context that does nothing; while a profiler records, a step opens a range in the trace instead."""
    return _NO_RANGE


class Step:
    """Runs the phases that are due, in order: forward, backward, update."""

    def __init__(
        self,
        recipe: Recipe,
        learners: dict[str, Learner],
        strategy: Strategy,
        finish: Finish,
        batch_size: int,
        images_per_step: int,
    ) -> None:
        self.recipe, self.learners, self.strategy, self.finish = recipe, learners, strategy, finish
        self.batch_size, self.images_per_step = batch_size, images_per_step
        self.world = strategy.world
        self.schedules = {name: value for name, value in recipe.signals.items() if callable(value)}
        self.signals = {name: self._scalar(value) for name, value in recipe.signals.items() if not callable(value)}
        self.scheduled = {name: self._scalar() for name in self.schedules}
        self.unchecked = {phase.name for phase in recipe.phases}
        self.annotate: Annotate = no_range  # replaced while a profiler records the step
        self.recorder = recorder()
        self.exchanges = strategy.needs_processes and self.world.size > 1
        observed = self.exchanges and self.world.device.type == "cpu" and not strategy.shards_weights
        self.waits = {name: GradientWait(one.parameters) for name, one in learners.items() if observed}

    def __call__(self, data: StepData, watch: Watch | None = None) -> list[Entry]:
        """Train on one step's data; return the phases' losses, still on the device."""
        self.set_rates(data.images)
        return self.learn(self.due(data.images), data.fetched, watch)

    def _scalar(self, value: float = 0.0) -> Tensor:
        return torch.tensor(value, device=self.world.device, dtype=self.strategy.precision.weights)

    def due(self, images: int) -> tuple[Phase, ...]:
        """Return the phases that run in the step that starts at this number of images seen."""
        number = images // self.images_per_step
        return tuple(phase for phase in self.recipe.phases if number % phase.every == 0)

    def set_rates(self, images: int) -> None:
        """Set the learning rates and the recipe's scheduled values, given the images seen before this step."""
        for learner in self.learners.values():
            learner.set_rate(images)
        burn_in = max(learner.burn_in for learner in self.learners.values())
        for name, value in self.scheduled.items():
            value.fill_(self.schedules[name](Clock(images, self.images_per_step, burn_in)))

    def learn(self, due: tuple[Phase, ...], fetched: list[list[Batch]], watch: Watch | None = None) -> list[Entry]:
        """Run the phases. Nothing waits for the device or depends on the images seen, as CUDA graphs require."""
        repetitions = [[self.finish(batch) for batch in micro_batches] for micro_batches in fetched]
        entries: list[Entry] = []
        for phases in groups(due):
            tasks = [partial(self._learn_phase, phase, repetitions, watch) for phase in phases]
            for phase_entries in run_concurrently(tasks, self.world.device):
                entries += phase_entries
        for learner in self.learners.values():
            learner.update_ema(self.images_per_step)
        return entries

    def dry_run(self, fetched: Batch) -> None:
        """Run the forward and backward passes of every phase on one micro-batch, in this process only; no update."""
        batch = self.finish(fetched)
        samples = len(next(iter(batch.values())))
        for phase in self.recipe.phases:
            self.strategy.trainable.select(phase.network)
            loss = self.strategy.call(phase.name, self._with_signals(batch, samples))
            _total(loss, 1).backward()
            batch |= {name: value.detach() for name, value in loss.shared.items()}
            self.learners[phase.network].clear_gradients()

    def _learn_phase(self, phase: Phase, repetitions: list[list[Batch]], watch: Watch | None) -> list[Entry]:
        self.recorder.where = phase.name
        self.strategy.trainable.select(phase.network)
        try:
            return [entry for batches in repetitions[: phase.repeat] for entry in self._run(phase, batches, watch)]
        except torch.OutOfMemoryError as error:
            error.add_note(f"phase {phase.name!r} (network {phase.network!r})")
            raise

    def _run(self, phase: Phase, batches: list[Batch], watch: Watch | None) -> list[Entry]:
        learner = self.learners[phase.network]
        entries: list[Entry] = []
        signals: dict[str, Tensor] = {}
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            samples = len(next(iter(batch.values())))
            with self.strategy.accumulating(phase, last):
                with self.annotate(f"{phase.name}/forward"):
                    loss = self.strategy.forward(phase, self._with_signals(batch, samples))
                # Weight the loss so that the average over ranks is the mean over the global batch.
                weight = samples * self.world.size / self.batch_size
                with self.annotate(f"{phase.name}/backward"):
                    self._backward(phase, learner, learner.scale(_total(loss, weight)), last)
            entries.append(Entry.of(phase.name, loss, samples))
            batch |= {name: value.detach() for name, value in loss.shared.items()}
            for name in (name for name in self.signals if name in loss.signals):  # use the same order on every rank
                part = loss.signals[name].detach().to(self.signals[name].dtype) * (samples / self.batch_size)
                signals[name] = signals[name] + part if name in signals else part
        if signals:
            self._update_signals(signals)
        if phase.name in self.unchecked:
            self._check_gradients(phase, learner)
        if watch:
            watch(phase, learner)
        with self.annotate(f"{phase.name}/update"):
            learner.step()
        return entries

    def _backward(self, phase: Phase, learner: Learner, loss: Tensor, last: bool) -> None:
        number = self.recorder.start("gradients") if last and self.exchanges else 0
        self.strategy.backward(loss, last)
        if number and any(parameter.grad is None for parameter in learner.parameters):
            # Then DistributedDataParallel does not exchange these gradients, and the other ranks wait for them.
            self.recorder.rename(number, f"gradients{INCOMPLETE}{_listed(learner.without_gradient())}")
        if last and self.waits:
            self.waits[phase.network].end_backward()

    def _with_signals(self, batch: Batch, samples: int) -> Batch:
        """Add the signals and scheduled values to the batch as columns, since DataParallel splits tensors by rows."""
        scalars = self.signals | self.scheduled
        return batch | {name: scalar.expand(samples) for name, scalar in scalars.items()} if scalars else batch

    def _update_signals(self, signals: dict[str, Tensor]) -> None:
        totals = self.world.sum(torch.stack(list(signals.values())))
        for name, total in zip(signals, totals.unbind(), strict=True):
            self.signals[name].copy_(total)

    def _check_gradients(self, phase: Phase, learner: Learner) -> None:
        self.unchecked.discard(phase.name)
        missing = learner.without_gradient()
        if missing:
            count = "1 parameter" if len(missing) == 1 else f"{len(missing)} parameters"
            raise UserError(
                f"phase {phase.name!r} computes no gradient for {count} in {phase.network!r} ({_listed(missing)}): "
                "use every parameter in the loss, or remove it from the network"
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _total(loss: Loss, weight: float) -> Tensor:
    terms = list(loss.terms.values())
    total = terms[0] if len(terms) == 1 else torch.stack(terms).sum()
    return total if weight == 1 else total * weight


def groups(due: Iterable[Phase]) -> list[list[Phase]]:
    """Return the phases in order; phases in the same group may run concurrently."""
    grouped: list[list[Phase]] = []
    for phase in due:
        if phase.concurrent and grouped and all(phase.network != other.network for other in grouped[-1]):
            grouped[-1].append(phase)
        else:
            grouped.append([phase])
    return grouped
