"""How a setting is declared: a default, a one-line meaning and bounds."""

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
    """Declare a setting: a field of a frozen dataclass, with a meaning and bounds.

    Args:
        default: The default value.
        meaning: One line of help, which `paceline settings` and the reference show.
        flag: Whether the command line has `--name` for it; every setting can be given with `--set name=value`.
        mutable_on_resume: Whether a resumed run may change it.
        at_least: The smallest value allowed.
        above: The value must be larger than this.
        below: The value must be smaller than this.
        at_most: The largest value allowed.

    Returns:
        A dataclass field. Its type is Any, so that a type checker accepts it as the default of the annotated field.

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
