"""Start the Python processes of a launcher or a comparison as forks of a process that has already imported PyTorch.

Importing PyTorch takes 2 s, and most tests of several processes are not about the start of Python. Each process is a
child of the process that starts it, in its own session, and has the command line and environment of a new process in
/proc. `start_command` starts new interpreters instead.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from paceline.core.heartbeat import die_with_parent

PR_SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>
FREE = 200  # descriptors from here on are not used for anything else
MAX_MESSAGE = 1 << 17  # bytes
_libc = ctypes.CDLL(None)


def start_warm() -> None:
    """From now on, start Python processes as forks of this process as it is now, which must have only one thread."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    this = os.getpid()
    if os.fork() == 0:
        ours.close()
        os.setsid()  # signals to the process group of the command must not end this process
        die_with_parent(this)
        _serve(theirs, this)
    theirs.close()
    WarmPopen.server = ours
    subprocess.Popen = subprocess_handler.Popen = WarmPopen  # type: ignore[misc]


class WarmPopen(subprocess.Popen):
    """Starts `python -m` and `python -c` in a fork, and other programs as usual."""

    server: socket.socket
    _one_at_a_time = threading.Lock()

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
        preexec_fn: Callable[[], None] | None = None,
        **others: Any,
    ) -> None:
        streams = [stdin, stdout, stdout if stderr == subprocess.STDOUT else stderr]
        is_python = args[0] == sys.executable and bool({"-m", "-c"} & set(args)) and start_new_session
        if not is_python or others or subprocess.PIPE in streams:
            more = {"pass_fds": pass_fds, "start_new_session": start_new_session, "preexec_fn": preexec_fn, **others}
            super().__init__(args, env=env, stdin=stdin, stdout=stdout, stderr=stderr, **more)
            return
        with Path(os.devnull).open("r+b", buffering=0) as null, self._one_at_a_time:
            opened = {target: null if one == subprocess.DEVNULL else one for target, one in enumerate(streams)}
            files = {target: one for target, one in opened.items() if one is not None} | {fd: fd for fd in pass_fds}
            request = {"args": args, "env": dict(os.environ if env is None else env), "targets": [*files]}
            request |= {"folder": os.getcwd(), "dies": preexec_fn is die_with_parent}
            fds = [one if isinstance(one, int) else one.fileno() for one in files.values()]
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the parent of the fork ends, and this process becomes it
            socket.send_fds(self.server, [json.dumps(request).encode()], fds)
            self.pid = int(self.server.recv(MAX_MESSAGE))
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        self.args, self.returncode, self._child_created, self._waitpid_lock = args, None, True, threading.Lock()
        self.stdin = self.stdout = self.stderr = None


def _serve(server: socket.socket, parent: int) -> None:
    """Start a fork for each request until the parent ends; return only in the forks, with an exception."""
    while True:
        message, fds, _, _ = socket.recv_fds(server, MAX_MESSAGE, 16)
        if not message:
            os._exit(0)
        between = os.fork()
        if between == 0:
            if os.fork() == 0:
                while os.getppid() != parent:
                    time.sleep(0.001)
                server.send(str(os.getpid()).encode())
                server.close()
                _run(fds, **json.loads(message))
            os._exit(0)
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def _run(fds: list[int], args: list[str], env: dict[str, str], targets: list[int], folder: str, dies: bool) -> None:
    """Do what a new Python interpreter would do with these arguments."""
    os.setsid()
    if dies:
        die_with_parent()
    os.chdir(folder)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, FREE) for fd in fds]  # a descriptor may be the target of another one
    for fd, target in zip(high, targets, strict=True):
        os.dup2(fd, target)
    for fd in {*high, *fds} - {*targets}:
        os.close(fd)
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    os.environ.update(env)  # for C, too: libc copies each variable, so that the initial ones may be overwritten
    _show_in_proc(args, env)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    start = next(number for number, word in enumerate(args) if word in ("-m", "-c"))
    how, program, *sys.argv[1:] = args[start:]
    sys.argv[0] = how
    if how == "-c":
        exec(program, {"__name__": "__main__"})
    else:
        sys.modules.pop(program, None)
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    raise SystemExit


def _show_in_proc(args: list[str], env: dict[str, str]) -> None:
    """Write the command line and the environment where /proc/PID/cmdline and environ read them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first_arg, end_of_args, first_variable, end_of_variables = map(int, fields[45:49])
    mark = sorted((f"{name}={value}" for name, value in env.items()), key=lambda one: not one.startswith("RANK="))
    for words, start, end in ((args, first_arg, end_of_args), (mark, first_variable, end_of_variables)):
        text = "\0".join(words).encode()[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
