"""Find out why the workers on this host hang: write their stacks to logs/, and compare their flight recorders."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from paceline.core.files import write_file
from paceline.core.flight_recorder import Record
from paceline.core.hang_diagnosis import Diagnosis, Witness, deviation, diagnose
from paceline.core.heartbeat import has_exited_with_zero
from paceline.core.stacks import STACK_SIGNAL
from paceline.launch.mailbox import Mailbox

HANG_FILE = "hang.txt"
STACK_SECONDS = 0.5  # time for the workers to write their stacks
NUM_SHOWN = 12  # operations per rank in the file
STOPPED = "is stopped (by SIGSTOP or a debugger)"
WAITS_FOR_DISK = "is waiting for a disk or a driver (uninterruptible sleep)"
_CONDITIONS = {"T": STOPPED, "t": STOPPED, "D": WAITS_FOR_DISK}


def examine_hang(mailbox: Mailbox, reason: str) -> str:
    """Write the stacks and operations of all workers to logs/; return a line that reports the missing rank."""
    witnesses = _witnesses(mailbox)
    found = diagnose(list(witnesses.values()))
    logs = _write_logs(witnesses, reason, found)
    what = found.message if found else "the workers' records do not show which rank is missing"
    return f"{what}; {reason}" + (f"; stacks: {logs}/rank-*.txt" if logs else "")


def examine_failure(mailbox: Mailbox) -> str:
    """Do the same after a worker has failed; return "" unless the ranks ran different collective operations."""
    witnesses = _witnesses(mailbox)
    found = deviation(list(witnesses.values()))
    if found is None:
        return ""
    logs = _write_logs(witnesses, "a worker failed", found)
    return f"{found.message}; stacks: {logs}/rank-*.txt"


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


def _write_logs(witnesses: Mapping[int, Witness], reason: str, found: Diagnosis | None) -> str:
    """Make the workers write their stacks, and write logs/hang.txt; return the path of logs/, or "" if unknown."""
    for process, one in witnesses.items():
        if one.record.dumps_stacks:
            with suppress(ProcessLookupError):
                os.kill(process, STACK_SIGNAL)
                os.kill(process, signal.SIGCONT)  # a stopped process writes its stacks only when it continues
    time.sleep(STACK_SECONDS)
    logs = next((one.record.logs for one in witnesses.values() if one.record.logs), "")
    if not logs:
        return ""
    lines = [time.strftime("%Y-%m-%d %H:%M:%S"), reason, *([found.message] if found else [])]
    for one in witnesses.values():
        lines += ["", f"rank {one.rank} {one.condition or 'is running'}; its last collective operations:"]
        lines += [f"  {operation}" for operation in one.record.operations[-NUM_SHOWN:]]
    with suppress(OSError):  # the disk may be the reason for the hang
        write_file(Path(logs) / HANG_FILE, "\n".join(lines) + "\n")
    return logs
