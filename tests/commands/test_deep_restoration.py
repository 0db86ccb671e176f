"""A restoration run on 5-channel 16-bit stacks: training, metrics, sample images, results, and bad images."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image
from running import run_fork
from skimage.metrics import peak_signal_noise_ratio

import paceline
from paceline.commands.apply import apply
from paceline.commands.measure import measure
from paceline.commands.options import ApplyOptions, MeasureOptions
from paceline.core.errors import UserError
from paceline.data.bundled import FOLDER
from paceline.runs.weights import read_data_spec

CHANNELS, SIDE = 5, 40
TINY = {"width": 4, "depth": 2, "crop": 16, "images": 32, "batch_size": 8, "accelerator": "cpu", "workers": 0}
TINY |= {"degrade_noise": 20.0, "evaluate_every": "50%", "save_every": "50%", "sample_every": "50%"}


def stacks(split: str, count: int) -> list[np.ndarray]:
    """Return stacks whose planes are crops of photographs, in 16 bits."""
    names = ("camera.png", "brick.png", "grass.png", "gravel.png", "moon.png")
    planes = np.stack([np.asarray(Image.open(FOLDER / name).convert("L")) for name in names]).astype(np.uint16) * 257
    corners = np.random.default_rng(len(split)).integers(0, 400, (count, 2))
    return [planes[:, top : top + SIDE, left : left + SIDE] for top, left in corners]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data and a run trained on it."""
    place = tmp_path_factory.mktemp("deep")
    for split, count in (("train", 6), ("test", 2)):
        (place / "data" / split).mkdir(parents=True)
        for number, planes in enumerate(stacks(split, count)):
            file = place / "data" / split / f"{number}.ome.tif"
            tifffile.imwrite(file, planes, photometric="minisblack", metadata={"axes": "CYX"})
    train(place, "run", preview_channels="4,2,0")
    return place


def train(place: Path, name: str, **more: object) -> paceline.TrainResult:
    settings = TINY | {"data": "degraded", "data_root": str(place / "data"), "out": str(place / name)} | more
    return paceline.train("restoration", **settings)  # type: ignore[arg-type]


def test_a_run_records_channels_and_pixels_and_has_the_data_range_in_its_protocol(place: Path) -> None:
    spec = read_data_spec(place / "run")
    assert (spec.channels, spec.dtype, spec.value_range) == (CHANNELS, "uint16", None)
    protocol = json.loads((place / "run/protocols.json").read_text())["validation"]["all"]
    assert (protocol["data_range"], protocol["rounded"]) == (65535.0, "to 16 bits")


def test_sample_images_show_the_chosen_channels(place: Path) -> None:
    sample = sorted((place / "run/samples").glob("*.png"))[-1]
    assert Image.open(sample).mode == "RGB"
    with pytest.raises(UserError, match="preview_channels=0,9,1: must be one or three of the channels 0 to 4"):
        train(place, "wrong", preview_channels="0,9,1")


def test_apply_writes_every_channel_and_measure_compares_them(place: Path, tmp_path: Path) -> None:
    assert (
        apply(str(place / "run"), [str(place / "data/test")], str(tmp_path / "out"), ApplyOptions(accelerator="cpu"))
        == 0
    )
    made, real = (tifffile.imread(folder / "0.ome.tif") for folder in (tmp_path / "out", place / "data/test"))
    assert made.dtype == np.uint16 and made.shape == real.shape == (CHANNELS, SIDE, SIDE)
    assert len(np.unique(made)) > 1000, "more levels than 8 bits have"
    report = tmp_path / "report.json"
    measure(str(tmp_path / "out"), str(place / "data/test"), MeasureOptions(json_file=str(report)))
    found = json.loads(report.read_text())
    expected = [
        peak_signal_noise_ratio(
            tifffile.imread(place / f"data/test/{number}.ome.tif"),
            tifffile.imread(tmp_path / f"out/{number}.ome.tif"),
            data_range=65535,
        )
        for number in range(2)
    ]
    assert found["metrics"]["psnr[all]"] == pytest.approx(np.mean(expected), abs=1e-6)
    assert found["protocol"]["data_range"] == 65535 and found["protocol"]["protocol"] == "all"


def test_images_that_do_not_fit_the_model_are_skipped_with_the_reason(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    good = stacks("test", 1)[0]
    tifffile.imwrite(folder / "good.tif", good, photometric="minisblack")
    tifffile.imwrite(folder / "few.tif", good[:4], photometric="minisblack")
    tifffile.imwrite(folder / "floats.tif", good.astype(np.float32), photometric="minisblack")
    Image.new("RGB", (20, 20)).save(folder / "rgb.png")
    (folder / "cut.tif").write_bytes((folder / "good.tif").read_bytes()[:9000])
    assert apply(str(place / "run"), [str(folder)], str(tmp_path / "out"), ApplyOptions(accelerator="cpu")) == 1
    listed = (tmp_path / "out.not_used.txt").read_text()
    assert "few.tif: it has 4 channels, but the networks take 5" in listed
    assert "rgb.png: it has 3 channels, but the networks take 5" in listed
    assert "floats.tif: float32 pixels" in listed and "cut.tif" in listed
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["good.tif"]


def test_losses_that_need_colours_are_rejected_in_one_line(place: Path) -> None:
    with pytest.raises(UserError, match=r"perceptual=0\.1: VGG19 takes images with 1 or 3 channels, not 5"):
        train(place, "colours", perceptual=0.1, vgg="random")


def test_floating_point_images_are_trained_evaluated_and_restored_in_their_range(place: Path, tmp_path: Path) -> None:
    for split, count in (("train", 4), ("test", 1)):
        (tmp_path / "data" / split).mkdir(parents=True)
        for number, planes in enumerate(stacks(split, count)):
            values = planes[:2].astype(np.float32) / 65535 * 3 - 1
            tifffile.imwrite(tmp_path / "data" / split / f"{number}.tif", values, photometric="minisblack")
    with pytest.raises(UserError, match=r"floating-point pixels need a declared range.*value_range=-10,10"):
        train(tmp_path, "without")
    train(tmp_path, "run", value_range="-1,2", validation=0.25)
    spec = read_data_spec(tmp_path / "run")
    assert (spec.channels, spec.dtype, spec.value_range) == (2, "float32", (-1.0, 2.0))
    protocol = json.loads((tmp_path / "run/protocols.json").read_text())["validation"]["all"]
    assert (protocol["data_range"], protocol["rounded"]) == (3.0, "no")
    file = tmp_path / "data/test/0.tif"
    assert apply(str(tmp_path / "run"), [str(file)], str(tmp_path / "out"), ApplyOptions(accelerator="cpu")) == 0
    made, real = tifffile.imread(tmp_path / "out/0.tif"), tifffile.imread(file)
    assert made.dtype == np.float32 and made.shape == real.shape
    assert made.min() >= -1 and made.max() <= 2 and np.abs(made - real).mean() < 0.5
    report = tmp_path / "report.json"
    measure(str(tmp_path / "out"), str(file.parent), MeasureOptions(json_file=str(report), value_range="-1,2"))
    expected = peak_signal_noise_ratio(real, made, data_range=3)
    assert json.loads(report.read_text())["metrics"]["psnr[all]"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_verify_finds_the_same_weights_on_one_and_two_processes(place: Path) -> None:
    words = ["--strategies", "single,ddp", "--steps", "4", "--data-root", "data", "--set", "crop=16"]
    verified = run_fork(place, "verify", "restoration", "--data", "degraded", *words)
    assert verified.wait() == 0, verified.stdout + verified.stderr
    assert "✓ single and ddp give the same weights" in verified.stdout
