"""The building blocks of a report in HTML and Markdown: sections of phrases, tables, plots and images."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

from paceline.core.text import printable
from paceline.core.types import Json, JsonObject
from paceline.report.advice import is_share
from paceline.report.model import Group, Sample, Summary

# Delimiters of a placeholder. They are Unicode private-use characters, which `as_words` escapes in other text.
_OPEN, _SPEC, _CLOSE = "\ue000", "\ue001", "\ue002"
_NUMBER = re.compile(f"{_OPEN}(.+?){_SPEC}(.*?){_CLOSE}")
_BETWEEN, _NOT_BETWEEN = "::", "\ue003"  # _NOT_BETWEEN replaces "::" inside a component of a path
NO_VALUE = "–"


@lru_cache(maxsize=4096)  # cached, because all lines of metrics.jsonl contain the same names
def as_words(text: str) -> str:
    """Return text from a run's files for use in a phrase, with placeholder delimiters escaped."""
    return re.sub(f"[{_OPEN}-{_NOT_BETWEEN}]", lambda found: f"\\u{ord(found[0]):04x}", printable(text))


def at(spec: str, *path: str | int) -> str:
    """Return a placeholder for the number at a path in report.json, with its format specification."""
    words = (str(word).replace(_BETWEEN, _NOT_BETWEEN) for word in path)
    return f"{_OPEN}{_BETWEEN.join(words)}{_SPEC}{spec}{_CLOSE}"


def look_up(content: JsonObject, path: str) -> Json:
    """Return the value at a path in report.json."""
    value: Json = content
    for word in path.split(_BETWEEN):
        if isinstance(value, list):
            value = value[int(word)]
        elif isinstance(value, dict):
            value = value[word.replace(_NOT_BETWEEN, _BETWEEN)]
        else:
            raise KeyError(path)
    return value


def fill(phrase: str, content: JsonObject, show: Callable[[str, Json, str], str] | None = None) -> str:
    """Replace the placeholders in a phrase; `show(path, value, text)` may wrap each number in markup."""

    def replace(match: re.Match[str]) -> str:
        path, spec = match.groups()
        value = look_up(content, path)
        text = NO_VALUE if value is None else format(value, spec).replace("%", " %")
        return show(path, value, text) if show else text

    return _NUMBER.sub(replace, phrase)


def pieces(phrase: str) -> list[str]:
    """Split a phrase into text and placeholders."""
    return re.split(f"({_OPEN}.+?{_CLOSE})", phrase)


def listed(labels: Iterable[str]) -> str:
    """Join labels with commas; labels that contain a comma are quoted."""
    return ", ".join(f"“{label}”" if "," in label else label for label in labels)


def has_number(phrase: str) -> bool:
    """Return whether a phrase contains a placeholder."""
    return _OPEN in phrase


DISPLAY_NAMES = {"top1": "top-1", "top5": "top-5", "loss": "loss"}


def metric_heading(name: str) -> str:
    """Return a metric name such as `test/top1` as a column heading: `test top-1, %`."""
    split, _, metric = name.partition("/")
    plain, bracket, label = metric.partition("[")
    unit = ", %" if plain.startswith("top") else ""
    where = f" ({label.removesuffix(']')})" if bracket else ""
    return f"{split} {DISPLAY_NAMES.get(plain, plain)}{unit}{where}"


def metric_unit(name: str) -> str:
    """Return the label of a plot's axis for a metric: its unit, or else its name without the split."""
    return "%" if is_share(name) else metric_in_text(name).partition(" ")[2]


def metric_in_text(name: str) -> str:
    """Return a metric name such as `test/top1` for use in a sentence: `test top-1`."""
    return metric_heading(name).replace(", %", "")


def evaluated_images(name: str) -> str:
    """Return a name for the images on which a metric such as `validation/top1` is computed: `validation images`."""
    split = name.partition("/")[0]
    return "training images" if split == "train" else f"{split} images"


def metrics_in_order(qualities: Iterable[Iterable[str]], first: str) -> list[str]:
    """Return the names of all metrics without duplicates, starting with the most important one."""
    names = list(dict.fromkeys(name for quality in qualities for name in quality))
    return sorted(names, key=lambda name: name != first)


def format_for(name: str, summary: Summary | None) -> str:
    """Return a number format for a metric's mean and spread, with more decimals for smaller values."""
    size = abs(summary.mean) if summary else 0.0
    if is_share(name):
        return ".2f"
    return ".1f" if size >= 100 else ".2f" if size >= 10 else ".3f" if size >= 1 else ".4f"


def with_spread(spec: str, summary: Summary | None, *path: str | int) -> str:
    """Return the mean, with ± standard deviation if there are several values."""
    if summary is None:
        return NO_VALUE
    mean = at(spec, *path, "mean")
    return mean if summary.std is None else f"{mean} ± {at(spec, *path, 'std')}"


def quality_of(group: Group, name: str) -> str:
    """Return a group's value for a metric, with its spread."""
    summary = group.quality.get(name)
    return with_spread(format_for(name, summary), summary, "groups", group.id, "quality", name)


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
