"""The building blocks of a report in HTML and Markdown: sections that contain phrases, tables, plots and images."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from paceline.report.model import Sample
from paceline.report.phrases import NO_VALUE, has_number


@dataclass(frozen=True)
class Table:
    """A table whose cells are phrases; rows in `strong` are highlighted."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: set[int] = field(default_factory=set)
    note: str = ""
    anchors: Sequence[str] = ()  # for each row, the name of the command that its first cell links to; may be empty

    @property
    def numeric(self) -> set[int]:
        """The columns that contain numbers, which are right-aligned."""
        columns = zip(*self.rows, strict=True)
        return {n for n, cells in enumerate(columns) if all(map(_is_number, cells)) and set(cells) != {NO_VALUE}}


@dataclass(frozen=True)
class Plots:
    """The names of plots that are shown side by side; Markdown omits them."""

    names: Sequence[str]


@dataclass(frozen=True)
class Images:
    """Sample images shown side by side, which can be enlarged."""

    samples: Sequence[Sample]
    small: bool = False


@dataclass(frozen=True)
class Command:
    """A command that the reader can copy, and the name of the run that it trains."""

    name: str
    words: str


@dataclass(frozen=True)
class Commands:
    """A list of commands."""

    commands: Sequence[Command]


@dataclass(frozen=True)
class Bullets:
    """A list of phrases."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Note:
    """A phrase in small print that explains the tables above it."""

    text: str


Part: TypeAlias = str | Table | Plots | Images | Commands | Bullets | Note  # a string is a paragraph of text


def _is_number(cell: str) -> bool:
    return has_number(cell) or cell == NO_VALUE or re.fullmatch(r"-?[\d.,]+(e[-+]?\d+)?", cell) is not None


@dataclass(frozen=True)
class Section:
    """A titled section of a report."""

    title: str
    parts: Sequence[Part]
    folded: bool = False  # collapsed until the reader opens it
