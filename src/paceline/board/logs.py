"""The output of a run's ranks: the end of each log, a search through a log, and the last lines before a failure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from paceline.board.files import UNREADABLE, Entry, Files
from paceline.core.text import printable, printable_lines, redact

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
    chosen = min(failed, key=_changed) if failed else max(ends, key=_changed)
    return [line for line in ends[chosen].splitlines() if line.strip()][-NUM_TAIL_LINES:]


def _changed(entry: Entry) -> float:
    return entry.changed
