"""Predict the step of many devices from one device's: what is exchanged, over which link, what the step hides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from paceline.core.types import JsonObject

BACKWARD_SHARE = 2 / 3  # of a step: two of three passes, during which gradients can be exchanged
MIN_USEFUL_SPEEDUP = 1.10  # by which doubling the devices must be faster
MIN_STEP_SHARE = 0.02  # of the shortest measured step: a line through two points can fall below zero
MAX_DEVICES = 2**16


@dataclass(frozen=True)
class Link:
    """The cost of an all-reduce: a time that does not depend on its size, and one that does."""

    latency_seconds: float  # of one exchange between `devices`
    bytes_per_second: float
    devices: int

    def all_reduce_seconds(self, num_bytes: float, devices: int) -> float:
        """Return the time of an all-reduce of so many bytes over a ring; latency grows with each doubling."""
        if devices == 1:
            return 0.0
        doublings = math.log2(devices) / math.log2(self.devices)
        return self.latency_seconds * doublings + 2 * (devices - 1) / devices * num_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Checked:
    """Images per second of one turn, predicted and measured."""

    predicted: float
    measured: float


@dataclass(frozen=True)
class Measurement:
    """What was measured on this machine's devices."""

    alone_seconds: dict[int, float]  # by batch: a step of one device, while the others are idle
    step_seconds: dict[int, float]  # by batch: a step of one of several devices, all busy, without exchange
    images_per_sample: int  # a step with repeated phases counts several batches
    gradient_bytes: dict[str, int]  # by phase
    exchanges: int  # small ones that a step waits for: BatchNorm's sums, signals
    overlap: float  # the share of the backward pass that can hide an exchange
    bucket_bytes: int  # what is left to send when the backward pass has ended
    networks: tuple[str, ...]
    rounds: int
    threads: int  # of each process on a CPU; else 0
    link: Link | None = None
    checked: tuple[Checked, ...] = ()  # turn by turn

    def to_json(self) -> JsonObject:
        """Return the measurement as JSON; batches become text, as JSON's keys are."""
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
        """Return the step of one of several devices at any batch, interpolated between the measured ones."""
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
    """The expected step on several devices."""

    compute_seconds: float
    exchange_seconds: float  # that the step waits for
    images_per_second: float


def predict(measured: Measurement, link: Link | None, devices: int, batch: int) -> Prediction:
    """Return the expected step of a global batch on several devices; on one, the measured one."""
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
    return Prediction(compute, exchange, images / (compute + exchange))


def max_useful_devices(measured: Measurement, link: Link | None, batch: int) -> int | None:
    """Return the number of devices from which doubling them adds less than 10 %; None if it always adds more."""
    devices = 1
    while devices * 2 <= min(batch, MAX_DEVICES):
        now, then = (predict(measured, link, count, batch).images_per_second for count in (devices, devices * 2))
        if then < now * MIN_USEFUL_SPEEDUP:
            return devices
        devices *= 2
    return None
