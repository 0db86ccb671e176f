"""A run that receives a stop signal finishes its step and saves a checkpoint, and can be resumed exactly."""

from __future__ import annotations

import os
import pty
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from running import (
    Running,
    processes_naming,
    run_fork,
    run_ranks,
    start_command,
    start_fork,
    start_ranks,
    wait_until,
    weights_of,
    workers_of,
)

from paceline.parallel.world import Place, World
from paceline.runs.status import Status
from paceline.training.stop import StopRequest, StopVote

SLOWLY = ("--set", "pause=0.02", "--set", "log_every=1000 steps", "--set", "save_every=1000 steps")

ANSWER = "saving a checkpoint after this step; press Ctrl-C again to stop now, without saving"


def tensors(run: Path) -> dict[str, bytes]:
    return {name: content for name, content in weights_of(run).items() if name.endswith(".safetensors")}


def is_training(run: Path, seen: Path) -> bool:
    return seen.exists() and any(len(file.read_text().splitlines()) > 3 for file in seen.iterdir())


def stop(running: Running, folder: Path, name: str, number: int) -> float:
    """Send a signal to a training run; return the seconds until the run ended."""
    wait_until(lambda: is_training(folder / name, folder / f"{name}-seen"), running)
    began = time.monotonic()
    running.interrupt_group(number)
    running.wait()
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("strategy", "number", "code"),
    [
        ("single", signal.SIGINT, 130),
        ("single", signal.SIGTERM, 75),
        ("single", signal.SIGUSR1, 75),
        ("single", signal.SIGHUP, 75),
        pytest.param("lightning", signal.SIGINT, 130, marks=pytest.mark.slow),
        ("lightning", signal.SIGTERM, 75),
    ],
)
def test_a_single_process_saves_on_a_stop_signal_and_resumes(
    tmp_path: Path, tiny: str, strategy: str, number: int, code: int
) -> None:
    command = ("train", tiny, *SLOWLY, "--strategy", strategy, "--set", "record=run-seen")
    running = start_fork(tmp_path, *command, "--out", "run")
    assert stop(running, tmp_path, "run", number) < 20
    assert running.wait() == code and running.stderr == ""
    assert "images and saved; run the same command again to resume" in running.stdout
    again = run_fork(tmp_path, *command, "--out", "run")
    assert again.wait() == 0 and "resuming from" in again.stdout
    assert run_fork(tmp_path, *command, "--out", "whole").wait() == 0
    assert tensors(tmp_path / "run") == tensors(tmp_path / "whole")


@pytest.mark.parametrize(
    ("strategy", "number", "code"),
    [("ddp", signal.SIGINT, 130), pytest.param("lightning", signal.SIGTERM, 75, marks=pytest.mark.slow)],
)
def test_two_processes_save_on_a_stop_signal_and_resume(
    tmp_path: Path, tiny: str, strategy: str, number: int, code: int
) -> None:
    command = ("train", tiny, *SLOWLY, "--devices", "2", "--strategy", strategy, "--set", "record=run-seen")
    running = start_command(tmp_path, *command, "--out", str(tmp_path / "run"))
    assert stop(running, tmp_path, "run", number) < 20
    assert running.wait() == code and running.stderr == ""
    assert "images and saved; run the same command again to resume" in running.stdout
    wait_until(lambda: not processes_naming(str(tmp_path / "run")), seconds=5)
    assert run_ranks(tmp_path, 2, *command, "--out", str(tmp_path / "run")) == [0, 0]
    assert run_ranks(tmp_path, 2, *command, "--out", str(tmp_path / "whole")) == [0, 0]
    assert tensors(tmp_path / "run") == tensors(tmp_path / "whole")


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("lightning", marks=pytest.mark.slow)])
def test_a_stop_signal_to_one_rank_stops_all_ranks(tmp_path: Path, tiny: str, strategy: str) -> None:
    """A scheduler may send the signal to a single process, without a launcher that forwards it."""
    command = ("train", tiny, *SLOWLY, "--devices", "2", "--strategy", strategy, "--set", "record=run-seen")
    ranks = start_ranks(tmp_path, 2, *command, "--out", "run")
    assert stop(ranks[1], tmp_path, "run", signal.SIGTERM) < 20
    assert [rank.wait() for rank in ranks] == [75, 75]
    assert run_ranks(tmp_path, 2, *command, "--out", "run") == [0, 0]
    assert run_ranks(tmp_path, 2, *command, "--out", "whole") == [0, 0]
    assert tensors(tmp_path / "run") == tensors(tmp_path / "whole")


@pytest.mark.parametrize("strategy", ["single", "lightning"])
def test_a_second_interrupt_ends_a_single_process_immediately(tmp_path: Path, tiny: str, strategy: str) -> None:
    command = ("train", tiny, "--set", "pause=30", "--strategy", strategy, "--set", "record=seen", "--out", "run")
    running = start_fork(tmp_path, *command)
    wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists(), running)
    time.sleep(0.3)
    running.interrupt_group()
    wait_until(lambda: ANSWER in running.stdout, running, seconds=10)
    time.sleep(1.5)
    assert not running.ended
    running.interrupt_group()
    assert running.wait(10) == 130
    assert running.stderr == "paceline: interrupted\n"
    status = Status.of(tmp_path / "run")
    assert status and (status.state, status.reason) == ("stopped", "a second Ctrl-C stopped the run immediately")


def test_a_second_interrupt_ends_two_processes_immediately(tmp_path: Path, tiny: str) -> None:
    run = tmp_path / "run"
    running = start_command(tmp_path, "train", tiny, "--set", "pause=60", "--devices", "2", "--out", str(run))
    wait_until(lambda: (run / "metrics.jsonl").exists(), running)
    time.sleep(0.5)
    running.interrupt_group()
    wait_until(lambda: ANSWER in running.stdout, running, seconds=10)
    assert not running.ended
    running.interrupt_group()
    assert running.wait(10) == 130
    assert running.stdout.count(ANSWER) == 1, "only rank 0 answers"
    assert "Traceback" not in running.stderr
    wait_until(lambda: not processes_naming(str(run)), seconds=5)
    status = Status.of(run)
    assert status and (status.state, status.reason) == ("stopped", "a second Ctrl-C stopped the run immediately")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_during_startup_ends_all_processes(tmp_path: Path, tiny: str, number: int, code: int) -> None:
    running = start_command(tmp_path, "train", tiny, "--devices", "2", "--out", str(tmp_path / "run"))
    wait_until(lambda: len(workers_of(running.pid)) == 2, running)
    running.interrupt_group(number)
    assert running.wait() == code, "nothing was saved"
    assert "Traceback" not in running.stderr, running.stderr
    wait_until(lambda: not processes_naming(str(tmp_path / "run")), seconds=5)


def shown(terminal: int) -> bool:
    """Read a terminal's output, so that the program does not block on writing."""
    with suppress(BlockingIOError):
        os.read(terminal, 65536)
    return True


@pytest.mark.parametrize("devices", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_run_saves_and_stops_when_its_terminal_is_closed(tmp_path: Path, tiny: str, devices: str) -> None:
    command = ("train", tiny, *SLOWLY, "--devices", devices, "--set", "record=run-seen", "--out", "run")
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, "-m", "paceline", *command])
    os.set_blocking(terminal, False)
    wait_until(lambda: shown(terminal) and is_training(tmp_path / "run", tmp_path / "run-seen"))
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75
    status = Status.of(tmp_path / "run")
    assert status and status.state == "stopped"
    assert weights_of(tmp_path / "run")


def test_a_run_started_with_nohup_ignores_a_hangup(tmp_path: Path, tiny: str) -> None:
    command = ("train", tiny, *SLOWLY, "--set", "record=run-seen", "--out", str(tmp_path / "run"))
    running = start_command(tmp_path, *command, before=("nohup",))
    assert stop(running, tmp_path, "run", signal.SIGHUP) > 0
    assert running.wait() == 0


def test_signal_handlers_are_restored_after_a_run() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    request = StopRequest()
    with request.listening():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)  # so soon after the first signal, this counts as the same request
    assert request.signal == signal.SIGTERM and request.exit_code == 75
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before


def test_all_ranks_check_for_a_stop_request_at_the_same_steps_and_not_too_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, looks = [0.0], []

    class OneOfTwo(World):
        def gather(self, vector: torch.Tensor) -> torch.Tensor:
            looks.append(clock[0])
            return torch.stack([vector, vector])

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    request = StopRequest()
    vote = StopVote(OneOfTwo(Place(0, 2), torch.device("cpu")), request)
    for _ in range(1000):
        clock[0] += 0.05
        assert not vote()
    assert 20 <= len(looks) <= 35, "about every two seconds"
    request.signal = signal.SIGTERM
    answers = [vote() for _ in range(60)]
    assert answers.count(True) >= 1
