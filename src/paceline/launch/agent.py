"""torchrun's agent with Paceline's restart rules, a watchdog, and the examination of workers that hang."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paceline.core.files import write_file
from paceline.core.terminal import restore_terminal
from paceline.core.text import print_line, printable_lines
from paceline.core.watch import (
    STACK_SIGNAL,
    Diagnosis,
    Record,
    Silence,
    Witness,
    deviation,
    diagnose,
    has_exited_with_zero,
    is_child,
)
from paceline.launch.mailbox import USER_ERROR_WAIT_SECONDS, Mailbox
from paceline.parallel.torch_internals import ElasticAgent

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
    workers = _Workers(mailbox)
    diagnosis = diagnose(list(workers.witnesses.values()))
    what = diagnosis.message if diagnosis else "the workers' records do not show which rank is missing"
    mailbox.keep_diagnosis(f"{what}; {reason}{workers.where_stacks_are}")
    workers.write_operations(reason, diagnosis)
    workers.write_stacks(workers.running)
    # A stopped rank writes its stacks only when it continues. Then no other rank must be able to go on with the run.
    _signal(workers.running, signal.SIGSTOP)
    workers.write_stacks(set(workers.witnesses).difference(workers.running))
    workers.publish_early_stacks(diagnosis.ranks if diagnosis else [one.rank for one in workers.witnesses.values()])


def examine_failure(mailbox: Mailbox) -> str:
    """Do the same after a worker has failed; return "" unless the ranks ran different collective operations."""
    workers = _Workers(mailbox)
    diagnosis = deviation(list(workers.witnesses.values()))
    if diagnosis is None:
        return ""
    workers.write_operations("a worker failed", diagnosis)
    workers.write_stacks(workers.running)
    return diagnosis.message + workers.where_stacks_are


def examine_exits(mailbox: Mailbox) -> str:
    """Return which worker exited with code 0 before the end of its task; empty if none did."""
    for process, is_alive in mailbox.processes().items():
        if not is_alive and has_exited_with_zero(process):
            record = Record.read(mailbox.record_file(process))
            named = f"rank {record.rank}" if record else "a worker"
            after = f", after {record.last}" if record and record.last else ""
            return f"{named} ended with exit code 0 before the end of the run{after}"
    return ""


def log_of_rank(mailbox: Mailbox, rank: int) -> str:
    """Return the path of a worker's log, to be shown to the user; empty if the worker has not opened its log."""
    logs = next((record.logs for record in mailbox.records().values() if record.rank == rank), "")
    log = Path(logs) / f"rank-{rank}.txt"
    return _shown(log) if logs and log.parent != mailbox.folder and log.exists() else ""


def _shown(path: Path) -> str:
    """Return a path as the user would write it: relative if it is below the current folder."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


class _Workers:
    """What is known about the workers on this host: their records, by process and in the order of their ranks."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.folder, records, alive = mailbox.folder, mailbox.records(), mailbox.processes()
        self.witnesses = {
            process: Witness(record, _condition(process) if alive[process] else "")
            for process, record in records.items()
            if process in alive and record.rank >= 0
        }
        self.running = [process for process, one in self.witnesses.items() if one.condition != STOPPED]
        folders = (Path(record.logs) for record in records.values() if record.logs)
        self.logs = next((logs for logs in folders if logs != mailbox.folder), None)  # of the run; None if not yet open
        self.where_stacks_are = f"; stacks: {_shown(self.logs)}/rank-*.txt" if self.logs else ""

    def write_stacks(self, processes: Iterable[int]) -> None:
        """Make workers append their stacks to their logs, and continue if they are stopped; wait until they have."""
        asked = {
            process: Path(record.logs) / f"rank-{record.rank}.txt"
            for process in processes
            if (record := self.witnesses[process].record).dumps_stacks and is_child(process, os.getpid())
        }

        def sizes() -> dict[int, int]:
            return {process: log.stat().st_size if log.exists() else 0 for process, log in asked.items()}

        before = seen = sizes()
        _signal(asked, STACK_SIGNAL)
        _signal(asked, signal.SIGCONT)
        changed_at, until = time.monotonic(), time.monotonic() + STACK_SECONDS
        while asked and (now := time.monotonic()) < until:
            time.sleep(QUIET_SECONDS / 10)
            if (found := sizes()) != seen:
                seen, changed_at = found, now
            elif now - changed_at > QUIET_SECONDS and all(seen[process] > before[process] for process in asked):
                return

    def publish_early_stacks(self, ranks: Iterable[int]) -> None:
        """Move the stacks of workers without a log to logs/, or print those of the given ranks if there is no logs/."""
        for rank in ranks:
            with suppress(OSError):
                text = (self.folder / f"rank-{rank}.txt").read_text(errors="replace").strip()
                if text and self.logs:
                    with (self.logs / f"rank-{rank}.txt").open("a") as log:
                        log.write(f"{text}\n")
                elif text:
                    print(f"the stacks of rank {rank}:\n{printable_lines(text)}", file=sys.stderr)

    def write_operations(self, reason: str, diagnosis: Diagnosis | None) -> None:
        """Write the workers' last operations to logs/hang.txt."""
        lines = [time.strftime("%Y-%m-%d %H:%M:%S"), reason, *([diagnosis.message] if diagnosis else [])]
        for one in self.witnesses.values():
            lines += ["", f"rank {one.rank} {one.condition or 'is running'}; its last collective operations:"]
            lines += [f"  {operation}" for operation in one.record.operations[-NUM_SHOWN:]]
        if self.logs:
            with suppress(OSError):  # the disk may be the reason for the hang
                write_file(self.logs / HANG_FILE, "\n".join(lines) + "\n")


def _condition(process: int) -> str:
    """Return why a process is not running; empty if it is running, or if the reason is unknown."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return _CONDITIONS.get(state, "")


def _signal(processes: Iterable[int], number: int) -> None:
    for process in processes:
        if is_child(process, os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(process, number)


EXIT_BARRIER_SECONDS = 60  # how long to wait for the other hosts after this host has finished
POLL_SECONDS = 0.2
LONGEST_POLL_SECONDS = 1.0  # if two polls are further apart, the launcher was suspended; the rest is not counted
START_UP_SECONDS = 20.0  # how long, at least, the others wait for a worker in start-up; collectives wait even longer
END_SECONDS = 10.0  # how long the agent may take to exit after its workers, on a busy host
SLACK_SECONDS = 30.0  # added to the time that hosts may wait for each other


class Agent(ElasticAgent):
    """Starts the workers on this host and restarts them after a failure, unless the run is over."""

    def __init__(self, spec: WorkerSpec, mailbox: Mailbox, is_over: Callable[[], bool]) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(mailbox.folder)), exit_barrier_timeout=EXIT_BARRIER_SECONDS)
        self._mailbox, self._is_over = mailbox, is_over
        self._examined = False  # whether the workers' records were compared after a failure in this round

    @property
    def restarts_left(self) -> int:
        """The number of restarts left; 0 once the run is over."""
        return 0 if self._is_over() else self.remaining_restarts

    def before_start(self) -> None:
        self._mailbox.start_round()
        self._examined = False

    def before_monitoring(self) -> None:
        """Compare the workers' records if a worker has died, or has failed and waits for the comparison."""
        died = not all(self._mailbox.processes().values())
        if self._is_over() or not (died or self._mailbox.has_failed_worker()):
            return
        # torch's agent ignores a worker that exits with code 0, and would report the failures that this causes.
        if early := examine_exits(self._mailbox):
            self._mailbox.keep_diagnosis(early)
        if not self._examined:
            self._examined = True
            self._mailbox.keep_diagnosis(examine_failure(self._mailbox))

    def review(self, result: RunResult) -> RunResult:
        """Return the result to act on: no restart if the run is over, and a restart if a host is waiting to join."""
        if result.state is WorkerState.SUCCEEDED and not self._is_over():
            self._mailbox.keep_diagnosis(examine_exits(self._mailbox))
            if self._mailbox.diagnosis():
                result = RunResult(state=WorkerState.FAILED)
        if result.is_failed():
            if any(failure.exitcode < 0 for failure in result.failures.values()):  # killed by a signal
                restore_terminal()
            self.remaining_restarts = self.restarts_left
            if self.remaining_restarts:
                reason = self._mailbox.diagnosis() or describe_failure(result.failures)
                print_restart(reason, self.remaining_restarts - 1)
        elif result.state is WorkerState.SUCCEEDED and self._mailbox.stop_code() and self.num_hosts_waiting():
            # The workers were not stopped by the user but by another host's agent, so that the waiting host can join.
            return RunResult(state=WorkerState.HEALTHY)
        return result

    def on_loss(self) -> None:
        """Stop the workers; unless the run was over before, they report a stop that the user has not requested."""
        if not self._is_over():
            self.stop_workers()
            self._mailbox.start_round()


def first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the rank that ended first.

    If several ended in the same second, a rank that was killed comes before ranks that failed as a result.
    Ranks ended by SIGTERM come last, because the agent sends SIGTERM to the remaining ranks.
    """
    order = {-signal.SIGTERM: 2}
    return min(
        failures.items(), key=lambda item: (item[1].timestamp, order.get(item[1].exitcode, item[1].exitcode > 0))
    )


def describe_failure(failures: Mapping[int, ProcessFailure]) -> str:
    """Describe which worker ended first, and how."""
    rank, first = first_failure(failures)
    how = f"ended with exit code {first.exitcode}" if first.exitcode > 0 else f"was killed by signal {-first.exitcode}"
    return f"rank {rank} {how}"


def print_restart(reason: str, left: int) -> None:
    """Print why the run restarts and how many restarts are left."""
    print_line(f"{reason}; restarting from the last checkpoint (restarts left: {left})", sys.stderr)


@dataclass
class _Worker:
    """What the watchdog knows about a worker."""

    silence: Silence
    patience: float  # seconds of silence until the next report is overdue
    report: int | None = None  # see `Mailbox.last_progress`; in start-up, the operations of a worker that is behind


class Watchdog(threading.Thread):
    """Kills processes that hang: workers that make no progress, workers whose peer died, and finally the launcher.

    torchrun's agent waits 30 seconds for a worker that ignores signals, and forever for a host that it cannot reach.
    The watchdog ends these waits with SIGKILL. Workers die with their launcher. The time during which the launcher was
    suspended is not counted, since its workers could not make progress then either.
    """

    def __init__(self, mailbox: Mailbox, restarts_left: Callable[[], int], timeout: float, join_timeout: float) -> None:
        super().__init__(daemon=True)
        self.mailbox, self.timeout = mailbox, timeout
        self.longest_idle = join_timeout + SLACK_SECONDS
        self._ask_restarts_left = restarts_left
        self._restarts_left = 0  # restarts left when all workers were last alive
        self._without_one, self._without_all = Silence(LONGEST_POLL_SECONDS), Silence(LONGEST_POLL_SECONDS)
        self._workers: dict[int, _Worker] = {}  # by process
        self._killed_some = False
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            self._poll()

    def stop(self) -> None:
        """Stop the watchdog."""
        self._ended.set()

    def _poll(self) -> None:
        processes = self.mailbox.processes()
        alive = [process for process, is_alive in processes.items() if is_alive]
        without_one = self._without_one.add(len(alive) < len(processes))
        without_all = self._without_all.add(not alive)
        if alive and len(alive) == len(processes):
            self._killed_some = False
            self._restarts_left = self._ask_restarts_left()
        elif without_one > USER_ERROR_WAIT_SECONDS + 1:  # the workers have had time to report a user error
            self._kill(processes)
        counts = {process: self.mailbox.num_operations(process) for process in alive}
        most = max((count for count in counts.values() if count is not None), default=0)
        overdue = [seconds for process in alive if (seconds := self._overdue(process, counts[process], most))]
        if overdue:
            reason = f"no progress for {max(overdue):.0f} s (--timeout {self.timeout:g})"
            print_line(f"{reason}; examining and killing all workers on this host", sys.stderr)
            examine_hang(self.mailbox, reason)
            self._kill(processes)
        will_not_restart = self._killed_some and not self._restarts_left
        if without_all > (END_SECONDS if will_not_restart else self.longest_idle):
            if reason := self.mailbox.user_error() or self.mailbox.diagnosis():
                print_line(f"paceline: {reason}", sys.stderr)
            print_line("the launcher did not exit in time; killing it", sys.stderr)
            os.kill(os.getpid(), signal.SIGKILL)

    def _overdue(self, process: int, count: int | None, most: int) -> float:
        """Return for how many seconds a worker has made no progress; 0 if it still may.

        Before training starts, a worker counts as making progress, unless others wait for it: they have started more
        collective operations. Only then is the number of its own operations its progress.
        """
        worker = self._workers.setdefault(process, _Worker(Silence(LONGEST_POLL_SECONDS), self.timeout))
        report, patience = self.mailbox.last_progress(process), self.timeout
        if report is None and count is not None and count < most:
            report, patience = count, max(self.timeout, START_UP_SECONDS)
        seconds = worker.silence.add(report is not None and report == worker.report)
        if not seconds:
            worker.report, worker.patience = report, patience
        return seconds if seconds > worker.patience else 0.0

    def _kill(self, processes: Mapping[int, bool]) -> None:
        self._killed_some = True
        for process, is_alive in processes.items():
            if is_alive:
                with suppress(ProcessLookupError):  # the agent has ended it in the meantime
                    os.kill(process, signal.SIGKILL)
            self.mailbox.forget(process)
