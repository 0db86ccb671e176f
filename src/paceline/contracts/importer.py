"""The importer contract: how weight files of another project become a recipe's weights.

An importer is one file in `paceline.recipes.importers`; a recipe names it (`Recipe.importer`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from paceline.contracts.data_spec import DataSpec
from paceline.core.types import SettingValue


class Importer:
    """Weight files of another project. The constructor reads them and raises UserError for what it cannot use."""

    recognised: Mapping[str, SettingValue] = {}  # settings that follow from the files; the user's must equal them
    assumed: Mapping[str, SettingValue] = {}  # settings that the files do not contain; the user's come first

    def __init__(self, paths: Sequence[Path]) -> None:
        raise NotImplementedError

    def data_spec(self, settings: Mapping[str, SettingValue]) -> DataSpec:
        """Return a data spec for which the recipe, with all its settings by name, has the imported networks."""
        raise NotImplementedError

    def tensors(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the imported tensors by the recipe's names; `own` is the recipe's state_dict before the import."""
        raise NotImplementedError
