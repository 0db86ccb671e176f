"""Writing stacks on a signal leaves the settings of a program that uses Paceline as they were."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import faulthandler, os, pathlib, signal, sys, threading
from paceline.core.watch import STACK_SIGNAL, dump_stacks_on_signal, stop_dumping_stacks
from paceline.core.watch import recorder

log, own = pathlib.Path("log.txt"), open("own.txt", "w")
{before}
for _ in range(2):  # as in a run with two stages
    dump_stacks_on_signal(log)
    dumps = recorder().record().dumps_stacks
    {during}
    stop_dumping_stacks()
{after}
print("ok")
"""


def run_program(folder: Path, before: str = "", during: str = "", after: str = "", **environment: str) -> str:
    code = PROGRAM.format(before=before, during=during, after=after)
    paths = {"PYTHONPATH": ":".join(sys.path), "PATH": ""}
    command = [sys.executable, "-c", code]
    finished = subprocess.run(command, cwd=folder, env=paths | environment, capture_output=True, text=True, timeout=60)
    assert finished.stdout == "ok\n", f"{finished.returncode}: {finished.stderr}"
    return (folder / "log.txt").read_text()


SEND = "os.kill(os.getpid(), STACK_SIGNAL)"


def test_a_signal_writes_the_stacks(tmp_path: Path) -> None:
    log = run_program(tmp_path, during=f"assert dumps; {SEND}")
    assert log.count("most recent call first") == 2


def test_a_python_handler_of_the_signal_keeps_working(tmp_path: Path) -> None:
    before = "got = []; handler = lambda *_: got.append(1); signal.signal(STACK_SIGNAL, handler)"
    during = f"assert not dumps; {SEND}"
    after = f"{SEND}; assert len(got) == 3 and signal.getsignal(STACK_SIGNAL) is handler"
    assert run_program(tmp_path, before, during, after) == ""


def test_the_default_effect_of_the_signal_is_restored_unless_a_launcher_may_still_send_it(tmp_path: Path) -> None:
    default = "assert not int(next(line.split()[1] for line in open('/proc/self/status') if 'SigIgn' in line), 16)"
    run_program(tmp_path, after=f"{default} >> (STACK_SIGNAL - 1) & 1")
    run_program(tmp_path, after=SEND, PACELINE_PULSE_FILE=str(tmp_path / "pulse"))


def test_a_crash_is_still_reported_where_the_program_wants_it(tmp_path: Path) -> None:
    before = "faulthandler.enable(own)"
    assert run_program(tmp_path, before, after="assert faulthandler.is_enabled()") == ""
    run_program(tmp_path, after="assert not faulthandler.is_enabled()")
