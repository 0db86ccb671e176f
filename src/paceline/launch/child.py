"""A `paceline` command in a process of its own: what it said, and an orderly end when this one is asked to stop."""

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
from typing import Any

from paceline.core.heartbeat import die_with_parent

LAST_WORDS = 400  # characters of a failure's reason
LOOK_EVERY_SECONDS = 0.2


class Stopped(Exception):
    """The person asked to stop, and the command has ended in order."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def words_of(flags: Mapping[str, Any], config_file: str, assignments: Iterable[str]) -> list[str]:
    """What was said of a run's settings, as words of a command."""
    words = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, str(value)]
    words += ["--config", config_file] if config_file else []
    return words + [word for one in assignments for word in ("--set", one)]


def run_paceline(arguments: Sequence[str], log: Path, look: Callable[[], None] | None = None) -> int:
    """Runs the command to its end, its output in `log`; gives the exit code. Ctrl-C goes to the command, once."""
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
        asked: list[int] = []

        def pass_on(number: int, frame: FrameType | None) -> None:
            asked.append(number)
            child.send_signal(number)

        here = threading.current_thread() is threading.main_thread()
        before = {n: signal.signal(n, pass_on) for n in (signal.SIGINT, signal.SIGTERM)} if here else {}
        try:
            while child.poll() is None:
                if look:
                    look()
                time.sleep(LOOK_EVERY_SECONDS)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
    if asked:
        raise Stopped(asked[0])
    return child.returncode


def last_words(log: Path) -> str:
    """Why a command failed, as its output ends: the one line of a mistake, or a traceback's last."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("paceline: ")]
    said = told[-1].removeprefix("paceline: ") if told else (lines[-1] if lines else "it said nothing")
    return said[-LAST_WORDS:]
