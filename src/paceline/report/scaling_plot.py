"""The plot of the speedup over one device against the number of devices."""

from __future__ import annotations

from typing import NamedTuple

from markupsafe import Markup

from paceline.report.axes import whole_ticks
from paceline.report.model import Group, Report, Scaling
from paceline.report.svg import NEUTRAL, Axis, Series, group_colour, lines


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
