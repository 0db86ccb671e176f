"""The plots of a report."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from paceline.core.types import Json, JsonObject
from paceline.report.metric_names import metric_heading
from paceline.report.model import Group, Report, Scaling
from paceline.report.phrases import at, fill
from paceline.report.run import Curve, Run
from paceline.report.svg import Bar, Series, bars, lines
from paceline.report.time_split import PARTS

MAX_LOSSES = 2  # maximum number of loss terms to plot; more would add little
AXES = ("images", "seconds")


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
        return _scaling(report)
    if kind == "time":
        return _time(report, content)
    axis, _, loss = rest.partition("-")
    title = f"{loss or metric_heading(report.metric.name)} against {axis}"
    return lines(title, axis, "", _curves(report, loss, axis))


def legend_of(names: Sequence[str], report: Report) -> list[tuple[int, str]]:
    """Return the colours and labels of a legend: activities for the time plot, groups for all other plots."""
    if list(names) == ["time"]:
        present = {name for split in report.time_split.values() for name in split}
        return [(number, words) for number, (name, words) in enumerate(PARTS.items()) if name in present]
    return [(number, group.label) for number, group in enumerate(report.groups.values())]


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
        found = [_points(_curve(report.runs[run], loss), axis) for run in group.runs]
        curves = [points for points in found if points]
        drawn += [Series(group.label, points, number, thin=len(curves) > 1) for points in curves]
        if len(curves) > 1:
            drawn.append(Series(f"{group.label}, mean", _mean(curves), number))
    return drawn


def _curve(run: Run, loss: str) -> Curve:
    return run.losses[loss] if loss else run.selection_curve


def _points(curve: Curve, axis: str) -> list[tuple[float, float]]:
    return [(point.images if axis == "images" else point.seconds, point.value) for point in curve]


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
            rows.append(Bar(group.label, [("images/s", speed.mean, number)], total))
    return bars("Training speed, images/s", "images/s", rows, ",.0f")


def _scaling(report: Report) -> Markup:
    """Plot the speedup over one device against the number of devices, with the ideal line."""
    found = _scaling_lines(report)
    largest = max(x for _, points in found.values() for x, _ in points)
    ideal = Series("ideal", [(1.0, 1.0), (largest, largest)], 0, thin=True, dashed=True)
    series = [Series(name, sorted(points), colour, dots=True) for name, (colour, points) in found.items()]
    return lines("Speedup over one device (dashed: ideal)", "devices", "", [ideal, *series], zero=True)


def scaling_legend(report: Report) -> list[tuple[int, str]]:
    """Return the colour and label of each line in the scaling plot."""
    return [(colour, name) for name, (colour, _) in _scaling_lines(report).items()]


def _scaling_lines(report: Report) -> dict[str, tuple[int, list[tuple[float, float]]]]:
    """Return the colour and points of each line; a line joins groups that differ only in the number of devices."""
    found: dict[str, tuple[int, list[tuple[float, float]]]] = {}
    scaled = [
        (number, group, group.scaling)
        for number, group in enumerate(report.groups.values())
        if group.scaling is not None
    ]
    several_recipes = len({group.recipe for _, group, _ in scaled}) > 1
    several_batches = len({_batch_of_line(group, scaling) for _, group, scaling in scaled}) > 1
    for number, group, scaling in scaled:
        name = f"{group.recipe} {group.strategy}" if several_recipes else group.strategy
        name += f", {_batch_of_line(group, scaling)}" if several_batches else ""
        name += "".join(f", {extra}={value}" for extra, value in group.extras.items() if extra != "nnodes")
        name += " (on one GPU)" if group.shares_a_gpu else ""
        start = [(1.0, 1.0)] if group.devices > 1 else []
        _, points = found.setdefault(name, (number, start))
        points.append((float(group.devices), scaling.speedup))
    return found


def _batch_of_line(group: Group, scaling: Scaling) -> str:
    """Return the batch size that is constant along a line: global, or per device for weak scaling."""
    if scaling.kind == "strong":
        return f"batch {group.batch}"
    return f"batch {group.batch / group.devices:g} per device"


def _time(report: Report, content: JsonObject) -> Markup:
    rows = []
    for key, split in report.time_split.items():
        parts = [(words, split[name], number) for number, (name, words) in enumerate(PARTS.items()) if name in split]
        rows.append(Bar(report.groups[key].label, parts, _number(content, ".2f", "time_split", key, "total")))
    return bars("Seconds per epoch", "s", rows, ".3f")
