"""Mistakes in a user's own source are reported with the value that is wrong and what to return instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline import ArraySource, DataSpec, Source, UserError
from paceline.data.source import check_classes, check_sample

LABELS = np.arange(6) % 3


def in_memory(labels: Any, num_classes: int = 3, names: tuple[str, ...] = ()) -> ArraySource:
    images = np.zeros((6, 4, 4, 1), np.uint8)
    return ArraySource({"image": images, "label": labels}, DataSpec(1, 4, 4, num_classes, names))


class OneAtATime(Source):
    """Reads one sample at a time, with the labels that it is given."""

    def __init__(self, labels: list[Any]) -> None:
        self.labels, self.spec = labels, DataSpec(1, 4, 4, 3)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Any:
        return {"image": np.zeros((4, 4, 1), np.uint8), "label": self.labels[index]}


@pytest.mark.parametrize("source", [in_memory(LABELS.tolist()), OneAtATime([0, 1, 2])])
def test_a_label_that_is_a_python_number_is_rejected(source: Source) -> None:
    with pytest.raises(UserError, match=r"^mine: 'label' is of type int: return a NumPy array or number$"):
        check_sample(source, "mine")


def test_labels_of_a_type_that_no_metric_accepts_are_rejected() -> None:
    with pytest.raises(UserError, match=r"'label' is a uint8 array of shape .*: return a single int64 number"):
        check_sample(in_memory(LABELS.astype(np.uint8)), "mine")


@pytest.mark.parametrize(("labels", "wrong"), [(LABELS + 1, 3), (LABELS - 1, -1)])
def test_labels_that_do_not_start_at_0_are_rejected(labels: Any, wrong: int) -> None:
    with pytest.raises(UserError, match=rf"mine: a label is {wrong}, but spec.num_classes is 3; .* from 0 to 2$"):
        check_classes(in_memory(labels), "mine")
    with pytest.raises(UserError, match=f"mine: a label is {wrong}"):
        check_classes(OneAtATime([np.int64(wrong)]), "mine")


def test_every_class_needs_one_name() -> None:
    with pytest.raises(UserError, match=r"mine: spec.num_classes is 3, but there are 2 class names"):
        check_classes(in_memory(LABELS, names=("a", "b")), "mine")


def test_arrays_of_different_lengths_are_rejected() -> None:
    with pytest.raises(UserError, match=r"ArraySource: the arrays differ in length \('image' has 6, 'label' has 5\)"):
        in_memory(LABELS[:5])


@pytest.mark.parametrize(
    "source", [in_memory(LABELS), in_memory(LABELS, names=("a", "b", "c")), in_memory(LABELS + 9, num_classes=0)]
)
def test_correct_samples_are_accepted(source: Source) -> None:
    check_sample(source, "mine")
    check_classes(source, "mine")
