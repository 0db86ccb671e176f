"""Find all runs under a root folder, and follow them in one thread."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from typing import NamedTuple

from paceline.board.files import Entry, Files
from paceline.board.run import RUN_FILES, Run
from paceline.core.text import one_line
from paceline.core.types import JsonObject

MAX_DEPTH = 3  # number of folder levels below the root that are searched for runs
MAX_FOLDERS = 5000
LOCAL_SECONDS = 1.0  # time between two scans of all folders
REMOTE_SECONDS = 10.0  # longer for remote storage, because requests may cost money
FIRST_READING_SECONDS = 0.2  # time for reading metrics before a scan is shown; enough for typical runs
PAUSE_AFTER_SECONDS = 60.0  # reading of files stops after this time without a request for the list of runs


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
        self._requested_at, self._is_fresh, self._changed = time.monotonic(), False, threading.Condition()
        self._sequence, self._listing = 0, threading.Lock()
        self._listed: dict[str, tuple[tuple[int, float], int]] = {}  # by run ID: its version, and the list's sequence

    def start(self) -> None:
        """Start the thread, which follows the runs until the process ends."""
        threading.Thread(target=self._follow, name="board", daemon=True).start()

    @property
    def _is_paused(self) -> bool:
        return time.monotonic() - self._requested_at > PAUSE_AFTER_SECONDS

    def wait_until_fresh(self) -> None:
        """Record that the page is open, and wait for a scan if the runs are not being followed yet."""
        with self._changed:
            self._is_fresh = self._is_fresh and not self._is_paused
            self._requested_at = time.monotonic()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_fresh, timeout=60)

    def _follow(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_paused)
            began = time.monotonic()
            try:
                self.refresh()
                self.error = ""
            except Exception as error:  # storage libraries may raise any exception: show it on the page and retry
                self.error = one_line(error)
            now = time.monotonic()
            with self._changed:
                self._is_fresh = True
                self._changed.notify_all()
            until = now + max(self.seconds, now - began)
            self._read_metrics(until)
            time.sleep(max(0.0, until - time.monotonic()))

    def refresh(self) -> None:
        """Find new runs and start reading their metrics; drop runs whose folders were removed."""
        runs = {}
        left = [MAX_FOLDERS]
        for folder, entries in self._find("", 0, left).items():
            identity = hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]
            name = folder or self.files.shown.rstrip("/").rpartition("/")[2] or self.files.shown
            run = runs[identity] = self.runs.get(identity) or Run(self.files, folder, identity, name)
            run.refresh(entries)
        self.runs, self.truncated = runs, left[0] < 0
        self._read_metrics(until=time.monotonic() + FIRST_READING_SECONDS)

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

    def _read_metrics(self, until: float) -> None:
        """Read the metrics of each run in turn, chunk by chunk, until everything is read or the time is up."""
        unread = list(self.runs.values())
        while unread and time.monotonic() < until:
            unread = [run for run in unread if time.monotonic() < until and run.read_more()]
