"""A rank that is slow, stopped, or skips a collective operation is named, and every rank's stack is in logs/."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from holds import Holds
from running import has_ended, run_fork, start_fork, start_ranks, wait_for_workers, wait_until

from paceline.runs.status import Status

FAULTY = str(Path(__file__).parents[1] / "faulty.py")
COMMAND = ("train", FAULTY, "--accelerator", "cpu", "--devices", "2", "--timeout", "6", "--out", "run")


def log_of(folder: Path, rank: int) -> str:
    return (folder / "run" / "logs" / f"rank-{rank}.txt").read_text()


def test_the_launcher_names_a_slow_rank_and_then_the_one_that_is_stopped(tmp_path: Path) -> None:
    # A slow rank is named after 60 steps.
    faults = ("--set", "fault=stop", "--set", "faulty_rank=1", "--set", "at=64", "--set", "slow_rank=0")
    running = start_fork(tmp_path, *COMMAND, *faults, "--set", "log_every=10 steps", "--profile", "4")
    workers = wait_for_workers(running)
    assert running.wait() == 2
    assert "rank 1 did not arrive: rank 1 is stopped" in running.stderr and "(--timeout 6)" in running.stderr
    wait_until(lambda: all(map(has_ended, workers.values())))
    status = Status.of(tmp_path / "run")
    assert status and status.state == "failed" and "rank 1 did not arrive" in status.reason
    for rank in (0, 1):  # both stacks end in the recipe or in the exchange of its statistics
        assert "most recent call first" in log_of(tmp_path, rank) and "faulty.py" in log_of(tmp_path, rank)
    report = (tmp_path / "run" / "logs" / "hang.txt").read_text()
    assert "rank 1 is stopped" in report and "classifier: " in report  # followed by the last operations
    assert "straggler: rank 0 needs" in running.stdout
    profile = tmp_path / "run" / "profile"
    assert {path.name for path in profile.iterdir()} == {
        *("rank-0.json.gz", "rank-1.json.gz", "summary.json", "summary.txt")
    }
    summary = (profile / "summary.txt").read_text()
    assert "time in the loop" in summary


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_is_stopped_in_the_last_step_does_not_finish_the_run(tmp_path: Path, rank: int) -> None:
    last_step = ("--images", "160", "--set", "at=10", "--set", "evaluate_every=never")
    running = start_fork(tmp_path, *COMMAND, *last_step, "--set", "fault=stop", "--set", f"faulty_rank={rank}")
    workers = wait_for_workers(running)
    assert running.wait() == 2
    assert f"paceline: rank {rank} did not arrive: rank {rank} is stopped" in running.stderr
    assert "Traceback" not in running.stderr and "most recent call first" in log_of(tmp_path, rank)
    status = Status.of(tmp_path / "run")
    assert status and status.state == "failed" and f"rank {rank} did not arrive" in status.reason
    assert not list((tmp_path / "run").glob("checkpoints/0*"))
    wait_until(lambda: all(map(has_ended, workers.values())))


def test_the_status_reports_the_rank_that_was_killed_and_the_signal(tmp_path: Path) -> None:
    running = run_fork(tmp_path, *COMMAND, "--set", "fault=kill", "--set", "at=3")
    assert running.wait() == 1
    status = Status.of(tmp_path / "run")
    assert status and status.state == "failed" and status.reason.startswith("rank 1 was killed by signal 9")
    assert "rank 1 was killed by signal 9; see run/logs/rank-1.txt for details" in running.stderr


def test_a_rank_that_is_ended_because_another_failed_does_not_print_that_it_saves(tmp_path: Path) -> None:
    running = run_fork(tmp_path, *COMMAND, "--set", "fault=error", "--set", "at=3")
    assert running.wait() == 2
    assert running.stderr == "paceline: a sample is damaged\n"
    assert "SIGTERM" not in running.stdout and "SIGTERM" not in log_of(tmp_path, 0)


@pytest.mark.parametrize(("faulty", "named"), [(1, 1), pytest.param(-2, r"\d", marks=pytest.mark.slow)])
def test_the_launcher_names_a_rank_that_exits_with_code_0_before_the_end(
    tmp_path: Path, faulty: int, named: int | str
) -> None:
    running = run_fork(tmp_path, *COMMAND, "--set", "fault=exit", "--set", "at=3", "--set", f"faulty_rank={faulty}")
    assert running.wait() == 2
    reason = rf"rank {named} ended with exit code 0 before the end of the run, after '.+' \(step [12], operation \d+\)"
    assert re.search(rf"^paceline: {reason}$", running.stderr, re.MULTILINE)
    status = Status.of(tmp_path / "run")
    assert status and status.state == "failed" and re.fullmatch(reason, status.reason)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_launcher_names_the_rank_whose_loss_does_not_use_every_parameter(tmp_path: Path, rank: int) -> None:
    # The next collective operation after the step is the exchange of the losses for a log line.
    faults = ("--set", "fault=unused", "--set", f"faulty_rank={rank}", "--set", "at=3", "--set", "log_every=3 steps")
    running = run_fork(tmp_path, *COMMAND, *faults)
    assert running.wait() == 2
    arrived = rf"paceline: rank {rank} did not arrive at 'classifier: gradients' \(step 2, operation \d+\): "
    assert re.search(rf"{arrived}the loss on rank {rank} did not use 8\.factor; ", running.stderr)


def test_a_parameter_that_all_ranks_leave_out_in_one_step_is_reported_in_one_line(tmp_path: Path) -> None:
    faults = ("--set", "fault=unused", "--set", "faulty_rank=-2", "--set", "at=3")
    once = start_fork(tmp_path, *COMMAND, *faults)
    # The first micro-batch of the second step is the third call; its last micro-batch is the fourth.
    last = start_fork(tmp_path, *COMMAND[:-1], "accumulated", *faults[:-1], "at=4", "--accumulate", "2")
    in_trainer = start_fork(tmp_path, *COMMAND[:-1], "trainer", *faults, "--strategy", "lightning")
    for running in (once, last, in_trainer):
        assert running.wait() == 2
        error = r"paceline: phase 'classifier': in the previous step, the loss.* on rank \d did not use every parameter"
        assert re.match(error, running.stderr) and running.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_launcher_names_a_rank_that_hangs_in_start_up_and_prints_its_stack(tmp_path: Path, rank: int) -> None:
    running = start_fork(tmp_path, *COMMAND, "--set", "fault=hang", "--set", f"faulty_rank={rank}")
    workers = wait_for_workers(running)
    assert running.wait() == 2
    assert f"paceline: rank {rank} did not arrive at 'start-up: wrap the networks'" in running.stderr
    assert f"the stacks of rank {rank}:" in running.stderr and "faulty.py" in running.stderr
    assert "Traceback" not in running.stderr and "logs/" not in running.stderr
    wait_until(lambda: all(map(has_ended, workers.values())))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_the_launcher_names_the_rank_that_skips_a_collective_operation(tmp_path: Path, rank: int) -> None:
    running = run_fork(tmp_path, *COMMAND, "--set", "fault=skip", "--set", f"faulty_rank={rank}")
    assert running.wait() == 2
    assert f"rank {rank} did not arrive at 'classifier: BatchNorm' (step 19" in running.stderr


@pytest.mark.slow
def test_ranks_without_a_launcher_name_the_one_that_is_stopped(tmp_path: Path) -> None:
    ranks = start_ranks(tmp_path, 2, *COMMAND, "--set", "fault=stop", "--set", "faulty_rank=1", "--strategy", "ddp")
    try:
        assert ranks[0].wait() == 2
        assert "rank 1 did not arrive: rank 1 does not answer" in ranks[0].stderr
        assert "most recent call first" in log_of(tmp_path, 0)
    finally:
        ranks[1].kill(signal.SIGKILL)


def test_a_hang_in_a_single_process_writes_its_stack(tmp_path: Path, tiny: str) -> None:
    holds = Holds(tmp_path / "holds")
    holds.hold("loss", after=1)  # nothing is written to the disk before
    words = ("train", tiny, "--accelerator", "cpu", "--timeout", "1", *holds.settings, "--out", "run")
    running = run_fork(tmp_path, *words)
    assert running.wait() == 2
    assert "no progress for " in running.stderr and "logs/rank-0.txt" in running.stderr
    assert "in classifier_loss" in log_of(tmp_path, 0)
