"""If more files are unusable than a message lists, all of them are listed in a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from running import run_fork

from paceline.commands.pack import pack
from paceline.inference.find_images import find_images
from paceline.inference.skipped import SkippedImage, report_skipped

DAMAGED = 7


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    """Two classes of images; seven images of the first class are damaged."""
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
    assert f"all {DAMAGED} files that are not used are listed in {listed}" in printed


@pytest.mark.parametrize("data", ["folder", "photos"])
def test_pack_lists_all_unusable_files(
    data: str, classes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"data": data, "bad_images": "skip", "workers": 1}
    assert pack(str(classes), str(tmp_path / "packed"), flags, {}) == 0
    check(tmp_path / "packed.not_used.txt", capsys.readouterr().out)


def test_train_lists_all_unusable_files_in_the_run_folder(classes: Path, tmp_path: Path) -> None:
    recipe = str(Path(__file__).parents[1] / "tiny.py")
    data = ("--data", "folder", "--data-root", str(classes), "--bad-images", "skip", "--workers", "0")
    words = ("--images", "16", "--batch-size", "16", "--accelerator", "cpu", "--out", str(tmp_path / "run"))
    trained = run_fork(tmp_path, "train", recipe, *data, *words)
    assert trained.wait() == 0, trained.stderr
    check(tmp_path / "run" / "not_used.txt", trained.stdout)


def test_apply_and_predict_list_all_unusable_files_next_to_the_results(
    classes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(5):
        (classes / f"{number}.txt").touch()
    found = find_images([str(classes)])
    skipped = [SkippedImage("a.png", "damaged")]
    assert report_skipped(skipped, 39, found.ignored, tmp_path / "out") == 1
    lines = (tmp_path / "out.not_used.txt").read_text().splitlines()
    assert lines[0] == "a.png: damaged" and len(lines) == 6
    assert report_skipped(skipped, 39, [], tmp_path / "out") == 1
    assert not (tmp_path / "out.not_used.txt").exists()  # the list of the earlier call is outdated
