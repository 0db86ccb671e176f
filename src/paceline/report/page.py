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
from paceline.images.decode import BadImage, decode
from paceline.report.content import Bullets, Commands, Images, Part, Plots, Section, Table
from paceline.report.model import NO_VALUE, Report, Sample
from paceline.report.plots import draw, legend_of

_NUMBER = re.compile(r"-?[\d.,]+(e[-+]?\d+)?×?(\s%)?( ± [\d.,]+)?|" + NO_VALUE)


def numeric_columns(table: Table) -> set[int]:
    """Return the columns that contain numbers, which are right-aligned."""
    columns = zip(*table.rows, strict=True)
    return {n for n, cells in enumerate(columns) if all(map(_NUMBER.fullmatch, cells)) and set(cells) != {NO_VALUE}}


def to_markdown(report: Report, sections: Sequence[Section], folder: Path) -> str:
    """Return the report as Markdown without plots, with image links relative to `folder`."""
    blocks = [f"# {_plain(report.title)}", _plain(" · ".join(report.subtitle))]
    for section in sections:
        parts = [_part(part, folder) for part in section.parts]
        if any(parts):
            blocks += [f"## {section.title}", *filter(None, parts)]
    return "\n\n".join(blocks) + "\n"


def _part(part: Part, folder: Path) -> str:
    match part:
        case Table():
            return _table(part)
        case Images():
            return "\n\n".join(_image(sample, folder) for sample in part.samples)
        case Commands():
            return "\n\n".join(f"{_plain(name)}:\n\n{_code(text)}" for name, text in part.commands.items())
        case Bullets():
            return "\n".join(f"- {_plain(line)}" for line in part.lines)
        case Plots():
            return ""
        case str():
            return _plain(part)


def _code(text: str) -> str:
    """Return a code block, with a fence that the text does not contain."""
    fence = "`" * (3 + max((len(found) for found in re.findall("`+", text)), default=0))
    return f"{fence}\n{printable(text)}\n{fence}"


def _image(sample: Sample, folder: Path) -> str:
    """Return an image's caption and a link to the image, relative to the folder."""
    words = _plain(sample.caption.translate({ord(sign): f"\\{sign}" for sign in "[]*_"}))
    return f"{words}:\n\n![{words}]({quote(os.path.relpath(sample.path, folder))})"


def _table(table: Table) -> str:
    rows = [[_cell(cell) for cell in row] for row in table.rows]
    rows = [[f"**{cell}**" for cell in row] if n in table.strong else row for n, row in enumerate(rows)]
    numeric = numeric_columns(table)
    ruler = ["---:" if number in numeric else "---" for number in range(len(table.head))]
    lines = [f"| {' | '.join(row)} |" for row in ([_cell(title) for title in table.head], ruler, *rows)]
    return "\n".join(lines) + (f"\n\n{_plain(table.note)}" if table.note else "")


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


def to_html(report: Report, sections: Sequence[Section]) -> str:
    """Return the report as an HTML page."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "rich": _with_markup,
        "numeric": numeric_columns,
        "embedded": _embedded,
        "anchor": lambda title: re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-"),
        "printable": printable,
    }
    environment.tests |= {kind.__name__.lower(): _test_for(kind) for kind in (Table, Plots, Images, Commands, Bullets)}
    return environment.get_template("report.html").render(
        report=report,
        sections=sections,
        draw=partial(draw, report=report),
        legend_of=partial(legend_of, report=report),
        ids=count(1),
        long_cell=LONG_CELL,
    )


def _test_for(kind: type[Part]) -> Callable[[Part], bool]:
    return lambda part: isinstance(part, kind)


def _with_markup(text: str) -> Markup:
    """Return text as HTML, with `code` and **strong text**."""
    code = re.sub(r"`(.+?)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", code))


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
