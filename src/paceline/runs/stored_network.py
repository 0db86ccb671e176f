"""The network settings that are stored with weights, so that `--init-from` alone selects the same network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.config.resolve import flatten
from paceline.core.errors import UserError
from paceline.core.files import user_path
from paceline.core.types import SettingValue, SettingValues
from paceline.runs.folder import RunFolder
from paceline.runs.weights_file import is_weights_file, stored_settings

INIT_FROM, OUT = "init_from", "out"


def stored_network(recipe: str, names: Sequence[str], layers: Iterable[SettingValues]) -> dict[str, SettingValue]:
    """Return the settings `names` of the weights that a run starts from, if their network comes from another library.

    The first name is the setting for the network. If the user or a preset sets it, nothing is returned. A run that is
    resumed does not need the initial weights, so its own folder is used if they no longer exist.
    """
    given: dict[str, SettingValue] = {}
    for layer in layers:
        given |= flatten(layer)
    if not names or not given.get(INIT_FROM) or names[0] in given:
        return {}
    stored: dict[str, SettingValue] = {}
    for place in (given[INIT_FROM], given.get(OUT, "")):
        stored = stored or _settings_of(str(place), recipe)
    found = {name: value for name, value in stored.items() if name.partition(".")[0] in names}
    return found if ":" in str(found.get(names[0], "")) else {}


def _settings_of(path: str, recipe: str) -> dict[str, SettingValue]:
    """Return the settings of a weights file or run by full name; empty if it cannot be read or has another recipe."""
    place = user_path(path)
    try:
        if path and is_weights_file(path):
            of_recipe, settings = stored_settings(place)
        elif path and place.is_dir() and (record := RunFolder(place).read_record()):
            of_recipe, settings = record.recipe, record.settings
        else:
            return {}
    except UserError:  # training reports the problem when it reads the weights
        return {}
    return flatten(settings) if of_recipe == recipe else {}
