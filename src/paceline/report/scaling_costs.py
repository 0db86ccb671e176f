"""What keeps N devices from being N times as fast: the costs that a step ladder measured, and remedies.

A step ladder is a series of measurements of the training step. Each measurement (a rung of the ladder) adds one cost,
such as communication, and so shows how much time that cost takes.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from paceline.contracts.step_ladder import StepLadder
from paceline.report.model import Explanation, Rung

# The cost that each rung adds, and a remedy, in the order of measurement.
COSTS: dict[str, tuple[str, str]] = {
    "part": (
        "a smaller batch per device uses the device less efficiently",
        "a larger batch (with --scale-lr), or fewer devices",
    ),
    "together": (
        "devices that run at the same time slow each other down (memory, cores, power)",
        "fewer processes on this host, or more cores per process",
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
        "BatchNorm waits for statistics from all devices",
        "--sync-batchnorm off (this changes the trained weights, so check the quality), or networks without BatchNorm",
    ),
    "loading": ("the step waits for data", "--loader resident if the data fits in memory, or more --workers"),
}


def explain(ladder: StepLadder, weak: bool = False) -> Explanation:
    """Return the cost that each rung of a step ladder adds.

    The first rung is N times the speed of one device, and the last rung is the complete training step. If the runs
    use the same batch per device (`weak`), the first rung is based on one device with its slice of the batch.
    """
    names = [rung.name for rung in ladder.rungs]
    first = names.index("part") if weak and "part" in names else 0
    # The speed of the rung "part" already includes the slices of all devices.
    times = ladder.devices if first == 0 else 1
    measured = [("ideal", times * ladder.rungs[first].images_per_second)]
    measured += [(rung.name, rung.images_per_second) for rung in ladder.rungs[first + 1 :]]
    # Each rung includes the costs of the rungs before it, so only noise can make a rung slower than a later one.
    seconds = list(accumulate((1 / speed for _, speed in reversed(measured)), min))
    added = [after - before for before, after in pairwise([*reversed(seconds)])]
    rungs = [Rung(*measured[0])] + [
        Rung(name, speed, share=cost / seconds[0], gain=seconds[0] / (seconds[0] - cost) - 1)
        for (name, speed), cost in zip(measured[1:], added, strict=True)
    ]
    largest = max(rungs[1:], key=lambda rung: rung.share)
    return Explanation(
        devices=ladder.devices,
        weak=weak,
        rungs=rungs,
        largest_cost=largest.name if largest.share else None,
        gain=largest.gain,
        efficiency=rungs[-1].images_per_second / rungs[0].images_per_second,
    )


def communication_share(ladder: StepLadder) -> float | None:
    """Return the fraction of the step time spent on communication, computed from steps with and without it."""
    speeds = {rung.name: rung.images_per_second for rung in ladder.rungs}
    without = speeds.get("eager", speeds.get("together"))
    with_it = speeds.get("batchnorm", speeds.get("gradients"))
    if without is None or with_it is None:
        return None
    return max(0.0, 1 - with_it / without)
