"""Augmentation on the device: operations do what their names say, from an image's own random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as vision
from photographs import photograph
from torch import Tensor

from paceline.core.errors import UserError
from paceline.models import augmentation, gan_augmentation
from paceline.models.augmentation import (
    COLOUR,
    GEOMETRIC,
    MAX_ROTATION,
    MIX_UNIFORMS,
    NUM_OPERATIONS,
    TABLE_SIZE,
    TRIVIAL_UNIFORMS,
    _beta,
    _quantiles,
    mix,
    neighbours,
    trivial_augment,
)
from paceline.models.gan_augmentation import (
    ADA_KINDS,
    ADA_UNIFORMS,
    DIFF_KINDS,
    DIFF_UNIFORMS,
    NUMBERS_EACH,
    TRANSFORMS,
    adaptive_augment,
    diff_augment,
)

ALMOST_ONE = 1 - 2**-24
HALF = torch.full((2,), 0.5, dtype=torch.float64)


def random_images(count: int = 4, channels: int = 3, height: int = 16, width: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, channels, height, width, generator=generator, dtype=torch.float64) * 2 - 1


def random_numbers(count: int, columns: int) -> Tensor:
    return torch.rand(count, columns, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def ada_numbers(count: int, **values: tuple[float, ...]) -> Tensor:
    """Return random numbers with which only the named transforms are applied at a strength of 0.5."""
    uniforms = torch.full((count, ADA_UNIFORMS), 0.9, dtype=torch.float64)
    for transform, parameters in values.items():
        first = NUMBERS_EACH * TRANSFORMS.index(transform)
        for offset, value in enumerate((0.0, *parameters)):
            uniforms[:, first + offset] = value
    return uniforms


@pytest.mark.parametrize("channels", [1, 3])
def test_ada_of_strength_zero_leaves_the_images_unchanged(channels: int) -> None:
    images = random_images(2, channels).float()
    found = adaptive_augment(images, random_numbers(2, ADA_UNIFORMS).float(), torch.zeros(2), ADA_KINDS)
    assert torch.equal(found, images)


def test_single_transforms_of_ada_do_what_their_names_say() -> None:
    images = random_images(2)
    cut = images.clone()
    cut[:, :, 4:12, :6] = 0  # part of the square is outside
    expected = {
        "flip": ((0.75,), images.flip(-1)),
        "rot90": ((0.6,), images.flip(-1, -2)),
        "shift": ((0.7, 0.5), torch.cat([images[..., 1:], images[..., -1:]], -1)),
        "luma_flip": ((0.75,), images - 2 * images.mean(1, keepdim=True)),
        "rotate": ((0.75,), torch.rot90(images, 1, (-2, -1))),
        "brightness": ((0.5,), images),
        "hue": ((0.5 + 1 / 3,), images.roll(1, 1)),
        "cutout": ((0.5, 0.125), cut),
    }
    for transform, (parameters, result) in expected.items():
        found = adaptive_augment(images, ada_numbers(2, **{transform: parameters}), HALF, ADA_KINDS)
        assert torch.allclose(found, result, atol=1e-12), transform


def test_each_transform_of_ada_changes_the_images_and_only_if_its_kind_is_selected() -> None:
    images = random_images(2)
    kinds = {"blit": TRANSFORMS[:3], "geometry": TRANSFORMS[3:7], "color": TRANSFORMS[7:12], "cutout": TRANSFORMS[12:]}
    for kind, transforms in kinds.items():
        for transform in transforms:
            uniforms = ada_numbers(2, **{transform: (0.8, 0.3)})
            assert not torch.allclose(adaptive_augment(images, uniforms, HALF, (kind,)), images), transform
            others = tuple(other for other in ADA_KINDS if other != kind)
            assert torch.equal(adaptive_augment(images, uniforms, HALF, others), images), transform


def test_a_larger_strength_changes_more_images() -> None:
    images, uniforms = random_images(400, height=4, width=4), random_numbers(400, ADA_UNIFORMS)
    changed = []
    for strength in (0.05, 0.3, 0.8):
        found = adaptive_augment(images, uniforms, torch.full((400,), strength, dtype=torch.float64), ("color",))
        changed.append((found != images).flatten(1).any(1).double().mean().item())
    assert changed == sorted(changed) and changed[0] == pytest.approx(1 - 0.95**5, abs=0.08) and changed[2] > 0.95


def diff_numbers(count: int, **chosen: float) -> Tensor:
    """Return random numbers that are all 0.5 (no change) except for the given values."""
    uniforms = torch.full((count, DIFF_UNIFORMS), 0.5)
    for name, value in chosen.items():
        uniforms[:, getattr(gan_augmentation, name)] = value
    return uniforms


def test_diffaugment_without_kinds_or_with_numbers_of_one_half_leaves_images_unchanged() -> None:
    images = random_images().float()
    for kind in ("color", "translation"):
        torch.testing.assert_close(diff_augment(images, diff_numbers(4), (kind,)), images)
    assert torch.equal(diff_augment(images, torch.rand(4, DIFF_UNIFORMS), ()), images)


def test_brightness_saturation_and_contrast_change_as_defined() -> None:
    images = random_images().float()
    brighter, grey, flatter = (
        diff_augment(images, diff_numbers(4, **{name: value}), ("color",))
        for name, value in (("BRIGHTNESS", 0.75), ("SATURATION", 0.0), ("CONTRAST", 0.0))
    )
    torch.testing.assert_close(brighter, images + 0.25)
    torch.testing.assert_close(grey, images.mean(1, keepdim=True).expand_as(images))
    torch.testing.assert_close(flatter.std((1, 2, 3)), images.std((1, 2, 3)) / 2)
    torch.testing.assert_close(flatter.mean((1, 2, 3)), images.mean((1, 2, 3)))


@pytest.mark.parametrize(
    ("uniform", "shift", "rows"), [(0.0, -2, range(0, 4)), (0.5, 0, range(4, 12)), (ALMOST_ONE, 2, range(12, 16))]
)
def test_diffaugment_moves_images_by_an_eighth_at_most_and_cuts_out_a_rectangle(
    uniform: float, shift: int, rows: range
) -> None:
    images = random_images().float()
    moved = diff_augment(images, diff_numbers(4, SHIFT_ROW=uniform), ("translation",))
    assert torch.equal(moved, torch.nn.functional.pad(images, (0, 0, 2, 2))[:, :, 2 + shift : 18 + shift])
    sideways = diff_augment(images.mT, diff_numbers(4, SHIFT_COLUMN=uniform), ("translation",))
    assert torch.equal(sideways.mT, moved)
    cut = diff_augment(torch.ones(1, 1, 16, 16), diff_numbers(1, CUTOUT_ROW=uniform), ("cutout",))[0, 0]
    assert [row for row in range(16) if (cut[row] == 0).any()] == list(rows)
    assert [column for column in range(16) if (cut[:, column] == 0).any()] == list(range(4, 12))


def test_augmentation_for_gans_is_differentiable() -> None:
    images, uniforms = random_images(2, 1, 4, 4).requires_grad_(True), random_numbers(2, DIFF_UNIFORMS)
    assert torch.autograd.gradgradcheck(lambda x: diff_augment(x, uniforms, DIFF_KINDS).square(), images)
    uniforms, strength = random_numbers(2, ADA_UNIFORMS), torch.ones(2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: adaptive_augment(x, uniforms, strength, ADA_KINDS), images)


NAMES = (*GEOMETRIC, *COLOUR, "identity")
SIDE = 48


def photo() -> Tensor:
    """Return a photograph as a uint8 [3, h, w] tensor."""
    return torch.from_numpy(photograph("astronaut")[100 : 100 + SIDE, 100 : 100 + SIDE].copy()).permute(2, 0, 1)


def changed_photo(name: str, strength: float, sign: float = 1) -> Tensor:
    """Return the photograph after an operation of TrivialAugment, as a uint8 tensor."""
    numbers = torch.tensor([[(NAMES.index(name) + 0.5) / NUM_OPERATIONS, strength, 0.75 if sign > 0 else 0.25]])
    result = trivial_augment(photo()[None].double() / 127.5 - 1, numbers.double())[0]
    return ((result + 1) * 127.5).round().to(torch.uint8)


FACTOR = 1 + 0.5 * augmentation.MAX_CHANGE
EXPECTED: dict[str, Callable[[Tensor], Tensor]] = {
    "brightness": lambda pixels: vision.adjust_brightness(pixels, FACTOR),
    "colour": lambda pixels: vision.adjust_saturation(pixels, FACTOR),
    "contrast": lambda pixels: vision.adjust_contrast(pixels, FACTOR),
    "sharpness": lambda pixels: vision.adjust_sharpness(pixels, FACTOR),
    "solarize": lambda pixels: vision.solarize(pixels, 128),
    "autocontrast": vision.autocontrast,
    "posterize": lambda pixels: vision.posterize(pixels, 5),
    "identity": lambda pixels: pixels,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_colour_operations_match_those_of_torchvision(name: str) -> None:
    difference = (changed_photo(name, 0.5).int() - EXPECTED[name](photo()).int()).abs()
    inside = difference[:, 1:-1, 1:-1] if name == "sharpness" else difference  # their borders are not sharpened
    assert inside.max() <= 2


def test_rotation_matches_torchvision_up_to_single_pixels_and_a_shift_moves_whole_pixels() -> None:
    degrees, ours = math.degrees(0.4 * MAX_ROTATION), changed_photo("rotate", 0.4).int()
    theirs = (vision.rotate(photo(), sign * degrees, fill=[128.0]).int() for sign in (1, -1))
    agreement = [(ours - other).abs().le(2).float().mean() for other in theirs]
    assert max(agreement) > 0.97 and min(agreement) < 0.6
    for name, axis in (("translate_x", 2), ("translate_y", 1)):
        expected = photo().roll(-8, axis)
        expected.narrow(axis, SIDE - 8, 8).fill_(128)
        assert torch.equal(changed_photo(name, 8 / augmentation.MAX_SHIFT_PX), expected)


@pytest.mark.parametrize("name", NAMES)
def test_every_operation_except_autocontrast_is_weak_at_low_strength(name: str) -> None:
    changed = (changed_photo(name, 0.0).int() - photo().int()).abs().float().mean()
    assert changed <= 1 or name == "autocontrast"
    assert not torch.equal(changed_photo(name, 0.9), photo()) or name == "identity"


def test_greyscale_images_are_supported_and_autocast_does_not_change_the_result() -> None:
    images, uniforms = random_images(60, 1, 8, 8).float(), random_numbers(60, TRIVIAL_UNIFORMS).float()
    expected = trivial_augment(images, uniforms)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(trivial_augment(images, uniforms), expected)


Augment = Callable[[Tensor, Tensor], Tensor]
AUGMENTATIONS: dict[str, tuple[int, Augment]] = {
    "TrivialAugment": (TRIVIAL_UNIFORMS, trivial_augment),
    "DiffAugment": (DIFF_UNIFORMS, lambda images, uniforms: diff_augment(images, uniforms, DIFF_KINDS)),
    "mixup": (MIX_UNIFORMS, lambda images, uniforms: mix(images, uniforms, 0.4, 0)[0]),
    "CutMix": (MIX_UNIFORMS, lambda images, uniforms: mix(images, uniforms, 0, 1.0)[0]),
    "both": (MIX_UNIFORMS, lambda images, uniforms: mix(images, uniforms, 0.8, 1.0)[0]),
}


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_an_image_depends_only_on_its_own_random_numbers_however_a_batch_is_split(name: str) -> None:
    columns, augment = AUGMENTATIONS[name]
    images, uniforms = random_images(40, 3, 9, 14), random_numbers(40, columns)
    whole = augment(images, uniforms)
    parts = [augment(images[i : i + 2], uniforms[i : i + 2]) for i in range(0, 40, 2)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, augment(images, uniforms.roll(1, 0)))


def test_mixup_blends_an_image_with_its_neighbour_and_cutmix_takes_each_pixel_from_one_of_them() -> None:
    images, uniforms = random_images(64), random_numbers(64, MIX_UNIFORMS)
    mixed, own = mix(images, uniforms, 1.0, 0)
    assert torch.allclose(own, uniforms[:, 0])  # Beta(1, 1) is the uniform distribution
    ratio = own[:, None, None, None]
    assert torch.allclose(mixed, images * ratio + images[torch.arange(64) ^ 1] * (1 - ratio))
    mixed, own = mix(images, uniforms, 0, 1.0)
    is_own = (mixed == images).all(1)
    assert torch.equal(is_own | (mixed == neighbours(images)).all(1), torch.ones_like(is_own))
    assert torch.allclose(own, is_own.double().mean((1, 2)))
    assert own.min() < 0.5 and own.max() > 0.9


def test_the_mixing_probability_is_the_fraction_of_mixed_images() -> None:
    images, uniforms = random_images(2000, 1, 4, 4), random_numbers(2000, MIX_UNIFORMS)
    assert 0.2 < (mix(images, uniforms, 0.4, 0, 0.25)[1] < 1).double().mean() < 0.3
    assert torch.equal(mix(images, uniforms, 0.4, 1.0, 0.0)[0], images)


@pytest.mark.parametrize("alpha", [1e-300, 1e-3, 0.2, 1.0, 2.0, 30.0, 100.0])
def test_mixing_ratios_follow_the_beta_distribution(alpha: float) -> None:
    random = np.random.default_rng(0)
    ours = _beta(torch.from_numpy(random.random(200_000)), alpha).numpy()
    theirs = random.beta(max(alpha, 1e-6), max(alpha, 1e-6), 200_000)
    difference = [abs((ours < point).mean() - (theirs < point).mean()) for point in np.linspace(0.02, 0.98, 25)]
    assert max(difference) < 0.006  # several standard errors of a fraction of 200,000 samples
    table = _quantiles(alpha, torch.device("cpu"), torch.float64)
    assert torch.isfinite(table).all() and (table.diff() >= 0).all()
    assert (table[0] == 0 and table[-1] == 1) or alpha > 30
    assert table[TABLE_SIZE // 2].item() == pytest.approx(0.5, abs=1e-9)


def test_an_odd_number_of_images_cannot_be_mixed() -> None:
    with pytest.raises(UserError, match=r"even number of images per device.*not 5"):
        mix(random_images(5), random_numbers(5, MIX_UNIFORMS), 0.4, 0)
