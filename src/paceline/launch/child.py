"""Runs `paceline` commands in child processes that log to files and stop cleanly when this process is stopped.

Importing PyTorch takes several seconds of CPU time. A fork server is a process that has imported PyTorch and starts
commands as forks of itself, so a comparison of many short runs imports PyTorch only once. It is for commands that do
not use a GPU, because CUDA does not support forks.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, Protocol, Self

from paceline.core.errors import UserError
from paceline.core.files import open_append
from paceline.core.trust import trusts_files
from paceline.core.types import SettingValue
from paceline.core.watch import die_with_parent
from paceline.training.compile import keep_kernels
from paceline.training.stop import handling_stop_signals, leave_terminal

MAX_REASON_LENGTH = 400  # maximum length of a failure reason
POLL_SECONDS = 0.2


class Stopped(Exception):
    """Raised when the user has requested a stop and the command has exited."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def to_arguments(flags: Mapping[str, SettingValue], config_file: str, assignments: Iterable[str]) -> list[str]:
    """Return a run's settings as command-line arguments: --trust if given, flags, then --config, then --set."""
    arguments = ["--trust"] if trusts_files() else []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            arguments.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            arguments += [flag, str(value)]
    arguments += ["--config", config_file] if config_file else []
    return arguments + [word for one in assignments for word in ("--set", one)]


class Process(Protocol):
    """A process that runs a `paceline` command."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def send_signal(self, number: int, /) -> None: ...


# Starts a `paceline` command, given its arguments, the log file for its output and additional environment variables.
Start = Callable[[Sequence[str], Path, Mapping[str, str]], Process]


def path_flags() -> list[str]:
    """Return flags for Python: -P, unless this process imports modules from the current folder, too.

    `python -m` and `python -c` import them, so a file such as random.py would replace a module of the standard library.
    """
    return [] if {"", os.getcwd()} & set(sys.path) else ["-P"]


def start_process(arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> Process:
    """Start a `paceline` command in a new Python process."""
    with os.fdopen(open_append(log), "wb") as output:
        return subprocess.Popen(
            [sys.executable, *path_flags(), "-m", "paceline", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # otherwise the command would receive a terminal's Ctrl-C twice
            preexec_fn=die_with_parent,
            env={**os.environ, **environment},
        )


class Child:
    """A `paceline` command that runs in a child process and writes its output to a log file."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        start: Start = start_process,
    ) -> None:
        self.stopping = False  # whether a stop signal was sent to the command
        log.parent.mkdir(parents=True, exist_ok=True)
        os.close(open_append(log, truncate=True))
        self._process = start(arguments, log, environment or {})

    def poll(self) -> int | None:
        """Return the command's exit code, or None while the command is running."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send a stop signal to the command."""
        self.stopping = True
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the command and the processes that it started, unless the command has exited."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has exited in the meantime
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextmanager
def forwarded_signals(children: Collection[Child]) -> Iterator[list[int]]:
    """Forward Ctrl-C and other stop signals to the children, and yield a list of the signals received so far.

    `children` may change inside the `with` block. Children that are still running at the end of the block are killed.
    """
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if number == signal.SIGHUP:
            leave_terminal()
        for child in children:
            child.send(number)

    with handling_stop_signals(forward):
        try:
            yield received
        finally:
            for child in children:
                child.kill()


def stop_late(children: Iterable[Child], received: Sequence[int]) -> None:
    """Stop children that were being started when a stop signal arrived."""
    for child in children:
        if received and not child.stopping:
            child.send(received[0])


def run_paceline(arguments: Sequence[str], log: Path, start: Start = start_process) -> int:
    """Run a command and write its output to `log`; return the exit code. Ctrl-C is forwarded to the command."""
    children: list[Child] = []
    with forwarded_signals(children) as received:
        children.append(Child(arguments, log, start=start))
        stop_late(children, received)
        while (code := children[0].poll()) is None:
            time.sleep(POLL_SECONDS)
    if received:
        raise Stopped(received[0])
    return code


def failure_reason(log: Path) -> str:
    """Return why a command failed, from its log: the last user error, or else the last line."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("paceline: ")]
    reason = errors[-1].removeprefix("paceline: ") if errors else (lines[-1] if lines else "it printed nothing")
    return reason[-MAX_REASON_LENGTH:]


# DistributedDataParallel imports torch._dynamo, which takes almost as long as importing torch.
MODULES = ("torch", "torch._dynamo")
START = "import sys; from paceline.launch.child import serve; serve(int(sys.argv[1]), sys.argv[2:])"


class ForkedProcess:
    """A command that the server has started; its methods correspond to those of `subprocess.Popen`."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid, self._server = pid, server
        self.exit_code: int | None = None  # set by the server's messages

    def poll(self) -> int | None:
        """Return the exit code, or None while the command is running."""
        self._server.read_messages(wait=False)
        return self.exit_code

    def wait(self) -> int:
        """Wait until the command has ended, and return its exit code."""
        while (code := self.poll()) is None:
            self._server.read_messages(wait=True)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the command, unless it has ended. Signal handlers may call this method."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkServer:
    """Starts commands as forks of a process that has imported PyTorch and Paceline.

    All commands have the environment variables of the server. Libraries such as OpenMP read them while they are
    imported, so a different environment needs a different server. `close` ends the server and all commands.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        # The commands that have not ended. A later command may have the process ID of one that has ended.
        self._running: dict[int, ForkedProcess] = {}
        self._started: ForkedProcess | None = None  # the command that was started last
        self._has_ended = False
        self._unread = b""  # the beginning of a message that has not arrived completely
        self._socket, other = socket.socketpair()
        keep_kernels()
        # The modules of Paceline that this process has imported are those that the commands will need.
        own = sorted(name for name in sys.modules if name.split(".")[0] == "paceline" and not name.endswith("__main__"))
        with other:
            self._process = subprocess.Popen(
                [sys.executable, *path_flags(), "-c", START, str(other.fileno()), *MODULES, *own],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal must not end the server
                preexec_fn=die_with_parent,
                env={**os.environ, **environment},
            )

    def close(self) -> None:
        """End the server. The commands die with it."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def start(self, arguments: Sequence[str], log: Path) -> ForkedProcess:
        """Start a `paceline` command that appends its output to a file."""
        os.close(open_append(log))  # raises an error here if the log cannot be written
        self._started = None
        request = {"arguments": [*arguments], "log": str(log), "folder": os.getcwd()}
        with suppress(OSError):  # if the server has died, `read_messages` reports that
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        while self._started is None:
            self.read_messages(wait=True)
            if self._has_ended:
                raise UserError("the process that starts the runs ended unexpectedly; run the same command again")
        return self._started

    def read_messages(self, *, wait: bool) -> None:
        """Read what the server has reported: commands that have started, and commands that have ended."""
        timeout = None if wait else 0
        while select.select([self._socket], [], [], timeout)[0]:
            timeout = 0
            try:
                received = self._socket.recv(4096)
            except ConnectionResetError:
                received = b""
            if not received:
                self._has_ended = True
                for command in self._running.values():  # the commands die with the server
                    command.exit_code = -signal.SIGKILL
                self._running.clear()
                return
            *lines, self._unread = (self._unread + received).split(b"\n")
            for message in map(json.loads, lines):
                if "exit_code" in message:
                    self._running.pop(message["pid"]).exit_code = message["exit_code"]
                else:
                    self._started = self._running[message["pid"]] = ForkedProcess(message["pid"], self)


class ForkServers:
    """Starts each command in the fork server for its environment; leaving the `with` block ends all commands."""

    def __init__(self) -> None:
        self._servers: dict[tuple[tuple[str, str], ...], ForkServer] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers.values():
            server.close()

    def start(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> ForkedProcess:
        """Start a `paceline` command with additional environment variables."""
        key = tuple(sorted({**os.environ, **environment}.items()))  # this process's environment may have changed
        if key not in self._servers:
            self._servers[key] = ForkServer(environment)
        return self._servers[key].start(arguments, log)


def serve(descriptor: int, modules: Sequence[str]) -> None:
    """Import the modules, then start a fork for each request until the client closes the connection."""
    for name in modules:
        with suppress(ImportError):
            importlib.import_module(name)
    server = os.getpid()
    connection = socket.socket(fileno=descriptor)
    requests = connection.makefile("r")
    ended, wake = socket.socketpair()  # a SIGCHLD makes `ended` readable
    for end in (ended, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake.fileno())
    while True:
        ready, _, _ = select.select([connection, ended], [], [])
        if ended in ready:
            ended.recv(4096)
            _report_ended(connection)
        if connection in ready:
            line = requests.readline()  # the client waits for the answer before it sends the next request
            if not line:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for one in (requests, connection, ended, wake):
                    one.close()
                os.setpgid(0, 0)
                die_with_parent(server)
                _run_command(**json.loads(line))
            with suppress(OSError):  # the command has ended
                os.setpgid(pid, pid)  # the client may kill the command's process group as soon as it has the answer
            _send(connection, {"pid": pid})


def _report_ended(connection: socket.socket) -> None:
    with suppress(ChildProcessError):  # there are no children
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = found
            _send(connection, {"pid": pid, "exit_code": os.waitstatus_to_exitcode(status)})


def _send(connection: socket.socket, message: Mapping[str, int]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _run_command(arguments: list[str], log: str, folder: str) -> NoReturn:
    """Run a command in this process, as `python -m paceline` does, and exit."""
    os.chdir(folder)
    output = open_append(Path(log))
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    sys.argv = ["paceline", *arguments]
    runpy.run_module("paceline", run_name="__main__", alter_sys=True)
    sys.exit()
