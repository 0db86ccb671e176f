"""Classes of generated images are chosen by name or index."""

from __future__ import annotations

import pytest

from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.inference.model import class_index
from paceline.recipes.r3gan import R3gan, R3ganSettings

SETTINGS = R3ganSettings(nz=8, width=8, num_blocks=1, group_size=4)


def index_of(label: str | int, *names: str, empty: tuple[int, ...] = ()) -> int:
    spec = DataSpec(1, 16, 16, num_classes=len(names), class_names=names, empty_classes=empty)
    return class_index(R3gan(SETTINGS, spec), spec, label, "--class ")


def test_a_class_is_chosen_by_name_or_index() -> None:
    assert index_of("dog", "cat", "dog") == index_of("1", "cat", "dog") == index_of(1, "cat", "dog") == 1
    with pytest.raises(UserError, match="--class 2: unknown class '2'; choose from: cat, dog"):
        index_of("2", "cat", "dog")


def test_a_class_is_found_in_either_spelling_of_an_accented_name() -> None:
    composed, decomposed = "\u00c4pfel", "A\u0308pfel"
    assert index_of(composed, "Birnen", decomposed) == index_of(decomposed, "Birnen", composed) == 1
    assert [index_of(name, decomposed, composed) for name in (decomposed, composed)] == [0, 1]


@pytest.mark.parametrize("names", [("1", "2", "10"), ("1", "2", "cat")])
def test_if_class_names_are_numbers_an_index_is_not_accepted(names: tuple[str, ...]) -> None:
    assert [index_of(name, *names) for name in names] == [0, 1, 2]
    with pytest.raises(UserError, match=f"--class 0: unknown class '0'; choose from: {', '.join(names)}"):
        index_of("0", *names)


def test_long_lists_of_classes_are_shortened() -> None:
    with pytest.raises(UserError, match=r"choose from: 1, 2, 3, .*, 20 and 5 more$"):
        index_of("0", *(str(number) for number in range(1, 26)))


def test_a_class_without_training_images_is_not_accepted_by_name_or_index() -> None:
    for label in ("dog", "1"):
        with pytest.raises(
            UserError, match=f"--class {label}: the class has no training images; choose from: cat, owl"
        ):
            index_of(label, "cat", "dog", "owl", empty=(1,))
