"""Settings that are tables of named values, such as `network_args`, and how their values are parsed.

The names in such a table are not declared in advance: the code that uses the table checks them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import get_args

from paceline.core.errors import UserError
from paceline.core.types import Scalar, SettingValue

_CONSTANTS: dict[str, Scalar] = {"true": True, "false": False}


class Text(str):
    """Text from the command line or an INI file. In a table setting, it is converted to the type it looks like."""


class Arguments(Mapping[str, SettingValue]):
    """The value of a table setting: an immutable mapping of names to numbers, booleans, strings and lists.

    `--set TABLE.NAME=VALUE` and the TOML table `[TABLE]` set single entries.
    """

    def __init__(self, values: Mapping[str, SettingValue] | None = None) -> None:
        self._values = dict(values or {})

    def __getitem__(self, name: str) -> SettingValue:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(json.dumps(self._values, sort_keys=True))

    def __repr__(self) -> str:
        return repr(self._values)


def argument_value(value: object, where: str) -> SettingValue:
    """Return an entry of a table setting; raise UserError for a value of an unsupported type."""
    if isinstance(value, Text):
        return _parse(str(value), where)
    if isinstance(value, tuple):
        value = list(value)
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, get_args(Scalar)) for item in items):
        raise UserError(f"{where}: {value!r} is not supported; use a number, true, false, text or a list of these")
    if any(isinstance(item, float) and not math.isfinite(item) for item in items):
        raise UserError(f"{where}: {value!r} is not finite; use a finite number")
    return value  # type: ignore[return-value]  # the checks above narrow it


def _parse(text: str, where: str) -> SettingValue:
    """Return a number, a boolean, a list such as [3,3,9,3], or else the text. Text in double quotes stays text."""
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    try:
        parsed = json.loads(text)
    except ValueError:
        if text.startswith("["):
            raise UserError(f"{where}: {text!r} is not a list; write a list like [2,2,6,2]") from None
        return text
    return text if parsed is None else argument_value(parsed, where)
