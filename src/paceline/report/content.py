"""The sections of a report. Each number is a placeholder with its path in report.json."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.report.content_bottlenecks import bottlenecks_section
from paceline.report.content_runs import command_names, runs_section
from paceline.report.content_speed import gpu_section, scaling_costs_section, speed_section, time_section
from paceline.report.labels import RUN
from paceline.report.metric_names import (
    evaluated_images,
    format_for,
    metric_heading,
    metric_in_text,
    metrics_in_order,
    quality_of,
    with_spread,
)
from paceline.report.model import Parity, Report
from paceline.report.parts import Bullets, Images, Part, Plots, Section, Table
from paceline.report.phrases import NO_VALUE, at

PARITY = "Do all strategies produce the same weights?"


def sections(report: Report, summary: Sequence[str], plots: Sequence[str]) -> list[Section]:
    """Return the non-empty sections, from the summary to the settings."""
    made = [
        Section("Summary", summary),
        _quality(report),
        _curves(plots),
        _samples(report),
        speed_section(report, plots),
        time_section(report, plots),
        scaling_costs_section(report),
        bottlenecks_section(report),
        gpu_section(report),
        _parity(report),
        runs_section(report),
        _not_measured(report),
        _settings(report),
    ]
    return [section for section in made if section.parts]


def _quality(report: Report) -> Section:
    groups = report.groups
    names = metrics_in_order((group.quality for group in groups.values()), report.metric.reported)
    if not names:
        return Section("Quality", [])
    selection = report.metric.name
    show_selection = selection not in names and any(group.selection_metric for group in groups.values())
    several_seeds = len({group.n for group in groups.values()}) > 1
    # The label of a run that the user named does not contain the differences, so they need their own columns.
    differences = list(dict.fromkeys(name for group in groups.values() for name in group.differences))
    differences = differences if report.subject == RUN and len(groups) > 1 else []
    head = [report.subject, *differences, *(["seeds"] if several_seeds else []), *map(metric_heading, names)]
    head += [metric_heading(selection)] if show_selection else []
    rows = []
    for key, group in groups.items():
        row = [group.label, *(group.differences.get(name, NO_VALUE) for name in differences)]
        row += [at("d", "groups", key, "n")] if several_seeds else []
        row += [quality_of(group, name) for name in names]
        if show_selection:
            spec = format_for(selection, group.selection_metric)
            row.append(with_spread(spec, group.selection_metric, "groups", key, "selection_metric"))
        rows.append(row)
    best = _best_groups(report)
    strong = {number for number, key in enumerate(groups) if key in best}
    return Section("Quality", [Table(head, rows, strong, _quality_note(report), command_names(report, groups))])


def _best_groups(report: Report) -> set[str]:
    """Return the groups whose selection metric, as displayed, equals the best; empty if all groups are equal."""
    name, groups = report.metric.name, report.groups
    if report.best_group is None:
        return set()
    spec = format_for(name, groups[report.best_group].selection_metric)
    shown = {key: format(one.selection_metric.mean, spec) for key, one in groups.items() if one.selection_metric}
    alike = {key for key, text in shown.items() if text == shown[report.best_group]}
    return alike if len(alike) < len(groups) else set()


def _quality_note(report: Report) -> str:
    groups = report.groups.values()
    averaged = any(group.n > 1 for group in groups)
    notes = ["Mean ± sample standard deviation over the seeds."] if averaged else []
    if report.metric.name:
        best = f"the best {metric_in_text(report.metric.name)}"
        notes.append(f"Each run is evaluated at its checkpoint with {best}.")
        notes += _evaluated_images(report)
        notes += [f"Highlighted: {best} of all rows."] if _best_groups(report) else []
    else:
        notes.append("The recipe has no metric for selecting checkpoints, or its code was not loaded (see --trust).")
    if any(group.n == 1 for group in groups):
        notes.append("With a single seed, the spread is unknown, and differences may be due to chance.")
    return " ".join(notes)


def _evaluated_images(report: Report) -> list[str]:
    """Return how many images each split has, if the numbers are the same for all runs."""
    counts = {
        (run.selection_metric.num_evaluated, run.checkpoint.num_tested, run.selection_metric.num_real)
        for run in report.runs.values()
        if run.selection_metric and run.checkpoint
    }
    first = next(iter(report.runs), "")
    if len(counts) != 1:
        return []
    ((evaluated, tested, real),) = counts
    where = evaluated_images(report.metric.name)
    count = at(",.0f", "runs", first, "selection_metric", "num_evaluated")
    if evaluated and real:
        of_real = at(",.0f", "runs", first, "selection_metric", "num_real")
        return [f"The metrics compare {count} generated images with {of_real} {where}."]
    parts = [f"{count} {where}"] if evaluated else []
    parts += [f"{at(',.0f', 'runs', first, 'checkpoint', 'num_tested')} test images"] if tested else []
    return [f"The metrics are computed on {' and '.join(parts)}."] if parts else []


def _curves(plots: Sequence[str]) -> Section:
    names = [name for name in plots if name.startswith(("quality", "loss"))]
    return Section("Training curves", [Plots(names)] if names else [])


def _samples(report: Report) -> Section:
    if not report.samples:
        return Section("Samples", [])
    inputs = "All rows use the same noise or the same input images." if len(report.groups) > 1 else ""
    parts: list[Part] = [f"Samples from the end of training. {inputs} Click an image to enlarge it."]
    parts.append(Images(report.samples))
    for gallery in report.progress:
        parts += [f"**Progress of {gallery.label}**, by the number of training images seen:"]
        parts.append(Images(gallery.progress, small=True))
    return Section("Samples", parts)


def _parity(report: Report) -> Section:
    parts: list[Part] = []
    for recipe, parity in report.parity.items():
        words = "produces the same weights under every strategy"
        words = words if parity.holds else "does NOT produce the same weights under every strategy"
        parts += [f"**{recipe}** {words}: {parity.description}.", _parity_table(recipe, parity)]
    return Section(PARITY, parts)


def _parity_table(recipe: str, parity: Parity) -> Table:
    rows = []
    for number, one in enumerate(parity.differences):
        where = ("parity", recipe, "differences", number)
        difference = "not finite" if one.value is None else at(".1e", *where, "value")
        tolerance = at(".0e", *where, "tolerance")
        rows.append([one.strategy, one.network, one.kind, difference, tolerance, one.worst or NO_VALUE])
    head = ["strategy", "network", "tensors", "difference", "tolerance", "first tensor above the tolerance"]
    note = (
        "The difference is max |a − b| ÷ max |b| over all values in a network, where a is the value after training "
        "with this strategy, and b is the value after training on one device."
    )
    return Table(head, rows, note=note)


def _not_measured(report: Report) -> Section:
    parts: list[Part] = []
    cells = [cell for cell in report.cells if cell.state != "done"]
    if cells:
        parts.append(Table(["run", "state", "reason"], [[cell.name, cell.state, cell.reason] for cell in cells]))
    parts += [Bullets([f"{line[:1].upper()}{line[1:]}" for line in report.not_measured])] if report.not_measured else []
    return Section("What was not measured and why", parts)


def _settings(report: Report) -> Section:
    parts: list[Part] = []
    parts.append(Table(["versions and hardware", ""], [list(one) for one in report.provenance.items()]))
    settings = [[name, str(value)] for name, value in report.settings.items()]
    parts.append(Table(["settings common to all runs", ""], settings))
    return Section("Settings, versions and hardware", parts, folded=True)
