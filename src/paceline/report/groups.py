"""Groups of runs that differ only in their seed: their labels, and how their speeds compare."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import UserError
from paceline.core.registry import load_class, names
from paceline.data.fingerprint import is_same_data
from paceline.evaluation.protocol import require_same
from paceline.parallel.strategy import Strategy, uses_one_device
from paceline.report.model import Cell, Group, Run, Scaling, SpeedSpread, Summary

LOAD_MARGIN = 1.0  # a load average above the number of cores by more than this means that tasks had to wait


def known_strategy(name: str) -> type[Strategy] | None:
    """Return the class of an installed strategy, or None if it is not installed.

    Strategies in user files are never loaded, because a run folder may come from an untrusted source.
    """
    if name not in names("strategy"):
        return None
    try:
        return load_class("strategy", name, Strategy)
    except UserError:  # the plugin cannot be imported
        return None


MULTI_DEVICE_SETTINGS = {"nnodes", "compress", "sync_batchnorm"}  # settings that have no effect on one device
Baseline = tuple[str, float, tuple[tuple[str, str], ...]]  # recipe, batch size and other properties of runs on 1 device


class GroupKey(NamedTuple):
    """The properties that all runs of a group share."""

    recipe: str
    strategy: str
    devices: int
    shares_a_gpu: bool
    batch: int
    extras: tuple[tuple[str, str], ...]  # (name, value) pairs of settings and hardware that distinguish groups

    def baseline(self, batch: float) -> Baseline:
        """Return the key of the runs on one device with this batch size, with which this group is compared."""
        return self.recipe, batch, tuple(one for one in self.extras if one[0] not in MULTI_DEVICE_SETTINGS)

    @property
    def is_baseline(self) -> bool:
        """Whether this group is a baseline for others, because its strategy supports only one device."""
        strategy = known_strategy(self.strategy)
        return self.devices == 1 and strategy is not None and uses_one_device(strategy)


RECIPE, STRATEGY, BATCH = "recipe", "strategy", "batch"
RUN = "run"
MAX_NAMES = 2  # a label with more names shows only the first and the last one


def find_differences(keys: Sequence[GroupKey]) -> dict[GroupKey, dict[str, str]]:
    """Return the properties in which groups differ, by name; the strategy if there is no difference."""
    everything = {key: _properties(key) for key in keys}
    names = list(dict.fromkeys(name for properties in everything.values() for name in properties))
    differing = [name for name in names if len({properties.get(name) for properties in everything.values()}) > 1]
    shown = differing or [STRATEGY]
    return {key: {name: one[name] for name in shown if name in one} for key, one in everything.items()}


def _properties(key: GroupKey) -> dict[str, str]:
    strategy = key.strategy if key.devices == 1 else f"{key.strategy} × {key.devices}"
    strategy += " (on one GPU)" if key.shares_a_gpu else ""
    return {RECIPE: Path(key.recipe).stem, STRATEGY: strategy, BATCH: str(key.batch), **dict(key.extras)}


def label_of(differences: Mapping[str, str]) -> str:
    """Return a label such as `dcgan ddp × 2, batch 64, lr=0.1` that contains only the differences."""
    own = dict(differences)
    start = " ".join(own.pop(name) for name in (RECIPE, STRATEGY) if name in own)
    batch = [f"batch {own.pop(BATCH)}"] if BATCH in own else []
    return ", ".join(filter(None, [start, *batch, *(f"{name}={value}" for name, value in own.items())]))


def heading_of(differences: Sequence[Mapping[str, str]], chosen_by_user: bool) -> str:
    """Return the heading of the column with the labels: what the groups differ in."""
    names = list(dict.fromkeys(name for one in differences for name in one))
    return RUN if chosen_by_user or not names else ", ".join(names)


def join_names(names: Sequence[str]) -> str:
    """Return one label for the runs of a group."""
    return ", ".join(names) if len(names) <= MAX_NAMES else f"{names[0]} … {names[-1]}"


def short_names(folders: Sequence[str]) -> list[str]:
    """Return folder names that are as short as possible but still differ from each other."""
    whole = [os.path.abspath(folder) for folder in folders]
    if len(whole) == 1:
        return [Path(whole[0]).name]
    common = os.path.commonpath([os.path.dirname(folder) for folder in whole])
    return [os.path.relpath(folder, common) for folder in whole]


def check_comparable(runs: Sequence[Run], across_recipes: bool) -> None:
    """Raise UserError if two runs cannot be compared in one table."""
    first = runs[0]
    for other in runs[1:]:
        pair = f"{first.folder} and {other.folder}"
        if other.recipe != first.recipe and not across_recipes:
            raise UserError(
                f"{pair} have different recipes ({first.recipe}, {other.recipe}); to compare them, use --across-recipes"
            )
        if other.best != first.best:
            metrics = f"{first.best[0]}, {other.best[0]}"
            raise UserError(f"{pair} are evaluated with different metrics ({metrics}) and cannot be compared")
        if other.data != first.data or not is_same_data(other.fingerprint, first.fingerprint):
            was, is_ = (f"{run.data}: {run.fingerprint}" for run in (first, other))
            raise UserError(f"{pair} were trained on different data ({was} ≠ {is_}) and cannot be compared")
    for metric in dict.fromkeys(name for run in runs for name in run.protocols):
        require_same({run.folder: run.protocols[metric] for run in runs if metric in run.protocols})
    labels = {name for run in runs for name in run.quality if name.partition("[")[0] == first.best[0] and "[" in name}
    if len(labels) > 1:
        raise UserError(
            "the metrics were computed with different feature networks and cannot be compared "
            f"({', '.join(sorted(labels))})"
        )


# Settings that do not distinguish groups: paths, launch options, and settings with their own columns in the report.
# The accelerator is one of them, because it may be "auto". The recorded hardware is compared instead.
IGNORED_SETTINGS = {
    *("seed", "out", "preset", "data_root", "gpus", "accelerator", "strategy", "devices", "batch_size"),
    *("backend", "inception", "inception_sha256", "check_replicas", "keep", "rdzv", "max_restarts", "timeout"),
    *("join_timeout", "start_timeout", "mirror", "mirror_every", "mirror_wait", "loggers", "logger_wait"),
}


def make_groups(cells: Sequence[Cell]) -> dict[str, Group]:
    """Return the groups of finished runs, keyed by group ID."""
    runs = [cell.run for cell in cells if cell.run is not None and cell.state == "done"]
    settings, hardware = _differing_settings(runs), _differing_hardware(runs)
    members: dict[GroupKey, list[Run]] = {}
    for run in runs:
        extras = tuple((name, str(run.settings.get(name))) for name in settings)
        extras += tuple((name, run.hardware[name]) for name in hardware)
        key = GroupKey(run.recipe, run.strategy, run.devices, run.shares_a_gpu, run.batch, extras)
        members.setdefault(key, []).append(run)
    chosen = {cell.run.folder: cell.label for cell in cells if cell.run is not None and cell.label}
    differences = find_differences(list(members))
    groups: dict[GroupKey, Group] = {}
    baselines: dict[Baseline, Group] = {}
    for key, alike in members.items():
        name = _name_of(alike[0], *(value for _, value in key.extras))
        while any(group.id == name for group in groups.values()):  # recipes in different folders may have the same name
            name += "'"
        label = join_names([chosen[run.folder] for run in alike if run.folder in chosen]) or label_of(differences[key])
        groups[key] = _group(key, alike, name, differences[key], label)
        if key.is_baseline:
            baselines.setdefault(key.baseline(key.batch), groups[key])
    per_device = bool(cells) and all(cell.batch.endswith("/device") for cell in cells)
    scaled = [replace(one, scaling=_scaling(key, one, baselines, per_device)) for key, one in groups.items()]
    return {group.id: group for group in scaled}


def _name_of(run: Run, *more: str) -> str:
    words = [Path(run.recipe).stem, run.strategy, str(run.devices), str(run.batch), *more]
    return "-".join(words + (["on-one-gpu"] if run.shares_a_gpu else []))


def _summarise(values: Sequence[float]) -> Summary:
    spread = statistics.stdev(values) if len(values) > 1 else None
    return Summary(statistics.fmean(values), spread, len(values), list(values))


def _differing_hardware(runs: Sequence[Run]) -> list[str]:
    """Return which hardware properties (including the torch version) differ between runs."""
    names = runs[0].hardware if runs else {}
    return [name for name in names if len({run.hardware[name] for run in runs}) > 1]


def _differing_settings(runs: Sequence[Run]) -> list[str]:
    """Return the settings that differ between runs of the same recipe."""
    found = []
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        if name in IGNORED_SETTINGS:
            continue
        by_recipe: dict[str, set[str]] = {}
        for run in runs:
            by_recipe.setdefault(run.recipe, set()).add(str(run.settings.get(name)))
        if any(len(values) > 1 for values in by_recipe.values()):
            found.append(name)
    return found


def _group(key: GroupKey, members: Sequence[Run], name: str, differences: Mapping[str, str], label: str) -> Group:
    """Return a group, without its scaling."""
    first = members[0]
    measured = list({run.speed_run or run.folder: run for run in members}.values())  # seeds may share a measured speed
    speed = _common([run.speed.images_per_second if run.speed else None for run in measured])
    without_loading = [run.speed.images_per_second_without_loading if run.speed else None for run in measured]
    evaluated = [run.selection_metric for run in members if run.selection_metric]
    quality = {name: _common([run.quality.get(name) for run in members]) for name in first.quality}
    return Group(
        id=name,
        label=label,
        recipe=Path(first.recipe).stem,
        extras=dict(key.extras),
        differences=differences,
        family="-".join([first.recipe, str(first.batch), *(value for _, value in key.extras)]),
        strategy=first.strategy,
        devices=first.devices,
        shares_a_gpu=first.shares_a_gpu,
        batch=first.batch,
        precision=first.precision,
        n=len(members),
        seeds=[run.seed for run in members],
        runs=[run.folder for run in members],
        quality={name: summary for name, summary in quality.items() if summary is not None},
        selection_metric=_common([run.selection_metric.value if run.selection_metric else None for run in members]),
        num_evaluated=min((one.num_evaluated or 0 for one in evaluated), default=0) or None,
        images_per_second=speed,
        speed_spread=_speed_spread(first, speed),
        includes_warmup=any(run.speed.includes_warmup for run in members if run.speed),
        side_by_side=any(run.side_by_side for run in members),
        num_threads=first.num_threads if len({run.num_threads for run in members}) == 1 else None,
        load_average=max((run.load_average for run in members if run.load_average is not None), default=None),
        was_busy=any(_was_busy(run) for run in members),
        images_per_second_without_loading=_common(without_loading),
        seconds=_summarise([run.seconds for run in members]),
        seconds_per_epoch=_means([run.seconds_per_epoch for run in members]),
        gpu=_means([run.gpu for run in members]),
    )


def _common(values: Sequence[float | None]) -> Summary | None:
    """Return a summary of the values, or None if any of them is missing."""
    present = [value for value in values if value is not None]
    return _summarise(present) if len(present) == len(values) else None


def _means(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean value of each key that all mappings contain."""
    return {
        name: statistics.fmean(table[name] for table in tables)
        for name in tables[0]
        if all(name in table for table in tables)
    }


def _speed_spread(first: Run, speed: Summary | None) -> SpeedSpread:
    """Return the spread of the speed across seeds or, with a single seed, across log intervals."""
    if speed and speed.std is not None:
        return SpeedSpread(speed.std, "seeds")
    std = first.speed.std_over_log_intervals if first.speed else None
    return SpeedSpread(std, "log intervals" if std is not None else "")


def _was_busy(run: Run) -> bool:
    cores = run.hardware["cores"]
    return run.load_average is not None and cores.isdecimal() and run.load_average > int(cores) + LOAD_MARGIN


def _scaling(key: GroupKey, group: Group, baselines: Mapping[Baseline, Group], per_device: bool) -> Scaling | None:
    """Return the speedup over one device with the same global batch or the same batch per device, if known."""
    batches = {"strong": key.batch, "weak": key.batch / key.devices}
    for kind in sorted(batches, reverse=per_device):
        alone = baselines.get(key.baseline(batches[kind]))
        if alone is None:
            continue
        if group.images_per_second is None or alone.images_per_second is None or alone is group:
            return None
        speedup = group.images_per_second.mean / alone.images_per_second.mean
        return Scaling(kind, alone.id, speedup, speedup / key.devices)
    return None
