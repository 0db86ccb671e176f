"""The networks of R3GAN."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paceline.models.r3gan import Block, Discriminator, Generator, Upsample


@pytest.mark.parametrize(("size", "channels", "num_classes"), [(16, 1, 0), (32, 3, 5), (64, 3, 0), (128, 1, 3)])
def test_the_networks_map_noise_to_images_and_images_to_scores(size: int, channels: int, num_classes: int) -> None:
    torch.manual_seed(0)
    sizes = (size, channels, 8, 16, 1, 4, num_classes)
    label = torch.arange(3) % num_classes if num_classes else None
    images = Generator(*sizes)(torch.randn(3, 8), label)
    assert images.shape == (3, channels, size, size)
    assert Discriminator(*sizes)(images, label).shape == (3,)


def test_a_class_changes_the_image_and_the_score() -> None:
    torch.manual_seed(0)
    sizes = (16, 1, 8, 16, 1, 4, 2)
    noise, generator, discriminator = torch.randn(1, 8), Generator(*sizes), Discriminator(*sizes)
    first, second = (generator(noise, torch.tensor([label])) for label in (0, 1))
    assert not torch.allclose(first, second)
    scores = [discriminator(first, torch.tensor([label])) for label in (0, 1)]
    assert not torch.allclose(*scores)


def test_blocks_start_as_the_identity_and_activations_keep_their_variance() -> None:
    torch.manual_seed(0)
    block = Block(32, 16, torch.nn.Conv2d)
    block.reduce.weight.data.zero_()
    features = torch.randn(2, 32, 4, 4)
    assert torch.equal(block(features), features)
    images = Generator(32, 3, 64, 64, 2, 16)(torch.randn(256, 64))
    assert 0.3 < images.std() < 1.5


def test_larger_feature_maps_have_fewer_channels() -> None:
    widths = [stage[-1].reduce.out_features for stage in Generator(128, 3, 8, 64, 1, 16).stages]
    assert widths == [64, 64, 32, 16, 8, 4]


def test_upsampling_equals_bilinear_interpolation() -> None:
    images = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    expected = F.interpolate(images, scale_factor=2, mode="bilinear", align_corners=False)
    assert torch.allclose(Upsample(4).double()(images), expected)
