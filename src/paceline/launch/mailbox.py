"""The mailbox: a folder of files through which worker processes report to their launcher.

process-PID   a worker that has started; rewritten with every progress report, and empty until training starts
record-PID    the worker's flight recorder: the last collective operations that it started
rank-N.txt    the stacks of a worker that was asked for them before it opened its log
user-error    the message from a UserError that a worker raised
failed        a worker has failed and waits until the launcher has examined the others
diagnosis     why the workers of this round hang or failed, if the launcher could determine it
stopped-CODE  the workers have saved and stopped on request, or their mirror is incomplete; the launcher's exit code
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from paceline.core.files import write_file
from paceline.core.watch import (
    PROCESS,
    PULSE_FILE,
    RECORD_FILE,
    Record,
    die_with_parent,
    dump_stacks_on_signal,
    num_started,
    recorder,
    registered_processes,
)
from paceline.training.stop import INTERRUPTED, MIRROR_INCOMPLETE, RESUME_LATER

LAUNCHER = "PACELINE_LAUNCHER"  # environment variable with the launcher's process ID, set for its workers
MAILBOX_FOLDER = "PACELINE_MAILBOX_FOLDER"
USER_ERROR = "user-error"
FAILED = "failed"
DIAGNOSIS = "diagnosis"
REPORTED_CODES = (INTERRUPTED, RESUME_LATER, MIRROR_INCOMPLETE)  # exit codes of workers that have not failed
EXAMINATION_SECONDS = 3.0  # how long a failed worker waits for its launcher to examine the others
USER_ERROR_WAIT_SECONDS = (
    2.0  # how long a worker whose peers have exited waits to learn whether a user error was the cause
)


class Mailbox:
    """The launcher's view of the mailbox: what its workers have reported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def processes(self) -> dict[int, bool]:
        """Return the workers that have started but not exited normally, and whether each is alive."""
        return registered_processes(self.folder, os.getpid())

    def alive(self) -> list[int]:
        """Return the workers that are alive, and so can be asked to stop."""
        return [process for process, is_alive in self.processes().items() if is_alive]

    def last_progress(self, process: int) -> int | None:
        """Return a number that changes with every progress report of a worker; None before training starts."""
        try:
            about = (self.folder / f"{PROCESS}{process}").stat()
        except FileNotFoundError:
            return None
        return about.st_mtime_ns if about.st_size else None

    def forget(self, process: int) -> None:
        """Remove a worker's report file."""
        (self.folder / f"{PROCESS}{process}").unlink(missing_ok=True)

    def start_round(self) -> None:
        """Remove the reports from the previous workers, which have all ended. A reported user error is kept."""
        for pattern in (f"{PROCESS}*", "record-*", "rank-*.txt", "stopped-*", FAILED, DIAGNOSIS):
            for file in self.folder.glob(pattern):
                file.unlink(missing_ok=True)

    def record_file(self, process: int) -> Path:
        """Return the path of a worker's flight recorder."""
        return self.folder / f"record-{process}"

    def records(self) -> dict[int, Record]:
        """Return the flight recorders of the workers of this round, by process and in the order of their ranks."""
        files = {int(file.name.removeprefix("record-")): file for file in self.folder.glob("record-*")}
        found = {process: record for process, file in files.items() if (record := Record.read(file))}
        return dict(sorted(found.items(), key=lambda item: item[1].rank))

    def num_operations(self, process: int) -> int | None:
        """Return how many collective operations a worker has started; None if it has no flight recorder."""
        return num_started(self.record_file(process))

    def has_failed_worker(self) -> bool:
        """Return whether a failed worker waits for an examination."""
        return (self.folder / FAILED).exists()

    def keep_diagnosis(self, line: str) -> None:
        """Store why the workers hang or failed, and let failed workers exit."""
        if line and not self.diagnosis():
            (self.folder / DIAGNOSIS).write_text(line)
        (self.folder / FAILED).unlink(missing_ok=True)

    def diagnosis(self) -> str:
        """Return why the workers of this round hang or failed; empty if it is not known."""
        return self._read(DIAGNOSIS)

    def user_error(self) -> str:
        """Return the message of the user error that ended the workers; empty if there was none."""
        return self._read(USER_ERROR)

    def _read(self, name: str) -> str:
        file = self.folder / name
        return file.read_text() if file.exists() else ""

    def stop_code(self) -> int:
        """Return the exit code that the workers have reported; 0 if they have not."""
        return next((code for code in REPORTED_CODES if (self.folder / f"stopped-{code}").exists()), 0)


def register_worker() -> None:
    """Report that this process has started; from now on it dies with its launcher and can be asked to stop."""
    if LAUNCHER not in os.environ:
        return
    die_with_parent(int(os.environ[LAUNCHER]))
    own = Path(os.environ[MAILBOX_FOLDER], f"{PROCESS}{os.getpid()}")
    own.touch()
    os.environ[PULSE_FILE] = str(own)
    os.environ[RECORD_FILE] = str(own.with_name(f"record-{os.getpid()}"))
    if "RANK" in os.environ:
        recorder().set_rank(int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", 1)))
        dump_stacks_on_signal(own.with_name(f"rank-{os.environ['RANK']}.txt"), on_crash=False)


def unregister_worker(code: int) -> int:
    """Report that this process is about to exit; return the exit code for torchrun's agent.

    The agent treats any non-zero code as a failure on all hosts, so the mailbox reports a requested stop instead.
    """
    if LAUNCHER not in os.environ or code not in (0, *REPORTED_CODES):
        return code
    if code:
        report_stop(code)
    Path(os.environ[MAILBOX_FOLDER], f"{PROCESS}{os.getpid()}").unlink(missing_ok=True)
    return 0


def report_stop(code: int) -> None:
    """Report a requested stop, with the exit code for the launcher; do nothing without a Paceline launcher."""
    if MAILBOX_FOLDER in os.environ:
        Path(os.environ[MAILBOX_FOLDER], f"stopped-{code}").touch()


def report_user_error(line: str) -> bool:
    """Pass a user error to the launcher, which prints it once; return False if there is no Paceline launcher."""
    if MAILBOX_FOLDER not in os.environ:
        return False
    file = Path(os.environ[MAILBOX_FOLDER], USER_ERROR)
    if not file.exists():
        write_file(file, line, durable=False)
    return True


def wait_for_examination() -> None:
    """Wait until the launcher has examined the other workers, because it kills them when this one exits."""
    if MAILBOX_FOLDER not in os.environ or recorder().record().size == 1:
        return
    file, until = Path(os.environ[MAILBOX_FOLDER], FAILED), time.monotonic() + EXAMINATION_SECONDS
    file.touch()
    while file.exists() and time.monotonic() < until:
        time.sleep(0.05)


def user_error_was_reported() -> bool:
    """Return whether this process failed only because a peer ended with a user error."""
    if MAILBOX_FOLDER not in os.environ:
        return False
    file, until = Path(os.environ[MAILBOX_FOLDER], USER_ERROR), time.monotonic() + USER_ERROR_WAIT_SECONDS
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.05)
    return file.exists()
