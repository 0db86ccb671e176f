"""Map a snapshot's weights to the parameter names of a recipe, and load them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from paceline.contracts.recipe import Recipe
from paceline.core.errors import UserError
from paceline.parallel.shards import fill_module

EMA = "ema/"


def load_weights(recipe: Recipe, weights: Mapping[str, Tensor], *, ema: bool = False) -> None:
    """Load weights into a recipe; with `ema`, use the EMA of each weight that has one."""
    plain = evaluated_values(weights) if ema else _without_ema(weights)
    check_weights(plain, recipe.state_dict())
    fill_module(recipe, plain)


def check_weights(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise UserError if the names or shapes of weights differ from those of a network."""
    differing = sorted(weights.keys() ^ own.keys())
    differing += [name for name in weights.keys() & own.keys() if weights[name].shape != own[name].shape]
    if differing:
        raise UserError(
            f"these weights belong to a different network: {differing[0]!r} does not match "
            f"(differing tensors: {len(differing)})"
        )


def evaluated_values(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a snapshot's weights by their names in the recipe, using EMAs if available.

    A tensor with several names (tied weights) has one EMA, stored under one of them.
    """
    plain = _without_ema(weights)
    emas = {name.removeprefix(EMA): value for name, value in weights.items() if name.startswith(EMA)}
    of_tensors = {id(plain[name]): value for name, value in emas.items() if name in plain}
    return {name: of_tensors.get(id(value), value) for name, value in plain.items()} | emas


def _without_ema(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if not name.startswith(EMA)}
