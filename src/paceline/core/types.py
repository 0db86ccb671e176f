"""Types that every package uses: setting values and JSON values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeAlias

StrPath: TypeAlias = str | os.PathLike[str]
Scalar: TypeAlias = str | int | float | bool
SettingValue: TypeAlias = Scalar | list[Scalar]
# Values of settings by name. A nested mapping contains the settings of one network, or the values of a table.
SettingValues: TypeAlias = Mapping[str, "SettingValue | Mapping[str, SettingValue]"]

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"
JsonObject: TypeAlias = "dict[str, Json]"
