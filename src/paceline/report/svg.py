"""Small SVG plots: lines, bars and stacked bars. Colours and fonts come from the page's light or dark style."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from paceline.report.axes import short, ticks

WIDTH, HEIGHT = 460, 290
LEFT, RIGHT, TOP, BOTTOM = 66, 16, 32, 44
NUM_COLOURS = 8
MAX_MARKED = 24  # curves with at most this many points have a visible dot at every point
DASH_PX = 8  # dash length of curves that coincide
NEUTRAL = "neutral"  # CSS class of lines that belong to no group

Points = Sequence[tuple[float, float]]


class Series(NamedTuple):
    """One line in a plot; `colour` is a CSS class."""

    label: str
    points: Points
    colour: str
    thin: bool = False
    dashed: bool = False
    dots: Sequence[tuple[str, str]] = ()  # label and colour of each point, if they differ along the line


class Axis(NamedTuple):
    """The name of an axis, the unit in tooltips, and the tick values (default: round values)."""

    name: str
    unit: str = ""
    ticks: Sequence[float] = ()
    from_zero: bool = False


class Bar(NamedTuple):
    """A stacked bar of (name, value, CSS class) parts; `total` is the text shown at its end."""

    label: str
    parts: Sequence[tuple[str, float, str]]
    total: Markup


def group_colour(place: int) -> str:
    """Return the CSS class for the group at this position; the palette repeats after its last colour."""
    return f"c{place % NUM_COLOURS}"


def activity_colour(place: int) -> str:
    """Return the CSS class for an activity. No activity has the colour of a group."""
    return f"t{place % NUM_COLOURS}"


def lines(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> Markup:
    """Return a line plot as SVG, without a legend, which the page adds."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return Markup()
    xs = [place for one in drawn for place, _ in one.points]
    ys = [place for one in drawn for _, place in one.points]
    x_ticks = list(x.ticks) or ticks(0 if x.from_zero or min(xs) >= 0 else min(xs), max(xs))
    y_ticks = list(y.ticks) or ticks(0 if y.from_zero else min(ys), max(ys))
    to_x = _scale(min(x_ticks[0], min(xs)), max(xs), LEFT, WIDTH - RIGHT)
    to_y = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    paths = [[(to_x(a), to_y(b)) for a, b in one.points] for one in drawn]
    alike = _coinciding(paths, [one.thin for one in drawn])
    body = [_frame(title, x.name, y.name, x_ticks, y_ticks, to_x, to_y)]
    for number, (one, path) in enumerate(zip(drawn, paths, strict=True)):
        places = alike[number]
        body.append(_line(one, path, len(places), places.index(number)))
    # The dots come last, so that no line covers them and their tooltips.
    body += [_dots(one, path, x.unit or x.name, y.unit) for one, path in zip(drawn, paths, strict=True)]
    sets = list(dict.fromkeys(tuple(places) for places in alike if len(places) > 1))
    body.append(_coincidence_note([[drawn[n].label for n in places] for places in sets]))
    return _svg(title, body)


def _coinciding(paths: Sequence[Points], thin: Sequence[bool]) -> list[list[int]]:
    """Return, for each path, the indices of all paths that look the same: equally thick and at most a pixel apart."""

    def same(one: Points, other: Points) -> bool:
        if len(one) != len(other) or len(one) < 2:
            return False
        return all(abs(a - c) < 1 and abs(b - d) < 1 for (a, b), (c, d) in zip(one, other, strict=True))

    return [
        [n for n, other in enumerate(paths) if n == number or (thin[n] == thin[number] and same(path, other))]
        for number, path in enumerate(paths)
    ]


def _line(one: Series, path: Points, num_alike: int, place: int) -> str:
    """Return a line; lines that coincide have dashes of different phases, so that all of them are visible."""
    kind = " ".join(["line", one.colour, *(["thin"] if one.thin else []), *(["dashed"] if one.dashed else [])])
    moves = " ".join(f"{'L' if n else 'M'}{a:.1f} {b:.1f}" for n, (a, b) in enumerate(path))
    phase = ""
    if num_alike > 1 and place:  # the first line is drawn in full, so that there are no gaps
        phase = f' stroke-dasharray="{DASH_PX} {DASH_PX * (num_alike - 1)}" stroke-dashoffset="{-DASH_PX * place}"'
    return f'<path class="{kind}" d="{moves}"{phase}/>'


def _dots(one: Series, path: Points, x_unit: str, y_unit: str) -> str:
    """Return a dot with a tooltip at every point; the dots of long or thin lines are invisible until hovered over."""
    if one.dashed:
        return ""
    visible = not one.thin and len(path) <= MAX_MARKED
    made = []
    for number, ((a, b), (x, y)) in enumerate(zip(path, one.points, strict=True)):
        label, colour = one.dots[number] if one.dots else (one.label, one.colour)
        kind = "dot" if visible or (number == len(path) - 1 and not one.thin) else "dot hidden"
        text = f"{escape(label)}: {y:.4g}{escape(y_unit)} at {_whole_if_large(x)} {escape(x_unit)}"
        made.append(f'<circle class="{kind} {colour}" cx="{a:.1f}" cy="{b:.1f}" r="3.2"><title>{text}</title></circle>')
    return "".join(made)


def _whole_if_large(value: float) -> str:
    """Return a number from 100,000 on as a whole number, such as 3,000,064, and a smaller one with five digits."""
    return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:,.5g}"


def _coincidence_note(sets: Sequence[Sequence[str]]) -> str:
    """Return a note about curves that coincide, with their names as a tooltip."""
    if not sets:
        return ""
    names = escape("; ".join(", ".join(labels) for labels in sets))
    words = f"{len(sets[0])} curves coincide" if len(sets) == 1 else f"{len(sets)} sets of curves coincide"
    return f'<text class="tick" x="8" y="{HEIGHT - 6}">{words} (alternating colours)<title>{names}</title></text>'


def bars(title: str, axis: str, unit: str, rows: Sequence[Bar], spec: str) -> Markup:
    """Return a horizontal bar chart as SVG."""
    if not rows:
        return Markup()
    bar, gap = 18, 24
    height = TOP + len(rows) * (bar + gap) + 44
    largest = max(sum(value for _, value, _ in row.parts) for row in rows) or 1.0
    marks = ticks(0, largest)
    to_x = _scale(0, marks[-1], 8, WIDTH - 60)
    body = [f'<text class="title" x="8" y="16">{escape(title)}</text>']
    for mark in marks:
        x = to_x(mark)
        anchor = "start" if mark == marks[0] else "middle"
        body.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{height - 40}"/>')
        body.append(f'<text class="tick" x="{x:.1f}" y="{height - 26}" text-anchor="{anchor}">{short(mark)}</text>')
    end = to_x(marks[-1])
    body.append(f'<text class="tick" x="{end:.1f}" y="{height - 8}" text-anchor="end">{escape(axis)}</text>')
    for number, (label, parts, total) in enumerate(rows):
        top = TOP + number * (bar + gap) + 14
        body.append(f'<text class="name" x="8" y="{top - 4}">{escape(label)}</text>')
        start = 0.0
        for name, value, colour in parts:
            x, width = to_x(start), to_x(start + value) - to_x(start)
            text = f"{escape(label)}, {escape(name)}: {value:{spec}} {escape(unit)}"
            body.append(f'<rect class="bar {colour}" x="{x:.1f}" y="{top}" width="{max(width, 0.5):.1f}"')
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
    """Return the title, the grid and the labelled axes."""
    parts = [f'<text class="title" x="8" y="16">{escape(title)}</text>']
    for y in y_ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{to_y(y):.1f}" x2="{WIDTH - RIGHT}" y2="{to_y(y):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{to_y(y) + 4:.1f}" text-anchor="end">{short(y)}</text>')
    for x in x_ticks:
        if to_x(x) <= WIDTH - RIGHT + 1:
            parts.append(f'<text class="tick" x="{to_x(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">')
            parts.append(f"{short(x)}</text>")
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(x_name)}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 14 {middle:.0f})"'
    parts.append(f'<text class="tick" x="14" y="{middle:.0f}" text-anchor="middle" {turned}>{escape(y_name)}</text>')
    return "".join(parts)


def _svg(title: str, body: list[str], height: int = HEIGHT) -> Markup:
    opening = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
    return Markup(opening + "".join(body) + "</svg>")
