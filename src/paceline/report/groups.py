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
from paceline.report.model import Cell, Group, Run, Scaling, Summary

MULTI_DEVICE_SETTINGS = {"nnodes", "compress", "sync_batchnorm"}  # settings that have no effect on one device
RECIPE, STRATEGY, BATCH = "recipe", "strategy", "batch"
RUN = "run"
# Settings that do not distinguish groups: paths, launch options, and settings with their own columns in the report.
# The accelerator is one of them, because it may be "auto". The recorded hardware is compared instead.
IGNORED_SETTINGS = {
    *("seed", "out", "preset", "data_root", "gpus", "accelerator", "strategy", "devices", "batch_size"),
    *("backend", "inception", "inception_sha256", "check_replicas", "keep", "rdzv", "max_restarts", "timeout"),
    *("join_timeout", "start_timeout", "mirror", "mirror_every", "mirror_wait", "loggers", "logger_wait"),
}


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


class GroupKey(NamedTuple):
    """The properties that all runs of a group share."""

    recipe: str
    strategy: str
    devices: int
    shares_a_gpu: bool
    batch: int
    extras: tuple[tuple[str, str], ...]  # (name, value) pairs of settings and hardware that distinguish groups

    @property
    def properties(self) -> dict[str, str]:
        """What the group is, by the name that tables show."""
        strategy = self.strategy if self.devices == 1 else f"{self.strategy} × {self.devices}"
        strategy += " (on one GPU)" if self.shares_a_gpu else ""
        return {RECIPE: Path(self.recipe).stem, STRATEGY: strategy, BATCH: str(self.batch), **dict(self.extras)}

    @property
    def id(self) -> str:
        """The name of the group in report.json."""
        words = [Path(self.recipe).stem, self.strategy, str(self.devices), str(self.batch)]
        return "-".join([*words, *(value for _, value in self.extras), *(["on-one-gpu"] if self.shares_a_gpu else [])])

    def baseline(self, batch: float) -> tuple[object, ...]:
        """Return the key of the runs on one device with this batch size, with which this group is compared."""
        return self.recipe, batch, *(pair for pair in self.extras if pair[0] not in MULTI_DEVICE_SETTINGS)

    @property
    def is_baseline(self) -> bool:
        """Whether this group is a baseline for others, because its strategy supports only one device."""
        strategy = known_strategy(self.strategy)
        return self.devices == 1 and strategy is not None and uses_one_device(strategy)


def find_differences(keys: Sequence[GroupKey]) -> dict[GroupKey, dict[str, str]]:
    """Return the properties in which groups differ, by name; the strategy if there is no difference."""
    columns = dict.fromkeys(name for key in keys for name in key.properties)
    differing = [name for name in columns if len({key.properties.get(name) for key in keys}) > 1] or [STRATEGY]
    return {key: {name: key.properties[name] for name in differing if name in key.properties} for key in keys}


def label_of(differences: Mapping[str, str]) -> str:
    """Return a label such as `dcgan ddp × 2, batch 64, lr=0.1` that contains only the differences."""
    start = " ".join(differences[name] for name in (RECIPE, STRATEGY) if name in differences)
    batch = f"batch {differences[BATCH]}" if BATCH in differences else ""
    others = [f"{name}={value}" for name, value in differences.items() if name not in (RECIPE, STRATEGY, BATCH)]
    return ", ".join(filter(None, [start, batch, *others]))


def heading_of(differences: Sequence[Mapping[str, str]], chosen_by_user: bool) -> str:
    """Return the heading of the column with the labels: what the groups differ in."""
    columns = dict.fromkeys(name for group in differences for name in group)
    return RUN if chosen_by_user or not columns else ", ".join(columns)


def short_names(folders: Sequence[str]) -> list[str]:
    """Return folder names that are as short as possible but still differ from each other."""
    paths = [os.path.abspath(folder) for folder in folders]
    common = os.path.commonpath([os.path.dirname(folder) for folder in paths])
    return [os.path.relpath(folder, common) for folder in paths]


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
            was, now = (f"{run.data}: {run.fingerprint}" for run in (first, other))
            raise UserError(f"{pair} were trained on different data ({was} ≠ {now}) and cannot be compared")
    for metric in dict.fromkeys(name for run in runs for name in run.protocols):
        require_same({run.folder: run.protocols[metric] for run in runs if metric in run.protocols})
    labels = {name for run in runs for name in run.quality if name.partition("[")[0] == first.best[0] and "[" in name}
    if len(labels) > 1:
        raise UserError(
            "the metrics were computed with different feature networks and cannot be compared "
            f"({', '.join(sorted(labels))})"
        )


def make_groups(cells: Sequence[Cell]) -> dict[str, Group]:
    """Return the groups of finished runs, keyed by group ID."""
    runs = [cell.run for cell in cells if cell.run is not None and cell.state == "done"]
    settings = [name for name in dict.fromkeys(name for run in runs for name in run.settings) if _differs(name, runs)]
    hardware = [name for name in (runs[0].hardware if runs else ()) if len({run.hardware[name] for run in runs}) > 1]
    members: dict[GroupKey, list[Run]] = {}
    for run in runs:
        extras = tuple((name, str(run.settings.get(name))) for name in settings)
        extras += tuple((name, run.hardware[name]) for name in hardware)
        key = GroupKey(run.recipe, run.strategy, run.devices, run.shares_a_gpu, run.batch, extras)
        members.setdefault(key, []).append(run)
    chosen = {cell.run.folder: cell.label for cell in cells if cell.run is not None and cell.label}
    differences = find_differences(list(members))
    groups: dict[GroupKey, Group] = {}
    baselines: dict[tuple[object, ...], Group] = {}
    for key, alike in members.items():
        name = key.id
        while any(group.id == name for group in groups.values()):  # recipes in different folders may have the same name
            name += "'"
        labels = [chosen[run.folder] for run in alike if run.folder in chosen]
        label = ", ".join(labels) if len(labels) <= 2 else f"{labels[0]} … {labels[-1]}"
        groups[key] = _group(key, alike, name, differences[key], label or label_of(differences[key]))
        if key.is_baseline:
            baselines.setdefault(key.baseline(key.batch), groups[key])
    per_device = bool(cells) and all(cell.batch.endswith("/device") for cell in cells)
    scaled = [replace(group, scaling=_scaling(key, group, baselines, per_device)) for key, group in groups.items()]
    return {group.id: group for group in scaled}


def _differs(setting: str, runs: Sequence[Run]) -> bool:
    """Return whether a setting distinguishes runs of the same recipe."""
    values = {(run.recipe, str(run.settings.get(setting))) for run in runs}
    return setting not in IGNORED_SETTINGS and len(values) > len({recipe for recipe, _ in values})


def _group(key: GroupKey, members: Sequence[Run], name: str, differences: Mapping[str, str], label: str) -> Group:
    """Return a group, without its scaling."""
    first, speeds = members[0], [run.speed for run in members]
    speed = _common([one.images_per_second if one else None for one in speeds])
    evaluated = [run.selection_metric for run in members if run.selection_metric]
    quality = {name: _common([run.quality.get(name) for run in members]) for name in first.quality}
    if speed and speed.std is not None:
        speed_std: float | None = speed.std
    else:
        speed_std = first.speed.std_over_log_intervals if first.speed else None
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
        speed_std=speed_std,
        includes_warmup=any(one.includes_warmup for one in speeds if one),
        images_per_second_without_loading=_common(
            [one.images_per_second_without_loading if one else None for one in speeds]
        ),
        seconds=_summarise([run.seconds for run in members]),
        gpu=_means([run.gpu for run in members]),
    )


def _summarise(values: Sequence[float]) -> Summary:
    spread = statistics.stdev(values) if len(values) > 1 else None
    return Summary(statistics.fmean(values), spread, len(values), list(values))


def _common(values: Sequence[float | None]) -> Summary | None:
    """Return a summary of the values, or None if any of them is missing."""
    present = [value for value in values if value is not None]
    return _summarise(present) if len(present) == len(values) else None


def _means(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean value of each key that all mappings contain."""
    common = [name for name in tables[0] if all(name in table for table in tables)]
    return {name: statistics.fmean(table[name] for table in tables) for name in common}


def _scaling(
    key: GroupKey, group: Group, baselines: Mapping[tuple[object, ...], Group], per_device: bool
) -> Scaling | None:
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
