"""Types that every package uses: values of settings, and what JSON holds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeAlias

StrPath: TypeAlias = str | os.PathLike[str]
SettingValue: TypeAlias = str | int | float | bool
SettingValues: TypeAlias = Mapping[str, "SettingValue | Mapping[str, SettingValue]"]  # one network's own as a table

Json: TypeAlias = "str | int | float | bool | list[Json] | dict[str, Json] | None"
JsonObject: TypeAlias = "dict[str, Json]"
