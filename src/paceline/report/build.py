"""Build a report from runs and measurements, and write report.json, report.md and report.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from paceline.contracts.step_ladder import StepLadder
from paceline.core.files import write_file, write_json
from paceline.core.types import SettingValue
from paceline.report.advice import recommend, summarise
from paceline.report.content import make_sections
from paceline.report.groups import BATCH, RECIPE, STRATEGY, heading_of, make_groups
from paceline.report.model import Cell, Group, Metric, Parity, Report, Run, Sample
from paceline.report.page import to_html, to_markdown
from paceline.report.plots import plot_names
from paceline.report.scaling_costs import communication_share, explain
from paceline.runs.metrics import METRICS

NUM_STAGES = 6  # maximum number of images that show the progress of one run


def make_report(
    title: str,
    cells: Sequence[Cell],
    *,
    command: str = "",
    step_ladders: Mapping[str, StepLadder] | None = None,
    parity: Mapping[str, Parity] | None = None,
    not_measured: Sequence[str] = (),
) -> Report:
    """Compute the contents of a report. `step_ladders` contains step-time measurements by the folder of a run."""
    groups = make_groups(cells)
    runs = [cell.run for cell in cells if cell.run is not None and cell.state == "done"]
    best, mode = runs[0].best if runs else ("", "max")
    name = next((run.selection_metric.name for run in runs if run.selection_metric), best)
    measured = step_ladders or {}
    ladders = {key: measured[group.runs[0]] for key, group in groups.items() if group.runs[0] in measured}
    time_split, missing = _split_time(groups, ladders, on_gpu=any("gpus" in run.provenance and run.gpu for run in runs))
    return Report(
        title=title,
        subtitle=_subtitle(cells, runs, groups),
        command=command,
        metric=Metric(name, _reported_metric(groups, best), mode),
        subject=heading_of([group.differences for group in groups.values()], any(cell.label for cell in cells)),
        groups=groups,
        best_group=_best_group(groups, mode),
        cells=list(cells),
        counts={"requested": len(cells), "done": len(runs), "missing": len(cells) - len(runs)},
        runs={run.folder: run for run in runs},
        recommendation=recommend(groups, name, mode),
        scaling_costs={key: explain(one, weak=_is_weak(groups[key])) for key, one in ladders.items()},
        time_split=time_split,
        parity=dict(parity or {}),
        samples=_last_samples(groups, runs),
        progress=_progress(groups, runs),
        provenance=_provenance(runs),
        settings=_common_settings(runs),
        not_measured=[*not_measured, *missing, *_broken_lines(cells)],
    )


def write_report(report: Report, folder: Path) -> list[str]:
    """Write report.html, report.md and report.json; return the summary's paragraphs."""
    summary, plots = summarise(report), plot_names(report)
    sections = make_sections(report, summary, plots)
    content = asdict(replace(report, cells=[replace(cell, run=None) for cell in report.cells]))
    write_json(folder / "report.json", content | {"plots": plots, "summary": summary}, indent=1)
    write_file(folder / "report.md", to_markdown(report, sections, folder))
    write_file(folder / "report.html", to_html(report, sections))
    return summary


def _split_time(
    groups: Mapping[str, Group], ladders: Mapping[str, StepLadder], on_gpu: bool
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Return the seconds per epoch by group and activity, and descriptions of what could not be measured."""
    split: dict[str, dict[str, float]] = {}
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
    if on_gpu:
        missing.append("time spent on copies from host to device during the runs (the copies overlap with the step)")
    else:
        missing.append("GPU utilisation, memory and energy (no GPU was used, or NVML is unavailable)")
    return split, missing


def _last_samples(groups: Mapping[str, Group], runs: Sequence[Run]) -> list[Sample]:
    """Return real images if a run saved them, then the last samples of each group's first run."""
    real = [Sample("real images", run.real_images) for run in runs if run.real_images]
    last = [
        Sample(f"{group.label}, seed {run.seed}, after {run.samples[-1].images:,} images", run.samples[-1].path)
        for group, run in _first_runs(groups, runs)
    ]
    return [*real[:1], *last] if last else []


def _progress(groups: Mapping[str, Group], runs: Sequence[Run]) -> dict[str, list[Sample]]:
    """Return samples from several points in the training of each group's first run, from the first to the last."""
    progress = {}
    for group, run in _first_runs(groups, runs):
        last, steps = len(run.samples) - 1, min(NUM_STAGES, len(run.samples)) - 1
        chosen = [run.samples[round(number * last / steps)] for number in range(steps + 1)] if steps else []
        if chosen:
            stages = [Sample(f"{sample.images:,} images", sample.path) for sample in chosen]
            progress[f"{group.label}, seed {run.seed}"] = stages
    return progress


def _first_runs(groups: Mapping[str, Group], runs: Sequence[Run]) -> list[tuple[Group, Run]]:
    by_folder = {run.folder: run for run in runs}
    firsts = [(group, by_folder[group.runs[0]]) for group in groups.values()]
    return [(group, run) for group, run in firsts if run.samples]


def _is_weak(group: Group) -> bool:
    return group.scaling is not None and group.scaling.kind == "weak"


def _broken_lines(cells: Sequence[Cell]) -> list[str]:
    """Return how many lines were skipped in each run, including runs that count as unfinished because of that."""
    broken = [(cell.run.broken_lines, cell.run.folder) for cell in cells if cell.run is not None]
    return [f"{count} malformed line{'s' * (count > 1)} in {run}/{METRICS} (skipped)" for count, run in broken if count]


def _subtitle(cells: Sequence[Cell], runs: Sequence[Run], groups: Mapping[str, Group]) -> list[str]:
    """Return what all runs have in common, and how many of them finished."""
    parts = []
    if runs:
        samples = runs[0].fingerprint.rpartition(", ")[0]
        parts.append(f"data {runs[0].data}" + (f" ({samples} for training)" if samples else ""))
        parts += _constants(list(groups.values()))
        parts += _hardware(runs) if runs[0].provenance else ["versions and hardware unknown"]
        parts.append(runs[0].provenance.get("started", "")[:10])
    parts.append(f"{len(runs)} of {len(cells)} runs finished")
    return [part for part in parts if part]


def _constants(groups: Sequence[Group]) -> list[str]:
    """Return the recipe, strategy, batch size, precision and seeds, as far as they are the same in all groups."""
    first, differing = groups[0], {name for group in groups for name in group.differences}
    strategy = first.strategy if first.devices == 1 else f"{first.strategy} × {first.devices}"
    constants = {RECIPE: f"recipe {first.recipe}", STRATEGY: f"strategy {strategy}", BATCH: f"batch {first.batch}"}
    words = [text for name, text in constants.items() if name not in differing]
    if len({group.precision for group in groups}) == 1:
        words.append(f"precision {first.precision}")
    if len({tuple(group.seeds) for group in groups}) == 1:
        words.append(f"seed{'s' * (first.n > 1)} {', '.join(map(str, first.seeds))}")
    return words


def _hardware(runs: Sequence[Run]) -> list[str]:
    """Return the hardware and torch version of the runs, or a note if they differ."""
    first = runs[0].hardware
    if any(run.hardware != first for run in runs):
        return ["different hardware or torch versions (see the tables)"]
    cpu = f"{first['cpu']}, {first['cores']} core{'s' * (first['cores'] != '1')}"
    return [first["gpus"] if first["accelerator"] == "cuda" else cpu, f"torch {first['torch']}"]


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
    return {name: one[0] if name == "started" else " | ".join(one) for name, one in values.items()}


def _common_settings(runs: Sequence[Run]) -> dict[str, SettingValue]:
    first = runs[0].settings if runs else {}
    same = {name for name in first if all(name in run.settings and run.settings[name] == first[name] for run in runs)}
    return {name: value for name, value in first.items() if name in same}
