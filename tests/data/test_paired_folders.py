"""Folders with inputs and targets of the same images are not used as independent images; class folders are."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from photographs import photograph
from PIL import Image, ImageFilter

from paceline.cli.app import run
from paceline.core.errors import UserError
from paceline.data.sources.folder import Folder
from paceline.data.sources.pairs import Pairs
from paceline.data.sources.photos import Photos

Copy = Callable[[Image.Image], Image.Image]
PHOTOS = ("astronaut", "coffee", "rocket", "chelsea", "moon")
WIDTH, HEIGHT = 96, 64


def same(image: Image.Image) -> Image.Image:
    return image


def blurred(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(2))


def reduced(image: Image.Image) -> Image.Image:
    return image.resize((WIDTH // 4, HEIGHT // 4))


def other_photo(image: Image.Image) -> Image.Image:
    seed = int(np.asarray(image).sum())
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (HEIGHT, WIDTH, 3), "u1"))


def write(root: Path, folders: dict[str, Copy], ending: str = "") -> None:
    for place, copy in folders.items():
        (root / place).mkdir(parents=True, exist_ok=True)
        for name in PHOTOS:
            image = Image.fromarray(photograph(name)).convert("RGB").resize((WIDTH, HEIGHT))
            copy(image).save(root / place / f"{name}{ending if copy is reduced else ''}.png")


def count(root: Path, kind: type[Photos | Pairs | Folder] = Photos, **options: str) -> int:
    """Return the number of samples of both splits."""
    settings = kind.Settings(data_root=str(root), workers=1, **options)  # type: ignore[arg-type]
    return sum(len(kind(split, settings)) for split in ("train", "test"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("folders", "remedy"),
    [
        (
            {"train/blurry": blurred, "train/sharp": same, "test/blurry": blurred, "test/sharp": same},
            "use --data pairs",
        ),
        ({"noisy": blurred, "clean": same}, "use --data pairs for both, or --data-root {root}/clean for one"),
        ({"A": blurred, "B": same}, "use --data pairs for both, or --data-root {root}/B for one"),
        ({"trainA": blurred, "trainB": same}, "moved to {root}/input and {root}/target, for both"),
        ({"scene1/blur": blurred, "scene1/sharp": same}, "moved to {root}/input and {root}/target, for both"),
        ({"HR": same, "LRx4": reduced}, "use --data-root {root}/HR --low-root {root}/LRx4 for both"),
        ({"large/day": same, "small/day": reduced}, "use --data-root {root}/large --low-root {root}/small for both"),
    ],
)
def test_inputs_and_targets_are_not_used_as_independent_images(
    folders: dict[str, Copy], remedy: str, tmp_path: Path
) -> None:
    write(tmp_path, folders, ending="x4")
    message = f"contain the same images, as inputs and targets.*{re.escape(remedy.format(root=tmp_path))}"
    with pytest.raises(UserError, match=message):
        count(tmp_path)


@pytest.mark.parametrize(
    "folders",
    [
        {"cats": same, "dogs": other_photo},
        {"a": same, "b": other_photo},
        {f"class {number}": same for number in range(9)},
        {"HR": same, "other": lambda image: image.resize((50, 50))},
    ],
)
def test_folders_with_the_same_names_and_other_images_are_used_together(
    folders: dict[str, Copy], tmp_path: Path
) -> None:
    write(tmp_path, folders)
    assert count(tmp_path) == len(folders) * len(PHOTOS)


def test_pairs_and_classes_may_have_the_usual_names_of_inputs_and_targets(tmp_path: Path) -> None:
    write(tmp_path, {"noisy": blurred, "clean": same})
    assert count(tmp_path, Pairs) == len(PHOTOS) and count(tmp_path, Folder) == 2 * len(PHOTOS)


def test_a_separate_test_folder_is_checked(tmp_path: Path) -> None:
    write(tmp_path / "data", {".": same})
    write(tmp_path / "Set5", {"HR": same, "LRx4": reduced}, ending="x4")
    high, low = f"{tmp_path}/Set5/HR", f"{tmp_path}/Set5/LRx4"
    with pytest.raises(UserError, match=f"--test-root .*: {low} and {high} .*: use --test-root {high} --test-low-root"):
        count(tmp_path / "data", test_root=f"{tmp_path}/Set5")
    assert count(tmp_path / "data", test_root=high, test_low_root=low) == 2 * len(PHOTOS)


def test_folders_with_other_names_of_splits_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path, {"training": same, "validation": other_photo})
    remedy = f"use --data-root {tmp_path}/training --test-root {tmp_path}/validation"
    with pytest.raises(UserError, match=f"training, validation are not used as splits.*{remedy}"):
        count(tmp_path)


def test_images_in_formats_that_are_not_supported_are_reported(tmp_path: Path) -> None:
    write(tmp_path, {".": same})
    (tmp_path / "phone.HEIC").write_bytes(b"heic")
    (note,) = Photos("train", Photos.Settings(data_root=str(tmp_path))).notes
    assert note == "1 entry ignored: phone.HEIC: format not supported, convert it to PNG or JPEG"


def test_images_without_class_folders_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "data", {".": same})
    words = [
        "classification",
        "--data",
        "folder",
        "--data-root",
        str(tmp_path / "data"),
        "--out",
        str(tmp_path / "run"),
    ]
    assert run(["train", *words, "--accelerator", "cpu", "--set", "size=16", "--set", "validation=0.25"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        f"{tmp_path}/data: has no class folders; for labels, put the images of each class in {tmp_path}/data/CL" in line
    )
