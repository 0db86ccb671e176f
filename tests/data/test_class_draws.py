"""The classes of generated images follow the class counts of a source."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.contracts.recipe import DataSpec
from paceline.data.source import ArraySource, Sample, Source, Subset, count_classes, in_proportion, selecting

LABELS = np.array([0, 2, 2, 2, 0, 2, 2, 2])
SPEC = DataSpec(1, 2, 2, num_classes=4)


class Unlisted(Source):
    """A user's source, whose labels are only known after reading a sample."""

    spec = SPEC

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return len(LABELS)

    def read(self, index: int) -> Sample:
        return {"image": np.zeros((2, 2, 1), np.uint8), "label": LABELS[index]}


def selected(draws: torch.Tensor, num_classes: int) -> torch.Tensor:
    return (draws * num_classes).long()


def test_the_samples_of_each_class_are_counted_in_any_source() -> None:
    arrays = ArraySource({"image": np.zeros((8, 2, 2, 1), np.uint8), "label": LABELS}, SPEC)
    assert count_classes(arrays).tolist() == count_classes(Unlisted()).tolist() == [2, 0, 6, 0]
    assert count_classes(Subset(arrays, [1, 2, 4])).tolist() == [1, 0, 2, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_classes_are_drawn_as_often_as_they_occur(dtype: torch.dtype) -> None:
    draws = torch.rand(20_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    edges = torch.tensor([0.0, 1 - 2**-24], dtype=dtype)
    drawn = in_proportion(torch.cat([draws, edges]), torch.tensor([2, 0, 6, 0]))
    assert drawn.dtype == dtype
    shares = selected(drawn, 4).bincount(minlength=4) / len(drawn)
    assert shares[1] == shares[3] == 0, "a class without images is drawn"
    assert shares[0].item() == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("num_classes", [2, 7, 10, 1000])
def test_equal_counts_leave_the_classes_as_they_were(num_classes: int) -> None:
    draws = torch.rand(5000, generator=torch.Generator().manual_seed(1))
    draws = torch.cat([draws, torch.arange(num_classes) / num_classes])
    drawn = in_proportion(draws, torch.full((num_classes,), 17))
    expected = (draws.double() * num_classes).long()
    assert torch.equal(selected(drawn, num_classes), expected)


def test_a_draw_that_selects_a_class_does_so_in_single_precision() -> None:
    draws = torch.tensor([selecting(number, 1000) for number in range(1000)])
    assert torch.equal(selected(draws, 1000), torch.arange(1000))
