"""Groups of runs that differ only in their seed, and how their speeds compare with that of one device."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.core.machine_load import is_busy
from paceline.report.group_key import Extras, GroupKey
from paceline.report.labels import find_differences, join_names, label_of
from paceline.report.model import Cell, Group, Scaling, SpeedSpread, Summary
from paceline.report.run import Run

# Settings that do not distinguish groups: paths, launch options, and settings with their own columns in the report.
# The accelerator is one of them, because it may be "auto". The recorded hardware is compared instead.
IGNORED_SETTINGS = {"seed", "out", "preset", "data_root", "gpus", "accelerator", "strategy", "devices", "batch_size"}
IGNORED_SETTINGS |= {"backend", "inception", "inception_sha256", "check_replicas", "keep"}
IGNORED_SETTINGS |= {
    "rdzv",
    "max_restarts",
    "timeout",
    "join_timeout",
    "start_timeout",
    "mirror",
    "mirror_every",
    "mirror_wait",
    "loggers",
    "logger_wait",
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
    ids = _unique_ids(members)
    speeds = {key: _speed(group) for key, group in members.items()}
    references: dict[tuple[str, float, Extras], GroupKey] = {}
    for key in members:
        if key.is_reference:
            references.setdefault(key.reference(key.batch), key)
    per_device = bool(cells) and all(cell.batch.endswith("/device") for cell in cells)
    chosen = {cell.run.folder: cell.label for cell in cells if cell.run is not None and cell.label}
    differences = find_differences(list(members))
    groups: dict[str, Group] = {}
    for key, group in members.items():
        names = [chosen[run.folder] for run in group if run.folder in chosen]
        scaling = _scaling(key, references, speeds, ids, per_device)
        groups[ids[key]] = _group(key, group, ids[key], differences[key], join_names(names), scaling)
    return groups


def group_name(run: Run, *more: str) -> str:
    """Return the name of a run's group: all runs that differ from it only in their seed."""
    words = [Path(run.recipe).stem, run.strategy, str(run.devices), str(run.batch), *more]
    name = "-".join(words + (["on-one-gpu"] if run.shares_a_gpu else []))
    return name.replace("::", "-")  # "::" separates the components of a path in report.json


def summary_of(values: Sequence[float]) -> Summary:
    """Return the mean, the sample standard deviation, the count and a list of the values."""
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


def _unique_ids(members: Mapping[GroupKey, Sequence[Run]]) -> dict[GroupKey, str]:
    ids: dict[GroupKey, str] = {}
    for key, runs in members.items():
        name = group_name(runs[0], *(value for _, value in key.extras))
        while name in ids.values():  # recipes in different folders may have the same name
            name += "'"
        ids[key] = name
    return ids


def _group(
    key: GroupKey,
    members: Sequence[Run],
    name: str,
    differences: Mapping[str, str],
    label: str,
    scaling: Scaling | None,
) -> Group:
    first, speed = members[0], _speed(members)
    return Group(
        id=name,
        label=label or label_of(differences),
        recipe=Path(first.recipe).stem,
        ladder_name=group_name(first),
        extras=dict(key.extras),
        differences=differences,
        family="-".join([first.recipe, str(first.batch), *(value for _, value in key.extras)]),
        data=first.data,
        strategy=first.strategy,
        devices=first.devices,
        shares_a_gpu=first.shares_a_gpu,
        batch=first.batch,
        precision=first.precision,
        n=len(members),
        seeds=[run.seed for run in members],
        runs=[run.folder for run in members],
        quality=_quality(members),
        selection_metric=_common([run.selection_metric.value if run.selection_metric else None for run in members]),
        num_evaluated=min(run.selection_metric.num_evaluated or 0 if run.selection_metric else 0 for run in members)
        or None,
        images_per_second=speed,
        speed_spread=_speed_spread(first, speed),
        includes_warmup=any(run.speed.includes_warmup for run in members if run.speed),
        side_by_side=any(run.side_by_side for run in members),
        more_processes_than_cores=any(_is_crowded(run) for run in members),
        num_threads=first.num_threads if len({run.num_threads for run in members}) == 1 else None,
        load_average=max((run.load_average for run in members if run.load_average is not None), default=None),
        was_busy=any(_was_busy(run) for run in members),
        images_per_second_without_loading=_common(
            [run.speed.images_per_second_without_loading if run.speed else None for run in _measured(members)]
        ),
        seconds=summary_of([run.seconds for run in members]),
        seconds_per_epoch=_means([run.seconds_per_epoch for run in members]),
        gpu=_means([run.gpu for run in members]),
        scaling=scaling,
    )


def _quality(members: Sequence[Run]) -> dict[str, Summary]:
    """Summarise each metric that all runs in a group have."""
    found = {name: _common([run.quality.get(name) for run in members]) for name in members[0].quality}
    return {name: summary for name, summary in found.items() if summary is not None}


def _speed(members: Sequence[Run]) -> Summary | None:
    return _common([run.speed.images_per_second if run.speed else None for run in _measured(members)])


def _measured(members: Sequence[Run]) -> list[Run]:
    """Return one run for each measurement of the speed, because runs trained side by side share a measurement."""
    return list({run.speed_run or run.folder: run for run in members}.values())


def _common(values: Sequence[float | None]) -> Summary | None:
    """Return a summary of the values, or None if any of them is missing."""
    present = [value for value in values if value is not None]
    return summary_of(present) if len(present) == len(values) else None


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


def _is_crowded(run: Run) -> bool:
    """Return whether a CPU run used more processes than cores; False for several hosts, whose load is unknown."""
    cores, one_host = run.hardware["cores"], str(run.settings.get("nnodes", "1")) == "1"
    return run.hardware["accelerator"] == "cpu" and one_host and cores.isdecimal() and run.devices > int(cores)


def _was_busy(run: Run) -> bool:
    cores = run.hardware["cores"]
    return run.load_average is not None and cores.isdecimal() and is_busy(run.load_average, int(cores))


def _scaling(
    key: GroupKey,
    references: Mapping[tuple[str, float, Extras], GroupKey],
    speeds: Mapping[GroupKey, Summary | None],
    ids: Mapping[GroupKey, str],
    per_device: bool,
) -> Scaling | None:
    """Return the speedup over one device with the same global batch or the same batch per device, if known."""
    batches = {"strong": key.batch, "weak": key.batch / key.devices}
    for kind in sorted(batches, reverse=per_device):
        other = references.get(key.reference(batches[kind]))
        if other is None:
            continue
        own, alone = speeds[key], speeds[other]
        if own is None or alone is None or other == key:
            return None
        speedup = own.mean / alone.mean
        return Scaling(kind, ids[other], speedup, speedup / key.devices)
    return None
