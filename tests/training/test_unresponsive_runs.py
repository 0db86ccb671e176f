"""A run that cannot finish its step still ends after a stop request, and ends by itself after `--timeout`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from holds import Holds
from running import (
    has_ended,
    metrics_without_times,
    run_fork,
    start_fork,
    wait_for_workers,
    wait_until,
    weights_of,
)

from paceline.runs.checkpoint import Checkpoints
from paceline.runs.metrics import read_metrics
from paceline.runs.status import Status

FAULTY = str(Path(__file__).parents[1] / "faulty.py")
HANGS_IN_START_UP = ("train", FAULTY, "--accelerator", "cpu", "--set", "fault=hang", "--set", "faulty_rank=-2")


@pytest.fixture
def holds(tmp_path: Path) -> Holds:
    return Holds(tmp_path / "holds")


def children_of(process: int) -> list[int]:
    return [int(one) for file in Path(f"/proc/{process}/task").glob("*/children") for one in file.read_text().split()]


def assert_stopped(run: Path) -> None:
    status = Status.of(run)
    assert status and status.state == "stopped"


def test_a_stop_request_ends_a_run_whose_first_step_hangs(tmp_path: Path, tiny: str, holds: Holds) -> None:
    holds.hold("loss")
    command = ("train", tiny, *holds.settings, "--out", "run")
    running = start_fork(tmp_path, *command)
    holds.wait_for("loss", running)
    running.kill(signal.SIGTERM)
    assert running.wait() == 143
    assert running.stderr.startswith("paceline: stopped by SIGTERM after ")
    assert running.stderr.count("\n") == 1
    assert_stopped(tmp_path / "run")
    holds.release("loss")
    assert run_fork(tmp_path, *command).wait() == 0


@pytest.mark.slow
def test_a_stop_request_ends_two_processes_whose_first_step_hangs(tmp_path: Path, tiny: str, holds: Holds) -> None:
    holds.hold("loss")
    running = start_fork(tmp_path, "train", tiny, *holds.settings, "--devices", "2", "--out", "run")
    workers = wait_for_workers(running)
    holds.wait_for("loss", running, num_ranks=2)
    running.kill(signal.SIGTERM)
    assert running.wait() == 143 and "Traceback" not in running.stderr
    assert_stopped(tmp_path / "run")
    wait_until(lambda: all(map(has_ended, workers.values())))


def test_a_run_that_waits_for_a_stopped_loader_process_saves_after_a_stop_request(
    tmp_path: Path, tiny: str, holds: Holds
) -> None:
    loading = ("--set", "loader=workers", "--set", "workers=1", "--set", "log_every=1 steps")
    command = ("train", tiny, *loading, *holds.settings, "--set", "save_every=1000 steps", "--out", "run")
    assert run_fork(tmp_path, *command[:-1], "whole").wait() == 0
    holds.hold("loss", after=4)
    running = start_fork(tmp_path, *command)
    holds.wait_for("loss", running)
    (loader,) = children_of(running.pid)
    os.kill(loader, signal.SIGSTOP)
    holds.release("loss")
    wait_until(lambda: any(line["images"] >= 5 * 16 for line in read_metrics(tmp_path / "run")), running)
    running.kill(signal.SIGTERM)
    assert running.wait() == 75 and running.stderr.count("\n") <= 1  # a line if torch waits for the loader process
    wait_until(lambda: has_ended(loader))
    assert_stopped(tmp_path / "run")
    (saved,) = Checkpoints(tmp_path / "run" / "checkpoints").all()
    assert 5 * 16 <= saved < 480
    assert run_fork(tmp_path, *command).wait() == 0
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "whole")


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stop_request_ends_an_evaluation_and_the_resumed_run_repeats_it(
    tmp_path: Path, tiny: str, holds: Holds, size: int
) -> None:
    command = ("train", tiny, *holds.settings, "--devices", str(size), "--set", "save_every=1000 steps", "--out", "run")
    assert run_fork(tmp_path, *command[:-1], "whole").wait() == 0
    holds.hold("loss", after=8 - 1)  # an evaluation follows the eighth step
    running = start_fork(tmp_path, *command)
    holds.wait_for("loss", running, size)
    holds.hold("prediction")
    holds.release("loss")
    holds.wait_for("prediction", running, size)
    running.kill(signal.SIGTERM)
    wait_until(lambda: "received SIGTERM" in running.stdout, running)
    holds.release("prediction")
    assert running.wait() == 75, running.stderr
    assert Checkpoints(tmp_path / "run" / "checkpoints").all() == [8 * 16]
    assert not any("validation/top1" in line for line in read_metrics(tmp_path / "run"))
    assert run_fork(tmp_path, *command).wait() == 0
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "whole")
    assert metrics_without_times(tmp_path / "run") == metrics_without_times(tmp_path / "whole")


def test_a_stop_request_in_the_final_evaluation_leaves_a_run_that_resumes_with_it(
    tmp_path: Path, tiny: str, holds: Holds
) -> None:
    command = ("train", tiny, *holds.settings, "--set", "evaluate_every=1000 steps", "--out", "run")
    holds.hold("loss", after=30 - 1)
    running = start_fork(tmp_path, *command)
    holds.wait_for("loss", running)
    holds.hold("prediction")
    holds.release("loss")
    holds.wait_for("prediction", running)  # of the validation split
    running.kill(signal.SIGTERM)
    assert running.wait() == 75
    assert_stopped(tmp_path / "run")
    holds.release("prediction")
    again = run_fork(tmp_path, *command)
    assert again.wait() == 0 and "test/top1" in again.stdout


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_hangs_in_start_up_ends_after_the_timeout(tmp_path: Path, size: int) -> None:
    running = run_fork(tmp_path, *HANGS_IN_START_UP, "--devices", str(size), "--timeout", "2", "--out", "run")
    assert running.wait() == 2
    (line,) = [line for line in running.stderr.splitlines() if line.startswith("paceline: ")]
    assert "no progress for " in line and "(--timeout 2)" in line
    assert "Traceback" not in running.stderr
