"""A logger that records its calls, and what a run has logged: its metrics, and its IDs in the services of loggers."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.runs.logger import LOGGER_RUNS

Point = tuple[str, int, float]  # name, step and value
CALLS = ("open", "connect", "write", "image", "flush", "end", "close")
RECORDER = """
import time
from pathlib import Path
from paceline import Logger


class Recorder(Logger):
    def __init__(self, folder, images):
        self.file = (folder / Path(__file__).with_suffix(".txt").name).open("a")
        self.record("open", images)

    def record(self, call, *details):
        while {hangs!r} == call:
            Path("hangs").touch()
            time.sleep(3600)
        if {fails!r} == call:
            raise ConnectionError("the server went away, token=abcdef")
        print(call, *details, file=self.file, flush=True)

    def connect(self):
        self.record("connect")

    def write(self, images, values):
        self.record("write", images)

    def image(self, name, images, pixels):
        self.record("image", name, images, pixels.shape, pixels.dtype)

    def flush(self):
        self.record("flush")

    def end(self, state, weights):
        self.record("end", state, weights)

    def close(self):
        self.record("close")
"""


def write_logger(file: Path, hangs: str = "", fails: str = "") -> str:
    """Write a logger that records its calls in a text file with the same name; return its name for `--loggers`."""
    file.write_text(RECORDER.format(hangs=hangs, fails=fails))
    return str(file)


def run_id(folder: Path, logger: str) -> str:
    return str(json.loads((folder / LOGGER_RUNS).read_text())[logger]["id"])


def lines_of(folder: Path) -> list[Point]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clocks = ("images", "seconds", "time")
    return sorted((name, row["images"], value) for row in rows for name, value in row.items() if name not in clocks)
