"""The numbers of a report: runs, groups of runs that differ in nothing but their seed, and what follows from them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.evaluation._protocol import require_same
from paceline.report.runs import Run

# Settings that say where a run lies or how it was asked for, and not what it is; the rest tells groups apart.
NO_DIFFERENCE = {"seed", "out", "preset", "data_root", "gpus", "accelerator", "strategy", "devices", "batch_size"}
NO_DIFFERENCE |= {"backend", "inception", "inception_sha256", "check_replicas", "keep"}
CLOSE = 0.02  # without several seeds, qualities this near (relative) are called equal


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
        if other.data != first.data or other.fingerprint != first.fingerprint:
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
    differing = _differing(runs)
    gathered: dict[tuple, list[Run]] = {}
    for run in runs:
        extras = tuple((name, str(run.settings.get(name))) for name in differing)
        key = (run.recipe, run.strategy, run.devices, run.shares_a_gpu, run.batch, extras)
        gathered.setdefault(key, []).append(run)
    several = {name: len({getattr(run, name) for run in runs}) > 1 for name in ("recipe", "batch")}
    groups: dict[str, dict[str, Any]] = {}
    for (*_, extras), members in gathered.items():
        group = _group(members, extras, several)
        groups[group["id"]] = group
    _add_scaling(groups)
    return groups


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
    return "-".join(words + (["on-one-gpu"] if run.shares_a_gpu else []))


def _group(members: list[Run], extras: tuple, several: dict[str, bool]) -> dict[str, Any]:
    first = members[0]
    stem = Path(first.recipe).stem
    words = [stem] if several["recipe"] else []
    words.append(first.strategy if first.devices == 1 else f"{first.strategy} × {first.devices}")
    label = " ".join(words)
    label += f", batch {first.batch}" if several["batch"] else ""
    label += "".join(f", {name}={value}" for name, value in extras)
    label += " (on one GPU)" if first.shares_a_gpu else ""
    metrics = [name for name in first.quality if all(run.quality.get(name) is not None for run in members)]
    return {
        "id": group_name(first, *(value for _, value in extras)),
        "label": label,
        "recipe": stem,
        "family": "-".join([stem, str(first.batch), *(value for _, value in extras)]),
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
        "images_per_second": _common(members, lambda run: run.speed.get("images_per_second")),
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


def _common(members: list[Run], get: Any) -> dict[str, Any] | None:
    values = [get(run) for run in members]
    return None if any(value is None for value in values) else summary_of(values)


def _add_scaling(groups: dict[str, dict[str, Any]]) -> None:
    """How much faster a group is than one device with the same batch, or with the same batch per device."""
    alone = {(g["recipe"], g["batch"]): g for g in groups.values() if g["devices"] == 1 and g["strategy"] == "single"}
    for group in groups.values():
        strong = alone.get((group["recipe"], group["batch"]))
        weak = alone.get((group["recipe"], group["batch"] / group["devices"]))
        one = strong or weak
        speed = group["images_per_second"]
        if one is None or speed is None or one["images_per_second"] is None or one is group:
            group["scaling"] = None
            continue
        speedup = speed["mean"] / one["images_per_second"]["mean"]
        group["scaling"] = {
            "kind": "strong" if one is strong else "weak",
            "against": one["id"],
            "speedup": speedup,
            "efficiency": speedup / group["devices"],
        }


def recommend(groups: dict[str, dict[str, Any]], metric: str, end: str) -> dict[str, Any] | None:
    """The fastest group among those that are not worse than the best one beyond what seeds explain.

    They are judged by what chose their checkpoints, which is not the test split; by `metric` where nothing chose.
    """
    found = [group for group in groups.values() if group["images_per_second"] and not group["shares_a_gpu"]]
    if not found:
        return None
    by_choice = all(group["chosen_by"] for group in found)
    judged = {
        group["id"]: group["chosen_by"] if by_choice else group["quality"][metric]
        for group in found
        if by_choice or metric in group["quality"]
    }
    if not judged:
        first = max(found, key=lambda g: g["images_per_second"]["mean"])
        return {"group": first["id"], "best": None, "equal": [], "by_seeds": False, "by_choice": False}
    sign = 1 if end == "max" else -1
    best = max(judged, key=lambda key: sign * judged[key]["mean"])
    pooled = {key: _pooled(groups[key], judged, groups) for key in judged}
    equal = [key for key, own in pooled.items() if _not_worse(own, pooled[best], sign)]
    fastest = max(equal, key=lambda key: groups[key]["images_per_second"]["mean"])
    by_seeds = all(summary["n"] > 1 for summary in judged.values())
    return {"group": fastest, "best": best, "equal": equal, "by_seeds": by_seeds, "by_choice": by_choice}


def _pooled(
    group: dict[str, Any], judged: dict[str, dict[str, Any]], groups: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """A group's own values; of one seed, those of all groups that differ from it in where they ran alone.

    Strategies give the same weights but for rounding, so that their runs of one seed are as good as seeds.
    """
    own = judged[group["id"]]
    if own["n"] > 1:
        return own
    alike = [judged[key]["mean"] for key in judged if groups[key]["family"] == group["family"]]
    return summary_of(alike) | {"n": 1}


def _not_worse(own: dict[str, Any], best: dict[str, Any], sign: int) -> bool:
    gap = sign * (best["mean"] - own["mean"])
    spreads = [one["std"] for one in (own, best) if one["std"] is not None]
    allowed = 2 * max(spreads) if len(spreads) == 2 else CLOSE * abs(best["mean"])
    return gap <= allowed
