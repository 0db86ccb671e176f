"""Every loader crops training images of mixed sizes to the same windows. Evaluation uses whole images."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from endless import endless
from made_data import random_images, raw_batches, save_image

from paceline.commands.pack import pack
from paceline.config.settings import RunSettings
from paceline.contracts.recipe import DataSpec, Draw
from paceline.core import registry
from paceline.core.errors import UserError
from paceline.data.fingerprint import fingerprint
from paceline.data.loader import BatchPipeline, Cut, Loader, TrainingFeed, evaluation_batches
from paceline.data.loaders import resident
from paceline.data.source import ArraySource, Source, split_off
from paceline.data.stream import (
    CROP_COLUMN,
    CROP_ROW,
    NUM_UNIFORMS,
    ROT90,
    Augment,
    Drawer,
    Stream,
    check_crop,
    transform,
    windows,
)
from paceline.images.rectangles import Box

CPU = torch.device("cpu")
BATCH, CROP, SCALE = 12, 12, 4
SIZES = [(16, 24), (40, 13), (12, 12), (31, 29), (20, 20), (17, 50), (24, 24), (33, 18)]
KINDS = ["photos with low", "pairs", "degraded", "packed photos", "packed pairs", "array"]
SETUPS = [("workers", 0), ("workers", 2), ("resident", 0), ("resident in the host's memory", 0)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images of mixed sizes in every layout."""
    root = tmp_path_factory.mktemp("mixed")
    for split, (number, (height, width)) in itertools.product(("train", "test"), enumerate(SIZES)):
        save_image(root / "photos" / split / f"{number}.png", height, width)
        save_image(root / "high" / split / f"{number}.png", height, width)
        save_image(root / "low" / split / f"{number}x4.png", height // SCALE, width // SCALE)
        for kind in ("img", "gt"):
            save_image(root / "pairs" / split / kind / "a" / f"{number}.png", height, width)
    for kind in ("photos", "pairs"):
        assert pack(str(root / kind), str(root / f"packed {kind}"), {"data": kind, "workers": 0}, {}) == 0
    return root


def open_source(data: Path, kind: str, split: str = "train") -> Source:
    if kind == "array":
        images = random_images(len(SIZES), 19, 14, 3)
        return ArraySource({"image": images, "label": np.arange(len(SIZES))}, DataSpec(3, 19, 14, num_classes=8))
    options: dict[str, Any] = {"data_root": str(data / kind)}
    if kind == "photos with low":
        options = {"data_root": str(data / "high"), "low_root": str(data / "low" / split)}
    elif kind == "degraded":
        options = {"data_root": str(data / "photos"), "degrade_blur": 1.0, "degrade_jpeg": 50}
    source_class = registry.load_class("source", "photos" if kind == "photos with low" else kind.split()[0], Source)
    return source_class(split, source_class.Settings(**options, crop=CROP, workers=0))


def build(name: str, source: Source, workers: int, monkeypatch: pytest.MonkeyPatch, crop: int = 0) -> Loader:
    loader_class = registry.load_class("loader", name.split()[0], Loader)
    loader = loader_class(source, CPU, RunSettings(workers=workers), crop)
    if "host" in name:
        monkeypatch.setattr(loader, "device", torch.device("meta"))  # must differ from the device that holds the pixels
        monkeypatch.setattr(resident, "upload", lambda batch, device: batch)
    return loader


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "workers"), SETUPS)
def test_every_loader_crops_images_to_the_requested_windows(
    name: str, workers: int, kind: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(data, kind)
    loader = build(name, source, workers, monkeypatch, CROP)
    for batch, request in zip(
        raw_batches(loader, endless(source, BATCH)), itertools.islice(endless(source, BATCH), 4), strict=False
    ):
        sizes = np.array([source.read(int(index))["image"].shape[:2] for index in request.index])
        for row, window in enumerate(windows(request.uniforms, sizes, CROP, source.spec.scale)):
            whole = source.read(int(request.index[row]))
            top, left, height, width = window
            for field, value in whole.items():
                if field == "low":
                    value = value[top // 4 : top // 4 + 3, left // 4 : left // 4 + 3]
                elif value.ndim == 3:
                    value = value[top : top + height, left : left + width]
                found = batch[field][row]
                assert np.array_equal(found.permute(1, 2, 0) if found.ndim == 3 else found, value)
        assert batch["image"].dtype == torch.uint8
        assert batch["image"].is_contiguous(memory_format=torch.channels_last)
    loader.close()


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize(("name", "workers"), SETUPS)
def test_evaluation_yields_every_whole_image_once(
    name: str, workers: int, kind: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(data, kind, "test")
    seen = []
    for rank in range(3):
        loader = build(name, source, workers, monkeypatch)
        for batch in evaluation_batches(BatchPipeline(loader, None, torch.float64), rank, 3):
            (index,) = batch["index"].tolist()
            seen.append(index)
            for field, value in source.read(index).items():
                pixels = (batch[field][0].permute(1, 2, 0) + 1) * 127.5
                assert np.array_equal(pixels.round().numpy(), value)
    assert seen == list(range(len(SIZES)))


def test_packed_samples_equal_those_of_the_source(data: Path) -> None:
    for kind in ("photos", "pairs"):
        packed, source = open_source(data, f"packed {kind}"), open_source(data, kind)
        assert packed.spec == source.spec and packed.sizes is not None and source.sizes is not None
        assert np.array_equal(packed.sizes, source.sizes) and fingerprint(packed) == fingerprint(source)
        for index in range(len(source)):
            one, other = packed.read(index), source.read(index)
            assert packed.name_of(index) == source.name_of(index) and one.keys() == other.keys()
            assert all(np.array_equal(one[field], other[field]) for field in one)


def test_packed_samples_smaller_than_the_crop_can_be_skipped(data: Path) -> None:
    names = []
    for name, folder in (("photos", "photos"), ("packed", "packed photos")):
        source_class = registry.load_class("source", name, Source)
        settings = source_class.Settings(data_root=str(data / folder), crop=20, bad_images="skip", workers=0)
        source = source_class("train", settings)
        assert [source.read(i)["image"].shape[:2] for i in range(len(source))] == [(31, 29), (20, 20), (24, 24)]
        assert "left out 5 of 8 samples" in source.notes[0] and len(source.not_used) == 5
        assert "pixels, smaller than the crop" in source.notes[0]
        names.append([source.name_of(index) for index in range(len(source))])
    assert names[0] == names[1]
    with pytest.raises(UserError, match="--crop 60: larger than every image"):
        registry.load_class("source", "packed", Source)("train", dataclasses.replace(settings, crop=60))


@pytest.mark.parametrize(("name", "workers"), SETUPS)
def test_training_batches_contain_image_windows_and_random_inputs(
    name: str, workers: int, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(data, "pairs")
    drawer = Drawer({"noise": Draw((5,))}, 0, CPU, torch.float32)
    steps = []
    for loader in (build("workers", source, 0, monkeypatch, CROP), build(name, source, workers, monkeypatch, CROP)):
        cut, augment = Cut(BATCH, 2, 0, 1), Augment(flip=True, rot90=True)
        pipeline = BatchPipeline(loader, augment, torch.float32)
        feed = TrainingFeed(pipeline, Stream(0, len(source)), cut, 1, drawer)
        steps.append([pipeline.finish(micro) for step in feed.steps(0, 2 * BATCH) for micro in step.fetched[0]])
        loader.close()
    for one, other in zip(*steps, strict=True):
        assert one.keys() == {"image", "target", "index", "noise"} and one["image"].shape == (6, 3, CROP, CROP)
        assert all(torch.equal(one[field], other[field]) for field in one)


def test_windows_stay_inside_the_image_and_reach_every_position() -> None:
    uniforms = np.random.default_rng(0).random((4000, NUM_UNIFORMS), dtype=np.float32)
    uniforms[0], uniforms[1] = 0, np.nextafter(np.float32(1), np.float32(0))
    sizes = np.tile([[15, 12]], (4000, 1))
    found = windows(uniforms, sizes, 12, 0)
    assert found[0] == Box(0, 0, 12, 12) and found[1] == Box(3, 0, 12, 12)
    assert {window.top for window in found} == {0, 1, 2, 3} and {window.left for window in found} == {0}
    aligned = windows(uniforms, np.tile([[23, 33]], (4000, 1)), 12, 4)
    assert {window.top for window in aligned} == {0, 4, 8}
    assert {window.left for window in aligned} == {0, 4, 8, 12, 16, 20}


def test_a_window_does_not_depend_on_the_other_samples_in_its_batch() -> None:
    uniforms = np.random.default_rng(0).random((9, NUM_UNIFORMS), dtype=np.float32)
    sizes = np.random.default_rng(1).integers(20, 3000, (9, 2))
    together = windows(uniforms, sizes, 16, 0)
    assert together == [windows(uniforms[i : i + 1], sizes[i : i + 1], 16, 0)[0] for i in range(9)]
    other = uniforms.copy()
    other[:, [i for i in range(NUM_UNIFORMS) if i not in (CROP_ROW, CROP_COLUMN)]] = 0
    assert windows(other, sizes, 16, 0) == together


@pytest.mark.parametrize(
    ("kind", "crop", "message"),
    [
        ("photos", 13, r"--crop 13: larger than some images: 2\.png 12×12; .* at most 12"),
        ("photos", 0, r"--crop 0: .*0\.png 24×16, 1\.png 13×40.* at most 12"),
        ("photos with low", 10, "--crop 10: must be a multiple of 4"),
    ],
)
def test_a_crop_that_does_not_fit_the_images_is_rejected(kind: str, crop: int, message: str, data: Path) -> None:
    source = open_source(data, kind)
    assert source.sizes is not None
    with pytest.raises(UserError, match=message):
        check_crop(source.sizes, crop, source.spec.scale, source.name_of)
    if crop:  # loaders check it, too
        with pytest.raises(UserError, match=message):
            registry.load_class("loader", "workers", Loader)(source, CPU, RunSettings(), crop)


def test_held_out_images_are_not_trained_on_and_keep_their_sizes_and_names(data: Path) -> None:
    source = open_source(data, "photos")
    training, validation = split_off(source, 0.25, seed=0)
    assert len(validation) == round(0.25 * len(source))
    assert sorted([*training.indices, *validation.indices]) == list(range(len(source)))  # type: ignore[attr-defined]
    for part in (training, validation):
        assert part.sizes is not None
        for index in range(len(part)):
            assert part.read(index)["image"].shape[:2] == tuple(part.sizes[index])
            window = part.read_window(index, Box(1, 2, 5, 6))["image"]
            assert np.array_equal(window, part.read(index)["image"][1:6, 2:8])
    assert len({part.name_of(i) for part in (training, validation) for i in range(len(part))}) == len(SIZES)


def test_rotation_by_90_degrees_equals_numpy_for_all_images_in_a_sample() -> None:
    images = {"image": random_images(8, 6, 6, 3), "low": random_images(8, 3, 3, 3)}
    raw = {name: torch.from_numpy(field).permute(0, 3, 1, 2) for name, field in images.items()}
    uniforms = torch.zeros(8, NUM_UNIFORMS)
    uniforms[:, ROT90] = torch.arange(8) / 8
    batch = transform(raw | {"uniforms": uniforms}, Augment(rot90=True), torch.float64)
    for name, field in images.items():
        found = ((batch[name] + 1) * 127.5).round().permute(0, 2, 3, 1).numpy()
        for row in range(8):
            assert np.array_equal(found[row], np.rot90(field[row], row // 2))


def test_crops_are_evaluated_at_random_places_that_are_the_same_for_every_division() -> None:
    height, width = 12, 20
    places = np.arange(height * width, dtype=np.uint8).reshape(1, height, width, 1)
    source = ArraySource({"image": places.repeat(60, axis=0)}, DataSpec(1, height, width))
    loader = resident.Resident(source, torch.device("cpu"), RunSettings(), crop=8)
    pipeline = BatchPipeline(loader, None, torch.float32)
    images = {}
    for size in (1, 3):
        batches = [batch for rank in range(size) for batch in evaluation_batches(pipeline, rank, size)]
        images[size] = torch.cat([batch["image"] for batch in batches])
    assert images[1].shape == (60, 1, 8, 8) and torch.equal(images[1], images[3])
    corners = images[1][:, 0, 0, 0].add(1).mul(127.5).round().long().tolist()
    rows, columns = {corner // width for corner in corners}, {corner % width for corner in corners}
    assert rows == set(range(height - 8 + 1)) and len(columns) > 8
