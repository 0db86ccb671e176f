"""One run, read from its files: state, progress, settings, samples and the last log lines."""

from __future__ import annotations

import math
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple, TypedDict

from paceline.board.files import UNREADABLE, Entry, Files
from paceline.board.logs import failure_tail, log_files
from paceline.board.metrics import Extreme, MetricsReader, Series, Table
from paceline.board.notes import NOTES, Notes
from paceline.config.files import PROVENANCE
from paceline.core.files import LOCK, parse_toml
from paceline.core.text import HIDDEN, is_private_name, redact
from paceline.core.types import SettingValue
from paceline.runs.metrics import METRICS, REAL_IMAGES, SAMPLE_NAME, SAMPLES
from paceline.runs.record import CONFIG
from paceline.runs.status import MIRROR_STATE, STATES, STATUS, MirrorState, Status
from paceline.runs.terminal import LOGS

RUN_FILES = {CONFIG, METRICS, STATUS}  # a folder that contains one of these files is a run folder
SILENT_AFTER_SECONDS = 600.0
MAX_SMALL_FILE_BYTES = 2**20
MAX_SAMPLE_BYTES = 2**26
KILLED = "the process ended without reporting why: it may have been killed, or the machine may have gone down"


class RunSummary(TypedDict):
    """A summary of one run for the board's list of runs."""

    id: str
    name: str
    revision: int
    state: str
    reason: str
    log_tail: list[str]
    since: float | None
    host: str
    images: int
    total_images: int
    seconds: float
    last_line_time: float | None
    mirror: dict[str, SettingValue] | None
    lines: int
    broken_lines: int
    read_share: float
    has_samples: bool
    tags: list[str]
    note: str
    notes_version: str
    names: list[str]
    names_truncated: bool
    last_values: dict[str, float | None]
    time_split: dict[str, float]


class _Seen(NamedTuple):
    """Values that are compared to detect changes to a run, apart from new metrics."""

    state: str
    reason: str
    config: tuple[float, int]  # modification time and size of config.toml
    samples: tuple[float, int]
    notes: tuple[float, int]
    status: tuple[float, int]
    mirror: tuple[float, int]


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
        self._settings: dict[str, dict[str, SettingValue]] | None = None  # parsed when the page requests them
        self._entries: dict[str, Entry] = {}
        self._seen: _Seen | None = None

    def refresh(self, entries: list[Entry]) -> None:
        """Update the run's state from the files in its folder, except for the metrics."""
        self._entries = {entry.basename: entry for entry in entries}
        if self._may_have_changed(STATUS, self._seen and self._seen.status):
            self.status = Status.parse(self._small_file(STATUS)) if STATUS in self._entries else None
        if self._may_have_changed(MIRROR_STATE, self._seen and self._seen.mirror):
            self.mirror = MirrorState.parse(self._small_file(MIRROR_STATE)) if MIRROR_STATE in self._entries else None
        locked = self.files.is_locked(self._path(LOCK)) if LOCK in self._entries else None
        before, (self.state, self.reason) = self.state, self._state(locked)
        if self.state == "failed" and before != "failed":
            self.log_tail = failure_tail(self.files, list(self.logs().values()))
        elif self.state != "failed":
            self.log_tail = []
        versions = [self._version_of(name) for name in (CONFIG, SAMPLES, NOTES, STATUS, MIRROR_STATE)]
        seen = _Seen(self.state, self.reason, *versions)
        if seen != self._seen:
            if self._seen is None or seen.notes != self._seen.notes:
                self.notes = self.read_notes()
            if self._seen is None or seen.config != self._seen.config:
                self._settings = None
            self._seen = seen
            self.revision += 1

    @property
    def metrics_size(self) -> int:
        """The size of the metrics file in bytes."""
        return self._entries[METRICS].size if METRICS in self._entries else 0

    def read_more(self) -> bool:
        """Read the next chunk of the metrics; return False if everything has been read."""
        table = self.metrics.table
        lines = table.lines
        more = self.metrics.advance(self.metrics_size)
        if self.metrics.table is not table or table.lines != lines:
            self.revision += 1
        return more

    def summary(self) -> RunSummary:
        """Return the run's summary for the list of runs."""
        table, read_share = self.metrics.table, self.metrics.read_share
        with table.lock:
            return self._summary(table, read_share)

    def _summary(self, table: Table, read_share: float) -> RunSummary:
        total = self.status.total_images if self.status else 0
        return {
            "id": self.identity,
            "name": self.name,
            "revision": self.revision,
            "state": self.state,
            "reason": redact(self.reason),
            "log_tail": self.log_tail,
            "since": self.status.since if self.status else None,
            "host": self.status.host if self.status else "",
            "images": table.images,
            "total_images": total,
            "seconds": table.seconds,
            "last_line_time": table.time or None,
            "mirror": self._mirror_summary(),
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
            "time_split": _time_split(table) if read_share == 1 else {},
        }

    def _mirror_summary(self) -> dict[str, SettingValue] | None:
        """Return the state of the run's mirror with credentials hidden, or None if it has no mirror."""
        if self.mirror is None:
            return None
        return {name: redact(value) if isinstance(value, str) else value for name, value in asdict(self.mirror).items()}

    def settings(self) -> dict[str, dict[str, SettingValue]]:
        """Return the run's settings and its provenance (versions and hardware), with credentials hidden."""
        settings = self._settings
        if settings is None:
            settings = self._settings = self._read_settings()
        return settings

    def _read_settings(self) -> dict[str, dict[str, SettingValue]]:
        try:
            kept = parse_toml(self._small_file(CONFIG))
        except ValueError:
            return {"settings": {}, PROVENANCE: {}}
        provenance = kept.pop(PROVENANCE, {})
        return {"settings": _shown(kept), PROVENANCE: _shown(provenance if isinstance(provenance, dict) else {})}

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

    def _version_of(self, name: str) -> tuple[float, int]:
        entry = self._entries.get(name)
        return (entry.changed, entry.size) if entry else (0.0, 0)

    def _may_have_changed(self, name: str, before: tuple[float, int] | None) -> bool:
        """Return whether a file may differ from its version `before`; some storage has no modification times."""
        version = self._version_of(name)
        return version != before or (name in self._entries and not version[0])

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


def _shown(table: Mapping[str, Any], prefix: str = "") -> dict[str, SettingValue]:
    """Flatten nested TOML tables to names such as `table.name`, and hide credentials."""
    flat: dict[str, SettingValue] = {}
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


class Result(TypedDict):
    """The last, lowest and highest value of a metric, with the number of images seen at each extreme."""

    last: float | None
    lowest: float | None
    lowest_at: float | None
    highest: float | None
    highest_at: float | None


class Row(TypedDict):
    """A run's row in the table."""

    run: str
    revision: int
    complete: bool  # False while the metrics are still being read
    results: dict[str, Result]
    settings: dict[str, SettingValue]


def make_row(run: Run) -> Row:
    """Return a run's row."""
    revision, table, complete = run.revision, run.metrics.table, run.metrics.read_share == 1
    with table.lock:
        results = {
            name: _result(series)
            for name, series in table.series.items()
            if series.last is not None and (name == SPEED or not _NOT_RESULTS.fullmatch(name))
        }
    return {
        "run": run.identity,
        "revision": revision,
        "complete": complete,
        "results": results,
        "settings": run.settings()["settings"],
    }


def _result(series: Series) -> Result:
    low, high = series.lowest, series.highest
    return {
        "last": series.last,
        "lowest": low and low.value,
        "lowest_at": _images(low),
        "highest": high and high.value,
        "highest_at": _images(high),
    }


def _images(extreme: Extreme | None) -> float | None:
    return extreme.images if extreme and math.isfinite(extreme.images) else None
