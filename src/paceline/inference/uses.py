"""Which command to use with a trained model: `apply`, `sample` or `predict`."""

from __future__ import annotations

from typing import Literal

from paceline.contracts.recipe import Recipe
from paceline.core.errors import UserError
from paceline.evaluation.contract import is_classifier
from paceline.inference.trained import StoredModel

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
