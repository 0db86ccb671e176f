"""A run survives being suspended for longer than its timeout, and workers and launchers that hang are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from holds import Holds
from running import start_fork, workers_of

from paceline.core.watch import Silence
from paceline.launch import agent
from paceline.launch.agent import LONGEST_POLL_SECONDS, Watchdog
from paceline.launch.mailbox import USER_ERROR, Mailbox


class Clock:
    """The time that the watchdog reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def poll(self, watchdog: Watchdog, seconds: float) -> None:
        """Let the watchdog look at its workers at regular intervals for this long."""
        for _ in range(round(seconds / LONGEST_POLL_SECONDS)):
            self.now += LONGEST_POLL_SECONDS
            watchdog._poll()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that reported progress once."""
    with subprocess.Popen(["sleep", "100"]) as child:
        (tmp_path / f"process-{child.pid}").write_text("1")
        yield child
        child.kill()


def test_a_silence_counts_only_the_time_between_regular_looks(clock: Clock) -> None:
    silence, seconds = Silence(longest_interval=1.0), []
    for interval, is_silent in ((0.25, True), (0.5, True), (3600.0, True), (0.25, False), (0.5, True)):
        clock.now += interval
        seconds.append(silence.add(is_silent))
    assert seconds == [0.25, 0.75, 1.75, 0.0, 0.5]


def test_a_silent_worker_is_killed_and_the_time_of_a_suspended_launcher_does_not_count(
    tmp_path: Path, clock: Clock, child: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    watchdog = Watchdog(Mailbox(tmp_path), lambda: 1, timeout=3.0, join_timeout=60.0)
    clock.poll(watchdog, seconds=1)
    clock.now += 3600
    watchdog._poll()
    assert child.poll() is None and not capsys.readouterr().err
    clock.poll(watchdog, seconds=4)
    assert child.wait(60) == -signal.SIGKILL
    assert "no progress for 4 s (--timeout 3); examining" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("user_error", "reason"),
    [("", "rank 0 waits for the moon"), ("--out x: the disk is full", "--out x: the disk is full")],
)
def test_a_launcher_that_does_not_exit_reports_the_reason_before_it_is_killed(
    tmp_path: Path,
    clock: Clock,
    child: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    user_error: str,
    reason: str,
) -> None:
    mailbox = Mailbox(tmp_path)
    mailbox.keep_diagnosis("rank 0 waits for the moon")
    if user_error:
        (tmp_path / USER_ERROR).write_text(user_error)
    watchdog, killed = Watchdog(mailbox, lambda: 0, timeout=3.0, join_timeout=60.0), []
    clock.poll(watchdog, seconds=6)
    assert child.wait(60) == -signal.SIGKILL
    monkeypatch.setattr(os, "kill", lambda process, number: killed.append((process, number)))
    clock.poll(watchdog, seconds=agent.END_SECONDS + 1)
    assert killed[0] == (os.getpid(), signal.SIGKILL)
    assert capsys.readouterr().err.splitlines()[1:3] == [
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
