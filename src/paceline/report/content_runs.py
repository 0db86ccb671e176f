"""The section that lists every run, with the command that repeats it."""

from __future__ import annotations

from paceline.report.metric_names import format_for, metric_heading, metrics_in_order
from paceline.report.model import Report, Summary
from paceline.report.parts import Command, Commands, Part, Section, Table
from paceline.report.phrases import NO_VALUE, at
from paceline.report.run import Run

WHOLE_COMPARISON = "all runs"


def runs_section(report: Report) -> Section:
    """Return the section with one row per run, and the commands that repeat the runs."""
    groups = {folder: group for group in report.groups.values() for folder in group.runs}
    done = [(cell, cell.run) for cell in report.cells if cell.run is not None and cell.run.folder in groups]
    names = metrics_in_order((run.quality for _, run in done), report.metric.reported)
    commands = [Command(WHOLE_COMPARISON, report.command)] if report.command else []
    parts: list[Part] = []
    if done:
        alone = not all(run.side_by_side for _, run in done)
        head = [report.subject, "seed", *map(metric_heading, names), "checkpoint, images"]
        head += ["images/s", "seconds"] if alone else ["seconds"]
        rows = [
            [groups[run.folder].label if not cell.label else cell.label, *_row(run, names, alone)] for cell, run in done
        ]
        parts.append(Table(head, rows, note=_note(report), anchors=[cell.name for cell, _ in done]))
    commands += [Command(cell.name, cell.command) for cell in report.cells if cell.command]
    if commands:
        parts += ["Commands that repeat the runs. Click a command to select it, then copy it.", Commands(commands)]
    return Section("Every run", parts)


def _row(run: Run, names: list[str], alone: bool) -> list[str]:
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
        at(",d", *where, "selection_metric", "images") if run.selection_metric else NO_VALUE,
        *([speed] if alone else []),
        at(".1f", *where, "seconds"),
    ]


def _note(report: Report) -> str:
    note = "“Checkpoint” is the number of training images after which the evaluated checkpoint was saved."
    if any(run.side_by_side for run in report.runs.values()):
        note += (
            " The seconds include the time lost to other runs that were trained at the same time. "
            "“Speed” shows speeds that were measured separately."
        )
    return note
