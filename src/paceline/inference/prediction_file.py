"""The file with predicted classes: a CSV table, or one line of JSON per image."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

SUFFIXES = (".csv", ".jsonl")


class ClassProbability(NamedTuple):
    """A class, and the probability that an image shows it."""

    name: str
    probability: float


class PredictionFile:
    """A file with one row per image, in the format given by its suffix."""

    def __init__(self, path: Path, suffix: str, top: int) -> None:
        # Bytes of a file name that are not UTF-8 stay bytes in a table; in JSON, they are escaped.
        errors = "surrogateescape" if suffix == ".csv" else "backslashreplace"
        self._file = path.open("w", newline="", encoding="utf-8", errors=errors)
        self._table = csv.writer(self._file) if suffix == ".csv" else None
        if self._table:
            ranks = range(1, top + 1)
            self._table.writerow(["file", *(f"{what}_{rank}" for rank in ranks for what in ("class", "probability"))])

    def write(self, image: str, classes: Sequence[ClassProbability]) -> None:
        """Add a row for an image, with its most likely class first."""
        if self._table:
            self._table.writerow([image, *(value for one in classes for value in one)])
        else:
            listed = [{"class": one.name, "probability": one.probability} for one in classes]
            self._file.write(json.dumps({"file": image, "classes": listed}, ensure_ascii=False) + "\n")

    def __enter__(self) -> PredictionFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
