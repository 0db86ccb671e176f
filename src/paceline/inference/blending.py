"""Interpolation between the weights of two trained models with the same networks.

Between a network trained with a pixel loss and the same network trained further with a discriminator, this trades
accuracy for sharpness without retraining (Wang et al., ESRGAN, 2018, section 3.4).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from paceline.core.errors import UserError
from paceline.inference.trained import StoredModel, read_stored
from paceline.runs.stages import last_finished
from paceline.runs.weights import evaluated_values, has_nan


class Blend(NamedTuple):
    """How to interpolate between a model and another one."""

    share: float = 1.0  # the model's share; the other model has the rest
    other: str = ""  # run folder or weights file; "" for the run that the model was initialised from


NO_BLEND = Blend()


def read_blended(path: str, checkpoint: str, blend: Blend) -> StoredModel:
    """Read a run or weights file, and interpolate its weights with those of another one."""
    _check(blend)
    stored = read_stored(path, checkpoint)
    if blend.share == 1:
        return stored
    other_path = blend.other or stored.config.run.init_from
    if not other_path:
        raise UserError(
            f"--interpolate {blend.share:g}: {path} was not initialised from another model; use --interpolate-with RUN"
        )
    other_path = last_finished(other_path)
    other = read_stored(other_path)
    _check_settings(stored, other, path, other_path)
    weights = interpolated(evaluated_values(stored.weights), evaluated_values(other.weights), blend.share, other_path)
    origin = f"{blend.share:g} × {stored.origin} + {1 - blend.share:g} × {other.origin}"
    return dataclasses.replace(stored, weights=weights, origin=origin)


def interpolated(
    weights: Mapping[str, Tensor], others: Mapping[str, Tensor], share: float, other_path: str
) -> dict[str, Tensor]:
    """Return share · weights + (1 - share) · others for the networks that both have; the rest stays unchanged."""
    networks = {_network(key) for key in weights} & {_network(key) for key in others}
    ours, theirs = ({key for key in tensors if _network(key) in networks} for tensors in (weights, others))
    differing = sorted(ours ^ theirs)
    differing += sorted(key for key in ours & theirs if _layout(weights[key]) != _layout(others[key]))
    if differing or not networks:
        what = f"{differing[0]!r} does not match" if differing else "they have no network in common"
        raise UserError(f"--interpolate-with {other_path}: {what}; both models must have the same networks")
    if damaged := sorted(key for key in ours if has_nan(others[key])):
        raise UserError(f"--interpolate-with {other_path}: {damaged[0]!r} contains NaN; use undamaged weights")
    mixed = {key: share * weights[key] + (1 - share) * others[key] for key in ours if weights[key].is_floating_point()}
    return {**weights, **mixed}


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.is_floating_point(), tensor.is_complex()


def _network(key: str) -> str:
    return key.partition(".")[0]


def _check(blend: Blend) -> None:
    if not 0 <= blend.share <= 1:
        raise UserError(f"--interpolate {blend.share:g}: expected a number from 0 to 1")
    if blend.other and blend.share == 1:
        raise UserError(f"--interpolate-with {blend.other}: needs --interpolate with a share below 1, such as 0.8")


def _check_settings(stored: StoredModel, other: StoredModel, path: str, other_path: str) -> None:
    """Raise UserError if the recipes differ, or if a setting that changes what the networks compute differs."""
    names = (stored.config.recipe_name, other.config.recipe_name)
    if names[0] != names[1]:
        raise UserError(
            f"--interpolate-with {other_path}: its recipe is {names[1]!r}, but that of {path} is {names[0]!r}; "
            "use two models of the same recipe"
        )
    for name in stored.recipe_class.settings_of_weights(stored.config.recipe):
        ours, theirs = (getattr(one.config.recipe, name) for one in (stored, other))
        if ours != theirs:
            raise UserError(
                f"--interpolate-with {other_path}: has {name}={theirs}, but {path} has {name}={ours}; "
                "both models must have the same networks"
            )
