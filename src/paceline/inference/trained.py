"""What a run learned, or a weights file holds: the recipe with the weights that were judged, without its data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.config.resolve import Config
from paceline.contracts.recipe import DataSpec, Recipe
from paceline.core.errors import UserError
from paceline.runs.checkpoint import choose_checkpoint
from paceline.runs.data_spec_file import read_data_spec
from paceline.runs.finished_run import config_of
from paceline.runs.folder import RunFolder
from paceline.runs.weights import evaluated_values
from paceline.runs.weights_file import SUFFIX, read_weights


@dataclass(frozen=True)
class Stored:
    """Weights as they lie in a run's folder or a file, and all that is needed to use them."""

    config: Config
    spec: DataSpec  # of what was learned from
    weights: dict[str, Tensor]
    origin: str  # where they are from, for a person

    @property
    def recipe_class(self) -> type[Recipe]:
        """What the weights are of."""
        return self.config.recipe_class


@dataclass(frozen=True)
class Trained:
    """A recipe with its weights, on the CPU, to be used and not trained."""

    recipe: Recipe
    config: Config
    spec: DataSpec
    origin: str

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each class, or its number where the data had no names."""
        return self.spec.class_names or tuple(map(str, range(self.spec.num_classes)))


def read_stored(path: str, checkpoint: str = "best") -> Stored:
    """Reads a run's folder or a weights file."""
    place = Path(path).expanduser()
    if place.suffix == SUFFIX and place.is_file():
        file = read_weights(place)
        return Stored(file.config, file.spec, file.weights, path)
    if not place.is_dir():
        raise UserError(f"{path}: expected a run's folder or a {SUFFIX} file")
    config = config_of(str(place), own_source=False)
    snapshot = choose_checkpoint(RunFolder(place).checkpoints, checkpoint)
    spec = read_data_spec(place)
    return Stored(config, spec, snapshot.weights, f"{path} at {snapshot.images:,} images")


def uses_of(recipe_class: type[Recipe]) -> dict[str, str]:
    """What recipes of this kind are good for: the command, and in words what they do."""
    found = {}
    if recipe_class.image_to_image is not Recipe.image_to_image:
        found["apply"] = "makes pictures of pictures"
    if recipe_class.generates:
        found["sample"] = "makes pictures of noise"
    if recipe_class.evaluator == "accuracy":  # which takes "logits", one for each class
        found["predict"] = "tells the classes of pictures"
    return found


def check_use(stored: Stored, command: str, path: str) -> None:
    """Refuses what a command, by its name, cannot use, and names the one that can."""
    uses = uses_of(stored.recipe_class)
    if command not in uses:
        other, name = main_use(stored, command, path), stored.config.recipe_name
        raise UserError(f"{path}: recipe {name!r} {uses[other]}, which is what `{other}` is for, not `{command}`")


def main_use(stored: Stored, command: str, path: str) -> str:
    """The command that uses what was stored; another command asks, and refuses what there is none for."""
    for use in uses_of(stored.recipe_class):
        return use
    raise UserError(
        f"{path}: `{command}` finds no use for recipe {stored.config.recipe_name!r}: "
        "it has no image_to_image(), does not generate and is not evaluated by accuracy"
    )


def open_trained(stored: Stored, path: str) -> Trained:
    """The recipe with all of its weights."""
    recipe = build(stored.config, stored.spec)
    fill(recipe, stored.weights, path, needed=recipe.state_dict())
    return Trained(recipe, stored.config, stored.spec, stored.origin)


def build(config: Config, spec: DataSpec) -> Recipe:
    """The recipe with random weights, to be used and not trained."""
    with torch.random.fork_rng(devices=[]):
        return config.recipe_class(config.recipe, spec).eval().requires_grad_(False)


def fill(recipe: Recipe, weights: dict[str, Tensor], name: str, needed: Iterable[str]) -> None:
    """Gives a recipe its weights, averages where there are any; tensors that are not needed may be missing."""
    plain = evaluated_values(weights)
    own = recipe.state_dict()
    for key, value in own.items():
        if key in plain and plain[key].shape != value.shape:
            shapes = f"{tuple(plain[key].shape)} in the file, {tuple(value.shape)} in the network"
            raise UserError(f"{name}: {key!r} does not fit: {shapes}; were its settings changed?")
    missing = [key for key in needed if key not in plain]
    strange = sorted(plain.keys() - own.keys())
    if missing or strange:
        first, what = (missing[0], "is missing") if missing else (strange[0], "is of another network")
        raise UserError(f"{name}: {first!r} {what} ({len(missing) + len(strange)} tensors do not fit)")
    recipe.load_state_dict(plain, strict=False)


def networks_in(stored: Stored, recipe: Recipe) -> dict[str, nn.Module]:
    """The networks by name whose weights are all there; a weights file may have none for a discriminator."""
    there = evaluated_values(stored.weights).keys()
    return {
        name: network
        for name, network in recipe.single_networks.items()
        if all(f"{name}.{key}" in there for key in network.state_dict())
    }
