"""All runs under a root, found and followed by one thread for as long as somebody looks."""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Any

from paceline.board.files import Entry, Files
from paceline.board.run import SIGNS, Run
from paceline.core.secrets import one_line

DEEPEST = 3  # folders below the root
MOST_FOLDERS = 5000
INSIDE_A_RUN = {"checkpoints", "tensorboard", "logs", "samples"}
LOCAL_SECONDS = 1.0  # between two looks at all folders
REMOTE_SECONDS = 10.0  # where every look is a request that may cost
FIRST_READING_SECONDS = 0.2  # before a look is shown: enough for runs of usual size
QUIET_SECONDS = 0.3  # without a request: whoever asked has the answer
LOOKERS_LEAVE_AFTER_SECONDS = 60.0


class Gallery:
    """The runs by identity, as they were at the last look; `fresh` waits for one where that is old."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.runs: dict[str, Run] = {}
        self.trouble = ""  # why the root cannot be read, in one line
        self.seconds = LOCAL_SECONDS if files.local else REMOTE_SECONDS
        self._asked, self._wanted = 0.0, threading.Event()
        self._looked, self._new_look = 0.0, threading.Condition()

    def start(self) -> None:
        """Begins to follow the runs; ends with the process."""
        self._asked = time.monotonic()
        self._wanted.set()
        threading.Thread(target=self._follow, name="board", daemon=True).start()

    def note_request(self) -> None:
        """Says that somebody waits for an answer: reading on gives way to that."""
        self._asked = time.monotonic()

    def fresh(self) -> None:
        """Says that somebody looks, and waits for a look where the last one is old."""
        self.note_request()
        self._wanted.set()
        with self._new_look:
            enough = time.monotonic() - 2 * self.seconds
            self._new_look.wait_for(lambda: self._looked > enough, timeout=60)

    def _follow(self) -> None:
        while True:
            self._wanted.wait()
            if time.monotonic() - self._asked > LOOKERS_LEAVE_AFTER_SECONDS:
                self._wanted.clear()
                continue
            try:
                self.refresh()
                self.trouble = ""
            except Exception as error:  # whatever a storage raises is said on the page, and tried again
                self.trouble = one_line(error)
            with self._new_look:
                self._looked = time.monotonic()
                self._new_look.notify_all()
            self._give_way()
            self._read_metrics(list(self.runs.values()), until=self._looked + self.seconds)
            time.sleep(max(0.0, self._looked + self.seconds - time.monotonic()))

    def refresh(self) -> None:
        """Finds new runs, forgets those that are gone, and takes a first look at what is new."""
        runs = {}
        for folder, entries in self._find("", 0, [MOST_FOLDERS]).items():
            identity = hashlib.sha256(folder.encode()).hexdigest()[:12]
            name = folder or self.files.shown.rstrip("/").rpartition("/")[2] or self.files.shown
            run = runs[identity] = self.runs.get(identity) or Run(self.files, folder, identity, name)
            run.refresh(entries)
            run.metrics.look(run.metrics_size)
        self.runs = runs
        short = [run for run in runs.values() if run.metrics.read_share == 1]
        self._read_metrics(short, until=time.monotonic() + FIRST_READING_SECONDS)

    def summaries(self) -> list[dict[str, Any]]:
        """What the page's list shows, by name."""
        return [run.summary() for run in sorted(self.runs.values(), key=lambda run: run.name)]

    def _find(self, folder: str, depth: int, left: list[int]) -> dict[str, list[Entry]]:
        """The entries of every folder that is a run."""
        left[0] -= 1
        entries = self.files.entries(folder)
        if any(entry.last in SIGNS and not entry.is_folder for entry in entries):
            return {folder: entries}
        found: dict[str, list[Entry]] = {}
        for entry in entries if depth < DEEPEST else ():
            if entry.is_folder and left[0] > 0 and entry.last not in INSIDE_A_RUN and not entry.last.startswith("."):
                found |= self._find(entry.name, depth + 1, left)
        return found

    def _read_metrics(self, unread: list[Run], until: float) -> None:
        """Reads on in turns, a little of each run, until all is read or the time is up."""
        while unread and time.monotonic() < until:
            unread = [run for run in unread if time.monotonic() < until and _read_on(run)]

    def _give_way(self) -> None:
        """Lets a page that is being opened have the processor for a moment."""
        until = time.monotonic() + self.seconds / 2
        while any(run.metrics.read_share < 1 for run in self.runs.values()) and time.monotonic() < until:
            if time.monotonic() - self._asked > QUIET_SECONDS:
                return
            time.sleep(QUIET_SECONDS / 10)


def _read_on(run: Run) -> bool:
    try:
        return run.read_on()
    except OSError:  # gone, or cut, since its folder was listed
        return False
