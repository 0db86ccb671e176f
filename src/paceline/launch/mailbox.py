"""What a launcher and the processes that it started tell each other, through files in a folder of their own.

process-PID   a process that began; its time says when it last got on, and it has content once it trains
mistake       a person's mistake that one of them met
stopped-CODE  they were asked to stop, have saved, and mean to end with this exit code
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from paceline.core.heartbeat import PULSE_FILE, die_with_parent, is_child
from paceline.training.stop import GO_ON_LATER, INTERRUPTED

LAUNCHER = "PACELINE_LAUNCHER"  # the process id of the one that started this process
MEETING_FOLDER = "PACELINE_MEETING_FOLDER"
MISTAKE = "mistake"
OTHERS_WAIT_SECONDS = 2.0  # for the mistake that ended the run, by a process that only lost its peers


class Mailbox:
    """The launcher's side: what its processes have told it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def processes(self) -> dict[int, bool]:
        """The processes that have begun and not ended as they should, and whether each is alive."""
        found = [int(file.name.removeprefix("process-")) for file in self.folder.glob("process-*")]
        return {process: is_child(process, os.getpid()) for process in found}

    def alive(self) -> list[int]:
        """The processes that can be asked to stop."""
        return [process for process, lives in self.processes().items() if lives]

    def seconds_silent(self, process: int) -> float:
        """For how long a process that trains has not got on; nothing, before it trains."""
        try:
            about = (self.folder / f"process-{process}").stat()
        except FileNotFoundError:
            return 0.0
        return time.time() - about.st_mtime if about.st_size else 0.0

    def forget(self, process: int) -> None:
        """Takes a process off the list."""
        (self.folder / f"process-{process}").unlink(missing_ok=True)

    def begin_afresh(self) -> None:
        """Forgets a round of processes, which have ended one way or another; a person's mistake stays."""
        for pattern in ("process-*", "stopped-*"):
            for file in self.folder.glob(pattern):
                file.unlink(missing_ok=True)

    def mistake(self) -> str:
        """A person's mistake that ended the processes, if one did."""
        file = self.folder / MISTAKE
        return file.read_text() if file.exists() else ""

    def stopped(self) -> int:
        """The exit code that the processes mean to end with, if they were asked to stop and have saved; else 0."""
        return next((code for code in (INTERRUPTED, GO_ON_LATER) if (self.folder / f"stopped-{code}").exists()), 0)


def report_for_work() -> None:
    """Called first by a process that a launcher started: it dies with the launcher, and can be asked to stop."""
    if LAUNCHER not in os.environ:
        return
    die_with_parent(int(os.environ[LAUNCHER]))
    own = Path(os.environ[MEETING_FOLDER], f"process-{os.getpid()}")
    own.touch()
    os.environ[PULSE_FILE] = str(own)


def leave_work(code: int) -> int:
    """Called last: the exit code for torchrun's agent, to which any but 0 is a failure of all hosts."""
    if LAUNCHER not in os.environ or code not in (0, INTERRUPTED, GO_ON_LATER):
        return code
    folder = Path(os.environ[MEETING_FOLDER])
    if code:
        (folder / f"stopped-{code}").touch()
    (folder / f"process-{os.getpid()}").unlink(missing_ok=True)
    return 0


def report_mistake(line: str) -> bool:
    """Hands a person's mistake to the launcher, which shows it once; false where there is no launcher of ours."""
    if MEETING_FOLDER not in os.environ:
        return False
    try:
        with open(Path(os.environ[MEETING_FOLDER], MISTAKE), "x") as file:
            file.write(line)
    except FileExistsError:
        pass
    return True


def mistake_was_reported() -> bool:
    """Whether this process failed only because another one met a person's mistake and ended."""
    if MEETING_FOLDER not in os.environ:
        return False
    mistake, until = Path(os.environ[MEETING_FOLDER], MISTAKE), time.monotonic() + OTHERS_WAIT_SECONDS
    while not mistake.exists() and time.monotonic() < until:
        time.sleep(0.05)
    return mistake.exists()
