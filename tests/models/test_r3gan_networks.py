"""The networks of R3GAN."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.models.losses import r1_penalty
from paceline.models.r3gan import Block, Discriminator, Downsample, Generator, Sizes, Upsample


@pytest.mark.parametrize(("size", "channels", "num_classes"), [(16, 1, 0), (32, 3, 5), (64, 3, 0), (128, 1, 3)])
def test_the_networks_map_noise_to_images_and_images_to_scores(size: int, channels: int, num_classes: int) -> None:
    torch.manual_seed(0)
    sizes = Sizes(size, channels, nz=8, width=16, num_blocks=1, group_size=4, num_classes=num_classes)
    label = torch.arange(3) % num_classes if num_classes else None
    images = Generator(sizes)(torch.randn(3, 8), label)
    assert images.shape == (3, channels, size, size)
    assert Discriminator(sizes)(images, label).shape == (3,)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_networks_return_no_views_because_fsdp_warns_about_them(channels: int) -> None:
    sizes = Sizes(16, channels, nz=8, width=16, num_blocks=1, group_size=4)
    images = Generator(sizes)(torch.randn(2, 8))
    scores, gradients = Discriminator(sizes)(images, with_gradients=True)
    assert not any(output._is_view() for output in (images, scores, gradients))


def test_a_class_changes_the_image_and_the_score() -> None:
    torch.manual_seed(0)
    sizes = Sizes(16, 1, nz=8, width=16, num_blocks=1, group_size=4, num_classes=2)
    noise, generator, discriminator = torch.randn(1, 8), Generator(sizes), Discriminator(sizes)
    first, second = (generator(noise, torch.tensor([label])) for label in (0, 1))
    assert not torch.allclose(first, second)
    scores = [discriminator(first, torch.tensor([label])) for label in (0, 1)]
    assert not torch.allclose(*scores)


@pytest.mark.parametrize("num_classes", [0, 5])
def test_the_discriminator_returns_the_gradients_that_autograd_computes(num_classes: int) -> None:
    torch.manual_seed(0)
    discriminator = Discriminator(Sizes(32, 3, width=16, group_size=4, num_classes=num_classes)).double()
    for parameter in discriminator.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    label = torch.arange(4) if num_classes else None

    scores, gradients = discriminator(images, label, with_gradients=True)
    penalties = gradients.square().sum((1, 2, 3)) / 2
    expected_penalties, expected_scores = r1_penalty(lambda seen: discriminator(seen, label), images)
    torch.testing.assert_close(scores, expected_scores, rtol=1e-12, atol=0)
    torch.testing.assert_close(penalties, expected_penalties, rtol=1e-12, atol=0)

    weights = tuple(discriminator.parameters())
    found = torch.autograd.grad(scores.square().sum() + penalties.sum(), weights)
    expected = torch.autograd.grad(expected_scores.square().sum() + expected_penalties.sum(), weights)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-12 * other.abs().max()


def test_blocks_start_as_the_identity_and_activations_keep_their_variance() -> None:
    torch.manual_seed(0)
    block = Block(32, 64, 16)
    block.reduce.weight.data.zero_()
    features = torch.randn(2, 32, 4, 4)
    assert torch.equal(block(features), features)
    images = Generator(Sizes(32, 3, width=64))(torch.randn(256, 64))
    assert 0.3 < images.std() < 1.5


def test_feature_maps_above_the_full_width_have_fewer_channels() -> None:
    def widths(**sizes: int) -> list[int]:
        generator = Generator(Sizes(128, 3, nz=8, width=64, num_blocks=1, **sizes))
        return [stage[-1].reduce.out_features for stage in generator.stages]

    assert widths() == [64, 64, 32, 16, 8, 4]
    assert widths(full_width_px=32) == [64, 64, 64, 64, 32, 16]


def test_the_initial_scores_of_a_conditional_discriminator_are_scaled_by_the_number_of_classes() -> None:
    torch.manual_seed(0)
    images = torch.randn(64, 3, 16, 16)

    @torch.no_grad()
    def spread(num_classes: int) -> float:
        label = torch.arange(64) % num_classes if num_classes else None
        sizes = Sizes(16, 3, width=32, num_blocks=1, num_classes=num_classes)
        return torch.stack([Discriminator(sizes)(images, label) for _ in range(40)]).std().item()

    assert spread(16) / spread(0) == pytest.approx(1 / 16**0.5, rel=0.3)


@pytest.mark.parametrize("side", [4, 16])
def test_upsampling_equals_bilinear_interpolation(side: int) -> None:
    images = torch.randn(2, 3, side, side, dtype=torch.float64)
    expected = F.interpolate(images, scale_factor=2, mode="bilinear", align_corners=False)
    assert torch.allclose(Upsample(side).double()(images), expected)


@pytest.mark.parametrize("side", [8, 32])
def test_downsampling_is_a_filter_with_the_weights_1_3_3_1(side: int) -> None:
    images = torch.randn(2, 3, side, side, dtype=torch.float64)
    weights = torch.tensor([1.0, 3, 3, 1], dtype=torch.float64) / 8
    kernel = torch.outer(weights, weights).expand(3, 1, 4, 4)
    expected = F.conv2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), kernel, stride=2, groups=3)
    assert torch.allclose(Downsample(side).double()(images), expected)
