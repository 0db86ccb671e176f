"""Random inputs for generated images of a chosen class, or closer to the average image (truncation)."""

from __future__ import annotations

from paceline.contracts.recipe import Batch, Recipe
from paceline.core.errors import UserError, unknown
from paceline.data.class_draws import selecting
from paceline.data.draws import Drawer
from paceline.training.previews import fixed_draws

EVERY_CLASS = "all"  # one class per row


def sample_draws(
    recipe: Recipe, drawer: Drawer, numbers: range, classes: tuple[str, ...], label: str | int | None, truncation: float
) -> Batch:
    """Return the random inputs for the sample images with these numbers, which are the same in any batch."""
    draws = fixed_draws(recipe, drawer, len(numbers), numbers.start)
    draws = truncate_draws(recipe, draws, truncation, "truncation=")
    return draws if label is None else choose_class(recipe, draws, classes, label, 0, "label=")


def truncate_draws(recipe: Recipe, draws: Batch, truncation: float, flag: str) -> Batch:
    """Scale normally distributed inputs by `truncation`: below 1, images are more alike and often look better."""
    if not 0 <= truncation <= 2:
        raise UserError(f"{flag}{truncation:g}: must be at least 0 and at most 2")
    if truncation == 1:
        return draws
    is_normal = {name: recipe.draws[name].kind == "normal" for name in draws}
    return {name: rows * truncation if is_normal[name] else rows for name, rows in draws.items()}


def choose_class(
    recipe: Recipe, draws: Batch, classes: tuple[str, ...], label: str | int, columns: int, flag: str
) -> Batch:
    """Return draws that select a class by its name or index, or a different class for each row of images.

    If `columns` is 0, the images have no rows, and `all` is an unknown class.
    """
    if not recipe.class_draw:
        raise UserError(f"{flag}{label}: {type(recipe).__name__} is not class-conditional; leave it out")
    rows = draws[recipe.class_draw].clone()
    if columns and is_every_class(label, classes):
        for start in range(0, len(rows), columns):
            rows[start : start + columns] = selecting(start // columns % len(classes), len(classes))
    else:
        rows[:] = selecting(_index(label, classes, flag), len(classes))
    return draws | {recipe.class_draw: rows}


def is_every_class(label: str | int, classes: tuple[str, ...]) -> bool:
    """Return whether a label selects a different class for each row; a class may itself be named `all`."""
    return label == EVERY_CLASS and EVERY_CLASS not in classes


def _index(label: str | int, classes: tuple[str, ...], flag: str) -> int:
    if str(label) in classes:
        return classes.index(str(label))
    number = int(label) if str(label).isdecimal() else -1
    if not 0 <= number < len(classes):
        raise UserError(f"{flag}{label}: {unknown('class', str(label), classes)}")
    return number
