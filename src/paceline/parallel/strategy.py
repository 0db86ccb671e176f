"""The strategy contract: how a recipe is parallelised."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from paceline.config.resolve import Config
from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, Loss, Phase, Recipe
from paceline.core.errors import UserError
from paceline.core.registry import load_class
from paceline.core.watch import start_operation
from paceline.parallel.batchnorm import has_batchnorm, synchronize
from paceline.parallel.blocks import recompute_blocks
from paceline.parallel.precision import Precision
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
            max_devices = 1

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
    """Whether the strategy needs one process per device."""
    max_devices: ClassVar[int | None] = None
    """The maximum number of devices that the strategy can use.

    None means no maximum. However, a strategy that neither sets `needs_processes` nor overrides `num_devices` can use
    only one device.
    """
    complexity: ClassVar[int] = 0
    """Tie-breaker: among equally good strategies, a report recommends the one with the lowest value."""
    package: ClassVar[str] = ""
    """A module that the strategy needs in addition to torch; empty if there is none."""
    extra: ClassVar[str] = ""
    """The Paceline extra that installs `package`."""
    shards_weights: ClassVar[bool] = False
    """Whether each process holds only a part of the weights.

    All processes then write a checkpoint together, and `checkpoint_activations=auto` means on.
    """
    memory_format: ClassVar[torch.memory_format] = torch.channels_last
    """The memory format of the weights on a GPU."""
    cannot_capture: ClassVar[str] = ""
    """Why the strategy's step cannot be captured as a CUDA graph; empty if it can."""
    eager_steps: ClassVar[int] = 11
    """How many eager steps must precede the capture of a step as a CUDA graph.

    The first step creates the optimizer's state and selects kernels. torch recommends three steps before a capture, and
    DistributedDataParallel requires eleven.
    """
    cannot_compile: ClassVar[str] = ""
    """Why the strategy's networks cannot be compiled; empty if they can."""
    cannot_recompute: ClassVar[str] = ""
    """Why activations cannot be recomputed in the backward pass; empty if they can."""
    parity_obstacle: ClassVar[str] = ""
    """Why the weights may differ from those trained on one device; empty if they are equal."""
    ladder_obstacle: ClassVar[str] = ""
    """Why the strategy's step-time breakdown cannot be measured; empty if it can."""
    cpu_obstacle: ClassVar[str] = ""
    """Why there is no benefit in using the strategy on a CPU; empty if there is one."""

    def __init__(self, settings: RunSettings, world: World, precision: Precision, recipe: Recipe) -> None:
        """Move the recipe to its device and wrap it, ready for the first step."""
        most = self.device_limit()
        if most is not None and settings.devices > most:
            name = settings.strategy
            raise UserError(
                f"--strategy {name}: uses only {most} of {settings.devices} devices; use ddp, or --devices {most}"
            )
        self.settings, self.world, self.precision, self.recipe = settings, world, precision, recipe
        if self.needs_processes and world.size > 1:
            start_operation("wrap the networks")  # DistributedDataParallel compares the networks of all processes
        self.notes: list[str] = []  # decisions and their reasons, printed before the first step
        self.evaluated: frozenset[str] | None = None  # the networks that predictions use; None if not known yet
        self.place(recipe)
        if self.needs_processes and world.size > 1:
            self._synchronize_batchnorm(recipe)
        self.recomputes = self._recompute(recipe)
        self.trainable = Trainable(recipe)
        # Cast copies of sharded weights would stay in memory after the weights themselves are released.
        self.call = PhaseCall(recipe, replace(precision, caches_casts=not self.shards_weights))

    @property
    def num_devices(self) -> int:
        """The number of devices that each batch is divided among."""
        return self.world.size

    @classmethod
    def device_limit(cls) -> int | None:
        """Return the maximum number of devices; None if there is no maximum."""
        undeclared = not cls.needs_processes and cls.num_devices is Strategy.num_devices
        return 1 if cls.max_devices is None and undeclared else cls.max_devices

    @classmethod
    def memory_shares(cls, recipe: Recipe, num_devices: int) -> MemoryShares:
        """Return how the strategy divides memory among a number of devices.

        `paceline plan --memory` uses this. The default is for a strategy that divides only the batch.
        """
        return MemoryShares()

    def place(self, recipe: Recipe) -> None:
        """Move the recipe to the device, in the precision and memory format of the run."""
        # A sharding strategy moves one block at a time, because a whole network may be too large for a device.
        recipe.to(device=None if self.shards_weights else self.world.device, dtype=self.precision.weights)
        if self.world.device.type == "cuda":
            recipe.to(memory_format=self.memory_format)

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
        if self.cannot_recompute and wanted == "on":
            raise UserError(f"checkpoint_activations=on: {self.cannot_recompute}; use checkpoint_activations=off")
        count = 0 if self.cannot_recompute else recompute_blocks(recipe)
        if wanted == "on" and not count:
            raise UserError(
                "checkpoint_activations=on: no network has repeated blocks that can be recomputed; "
                "list them in the recipe's `blocks`, or use checkpoint_activations=off"
            )
        if count:
            blocks = "1 block" if count == 1 else f"{count} blocks"
            self.notes.append(f"activations: recomputed in the backward pass for {blocks} (checkpoint_activations)")
        return count > 0

    def generators(self) -> list[torch.Generator]:
        """Return the random generators that dropout uses in this process, one per device."""
        device = self.world.device
        return [torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator]

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
        """Return a context in which every process has the weights for predictions.

        These are all weights of the networks that predictions use, or of all networks before `evaluated` is known.
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


AUTO = {"one device": "single", "several": "ddp"}  # what `--strategy auto` selects


def strategy_name(name: str, devices: int, accelerator: str = "") -> tuple[str, int]:
    """Return the name of the strategy that the settings select, and the number of devices."""
    if name == "auto":
        name = AUTO["several" if devices > 1 else "one device"]
    if accelerator == "cpu" and load_class("strategy", name, Strategy).cpu_obstacle:
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
