"""The report as Markdown: the words and tables of the page, without its plots and pictures."""

from __future__ import annotations

from typing import Any

from paceline.report.content import sections
from paceline.report.parts import Pictures, Plots, Table
from paceline.report.phrases import fill

Report = dict[str, Any]


def to_markdown(report: Report) -> str:
    """The whole report; report.html beside it has the plots."""
    made = [f"# {report['title']}", " · ".join(report["subtitle"])]
    for section in sections(report):
        parts = [_part(part, report) for part in section.parts]
        if any(parts):
            made += [f"## {section.title}", *filter(None, parts)]
    return "\n\n".join(made) + "\n"


def _part(part: str | Table | Plots | Pictures, report: Report) -> str:
    if isinstance(part, Table):
        return _table(part, report)
    if isinstance(part, Plots | Pictures):
        return ""
    return fill(part, report)


def _table(table: Table, report: Report) -> str:
    rows = [[_cell(fill(cell, report)) for cell in row] for row in table.rows]
    rows = [[f"**{cell}**" for cell in row] if n in table.strong else row for n, row in enumerate(rows)]
    lines = [_row(table.head), _row(["---"] * len(table.head)), *map(_row, rows)]
    return "\n".join(lines) + (f"\n\n{fill(table.note, report)}" if table.note else "")


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
