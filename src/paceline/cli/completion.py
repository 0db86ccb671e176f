"""Values that the shell suggests for arguments and flags, found without loading PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args, get_origin

import typer

from paceline.core.declared import preset_names
from paceline.core.registry import PluginKind, names

Completion = Callable[..., list[str]]
PLUGINS: dict[str, PluginKind] = {"data": "source", "strategy": "strategy", "loader": "loader", "loggers": "logger"}


def complete_recipe(incomplete: str) -> list[str]:
    """Return the recipes whose names start with the given text."""
    return _starting_with(incomplete, names("recipe"))


def completion_of(setting: str, hint: Any) -> Completion | None:
    """Return a function that suggests values for a setting; None if there is no list of its values."""
    if setting == "preset":
        return _complete_preset
    if setting in PLUGINS:
        return lambda incomplete: _starting_with(incomplete, names(PLUGINS[setting]))
    if get_origin(hint) is Literal:
        return lambda incomplete: _starting_with(incomplete, map(str, get_args(hint)))
    return None


def _complete_preset(ctx: typer.Context, incomplete: str) -> list[str]:
    # The parser stops at the flag whose value is missing, before it assigns the arguments to their names.
    given = [*ctx.args, *filter(None, [ctx.params.get("recipe")])]
    recipe = next((name for name in given if name in names("recipe")), "")
    return _starting_with(incomplete, preset_names(recipe))


def _starting_with(incomplete: str, values: Iterable[str]) -> list[str]:
    return [value for value in values if value.startswith(incomplete)]
