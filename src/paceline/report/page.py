"""The report as one HTML file: no script, no request, light and dark, readable on a phone and on paper."""

from __future__ import annotations

import base64
import io
import re
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from paceline.report.content import sections
from paceline.report.parts import Pictures, Plots, Section, Table
from paceline.report.phrases import fill, has_place, pieces
from paceline.report.plots import draw, legend, scaling_legend, time_legend
from paceline.report.svg import NUM_COLOURS

Report = dict[str, Any]
LARGEST_PICTURE_PX = 560
LONG_CELL = 28  # characters
STYLE = Path(__file__).with_name("page.css")


def to_html(report: Report) -> str:
    """The whole page."""
    body = [_header(report), *(_section(section, report) for section in sections(report))]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(report['title'])}</title>\n<style>\n{STYLE.read_text()}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _header(report: Report) -> str:
    facts = " · ".join(escape(fact) for fact in report["subtitle"])
    return (
        f'<header><p class="mark">Paceline</p><h1>{escape(report["title"])}</h1><p class="facts">{facts}</p></header>'
    )


def _section(section: Section, report: Report) -> str:
    name = re.sub(r"[^a-z]+", "-", section.title.lower()).strip("-")
    parts = "\n".join(_part(part, report) for part in section.parts)
    if section.title == "Settings, versions, hardware":
        parts = f"<details><summary><h2>{escape(section.title)}</h2></summary>{parts}</details>"
        return f'<section id="{name}">{parts}</section>'
    return f'<section id="{name}"><h2>{escape(section.title)}</h2>\n{parts}</section>'


def _part(part: str | Table | Plots | Pictures, report: Report) -> str:
    if isinstance(part, Table):
        return _table(part, report)
    if isinstance(part, Plots):
        colours = time_legend(report) if part.names == ["time"] else legend(report)
        own = {"scaling": _legend(scaling_legend(report))} if "scaling" in part.names else {}
        drawn = "".join(f"<figure>{draw(name, report)}{own.get(name, '')}</figure>" for name in part.names)
        return f'{_legend(colours)}<div class="plots">{drawn}</div>'
    if isinstance(part, Pictures):
        shown = "".join(_picture(caption, path) for caption, path in part.pictures)
        return f'<div class="pictures">{shown}</div>'
    return f"<p>{_phrase(part, report)}</p>"


def _legend(colours: list[tuple[int, str]]) -> str:
    keys = "".join(f'<li class="c{number % NUM_COLOURS}">{escape(label)}</li>' for number, label in colours)
    return f'<ul class="legend">{keys}</ul>'


def _table(table: Table, report: Report) -> str:
    head = "".join(f"<th>{escape(word)}</th>" for word in table.head)
    rows = []
    for number, row in enumerate(table.rows):
        cells = "".join(f"<td{_kind(cell)}>{_phrase(cell, report)}</td>" for cell in row)
        rows.append(f'<tr class="strong">{cells}</tr>' if number in table.strong else f"<tr>{cells}</tr>")
    note = f'<p class="note">{_phrase(table.note, report)}</p>' if table.note else ""
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>{note}'


def _kind(cell: str) -> str:
    """Long words may break into lines, short ones and numbers may not."""
    return ' class="text"' if not has_place(cell) and len(cell) > LONG_CELL else ""


def _phrase(phrase: str, report: Report) -> str:
    """The phrase as HTML; each number of the report keeps its place and its exact value."""

    def show(path: str, value: Any, text: str) -> str:
        place = escape(path, quote=True)
        return f'<data value="{escape(repr(value), quote=True)}" data-path="{place}">{escape(text)}</data>'

    made = []
    for piece in pieces(phrase):
        if has_place(piece):
            made.append(fill(piece, report, show))
        else:
            words = re.sub(r"`(.+?)`", r"<code>\1</code>", escape(piece))
            made.append(words)
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", "".join(made))


def _picture(caption: str, path: str) -> str:
    said = escape(caption, quote=True)
    try:
        with Image.open(path) as picture:
            picture.thumbnail((LARGEST_PICTURE_PX, LARGEST_PICTURE_PX))
            kept = io.BytesIO()
            picture.save(kept, format="png", optimize=True)
            width, height = picture.size
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):  # what Pillow says of broken files
        return f"<figure><figcaption>{said}: the picture {escape(path)} cannot be read</figcaption></figure>"
    content = base64.b64encode(kept.getvalue()).decode()
    return (
        f'<figure><img src="data:image/png;base64,{content}" width="{width}" height="{height}" alt="{said}">'
        f"<figcaption>{said}</figcaption></figure>"
    )
