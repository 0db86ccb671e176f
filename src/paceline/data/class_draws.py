"""The draws that select the class of a generated image; see `Recipe.class_draw`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.data.source import Source

LABEL = "label"


def selecting(number: int, num_classes: int) -> float:
    """Return the draw that selects a class."""
    return (number + 0.5) / num_classes


def count_classes(source: Source) -> Tensor:
    """Return the number of samples of each class, on the CPU; samples are read only if their labels are not known."""
    found = source.numbers_of(np.arange(len(source)))
    if found is None or LABEL not in found:
        labels = np.array([source.read(index)[LABEL] for index in range(len(source))])
    else:
        labels = found[LABEL]
    return torch.from_numpy(np.bincount(labels.astype(np.int64), minlength=source.spec.num_classes))


def in_proportion(draws: Tensor, counts: Tensor) -> Tensor:
    """Turn uniform draws into draws that select each class as often as it occurs in `counts`, without empty classes.

    If all classes occur equally often, the draws still select the same classes.
    """
    ends = counts.cumsum(0)
    numbers = torch.searchsorted(ends[:-1].double(), draws.double() * ends[-1], right=True)
    return ((numbers + 0.5) / len(counts)).to(draws.dtype)
