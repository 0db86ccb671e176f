"""`paceline measure` compares images from any program with their targets."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from torch import Tensor

from paceline.cli.app import run
from paceline.core.errors import UserError
from paceline.evaluation.features import Arithmetic, FeatureNetwork, Features
from paceline.evaluation.statistics import frechet_distance
from paceline.inference.files import match_files

SIDE = 24


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def save(path: str, pixels: np.ndarray) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def noise(seed: int, width: int = SIDE) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(SIDE, width, 3), dtype=np.uint8)


def test_metrics_follow_their_definitions_and_are_written_to_files(capsys: pytest.CaptureFixture[str]) -> None:
    values = []
    for number in range(3):
        target = noise(number)
        made = np.clip(target.astype(int) + np.random.default_rng(9).integers(-9, 9, target.shape), 0, 255)
        save(f"targets/{number}.png", target)
        save(f"made/{number}.png", made.astype(np.uint8))
        values.append(10 * np.log10(255**2 / np.mean((made - target.astype(float)) ** 2)))
    assert run(["measure", "made", "targets", "--json", "all.json", "--per-image", "each.csv"]) == 0
    assert "made compared with targets: 3 images" in capsys.readouterr().out
    written = json.loads(Path("all.json").read_text())
    assert written["metrics"]["psnr[rgb]"] == pytest.approx(np.mean(values)) and written["metrics"]["count"] == 3
    assert written["protocol"]["border"] == 0 and written["left_out"] == []
    with open("each.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["image"] for row in rows] == [f"made/{number}.png" for number in range(3)]
    assert [float(row["psnr[rgb]"]) for row in rows] == pytest.approx(values)


def test_multi_channel_images_have_their_own_protocol_and_mean(capsys: pytest.CaptureFixture[str]) -> None:
    for folder, value in (("made", 110), ("targets", 100)):
        for number in range(2):
            save(f"{folder}/{number}.png", np.full((SIDE, SIDE, 3), value, dtype=np.uint8))
        planes = np.full((5, SIDE, SIDE), value + (value > 100) * 10, dtype=np.uint8)
        tifffile.imwrite(f"{folder}/planes.tif", planes, photometric="minisblack")
    assert run(["measure", "made/planes.tif", "targets/planes.tif", "--json", "planes.json"]) == 0
    assert "psnr[rgb]" not in capsys.readouterr().out
    planes_only, mixed = Path("planes.json"), Path("mixed.json")
    assert json.loads(planes_only.read_text())["protocol"]["protocol"] == "all"
    assert run(["measure", "made", "targets", "--json", str(mixed)]) == 0
    found = json.loads(mixed.read_text())
    assert found["metrics"]["psnr[rgb]"] == pytest.approx(20 * np.log10(255 / 10))
    assert found["metrics"]["psnr[all]"] == pytest.approx(20 * np.log10(255 / 20))
    assert found["protocol"]["protocol"] == "rgb and all" and found["metrics"]["count"] == 3


def test_two_files_are_compared_even_if_their_names_differ(capsys: pytest.CaptureFixture[str]) -> None:
    save("a.png", noise(0))
    save("b.png", noise(0))
    assert run(["measure", "a.png", "b.png", "--protocol", "y", "--border", "2"]) == 0
    printed = capsys.readouterr().out
    assert "psnr[y]  100\n" in printed and "images identical to their targets (1 of 1): a.png" in printed


def test_missing_files_and_different_sizes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("made/0.png", "targets/0.png", "made/1.png", "targets/2.png", "targets/3.png"):
        save(name, noise(0))
    save("made/3.png", noise(0, 30))
    assert run(["measure", "made", "targets"]) == 1
    printed = capsys.readouterr().out
    for line in (
        "files left out (3): ",
        "made/1.png: has no matching target",
        "targets/2.png: has no matching result",
        "made/3.png: is 30×24 pixels, but targets/3.png is 24×24",
    ):
        assert line in printed


def test_masks_are_compared_by_iou_and_dice(capsys: pytest.CaptureFixture[str]) -> None:
    mask = np.zeros((SIDE, SIDE, 3), np.uint8)
    mask[:12, :, 0], mask[12:18, :, 2] = 255, 255
    other = mask.copy()
    other[6:12] = 0
    save("made/0_segmentation.png", other)
    save("made/1_segmentation.png", mask)
    save("targets/0.png", mask)
    save("targets/1.png", mask)
    assert run(["measure", "made", "targets", "--masks"]) == 0
    printed = capsys.readouterr().out
    assert "iou_red    0.75\n" in printed and "dice_blue  1\n" in printed


@pytest.mark.parametrize(
    ("result", "target"),
    [("22_2_segmentation", "22_2"), ("0001x4", "0001"), ("sr_castle", "castle"), ("castle-sr", "castle"), ("a", "a")],
)
def test_a_result_matches_a_target_if_its_name_has_one_extra_word(result: str, target: str) -> None:
    files = [Path(f"{name}.png") for name in (result, "other")], [Path(f"{name}.jpg") for name in (target, "other")]
    pairs, problems = match_files(*files)
    assert pairs == list(zip(*files, strict=True)) and not problems


def test_results_that_match_the_same_target_require_the_suffix_option() -> None:
    results, targets = [Path("a-sr.png"), Path("a-lr.png")], [Path("a.png"), Path("b.png")]
    with pytest.raises(UserError, match=r"a-lr.png and a-sr.png: both match a.png; choose results with --suffix"):
        match_files(results, targets)
    assert match_files(results, targets, "-sr") == ([(results[0], targets[0])], ["b.png: has no matching result"])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere", "made"], "nowhere: no such file or folder"),
        (["made", "made", "--protocol", "lab"], "'lab' is not one of 'rgb', 'y'"),
        (["made", "made", "--json", "all.txt"], "--json all.txt: expected a file name ending in .json"),
        (["made", "made", "--per-image", "folder.csv"], "--per-image folder.csv: is a folder; give a file name"),
        (["made", "made", "--per-image", "made/0.png/each.csv"], "--per-image made/0.png/each.csv: "),
        (["made", "made", "--json", "made/0.png/all.json"], "--json made/0.png/all.json: "),
        (["made", "others"], "no images could be compared with others: made/0.png: has no matching target"),
        (["made", "made", "--value-range", "1,0"], "--value-range 1,0: must be two numbers"),
        (["made"], "Missing argument 'TARGETS'"),
    ],
)
def test_wrong_input_is_reported_in_one_line(words: list[str], line: str, rejected: Callable[..., str]) -> None:
    save("made/0.png", noise(0))
    save("others/1.png", noise(0))
    save("others/2.png", noise(0))
    Path("folder.csv").mkdir()
    assert line in rejected("measure", *words)


def test_names_with_control_characters_and_other_encodings_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    for name in (b"red\x1b[31m.png", b"caf\xe9.png"):
        for folder in (b"made", b"targets"):
            save("plain.png", noise(0))
            Path(os.fsdecode(folder)).mkdir(exist_ok=True)
            os.replace("plain.png", os.path.join(folder, name))
    save("made/alone\x1b[31m.png", noise(0))
    assert run(["measure", "made", "targets", "--per-image", "each.csv", "--json", "all.json"]) == 1
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "files left out (1): " in printed and "made/red\\x1b[31m.png" in printed
    with open("each.csv", newline="", encoding="utf-8") as file:
        assert [row["image"] for row in csv.DictReader(file)] == ["made/caf\\xe9.png", "made/red\\x1b[31m.png"]
    assert json.loads(Path("all.json").read_text())["metrics"]["count"] == 2


def test_a_wrong_inception_file_is_reported_before_any_image_is_compared(
    rejected: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("made/0.png", "made/1.png", "targets/0.png", "targets/1.png", "others/photo.png"):
        save(name, noise(0))
    monkeypatch.setattr("paceline.commands.measure._compare", pytest.fail)
    for targets in ("targets", "others"):
        assert "--inception missing.pt: no such file" in rejected(
            "measure", "made", targets, "--inception", "missing.pt"
        )


class MeanColors(FeatureNetwork):
    """A stand-in for Inception whose features are the mean of each channel."""

    label, weights, num_features = "colors", "abc", 3

    def extract(self, images: Tensor, arithmetic: Arithmetic = "fp32") -> Features:
        return Features(images.float().mean((2, 3)))


@pytest.fixture
def inception(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("paceline.commands.measure.load_inception", lambda *_: MeanColors())
    return ["--inception", "network.pt"]


def fid_of(made: list[np.ndarray], real: list[np.ndarray]) -> float:
    rows = [torch.tensor(np.array([image.mean((0, 1)) for image in images])) for images in (real, made)]
    (mean1, mean2), (covariance1, covariance2) = zip(*((own.mean(0), own.T.cov()) for own in rows), strict=True)
    return frechet_distance(mean1, covariance1, mean2, covariance2)


def test_fid_uses_all_images_of_both_folders_if_no_names_match(
    inception: list[str], capsys: pytest.CaptureFixture[str], rejected: Callable[..., str]
) -> None:
    made, real = [noise(number) for number in range(3)], [noise(number, 30) for number in range(10, 15)]
    for number, image in enumerate(made):
        save(f"made/{number}.png", image)
    for number, image in enumerate(real):  # the names of the real images are the same in all of their folders
        save(f"real/{number % 2}/photo{number // 2}.png", image)
    assert run(["measure", "made", "real", *inception, "--json", "all.json"]) == 0
    printed = capsys.readouterr().out
    assert "FID images 3 results, 5 targets" in printed and "psnr" not in printed and "files left out" not in printed
    note = "only FID was measured, because no result could be compared with a target: "
    assert [note in line for line in printed.splitlines()].count(True) == 1
    written = json.loads(Path("all.json").read_text())
    assert written["metrics"] == {"FID": pytest.approx(fid_of(made, real), rel=1e-4)}
    assert "two targets have the same name" in rejected("measure", "made", "real")
    assert "no images could be compared with real: " in rejected("measure", "made", "real", *inception, "--masks")


def test_fid_also_uses_images_that_have_no_matching_name(
    inception: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    made, real = [noise(number) for number in range(3)], [noise(number) for number in range(10, 14)]
    for number, image in enumerate(made):
        save(f"made/{number}.png", image)
    for number, image in enumerate(real):
        save(f"real/{number + 2}.png", image)
    Path("made/damaged.png").write_bytes(Path("made/0.png").read_bytes()[:90])
    assert run(["measure", "made", "real", *inception, "--json", "all.json"]) == 1
    printed = capsys.readouterr().out
    assert "made compared with real: 1 image\n" in printed
    assert "files left out of some metrics (7): made/0.png: has no matching target" in printed
    written = json.loads(Path("all.json").read_text())
    metrics, left_out = written["metrics"], written["left_out"]
    damaged = [line for line in left_out if line.startswith("made/damaged.png: ")]
    assert len(left_out) == 7 and len(damaged) == 2, "it has no target, and cannot be decoded for FID"
    assert metrics["count"] == 1 and metrics["FID"] == pytest.approx(fid_of(made, real), rel=1e-4)


def test_fid_rejects_images_that_are_huge_or_not_grey_or_rgb(
    inception: list[str], rejected: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("made/0.tif", "made/1.tif", "real/0.tif", "real/1.tif"):
        Path(name).parent.mkdir(exist_ok=True)
        tifffile.imwrite(name, np.zeros((5, SIDE, SIDE), np.uint8), photometric="minisblack")
    expected = "--inception: FID needs 8-bit images with 1 or 3 channels and up to 89 megapixels, unlike "
    assert f"{expected}made/0.tif; omit --inception" in rejected("measure", "made", "real", *inception)
    save("plain.png", noise(0))
    monkeypatch.setattr("paceline.images.regions.PIXEL_LIMIT", 100)
    assert f"{expected}plain.png; omit --inception" in rejected("measure", "plain.png", "plain.png", *inception)


@pytest.mark.parametrize("suffix", ["tif", "png"])
@pytest.mark.parametrize("words", [[], ["--protocol", "y", "--border", "3"], ["--masks"]])
def test_huge_files_are_compared_by_region_with_the_same_metrics(words, suffix, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    target = rng.integers(0, 256, (150, 170, 3), dtype=np.uint8)
    made = np.clip(target.astype(int) + rng.integers(-20, 20, target.shape), 0, 255).astype(np.uint8)
    found = []
    for name, pixels in (("made", made), ("target", target)):
        tifffile.imwrite(f"{name}.tif", pixels, tile=(32, 32), photometric="rgb", compression="zlib")
        save(f"{name}.png", pixels)
    for by_region in (False, True):
        if by_region:
            for module in ("regions", "decode", "deep"):
                monkeypatch.setattr(f"paceline.images.{module}.PIXEL_LIMIT", 1000)
            monkeypatch.setattr("paceline.inference.compare_images.BLOCK_PX", 64)
        report = tmp_path / f"{by_region}.json"
        assert run(["measure", f"made.{suffix}", f"target.{suffix}", "--json", str(report), *words]) == 0
        found.append(json.loads(report.read_text())["metrics"])
    whole, regions = found
    for name in regions:
        assert regions[name] == pytest.approx(whole[name], rel=1e-9), name
    assert len(regions) >= 3


def test_metrics_that_are_not_measured_by_region_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    for name, height in (("huge", 384), ("small", 192)):
        for folder in ("made", "targets"):
            save(f"{folder}/{name}.tif", rng.integers(0, 256, (height, 192, 3), dtype=np.uint8))
    monkeypatch.setattr("paceline.images.regions.PIXEL_LIMIT", 192 * 192)
    distance = lambda made, target: made.new_full((1,), 0.25)  # noqa: E731
    monkeypatch.setattr("paceline.commands.measure.perceptual_distance", lambda device: (distance, ()))
    assert run(["measure", "made", "targets", "--per-image", "each.csv"]) == 0
    printed = capsys.readouterr().out
    assert "LPIPS: no mean, because it was not measured for 1 of 2 images (compared by region, or " in printed
    assert "lpips[rgb]" not in printed
    with open("each.csv", newline="", encoding="utf-8") as file:
        assert [bool(row["lpips[rgb]"]) for row in csv.DictReader(file)] == [False, True]
    assert run(["measure", "made/small.tif", "targets/small.tif"]) == 0
    printed = capsys.readouterr().out
    assert "lpips[rgb]" in printed and "no mean" not in printed


def test_three_depths_are_not_measured_as_colours(capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    for axis in "CZ":
        for name in ("made", "target"):
            planes = rng.integers(0, 256, (3, 192, 192), dtype=np.uint8)
            tifffile.imwrite(f"{name}_{axis}.tif", planes, imagej=True, metadata={"axes": f"{axis}YX"})
        words = ["measure", f"made_{axis}.tif", f"target_{axis}.tif"]
        assert run([*words, "--protocol", "y"]) == (0 if axis == "C" else 2)
    printed = capsys.readouterr().err
    assert "it has 3 channels that are not colours, but --protocol y needs grey or RGB images" in printed
