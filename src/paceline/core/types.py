"""Types that every package uses: setting values and JSON values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeAlias

StrPath: TypeAlias = str | os.PathLike[str]
SettingValue: TypeAlias = str | int | float | bool
# Values of settings by name. A nested mapping contains the settings of one network.
SettingValues: TypeAlias = Mapping[str, "SettingValue | Mapping[str, SettingValue]"]

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"
JsonObject: TypeAlias = "dict[str, Json]"
