"""Augmenting and scaling a batch gives the same result as a slow implementation that handles one sample at a time."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, DataSpec
from paceline.core.errors import UserError
from paceline.data.stream import COLOURS, CROP_COLUMN, CROP_ROW, CUTOUT_COLUMN, CUTOUT_ROW, FLIP, Stream
from paceline.data.transforms import Augment, transform

LARGEST_UNIFORM = float(np.nextafter(np.float32(1), np.float32(0)))
AUGMENTS = [
    Augment(),
    Augment(flip=True),
    Augment(pad_crop=3),
    Augment(pad_crop=2, flip=True),
    Augment(cutout=5),
    Augment(pad_crop=2, flip=True, cutout=4),
]


def raw_batch(num: int = 40, channels: int = 3, height: int = 9, width: int = 7) -> Batch:
    images = np.random.default_rng(1).integers(0, 256, (num, height, width, channels), dtype=np.uint8)
    index, uniforms = Stream(seed=0, length=100).take(0, num)
    return {
        "image": torch.from_numpy(images).permute(0, 3, 1, 2),
        "label": torch.arange(num),
        "index": torch.from_numpy(index),
        "uniforms": torch.from_numpy(uniforms),
    }


def prepare_slowly(image: np.ndarray, uniforms: np.ndarray, augment: Augment) -> np.ndarray:
    _, height, width = image.shape
    pad = augment.pad_crop
    top, left = (int(np.floor(uniforms[column] * (2 * pad + 1))) for column in (CROP_ROW, CROP_COLUMN))
    padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)))
    image = padded[:, top : top + height, left : left + width]
    if augment.flip and uniforms[FLIP] < 0.5:
        image = image[:, :, ::-1]
    scaled = image.astype(np.float64) / 127.5 - 1
    if augment.cutout:
        row, column = int(uniforms[CUTOUT_ROW] * height), int(uniforms[CUTOUT_COLUMN] * width)
        top, left = row - augment.cutout // 2, column - augment.cutout // 2
        scaled[:, max(0, top) : top + augment.cutout, max(0, left) : left + augment.cutout] = 0
    return scaled


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("augment", AUGMENTS, ids=str)
def test_transforming_a_batch_equals_transforming_its_samples_one_by_one(augment: Augment, channels: int) -> None:
    raw = raw_batch(channels=channels)
    image = transform(raw, augment, torch.float64)["image"]
    assert image.is_contiguous(memory_format=torch.channels_last)
    slow = [prepare_slowly(raw["image"][n].numpy(), raw["uniforms"][n].numpy(), augment) for n in range(len(image))]
    assert np.allclose(image.numpy(), np.stack(slow), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_transforming_a_batch_in_parts_produces_bit_identical_images(dtype: torch.dtype) -> None:
    raw, augment = raw_batch(), AUGMENTS[-1]
    whole = transform(raw, augment, dtype)["image"]
    parts = [
        transform({name: value[start : start + 13] for name, value in raw.items()}, augment, dtype)["image"]
        for start in range(0, 40, 13)
    ]
    assert whole.dtype == dtype
    assert torch.equal(whole, torch.cat(parts))


def test_black_becomes_minus_one_and_white_becomes_one() -> None:
    every_value = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    raw = {"image": every_value, "uniforms": torch.zeros(1, 8)}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        image = transform(raw, None, dtype)["image"].flatten()
        assert image[0] == -1 and image[-1] == 1
        assert image.diff().min() >= 0
    exact = torch.arange(256, dtype=torch.float64) / 127.5 - 1
    assert torch.allclose(transform(raw, None, torch.float32)["image"].flatten().double(), exact, atol=1e-7, rtol=0)


def test_without_augmentation_only_the_value_range_changes() -> None:
    raw = raw_batch()
    batch = transform(raw, None, torch.float32)
    assert batch.keys() == {"image", "label", "index"}
    assert torch.equal(batch["label"], raw["label"]) and torch.equal(batch["index"], raw["index"])
    assert torch.equal(batch["image"].add(1).mul(127.5).round().to(torch.uint8), raw["image"])


@pytest.mark.parametrize("pad", [*range(1, 20), 127, 128, 500])
def test_the_largest_random_number_selects_the_last_crop_position(pad: int) -> None:
    white = torch.full((1, 1, pad + 1, pad + 1), 255, dtype=torch.uint8)
    raw = {"image": white, "uniforms": torch.full((1, 8), LARGEST_UNIFORM)}
    moved = transform(raw, Augment(pad_crop=pad), torch.float32)["image"]
    assert moved[0, 0, 0, 0] == 1 and moved.sum() == 1 - (moved.numel() - 1)


@pytest.mark.parametrize("augment", [AUGMENTS[-1], Augment(swap_colours=True)], ids=str)
def test_images_in_one_sample_are_augmented_together_and_the_batch_is_not_modified(augment: Augment) -> None:
    raw = raw_batch()
    raw["target"] = raw["image"].clone(memory_format=torch.preserve_format)
    before = {name: value.clone() for name, value in raw.items()}
    batch = transform(raw, augment, torch.float32)
    assert torch.equal(batch["image"], batch["target"])
    assert raw.keys() == before.keys() and all(torch.equal(raw[name], before[name]) for name in raw)


@pytest.mark.parametrize(
    ("flip", "flip_allowed", "expected"),
    [("auto", True, True), ("auto", False, False), ("on", False, True), ("off", True, False)],
)
def test_the_source_decides_whether_images_are_flipped_unless_the_user_sets_it(
    flip: str, flip_allowed: bool, expected: bool
) -> None:
    settings = RunSettings(pad_crop=4, flip=flip, cutout=8)  # type: ignore[arg-type]
    assert Augment.from_settings(settings, DataSpec(3, 32, 32, flip_allowed=flip_allowed)) == Augment(4, expected, 8)


def test_colours_are_put_in_the_order_that_the_random_number_selects() -> None:
    raw = raw_batch()
    image = transform(raw, Augment(swap_colours=True), torch.float64)["image"]
    orders = [list(permutations(range(3)))[int(u * 6)] for u in raw["uniforms"][:, COLOURS].tolist()]
    swapped = torch.stack([one[list(order)] for one, order in zip(raw["image"], orders, strict=True)])
    assert len(set(orders)) == 6
    assert torch.equal(image, transform({**raw, "image": swapped}, None, torch.float64)["image"])
    assert image.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("settings", "spec", "message"),
    [
        ({"swap_colours": "on"}, DataSpec(1, 32, 32), "swap_colours=on"),
        ({"rot90": "on"}, DataSpec(3, 4, 5), "rot90=on: needs square images, not 5×4"),
        ({"pad_crop": 4, "crop": 8}, DataSpec(3, 8, 8), "pad_crop=4"),
    ],
)
def test_augmentations_that_do_not_fit_the_images_are_rejected(
    settings: dict[str, Any], spec: DataSpec, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Augment.from_settings(RunSettings(**settings), spec)
