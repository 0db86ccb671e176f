"""The fingerprint of a run's data covers images and labels."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from made_data import random_images
from PIL import Image

from paceline.commands.pack import pack, pack_to_shards
from paceline.contracts.recipe import DataSpec
from paceline.core.registry import load_class
from paceline.data.fingerprint import (
    IDENTITY_SAMPLES,
    describe_samples,
    fingerprint,
    fingerprint_of_files,
    is_same_data,
    without_sizes,
)
from paceline.data.source import ArraySource, RegisteredSources, Sample, Source


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
        settings = RegisteredSources().of(name)(data=name, data_root=str(root), workers=0)
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
    folders = RegisteredSources().of("folder")

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
