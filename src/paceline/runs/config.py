"""Resolve a run's config with recipes and sources from the registry. Only this module looks up recipe classes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from paceline.config.resolve import Config, resolve
from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Recipe, check_attributes
from paceline.core.errors import UserError
from paceline.core.files import SAFETENSORS
from paceline.core.registry import load_class
from paceline.core.trust import may_run
from paceline.core.types import SettingValues
from paceline.data.source_settings import RegisteredSources

Layers: TypeAlias = Iterable[tuple[str, SettingValues]]  # (origin, settings) pairs; an origin may be a file name


def load_recipe(name: str) -> type[Recipe]:
    """Return the recipe class for a name or a file path."""
    if name.endswith(SAFETENSORS):
        raise UserError(
            f"{name}: a weights file, not a recipe; to start from its weights, use RECIPE --init-from {name}"
        )
    found = load_class("recipe", name, Recipe)
    check_attributes(found, name)
    if "__dataclass_fields__" not in vars(found.Settings):
        raise UserError(f"recipe {name!r}: its Settings must be a frozen @dataclass; decorate the class")
    return found


def find_recipe(name: str) -> type[Recipe]:
    """Return a run's recipe class, or the base class `Recipe` if the recipe's code is not trusted."""
    return load_recipe(name) if may_run(name) else Recipe


def resolve_config(recipe: str, layers: Layers, *, load_source: bool = True) -> Config:
    """Return the config of a recipe, resolved from layers of settings; see `config.resolve`."""
    return resolve(recipe, load_recipe(recipe), layers, RegisteredSources(), load_source=load_source)


def resolve_settings(command: str, layers: Layers) -> RunSettings:
    """Return the settings for a command that has no recipe."""
    return resolve(command, Recipe, layers, RegisteredSources()).run
