"""Several processes on this machine through torchrun's agent."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from paceline.engine.signals import GO_ON_LATER, INTERRUPTED, SIGNALS
from paceline.errors import UserError
from paceline.processes import die_with_parent

LAUNCHER = "PACELINE_LAUNCHER"  # the process id of the one that started this process
MEETING_FOLDER = "PACELINE_MEETING_FOLDER"  # where the processes leave notes for it: their ids, a person's mistake
MISTAKE = "mistake"
OTHERS_WAIT_SECONDS = 2.0  # for the mistake that ended the run, by a process that only lost its peers


def run_processes(module: str, arguments: list[str], processes: int) -> int:
    """Runs `python -m module arguments` in several processes that meet on loopback; gives their exit code."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="paceline-") as name:
        folder = Path(name)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=folder.name,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            rdzv_configs={"is_host": True},
            max_restarts=0,
            monitor_interval=0.1,
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir=name),
            signals_to_handle="SIGHUP,SIGQUIT",  # the others are passed on below, with time to save
        )
        with _environment({LAUNCHER: str(os.getpid()), MEETING_FOLDER: name}), _passing_on(folder) as asked:
            try:
                elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
                return 0
            except SignalException as stop:
                return 128 + int(asked[0] if asked else stop.sigval)
            except ChildFailedError as failure:
                return _exit_code(failure, folder, asked)


def _exit_code(failure: ChildFailedError, folder: Path, asked: list[int]) -> int:
    """Says why the processes ended, where they did not say so themselves."""
    if (folder / MISTAKE).exists():
        raise UserError((folder / MISTAKE).read_text()) from None
    codes = {one.exitcode for one in failure.failures.values()}
    for stopped in (INTERRUPTED, GO_ON_LATER):
        if stopped in codes:
            return stopped
    if asked:
        print("stopped before training began" if len(asked) == 1 else "stopped at once", file=sys.stderr)
        return 128 + asked[0]
    rank, first = min(failure.failures.items(), key=lambda item: item[1].timestamp)
    how = f"ended with exit code {first.exitcode}" if first.exitcode > 0 else f"was killed by signal {-first.exitcode}"
    print(f"rank {rank} {how}; logs/rank-{rank}.txt says more", file=sys.stderr)
    return first.exitcode if first.exitcode > 0 else 1


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    os.environ |= variables
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


@contextmanager
def _passing_on(folder: Path) -> Iterator[list[int]]:
    """Inside, a request to stop goes to the processes, which then have all the time they need; gives those that came.

    torchrun's agent would send it to their children too and kill them after half a minute. A second Ctrl-C ends
    them at once.
    """
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        again = number == signal.SIGINT and len(asked) > 1
        processes = [int(file.name.removeprefix("process-")) for file in folder.glob("process-*")]
        for process in processes:
            try:
                os.kill(process, signal.SIGKILL if again else number)
            except ProcessLookupError:
                continue
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


def report_for_work() -> None:
    """Called first by a process that a launcher started: it dies with the launcher, and can be asked to stop."""
    if LAUNCHER not in os.environ:
        return
    die_with_parent(int(os.environ[LAUNCHER]))
    Path(os.environ[MEETING_FOLDER], f"process-{os.getpid()}").touch()


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
