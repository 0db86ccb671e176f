"""Mixup and CutMix mix neighbouring images, independently of how a batch is split."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core.errors import UserError
from paceline.models.mixing import NUM_UNIFORMS, TABLE_SIZE, _beta, _quantiles, mix, neighbours

COUNT = 64


def batch(count: int = COUNT) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, 3, 16, 12, generator=generator, dtype=torch.float64) * 2 - 1
    return images, torch.rand(count, NUM_UNIFORMS, generator=generator)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0), (0, 1.0), (0.8, 1.0)])
def test_two_halves_of_a_batch_are_mixed_like_the_whole_batch(mixup: float, cutmix: float) -> None:
    images, uniforms = batch()
    whole = mix(images, uniforms, mixup, cutmix)
    halves = [mix(images[part], uniforms[part], mixup, cutmix) for part in (slice(0, 30), slice(30, COUNT))]
    for position in range(2):
        assert torch.equal(whole[position], torch.cat([half[position] for half in halves]))


def test_mixup_is_a_weighted_sum_of_an_image_and_its_neighbour() -> None:
    images, uniforms = batch()
    mixed, own = mix(images, uniforms, 1.0, 0)
    assert torch.allclose(own, uniforms[:, 0].double())  # Beta(1, 1) is the uniform distribution
    ratio = own[:, None, None, None]
    expected = images * ratio + images[torch.arange(COUNT) ^ 1] * (1 - ratio)
    assert torch.allclose(mixed, expected)


def test_cutmix_takes_every_pixel_from_one_of_the_two_images_and_counts_them() -> None:
    images, uniforms = batch()
    mixed, own = mix(images, uniforms, 0, 1.0)
    is_own = (mixed == images).all(1)
    assert torch.equal(is_own | (mixed == neighbours(images)).all(1), torch.ones_like(is_own))
    assert torch.allclose(own, is_own.double().mean((1, 2)))
    assert own.min() < 0.5 and own.max() > 0.9


def test_the_mixing_probability_is_the_fraction_of_mixed_images() -> None:
    images, uniforms = batch(2000)
    _, own = mix(images, uniforms, 0.4, 0, 0.25)
    assert 0.2 < (own < 1).double().mean() < 0.3
    assert torch.equal(mix(images, uniforms, 0.4, 1.0, 0.0)[0], images)


@pytest.mark.parametrize("alpha", [1e-300, 1e-3, 0.1, 0.2, 0.8, 1.0, 2.0, 8.0, 30.0, 100.0])
def test_mixing_ratios_follow_the_beta_distribution(alpha: float) -> None:
    random = np.random.default_rng(0)
    ours = _beta(torch.from_numpy(random.random(200_000)), alpha).numpy()
    theirs = random.beta(max(alpha, 1e-6), max(alpha, 1e-6), 200_000)
    points = np.linspace(0.02, 0.98, 25)
    difference = [abs((ours < point).mean() - (theirs < point).mean()) for point in points]
    assert max(difference) < 0.006  # several standard errors of a fraction of 200,000 samples
    table = _quantiles(alpha, torch.device("cpu"), torch.float64)
    assert torch.isfinite(table).all() and (table.diff() >= 0).all()
    assert (table[0] == 0 and table[-1] == 1) or alpha > 30
    assert table[TABLE_SIZE // 2].item() == pytest.approx(0.5, abs=1e-9)
    assert float(table.std()) == pytest.approx(0.5 / (2 * alpha + 1) ** 0.5, rel=0.06)


def test_an_odd_number_of_images_cannot_be_mixed() -> None:
    images, uniforms = batch(5)
    with pytest.raises(UserError, match=r"even number of images per device.*not 5"):
        mix(images, uniforms, 0.4, 0)
