"""A run that receives a stop signal finishes its step and saves a checkpoint, and can be resumed exactly."""

from __future__ import annotations

import os
import pty
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from holds import Holds
from running import (
    TIMEOUT_SECONDS,
    Running,
    has_ended,
    run_fork,
    run_ranks,
    start_command,
    start_fork,
    start_function_in_ranks,
    start_ranks,
    wait_for_workers,
    wait_until,
    weights_of,
)

from paceline.parallel.group import Place
from paceline.parallel.world import World
from paceline.runs.checkpoint import Checkpoints
from paceline.runs.status import Status
from paceline.training import stop as stop_module
from paceline.training.stop import StopRequest, StopVote

RARELY = ("--set", "log_every=1000 steps", "--set", "save_every=1000 steps", "--set", "holds=holds")
STEPS_BEFORE_STOP = 4  # of 30. Two processes check for a stop request after steps 1, 3 and 7.
ANSWER = "saving a checkpoint after this step; press Ctrl-C again to stop now, without saving"


def tensors(run: Path) -> dict[str, bytes]:
    return {name: content for name, content in weights_of(run).items() if name.endswith(".safetensors")}


@pytest.fixture
def holds(tmp_path: Path) -> Holds:
    """Hold every run in its fifth step."""
    holds = Holds(tmp_path / "holds")
    holds.hold("loss", after=STEPS_BEFORE_STOP)
    return holds


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny: str) -> Callable[[str, int], dict[str, bytes]]:
    """A function that returns the final tensors of a run without interruptions."""
    folder = tmp_path_factory.mktemp("whole")

    def train(strategy: str, size: int) -> dict[str, bytes]:
        run = folder / f"{strategy}-{size}"
        if not run.exists():
            words = ("train", tiny, *RARELY, "--strategy", strategy, "--out", run.name)
            assert run_ranks(folder, size, *words) == [0] * size
        return tensors(run)

    return train


def stop(holds: Holds, running: Running, number: int, num_ranks: int = 1) -> None:
    """Send a signal to a run that is held in a step, and let the run continue."""
    holds.wait_for("loss", running, num_ranks)
    running.interrupt_group(number)
    if number in (signal.SIGINT, signal.SIGTERM) and num_ranks > 1:  # the launcher may have to forward the signal
        wait_until(lambda: "saving a checkpoint after this step" in running.stdout, running)
    holds.release("loss")


def assert_stopped(run: Path) -> None:
    """Check that the run saved its last step and did not reach its end."""
    status = Status.of(run)
    assert status and status.state == "stopped"
    (saved,) = Checkpoints(run / "checkpoints").all()
    assert 16 * STEPS_BEFORE_STOP < saved < 480


@pytest.mark.parametrize(
    ("strategy", "number", "code"),
    [
        ("single", signal.SIGINT, 130),
        ("single", signal.SIGUSR1, 75),
        pytest.param("single", signal.SIGTERM, 75, marks=pytest.mark.slow),
        pytest.param("lightning", signal.SIGINT, 130, marks=pytest.mark.slow),
        ("lightning", signal.SIGTERM, 75),
    ],
)
def test_a_single_process_saves_on_a_stop_signal_and_resumes(
    tmp_path: Path,
    tiny: str,
    holds: Holds,
    whole: Callable[[str, int], dict[str, bytes]],
    strategy: str,
    number: int,
    code: int,
) -> None:
    command = ("train", tiny, *RARELY, "--strategy", strategy, "--out", "run")
    running = start_fork(tmp_path, *command)
    stop(holds, running, number)
    assert running.wait() == code and running.stderr == ""
    assert "images and saved; run the same command again to resume" in running.stdout
    assert_stopped(tmp_path / "run")
    again = run_fork(tmp_path, *command)
    assert again.wait() == 0 and "resuming from" in again.stdout
    assert tensors(tmp_path / "run") == whole(strategy, 1)


def stop_before_the_first_step(*arguments: str) -> int:
    """Run a command in which SIGTERM arrives when Lightning's Trainer asks for the first batch."""
    from paceline.cli.app import run
    from paceline.parallel.strategies.lightning import Steps

    iterate = Steps.__iter__

    def stop_and_iterate(steps: Steps) -> Iterator[Any]:
        signal.raise_signal(signal.SIGTERM)
        return iterate(steps)

    Steps.__iter__ = stop_and_iterate  # type: ignore[method-assign]
    return run(list(arguments))


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_lightning_saves_if_a_stop_signal_arrives_before_its_first_step(tmp_path: Path, tiny: str, size: int) -> None:
    command = ("train", tiny, "--devices", str(size), "--strategy", "lightning", "--out", "run")
    ranks = start_function_in_ranks(tmp_path, size, stop_before_the_first_step, *command)
    assert [rank.wait() for rank in ranks] == [75] * size
    assert "stopped at 16 images and saved; run the same command again to resume" in ranks[0].stdout
    assert Checkpoints(tmp_path / "run" / "checkpoints").all() == [16]


@pytest.mark.parametrize(
    ("strategy", "number", "code"),
    [("ddp", signal.SIGINT, 130), pytest.param("lightning", signal.SIGTERM, 75, marks=pytest.mark.slow)],
)
def test_two_processes_save_on_a_stop_signal_and_resume(
    tmp_path: Path,
    tiny: str,
    holds: Holds,
    whole: Callable[[str, int], dict[str, bytes]],
    strategy: str,
    number: int,
    code: int,
) -> None:
    run = tmp_path / "run"
    command = ("train", tiny, *RARELY, "--devices", "2", "--strategy", strategy, "--out", str(run))
    running = start_fork(tmp_path, *command)
    workers = wait_for_workers(running)
    stop(holds, running, number, num_ranks=2)
    assert running.wait() == code and running.stderr == ""
    assert "images and saved; run the same command again to resume" in running.stdout
    wait_until(lambda: all(map(has_ended, workers.values())))
    assert_stopped(run)
    assert run_ranks(tmp_path, 2, *command) == [0, 0]
    assert tensors(run) == whole(strategy, 2)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("lightning", marks=pytest.mark.slow)])
def test_a_stop_signal_to_one_rank_stops_all_ranks(
    tmp_path: Path, tiny: str, holds: Holds, whole: Callable[[str, int], dict[str, bytes]], strategy: str
) -> None:
    """A scheduler may send the signal to a single process, without a launcher that forwards it."""
    command = ("train", tiny, *RARELY, "--devices", "2", "--strategy", strategy, "--out", "run")
    ranks = start_ranks(tmp_path, 2, *command)
    holds.wait_for("loss", ranks[0], num_ranks=2)
    ranks[1].kill(signal.SIGTERM)
    holds.release("loss")
    assert [rank.wait() for rank in ranks] == [75, 75]
    assert_stopped(tmp_path / "run")
    assert run_ranks(tmp_path, 2, *command) == [0, 0]
    assert tensors(tmp_path / "run") == whole(strategy, 2)


def wait_until_a_second_request_counts(running: Running) -> None:
    """Wait until the run has answered the first Ctrl-C, and for the time in which a second one is the same request."""
    wait_until(lambda: ANSWER in running.stdout, running)
    time.sleep(1.2 * stop_module.SECOND_REQUEST_AFTER_SECONDS)


@pytest.mark.parametrize(("strategy", "size"), [("single", 1), ("ddp", 2), ("lightning", 1)])
def test_a_second_interrupt_ends_all_processes_immediately(
    tmp_path: Path, tiny: str, holds: Holds, strategy: str, size: int
) -> None:
    run = tmp_path / "run"
    command = ("train", tiny, *RARELY, "--strategy", strategy, "--devices", str(size), "--out", str(run))
    running = start_fork(tmp_path, *command)
    workers = wait_for_workers(running) if size > 1 else {}
    holds.wait_for("loss", running, num_ranks=size)
    running.interrupt_group()
    wait_until_a_second_request_counts(running)
    assert not running.ended
    running.interrupt_group()
    assert running.wait() == 130, "the step is still held"
    assert running.stdout.count(ANSWER) == 1, "only rank 0 answers"
    assert running.stderr == "paceline: interrupted\n" if size == 1 else "Traceback" not in running.stderr
    wait_until(lambda: all(map(has_ended, workers.values())))
    status = Status.of(run)
    assert status and (status.state, status.reason) == ("stopped", "a second Ctrl-C stopped the run immediately")


CATCHES_EVERYTHING = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    sum(range(1000))
except BaseException:
    pass
"""


def test_an_interrupt_during_an_import_that_catches_every_exception_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CATCHES_EVERYTHING)
    running = start_command(tmp_path, "train", "./own.py")
    assert running.wait() == 130
    assert running.stderr == "paceline: interrupted\n"


INTERRUPTS_AN_IMPORT = """
import os, signal, sys

class Finder:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == os.environ["INTERRUPTED_IMPORT"]:
            os.kill(os.getpid(), signal.SIGINT)
            sum(range(1000))

sys.meta_path.insert(0, Finder)
"""


def add_import_finder(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let every Python process run code that adds an import finder when it starts."""
    (folder / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.parametrize("module", ["paceline.cli.app", pytest.param("typer", marks=pytest.mark.slow)])
def test_an_interrupt_while_the_command_line_is_imported_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    add_import_finder(tmp_path, monkeypatch, INTERRUPTS_AN_IMPORT)
    monkeypatch.setenv("INTERRUPTED_IMPORT", module)
    running = start_command(tmp_path, "--version")
    assert running.wait() == 130
    assert running.stdout == "" and running.stderr == "paceline: interrupted\n"


HOLDS_TORCH_IN_WORKERS = """
import os, sys, time

class Finder:
    @staticmethod
    def find_spec(name, path, target=None):
        while name == "torch" and "RANK" in os.environ and os.path.exists("startup"):
            time.sleep(0.01)

sys.meta_path.insert(0, Finder)
"""


def test_an_interrupt_while_two_processes_load_torch_is_reported_in_one_line(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "startup").touch()  # the workers do not get further than the import of torch
    add_import_finder(tmp_path, monkeypatch, HOLDS_TORCH_IN_WORKERS)
    running = start_command(tmp_path, "train", tiny, "--devices", "2", "--accelerator", "cpu", "--out", "run")
    wait_for_workers(running)
    running.interrupt_group()
    assert running.wait() == 130
    assert running.stderr == "stopped before training began\n"


WAITS_IN_WORKERS = """
import os, time
while "RANK" in os.environ and os.path.exists("startup"):
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_during_startup_ends_all_processes(tmp_path: Path, tiny: str, number: int, code: int) -> None:
    (tmp_path / "startup").touch()  # the workers do not get further than the import of their recipe
    (tmp_path / "waits.py").write_text(Path(tiny).read_text() + WAITS_IN_WORKERS)
    running = start_command(tmp_path, "train", "./waits.py", "--devices", "2", "--out", str(tmp_path / "run"))
    workers = wait_for_workers(running)
    running.interrupt_group(number)
    assert running.wait() == code, "nothing was saved"
    assert "Traceback" not in running.stderr, running.stderr
    wait_until(lambda: all(map(has_ended, workers.values())))


def shown(terminal: int) -> bool:
    """Read a terminal's output, so that the program does not block on writing."""
    with suppress(BlockingIOError):
        os.read(terminal, 65536)
    return True


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_saves_and_stops_when_its_terminal_is_closed(
    tmp_path: Path, tiny: str, holds: Holds, devices: int
) -> None:
    command = ("train", tiny, *RARELY, "--devices", str(devices), "--out", "run")
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, "-m", "paceline", *command])
    os.set_blocking(terminal, False)
    wait_until(lambda: shown(terminal) and holds.num_held("loss") == devices)
    os.close(terminal)
    log = tmp_path / "run" / "logs" / "rank-0.txt"
    wait_until(lambda: "received SIGHUP: saving a checkpoint after this step" in log.read_text())
    holds.release("loss")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75
    assert_stopped(tmp_path / "run")


def test_signal_handlers_are_restored_after_a_run_and_nohup_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_module, "SECOND_REQUEST_AFTER_SECONDS", TIMEOUT_SECONDS)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    before = [signal.getsignal(number) for number in stop_module.SIGNALS]
    request = StopRequest()
    with request.listening():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)  # so soon after the first signal, this counts as the same request
    assert request.signal == signal.SIGTERM and request.exit_code == 75
    assert [signal.getsignal(number) for number in stop_module.SIGNALS] == before
    signal.signal(signal.SIGHUP, hangup)


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
