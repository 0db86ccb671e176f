"""Plots of metrics during training as SVG files, for benchmarks that train GANs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from markupsafe import escape

from paceline.core.files import write_file
from paceline.report.plots import HEIGHT, WIDTH, Axis, Points, Series, group_colour, lines

ROW_PX = 18  # height of a row of the legend
# Reports use dashes only for lines that belong to no group, which are grey.
DASHES_IN_COLOUR = ".line.dashed { stroke: var(--own); } .line.thin { opacity: .55; }"


class Group(NamedTuple):
    """The curves of runs that differ only in their seeds."""

    label: str
    curves: Sequence[Points]
    colour: int
    dashed: bool = False


def draw(path: Path, title: str, x: Axis, y: Axis, groups: Sequence[Group]) -> None:
    """Draw curves as an SVG file: a line per seed, and a thick line for the mean of several seeds."""
    series, drawn = [], sorted((group for group in groups if any(group.curves)), key=lambda group: group.colour)
    for group in drawn:
        colour, has_mean = group_colour(group.colour), len(group.curves) > 1
        series += [Series(group.label, curve, colour, has_mean, group.dashed) for curve in group.curves]
        if has_mean:
            series.append(Series(f"{group.label}, mean", mean_of(group.curves), colour, dashed=group.dashed))
    if series:
        write_file(path, _standalone(str(lines(title, x, y, series)), drawn))


def mean_of(curves: Sequence[Points]) -> Points:
    """Return the mean of curves, as far as the shortest one goes."""
    return [(at[0][0], sum(value for _, value in at) / len(at)) for at in zip(*curves, strict=False)]


def _standalone(svg: str, groups: Sequence[Group]) -> str:
    """Return a plot of a report as a file of its own, with its style and a legend below it."""
    style = files("paceline.report").joinpath("templates/report.css").read_text() + DASHES_IN_COLOUR
    legend = ""
    for number, group in enumerate(groups):
        x, y = 8 + WIDTH // 2 * (number % 2), HEIGHT + ROW_PX // 2 + ROW_PX * (number // 2)
        kind = f"line {group_colour(group.colour)}{' dashed' if group.dashed else ''}"
        seeds = f" ({len(group.curves)} seeds)" if len(group.curves) > 1 else ""
        legend += f'<path class="{kind}" d="M{x} {y}h24"/>'
        legend += f'<text class="tick" x="{x + 30}" y="{y + 4}">{escape(group.label + seeds)}</text>'
    height = HEIGHT + ROW_PX * ((len(groups) + 1) // 2) + 8
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{2 * WIDTH}"'
    _, _, rest = svg.partition(">")
    paper = f'<rect width="{WIDTH}" height="{height}" style="fill: var(--card)"/>'
    body = rest.removesuffix("</svg>")
    return f'{opening} style="font-family: system-ui, sans-serif"><style>{style}</style>{paper}{body}{legend}</svg>\n'
