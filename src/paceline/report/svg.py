"""Small SVG plots: lines, bars and stacked bars. Colours and fonts come from the page's light or dark style."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

WIDTH, HEIGHT = 460, 290
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 30, 40
NUM_COLOURS = 8


class Series(NamedTuple):
    """One line in a plot; `colour` is an index into the page's palette."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: int
    thin: bool = False
    dashed: bool = False
    dots: bool = False


def colour_class(place: int) -> str:
    """Return the CSS class for a palette index; the palette repeats after its last colour."""
    return f"c{place % NUM_COLOURS}"


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return round tick values that cover a range."""
    if not math.isfinite(low) or not math.isfinite(high) or high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / max(1, wanted - 1)
    size = 10 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= raw * 0.999)
    first = math.floor(low / step)
    last = math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def short(value: float) -> str:
    """Return a short label for a tick, such as 20k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 10 or (abs(value) >= size and value % (size / 10) == 0):
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def lines(title: str, x_name: str, y_name: str, series: Sequence[Series], zero: bool = False) -> Markup:
    """Return a line plot as SVG, without a legend, which the page adds."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return Markup()
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points]
    x_ticks = ticks(0 if min(xs) >= 0 else min(xs), max(xs))
    y_ticks = ticks(0 if zero else min(ys), max(ys))
    to_x = _scale(x_ticks[0], max(x_ticks[-1], max(xs)), LEFT, WIDTH - RIGHT)
    to_y = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    body = [_frame(title, x_name, y_name, x_ticks, y_ticks, to_x, to_y)]
    for one in drawn:
        kind = " ".join(["line", colour_class(one.colour), *(["thin"] if one.thin else [])])
        kind += " dashed" if one.dashed else ""
        path = " ".join(f"{'L' if n else 'M'}{to_x(x):.1f} {to_y(y):.1f}" for n, (x, y) in enumerate(one.points))
        body.append(f'<path class="{kind}" d="{path}"/>')
        marked = one.points if one.dots or len(one.points) == 1 else [] if one.thin else one.points[-1:]
        for x, y in marked:
            text = f"{escape(one.label)}: {y:.5g} at {x:,.5g}"
            body.append(
                f'<circle class="dot {colour_class(one.colour)}" cx="{to_x(x):.1f}" cy="{to_y(y):.1f}" r="3.2">'
            )
            body.append(f"<title>{text}</title></circle>")
    return _svg(title, body)


class Bar(NamedTuple):
    """A stacked bar of (name, value, colour) parts; `total` is the text shown at its end."""

    label: str
    parts: Sequence[tuple[str, float, int]]
    total: Markup


def bars(title: str, unit: str, rows: Sequence[Bar], spec: str) -> Markup:
    """Return a horizontal bar chart as SVG."""
    if not rows:
        return Markup()
    bar, gap = 18, 24
    height = TOP + len(rows) * (bar + gap) + 26
    largest = max(sum(value for _, value, _ in row.parts) for row in rows) or 1.0
    marks = ticks(0, largest)
    to_x = _scale(0, marks[-1], 8, WIDTH - 60)
    body = [f'<text class="title" x="8" y="16">{escape(title)}</text>']
    for mark in marks:
        x = to_x(mark)
        body.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{height - 22}"/>')
        body.append(f'<text class="tick" x="{x:.1f}" y="{height - 8}" text-anchor="middle">{short(mark)}</text>')
    for number, (label, parts, total) in enumerate(rows):
        top = TOP + number * (bar + gap) + 14
        body.append(f'<text class="name" x="8" y="{top - 4}">{escape(label)}</text>')
        start = 0.0
        for name, value, colour in parts:
            x, width = to_x(start), to_x(start + value) - to_x(start)
            text = f"{escape(label)}, {escape(name)}: {value:{spec}} {escape(unit)}"
            body.append(f'<rect class="bar {colour_class(colour)}" x="{x:.1f}" y="{top}" width="{max(width, 0.5):.1f}"')
            body.append(f' height="{bar}"><title>{text}</title></rect>')
            start += value
        body.append(f'<text class="value" x="{to_x(start) + 5:.1f}" y="{top + 13}">{total}</text>')
    return _svg(title, body, height)


Place = Callable[[float], float]  # maps a value to its coordinate in the plot


def _scale(low: float, high: float, start: float, end: float) -> Place:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _frame(
    title: str, x_name: str, y_name: str, x_ticks: list[float], y_ticks: list[float], to_x: Place, to_y: Place
) -> str:
    parts = [f'<text class="title" x="8" y="16">{escape(title)}</text>']
    for y in y_ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{to_y(y):.1f}" x2="{WIDTH - RIGHT}" y2="{to_y(y):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{to_y(y) + 4:.1f}" text-anchor="end">{short(y)}</text>')
    for x in x_ticks:
        if to_x(x) <= WIDTH - RIGHT + 1:
            parts.append(f'<text class="tick" x="{to_x(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">')
            parts.append(f"{short(x)}</text>")
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(x_name)}</text>')
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="16" text-anchor="end">{escape(y_name)}</text>')
    return "".join(parts)


def _svg(title: str, body: list[str], height: int = HEIGHT) -> Markup:
    opening = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
    return Markup(opening + "".join(body) + "</svg>")
