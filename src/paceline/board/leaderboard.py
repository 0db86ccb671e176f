"""One row per run for the board's table: the last and best values of its metrics, and its settings."""

from __future__ import annotations

import math
import re
from typing import TypedDict

from paceline.board.run import Run
from paceline.board.series import Extreme, Series
from paceline.core.types import SettingValue

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
