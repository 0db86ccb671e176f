"""Files and folders that are not used are reported. If there are many, a file lists all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.cli.app import run
from paceline.commands.pack import pack
from paceline.config.flags import PhotoSettings, SeparateTestFolder
from paceline.core.errors import UserError
from paceline.data.source import PanelSettings, Source
from paceline.data.sources.folder import Folder
from paceline.data.sources.pairs import Pairs
from paceline.data.sources.panels import Panels
from paceline.data.sources.photos import Photos
from paceline.inference.files import SkippedImage, find_images, report_skipped

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


@pytest.mark.parametrize("data", ["folder", "photos"])
def test_pack_lists_all_unusable_files(
    data: str, classes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"data": data, "bad_images": "skip", "workers": 1}
    assert pack(str(classes), str(tmp_path / "packed"), flags, {}) == 0
    check(tmp_path / "packed.not_used.txt", capsys.readouterr().out)


def test_train_lists_all_unusable_files_in_the_run_folder(
    classes: Path, tmp_path: Path, tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ("--data", "folder", "--data-root", str(classes), "--bad-images", "skip", "--workers", "0")
    words = ("--images", "16", "--batch-size", "16", "--accelerator", "cpu", "--out", str(tmp_path / "run"))
    assert run(["train", tiny, *data, *words, "--set", "evaluate_every=never"]) == 0
    check(tmp_path / "run" / "not_used.txt", capsys.readouterr().out)


def test_files_that_are_left_out_are_listed_or_counted_by_reason_with_three_examples_each(tmp_path: Path) -> None:
    write_images(tmp_path / "train", tmp_path / "test")
    for number in range(5):
        (tmp_path / "train" / f"text{number}.png").write_bytes(b"not an image")
    for number in range(2):
        (tmp_path / "train" / f"empty{number}.png").touch()
        Image.new("RGB", (7, 20)).save(tmp_path / "train" / f"small{number}.png")
    source = Photos("train", PhotoSettings(data_root=str(tmp_path), crop=8, bad_images="skip", workers=1))
    assert len(source) == 3 and len(source.not_used) == 9
    assert source.notes == (
        f"left out 9 of 12 samples in {tmp_path / 'train'}: 5 × unreadable image (text0.png, text1.png, text2.png, …), "
        "2 × empty file (empty0.png, empty1.png), "
        "2 × smaller than the crop of 8×8 pixels (small0.png, small1.png)",
    )
    for file in {*(tmp_path / "train").glob("text*"), *(tmp_path / "train").glob("*1.png")}:
        file.unlink()
    source = Photos("train", PhotoSettings(data_root=str(tmp_path), crop=8, bad_images="skip", workers=1))
    assert source.notes == (  # a few files are listed with the details
        f"left out 2 of 4 samples in {tmp_path / 'train'}: empty0.png: unreadable image (the file is empty), "
        "small0.png: 7×20 pixels, smaller than the crop",
    )


def test_pairs_that_are_left_out_are_counted_by_reason(tmp_path: Path) -> None:
    write_images(*(tmp_path / split / kind for split in ("train", "test") for kind in ("input", "target")))
    for number in range(4):
        Image.new("RGB", (16, 8)).save(tmp_path / "train" / "input" / f"alone{number}.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "train" / "target" / "2.png")
    source = Pairs("train", Pairs.Settings(data_root=str(tmp_path), bad_images="skip", workers=1))
    (note,) = source.notes
    assert "4 × no counterpart (input/alone0.png, input/alone1.png, input/alone2.png, …), " in note
    assert note.endswith("1 × image sizes do not match (input/2.png)")


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


def test_a_validation_folder_alongside_a_test_folder_is_reported(tmp_path: Path) -> None:
    sources: dict[str, tuple[type[Source], type[SeparateTestFolder], tuple[str, ...]]] = {
        "folder": (Folder, SeparateTestFolder, ("train/a", "train/b", "test/a", "val/a")),
        "photos": (Photos, PhotoSettings, ("train", "test", "val")),
        "rows": (Panels, PanelSettings, ("train", "test", "val")),
        "pairs": (
            Pairs,
            Pairs.Settings,
            tuple(f"{s}/{k}" for s in ("train", "test", "val") for k in ("img", "gt")),
        ),
        "two": (Panels, PanelSettings, ("trainA", "trainB", "testA", "testB", "valA", "valB")),
    }
    for name, (source, settings, folders) in sources.items():
        root = tmp_path / name
        write_images(*(root / folder for folder in folders))
        opened = {split: source(split, settings(data=name, data_root=str(root))) for split in source.splits}
        unused = root / ("valA" if name == "two" else "val")
        assert [note for note in opened["train"].notes if note.startswith(f"{unused}: not used")], name
        assert not [note for note in opened["test"].notes if "not used" in note], name
    (tmp_path / "photos" / "test").rename(tmp_path / "tests")  # now `val` is the test split
    assert not Photos("train", PhotoSettings(data="photos", data_root=str(tmp_path / "photos"))).notes


def test_folders_named_train_and_val_are_not_treated_as_classes(tmp_path: Path) -> None:
    write_images(*(tmp_path / folder for folder in ("train/a", "train/b", "val/a", "val/b")))
    with pytest.raises(
        UserError, match=r"the folders train, val are not used as splits.*--data-root .*train --test-root .*val"
    ):
        Folder("train", SeparateTestFolder(data="folder", data_root=str(tmp_path)))
    named = SeparateTestFolder(data="folder", data_root=str(tmp_path / "train"), test_root=str(tmp_path / "val"))
    assert [len(Folder(split, named)) for split in Folder.splits] == [6, 6]


def test_the_error_for_many_unusable_files_names_the_commands_that_list_them_all(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.png").write_bytes(b"not an image")
    with pytest.raises(UserError, match="skip to leave these out; train and pack then list all 5 in"):
        Photos("train", PhotoSettings(data_root=str(tmp_path)))
