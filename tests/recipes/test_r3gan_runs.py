"""Runs of r3gan: images by class, nearest training images, metrics by class, and exact resume with all of its state."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from holds import start_until
from PIL import Image
from running import metrics_without_times, run_fork, wait_until, weights_of

import paceline
from paceline.cli.app import run
from paceline.core.errors import UserError
from paceline.data.source import open_sources
from paceline.images.grids import GAP_PX
from paceline.runs.checkpoint import Checkpoints
from paceline.runs.finished_run import config_of

SMALL = ("nz=8", "width=16", "num_blocks=1", "group_size=4", "size=16")
SETTINGS = (
    *SMALL,
    *("ada=blit,geometry,color", "ada_images=400", "ada_target=0", "burn_in=50%", "ema_half_life=64 images"),
    *("save_every=64 images", "evaluate_every=256 images", "log_every=2 steps"),
)
COMMAND = ("train", "r3gan", "--accelerator", "cpu", "--batch-size", "16", "--images", "384", "--lr", "3e-3")
CELL_PX = 32 + GAP_PX  # images of 16 pixels are upscaled to 32 pixels


def with_settings(*more: str) -> list[str]:
    return [*COMMAND, *(word for one in (*SETTINGS, *more) for word in ("--set", one))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an uninterrupted run."""
    folder = tmp_path_factory.mktemp("runs")
    trained = run_fork(folder, *with_settings(), "--out", "whole")
    assert trained.wait() == 0, trained.stderr
    return folder


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def cells(path: str, rows: int, columns: int) -> np.ndarray:
    """Return the images of a grid as [rows, columns, 16, 16]."""
    with Image.open(path) as image:
        whole = np.asarray(image.convert("L"))
    tops, lefts = (np.arange(count) * CELL_PX + GAP_PX for count in (rows, columns))
    return np.stack([[whole[top : top + 32 : 2, left : left + 32 : 2] for left in lefts] for top in tops])


def strength(run_folder: str) -> float:
    snapshot = Checkpoints(Path(run_folder, "checkpoints")).latest(pytest.fail)
    assert snapshot is not None
    return float(snapshot.state["signals/augment_strength"])


def test_a_killed_run_ends_with_the_same_weights_and_augmentation_strength(folder: Path) -> None:
    for images in (64, 192):
        (running,) = start_until(folder, 1, images + 16, *with_settings(), "--out", "killed")
        wait_until(lambda at=images: Path("killed/checkpoints", f"{at:012}").is_dir(), running)
        running.kill()
        assert running.wait() == -signal.SIGKILL
    last = run_fork(folder, *with_settings(), "--out", "killed")
    assert last.wait() == 0 and "resuming from" in last.stdout
    assert weights_of(Path("killed")) == weights_of(Path("whole"))
    assert metrics_without_times(Path("killed")) == metrics_without_times(Path("whole"))
    assert strength("killed") == strength("whole") > 0


def test_images_are_generated_by_class(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sample", "whole", "--class", "7", "--grid", "2x3", "--out", "seven.png"]) == 0
    assert "whole at 384 images, class 7 → " in capsys.readouterr().out
    assert run(["sample", "whole", "--class", "7", "--count", "1", "--to", "sevens"]) == 0
    assert "1 image of class 7 from whole at 384 images → " in capsys.readouterr().out
    assert run(["sample", "whole", "--class", "all", "--grid", "10x3", "--out", "all.png"]) == 0
    by_class = cells("all.png", 10, 3)
    model = paceline.load("whole", device="cpu")
    # The second row has the images 3 to 5 of class 1.
    assert np.array_equal(by_class[1], model.sample(30, label="1")[3:6, 0].numpy())
    assert np.array_equal(cells("seven.png", 2, 3).reshape(6, 16, 16), model.sample(6, label=7)[:, 0].numpy())
    assert not np.array_equal(model.sample(6, label=7), model.sample(6, label=8))
    with pytest.raises(UserError, match="label=all: unknown class 'all'"):
        model.sample(2, label="all")


def test_truncation_moves_images_towards_one_image() -> None:
    model = paceline.load("whole", device="cpu")
    images = [model.sample(4, label=3, truncation=factor).float() for factor in (1.0, 0.5, 0.0)]
    spreads = [float(some.std(0).mean()) for some in images]
    assert spreads[0] > spreads[1] > spreads[2] == 0
    assert run(["sample", "whole", "--class", "3", "--truncation", "0", "--grid", "1x2", "--out", "one.png"]) == 0
    assert np.array_equal(*cells("one.png", 1, 2)[0])


def test_an_interpolation_stays_within_one_class() -> None:
    assert run(["sample", "whole", "--interpolate", "--class", "4", "--grid", "1x3", "--out", "between.png"]) == 0
    first = paceline.load("whole", device="cpu").sample(1, label=4)[0, 0].numpy()
    assert np.abs(cells("between.png", 1, 3)[0, 0].astype(int) - first).max() <= 1
    assert run(["sample", "whole", "--interpolate", "--grid", "2x3", "--out", "between.png"]) == 0


def test_each_row_of_an_interpolation_can_show_another_class_with_truncated_noise() -> None:
    words = ["--interpolate", "--class", "all", "--truncation", "0.5", "--grid", "2x4", "--out", "between.png"]
    assert run(["sample", "whole", *words]) == 0
    shown, model = cells("between.png", 2, 4).astype(int), paceline.load("whole", device="cpu")
    for row, label in enumerate("01"):
        ends = model.sample(2, first=2 * row, label=label, truncation=0.5)[:, 0].numpy()
        assert np.abs(shown[row, [0, -1]] - ends).max() <= 1
    words[words.index("0.5")] = "0"  # all noise vectors are 0
    assert run(["sample", "whole", *words]) == 0
    shown = cells("between.png", 2, 4)
    average = model.sample(1, label=0, truncation=0)[0, 0].numpy()
    assert all(np.array_equal(image, average) for image in shown[0])


def test_the_nearest_training_images_are_shown_next_to_each_image() -> None:
    assert run(["sample", "whole", "--nearest", "--grid", "3x4"]) == 0
    shown = cells("whole/nearest.png", 3, 4)
    generated = paceline.load("whole", device="cpu").sample(3)[:, 0].numpy()
    assert np.array_equal(shown[:, 0], generated)

    def small(images: np.ndarray) -> np.ndarray:
        return images.astype(float).reshape(-1, 8, 2, 8, 2).mean((2, 4)).reshape(-1, 64)

    source = open_sources(config_of("whole"))["train"]
    real = source.read_many(np.arange(len(source)))["image"][..., 0]
    for row in shown:
        distances = np.linalg.norm(small(real) - small(row[:1]), axis=1)
        nearest = np.linalg.norm(small(row[1:]) - small(row[:1]), axis=1)
        assert nearest == pytest.approx(np.sort(distances)[:3])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--class", ""], "--class '': expected the name of a class"),
        (["--class", "cat"], "--class cat: unknown class 'cat'"),
        (["--class", "10"], "--class 10: unknown class '10'; choose from: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9"),
        (["--truncation", "-1"], "--truncation -1: must be at least 0 and at most 2"),
        (["--truncation", "-1", "--count", "1", "--to", "none"], "--truncation -1: must be at least 0 and at most 2"),
        (["--nearest", "--interpolate"], "cannot be combined"),
        (["--nearest", "--grid", "2x1"], "--nearest needs at least 2 columns"),
        (["--animate", "--class", "3"], "cannot be combined with --animate"),
    ],
)
def test_invalid_options_are_reported(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sample", "whole", *words]) == 2
    assert message in capsys.readouterr().err and not Path("none").exists()


def test_a_grid_needs_no_training_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = np.random.default_rng(0).integers(0, 256, (40, 16, 16), dtype=np.uint8)
    labels = np.arange(40) % 3
    np.savez("own.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    command = with_settings("few_images=allow")
    command[command.index("384")] = "32"
    assert run_fork(Path.cwd(), *command, "--data", "npz", "--data-root", "own.npz", "--out", "own").wait() == 0
    words = ["sample", "own", "--class", "all", "--grid", "2x4", "--out"]
    assert run([*words, str(tmp_path / "with.png")]) == 0
    Path("own.npz").unlink()
    assert run([*words, str(tmp_path / "without.png")]) == 0
    assert "own at 32 images (the first 2 of 3 classes) → " in capsys.readouterr().out
    assert np.array_equal(*(cells(str(tmp_path / name), 2, 4) for name in ("with.png", "without.png")))
    assert run(["sample", "own", "--nearest"]) == 2
    assert "own.npz: no such file" in capsys.readouterr().err


@pytest.fixture(scope="module")
def sparse(folder: Path) -> str:
    """The folder of a run whose labels are 2, 4 and 5."""
    images = np.random.default_rng(0).integers(0, 256, (30, 16, 16), dtype=np.uint8)
    np.savez(folder / "sparse.npz", x_train=images, y_train=np.array([2, 4, 5])[np.arange(30) % 3])
    command = with_settings("few_images=allow")
    command[command.index("384")] = "32"
    words = ["--data", "npz", "--data-root", "sparse.npz", "--out", "sparse"]
    assert run_fork(folder, *command, *words).wait() == 0
    return str(folder / "sparse")


def test_the_nearest_images_are_found_in_data_that_was_moved(
    sparse: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sample", sparse, "--nearest", "--grid", "2x3", "--out"]
    assert run([*words, str(tmp_path / "before.png")]) == 0
    Path("sparse.npz").rename("moved.npz")
    try:
        assert run([*words, str(tmp_path / "none.png")]) == 2
        assert "--data-root" in capsys.readouterr().err
        assert run([*words, str(tmp_path / "after.png"), "--data-root", "moved.npz"]) == 0
    finally:
        Path("moved.npz").rename("sparse.npz")
    assert np.array_equal(*(cells(str(tmp_path / name), 2, 3) for name in ("before.png", "after.png")))
    for more in ([], ["--animate"], ["--count", "1", "--to", str(tmp_path / "none")]):
        assert run(["sample", sparse, "--data-root", "sparse.npz", *more]) == 2
        assert "--data-root" in capsys.readouterr().err


def test_no_training_image_is_shown_twice_if_there_are_fewer_than_columns(sparse: str, tmp_path: Path) -> None:
    file = str(tmp_path / "all.png")
    assert run(["sample", sparse, "--nearest", "--grid", "1x40", "--out", file]) == 0
    with Image.open(file) as image:
        assert image.width == 31 * CELL_PX + GAP_PX  # one generated image and 30 training images
    assert len({image.tobytes() for image in cells(file, 1, 31)[0, 1:]}) == 30


def test_classes_without_training_images_are_not_generated(
    sparse: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sample", sparse, "--class", "all", "--grid", "4x2", "--out", str(tmp_path / "all.png")]) == 0
    model = paceline.load(sparse, device="cpu")
    assert model.spec.empty_classes == (0, 1, 3)
    by_class = {label: model.sample(20, label=label, truncation=0)[0].numpy() for label in (2, 4, 5)}
    rows = cells(str(tmp_path / "all.png"), 4, 2)
    for row, label in enumerate((2, 4, 5, 2)):
        assert np.array_equal(rows[row], model.sample(8, label=label)[2 * row : 2 * row + 2, 0].numpy())
    drawn = [one.tobytes() for one in model.sample(40, truncation=0).numpy()]
    assert set(drawn) == {image.tobytes() for image in by_class.values()}
    for words in (["--out", str(tmp_path / "none.png")], ["--count", "3", "--to", str(tmp_path / "none")]):
        assert run(["sample", sparse, "--class", "3", *words]) == 2
        assert "--class 3: the class has no training images; choose another one\n" in capsys.readouterr().err
        assert not Path(words[-1]).exists()
    with pytest.raises(UserError, match="label=0: the class has no training images"):
        model.sample(1, label=0)
    shutil.copy(Path(sparse, "checkpoints", "000000000032", "weights.safetensors"), tmp_path / "own.safetensors")
    copied = paceline.load(str(tmp_path / "own.safetensors"), device="cpu")
    assert copied.spec.empty_classes == (0, 1, 3) and np.array_equal(copied.sample(9), model.sample(9))


def test_a_run_of_an_older_version_draws_from_all_classes_and_may_have_retired_settings(
    sparse: str, tmp_path: Path
) -> None:
    shutil.copytree(sparse, tmp_path / "older")
    config = tmp_path / "older" / "config.toml"
    config.write_text(f"niqe = false\n{config.read_text()}")
    file = tmp_path / "older" / "data_spec.json"
    stored = json.loads(file.read_text())
    assert stored.pop("empty_classes") == [0, 1, 3]
    file.write_text(json.dumps(stored))
    model = paceline.load(str(tmp_path / "older"), device="cpu")
    assert model.spec.empty_classes == () and model.sample(1, label=0).shape == (1, 1, 16, 16)


def test_a_class_needs_a_conditional_model(folder: Path) -> None:
    command = with_settings("conditional=off", "few_images=allow")
    command[command.index("384")] = "32"
    assert run_fork(folder, *command, "--out", "unconditional").wait() == 0
    with pytest.raises(UserError, match="R3gan is not class-conditional"):
        paceline.load("unconditional", device="cpu").sample(1, label=0)


def test_weights_that_do_not_fit_are_reported_with_the_settings_that_differ(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for one in (*SMALL[:-1], "size=32") for word in ("--set", one)]
    assert run([*COMMAND, *words, "--init-from", "whole", "--out", "larger"]) == 2
    error = capsys.readouterr().err
    assert "its generator is a different network" in error and "width" not in error
    assert run([*COMMAND, *words, "--set", "width=32", "--init-from", "whole", "--out", "larger"]) == 2
    error = capsys.readouterr().err
    assert "weights were trained with " in error and "width=16 (not 32)" in error and "--set width=16" in error


def test_a_run_with_a_far_too_high_learning_rate_stops_with_an_error(folder: Path) -> None:
    done = run_fork(folder, *with_settings(), "--lr", "10", "--images", "2048", "--out", "diverged")
    assert done.wait() == 2
    assert "diverged" in done.stderr or "not finite" in done.stderr
    assert "lower learning rate" in done.stderr and "at step" in done.stderr
