"""The report as one HTML file: no scripts, no requests, light and dark, readable on a phone and on paper."""

from __future__ import annotations

import base64
import io
import re
from html import escape
from pathlib import Path

from PIL import Image

from paceline.core.types import Json, JsonObject
from paceline.report.document import Document
from paceline.report.model import Report, Sample
from paceline.report.parts import Images, Part, Plots, Section, Table
from paceline.report.phrases import fill, has_number, pieces
from paceline.report.plots import draw, legend, scaling_legend, time_legend
from paceline.report.svg import NUM_COLOURS

LARGEST_IMAGE_PX = 560
LONG_CELL = 28  # characters
STYLE = Path(__file__).with_name("page.css")


def to_html(document: Document) -> str:
    """Return the whole page."""
    body = [_header(document.report), *(_section(section, document) for section in document.sections)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(document.report.title)}</title>\n<style>\n{STYLE.read_text()}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _header(report: Report) -> str:
    facts = " · ".join(escape(part) for part in report.subtitle)
    return f'<header><p class="mark">Paceline</p><h1>{escape(report.title)}</h1><p class="facts">{facts}</p></header>'


def _section(section: Section, document: Document) -> str:
    name = re.sub(r"[^a-z]+", "-", section.title.lower()).strip("-")
    parts = "\n".join(_part(part, document) for part in section.parts)
    if section.folded:
        parts = f"<details><summary><h2>{escape(section.title)}</h2></summary>{parts}</details>"
        return f'<section id="{name}">{parts}</section>'
    return f'<section id="{name}"><h2>{escape(section.title)}</h2>\n{parts}</section>'


def _part(part: Part, document: Document) -> str:
    report = document.report
    if isinstance(part, Table):
        return _table(part, document.content)
    if isinstance(part, Plots):
        colours = time_legend(report) if part.names == ["time"] else legend(report)
        own = {"scaling": _legend(scaling_legend(report))} if "scaling" in part.names else {}
        figures = [f"<figure>{draw(name, report, document.content)}{own.get(name, '')}</figure>" for name in part.names]
        return f'{_legend(colours)}<div class="plots">{"".join(figures)}</div>'
    if isinstance(part, Images):
        shown = "".join(_image(sample) for sample in part.samples)
        return f'<div class="pictures">{shown}</div>'
    return f"<p>{_phrase(part, document.content)}</p>"


def _legend(colours: list[tuple[int, str]]) -> str:
    keys = "".join(f'<li class="c{number % NUM_COLOURS}">{escape(label)}</li>' for number, label in colours)
    return f'<ul class="legend">{keys}</ul>'


def _table(table: Table, content: JsonObject) -> str:
    head = "".join(f"<th>{escape(word)}</th>" for word in table.head)
    rows = []
    for number, row in enumerate(table.rows):
        cells = "".join(f"<td{_kind(cell)}>{_phrase(cell, content)}</td>" for cell in row)
        rows.append(f'<tr class="strong">{cells}</tr>' if number in table.strong else f"<tr>{cells}</tr>")
    note = f'<p class="note">{_phrase(table.note, content)}</p>' if table.note else ""
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>{note}'


def _kind(cell: str) -> str:
    """Return the class of long texts, which may break into lines; short ones and numbers may not."""
    return ' class="text"' if not has_number(cell) and len(cell) > LONG_CELL else ""


def _phrase(phrase: str, content: JsonObject) -> str:
    """Return the phrase as HTML; each number of the report keeps its path and its exact value."""

    def show(path: str, value: Json, text: str) -> str:
        place = escape(path, quote=True)
        return f'<data value="{escape(repr(value), quote=True)}" data-path="{place}">{escape(text)}</data>'

    made = []
    for piece in pieces(phrase):
        if has_number(piece):
            made.append(fill(piece, content, show))
        else:
            made.append(re.sub(r"`(.+?)`", r"<code>\1</code>", escape(piece)))
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", "".join(made))


def _image(sample: Sample) -> str:
    caption = escape(sample.caption, quote=True)
    try:
        with Image.open(sample.path) as image:
            image.thumbnail((LARGEST_IMAGE_PX, LARGEST_IMAGE_PX))
            png = io.BytesIO()
            image.save(png, format="png", optimize=True)
            width, height = image.size
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):  # what Pillow raises for broken files
        return f"<figure><figcaption>{caption}: the image {escape(sample.path)} cannot be read</figcaption></figure>"
    content = base64.b64encode(png.getvalue()).decode()
    return (
        f'<figure><img src="data:image/png;base64,{content}" width="{width}" height="{height}" alt="{caption}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )
