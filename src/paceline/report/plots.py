"""The plots of a report."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from paceline.core.types import Json, JsonObject
from paceline.report.advice import is_share
from paceline.report.metric_names import metric_in_text, metric_unit
from paceline.report.model import Group, Report
from paceline.report.phrases import at, fill
from paceline.report.run import Curve, Point, Run
from paceline.report.scaling_plot import draw_scaling
from paceline.report.svg import Axis, Bar, Series, activity_colour, bars, group_colour, lines
from paceline.report.time_split import PARTS

MAX_LOSSES = 2  # maximum number of loss terms to plot; more would add little
MAX_POINTS = 120  # maximum number of points per curve in a plot
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


def draw(name: str, report: Report, content: JsonObject) -> Markup:
    """Return one plot as SVG."""
    kind, _, rest = name.partition("-")
    if kind == "speed":
        return _speed(report, content)
    if kind == "scaling":
        return draw_scaling(report)
    if kind == "time":
        return _time(report, content)
    axis, _, loss = rest.partition("-")
    metric = report.metric.name
    what = loss or metric_in_text(metric)
    unit = "" if loss or not is_share(metric) else " %"
    y_axis = Axis("loss" if loss else metric_unit(metric), unit)
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
        found = [(run, _points(_curve(run, loss), axis, group)) for run in runs]
        curves = {run.seed: points for run, points in found if points}
        colour, several = group_colour(number), len(curves) > 1
        drawn += [
            Series(f"{group.label}, seed {seed}" if several else group.label, points, colour, thin=several)
            for seed, points in curves.items()
        ]
        if several:
            drawn.append(Series(f"{group.label}, mean", _mean(list(curves.values())), colour))
    return drawn


def _curve(run: Run, loss: str) -> Curve:
    curve = run.losses[loss] if loss else run.selection_curve
    step = -(-len(curve) // MAX_POINTS) or 1
    return curve[::-1][::step][::-1]


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


def _number(content: JsonObject, spec: str, *path: str) -> Markup:
    """Return a number from report.json as SVG text that is marked with its path."""

    def show(place: str, value: Json, text: str) -> str:
        return Markup('<tspan data-path="{}" data-value="{}">{}</tspan>').format(place, repr(value), text)

    return Markup(fill(at(spec, *path), content, show))


def _speed(report: Report, content: JsonObject) -> Markup:
    rows = []
    for number, (key, group) in enumerate(report.groups.items()):
        if speed := group.images_per_second:
            total = _number(content, ",.0f", "groups", key, "images_per_second", "mean")
            rows.append(Bar(group.label, [("speed", speed.mean, group_colour(number))], total))
    return bars("Training speed", "images per second", "images/s", rows, ",.0f")


def _time(report: Report, content: JsonObject) -> Markup:
    rows = []
    for key, split in report.time_split.items():
        parts = [
            (words, split[name], activity_colour(number))
            for number, (name, words) in enumerate(PARTS.items())
            if name in split
        ]
        rows.append(Bar(report.groups[key].label, parts, _number(content, ".2f", "time_split", key, "total")))
    return bars("Time per epoch", "seconds", "s", rows, ".3f")
