"""The draws that select the class of a generated image; see `Recipe.class_draw`."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.contracts.recipe import DataSpec
from paceline.data.source import Source

LABEL = "label"
NumberOrTensor = TypeVar("NumberOrTensor", float, Tensor)


def selecting(number: NumberOrTensor, num_classes: int) -> NumberOrTensor:
    """Return the draws that select classes."""
    return (number + 0.5) / num_classes


def count_classes(source: Source) -> Tensor:
    """Return the number of samples of each class, on the CPU; samples are read only if their labels are not known."""
    found = source.numbers_of(np.arange(len(source)))
    if found is None or LABEL not in found:
        labels = np.array([source.read(index)[LABEL] for index in range(len(source))])
    else:
        labels = found[LABEL]
    return torch.from_numpy(np.bincount(labels.astype(np.int64), minlength=source.spec.num_classes))


def with_empty_classes(source: Source) -> DataSpec:
    """Return a source's data spec with its empty classes, if labels are known without reading the samples."""
    found = source.numbers_of(np.arange(len(source)))
    if found is None or LABEL not in found:
        return source.spec
    empty = np.setdiff1d(np.arange(source.spec.num_classes), found[LABEL])
    return dataclasses.replace(source.spec, empty_classes=tuple(empty.tolist()))


def without_empty_classes(draws: Tensor, spec: DataSpec) -> Tensor:
    """Turn uniform draws into draws that select all classes with training images with the same probability."""
    if not spec.empty_classes:
        return draws
    counts = torch.ones(spec.num_classes, device=draws.device)
    counts[list(spec.empty_classes)] = 0
    return in_proportion(draws, counts)


def in_proportion(draws: Tensor, counts: Tensor) -> Tensor:
    """Turn uniform draws into draws that select each class as often as it occurs in `counts`, without empty classes.

    If all classes occur equally often, the draws still select the same classes.
    """
    ends = counts.cumsum(0)
    numbers = torch.searchsorted(ends[:-1].double(), draws.double() * ends[-1], right=True)
    return selecting(numbers, len(counts)).to(draws.dtype)
