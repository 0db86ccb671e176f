"""The numbers of a report: runs, groups of runs that differ in nothing but their seed, and what follows from them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.errors import UserError
from paceline.evaluation.protocol import require_same
from paceline.report.runs import Run

# Settings that say where a run lies or how it was asked for, and not what it is; the rest tells groups apart.
# The accelerator does so by what "auto" meant, along with the hardware.
NO_DIFFERENCE = {"seed", "out", "preset", "data_root", "gpus", "accelerator", "strategy", "devices", "batch_size"}
NO_DIFFERENCE |= {"backend", "inception", "inception_sha256", "check_replicas", "keep"}
NO_DIFFERENCE |= {"rdzv", "max_restarts", "timeout", "join_timeout", "mirror", "mirror_every", "mirror_wait"}
BETWEEN_DEVICES = {"nnodes", "compress", "sync_batchnorm"}  # one device is the same one, whatever these say
Extras = tuple[tuple[str, str], ...]  # names and values of what else tells groups apart


@dataclass
class Cell:
    """One run that was wanted, and what became of it."""

    name: str
    recipe: str
    strategy: str
    devices: int
    batch: str
    seed: int
    state: str = "done"  # or "failed", "unfinished", "not measured"
    reason: str = ""
    run: Run | None = field(default=None, repr=False)


def check_alike(runs: Sequence[Run], across_recipes: bool) -> None:
    """Refuses runs that do not belong into one table, by name."""
    first = runs[0]
    for other in runs[1:]:
        pair = f"{first.folder} and {other.folder}"
        if other.recipe != first.recipe and not across_recipes:
            raise UserError(
                f"{pair} are of different recipes ({first.recipe}, {other.recipe}); --across-recipes allows it"
            )
        if other.best != first.best:
            raise UserError(f"{pair} are judged by different metrics ({first.best[0]}, {other.best[0]})")
        if (other.data, other.fingerprint) != (first.data, first.fingerprint):
            was, is_ = (f"{run.data}: {run.fingerprint}" for run in (first, other))
            raise UserError(f"{pair} are of different data ({was} ≠ {is_}) and cannot be compared")
    for metric in dict.fromkeys(name for run in runs for name in run.protocols):
        measured = {run.folder: run.protocols[metric] for run in runs if metric in run.protocols}
        require_same(measured)
    labels = {name for run in runs for name in run.quality if name.partition("[")[0] == first.best[0] and "[" in name}
    if len(labels) > 1:
        raise UserError(
            f"the runs were judged by different networks and cannot be compared ({', '.join(sorted(labels))})"
        )


def summary_of(values: Sequence[float]) -> dict[str, Any]:
    """Mean, sample standard deviation, number and the values themselves."""
    spread = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": spread, "n": len(values), "values": list(values)}


def make_groups(cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """Runs that differ in nothing but their seed, together; by a name that says what they are."""
    runs = [cell.run for cell in cells if cell.run is not None and cell.state == "done"]
    settings, hardware = _differing(runs), _differing_hardware(runs)
    gathered: dict[tuple, list[Run]] = {}
    for run in runs:
        extras = tuple((name, str(run.settings.get(name))) for name in settings)
        extras += tuple((name, run.hardware[name]) for name in hardware)
        key = (run.recipe, run.strategy, run.devices, run.shares_a_gpu, run.batch, extras)
        gathered.setdefault(key, []).append(run)
    several = {name: len({getattr(run, name) for run in runs}) > 1 for name in ("recipe", "batch")}
    groups: dict[str, dict[str, Any]] = {}
    singles: dict[tuple[str, float, Extras], dict[str, Any]] = {}
    for (recipe, strategy, devices, _, batch, extras), members in gathered.items():
        group = _group(members, extras, several)
        while group["id"] in groups:  # recipes in two folders may have one name
            group["id"] += "'"
        groups[group["id"]] = group
        if strategy == "single" and devices == 1:
            singles.setdefault((recipe, batch, _of_one_device(extras)), group)
    per_device = bool(cells) and all(cell.batch.endswith("/device") for cell in cells)
    for (recipe, _, devices, _, batch, extras), group in zip(gathered, groups.values(), strict=True):
        wanted = {"strong": batch, "weak": batch / devices}
        order = sorted(wanted, reverse=per_device)
        alone = {kind: singles.get((recipe, wanted[kind], _of_one_device(extras))) for kind in order}
        group["scaling"] = _scaling(group, alone)
    return groups


def _of_one_device(extras: Extras) -> Extras:
    """The extras that a run on one device would share."""
    return tuple((name, value) for name, value in extras if name not in BETWEEN_DEVICES)


def _differing_hardware(runs: Sequence[Run]) -> list[str]:
    """What of the hardware, and which torch, is not the same for all runs."""
    names = runs[0].hardware if runs else {}
    return [name for name in names if len({run.hardware[name] for run in runs}) > 1]


def _differing(runs: Sequence[Run]) -> list[str]:
    """The settings, not of the recipes' own kind, in which some runs of one recipe differ."""
    found = []
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        if name in NO_DIFFERENCE:
            continue
        by_recipe: dict[str, set[str]] = {}
        for run in runs:
            by_recipe.setdefault(run.recipe, set()).add(str(run.settings.get(name)))
        if any(len(values) > 1 for values in by_recipe.values()):
            found.append(name)
    return found


def group_name(run: Run, *more: str) -> str:
    """A name for the runs that differ from this one in nothing but their seed."""
    words = [Path(run.recipe).stem, run.strategy, str(run.devices), str(run.batch), *more]
    name = "-".join(words + (["on-one-gpu"] if run.shares_a_gpu else []))
    return name.replace("::", "-")  # which parts the words of a place in the report


def _group(members: list[Run], extras: Extras, several: dict[str, bool]) -> dict[str, Any]:
    first = members[0]
    stem = Path(first.recipe).stem
    words = [stem] if several["recipe"] else []
    words.append(first.strategy if first.devices == 1 else f"{first.strategy} × {first.devices}")
    label = " ".join(words)
    label += f", batch {first.batch}" if several["batch"] else ""
    label += "".join(f", {name}={value}" for name, value in extras)
    label += " (on one GPU)" if first.shares_a_gpu else ""
    speed = _common(members, lambda run: run.speed.get("images_per_second"))
    metrics = [name for name in first.quality if all(run.quality.get(name) is not None for run in members)]
    return {
        "id": group_name(first, *(value for _, value in extras)),
        "label": label,
        "recipe": stem,
        "measured_as": group_name(first),  # what ceilings are kept under
        "extras": dict(extras),
        "family": "-".join([first.recipe, str(first.batch), *(value for _, value in extras)]),
        "data": first.data,
        "strategy": first.strategy,
        "devices": first.devices,
        "shares_a_gpu": first.shares_a_gpu,
        "batch": first.batch,
        "precision": first.precision,
        "n": len(members),
        "seeds": [run.seed for run in members],
        "runs": [run.folder for run in members],
        "quality": {name: summary_of([run.quality[name] for run in members]) for name in metrics},
        "chosen_by": _common(members, lambda run: run.chosen_by.get("value")),
        "judged_on": min((run.chosen_by.get("judged_on") or 0 for run in members), default=0) or None,
        "images_per_second": speed,
        "speed_spread": _speed_spread(members, speed),
        "with_warm_up": any(run.speed.get("with_warm_up", False) for run in members),
        "more_processes_than_cores": any(_is_crowded(run) for run in members),
        "images_per_second_without_loading": _common(
            members, lambda run: run.speed.get("images_per_second_without_loading")
        ),
        "seconds": summary_of([run.seconds for run in members]),
        "seconds_per_epoch": {
            name: statistics.fmean(run.seconds_per_epoch[name] for run in members)
            for name in first.seconds_per_epoch
            if all(name in run.seconds_per_epoch for run in members)
        },
        "gpu": {
            name: statistics.fmean(run.gpu[name] for run in members)
            for name in first.gpu
            if all(name in run.gpu for run in members)
        },
    }


def _common(members: list[Run], get: Callable[[Run], Any]) -> dict[str, Any] | None:
    values = [get(run) for run in members]
    return None if any(value is None for value in values) else summary_of(values)


def _speed_spread(members: list[Run], speed: dict[str, Any] | None) -> dict[str, Any]:
    """How far the speed varies and over what: over seeds, of one seed over its logged stretches, or nobody knows."""
    if speed and speed["std"] is not None:
        return {"std": speed["std"], "over": "seeds"}
    std = members[0].speed.get("std_of_stretches")
    return {"std": std, "over": "logged stretches" if std is not None else ""}


def _is_crowded(run: Run) -> bool:
    """Whether processes on a CPU were more than its cores; cores of other hosts are not known."""
    cores, one_host = run.hardware["cores"], str(run.settings.get("nnodes", "1")) == "1"
    return run.hardware["accelerator"] == "cpu" and one_host and cores.isdigit() and run.devices > int(cores)


def _scaling(group: dict[str, Any], alone: dict[str, dict[str, Any] | None]) -> dict[str, Any] | None:
    """How much faster a group is than one device with the same batch, or with the same batch per device."""
    kind, one = next(((kind, one) for kind, one in alone.items() if one is not None), ("", None))
    speed = group["images_per_second"]
    if one is None or speed is None or one["images_per_second"] is None or one is group:
        return None
    speedup = speed["mean"] / one["images_per_second"]["mean"]
    return {"kind": kind, "against": one["id"], "speedup": speedup, "efficiency": speedup / group["devices"]}
