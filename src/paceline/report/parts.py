"""The building blocks of a report in HTML and Markdown: sections that contain phrases, tables, plots and images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from paceline.report.model import Sample


@dataclass(frozen=True)
class Table:
    """A table whose cells are phrases; rows in `strong` are highlighted."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: set[int] = field(default_factory=set)
    note: str = ""


@dataclass(frozen=True)
class Plots:
    """The names of plots that are shown side by side; Markdown omits them."""

    names: Sequence[str]


@dataclass(frozen=True)
class Images:
    """Sample images shown side by side."""

    samples: Sequence[Sample]


Part: TypeAlias = str | Table | Plots | Images  # a string is a paragraph of text


@dataclass(frozen=True)
class Section:
    """A titled section of a report."""

    title: str
    parts: Sequence[Part]
    folded: bool = False  # collapsed until the reader opens it
