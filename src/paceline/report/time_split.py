"""How each group's time per epoch is spent."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.contracts.step_ladder import StepLadder
from paceline.report.model import Group, TimeSplit
from paceline.report.step_ladder import communication_share

PARTS = {
    "data": "data wait",
    "host_to_device": "host to device",
    "compute": "compute",
    "communication": "communication",
    "step": "compute and communication",
    "between_steps": "between steps",
    "evaluation": "evaluation",
    "saving": "samples and saving",
}
NOTE = (
    "Seconds per epoch. "
    "The times for data wait, steps, evaluation and saving were measured during the runs with the host's clock. "
    "The step time is split into communication and compute according to the step-time breakdown. "
    "“Between steps” is the time that the training loop, such as Lightning's Trainer, spends outside the steps. "
    "Samples and checkpoints written after a run's last log line are not included."
)


def split_time(
    groups: Mapping[str, Group], ladders: Mapping[str, StepLadder], on_gpu: bool
) -> tuple[dict[str, TimeSplit], list[str]]:
    """Return the seconds per epoch by group and activity, and descriptions of what could not be measured."""
    split: dict[str, TimeSplit] = {}
    missing = []
    for key, group in groups.items():
        seconds = group.seconds_per_epoch
        if not seconds:
            continue
        row = {"data": seconds["data"]}
        share = communication_share(ladders[key]) if key in ladders else None
        if group.devices == 1:
            row["compute"] = seconds["step"]
        elif share is not None:
            row |= {"compute": seconds["step"] * (1 - share), "communication": seconds["step"] * share}
        else:
            row["step"] = seconds["step"]
            missing.append(f"communication time for {group.label} separately from compute (no step-time breakdown)")
        row |= {name: seconds[name] for name in ("between_steps", "evaluation", "saving") if name in seconds}
        split[key] = row | {"total": sum(row.values())}
    copies = "the copies overlap with the step" if on_gpu else "there are no copies on a CPU"
    missing.append(f"time spent on copies from host to device during the runs ({copies})")
    if not on_gpu:
        missing.append("GPU utilisation, memory and energy (no GPU was used, or NVML is unavailable)")
    return split, missing
