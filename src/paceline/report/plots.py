"""The plots of a report, as small SVG images: curves and horizontal bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from markupsafe import Markup, escape

from paceline.report.model import Curve, Report, is_share, metric_in_text

NUM_TICKS = 5  # approximately
WIDTH, HEIGHT = 460, 290
LEFT, RIGHT, TOP, BOTTOM = 66, 16, 32, 44
BAR, GAP = 18, 24  # heights
NUM_COLOURS = 8
LINE_WIDTH, NESTED_PX, MAX_WIDTH = 2.2, 2.4, 9.4
MAX_MARKED = 24  # curves with at most this many points have a dot at every point, and others only at the last one
MAX_LOSSES = 2  # maximum number of loss terms to plot; more would add little
AXES = {"images": "training images", "seconds": "training time, s"}
OVER = {"images": "over training images", "seconds": "over time"}

Points = Sequence[tuple[float, float]]
Place = Callable[[float], float]  # maps a value to its coordinate in the plot


class Series(NamedTuple):
    """One line in a plot; `colour` is a CSS class."""

    label: str
    points: Points
    colour: str
    thin: bool = False


class Bar(NamedTuple):
    """A bar, its CSS class, and the text shown at its end."""

    label: str
    value: float
    colour: str
    text: str


def ticks(low: float, high: float) -> list[float]:
    """Return round tick values that cover a range."""
    if not math.isfinite(low) or not math.isfinite(high) or high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / (NUM_TICKS - 1)
    size = 10 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= raw * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _short(value: float) -> str:
    """Return a short label for a tick, such as 20k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 10 or (abs(value) >= size and value % (size / 10) == 0):
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _colour(number: int) -> str:
    """Return the CSS class of a group; the palette repeats after its last colour."""
    return f"c{number % NUM_COLOURS}"


def lines(title: str, x_name: str, y_name: str, series: Sequence[Series]) -> Markup:
    """Return a line plot as SVG, without a legend, which the page adds.

    Earlier lines are wider than later ones, so that lines that coincide are all visible.
    """
    drawn = [one for one in series if one.points]
    if not drawn:
        return Markup()
    xs, ys = zip(*(point for one in drawn for point in one.points), strict=True)
    x_ticks, y_ticks = ticks(min(0, *xs), max(xs)), ticks(min(ys), max(ys))
    to_x = _scale(x_ticks[0], max(xs), LEFT, WIDTH - RIGHT)
    to_y = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    body = [_text("title", 8, 16, title)]
    for y in y_ticks:
        body.append(f'<line class="grid" x1="{LEFT}" y1="{to_y(y):.1f}" x2="{WIDTH - RIGHT}" y2="{to_y(y):.1f}"/>')
        body.append(_text("tick", LEFT - 6, to_y(y) + 4, _short(y), "end"))
    body += [
        _text("tick", to_x(x), HEIGHT - BOTTOM + 16, _short(x), "middle")
        for x in x_ticks
        if to_x(x) <= WIDTH - RIGHT + 1
    ]
    middle = (TOP + HEIGHT - BOTTOM) / 2
    body.append(_text("tick", WIDTH - RIGHT, HEIGHT - 6, x_name, "end"))
    body.append(_text("tick", 14, middle, y_name, "middle", f' transform="rotate(-90 14 {middle:.0f})"'))
    thick = [one for one in drawn if not one.thin]
    for one in drawn:
        path = [(to_x(x), to_y(y)) for x, y in one.points]
        moves = " ".join(f"{'L' if n else 'M'}{a:.1f} {b:.1f}" for n, (a, b) in enumerate(path))
        width = 1.0 if one.thin else min(LINE_WIDTH + NESTED_PX * (len(thick) - 1 - thick.index(one)), MAX_WIDTH)
        kind = f"line {one.colour}{' thin' * one.thin}"
        body.append(f'<path class="{kind}" style="stroke-width:{width:.1f}" d="{moves}"/>')
    # The dots come last, so that no line covers them and their tooltips.
    for one in thick:
        for x, y in one.points if len(one.points) <= MAX_MARKED else one.points[-1:]:
            text = f"{escape(one.label)}: {y:.4g} at {round(x, 2):,.10g} {escape(x_name)}"
            centre = f'cx="{to_x(x):.1f}" cy="{to_y(y):.1f}"'
            body.append(f'<circle class="dot {one.colour}" {centre} r="3.2"><title>{text}</title></circle>')
    return _svg(title, body)


def bars(title: str, axis: str, rows: Sequence[Bar]) -> Markup:
    """Return a horizontal bar chart as SVG."""
    height = TOP + len(rows) * (BAR + GAP) + 44
    marks = ticks(0, max(row.value for row in rows))
    to_x = _scale(0, marks[-1], 12, WIDTH - 60)
    body = [_text("title", 8, 16, title), _text("tick", to_x(marks[-1]), height - 8, axis, "end")]
    for mark in marks:
        x = to_x(mark)
        body.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{height - 40}"/>')
        body.append(_text("tick", x, height - 26, _short(mark), "middle"))
    for number, (label, value, colour, text) in enumerate(rows):
        top, end = TOP + number * (BAR + GAP) + 14, to_x(value)
        body.append(_text("name", 8, top - 4, label))
        box = f'x="12" y="{top}" width="{max(end - 12, 0.5):.1f}" height="{BAR}"'
        body += [f'<rect class="bar {colour}" {box}/>', _text("value", end + 5, top + 13, text)]
    return _svg(title, body, height)


def _scale(low: float, high: float, start: float, end: float) -> Place:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _text(kind: str, x: float, y: float, text: str, anchor: str = "start", more: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def _svg(title: str, body: list[str], height: int = HEIGHT) -> Markup:
    opening = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
    return Markup(opening + "".join(body) + "</svg>")


def plot_names(report: Report) -> list[str]:
    """Return the names of the plots for which the report has data."""
    names = []
    if any(run.selection_curve for run in report.runs.values()):
        names += [f"quality-{axis}" for axis in AXES]
    names += [f"loss-{axis}-{name}" for name in _losses(report) for axis in AXES]
    if any(group.images_per_second for group in report.groups.values()):
        names.append("speed")
    if any(group.scaling and group.devices > 1 for group in report.groups.values()):
        names.append("scaling")
    return names


def draw(name: str, report: Report) -> Markup:
    """Return one plot as SVG."""
    kind, _, rest = name.partition("-")
    groups = [(group, _colour(number)) for number, group in enumerate(report.groups.values())]
    if kind == "speed":
        speeds = [(group.label, colour, group.images_per_second) for group, colour in groups]
        rows = [Bar(label, s.mean, colour, f"{s.mean:,.0f}") for label, colour, s in speeds if s]
        return bars("Training speed", "images per second", rows)
    if kind == "scaling":
        rows = [
            Bar(group.label, one.speedup, colour, f"{one.speedup:.2f}×")
            for group, colour in groups
            if (one := group.scaling)
        ]
        return bars("Speedup over one device", "speedup", rows)
    axis, _, loss = rest.partition("-")
    what = loss or metric_in_text(report.metric.name)
    unit = "loss" if loss else "%" if is_share(report.metric.name) else what.partition(" ")[2]
    return lines(f"{what} {OVER[axis]}", AXES[axis], unit, _curves(report, loss, axis))


def legend_of(names: Sequence[str], report: Report) -> list[tuple[str, str]]:
    """Return the colours and labels of a legend: the groups for curves, none for bars."""
    if "speed" in names:
        return []  # each bar has its label
    return [(_colour(number), group.label) for number, group in enumerate(report.groups.values())]


def _losses(report: Report) -> list[str]:
    """Return the first loss of each network, at most MAX_LOSSES in total; skip losses that some runs lack."""
    runs = list(report.runs.values())
    firsts: dict[str, str] = {}
    for name in runs[0].losses if runs else ():
        if all(name in run.losses for run in runs):
            firsts.setdefault(name.split("/")[0], name)
    return list(firsts.values())[:MAX_LOSSES]


def _curves(report: Report, loss: str, axis: str) -> list[Series]:
    """Return a thin line per seed and a thick line for their mean, or one thick line for a single seed."""
    series = []
    for number, group in enumerate(report.groups.values()):
        runs = [report.runs[folder] for folder in group.runs]
        curves = {run.seed: _points(run.losses[loss] if loss else run.selection_curve, axis) for run in runs}
        curves = {seed: points for seed, points in curves.items() if points}
        colour, several = _colour(number), len(curves) > 1
        series += [
            Series(f"{group.label}, seed {seed}" if several else group.label, points, colour, thin=several)
            for seed, points in curves.items()
        ]
        if several:  # the pointwise mean, up to the length of the shortest curve
            columns = zip(*curves.values(), strict=False)
            mean = [(fmean(x for x, _ in points), fmean(y for _, y in points)) for points in columns]
            series.append(Series(f"{group.label}, mean", mean, colour))
    return series


def _points(curve: Curve, axis: str) -> list[tuple[float, float]]:
    return [(point.images if axis == "images" else point.seconds, point.value) for point in curve]
