"""One run, read from its files: state, progress, settings, samples and logs."""

from __future__ import annotations

import math
import re
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from operator import attrgetter
from typing import Any, NamedTuple

from paceline.board.files import UNREADABLE, Entry, Files
from paceline.board.metrics import Extreme, MetricsReader, Table
from paceline.board.notes import NOTES, Notes
from paceline.config.files import PROVENANCE
from paceline.core.files import LOCK, parse_toml
from paceline.core.text import HIDDEN, is_private_name, printable, printable_lines, redact
from paceline.core.types import JsonObject
from paceline.runs.metrics import METRICS, REAL_IMAGES, SAMPLE_NAME, SAMPLES
from paceline.runs.record import CONFIG
from paceline.runs.status import MIRROR_STATE, STATES, STATUS, MirrorState, Status
from paceline.runs.terminal import LOGS

RUN_FILES = {CONFIG, METRICS, STATUS}  # a folder that contains one of these files is a run folder
SILENT_AFTER_SECONDS = 600.0
MAX_SMALL_FILE_BYTES = 2**20
MAX_SAMPLE_BYTES = 2**26
KILLED = "the process ended without reporting why: it may have been killed, or the machine may have gone down"


Version = tuple[float, int]  # modification time and size of a file


class Run:
    """One run folder, read repeatedly as its files change."""

    def __init__(self, files: Files, folder: str, identity: str, name: str) -> None:
        self.files, self.folder, self.identity, self.name = files, folder, identity, name
        self.metrics = MetricsReader(files, folder)
        self.revision = 0  # incremented with every change to the run
        self.status: Status | None = None
        self.mirror: MirrorState | None = None
        self.state = "unknown"
        self.reason = ""
        self.log_tail: list[str] = []
        self.notes = Notes()
        self._settings: dict[str, JsonObject] | None = None  # parsed when the page requests them
        self._entries: dict[str, Entry] = {}
        self._versions: dict[str, Version] = {}  # of the files that the last `refresh` has seen

    def refresh(self, entries: list[Entry]) -> None:
        """Update the run's state from the files in its folder, except for the metrics."""
        self._entries = {entry.basename: entry for entry in entries}
        watched = (CONFIG, SAMPLES, NOTES, STATUS, MIRROR_STATE)
        versions = {name: (one.changed, one.size) for name in watched if (one := self._entries.get(name))}
        # Some storage has no modification times.
        changed = {name for name in watched if versions.get(name) != self._versions.get(name)}
        unknown = {name for name, (time, _) in versions.items() if not time}
        if STATUS in changed | unknown:
            self.status = Status.parse(self._small_file(STATUS)) if STATUS in versions else None
        if MIRROR_STATE in changed | unknown:
            self.mirror = MirrorState.parse(self._small_file(MIRROR_STATE)) if MIRROR_STATE in versions else None
        if NOTES in changed:
            self.notes = self.read_notes()
        if CONFIG in changed:
            self._settings = None
        locked = self.files.is_locked(self._path(LOCK)) if LOCK in self._entries else None
        before, (self.state, self.reason) = (self.state, self.reason), self._state(locked)
        if self.state != "failed":
            self.log_tail = []
        elif before[0] != "failed":
            self.log_tail = failure_tail(self.files, list(self.logs().values()))
        self.revision += bool(changed) or before != (self.state, self.reason)
        self._versions = versions

    def read_more(self) -> bool:
        """Read the next chunk of the metrics; return False if everything has been read."""
        table = self.metrics.table
        lines = table.lines
        size = self._entries[METRICS].size if METRICS in self._entries else 0
        try:
            more = self.metrics.advance(size)
        except OSError:  # the file was removed or truncated after its folder was listed
            return False
        if self.metrics.table is not table or table.lines != lines:
            self.revision += 1
        return more

    def summary(self) -> JsonObject:
        """Return the run's summary for the list of runs."""
        table, read_share, status = self.metrics.table, self.metrics.read_share, self.status
        mirror = asdict(self.mirror) if self.mirror else None
        with table.lock:
            return {
                "id": self.identity,
                "name": self.name,
                "revision": self.revision,
                "state": self.state,
                "reason": redact(self.reason),
                "log_tail": list(self.log_tail),
                "since": status.since if status else None,
                "host": status.host if status else "",
                "images": table.images,
                "total_images": status.total_images if status else 0,
                "seconds": table.seconds,
                "last_line_time": table.time or None,
                "mirror": mirror and mirror | {name: redact(mirror[name]) for name in ("url", "error")},
                "lines": table.lines,
                "broken_lines": self.metrics.broken,
                "read_share": round(read_share, 3),
                "has_samples": SAMPLES in self._entries,
                "tags": list(self.notes.tags),
                "note": self.notes.text,
                "notes_version": self.notes.version,
                "names": list(table.series),
                "names_truncated": table.names_truncated,
                "last_values": {name: series.last for name, series in table.series.items()},
                "time_split": {**_time_split(table)} if read_share == 1 else {},
            }

    def settings(self) -> dict[str, JsonObject]:
        """Return the run's settings and its provenance (versions and hardware), with credentials hidden."""
        settings = self._settings
        if settings is None:
            try:
                kept = parse_toml(self._small_file(CONFIG))
            except ValueError:
                kept = {}
            provenance = kept.pop(PROVENANCE, {})
            shown = _shown(provenance if isinstance(provenance, dict) else {})
            settings = self._settings = {"settings": _shown(kept), PROVENANCE: shown}
        return settings

    def read_notes(self) -> Notes:
        """Return the run's tags and note, read from its folder; empty if there are none."""
        try:
            return Notes.parse(self._start_of(NOTES))
        except OSError:
            return Notes()

    def samples(self) -> dict[str, list[int]]:
        """Return, for each kind of sample image, how many images had been seen each time samples were saved."""
        found: dict[str, list[int]] = {}
        for entry in self.files.entries(self._path(SAMPLES)):
            match = SAMPLE_NAME.fullmatch(entry.basename)
            if match and not entry.is_folder:
                found.setdefault(match[1], []).append(int(match[2]))
        return {name: sorted(moments) for name, moments in found.items()}

    def real_bytes(self) -> int | None:
        """Return the size of the image with real examples, or None if there is none."""
        file_name = f"{REAL_IMAGES}-{0:012}.png"
        sizes = [entry.size for entry in self.files.entries(self._path(SAMPLES)) if entry.basename == file_name]
        return sizes[0] if sizes else None

    def sample(self, name: str, images: int) -> bytes:
        """Return a sample image as PNG; raise FileNotFoundError if it does not exist."""
        file_name = f"{name}-{images:012}.png"
        for entry in self.files.entries(self._path(SAMPLES)):
            if entry.basename == file_name and not entry.is_folder and entry.size <= MAX_SAMPLE_BYTES:
                return self.files.read(entry.name, 0, entry.size)
        raise FileNotFoundError(file_name)

    def logs(self) -> dict[int, Entry]:
        """Return each rank's log file."""
        return log_files(self.files, self._path(LOGS))

    def _state(self, locked: bool | None) -> tuple[str, str]:
        """Return the run's state and its reason, based on the lock, status.json and the time of the last write."""
        status = self.status
        if locked:
            return "running", ""
        quiet_seconds = time.time() - max(self._last_write(), status.since if status else 0.0)
        if status is None or status.state not in STATES:
            return ("running" if locked is None and quiet_seconds < SILENT_AFTER_SECONDS else "unknown"), ""
        if status.state != "running":
            return status.state, status.reason
        if locked is False and status.host == socket.gethostname():
            return "failed", KILLED
        if quiet_seconds > SILENT_AFTER_SECONDS:
            host = status.host or "an unknown host"
            minutes = f"{SILENT_AFTER_SECONDS / 60:.0f} minutes"
            return "silent", f"recorded as running on {host}, but there has been no output for more than {minutes}"
        return "running", ""

    def _last_write(self) -> float:
        changed = self._entries[METRICS].changed if METRICS in self._entries else 0.0
        return max(changed, self.metrics.table.time)

    def _small_file(self, name: str) -> bytes:
        """Return the content of a file; empty if it cannot be read, because other runs must still be shown."""
        try:
            return self._start_of(name)
        except UNREADABLE:
            return b""

    def _start_of(self, name: str) -> bytes:
        return self.files.read(self._path(name), 0, MAX_SMALL_FILE_BYTES)

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name


def _time_split(table: Table) -> dict[str, float]:
    """Return the total time in seconds for each part of the training loop.

    `evaluate_seconds` is left out, because it includes the time that is also logged as `evaluation_seconds`.
    """
    return {
        name.removeprefix("time/").removesuffix("_seconds"): round(series.total, 3)
        for name, series in table.series.items()
        if name.startswith("time/") and name.endswith("_seconds") and name != "time/evaluate_seconds"
    }


def _shown(table: Mapping[str, Any], prefix: str = "") -> JsonObject:
    """Flatten nested TOML tables to names such as `table.name`, and hide credentials."""
    flat: JsonObject = {}
    for name, value in table.items():
        full = prefix + name
        if isinstance(value, dict):
            flat |= _shown(value, f"{full}.")
        elif isinstance(value, list) and all(isinstance(one, dict) for one in value):
            for number, one in enumerate(value, start=1):
                flat |= _shown(one, f"{full}.{number}.")
        elif is_private_name(name) and value:
            flat[full] = HIDDEN
        else:
            number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
            flat[full] = value if number else redact(str(value))  # JSON has no NaN or infinity
    return flat


# Metrics that are not results: readings of the machine, parts of the training time, and numbers of samples.
_NOT_RESULTS = re.compile(r"(spread|gpu|host|lr|time)/.*|epoch|.*/(count|checkpoint_images)")
SPEED = "time/images_per_second"


def make_row(run: Run) -> JsonObject:
    """Return a run's row in the table: its settings, and the last, lowest and highest value of each metric."""
    revision, table, complete = run.revision, run.metrics.table, run.metrics.read_share == 1
    with table.lock:
        results: JsonObject = {
            name: {"last": series.last, **_extreme("lowest", series.lowest), **_extreme("highest", series.highest)}
            for name, series in table.series.items()
            if series.last is not None and (name == SPEED or not _NOT_RESULTS.fullmatch(name))
        }
    settings = run.settings()["settings"]
    return {"run": run.identity, "revision": revision, "complete": complete, "results": results, "settings": settings}


def _extreme(name: str, extreme: Extreme | None) -> JsonObject:
    """Return an extreme value, and the number of images seen at that value."""
    at = extreme.images if extreme and math.isfinite(extreme.images) else None
    return {name: extreme.value if extreme else None, f"{name}_at": at}


TAIL_BYTES = 2**16
CHUNK = 2**20  # bytes of a log that are searched at a time
MAX_SEARCHED_BYTES = 2**26  # only the end of a larger log is searched
MAX_MATCHES = 500
MAX_LINE = 2000  # characters shown of a matching line
NUM_TAIL_LINES = 12
_LOG_NAME = re.compile(r"rank-(\d{1,6})\.txt")


class Found(NamedTuple):
    """The result of a search through a log."""

    matches: list[tuple[int, str]]  # line number in the searched part, counted from 1, and text; the last if many
    total: int
    searched_share: float  # fraction of the file that was searched; below 1 for a very large file


def log_files(files: Files, folder: str) -> dict[int, Entry]:
    """Return the log file of each rank in a folder."""
    found = [entry for entry in files.entries(folder) if not entry.is_folder]
    entries = {_LOG_NAME.fullmatch(entry.basename): entry for entry in found}
    return dict(sorted((int(match[1]), entry) for match, entry in entries.items() if match))


def tail(files: Files, entry: Entry, at_most: int = TAIL_BYTES) -> str:
    """Return the end of a log, with credentials hidden."""
    content = files.read(entry.name, max(0, entry.size - at_most), entry.size)
    text = content.decode(errors="replace")
    if entry.size > at_most:
        text = text.partition("\n")[2]
    return printable_lines(redact(text))


def search(files: Files, entry: Entry, text: str) -> Found:
    """Find the lines of a log that contain a text, regardless of case, with credentials hidden."""
    wanted = text.casefold()
    size = min(entry.size, MAX_SEARCHED_BYTES)
    matches: deque[tuple[int, str]] = deque(maxlen=MAX_MATCHES)
    total = 0
    for number, line in enumerate(_lines(files, entry, entry.size - size), start=1):
        if wanted not in line.casefold():
            continue
        shown = printable(redact(line)[:MAX_LINE].rstrip("\r"))
        if wanted in shown.casefold():  # the text may be part of a credential, which a search must not reveal
            total += 1
            matches.append((number, shown))
    return Found(list(matches), total, size / entry.size if entry.size else 1.0)


def _lines(files: Files, entry: Entry, start: int) -> Iterator[str]:
    rest = b""
    while start < entry.size and (content := files.read(entry.name, start, min(start + CHUNK, entry.size))):
        start += len(content)
        *lines, rest = (rest + content).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def failure_tail(files: Files, logs: Sequence[Entry]) -> list[str]:
    """Return the last log lines of the rank that failed first or, if none did, of the rank that printed last."""
    ends: dict[Entry, str] = {}
    for entry in logs:
        with suppress(*UNREADABLE):
            ends[entry] = tail(files, entry, TAIL_BYTES // 4)
    if not ends:
        return []
    failed = [entry for entry, text in ends.items() if "Traceback" in text]
    chosen = min(failed, key=attrgetter("changed")) if failed else max(ends, key=attrgetter("changed"))
    return [line for line in ends[chosen].splitlines() if line.strip()][-NUM_TAIL_LINES:]
