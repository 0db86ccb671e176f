"""Watches processes: heartbeats of children, the collectives that each rank started, and the stacks of hangs."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from paceline.core.files import open_append

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
PULSE_FILE = "PACELINE_PULSE_FILE"  # environment variable with the path to a file that is written to report progress
PROCESS = "process-"  # a child's file in its parent's folder is named after the child: process-PID
SECONDS_BETWEEN_BEATS = LONGEST_INTERVAL_SECONDS = 0.5

BUSY_SHARE = 0.02  # of one core: a process that starts up and uses more CPU time makes progress
SPARE_CPU_SECONDS = 0.1  # added to that share, since the system counts CPU time in steps of 0.01 s

_beaten_at = _longest_gap = 0.0


def die_with_parent(parent: int | None = None) -> None:
    """Make the kernel kill this process when the thread that started it ends, even if that thread is killed.

    `parent` is the ID of the parent process. If the parent is already dead, this process is killed immediately.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def is_watched() -> bool:
    """Return whether a launcher watches this process and ends it if it hangs or if another rank ends."""
    return PULSE_FILE in os.environ


def prepare() -> None:
    """Report that this process is starting up: no progress is expected until the next `beat`."""
    global _beaten_at
    _beaten_at = 0.0
    if PULSE_FILE in os.environ:
        with suppress(OSError):
            Path(os.environ[PULSE_FILE]).write_bytes(b"")


def beat() -> None:
    """Report progress. This is cheap enough to call in every step."""
    global _beaten_at, _longest_gap
    now = time.monotonic()
    if now - _beaten_at < SECONDS_BETWEEN_BEATS:
        return
    _longest_gap = max(_longest_gap, now - _beaten_at) if _beaten_at else 0.0
    _beaten_at = now
    if PULSE_FILE in os.environ:
        try:
            Path(os.environ[PULSE_FILE]).write_bytes(b"1")
        except OSError:
            os.environ.pop(PULSE_FILE)  # the parent has deleted the file


def longest_gap() -> float:
    """Return the longest time between two beats of this process, in seconds."""
    return _longest_gap


def registered_processes(folder: Path, parent: int) -> dict[int, bool]:
    """Return the processes that have a file in the folder, and whether each is alive and a child of `parent`."""
    found = [int(file.name.removeprefix(PROCESS)) for file in folder.glob(f"{PROCESS}*")]
    return {process: is_child(process, parent) for process in found}


def has_failed_peer() -> bool:
    """Return whether another child of this process's launcher has failed: it has ended without removing its file."""
    if PULSE_FILE not in os.environ:
        return False
    return not all(registered_processes(Path(os.environ[PULSE_FILE]).parent, os.getppid()).values())


class Silence:
    """How long something has made no progress, in seconds during which this process ran.

    If more than `longest_interval` passes between two calls of `add`, this process was suspended: by SIGSTOP, on a
    laptop that slept, or on a paused virtual machine. Only `longest_interval` of this time is counted.
    """

    def __init__(self, longest_interval: float) -> None:
        self._longest_interval = longest_interval
        self._seconds, self._added_at = 0.0, time.monotonic()

    def add(self, is_silent: bool) -> float:
        """Add the time since the last call, or begin anew if there was progress; return the seconds of the silence."""
        now = time.monotonic()
        self._seconds = self._seconds + min(now - self._added_at, self._longest_interval) if is_silent else 0.0
        self._added_at = now
        return self._seconds


class Watch(threading.Thread):
    """A thread that calls a function whenever this process makes no progress for longer than `patience()` seconds.

    Until the first beat, the use of CPU time counts as progress, unless `is_stopping()`. Any other patience than before
    starts the silence anew. The function runs in this thread, because the main thread is stuck.
    """

    def __init__(
        self,
        patience: Callable[[], float],
        on_silence: Callable[[float], None],
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self._patience, self._on_silence, self._is_stopping = patience, on_silence, is_stopping
        self._ended = threading.Event()

    def run(self) -> None:
        seconds, counted, patience = 0.0, _cpu_seconds(), self._patience()
        interval, last = min(LONGEST_INTERVAL_SECONDS, patience / 4), (_beaten_at, patience)
        silence = Silence(2 * interval)
        while not self._ended.wait(interval):
            patience = self._patience()
            moved, last = last != (_beaten_at, patience), (_beaten_at, patience)
            if not (moved or _beaten_at or self._is_stopping()):
                used = _cpu_seconds()
                moved = used - counted > BUSY_SHARE * seconds + SPARE_CPU_SECONDS
                counted = used if moved else counted
            seconds = silence.add(not moved)
            if seconds > patience:
                self._on_silence(seconds)
                seconds = silence.add(is_silent=False)

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()


def _cpu_seconds(process: str = "self") -> float:
    """Return the CPU time that a process and its descendants have used; the time of day if it is unknown."""
    try:
        numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]
        children = [file.read_text() for file in Path(f"/proc/{process}/task").glob("*/children")]
    except OSError:  # not Linux, or a process that has just ended
        return time.monotonic() if process == "self" else 0.0
    own = sum(map(int, numbers)) / os.sysconf("SC_CLK_TCK")
    return own + sum(_cpu_seconds(child) for child in " ".join(children).split())


def has_exited_with_zero(child: int) -> bool:
    """Return whether a child process that is no longer alive ended with exit code 0; False while its threads end.

    The exit code stays available to the owner of the child. If the owner has already read it, it was 0: otherwise, the
    owner would have reported a failure.
    """
    try:
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return ended is not None and ended.si_code == os.CLD_EXITED and ended.si_status == 0


def is_child(process: int, parent: int) -> bool:
    """Return whether a process is alive, not a zombie, and a child of `parent`."""
    try:
        state, started_by = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return False
    return state not in "ZX" and int(started_by) == parent


RECORD_FILE = "PACELINE_FLIGHT_RECORD"  # environment variable with the path of the file
CAPACITY = 256  # operations kept
_HEADER = struct.Struct("<qqqq")  # rank, number of ranks, operations started, whether stacks can be requested
NAME_BYTES = 160
INCOMPLETE = ", without "  # in the name of an exchange of gradients, followed by the parameters that have no gradient
_OPERATION = struct.Struct(f"<qq{NAME_BYTES}s")  # number, training step, name
_LOGS_BYTES = 1024  # path of the logs folder, after the header
_START = _HEADER.size + _LOGS_BYTES
_SIZE = _START + CAPACITY * _OPERATION.size


class Operation(NamedTuple):
    """A collective operation that a process has started."""

    number: int  # 1 for the first operation of the process
    step: int  # training step, or -1 outside the training loop
    name: str

    def __str__(self) -> str:
        return f"{self.name!r} ({f'step {self.step}, ' if self.step >= 0 else ''}operation {self.number})"


@dataclass(frozen=True)
class Record:
    """What one process has recorded."""

    rank: int
    size: int
    dumps_stacks: bool
    logs: str
    operations: tuple[Operation, ...] = field(repr=False)  # the last ones, in order

    @property
    def last(self) -> Operation | None:
        """The last operation that the process started; None if there is none."""
        return self.operations[-1] if self.operations else None

    @classmethod
    def parse(cls, content: bytes) -> Record | None:
        """Parse a record; None if the content is too short."""
        if len(content) < _SIZE:
            return None
        rank, size, count, dumps = _HEADER.unpack_from(content)
        found = []
        for number in range(max(1, count - CAPACITY + 1), count + 1):
            kept, step, name = _OPERATION.unpack_from(content, _START + (number % CAPACITY) * _OPERATION.size)
            if kept == number:  # otherwise the process was writing this entry
                found.append(Operation(number, step, _text(name)))
        return cls(rank, size, bool(dumps), _text(content[_HEADER.size : _START]), tuple(found))

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """Return the record in a file; None if there is none."""
        try:
            return cls.parse(path.read_bytes())
        except OSError:
            return None


def num_started(path: Path) -> int | None:
    """Return the number of operations in a record, without reading them; None if there is no record."""
    try:
        with path.open("rb") as file:
            return int(_HEADER.unpack(file.read(_HEADER.size))[2])
    except (OSError, struct.error):
        return None


class FlightRecorder:
    """Records the collective operations of this process."""

    def __init__(self, path: str = "") -> None:
        self._memory = _map_file(path) if path else mmap.mmap(-1, _SIZE)
        self._rank, self._size, self._count, self._dumps_stacks = -1, 1, 0, False
        self.step = -1  # the current training step
        self.where = "start-up"  # the current part of the run, such as a phase
        self._write_header()

    def set_rank(self, rank: int, size: int) -> None:
        """Record this process's rank, and the number of ranks."""
        self._rank, self._size = rank, size
        self._write_header()

    def join(self, rank: int, size: int) -> None:
        """Record that this process joins a process group, which is its first collective operation."""
        self.set_rank(rank, size)
        self.start("join the process group")

    def announce_logs(self, folder: str, dumps_stacks: bool) -> None:
        """Record the logs folder, and whether a signal makes this process write its stacks there."""
        encoded = os.fsencode(folder)[: _LOGS_BYTES - 1]
        self._memory[_HEADER.size : _START] = encoded.ljust(_LOGS_BYTES, b"\0")
        self._dumps_stacks = dumps_stacks
        self._write_header()

    def start(self, what: str) -> int:
        """Record that this process starts a collective operation; return the operation's number."""
        self._count += 1
        self._write_operation(self._count, what)
        self._write_header()
        return self._count

    def rename(self, number: int, what: str) -> None:
        """Change the name of an operation of the current step, because it was not what it should have been."""
        if number > self._count - CAPACITY:
            self._write_operation(number, what)

    def record(self) -> Record:
        """Return what has been recorded."""
        found = Record.parse(self._memory[:])
        assert found is not None
        return found

    def _write_operation(self, number: int, what: str) -> None:
        name = f"{self.where}: {what}".encode()[:NAME_BYTES]
        _OPERATION.pack_into(self._memory, _START + (number % CAPACITY) * _OPERATION.size, number, self.step, name)

    def _write_header(self) -> None:
        _HEADER.pack_into(self._memory, 0, self._rank, self._size, self._count, self._dumps_stacks)


def _map_file(path: str) -> mmap.mmap:
    """Map the file. If it cannot be written, for example because the disk is full, map memory without a file."""
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            # Without space on the disk, a process that writes to the mapped file would be killed.
            os.posix_fallocate(file.fileno(), 0, _SIZE)
            return mmap.mmap(file.fileno(), _SIZE)
    except OSError:
        return mmap.mmap(-1, _SIZE)


def _text(content: bytes) -> str:
    return content.rstrip(b"\0").decode(errors="replace")


_recorder: FlightRecorder | None = None


def recorder() -> FlightRecorder:
    """Return this process's flight recorder."""
    global _recorder
    if _recorder is None:
        _recorder = FlightRecorder(os.environ.get(RECORD_FILE, ""))
    return _recorder


def start_operation(what: str) -> None:
    """Record that this process starts a collective operation."""
    recorder().start(what)


@dataclass(frozen=True)
class Witness:
    """What is known about one rank when a run hangs."""

    record: Record
    condition: str = ""  # such as "is stopped"; empty if the rank runs

    @property
    def rank(self) -> int:
        return self.record.rank


@dataclass(frozen=True)
class Diagnosis:
    """The ranks that cause a hang, and one line for the user."""

    ranks: tuple[int, ...]
    message: str


def diagnose(witnesses: Sequence[Witness]) -> Diagnosis | None:
    """Return which ranks did not arrive at a collective operation; None if the records do not show it."""
    halted = [one for one in witnesses if one.condition]
    if halted:
        first = halted[0]
        return Diagnosis(
            tuple(one.rank for one in halted),
            f"{_ranks(halted)} did not arrive: rank {first.rank} {first.condition}"
            f"{_after(first.record.last) if first.record.last else ''}",
        )
    if len(witnesses) < 2:
        return None
    return deviation(witnesses) or _latecomers(witnesses)


def deviation(witnesses: Sequence[Witness]) -> Diagnosis | None:
    """Return the ranks whose operations differ from those of the others; None if all ran the same ones so far."""
    by_rank = {one.rank: {found.number: found for found in one.record.operations} for one in witnesses}
    if len(by_rank) < 2:
        return None
    common = set.intersection(*(set(operations) for operations in by_rank.values()))
    for number in sorted(common):
        groups: dict[tuple[int, str], list[int]] = {}
        for rank, operations in by_rank.items():
            groups.setdefault((operations[number].step, operations[number].name), []).append(rank)
        if len(groups) > 1:
            odd = _odd_one(number, groups, by_rank)
            other = next(rank for rank in by_rank if rank not in odd)
            skipped, found = by_rank[other][number], by_rank[odd[0]][number]
            named = f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd[:8]))}"
            unused = found.name.partition(INCOMPLETE)[2]
            if unused and INCOMPLETE not in skipped.name:
                return Diagnosis(
                    tuple(odd),
                    f"{named} did not arrive at {skipped}: the loss on rank {odd[0]} did not use {unused}; "
                    "on all ranks, the loss must use every parameter of the network in every step",
                )
            return Diagnosis(
                tuple(odd),
                f"{named} did not arrive at {skipped}, but started {found} instead: all ranks must run the "
                "same collective operations in the same order",
            )
    return None


def _odd_one(
    number: int, groups: Mapping[tuple[int, str], list[int]], by_rank: Mapping[int, Mapping[int, Operation]]
) -> list[int]:
    """Return the ranks that caused a difference between the sequences of operations.

    These are ranks that did not exchange all gradients. If there are none, it is the smaller group of ranks with the
    same operation or, of two equal groups, the one that has started more operations.
    """
    incomplete = [rank for (_, name), ranks in groups.items() if INCOMPLETE in name for rank in ranks]
    if 0 < len(incomplete) < len(by_rank):
        return incomplete
    sizes = sorted(len(ranks) for ranks in groups.values())
    if len(groups) > 2 or sizes[0] < sizes[1]:
        return min(groups.values(), key=len)
    (one, first), (other, second) = groups.items()
    usual = [_is_usual(by_rank[ranks[0]], number) for ranks in (first, second)]
    if usual[0] != usual[1]:
        return second if usual[0] else first
    # Otherwise the rank that is further ahead has skipped an operation.
    return second if other[0] >= one[0] else first


def _is_usual(operations: Mapping[int, Operation], number: int) -> bool:
    """Return whether an earlier step began with the same operations as this step, up to operation `number`."""
    steps: dict[int, list[str]] = {}
    for at, operation in sorted(operations.items()):
        if at <= number:
            steps.setdefault(operation.step, []).append(operation.name)
    current = steps.pop(operations[number].step)
    return any(names[: len(current)] == current for names in steps.values())


def _latecomers(witnesses: Sequence[Witness]) -> Diagnosis | None:
    counts = {one.rank: one.record.last.number if one.record.last else 0 for one in witnesses}
    most = max(counts.values())
    late = [one for one in witnesses if counts[one.rank] < most]
    if not late:
        return None
    waiting = next(one for one in witnesses if counts[one.rank] == most)
    first = late[0]
    return Diagnosis(
        tuple(one.rank for one in late),
        f"{_ranks(late)} did not arrive at {waiting.record.last}; rank {first.rank} is still busy"
        f"{_after(first.record.last)}",
    )


def _ranks(witnesses: Sequence[Witness]) -> str:
    numbers = [str(one.rank) for one in witnesses]
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers[:8])}{', …' * (len(numbers) > 8)}"


def _after(operation: Operation | None) -> str:
    return f" after {operation}" if operation else " before its first collective operation"


STACK_SIGNAL = signal.SIGUSR2
_undo = ExitStack()  # undoes `dump_stacks_on_signal`
_log_file = -1  # descriptor of the file to which stacks are appended


def dump_stacks_on_signal(log: Path, *, on_crash: bool = True) -> None:
    """Make STACK_SIGNAL, and crashes, append the stacks to a log file; announce this in the flight recorder."""
    global _log_file
    stop_dumping_stacks()
    _log_file = open_append(log)
    _undo.callback(os.close, _log_file)
    if on_crash and not faulthandler.is_enabled():
        faulthandler.enable(file=_log_file)  # when libtorch aborts the process, for example
        _undo.callback(faulthandler.disable)
    on_signal = not callable(signal.getsignal(STACK_SIGNAL))
    if on_signal:
        faulthandler.register(STACK_SIGNAL, file=_log_file, all_threads=True)
        _undo.callback(_restore_signal)
    recorder().announce_logs(str(log.parent.absolute()), dumps_stacks=on_signal)


def stop_dumping_stacks() -> None:
    """Undo `dump_stacks_on_signal`. A worker ignores the signal from then on, because one may still be pending."""
    global _log_file
    if _log_file >= 0:
        recorder().announce_logs("", dumps_stacks=False)
        _undo.close()
        _log_file = -1


def _restore_signal() -> None:
    if not callable(signal.getsignal(STACK_SIGNAL)):  # the program may have replaced the handler
        faulthandler.unregister(STACK_SIGNAL)  # restores the previous handler
        if is_watched() and threading.current_thread() is threading.main_thread():
            signal.signal(STACK_SIGNAL, signal.SIG_IGN)


def dump_stacks_now(reason: str) -> bool:
    """Append the reason and the stacks of all threads to the log file; return False if there is none."""
    if _log_file >= 0:
        os.write(_log_file, f"{reason}; the stacks of all threads:\n".encode())
        faulthandler.dump_traceback(file=_log_file, all_threads=True)
    return _log_file >= 0
