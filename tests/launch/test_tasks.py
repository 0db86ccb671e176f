"""A task (a function for worker processes) runs in one process per device and determines the exit code."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import task_functions
from task_functions import end_with, interrupt_one, note_sum, outer, raise_user_error

from paceline.commands.configure import configure
from paceline.config.files import to_toml
from paceline.config.resolve import Config
from paceline.launch import worker
from paceline.launch.tasks import Task, run_in_processes

TINY = str(Path(__file__).resolve().parent.parent / "tiny.py")


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return settings for two CPU processes that can import the task functions."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    flags = {"devices": "2", "strategy": "ddp", "accelerator": "cpu", "seed": "7"}
    return configure(TINY, flags)


def test_a_task_runs_in_every_process_with_its_arguments_and_settings(config: Config, tmp_path: Path) -> None:
    task = Task.of(note_sum, str(tmp_path), [1, 2, 3], word="it's $HOME")
    assert run_in_processes(task, config) == 0
    notes = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert notes == {f"rank-{rank}": "it's $HOME 6 of 0,1 7" for rank in (0, 1)}


def test_the_exit_code_of_a_task_is_returned(config: Config, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_in_processes(Task.of(end_with, 3), config.with_run(devices=1)) == 3
    assert "ended with exit code 3" in capfd.readouterr().err


def test_an_interrupted_process_ends_the_others(
    config: Config, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_in_processes(Task.of(interrupt_one, str(tmp_path)), config) == 130
    assert capfd.readouterr().err == "interrupted\n"
    assert not any(tmp_path.iterdir())


def test_a_function_that_other_processes_cannot_import_is_rejected_as_a_task() -> None:
    function: Any = outer()
    with pytest.raises(ValueError, match=r"outer\.<locals>\.inner: a task must be a function that other processes can"):
        Task.of(function)


@pytest.fixture
def start_worker(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Task], int]:
    """Return a function that runs a task in this process, without a launcher."""
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config.with_run(devices=1).values(), {}))

    def start(task: Task) -> int:
        monkeypatch.setattr("sys.argv", ["worker", *task, TINY, str(file)])
        return worker.main()

    return start


UNKNOWN = Task(task_functions.__name__, "nothing", "[[], {}]")


def test_a_failed_worker_without_a_launcher_prints_the_reason(
    start_worker: Callable[[Task], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert start_worker(Task.of(raise_user_error, 0)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--data ") and line.endswith("give another")
    assert start_worker(UNKNOWN) == 1
    assert "LookupError: task_functions.nothing: no such function" in capsys.readouterr().err


def test_an_interrupt_while_a_failed_worker_waits_for_the_reason_prints_no_traceback(
    start_worker: Callable[[Task], int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "user_error_was_reported", lambda: signal.raise_signal(signal.SIGINT))
    if (process := os.fork()) == 0:
        try:
            start_worker(UNKNOWN)
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == worker.INTERRUPTED
    assert "Traceback" not in capfd.readouterr().err
