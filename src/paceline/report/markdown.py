"""The report as Markdown: text, tables and images, without plots."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from paceline.core.types import JsonObject
from paceline.report.document import Document
from paceline.report.model import Sample
from paceline.report.parts import Images, Part, Plots, Table
from paceline.report.phrases import fill


def to_markdown(document: Document, folder: Path) -> str:
    """Return the report as Markdown without plots, with image links relative to `folder`."""
    made = [f"# {_plain(document.report.title)}", _plain(" · ".join(document.report.subtitle))]
    for section in document.sections:
        parts = [_part(part, document.content, folder) for part in section.parts]
        if any(parts):
            made += [f"## {section.title}", *filter(None, parts)]
    return "\n\n".join(made) + "\n"


def _part(part: Part, content: JsonObject, folder: Path) -> str:
    if isinstance(part, Table):
        return _table(part, content)
    if isinstance(part, Images):
        return "\n\n".join(_image(sample, folder) for sample in part.samples)
    return "" if isinstance(part, Plots) else _plain(fill(part, content))


def _image(sample: Sample, folder: Path) -> str:
    """Return an image's caption and a link to the image, relative to the folder."""
    words = _plain(sample.caption.translate({ord(sign): f"\\{sign}" for sign in "[]*_"}))
    return f"{words}:\n\n![{words}]({quote(os.path.relpath(sample.path, folder))})"


def _table(table: Table, content: JsonObject) -> str:
    rows = [[_cell(fill(cell, content)) for cell in row] for row in table.rows]
    rows = [[f"**{cell}**" for cell in row] if n in table.strong else row for n, row in enumerate(rows)]
    lines = [_row([_cell(title) for title in table.head]), _row(["---"] * len(table.head)), *map(_row, rows)]
    return "\n".join(lines) + (f"\n\n{_plain(fill(table.note, content))}" if table.note else "")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|").replace("\n", " ")


def _plain(text: str) -> str:
    """Escape text that Markdown would render as HTML, a link or an image."""
    return text.replace("<", "&lt;").replace("](", "]\\(")
