"""Folder entries that are not regular files are reported, and unprintable characters in names are escaped."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.commands.pack import pack
from paceline.config.flags import PhotoSettings, SeparateTestFolder
from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.core.text import printable
from paceline.data.file_lists import images_under, list_folder
from paceline.data.source import PanelSettings
from paceline.data.sources.folder import Folder
from paceline.data.sources.npz import Npz
from paceline.data.sources.pairs import Pairs
from paceline.data.sources.panels import Panels
from paceline.data.sources.photos import Photos
from paceline.images.decode import BadImage, decode
from paceline.inference.files import SkippedImage, find_images, plan_results, report_skipped

NOT_UTF8 = os.fsdecode(b"\xff\xfe.png")
HOSTILE_NAMES = (NOT_UTF8, "two\nlines.png", "\x1b[2Jescape.png", "\u202egnp.exe.png", "ünïcode 日本.png")
SPECIAL = ("a/loop.png", "a/missing.png", "a/pipe.png", "a/socket.png", "a/zero.png", "a/again")


@pytest.fixture(autouse=True)
def never_blocks() -> Iterator[None]:
    signal.alarm(60)
    yield
    signal.alarm(0)


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


@pytest.mark.parametrize("name", SPECIAL[:-1])
def test_an_entry_that_is_not_a_regular_file_cannot_be_opened_as_an_image(name: str, tmp_path: Path) -> None:
    folder = fill(tmp_path / "in")
    with pytest.raises(BadImage):
        decode(folder / name)
    with pytest.raises(UserError, match="not a regular file"):
        find_images([str(folder / name)])


@pytest.mark.parametrize("split", ["train", "test"])
def test_sources_report_entries_that_are_not_regular_files(split: str, tmp_path: Path) -> None:
    folder = fill(tmp_path / "in")
    root = {"data_root": str(folder), "workers": 1}
    assert reported(Folder(split, SeparateTestFolder(data="folder", **root)).notes)
    assert reported(Photos(split, PhotoSettings(data="photos", **root)).notes)
    row_settings = PanelSettings(data="panels", data_root=str(folder / "a"), workers=1)
    assert reported(Panels(split, row_settings).notes)
    pairs = tmp_path / "pairs"
    (pairs / "target").mkdir(parents=True)
    (folder / "a").rename(pairs / "input")
    for number in range(5):
        (pairs / "target" / f"{number}.png").symlink_to(pairs / "input" / f"{number}.png")
    assert reported(Pairs(split, Pairs.Settings(data="pairs", data_root=str(pairs), workers=1)).notes)


def test_an_npz_that_is_a_pipe_is_not_opened(tmp_path: Path) -> None:
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


def test_printable_names_are_not_changed() -> None:
    assert printable("ünïcode 日本 👩‍🔬.png") == "ünïcode 日本 👩‍🔬.png"
    assert printable(Path(NOT_UTF8)) == r"\xff\xfe.png"
    assert printable("a\tb\x7f\u202e\u2028\ud800") == r"a\x09b\x7f\u202e\u2028\ud800"
