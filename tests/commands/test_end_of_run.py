"""What `train` prints while it trains and at its end, and the names of runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from running import run_fork

LENGTH = ("--images", "256", "--set", "log_every=4 steps")


def test_a_finished_run_prints_its_metrics_and_commands_that_work(tmp_path: Path, tiny: str) -> None:
    trained = run_fork(tmp_path, "train", tiny, *LENGTH, "--out", "my runs/it's first")
    assert trained.wait() == 0, trained.stderr
    lines = trained.stdout.splitlines()
    assert any(
        re.match(r"  [\d,.]+ images/s  ETA 0:\d\d  epoch 0\.\d+/0\.\d+ .*  classifier/cross_entropy ", x) for x in lines
    )
    evaluated = [line for line in lines if line.startswith("epoch ")]
    assert len(evaluated) == 2
    assert all(re.search(r"validation/top1 \d+\.\d+%  validation/top5 \S+%", line) for line in evaluated)
    assert evaluated[0].endswith("  (best so far)")
    best = r"trained for 0:\d\d; best: validation/top1 \S+% at epoch 0\.\d+/0\.\d+ \((128|256) images\)"
    assert any(re.fullmatch(best, line) for line in lines), trained.stdout
    assert any(line.startswith("test metrics for the checkpoint at ") and "test/top1 " in line for line in lines)
    steps = [shlex.split(line) for line in lines[lines.index("next:") + 1 :]]
    assert steps[0] == ["paceline", "predict", "my runs/it's first", "path/to/images", "--trust"]
    assert steps[1][:3] == ["paceline", "evaluate", "my runs/it's first"]
    assert all(step == ["paceline", "board", "my runs"] for step in steps[2:])
    done = run_fork(tmp_path, *steps[1][1:])
    assert done.wait() == 0 and "top1" in done.stdout, done.stderr


def test_the_next_commands_fit_the_recipe(tmp_path: Path) -> None:
    small = ("--preset", "quick", "--images", "4", "--batch-size", "2", "--crop", "16", "--accelerator", "cpu")
    small += ("--set", "depth=1", "--set", "width=2")
    trained = run_fork(tmp_path, "train", "restoration", *small, "--out", "run")
    assert trained.wait() == 0, trained.stderr
    assert "next:\n  paceline apply run path/to/images --out results\n  paceline evaluate run\n" in trained.stdout


def test_a_run_with_other_settings_is_given_a_name_that_can_be_pasted(tmp_path: Path, tiny: str) -> None:
    command = ("train", tiny, *LENGTH, "--name", "first")
    assert run_fork(tmp_path, *command).wait() == 0 and (tmp_path / "runs/first/config.toml").is_file()
    rejected = run_fork(tmp_path, *command, "--lr", "0.2")
    assert rejected.wait() == 2 and len(rejected.stderr.splitlines()) == 1
    suggested = "--name first-2"
    assert f"(lr: 0.05 → 0.2); use the same settings to resume it, or add {suggested} to start" in rejected.stderr
    assert run_fork(tmp_path, *command, "--lr", "0.2", *suggested.split()).wait() == 0
    assert (tmp_path / "runs/first-2/config.toml").is_file()
    again = run_fork(tmp_path, "train", tiny, *LENGTH, "--lr", "0.2", "--out", "./runs/first")
    assert "add --name first-3 to start" in again.stderr, again.stderr


def test_a_run_outside_the_default_folder_is_given_another_folder(tmp_path: Path, tiny: str) -> None:
    command = ("train", tiny, *LENGTH, "--out", "my runs/a")
    assert run_fork(tmp_path, *command).wait() == 0
    rejected = run_fork(tmp_path, *command, "--set", "width=8")
    assert rejected.wait() == 2 and "add --out 'my runs/a-2' to start another run" in rejected.stderr
