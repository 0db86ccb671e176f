"""The report as a single HTML file, and as Markdown."""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from paceline.core.text import printable
from paceline.core.types import Json, JsonObject
from paceline.images.decode import BadImage, decode
from paceline.report.document import Document
from paceline.report.model import Sample
from paceline.report.parts import Bullets, Command, Commands, Images, Note, Part, Plots, Table, fill, has_number, pieces
from paceline.report.plots import draw, legend_of


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


LARGEST_IMAGE_PX = 1024
LONG_CELL = 28  # text longer than this (in characters) may wrap in a table cell
TEMPLATES = Path(__file__).with_name("templates")


class EmbeddedImage(NamedTuple):
    """A sample image as a data URL."""

    url: str
    width: int
    height: int


def to_html(document: Document) -> str:
    """Return the report as an HTML page."""
    environment = _environment(document.content)
    return environment.get_template("report.html").render(
        report=document.report,
        sections=document.sections,
        draw=partial(draw, report=document.report, content=document.content),
        legend_of=partial(legend_of, report=document.report),
        next_id=_ids(),
    )


def _environment(content: JsonObject) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "phrase": partial(_phrase, content=content),
        "is_long": _is_long,
        "embedded": _embedded,
        "anchor": _anchor,
        "printable": printable,
    }
    environment.tests |= {
        "table": lambda part: isinstance(part, Table),
        "plots": lambda part: isinstance(part, Plots),
        "images": lambda part: isinstance(part, Images),
        "commands": lambda part: isinstance(part, Commands),
        "bullets": lambda part: isinstance(part, Bullets),
        "note": lambda part: isinstance(part, Note),
    }
    return environment


def _ids() -> Callable[[str], str]:
    """Return a function that returns a new HTML id at every call."""
    numbers = count(1)
    return lambda start: f"{start}-{next(numbers)}"


def _anchor(title: str) -> str:
    """Return a title or name as an HTML id."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _is_long(cell: str) -> bool:
    """Return whether a table cell may wrap: only long text without numbers may do so."""
    return not has_number(cell) and len(cell) > LONG_CELL


def _phrase(phrase: str, content: JsonObject) -> Markup:
    """Return a phrase as HTML; each number is marked with its path in report.json and its exact value."""

    def show(path: str, value: Json, text: str) -> str:
        return Markup('<data value="{}" data-path="{}">{}</data>').format(repr(value), path, text)

    made = []
    for piece in pieces(phrase):
        if has_number(piece):
            made.append(fill(piece, content, show))
        else:
            made.append(re.sub(r"`(.+?)`", r"<code>\1</code>", str(escape(piece))))
    return Markup(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", "".join(made)))


def _embedded(sample: Sample) -> EmbeddedImage | None:
    """Return a thumbnail of a sample image, or None if it cannot be read."""
    try:
        image = decode(Path(sample.path))
    except BadImage:
        return None
    image.thumbnail((LARGEST_IMAGE_PX, LARGEST_IMAGE_PX))
    png = io.BytesIO()
    image.save(png, format="png", optimize=True)
    width, height = image.size
    return EmbeddedImage(f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}", width, height)
