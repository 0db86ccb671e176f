"""Tests that every source must pass, and what is checked of users' sources; add new sources to made_data.py."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_data import random_images
from PIL import Image

from paceline.commands.pack import pack, pack_to_shards
from paceline.config.resolve import settings_of
from paceline.config.settings import LearnerSettings, RunSettings
from paceline.contracts.recipe import DataSpec, Recipe
from paceline.core import registry
from paceline.core.errors import UserError
from paceline.core.registry import load_class
from paceline.data.fingerprint import (
    IDENTITY_SAMPLES,
    describe_samples,
    fingerprint,
    fingerprint_of_files,
    is_same_data,
    without_sizes,
)
from paceline.data.source import ArraySource, Sample, Source, Subset, check_classes, check_sample, data_name, sizes_of
from paceline.images.rectangles import Box

# Built-in sources


NAMES = registry.names("source")


def build(name: str, split: str, settings: RunSettings) -> Source:
    return registry.load_class("source", name, Source)(split, settings)


@pytest.mark.parametrize("name", NAMES)
def test_samples_match_the_data_spec_however_they_are_read(name: str, make_data) -> None:
    settings, indices = make_data(name), np.array([2, 0, 3])
    for split in ("train", "test"):
        source = build(name, split, settings)
        spec = source.spec
        assert len(source) > 0 and len(spec.class_names) in (0, spec.num_classes)
        for index in (0, len(source) - 1):
            sample = source.read(index)
            assert sample["image"].shape == (*sizes_of(source)[index], spec.channels)
            assert sample["image"].dtype == np.uint8
            if spec.num_classes:
                assert sample["label"].shape == () and sample["label"].dtype == np.int64
                assert 0 <= sample["label"] < spec.num_classes
    source = build(name, "train", settings)
    many, again = source.read_many(indices), build(name, "train", settings).read_many(indices)
    for row, index in enumerate(indices):
        assert all(np.array_equal(many[field][row], value) for field, value in source.read(int(index)).items())
    assert all(np.array_equal(many[field], again[field]) for field in many)
    for part, places in ((source, indices), (Subset(source, indices), np.arange(3))):
        numbers, read = part.numbers_of(places), part.read_many(places)
        assert numbers is None or numbers.keys() == {field for field, values in read.items() if values.ndim == 1}
        assert all(np.array_equal(values, read[field]) for field, values in (numbers or {}).items())
    whole, window = source.read(1), source.read_window(1, Box(2, 4, 4, 2))
    assert window.keys() == whole.keys()
    for field, value in whole.items():
        assert np.array_equal(window[field], value[2:6, 4:6] if value.ndim == 3 else value)


@pytest.mark.parametrize("name", NAMES)
def test_size_and_channels_are_as_requested(name: str, make_data) -> None:
    settings = make_data(name, size=13, channels=1)
    for channels in (1,) if name == "packed" else (1, 3):
        source = build(name, "test", dataclasses.replace(settings, channels=channels))
        assert (source.spec.height, source.spec.width, source.spec.channels) == (13, 13, channels)
        assert source.read(0)["image"].shape == (13, 13, channels)


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_a_source_have_help_texts_bounds_and_unique_names(name: str) -> None:
    common = {field.name for field in dataclasses.fields(RunSettings)}
    own = [field for field in dataclasses.fields(settings_of(name)) if field.name not in common]
    assert all(field.metadata["meaning"] for field in own)
    assert all(field.metadata["bounds"] for field in own if field.type in ("int", "float"))
    recipes = [registry.load_class("recipe", recipe, Recipe).Settings for recipe in registry.names("recipe")]
    taken = {field.name for group in (LearnerSettings, *recipes) for field in dataclasses.fields(group)}
    assert not taken & {field.name for field in own}


@pytest.mark.parametrize("name", NAMES)
def test_whole_folders_wrong_channels_and_files_of_samples(name: str, make_data) -> None:
    settings, source_class = make_data(name), registry.load_class("source", name, Source)
    source, test = source_class("train", settings), source_class("test", settings)
    assert test.spec.flip_allowed == (name not in ("digits", "mnist", "svhn"))
    evaluated = source_class.measure_whole(settings)
    whole = source_class("test", evaluated)
    assert len(whole) == len(test) + (0 if evaluated == settings else len(source)), "every sample is evaluated"
    with pytest.raises(UserError, match="channels=2"):
        source_class("train", dataclasses.replace(settings, channels=2))
    sample, encoded, files = source.read(1), source.encoded(1), source.files_of(1)
    assert encoded or name not in ("photos", "pairs"), "the samples are files"
    assert files or name not in ("folder", "photos", "pairs", "degraded", "panels"), "the samples are files"
    if encoded:
        assert encoded.files.keys() | encoded.numbers.keys() == sample.keys()
        assert all(np.array_equal(value, sample[field]) for field, value in encoded.numbers.items())
        for field, file in encoded.files.items():
            assert np.array_equal(np.asarray(Image.open(file).convert("RGB")), sample[field])
    if files:
        assert files.files and all(file.is_file() for file in files.files.values())
        assert files.numbers == {field: value for field, value in sample.items() if value.ndim == 0}


# Checks of samples


LABELS = np.arange(6) % 3


def in_memory(labels: Any, num_classes: int = 3, names: tuple[str, ...] = ()) -> ArraySource:
    images = np.zeros((6, 4, 4, 1), np.uint8)
    return ArraySource({"image": images, "label": labels}, DataSpec(1, 4, 4, num_classes, names))


class OneAtATime(Source):
    """Reads one sample at a time, with the labels that it is given."""

    def __init__(self, labels: list[Any]) -> None:
        self.labels, self.spec = labels, DataSpec(1, 4, 4, 3)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Any:
        return {"image": np.zeros((4, 4, 1), np.uint8), "label": self.labels[index]}


def test_wrong_labels_are_rejected() -> None:
    for source in (in_memory(LABELS.tolist()), OneAtATime([0, 1, 2])):
        with pytest.raises(UserError, match=r"^mine: 'label' is of type int: return a NumPy array or number$"):
            check_sample(source, "mine")
    with pytest.raises(UserError, match=r"'label' is a uint8 array of shape .*: return a single int64 number"):
        check_sample(in_memory(LABELS.astype(np.uint8)), "mine")
    for labels, wrong in ((LABELS + 1, 3), (LABELS - 1, -1)):
        with pytest.raises(UserError, match=rf"mine: a label is {wrong}, but spec.num_classes is 3; .* from 0 to 2$"):
            check_classes(in_memory(labels), "mine")
        with pytest.raises(UserError, match=f"mine: a label is {wrong}"):
            check_classes(OneAtATime([np.int64(wrong)]), "mine")
    with pytest.raises(UserError, match=r"mine: spec.num_classes is 3, but there are 2 class names"):
        check_classes(in_memory(LABELS, names=("a", "b")), "mine")
    with pytest.raises(UserError, match=r"ArraySource: the arrays differ in length \('image' has 6, 'label' has 5\)"):
        in_memory(LABELS[:5])


@pytest.mark.parametrize(
    "source", [in_memory(LABELS), in_memory(LABELS, names=("a", "b", "c")), in_memory(LABELS + 9, num_classes=0)]
)
def test_correct_samples_are_accepted(source: Source) -> None:
    check_sample(source, "mine")
    check_classes(source, "mine")


# Names of data


def test_data_is_named_after_its_source_or_its_root() -> None:
    for source, root, name in (
        ("digits", "elsewhere", "digits"),
        ("cifar10", "downloads", "cifar10"),
        ("npz", "arrays/cifar10.npz", "cifar10"),
        ("npz", "my cats & dogs.npz", "my-cats-dogs"),
        ("folder", "photos/birds-v1.5/", "birds-v1.5"),
        ("packed", ".", "packed"),
        ("folder", RunSettings.data_root, "folder"),
        ("shards", "s3://bucket/flowers", "flowers"),
        ("shards", "https://user:secret@host?token=secret", "shards"),
        ("./not_loaded.py", "birds", "not_loaded"),
    ):
        assert data_name(source, root) == name


# Fingerprints


class OnlyRead(Source):
    """A source whose labels can be found only by reading the samples."""

    def __init__(self, source: Source) -> None:
        self.source, self.spec = source, source.spec

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> Sample:
        return self.source.read(index)


def test_the_fingerprint_of_data_depends_on_labels_too() -> None:
    image, labels = random_images(40, 6, 6, 3), np.arange(40)
    plain = describe_samples(ArraySource({"image": image}, DataSpec(3, 6, 6)))
    assert plain == f"40 samples, {fingerprint(ArraySource({'image': image}, DataSpec(3, 6, 6)), IDENTITY_SAMPLES)}"
    for change in (slice(0, None), slice(7, 8)):  # change all labels, then one that a spot check would miss
        other = labels.copy()
        other[change] += 1
        sources = [
            ArraySource({"image": image, "label": one}, DataSpec(3, 6, 6, 41)) for one in (labels, labels, other)
        ]
        first, same, changed = map(describe_samples, sources)
        assert first == same and len({plain, first, changed}) == 3
    read = [describe_samples(OnlyRead(source)) for source in (sources[0], shifted(sources[0]))]
    assert read[0] != read[1]


def shifted(source: ArraySource) -> Source:
    return ArraySource(source.arrays | {"label": source.arrays["label"] + 1}, source.spec)


@pytest.mark.parametrize("name", ["packed", "shards"])
def test_the_fingerprint_of_packed_files_changes_if_any_image_changes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    images, labels = random_images(600, 4, 4, 1), np.arange(600) % 3
    found = []
    for change in (0, 0, 1):
        images[1] ^= change  # not one of the images of which the pixels are compared
        np.savez(tmp_path / "images.npz", x_train=images, y_train=labels, x_test=images[:9], y_test=labels[:9])
        root = tmp_path / f"{name}{len(found)}"
        origin, flags = str(tmp_path / "images.npz"), {"data": "npz", "workers": 0}
        if name == "packed":
            assert pack(origin, str(root), flags, {}) == 0
        else:
            assert pack_to_shards(origin, str(root), flags, {}, 1) == 0
        settings = settings_of(name)(data=name, data_root=str(root), workers=0)
        source = load_class("source", name, Source)("train", settings)
        found.append((fingerprint(source), fingerprint_of_files(source)))
    assert found[0] == found[1]
    assert found[2][0] == found[0][0] and found[2][1] != found[0][1]


def test_a_replaced_image_changes_the_description_of_a_folder_but_a_copy_does_not(tmp_path: Path) -> None:
    source_class = load_class("source", "folder", Source)
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number, image in enumerate(random_images(50, 8, 8, 3)):
            Image.fromarray(image).save(tmp_path / "data" / name / f"{number:02}.png")
    shutil.copytree(tmp_path / "data", tmp_path / "copy", copy_function=shutil.copyfile)
    folders = settings_of("folder")

    def describe(name: str) -> str:
        return describe_samples(source_class("train", folders(data_root=str(tmp_path / name), size=8)))

    before = describe("data")
    assert is_same_data(before, describe("copy"))
    opened = source_class("train", folders(data_root=str(tmp_path / "data"), size=8))
    replaced = opened.files_of(1)  # not one of those whose pixels are hashed
    assert replaced is not None
    Image.fromarray(random_images(9, 9, 3)).save(replaced.files["image"])
    assert not is_same_data(before, describe("data"))
    assert is_same_data(without_sizes(before), describe("data"))  # as a run of an older version describes its data
