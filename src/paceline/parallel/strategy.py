"""The strategy contract: how a recipe is parallelised."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from paceline.config.resolve import Config
from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, Loss, Phase, Recipe
from paceline.core.errors import UserError, missing
from paceline.core.registry import is_installed, load_class
from paceline.core.watch import start_operation
from paceline.parallel.batchnorm import has_batchnorm, synchronize
from paceline.parallel.precision import Precision
from paceline.parallel.shards import recompute_blocks
from paceline.parallel.torch_internals import has_exchanged_gradients
from paceline.parallel.world import World


@dataclass(frozen=True)
class MemoryShares:
    """The memory of the fullest device, compared with one device that trains on the same number of samples.

    A strategy that divides nothing and needs no buffers returns `MemoryShares()`.
    """

    held: Mapping[str, float] = field(default_factory=dict)
    """Fraction of a network's weights, gradients, optimizer state and EMA per device; 1 for networks not listed."""
    gradient_copies: float = 1.0
    """How many copies of a phase's gradients the device stores, apart from buffers."""
    batch_copies: int = 1
    """How many devices' batches the device stores."""
    buffer_bytes: int = 0
    """Memory that the strategy keeps during the whole step: gradient buckets and gathered weights."""

    def of(self, network: str) -> float:
        """Return the fraction of a network that a device stores."""
        return self.held.get(network, 1.0)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the size of tensors in bytes, counting each tensor once."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


class Trainable:
    """The trainable parameters by network. While a phase runs, only those of its network require grad."""

    def __init__(self, recipe: Recipe) -> None:
        # Parameters that the recipe froze stay frozen.
        self.parameters: dict[str, list[nn.Parameter]] = {
            name: [parameter for parameter in network.parameters() if parameter.requires_grad]
            for name, network in recipe.networks.items()
        }
        self._selected: str | None = None

    def select(self, network: str) -> None:
        """Make only one network's parameters require grad."""
        if network == self._selected:
            return
        self._selected = network
        for name, parameters in self.parameters.items():
            for parameter in parameters:
                parameter.requires_grad_(name == network)

    def release(self) -> None:
        """Make the trainable parameters of all networks require grad."""
        self._selected = None
        for parameters in self.parameters.values():
            for parameter in parameters:
                parameter.requires_grad_(True)


StepData = TypeVar("StepData")
Feature = Literal["capture", "compile", "recompute", "parity", "breakdown", "cpu"]  # see `Strategy.why_not`
NOTHING = "nothing"  # a dummy phase: its loss uses every parameter and has zero gradients


class PhaseCall(nn.Module):
    """The recipe's forward pass under autocast: the module that DataParallel and DistributedDataParallel wrap.

    Autocast is applied inside the module, because DataParallel's threads do not inherit it.
    """

    def __init__(self, recipe: Recipe, precision: Precision) -> None:
        super().__init__()
        self.recipe, self.precision = recipe, precision

    def forward(self, phase: str, batch: Batch) -> Loss:
        if phase == NOTHING:
            return Loss({NOTHING: sum(p.sum() * 0 for p in self.recipe.parameters() if p.requires_grad)})  # type: ignore[dict-item]
        with self.precision.autocast():
            loss = self.recipe(phase, batch)
        return _checked(phase, loss)


def _checked(phase: str, loss: object) -> Loss:
    """Return a recipe's loss; raise UserError if it has no gradient. Nothing here waits for the device."""
    if not isinstance(loss, Loss):
        raise UserError(f"phase {phase!r}: the loss is a {type(loss).__name__}: return paceline.Loss({{NAME: tensor}})")
    for kind, values in (("loss term", loss.terms), ("shared value", loss.shared), ("signal", loss.signals)):
        for name, value in values.items() if isinstance(values, dict) else [("", values)]:
            if not isinstance(value, Tensor) or not name:
                problem = f"{kind} {name!r} is of type {type(value).__name__}"
                raise UserError(f"phase {phase!r}: {problem}: return a tensor in a dict")
    for name, term in loss.terms.items():
        if term.numel() != 1:
            shape = f"loss term {name!r} has the shape {list(term.shape)}"
            raise UserError(f"phase {phase!r}: {shape}: return its mean over samples")
    if torch.is_grad_enabled() and not any(term.requires_grad for term in loss.terms.values()):
        raise UserError(
            f"phase {phase!r}: no loss term depends on the weights of its network: use its output in the loss"
        )
    return loss


class Strategy:
    """Defines how a recipe is parallelised. Subclass it in a separate file.

    The file name is the name of the strategy. This base class runs a recipe in one process on one device. Override the
    methods that differ: `forward` (called for each phase and micro-batch), `accumulating`, `backward`, `drive` (the
    loop over steps), or the constructor to wrap the networks.

    Examples:
        ```python
        # counting.py
        from paceline import Strategy


        class Counting(Strategy):
            def drive(self, steps, advance):
                count = 0
                for data in steps:
                    advance(data)
                    count += 1
                print(f"{count} steps")
        ```

        >>> run = paceline.train("./my_recipe.py", strategy="./counting.py", images=512, out="runs/counted")
        >>> result = paceline.verify("./my_recipe.py", ["single", "./counting.py"], steps=2, devices=1)
        >>> result.ok
        True
    """

    # Properties of a strategy. Other code checks these properties, never the strategy's name.
    needs_processes: ClassVar[bool] = False
    """Whether the strategy needs one process per device.

    A strategy that neither sets this nor overrides `local_devices` uses only one device.
    """
    shards_weights: ClassVar[bool] = False
    """Whether each process holds only a part of the weights.

    All processes then write a checkpoint together, and `checkpoint_activations=auto` means on.
    """
    complexity: ClassVar[int] = 0
    """Tie-breaker: among equally good strategies, a report recommends the one with the lowest value."""
    package: ClassVar[str] = ""
    """A module that the strategy needs in addition to torch; empty if there is none."""
    extra: ClassVar[str] = ""
    """The Paceline extra that installs `package`."""

    @classmethod
    def why_not(cls, feature: Feature) -> str:
        """Return why the strategy does not support a feature; empty if it does.

        Args:
            feature: "capture": its step is captured as a CUDA graph; "compile": its networks are compiled; "recompute":
                activations are recomputed in the backward pass; "parity": the weights equal those trained on one
                device; "breakdown": the times of its step's parts are measured; "cpu": there is a benefit in using it
                on a CPU.
        """
        return ""

    def __init__(self, settings: RunSettings, world: World, precision: Precision, recipe: Recipe) -> None:
        """Move the recipe to its device and wrap it, ready for the first step."""
        if settings.devices > 1 and uses_one_device(type(self)):
            raise UserError(
                f"--strategy {settings.strategy}: uses only 1 of {settings.devices} devices; use ddp, or --devices 1"
            )
        self.settings, self.world, self.precision, self.recipe = settings, world, precision, recipe
        if self.needs_processes and world.size > 1:
            start_operation("wrap the networks")  # DistributedDataParallel compares the networks of all processes
        self.notes: list[str] = []  # decisions and their reasons, printed before the first step
        self._place(recipe)
        if self.needs_processes and world.size > 1:
            self._synchronize_batchnorm(recipe)
        self.recomputes = self._recompute(recipe)
        self.trainable = Trainable(recipe)
        # Cast copies of sharded weights would stay in memory after the weights themselves are released.
        self.call = PhaseCall(recipe, replace(precision, caches_casts=not self.shards_weights))

    @property
    def local_devices(self) -> list[torch.device]:
        """The devices of this process that each batch is divided among.

        A device may be listed several times.
        """
        return [self.world.device]

    @classmethod
    def memory_shares(cls, recipe: Recipe, num_devices: int) -> MemoryShares:
        """Return how the strategy divides memory among a number of devices.

        `paceline plan --memory` uses this. The default is for a strategy that divides only the batch.
        """
        return MemoryShares()

    def _place(self, recipe: Recipe) -> None:
        """Move the recipe to the device, in the precision and memory format of the run."""
        # A sharding strategy moves one block at a time, because a whole network may be too large for a device.
        recipe.to(device=None if self.shards_weights else self.world.device, dtype=self.precision.weights)
        if self.world.device.type == "cuda":  # fully_shard rejects parameters that are not contiguous
            recipe.to(memory_format=torch.contiguous_format if self.shards_weights else torch.channels_last)

    def _synchronize_batchnorm(self, recipe: Recipe) -> None:
        with_norm = [name for name, network in recipe.networks.items() if has_batchnorm(network)]
        if not with_norm:
            return
        if self.settings.sync_batchnorm == "off":
            self.notes.append("BatchNorm: not synchronised, as requested; results depend on the number of devices")
            return
        chosen = []
        for name in with_norm:
            ours = self.world.device.type == "cpu" or name in recipe.double_backward
            setattr(recipe, name, synchronize(recipe.get_submodule(name), ours=ours))
            chosen.append(f"{name} with {'SynchronizedBatchNorm' if ours else 'torch.nn.SyncBatchNorm'}")
        why = (
            "torch.nn.SyncBatchNorm does not run on a CPU"
            if self.world.device.type == "cpu"
            else "torch.nn.SyncBatchNorm is used unless a network needs double backward"
        )
        self.notes.append(f"BatchNorm: synchronised across {self.world.size} processes ({', '.join(chosen)}; {why})")

    def _recompute(self, recipe: Recipe) -> bool:
        """Apply `checkpoint_activations`; return whether the networks recompute activations."""
        wanted = self.settings.checkpoint_activations
        if wanted == "off" or (wanted == "auto" and not (self.shards_weights and self.world.size > 1)):
            return False
        obstacle = self.why_not("recompute")
        if obstacle and wanted == "on":
            raise UserError(f"checkpoint_activations=on: {obstacle}; use checkpoint_activations=off")
        count = 0 if obstacle else recompute_blocks(recipe)
        if wanted == "on" and not count:
            raise UserError(
                "checkpoint_activations=on: no network has repeated blocks that can be recomputed; "
                "list them in the recipe's `blocks`, or use checkpoint_activations=off"
            )
        if count:
            blocks = "1 block" if count == 1 else f"{count} blocks"
            self.notes.append(f"activations: recomputed in the backward pass for {blocks} (checkpoint_activations)")
        return count > 0

    def forward(self, phase: Phase, batch: Batch) -> Loss:
        """Return the loss of a phase for this process's slice of a micro-batch."""
        loss: Loss = self.call(phase.name, batch)
        return loss

    def accumulating(self, phase: Phase, last: bool) -> AbstractContextManager[object]:
        """Return a context manager for the backward pass of one micro-batch.

        Gradients are synchronised only for the last micro-batch.
        """
        return nullcontext()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Compute the gradients of a loss and accumulate them in the network."""
        loss.backward()

    def whole_weights(self) -> AbstractContextManager[object]:
        """Return a context in which every process has all weights, for predictions.

        Inside the context, a process may call the networks independently of the other processes. All processes must
        enter and leave the context together.
        """
        return nullcontext()

    def drive(self, steps: Iterable[StepData], advance: Callable[[StepData], None]) -> None:
        """Run the training loop: pass the data of each step to `advance`.

        Override this for a strategy with its own loop.
        """
        for data in steps:
            advance(data)


def uses_one_device(strategy: type[Strategy]) -> bool:
    """Return whether a strategy cannot use several devices."""
    return not strategy.needs_processes and strategy.local_devices is Strategy.local_devices


def num_devices(strategy: Strategy) -> int:
    """Return the number of devices that each batch is divided among."""
    return strategy.world.size * len(strategy.local_devices)


def why_unavailable(strategy: type[Strategy], *, on_gpus: bool) -> str:
    """Return why a strategy cannot be used here; empty if it can."""
    if not is_installed(strategy.package):
        return missing(strategy.package, strategy.extra)
    return "" if on_gpus else strategy.why_not("cpu")


AUTO = {"one device": "single", "several": "ddp"}  # what `--strategy auto` selects


def strategy_name(name: str, devices: int, accelerator: str = "") -> tuple[str, int]:
    """Return the name of the strategy that the settings select, and the number of devices."""
    if name == "auto":
        name = AUTO["several" if devices > 1 else "one device"]
    if accelerator == "cpu" and load_class("strategy", name, Strategy).why_not("cpu"):
        return AUTO["one device"], 1
    return name, devices


def strategy_class(config: Config) -> type[Strategy]:
    """Return the class selected by `--strategy`."""
    name, _ = strategy_name(config.run.strategy, config.run.devices)
    return load_class("strategy", name, Strategy)


# torch warns about convolutions with one channel or 1×1 pixels: two sets of strides describe the same layout.
warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")

# Buffers are broadcast once, when a wrapper is built. A broadcast in every forward pass would break recipes
# that call a network twice before a backward pass.
_PARAMETERS = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
NO_BUFFER_BROADCAST: dict[str, Any] = {
    ("forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"): False
}


def check_gradients(
    wrapper: nn.parallel.DistributedDataParallel, phase: Phase, settings: RunSettings, rank: int
) -> None:
    """Raise UserError if the last backward pass, which was that of `phase`, left out parameters."""
    if has_exchanged_gradients(wrapper):
        return
    loss_name = "the loss of the last micro-batch" if settings.accumulate > 1 else "the loss"
    raise UserError(
        f"phase {phase.name!r}: in the previous step, {loss_name} on rank {rank} did not use every "
        f"parameter of {phase.network!r}, so some gradients were not exchanged: use every parameter in "
        f"{loss_name}, with a weight of 0 where necessary"
    )
