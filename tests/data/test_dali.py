"""The DALI loader yields the same batches as the `workers` loader, and rejects unsupported files."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from endless import endless
from made_data import random_images, raw_batches
from PIL import Image, ImageFilter

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, DataSpec
from paceline.core.errors import UserError
from paceline.data.loader import BatchPipeline, Loader, evaluation_batches
from paceline.data.loaders.dali import Dali
from paceline.data.loaders.workers import Workers
from paceline.data.source import ArraySource, Source, Subset
from paceline.data.sources.degraded import Degraded
from paceline.data.sources.folder import Folder
from paceline.data.sources.pairs import Pairs
from paceline.data.sources.panels import Panels
from paceline.data.sources.photos import Photos
from paceline.data.stream import Stream

CPU = torch.device("cpu")
Test = TypeVar("Test", bound=Callable[..., Any])
BATCH, CROP, SCALE = 5, 12, 4
SIZES = [(16, 24), (40, 13), (12, 12), (31, 29), (20, 20), (17, 50), (24, 24)]
DECODERS_DIFFER_BY = 2  # largest difference in grey levels between libjpeg builds


def has_dali() -> bool:
    try:
        return importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:  # raised if the parent package `nvidia` is missing
        return False


def needs_dali(test: Test) -> Test:
    """Mark a test that needs DALI; `make test-extras` installs it and runs these tests."""
    return pytest.mark.extras(pytest.mark.skipif(not has_dali(), reason="needs NVIDIA DALI")(test))


def save(file: Path, height: int, width: int, **options: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).filter(ImageFilter.GaussianBlur(1)).save(file, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images of mixed sizes in every layout. One photo has an EXIF rotation."""
    root = tmp_path_factory.mktemp("files")
    sideways = Image.Exif()
    sideways[0x0112] = 6
    for split, (number, (height, width)) in itertools.product(("train", "test"), enumerate(SIZES)):
        save(root / "png" / split / f"{number}.png", height, width)
        options = {"exif": sideways} if number == 3 else {}
        save(root / "jpeg" / split / f"{number}.jpg", height, width, quality=90, **options)
        save(root / "low" / split / f"{number}x4.png", height // SCALE, width // SCALE)
        for kind in ("img", "gt"):
            save(root / "pairs" / split / kind / "a" / f"{number}.png", height, width)
        for kind in ("cat", "dog"):
            save(root / "folder" / split / kind / f"{number}.png", 16, 16)
    return root


def open_source(data: Path, kind: str, split: str = "train") -> Source:
    if kind == "png with low":
        roots = {"data_root": str(data / "png"), "low_root": str(data / "low" / split)}
        return Photos(split, Photos.Settings(**roots, crop=CROP, workers=0))  # type: ignore[arg-type]
    if kind == "part of png":
        return Subset(open_source(data, "png", split), [5, 1, 2])
    source_class: type[Any] = {"pairs": Pairs, "folder": Folder}.get(kind, Photos)
    return source_class(split, source_class.Settings(data_root=str(data / kind), crop=CROP, workers=0))


def take(loader: Loader, count: int = 6) -> list[Batch]:
    try:
        return list(itertools.islice(raw_batches(loader, endless(loader.source, BATCH)), count))
    finally:
        loader.close()


@needs_dali
@pytest.mark.parametrize("kind", ["png", "png with low", "pairs", "folder", "part of png", "jpeg"])
def test_dali_yields_the_same_windows_and_labels_as_workers(kind: str, data: Path) -> None:
    source, allowed = open_source(data, kind), DECODERS_DIFFER_BY if kind == "jpeg" else 0
    settings = RunSettings(workers=2)
    found, expected = take(Dali(source, CPU, settings, CROP)), take(Workers(source, CPU, RunSettings(workers=0), CROP))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, field in theirs.items():
            assert ours[name].dtype == field.dtype and ours[name].stride() == field.stride()
            assert (ours[name].double() - field.double()).abs().max() <= allowed, name


@needs_dali
@pytest.mark.parametrize("kind", ["png", "png with low", "pairs", "folder"])
def test_evaluation_yields_every_whole_image_once_and_a_short_last_batch(kind: str, data: Path) -> None:
    source = open_source(data, kind, "test")
    for rank in range(2):
        loaders = (loader(source, CPU, RunSettings(workers=0)) for loader in (Dali, Workers))
        pipelines = (BatchPipeline(loader, None, torch.float32) for loader in loaders)
        ours, theirs = (list(evaluation_batches(pipeline, rank, 2)) for pipeline in pipelines)
        assert ours
        for one, other in zip(ours, theirs, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other)


@needs_dali
def test_batches_of_different_sizes_can_be_requested(data: Path) -> None:
    source = open_source(data, "png")
    stream = Stream(0, len(source))
    requests = [stream.take(0, 2), stream.take(2, 5), stream.take(5, 6)]
    batches = list(raw_batches(Dali(source, CPU, RunSettings(), CROP), requests))
    assert [len(batch["image"]) for batch in batches] == [2, 3, 1]


@needs_dali
def test_a_truncated_or_missing_file_is_reported(tmp_path: Path) -> None:
    for number, split in itertools.product(range(3), ("train", "test")):
        save(tmp_path / split / f"{number}.png", 20, 20)
    source, file = Photos("train", Photos.Settings(data_root=str(tmp_path), crop=CROP)), tmp_path / "train" / "1.png"
    loader = Dali(source, CPU, RunSettings(), CROP)
    file.write_bytes(file.read_bytes()[:600])
    with pytest.raises(UserError, match=r"1\.png: unreadable image \(.*--bad-images skip"):
        take(Dali(source, CPU, RunSettings(), CROP))
    file.unlink()
    with pytest.raises(UserError, match=r"1\.png: cannot be read \(No such file"):
        take(loader)


@needs_dali
def test_files_that_dali_decodes_differently_are_rejected(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save(tmp_path / split / "plain.png", 20, 20)
        pixels = random_images(20, 20, 4)
        Image.fromarray(pixels).save(tmp_path / split / "veil.png")
    source = Photos("train", Photos.Settings(data_root=str(tmp_path), crop=CROP))
    with pytest.raises(UserError, match=r"--loader dali: .*veil\.png \(PNG, transparency\).*--loader workers"):
        Dali(source, CPU, RunSettings(), CROP)


@needs_dali
def test_sources_that_modify_their_images_are_rejected(data: Path, tmp_path: Path) -> None:
    for split in ("train", "test"):
        save(tmp_path / split / "row.png", 14, 28)
    worse = Degraded("train", Degraded.Settings(data_root=str(data / "png"), crop=CROP))
    scaled = Folder("train", Folder.Settings(data_root=str(data / "folder"), size=8))
    grey = Photos("train", Photos.Settings(data_root=str(data / "png"), channels=1, crop=CROP))
    rows = Panels("train", Panels.Settings(data_root=str(tmp_path), panels="image,target"))
    array = ArraySource({"image": random_images(4, 8, 8, 3)}, DataSpec(3, 8, 8))
    for source in (worse, scaled, grey, rows, array):
        with pytest.raises(UserError, match=r"--loader dali: .* use --loader workers"):
            Dali(source, CPU, RunSettings())


def test_if_dali_is_missing_the_error_names_the_extra_to_install(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(UserError, match=r"not installed; pip install 'paceline\[dali\]'"):
        Dali(open_source(data, "png"), CPU, RunSettings(), CROP)
