"""The section that lists every run, with the command that repeats it."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.report.metric_names import evaluated_images, format_for, metric_heading, metric_in_text, metrics_in_order
from paceline.report.model import Report, Summary
from paceline.report.parts import Command, Commands, Part, Section, Table
from paceline.report.phrases import NO_VALUE, at
from paceline.report.run import Checkpoint, Run

WHOLE_COMPARISON = "all runs"
TEST_IMAGES = "test images"


def runs_section(report: Report) -> Section:
    """Return the section with one row per run, and the commands that repeat the runs."""
    groups = {folder: group for group in report.groups.values() for folder in group.runs}
    done = [(cell, cell.run) for cell in report.cells if cell.run is not None and cell.run.folder in groups]
    names = metrics_in_order((run.quality for _, run in done), report.metric.reported)
    commands = [Command(WHOLE_COMPARISON, report.command)] if report.command else []
    parts: list[Part] = []
    if done:
        alone = not all(run.side_by_side for _, run in done)
        head = [report.subject, "seed", *map(metric_heading, names), "checkpoint", "saved after, images"]
        head += [*_counted(report), *(["images/s"] if alone else []), "seconds"]
        rows = [
            [cell.label or groups[run.folder].label, *_row(run, names, _counted(report), alone)] for cell, run in done
        ]
        parts.append(Table(head, rows, note=_note(report), anchors=[cell.name for cell, _ in done]))
    commands += [Command(cell.name, cell.command) for cell in report.cells if cell.command]
    if commands:
        parts += ["Commands that repeat the runs. Click a command to select it, then copy it.", Commands(commands)]
    return Section("Every run", parts)


def _counted(report: Report) -> list[str]:
    """Return the headings of the columns with the number of evaluated images."""
    runs = report.runs.values()
    selected = any(run.selection_metric and run.selection_metric.num_evaluated for run in runs)
    tested = any(run.checkpoint and run.checkpoint.num_tested for run in runs)
    generated = any(run.selection_metric and run.selection_metric.num_real for run in runs)
    evaluated = "generated images" if generated else evaluated_images(report.metric.name)
    return [*([evaluated] if selected else []), *([TEST_IMAGES] if tested else [])]


def command_names(report: Report, keys: Iterable[str]) -> list[str]:
    """Return the name of the command that repeats the first run of each group; empty if it has no command."""
    names = {cell.run.folder: cell.name for cell in report.cells if cell.run is not None and cell.command}
    return [names.get(report.groups[key].runs[0], "") for key in keys]


def _row(run: Run, names: list[str], counted: list[str], alone: bool) -> list[str]:
    where = ("runs", run.folder)
    values = []
    for name in names:
        value = run.quality.get(name)
        summary = None if value is None else Summary(value, None, 1, [value])
        values.append(NO_VALUE if value is None else at(format_for(name, summary), *where, "quality", name))
    speed = at(",.0f", *where, "speed", "images_per_second") if run.speed and not run.side_by_side else NO_VALUE
    return [
        at("d", *where, "seed"),
        *values,
        kind_of(run.checkpoint),
        at(",d", *where, "checkpoint", "images") if run.checkpoint else NO_VALUE,
        *(_count(run, heading) for heading in counted),
        *([speed] if alone else []),
        at(".1f", *where, "seconds"),
    ]


def kind_of(checkpoint: Checkpoint | None) -> str:
    """Return which checkpoint of a run was evaluated: the best, the last, or one that is both."""
    if checkpoint is None:
        return NO_VALUE
    words = [word for word, holds in (("best", checkpoint.is_best), ("last", checkpoint.is_last)) if holds]
    return " and ".join(words) or "earlier"


def _count(run: Run, heading: str) -> str:
    """Return the number of images in the split given by a column heading."""
    where = ("runs", run.folder)
    if heading == TEST_IMAGES:
        tested = run.checkpoint is not None and run.checkpoint.num_tested
        return at(",.0f", *where, "checkpoint", "num_tested") if tested else NO_VALUE
    evaluated = run.selection_metric is not None and run.selection_metric.num_evaluated
    return at(",.0f", *where, "selection_metric", "num_evaluated") if evaluated else NO_VALUE


def _note(report: Report) -> str:
    note = "“Checkpoint” shows which checkpoint was evaluated: the best, the last, or one that is both."
    if report.metric.name:
        note += f" The best checkpoint has the best {metric_in_text(report.metric.name)}."
    if counted := _counted(report):
        columns = " and ".join(f"“{heading}”" for heading in counted)
        which = f"The column {columns} shows" if len(counted) == 1 else f"The columns {columns} show"
        note += f" {which} how many images the metrics are computed on."
    if any(run.side_by_side for run in report.runs.values()):
        note += (
            " The seconds include the time lost to other runs that were trained at the same time. "
            "The section “Speed” shows speeds that were measured separately."
        )
    return note
