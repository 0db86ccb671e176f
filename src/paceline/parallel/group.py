"""The group of processes: where this process runs, the store at which they meet, and ranks that end early.

torchrun, srun and scripts start ranks but do not tell them when another rank ends, so a collective operation would wait
for that rank until `--timeout`. Therefore, ranks limit how long they wait for each other, then report through the
rendezvous store.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import re
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.core.text import printable
from paceline.core.watch import Operation, Record, Silence, Witness, diagnose, recorder

FIRST_PORT, NUM_PORTS = 10_000, 10_000  # a port range below the kernel's ephemeral ports
MAX_PORT = 65_535


@dataclass(frozen=True)
class Place:
    """A process's rank, and the size of its group."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1  # processes on this machine; other machines may have more or fewer
    num_nodes: int = 1


def place_from(environ: Mapping[str, str]) -> Place | None:
    """Return this process's rank and world size if a launcher started it; None if the user started it."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        size = _number(environ, "WORLD_SIZE", at_least=1)
        rank = _number(environ, "RANK", at_most=size - 1)
        local_rank = _number(environ, "LOCAL_RANK", 0)
        local_size = _number(environ, "LOCAL_WORLD_SIZE", local_rank + 1, at_least=local_rank + 1)
        num_nodes = _number(environ, "GROUP_WORLD_SIZE", max(1, size // local_size), at_least=1)
        return Place(rank, size, local_rank, local_size, num_nodes)
    # SLURM also sets SLURM_PROCID in batch scripts; only srun starts steps with several tasks.
    if "SLURM_PROCID" in environ and (size := _number(environ, "SLURM_STEP_NUM_TASKS", 1)) > 1:
        tasks, node = _tasks_per_node(environ), _number(environ, "SLURM_NODEID", 0)
        return Place(
            rank=_number(environ, "SLURM_PROCID", at_most=size - 1),
            size=size,
            local_rank=_number(environ, "SLURM_LOCALID"),
            local_size=tasks[node if node < len(tasks) else 0],
            num_nodes=len(tasks),
        )
    return None


def place_of(settings: RunSettings) -> Place | None:
    """Return this process's rank and group size. With `--rdzv`, srun starts launchers, so its variables are ignored."""
    return None if settings.rdzv and "RANK" not in os.environ else place_from(os.environ)


def meeting_point(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the host and the port at which the processes of a group meet; raise UserError if they are not usable."""
    if "MASTER_ADDR" in environ:
        host, port = environ["MASTER_ADDR"], _number(environ, "MASTER_PORT", at_least=1, at_most=MAX_PORT)
    elif "SLURM_STEP_NODELIST" in environ or "SLURM_NODELIST" in environ:
        host, port = slurm_rendezvous(environ)
    else:
        raise UserError(
            "RANK and WORLD_SIZE are set, but MASTER_ADDR and MASTER_PORT are not: set them to the host of rank 0 and "
            "a free port on that host, or use torchrun"
        )
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UserError(f"MASTER_ADDR={host}: this machine cannot find the host ({error})") from None
    return host, port


def slurm_rendezvous(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the first host of the SLURM step, and a port derived from the job and step IDs."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_NODELIST"]
    first = re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).split(",")[0]  # e.g. gpu[07-09,12]-ib → gpu07-ib
    job, step = _number(environ, "SLURM_JOB_ID", 0), _number(environ, "SLURM_STEP_ID", 0)
    # Ports of consecutive jobs are a prime number apart, so that their steps do not collide on one host.
    return first, FIRST_PORT + (7919 * job + step) % NUM_PORTS


def _tasks_per_node(environ: Mapping[str, str]) -> list[int]:
    """Parse SLURM's `2(x3),1` into 2, 2, 2, 1."""
    words = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return [int(count) for count, times in words for _ in range(int(times or 1))]


def _number(
    environ: Mapping[str, str], name: str, default: int | None = None, *, at_least: int = 0, at_most: int | None = None
) -> int:
    """Return the value of a variable that a launcher sets; raise UserError if it is not a number within the limits."""
    limits = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
    text = environ.get(name)
    if text is None:
        if default is None:
            raise UserError(f"the environment variable {name} is not set: expected a whole number {limits}")
        return default
    try:
        value = int(text)
    except ValueError:
        value = at_least - 1
    if value < at_least or (at_most is not None and value > at_most):
        raise UserError(f"the environment variable {name} is {text!r}: expected a whole number {limits}")
    return value


SIOCGIFADDR = 0x8915  # from <linux/sockios.h>: request for an interface's address
LOOPBACK = "127.0.0.1"


def serve_store(host: str, port: int, timeout: timedelta, *, on_all: bool = False) -> dist.TCPStore:
    """Serve a store on this address only; with `on_all`, on all addresses, as torch does. Port 0 picks a free port."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port) if on_all else address)
        listener.listen(4096)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            host,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),  # the store owns the socket, and closes it even if it cannot start
        )
    return store


def join_store(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Return a client of a store that another process serves."""
    return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


def await_server(host: str, port: int, seconds: float) -> None:
    """Wait until a server can be reached, in Python and not in torch, so that signals are handled; raise OSError."""
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def own_address(host: str) -> str:
    """Return the local address that this machine uses to reach a host."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # connecting a datagram socket sends nothing
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is a loopback address."""
    return ipaddress.ip_address(own_address(host).partition("%")[0]).is_loopback


def is_here(host: str) -> bool:
    """Return whether a name or an address belongs to this machine."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        try:
            trial.bind(address)
        except OSError:
            return False
    return True


def choose_interface(host: str, num_nodes: int) -> None:
    """Make the process group use the interface that reaches a host, unless the environment already sets one.

    By default, gloo listens on the address that the machine's host name resolves to, even if all processes are on the
    same machine.
    """
    local = is_loopback(host)
    if local and num_nodes > 1:
        return  # the host name resolves to a loopback address: leave the choice to gloo and NCCL
    name = "lo" if local else _interface_of(own_address(host))
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if local:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def check_interface(backend: str) -> None:
    """Raise UserError if the environment makes a backend use network interfaces that do not exist."""
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    value = os.environ.get(variable, "")
    if not value or value.startswith("^"):  # NCCL: all interfaces except these
        return
    names = [name for _, name in socket.if_nameindex()]
    is_exact = backend == "gloo" or value.startswith("=")  # otherwise, NCCL matches the beginning of the names
    words = [word.partition(":")[0] for word in value.removeprefix("=").split(",")]
    exist = [any(name == word if is_exact else name.startswith(word) for name in names) for word in words]
    if not (all(exist) if backend == "gloo" else any(exist)):
        raise UserError(f"{variable}={value}: no such network interface; choose from: {', '.join(names)}")


def _interface_of(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # the interface has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


BEAT_SECONDS = 0.5  # time between a rank's reports
SILENT_SECONDS = 60.0  # a rank that sends no report for this long has ended; a busy machine can delay reports
BLAME_SECONDS = 3.0  # how long a failed rank waits for the others, to find out whether one of them has ended
EXAMINATION_SECONDS = 5.0  # how long a rank that hangs waits for the records of the others
NOTIFY_SECONDS = 10.0  # how long rank 0 waits until the others have read why the start failed
GRACE_SECONDS = 5.0  # how long the main thread may take to notice that another rank has failed
FAILED = "failed"  # key in the store for the first failure
EXAMINED = "examined"  # key in the store: a rank that hangs asks the others for their records
NO_ANSWER = "does not answer: it may be stopped"
LEFT = b"left"  # last report of a rank that has left the group
Answer = TypeVar("Answer")


def await_rank_0(host: str, port: int, seconds: float) -> None:
    """Wait until rank 0 serves the store, without the warnings that torch would print; raise UserError on timeout."""
    try:
        await_server(host, port, seconds)
    except OSError:
        raise UserError(f"{_too_late([0], seconds)} at {host}:{port} (MASTER_ADDR, MASTER_PORT)") from None


def call_roll(store: dist.Store, rank: int, size: int, seconds: float) -> None:
    """Wait until every rank has called this function; raise a UserError that lists the ranks that have not."""
    until = time.monotonic() + seconds
    missing = list(range(size))
    try:
        store.set(f"arrived/{rank}", "")
        while missing:
            missing = [one for one in missing if not store.check([f"arrived/{one}"])]
            failure = read_failure(store)
            if not failure and missing and time.monotonic() > until:
                failure = publish_failure(store, _too_late(missing, seconds))
            if failure:
                store.set(f"notified/{rank}", "")
                if rank == 0:  # it serves the store from which the others read this message
                    _wait_until_notified(store, sorted(set(range(size)).difference(missing)))
                raise UserError(failure)
            time.sleep(0.05 if missing else 0)
    except dist.DistError as error:
        raise UserError("rank 0 ended during start-up; see its output for the reason") from error


def _wait_until_notified(store: dist.Store, ranks: list[int]) -> None:
    until = time.monotonic() + NOTIFY_SECONDS
    while not store.check([f"notified/{one}" for one in ranks]) and time.monotonic() < until:
        time.sleep(0.05)


def _too_late(ranks: list[int], seconds: float) -> str:
    named = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', …' * (len(ranks) > 8)}"
    return f"{named} did not start within {seconds:g} s (start_timeout)"


class Peers(threading.Thread):
    """Reports that this rank is alive, and ends this process if another rank has ended and the main thread hangs."""

    def __init__(self, store: dist.Store, line: socket.socket, rank: int, size: int) -> None:
        """Start reporting.

        The store must not be used elsewhere, since a call that waits blocks all others. `line` is a connection to the
        store's server that shows whether the server has ended. Once it has, store calls fail, each with a warning from
        torch.
        """
        super().__init__(name="peers", daemon=True)
        self._store, self._line, self._rank, self._size = store, line, rank, size
        self._ended, self._beats = threading.Event(), 0
        self._failure = ""
        self.before_exit: Callable[[str], None] = lambda reason: None  # called if the main thread hangs
        self._beat()
        self.start()

    def run(self) -> None:
        watched, last, silence = (self._rank + 1) % self._size, b"", Silence(2 * BEAT_SECONDS)
        while not self._ended.wait(BEAT_SECONDS):
            if not self._find_failure():
                self._beat()
                self._answer_examination()
                before, last = last, self._beat_of(watched)
                if silence.add(before == last != LEFT) > SILENT_SECONDS:
                    self._publish(_silent(watched, last))
            elif not self._ended.wait(GRACE_SECONDS):
                self.before_exit(self._failure)
                print(f"paceline: {printable(self._failure)}", file=sys.stderr, flush=True)
                os._exit(2)  # the main thread is still waiting for the lost rank

    def leave(self) -> None:
        """Stop reporting and watching, because this rank is leaving the group."""
        self._ended.set()
        self._set(f"beat/{self._rank}", LEFT)

    def explain(self, error: BaseException) -> str:
        """Return which other rank caused this rank's error; empty if none did. Report this rank's error to the others.

        User errors and interrupts are never attributed to another rank.
        """
        if self._ended.is_set():  # already reported
            return ""
        own = isinstance(error, UserError) or not isinstance(error, Exception)
        failure = "" if own else self._find_failure() or self._find_silent_rank()
        self._ended.set()
        if not failure:
            what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self._publish(f"rank {self._rank} ended: {what}")
            self._set(f"read/{self._rank}", b"")  # if all ranks fail, none waits for this one
            self._wait_for_readers()
        return failure

    def examine(self, reason: str) -> str:
        """Compare the flight recorders of all ranks after a hang; return a line that reports the missing rank.

        The threads of ranks that run, even if they have not noticed the hang yet, send their records on request. A rank
        that does not is stopped. If rank 0, which serves the store, is stopped, calls to the store do not return, so
        they run in their own thread.
        """
        self._ended.set()
        found: list[str] = []
        thread = threading.Thread(target=self._compare_records, args=[reason, found], daemon=True)
        thread.start()
        until = time.monotonic() + EXAMINATION_SECONDS + BLAME_SECONDS
        while not found and time.monotonic() < until:
            time.sleep(BEAT_SECONDS / 4)
        if found:
            thread.join(BLAME_SECONDS)  # the others read the failure in the meantime
        return found[0] if found else f"rank 0 did not arrive: rank 0 {NO_ANSWER}; {reason}"

    def _compare_records(self, reason: str, found: list[str]) -> None:
        self._set(EXAMINED, b"yes")
        self._send_record()
        until = time.monotonic() + EXAMINATION_SECONDS
        while time.monotonic() < until and any(self._record_of(rank) is None for rank in range(self._size)):
            time.sleep(BEAT_SECONDS / 4)
        witnesses = []
        for rank in range(self._size):
            operations = self._record_of(rank)
            record = Record(rank, self._size, False, "", operations or ())
            last = self._beat_of(rank).decode(errors="replace").partition(" ")[2]
            condition = f"{NO_ANSWER}{f', last seen after {last}' * bool(last)}" if operations is None else ""
            witnesses.append(Witness(record, condition))
        diagnosis = diagnose(witnesses)
        found.append(f"{diagnosis.message}; {reason}" if diagnosis else reason)
        self._publish(found[0])
        self._set(f"read/{self._rank}", b"")
        self._wait_for_readers()

    def _answer_examination(self) -> None:
        """Send this rank's record if another rank has asked for it."""
        if self._get(EXAMINED):
            self._send_record()

    def _send_record(self) -> None:
        self._set(f"record/{self._rank}", json.dumps(recorder().record().operations).encode())

    def _record_of(self, rank: int) -> tuple[Operation, ...] | None:
        record = self._get(f"record/{rank}")
        return tuple(Operation(*operation) for operation in json.loads(record)) if record else None

    def _find_failure(self) -> str:
        """Return the first failure in the group; empty if there was none."""
        if not self._failure:
            self._failure = self._get(FAILED).decode() or ("" if self._has_server() else "rank 0 ended")
            if self._failure:
                self._set(f"read/{self._rank}", b"")
        return self._failure

    def _find_silent_rank(self) -> str:
        """Watch the other ranks for a short time; return which of them has ended, or an empty string."""
        before = [self._beat_of(one) for one in range(self._size)]
        until = time.monotonic() + BLAME_SECONDS
        while time.monotonic() < until:
            time.sleep(BEAT_SECONDS)
            if self._find_failure():
                return self._failure
        silent = [one for one in range(self._size) if one != self._rank and self._beat_of(one) == before[one]]
        if silent:
            self._publish(_silent(silent[0], before[silent[0]]))
        return self._find_failure()

    def _wait_for_readers(self) -> None:
        """Wait until the other ranks have read this rank's failure, because the store may close on exit."""
        until = time.monotonic() + BLAME_SECONDS
        keys = [f"read/{one}" for one in range(self._size) if one != self._rank]
        while time.monotonic() < until and not self._ask(lambda: self._store.check(keys), True):
            time.sleep(BEAT_SECONDS / 4)

    def _beat(self) -> None:
        self._beats += 1
        self._set(f"beat/{self._rank}", f"{self._beats} {recorder().record().last or ''}".encode())

    def _beat_of(self, rank: int) -> bytes:
        return self._get(f"beat/{rank}")

    def _get(self, key: str) -> bytes:
        """Return what a rank has stored; empty if there is nothing."""
        return self._ask(lambda: bytes(self._store.get(key)) if self._store.check([key]) else b"", b"")

    def _set(self, key: str, value: bytes) -> None:
        self._ask(lambda: self._store.set(key, value.decode()), None)

    def _publish(self, failure: str) -> None:
        self._ask(lambda: publish_failure(self._store, failure), "")

    def _ask(self, call: Callable[[], Answer], without_server: Answer) -> Answer:
        """Return the result of a call to the store."""
        with suppress(dist.DistError):
            if self._has_server():
                return call()
        return without_server

    def _has_server(self) -> bool:
        """Return whether the process that serves the store is alive; the connection is readable only after it exits."""
        return not select.select([self._line], [], [], 0)[0]


def _silent(rank: int, beat: bytes) -> str:
    last = beat.decode(errors="replace").partition(" ")[2]  # up to BEAT_SECONDS before the rank ended
    seen = f", last seen after {last}" if last else ""
    return f"rank {rank} ended without a message{seen}; it may have been killed or stopped"


def read_failure(store: dist.Store) -> str:
    """Return the first failure that a rank has reported; empty if there was none."""
    return bytes(store.get(FAILED)).decode() if store.check([FAILED]) else ""


def publish_failure(store: dist.Store, failure: str) -> str:
    """Report a failure to all ranks, in one line; return the first failure that was reported."""
    return bytes(store.compare_set(FAILED, "", " ".join(failure.split()))).decode()
