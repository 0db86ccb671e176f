"""Build a report from runs and measurements, and write report.json, report.md and report.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.contracts.step_ladder import StepLadder
from paceline.core.files import write_file, write_json
from paceline.core.types import SettingValue
from paceline.report.advice import recommend
from paceline.report.content import NOTE, split_time
from paceline.report.document import document_of
from paceline.report.groups import BATCH, RECIPE, STRATEGY, heading_of, make_groups
from paceline.report.model import (
    Cell,
    Counts,
    Gallery,
    Group,
    Metric,
    Parity,
    Report,
    ResumedRun,
    Run,
    Sample,
    SampleFile,
    explain,
)
from paceline.report.page import to_html, to_markdown
from paceline.runs.metrics import METRICS

NUM_STAGES = 6  # maximum number of images that show the progress of one run


def samples_of(groups: Mapping[str, Group], runs: Sequence[Run]) -> list[Sample]:
    """Return real images if a run saved them, then the last samples of each group's first run."""
    real = [Sample("real images", run.real_images) for run in runs if run.real_images]
    last = [Sample(_caption(group, run, run.samples[-1]), run.samples[-1].path) for group, run in _firsts(groups, runs)]
    return [*real[:1], *last] if last else []


def progress_of(groups: Mapping[str, Group], runs: Sequence[Run]) -> list[Gallery]:
    """Return samples from several points in the training of each group's first run."""
    found = []
    for group, run in _firsts(groups, runs):
        stages = [Sample(f"{one.images:,} images", one.path) for one in _spread_out(run.samples)]
        if len(stages) > 1:
            found.append(Gallery(f"{group.label}, seed {run.seed}", stages))
    return found


def _firsts(groups: Mapping[str, Group], runs: Sequence[Run]) -> list[tuple[Group, Run]]:
    by_folder = {run.folder: run for run in runs}
    firsts = [(group, by_folder[group.runs[0]]) for group in groups.values()]
    return [(group, run) for group, run in firsts if run.samples]


def _caption(group: Group, run: Run, sample: SampleFile) -> str:
    return f"{group.label}, seed {run.seed}, after {sample.images:,} images"


def _spread_out(samples: Sequence[SampleFile]) -> list[SampleFile]:
    """Return at most NUM_STAGES samples, from the first to the last."""
    steps = min(NUM_STAGES, len(samples)) - 1
    return [samples[round(number * (len(samples) - 1) / max(1, steps))] for number in range(steps + 1)]


LADDER_NOTE = (
    "All values are medians over blocks of steps, measured for each row in turn. They were measured separately from "
    "the runs, but with the same number of processes. The first rows show one device with the whole batch, one device "
    "with its slice of the batch, and all devices without communication. Each further row adds one cost. Fractions are "
    "relative to the time per image in the last row. If a row is slower than a later row, the difference is noise. "
    "The runs can be faster or slower than the last row, because they were measured in different processes at a "
    "different time."
)


def make_report(
    title: str,
    cells: Sequence[Cell],
    *,
    command: str = "",
    step_ladders: Mapping[str, StepLadder] | None = None,
    parity: Mapping[str, Parity] | None = None,
    not_measured: Sequence[str] = (),
) -> Report:
    """Compute the contents of a report.

    `step_ladders` contains step-time measurements, keyed by the group names that `group_name` returns.
    """
    groups = make_groups(cells)
    runs = [cell.run for cell in cells if cell.run is not None and cell.state == "done"]
    name, mode = runs[0].best if runs else ("", "max")
    metric = Metric(_full_name(runs, name), _reported_metric(groups, name), mode)
    ladders, unplaced = _by_group(step_ladders or {}, groups)
    on_gpu = any("gpus" in run.provenance and run.gpu for run in runs)
    time_split, missing = split_time(groups, ladders, on_gpu)
    return Report(
        title=title,
        subtitle=_subtitle(cells, runs, groups),
        command=command,
        metric=metric,
        groups=groups,
        cells=list(cells),
        counts=Counts(len(cells), len(runs), len(cells) - len(runs)),
        runs={run.folder: run for run in runs},
        resumed_runs=[ResumedRun(run.folder, run.segment_changes) for run in runs if run.segment_changes],
        recommendation=recommend(groups, metric.name, mode),
        step_ladders=ladders,
        scaling_costs={key: explain(one, weak=_is_weak(groups[key])) for key, one in ladders.items()},
        scaling_costs_note=LADDER_NOTE,
        parity=dict(parity or {}),
        subject=heading_of([group.differences for group in groups.values()], any(cell.label for cell in cells)),
        samples=samples_of(groups, runs),
        progress=progress_of(groups, runs),
        provenance=_provenance(runs),
        settings=_same_settings(runs),
        best_group=_best_group(groups, mode),
        time_split=time_split,
        time_split_note=NOTE,
        not_measured=[*not_measured, *unplaced, *missing, *_broken(cells)],
    )


def write_report(report: Report, folder: Path) -> list[str]:
    """Write report.html, report.md and report.json; return the summary's sentences."""
    document = document_of(report)
    write_json(folder / "report.json", document.content, indent=1)
    write_file(folder / "report.md", to_markdown(document, folder))
    write_file(folder / "report.html", to_html(document))
    return document.summary


def _by_group(
    ladders: Mapping[str, StepLadder], groups: Mapping[str, Group]
) -> tuple[dict[str, StepLadder], list[str]]:
    """Return the step-time measurement of each group, and describe measurements that match several groups."""
    placed, unplaced = {}, []
    for name, one in ladders.items():
        meant = [key for key, group in groups.items() if group.ladder_name == name]
        if len(meant) == 1:
            placed[meant[0]] = one
        elif meant:
            labels = ", ".join(groups[key].label for key in meant)
            unplaced.append(f"a separate step-time breakdown for each of {labels} (they share one measurement)")
    return placed, unplaced


def _is_weak(group: Group) -> bool:
    return group.scaling is not None and group.scaling.kind == "weak"


def _broken(cells: Sequence[Cell]) -> list[str]:
    """Return how many lines were skipped in each run, including runs that count as unfinished because of that."""
    runs = [cell.run for cell in cells if cell.run is not None]
    return [
        f"{run.broken_lines} malformed line{'s' if run.broken_lines > 1 else ''} in {run.folder}/{METRICS} (skipped)"
        for run in runs
        if run.broken_lines
    ]


def _subtitle(cells: Sequence[Cell], runs: Sequence[Run], groups: Mapping[str, Group]) -> list[str]:
    """Return what all runs have in common, and how many of them finished."""
    parts = []
    if runs:
        made = runs[0].provenance
        samples = runs[0].fingerprint.rpartition(", ")[0]
        parts.append(f"data {runs[0].data}" + (f" ({samples} for training)" if samples else ""))
        parts += _constants(list(groups.values()))
        parts += _hardware(runs) if made else ["versions and hardware unknown"]
        parts.append(made.get("started", "")[:10])
    parts.append(f"{len(runs)} of {len(cells)} runs finished")
    return [part for part in parts if part]


def _constants(groups: Sequence[Group]) -> list[str]:
    """Return the recipe, strategy, batch size, precision and seeds, as far as they are the same in all groups."""
    first, differing = groups[0], {name for group in groups for name in group.differences}
    strategy = first.strategy if first.devices == 1 else f"{first.strategy} × {first.devices}"
    constants = {RECIPE: f"recipe {first.recipe}", STRATEGY: f"strategy {strategy}", BATCH: f"batch {first.batch}"}
    found = [text for name, text in constants.items() if name not in differing]
    if len({group.precision for group in groups}) == 1:
        found.append(f"precision {first.precision}")
    seeds = {tuple(group.seeds) for group in groups}
    if len(seeds) == 1:
        found.append(f"seed{'s' if first.n > 1 else ''} {', '.join(map(str, first.seeds))}")
    return found


def _hardware(runs: Sequence[Run]) -> list[str]:
    """Return the hardware and torch version of the runs, or a note if they differ."""
    first = runs[0].hardware
    if any(run.hardware != first for run in runs):
        return ["different hardware or torch versions (see the tables)"]
    cores = "1 core" if first["cores"] == "1" else f"{first['cores']} cores"
    where = first["gpus"] if first["accelerator"] == "cuda" else f"{first['cpu']}, {cores}"
    threads = {run.num_threads for run in runs}
    found = [where]
    if first["accelerator"] == "cpu" and len(threads) == 1 and (number := threads.pop()):
        found.append("1 thread per process" if number == 1 else f"{number} threads per process")
    return [*found, f"torch {first['torch']}"]


def _full_name(runs: Sequence[Run], name: str) -> str:
    return next((run.selection_metric.name for run in runs if run.selection_metric), name)


def _reported_metric(groups: Mapping[str, Group], name: str) -> str:
    """Return the selection metric on the test split, or `name` itself if there is no test result."""
    names = [metric for group in groups.values() for metric in group.quality]
    plain = name.partition("/")[2]
    return next((m for m in names if m.partition("/")[2].partition("[")[0] == plain), name)


def _best_group(groups: Mapping[str, Group], mode: str) -> str | None:
    means = {key: group.selection_metric.mean for key, group in groups.items() if group.selection_metric}
    choose = max if mode == "max" else min
    return choose(means, key=lambda key: means[key]) if means else None


def _provenance(runs: Sequence[Run]) -> dict[str, str]:
    """Return the versions and hardware of the runs; if runs differ, an entry lists all values."""
    names = dict.fromkeys(name for run in runs for name in run.provenance)
    values = {name: list(dict.fromkeys(run.provenance.get(name, "none") for run in runs)) for name in names}
    return {
        name: found[0] if name == "started" or len(found) == 1 else " | ".join(found) for name, found in values.items()
    }


def _same_settings(runs: Sequence[Run]) -> dict[str, SettingValue]:
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return {
        name: runs[0].settings[name]
        for name in names
        if all(name in run.settings and run.settings[name] == runs[0].settings[name] for run in runs)
    }
