"""Forecasts the memory that each device needs for a step, and explains what to change when it runs out.

The step runs on fake tensors, which have a shape but no data, while a log counts the bytes in use.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.config.resolve import Config
from paceline.config.settings import split_batch
from paceline.contracts.recipe import Batch, Loss, Phase, Recipe
from paceline.core.errors import UserError
from paceline.core.host import free_host_bytes
from paceline.core.terminal import activity
from paceline.data.loader import Budget, choose_loader
from paceline.data.source import Source, bytes_needed, open_sources
from paceline.data.stream import cut
from paceline.images.rectangles import Box
from paceline.parallel.group import Place
from paceline.parallel.precision import Precision
from paceline.parallel.shards import Mode, recompute_blocks
from paceline.parallel.strategy import MemoryShares, Strategy, strategy_class
from paceline.parallel.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    has_no_result,
    real_tensors,
)
from paceline.parallel.world import World
from paceline.runs.recipe import make_recipe
from paceline.training.build import Parts, make_learners
from paceline.training.graph import culprit, first_line
from paceline.training.learner import Learner
from paceline.training.step import Step

BLOCK_BYTES = 512  # the CUDA allocator rounds every size up to a multiple of this
EPOCH_IMAGES = 2**20  # any number: the memory of a step does not depend on the length of the run


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


Sizes = dict[Column, int]  # bytes


class _Storage(NamedTuple):
    alive: weakref.ref[torch.UntypedStorage]
    size: int
    column: Column


class StorageLog(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Counts the live bytes of all tensors on one device by column. New tensors count as activations."""

    def __init__(self, device: torch.device, *, is_fake: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.device, self.is_fake, self.phase = device, is_fake, ""
        self.live: Sizes = {}
        self.peaks: dict[tuple[str, str], Sizes] = {}  # by phase: the live bytes at the peaks of all and of activations
        self._storages: dict[int, _Storage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_fake and has_no_result(func):
            return None  # fused optimizers have no implementation for fake tensors
        self.mark(_tensors(args), Column(Kind.BUFFERS), only_new=True)  # they were created before the log was active
        result = func(*args, **(kwargs or {}))
        self.mark(_tensors(result), Column(Kind.ACTIVATIONS), only_new=True)
        return result

    def mark(self, tensors: Iterable[Tensor], column: Column, *, only_new: bool = False) -> None:
        """Count the memory of tensors in a column, from now on; with `only_new`, skip memory that is known."""
        for tensor in tensors:
            if tensor.device != self.device or (self.is_fake and not isinstance(tensor, FakeTensor)):
                continue  # of frozen weights that were read from a file, the fake copies are counted
            storage = tensor.untyped_storage()
            key, known = id(storage), self._storages.get(id(storage))
            if known and only_new:
                continue
            if known:
                self._add(known.column, -known.size)
                self._storages[key] = known._replace(column=column)
            else:
                size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
                self._storages[key] = _Storage(weakref.ref(storage, partial(self._forget, key)), size, column)
            self._add(column, self._storages[key].size)
        activations = Column(Kind.ACTIVATIONS)
        if sum(self.live.values()) > sum(self.peaks.get((self.phase, ""), {}).values()):
            self.peaks[self.phase, ""] = dict(self.live)
        if self.live.get(activations, 0) > self.peaks.get((self.phase, activations.kind), {}).get(activations, 0):
            self.peaks[self.phase, activations.kind] = dict(self.live)

    def _forget(self, key: int, _: object) -> None:
        storage = self._storages.pop(key)
        self._add(storage.column, -storage.size)

    def _add(self, column: Column, size: int) -> None:
        self.live[column] = self.live.get(column, 0) + size


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments or results of an operation."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


# Autocast on a GPU runs these operations in float32, and on a CPU in the precision of their inputs. Without them, the
# forecast for a vision transformer is 9 % lower. Autocast's other operations, such as losses, do not matter.
IN_FLOAT32 = {F.layer_norm, F.group_norm, F.softmax, torch.layer_norm, torch.softmax, Tensor.softmax}


class LikeCuda(TorchFunctionMode):
    """Runs operations with the autocast list of a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            return func(*map(_in_float32, args), **{name: _in_float32(value) for name, value in kwargs.items()})
        return func(*args, **kwargs)


def _in_float32(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value


@dataclass(frozen=True)
class Trace:
    """The memory of one step on one device."""

    samples: int  # per micro-batch
    recipe: Recipe  # with fake weights, which require grad unless the recipe froze them
    peaks: dict[tuple[str, str], Sizes]  # see `StorageLog`
    recomputes: bool  # whether activations are recomputed in the backward pass


def trace_step(
    config: Config, sources: Mapping[str, Source], precision: Precision, samples: int, *, recompute: bool = False
) -> Trace:
    """Follow the memory of a step with this many samples in each micro-batch; raise UserError if it needs real data.

    With `recompute`, the networks recompute activations if they can.
    """
    device = torch.device("cuda", 0) if precision.device_type == "cuda" else torch.device("cpu")
    log = StorageLog(device, is_fake=True)
    mode = LikeCuda if config.run.accelerator != "cpu" and device.type == "cpu" else nullcontext
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
            log.peaks.clear()
            _learn(step, fetched, log)
            gc.collect()
            activations, buffers = Column(Kind.ACTIVATIONS), Column(Kind.BUFFERS)
            for sizes in log.peaks.values():
                constants = min(log.live.get(activations, 0), sizes.get(activations, 0))  # kept by the recipe
                sizes[activations] = sizes.get(activations, 0) - constants
                sizes[buffers] = sizes.get(buffers, 0) + constants
            strategy.trainable.release()
            return Trace(samples, recipe, log.peaks, strategy.recomputes)


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
    log.mark([] if parameter.grad is None else [parameter.grad], column)


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


GIB = 2**30
USABLE = 0.9  # part of a device's memory; the CUDA context, cuDNN workspaces and fragmentation need the rest
MAX_SAMPLES = 2**20  # per device
UNKNOWN_BYTES = 2**62  # of a device whose memory is not known
DIVIDED = (Kind.WEIGHTS, Kind.GRADIENTS, Kind.OPTIMIZER, Kind.EMA)


@dataclass(frozen=True)
class DeviceMemory:
    """The memory that the fullest device needs at the peak of a step."""

    bytes: Mapping[Kind, int]
    phase: str  # the phase with the peak
    network: str  # the network that the phase updates

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    @property
    def largest(self) -> Kind:
        """What needs the most memory."""
        return max(self.bytes, key=lambda kind: self.bytes[kind])


@dataclass(frozen=True)
class StepMemory:
    """The memory of a step with any number of samples, interpolated between two traces."""

    low: Trace
    high: Trace

    @property
    def recipe(self) -> Recipe:
        return self.high.recipe

    def peak(self, shares: MemoryShares, samples: int) -> tuple[dict[Kind, int], str]:
        """Return the bytes of each kind at the peak of a step, and the phase with the peak."""
        scale = (samples - self.high.samples) / (self.high.samples - self.low.samples)
        peaks: dict[tuple[str, str], dict[Kind, int]] = {}
        for key, high in self.high.peaks.items():
            low, sizes = self.low.peaks.get(key, high), dict.fromkeys(Kind, 0)
            for column in high | low:
                live = high.get(column, 0) + scale * (high.get(column, 0) - low.get(column, 0))
                sizes[column.kind] += max(0, round(live * _weight(shares, column.kind, column.network)))
            peaks[key] = sizes
        key = max(peaks, key=lambda name: sum(peaks[name].values()))
        peaks[key][Kind.BUFFERS] += shares.buffer_bytes
        return peaks[key], key[0]


def _weight(shares: MemoryShares, kind: Kind, network: str) -> float:
    weight = shares.of(network) if kind in DIVIDED else 1.0
    if kind == Kind.GRADIENTS:
        weight *= shares.gradient_copies
    return weight * (shares.batch_copies if kind == Kind.BATCH else 1)


@dataclass(frozen=True)
class Forecast:
    """The memory of a run's step under any strategy, on any number of devices."""

    config: Config
    stored: StepMemory  # without recomputation
    recomputed: StepMemory | None  # with `checkpoint_activations=on`; None if no network can recompute
    data_bytes: int  # samples that the loader keeps on each device
    captures: bool  # whether steps are captured as CUDA graphs, if the strategy allows it

    def recomputes(self, strategy: type[Strategy], devices: int) -> bool:
        """Return whether activations are recomputed with the settings."""
        wanted = self.config.run.checkpoint_activations
        on = wanted == "on" or (wanted == "auto" and strategy.shards_weights and devices > 1)
        return on and self.can_recompute(strategy)

    def memory(
        self, strategy: type[Strategy], devices: int, samples: int, *, recompute: bool | None = None
    ) -> DeviceMemory:
        """Return the memory of the fullest device with this many samples per device and micro-batch."""
        wanted = self.recomputes(strategy, devices) if recompute is None else recompute
        step = self.recomputed if wanted and self.recomputed else self.stored
        found, phase = step.peak(strategy.memory_shares(step.recipe, devices), samples)
        found[Kind.BUFFERS] += self.data_bytes
        if self.captures and not strategy.why_not("capture") and not wanted:
            found[Kind.GRAPHS] += (num_graphs(step.recipe) - 1) * found[Kind.ACTIVATIONS]
        network = next((one.network for one in step.recipe.phases if one.name == phase), "")
        return DeviceMemory({kind: size for kind, size in found.items() if size}, phase, network)

    def can_recompute(self, strategy: type[Strategy]) -> bool:
        """Return whether `checkpoint_activations=on` is possible."""
        return self.recomputed is not None and not strategy.why_not("recompute")

    def can_divide(self, devices: int) -> bool:
        """Return whether each device gets at least one sample of each micro-batch."""
        batch = split_batch(self.config.run.batch_size, 1, self.config.run.accumulate)
        return "/" in self.config.run.batch_size or batch >= devices * self.config.run.accumulate

    def advice(self, memory: DeviceMemory) -> str:
        """Return what reduces the memory of a step whose smallest batch does not fit."""
        smaller = "a smaller network"
        if memory.largest == Kind.ACTIVATIONS:
            recompute = "--set checkpoint_activations=on, " if self.recomputed else ""
            return f"use {recompute}smaller images (--crop or --set size=N) or {smaller}"
        return f"use --strategy fsdp on more devices, or {smaller}"

    def samples_per_device(self, devices: int) -> int:
        """Return the number of samples per device and micro-batch with the run's batch size."""
        batch = split_batch(self.config.run.batch_size, devices, self.config.run.accumulate)
        return math.ceil(batch / devices / self.config.run.accumulate)

    def fits(self, memory: DeviceMemory, device_bytes: int) -> bool:
        """Return whether a step fits in a device's memory."""
        return memory.total <= device_bytes * USABLE

    def largest_batch(self, strategy: type[Strategy], devices: int, device_bytes: int, *, recompute: bool) -> int:
        """Return the largest global batch whose step fits in a device's memory; 0 if one sample does not fit."""

        def fits(samples: int) -> bool:
            return self.fits(self.memory(strategy, devices, samples, recompute=recompute), device_bytes)

        low, high = 0, 1
        while high <= MAX_SAMPLES and fits(high):
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low * devices * self.config.run.accumulate


def forecast(config: Config, device_bytes: int = 0, sources: Mapping[str, Source] | None = None) -> Forecast:
    """Trace the step of a run and return its memory; the process must not train afterwards.

    `device_bytes` is the memory of a device, which decides whether the samples are kept on it; 0 if it is not known.
    """
    precision = precision_of(config)
    if sources is None:
        activity(f"opening the data source {config.run.data}")
        sources = open_sources(config)
    batch = split_batch(config.run.batch_size, 1, config.run.accumulate)
    samples = math.ceil(batch / config.run.accumulate)
    sizes = (samples, 2 * samples) if samples < 4 else (samples // 2, samples)
    traces: dict[bool, list[Trace]] = {False: [], True: []}
    for recompute in (False, True):
        for size in sizes:
            how = "recomputed" if recompute else "stored"
            activity(f"computing the memory of a step with {size} samples per device, activations {how}")
            found = trace_step(config, sources, precision, size, recompute=recompute)
            if recompute and not found.recomputes:
                break
            traces[recompute].append(found)
    return Forecast(
        config,
        StepMemory(*traces[False]),
        StepMemory(*traces[True]) if traces[True] else None,
        kept_data_bytes(config, sources, device_bytes),
        captures=config.run.accelerator != "cpu" and config.run.graph != "off",
    )


def precision_of(config: Config) -> Precision:
    """Return the precision on a GPU that supports bf16, unless the run uses the CPU; without a GPU, on fake tensors."""
    for_gpu = config.run.accelerator != "cpu"
    name = ("bf16" if for_gpu else "fp32") if config.run.precision == "auto" else config.run.precision
    return Precision(name, "cuda" if for_gpu and torch.cuda.is_available() else "cpu")


def kept_data_bytes(config: Config, sources: Mapping[str, Source], device_bytes: int) -> int:
    """Return the size of the samples that loaders keep on a device."""
    device = torch.device("cpu" if config.run.accelerator == "cpu" else "cuda")
    budget = Budget(config.run.devices, free={device.type: device_bytes or UNKNOWN_BYTES})
    order = sorted(sources, key=lambda split: split != "train")
    kept = [split for split in order if choose_loader(config.run, sources[split], device, budget).home == device]
    return sum(bytes_needed(sources[split]) for split in kept)


def num_graphs(recipe: Recipe) -> int:
    """Return how many CUDA graphs a run captures: one for each set of phases that run in the same step."""
    period = math.lcm(*(phase.every for phase in recipe.phases))
    return len({tuple(phase.name for phase in recipe.phases if number % phase.every == 0) for number in range(period)})


def gib(size: float) -> str:
    """Return a number of bytes in GiB."""
    return f"{size / GIB:.2f}" if size >= GIB / 100 else f"{size / GIB:.2g}" if size else "0"


SMALL_SHARE = 1e-5  # the activations of a ResNet need up to 70,000 times as much memory as small grey images
SHORT = "use a smaller --batch-size, --accumulate 2 or --set checkpoint_activations=on"


def explain_out_of_memory(error: torch.OutOfMemoryError, parts: Parts) -> str:
    """Return in which phase the device ran out of memory, and settings that fit. The process must end afterwards."""
    where = "".join(f" in {note}" for note in getattr(error, "__notes__", []))
    device, sources = parts.world.device, {split: loader.source for split, loader in parts.loaders.items()}
    try:
        usable = free_host_bytes()
        if device.type == "cuda":  # what this process holds now, and what no process uses
            usable = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        advice = _suggest(forecast(parts.config.with_run(accelerator=device.type), usable, sources), usable)
    except Exception:  # the forecast is optional; the error must be reported in any case
        advice = SHORT
    return f"out of memory{where}: {advice}"


def check_step_fits(config: Config, num_sharing: int) -> None:
    """Raise UserError if a step on the CPU needs too much memory. The process must not train afterwards.

    `num_sharing` is the number of processes that take such a step at the same time. The forecast takes seconds, so it
    is skipped if the images of a batch need only a tiny part of the memory.
    """
    free, sources = free_host_bytes() // num_sharing, open_sources(config)
    batch = split_batch(config.run.batch_size, 1, config.run.accumulate) // config.run.accumulate
    if batch * sum(field.nbytes for field in sources["train"].read(0).values()) < free * SMALL_SHARE:
        return
    step = forecast(config.with_run(accelerator="cpu"), free, sources)
    if not step.fits(step.memory(strategy_class(config), 1, step.samples_per_device(1)), free):
        raise UserError(_suggest(step, free))


def _suggest(step: Forecast, device_bytes: int) -> str:
    """Return the memory that a step needs and the settings with which it would fit, the smallest change first."""
    run, strategy = step.config.run, strategy_class(step.config)
    memory = step.memory(strategy, run.devices, step.samples_per_device(run.devices))
    needed = (
        f"a step with batch {run.batch_size} needs about {gib(memory.total)} of {gib(device_bytes)} GiB, "
        f"mostly {memory.largest} in phase {memory.phase!r}"
    )
    batch = split_batch(run.batch_size, run.devices, run.accumulate)
    stored, recomputed = (
        step.largest_batch(strategy, run.devices, device_bytes, recompute=recompute) for recompute in (False, True)
    )
    is_recomputed = step.recomputes(strategy, run.devices)
    largest = recomputed if is_recomputed else stored
    if largest >= batch:
        return f"{needed}; check whether other processes use the device, or {SHORT}"
    options = []
    if per_device := largest // run.devices // run.accumulate:
        options.append(f"--accumulate {math.ceil(batch / run.devices / per_device)}")
    if not is_recomputed and step.can_recompute(strategy) and recomputed > largest:
        smaller = f" --batch-size {recomputed}" if recomputed < batch else ""
        options.append(f"--set checkpoint_activations=on{smaller}")
    options += [f"--batch-size {largest}"] if largest else []
    return f"{needed}; use {', or '.join(options)}" if options else f"{needed}; {step.advice(memory)}"
