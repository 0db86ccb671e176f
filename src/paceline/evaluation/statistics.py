"""Metrics computed from features: distances, precision, recall, density, coverage and the Inception Score."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

KERNEL_SUBSET = 1000  # rows per estimate of the kernel distance
NEIGHBOURS = 3  # for precision and recall
DENSITY_NEIGHBOURS = 5  # for density and coverage
_ROWS_AT_ONCE = 2000  # rows of a distance matrix computed at a time


def frechet_distance(mean1: Tensor, covariance1: Tensor, mean2: Tensor, covariance2: Tensor) -> float:
    """Return the Fréchet distance between two normal distributions, in float64.

    The trace of (Σ₁Σ₂)^½ is the sum of the square roots of the eigenvalues of RᵀΣ₂R, where RRᵀ = Σ₁. This matrix is
    symmetric, so no general matrix square root is needed. Covariances may be singular (fewer samples than features).
    If the features are not finite, the distance is NaN.
    """
    if not (covariance1.isfinite().all() and covariance2.isfinite().all()):
        return math.nan  # the decompositions below raise an error for a matrix with NaN
    root = _root(covariance1.double())
    product = root.T @ covariance2.double() @ root
    eigenvalues: Tensor = torch.linalg.eigvalsh((product + product.T) / 2)
    trace_of_root = eigenvalues.clamp_min(0).sqrt().sum()
    traces = covariance1.double().trace() + covariance2.double().trace()
    distance = (mean1.double() - mean2.double()).square().sum() + traces - 2 * trace_of_root
    return max(float(distance.item()), 0.0)  # with the arguments in this order, max() returns a NaN unchanged


def _root(covariance: Tensor) -> Tensor:
    """Return R with RRᵀ = covariance: the Cholesky factor or, for a singular matrix, one computed from eigenvalues."""
    factor: Tensor
    failed: Tensor
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if not failed:
        return factor
    values: Tensor
    vectors: Tensor
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp_min(0).sqrt()


def kernel_distance(first: Tensor, second: Tensor, subset: int = KERNEL_SUBSET) -> float:
    """Return the unbiased squared MMD (maximum mean discrepancy) with kernel (x·y/d + 1)³, averaged over subsets."""
    size = min(subset, len(first), len(second))
    estimates = [
        _squared_discrepancy(one.double(), other.double())
        for one, other in zip(torch.split(first, size), torch.split(second, size), strict=False)
        if len(one) == len(other) == size
    ]
    return torch.stack(estimates).mean().item()


def _squared_discrepancy(first: Tensor, second: Tensor) -> Tensor:
    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T / a.shape[1] + 1) ** 3

    def mean_of_others(table: Tensor) -> Tensor:
        return (table.sum() - table.trace()) / (len(table) * (len(table) - 1))

    within = mean_of_others(kernel(first, first)) + mean_of_others(kernel(second, second))
    return within - 2 * kernel(first, second).mean()


def precision_and_recall(real: Tensor, made: Tensor) -> tuple[float, float]:
    """Return the fraction of generated rows that lie among the real ones, and vice versa.

    As in Kynkäänniemi et al. (2019), a row lies among others if its distance to one of them is at most the distance
    between that one and its third-nearest neighbour.
    """
    count = min(len(real), len(made))
    real, made = real[:count].double(), made[:count].double()
    return _share_among(made, real), _share_among(real, made)


def density_and_coverage(real: Tensor, made: Tensor) -> tuple[float, float]:
    """Return how many real neighbourhoods contain a generated row, relative to k, and the share that contain any.

    As in Naeem et al. (2020), the neighbourhood of a real row contains all rows nearer than its k-th nearest real
    neighbour, so that the density of the real rows themselves is 1.
    """
    count = min(len(real), len(made))
    real, made = real[:count].double(), made[:count].double()
    radii = _radii(real, DENSITY_NEIGHBOURS)
    around = torch.zeros(count, dtype=torch.float64, device=real.device)  # generated rows around each real row
    for table in _squared_distances(made, real):
        around += (table < radii).sum(dim=0)
    return around.sum().item() / (DENSITY_NEIGHBOURS * count), (around > 0).double().mean().item()


def _share_among(rows: Tensor, others: Tensor) -> float:
    radii = _radii(others, NEIGHBOURS)
    inside = [(table <= radii).any(dim=1) for table in _squared_distances(rows, others)]
    return torch.cat(inside).double().mean().item()


def _radii(rows: Tensor, neighbours: int) -> Tensor:
    """Return the squared distance from each row to its k-th nearest neighbour."""
    nearest = min(neighbours + 1, len(rows))  # plus one, because the nearest row is the row itself
    return torch.cat([table.kthvalue(nearest, dim=1).values for table in _squared_distances(rows, rows)])


def _squared_distances(rows: Tensor, others: Tensor) -> Iterator[Tensor]:
    for some in torch.split(rows, _ROWS_AT_ONCE):
        squares = some.square().sum(dim=1)[:, None] + others.square().sum(dim=1)
        yield (squares - 2 * some @ others.T).clamp_min(0)


def inception_score(counts: Tensor, likelihoods: Tensor, negative_entropies: Tensor) -> float:
    """Return exp of the mean divergence between p(class | image) and p(class), averaged across splits of the images.

    For each split, the arguments contain the number of images, the sum of their class probabilities, and the sum of
    Σ p log p.
    """
    filled = counts > 0
    counts, likelihoods, negative_entropies = counts[filled], likelihoods[filled], negative_entropies[filled]
    overall = likelihoods / counts[:, None]
    entropies: Tensor = torch.special.xlogy(overall, overall).sum(dim=1)
    return (negative_entropies / counts - entropies).exp().mean().item()
