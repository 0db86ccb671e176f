"""Folders with inputs and targets of the same images are not used as independent images; class folders are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from photographs import photograph
from PIL import Image, ImageFilter
from test_bad_input import assert_rejected

from paceline.cli.app import run

Copy = Callable[[Image.Image], Image.Image]
PHOTOS = ("astronaut", "coffee", "rocket", "chelsea", "moon")
WIDTH, HEIGHT = 96, 64


def same(image: Image.Image) -> Image.Image:
    return image


def blurred(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(2))


def noisy(image: Image.Image) -> Image.Image:
    noise = np.random.default_rng(0).normal(0, 30, (HEIGHT, WIDTH, 3))
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


def reduced(image: Image.Image) -> Image.Image:
    return image.resize((WIDTH // 4, HEIGHT // 4))


def inverted_edges(image: Image.Image) -> Image.Image:
    return image.convert("L").filter(ImageFilter.FIND_EDGES).convert("RGB")


def other_photo(image: Image.Image) -> Image.Image:
    return Image.fromarray(
        np.random.default_rng(int(np.asarray(image).sum())).integers(0, 255, (HEIGHT, WIDTH, 3), "u1")
    )


def write(root: Path, folders: dict[str, Copy], ending: str = "") -> None:
    for place, copy in folders.items():
        (root / place).mkdir(parents=True, exist_ok=True)
        for name in PHOTOS:
            image = Image.fromarray(photograph(name)).convert("RGB").resize((WIDTH, HEIGHT))
            copy(image).save(root / place / f"{name}{ending if copy is reduced else ''}.png")


def train(root: Path, *words: str) -> int:
    short = ["--preset", "quick", "--accelerator", "cpu", "--images", "8", "--batch-size", "4", "--set", "width=4"]
    size = ["size=16"] if "classification" in words else ["crop=16"]
    short += ["--set", "validation=0.25", "--set", *size, "--out", str(root / "run")]
    return run(["train", *words, "--data-root", str(root / "data"), *short])


@pytest.mark.parametrize(
    ("folders", "remedy"),
    [
        (
            {"train/blurry": blurred, "train/sharp": same, "test/blurry": blurred, "test/sharp": same},
            "use --data pairs",
        ),
        ({"noisy": noisy, "clean": same}, "use --data pairs for both, or --data-root {root}/clean for one"),
        ({"A": inverted_edges, "B": same}, "use --data pairs for both, or --data-root {root}/B for one"),
        ({"trainA": inverted_edges, "trainB": same}, "moved to {root}/input and {root}/target, for both"),
        ({"scene1/blur": blurred, "scene1/sharp": same}, "moved to {root}/input and {root}/target, for both"),
        ({"HR": same, "LRx4": reduced}, "use --data-root {root}/HR --low-root {root}/LRx4 for both"),
        ({"large/day": same, "small/day": reduced}, "use --data-root {root}/large --low-root {root}/small for both"),
    ],
)
def test_inputs_and_targets_are_not_used_as_independent_images(
    folders: dict[str, Copy], remedy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "data", folders, ending="x4")
    code = train(tmp_path, "restoration")
    output = capsys.readouterr()
    expected = remedy.format(root=tmp_path / "data")
    assert_rejected(code, output.out, output.err, "contain the same images, as inputs and targets", expected)


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
    folders: dict[str, Copy], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "data", folders)
    assert train(tmp_path, "restoration") == 0, capsys.readouterr().err


def test_pairs_in_folders_with_usual_names_are_read(tmp_path: Path) -> None:
    write(tmp_path / "data", {"noisy": noisy, "clean": same})
    assert train(tmp_path, "restoration", "--data", "pairs") == 0


def test_test_folders_and_packed_and_measured_folders_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "data", {".": same})
    assert train(tmp_path, "super_resolution") == 0
    both = tmp_path / "Set5"
    write(both, {"HR": same, "LRx2": lambda image: image.resize((WIDTH // 2, HEIGHT // 2))})
    capsys.readouterr()
    for words in (["evaluate", str(tmp_path / "run"), "--data-root"], ["pack", "photos", "--data-root"]):
        code = run([*words, str(both), *([str(tmp_path / "packed")] if words[0] == "pack" else [])])
        output = capsys.readouterr()
        assert_rejected(code, output.out, output.err, f"{both}/LRx2 and {both}/HR contain the same images")
    assert run(["evaluate", str(tmp_path / "run"), "--test-root", f"{both}/HR", "--test-low-root", f"{both}/LRx2"]) == 0
    assert "count 5" in " ".join(capsys.readouterr().out.split())


def test_classes_may_have_the_names_of_inputs_and_targets(tmp_path: Path) -> None:
    write(tmp_path / "data", {"noisy": noisy, "clean": same})
    assert train(tmp_path, "classification", "--data", "folder") == 0


def test_folders_with_other_names_of_splits_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "data", {"training": same, "validation": other_photo})
    code = train(tmp_path, "restoration")
    output = capsys.readouterr()
    remedy = f"use --data-root {tmp_path}/data/training --test-root {tmp_path}/data/validation"
    assert_rejected(code, output.out, output.err, "training, validation are not used as splits", remedy)


def test_images_in_formats_that_are_not_supported_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "data", {".": same})
    (tmp_path / "data/phone.HEIC").write_bytes(b"heic")
    assert train(tmp_path, "restoration") == 0
    assert "1 entry ignored: phone.HEIC: format not supported, convert it to PNG or JPEG" in capsys.readouterr().out


def test_images_without_class_folders_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "data", {".": same})
    code = train(tmp_path, "classification", "--data", "folder")
    output = capsys.readouterr()
    where = f"put the images of each class in {tmp_path}/data/CLASS"
    assert_rejected(code, output.out, output.err, f"{tmp_path}/data: has no class folders", where)
