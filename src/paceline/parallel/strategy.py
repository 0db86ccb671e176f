"""The strategy contract: how a recipe is parallelized. Step and loop are the same under every strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from paceline.config.resolve import Config
from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, Loss, Phase, Recipe
from paceline.core.errors import UserError
from paceline.core.registry import load_class
from paceline.parallel.batchnorm import has_batchnorm, synchronize
from paceline.parallel.precision import Precision
from paceline.parallel.trainable import Trainable
from paceline.parallel.world import World

StepData = TypeVar("StepData")
NOTHING = "nothing"  # a phase that uses every parameter and has zero gradients


class PhaseCall(nn.Module):
    """The recipe's forward in autocast: the one module that DataParallel and DistributedDataParallel wrap.

    Autocast is inside, since DataParallel's threads do not inherit it.
    """

    def __init__(self, recipe: Recipe, precision: Precision) -> None:
        super().__init__()
        self.recipe, self.precision = recipe, precision

    def forward(self, phase: str, batch: Batch) -> Loss:
        if phase == NOTHING:
            return Loss({NOTHING: sum(p.sum() * 0 for p in self.recipe.parameters() if p.requires_grad)})  # type: ignore[dict-item]
        with self.precision.autocast():
            loss: Loss = self.recipe(phase, batch)
            return loss


class Strategy:
    """Runs a recipe in this process, on one device; subclasses override what they change."""

    # What callers need to know about a strategy; they never compare its name.
    needs_processes: ClassVar[bool] = False  # one process per device
    max_devices: ClassVar[int | None] = None
    complexity: ClassVar[int] = 0  # a report recommends the simplest of equally good strategies
    package: ClassVar[str] = ""  # the module that must be installed besides torch
    extra: ClassVar[str] = ""  # of paceline, which installs that module
    cannot_capture: ClassVar[str] = ""  # why its step cannot be a CUDA graph; empty if it can
    cannot_compile: ClassVar[str] = ""  # why its networks cannot be compiled
    parity_obstacle: ClassVar[str] = ""  # why its weights may differ from those of one device
    ladder_obstacle: ClassVar[str] = ""  # why the step ladder cannot measure it
    cpu_obstacle: ClassVar[str] = ""  # why it is useless on a CPU, where it runs on one device

    def __init__(self, settings: RunSettings, world: World, precision: Precision, recipe: Recipe) -> None:
        """Move the recipe to its device and wrap it; the strategy is then ready for the first step."""
        if self.max_devices is not None and settings.devices > self.max_devices:
            name, most = settings.strategy, self.max_devices
            raise UserError(
                f"--strategy {name}: uses {most} of {settings.devices} devices; use ddp, or --devices {most}"
            )
        self.settings, self.world, self.precision, self.recipe = settings, world, precision, recipe
        self.notes: list[str] = []  # what was chosen and why; printed before the first step
        recipe.to(device=world.device, dtype=precision.weights)
        if world.device.type == "cuda":
            recipe.to(memory_format=torch.channels_last)
        if self.needs_processes and world.size > 1:
            self._synchronize_batchnorm(recipe)
        self.trainable = Trainable(recipe)
        self.call = PhaseCall(recipe, precision)

    @property
    def num_devices(self) -> int:
        """Return how many devices share a batch."""
        return self.world.size

    def _synchronize_batchnorm(self, recipe: Recipe) -> None:
        with_norm = [name for name, network in recipe.networks.items() if has_batchnorm(network)]
        if not with_norm:
            return
        if self.settings.sync_batchnorm == "off":
            self.notes.append(
                "BatchNorm: separate in each process, as requested; results depend on the number of devices"
            )
            return
        chosen = []
        for name in with_norm:
            ours = self.world.device.type == "cpu" or name in recipe.double_backward
            setattr(recipe, name, synchronize(recipe.get_submodule(name), ours=ours))
            chosen.append(f"{name} by {'our own class' if ours else 'torch.nn.SyncBatchNorm'}")
        why = (
            "torch's cannot run on CPU"
            if self.world.device.type == "cpu"
            else "torch's where there is no gradient penalty"
        )
        self.notes.append(f"BatchNorm: synchronized over {self.world.size} processes ({', '.join(chosen)}; {why})")

    def generators(self) -> list[torch.Generator]:
        """Return the generators that dropout uses in this process, one per device."""
        device = self.world.device
        return [torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator]

    def forward(self, phase: Phase, batch: Batch) -> Loss:
        """Return the loss of a phase on this process's part of a micro-batch."""
        loss: Loss = self.call(phase.name, batch)
        return loss

    def accumulating(self, phase: Phase, last: bool) -> AbstractContextManager[object]:
        """Return a context for one micro-batch; only the last micro-batch synchronizes gradients."""
        return nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add a loss's gradients to the network's."""
        loss.backward()

    def drive(self, steps: Iterable[StepData], advance: Callable[[StepData], None]) -> None:
        """Run the loop: pass each step's data to `advance`. A strategy with its own loop overrides this."""
        for data in steps:
            advance(data)


AUTO = {"one device": "single", "several": "ddp"}  # what `--strategy auto` means


def strategy_name(name: str, devices: int, accelerator: str = "") -> tuple[str, int]:
    """Return the strategy that the settings resolve to and its number of devices."""
    if name == "auto":
        name = AUTO["several" if devices > 1 else "one device"]
    if accelerator == "cpu" and load_class("strategy", name, Strategy).cpu_obstacle:
        return AUTO["one device"], 1
    return name, devices


def strategy_class(config: Config) -> type[Strategy]:
    """Return the class behind `--strategy`."""
    name, _ = strategy_name(config.run.strategy, config.run.devices)
    return load_class("strategy", name, Strategy)
