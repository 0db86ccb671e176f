"""The sections of a report: paragraphs, tables, plots and images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from paceline.report.advice import COSTS, PARITY
from paceline.report.groups import RUN
from paceline.report.model import (
    NO_VALUE,
    Explanation,
    Group,
    Parity,
    Report,
    Sample,
    format_of,
    heading_of_metric,
    metric_in_text,
    metric_with_spread,
    metrics_in_order,
    number,
    percent,
    with_spread,
)


@dataclass(frozen=True)
class Table:
    """A table; rows in `strong` are highlighted."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: set[int] = field(default_factory=set)
    note: str = ""


@dataclass(frozen=True)
class Plots:
    """The names of plots that are shown side by side; Markdown omits them."""

    names: Sequence[str]


@dataclass(frozen=True)
class Images:
    """Sample images shown side by side, which can be enlarged."""

    samples: Sequence[Sample]
    small: bool = False


@dataclass(frozen=True)
class Commands:
    """Commands that the reader can copy, by the name of the run that they train."""

    commands: Mapping[str, str]


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    lines: Sequence[str]


Part: TypeAlias = str | Table | Plots | Images | Commands | Bullets  # a string is a paragraph of text


@dataclass(frozen=True)
class Section:
    """A titled section of a report."""

    title: str
    parts: Sequence[Part]
    folded: bool = False  # collapsed until the reader opens it


def make_sections(report: Report, summary: Sequence[str], plots: Sequence[str]) -> list[Section]:
    """Return the non-empty sections, from the summary to the settings."""
    curves = [name for name in plots if name.startswith(("quality", "loss"))]
    sections = [
        Section("Summary", summary),
        Section("Quality", _quality(report)),
        Section("Training curves", [Plots(curves)] if curves else []),
        Section("Samples", _samples(report)),
        Section("Speed", _speed(report, plots)),
        Section("Why not N×?", _scaling_costs(report)),
        Section("GPU", _gpu(report)),
        Section(PARITY, [part for name, parity in report.parity.items() for part in _parity(name, parity)]),
        Section("Every run", _runs(report)),
        Section("What was not measured and why", _not_measured(report)),
        Section("Settings, versions and hardware", _settings(report), folded=True),
    ]
    return [section for section in sections if section.parts]


def _quality(report: Report) -> list[Part]:
    groups, selection = report.groups, report.metric.name
    names = metrics_in_order((group.quality for group in groups.values()), report.metric.reported)
    if not names:
        return []
    several_seeds = len({group.n for group in groups.values()}) > 1
    # The label of a run that the user named does not contain the differences, so they need their own columns.
    differences = list(dict.fromkeys(name for group in groups.values() for name in group.differences))
    differences = differences if report.subject == RUN and len(groups) > 1 else []
    has_selection = selection not in names and any(group.selection_metric for group in groups.values())
    head = [report.subject, *differences, *(["seeds"] if several_seeds else []), *map(heading_of_metric, names)]
    head += [heading_of_metric(selection)] if has_selection else []
    rows = []
    for group in groups.values():
        row = [group.label, *(group.differences.get(name, NO_VALUE) for name in differences)]
        row += [str(group.n)] if several_seeds else []
        row += [metric_with_spread(name, group.quality.get(name)) for name in names]
        rows.append(row + ([metric_with_spread(selection, group.selection_metric)] if has_selection else []))
    best = _best_groups(report)
    notes = ["Mean ± sample standard deviation over the seeds."] if any(one.n > 1 for one in groups.values()) else []
    if selection:
        notes.append(f"Each run is evaluated at its checkpoint with the best {metric_in_text(selection)}.")
        notes += [f"Highlighted: the best {metric_in_text(selection)} of all rows."] if best else []
    else:
        notes.append("The recipe has no metric for selecting checkpoints, or its code was not loaded (see --trust).")
    return [Table(head, rows, {n for n, key in enumerate(groups) if key in best}, " ".join(notes))]


def _best_groups(report: Report) -> set[str]:
    """Return the groups whose selection metric, as displayed, equals the best; empty if all groups are equal."""
    means = {key: one.selection_metric.mean for key, one in report.groups.items() if one.selection_metric}
    if not means:
        return set()
    best = (max if report.metric.mode == "max" else min)(means.values())
    spec = format_of(report.metric.name, best)
    alike = {key for key, value in means.items() if f"{value:{spec}}" == f"{best:{spec}}"}
    return alike if len(alike) < len(report.groups) else set()


def _samples(report: Report) -> list[Part]:
    if not report.samples:
        return []
    inputs = "All rows use the same noise or the same input images. " if len(report.groups) > 1 else ""
    parts: list[Part] = [f"Samples from the end of training. {inputs}Click an image to enlarge it."]
    parts.append(Images(report.samples))
    for label, samples in report.progress.items():
        parts += [f"**Progress of {label}**, by the number of training images seen:", Images(samples, small=True)]
    return parts


def _speed(report: Report, plots: Sequence[str]) -> list[Part]:
    """Return the throughput and scaling of each group."""
    measured = {key: group for key, group in report.groups.items() if group.images_per_second}
    if not measured:
        return []
    scaled = any(group.scaling for group in measured.values())
    head = [report.subject, "images/s", "without loading", "seconds per run"]
    head += ["× one device", "efficiency"] if scaled else []
    rows = []
    for group in measured.values():
        spread = "" if group.speed_std is None else f" ± {group.speed_std:,.0f}"
        speed = f"{group.images_per_second.mean:,.0f}{spread}" if group.images_per_second else NO_VALUE
        row = [group.label, speed, with_spread(",.0f", group.images_per_second_without_loading)]
        row.append(with_spread(".1f", group.seconds))
        if scaled:
            scaling = group.scaling
            row += [f"{scaling.speedup:.2f}", percent(scaling.efficiency)] if scaling else [NO_VALUE, NO_VALUE]
        rows.append(row)
    strong = {n for n, key in enumerate(measured) if report.recommendation and key == report.recommendation.group}
    shown = [name for name in ("speed", "scaling") if name in plots]
    return [Table(head, rows, strong, _speed_note(list(measured.values()))), *([Plots(shown)] if shown else [])]


def _speed_note(groups: Sequence[Group]) -> str:
    kinds = {group.scaling.kind for group in groups if group.scaling}
    batches = {"strong": "the same global batch", "weak": "the same batch per device"}
    unsettled = ", ".join(group.label for group in groups if group.includes_warmup)
    notes = {
        "Training throughput across all devices. The first log interval after each start is left out, because it "
        "includes warm-up. ± is the standard deviation over seeds or, for a single seed, over log intervals. Seconds "
        "per run include evaluation and saving, but not start-up.": True,
        f"Speeds over a single log interval include warm-up, but not the time between steps: {unsettled}.": unsettled,
        "“× one device” is the speed relative to one device with "
        f"{' or '.join(batches[kind] for kind in sorted(kinds))}.": kinds,
        "Rows marked “on one GPU” run several processes on a single GPU. They show whether the results are equal, but "
        "not how fast several GPUs are.": any(group.shares_a_gpu for group in groups),
    }
    return " ".join(note for note, applies in notes.items() if applies)


def _scaling_costs(report: Report) -> list[Part]:
    """Return the step-time breakdown and largest cost for each group on several devices."""
    parts: list[Part] = []
    for key, costs in report.scaling_costs.items():
        parts += [_describe_largest_cost(report.groups[key], costs), _cost_table(costs)]
    note = (
        "All values are medians over blocks of steps, measured for each row in turn, separately from the runs but with "
        "the same number of processes. Each row adds one cost. Fractions are relative to the time per image in the "
        "last row. If a row is slower than a later row, the difference is noise."
    )
    return [*parts, note] if parts else []


def _describe_largest_cost(group: Group, costs: Explanation) -> str:
    if costs.largest_cost is None:
        return f"**{group.label}** scales without a measurable loss."
    share = next(rung.share for rung in costs.rungs if rung.name == costs.largest_cost)
    cost, remedy = COSTS[costs.largest_cost]
    in_runs = f" (during the runs: {percent(group.scaling.efficiency)}; see Speed)" if group.scaling else ""
    return (
        f"**{group.label}** reaches {percent(costs.efficiency)} of the ideal {costs.devices}× speedup in this "
        f"measurement{in_runs}. The largest cost accounts for {percent(share)} of the time: {cost}. "
        f"Best remedy: {remedy}. Without this cost, throughput would be {percent(costs.gain)} higher."
    )


def _cost_table(costs: Explanation) -> Table:
    ideal = f"{costs.devices} × the speed of one device{' with its slice of the batch' if costs.weak else ''}"
    rows = [[ideal, f"{costs.rungs[0].images_per_second:,.0f}", NO_VALUE]]
    for rung in costs.rungs[1:]:
        rows.append([COSTS[rung.name][0], f"{rung.images_per_second:,.0f}", percent(rung.share, 1)])
    return Table(["cost added to the step", "images/s", "fraction of time"], rows)


GPU_COLUMNS = {
    "utilisation": ("utilisation, %", ".0f"),
    "peak_memory_gib": ("peak memory, GiB", ".2f"),
    "power_watts": ("power, W", ".0f"),
    "joules_per_1000_images": ("energy, J per 1,000 images", ".1f"),
}


def _gpu(report: Report) -> list[Part]:
    """Return the NVML measurements."""
    groups = [group for group in report.groups.values() if group.gpu]
    columns = {name: column for name, column in GPU_COLUMNS.items() if any(name in group.gpu for group in groups)}
    rows = [
        [group.label, *(number(group.gpu.get(name), spec) for name, (_, spec) in columns.items())] for group in groups
    ]
    note = (
        "NVML measurements for the GPU of the first process, averaged over log intervals. "
        "Peak memory is measured by PyTorch. "
        "Energy is measured on one GPU and multiplied by the number of GPUs, assuming that all draw the same power."
    )
    return [Table([report.subject, *(heading for heading, _ in columns.values())], rows, note=note)] if rows else []


def _parity(recipe: str, parity: Parity) -> list[Part]:
    verb = "produces" if parity.holds else "does NOT produce"
    rows = []
    for one in parity.differences:
        difference = "not finite" if one["value"] is None else f"{one['value']:.1e}"
        worst = one["worst"] or NO_VALUE
        rows.append([one["strategy"], one["network"], one["kind"], difference, f"{one['tolerance']:.0e}", worst])
    head = ["strategy", "network", "tensors", "difference", "tolerance", "first tensor above the tolerance"]
    note = (
        "The difference is max |a − b| ÷ max |b| over all values in a network, where a is the value after training "
        "with this strategy, and b is the value after training on one device."
    )
    text = f"**{recipe}** {verb} the same weights under every strategy: {parity.description}."
    return [text, Table(head, rows, note=note)]


def _runs(report: Report) -> list[Part]:
    """Return one row per run, and the commands that repeat the runs."""
    groups = {folder: group for group in report.groups.values() for folder in group.runs}
    done = [(cell, cell.run) for cell in report.cells if cell.run is not None and cell.run.folder in groups]
    parts: list[Part] = []
    if done:
        names = metrics_in_order((run.quality for _, run in done), report.metric.reported)
        rows = []
        for cell, run in done:
            row = [cell.label or groups[run.folder].label, str(run.seed)]
            row += [number(run.quality.get(name), format_of(name, run.quality.get(name))) for name in names]
            row += [number(run.checkpoint, ",d"), number(run.speed.images_per_second if run.speed else None, ",.0f")]
            rows.append([*row, f"{run.seconds:.1f}"])
        head = [report.subject, "seed", *map(heading_of_metric, names), "checkpoint, images", "images/s", "seconds"]
        note = "“Checkpoint” is the number of training images after which the evaluated checkpoint was saved."
        parts.append(Table(head, rows, note=note))
    commands = {"all runs": report.command} if report.command else {}
    commands |= {cell.name: cell.command for cell in report.cells if cell.command}
    if commands:
        parts += ["Commands that repeat the runs. Click a command to select it, then copy it.", Commands(commands)]
    return parts


def _not_measured(report: Report) -> list[Part]:
    cells = [[cell.name, cell.state, cell.reason] for cell in report.cells if cell.state != "done"]
    lines = [f"{line[:1].upper()}{line[1:]}" for line in report.not_measured]
    return [*([Table(["run", "state", "reason"], cells)] if cells else []), *([Bullets(lines)] if lines else [])]


def _settings(report: Report) -> list[Part]:
    settings = [[name, str(value)] for name, value in report.settings.items()]
    return [
        Table(["versions and hardware", ""], [list(pair) for pair in report.provenance.items()]),
        Table(["settings common to all runs", ""], settings),
    ]
