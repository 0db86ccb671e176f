"""Several processes on this machine, or its part of those on several, through torchrun's agent."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from paceline.core.errors import UserError
from paceline.launch.agent import END_SECONDS, Agent, Watchdog, describe_failure, say_restart
from paceline.launch.mailbox import LAUNCHER, MEETING_FOLDER, Mailbox
from paceline.launch.rendezvous import Rendezvous
from paceline.training.stop import GO_ON_LATER, INTERRUPTED, SIGNALS

TO_THE_AGENT = {
    # Each round's first process serves a store of its own: a shared one would be lost with its host.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGHUP,SIGQUIT",  # the others are passed on below, with time to save
}


def run_processes(module: str, arguments: list[str], processes: int, rendezvous: Rendezvous | None = None) -> int:
    """Runs `python -m module arguments` in several processes of this host; gives the exit code of all."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    rendezvous = rendezvous or Rendezvous()
    with tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True) as name:
        mailbox = Mailbox(Path(name))
        watchdog = Watchdog(mailbox, rendezvous.timeout, rendezvous.join_timeout)
        variables = {LAUNCHER: str(os.getpid()), MEETING_FOLDER: name, **TO_THE_AGENT}
        with _environment(variables), _passing_on(mailbox) as asked:
            watchdog.start()
            try:
                result = _supervise(["-u", "-m", module, *arguments], processes, rendezvous, mailbox, watchdog, asked)
                return _exit_code(result, mailbox, asked)
            except SignalException as stop:
                return mailbox.stopped() or _code_of(asked[0] if asked else stop.sigval)
            except (RendezvousError, dist.DistError) as error:
                return _say_why_alone(error, rendezvous, mailbox)
            finally:
                watchdog.stop()


def _supervise(
    words: list[str], processes: int, rendezvous: Rendezvous, mailbox: Mailbox, watchdog: Watchdog, asked: list[int]
) -> RunResult | None:
    """Runs the agent to its end, and another where the host at which all meet was lost and may come back."""

    def is_over() -> bool:
        return bool(asked or mailbox.mistake() or mailbox.stopped())

    left = rendezvous.max_restarts
    while True:
        handler = rendezvous.open()
        spec = WorkerSpec(
            role="paceline",
            local_world_size=processes,
            rdzv_handler=handler,
            entrypoint=sys.executable,
            args=tuple(words),
            max_restarts=left,
            monitor_interval=0.1,
            local_addr=handler._this_node.addr,
        )
        watchdog.agent = agent = Agent(spec, mailbox, is_over)
        closes = True
        try:
            return agent.run()
        except SignalException:
            closes = False  # to close the meeting would end it for the other hosts
            raise
        except (RendezvousClosedError, RendezvousTimeoutError):
            raise
        except (RendezvousError, dist.DistError):
            closes = False
            if rendezvous.most == 1 or not agent.restarts_left:
                raise
            left = agent.restarts_left - 1
            say_restart(f"lost the host at which all meet ({rendezvous.host}:{rendezvous.port})", left)
        finally:
            _leave(handler, closes)


def _leave(handler: DynamicRendezvousHandler, closes: bool) -> None:
    """Ends this host's part in the meeting, as far as the other hosts can still be reached."""

    def close() -> None:
        with suppress(Exception):
            if closes:
                handler.shutdown()
            else:
                handler._stop_heartbeats()

    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(END_SECONDS / 2)


def _exit_code(result: RunResult | None, mailbox: Mailbox, asked: list[int]) -> int:
    """Says why the processes ended, where they did not say so themselves."""
    if mailbox.mistake():
        raise UserError(mailbox.mistake()) from None
    if mailbox.stopped():
        return mailbox.stopped()
    if result is None:
        print("another host ended the run", file=sys.stderr)
        return 1
    if not result.is_failed():
        return 0
    if asked:
        print("stopped before training began" if len(asked) == 1 else "stopped at once", file=sys.stderr)
        return _code_of(asked[0])
    rank, first = min(result.failures.items(), key=lambda item: item[1].timestamp)
    print(f"{describe_failure(result.failures)}; logs/rank-{rank}.txt says more", file=sys.stderr)
    return first.exitcode if first.exitcode > 0 else 1


def _say_why_alone(error: Exception, rendezvous: Rendezvous, mailbox: Mailbox) -> int:
    """One line for a host that lost the others or never met them."""
    if mailbox.mistake():
        raise UserError(mailbox.mistake()) from None
    if mailbox.stopped():
        return mailbox.stopped()
    place = f"{rendezvous.host}:{rendezvous.port}"
    if isinstance(error, RendezvousClosedError):
        print(f"the run at {place} was ended by another host", file=sys.stderr)
    elif isinstance(error, RendezvousTimeoutError):
        print(
            f"waited {rendezvous.join_timeout:g} s at {place} for {rendezvous.fewest} hosts (--nnodes, join_timeout); "
            "the same command goes on from the last checkpoint",
            file=sys.stderr,
        )
    else:
        print(f"lost the host at which all meet ({place}): {str(error).splitlines()[0]}", file=sys.stderr)
    return 1


def _code_of(number: int) -> int:
    """The exit code of a run that was asked to stop before there was anything to save."""
    return INTERRUPTED if number == signal.SIGINT else GO_ON_LATER


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    os.environ |= variables
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


@contextmanager
def _passing_on(mailbox: Mailbox) -> Iterator[list[int]]:
    """Inside, a request to stop goes to the processes, which then have all the time they need; gives those that came.

    torchrun's agent would send it to their children too and kill them after half a minute. A second Ctrl-C ends
    them at once.
    """
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        again = number == signal.SIGINT and len(asked) > 1
        processes = mailbox.alive()
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL if again else number)
        if not processes:  # they have not begun: SIGTERM ends them, where Ctrl-C would have them print tracebacks
            raise SignalException("asked to stop", signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
