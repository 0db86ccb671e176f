"""`paceline compare` does not repeat finished runs, shows failures, and loses nothing when interrupted."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from holds import Holds
from running import processes_naming, run_fork, start_fork, wait_until

from paceline.commands.configure import configure
from paceline.compare import Options
from paceline.compare.grid import Grid, PlannedRun, obstacle_here
from paceline.config.resolve import Config

TRAIN = [str(Path(__file__).parents[1] / "tiny.py"), "--accelerator", "cpu", "--set", "holds=holds"]
TINY = ["compare", *TRAIN, "--strategies", "single", "--seeds", "0,1", "--no-verify", "--no-step-ladder"]
TINY += ["--out", "table"]


def quality(folder: Path) -> dict[str, Any]:
    report = json.loads((folder / "table/report.json").read_text())
    return {key: group["quality"] for key, group in report["groups"].items()}


def cell(folder: Path, seed: int) -> Path:
    return folder / f"table/cells/tiny-single-1-batch16-seed{seed}"


@pytest.mark.slow
def test_a_comparison_that_was_killed_resumes_without_repeating_finished_runs(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    killed.mkdir()
    assert run_fork(killed, *TINY, "--seeds", "0").wait() == 0
    (killed / "table/report.json").unlink()
    metrics = cell(killed, 0) / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns, metrics.read_bytes()
    holds = Holds(killed / "holds")
    holds.hold("loss", after=8)
    running = start_fork(killed, *TINY)
    holds.wait_for("loss", running)
    running.kill()
    assert running.wait() == -signal.SIGKILL
    # The current run's process ends when its parent is killed.
    wait_until(lambda: not processes_naming(f"{killed}/"))
    holds.release("loss")
    assert not (killed / "table/report.json").exists()
    again = run_fork(killed, *TINY)
    assert again.wait() == 0, again.stderr
    assert before == (metrics.stat().st_mtime_ns, metrics.read_bytes())
    assert "seed0: " in again.stdout and again.stdout.count("(already finished)") == 1
    (table,) = quality(killed).values()
    for number in (0, 1):
        never_stopped = run_fork(tmp_path, "train", *TRAIN, "--seed", str(number), "--out", f"never-stopped-{number}")
        assert never_stopped.wait() == 0
        lines = (tmp_path / f"never-stopped-{number}/metrics.jsonl").read_text().splitlines()
        tested = next(line for line in map(json.loads, lines) if "test/top1" in line)
        assert {name: summary["values"][number] for name, summary in table.items()} == {
            name: tested[name] for name in table
        }


def test_ctrl_c_stops_the_current_run_cleanly(tmp_path: Path) -> None:
    holds = Holds(tmp_path / "holds")
    holds.hold("loss", after=8)
    running = start_fork(tmp_path, *TINY)
    holds.wait_for("loss", running)
    running.interrupt_group()
    log = tmp_path / "table/logs" / f"{cell(tmp_path, 0).name}.txt"
    wait_until(lambda: "saving a checkpoint after this step" in log.read_text(), running)
    holds.release("loss")
    assert running.wait() == 130
    assert "run the same command again to resume" in running.stderr
    assert "images and saved; run the same command again to resume" in log.read_text()
    assert not cell(tmp_path, 1).exists()


def test_a_failing_run_is_shown_with_its_reason_and_the_other_runs_continue(tmp_path: Path) -> None:
    words = [*TINY, "--set", "norm=none", "--images", "64", "--batch-size", "1", "--seeds", "0"]
    words += ["--strategies", "single,ddp,dp"]
    done = run_fork(tmp_path, *words)
    assert done.wait() == 1, done.stderr
    report = json.loads((tmp_path / "table/report.json").read_text())
    states = {cell["strategy"]: (cell["state"], cell["reason"]) for cell in report["cells"]}
    assert states["single"] == ("done", "")
    assert states["ddp"][0] == "failed" and "--batch-size 1: needs at least 2 images" in states["ddp"][1]
    assert states["dp"][0] == "not measured" and "needs GPUs" in states["dp"][1]
    page = (tmp_path / "table/report.html").read_text()
    assert "needs at least 2 images" in page and "needs GPUs" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategies", ","], "--strategies ',': the list is empty"),
        (["--strategies", "dpp"], "did you mean 'dp'?"),
        (["--devices", "two"], "'two' is not a whole number"),
        (["--devices", "0"], "'0' is not a whole number >= 1"),
        (["--jobs", "0"], "Invalid value for '--jobs'"),
        (["--seeds", "1,x"], "'x' is not a whole number"),
        (["--scaling", "medium"], "'medium' is not one of 'strong', 'weak'"),
        (["--batch-size", "64,some"], "--batch-size 'some': expected a number"),
        (["--preset", "quik"], "did you mean 'quick'?"),
    ],
)
def test_a_user_error_prints_one_line_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rejected: Callable[..., str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in rejected("compare", "classification", "--accelerator", "cpu", *words)
    assert not (tmp_path / "runs").exists()


def test_recipes_with_different_metrics_cannot_be_compared(rejected: Callable[..., str]) -> None:
    line = "classification and dcgan are evaluated with different metrics (validation/top1 and train/FID)"
    assert line in rejected("compare", "classification,dcgan", "--accelerator", "cpu")


@pytest.fixture
def config() -> Config:
    return configure("classification", {"accelerator": "cpu"})


def cells(config: Config, options: Options, **flags: str) -> list[PlannedRun]:
    configs = {"classification": config}
    return Grid.of(configs, {"batch_size": "64", **flags}, options).cells(configs)


def test_strategy_single_uses_one_device_and_weak_scaling_sets_the_batch_size_per_device(config: Config) -> None:
    weak = [one.cell for one in cells(config, Options("single,ddp", "0", "weak"), devices="2,4")]
    expected = [("single", 1, "64/device"), ("ddp", 2, "64/device"), ("ddp", 4, "64/device")]
    assert [(cell.strategy, cell.devices, cell.batch) for cell in weak] == expected
    assert len({cell.name for cell in weak}) == 3


def test_all_runs_of_a_comparison_are_compiled_or_none_is(config: Config) -> None:
    def choices(compiles: str) -> set[str]:
        chosen = cells(config.with_run(compile=compiles), Options("single,ddp", "0,1"))
        return {str(one.flags.get("compile", compiles)) for one in chosen}

    assert choices("auto") == {"off"} and choices("on") == {"on"}


def test_too_few_gpus_are_reported_as_the_reason_why_a_run_is_skipped(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    on_gpu = config.with_run(accelerator="cuda")
    assert obstacle_here(on_gpu, "ddp", 2, []) == "needs 2 GPUs, but this machine has 1"
    assert obstacle_here(on_gpu, "ddp", 2, ["0", "0"]) == ""
    assert obstacle_here(on_gpu, "ddp", 4, ["0", "0"]) == "needs 4 GPUs, but --gpus lists only 2"
    shared = cells(on_gpu.with_run(gpus="0,0"), Options("single,ddp", "0"))
    found = [(one.cell.name.endswith("on-one-gpu"), one.flags["gpus"]) for one in shared]
    assert found == [(False, "0"), (True, "0,0")]
