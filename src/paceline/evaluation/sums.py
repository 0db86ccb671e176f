"""Sums of features over samples, which can be reduced across ranks, and the statistics computed from them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.evaluation.features.network import Features

NUM_SPLITS = 10  # groups of images for the Inception Score


class Layout(NamedTuple):
    """The numbers of samples, features and classes, which determine the shapes of the sums."""

    total: int  # expected number of samples
    num_features: int
    num_classes: int
    num_rows: int  # number of samples, counted from the first, whose features are kept

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the sums by name, in order."""
        return {
            "count": (1,),
            "sum": (self.num_features,),
            "products": (self.num_features, self.num_features),
            "rows": (self.num_rows, self.num_features),
            "split_counts": (NUM_SPLITS,),
            "likelihoods": (NUM_SPLITS, self.num_classes),
            "negative_entropies": (NUM_SPLITS,),
        }

    @property
    def num_values(self) -> int:
        """The length of the vector of all sums."""
        return sum(prod(shape) for shape in self.shapes().values())


class FeatureSums:
    """Sums features in float64. Samples are identified by position, so sums do not depend on the number of ranks."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.parts = {
            name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in layout.shapes().items()
        }
        # The extra row receives all samples that are not kept, so that the host need not wait for the device.
        self.rows = torch.zeros(layout.num_rows + 1, layout.num_features, dtype=torch.float64, device=device)

    def add(self, features: Features, position: Tensor) -> None:
        """Add a batch. The position of a sample is its index among all samples."""
        vectors = features.vectors.double()
        self.parts["count"] += len(vectors)
        self.parts["sum"] += vectors.sum(dim=0)
        self.parts["products"] += vectors.T @ vectors
        self.rows.index_copy_(0, position.clamp_max(self.layout.num_rows), vectors)
        if features.logits is not None:
            likelihood = features.logits.double().softmax(dim=1)
            splits = torch.arange(NUM_SPLITS, device=position.device)
            member = (splits[:, None] == position * NUM_SPLITS // self.layout.total).double()
            self.parts["split_counts"] += member.sum(dim=1)
            self.parts["likelihoods"] += member @ likelihood
            self.parts["negative_entropies"] += member @ torch.special.xlogy(likelihood, likelihood).sum(dim=1)

    def flat(self) -> Tensor:
        """Return all sums as one vector."""
        parts = self.parts | {"rows": self.rows[:-1]}
        return torch.cat([part.flatten() for part in parts.values()])


def unflatten(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Split a vector returned by `flat` into sums by name."""
    shapes = layout.shapes()
    pieces = torch.split(flat, [prod(shape) for shape in shapes.values()])
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


@dataclass(frozen=True)
class Statistics:
    """Statistics of features, from which distances are computed."""

    count: Tensor  # shape [1]
    mean: Tensor
    covariance: Tensor
    rows: Tensor  # the features of the first samples


def statistics_from(sums: dict[str, Tensor]) -> Statistics:
    """Compute the statistics from the sums, with an unbiased covariance."""
    count = sums["count"]
    mean = sums["sum"] / count
    covariance = (sums["products"] - count * mean[:, None] * mean) / (count - 1)
    return Statistics(count, mean, covariance, sums["rows"])
