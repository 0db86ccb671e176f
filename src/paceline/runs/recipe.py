"""The config and the recipe of a run, checked against its data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch

from paceline.config.resolve import Config, resolve
from paceline.config.settings import RunSettings
from paceline.contracts.recipe import DataSpec, Recipe, check_attributes, check_recipe
from paceline.core.errors import NoClasses, UserError, check_parameters, unknown
from paceline.core.files import SAFETENSORS
from paceline.core.registry import load_class
from paceline.core.trust import may_run
from paceline.core.types import SettingValues
from paceline.data.image_files import fields_of
from paceline.data.source import Source
from paceline.data.stream import cropped


def make_recipe(config: Config, sources: Mapping[str, Source], size: tuple[int, int] | None = None) -> Recipe:
    """Return the recipe with its initial weights, which depend only on the seed.

    `size` is the height and width of the training images, if the sources have different ones.
    """
    torch.manual_seed(config.run.seed)
    first = sources.get("train", next(iter(sources.values())))
    spec = cropped(first.spec, config.run.crop)
    if size:
        spec = dataclasses.replace(spec, height=size[0], width=size[1])
    name = f"recipe {config.recipe_name!r}"
    check_parameters(f"{name}: __init__(self, settings, spec)", config.recipe_class, config.recipe, spec)
    try:
        recipe = config.recipe_class(config.recipe, spec)
    except NoClasses as error:
        raise UserError("; ".join(filter(None, [str(error), *first.notes, first.class_advice]))) from None
    check_recipe(recipe, config.recipe_name)
    for network in config.networks:
        if network not in recipe.networks:
            raise unknown("network", network, recipe.networks)
    check_sources(recipe, spec, sources, config)
    return recipe


def check_sources(recipe: Recipe, spec: DataSpec, sources: Mapping[str, Source], config: Config) -> None:
    """Raise UserError if the sources do not fit the recipe or the data spec that it was built for."""
    for split, source in sources.items():
        _check_same_pixels(spec, split, source.spec, config.run.data)
        _check_fit(recipe, split, source, config)


def _check_same_pixels(spec: DataSpec, split: str, other: DataSpec, data: str) -> None:
    """Raise UserError if the images of a split differ from the training images in channels or pixel format."""
    if spec.channels != other.channels:
        what = f"the {split} images have {other.channels} channels, but the training images have {spec.channels}"
        raise UserError(f"--data {data}: {what}; set channels for both, or use other files")
    if spec.pixel_format != other.pixel_format:
        what = f"the {split} images are {other.pixel_format}, but the training images are {spec.pixel_format}"
        raise UserError(f"--data {data}: {what}; set pixels for both, e.g. --set pixels=uint16")


def _check_fit(recipe: Recipe, split: str, source: Source, config: Config) -> None:
    """Raise UserError before training starts if the recipe cannot train on a source."""
    fields = fields_of(source) if recipe.required_fields or recipe.rejected_fields else set()
    missing = sorted(set(recipe.required_fields) - fields)
    if missing:
        usual = f", e.g. --data {recipe.defaults['data']}" if "data" in recipe.defaults else ""
        raise UserError(
            f"--data {config.run.data}: its samples have no field {missing[0]!r}; use a different source{usual}"
        )
    ignored = sorted(recipe.rejected_fields.keys() & fields)
    if ignored:
        raise UserError(
            f"--data {config.run.data}: its samples have a field {ignored[0]!r}, "
            f"which {config.recipe_name} would ignore; "
            f"to use it, run: paceline train {recipe.rejected_fields[ignored[0]]}"
        )
    if recipe.output_scale > 1 and source.spec.scale not in (0, recipe.output_scale):
        raise UserError(
            f"scale={recipe.output_scale}: the low-resolution {split} images are smaller by a factor of "
            f"{source.spec.scale}; use files that match the scale"
        )


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
    return resolve(recipe, load_recipe(recipe), layers, load_source=load_source)


def resolve_settings(command: str, layers: Layers) -> RunSettings:
    """Return the settings for a command that has no recipe."""
    return resolve(command, Recipe, layers).run
