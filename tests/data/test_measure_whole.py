"""All samples in a folder given for evaluation are evaluated, unless the folder has a test split."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from made_data import writers
from PIL import Image

from paceline.commands.configure import configure
from paceline.commands.evaluate import _for_whole_folder
from paceline.config.flags import SeparateTestFolder
from paceline.config.settings import RunSettings
from paceline.core import registry
from paceline.core.errors import UserError
from paceline.data.open_sources import open_sources
from paceline.data.source import RegisteredSources, Source

COUNT, SIDE = 10, 12
FOLDERS = {"photos": ("",), "degraded": ("",), "pairs": ("input", "target"), "panels": ("",), "folder": ("",)}


def source_class(name: str) -> type[Source]:
    return registry.load_class("source", name, Source)


def settings_of(name: str, root: Path, **changes: str | int) -> RunSettings:
    return RegisteredSources().of(name)(data=name, data_root=str(root), workers=0, **changes)  # type: ignore[arg-type]


def write(root: Path, name: str, count: int) -> None:
    """Write the samples of one split in the layout that the source expects."""
    for folder in FOLDERS[name]:
        (root / folder).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = np.full((SIDE, 2 * SIDE, 3), number, np.uint8)
            Image.fromarray(pixels).save(root / folder / f"{number}.png")


@pytest.mark.parametrize("name", FOLDERS)
def test_all_samples_in_a_folder_without_a_test_split_are_evaluated(name: str, tmp_path: Path) -> None:
    source, settings = source_class(name), settings_of(name, tmp_path)
    write(tmp_path, name, 1)
    with pytest.raises(UserError, match="too few to train and test on; add more, or set --test-root"):
        source("test", settings)
    assert len(source("test", source.measure_whole(settings))) == 1
    write(tmp_path, name, COUNT)
    assert len(source("test", settings)) == COUNT // 5
    whole = source("test", source.measure_whole(settings))
    names = [Path(whole.name_of(index)).name for index in range(len(whole))]
    assert names == [f"{number}.png" for number in range(COUNT)]


@pytest.mark.parametrize("name", FOLDERS)
def test_only_the_test_split_or_folder_is_evaluated_if_there_is_one(name: str, tmp_path: Path) -> None:
    write(tmp_path / "train", name, 3)
    write(tmp_path / "test", name, 2)
    source, settings = source_class(name), settings_of(name, tmp_path)
    assert source.measure_whole(settings) == settings and len(source("test", settings)) == 2
    write(tmp_path / "own", name, 5)
    write(tmp_path / "other", name, 4)
    settings = settings_of(name, tmp_path / "own", test_root=str(tmp_path / "other"))
    assert [len(source(split, settings)) for split in ("train", "test")] == [5, 4]
    assert source.measure_whole(settings) == settings
    with pytest.raises(UserError, match=r"--test-root .*nowhere: no such folder"):
        source("test", settings_of(name, tmp_path / "own", test_root=str(tmp_path / "nowhere")))


def test_classes_keep_their_labels_if_the_whole_folder_is_evaluated(tmp_path: Path) -> None:
    for name, count in (("cat", 4), ("dog", 6)):
        write(tmp_path / name, "folder", count)
    settings = settings_of("folder", tmp_path, size=SIDE)
    whole = source_class("folder")("test", source_class("folder").measure_whole(settings))
    assert [int(whole.read(index)["label"]) for index in range(len(whole))] == [0] * 4 + [1] * 6


def test_panels_in_folders_named_a_and_b_are_evaluated_on_their_test_split(tmp_path: Path) -> None:
    for folder, count in (("trainA", 3), ("trainB", 3), ("testA", 2), ("testB", 2)):
        write(tmp_path / folder, "panels", count)
    settings = settings_of("panels", tmp_path)
    assert source_class("panels").measure_whole(settings) == settings
    assert len(source_class("panels")("test", settings)) == 2


@pytest.mark.parametrize("name", sorted({*writers} - {*FOLDERS}))
def test_sources_with_a_fixed_test_split_evaluate_that_split(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers[name](tmp_path, monkeypatch)
    settings = settings_of(name, tmp_path)
    assert source_class(name).measure_whole(settings) is settings


def test_low_resolution_files_are_evaluated_with_their_high_resolution_images(tmp_path: Path) -> None:
    write(tmp_path / "high", "photos", 2)
    settings = settings_of("photos", tmp_path / "high", low_root=str(tmp_path / "low"))
    whole = source_class("photos").measure_whole(settings)
    assert whole == dataclasses.replace(
        settings, test_root=settings.data_root, test_low_root=str(tmp_path / "low"), validation=0.0
    )  # type: ignore[call-arg]


@pytest.mark.parametrize(("recipe", "name"), [("restoration", "pairs"), ("translation", "panels")])
def test_evaluation_uses_the_source_that_the_run_was_trained_on(recipe: str, name: str, tmp_path: Path) -> None:
    write(tmp_path, name, COUNT)
    config = configure(recipe, {"data": name, "data_root": str(tmp_path), "workers": "0"})
    whole = _for_whole_folder(config)
    assert isinstance(whole.run, SeparateTestFolder) and whole.run.test_root == str(tmp_path)
    assert {split: len(source) for split, source in open_sources(whole, "test").items()} == {"test": COUNT}
