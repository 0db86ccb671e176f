"""Which plots a report has, drawn from its numbers."""

from __future__ import annotations

from html import escape
from typing import Any

from paceline.report.content_speed import SPLIT_WORDS
from paceline.report.metric_words import metric_words
from paceline.report.phrases import at, fill
from paceline.report.svg import Bar, Series, bars, lines

Report = dict[str, Any]
MAX_LOSSES = 2  # plots of loss terms; more say little more
AXES = ((0, "images"), (1, "seconds"))


def plot_names(report: Report) -> list[str]:
    """The names of the plots that the numbers are enough for."""
    names = []
    if any(run["course"] for run in report["runs"].values()):
        names += ["quality-images", "quality-seconds"]
    names += [f"loss-{axis}-{name}" for name in _losses(report) for _, axis in AXES]
    if any(group["images_per_second"] for group in report["groups"].values()):
        names.append("speed")
    if any(group["scaling"] and group["devices"] > 1 for group in report["groups"].values()):
        names.append("scaling")
    if report["time"]:
        names.append("time")
    return names


def draw(name: str, report: Report) -> str:
    """One plot as SVG."""
    kind, _, rest = name.partition("-")
    if kind == "speed":
        return _speed(report)
    if kind == "scaling":
        return _scaling(report)
    if kind == "time":
        return _time(report)
    if kind == "quality":
        axis = dict((word, number) for number, word in AXES)[rest]
        title = f"{metric_words(report['metric']['name'])} against {rest}"
        return lines(title, rest, "", _curves(report, "", axis))
    axis_name, _, loss = rest.partition("-")
    axis = dict((word, number) for number, word in AXES)[axis_name]
    return lines(f"{loss} against {axis_name}", axis_name, "", _curves(report, loss, axis))


def legend(report: Report) -> list[tuple[int, str]]:
    """The colour of each group."""
    return [(number, group["label"]) for number, group in enumerate(report["groups"].values())]


def _losses(report: Report) -> list[str]:
    """The first loss of the first networks that every run has."""
    runs = list(report["runs"].values())
    common = [name for name in (runs[0]["losses"] if runs else {}) if all(name in run["losses"] for run in runs)]
    firsts: dict[str, str] = {}
    for name in common:
        firsts.setdefault(name.split("/")[0], name)
    return list(firsts.values())[:MAX_LOSSES]


def _curves(report: Report, loss: str, axis: int) -> list[Series]:
    """A thin line for each seed, and a thick one for their mean; of one seed, a thick one."""
    drawn = []
    for number, group in enumerate(report["groups"].values()):
        curves = [
            report["runs"][run]["losses"][loss] if loss else report["runs"][run]["course"] for run in group["runs"]
        ]
        curves = [curve for curve in curves if curve]
        one = len(curves) == 1
        for curve in curves:
            points = [(point[axis], point[2]) for point in curve]
            drawn.append(Series(group["label"], points, number, thin=not one))
        shortest = min((len(curve) for curve in curves), default=0)
        if not one and shortest:
            mean = [
                (sum(c[i][axis] for c in curves) / len(curves), sum(c[i][2] for c in curves) / len(curves))
                for i in range(shortest)
            ]
            drawn.append(Series(f"{group['label']}, mean", mean, number))
    return drawn


def _number(report: Report, spec: str, *path: str) -> str:
    """A number of the report in a plot, with its place."""

    def show(place: str, value: Any, text: str) -> str:
        return f'<tspan data-path="{escape(place, quote=True)}" data-value="{value!r}">{text}</tspan>'

    return fill(at(spec, *path), report, show)


def _speed(report: Report) -> str:
    rows = []
    for number, (key, group) in enumerate(report["groups"].items()):
        if speed := group["images_per_second"]:
            total = _number(report, ",.0f", "groups", key, "images_per_second", "mean")
            rows.append(Bar(group["label"], [("images/s", speed["mean"], number)], total))
    return bars("Training speed, images/s", "images/s", rows, ",.0f")


def _scaling(report: Report) -> str:
    """Speed against one device by number of devices, and the line that nothing can cross for long."""
    found = _scaling_lines(report)
    largest = max(x for _, points in found.values() for x, _ in points)
    ideal = Series("ideal", [(1.0, 1.0), (largest, largest)], 0, thin=True, dashed=True)
    series = [Series(name, sorted(points), colour, dots=True) for name, (colour, points) in found.items()]
    return lines("× one device (dashed: ideal)", "devices", "", [ideal, *series], zero=True)


def scaling_legend(report: Report) -> list[tuple[int, str]]:
    """The colour of each line of the scaling plot."""
    return [(colour, name) for name, (colour, _) in _scaling_lines(report).items()]


def _scaling_lines(report: Report) -> dict[str, tuple[int, list[tuple[float, float]]]]:
    """One line for all that differs in the number of devices alone, by a name: its first group's colour, its points."""
    numbered = [(number, group) for number, group in enumerate(report["groups"].values()) if group["scaling"]]
    groups = [group for _, group in numbered]
    several = {name: len({group[name] for group in groups}) > 1 for name in ("recipe", "shares_a_gpu")}
    batches = {_batch_of_line(group) for group in groups}
    found: dict[str, tuple[int, list[tuple[float, float]]]] = {}
    for number, group in numbered:
        words = [group["recipe"]] if several["recipe"] else []
        name = " ".join([*words, group["strategy"]])
        name += f", {_batch_of_line(group)}" if len(batches) > 1 else ""
        name += "".join(f", {extra}={value}" for extra, value in group["extras"].items() if extra != "nnodes")
        name += " (on one GPU)" if group["shares_a_gpu"] else ""
        start = [(1.0, 1.0)] if group["devices"] > 1 else []
        _, points = found.setdefault(name, (number, start))
        points.append((float(group["devices"]), group["scaling"]["speedup"]))
    return found


def _batch_of_line(group: dict[str, Any]) -> str:
    """What stays the same along a line: the batch, or with weak scaling the batch per device."""
    if group["scaling"]["kind"] == "strong":
        return f"batch {group['batch']}"
    return f"batch {group['batch'] / group['devices']:g} per device"


def _time(report: Report) -> str:
    order = list(SPLIT_WORDS)
    rows = []
    for key, split in report["time"].items():
        parts = [(SPLIT_WORDS[name], split[name], order.index(name)) for name in order if split.get(name) is not None]
        rows.append(Bar(report["groups"][key]["label"], parts, _number(report, ".2f", "time", key, "total")))
    return bars("Seconds an epoch", "s", rows, ".3f")


def time_legend(report: Report) -> list[tuple[int, str]]:
    """The colour of each part of an epoch."""
    present = {name for split in report["time"].values() for name in split}
    return [(number, words) for number, (name, words) in enumerate(SPLIT_WORDS.items()) if name in present]
