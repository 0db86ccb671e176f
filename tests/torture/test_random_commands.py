"""Random command lines end in time, with a documented exit code and one line for an error, and leave nothing behind.

`WALK_COMMANDS` is the number of commands, `WALK_SEED` draws others, `WALK_ONLY` runs those of certain numbers (comma
separated).
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pkgutil
import random
import re
import resource
import shlex
import shutil
import signal
import stat
import sys
import tempfile
import termios
import threading
import time
import tty
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from preloaded import MODULES
from probes import fingerprint
from random_commands import Line, Pool, draw_line, lay_out, make_pool
from running import ACTIVITY, Running, start_function_in_ranks

from paceline.core.terminal import CONTROLS, ERASE_LINE

pytestmark = [pytest.mark.torture, pytest.mark.timeout(4 * 3600)]

COMMANDS = int(os.environ.get("WALK_COMMANDS", "150"))
SEED = os.environ.get("WALK_SEED", "1")
AT_ONCE = 2
ONLY = [int(number) for number in os.environ.get("WALK_ONLY", "").split(",") if number]

SILENT_SECONDS = 2.0  # on a terminal; see `_Watch` for the clock
SILENT_SECONDS_IN_FILES = 12.0  # elsewhere, a line is printed at least every ten seconds
LIMIT_SECONDS = 60.0
END_SECONDS = 10.0  # from a signal to the end
LIMIT_BYTES = 3 * 2**30  # of address space, in addition to what a process has mapped at the start
LARGEST_FILE = 64 * 2**20
LONGEST_STEP = 0.25  # seconds between two looks at a command; if it was longer, the machine stood still
LARGEST_TEXT = 10**6  # characters
MOST_PROCESSES = 40
STARTED = "started"  # a file that marks the start of the command's entry point
COLUMNS = 200
SERVERS = {"board"}  # serve until a signal, and are silent until then
GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "train.md"
PACKAGES = ("commands", "recipes", "data.sources", "data.shards", "board", "inference", "images.regions")
_multiprocessing = threading.Lock()  # each start of a process also polls those of other threads
STOPPED = {signal.SIGINT: {130}, signal.SIGTERM: {75, 143}}


def documented_codes() -> set[int]:
    """Return the exit codes in the table of the guide."""
    _, _, table = GUIDE.read_text().partition("| exit code | meaning |\n")
    rows = [line.split("|")[1] for line in table.partition("\n\n")[0].splitlines()[1:]]
    return {int(code) for row in rows for code in row.split(",")}


def _preload() -> None:
    """Import the modules of all commands before forking, unless other tests have forked before."""
    packages = [import_module(f"paceline.{name}") for name in PACKAGES]
    found = [f"{one.__name__}.{module.name}" for one in packages for module in pkgutil.iter_modules(one.__path__)]
    multiprocessing.get_context("forkserver").set_forkserver_preload([*MODULES, *found])


@dataclass
class Outcome:
    """What a command did."""

    code: int
    on_terminal: bool
    text: str = ""
    errors: str = ""
    silence: float = 0.0  # the longest one
    silent_after: str = ""  # the last line before it
    sent: int = 0  # the signal that stopped the command
    faults: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    _preload()
    return make_pool(tmp_path_factory.mktemp("walk") / "pool", SEED)


def test_random_commands_end_in_time_with_a_documented_code_and_leave_nothing(
    pool: Pool, tmp_path: Path, tally: Any
) -> None:
    counted = tally("random commands")
    codes, lock = documented_codes(), threading.Lock()
    before = fingerprint([pool.folder])

    def run(number: int) -> None:
        line = draw_line(pool, SEED, number)
        outcome = run_line(pool, line, tmp_path / str(number), codes)
        if len(outcome.faults) == 1 and "silent for" in outcome.faults[0]:  # perhaps the machine stood still
            outcome = run_line(pool, line, tmp_path / f"{number}-again", codes)
        with lock:
            faults = "; ".join(outcome.faults)
            counted.add(f"command {number}", f"{faults}\n{reproduction(line, outcome)}" if faults else "")

    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(run, ONLY or range(COMMANDS)))
    assert fingerprint([pool.folder]) == before
    counted.check()


def run_line(pool: Pool, line: Line, folder: Path, codes: set[int]) -> Outcome:
    """Run a command line in a new folder, and return what it did; remove the folder unless there are faults."""
    work = folder / "work"
    lay_out(pool, line, work)
    for name in ("tmp", "home"):
        (folder / name).mkdir()
    before, shared = fingerprint([work]), set(os.listdir("/dev/shm"))
    chance = random.Random(f"{SEED} {line.number} run")
    environment = {"TMPDIR": folder / "tmp", "HOME": folder / "home", "XDG_CACHE_HOME": pool.folder.parent / "cache"}
    environment |= {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1", "WALK": folder}
    environment["COLUMNS"] = COLUMNS
    with _Output(folder, on_terminal=chance.random() < 0.75) as output:
        names = {name: str(value) for name, value in environment.items()}
        with _multiprocessing:
            (running,) = start_function_in_ranks(work, 1, _enter, line.words, output.paths, names)
        watch = _Watch(running, output)
        stop_after = chance.uniform(0.2, 3) if line.command in SERVERS else chance.uniform(2, 8)
        outcome = watch.follow(line, stop_after, chance.choice((signal.SIGINT, signal.SIGTERM)))
        left = watch.left_behind(folder)
        outcome.text, outcome.errors = output.text, output.errors
    outcome.faults += [*left, *_faults(line, outcome, codes)]
    for name in os.listdir(folder / "tmp"):
        outcome.faults.append(f"left {name} in the temporary folder")
    outcome.faults += [f"wrote {name} to the home folder" for name in os.listdir(folder / "home")]
    pids = {str(pid) for pid in watch.pids}
    for name in set(os.listdir("/dev/shm")) - shared:
        if pids & set(re.findall(r"\d+", name)):
            outcome.faults.append(f"left {name} in /dev/shm")
    outcome.faults += _changes(line, work, before, running.pid)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode), f"/dev/null is gone after {line.words}"
    if not outcome.faults:
        shutil.rmtree(folder)
    return outcome


def _enter(words: tuple[str, ...], paths: list[str], environment: dict[str, str]) -> int:
    """Run the entry point of the `paceline` command in this process, with limits on memory and files."""
    for number, path in enumerate(paths, start=1):
        file = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    os.environ |= environment
    tempfile.tempdir = None
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    warnings.filterwarnings("ignore", module="torch.cuda")  # the memory limit keeps CUDA from starting
    resource.setrlimit(resource.RLIMIT_AS, (mapped + LIMIT_BYTES, mapped + LIMIT_BYTES))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.argv = ["paceline", *words]
    Path(environment["WALK"], STARTED).touch()
    from paceline.cli.start import main

    main()
    return 0


class _Output:
    """The output of a command: one terminal for everything, or two files."""

    def __init__(self, folder: Path, on_terminal: bool) -> None:
        self.on_terminal, self.paths = on_terminal, [str(folder / name) for name in ("out", "err")]
        if on_terminal:
            reader, self._writer = os.openpty()
            tty.setraw(self._writer)
            termios.tcsetwinsize(self._writer, (50, COLUMNS))
            self.paths, self._files = [os.ttyname(self._writer)] * 2, [reader]
        else:
            self._files = [os.open(path, os.O_RDONLY | os.O_CREAT, 0o600) for path in self.paths]
        self._texts = [""] * len(self._files)
        for file in self._files:
            os.set_blocking(file, False)

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (*self._files, *([self._writer] if self.on_terminal else [])):
            os.close(file)

    def read(self) -> bool:
        """Read what is new, and return whether there is anything."""
        found = False
        for number, file in enumerate(self._files):
            with suppress(BlockingIOError):
                while part := os.read(file, 65536):
                    self._texts[number] = (self._texts[number] + part.decode(errors="replace"))[-LARGEST_TEXT:]
                    found = True
        return found

    @property
    def text(self) -> str:
        """The lines on stdout and stderr, without activities and progress bars."""
        return "".join(map(_lines_of, self._texts))

    @property
    def errors(self) -> str:
        """The lines on stderr or, if there is one terminal, all lines."""
        return _lines_of(self._texts[-1])

    @property
    def end(self) -> str:
        return " | ".join(text[-100:] for text in self._texts)


def _lines_of(text: str) -> str:
    """Return lines as a terminal would show them, each long line in one piece, without activities."""
    shown = [CONTROLS.sub("", line.rpartition(ERASE_LINE)[2]).rpartition("\r")[2] for line in text.split("\n")]
    kept = [line for line in shown if line.strip() and not f"{line}\n".endswith(ACTIVITY) and "━━━" not in line]
    return re.sub(r"\n  (?! )", " ", "\n".join([*kept, ""]))


class _Watch:
    """Follows a command.

    Its clock stands still while the threads of the command wait for a processor, since the machine may be busy.
    """

    def __init__(self, running: Running, output: _Output) -> None:
        self.running, self.output, self.pids = running, output, {running.pid}
        self._delays: dict[str, int] = {}
        self._read_at = time.monotonic()

    def follow(self, line: Line, stop_after: float, number: signal.Signals) -> Outcome:
        """Wait until a command has ended, which is stopped by a signal after some seconds."""
        outcome = Outcome(0, self.output.on_terminal)
        now = quiet_since = 0.0
        until = LIMIT_SECONDS
        while (code := self._exit_code()) is None:
            now += self._step()
            if self.output.read() or (outcome.sent and line.command in SERVERS):
                quiet_since = now
            if now - quiet_since > outcome.silence and not (line.command in SERVERS and self.output.text):
                outcome.silence, outcome.silent_after = now - quiet_since, self.output.end
            if not outcome.sent and now > stop_after and (self.running.folder.parent / STARTED).exists():
                outcome.sent, until = number, now + END_SECONDS
                self.running.kill(number)
            if now > until or (len(self.pids) > MOST_PROCESSES and until < math.inf):
                many = len(self.pids) > MOST_PROCESSES
                since = f"after {'SIGINT' if number == signal.SIGINT else 'SIGTERM'}, {END_SECONDS:g} s ago"
                outcome.faults.append("started too many processes" if many else f"still running {since}")
                self._kill()
                until = math.inf
        self.output.read()
        outcome.code = code
        return outcome

    def _exit_code(self) -> int | None:
        time.sleep(0.05)
        with _multiprocessing:
            return self.running.wait_for_end(0)

    def left_behind(self, folder: Path) -> list[str]:
        """Kill the processes that a command has left, and return a description of each."""
        until = time.monotonic() + 30
        while (left := self._left(folder)) and time.monotonic() < until:
            time.sleep(0.1)
        found = [f"left process {pid}: {name}" for pid, name in left.items()]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found

    def _left(self, folder: Path) -> dict[int, str]:
        found = {}
        for entry in os.listdir("/proc"):
            with suppress(OSError, ValueError):
                if not entry.isdigit() or int(entry) == self.running.pid:
                    continue
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                mine = int(fields[3]) == self.running.pid or int(entry) in self.pids
                mine |= f"WALK={folder}\0" in Path("/proc", entry, "environ").read_text(errors="replace")
                if mine and fields[0] not in "ZX":
                    command = Path("/proc", entry, "cmdline").read_text(errors="replace").replace("\0", " ")
                    found[int(entry)] = command[:200]
        return found

    def _step(self) -> float:
        """Return the seconds since the last call in which no thread of the command had to wait for a processor."""
        elapsed = -self._read_at
        self._read_at = time.monotonic()
        elapsed += self._read_at
        waited, delays = 0, {}
        for pid in self._family():
            self.pids.add(pid)
            for task in _listed(f"/proc/{pid}/task"):
                with suppress(OSError, IndexError, ValueError):
                    delay = int(Path(task, "schedstat").read_text().split()[1])
                    delays[task] = delay
                    waited = max(waited, delay - self._delays.get(task, delay))
        self._delays = delays
        return min(max(0.0, elapsed - waited / 1e9), LONGEST_STEP)

    def _family(self) -> list[int]:
        found = [self.running.pid]
        for pid in found:
            for task in _listed(f"/proc/{pid}/task"):
                with suppress(OSError):
                    found += [int(child) for child in Path(task, "children").read_text().split()]
        return found

    def _kill(self) -> None:
        for pid in self._family():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _listed(folder: str) -> list[str]:
    with suppress(OSError):
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    return []


def _faults(line: Line, outcome: Outcome, codes: set[int]) -> list[str]:
    faults = []
    code = 128 - outcome.code if outcome.code < 0 else outcome.code
    expected = {0, 1, 2, 74} | (STOPPED[signal.Signals(outcome.sent)] if outcome.sent else set())
    if not outcome.faults and (code not in codes & expected or (outcome.code < 0 and not outcome.sent)):
        faults.append(f"exit code {outcome.code}")
    if code == 1 and not outcome.text:
        faults.append("fails without a message")
    if "Traceback (most recent call last)" in outcome.text:
        faults.append(f"traceback: {_last_of_traceback(outcome.text)}")
    lines = [one for one in outcome.errors.splitlines() if outcome.on_terminal <= one.startswith("paceline: ")]
    if code == 2 and not outcome.sent and (len(lines) != 1 or not lines[0].startswith("paceline: ")):
        faults.append(f"not one line: {lines!r}")
    if code == 2 and outcome.sent and re.search("exit code (143|130|75|-)", outcome.text):
        faults.append("takes the signal for a user error")
    if not outcome.sent and re.search(r"Warning: |Exception ignored|^\[[WEF]\d{4}", outcome.text, re.MULTILINE):
        faults.append("prints a warning")
    slowness = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / 2)  # of a machine that does much else
    if outcome.silence > slowness * (SILENT_SECONDS if outcome.on_terminal else SILENT_SECONDS_IN_FILES):
        faults.append(f"silent for {outcome.silence:.1f} s after {outcome.silent_after!r}")
    return faults


def _last_of_traceback(text: str) -> str:
    after = text.rpartition("Traceback (most recent call last)")[2].splitlines()
    return next(
        (one for one in after if re.match(r"[\w.]+(Error|Exception|Warning|Exit|Interrupt|Damaged)?(:|$)", one)), "?"
    )[:300]


def _changes(line: Line, work: Path, before: dict[str, str], pid: int) -> list[str]:
    """Describe the files that a command wrote without being asked to."""
    after = fingerprint([work])
    faults = []
    for name in {**before, **after}:
        if before.get(name) == after.get(name):
            continue
        path = str(Path(name).relative_to(work))
        first = path.split("/")[0]
        named = Path(first).stem in line.words or any(first in word for word in line.words)
        listed = first.removesuffix(".not_used.txt") in line.outputs  # the guide documents this file
        asked = first in line.outputs or listed or (name not in before and named)
        if path.startswith((".", "stdout-", "stderr-")) or first in ("runs", "data") or asked:
            continue
        faults.append(f"{'changed' if name in before else 'wrote'} {path}")
    unfinished = [name for name in after if name not in before and re.search(r"\.(writing|tmp|part)\b", name)]
    return sorted(faults)[:3] + [f"left {name}" for name in unfinished]


def reproduction(line: Line, outcome: Outcome) -> str:
    """Return how to run a command again: by its number, and in a shell."""
    words = " ".join(shlex.quote(word) if word.isprintable() else ascii(word) for word in line.words)
    signalled = f"; {signal.Signals(outcome.sent).name} after some seconds" if outcome.sent else ""
    return f"  WALK_SEED={SEED} WALK_ONLY={line.number}: paceline {words}{signalled}\n  {outcome.errors[-1500:]}"
