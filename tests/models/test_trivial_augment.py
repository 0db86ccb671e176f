"""TrivialAugment's operations match torchvision's, and each image depends only on its own random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torchvision.transforms.v2.functional as vision
from photographs import photograph
from torch import Tensor

from paceline.models import trivial_augment
from paceline.models.trivial_augment import COLOUR, GEOMETRIC, MAX_ROTATION, NUM_OPERATIONS, NUM_UNIFORMS, augment

NAMES = (*GEOMETRIC, *COLOUR, "identity")
SIDE = 48
PHOTOGRAPH = "astronaut"


def image() -> Tensor:
    """Return a photograph as a uint8 [3, h, w] tensor."""
    return torch.from_numpy(photograph(PHOTOGRAPH)[100 : 100 + SIDE, 100 : 100 + SIDE].copy()).permute(2, 0, 1)


def ours(name: str, strength: float, sign: float = 1) -> Tensor:
    """Return the photograph after one of our operations, as a uint8 tensor."""
    numbers = torch.tensor([[(NAMES.index(name) + 0.5) / NUM_OPERATIONS, strength, 0.75 if sign > 0 else 0.25]])
    result = augment(image()[None].double() / 127.5 - 1, numbers.double())[0]
    return ((result + 1) * 127.5).round().to(torch.uint8)


FACTOR = 1 + 0.5 * trivial_augment.MAX_CHANGE
EXPECTED: dict[str, Callable[[Tensor], Tensor]] = {
    "brightness": lambda pixels: vision.adjust_brightness(pixels, FACTOR),
    "colour": lambda pixels: vision.adjust_saturation(pixels, FACTOR),
    "contrast": lambda pixels: vision.adjust_contrast(pixels, FACTOR),
    "solarize": lambda pixels: vision.solarize(pixels, 128),
    "autocontrast": vision.autocontrast,
    "posterize": lambda pixels: vision.posterize(pixels, 5),
    "identity": lambda pixels: pixels,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_colour_operations_match_those_of_torchvision(name: str) -> None:
    difference = (ours(name, 0.5).int() - EXPECTED[name](image()).int()).abs()
    assert difference.max() <= 2


def test_sharpening_matches_torchvision_away_from_the_border() -> None:
    difference = (ours("sharpness", 0.5).int() - vision.adjust_sharpness(image(), FACTOR).int()).abs()
    assert difference[:, 1:-1, 1:-1].max() <= 2


def test_rotation_matches_torchvision_up_to_single_pixels() -> None:
    degrees = math.degrees(0.4 * MAX_ROTATION)
    expected = vision.rotate(image(), degrees, fill=[128.0])
    opposite = vision.rotate(image(), -degrees, fill=[128.0])
    agreement = [(ours("rotate", 0.4).int() - other.int()).abs().le(2).float().mean() for other in (expected, opposite)]
    assert max(agreement) > 0.97 and min(agreement) < 0.6


@pytest.mark.parametrize(("name", "axis"), [("translate_x", 2), ("translate_y", 1)])
def test_a_shift_moves_whole_pixels_and_fills_with_mid_grey(name: str, axis: int) -> None:
    shifted = ours(name, 8 / trivial_augment.MAX_SHIFT_PX)
    expected = image().roll(-8, axis)
    expected.narrow(axis, SIDE - 8, 8).fill_(128)
    assert torch.equal(shifted, expected)


@pytest.mark.parametrize("name", NAMES)
def test_every_operation_except_autocontrast_is_weak_at_low_strength_and_stays_in_range(name: str) -> None:
    changed = (ours(name, 0.0).int() - image().int()).abs().float().mean()
    assert changed <= 1 or name == "autocontrast"
    assert not torch.equal(ours(name, 0.9), image()) or name == "identity"


def test_an_image_depends_only_on_its_own_random_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(40, 3, 9, 14, generator=generator, dtype=torch.float64) * 2 - 1
    uniforms = torch.rand(40, NUM_UNIFORMS, generator=generator)
    whole = augment(images, uniforms)
    assert torch.equal(whole, torch.cat([augment(images[i : i + 1], uniforms[i : i + 1]) for i in range(40)]))
    assert whole.abs().max() <= 1 + 1e-9


def test_greyscale_images_are_supported_and_autocast_does_not_change_the_result() -> None:
    generator = torch.Generator().manual_seed(0)
    images, uniforms = torch.rand(60, 1, 8, 8, generator=generator) * 2 - 1, torch.rand(60, 3, generator=generator)
    expected = augment(images, uniforms)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(augment(images, uniforms), expected)
