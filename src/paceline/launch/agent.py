"""torchrun's agent with Paceline's restart rules, and a watchdog for the agent and its worker processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paceline.core.activity import restore_terminal
from paceline.core.awake_clock import AwakeClock
from paceline.core.printable import print_line
from paceline.launch.examination import examine_exits, examine_failure, examine_hang
from paceline.launch.mailbox import USER_ERROR_WAIT_SECONDS, Mailbox
from paceline.parallel.torch_internals import ElasticAgent

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


class _Progress(NamedTuple):
    """The last progress report of a worker."""

    report: int | None  # see `Mailbox.last_progress`; in start-up, the number of operations of a worker that is behind
    seen_at: float  # time on the watchdog's clock
    patience: float  # seconds until the next report is overdue


class Watchdog(threading.Thread):
    """Kills processes that hang: workers that make no progress, workers whose peer died, and finally the launcher.

    torchrun's agent waits 30 seconds for a worker that ignores signals, and forever for a host that it cannot reach.
    The watchdog ends these waits with SIGKILL. Workers die with their launcher. The time during which the launcher was
    suspended is not counted, since its workers could not make progress then either.
    """

    def __init__(
        self, mailbox: Mailbox, restarts_left: Callable[[], int], *, timeout: float, join_timeout: float
    ) -> None:
        super().__init__(daemon=True)
        self.mailbox, self.timeout = mailbox, timeout
        self.longest_idle = join_timeout + SLACK_SECONDS
        self._ask_restarts_left = restarts_left
        self._restarts_left = 0  # restarts left when all workers were last alive
        self._clock = AwakeClock(LONGEST_POLL_SECONDS)
        self._all_alive_at = self._some_alive_at = self._clock.read()
        self._progress: dict[int, _Progress] = {}  # by process
        self._killed_some = False
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            self._poll()

    def stop(self) -> None:
        """Stop the watchdog."""
        self._ended.set()

    def _poll(self) -> None:
        processes, now = self.mailbox.processes(), self._clock.read()
        alive = [process for process, is_alive in processes.items() if is_alive]
        if alive:
            self._some_alive_at = now
        if len(alive) == len(processes):
            self._all_alive_at = now
            if alive:
                self._killed_some = False
                self._restarts_left = self._ask_restarts_left()
        elif now - self._all_alive_at > USER_ERROR_WAIT_SECONDS + 1:  # the workers have had time to report a user error
            self._kill(processes)
        counts = {process: self.mailbox.num_operations(process) for process in alive}
        most = max((count for count in counts.values() if count is not None), default=0)
        self._progress = {process: self._progress_of(process, counts[process], most, now) for process in alive}
        silences = [(now - progress.seen_at, progress.patience) for progress in self._progress.values()]
        overdue = [silent for silent, patience in silences if silent > patience]
        if overdue:
            reason = f"no progress for {max(overdue):.0f} s (--timeout {self.timeout:g})"
            print_line(f"{reason}; examining and killing all workers on this host", sys.stderr)
            examine_hang(self.mailbox, reason)
            self._kill(processes)
        will_not_restart = self._killed_some and not self._restarts_left
        if now - self._some_alive_at > (END_SECONDS if will_not_restart else self.longest_idle):
            if reason := self.mailbox.user_error() or self.mailbox.diagnosis():
                print_line(f"paceline: {reason}", sys.stderr)
            print_line("the launcher did not exit in time; killing it", sys.stderr)
            os.kill(os.getpid(), signal.SIGKILL)

    def _progress_of(self, process: int, count: int | None, most: int, now: float) -> _Progress:
        """Return the last progress of a worker.

        Before training starts, a worker counts as making progress, unless others wait for it: they have started more
        collective operations. Only then is the number of its own operations its progress.
        """
        report, before = self.mailbox.last_progress(process), self._progress.get(process)
        patience = self.timeout
        if report is None and count is not None and count < most:
            report, patience = count, max(self.timeout, START_UP_SECONDS)
        return before if before and report is not None and report == before.report else _Progress(report, now, patience)

    def _kill(self, processes: Mapping[int, bool]) -> None:
        self._killed_some = True
        for process, is_alive in processes.items():
            if is_alive:
                with suppress(ProcessLookupError):  # the agent has ended it in the meantime
                    os.kill(process, signal.SIGKILL)
            self.mailbox.forget(process)
