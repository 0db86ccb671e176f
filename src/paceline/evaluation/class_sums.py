"""Sums of features for each class, from which the Fréchet distance of each class is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.errors import UserError
from paceline.evaluation.statistics import frechet_distance

MAX_BYTES = 4 * 2**30  # of the sums of products, which need num_classes · num_features² numbers
CLASS_FID = "FID:"  # followed by the name of the class
MIN_IMAGES = 2  # a covariance needs at least two images


@dataclass(frozen=True)
class ClassStatistics:
    """The features of the images of one class."""

    count: int
    mean: Tensor
    covariance: Tensor


class ClassSums:
    """Sums features in float64, separately for each class."""

    def __init__(self, num_classes: int, num_features: int, device: torch.device) -> None:
        self.shapes = (num_classes,), (num_classes, num_features), (num_classes, num_features, num_features)
        if 8 * num_classes * num_features**2 > MAX_BYTES:
            raise UserError(
                f"per_class=on: too many classes ({num_classes:,}) for {num_features:,} features; use per_class=off"
            )
        self.parts = [torch.zeros(shape, dtype=torch.float64, device=device) for shape in self.shapes]

    def add(self, vectors: Tensor, label: Tensor) -> None:
        """Add a batch of feature vectors with their classes."""
        vectors = vectors.double()
        counts, sums, products = self.parts
        for number in range(len(counts)):  # one class after the other, so that the host need not wait for the device
            chosen = vectors * (label == number)[:, None]
            counts[number] += (label == number).sum()
            sums[number] += chosen.sum(0)
            products[number] += chosen.T @ vectors

    def flat(self) -> Tensor:
        """Return all sums as one vector."""
        return torch.cat([part.flatten() for part in self.parts])

    def statistics(self, flat: Tensor) -> list[ClassStatistics]:
        """Return the mean and the unbiased covariance of each class, given the sums over all ranks.

        They are not finite for a class with fewer than `MIN_IMAGES` images.
        """
        pieces = torch.split(flat, [part.numel() for part in self.parts])
        counts, sums, products = (piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True))
        means = sums / counts[:, None]
        covariances = products - counts[:, None, None] * means[:, :, None] * means[:, None]
        numbers = map(int, counts.tolist())
        return list(map(ClassStatistics, numbers, means, covariances / (counts - 1)[:, None, None]))


@dataclass(frozen=True)
class ClassDistances:
    """The FID of each class with enough images, and the names of the other classes."""

    by_name: dict[str, float]
    missing: tuple[str, ...]

    def metrics(self) -> dict[str, float]:
        """Return the FID of each class, and their mean; nothing if no class has enough images."""
        if not self.by_name:
            return {}
        mean = sum(self.by_name.values()) / len(self.by_name)
        return {"FID_by_class": mean, **{f"{CLASS_FID}{name}": value for name, value in self.by_name.items()}}


def distances_by_class(
    real: Sequence[ClassStatistics], made: Sequence[ClassStatistics], names: Sequence[str]
) -> ClassDistances:
    """Return the FID of each class with at least `MIN_IMAGES` real and as many generated images."""
    found, missing = {}, []
    for name, of_real, of_made in zip(names, real, made, strict=True):
        if min(of_real.count, of_made.count) < MIN_IMAGES:
            missing.append(name)
        else:
            found[name] = frechet_distance(of_real.mean, of_real.covariance, of_made.mean, of_made.covariance)
    return ClassDistances(found, tuple(missing))
