"""Unusable files and folders are reported in every command, which agree on the files that they accept."""

from __future__ import annotations

import os
import re
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tifffile
import torch
from photographs import photograph
from PIL import Image, ImageFilter

from paceline.cli.app import run
from paceline.commands.pack import pack
from paceline.config.flags import PhotoSettings, SeparateTestFolder
from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.data.file_lists import images_under, list_folder
from paceline.data.source import PanelSettings, open_sources
from paceline.data.sources.folder import Folder
from paceline.data.sources.npz import Npz
from paceline.data.sources.pairs import Pairs
from paceline.data.sources.panels import Panels
from paceline.data.sources.photos import Photos
from paceline.images.decode import BadImage, decode
from paceline.images.encode import read_image
from paceline.images.readers import EightBitReader
from paceline.inference.apply_regions import RegionOptions, read_headers
from paceline.inference.files import SkippedImage, find_images, plan_results, report_skipped
from paceline.inference.model import classify_files
from paceline.runs.recipe import resolve_config

# Lists of unused files


DAMAGED = 7


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    """Two classes of images; seven images in the first class are damaged."""
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(20):
            Image.fromarray(np.full((8, 8), number, np.uint8)).save(tmp_path / "data" / name / f"{number:02}.png")
    for number in range(DAMAGED):
        file = tmp_path / "data" / "a" / f"{number:02}.png"
        file.write_bytes(file.read_bytes()[:-20])
    return tmp_path / "data"


def check(listed: Path, printed: str) -> None:
    lines = listed.read_text().splitlines()
    assert len(lines) == DAMAGED and all("truncated" in line for line in lines)
    assert {Path(line.partition(":")[0]).name for line in lines} == {f"{number:02}.png" for number in range(DAMAGED)}
    assert f"all {DAMAGED} unused files are listed in {listed}" in printed


def test_pack_and_train_list_all_unusable_files(
    classes: Path, tmp_path: Path, tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"data": "photos", "bad_images": "skip", "workers": 1}
    assert pack(str(classes), str(tmp_path / "packed"), flags, {}) == 0
    check(tmp_path / "packed.not_used.txt", capsys.readouterr().out)
    data = ("--data", "folder", "--data-root", str(classes), "--bad-images", "skip", "--workers", "0")
    words = ("--images", "16", "--batch-size", "16", "--accelerator", "cpu", "--out", str(tmp_path / "run"))
    assert run(["train", tiny, *data, *words, "--set", "evaluate_every=never"]) == 0
    check(tmp_path / "run" / "not_used.txt", capsys.readouterr().out)


def test_the_first_files_that_are_left_out_are_listed_with_their_reasons(tmp_path: Path) -> None:
    write_images(tmp_path / "train", tmp_path / "test")
    for number in range(2):
        (tmp_path / "train" / f"empty{number}.png").touch()
        Image.new("RGB", (7, 20)).save(tmp_path / "train" / f"small{number}.png")
    source = Photos("train", PhotoSettings(data_root=str(tmp_path), crop=8, bad_images="skip", workers=1))
    assert len(source) == 3 and len(source.not_used) == 4
    empty, small = "unreadable image (the file is empty)", "7×20 pixels, smaller than the crop"
    assert source.notes == (
        f"left out 4 of 7 samples in {tmp_path / 'train'}: empty0.png: {empty}, empty1.png: {empty}, "
        f"small0.png: {small} and 1 more",
    )


def test_classes_without_training_images_are_listed(tmp_path: Path) -> None:
    arrays = {"x_train": np.zeros((3, 8, 8), np.uint8), "y_train": [1, 1, 4], "x_test": np.zeros((1, 8, 8), np.uint8)}
    np.savez(tmp_path / "own.npz", **arrays, y_test=[0])
    flags = {"data": "npz", "data_root": str(tmp_path / "own.npz")}
    sources = open_sources(resolve_config("classification", [("flag", flags), ("--set", {"validation": 0})]))
    assert sources["train"].notes == ("--data npz: 3 of 5 classes have no training images (0, 2, 3)",)
    assert sources["test"].notes == ()


def test_apply_and_predict_list_all_unusable_files_alongside_the_results(
    classes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(5):
        (classes / f"{number}.txt").touch()
    found = find_images([str(classes)])
    skipped = [SkippedImage("a.png", "damaged")]
    assert report_skipped(skipped, 39, found.ignored, tmp_path / "out") == 1
    lines = (tmp_path / "out.not_used.txt").read_text().splitlines()
    assert lines[0] == "a.png: damaged" and len(lines) == 6
    printed = capsys.readouterr()
    assert "not used: a.png: damaged\n39 of 40 images were processed; 1 could not be used" in printed.err
    assert "out.not_used.txt" in printed.out
    assert report_skipped(skipped, 39, [], tmp_path / "out") == 1
    assert not (tmp_path / "out.not_used.txt").exists()  # the outdated list from the earlier call was removed


def write_images(*folders: Path) -> None:
    for folder in folders:
        folder.mkdir(parents=True)
        for number in range(3):
            Image.fromarray(np.full((8, 16, 3), number, np.uint8)).save(folder / f"{number}.png")


def test_folders_named_train_and_val_are_not_treated_as_classes(tmp_path: Path) -> None:
    write_images(*(tmp_path / folder for folder in ("train/a", "train/b", "val/a", "val/b")))
    with pytest.raises(
        UserError, match=r"the folders train, val are not used as splits.*--data-root .*train --test-root .*val"
    ):
        Folder("train", SeparateTestFolder(data="folder", data_root=str(tmp_path)))
    named = SeparateTestFolder(data="folder", data_root=str(tmp_path / "train"), test_root=str(tmp_path / "val"))
    assert [len(Folder(split, named)) for split in Folder.splits] == [6, 6]


# Entries that are not regular files


NOT_UTF8 = os.fsdecode(b"\xff\xfe.png")
HOSTILE_NAMES = (NOT_UTF8, "two\nlines.png", "\x1b[2Jescape.png", "\u202egnp.exe.png", "ünïcode 日本.png")
SPECIAL = ("a/loop.png", "a/missing.png", "a/pipe.png", "a/socket.png", "a/zero.png", "a/again")


def fill(folder: Path) -> Path:
    """Write five images, and six entries that are not regular files."""
    (folder / "a").mkdir(parents=True)
    for number in range(5):
        Image.fromarray(np.full((8, 16, 3), 40 * number, np.uint8)).save(folder / "a" / f"{number}.png")
    (folder / "a" / "loop.png").symlink_to("loop.png")
    (folder / "a" / "missing.png").symlink_to("nowhere.png")
    os.mkfifo(folder / "a" / "pipe.png")
    (folder / "a" / "zero.png").symlink_to("/dev/zero")
    (folder / "a" / "again").symlink_to("..")
    here = os.open(folder / "a", os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(f"/proc/self/fd/{here}/socket.png")  # the full path may be too long for a socket
    os.close(here)
    return folder


def reported(notes: tuple[str, ...] | list[str]) -> bool:
    return any("6 entries ignored: " in note and " and 3 more" in note for note in notes)


def test_apply_and_predict_process_the_images_and_report_the_other_entries(tmp_path: Path) -> None:
    folder = fill(tmp_path / "in")
    assert sorted(entry.partition(":")[0] for entry in list_folder(folder).unusable) == sorted(SPECIAL)
    found = find_images([str(folder)])
    assert [image.path.name for image in found.images] == [f"{number}.png" for number in range(5)]
    assert reported(found.notes)
    plan = plan_results([str(folder)], tmp_path / "out", [""])
    assert len(plan.tasks) == 5 and reported(plan.notes)
    (tmp_path / "out" / "a").mkdir(parents=True)
    (tmp_path / "out" / "a" / "0.png").symlink_to("0.png")
    with pytest.raises(UserError, match=r"0\.png exists"):
        plan_results([str(folder)], tmp_path / "out", [""])


def test_an_entry_that_is_not_a_regular_file_cannot_be_opened_as_an_image(tmp_path: Path) -> None:
    folder = fill(tmp_path / "in")
    for name in SPECIAL[:-1]:
        with pytest.raises(BadImage):
            decode(folder / name)
        with pytest.raises(UserError, match="not a regular file"):
            find_images([str(folder / name)])


def test_sources_report_entries_that_are_not_regular_files(tmp_path: Path) -> None:
    folder, pairs = fill(tmp_path / "in"), tmp_path / "pairs"
    root = {"data_root": str(folder), "workers": 1}
    for split in ("train", "test"):
        assert reported(Folder(split, SeparateTestFolder(data="folder", **root)).notes)
        assert reported(Photos(split, PhotoSettings(data="photos", **root)).notes)
        rows = PanelSettings(data="panels", data_root=str(folder / "a"), workers=1)
        assert reported(Panels(split, rows).notes)
    (pairs / "target").mkdir(parents=True)
    (folder / "a").rename(pairs / "input")
    for number in range(5):
        (pairs / "target" / f"{number}.png").symlink_to(pairs / "input" / f"{number}.png")
    assert reported(Pairs("train", Pairs.Settings(data="pairs", data_root=str(pairs), workers=1)).notes)
    os.mkfifo(tmp_path / "data.npz")
    with pytest.raises(UserError, match=r"has 0 \.npz files"):
        Npz("train", RunSettings(data="npz", data_root=str(tmp_path)))


def test_a_folder_that_cannot_be_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, scandir = fill(tmp_path / "in"), os.scandir
    (folder / "locked").mkdir()

    def refuse(path: Path) -> Iterator[os.DirEntry[str]]:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # simulates missing permissions, even for root
    assert "locked: cannot be read (Permission denied)" in list_folder(folder).unusable
    with pytest.raises(UserError, match=r"locked: cannot be read \(Permission denied\)"):
        images_under(folder / "locked")


@pytest.mark.parametrize("damaged", [False, True])
def test_unprintable_characters_in_file_names_are_escaped(
    damaged: bool, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in HOSTILE_NAMES:
        (folder / "whole.png").unlink(missing_ok=True)
        Image.new("RGB", (8, 8)).save(folder / "whole.png")
        content = (folder / "whole.png").read_bytes()
        (folder / name).write_bytes(content[:40] if damaged else content)
    found = find_images([str(folder)])
    report_skipped([SkippedImage(str(image.path), "unusable") for image in found.images], 0, [], None)
    flags = {"data": "photos", "data_root": str(folder), "bad_images": "skip" if damaged else "fail", "workers": 1}
    if damaged:
        settings = PhotoSettings(**flags | {"bad_images": "fail"})
        with pytest.raises(UserError) as error:
            Photos("train", settings)
        assert str(error.value).isprintable()
    else:
        assert pack("photos", str(tmp_path / "packed"), flags, {}) == 0
    printed = b"".join(capsysbinary.readouterr()).decode()  # fails if the output is not valid UTF-8
    assert printed.replace("\n", "").isprintable() and "ünïcode 日本.png" in printed and r"\x1b[2J" in printed


# Odd files in all commands


PHOTO = Image.fromarray(photograph("coffee")).resize((24, 20))
ANIMATED = [PHOTO, PHOTO.rotate(180), PHOTO.rotate(90)]


def save(image: Image.Image, **options: Any) -> Callable[[Path], object]:
    return lambda path: image.save(path, **options)


def animate(**options: Any) -> Callable[[Path], object]:
    return lambda path: PHOTO.save(path, save_all=True, append_images=ANIMATED[1:], **options)


def as_tiff(pixels: Any, **options: Any) -> Callable[[Path], object]:
    return lambda path: tifffile.imwrite(path, pixels, **options)


def content(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def claim_to_be_huge(path: Path) -> None:
    """Write a tiny PNG file whose header declares 400 megapixels."""
    header = b"IHDR" + struct.pack(">2I5B", 20_000, 20_000, 8, 2, 0, 0, 0)
    chunks = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks + struct.pack(">I", 0) + b"IEND\xae\x42\x60\x82")


@dataclass(frozen=True)
class Odd:
    write: Callable[[Path], object]
    accepted: bool


DEEP = np.asarray(PHOTO).astype(np.uint16) * 257
ODD_FILES = {
    "plain.png": Odd(save(PHOTO), True),
    "CAPITALS.JPG": Odd(save(PHOTO, format="JPEG"), True),
    "jpeg_named.png": Odd(save(PHOTO, format="JPEG"), True),
    "png_named.tif": Odd(save(PHOTO, format="PNG"), True),
    "bitmap_named.gif": Odd(save(PHOTO, format="BMP"), True),
    "ink.jpg": Odd(save(PHOTO.convert("CMYK")), True),
    "ink.tif": Odd(save(PHOTO.convert("CMYK")), True),
    "lab.tif": Odd(save(PHOTO.convert("LAB")), True),
    "one_bit.png": Odd(save(PHOTO.convert("1")), True),
    "palette.png": Odd(save(PHOTO.quantize(7), transparency=0), True),
    "grey_alpha.png": Odd(save(PHOTO.convert("LA")), True),
    "deep_grey.png": Odd(save(Image.fromarray(DEEP[..., 0])), True),
    "deep_colours.tif": Odd(as_tiff(DEEP, photometric="rgb"), True),
    "pages.tif": Odd(animate(), True),
    "single_frame.gif": Odd(save(PHOTO), True),
    "moving.gif": Odd(animate(), False),
    "moving.png": Odd(animate(), False),
    "moving.webp": Odd(animate(lossless=True), False),
    "moving_named.jpg": Odd(animate(format="GIF"), False),
    "integers.tif": Odd(as_tiff(DEEP[..., 0].astype(np.int32)), False),
    "unsigned.tif": Odd(as_tiff(DEEP[..., 0].astype(np.uint32)), False),
    "floats.tif": Odd(as_tiff(DEEP[..., 0].astype(np.float32)), False),
    "signed.tif": Odd(as_tiff(DEEP[..., 0].astype(np.int8)), False),
    "huge.png": Odd(claim_to_be_huge, False),
    "empty.png": Odd(content(b""), False),
    "text.jpg": Odd(content(b"<html>404</html>"), False),
    "drawing.png": Odd(content(b'<svg xmlns="http://www.w3.org/2000/svg"/>'), False),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("odd") / "files"
    made.mkdir()
    for name, file in ODD_FILES.items():
        file.write(made / name)
    return made


class AnyClass:
    """A classifier that reads its input images and always predicts the same class."""

    classes = ("any",)
    reader = EightBitReader()

    def predict(self, images: Any) -> torch.Tensor:
        return torch.ones(len(list(images)), 1)


def apply_accepts(folder: Path) -> set[str]:
    accepted = set()
    for task in read_headers(plan_results([str(folder)], folder.parent / "out", [""]), RegionOptions()):
        try:
            read_image(Path(task.path))
        except BadImage:
            continue
        accepted.add(Path(task.path).name)
    return accepted


def predict_accepts(folder: Path) -> set[str]:
    found = classify_files(cast(Any, AnyClass()), find_images([str(folder)]).images, 1, [])
    return {Path(path).name for path, _ in found}


def folder_accepts(folder: Path) -> set[str]:
    settings = SeparateTestFolder(data="folder", data_root=str(folder), size=8, workers=2, bad_images="skip")
    sources = [Folder(split, settings) for split in Folder.splits]
    return {files["image"].name for source in sources for files in source.files}


def photos_accept(folder: Path) -> set[str]:
    settings = PhotoSettings(data="photos", data_root=str(folder), workers=2, bad_images="skip")
    sources = [Photos(split, settings) for split in Photos.splits]
    return {files["image"].name for source in sources for files in source.files}


@pytest.mark.parametrize("accept", [apply_accepts, predict_accepts, folder_accepts, photos_accept])
def test_all_commands_accept_the_same_files(accept: Callable[[Path], set[str]], folder: Path) -> None:
    assert accept(folder) == {name for name, file in ODD_FILES.items() if file.accepted}


# Pairs in folders of independent images


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
        ({"trainA": blurred, "trainB": same}, "use --data pairs for both, or --data-root {root}/trainB for one"),
        ({"scene1/blur": blurred, "scene1/sharp": same}, "use --data pairs"),
        ({"HR": same, "LRx4": reduced}, "use --data-root {root}/HR --low-root {root}/LRx4 for both"),
        ({"train_HR": same, "train_LR": reduced}, "use --data-root {root}/train_HR --low-root {root}/train_LR for"),
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
