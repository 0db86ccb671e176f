"""Sentences and table cells whose numbers are places in report.json, so that no shown number can differ from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

# Around a place, and before its format: characters for private use, which no name or message has.
_OPEN, _SPEC, _CLOSE = "\ue000", "\ue001", "\ue002"
_PLACE = re.compile(f"{_OPEN}(.+?){_SPEC}(.*?){_CLOSE}")
_BETWEEN = "::"
NOTHING = "–"


def at(spec: str, *path: str | int) -> str:
    """Stands for the number at a place of the report, shown by a format specification."""
    return f"{_OPEN}{_BETWEEN.join(map(str, path))}{_SPEC}{spec}{_CLOSE}"


def look_up(report: dict[str, Any], path: str) -> Any:
    """The value at a place."""
    value: Any = report
    for word in path.split(_BETWEEN):
        value = value[int(word)] if isinstance(value, list) else value[word]
    return value


def shown(value: Any, spec: str) -> str:
    """A value as a reader sees it."""
    return NOTHING if value is None else format(value, spec)


def fill(phrase: str, report: dict[str, Any], show: Callable[[str, Any, str], str] | None = None) -> str:
    """A phrase with its numbers; `show(path, value, text)` may dress one up."""

    def replace(match: re.Match[str]) -> str:
        path, spec = match.groups()
        value = look_up(report, path)
        text = shown(value, spec)
        return show(path, value, text) if show else text

    return _PLACE.sub(replace, phrase)


def pieces(phrase: str) -> list[str]:
    """The phrase cut into words of its own and places."""
    return re.split(f"({_OPEN}.+?{_CLOSE})", phrase)


def listed(labels: Iterable[str]) -> str:
    """Labels one after the other; those with a comma of their own are quoted."""
    return ", ".join(f"“{label}”" if "," in label else label for label in labels)


def has_place(phrase: str) -> bool:
    """Whether a number of the report stands in it."""
    return _OPEN in phrase
