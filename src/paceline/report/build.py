"""Build a report from runs and measurements, and write report.json, report.md and report.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from paceline.contracts.step_ladder import StepLadder
from paceline.core.files import write_file, write_json
from paceline.core.types import SettingValue
from paceline.report.advice import explain, recommend, summarise
from paceline.report.content import make_sections
from paceline.report.groups import BATCH, RECIPE, STRATEGY, heading_of, make_groups
from paceline.report.model import Cell, Group, Metric, Parity, Report, Run, Sample
from paceline.report.page import to_html, to_markdown
from paceline.report.plots import plot_names
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
    no_gpu = ["GPU utilisation, memory and energy (no GPU was used, or NVML is unavailable)"]
    samples, progress = _samples(groups, runs)
    return Report(
        title=title,
        subtitle=_subtitle(cells, runs, groups),
        command=command,
        metric=Metric(name, _reported_metric(groups, best), mode),
        subject=heading_of([group.differences for group in groups.values()], any(cell.label for cell in cells)),
        groups=groups,
        cells=list(cells),
        counts={"requested": len(cells), "done": len(runs), "missing": len(cells) - len(runs)},
        runs={run.folder: run for run in runs},
        recommendation=recommend(groups, name, mode),
        scaling_costs={
            key: explain(ladder, weak=(scaling := groups[key].scaling) is not None and scaling.kind == "weak")
            for key, ladder in ladders.items()
        },
        parity=dict(parity or {}),
        samples=samples,
        progress=progress,
        provenance=_provenance(runs),
        settings=_common_settings(runs),
        not_measured=[*not_measured, *([] if any(run.gpu for run in runs) else no_gpu), *_lost_measurements(cells)],
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


def _samples(groups: Mapping[str, Group], runs: Sequence[Run]) -> tuple[list[Sample], dict[str, list[Sample]]]:
    """Return the last samples of each group's first run, after real images if a run saved them, and its progress."""
    by_folder = {run.folder: run for run in runs}
    last, progress = [], {}
    for group in groups.values():
        run = by_folder[group.runs[0]]
        if not run.samples:
            continue
        title = f"{group.label}, seed {run.seed}"
        last.append(Sample(f"{title}, after {run.samples[-1].images:,} images", run.samples[-1].path))
        steps = min(NUM_STAGES, len(run.samples)) - 1
        if steps:
            chosen = [run.samples[round(number * (len(run.samples) - 1) / steps)] for number in range(steps + 1)]
            progress[title] = [Sample(f"{sample.images:,} images", sample.path) for sample in chosen]
    real = [Sample("real images", run.real_images) for run in runs if run.real_images]
    return [*real[:1], *last] if last else [], progress


def _lost_measurements(cells: Sequence[Cell]) -> list[str]:
    """Return what is missing from single runs, including runs that count as unfinished because of that."""
    lines = []
    for run in (cell.run for cell in cells if cell.run is not None):
        if run.broken_lines:
            count = f"{run.broken_lines} malformed line{'s' * (run.broken_lines > 1)}"
            lines.append(f"{count} in {run.folder}/{METRICS} (skipped)")
        if run.changes:
            changes = ", then ".join(run.changes)
            lines.append(f"speed of {run.folder} before its last change: it was resumed with changes {changes}")
    return lines


def _subtitle(cells: Sequence[Cell], runs: Sequence[Run], groups: Mapping[str, Group]) -> list[str]:
    """Return what all runs have in common, and how many of them finished."""
    parts = []
    if runs:
        samples = runs[0].fingerprint.rpartition(", ")[0]
        parts.append(f"data {runs[0].data}" + (f" ({samples} for training)" if samples else ""))
        parts += _constants(list(groups.values()))
        hardware = runs[0].hardware
        if any(run.hardware != hardware for run in runs):
            parts.append("different hardware or torch versions (see the tables)")
        else:
            cpu = f"{hardware['cpu']}, {hardware['cores']} cores"
            parts += [hardware["gpus"] if hardware["accelerator"] == "cuda" else cpu, f"torch {hardware['torch']}"]
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


def _reported_metric(groups: Mapping[str, Group], name: str) -> str:
    """Return the selection metric on the test split, or `name` itself if there is no test result."""
    names = [metric for group in groups.values() for metric in group.quality]
    plain = name.partition("/")[2]
    return next((m for m in names if m.partition("/")[2].partition("[")[0] == plain), name)


def _provenance(runs: Sequence[Run]) -> dict[str, str]:
    """Return the versions and hardware of the runs; if runs differ, an entry lists all values."""
    names = dict.fromkeys(name for run in runs for name in run.provenance)
    values = {name: list(dict.fromkeys(run.provenance.get(name, "none") for run in runs)) for name in names}
    return {name: texts[0] if name == "started" else " | ".join(texts) for name, texts in values.items()}


def _common_settings(runs: Sequence[Run]) -> dict[str, SettingValue]:
    first = runs[0].settings if runs else {}
    return {name: value for name, value in first.items() if all(run.settings.get(name) == value for run in runs)}
