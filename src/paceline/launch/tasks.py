"""Runs functions in one process per device on this host, under torchrun's agent; several hosts may share a run.

A task is created from the function itself, so type checkers see its arguments and nothing has to be registered. Its
processes receive the function by module and name, and its arguments as JSON.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Concatenate, NamedTuple, ParamSpec, cast

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from paceline.config.files import to_toml
from paceline.config.resolve import Config
from paceline.core.errors import UserError
from paceline.core.terminal import activity, take_over_terminal
from paceline.core.text import print_line
from paceline.launch.agent import Agent, Watchdog, describe_failure, first_failure, log_of_rank, print_restart
from paceline.launch.child import path_flags
from paceline.launch.mailbox import LAUNCHER, MAILBOX_FOLDER, Mailbox
from paceline.launch.rendezvous import Rendezvous
from paceline.parallel.strategy import strategy_class
from paceline.parallel.torch_internals import local_address, stop_heartbeats
from paceline.training.stop import handling_stop_signals, leave_terminal

Arguments = ParamSpec("Arguments")
WORKER = "paceline.launch.worker"


class Task(NamedTuple):
    """A module-level function and its arguments, as strings for a command line."""

    module: str
    function: str
    arguments: str  # JSON with the positional and keyword arguments that follow the config

    @classmethod
    def of(
        cls,
        function: Callable[Concatenate[Config, Arguments], int | None],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Task:
        """Return the task that calls `function(config, *arguments, **named)`; arguments must be JSON values."""
        module, name = function.__module__, function.__qualname__
        if module == "__main__" or getattr(sys.modules[module], name, None) is not function:
            raise ValueError(f"{module}.{name}: a task must be a function that other processes can import")
        return cls(module, name, json.dumps([arguments, named]))

    def run(self, config: Config) -> int:
        """Call the function and return its exit code; None counts as 0."""
        found = getattr(importlib.import_module(self.module), self.function, None)
        if found is None:
            raise LookupError(f"{self.module}.{self.function}: no such function")
        arguments, named = json.loads(self.arguments)
        return cast(Callable[..., int | None], found)(config, *arguments, **named) or 0


AGENT_ENVIRONMENT = {
    # The first process of each round serves its own store. A shared store would be lost with its host.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",  # Paceline forwards other signals, so that workers can save
}
NOT_BEGUN = "stopped before training began"
LEAVE_SECONDS = 1.5  # how long to wait for the other hosts when leaving the rendezvous


def run_in_processes(
    task: Task,
    config: Config,
    rendezvous: Rendezvous | None = None,
    on_failure: Callable[[str], None] = lambda reason: None,
) -> int:
    """Run a task in one process per device on this host; return the processes' common exit code.

    If they fail, `on_failure` is called with the reason, unless the function raises UserError.
    """

    def report(reason: str) -> None:
        print_line(reason, sys.stderr)
        on_failure(reason)

    _silence("torch.distributed.elastic")
    rendezvous = rendezvous or Rendezvous(timeout=config.run.timeout)
    processes = config.run.devices if strategy_class(config).needs_processes else 1
    with tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True) as name:
        mailbox, config_file = Mailbox(Path(name)), Path(name, "config.toml")
        config_file.write_text(to_toml(config.values(), {}))
        words = [*path_flags(), "-u", "-m", WORKER, *task, config.recipe_name, str(config_file)]
        started = "1 process, which loads PyTorch" if processes == 1 else f"{processes} processes, which load PyTorch"
        activity(f"starting {started}", until=lambda: bool(mailbox.processes()))
        variables = {LAUNCHER: str(os.getpid()), MAILBOX_FOLDER: name, **AGENT_ENVIRONMENT}
        with _environment(variables), _forwarding(mailbox) as signals:
            supervisor = _Supervisor(words, processes, rendezvous, mailbox, signals)
            watchdog = Watchdog(mailbox, supervisor.restarts_left, rendezvous.timeout, rendezvous.join_timeout)
            watchdog.start()
            try:
                return _exit_code(supervisor.run(), mailbox, signals, report)
            except SignalException as stop:
                if mailbox.stop_code():
                    return mailbox.stop_code()
                report(NOT_BEGUN)
                return 128 + (signals[0] if signals else stop.sigval)  # as in shells, for a run that could not save
            except (RendezvousError, dist.DistError) as error:
                return _report_no_rendezvous(error, rendezvous, mailbox, report)
            finally:
                watchdog.stop()
                take_over_terminal()


def _silence(package: str) -> None:
    """Log only critical errors of a package; torch gives each of its loggers a level of its own."""
    for name in (package, *logging.root.manager.loggerDict):
        if f"{name}.".startswith(f"{package}."):
            logging.getLogger(name).setLevel(logging.CRITICAL)


class _Supervisor:
    """Runs an agent until it ends; starts a new agent if the rendezvous host was lost but may be reachable again."""

    def __init__(
        self,
        words: Sequence[str],
        processes: int,
        rendezvous: Rendezvous,
        mailbox: Mailbox,
        signals: Sequence[int],
    ) -> None:
        self.words, self.processes, self.rendezvous = tuple(words), processes, rendezvous
        self.mailbox, self.signals = mailbox, signals
        self._agent: Agent | None = None

    def restarts_left(self) -> int:
        """Return how many restarts are left."""
        return self._agent.restarts_left if self._agent else 0

    def run(self) -> RunResult | None:
        """Return how the workers ended, or None if another host ended the run."""
        left = self.rendezvous.max_restarts
        while True:
            handler = self.rendezvous.open()
            self._agent = agent = self._make_agent(handler, left)
            closes = True
            try:
                result: RunResult | None = agent.run()
                return result
            except SignalException:
                closes = False  # closing the rendezvous would end the run for the other hosts
                raise
            except (RendezvousClosedError, RendezvousTimeoutError):
                raise
            except (RendezvousError, dist.DistError):
                closes = False
                if self.rendezvous.max_hosts == 1 or not agent.restarts_left:
                    raise
                left = agent.restarts_left - 1
                print_restart(f"lost the rendezvous host ({self.rendezvous.endpoint})", left)
            finally:
                _leave_rendezvous(handler, closes)

    def _make_agent(self, handler: DynamicRendezvousHandler, max_restarts: int) -> Agent:
        spec = WorkerSpec(
            role="paceline",
            local_world_size=self.processes,
            rdzv_handler=handler,
            entrypoint=sys.executable,
            args=self.words,
            max_restarts=max_restarts,
            monitor_interval=0.1,
            local_addr=local_address(handler),
        )
        return Agent(spec, self.mailbox, self._is_over)

    def _is_over(self) -> bool:
        return bool(self.signals or self.mailbox.user_error() or self.mailbox.stop_code())


def _leave_rendezvous(handler: DynamicRendezvousHandler, closes: bool) -> None:
    """Leave the rendezvous; give up quickly if the other hosts cannot be reached."""

    def close() -> None:
        with suppress(Exception):
            if closes:
                handler.shutdown()
            else:
                stop_heartbeats(handler)

    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(LEAVE_SECONDS)


def _exit_code(
    result: RunResult | None, mailbox: Mailbox, signals: Sequence[int], report: Callable[[str], None]
) -> int:
    """Return the workers' exit code; report why they ended, unless they have already reported it."""
    if mailbox.user_error():
        raise UserError(mailbox.user_error()) from None
    if mailbox.stop_code():
        if result and result.is_failed():  # otherwise, the workers have saved, and reported it
            report("interrupted")
        return mailbox.stop_code()
    if result is None:
        report("another host ended the run")
        return 1
    if not result.is_failed():
        return 0
    if signals:
        report(NOT_BEGUN if len(signals) == 1 else "stopped immediately")
        return 128 + signals[0]
    if mailbox.diagnosis():
        raise UserError(mailbox.diagnosis()) from None
    rank, first = first_failure(result.failures)
    log = log_of_rank(mailbox, rank)
    report(describe_failure(result.failures) + (f"; see {log} for details" if log else ""))
    return first.exitcode if first.exitcode > 0 else 1


def _report_no_rendezvous(
    error: Exception, rendezvous: Rendezvous, mailbox: Mailbox, report: Callable[[str], None]
) -> int:
    """Report why this host lost or never reached the other hosts; return the exit code."""
    if mailbox.user_error():
        raise UserError(mailbox.user_error()) from None
    if mailbox.stop_code():
        return mailbox.stop_code()
    endpoint = rendezvous.endpoint
    if isinstance(error, RendezvousClosedError):
        report(f"another host ended the run (rendezvous {endpoint})")
    elif isinstance(error, RendezvousTimeoutError):
        report(
            f"fewer than {rendezvous.min_hosts} hosts (--nnodes) joined at {endpoint} within "
            f"{rendezvous.join_timeout:g} s (join_timeout); "
            "run the same command again to resume from the last checkpoint"
        )
    else:
        report(f"lost the rendezvous host ({endpoint}): {str(error).splitlines()[0]}")
    return 1


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    os.environ |= variables
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


@contextmanager
def _forwarding(mailbox: Mailbox) -> Iterator[list[int]]:
    """Forward stop signals to the workers without a time limit; yield the signals received.

    torchrun's agent would also send them to the workers' children, and kill everything after 30 seconds. A second
    Ctrl-C kills the workers immediately.
    """
    signals: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        if number == signal.SIGHUP:
            leave_terminal()
        again = number == signal.SIGINT and len(signals) > 1
        processes = mailbox.alive()
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL if again else number)
        if not processes:  # no worker is registered yet; SIGTERM ends workers without the tracebacks that SIGINT causes
            raise SignalException("asked to stop", signal.SIGTERM)

    with handling_stop_signals(forward):
        yield signals
