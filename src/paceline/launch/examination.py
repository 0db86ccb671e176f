"""Find out why the workers on this host hang: write their stacks to logs/, and compare their flight recorders."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from paceline.core.files import write_file
from paceline.core.flight_recorder import Record
from paceline.core.hang_diagnosis import Diagnosis, Witness, deviation, diagnose
from paceline.core.heartbeat import has_exited_with_zero, is_child
from paceline.core.printable import printable_lines
from paceline.core.stacks import STACK_SIGNAL
from paceline.launch.mailbox import Mailbox

HANG_FILE = "hang.txt"
STACK_SECONDS = 5.0  # time for the workers to write their stacks; on a busy machine, a worker may have to wait
QUIET_SECONDS = 0.1  # a log file that has not grown for this long contains the whole stack
NUM_SHOWN = 12  # operations per rank in the file
STOPPED = "is stopped (by SIGSTOP or a debugger)"
WAITS_FOR_DISK = "is waiting for a disk or a driver (uninterruptible sleep)"
_CONDITIONS = {"T": STOPPED, "t": STOPPED, "D": WAITS_FOR_DISK}


def examine_hang(mailbox: Mailbox, reason: str) -> None:
    """Store a diagnosis that reports the missing rank; write the stacks and operations of all workers to logs/.

    Afterwards, the workers are stopped or about to stop, and must be killed.
    """
    witnesses = _witnesses(mailbox)
    found = diagnose(list(witnesses.values()))
    what = found.message if found else "the workers' records do not show which rank is missing"
    logs = _logs_folder(mailbox)
    mailbox.keep_diagnosis(f"{what}; {reason}" + (f"; stacks: {_shown(logs)}/rank-*.txt" if logs else ""))
    _write_operations(logs, witnesses, reason, found)
    stopped = [process for process, one in witnesses.items() if one.condition == STOPPED]
    running = [process for process in witnesses if process not in stopped]
    _request_stacks(witnesses, running)
    # A stopped rank writes its stacks only when it continues. Then no other rank must be able to go on with the run.
    _signal(running, signal.SIGSTOP)
    _request_stacks(witnesses, stopped)
    _publish_early_stacks(mailbox, logs, found.ranks if found else [one.rank for one in witnesses.values()])


def examine_failure(mailbox: Mailbox) -> str:
    """Do the same after a worker has failed; return "" unless the ranks ran different collective operations."""
    witnesses = _witnesses(mailbox)
    found = deviation(list(witnesses.values()))
    if found is None:
        return ""
    logs = _logs_folder(mailbox)
    _write_operations(logs, witnesses, "a worker failed", found)
    _request_stacks(witnesses, [process for process, one in witnesses.items() if one.condition != STOPPED])
    return found.message + (f"; stacks: {_shown(logs)}/rank-*.txt" if logs else "")


def examine_exits(mailbox: Mailbox) -> str:
    """Return which worker exited with code 0 before the end of its task; empty if none did."""
    for process, is_alive in mailbox.processes().items():
        if not is_alive and has_exited_with_zero(process):
            record = Record.read(mailbox.record_file(process))
            named = f"rank {record.rank}" if record else "a worker"
            after = f", after {record.last}" if record and record.last else ""
            return f"{named} ended with exit code 0 before the end of the run{after}"
    return ""


def _witnesses(mailbox: Mailbox) -> dict[int, Witness]:
    """Return what is known about the workers on this host, by process and in the order of their ranks."""
    found = {}
    for process, is_alive in mailbox.processes().items():
        record = Record.read(mailbox.record_file(process))
        if record is not None and record.rank >= 0:
            found[process] = Witness(record, _condition(process) if is_alive else "")
    return dict(sorted(found.items(), key=lambda item: item[1].rank))


def _condition(process: int) -> str:
    """Return why a process is not running; empty if it is running, or if the reason is unknown."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return _CONDITIONS.get(state, "")


def log_of_rank(mailbox: Mailbox, rank: int) -> str:
    """Return the path of a worker's log, to be shown to the user; empty if the worker has not opened its log."""
    logs = next((record.logs for record in mailbox.records().values() if record.rank == rank), "")
    log = Path(logs) / f"rank-{rank}.txt"
    return _shown(log) if logs and log.parent != mailbox.folder and log.exists() else ""


def _logs_folder(mailbox: Mailbox) -> Path | None:
    """Return the path of the run's logs/; None if no worker on this host has opened its log."""
    found = (Path(record.logs) for record in mailbox.records().values() if record.logs)
    return next((logs for logs in found if logs != mailbox.folder), None)


def _shown(path: Path) -> str:
    """Return a path as the user would write it: relative if it is below the current folder."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _publish_early_stacks(mailbox: Mailbox, logs: Path | None, ranks: Iterable[int]) -> None:
    """Move the stacks of workers without a log to logs/, or print those of the given ranks if there is no logs/."""
    for rank in ranks:
        with suppress(OSError):
            text = (mailbox.folder / f"rank-{rank}.txt").read_text(errors="replace").strip()
            if text and logs:
                with (logs / f"rank-{rank}.txt").open("a") as log:
                    log.write(f"{text}\n")
            elif text:
                print(f"the stacks of rank {rank}:\n{printable_lines(text)}", file=sys.stderr)


def _request_stacks(witnesses: Mapping[int, Witness], processes: Iterable[int]) -> None:
    """Make workers append their stacks to their logs, and continue if they are stopped; wait until they have."""
    able = [process for process in processes if witnesses[process].record.dumps_stacks]
    asked = {process: _log_of(witnesses[process]) for process in able if is_child(process, os.getpid())}
    before = {process: _size(log) for process, log in asked.items()}
    _signal(asked, STACK_SIGNAL)
    _signal(asked, signal.SIGCONT)
    sizes, changed_at, until = before, time.monotonic(), time.monotonic() + STACK_SECONDS
    while asked and (now := time.monotonic()) < until:
        time.sleep(QUIET_SECONDS / 10)
        if (found := {process: _size(log) for process, log in asked.items()}) != sizes:
            sizes, changed_at = found, now
        elif now - changed_at > QUIET_SECONDS and all(sizes[process] > before[process] for process in asked):
            return


def _log_of(witness: Witness) -> Path:
    return Path(witness.record.logs) / f"rank-{witness.rank}.txt"


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _signal(processes: Iterable[int], number: int) -> None:
    for process in processes:
        if is_child(process, os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(process, number)


def _write_operations(
    logs: Path | None, witnesses: Mapping[int, Witness], reason: str, found: Diagnosis | None
) -> None:
    """Write the workers' last operations to logs/hang.txt."""
    if logs is None:
        return
    lines = [time.strftime("%Y-%m-%d %H:%M:%S"), reason, *([found.message] if found else [])]
    for one in witnesses.values():
        lines += ["", f"rank {one.rank} {one.condition or 'is running'}; its last collective operations:"]
        lines += [f"  {operation}" for operation in one.record.operations[-NUM_SHOWN:]]
    with suppress(OSError):  # the disk may be the reason for the hang
        write_file(logs / HANG_FILE, "\n".join(lines) + "\n")
