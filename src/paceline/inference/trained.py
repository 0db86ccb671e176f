"""The trained model from a run or a weights file: the recipe with the weights used for evaluation, without the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.config.resolve import Config
from paceline.contracts.recipe import DataSpec, Recipe
from paceline.core.errors import NOT_FOUND, UserError
from paceline.core.files import user_path
from paceline.runs.checkpoint import choose_checkpoint
from paceline.runs.data_spec_file import read_data_spec
from paceline.runs.finished_run import check_not_file, config_of
from paceline.runs.folder import RunFolder
from paceline.runs.weights import check_values, evaluated_values
from paceline.runs.weights_file import check_checkpoint, is_weights_file, read_weights

RANDOM_FILLS = (Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)


@dataclass(frozen=True)
class StoredModel:
    """Weights from a run folder or a weights file, and everything needed to use them."""

    config: Config
    spec: DataSpec  # describes the training data
    weights: dict[str, Tensor]
    origin: str  # where the weights come from, to be printed
    checkpoint: str = ""  # which checkpoint of a run, to be printed; empty for a weights file

    @property
    def recipe_class(self) -> type[Recipe]:
        """The recipe that the weights belong to."""
        return self.config.recipe_class


@dataclass(frozen=True)
class TrainedModel:
    """A recipe with its weights, on the CPU, for inference."""

    recipe: Recipe
    config: Config
    spec: DataSpec
    origin: str

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each class, or its index if the classes have no names."""
        return self.spec.classes

    @property
    def evaluated_size(self) -> tuple[int, int] | None:
        """Height and width of the images that a classifier is evaluated on; None if they may have any size.

        Evaluation uses whole images, even if training used crops.
        """
        run = self.config.run
        if not run.crop:
            return self.spec.height, self.spec.width
        # If the run trained on crops, the full image size is known only if `size` was set.
        return (run.size, run.size) if run.size else None


def read_stored(path: str, checkpoint: str = "best", *, trust: bool = False) -> StoredModel:
    """Read the weights and settings from a run folder or a weights file; see `core.trust` for `trust`."""
    place = user_path(path)
    check_checkpoint(path, checkpoint)
    if is_weights_file(path):
        file = read_weights(place, trust=trust)
        return StoredModel(file.config, file.spec, file.weights, path)
    if not place.exists():
        raise UserError(f"{path}: {NOT_FOUND}")
    check_not_file(path)
    config = config_of(str(place), load_source=False, trust=trust)
    snapshot = choose_checkpoint(RunFolder(place).checkpoints, checkpoint)
    spec = read_data_spec(place)
    at_images = f"at {snapshot.images:,} images"
    chosen = "last" if snapshot.best_images < snapshot.images else checkpoint  # the best one may be damaged
    label = f"checkpoint {at_images}" if checkpoint.isdecimal() else f"{chosen} checkpoint {at_images}"
    return StoredModel(config, spec, snapshot.weights, f"{path} {at_images}", label)


def open_trained(stored: StoredModel, path: str) -> TrainedModel:
    """Return the recipe with all of its weights."""
    recipe = build_for(stored)
    load_into(recipe, stored.weights, path, required=recipe.state_dict())
    return TrainedModel(recipe, stored.config, stored.spec, stored.origin)


def build(config: Config, spec: DataSpec) -> Recipe:
    """Return a recipe in eval mode, with random weights and without gradients."""
    with torch.random.fork_rng(devices=[]):
        return config.recipe_class(config.recipe, spec).eval().requires_grad_(False)


def build_for(stored: StoredModel) -> Recipe:
    """Return a recipe like `build`, whose weights are then loaded. If all of them are stored, none are random.

    For large networks, drawing random weights takes much longer than loading the stored ones.
    """
    with _WithoutRandomWeights():
        recipe = build(stored.config, stored.spec)
    is_complete = recipe.state_dict().keys() <= evaluated_values(stored.weights).keys()
    return recipe if is_complete else build(stored.config, stored.spec)


class _WithoutRandomWeights(TorchFunctionMode):
    """While this mode is active, parameters are not filled with random values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        filled = args[0] if args else kwargs.get("tensor")
        return filled if func in RANDOM_FILLS and isinstance(filled, nn.Parameter) else func(*args, **kwargs)


def load_into(recipe: Recipe, weights: Mapping[str, Tensor], path: str, required: Iterable[str]) -> None:
    """Load weights or, if present, their EMA into a recipe; raise UserError if a tensor is missing or does not fit."""
    values = evaluated_values(dict(weights))
    own = recipe.state_dict()
    for key, value in own.items():
        if key in values and values[key].shape != value.shape:
            shapes = f"{tuple(values[key].shape)} in the file, {tuple(value.shape)} in the network"
            raise UserError(
                f"{path}: {key!r} has the wrong shape: {shapes}; check that the run's settings are unchanged"
            )
    missing = [key for key in required if key not in values]
    unexpected = sorted(values.keys() - own.keys())
    if missing or unexpected:
        first, what = (missing[0], "is missing") if missing else (unexpected[0], "belongs to a different network")
        raise UserError(f"{path}: {first!r} {what} (mismatched tensors: {len(missing) + len(unexpected)})")
    check_values(values, recipe, path)
    recipe.load_state_dict(values, strict=False)


def networks_in(stored: StoredModel, recipe: Recipe) -> dict[str, nn.Module]:
    """Return the networks with complete weights, by name; a weights file may have no discriminator."""
    available = evaluated_values(stored.weights).keys()
    return {
        name: network
        for name, network in recipe.single_networks.items()
        if all(f"{name}.{key}" in available for key in network.state_dict())
    }
