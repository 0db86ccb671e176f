"""Weights to start from, instead of random ones: those of another run, or of a file."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
from torch import Tensor

from paceline.engine.checkpoint import Checkpoints, choose_checkpoint
from paceline.engine.snapshot import judged_values
from paceline.errors import UserError
from paceline.recipe import Recipe


def start_from(recipe: Recipe, path: str) -> str:
    """Gives the recipe's networks the weights that a run judged best or a file holds; says which networks had some."""
    weights, origin = weights_from(path)
    found = []
    for name, network in recipe.networks.items():
        prefix = f"{name}."
        given = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
        if not given:
            continue
        own = network.state_dict()
        differing = sorted(given.keys() ^ own.keys())
        differing += [key for key in given.keys() & own.keys() if given[key].shape != own[key].shape]
        if differing:
            raise UserError(
                f"--init-from {path}: its {name} is another network: {differing[0]!r} does not fit "
                f"({len(differing)} differ); use the settings that it was made with"
            )
        network.load_state_dict(given)
        found.append(name)
    if not found:
        raise UserError(f"--init-from {path}: holds none of the networks {', '.join(recipe.networks)}")
    return f"starts from {origin}: {', '.join(found)}"


def weights_from(path: str) -> tuple[dict[str, Tensor], str]:
    """The weights of a run's best checkpoint (averages where there are any) or of a file, and where they are from."""
    place = Path(path)
    if place.is_dir():
        snapshot = choose_checkpoint(Checkpoints(place / "checkpoints"), "best")
        weights, origin = snapshot.weights, f"{path} at {snapshot.images:,} images"
    elif place.suffix == ".safetensors" and place.is_file():
        try:
            weights, origin = safetensors.torch.load(place.read_bytes()), path
        except Exception as error:
            raise UserError(f"--init-from {path}: cannot be read ({str(error).splitlines()[0]})") from None
    else:
        raise UserError(f"--init-from {path}: expected a run's folder or a .safetensors file")
    return judged_values(weights), origin
