"""The config of a run, with recipes and sources from the registry. Recipe classes are looked up here only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from paceline.config.resolve import Config, resolve
from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Recipe
from paceline.core.registry import load_class
from paceline.core.types import SettingValues
from paceline.data.source_settings import RegisteredSources

Layers: TypeAlias = Iterable[tuple[str, SettingValues]]  # where settings come from, and their values by name


def load_recipe(name: str) -> type[Recipe]:
    """Return the recipe class behind a name or the path of a file."""
    return load_class("recipe", name, Recipe)


def resolve_config(recipe: str, layers: Layers, *, load_source: bool = True) -> Config:
    """Return the config that layers of settings give for a recipe; see `config.resolve`."""
    return resolve(recipe, load_recipe(recipe), layers, RegisteredSources(), load_source=load_source)


def resolve_settings(command: str, layers: Layers) -> RunSettings:
    """Return the settings of a command that has no recipe."""
    return resolve(command, Recipe, layers, RegisteredSources()).run
