"""The report as Markdown: the words, tables and pictures of the page, without its plots."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from paceline.report.content import sections
from paceline.report.parts import Pictures, Plots, Table
from paceline.report.phrases import fill

Report = dict[str, Any]


def to_markdown(report: Report, folder: Path) -> str:
    """The whole report, to lie in a folder; report.html beside it has the plots."""
    made = [f"# {report['title']}", " · ".join(report["subtitle"])]
    for section in sections(report):
        parts = [_part(part, report, folder) for part in section.parts]
        if any(parts):
            made += [f"## {section.title}", *filter(None, parts)]
    return "\n\n".join(made) + "\n"


def _part(part: str | Table | Plots | Pictures, report: Report, folder: Path) -> str:
    if isinstance(part, Table):
        return _table(part, report)
    if isinstance(part, Pictures):
        return "\n\n".join(_picture(caption, path, folder) for caption, path in part.pictures)
    return "" if isinstance(part, Plots) else fill(part, report)


def _picture(caption: str, path: str, folder: Path) -> str:
    """A picture where it lies, as seen from the folder, under its caption."""
    words = caption.translate({ord(sign): f"\\{sign}" for sign in "[]*_"})
    return f"{words}:\n\n![{words}]({quote(os.path.relpath(path, folder))})"


def _table(table: Table, report: Report) -> str:
    rows = [[_cell(fill(cell, report)) for cell in row] for row in table.rows]
    rows = [[f"**{cell}**" for cell in row] if n in table.strong else row for n, row in enumerate(rows)]
    lines = [_row(table.head), _row(["---"] * len(table.head)), *map(_row, rows)]
    return "\n".join(lines) + (f"\n\n{fill(table.note, report)}" if table.note else "")


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
