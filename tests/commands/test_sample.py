"""`paceline sample` writes grids, interpolations, animations, and images from two runs side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from running import run_fork

import paceline
from paceline.cli.app import run
from paceline.images.grids import GAP_PX, grid
from paceline.inference.generate import slerp

TINY_GAN = str(Path(__file__).parent.parent / "tiny_gan.py")
BRIGHT = (255, 0, 255)
CELL_PX = 32 + GAP_PX  # the 8-pixel digits are upscaled to 32 pixels


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two generators, one trained for longer, and a classifier."""
    folder = tmp_path_factory.mktemp("runs")
    for name, more in (("short", ["--seed", "1", "--images", "1280"]), ("long", [])):
        trained = run_fork(folder, "train", TINY_GAN, "--accelerator", "cpu", "--out", name, *more)
        assert trained.wait() == 0, trained.stderr
    classifier = ["train", "classification", "--preset", "quick", "--set", "width=8", "--images", "64"]
    assert run_fork(folder, *classifier, "--accelerator", "cpu", "--out", "classifier").wait() == 0
    return folder


@pytest.fixture(autouse=True)
def inside(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)


def pixels(path: str | Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def test_training_saves_image_grids_generated_from_the_same_noise():
    names = sorted(path.name for path in Path("long/samples").iterdir())
    assert names == ["real-000000000000.png", *(f"samples-{images:012}.png" for images in (0, 640, 1280, 1920))]
    assert not np.array_equal(pixels(Path("long/samples", names[1])), pixels(Path("long/samples", names[-1])))


def test_the_grid_for_a_checkpoint_equals_the_grid_that_training_saved(capsys):
    assert run(["sample", "long", "--trust", "--checkpoint", "1280"]) == 0
    assert np.array_equal(pixels("long/grid.png"), pixels("long/samples/samples-000000001280.png"))
    assert "long at 1,280 images → long/grid.png" in capsys.readouterr().out


def test_a_smaller_grid_shows_the_first_images_of_the_larger_one():
    assert run(["sample", "long", "--trust", "--checkpoint", "last", "--grid", "1x5", "--out", "some/where.png"]) == 0
    small, large = pixels("some/where.png"), pixels("long/samples/samples-000000001920.png")
    assert small.shape == (CELL_PX + GAP_PX, 5 * CELL_PX + GAP_PX, 3)
    assert np.array_equal(small[:CELL_PX], large[:CELL_PX, : 5 * CELL_PX + GAP_PX])


def test_single_images_are_written_to_a_folder_in_order(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.inference.generate.IMAGES_AT_ONCE", 3)
    words = ["sample", "long", "--count", "8", "--accelerator", "cpu", "--trust"]
    assert run([*words, "--to", str(tmp_path / "made")]) == 0
    files = sorted((tmp_path / "made").iterdir())
    assert [file.name for file in files] == [f"{number:05}.png" for number in range(8)]
    expected = paceline.load("long", device="cpu", trust=True).sample(8).permute(0, 2, 3, 1).numpy()
    for file, image in zip(files, expected, strict=True):
        difference = np.asarray(Image.open(file)).astype(int) - image[..., 0]
        assert np.abs(difference).max() <= 1  # other batch sizes round differently
    assert run([*words, "--to", str(tmp_path / "made")]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert run(["sample", "long", "--count", "8"]) == 2


def test_an_interpolation_goes_from_one_sample_image_to_the_next():
    assert run(["sample", "long", "--trust", "--checkpoint", "last", "--interpolate", "--grid", "2x7"]) == 0
    between, whole = pixels("long/interpolation.png"), pixels("long/samples/samples-000000001920.png")
    assert between.shape == (2 * CELL_PX + GAP_PX, 7 * CELL_PX + GAP_PX, 3)
    ends = [between[:CELL_PX, :CELL_PX], between[:CELL_PX, 6 * CELL_PX : 7 * CELL_PX]]
    for column, end in enumerate(ends):
        assert np.abs(end - whole[:CELL_PX, column * CELL_PX : (column + 1) * CELL_PX].astype(int)).max() <= 1


def test_interpolated_noise_keeps_its_norm():
    torch.manual_seed(0)
    start, end = torch.randn(2, 500, dtype=torch.float64)
    middle = slerp(start, end, torch.tensor(0.5).double())
    assert middle.norm() == pytest.approx(((start.norm() + end.norm()) / 2).item(), rel=0.05)
    assert torch.allclose(slerp(start, start * 2, torch.tensor(0.25).double()), start * 1.25)


def test_an_animation_has_a_frame_for_each_saved_grid(capsys):
    assert run(["sample", "long", "--animate"]) == 0
    for name in ("long/animation.gif", "long/animation.webp"):
        with Image.open(name) as moving:
            assert moving.n_frames == 4
    assert "4 frames → long/animation.gif, long/animation.webp" in capsys.readouterr().out


def test_two_runs_are_shown_side_by_side():
    assert run(["sample", "long", "--trust", "--next-to", "short", "--grid", "2x2", "--out", "both.png"]) == 0
    width = 2 * CELL_PX + GAP_PX
    assert pixels("both.png").shape[1] == 2 * width + 4 * GAP_PX
    assert run(["sample", "long", "--next-to", "short", "--animate", "--out", "both.gif"]) == 0
    with Image.open("both.gif") as moving:
        assert moving.n_frames == 4 and moving.width > 2 * 8 * CELL_PX


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("classifier", "classifier: recipe 'classification' classifies images, which `sample` does not do"),
        ("classifier --animate", "classifier: has no images in samples/ to animate"),
        ("nowhere", "nowhere: no such file or folder"),
        ("long --next-to nowhere", "nowhere: no such file or folder"),
        ("long --next-to short --class 3", "long: --class 3: "),
        ("long --next-to short --checkpoint 1920", "short: --checkpoint 1920: "),
        ("long --grid 8", "--grid 8: expected rows and columns like 8x8"),
        ("long --grid 0x3", "--grid 0x3: expected rows"),
        ("long --grid 100x100", "at most 4,096 images"),
        ("long --out image.jpg", "--out image.jpg: expected a file name ending in .png"),
        ("long --animate --out moving.mp4", "--out moving.mp4: expected a file name ending in .gif or .webp"),
        ("long --animate --interpolate", "--interpolate: cannot be combined with --animate"),
        ("long --count 2 --to new --grid 2x2", "--grid: cannot be combined with --count"),
        ("long --inception net.pt", "--inception: needs --nearest"),
        ("long --count 2 --to new --out grid.png", "--out grid.png: --count writes the images of one run"),
        ("long --count 2 --to new --next-to short", "--next-to short: --count writes the images of one run"),
        ("long --checkpoint 7", "--checkpoint 7: no checkpoint was kept at this number of images"),
    ],
)
def test_unsupported_requests_are_reported_in_one_line(command, line, rejected):
    assert line in rejected("sample", "--trust", *command.split())


def test_a_grid_has_room_for_every_image():
    images = np.arange(5, dtype=np.uint8).reshape(5, 1, 1, 1).repeat(40, 1).repeat(40, 2) + 1
    whole = grid(images)
    assert whole.shape == (2 * 42 + GAP_PX, 3 * 42 + GAP_PX, 1)
    assert sorted(set(whole.flatten())) == [0, 1, 2, 3, 4, 5]
    assert grid(images, columns=5).shape == (42 + GAP_PX, 5 * 42 + GAP_PX, 1)
