"""Weights to start from, instead of random ones: those of another run, or of a file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from paceline.config import Config
from paceline.engine.agreement import from_holder, tell
from paceline.engine.assemble import Parts
from paceline.engine.checkpoint import choose_checkpoint
from paceline.engine.finished_run import name_stages
from paceline.engine.run_folder import RunFolder
from paceline.engine.snapshot import judged_values
from paceline.engine.weights_file import SETTINGS, SUFFIX
from paceline.errors import UserError
from paceline.recipe import Recipe


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
    networks = _fill(parts.recipe, parts.config, given, path)
    for learner in parts.step.learners.values():
        learner.begin_average()
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
    snapshot = choose_checkpoint(folder.checkpoints, "best")
    try:
        settings = tomllib.loads(folder.config_file.read_text()) if folder.config_file.exists() else {}
    except ValueError as error:
        raise UserError(f"{folder.config_file.name} cannot be read ({error})") from None
    origin = f"{name} at {snapshot.images:,} images"
    return Given(judged_values(snapshot.weights), settings, origin, folder.checkpoints.all()[-1])


def _of_file(file: Path, name: str) -> Given:
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            settings = json.loads((opened.metadata() or {}).get(SETTINGS, "{}"))
        weights = safetensors.torch.load_file(file)
    except Exception as error:
        raise UserError(f"cannot be read ({str(error).splitlines()[0]})") from None
    return Given(judged_values(weights), settings, name)


def _fill(recipe: Recipe, config: Config, given: Given, path: str) -> list[str]:
    """Puts the weights into the networks that they are of, and names these."""
    by_network = {name: _beneath(f"{name}.", given.weights) for name in recipe.networks}
    found = [name for name, weights in by_network.items() if weights]
    if not found:
        raise UserError(f"--init-from {path}: holds none of the networks {', '.join(recipe.networks)}")
    _check_settings(recipe, config, given, path)
    for name in found:
        weights, own = by_network[name], recipe.networks[name].state_dict()
        differing = sorted(weights.keys() ^ own.keys())
        differing += [key for key in weights.keys() & own.keys() if weights[key].shape != own[key].shape]
        if differing:
            raise UserError(
                f"--init-from {path}: its {name} is another network: {differing[0]!r} does not fit "
                f"({len(differing)} differ); use the settings that it was made with"
            )
        recipe.networks[name].load_state_dict(weights)
    return found


def _beneath(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}


def _check_settings(recipe: Recipe, config: Config, given: Given, path: str) -> None:
    """Refuses weights that would fit and yet mean something else with this run's settings."""
    now = {name: getattr(config.recipe, name) for name in recipe.bound_to_weights}
    other = {name: given.settings[name] for name in now if str(given.settings.get(name, now[name])) != str(now[name])}
    if other:
        differences = ", ".join(f"{name}={value} and not {now[name]}" for name, value in other.items())
        flags = " ".join(f"--set {name}={value}" for name, value in other.items())
        raise UserError(f"--init-from {path}: its weights were learned with {differences}; use {flags}")
