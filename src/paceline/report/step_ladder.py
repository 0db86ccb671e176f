"""Explains why N devices are not N times as fast.

A step is timed in increasingly complete variants, the rungs of a ladder. Each rung shows the cost of what it adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from paceline.contracts.step_ladder import StepLadder
from paceline.report.as_json import OPTIONAL

# For each rung, in the order of measurement: the cost that it adds, and a remedy.
COSTS: dict[str, tuple[str, str]] = {
    "part": (
        "a smaller batch per device uses the device less efficiently",
        "a larger batch (with --scale-lr), or fewer devices",
    ),
    "together": (
        "devices that run at the same time slow each other down (memory, cores, power)",
        "fewer processes on this host, or more cores for each",
    ),
    "eager": (
        "the step is launched kernel by kernel instead of as one CUDA graph",
        "--strategy single, whose step can be captured as a graph",
    ),
    "gradients": (
        "gradients are exchanged between devices",
        "a larger batch per device, --accumulate 2, or a faster link between devices",
    ),
    "batchnorm": (
        "BatchNorm waits for the statistics of all devices",
        "--sync-batchnorm off (this changes the trained weights, so check the quality), or networks without BatchNorm",
    ),
    "loading": ("the step waits for data", "--loader resident if the data fits in memory, or more --workers"),
}


@dataclass(frozen=True)
class Rung:
    """One rung with its cost; the first rung has no cost."""

    name: str
    images_per_second: float
    share: float | None = field(default=None, metadata=OPTIONAL)  # fraction of the training time per image
    gain: float | None = field(default=None, metadata=OPTIONAL)  # relative speedup from removing only this cost


@dataclass(frozen=True)
class Explanation:
    """The ladder with the cost of each rung."""

    devices: int
    weak: bool  # whether the batch per device is the same as on one device
    rungs: Sequence[Rung]
    largest_cost: str | None  # name of the most expensive rung; None if no rung has a cost
    gain: float  # relative speedup from removing the largest cost
    efficiency: float


def explain(ladder: StepLadder, weak: bool = False) -> Explanation:
    """Return the cost of each rung, from N times the speed of one device down to the complete training step.

    With the same batch per device (`weak`), the ladder starts at one device with its slice of the batch.
    """
    names = [rung.name for rung in ladder.rungs]
    first = names.index("part") if weak and "part" in names else 0
    times = ladder.devices if first == 0 else 1  # the speed of the rung "part" already counts all slices
    measured = [("ideal", times * ladder.rungs[first].images_per_second)]
    measured += [(rung.name, rung.images_per_second) for rung in ladder.rungs[first + 1 :]]
    # Each rung includes the costs of the rungs before it, so a rung that is slower than a later one is noise.
    seconds = list(accumulate((1 / speed for _, speed in reversed(measured)), min))
    added = [after - before for after, before in pairwise(seconds)][::-1]
    rungs = [Rung(*measured[0])] + [
        Rung(name, speed, share=cost / seconds[0], gain=seconds[0] / (seconds[0] - cost) - 1)
        for (name, speed), cost in zip(measured[1:], added, strict=True)
    ]
    largest = max(rungs[1:], key=lambda rung: rung.share or 0.0)
    return Explanation(
        devices=ladder.devices,
        weak=weak,
        rungs=rungs,
        largest_cost=largest.name if largest.share else None,
        gain=largest.gain or 0.0,
        efficiency=rungs[-1].images_per_second / rungs[0].images_per_second,
    )


def communication_share(ladder: StepLadder) -> float | None:
    """Return the fraction of the step time spent on communication, from steps with and without it."""
    speeds = {rung.name: rung.images_per_second for rung in ladder.rungs}
    without = speeds.get("eager", speeds.get("together"))
    with_it = speeds.get("batchnorm", speeds.get("gradients"))
    if without is None or with_it is None:
        return None
    return max(0.0, 1 - with_it / without)
