"""A `paceline` command in a process of its own: its arguments, its log, and an orderly end when this one is stopped."""

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

from paceline.core.heartbeat import die_with_parent
from paceline.core.types import SettingValue

MAX_REASON_LENGTH = 400  # characters
POLL_SECONDS = 0.2


class Stopped(Exception):
    """Raised when the user asked to stop and the command has ended in order."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def to_arguments(flags: Mapping[str, SettingValue], config_file: str, assignments: Iterable[str]) -> list[str]:
    """Return the settings of a run as arguments of a command, in the order of the command line's layers."""
    arguments = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            arguments.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            arguments += [flag, str(value)]
    arguments += ["--config", config_file] if config_file else []
    return arguments + [word for one in assignments for word in ("--set", one)]


def run_paceline(arguments: Sequence[str], log: Path, on_poll: Callable[[], None] | None = None) -> int:
    """Run the command to its end with its output in `log`; return the exit code. Ctrl-C reaches it once."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "paceline", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # else a terminal's Ctrl-C reaches it twice
            preexec_fn=die_with_parent,
        )
        signals: list[int] = []

        def forward(number: int, frame: FrameType | None) -> None:
            signals.append(number)
            child.send_signal(number)

        here = threading.current_thread() is threading.main_thread()
        before = {n: signal.signal(n, forward) for n in (signal.SIGINT, signal.SIGTERM)} if here else {}
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
    """Return why a command failed, from the end of its log: the line of a user error, or a traceback's last."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("paceline: ")]
    reason = errors[-1].removeprefix("paceline: ") if errors else (lines[-1] if lines else "it printed nothing")
    return reason[-MAX_REASON_LENGTH:]
