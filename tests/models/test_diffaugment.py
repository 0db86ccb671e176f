import pytest
import torch

from paceline.models import diffaugment
from paceline.models.diffaugment import KINDS, NUM_UNIFORMS, augment

ALMOST_ONE = 1 - 2**-24


def numbers(num: int, **chosen: float) -> torch.Tensor:
    """Return random numbers that are all 0.5 (no change) except for the given values."""
    uniforms = torch.full((num, NUM_UNIFORMS), 0.5)
    for name, value in chosen.items():
        uniforms[:, getattr(diffaugment, name)] = value
    return uniforms


def images(channels: int = 3) -> torch.Tensor:
    return torch.rand(4, channels, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("kind", ["color", "translation"])
def test_random_numbers_of_one_half_leave_images_unchanged(kind):
    torch.testing.assert_close(augment(images(), numbers(4), (kind,)), images())


def test_images_are_unchanged_if_no_augmentation_is_enabled():
    assert torch.equal(augment(images(), torch.rand(4, NUM_UNIFORMS), ()), images())


def test_brightness_saturation_and_contrast_change_as_defined():
    given = images()
    brighter = augment(given, numbers(4, BRIGHTNESS=0.75), ("color",))
    torch.testing.assert_close(brighter, given + 0.25)
    grey = augment(given, numbers(4, SATURATION=0.0), ("color",))
    torch.testing.assert_close(grey, given.mean(1, keepdim=True).expand_as(given))
    flatter = augment(given, numbers(4, CONTRAST=0.0), ("color",))
    torch.testing.assert_close(flatter.std((1, 2, 3)), given.std((1, 2, 3)) / 2)
    torch.testing.assert_close(flatter.mean((1, 2, 3)), given.mean((1, 2, 3)))


@pytest.mark.parametrize(("uniform", "shift"), [(0.0, -2), (0.5, 0), (ALMOST_ONE, 2)])
def test_a_translation_moves_an_image_by_at_most_an_eighth_and_fills_with_zeros(uniform, shift):
    given = images()
    moved = augment(given, numbers(4, SHIFT_ROW=uniform), ("translation",))
    padded = torch.nn.functional.pad(given, (0, 0, 2, 2))
    assert torch.equal(moved, padded[:, :, 2 + shift : 18 + shift])
    sideways = augment(given, numbers(4, SHIFT_COLUMN=uniform), ("translation",))
    assert torch.equal(sideways.mT, augment(given.mT, numbers(4, SHIFT_ROW=uniform), ("translation",)))


@pytest.mark.parametrize(("uniform", "rows"), [(0.0, range(0, 4)), (0.5, range(4, 12)), (ALMOST_ONE, range(12, 16))])
def test_a_cutout_is_half_as_wide_and_high_as_the_image(uniform, rows):
    cut = augment(torch.ones(1, 1, 16, 16), numbers(1, CUTOUT_ROW=uniform, CUTOUT_COLUMN=0.5), ("cutout",))[0, 0]
    assert [row for row in range(16) if (cut[row] == 0).any()] == list(rows)
    assert [column for column in range(16) if (cut[:, column] == 0).any()] == list(range(4, 12))


def test_the_augmentation_of_an_image_depends_only_on_its_own_random_numbers():
    given, uniforms = images(), torch.rand(4, NUM_UNIFORMS, generator=torch.Generator().manual_seed(1))
    whole = augment(given, uniforms, KINDS)
    parts = [augment(given[i : i + 1], uniforms[i : i + 1], KINDS) for i in range(4)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole[0], augment(given[:1], uniforms[1:2], KINDS)[0])


def test_augmentation_can_be_differentiated_twice():
    given, uniforms = images(1).double()[:2, :, :4, :4], torch.rand(2, NUM_UNIFORMS, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda x: augment(x, uniforms, KINDS).square(), given.requires_grad_(True))
