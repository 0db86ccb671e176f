"""Map a snapshot's weights to the parameter names of a recipe, and load them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from paceline.contracts.recipe import Recipe
from paceline.core.errors import UserError
from paceline.parallel.shards import fill_module

EMA = "ema/"


def load_weights(recipe: Recipe, weights: Mapping[str, Tensor], *, ema: bool = False, where: str = "") -> None:
    """Load weights into a recipe; with `ema`, use the EMAs; see `check_values` for `where`."""
    plain = evaluated_values(weights) if ema else _without_ema(weights)
    check_weights(plain, recipe.state_dict())
    if where:
        check_values(plain, recipe, where)
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


def check_values(weights: Mapping[str, Tensor], network: nn.Module, where: str) -> None:
    """Raise UserError about `where` if a tensor has another kind of numbers than the network's, or is not finite.

    Floating-point numbers of any precision fit each other. A buffer may be infinite, as the mask of an attention layer.
    """
    for name, own in network.state_dict(keep_vars=True).items():
        if name not in weights:
            continue
        value = weights[name]
        if (value.is_floating_point(), value.is_complex()) != (own.is_floating_point(), own.is_complex()):
            kinds = " instead of ".join(str(tensor.dtype).removeprefix("torch.") for tensor in (value, own))
            raise UserError(f"{where}: {name!r} is {kinds}; convert it, or use another file")
        if has_nan(value) or (isinstance(own, nn.Parameter) and value.to(own.dtype).isinf().any()):
            raise UserError(f"{where}: {name!r} contains NaN or infinite values; use undamaged weights")


def has_nan(tensor: Tensor) -> bool:
    """Return whether a tensor contains NaN; 8-bit numbers are widened first, because torch cannot test them."""
    return bool((tensor.float() if tensor.itemsize == 1 else tensor).isnan().any())


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
