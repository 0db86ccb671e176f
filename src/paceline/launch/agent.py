"""torchrun's agent, which starts this host's processes again only where that can help, and who watches over both."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paceline.launch.mailbox import OTHERS_WAIT_SECONDS, Mailbox

EXIT_BARRIER_SECONDS = 60  # for the other hosts, once all is done here
SECONDS_BETWEEN_LOOKS = 0.2
END_SECONDS = 3.0  # for the agent to end, once its processes have
SLACK_SECONDS = 30.0  # on top of what hosts may wait for each other


class Agent(LocalElasticAgent):
    """Starts the processes of this host, and again after a failure, unless a person has ended the run."""

    def __init__(self, spec: WorkerSpec, mailbox: Mailbox, is_over: Callable[[], bool]) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(mailbox.folder)), exit_barrier_timeout=EXIT_BARRIER_SECONDS)
        self._notes, self._is_over = mailbox, is_over

    @property
    def restarts_left(self) -> int:
        """How often the processes may still begin again."""
        return 0 if self._is_over() else self._remaining_restarts

    def _initialize_workers(self, worker_group: Any) -> None:
        self._notes.begin_afresh()
        super()._initialize_workers(worker_group)

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._remaining_restarts = self.restarts_left
            if self._remaining_restarts:
                say_restart(describe_failure(result.failures), self._remaining_restarts - 1)
        elif result.state is WorkerState.SUCCEEDED and self._notes.stopped() and self._others_wait():
            # Not a person but another host's agent stopped them, to take in a host that came.
            return RunResult(state=WorkerState.HEALTHY)
        return result

    def _others_wait(self) -> bool:
        return self._worker_group.spec.rdzv_handler.num_nodes_waiting() > 0


def describe_failure(failures: dict[int, ProcessFailure]) -> str:
    """Which process ended first, and how."""
    rank, first = min(failures.items(), key=lambda item: item[1].timestamp)
    how = f"ended with exit code {first.exitcode}" if first.exitcode > 0 else f"was killed by signal {-first.exitcode}"
    return f"rank {rank} {how}"


def say_restart(why: str, left: int) -> None:
    """Tells a person that the run goes on, and how often it still could."""
    print(f"{why}; beginning again from the last checkpoint ({left} restarts left)", file=sys.stderr, flush=True)


class Watchdog(threading.Thread):
    """Ends what hangs: processes that do not get on, those that a dead one left behind, and in the end the launcher.

    The agent waits half a minute for a process that cannot hear it, and without an end for a host that it cannot
    reach. Here every wait ends in SIGKILL; the processes die with their launcher.
    """

    def __init__(self, mailbox: Mailbox, timeout: float, join_timeout: float) -> None:
        super().__init__(daemon=True)
        self.mailbox, self.timeout = mailbox, timeout
        self.longest_idle = join_timeout + SLACK_SECONDS
        self.agent: Agent | None = None
        self._found_dead = self._idle_since = time.monotonic()
        self._restarts_left = 0  # when the processes were last seen well
        self._ended_some = False
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_LOOKS):
            self._look()

    def stop(self) -> None:
        """Ends the watch."""
        self._ended.set()

    def _look(self) -> None:
        processes, now = self.mailbox.processes(), time.monotonic()
        alive = [process for process, lives in processes.items() if lives]
        if alive:
            self._idle_since = now
        if len(alive) == len(processes):
            self._found_dead = now
            if alive:
                self._ended_some = False
                self._restarts_left = self.agent.restarts_left if self.agent else 0
        elif now - self._found_dead > OTHERS_WAIT_SECONDS + 1:  # they had the time to say why they end
            self._end(processes)
        silent = max(map(self.mailbox.seconds_silent, alive), default=0.0)
        if silent > self.timeout:
            print(
                f"no sign of life from a process for {silent:.0f} s (--timeout {self.timeout:g}); ending those here",
                file=sys.stderr,
                flush=True,
            )
            self._end(processes)
        hopeless = self._ended_some and not self._restarts_left
        if now - self._idle_since > (END_SECONDS if hopeless else self.longest_idle):
            print("the launcher cannot end by itself; killed", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    def _end(self, processes: dict[int, bool]) -> None:
        self._ended_some = True
        for process, lives in processes.items():
            if lives:
                os.kill(process, signal.SIGKILL)
            self.mailbox.forget(process)
