"""Random inputs for generated images of a chosen class, or closer to the average image (truncation)."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from paceline.contracts.recipe import Batch, DataSpec, Recipe
from paceline.core.errors import UserError, unknown
from paceline.data.class_draws import selecting
from paceline.data.draws import Drawer
from paceline.training.previews import fixed_draws

EVERY_CLASS = "all"  # one class per row
MAX_LISTED = 20  # classes in an error message


def sample_draws(
    recipe: Recipe, drawer: Drawer, numbers: range, spec: DataSpec, label: str | int | None, truncation: float
) -> Batch:
    """Return the random inputs for the sample images with these numbers, which are the same in any batch."""
    draws = fixed_draws(recipe, drawer, spec, len(numbers), numbers.start)
    draws = truncate_draws(recipe, draws, truncation, "truncation=")
    return draws if label is None else choose_class(recipe, draws, spec, label, 0, "label=")


def truncate_draws(recipe: Recipe, draws: Batch, truncation: float, flag: str) -> Batch:
    """Scale normally distributed inputs by `truncation`: below 1, images are more alike and often look better."""
    check_truncation(truncation, flag)
    if truncation == 1:
        return draws
    is_normal = {name: recipe.draws[name].kind == "normal" for name in draws}
    return {name: rows * truncation if is_normal[name] else rows for name, rows in draws.items()}


def check_truncation(truncation: float, flag: str) -> None:
    """Raise UserError if the truncation factor is not between 0 and 2."""
    if not 0 <= truncation <= 2:
        raise UserError(f"{flag}{truncation:g}: must be at least 0 and at most 2")


def choose_class(recipe: Recipe, draws: Batch, spec: DataSpec, label: str | int, columns: int, flag: str) -> Batch:
    """Return draws that select a class by its name or index, or a different class for each row of images.

    If `columns` is 0, the images have no rows, and `all` is an unknown class.
    """
    _check_conditional(recipe, label, flag)
    rows = draws[recipe.class_draw].clone()
    if columns and is_every_class(label, spec.classes):
        classes = trained_classes(spec)
        for start in range(0, len(rows), columns):
            rows[start : start + columns] = selecting(classes[start // columns % len(classes)], spec.num_classes)
    else:
        rows[:] = selecting(class_index(recipe, spec, label, flag), spec.num_classes)
    return draws | {recipe.class_draw: rows}


def is_every_class(label: str | int, classes: tuple[str, ...]) -> bool:
    """Return whether a label selects a different class for each row; a class may itself be named `all`."""
    return label == EVERY_CLASS and EVERY_CLASS not in classes


def trained_classes(spec: DataSpec) -> list[int]:
    """Return the indices of the classes that have training images."""
    return sorted(set(range(spec.num_classes)) - set(spec.empty_classes))


def class_index(recipe: Recipe, spec: DataSpec, label: str | int, flag: str) -> int:
    """Return the index of a class, given by its name or its index; raise UserError if the model cannot generate it.

    If a class name is a number, only names are accepted, since an index could be mistaken for a name.
    """
    _check_conditional(recipe, label, flag)
    index = _find(label, spec.classes, flag)
    if index in spec.empty_classes:
        trained = _listed([spec.classes[one] for one in trained_classes(spec)])
        raise UserError(f"{flag}{label}: the class has no training images; choose from: {trained}")
    return index


def _find(label: str | int, classes: tuple[str, ...], flag: str) -> int:
    if str(label) in classes:
        return classes.index(str(label))
    # In names of folders copied from macOS, "ü" may be stored as two characters, but users type it as one.
    composed = [unicodedata.normalize("NFC", name) for name in classes]
    typed = unicodedata.normalize("NFC", str(label))
    if typed in composed:
        return composed.index(typed)
    if any(name.isdecimal() for name in classes):
        raise UserError(f"{flag}{label}: unknown class {str(label)!r}; choose from: {_listed(classes)}")
    number = int(label) if str(label).isdecimal() else -1
    if not 0 <= number < len(classes):
        raise UserError(f"{flag}{label}: {unknown('class', str(label), classes)}")
    return number


def _check_conditional(recipe: Recipe, label: str | int, flag: str) -> None:
    if not recipe.class_draw:
        raise UserError(f"{flag}{label}: {type(recipe).__name__} is not class-conditional; leave it out")


def _listed(classes: Sequence[str]) -> str:
    more = len(classes) - MAX_LISTED
    return ", ".join(classes[:MAX_LISTED]) + (f" and {more:,} more" if more > 0 else "")
