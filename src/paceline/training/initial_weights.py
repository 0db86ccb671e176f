"""Weights to start from, instead of random ones: those of another run, or of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from paceline.config.resolve import Config, convert
from paceline.contracts.recipe import DataSpec, Recipe
from paceline.core.errors import UserError
from paceline.data.crop import cropped
from paceline.runs.checkpoint import choose_checkpoint
from paceline.runs.finished_run import name_stages
from paceline.runs.folder import RunFolder
from paceline.runs.weights import evaluated_values
from paceline.runs.weights_file import SETTINGS, SUFFIX, check_weights_format, read_tensors
from paceline.training.agreement import from_holder, tell
from paceline.training.build import Parts


@dataclass(frozen=True)
class Given:
    """Weights from elsewhere by their names in a recipe, and what is known of them."""

    weights: dict[str, Tensor]
    settings: Mapping[str, Any]  # of the recipe that learned them; those of a bare file are not known
    origin: str  # for a person
    images: int = 0  # that their run has seen


def start_from(parts: Parts, path: str) -> str:
    """Gives the networks the weights that a run judged best or a file holds; says which networks had some.

    A host that has them sends them to the others. Of a run that several have, the one that is furthest counts.
    """
    own, mistake = None, ""
    if parts.world.place.local_rank == 0:
        try:
            own = read_given(path)
        except UserError as error:
            mistake = f"--init-from {path}: {error}"
    given, _ = from_holder(parts.world, own, own.images if own else -1)
    if given is None:
        tell(parts.world, mistake)
    assert given is not None
    spec = cropped(parts.loaders["train"].source.spec, parts.config.run.crop)
    networks = _fill(parts.recipe, parts.config, spec, given, path)
    for learner in parts.step.learners.values():
        learner.reset_ema()
    return f"starts from {given.origin}: {', '.join(networks)}"


def read_given(path: str) -> Given:
    """The weights of a run's best checkpoint (averages where there are any) or of a file."""
    place = Path(path).expanduser()
    if place.is_dir():
        return _of_run(RunFolder(place), path)
    if place.suffix == SUFFIX and place.is_file():
        return _of_file(place, path)
    raise UserError(f"expected a run's folder or a {SUFFIX} file")


def _of_run(folder: RunFolder, name: str) -> Given:
    if not folder.checkpoints.all():
        raise UserError(f"has no checkpoint yet{name_stages(folder.path)}")
    record = folder.read_record()  # of another format, the checkpoints are not damaged but cannot be read
    snapshot = choose_checkpoint(folder.checkpoints, "best")
    settings = record.settings if record else {}
    origin = f"{name} at {snapshot.images:,} images"
    return Given(evaluated_values(snapshot.weights), settings, origin, folder.checkpoints.all()[-1])


def _of_file(file: Path, name: str) -> Given:
    try:
        weights, metadata = read_tensors(file)
        if SETTINGS in metadata:
            check_weights_format(metadata, str(file))
        settings = json.loads(metadata.get(SETTINGS, "{}"))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"cannot be read ({str(error).splitlines()[0]})") from None
    return Given(evaluated_values(weights), settings, name)


def _fill(recipe: Recipe, config: Config, spec: DataSpec, given: Given, path: str) -> list[str]:
    """Puts the weights into the networks that they are of, and names these; refuses those that mean other networks."""
    by_network = {name: _beneath(f"{name}.", given.weights) for name in recipe.networks}
    found = {name: weights for name, weights in by_network.items() if weights}
    if not found:
        raise UserError(f"--init-from {path}: holds none of the networks {', '.join(recipe.networks)}")
    others = _other_settings(config, given, path)
    misfits = {name: _misfits(recipe.networks[name], weights) for name, weights in found.items()}
    if any(misfits.values()):
        _refuse_settings(_those_of_networks(others, recipe, config, spec, found), config, path)
        name, differing = next((name, differing) for name, differing in misfits.items() if differing)
        advice = "was its data of another kind?" if given.settings else "use the settings that it was made with"
        raise UserError(
            f"--init-from {path}: its {name} is another network: {differing[0]!r} does not fit "
            f"({len(differing)} differ); {advice}"
        )
    _refuse_settings({name: value for name, value in others.items() if name in recipe.must_match_weights}, config, path)
    for name, weights in found.items():
        recipe.networks[name].load_state_dict(weights)
    return list(found)


def _beneath(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}


def _misfits(network: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    """The tensors that only one of the two has, then those of another shape."""
    own = network.state_dict()
    common = sorted(weights.keys() & own.keys())
    return sorted(weights.keys() ^ own.keys()) + [key for key in common if weights[key].shape != own[key].shape]


def _other_settings(config: Config, given: Given, path: str) -> dict[str, Any]:
    """The recipe's settings that the weights were learned with, where this run has others."""
    now, hints = asdict(config.recipe), get_type_hints(type(config.recipe))
    said = {name: value for name, value in given.settings.items() if name in now and str(value) != str(now[name])}
    return {name: convert(value, hints[name], f"--init-from {path}: {name}") for name, value in said.items()}


def _those_of_networks(
    others: dict[str, Any], recipe: Recipe, config: Config, spec: DataSpec, found: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Any]:
    """Those of the settings that change what the networks compute or what they have room for."""
    changing = {}
    for name, value in others.items():
        if name not in recipe.must_match_weights:
            with torch.random.fork_rng(devices=[]), suppress(UserError):  # some values do not go without others
                changed = type(recipe)(replace(config.recipe, **{name: value}), spec).networks
                if not any(_misfits(changed[one], recipe.networks[one].state_dict()) for one in found):
                    continue
        changing[name] = value
    return changing


def _refuse_settings(others: Mapping[str, Any], config: Config, path: str) -> None:
    if others:
        told = ", ".join(f"{name}={value} and not {getattr(config.recipe, name)}" for name, value in others.items())
        flags = " ".join(f"--set {name}={value}" for name, value in others.items())
        raise UserError(f"--init-from {path}: its weights were learned with {told}; use {flags}")
