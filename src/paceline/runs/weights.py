"""The weights of a snapshot by their names in a recipe, and back into the recipe."""

from __future__ import annotations

from torch import Tensor

from paceline.contracts.recipe import Recipe
from paceline.core.errors import UserError

AVERAGED = "averaged/"


def load_weights(recipe: Recipe, weights: dict[str, Tensor], *, averaged: bool = False) -> None:
    """Puts weights into a recipe; with `averaged`, their moving averages where there are any."""
    plain = judged_values(weights) if averaged else _without_averages(weights)
    own = recipe.state_dict()
    differing = sorted(plain.keys() ^ own.keys())
    differing += [name for name in plain.keys() & own.keys() if plain[name].shape != own[name].shape]
    if differing:
        raise UserError(
            f"these weights are of another network: {differing[0]!r} does not fit ({len(differing)} differ)"
        )
    recipe.load_state_dict(plain)


def judged_values(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A snapshot's weights by their names in the recipe: moving averages where there are any."""
    averages = {name.removeprefix(AVERAGED): value for name, value in weights.items() if name.startswith(AVERAGED)}
    return _without_averages(weights) | averages


def _without_averages(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if not name.startswith(AVERAGED)}
