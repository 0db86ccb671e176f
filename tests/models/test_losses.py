"""Adversarial losses from logits, and losses that compare images by frequencies and structure."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from skimage.metrics import structural_similarity

from paceline.core.errors import UserError
from paceline.models.losses import BCE, HINGE, LEAST_SQUARES, d2gan, fft_loss, log_softplus, r1_penalty, ssim_loss

LOGITS = torch.tensor([-3.0, -0.5, 0.0, 0.7, 4.0], dtype=torch.float64)


def test_bce_equals_the_cross_entropy_of_a_sigmoid():
    probability, ones = LOGITS.sigmoid(), torch.ones_like(LOGITS)
    as_real = F.binary_cross_entropy(probability, ones, reduction="none")
    as_fake = F.binary_cross_entropy(probability, 0 * ones, reduction="none")
    torch.testing.assert_close(BCE.generator(LOGITS), as_real)
    torch.testing.assert_close(BCE.real(LOGITS), as_real)
    torch.testing.assert_close(BCE.fake(LOGITS), as_fake)


def test_bce_of_extreme_logits_is_finite_and_still_has_a_gradient():
    logits = torch.tensor([-1000.0], requires_grad=True)
    loss = BCE.generator(logits)
    loss.sum().backward()
    assert loss.item() == 1000.0 and logits.grad.item() == -1.0


def test_the_hinge_loss_is_zero_beyond_its_margin():
    assert HINGE.real(LOGITS).tolist() == pytest.approx([4.0, 1.5, 1.0, 0.3, 0.0])
    assert HINGE.fake(LOGITS).tolist() == pytest.approx([0.0, 0.5, 1.0, 1.7, 5.0])
    assert torch.equal(HINGE.generator(LOGITS), -LOGITS)


def test_the_least_squares_loss_has_target_one_for_real_and_zero_for_fake_images():
    assert torch.equal(LEAST_SQUARES.real(LOGITS), (LOGITS - 1) ** 2 / 2)
    assert torch.equal(LEAST_SQUARES.fake(LOGITS), LOGITS**2 / 2)
    assert torch.equal(LEAST_SQUARES.generator(LOGITS), LEAST_SQUARES.real(LOGITS))


def test_d2gan_trains_one_discriminator_to_score_real_images_high_and_the_other_to_score_fakes_high():
    alpha, beta, output = 0.2, 0.1, F.softplus(LOGITS)
    first, second = d2gan(alpha, beta)
    torch.testing.assert_close(first.real(LOGITS), -alpha * output.log())
    torch.testing.assert_close(first.fake(LOGITS), output)
    torch.testing.assert_close(second.real(LOGITS), output)
    torch.testing.assert_close(second.fake(LOGITS), -beta * output.log())
    torch.testing.assert_close(first.generator(LOGITS) + second.generator(LOGITS), -output + beta * output.log())


@pytest.mark.parametrize("objective", [BCE, HINGE, LEAST_SQUARES, *d2gan(0.2, 0.1)])
def test_the_boundary_is_the_best_logit_for_an_image_that_is_as_likely_real_as_fake(objective):
    logits = torch.tensor(objective.boundary, dtype=torch.float64) + torch.tensor([-0.1, 0.0, 0.1])
    losses = objective.real(logits) + objective.fake(logits)
    assert losses[1] <= losses.min() + 1e-12


def test_log_softplus_and_its_gradient_are_finite_and_smooth():
    logits = torch.tensor([-1e4, -100.0, -30.001, -29.999, 0.0, 50.0], requires_grad=True)
    value = log_softplus(logits)
    value.sum().backward()
    assert value.isfinite().all() and logits.grad.isfinite().all()
    torch.testing.assert_close(value[:4], logits[:4].detach())
    torch.testing.assert_close(logits.grad[:4], torch.ones(4))


def test_r1_of_a_linear_discriminator_is_half_its_squared_weight_norm():
    weight = torch.randn(3, 4, 4, dtype=torch.float64, requires_grad=True)
    images = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    norms, logits = r1_penalty(lambda x: (x * weight).sum((1, 2, 3)), images)
    torch.testing.assert_close(norms, (weight.square().sum() / 2).expand(5))
    torch.testing.assert_close(logits, (images * weight).sum((1, 2, 3)))
    norms.mean().backward()
    torch.testing.assert_close(weight.grad, weight.detach())  # the derivative of |w|² / 2


def test_r1_of_a_quadratic_discriminator_depends_on_the_image():
    images = torch.randn(5, 1, 2, 2, dtype=torch.float64)
    norms, _ = r1_penalty(lambda x: x.square().sum((1, 2, 3)), images)
    torch.testing.assert_close(norms, 2 * images.square().sum((1, 2, 3)))


def test_r1_is_computed_in_full_precision_under_autocast():
    weight = torch.randn(4, 1, 2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        norms, logits = r1_penalty(lambda x: F.conv2d(x, weight).sum((1, 2, 3)), torch.randn(3, 1, 2, 2))
    assert norms.dtype == logits.dtype == torch.float32


def random_images(height: int, width: int, count: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(seed)).double() * 2 - 1


def test_the_fft_loss_equals_numpy():
    one, other = random_images(12, 9), random_images(12, 9, seed=1)
    difference = np.fft.rfft2((one - other).numpy(), norm="ortho")
    wanted = np.abs(np.stack([difference.real, difference.imag])).mean()
    assert fft_loss(one, other).item() == pytest.approx(wanted)
    assert fft_loss(one, one).item() == 0


def test_the_ssim_loss_equals_scikit_image():
    one = random_images(30, 26, count=1)
    other = one + 0.2 * random_images(30, 26, count=1, seed=1)
    similarity = structural_similarity(
        *(images[0].permute(1, 2, 0).numpy() for images in (one, other)),
        data_range=2,
        channel_axis=2,
        gaussian_weights=True,
        sigma=1.5,
        use_sample_covariance=False,
        full=True,
    )[1]
    assert ssim_loss(one, other).item() == pytest.approx(1 - similarity[5:-5, 5:-5].mean(), rel=1e-6)
    with pytest.raises(UserError, match="at least 11×11"):
        ssim_loss(one[..., :8], other[..., :8])
