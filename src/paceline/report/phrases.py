"""Sentences and table cells whose numbers are places in report.json, so that no shown number can differ from it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_PLACE = re.compile(r"⟦(.+?)\|(.*?)⟧")
_BETWEEN = "::"
NOTHING = "–"


def at(spec: str, *path: str | int) -> str:
    """Stands for the number at a place of the report, shown by a format specification."""
    return f"⟦{_BETWEEN.join(map(str, path))}|{spec}⟧"


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
    """The phrase cut into words of its own and places, which keep their brackets."""
    return re.split(r"(⟦.+?\|.*?⟧)", phrase)
