"""Run a `paceline` command in a child process that logs to a file and stops cleanly when this process is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from paceline.core.files import open_append
from paceline.core.heartbeat import die_with_parent
from paceline.core.trust import trusts_files
from paceline.core.types import SettingValue
from paceline.training.stop import leave_terminal, signals_to_handle

MAX_REASON_LENGTH = 400  # maximum length of a failure reason
POLL_SECONDS = 0.2


class Stopped(Exception):
    """Raised when the user has requested a stop and the command has exited."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def to_arguments(flags: Mapping[str, SettingValue], config_file: str, assignments: Iterable[str]) -> list[str]:
    """Return a run's settings as command-line arguments: --trust if given, flags, then --config, then --set."""
    arguments = ["--trust"] if trusts_files() else []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            arguments.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            arguments += [flag, str(value)]
    arguments += ["--config", config_file] if config_file else []
    return arguments + [word for one in assignments for word in ("--set", one)]


def run_paceline(arguments: Sequence[str], log: Path, on_poll: Callable[[], None] | None = None) -> int:
    """Run a command and write its output to `log`; return the exit code. Ctrl-C is forwarded to the command.

    `look` is called several times per second while the command runs.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(open_append(log, truncate=True), "wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "paceline", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # otherwise the command would receive a terminal's Ctrl-C twice
            preexec_fn=die_with_parent,
        )
        signals: list[int] = []

        def forward(number: int, frame: FrameType | None) -> None:
            signals.append(number)
            if number == signal.SIGHUP:
                leave_terminal()
            child.send_signal(number)

        here = threading.current_thread() is threading.main_thread()
        before = {n: signal.signal(n, forward) for n in signals_to_handle()} if here else {}
        try:
            while child.poll() is None:
                if on_poll:
                    on_poll()
                time.sleep(POLL_SECONDS)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
    if signals:
        raise Stopped(signals[0])
    return child.returncode


def failure_reason(log: Path) -> str:
    """Return why a command failed, from its log: the last user error, or else the last line."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("paceline: ")]
    reason = errors[-1].removeprefix("paceline: ") if errors else (lines[-1] if lines else "it printed nothing")
    return reason[-MAX_REASON_LENGTH:]
