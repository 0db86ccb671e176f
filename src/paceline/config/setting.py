"""Declaration of a setting: a default, a one-line description and bounds."""

from __future__ import annotations

import operator
from dataclasses import field
from typing import Any

Number = int | float
BOUNDS = {"at least": operator.ge, "above": operator.gt, "below": operator.lt, "at most": operator.le}


def setting(
    default: Any,
    meaning: str,
    *,
    flag: bool = False,
    mutable_on_resume: bool = False,
    at_least: Number | None = None,
    above: Number | None = None,
    below: Number | None = None,
    at_most: Number | None = None,
) -> Any:
    """Declare a setting as a field of a frozen dataclass.

    Args:
        default: The default value.
        meaning: A one-line description, shown by `paceline settings` and in the documentation.
        flag: Whether the setting has a command-line flag `--name`. `--set name=value` works for all settings.
        mutable_on_resume: Whether a run may resume with a different value.
        at_least: The smallest allowed value.
        above: The value must be greater than this.
        below: The value must be less than this.
        at_most: The largest allowed value.

    Returns:
        A dataclass field, typed as Any so that type checkers accept it as the default for any annotation.

    Examples:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Settings:
        ...     width: int = paceline.setting(32, "channels of the first layer", at_least=1)
        >>> Settings(width=64)
        Settings(width=64)
    """
    limits = zip(BOUNDS, (at_least, above, below, at_most), strict=True)
    bounds = {words: limit for words, limit in limits if limit is not None}
    metadata = {"meaning": meaning, "flag": flag, "mutable_on_resume": mutable_on_resume, "bounds": bounds}
    return field(default=default, metadata=metadata)
