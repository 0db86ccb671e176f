"""What a run learned, or a weights file holds, ready to be applied to pictures."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from paceline.config import Config
from paceline.data.crop import cropped
from paceline.engine.assemble import open_sources
from paceline.engine.checkpoint import choose_checkpoint
from paceline.engine.facts_file import kept_facts
from paceline.engine.finished_run import config_of
from paceline.engine.run_folder import RunFolder
from paceline.engine.snapshot import judged_values
from paceline.engine.weights_file import SUFFIX, read_weights
from paceline.errors import UserError
from paceline.models.receptive_field import ReceptiveField, receptive_field
from paceline.recipe import Facts, Recipe
from paceline.registry import load_class


@dataclass(frozen=True)
class Restorer:
    """A recipe that makes pictures of pictures, with its weights, on the CPU, and how far its networks see."""

    recipe: Recipe
    config: Config
    facts: Facts
    origin: str  # where the weights are from, for a person

    @property
    def enlarges(self) -> int:
        """How many times as high and wide the results are."""
        return self.recipe.enlarges

    @property
    def results(self) -> tuple[str, ...]:
        """The names of what is made of one picture."""
        return self.field.results

    @cached_property
    def field(self) -> ReceptiveField:
        """What tiles must keep to."""
        return receptive_field(self.recipe.restore, self.facts.channels, self.enlarges)


def open_restorer(path: str, checkpoint: str = "best") -> Restorer:
    """Opens a run's folder or a weights file; a network that takes part without weights is an error."""
    place = Path(path).expanduser()
    if place.suffix == SUFFIX and place.is_file():
        file = read_weights(place)
        config, facts, weights, origin = file.config, file.facts, file.weights, path
    elif place.is_dir():
        config = config_of(str(place), own_source=False)
        facts = kept_facts(place) or _facts_of_data(config_of(str(place)))
        snapshot = choose_checkpoint(RunFolder(place).checkpoints, checkpoint)
        weights, origin = snapshot.weights, f"{path} at {snapshot.images:,} images"
    else:
        raise UserError(f"{path}: expected a run's folder or a {SUFFIX} file")
    recipe = build(config, facts)
    restorer = Restorer(recipe, config, facts, origin)
    fill(restorer, weights, path)
    return restorer


def _facts_of_data(config: Config) -> Facts:
    return cropped(open_sources(config)["train"].facts, config.run.crop)


def build(config: Config, facts: Facts) -> Recipe:
    """The recipe with random weights, ready to be applied; refuses one that makes no pictures of pictures."""
    recipe_class: type[Recipe] = load_class("recipe", config.recipe_name, Recipe)
    if recipe_class.restore is Recipe.restore:
        raise UserError(f"recipe {config.recipe_name!r} makes no pictures of pictures, so it cannot be applied")
    with torch.random.fork_rng(devices=[]):
        return recipe_class(config.recipe, facts).eval().requires_grad_(False)


def fill(restorer: Restorer, weights: dict[str, Tensor], name: str) -> None:
    """Gives the recipe its weights, averages where there are any; networks that take no part may have none."""
    plain = judged_values(weights)
    own = restorer.recipe.state_dict(keep_vars=True)
    needed = [key for key, value in own.items() if id(value) in restorer.field.used]
    for key, value in own.items():
        if key in plain and plain[key].shape != value.shape:
            shapes = f"{tuple(plain[key].shape)} in the file, {tuple(value.shape)} in the network"
            raise UserError(f"{name}: {key!r} does not fit: {shapes}; were its settings changed?")
    missing = [key for key in needed if key not in plain]
    strange = sorted(plain.keys() - own.keys())
    if missing or strange:
        first, what = (missing[0], "is missing") if missing else (strange[0], "is of another network")
        raise UserError(f"{name}: {first!r} {what} ({len(missing) + len(strange)} tensors do not fit)")
    restorer.recipe.load_state_dict(plain, strict=False)
