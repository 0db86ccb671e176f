"""A run survives being suspended for longer than its timeout."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from holds import Holds
from running import start_fork, start_function_in_ranks, wait_until, workers_of

from paceline.launch.agent import AwakeClock


def watch_silent_child(folder: str, is_suspended: bool) -> int:
    """Start a process that reports progress once, and watch it; return its exit code, or 0 if it is still alive.

    With `is_suspended`, this process suspends itself, and the watch ends with the first look at the child afterwards.
    """
    from paceline.launch.agent import Watchdog
    from paceline.launch.mailbox import Mailbox

    child = subprocess.Popen(["sleep", "100"])
    Path(folder, f"process-{child.pid}").write_text("1")
    watchdog, polled = Watchdog(Mailbox(Path(folder)), lambda: 1, timeout=3.0, join_timeout=60.0), threading.Event()
    poll = watchdog._poll

    def suspended_poll() -> None:
        poll()
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)  # all threads stop within this time
        poll()
        polled.set()
        watchdog.stop()

    if is_suspended:
        watchdog._poll = suspended_poll  # type: ignore[method-assign]
    watchdog.start()
    wait_until(lambda: child.poll() is not None or polled.is_set())
    code = child.poll() or 0
    child.kill()
    return code


def test_the_time_of_a_suspended_launcher_does_not_count(tmp_path: Path) -> None:
    (launcher,) = start_function_in_ranks(tmp_path, 1, watch_silent_child, str(tmp_path), True)
    state = Path(f"/proc/{launcher.pid}/stat")
    wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", launcher)
    time.sleep(4)
    launcher.kill(signal.SIGCONT)
    assert launcher.wait() == 0, launcher.stderr


def test_a_worker_without_progress_is_still_killed(tmp_path: Path) -> None:
    (launcher,) = start_function_in_ranks(tmp_path, 1, watch_silent_child, str(tmp_path), False)
    assert launcher.wait() == 256 - signal.SIGKILL
    assert "no progress for 3 s (--timeout 3)" in launcher.stderr


def watch_child_and_never_exit(folder: str, user_error: str) -> int:
    """Watch a child that reports nothing, with a reason for its failure, and ignore its end."""
    from paceline.launch import agent
    from paceline.launch.mailbox import USER_ERROR, Mailbox

    agent.END_SECONDS = 0.5
    mailbox = Mailbox(Path(folder))
    mailbox.keep_diagnosis("rank 0 waits for the moon")
    if user_error:
        Path(folder, USER_ERROR).write_text(user_error)
    with subprocess.Popen(["sleep", "100"]) as child:
        Path(folder, f"process-{child.pid}").write_text("1")
        agent.Watchdog(mailbox, lambda: 0, timeout=1.0, join_timeout=60.0).start()
        time.sleep(100)
    return 0


@pytest.mark.parametrize(
    ("user_error", "reason"),
    [("", "rank 0 waits for the moon"), ("--out x: the disk is full", "--out x: the disk is full")],
)
def test_a_launcher_that_does_not_exit_reports_the_reason_before_it_is_killed(
    tmp_path: Path, user_error: str, reason: str
) -> None:
    (launcher,) = start_function_in_ranks(tmp_path, 1, watch_child_and_never_exit, str(tmp_path), user_error)
    assert launcher.wait() == -signal.SIGKILL
    assert launcher.stderr.splitlines()[-2:] == [
        f"paceline: {reason}",
        "the launcher did not exit in time; killing it",
    ]


@pytest.mark.slow
def test_a_suspended_launcher_does_not_take_its_workers_for_hung(tmp_path: Path, tiny: str) -> None:
    holds = Holds(tmp_path / "holds")
    holds.hold("loss", after=5)  # the run cannot end before it is suspended
    words = ("--devices", "2", "--accelerator", "cpu", "--timeout", "3", "--images", "320", "--out", "run")
    running = start_fork(tmp_path, "train", tiny, *words, *holds.settings)
    holds.wait_for("loss", running, num_ranks=2)
    processes = [running.pid, *workers_of(running.pid).values()]
    assert len(processes) == 3
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    time.sleep(4)
    for process in processes:  # the launcher first, so that it looks at its workers before they report progress
        os.kill(process, signal.SIGCONT)
        time.sleep(0.3)
    holds.release("loss")
    assert running.wait() == 0, running.stderr
    assert "no progress" not in running.stderr


def test_a_clock_counts_only_the_time_between_regular_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock, read = AwakeClock(longest_interval=1.0), []
    for interval in (0.25, 0.5, 3600.0, 0.25):
        now += interval
        read.append(clock.read())
    assert read == [0.25, 0.75, 1.75, 2.0]
