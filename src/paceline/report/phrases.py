"""Sentences and table cells that take their numbers from report.json, so that all formats show the same numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from paceline.core.printable import printable
from paceline.core.types import Json, JsonObject

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
