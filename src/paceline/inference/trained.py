"""The trained model from a run or a weights file, or between two of them, and which commands can use it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.config.resolve import Config
from paceline.contracts.recipe import DataSpec, Recipe, single_networks
from paceline.core.errors import NOT_FOUND, UserError
from paceline.core.files import user_path
from paceline.evaluation.contract import is_classifier
from paceline.inference.receptive_field import ReceptiveField, measured_field, receptive_field, window_multiple
from paceline.runs.checkpoint import choose_checkpoint
from paceline.runs.finished_run import check_not_file, config_of, last_finished
from paceline.runs.folder import RunFolder
from paceline.runs.weights import (
    check_checkpoint,
    check_values,
    evaluated_values,
    has_nan,
    is_weights_file,
    read_data_spec,
    read_weights,
)

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
    """A recipe in eval mode with its weights, for inference."""

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

    # The properties below are only for recipes that map images to images.

    @property
    def output_scale(self) -> int:
        """The height and width of the results relative to the input."""
        return self.recipe.output_scale

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the images computed from one input image."""
        return self.receptive_field.results

    @cached_property
    def receptive_field(self) -> ReceptiveField:
        """The halo and alignment that tiles need to produce the same result as the whole image."""
        window_px = window_multiple(self.recipe)
        return receptive_field(self.recipe.image_to_image, self.spec.channels, self.output_scale, window_px)

    @cached_property
    def tiled_field(self) -> ReceptiveField:
        """The receptive field for tiles. If it cannot be traced, it is measured, which takes several seconds."""
        field = self.receptive_field
        return measured_field(self.recipe, self.spec.channels, field) if field.is_measurable else field


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
    """Return the recipe with its weights, on the CPU; weights that `image_to_image` does not need may be missing."""
    with _WithoutRandomWeights():  # drawing them takes much longer for large networks than loading the stored ones
        recipe = build(stored.config, stored.spec)
    if not recipe.state_dict().keys() <= evaluated_values(stored.weights).keys():
        recipe = build(stored.config, stored.spec)  # some weights stay random
    return load_weights(recipe, stored, path)


def build(config: Config, spec: DataSpec) -> Recipe:
    """Return a recipe in eval mode, with random weights and without gradients."""
    with torch.random.fork_rng(devices=[]):
        return config.recipe_class(config.recipe, spec).eval().requires_grad_(False)


class _WithoutRandomWeights(TorchFunctionMode):
    """While this mode is active, parameters are not filled with random values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        filled = args[0] if args else kwargs.get("tensor")
        return filled if func in RANDOM_FILLS and isinstance(filled, nn.Parameter) else func(*args, **kwargs)


def load_weights(recipe: Recipe, stored: StoredModel, path: str) -> TrainedModel:
    """Load the stored weights or, if present, their EMA into a recipe; return it as a trained model.

    Raise UserError if a tensor does not fit or is missing, unless `image_to_image` does not need it.
    """
    model = TrainedModel(recipe.eval(), stored.config, stored.spec, stored.origin)
    values, own = evaluated_values(dict(stored.weights)), recipe.state_dict(keep_vars=True)
    for key, value in own.items():
        if key in values and values[key].shape != value.shape:
            shapes = f"{tuple(values[key].shape)} in the file, {tuple(value.shape)} in the network"
            raise UserError(
                f"{path}: {key!r} has the wrong shape: {shapes}; check that the run's settings are unchanged"
            )
    missing, unexpected = [key for key in own if key not in values], sorted(values.keys() - own.keys())
    if missing and "apply" in uses_of(stored.recipe_class):
        missing = [key for key in missing if id(own[key]) in model.receptive_field.used]
    if missing or unexpected:
        first, what = (missing[0], "is missing") if missing else (unexpected[0], "belongs to a different network")
        raise UserError(f"{path}: {first!r} {what} (mismatched tensors: {len(missing) + len(unexpected)})")
    check_values(values, recipe, path)
    recipe.load_state_dict(values, strict=False)
    return model


def networks_in(stored: StoredModel, recipe: Recipe) -> dict[str, nn.Module]:
    """Return the networks with complete weights, by name; a weights file may have no discriminator."""
    available = evaluated_values(stored.weights).keys()
    return {
        name: network
        for name, network in single_networks(recipe).items()
        if all(f"{name}.{key}" in available for key in network.state_dict())
    }


Use = Literal["apply", "sample", "predict"]


def uses_of(recipe_class: type[Recipe]) -> dict[Use, str]:
    """Return the commands that support a recipe, each with a description of what the recipe does."""
    found: dict[Use, str] = {}
    if recipe_class.image_to_image is not Recipe.image_to_image:
        found["apply"] = "transforms images"
    if recipe_class.generates:
        found["sample"] = "generates images from noise"
    if is_classifier(recipe_class):
        found["predict"] = "classifies images"
    return found


def check_use(stored: StoredModel, command: Use, path: str) -> None:
    """Raise UserError if a command does not support a recipe; the message suggests one that does."""
    uses = uses_of(stored.recipe_class)
    if command not in uses:
        other, name = main_use(stored, command, path), stored.config.recipe_name
        raise UserError(f"{path}: recipe {name!r} {uses[other]}, which `{command}` does not do: use `{other}`")


def main_use(stored: StoredModel, command: str, path: str) -> Use:
    """Return the main command for a model; if there is none, raise a UserError that names `command`."""
    for use in uses_of(stored.recipe_class):
        return use
    raise UserError(
        f"{path}: `{command}` does not support recipe {stored.config.recipe_name!r}: "
        "it has no image_to_image(), generates no images, and its evaluator is not for classifiers"
    )


class Blend(NamedTuple):
    """How to interpolate between a model and another one."""

    share: float = 1.0  # the model's share; the other model has the rest
    other: str = ""  # run folder or weights file; "" for the run that the model was initialised from


NO_BLEND = Blend()


def read_blended(path: str, checkpoint: str, blend: Blend) -> StoredModel:
    """Read a run or weights file, and interpolate its weights with those of another one."""
    share, other_path = blend
    if not 0 <= share <= 1:
        raise UserError(f"--interpolate {share:g}: expected a number from 0 to 1")
    if other_path and share == 1:
        raise UserError(f"--interpolate-with {other_path}: needs --interpolate with a share below 1, such as 0.8")
    stored = read_stored(path, checkpoint)
    if share == 1:
        return stored
    other_path = other_path or stored.config.run.init_from
    if not other_path:
        raise UserError(
            f"--interpolate {share:g}: {path} was not initialised from another model; use --interpolate-with RUN"
        )
    other_path = last_finished(other_path)
    other = read_stored(other_path)
    # The recipe and the settings that change what the networks compute must be equal.
    ours, theirs = (
        {"recipe": one.config.recipe_name}
        | {
            name: getattr(one.config.recipe, name, "")
            for name in stored.recipe_class.weights.settings_to_match(stored.config.recipe)
        }
        for one in (stored, other)
    )
    for name, value in ours.items():
        if theirs[name] != value:
            what = f"has {name}={theirs[name]}, but {path} has {name}={value}"
            raise UserError(f"--interpolate-with {other_path}: {what}; both models must have the same networks")
    weights = interpolated(evaluated_values(stored.weights), evaluated_values(other.weights), share, other_path)
    origin = f"{share:g} × {stored.origin} + {1 - share:g} × {other.origin}"
    return dataclasses.replace(stored, weights=weights, origin=origin)


def interpolated(
    weights: Mapping[str, Tensor], others: Mapping[str, Tensor], share: float, other_path: str
) -> dict[str, Tensor]:
    """Return share · weights + (1 - share) · others for the networks that both have; the rest stays unchanged."""

    def network(key: str) -> str:
        return key.partition(".")[0]

    def layout(tensor: Tensor) -> tuple[object, ...]:
        return tensor.shape, tensor.is_floating_point(), tensor.is_complex()

    networks = {network(key) for key in weights} & {network(key) for key in others}
    ours, theirs = ({key for key in tensors if network(key) in networks} for tensors in (weights, others))
    differing = sorted(ours ^ theirs)
    differing += sorted(key for key in ours & theirs if layout(weights[key]) != layout(others[key]))
    if differing or not networks:
        what = f"{differing[0]!r} does not match" if differing else "they have no network in common"
        raise UserError(f"--interpolate-with {other_path}: {what}; both models must have the same networks")
    if damaged := sorted(key for key in ours if has_nan(others[key])):
        raise UserError(f"--interpolate-with {other_path}: {damaged[0]!r} contains NaN; use undamaged weights")
    mixed = {key: share * weights[key] + (1 - share) * others[key] for key in ours if weights[key].is_floating_point()}
    return {**weights, **mixed}


def open_image_model(path: str, checkpoint: str = "best", blend: Blend = NO_BLEND) -> TrainedModel:
    """Open a run folder or weights file whose recipe transforms images."""
    stored = read_blended(path, checkpoint, blend)
    check_use(stored, "apply", path)
    return open_trained(stored, path)
