"""Report ranks that end early, in a process group that our launcher does not watch.

torchrun, srun and scripts start ranks but do not tell them when another rank ends, so a collective operation would wait
for that rank until `--timeout`. Therefore, ranks limit how long they wait for each other, then report through the
rendezvous store.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist

from paceline.core.errors import UserError
from paceline.core.text import printable
from paceline.core.watch import Operation, Record, Silence, Witness, diagnose, recorder
from paceline.parallel.place import await_server

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
