"""Run a `paceline` command in a child process that logs to a file and stops cleanly when this process is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Protocol

from paceline.core.files import open_append
from paceline.core.trust import trusts_files
from paceline.core.types import SettingValue
from paceline.core.watch import die_with_parent
from paceline.training.stop import handling_stop_signals, leave_terminal

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


class Process(Protocol):
    """A process that runs a `paceline` command."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def send_signal(self, number: int, /) -> None: ...


# Starts a `paceline` command, given its arguments, the log file for its output and additional environment variables.
Start = Callable[[Sequence[str], Path, Mapping[str, str]], Process]


def path_flags() -> list[str]:
    """Return flags for Python: -P, unless this process imports modules from the current folder, too.

    `python -m` and `python -c` import them, so a file such as random.py would replace a module of the standard library.
    """
    return [] if {"", os.getcwd()} & set(sys.path) else ["-P"]


def start_process(arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> Process:
    """Start a `paceline` command in a new Python process."""
    with os.fdopen(open_append(log), "wb") as output:
        return subprocess.Popen(
            [sys.executable, *path_flags(), "-m", "paceline", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # otherwise the command would receive a terminal's Ctrl-C twice
            preexec_fn=die_with_parent,
            env={**os.environ, **environment},
        )


class Child:
    """A `paceline` command that runs in a child process and writes its output to a log file."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        start: Start = start_process,
    ) -> None:
        self.stopping = False  # whether a stop signal was sent to the command
        log.parent.mkdir(parents=True, exist_ok=True)
        os.close(open_append(log, truncate=True))
        self._process = start(arguments, log, environment or {})

    def poll(self) -> int | None:
        """Return the command's exit code, or None while the command is running."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send a stop signal to the command."""
        self.stopping = True
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the command and the processes that it started, unless the command has exited."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has exited in the meantime
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextmanager
def forwarded_signals(children: Collection[Child]) -> Iterator[list[int]]:
    """Forward Ctrl-C and other stop signals to the children, and yield a list of the signals received so far.

    `children` may change inside the `with` block. Children that are still running at the end of the block are killed.
    """
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number == signal.SIGHUP:
            leave_terminal()
        for child in children:
            child.send(number)

    with handling_stop_signals(forward):
        try:
            yield received
        finally:
            for child in children:
                child.kill()


def stop_late(children: Iterable[Child], received: Sequence[int]) -> None:
    """Stop children that were being started when a stop signal arrived."""
    for child in children:
        if received and not child.stopping:
            child.send(received[0])


def run_paceline(arguments: Sequence[str], log: Path, start: Start = start_process) -> int:
    """Run a command and write its output to `log`; return the exit code. Ctrl-C is forwarded to the command."""
    children: list[Child] = []
    with forwarded_signals(children) as received:
        children.append(Child(arguments, log, start=start))
        stop_late(children, received)
        while (code := children[0].poll()) is None:
            time.sleep(POLL_SECONDS)
    if received:
        raise Stopped(received[0])
    return code


def failure_reason(log: Path) -> str:
    """Return why a command failed, from its log: the last user error, or else the last line."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("paceline: ")]
    reason = errors[-1].removeprefix("paceline: ") if errors else (lines[-1] if lines else "it printed nothing")
    return reason[-MAX_REASON_LENGTH:]
