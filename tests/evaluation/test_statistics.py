import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor
from torchmetrics.image.kid import poly_mmd

from paceline.evaluation.statistics import (
    density_and_coverage,
    frechet_distance,
    inception_score,
    kernel_distance,
    precision_and_recall,
)


def features(count: int, size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(size, size, generator=generator, dtype=torch.float64) / size**0.5
    return torch.randn(count, size, generator=generator, dtype=torch.float64) @ mixing + 0.1 * seed


def moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows.mean(dim=0), rows.T.cov()


def by_scipy(first: Tensor, second: Tensor) -> float:
    (mean1, covariance1), (mean2, covariance2) = moments(first), moments(second)
    root = scipy.linalg.sqrtm((covariance1 @ covariance2).numpy())
    return float((mean1 - mean2).square().sum() + covariance1.trace() + covariance2.trace() - 2 * np.trace(root).real)


@pytest.mark.parametrize(("count", "size"), [(500, 8), (900, 200), (300, 256)])
def test_the_frechet_distance_equals_the_formula_computed_with_scipy(count, size):
    first, second = features(count, size, 1), features(count, size, 2)
    assert frechet_distance(*moments(first), *moments(second)) == pytest.approx(by_scipy(first, second), rel=1e-6)


def test_the_frechet_distance_is_correct_for_singular_covariances():
    first = torch.zeros(100, 5, dtype=torch.float64)
    first[:, 0] = torch.linspace(-1, 1, 100)
    second = 3 * first + torch.tensor([0.0, 2, 0, 0, 0])
    spread = first[:, 0].std().item()  # in one dimension, the distance is (σ₁ - σ₂)² plus (μ₁ - μ₂)²
    assert frechet_distance(*moments(first), *moments(second)) == pytest.approx(4 * spread**2 + 4, rel=1e-9)
    assert frechet_distance(*moments(first), *moments(first)) == pytest.approx(0, abs=1e-9)


def test_the_frechet_distance_of_nan_features_is_nan():
    mean, covariance = moments(features(50, 4, 1))
    assert np.isnan(frechet_distance(mean * float("nan"), covariance, mean, covariance))
    unknown = moments(torch.cat([features(50, 4, 1), torch.full((1, 4), float("nan"))]))
    assert np.isnan(frechet_distance(*unknown, mean, covariance))
    assert np.isnan(frechet_distance(mean, covariance, *unknown))


def test_the_kernel_distance_is_the_mean_of_unbiased_estimates_over_subsets():
    first, second = features(250, 16, 1), features(230, 16, 2)
    pairs = [(first[low : low + 100], second[low : low + 100]) for low in (0, 100)]
    theirs = torch.stack([poly_mmd(one, other, degree=3, gamma=None, coef=1.0) for one, other in pairs]).mean()
    assert kernel_distance(first, second, subset=100) == pytest.approx(theirs.item(), rel=1e-9)


def test_the_kernel_distance_of_a_distribution_to_itself_is_zero_on_average():
    first, second = features(8000, 16, 1).split(4000)
    estimates = torch.tensor(
        [kernel_distance(one, other, subset=20) for one, other in zip(first.split(20), second.split(20), strict=True)]
    )
    error = estimates.std() / len(estimates) ** 0.5
    assert estimates.min() < 0 and estimates.mean().abs() < 3 * error


def test_precision_and_recall_equal_a_direct_computation_from_all_pairwise_distances():
    real, made = features(120, 4, 1), 0.5 * features(150, 4, 1)[:140]
    among = []
    for rows, others in ((made[:120], real), (real, made[:120])):
        radii = torch.cdist(others, others).sort(dim=1).values[:, 3]
        among.append((torch.cdist(rows, others) <= radii).any(dim=1).double().mean().item())
    assert precision_and_recall(real, made) == pytest.approx(tuple(among))
    assert among[0] > among[1]  # generated features are near the centre: precise but not diverse
    assert precision_and_recall(real, real + 100) == (0, 0)


def test_the_inception_score_of_confident_balanced_predictions_is_the_number_of_classes():
    likelihoods, counts = torch.full((2, 5), 20.0, dtype=torch.float64), torch.full((2,), 100.0, dtype=torch.float64)
    assert inception_score(counts, likelihoods, torch.zeros(2)) == pytest.approx(5)
    entropy = torch.full((2,), 100 * np.log(0.2), dtype=torch.float64)  # uniform class probabilities
    assert inception_score(counts, likelihoods, entropy) == pytest.approx(1)


def test_density_and_coverage_equal_their_definition_computed_with_numpy():
    real, made = features(60, 6, 1).numpy(), features(60, 6, 2).numpy() * 0.7
    within = np.linalg.norm(real[:, None] - real[None], axis=-1)
    radii = np.sort(within, axis=1)[:, 5]
    inside = np.linalg.norm(real[:, None] - made[None], axis=-1) < radii[:, None]
    density, coverage = density_and_coverage(torch.from_numpy(real), torch.from_numpy(made))
    assert density == pytest.approx(inside.sum() / (5 * 60)) and density > 0
    assert coverage == pytest.approx(inside.any(axis=1).mean()) and 0 < coverage < 1


def test_density_and_coverage_of_the_real_images_themselves_and_of_images_that_are_all_alike():
    real = features(200, 4, 1)
    assert density_and_coverage(real, real) == (pytest.approx(1, abs=0.02), 1.0)
    density, coverage = density_and_coverage(real, real[:1].expand(200, -1))
    assert coverage < 0.2 and density > coverage
