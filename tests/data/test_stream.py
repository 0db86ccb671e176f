"""Tickets, random inputs and transforms depend only on the seed and the position in training."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, DataSpec, Draw
from paceline.core.errors import UserError
from paceline.data.loader import drawn_batches
from paceline.data.source import ArraySource, Sample, Source, Subset, count_classes, in_proportion, selecting
from paceline.data.stream import (
    BLOCK_ROWS,
    COLOURS,
    CROP_COLUMN,
    CROP_ROW,
    CUTOUT_COLUMN,
    CUTOUT_ROW,
    FLIP,
    NUM_UNIFORMS,
    Augment,
    Drawer,
    Stream,
    in_order,
    part,
    tickets,
    transform,
)

# Tickets


def test_an_epoch_contains_every_sample_once() -> None:
    for epoch in (0, 1, 7):
        index, uniforms = tickets(seed=3, epoch=epoch, length=101)
        assert sorted(index) == list(range(101))
        assert uniforms.shape == (101, NUM_UNIFORMS)
        assert uniforms.dtype == np.float32 and uniforms.min() >= 0 and uniforms.max() < 1


def test_sample_order_and_random_numbers_differ_between_epochs_and_seeds() -> None:
    first = tickets(0, 0, 50)
    for other in (tickets(0, 1, 50), tickets(1, 0, 50)):
        assert not np.array_equal(first.index, other.index)
        assert not np.array_equal(first.uniforms, other.uniforms)


def test_the_random_generator_still_returns_the_same_values_as_in_earlier_versions() -> None:
    index, uniforms = tickets(seed=42, epoch=3, length=10)
    assert index.tolist() == [8, 4, 7, 1, 6, 3, 0, 2, 9, 5]
    assert uniforms[0, :3].tolist() == [0.2540859580039978, 0.32575345039367676, 0.09693330526351929]


def test_a_batch_may_span_epochs() -> None:
    taken = Stream(seed=1, length=10).take(8, 25)
    whole = np.concatenate([tickets(1, epoch, 10).index for epoch in range(3)])
    assert np.array_equal(taken.index, whole[8:25])
    assert taken.uniforms.shape == (17, NUM_UNIFORMS)


def test_the_sample_order_does_not_depend_on_the_batch_size() -> None:
    stream = Stream(seed=5, length=13)
    whole = stream.take(0, 60)
    pieces = [stream.take(start, start + 4) for start in range(0, 60, 4)]
    assert np.array_equal(whole.index, np.concatenate([piece.index for piece in pieces]))
    assert np.array_equal(whole.uniforms, np.concatenate([piece.uniforms for piece in pieces]))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_the_samples_of_all_ranks_form_the_global_batch(world_size: int) -> None:
    stream = Stream(seed=9, length=50)
    parts = [stream.take(*part(128, 256, rank, world_size)) for rank in range(world_size)]
    assert np.array_equal(np.concatenate([one.index for one in parts]), stream.take(128, 256).index)
    sizes = [len(one.index) for one in parts]
    assert max(sizes) - min(sizes) <= 1


def test_evaluation_reads_samples_in_order_without_randomness() -> None:
    index, uniforms = in_order(3, 7)
    assert index.tolist() == [3, 4, 5, 6]
    assert not uniforms.any()


# Draws


DRAWS = {"noise": Draw((3,), "normal"), "where": Draw((2, 2), "uniform"), "coin": Draw((), "uniform", common=True)}


def drawer(seed: int = 0, dtype: torch.dtype = torch.float32) -> Drawer:
    return Drawer(DRAWS, seed, torch.device("cpu"), dtype)


def test_random_inputs_for_evaluation_depend_only_on_seed_position_and_purpose():
    whole = drawer().rows("evaluation", 0, 3 * BLOCK_ROWS)
    for start, stop in ((0, 1), (7, BLOCK_ROWS), (BLOCK_ROWS - 1, BLOCK_ROWS + 1), (400, 1400)):
        some = drawer().rows("evaluation", start, stop)
        assert all(torch.equal(some[name], whole[name][start:stop]) for name in DRAWS)
    assert not torch.equal(whole["noise"], drawer().rows("samples", 0, 3 * BLOCK_ROWS)["noise"])
    assert not torch.equal(whole["noise"], drawer(seed=1).rows("evaluation", 0, 3 * BLOCK_ROWS)["noise"])
    assert len(whole["noise"].unique()) > 4000  # blocks of random numbers do not repeat
    assert len(whole["coin"].unique()) == 1


def test_random_inputs_across_all_ranks_equal_those_in_one_process():
    whole = drawer().rows("evaluation", 0, 1234)
    for size in (1, 2, 3):
        batches = [batch for rank in range(size) for batch in drawn_batches(drawer(), 1234, rank, size)]
        assert torch.equal(torch.cat([batch["noise"] for batch in batches]), whole["noise"])
        assert torch.equal(torch.cat([batch["index"] for batch in batches]), torch.arange(1234))


def test_random_inputs_are_the_same_numbers_in_every_precision():
    wide = drawer(dtype=torch.float64).rows("evaluation", 0, 5)["noise"]
    assert torch.equal(wide, drawer().rows("evaluation", 0, 5)["noise"].double())


# Classes of generated images


LABELS = np.array([0, 2, 2, 2, 0, 2, 2, 2])
SPEC = DataSpec(1, 2, 2, num_classes=4)


class Unlisted(Source):
    """A user's source, whose labels are only known after reading a sample."""

    spec = SPEC

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return len(LABELS)

    def read(self, index: int) -> Sample:
        return {"image": np.zeros((2, 2, 1), np.uint8), "label": LABELS[index]}


def selected(draws: torch.Tensor, num_classes: int) -> torch.Tensor:
    return (draws * num_classes).long()


def test_the_samples_of_each_class_are_counted_in_any_source() -> None:
    arrays = ArraySource({"image": np.zeros((8, 2, 2, 1), np.uint8), "label": LABELS}, SPEC)
    assert count_classes(arrays).tolist() == count_classes(Unlisted()).tolist() == [2, 0, 6, 0]
    assert count_classes(Subset(arrays, [1, 2, 4])).tolist() == [1, 0, 2, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_classes_are_drawn_as_often_as_they_occur(dtype: torch.dtype) -> None:
    draws = torch.rand(20_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    edges = torch.tensor([0.0, 1 - 2**-24], dtype=dtype)
    drawn = in_proportion(torch.cat([draws, edges]), torch.tensor([2, 0, 6, 0]))
    assert drawn.dtype == dtype
    shares = selected(drawn, 4).bincount(minlength=4) / len(drawn)
    assert shares[1] == shares[3] == 0, "a class without images is drawn"
    assert shares[0].item() == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("num_classes", [2, 7, 10, 1000])
def test_equal_counts_leave_the_classes_as_they_were(num_classes: int) -> None:
    draws = torch.rand(5000, generator=torch.Generator().manual_seed(1))
    draws = torch.cat([draws, torch.arange(num_classes) / num_classes])
    drawn = in_proportion(draws, torch.full((num_classes,), 17))
    expected = (draws.double() * num_classes).long()
    assert torch.equal(selected(drawn, num_classes), expected)


def test_a_draw_that_selects_a_class_does_so_in_single_precision() -> None:
    draws = torch.tensor([selecting(number, 1000) for number in range(1000)])
    assert torch.equal(selected(draws, 1000), torch.arange(1000))


# Transforms


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


def test_the_largest_random_number_selects_the_last_crop_position() -> None:
    for pad in (*range(1, 20), 127, 128, 500):
        white = torch.full((1, 1, pad + 1, pad + 1), 255, dtype=torch.uint8)
        raw = {"image": white, "uniforms": torch.full((1, 8), LARGEST_UNIFORM)}
        moved = transform(raw, Augment(pad_crop=pad), torch.float32)["image"]
        assert moved[0, 0, 0, 0] == 1 and moved.sum() == 1 - (moved.numel() - 1), pad


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
