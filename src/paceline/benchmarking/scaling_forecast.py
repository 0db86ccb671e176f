"""Predict step times on many devices from the step time on one device and the cost of communication."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from paceline.core.errors import UserError
from paceline.core.types import JsonObject

BACKWARD_SHARE = 2 / 3  # fraction of a step spent in the backward pass, which can overlap with communication
MIN_USEFUL_SPEEDUP = 1.10  # minimum speedup that makes doubling the number of devices worthwhile
MIN_STEP_SHARE = 0.02  # lower bound relative to the shortest measured step, since extrapolation can go negative
MAX_DEVICES = 2**16


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


@dataclass(frozen=True)
class Checked:
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

    def to_json(self) -> JsonObject:
        """Return the measurement as JSON; batch sizes become strings, since JSON keys are strings."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Measurement:
        """Return the measurement that `to_json` wrote."""
        fields = dict(values)
        for name in ("alone_seconds", "step_seconds"):
            fields[name] = {int(batch): seconds for batch, seconds in values[name].items()}
        fields["networks"] = tuple(values["networks"])
        fields["link"] = Link(**values["link"]) if values["link"] else None
        fields["checked"] = tuple(Checked(**one) for one in values["checked"])
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


def max_useful_devices(measured: Measurement, link: Link | None, batch: int) -> int | None:
    """Return the device count beyond which another doubling increases speed by less than 10 %; None if unlimited."""
    devices = 1
    while devices * 2 <= min(batch, MAX_DEVICES):
        now, then = (predict(measured, link, count, batch).images_per_second for count in (devices, devices * 2))
        if then < now * MIN_USEFUL_SPEEDUP:
            return devices
        devices *= 2
    return None


DEFAULT_LATENCY_SECONDS = 20e-6  # latency of one exchange between GPUs if only the bandwidth is set
NUMBER = r"\s*(\d+\.?\d*|\.\d+)((?:[eE][+-]?\d+)?)\s*"
SHORT = re.compile(NUMBER + r"([kKMGT]?)([bB])\s*(?:/\s*s|ps)?\s*")  # B means bytes, b means bits
AMBIGUOUS = re.compile(NUMBER + r"[kmgt]?b?\s*(?:/\s*s|ps)?\s*", re.IGNORECASE)
SPELLED = re.compile(NUMBER + r"([kmgt]?)(bits?|bytes?)\s*(?:/\s*s|ps)?\s*", re.IGNORECASE)
SECONDS = re.compile(NUMBER + r"(us|µs|ms|s)\s*")
PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@dataclass(frozen=True)
class LinkOverride:
    """The bandwidth and latency that the user set; None for a value that was not set."""

    bytes_per_second: float | None
    latency_seconds: float | None

    @classmethod
    def parse(cls, bandwidth: str, latency: str) -> LinkOverride:
        """Parse `--bandwidth` and `--latency`; an empty string means that the flag was not set."""
        return cls(parse_bandwidth(bandwidth) if bandwidth else None, parse_seconds(latency) if latency else None)

    def apply(self, measured: Link | None) -> Link | None:
        """Return the link for predictions: the user's values if set, otherwise measured or default values."""
        if self.bytes_per_second is None and (self.latency_seconds is None or measured is None):
            return measured
        bandwidth = self.bytes_per_second
        if bandwidth is None:
            assert measured is not None
            bandwidth = measured.bytes_per_second
        latency = DEFAULT_LATENCY_SECONDS if self.latency_seconds is None else self.latency_seconds
        return Link(latency, bandwidth, devices=2)

    def describe(self, link: Link) -> str:
        """Describe the link, with the origin of each value."""
        measured = f"measured between {link.devices} processes"
        bandwidth = "as given" if self.bytes_per_second is not None else measured
        latency = "assumed" if self.bytes_per_second is not None else measured
        if self.latency_seconds is not None:
            latency = "as given"
        microseconds = link.latency_seconds * 1e6
        shown = f"{microseconds:,.0f}" if microseconds >= 10 else f"{microseconds:.2g}"
        speed = f"bandwidth {link.bytes_per_second / 1e9:.3g} GB/s ({bandwidth})"
        return f"{speed}; latency {shown} µs per exchange ({latency})"


def parse_bandwidth(text: str) -> float:
    """Convert `25GB/s`, `200Gbit/s` or `200Gbps` to bytes per second."""
    match = SHORT.fullmatch(text) or SPELLED.fullmatch(text)
    if not match:
        doubt = "bytes or bits? " if AMBIGUOUS.fullmatch(text) else ""
        raise UserError(f"--bandwidth {text}: {doubt}expected something like 25GB/s (bytes) or 200Gbit/s (bits)")
    number, exponent, prefix, unit = match.groups()
    in_bits = unit == "b" or unit.lower().startswith("bit")
    value = float(number + exponent) * PREFIXES[prefix.lower()] / (8 if in_bits else 1)
    if not 0 < value < math.inf:
        raise UserError(f"--bandwidth {text}: must be above 0 and finite; expected something like 25GB/s or 200Gbit/s")
    return value


def parse_seconds(text: str) -> float:
    """Convert `20us`, `0.1ms` or `1e-5s` to seconds."""
    match = SECONDS.fullmatch(text.lower())
    value = math.inf
    if match:
        value = float(match[1] + match[2]) * {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[match[3]]
    if value == math.inf:
        raise UserError(f"--latency {text}: expected something like 20us or 0.1ms")
    return value
