"""Measures steps and all-reduces for `paceline plan`, and predicts the speed on many devices."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.benchmarking.step_ladder import (
    Variant,
    from_data,
    gradient_bytes,
    steps_per_block,
    synthetic,
    time_block,
    time_sum,
)
from paceline.config.resolve import Config
from paceline.core.errors import UserError
from paceline.core.files import write_json
from paceline.core.terminal import activity, counted
from paceline.parallel.batchnorm import has_batchnorm, synchronize
from paceline.parallel.group import Place
from paceline.parallel.strategy import AUTO
from paceline.parallel.torch_internals import local_collectives
from paceline.parallel.world import World, join
from paceline.training.build import Parts, assemble

BACKWARD_SHARE = 2 / 3  # fraction of a step spent in the backward pass, which can overlap with communication
MIN_STEP_SHARE = 0.02  # lower bound relative to the shortest measured step, since extrapolation can go negative


@dataclass(frozen=True)
class Link:
    """The time that an all-reduce takes: a constant part, and a part proportional to the message size."""

    latency_seconds: float  # time of one exchange between `devices` devices
    bytes_per_second: float
    devices: int

    def all_reduce_seconds(self, num_bytes: float, devices: int) -> float:
        """Return how long a ring all-reduce of `num_bytes` takes; latency grows each time the device count doubles."""
        if devices == 1:
            return 0.0
        doublings = math.log2(devices) / math.log2(self.devices)
        return self.latency_seconds * doublings + 2 * (devices - 1) / devices * num_bytes / self.bytes_per_second


class Checked(NamedTuple):
    """Predicted and measured images per second in one round of measurements."""

    predicted: float
    measured: float


@dataclass(frozen=True)
class Measurement:
    """Measurements on this machine's devices."""

    alone_seconds: dict[int, float]  # step time of one device by batch size when the other devices are idle
    step_seconds: dict[int, float]  # step time by batch size when all devices are busy but do not communicate
    images_per_sample: int  # more than 1 if a step uses several batches, as with repeated phases
    gradient_bytes: dict[str, int]  # size of each phase's gradients
    exchanges: int  # number of small exchanges per step, for example of BatchNorm statistics
    overlap: float  # fraction of the backward pass that can overlap with communication
    bucket_bytes: int  # size of the last bucket, which is sent after the backward pass
    networks: tuple[str, ...]
    rounds: int
    threads: int  # CPU threads per process; 0 on GPUs
    link: Link | None = None
    checked: tuple[Checked, ...] = ()  # one entry per round of measurements

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Measurement:
        """Return the measurement whose fields were written as JSON, whose keys are strings."""
        fields = dict(values)
        for name in ("alone_seconds", "step_seconds"):
            fields[name] = {int(batch): seconds for batch, seconds in values[name].items()}
        fields["networks"] = tuple(values["networks"])
        fields["link"] = Link(**values["link"]) if values["link"] else None
        fields["checked"] = tuple(Checked(*one) for one in values["checked"])
        return cls(**fields)

    def seconds_of_step(self, batch: float) -> float:
        """Return the step time per device, interpolated between the measured batch sizes."""
        sizes = sorted(self.step_seconds)
        if len(sizes) == 1:
            return self.step_seconds[sizes[0]] * batch / sizes[0]
        low, high = sizes[0], sizes[-1]
        for small, large in pairwise(sizes):
            if small <= batch <= large:
                low, high = small, large
        slope = (self.step_seconds[high] - self.step_seconds[low]) / (high - low)
        return max(self.step_seconds[low] + slope * (batch - low), min(self.step_seconds.values()) * MIN_STEP_SHARE)


@dataclass(frozen=True)
class Prediction:
    """The predicted communication time and speed on several devices."""

    exchange_seconds: float  # communication time that does not overlap with computation
    images_per_second: float


def predict(measured: Measurement, link: Link | None, devices: int, batch: int) -> Prediction:
    """Predict the step time for a global batch on several devices; for one device, use the measured time."""
    compute = measured.alone_seconds[batch] if devices == 1 else measured.seconds_of_step(batch / devices)
    exchange = 0.0
    if devices > 1:
        assert link is not None
        whole = sum(measured.gradient_bytes.values()) or 1
        for size in measured.gradient_bytes.values():
            hidden = measured.overlap * BACKWARD_SHARE * compute * size / whole
            last = link.all_reduce_seconds(min(size, measured.bucket_bytes), devices)
            exchange += max(link.all_reduce_seconds(size, devices) - hidden, last)
        exchange += measured.exchanges * link.all_reduce_seconds(0, devices)
    images = batch * measured.images_per_sample
    return Prediction(exchange, images / (compute + exchange))


DEFAULT_LATENCY_SECONDS = 20e-6  # latency of one exchange between GPUs if only the bandwidth is set
PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
WORDS = {"B": 1.0, "byte": 1.0, "bytes": 1.0, "b": 1 / 8, "bit": 1 / 8, "bits": 1 / 8}
BANDWIDTHS = {  # in bytes per second; B means bytes, and b means bits
    f"{prefix}{word}{per_second}": scale * size
    for prefix, scale in PREFIXES.items()
    for word, size in WORDS.items()
    for per_second in ("", "/s", "ps")
}
LATENCIES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_amount(flag: str, text: str, units: Mapping[str, float], example: str) -> float:
    """Return a number with a unit, such as `24GiB`, in the base unit; raise UserError unless it is above 0."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)((?:[eE][+-]?\d+)?)\s*(.+?)\s*", text)
    value = float(match[1] + match[2]) * units.get(match[3], math.nan) if match else math.nan
    if not 0 < value < math.inf:
        raise UserError(f"{flag} {text}: expected something like {example}")
    return value


def parse_bandwidth(text: str) -> float:
    """Convert `25GB/s`, `200Gbit/s` or `200Gbps` to bytes per second."""
    return parse_amount("--bandwidth", text, BANDWIDTHS, "25GB/s (bytes) or 200Gbit/s (bits)")


@dataclass(frozen=True)
class LinkOverride:
    """The bandwidth and latency that the user set; None for a value that was not set."""

    bytes_per_second: float | None
    latency_seconds: float | None

    @classmethod
    def parse(cls, bandwidth: str, latency: str) -> LinkOverride:
        """Parse `--bandwidth` and `--latency`; an empty string means that the flag was not set."""
        seconds = parse_amount("--latency", latency, LATENCIES, "20us or 0.1ms") if latency else None
        return cls(parse_bandwidth(bandwidth) if bandwidth else None, seconds)

    def apply(self, measured: Link | None) -> Link | None:
        """Return the link for predictions: the user's values if set, otherwise measured or default values."""
        if self.bytes_per_second is not None:
            return Link(self.latency_seconds or DEFAULT_LATENCY_SECONDS, self.bytes_per_second, devices=2)
        if measured is None or self.latency_seconds is None:
            return measured
        return Link(self.latency_seconds, measured.bytes_per_second, devices=2)

    def describe(self, link: Link) -> str:
        """Describe the link, with the origin of each value."""
        measured = f"measured between {link.devices} processes"
        bandwidth, otherwise = (measured, measured) if self.bytes_per_second is None else ("as given", "assumed")
        latency = otherwise if self.latency_seconds is None else "as given"
        microseconds = link.latency_seconds * 1e6
        shown = f"{microseconds:,.0f}" if microseconds >= 10 else f"{microseconds:.2g}"
        speed = f"bandwidth {link.bytes_per_second / 1e9:.3g} GB/s ({bandwidth})"
        return f"{speed}; latency {shown} µs per exchange ({latency})"


ROUNDS = 21
BLOCK_SECONDS = 0.15  # short blocks, since the load on a shared machine changes from second to second
SMALL_BYTES = 1024  # about the size of BatchNorm statistics
MIN_BYTES = 2**20  # minimum message size for measuring bandwidth
GLOO_BUCKET, NCCL_BUCKET = 5 * 2**20, 25 * 2**20


def measure_scaling(config: Config, path: str, batches: list[int], check: bool) -> None:
    """Run the measurement in this process; rank 0 writes the result to a file."""
    activity("preparing the measurement")
    target = assemble(config) if check else None
    world = target.world if target else join(config.run, distributed=True)
    parts = {batch: one_of_several(config, batch, world) for batch in batches}
    variants = {batch: synthetic(str(batch), part, alone=False) for batch, part in parts.items()}
    first = parts[batches[0]]
    single = one_device(config, batches[0], world) if _has_own_batchnorm(config, world) else first
    alone = synthetic("alone", single, alone=True)
    with local_collectives() as collectives:
        variants[batches[0]].advance()
    blocks = {batch: _local_steps_per_block(variant, world) for batch, variant in variants.items()}
    alone_steps = steps_per_block(alone, world, BLOCK_SECONDS)
    ddp = from_data("ddp", target) if target else None
    ddp_steps = steps_per_block(ddp, world, BLOCK_SECONDS) if ddp else 0
    exchanges = len(collectives) or _torch_batchnorm_exchanges(first)
    exchanges += len(first.recipe.phases) if first.recipe.signals else 0
    base = Measurement(
        alone_seconds={},
        step_seconds={},
        images_per_sample=first.feed.repeats,
        gradient_bytes=gradient_bytes(first),
        exchanges=exchanges,
        overlap=0.0 if world.device.type == "cpu" else 1.0,  # on a CPU, communication and computation share cores
        bucket_bytes=NCCL_BUCKET if world.backend == "nccl" else GLOO_BUCKET,
        networks=tuple(phase.network for phase in first.recipe.phases),
        rounds=ROUNDS,
        threads=torch.get_num_threads() if world.device.type == "cpu" else 0,
    )
    # Time one device alone before and after the rounds, not between them: a round must not start with idle processes.
    activity("measuring one device alone")
    alone_seconds = [time_block(alone, alone_steps, world) / alone_steps for _ in range(ROUNDS // 2)]
    turns: list[tuple[Measurement, float | None]] = []
    for _ in counted(range(ROUNDS), "measuring", ROUNDS):
        seconds = {}
        for batch, variant in variants.items():
            with local_collectives():
                seconds[batch] = time_block(variant, blocks[batch], world) / blocks[batch]
        added = 0.0
        if collectives and world.size > 1:
            with_exchanges = time_block(variants[batches[-1]], blocks[batches[-1]], world) / blocks[batches[-1]]
            added = (with_exchanges - seconds[batches[-1]]) / len(collectives)
        seen = replace(base, step_seconds=seconds, link=_link(base, world, added))
        speed = ddp.images * ddp_steps / time_block(ddp, ddp_steps, world) if ddp else None
        turns.append((seen, speed))
    alone_seconds += [time_block(alone, alone_steps, world) / alone_steps for _ in range(ROUNDS - len(alone_seconds))]
    if world.is_first:
        base = replace(base, alone_seconds={batches[0]: float(np.median(alone_seconds))})
        write_json(Path(path), asdict(_median(base, turns, config)))
    world.wait_for_all()
    world.leave()


def one_device(config: Config, batch: int, world: World) -> Parts:
    """Assemble a run on one device, in this process alone and with torch's BatchNorm."""
    alone = config.with_run(strategy=AUTO["one device"], devices=1, gpus="", batch_size=str(batch))
    return assemble(alone, World(Place(), world.device))


def one_of_several(config: Config, batch: int, world: World) -> Parts:
    """Assemble a run on one device, with the BatchNorm that a run on several devices would use."""
    parts = one_device(config, batch, world)
    if _has_own_batchnorm(config, world):
        for name, network in parts.recipe.networks.items():
            if has_batchnorm(network):
                setattr(parts.recipe, name, synchronize(network, ours=True))
    return parts


def _has_own_batchnorm(config: Config, world: World) -> bool:
    """Return whether to use Paceline's synchronised BatchNorm, as a run on several CPU processes would."""
    return world.device.type == "cpu" and config.run.sync_batchnorm != "off"


def _local_steps_per_block(variant: Variant, world: World) -> int:
    with local_collectives():
        return steps_per_block(variant, world, BLOCK_SECONDS)


def _torch_batchnorm_exchanges(parts: Parts) -> int:
    """Return how many collectives torch's SyncBatchNorm, which is used on GPUs, runs per step."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    norms = [module for module in parts.recipe.modules() if has_batchnorm(module) and not list(module.children())]
    hooks = [module.register_forward_hook(count) for module in norms]
    parts.step(next(parts.feed.steps(0, parts.feed.images_per_step)))
    for hook in hooks:
        hook.remove()
    return 2 * calls


def _link(base: Measurement, world: World, added: float) -> Link | None:
    """Measure the link; `added` is the time that a small exchange adds to a step, or 0 if it was not measured.

    The exchange takes longer within a step than alone, because busy processes do not reach it at the same moment.
    """
    if world.size == 1:
        return None
    large = max(MIN_BYTES, sum(base.gradient_bytes.values()))
    short, long = time_sum(SMALL_BYTES, world), time_sum(large, world)
    ring = 2 * (world.size - 1) / world.size
    return Link(max(short, added), ring * (large - SMALL_BYTES) / max(long - short, 1e-9), world.size)


def _median(base: Measurement, turns: Sequence[tuple[Measurement, float | None]], config: Config) -> Measurement:
    """Return the median over all rounds, with the predicted and measured speeds in each round."""
    links = [seen.link for seen, _ in turns if seen.link]
    steps = {b: float(np.median([seen.step_seconds[b] for seen, _ in turns])) for b in turns[0][0].step_seconds}
    link = None
    if links:
        latency = float(np.median([one.latency_seconds for one in links]))
        link = Link(latency, float(np.median([one.bytes_per_second for one in links])), links[0].devices)
    devices, batch = config.run.devices, int(config.run.batch_size)
    checked = []
    for seen, speed in turns:
        if speed is not None:
            whole = replace(seen, alone_seconds=base.alone_seconds)
            checked.append(Checked(predict(whole, seen.link, devices, batch).images_per_second, speed))
    return replace(base, step_seconds=steps, link=link, checked=tuple(checked))
