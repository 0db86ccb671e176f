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


def test_a_class_is_chosen_by_name_in_either_spelling_or_by_index() -> None:
    assert index_of("dog", "cat", "dog") == index_of("1", "cat", "dog") == index_of(1, "cat", "dog") == 1
    composed, decomposed = "\u00c4pfel", "A\u0308pfel"
    assert index_of(composed, "Birnen", decomposed) == index_of(decomposed, "Birnen", composed) == 1
    assert [index_of(name, decomposed, composed) for name in (decomposed, composed)] == [0, 1]
    for names in (("1", "2", "10"), ("1", "2", "cat")):
        assert [index_of(name, *names) for name in names] == [0, 1, 2]


@pytest.mark.parametrize(
    ("label", "names", "empty", "message"),
    [
        ("2", ("cat", "dog"), (), "unknown class '2'; choose from: cat, dog"),
        ("0", ("1", "2", "10"), (), "unknown class '0'; choose from: 1, 2, 10"),  # an index could be taken for a name
        ("0", ("1", "2", "cat"), (), "unknown class '0'; choose from: 1, 2, cat"),
        ("0", tuple(map(str, range(1, 26))), (), r"choose from: 1, 2, 3, .*, 20 and 5 more$"),
        ("dog", ("cat", "dog", "owl"), (1,), "the class has no training images; choose from: cat, owl"),
        ("1", ("cat", "dog", "owl"), (1,), "the class has no training images; choose from: cat, owl"),
    ],
)
def test_a_class_that_cannot_be_generated_is_rejected(
    label: str, names: tuple[str, ...], empty: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UserError, match=f"--class {label}: .*{message}"):
        index_of(label, *names, empty=empty)
