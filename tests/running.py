"""Functions for tests that start `paceline` commands in real processes and wait for them."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from preloaded import MODULES

from paceline.core.watch import die_with_parent

ACTIVITY = " …\n"  # the end of a line about an activity, which only a real `paceline` command prints
TIMEOUT_SECONDS = 120.0  # long, since the machine may be busy
_names_of_ports = deque[socket.socket](maxlen=50)  # of those that were chosen last; others are closed
_is_fork = False  # whether this process was started by a function of this module
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(MODULES)


@dataclass
class Running:
    """A command that runs in a separate process and session."""

    folder: Path  # working directory, which also contains the output files
    pid: int
    wait_for_end: Callable[[float], int | None] = field(repr=False)

    @property
    def stdout(self) -> str:
        return self._output("stdout")

    @property
    def stderr(self) -> str:
        """What the command printed to stderr, without its activities."""
        lines = self._output("stderr").splitlines(keepends=True)
        return "".join(line for line in lines if not line.endswith(ACTIVITY))

    def _output(self, name: str) -> str:
        with suppress(FileNotFoundError):  # a new process has not opened its files yet
            return (self.folder / f"{name}-{self.pid}").read_text()
        return ""

    def wait(self, seconds: float = TIMEOUT_SECONDS) -> int:
        """Wait for the process and return its exit code, which is negative if a signal killed the process."""
        code = self.wait_for_end(seconds)
        assert code is not None, f"still running after {seconds:g} s:\n{self.stdout}\n{self.stderr}"
        return code

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process, unless it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def interrupt_group(self, number: int = signal.SIGINT) -> None:
        """Send SIGINT to the process group, as a terminal does on Ctrl-C."""
        os.killpg(self.pid, number)

    @property
    def ended(self) -> bool:
        return self.wait_for_end(0) is not None


def start_fork(
    folder: Path, *arguments: str, largest_file: int | None = None, environment: dict[str, str] | None = None
) -> Running:
    """Start `paceline ARGUMENTS` quickly, in a fork of a process that has already imported its modules."""
    return _fork(folder, environment or {}, largest_file, _run_command, arguments)


def start_ranks(folder: Path, size: int, *arguments: str) -> list[Running]:
    """Start `paceline ARGUMENTS` in several processes with the environment variables that torchrun sets."""
    return start_function_in_ranks(folder, size, _run_command, arguments)


def start_function_in_ranks(
    folder: Path, size: int, function: Callable[..., int | None], *values: Any
) -> list[Running]:
    """Start an importable function in several ranks; its return value, if any, is the exit code."""
    shared = {**_meeting_point(), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    environments = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(size)] if size > 1 else [{}]
    return [_fork(folder, environment, None, function, *values) for environment in environments]


def run_hosts(folders: list[Path], *arguments: str) -> list[Running]:
    """Run `paceline ARGUMENTS` to completion in one process per folder, as on hosts without a shared disk."""
    return run_function_on_hosts(folders, _run_command, arguments)


def run_function_on_hosts(folders: list[Path], function: Callable[..., int | None], *values: Any) -> list[Running]:
    """Run a function to completion in one process per folder, as on hosts without a shared disk."""
    shared = {**_meeting_point(), "WORLD_SIZE": len(folders), "GROUP_WORLD_SIZE": len(folders)}
    shared |= {"LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0}
    hosts = [_fork(folder, {**shared, "RANK": rank}, None, function, *values) for rank, folder in enumerate(folders)]
    for host in hosts:
        host.wait()
    return hosts


def free_port() -> int:
    """Return a free port below those that the kernel assigns, so that no connection takes it in the meantime.

    Until a process listens on the port, a socket with its number as name keeps other tests from choosing it, too.
    """
    while True:
        port, name = random.SystemRandom().randrange(20_000, 29_000), socket.socket(socket.AF_UNIX)
        with socket.socket() as listener, suppress(OSError):
            name.bind(f"\0paceline-test-port-{port}")
            listener.bind(("127.0.0.1", port))
            _names_of_ports.append(name)
            return port


def _meeting_point() -> dict[str, Any]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}


def _fork(
    folder: Path,
    environment: dict[str, Any],
    largest_file: int | None,
    function: Callable,
    *values: Any,
    log: Path | None = None,
) -> Running:
    texts = {name: str(value) for name, value in environment.items()}
    values = (str(folder), texts, largest_file, function, values, log)
    process = _forks.Process(target=_run_fork, args=values, daemon=True)
    process.start()
    assert process.pid

    def wait(seconds: float) -> int | None:
        process.join(seconds)
        return process.exitcode

    return Running(folder, process.pid, wait)


def start_command(folder: Path, *arguments: str, before: tuple[str, ...] = ()) -> Running:
    """Start `paceline ARGUMENTS` as a user would; `before` is a command prefix such as nohup."""
    pending = [(folder / name).open("wb") for name in ("stdout", "stderr")]
    command = [*before, sys.executable, "-m", "paceline", *arguments]
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=pending[0],
        stderr=pending[1],
        start_new_session=True,
        preexec_fn=die_with_parent,  # end the command if its test fails
    )
    for file in pending:
        file.close()
        os.rename(file.name, f"{file.name}-{process.pid}")

    def wait(seconds: float) -> int | None:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    return Running(folder, process.pid, wait)


def run_fork(
    folder: Path, *arguments: str, largest_file: int | None = None, environment: dict[str, str] | None = None
) -> Running:
    """Run `paceline ARGUMENTS` in a fork and wait until the command ends."""
    running = start_fork(folder, *arguments, largest_file=largest_file, environment=environment)
    running.wait()
    return running


def kill_together(ranks: list[Running]) -> None:
    """Kill ranks so that none of them can notice the end of another one, however long this takes."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for rank in ranks:
            rank.kill(number)


def run_ranks(folder: Path, size: int, *arguments: str) -> list[int]:
    """Run a command in several processes and return their exit codes."""
    return [running.wait() for running in start_ranks(folder, size, *arguments)]


def _run_fork(
    folder: str,
    environment: dict[str, str],
    largest_file: int | None,
    function: Callable,
    values: tuple[Any, ...],
    log: Path | None = None,
) -> None:
    global _is_fork
    _is_fork = True
    die_with_parent()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    os.setsid()
    os.chdir(folder)
    os.environ |= environment
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(log or f"{name}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | (os.O_APPEND if log else os.O_TRUNC))
        os.dup2(file, number)
        os.close(file)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if largest_file is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    code = 1
    try:
        code = function(*values) or 0
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_command(arguments: tuple[str, ...]) -> int:
    from paceline.cli.app import run

    if arguments[:1] == ("compare",):
        from paceline.commands import compare

        compare.ForkServers = QuickForks  # type: ignore[assignment, misc]
    return run(list(arguments))


class QuickForks:
    """Stands in for the fork servers of a comparison, which import PyTorch again: this process has imported it."""

    def __enter__(self) -> QuickForks:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> QuickFork:
        """Start a `paceline` command in a fork of this process, if it is a fork itself and so has few threads."""
        words = tuple(arguments)
        if not _is_fork:
            running = _fork(Path.cwd(), dict(environment), None, _run_command, words, log=log)
            return QuickFork(running.pid, lambda: running.wait_for_end(0))
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        pid = os.fork()
        if not pid:
            for number in signals:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
            _run_fork(os.getcwd(), dict(environment), None, _run_command, (words,), log)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

        def poll() -> int | None:
            ended, status = os.waitpid(pid, os.WNOHANG)
            return os.waitstatus_to_exitcode(status) if ended else None

        return QuickFork(pid, poll)


class QuickFork:
    """A command that `QuickForks` started."""

    def __init__(self, pid: int, poll: Callable[[], int | None]) -> None:
        self.pid, self._poll, self._code = pid, poll, None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._poll()
        return self._code

    def wait(self) -> int:
        wait_until(lambda: self.poll() is not None)
        return self._code or 0

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def wait_until(condition: Callable[[], Any], running: Running | None = None, seconds: float = TIMEOUT_SECONDS) -> Any:
    """Wait until a condition is true, and return its value."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        value = condition()
        if value:
            return value
        if running and running.ended:
            value = condition()  # the condition may have become true just before the exit
            assert value, f"ended too early: exit code {running.wait()}\n{running.stdout}\n{running.stderr}"
            return value
        time.sleep(0.005)
    raise AssertionError(
        f"not true within {seconds:g} s" + (f":\n{running.stdout}\n{running.stderr}" if running else "")
    )


def workers_of(launcher: int) -> dict[int, int]:
    """Return the process id of each rank that a launcher started."""
    ranks = {}
    for pid in _processes():
        if _read(pid, "stat").rpartition(")")[2].split()[1:2] == [str(launcher)]:
            environment = dict(word.partition("=")[::2] for word in _read(pid, "environ").split("\0"))
            if "RANK" in environment:
                ranks[int(environment["RANK"])] = pid
    return ranks


def wait_for_workers(launcher: Running, count: int = 2) -> dict[int, int]:
    """Wait until a launcher has started its worker processes; return the process id of each rank."""
    wait_until(lambda: len(workers_of(launcher.pid)) == count, launcher)
    return workers_of(launcher.pid)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended; a zombie has."""
    return not _read(pid, "cmdline")


def processes_naming(text: str) -> list[int]:
    """Return other live processes with this text in their command line or environment."""
    found = [pid for pid in _processes() if text in _read(pid, "cmdline") + _read(pid, "environ")]
    return [pid for pid in found if pid != os.getpid()]


def _processes() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def _read(pid: int, name: str) -> str:
    try:
        return Path("/proc", str(pid), name).read_text(errors="replace")
    except OSError:
        return ""


def metrics_without_times(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without times and readings of the host, which differ between identical runs."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    varying = ("time/", "host/", "ranks/")
    return [
        {name: value for name, value in row.items() if name not in ("time", "seconds") and not name.startswith(varying)}
        for row in rows
    ]


def weights_of(run: Path, images: int | None = None) -> dict[str, bytes]:
    """Return the contents of the tensor files in the last checkpoint, or in the one at `images`."""
    folders = sorted(path for path in (run / "checkpoints").iterdir() if path.name.isdigit())
    folder = folders[-1] if images is None else run / "checkpoints" / f"{images:012d}"
    return {name: (folder / name).read_bytes() for name in ("weights.safetensors", "state.safetensors", "state.json")}
