"""Why N devices are not N times as fast: measured ceilings as a ladder, and the step down that takes most time."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

# What is missing at each rung of the ladder, in the order of measuring, and what would win it back.
STEPS: dict[str, tuple[str, str]] = {
    "part": (
        "a smaller batch per device keeps a device less busy",
        "a larger batch (with --scale-lr), or fewer devices",
    ),
    "together": (
        "devices that work at the same time slow each other down (memory, cores, power)",
        "fewer processes on this host, or more cores for each",
    ),
    "eager": (
        "the step is launched kernel by kernel, not as one CUDA graph",
        "--strategy single, until graphs cover it",
    ),
    "gradients": (
        "gradients are exchanged between devices",
        "a larger batch per device, --accumulate 2, or a faster link between devices",
    ),
    "batchnorm": (
        "BatchNorm waits for the sums of all devices",
        "--sync-batchnorm off, which changes what is learned (judge the quality), or networks without BatchNorm",
    ),
    "loading": ("the step waits for data", "--loader resident where the data fits, or more --workers"),
}


def explain(ceilings: dict[str, Any], weak: bool = False) -> dict[str, Any]:
    """The ladder from N times one device down to the step as it is in training, with the time that each step adds.

    With the same batch per device (`weak`), one device has the part alone, and the ladder starts there.
    """
    devices, measured = ceilings["devices"], ceilings["rungs"]
    first = next((n for n, rung in enumerate(measured) if rung["name"] == "part"), 0) if weak else 0
    times = devices if first == 0 else 1  # a part's speed is that of all parts
    rungs = [{"name": "ideal", "images_per_second": times * measured[first]["images_per_second"]}]
    rungs += [{"name": r["name"], "images_per_second": r["images_per_second"]} for r in measured[first + 1 :]]
    # A rung has all of the ones above it: one that took longer than a later rung did so by chance.
    seconds = list(accumulate((1 / rung["images_per_second"] for rung in reversed(rungs)), min))
    for rung, (after, before) in zip(reversed(rungs), pairwise(seconds), strict=False):
        rung["share"] = (after - before) / seconds[0]
        rung["gain"] = seconds[0] / (seconds[0] - (after - before)) - 1
    largest = max(rungs[1:], key=lambda rung: rung["share"])
    return {
        "devices": devices,
        "weak": weak,
        "rungs": rungs,
        "largest": largest["name"] if largest["share"] > 0 else None,
        "gain": largest["gain"],
        "efficiency": rungs[-1]["images_per_second"] / rungs[0]["images_per_second"],
    }


def communication_share(ceilings: dict[str, Any]) -> float | None:
    """The share of a step that is communication: what the step takes longer with it than without."""
    speeds = {rung["name"]: rung["images_per_second"] for rung in ceilings["rungs"]}
    without = speeds.get("eager", speeds.get("together"))
    with_it = speeds.get("batchnorm", speeds.get("gradients"))
    if without is None or with_it is None:
        return None
    return max(0.0, 1 - with_it / without)
