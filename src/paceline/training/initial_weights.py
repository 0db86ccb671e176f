"""Initial weights from a previous run or a file, instead of random ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from torch import Tensor, nn

from paceline.config.resolve import Arguments, Config, argument_value, convert, flatten
from paceline.contracts.importer import Importer
from paceline.contracts.recipe import DataSpec, Recipe
from paceline.core.errors import NOT_FOUND, UserError
from paceline.core.files import SAFETENSORS, parse_json, user_path, why
from paceline.core.registry import load_class
from paceline.data.stream import cropped
from paceline.models.torch_file import TORCH_SUFFIXES, describe_import, read_state_dict
from paceline.parallel.shards import fill_module
from paceline.runs.checkpoint import choose_checkpoint
from paceline.runs.finished_run import name_stages
from paceline.runs.folder import RunFolder
from paceline.runs.weights import SETTINGS, check_values, check_weights_format, evaluated_values, read_tensors
from paceline.training.build import Parts
from paceline.training.resume import raise_on_all, share_newest

PUBLISHED = "published weights"


@dataclass(frozen=True)
class InitialWeights:
    """Weights by parameter name, and where they come from."""

    weights: dict[str, Tensor]
    settings: Mapping[str, Any]  # recipe settings used in training; empty for a file without settings
    origin: str  # where the weights come from, shown to the user
    images: int = 0  # images seen at the run's newest checkpoint


def initialise(parts: Parts) -> str:
    """Load the weights that a new run starts from, if there are any; return a line that lists the loaded networks.

    These are the best weights of a run or the weights in a file (`--init-from`), or published weights that the recipe's
    settings request. A host that has the weights sends them to the others. If several hosts have the run, the newest
    copy is used.
    """
    path = parts.config.run.init_from
    if not path and not parts.recipe.weights.published:
        return ""
    own, message = None, ""
    if parts.world.place.local_rank == 0:
        try:
            if path:
                own = read_initial_weights(path)
            else:
                own = InitialWeights(parts.recipe.pretrained_weights(None), {}, PUBLISHED)
        except UserError as error:
            message = f"--init-from {path}: {error}" if path else str(error)
    initial, _ = share_newest(parts.world, own, own.images if own else -1)
    if initial is None:
        raise_on_all(parts.world, message)
    assert initial is not None
    spec = cropped(parts.loaders["train"].source.spec, parts.config.run.crop)
    networks = _fill(parts.recipe, parts.config, spec, initial, path)
    for learner in parts.step.learners.values():
        learner.reset_ema()
    return f"initialised from {initial.origin}: {', '.join(networks)}"


def read_initial_weights(path: str) -> InitialWeights:
    """Return the weights (the EMA, if there is one) from a run's best checkpoint or from a file."""
    place = user_path(path)
    if place.is_dir():
        return _of_run(RunFolder(place), path)
    if place.suffix == SAFETENSORS and place.is_file():
        return _of_file(place, path)
    if place.suffix in TORCH_SUFFIXES and place.is_file():
        return InitialWeights(read_state_dict(place), {}, path)
    if not place.exists():
        raise UserError(NOT_FOUND)
    raise UserError(f"expected a run folder, or a file ending in {', '.join((SAFETENSORS, *TORCH_SUFFIXES))}")


def _of_run(folder: RunFolder, name: str) -> InitialWeights:
    if not folder.checkpoints.all():
        raise UserError(f"has no checkpoint yet{name_stages(folder.path)}")
    record = folder.read_record()  # raises for an unsupported format, whose checkpoints would look damaged
    snapshot = choose_checkpoint(folder.checkpoints, "best")
    settings = record.settings if record else {}
    origin = f"{name} at {snapshot.images:,} images"
    return InitialWeights(evaluated_values(snapshot.weights), settings, origin, folder.checkpoints.all()[-1])


def _of_file(file: Path, name: str) -> InitialWeights:
    try:
        weights, metadata = read_tensors(file)
        if SETTINGS in metadata:
            check_weights_format(metadata, str(file))
        settings = parse_json(metadata.get(SETTINGS, "{}"))
        if not isinstance(settings, dict):
            raise ValueError("the settings in its metadata are not a JSON object")
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"cannot be read ({why(error)})") from None
    return InitialWeights(evaluated_values(weights), settings, name)


def _fill(recipe: Recipe, config: Config, spec: DataSpec, initial: InitialWeights, path: str) -> list[str]:
    """Load the weights into their networks and return the networks' names; raise UserError if they do not fit."""
    found = _by_network(recipe, initial.weights)
    if not found and path:
        try:
            found = _by_network(recipe, recipe.pretrained_weights(initial.weights))
        except UserError as error:
            raise UserError(f"--init-from {path}: {error}") from None
    if not found:
        wanted, advice = ", ".join(recipe.networks), _other_use(initial, path, recipe, config.recipe_name)
        raise UserError(f"--init-from {path}: contains none of the networks {wanted}; {advice}")
    others = _differing_settings(config, initial, path)
    renewed = {name: _rows_of_other_classes(recipe, name, weights, spec) for name, weights in found.items()}
    for name, weights in found.items():
        found[name] = {key: value for key, value in weights.items() if key not in renewed[name]}
    misfits = {name: _misfits(recipe.networks[name], weights, renewed[name]) for name, weights in found.items()}
    if any(misfits.values()):
        name, differing = next((name, differing) for name, differing in misfits.items() if differing)
        same_data = "use images with the same channels (--set channels=N) and size, and the same classes"
        advice = same_data if initial.settings else "use the settings that the weights were trained with"
        raise UserError(
            f"--init-from {path}: its {name} is a different network: {differing[0]!r} does not match (differing "
            f"tensors: {len(differing)}); {advice}{f'; its {_describe_settings(others, config)}' if others else ''}"
        )
    required = recipe.weights.settings_to_match(config.recipe)
    if rejected := {name: value for name, value in others.items() if name in required}:
        raise UserError(f"--init-from {path}: its {_describe_settings(rejected, config)}")
    for name, weights in found.items():
        check_values(weights, recipe.networks[name], f"--init-from {path}" if path else PUBLISHED)
        fill_module(recipe.networks[name], weights, renewed[name])
    return [f"{name}{_describe_new(renewed[name], spec)}" for name in found]


def _rows_of_other_classes(
    recipe: Recipe, network: str, weights: Mapping[str, Tensor], spec: DataSpec
) -> frozenset[str]:
    """Return the tensors of a classifier that have one row per class, if the weights have another number of classes."""
    if not recipe.weights.row_per_class:
        return frozenset()
    own = recipe.networks[network].state_dict()
    return frozenset(
        key
        for key in weights.keys() & own.keys()
        if own[key].shape[:1] == (spec.num_classes,) != weights[key].shape[:1]
        and own[key].shape[1:] == weights[key].shape[1:]
        and own[key].ndim == weights[key].ndim
    )


def _describe_new(tensors: frozenset[str], spec: DataSpec) -> str:
    return f" (new for {spec.num_classes} classes: {', '.join(sorted(tensors))})" if tensors else ""


def _other_use(initial: InitialWeights, path: str, recipe: Recipe, recipe_name: str) -> str:
    """Return what to do with weights that belong to none of the recipe's networks."""
    if not initial.settings:
        tried = recipe.weights.importer and load_class("importer", recipe.weights.importer, Importer).tries_any_file
        return describe_import(path, recipe_name if recipe.weights.importer and not tried else "")
    own = dict.fromkeys(name.partition(".")[0] for name in initial.weights)
    return f"its networks are {', '.join(own)}, so it belongs to a different recipe"


def _by_network(recipe: Recipe, weights: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the weights of each network that has any, without the network's name."""
    by_network = {
        name: {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}
        for name in recipe.networks
    }
    return {name: own for name, own in by_network.items() if own}


def _misfits(network: nn.Module, weights: Mapping[str, Tensor], without: frozenset[str]) -> list[str]:
    """Return the names of tensors that are missing on one side, then the names of those whose shapes differ."""
    own = network.state_dict()
    one_sided = (weights.keys() ^ own.keys()) - without
    common = sorted(weights.keys() & own.keys())
    return sorted(one_sided) + [key for key in common if weights[key].shape != own[key].shape]


def _differing_settings(config: Config, initial: InitialWeights, path: str) -> dict[str, Any]:
    """Return the settings that the weights were trained with and that differ from this run's settings."""
    now, hints = asdict(config.recipe), get_type_hints(type(config.recipe))
    stored = flatten(initial.settings)
    before: dict[str, Any] = {}
    for name in now:
        shown = f"--init-from {path}: {name}"
        if hints[name] is Arguments and initial.settings:
            entries = {
                key.removeprefix(f"{name}."): value for key, value in stored.items() if key.startswith(f"{name}.")
            }
            before[name] = Arguments({entry: argument_value(value, shown) for entry, value in entries.items()})
        elif name in stored:
            before[name] = convert(stored[name], hints[name], shown)
    return {name: value for name, value in before.items() if str(value) != str(now[name])}


def _describe_settings(others: Mapping[str, Any], config: Config) -> str:
    """Return the settings that weights were trained with, and how to use them for this run."""
    values = ", ".join(f"{name}={value} (not {getattr(config.recipe, name)})" for name, value in others.items())
    lists = {name: json.dumps(v, separators=(",", ":")) for name, v in flatten(others).items() if isinstance(v, list)}
    flags = " ".join(f"--set {name}={value}" for name, value in (flatten(others) | lists).items())
    advice = f"use {flags}" if flags else f"leave out {', '.join(others)}"
    return f"weights were trained with {values}: {advice}"
