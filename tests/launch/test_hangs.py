"""A rank that is slow, stopped, or skips a collective operation is named, and every rank's stack is in logs/."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from holds import Holds
from running import Running, has_ended, run_fork, start_fork, start_ranks, wait_for_workers, wait_until

from paceline.runs.status import Status

FAULTY = str(Path(__file__).parents[1] / "faulty.py")
COMMAND = ("train", FAULTY, "--accelerator", "cpu", "--devices", "2", "--timeout", "6", "--out", "run")


def log_of(folder: Path, rank: int) -> str:
    return (folder / "run" / "logs" / f"rank-{rank}.txt").read_text()


@pytest.mark.slow
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


LAST_STEP = ("fault=stop", "at=10", "evaluate_every=never", "images=160")
# The next collective operation after the step is the exchange of the losses for a log line.
UNUSED = ("fault=unused", "at=3", "log_every=3 steps")
FAULTS: dict[str, tuple[str, ...]] = {
    "stop": (*LAST_STEP, "faulty_rank=1"),
    "kill": ("fault=kill", "at=3"),
    "error": ("fault=error", "at=3"),
    "exit": ("fault=exit", "at=3", "faulty_rank=1"),
    "unused": (*UNUSED, "faulty_rank=0"),
    "unused by all": ("fault=unused", "at=3", "faulty_rank=-2"),
}
SLOW_FAULTS: dict[str, tuple[str, ...]] = {
    "stop of rank 0": (*LAST_STEP, "faulty_rank=0"),
    "exit of both": ("fault=exit", "at=3", "faulty_rank=-2"),
    "unused by rank 1": (*UNUSED, "faulty_rank=1"),
    # The first micro-batch of the second step is the third call; its last micro-batch is the fourth.
    "unused in the last micro-batch": ("fault=unused", "at=4", "faulty_rank=-2", "accumulate=2"),
    "unused in the Trainer": ("fault=unused", "at=3", "faulty_rank=-2", "strategy=lightning"),
}
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Running]:
    """Return a run with a fault. The runs spend most of their time waiting, so those of FAULTS start together."""

    @cache
    def start(name: str) -> Running:
        settings = (word for one in (FAULTS | SLOW_FAULTS)[name] for word in ("--set", one))
        return start_fork(tmp_path_factory.mktemp("faulty"), *COMMAND, *settings)

    for name in FAULTS:
        start(name)
    return start


Faulty = Callable[[str], Running]


@pytest.mark.parametrize(("name", "rank"), [("stop", 1), pytest.param("stop of rank 0", 0, marks=SLOW)])
def test_a_rank_that_is_stopped_in_the_last_step_does_not_finish_the_run(faulty: Faulty, name: str, rank: int) -> None:
    running = faulty(name)
    assert running.wait() == 2
    assert f"paceline: rank {rank} did not arrive: rank {rank} is stopped" in running.stderr
    assert "Traceback" not in running.stderr
    assert all("most recent call first" in log_of(running.folder, rank) for rank in (0, 1))
    report = (running.folder / "run" / "logs" / "hang.txt").read_text()
    assert f"rank {rank} is stopped" in report and "(--timeout 6)" in report and "classifier: " in report
    status = Status.of(running.folder / "run")
    assert status and status.state == "failed" and f"rank {rank} did not arrive" in status.reason
    assert not list((running.folder / "run").glob("checkpoints/0*"))


def test_the_status_reports_the_rank_that_was_killed_and_the_signal(faulty: Faulty) -> None:
    running = faulty("kill")
    assert running.wait() == 1
    status = Status.of(running.folder / "run")
    assert status and status.state == "failed" and status.reason.startswith("rank 1 was killed by signal 9")
    assert "rank 1 was killed by signal 9; see run/logs/rank-1.txt for details" in running.stderr


def test_a_rank_that_is_ended_because_another_failed_does_not_print_that_it_saves(faulty: Faulty) -> None:
    running = faulty("error")
    assert running.wait() == 2
    assert running.stderr == "paceline: a sample is damaged\n"
    assert "SIGTERM" not in running.stdout and "SIGTERM" not in log_of(running.folder, 0)


@pytest.mark.parametrize(("name", "named"), [("exit", "1"), pytest.param("exit of both", r"\d", marks=SLOW)])
def test_the_launcher_names_a_rank_that_exits_with_code_0_before_the_end(faulty: Faulty, name: str, named: str) -> None:
    running = faulty(name)
    assert running.wait() == 2
    reason = rf"rank {named} ended with exit code 0 before the end of the run, after '.+' \(step [12], operation \d+\)"
    assert re.search(rf"^paceline: {reason}$", running.stderr, re.MULTILINE)
    status = Status.of(running.folder / "run")
    assert status and status.state == "failed" and re.fullmatch(reason, status.reason)


@pytest.mark.parametrize(("name", "rank"), [("unused", 0), pytest.param("unused by rank 1", 1, marks=SLOW)])
def test_the_launcher_names_the_rank_whose_loss_does_not_use_every_parameter(
    faulty: Faulty, name: str, rank: int
) -> None:
    running = faulty(name)
    assert running.wait() == 2
    arrived = rf"paceline: rank {rank} did not arrive at 'classifier: gradients' \(step 2, operation \d+\): "
    assert re.search(rf"{arrived}the loss on rank {rank} did not use 8\.factor; ", running.stderr)


@pytest.mark.parametrize(
    "name", ["unused by all", *(pytest.param(name, marks=SLOW) for name in list(SLOW_FAULTS)[-2:])]
)
def test_a_parameter_that_all_ranks_leave_out_in_one_step_is_reported_in_one_line(faulty: Faulty, name: str) -> None:
    running = faulty(name)
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
