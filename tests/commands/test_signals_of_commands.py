"""A signal that ends a command leaves no temporary files and no processes, and is reported in one line."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import time
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import pytest
from holds import Holds
from running import Running, has_ended, start_function_in_ranks, wait_until, workers_of

from paceline.cli import start
from paceline.cli.start import main
from paceline.core.files import replacing

SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "stopped by SIGTERM", signal.SIGUSR1: "stopped by SIGUSR1"}


def run_as_command(arguments: list[str]) -> None:
    """Run the entry point of `paceline` with a temporary folder of its own."""
    tempfile.tempdir = str(Path("temporary").absolute())
    Path(tempfile.tempdir).mkdir()
    sys.argv = ["paceline", *arguments]
    main()


def start_verify(folder: Path, tiny: str, devices: int, holds: Holds) -> Running:
    words = ["verify", tiny, "--devices", str(devices), "--accelerator", "cpu", *holds.settings]
    (running,) = start_function_in_ranks(folder, 1, run_as_command, words)
    return running


@pytest.mark.parametrize("number", SIGNALS)
def test_a_command_that_a_signal_stops_removes_its_temporary_files(
    tmp_path: Path, tiny: str, number: signal.Signals
) -> None:
    holds = Holds(tmp_path / "holds")
    holds.hold("loss")
    running = start_verify(tmp_path, tiny, 1, holds)
    holds.wait_for("loss", running)
    assert list((tmp_path / "temporary").iterdir())
    running.kill(number)
    assert running.wait() == 128 + number
    assert running.stderr == f"paceline: {SIGNALS[number]}\n"
    assert not list((tmp_path / "temporary").iterdir())


def test_a_signal_that_stops_the_workers_of_a_command_is_not_reported_as_a_user_error(
    tmp_path: Path, tiny: str
) -> None:
    holds = Holds(tmp_path / "holds")
    running = start_verify(tmp_path, tiny, 2, holds)
    wait_until(lambda: len(workers_of(running.pid)) == 2, running)
    workers = workers_of(running.pid).values()
    running.kill(signal.SIGTERM)
    assert running.wait() == 128 + signal.SIGTERM
    assert "user error" not in running.stderr and "exit code" not in running.stderr, running.stderr
    assert not list((tmp_path / "temporary").iterdir())
    wait_until(lambda: all(map(has_ended, workers)))


def wait_outside_python() -> None:
    """Wait in C code without returning to Python when a signal arrives."""
    start.PATIENCE_SECONDS = 0.1
    start.handle_interrupts()
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    Path("waits").touch()
    library.pthread_mutex_lock(mutex)


def test_a_command_that_hangs_outside_python_ends_some_seconds_after_sigterm(tmp_path: Path) -> None:
    (running,) = start_function_in_ranks(tmp_path, 1, wait_outside_python)
    wait_until(lambda: (tmp_path / "waits").exists(), running)
    running.kill(signal.SIGTERM)
    assert running.wait() == 143


def wait_in_a_child() -> int:
    """Return the exit code of a forked process that receives SIGTERM."""
    start.handle_interrupts()
    child = get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    assert child.pid
    os.kill(child.pid, signal.SIGTERM)
    child.join()
    time.sleep(start.PATIENCE_SECONDS / 10)  # the signal of the child does not end this process
    return -(child.exitcode or 0)


def test_a_forked_process_of_a_command_ends_at_once_on_sigterm(tmp_path: Path) -> None:
    (running,) = start_function_in_ranks(tmp_path, 1, wait_in_a_child)
    assert running.wait() == signal.SIGTERM
    assert not running.stderr


def import_a_module_that_is_stopped() -> None:
    """Receive SIGTERM while a module is imported, with an unfinished file."""
    start.handle_interrupts()
    Path("stopped_module.py").write_text("import os, signal\n\nos.kill(os.getpid(), signal.SIGTERM)\n")
    sys.path.insert(0, os.getcwd())
    with replacing(Path("result")):
        import_module("stopped_module")


def test_a_command_that_is_stopped_while_it_imports_a_module_removes_its_unfinished_files(tmp_path: Path) -> None:
    (running,) = start_function_in_ranks(tmp_path, 1, import_a_module_that_is_stopped)
    assert running.wait() == 143
    assert not (tmp_path / "result").exists() and not list(tmp_path.glob(".*.writing"))
