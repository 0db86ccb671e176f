"""What features add up to: sums over samples that add over parts, and the statistics behind them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.evaluation.features.network import Seen

NUM_SPLITS = 10  # of the pictures, for the Inception Score


class Layout(NamedTuple):
    """The sizes of the sums."""

    total: int  # samples that will come
    num_features: int
    num_classes: int
    num_rows: int  # the features of so many first samples are kept as they are

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The sums by name, in their order."""
        return {
            "count": (1,),
            "sum": (self.num_features,),
            "products": (self.num_features, self.num_features),
            "rows": (self.num_rows, self.num_features),
            "split_counts": (NUM_SPLITS,),
            "likelihoods": (NUM_SPLITS, self.num_classes),
            "negative_entropies": (NUM_SPLITS,),
        }


class FeatureSums:
    """Adds up features in float64; a sample is known by its position, so the sums do not depend on the parts."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.parts = {
            name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in layout.shapes().items()
        }
        # One row more takes all samples behind those that are kept: no wait to find out which they are.
        self.rows = torch.zeros(layout.num_rows + 1, layout.num_features, dtype=torch.float64, device=device)

    def add(self, seen: Seen, position: Tensor) -> None:
        """Adds a batch; a sample's position is its number among all."""
        features = seen.features.double()
        self.parts["count"] += len(features)
        self.parts["sum"] += features.sum(dim=0)
        self.parts["products"] += features.T @ features
        self.rows.index_copy_(0, position.clamp_max(self.layout.num_rows), features)
        if seen.logits is not None:
            likelihood = seen.logits.double().softmax(dim=1)
            splits = torch.arange(NUM_SPLITS, device=position.device)
            member = (splits[:, None] == position * NUM_SPLITS // self.layout.total).double()
            self.parts["split_counts"] += member.sum(dim=1)
            self.parts["likelihoods"] += member @ likelihood
            self.parts["negative_entropies"] += member @ torch.special.xlogy(likelihood, likelihood).sum(dim=1)

    def flat(self) -> Tensor:
        """All sums in one row."""
        parts = self.parts | {"rows": self.rows[:-1]}
        return torch.cat([part.flatten() for part in parts.values()])


def unflatten(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The sums by name."""
    shapes = layout.shapes()
    pieces = flat.split([prod(shape) for shape in shapes.values()])
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


@dataclass(frozen=True)
class Statistics:
    """What distances are computed from."""

    count: Tensor  # [1]
    mean: Tensor
    covariance: Tensor
    rows: Tensor  # the features of the first samples


def statistics_from(sums: dict[str, Tensor]) -> Statistics:
    """Mean and unbiased covariance behind sums."""
    count = sums["count"]
    mean = sums["sum"] / count
    covariance = (sums["products"] - count * mean[:, None] * mean) / (count - 1)
    return Statistics(count, mean, covariance, sums["rows"])
