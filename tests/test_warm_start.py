"""Processes that the tests fork look like processes that start a new Python interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from running import start_function_in_ranks
from warm_start import WarmPopen, start_warm

from paceline.core.heartbeat import die_with_parent

CODE = """
import json, os, sys
own = {word for word in open("/proc/self/environ").read().split("\\0") if word.startswith("RANK")}
print(json.dumps({
    "arguments": sys.argv, "environment": dict(os.environ), "folder": os.getcwd(), "shown_environment": sorted(own),
    "command_line": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"), "parent": os.getppid(),
    "leads_session": os.getsid(0) == os.getpid(), "passed": os.pread(int(sys.argv[1]), 4, 0).decode(),
}))
print("an error", file=sys.stderr)
sys.exit(3)
"""


def start_both(folder: str) -> None:
    """Start the same program as a fork and in a new interpreter, and write down what each one found."""
    new_interpreter = subprocess.Popen
    start_warm()
    Path(folder, "passed").write_text("1234")
    for name, start in (("new", new_interpreter), ("fork", subprocess.Popen)):
        with Path(folder, "passed").open() as passed, Path(folder, name).open("w") as output:
            fd = passed.fileno()
            process = start(
                [sys.executable, "-u", "-c", CODE, str(fd), "two words"],
                env={**os.environ, "RANK": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[fd],
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
            assert isinstance(process, WarmPopen) == (name == "fork")
            assert process.wait() == 3
    killed = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], start_new_session=True)
    assert isinstance(killed, WarmPopen) and killed.poll() is None
    killed.kill()
    assert killed.wait(60) == -9


def test_a_forked_process_finds_what_a_new_interpreter_finds(tmp_path: Path) -> None:
    (running,) = start_function_in_ranks(tmp_path, 1, start_both, str(tmp_path))
    assert running.wait() == 0, running.stderr
    new, fork = ((tmp_path / name).read_text().splitlines() for name in ("new", "fork"))
    assert new[1:] == fork[1:] == ["an error"]
    assert json.loads(new[0]) == json.loads(fork[0])
    found = json.loads(fork[0])
    assert (found["parent"], found["passed"], found["shown_environment"]) == (running.pid, "1234", ["RANK=1"])
