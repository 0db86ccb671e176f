"""From one device's step to that of many: what is exchanged, over which link, and how much of it the step hides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

BACKWARD_SHARE = 2 / 3  # of a step: two passes of three, which is where gradients can travel beside it
PAYS = 1.10  # doubling the devices must win so much
LEAST = 0.02  # of the shortest step that was seen: a line through two points can fall below zero
MOST_DEVICES = 2**16


@dataclass(frozen=True)
class Link:
    """What an all-reduce costs: a time that does not depend on its size, and one that does."""

    latency_seconds: float  # of one exchange between `devices`
    bytes_per_second: float
    devices: int

    def all_reduce_seconds(self, num_bytes: float, devices: int) -> float:
        """The time of adding up so many bytes over a ring; latency grows with the doublings."""
        if devices == 1:
            return 0.0
        doublings = math.log2(devices) / math.log2(self.devices)
        return self.latency_seconds * doublings + 2 * (devices - 1) / devices * num_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Measurement:
    """What was seen on this machine's devices."""

    alone_seconds: dict[int, float]  # by batch: a step of one device, while no other works
    step_seconds: dict[int, float]  # by batch: a step of one of several devices, all at work, without exchange
    images_per_sample: int  # a step with repeated phases moves the clock by several batches
    gradient_bytes: dict[str, int]  # by phase
    exchanges: int  # small ones that a step waits for: BatchNorm's sums, facts
    overlap: float  # the share of the backward pass that can hide an exchange
    bucket_bytes: int  # what is left to send when the backward pass has ended
    networks: list[str]
    rounds: int
    threads: int  # of each process, where the devices are a CPU's; else 0
    link: Link | None = None
    checked: list[dict[str, float]] | None = None  # images per second, predicted and measured, turn by turn

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Measurement:
        """As a process wrote it."""
        alone, together = (
            {int(batch): seconds for batch, seconds in values.pop(name).items()}
            for name in ("alone_seconds", "step_seconds")
        )
        link = values.pop("link")
        return cls(alone_seconds=alone, step_seconds=together, link=Link(**link) if link else None, **values)

    def seconds_of_step(self, batch: float) -> float:
        """A step of one of several at any batch: between two measured ones, or on the line through the outermost."""
        sizes = sorted(self.step_seconds)
        if len(sizes) == 1:
            return self.step_seconds[sizes[0]] * batch / sizes[0]
        low, high = sizes[0], sizes[-1]
        for small, large in pairwise(sizes):
            if small <= batch <= large:
                low, high = small, large
        slope = (self.step_seconds[high] - self.step_seconds[low]) / (high - low)
        return max(self.step_seconds[low] + slope * (batch - low), min(self.step_seconds.values()) * LEAST)


@dataclass(frozen=True)
class Prediction:
    """What is to be expected of one step on several devices."""

    compute_seconds: float
    exchange_seconds: float  # that the step waits for
    images_per_second: float


def predict(measured: Measurement, link: Link | None, devices: int, batch: int) -> Prediction:
    """The step of a global batch on several devices; on one, as it was measured alone."""
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


def stops_paying_at(measured: Measurement, link: Link | None, batch: int) -> int | None:
    """The number of devices from which on twice as many win less than a tenth; None if that never comes."""
    devices = 1
    while devices * 2 <= min(batch, MOST_DEVICES):
        now, then = (predict(measured, link, count, batch).images_per_second for count in (devices, devices * 2))
        if then < now * PAYS:
            return devices
        devices *= 2
    return None
