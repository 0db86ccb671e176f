"""The plots of a report, as small SVG images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

from paceline.report.content import PARTS
from paceline.report.model import Curve, Group, Point, Report, Scaling
from paceline.report.wording import is_share, metric_in_text

NUM_TICKS = 5  # approximately
MAX_WHOLE_TICKS = 8


def ticks(low: float, high: float) -> list[float]:
    """Return round tick values that cover a range."""
    if not math.isfinite(low) or not math.isfinite(high) or high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / (NUM_TICKS - 1)
    size = 10 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= raw * 0.999)
    first = math.floor(low / step)
    last = math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def whole_ticks(values: Sequence[float]) -> list[float]:
    """Return ticks for whole numbers, such as device counts: the values themselves if there are only a few."""
    own = sorted(set(values))
    if len(own) <= MAX_WHOLE_TICKS:
        return own
    return [tick for tick in ticks(own[0], own[-1]) if tick == round(tick)]


def short(value: float) -> str:
    """Return a short label for a tick, such as 20k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 10 or (abs(value) >= size and value % (size / 10) == 0):
            return f"{value / size:g}{letter}"
    return f"{value:g}"


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
    total: str


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
    body = [_frame(title, x.name, y.name, x_ticks, y_ticks, to_x, to_y)]
    coinciding: dict[object, list[int]] = {}  # lines that look the same: equally thick, with the same pixels
    for number, (one, path) in enumerate(zip(drawn, paths, strict=True)):
        pixels = tuple((round(a), round(b)) for a, b in path) if len(path) > 1 else number
        coinciding.setdefault((one.thin, pixels), []).append(number)
    for alike in coinciding.values():
        body += [_line(drawn[number], paths[number], len(alike), place) for place, number in enumerate(alike)]
    # The dots come last, so that no line covers them and their tooltips.
    body += [_dots(one, path, x.unit or x.name, y.unit) for one, path in zip(drawn, paths, strict=True)]
    if sets := [", ".join(drawn[n].label for n in alike) for alike in coinciding.values() if len(alike) > 1]:
        note = f"curves that coincide have alternating colours<title>{escape('; '.join(sets))}</title>"
        body.append(f'<text class="tick" x="8" y="{HEIGHT - 6}">{note}</text>')
    return _svg(title, body)


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


def bars(title: str, axis: str, unit: str, rows: Sequence[Bar], spec: str) -> Markup:
    """Return a horizontal bar chart as SVG."""
    if not rows:
        return Markup()
    bar, gap = 18, 24
    height = TOP + len(rows) * (bar + gap) + 44
    largest = max(sum(value for _, value, _ in row.parts) for row in rows) or 1.0
    marks = ticks(0, largest)
    to_x = _scale(0, marks[-1], 12, WIDTH - 60)
    body = [f'<text class="title" x="8" y="16">{escape(title)}</text>']
    for mark in marks:
        x = to_x(mark)
        body.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{height - 40}"/>')
        body.append(f'<text class="tick" x="{x:.1f}" y="{height - 26}" text-anchor="middle">{short(mark)}</text>')
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


class _Spot(NamedTuple):
    """A group's place in the plot."""

    devices: float
    speedup: float
    label: str
    colour: str


def draw_scaling(report: Report) -> Markup:
    """Return the plot: a grey line joins groups that differ only in devices, and each dot has its group's colour."""
    found = [sorted(spots) for spots in _lines(report).values()]
    devices = [spot.devices for spots in found for spot in spots]
    ideal = Series("ideal", [(1.0, 1.0), (max(devices), max(devices))], NEUTRAL, thin=True, dashed=True)
    series = [
        Series(
            spots[-1].label,
            [(spot.devices, spot.speedup) for spot in spots],
            NEUTRAL,
            dots=[(spot.label, spot.colour) for spot in spots],
        )
        for spots in found
    ]
    x_axis = Axis("number of devices", "devices", whole_ticks([1.0, *devices]))
    y_axis = Axis("speedup", "×", from_zero=True)
    return lines("Speedup over one device (dashed: ideal)", x_axis, y_axis, [ideal, *series])


def _lines(report: Report) -> dict[tuple[str, ...], list[_Spot]]:
    """Return the points of each line; all groups on a line differ only in their number of devices."""
    places = {key: number for number, key in enumerate(report.groups)}
    found: dict[tuple[str, ...], list[_Spot]] = {}
    for key, group in report.groups.items():
        scaling = group.scaling
        if scaling is None:
            continue
        baseline = report.groups[scaling.baseline]
        start = [_Spot(1.0, 1.0, baseline.label, group_colour(places[scaling.baseline]))]
        spots = found.setdefault(_line_key(group, scaling), start if group.devices > 1 else [])
        spots.append(_Spot(float(group.devices), scaling.speedup, group.label, group_colour(places[key])))
    return found


def _line_key(group: Group, scaling: Scaling) -> tuple[str, ...]:
    """Return what is constant along a line: for weak scaling, the batch per device instead of the global batch."""
    batch = f"{group.batch}" if scaling.kind == "strong" else f"{group.batch / group.devices:g}/device"
    extras = [f"{name}={value}" for name, value in group.extras.items() if name != "nnodes"]
    return (group.recipe, group.strategy, batch, str(group.shares_a_gpu), *extras)


MAX_LOSSES = 2  # maximum number of loss terms to plot; more would add little
AXES = {"images": Axis("training images", "images"), "seconds": Axis("training time, s", "s")}
OVER = {"images": "over training images", "seconds": "over time"}


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
    if report.time_split:
        names.append("time")
    return names


def draw(name: str, report: Report) -> Markup:
    """Return one plot as SVG."""
    kind, _, rest = name.partition("-")
    if kind == "speed":
        return _speed(report)
    if kind == "scaling":
        return draw_scaling(report)
    if kind == "time":
        return _time(report)
    axis, _, loss = rest.partition("-")
    metric = report.metric.name
    what = loss or metric_in_text(metric)
    unit = "" if loss or not is_share(metric) else " %"
    y_axis = Axis("loss" if loss else "%" if is_share(metric) else what.partition(" ")[2], unit)
    return lines(f"{what} {OVER[axis]}", AXES[axis], y_axis, _curves(report, loss, axis))


def legend_of(names: Sequence[str], report: Report) -> list[tuple[str, str]]:
    """Return the colours and labels of a legend: activities for the time plot, groups for plots with curves."""
    if list(names) == ["time"]:
        present = {name for split in report.time_split.values() for name in split}
        return [(activity_colour(n), words) for n, (name, words) in enumerate(PARTS.items()) if name in present]
    if list(names) == ["speed"]:
        return []  # each bar has its label
    return [(group_colour(number), group.label) for number, group in enumerate(report.groups.values())]


def _losses(report: Report) -> list[str]:
    """Return the first loss of each network, at most MAX_LOSSES in total; skip losses that some runs lack."""
    runs = list(report.runs.values())
    common = [name for name in (runs[0].losses if runs else {}) if all(name in run.losses for run in runs)]
    firsts: dict[str, str] = {}
    for name in common:
        firsts.setdefault(name.split("/")[0], name)
    return list(firsts.values())[:MAX_LOSSES]


def _curves(report: Report, loss: str, axis: str) -> list[Series]:
    """Return a thin line per seed and a thick line for their mean, or one thick line for a single seed."""
    drawn = []
    for number, group in enumerate(report.groups.values()):
        runs = [report.runs[folder] for folder in group.runs]
        found = [(run, _points(run.losses[loss] if loss else run.selection_curve, axis, group)) for run in runs]
        curves = {run.seed: points for run, points in found if points}
        colour, several = group_colour(number), len(curves) > 1
        drawn += [
            Series(f"{group.label}, seed {seed}" if several else group.label, points, colour, thin=several)
            for seed, points in curves.items()
        ]
        if several:
            drawn.append(Series(f"{group.label}, mean", _mean(list(curves.values())), colour))
    return drawn


def _points(curve: Curve, axis: str, group: Group) -> list[tuple[float, float]]:
    """Return the points of a curve. If runs were trained side by side, the time is computed from the measured speed."""
    speed = group.images_per_second

    def place(point: Point) -> float:
        if axis == "images":
            return point.images
        return point.images / speed.mean if group.side_by_side and speed else point.seconds

    return [(place(point), point.value) for point in curve]


def _mean(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return the pointwise mean of curves, up to the length of the shortest."""
    return [
        (sum(x for x, _ in points) / len(curves), sum(y for _, y in points) / len(curves))
        for points in zip(*curves, strict=False)
    ]


def _speed(report: Report) -> Markup:
    rows = []
    for number, group in enumerate(report.groups.values()):
        if speed := group.images_per_second:
            rows.append(Bar(group.label, [("speed", speed.mean, group_colour(number))], f"{speed.mean:,.0f}"))
    return bars("Training speed", "images per second", "images/s", rows, ",.0f")


def _time(report: Report) -> Markup:
    rows = []
    for key, split in report.time_split.items():
        parts = [
            (words, split[name], activity_colour(number))
            for number, (name, words) in enumerate(PARTS.items())
            if name in split
        ]
        rows.append(Bar(report.groups[key].label, parts, f"{split['total']:.2f}"))
    return bars("Time per epoch", "seconds", "s", rows, ".3f")
