"""Sums of features for each class, from which the Fréchet distance of each class is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.errors import UserError
from paceline.evaluation.statistics import frechet_distance

MAX_BYTES = 4 * 2**30  # of the sums of products, which need num_classes · num_features² numbers


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

    def statistics(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the mean and the unbiased covariance of each class, given the sums over all ranks."""
        pieces = torch.split(flat, [part.numel() for part in self.parts])
        counts, sums, products = (piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True))
        means = sums / counts[:, None]
        covariances = products - counts[:, None, None] * means[:, :, None] * means[:, None]
        return list(zip(means, covariances / (counts - 1)[:, None, None], strict=True))


def distances_by_class(
    real: list[tuple[Tensor, Tensor]], made: list[tuple[Tensor, Tensor]], names: tuple[str, ...]
) -> dict[str, float]:
    """Return the FID of each class, and their mean. FID is NaN for a class with fewer than two images."""
    found = {}
    for name, of_real, of_made in zip(names, real, made, strict=True):
        is_known = all(tensor.isfinite().all() for tensor in (*of_real, *of_made))
        found[f"FID:{name}"] = frechet_distance(*of_real, *of_made) if is_known else float("nan")
    return {"FID_by_class": sum(found.values()) / len(found), **found}
