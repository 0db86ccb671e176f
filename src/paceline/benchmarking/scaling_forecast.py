"""Predict step times on many devices from the step time on one device and the cost of communication."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

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
