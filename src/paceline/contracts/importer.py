"""The base class for importers, which convert weight files from other projects to a recipe's weights.

An importer is one file in `paceline.recipes.importers`; a recipe selects it with `Recipe.weights`. The importer
`recognised` is used if the user specifies no recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from paceline.contracts.data_spec import DataSpec
from paceline.core.errors import UserError
from paceline.core.types import SettingValue


def only_path(paths: Sequence[Path], content: str) -> Path:
    """Return the single path; raise UserError if there are several."""
    if len(paths) != 1:
        raise UserError(f"import: expected one file with {content}, got {len(paths)}; import them one at a time")
    return paths[0]


class Importer:
    """Reads weight files from another project. The constructor raises UserError if the files cannot be used."""

    tries_any_file: ClassVar[bool] = False  # whether `import` without --recipe tries it; it then rejects other files
    recipe: str = ""  # the recipe that the files belong to; empty if they belong to each recipe with this importer
    recognised: Mapping[str, SettingValue] = {}  # settings determined by the files; users cannot change them
    assumed: Mapping[str, SettingValue] = {}  # settings not stored in the files; users can change them

    def __init__(self, paths: Sequence[Path]) -> None:
        raise NotImplementedError

    def data_spec(self, settings: Mapping[str, SettingValue]) -> DataSpec:
        """Return a data spec for which a recipe with these settings creates the networks stored in the files."""
        raise NotImplementedError

    def tensors(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the imported tensors under the recipe's names; `own` is the recipe's state_dict before the import."""
        raise NotImplementedError
