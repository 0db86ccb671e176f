"""A process that has imported PyTorch and starts `paceline` commands as forks of itself.

Importing PyTorch takes several seconds of CPU time. A fork starts with all modules that the server has imported, so a
comparison of many short runs imports PyTorch only once. The server is for commands that do not use a GPU, because
CUDA does not support forks.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from paceline.core.errors import UserError
from paceline.core.files import open_append
from paceline.core.watch import die_with_parent
from paceline.launch.child import path_flags
from paceline.training.compile import keep_kernels

PROGRAM = "paceline"
# DistributedDataParallel imports torch._dynamo, which takes almost as long as importing torch.
MODULES = ("torch", "torch._dynamo")
START = "import sys; from paceline.launch.fork_server import serve; serve(int(sys.argv[1]), sys.argv[2:])"


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
        own = sorted(name for name in sys.modules if name.split(".")[0] == PROGRAM and not name.endswith("__main__"))
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
    sys.argv = [PROGRAM, *arguments]
    runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)
    sys.exit()
