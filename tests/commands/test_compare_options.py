"""A comparison reports each requested run once, and omits runs that are unfinished or have different settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from running import run_fork, start_fork, wait_until

from paceline.cli.app import run
from paceline.commands.configure import configure
from paceline.compare import Options
from paceline.compare.grid import Grid
from paceline.compare.training import Measured
from paceline.core.files import Lock, read_json

SHORT = ["--preset", "quick", "--accelerator", "cpu", "--no-verify", "--no-step-ladder", "--images", "128"]
TINY = ["compare", "classification", *SHORT, "--set", "width=8", "--strategies", "single"]
CELL = "cells/classification-single-1-batch64-seed0"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two comparisons of one run each: one uses a config file, and the other a user recipe."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "rate.toml").write_text("lr = 0.1\n")
    assert run_fork(folder, *TINY, "--config", "rate.toml", "--out", "table").wait() == 0
    assert run_fork(folder, "new", "recipe", "mine").wait() == 0
    own = run_fork(folder, "compare", "./mine.py", *SHORT[2:], "--strategies", "single", "--out", "own")
    assert own.wait() == 0, own.stderr
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the comparisons that a test can modify, used as the working directory."""
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the contents of all files except the lock file, which records the last process that held it."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize(
    ("rate", "words", "message"),
    [
        ("0.1", ["--images", "64"], "images: 128 → 64"),
        ("0.1", ["--precision", "fp64"], "precision: auto → fp64"),
        ("0.2", [], "lr: 0.1 → 0.2"),
    ],
)
def test_runs_with_different_settings_are_rejected_before_anything_changes(
    place: Path, rejected: Callable[..., str], rate: str, words: list[str], message: str
) -> None:
    (place / "rate.toml").write_text(f"lr = {rate}\n")
    before = contents(place / "table")
    line = rejected(*TINY, "--config", "rate.toml", *words, "--out", "table")
    cell = CELL.removeprefix("cells/")
    assert line == f"--out table: run {cell} has different settings ({message}); choose a different --out"
    assert contents(place / "table") == before


def test_a_changed_user_recipe_counts_as_a_different_recipe(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "./mine.py", *SHORT[2:], "--strategies", "single", "--out", "own"]
    assert run(words) == 0
    assert "(already finished)" in capsys.readouterr().out
    with (place / "mine.py").open("a") as file:
        file.write("# another line\n")
    assert run(words) == 2
    assert "has different settings (code in mine.py: " in capsys.readouterr().err


def test_changed_data_is_rejected_before_a_new_run_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(0).integers(0, 255, (16, 8, 8, 3), dtype=np.uint8)
    for number, image in enumerate(images):
        file = Path("images", ("train", "test")[number % 2], ("cat", "dog")[number // 8], f"{number}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    words = [*TINY, "--data", "folder", "--data-root", "images", "--set", "size=8", "--images", "8"]
    words += ["--batch-size", "4", "--set", "validation=0.25", "--out", "table"]
    assert run([*words, "--seeds", "0,1"]) == 0
    Path("images/train/cat/0.png").unlink()
    before = contents(tmp_path / "table")
    assert run([*words, "--seeds", "0,1,2"]) == 2
    printed = capsys.readouterr().err
    assert "--out table: run classification-single-1-batch4-seed0 was trained on different data (6 samples, " in printed
    assert printed.endswith("; use the same data to resume, or choose a different --out\n") and printed.count("\n") == 1
    assert contents(tmp_path / "table") == before
    shutil.rmtree("images")
    assert run([*words, "--seeds", "0,1"]) == 0  # finished runs do not need their data
    assert capsys.readouterr().out.count("(already finished)") == 2


def test_a_run_without_a_readable_cell_file_is_used_only_if_its_length_matches(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = (place / "table/report.json").read_bytes()
    record = place / "table" / CELL / "cell.json"
    record.unlink()
    assert run([*TINY, "--config", "rate.toml", "--images", "64", "--out", "table"]) == 1
    printed = capsys.readouterr()
    assert "contains a run of a different length (128 images); choose a different --out" in printed.out
    assert "no run finished; no report was written to table" in printed.err
    assert (place / "table/report.json").read_bytes() == good
    record.write_text('{"made_')
    assert run([*TINY, "--config", "rate.toml", "--out", "table"]) == 0
    assert report(place / "table")["runs"][f"table/{CELL}"]["images"] == 128
    assert read_json(record)["finished"] is True


def test_a_run_that_cannot_be_read_is_reported_as_failed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = place / "table" / CELL / "config.toml"
    config.write_text("\n".join(line for line in config.read_text().splitlines() if not line.startswith("recipe =")))
    assert run([*TINY, "--config", "rate.toml", "--out", "table"]) == 1
    assert f"failed: table/{CELL}/config.toml: does not name a recipe" in capsys.readouterr().out


def test_a_second_comparison_cannot_use_the_folder_of_one_in_progress(tmp_path: Path) -> None:
    words = [*TINY, "--images", "640000", "--out", "table"]
    first = start_fork(tmp_path, *words)
    wait_until(lambda: (tmp_path / "table" / CELL / "metrics.jsonl").is_file(), first)
    second = run_fork(tmp_path, *words)
    first.interrupt_group()
    assert second.wait() == 2
    assert f"--out table: this run is in use by process {first.pid}; choose a different --out" in second.stderr
    assert first.wait() == 130
    assert read_json(tmp_path / "table" / CELL / "cell.json")["finished"] is False


def test_a_recipe_with_stages_is_compared_by_its_last_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    images = np.random.default_rng(0).integers(0, 255, (4, 32, 32, 3), dtype=np.uint8)
    for number, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / "photos" / f"{number}.png")
    settings = ["stage=both", "num_blocks=1", "width=2", "d_width=2", "vgg=random", "vgg_layer=relu2_1", "scale=2"]
    words = ["--data", "photos", "--data-root", "photos", "--crop", "16", "--batch-size", "4", "--images", "8"]
    words += [word for setting in [*settings, "validation=0.25"] for word in ("--set", setting)]
    words += ["--strategies", "single", "--accelerator", "cpu", "--no-verify", "--no-step-ladder", "--out", "table"]
    assert run(["compare", "super_resolution", *words, "--seeds", "0,1"]) == 0
    cells = [f"table/cells/super_resolution-single-1-batch4-seed{seed}" for seed in (0, 1)]
    (group,) = report(tmp_path / "table")["groups"].values()
    assert group["runs"] == [f"{cell}/adversarial" for cell in cells]
    assert run(["compare", "super_resolution", *words, "--seeds", "0,1"]) == 0
    assert capsys.readouterr().out.count("(already finished)") == 2
    assert run(["compare", *cells]) == 0  # the run is given as the folder that contains both stages
    (group,) = report(tmp_path / "runs/compare-finished-super_resolution-photos")["groups"].values()
    assert group["seeds"] == [0, 1]


def test_parity_between_strategies_is_measured_under_the_settings_being_compared(tmp_path: Path) -> None:
    flags = {"accelerator": "cpu", "preset": "quick", "sync_batchnorm": "off"}
    configs = {"classification": configure("classification", flags, assignments=["width=8"])}
    options = Options("ddp", assignments=("width=8",))
    measured = Measured(tmp_path, options, Console())
    measured.verify(configs, flags, Grid.of(configs, {"batch_size": "64"}, options))
    differences = measured.parity["classification"].differences
    assert any(one["value"] > one["tolerance"] for one in differences)


def test_a_run_given_under_several_names_counts_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(place / "table" / CELL, place / "run")
    good = (place / "table/report.json").read_bytes()
    assert run(["compare", "run", "./run", "run/", str(place / "run")]) == 0
    (group,) = report(place / "runs/compare-finished-classification-digits")["groups"].values()
    assert (group["n"], group["runs"]) == (1, ["run"])
    assert (place / "table/report.json").read_bytes() == good
    shutil.copytree("run", "copy")
    assert run(["compare", "run", "copy"]) == 2
    assert "run and copy: the same run twice (single, seed 0); leave one out" in capsys.readouterr().err


def test_a_run_that_is_still_running_is_not_reported_as_stopped(place: Path) -> None:
    (place / "table" / CELL / "config.toml").write_text(
        (place / "table" / CELL / "config.toml").read_text().replace("images = 128", "images = 256")
    )
    shutil.copytree(place / "table" / CELL, place / "killed")
    held = Lock(place / "table" / CELL)
    assert run(["compare", f"table/{CELL}", "killed"]) == 0
    held.release()
    cells = report(place / "runs/compare-finished-classification-digits")["cells"]
    assert [cell["reason"] for cell in cells] == ["still running, 128 images so far", "stopped at 128 images"]


@pytest.mark.parametrize(
    "words", [["--epochs", "9"], ["--seeds", "7"], ["--verify"], ["--set", "lr=1"], ["--scaling", "weak"]]
)
def test_options_for_new_runs_are_rejected_for_finished_runs(
    place: Path, rejected: Callable[..., str], words: list[str]
) -> None:
    line = f"{words[0]}: applies only to new runs, but table/{CELL} is a finished run"
    assert line in rejected("compare", f"table/{CELL}", *words)


def test_a_folder_named_like_a_recipe_is_used_only_if_it_contains_a_run(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "classification").mkdir()
    assert run([*TINY, "--config", "rate.toml", "--out", "table"]) == 0
    assert run(["compare", "./classification"]) == 2
    assert "./classification: not a run" in capsys.readouterr().err
    shutil.copytree(place / "table" / CELL, place / "classification", dirs_exist_ok=True)
    assert run(["compare", "classification", "--out", "one"]) == 0
    assert report(place / "one")["counts"]["requested"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([""], "compare: one of the names is empty; list recipes or run folders"),
        (["classification", "--set", "seed=5"], "--set seed: each run in a comparison has its own value; use --seeds"),
        (["classification", "--set", "strategy=ddp"], "use --strategies"),
        (["classification", "--set", "batch-size=5"], "use --batch-size"),
        (["classification", "--set", "devices=5"], "use --devices"),
        (["classification", "--set", "out=x"], "use --out"),
        (["classification", "--seed", "1", "--seeds", "2"], "--seed 1: cannot be combined with --seeds"),
        (["classification", "--strategy", "dp", "--strategies", "ddp"], "--strategy dp: cannot be combined with"),
        (["classification", "--set", "mirror=s3://a/b"], "--mirror: applies to a single run"),
        (["classification", "--batch-size", ""], "--batch-size '': the list is empty"),
        (["classification", "--seeds", ""], "--seeds '': the list is empty"),
        (["a/mine.py,b/mine.py"], "a/mine.py and b/mine.py would have the same name in the report"),
        (["classification", "--out", "/proc/none"], "--out /proc/none: No such file or directory"),
        (["classification", "--out", "mine.py"], "--out mine.py: File exists"),
    ],
)
def test_an_argument_that_would_be_ignored_is_rejected(
    place: Path, rejected: Callable[..., str], words: list[str], message: str
) -> None:
    for folder in ("a", "b"):
        (place / folder).mkdir()
        shutil.copy("mine.py", folder)
    assert message in rejected("compare", *words, *([] if words == [""] else ["--accelerator", "cpu"]))
    assert not (place / "runs").exists()
