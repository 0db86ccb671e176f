"""A task (a function for worker processes) runs in one process per device and determines the exit code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import task_functions
from running import start_function_in_ranks
from task_functions import end_with, note_sum, outer, raise_user_error
from warm_start import start_warm

from paceline.commands.configure import configure
from paceline.config.resolve import Config
from paceline.core.errors import UserError
from paceline.launch.tasks import Task, run_in_processes

TINY = str(Path(__file__).resolve().parent.parent / "tiny.py")
FLAGS = {"devices": "2", "strategy": "ddp", "accelerator": "cpu", "seed": "7"}


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Config:
    """Return settings for two CPU processes that can import the task functions."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    return configure(TINY, FLAGS)


def test_a_task_runs_in_every_process_with_its_arguments_and_settings(config: Config, tmp_path: Path) -> None:
    task = Task.of(note_sum, str(tmp_path), [1, 2, 3], word="it's $HOME")
    assert run_in_processes(task, config) == 0
    notes = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert notes == {f"rank-{rank}": "it's $HOME 6 of 0,1 7" for rank in (0, 1)}


def run_task(task: Task, devices: int) -> int:
    """Run a task in forked worker processes and return the exit code."""
    start_warm()
    try:
        return run_in_processes(task, configure(TINY, FLAGS | {"devices": str(devices)}))
    except UserError as error:
        print(f"UserError: {error}")
        return 2


def test_the_exit_code_of_a_task_is_returned(tmp_path: Path) -> None:
    (launcher,) = start_function_in_ranks(tmp_path, 1, run_task, Task.of(end_with, 3), 1)
    assert launcher.wait() == 3
    assert "ended with exit code 3" in launcher.stderr


def test_a_user_error_in_one_process_is_reported_once(tmp_path: Path) -> None:
    (launcher,) = start_function_in_ranks(tmp_path, 1, run_task, Task.of(raise_user_error, 1), 2)
    assert launcher.wait() == 2
    assert re.fullmatch(r"UserError: --data \d+: is of no use; give another", launcher.stdout.splitlines()[-1])
    assert "Traceback" not in launcher.stderr


def test_a_task_with_an_unknown_function_fails(config: Config, tmp_path: Path) -> None:
    unknown = Task(task_functions.__name__, "nothing", "[[], {}]")
    with pytest.raises(LookupError, match=r"task_functions\.nothing: no such function"):
        unknown.run(config)
    (launcher,) = start_function_in_ranks(tmp_path, 1, run_task, unknown, 1)
    assert launcher.wait() == 1
    assert "LookupError: task_functions.nothing: no such function" in launcher.stderr


def test_a_function_that_other_processes_cannot_import_is_rejected_as_a_task() -> None:
    function: Any = outer()
    with pytest.raises(ValueError, match=r"outer\.<locals>\.inner: a task must be a function that other processes can"):
        Task.of(function)


def test_a_user_error_without_a_launcher_is_printed_and_exits_with_code_2(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.config.files import to_toml
    from paceline.launch import worker

    file = tmp_path / "config.toml"
    file.write_text(to_toml(config.with_run(devices=1).values(), {}))
    task = Task.of(raise_user_error, 0)
    monkeypatch.setattr("sys.argv", ["worker", *task, TINY, str(file)])
    assert worker.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--data ") and line.endswith("give another")
