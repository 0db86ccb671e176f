"""Predict step times on many devices from the step time on one device and the cost of communication."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from paceline.core.errors import UserError

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
