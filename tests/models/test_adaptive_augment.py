"""Augmentation with an adjustable strength."""

from __future__ import annotations

import pytest
import torch

from paceline.models.adaptive_augment import KINDS, NUM_UNIFORMS, NUMBERS_EACH, TRANSFORMS, augment


def numbers(count: int, **values: tuple[float, ...]) -> torch.Tensor:
    """Return random numbers with which only the named transforms are applied at a strength of 0.5."""
    uniforms = torch.full((count, NUM_UNIFORMS), 0.9, dtype=torch.float64)
    for transform, parameters in values.items():
        first = NUMBERS_EACH * TRANSFORMS.index(transform)
        for offset, value in enumerate((0.0, *parameters)):
            uniforms[:, first + offset] = value
    return uniforms


def photos(count: int = 2, channels: int = 3, side: int = 8) -> torch.Tensor:
    return torch.rand(count, channels, side, side, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


HALF = torch.full((2,), 0.5, dtype=torch.float64)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_strength_of_zero_leaves_the_images_unchanged(channels: int) -> None:
    images = photos(channels=channels).float()
    uniforms = torch.rand(2, NUM_UNIFORMS, generator=torch.Generator().manual_seed(1))
    assert torch.equal(augment(images, uniforms, torch.zeros(2), KINDS), images)


def test_single_transforms_do_what_their_names_say() -> None:
    images = photos()
    expected = {
        "flip": ((0.75,), images.flip(-1)),
        "rot90": ((0.6,), images.flip(-1, -2)),
        "shift": ((0.99, 0.5), torch.cat([images[..., 1:], images[..., -1:]], -1)),
        "luma_flip": ((0.75,), images - 2 * images.mean(1, keepdim=True)),
        "rotate": ((0.75,), torch.rot90(images, 1, (-2, -1))),
        "brightness": ((0.5,), images),
        "hue": ((0.5 + 1 / 3,), images.roll(1, 1)),
    }
    for transform, (parameters, result) in expected.items():
        found = augment(images, numbers(2, **{transform: parameters}), HALF, KINDS)
        assert torch.allclose(found, result, atol=1e-12), transform


def test_each_transform_changes_the_images_and_only_if_its_kind_is_selected() -> None:
    images = photos()
    kinds = {"blit": TRANSFORMS[:3], "geometry": TRANSFORMS[3:7], "color": TRANSFORMS[7:12], "cutout": TRANSFORMS[12:]}
    for kind, transforms in kinds.items():
        for transform in transforms:
            uniforms = numbers(2, **{transform: (0.8, 0.3)})
            assert not torch.allclose(augment(images, uniforms, HALF, (kind,)), images), transform
            others = tuple(other for other in KINDS if other != kind)
            assert torch.equal(augment(images, uniforms, HALF, others), images), transform


def test_a_larger_strength_changes_more_images() -> None:
    images = photos(400)
    uniforms = torch.rand(400, NUM_UNIFORMS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    changed = []
    for strength in (0.05, 0.3, 0.8):
        strengths = torch.full((400,), strength, dtype=torch.float64)
        found = augment(images, uniforms, strengths, ("color",))
        changed.append((found != images).flatten(1).any(1).double().mean().item())
    assert changed == sorted(changed) and changed[0] == pytest.approx(1 - 0.95**5, abs=0.08) and changed[2] > 0.95


def test_the_augmentation_is_differentiable() -> None:
    images = photos(1, 3, 4).requires_grad_(True)
    uniforms = torch.rand(1, NUM_UNIFORMS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: augment(x, uniforms, torch.ones(1, dtype=torch.float64), KINDS), (images,)
    )


def test_cutout_replaces_a_square_of_half_the_side_with_grey() -> None:
    images = photos() + 1
    found = augment(images, numbers(2, cutout=(0.5, 0.125)), HALF, KINDS)
    expected = images.clone()
    expected[:, :, 2:6, :3] = 0  # part of the square is outside
    assert torch.equal(found, expected)
