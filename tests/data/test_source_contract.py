"""Tests that every source must pass. To include a new source, add a writer to made_data.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.config.settings import LearnerSettings, RunSettings
from paceline.contracts.recipe import Recipe
from paceline.core import registry
from paceline.core.errors import UserError
from paceline.data.source import RegisteredSources, Source, Subset, sizes_of, split_off
from paceline.images.rectangles import Box

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
def test_evaluating_a_whole_folder_includes_every_sample(name: str, make_data) -> None:
    settings = make_data(name)
    whole = registry.load_class("source", name, Source).measure_whole(settings)
    usual, measured = len(build(name, "test", settings)), len(build(name, "test", whole))
    assert measured == usual if whole == settings else measured == usual + len(build(name, "train", settings))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_size_and_channels_are_as_requested(name: str, channels: int, make_data) -> None:
    source = build(name, "test", make_data(name, size=13, channels=channels))
    assert (source.spec.height, source.spec.width, source.spec.channels) == (13, 13, channels)
    assert source.read(0)["image"].shape == (13, 13, channels)


@pytest.mark.parametrize("name", NAMES)
def test_channels_that_the_images_do_not_have_are_rejected(name: str, make_data) -> None:
    settings = make_data(name)
    with pytest.raises(UserError, match="channels=2"):
        build(name, "train", dataclasses.replace(settings, channels=2))


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_a_source_have_help_texts_bounds_and_unique_names(name: str) -> None:
    common = {field.name for field in dataclasses.fields(RunSettings)}
    own = [field for field in dataclasses.fields(RegisteredSources().of(name)) if field.name not in common]
    assert all(field.metadata["meaning"] for field in own)
    assert all(field.metadata["bounds"] for field in own if field.type in ("int", "float"))
    recipes = [registry.load_class("recipe", recipe, Recipe).Settings for recipe in registry.names("recipe")]
    taken = {field.name for group in (LearnerSettings, *recipes) for field in dataclasses.fields(group)}
    assert not taken & {field.name for field in own}


def test_digits_and_house_numbers_may_not_be_flipped(make_data) -> None:
    may_flip = {name: build(name, "test", make_data(name)).spec.flip_allowed for name in NAMES}
    assert [name for name, allowed in may_flip.items() if not allowed] == ["digits", "mnist", "svhn"]


def test_a_source_in_a_user_file_is_given_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "stripes.py"
    file.write_text(
        "import numpy as np\n"
        "from paceline.data.source import ArraySource\n"
        "from paceline.contracts.recipe import DataSpec\n"
        "class Stripes(ArraySource):\n"
        "    def __init__(self, split, settings):\n"
        "        images = np.zeros((5, 4, 4, 1), dtype=np.uint8)\n"
        "        super().__init__({'image': images, 'label': np.arange(5)}, DataSpec(1, 4, 4, num_classes=5))\n"
    )
    source = build(str(file), "train", RunSettings())
    assert len(source) == 5 and source.read(4)["label"] == 4


def test_held_out_samples_are_not_trained_on() -> None:
    source = build("digits", "train", RunSettings())
    training, validation = split_off(source, 0.1, seed=0)
    assert len(validation) == round(0.1 * len(source))
    assert sorted([*training.indices, *validation.indices]) == list(range(len(source)))  # type: ignore[attr-defined]
    assert np.array_equal(validation.read(0)["image"], source.read(int(validation.indices[0]))["image"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_the_files_of_a_sample_contain_the_images_and_numbers_that_reading_returns(name: str, make_data) -> None:
    source = build(name, "train", make_data(name))
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
