"""A recipe's losses in loops without the engine: a captured loop, Lightning's Trainer and Accelerate.

All loops train on one batch that is already on the device, so they neither load data nor compute metrics. This is an
upper bound for a loop that a user writes around the same networks and losses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from _variants import Fit, capture, synchronize
from torch import Tensor
from torch.optim import Optimizer

from paceline.commands.configure import configure
from paceline.contracts.recipe import Batch, Phase
from paceline.training.build import assemble
from paceline.training.compile import compile_networks

WARMUP_STEPS = 5  # before each timed block of a loop that is not captured
WARMUP_BATCHES = 20  # before timing starts in each fit of Lightning's Trainer


class Repeated:
    """A loader without overhead: it repeats one batch."""

    def __init__(self, batch: Tensor) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Tensor]:
        return repeat(self.batch, len(self))

    def __len__(self) -> int:
        return 10**6


class Losses:
    """A recipe on the device, its losses for one batch, and a plain torch optimizer for each network."""

    def __init__(self, recipe: str, assignments: list[str], *, compiled: bool) -> None:
        fixed = ["compile=off", "graph=off", "validation=0"]
        parts = assemble(configure(recipe, {}, assignments=[*assignments, *fixed]))
        self.recipe, self.device, self.precision = parts.recipe.train(), parts.world.device, parts.precision
        self.trainable = parts.strategy.trainable
        data = next(parts.feed.steps(0, parts.feed.images_per_step))
        self.batch: Batch = parts.step.finish(data.fetched[0][0])
        self.num_samples = parts.feed.images_per_step
        self.kinds = {name: (one.settings.optimizer, one.parameters) for name, one in parts.step.learners.items()}
        self.signals = dict(parts.step.signals)
        self.scheduled = dict(parts.step.scheduled)
        for loader in parts.loaders.values():
            loader.close()
        if compiled:
            compile_networks(self.recipe)

    def make_optimizers(self, *, capturable: bool) -> dict[str, Optimizer]:
        """Return torch's optimizers with the learning rate as a tensor if they are captured."""
        on_gpu = self.device.type == "cuda"
        rate: Any = torch.tensor(1e-4, device=self.device) if capturable and on_gpu else 1e-4
        made: dict[str, Optimizer] = {}
        for name, (kind, parameters) in self.kinds.items():
            if kind == "sgd":
                made[name] = torch.optim.SGD(parameters, lr=rate, momentum=0.9, nesterov=True, fused=on_gpu)
            else:
                adam = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind]
                made[name] = adam(parameters, lr=rate, fused=on_gpu, capturable=capturable and on_gpu)
        return made

    def each(self, call: Callable[[str, Batch], Any]) -> Iterator[tuple[Phase, dict[str, Tensor]]]:
        """Yield each phase with its loss terms; the caller updates the network before it takes the next phase."""
        batch = dict(self.batch)
        for phase in self.recipe.phases:
            self.trainable.select(phase.network)
            scalars = {
                name: value.expand(len(batch["index"])) for name, value in (self.signals | self.scheduled).items()
            }
            loss = call(phase.name, batch | scalars)
            yield phase, loss.terms
            batch |= {name: value.detach() for name, value in loss.shared.items()}
            for name in (name for name in self.signals if name in loss.signals):
                self.signals[name].copy_(loss.signals[name].detach())


def plain_fit(losses: Losses, *, captured: bool) -> Fit:
    """Return a hand-written loop: bf16 autocast, channels_last, fused optimizers and, if wanted, one CUDA graph."""
    device, optimizers = losses.device, losses.make_optimizers(capturable=captured)

    def forward(phase: str, batch: Batch) -> Any:
        with losses.precision.autocast():
            return losses.recipe(phase, batch)

    def learn() -> None:
        for phase, terms in losses.each(forward):
            torch.stack(list(terms.values())).sum().backward()
            optimizers[phase.network].step()
            optimizers[phase.network].zero_grad(set_to_none=True)

    losses.precision.apply(deterministic=False)
    step = capture(learn, device) if captured and device.type == "cuda" else learn
    return _timed(step, device, lambda: losses.precision.apply(deterministic=False))


def accelerate_fit(losses: Losses) -> Fit:
    """Return the loop of Accelerate's documentation, with `accelerator.backward` and prepared optimizers."""
    from accelerate import Accelerator

    on_gpu = losses.device.type == "cuda"
    accelerator = Accelerator(mixed_precision="bf16" if on_gpu else "no", cpu=not on_gpu)
    recipe = accelerator.prepare(losses.recipe)
    optimizers = {name: accelerator.prepare(one) for name, one in losses.make_optimizers(capturable=False).items()}

    def learn() -> None:
        for phase, terms in losses.each(recipe):
            accelerator.backward(torch.stack(list(terms.values())).sum())
            optimizers[phase.network].step()
            optimizers[phase.network].zero_grad()

    return _timed(learn, losses.device, lambda: losses.precision.apply(deterministic=False))


def trainer_fit(losses: Losses, folder: Path) -> Fit:
    """Return a function that trains under Lightning's Trainer, with manual optimization and logged losses."""
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # its import sets another level
    names = list(losses.kinds)

    class Clock(lightning.Callback):
        """Measures the time from the end of the warm-up to the end of the last step."""

        def __init__(self, last: int) -> None:
            self.last, self.seconds = last, 0.0

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
            done = trainer.fit_loop.epoch_loop.total_batch_idx + 1
            if done in (WARMUP_BATCHES, self.last):
                synchronize(losses.device)
                self.seconds = perf_counter() - self.seconds

    class Module(lightning.LightningModule):
        """The recipe as a LightningModule."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.recipe = losses.recipe

        def configure_optimizers(self) -> list[Optimizer]:
            return list(losses.make_optimizers(capturable=False).values())

        def training_step(self, batch: Tensor, number: int) -> None:
            found = self.optimizers()
            optimizers = dict(zip(names, found if isinstance(found, list) else [found], strict=True))
            for phase, terms in losses.each(self.recipe):
                self.log_dict({f"{phase.name}/{name}": value for name, value in terms.items()})
                self.manual_backward(torch.stack(list(terms.values())).sum())
                optimizers[phase.network].step()
                optimizers[phase.network].zero_grad()

    module = Module()

    def fit(steps: int) -> float:
        losses.precision.apply(deterministic=False)
        clock = Clock(WARMUP_BATCHES + steps)
        trainer = lightning.Trainer(
            accelerator="gpu" if losses.device.type == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed" if losses.device.type == "cuda" else "32-true",
            max_steps=len(losses.recipe.phases) * clock.last,  # Lightning counts the updates of all networks
            callbacks=[clock],
            logger=lightning.pytorch.loggers.CSVLogger(str(folder)),
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        trainer.fit(module, Repeated(torch.zeros(1, device=losses.device)))
        module.to(losses.device)  # the Trainer moves the module to the CPU at the end
        return float(clock.seconds)

    return fit


def _timed(step: Callable[[], None], device: torch.device, before: Callable[[], None]) -> Fit:
    def fit(steps: int) -> float:
        before()
        for _ in range(WARMUP_STEPS):
            step()
        synchronize(device)
        start = perf_counter()
        for _ in range(steps):
            step()
        synchronize(device)
        return perf_counter() - start

    return fit
