"""The report as Markdown: text, tables and images, without plots."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from paceline.core.printable import printable
from paceline.core.types import JsonObject
from paceline.report.document import Document
from paceline.report.model import Sample
from paceline.report.parts import Bullets, Command, Commands, Images, Note, Part, Plots, Table
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
    if isinstance(part, Commands):
        return "\n\n".join(_command(one) for one in part.commands)
    if isinstance(part, Bullets):
        return "\n".join(f"- {_plain(fill(line, content))}" for line in part.lines)
    if isinstance(part, Note):
        return _plain(fill(part.text, content))
    return "" if isinstance(part, Plots) else _plain(fill(part, content))


def _command(command: Command) -> str:
    """Return a command as a code block, with a fence that the command does not contain."""
    fence = "`" * (3 + max((len(found) for found in re.findall("`+", command.words)), default=0))
    return f"{_plain(command.name)}:\n\n{fence}bash\n{printable(command.words)}\n{fence}"


def _image(sample: Sample, folder: Path) -> str:
    """Return an image's caption and a link to the image, relative to the folder."""
    words = _plain(sample.caption.translate({ord(sign): f"\\{sign}" for sign in "[]*_"}))
    return f"{words}:\n\n![{words}]({quote(os.path.relpath(sample.path, folder))})"


def _table(table: Table, content: JsonObject) -> str:
    rows = [[_cell(fill(cell, content)) for cell in row] for row in table.rows]
    rows = [[f"**{cell}**" for cell in row] if n in table.strong else row for n, row in enumerate(rows)]
    ruler = ["---:" if number in table.numeric else "---" for number in range(len(table.head))]
    lines = [_row([_cell(title) for title in table.head]), _row(ruler), *map(_row, rows)]
    return "\n".join(lines) + (f"\n\n{_plain(fill(table.note, content))}" if table.note else "")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|").replace("\n", " ")


def _plain(text: str) -> str:
    """Escape text that Markdown would render as HTML, a link or an image."""
    return text.replace("<", "&lt;").replace("](", "]\\(")
