"""Forecasts the memory that each device needs, and explains what to change when it runs out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.config.resolve import Config
from paceline.config.settings import split_batch
from paceline.contracts.recipe import Recipe
from paceline.core.errors import UserError
from paceline.core.host import free_host_bytes
from paceline.core.terminal import activity
from paceline.data.loader import Budget, choose_loader
from paceline.data.source import Source, bytes_needed, open_sources
from paceline.parallel.precision import Precision
from paceline.parallel.strategy import MemoryShares, Strategy, strategy_class
from paceline.training.build import Parts
from paceline.training.memory_trace import Kind, Trace, trace_step

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


class StepMemory:
    """The memory of a step with any number of samples, interpolated between two traces."""

    def __init__(self, low: Trace, high: Trace) -> None:
        self.low, self.high, self.recipe = low, high, high.recipe
        self._is_aligned = low.timeline.phases == high.timeline.phases and (
            low.timeline.columns == high.timeline.columns
        )

    def peak(self, shares: MemoryShares, samples: int) -> tuple[dict[Kind, int], str]:
        """Return the bytes of each kind at the peak of a step, and the phase with the peak."""
        columns = self.high.timeline.columns
        weights = np.array([_weight(shares, column.kind, column.network) for column in columns])
        live = self._live(samples) * weights
        at = int(live.sum(axis=1).argmax())
        found = dict.fromkeys(Kind, 0)
        for column, size in zip(columns, live[at], strict=True):
            found[column.kind] += max(0, round(size))
        found[Kind.BUFFERS] += shares.buffer_bytes
        return found, self.high.timeline.phases[at]

    def _live(self, samples: int) -> NDArray[np.float64]:
        """Return the live bytes at each moment of a step with this many samples in each micro-batch."""
        low, high = self.low, self.high
        if samples == high.samples or not self._is_aligned:
            scale = samples / high.samples
            batch = np.array([kind in (Kind.ACTIVATIONS, Kind.BATCH) for kind, _ in high.timeline.columns])
            return high.timeline.live * np.where(batch, scale, 1.0)
        slope = (high.timeline.live - low.timeline.live) / (high.samples - low.samples)
        live: NDArray[np.float64] = high.timeline.live + slope * (samples - high.samples)
        return live


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
    """Trace the step of a run and return its memory; the process must not train afterwards (see `memory_trace`).

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
    sources = {split: loader.source for split, loader in parts.loaders.items()}
    config = parts.config.with_run(accelerator=parts.world.device.type)
    try:
        advice = suggest(config, _usable_bytes(parts.world.device), sources)
    except Exception:  # the forecast is optional; the error must be reported in any case
        advice = SHORT
    return f"out of memory{where}: {advice}"


def suggest(config: Config, device_bytes: int, sources: Mapping[str, Source] | None = None) -> str:
    """Return the memory that a step needs and the settings with which it would fit in a device's memory."""
    return _describe(forecast(config, device_bytes, sources), device_bytes)


def check_step_fits(config: Config, num_sharing: int) -> None:
    """Raise UserError if a step on the CPU needs too much memory. The process must not train afterwards.

    `num_sharing` is the number of processes that take such a step at the same time. The forecast takes seconds, so it
    is skipped if the images of a batch need only a tiny part of the memory.
    """
    free, sources = free_host_bytes() // num_sharing, open_sources(config)
    batch = split_batch(config.run.batch_size, 1, config.run.accumulate) // config.run.accumulate
    if batch * sum(field.nbytes for field in sources["train"].read(0).values()) < free * SMALL_SHARE:
        return
    found = forecast(config.with_run(accelerator="cpu"), free, sources)
    memory = found.memory(strategy_class(config), 1, found.samples_per_device(1))
    if not found.fits(memory, free):
        raise UserError(_describe(found, free))


def _describe(found: Forecast, device_bytes: int) -> str:
    config = found.config
    strategy, devices = strategy_class(config), config.run.devices
    memory = found.memory(strategy, devices, found.samples_per_device(devices))
    needed = (
        f"a step with batch {config.run.batch_size} needs about {gib(memory.total)} of {gib(device_bytes)} GiB, "
        f"mostly {memory.largest} in phase {memory.phase!r}"
    )
    options = _options(found, device_bytes)
    if options:
        return f"{needed}; use {', or '.join(options)}"
    if found.fits(memory, device_bytes):
        return f"{needed}; check whether other processes use the device, or {SHORT}"
    return f"{needed}; {found.advice(memory)}"


def _options(found: Forecast, device_bytes: int) -> list[str]:
    """Return settings that fit, the ones that change the least first; empty if the step fits as it is, or never."""
    config, strategy, devices = found.config, strategy_class(found.config), found.config.run.devices
    batch = split_batch(config.run.batch_size, devices, config.run.accumulate)
    is_recomputed = found.recomputes(strategy, devices)
    largest = found.largest_batch(strategy, devices, device_bytes, recompute=is_recomputed)
    options: list[str] = []
    if largest >= batch:
        return options
    per_device = largest // devices // config.run.accumulate
    if per_device:
        options.append(f"--accumulate {math.ceil(batch / devices / per_device)}")
    if not is_recomputed and found.can_recompute(strategy):
        recomputed = found.largest_batch(strategy, devices, device_bytes, recompute=True)
        smaller = f" --batch-size {recomputed}" if recomputed < batch else ""
        if recomputed > largest:
            options.append(f"--set checkpoint_activations=on{smaller}")
    return [*options, f"--batch-size {largest}"] if largest else options


def _usable_bytes(device: torch.device) -> int:
    """Return the memory that this process can use: what it holds now, and what no process uses."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return free_host_bytes()
