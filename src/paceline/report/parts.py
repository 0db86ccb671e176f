"""What a report consists of, in HTML and in Markdown: sections of phrases, tables, plots and images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from paceline.report.model import Sample


@dataclass(frozen=True)
class Table:
    """Cells are phrases; `strong` rows are highlighted."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: set[int] = field(default_factory=set)
    note: str = ""


@dataclass(frozen=True)
class Plots:
    """Names of plots that stand side by side; Markdown leaves them out."""

    names: Sequence[str]


@dataclass(frozen=True)
class Images:
    """Sample images side by side."""

    samples: Sequence[Sample]


Part: TypeAlias = str | Table | Plots | Images  # a string is a phrase


@dataclass(frozen=True)
class Section:
    """A title and what is under it."""

    title: str
    parts: Sequence[Part]
    folded: bool = False  # details that a page shows on request
