"""What a report is made of, on a page and in Markdown alike: sections of phrases, tables, plots and pictures."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Table:
    """Cells are phrases; `strong` rows are set off."""

    head: list[str]
    rows: list[list[str]]
    strong: set[int] = field(default_factory=set)
    note: str = ""


@dataclass
class Plots:
    """Names of plots that stand side by side; Markdown leaves them out."""

    names: list[str]


@dataclass
class Pictures:
    """Samples side by side: (caption, path of a picture)."""

    pictures: list[tuple[str, str]]


@dataclass
class Section:
    """A title and what is under it: phrases, tables, plots, pictures."""

    title: str
    parts: list[str | Table | Plots | Pictures]
