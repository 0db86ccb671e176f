"""Find all runs under a root folder, and follow them in one thread that lets requests go first."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.board.files import UNREADABLE, Entry, Files
from paceline.board.run import RUN_FILES, Run
from paceline.core.text import one_line
from paceline.core.types import JsonObject

PATIENCE_SECONDS = 0.1  # longest pause for requests before the next chunk of metrics is read


class Requests:
    """The requests that are being answered."""

    def __init__(self) -> None:
        self.newest = time.monotonic()  # when the newest request began
        self._num, self._ended = 0, threading.Condition()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request while the block runs."""
        self.newest = time.monotonic()
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Do not count a request while the block runs, because the request waits for the files to be read."""
        self._change(-1)
        try:
            yield
        finally:
            self._change(1)

    def let_pass(self) -> None:
        """Wait until no request is being answered, but not for long."""
        with self._ended:
            self._ended.wait_for(lambda: self._num <= 0, timeout=PATIENCE_SECONDS)

    def _change(self, by: int) -> None:
        with self._ended:
            self._num += by
            self._ended.notify_all()


class CountRequests:
    """ASGI middleware that counts requests while they are being answered."""

    def __init__(self, app: ASGIApp, requests: Requests) -> None:
        self._app, self._requests = app, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._requests.answering():
            await self._app(scope, receive, send)


MAX_DEPTH = 3  # number of folder levels below the root that are searched for runs
MAX_FOLDERS = 5000
LOCAL_SECONDS = 1.0  # time between two scans of all folders
REMOTE_SECONDS = 10.0  # longer for remote storage, because requests may cost money
FIRST_READING_SECONDS = 0.2  # time for reading metrics before a scan is shown; enough for typical runs
PAUSE_AFTER_SECONDS = 60.0  # reading of files stops after this time without requests


class Summaries(NamedTuple):
    """The runs that have changed since an earlier list of runs."""

    sequence: int  # identifies this list
    ids: list[str]  # IDs of all runs, sorted by name
    runs: list[JsonObject]  # summaries of the runs that have changed


class Gallery:
    """The runs that the last scan found, keyed by run ID."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.runs: dict[str, Run] = {}
        self.error = ""  # one-line reason why the root folder cannot be read
        self.truncated = False  # True if there are more folders than are searched
        self.seconds = LOCAL_SECONDS if files.local else REMOTE_SECONDS
        self.requests, self._watched = Requests(), threading.Event()
        self._scanned, self._new_scan = 0.0, threading.Condition()  # time of the last scan; 0 before the first one
        self._sequence, self._listing = 0, threading.Lock()
        self._listed: dict[str, tuple[tuple[int, float], int]] = {}  # by run ID: its version, and the list's sequence

    def start(self) -> None:
        """Start the thread, which follows the runs until the process ends."""
        self._watched.set()
        threading.Thread(target=self._follow, name="board", daemon=True).start()

    def wait_until_fresh(self) -> None:
        """Record that the page is open, and wait for a scan if the runs are not being followed yet."""
        self._watched.set()
        with self.requests.waiting(), self._new_scan:
            self._new_scan.wait_for(lambda: self._scanned > 0, timeout=60)

    def _follow(self) -> None:
        while True:
            self._watched.wait()
            if self._pause():
                continue
            started = time.monotonic()
            try:
                self.refresh()
                self.error = ""
            except Exception as error:  # storage libraries may raise any exception: show it on the page and retry
                self.error = one_line(error)
            with self._new_scan:
                self._scanned = time.monotonic()
                self._new_scan.notify_all()
            until = self._scanned + max(self.seconds, self._scanned - started)
            self._read_metrics(list(self.runs.values()), until, before=self.requests.let_pass)
            time.sleep(max(0.0, until - time.monotonic()))

    def _pause(self) -> bool:
        """Stop following the runs if the page has been closed for a while; return whether that is the case."""
        if time.monotonic() - self.requests.newest <= PAUSE_AFTER_SECONDS:
            return False
        self._watched.clear()
        self._scanned = 0.0
        if time.monotonic() - self.requests.newest <= PAUSE_AFTER_SECONDS:  # a request has just arrived
            self._watched.set()
        return True

    def refresh(self) -> None:
        """Find new runs and start reading their metrics; drop runs whose folders were removed."""
        runs = {}
        left = [MAX_FOLDERS]
        for folder, entries in self._find("", 0, left).items():
            identity = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
            name = folder or self.files.shown.rstrip("/").rpartition("/")[2] or self.files.shown
            run = runs[identity] = self.runs.get(identity) or Run(self.files, folder, identity, name)
            run.refresh(entries)
            with suppress(*UNREADABLE):
                run.metrics.preview(run.metrics_size)
        self.runs, self.truncated = runs, left[0] < 0
        short = [run for run in runs.values() if run.metrics.read_share == 1]
        self._read_metrics(short, until=time.monotonic() + FIRST_READING_SECONDS)

    def summaries(self, after: int = 0) -> Summaries:
        """Return a summary of each run that has changed since the list `after`; by default, of every run."""
        runs = sorted(self.runs.values(), key=lambda run: run.name)
        with self._listing:
            self._sequence += 1
            for run in runs:
                version = (run.revision, round(run.metrics.read_share, 2))
                if run.identity not in self._listed or self._listed[run.identity][0] != version:
                    self._listed[run.identity] = (version, self._sequence)
            changed = [run.summary() for run in runs if self._listed[run.identity][1] > after]
            return Summaries(self._sequence, [run.identity for run in runs], changed)

    def _find(self, folder: str, depth: int, left: list[int]) -> dict[str, list[Entry]]:
        """Find all run folders in a folder, and return the files of each; `left` is how many more may be searched."""
        left[0] -= 1
        if left[0] < 0:
            return {}
        entries = self.files.entries(folder)
        if any(entry.basename in RUN_FILES and not entry.is_folder for entry in entries):
            return {folder: entries}
        found: dict[str, list[Entry]] = {}
        for entry in entries if depth < MAX_DEPTH else ():
            if entry.is_folder and left[0] >= 0 and not entry.basename.startswith("."):
                found |= self._find(entry.name, depth + 1, left)
        return found

    def _read_metrics(self, unread: list[Run], until: float, before: Callable[[], None] = lambda: None) -> None:
        """Read the metrics of each run in turn, chunk by chunk, until everything is read or the time is up.

        `before` is called before each chunk.
        """
        while unread and time.monotonic() < until:
            unread = [run for run in unread if time.monotonic() < until and _read_chunk(run, before)]


def _read_chunk(run: Run, before: Callable[[], None]) -> bool:
    """Read the next chunk of a run's metrics; return False if everything has been read."""
    before()
    try:
        return run.read_more()
    except OSError:  # the file was removed or truncated after its folder was listed
        return False
