"""The gain and cost of compiling networks on this machine, measured by `paceline doctor` and by earlier runs."""

from __future__ import annotations

import math
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.files import write_json
from paceline.core.user_cache import user_cache
from paceline.runs.machine_record import cache_file, identity, read_cached

TABLE = "compile.json"
GAINS, SECONDS = "gains", "seconds_per_network"
ANY_RECIPE = ""  # key of the values for recipes without their own
# Estimates for one H200. docs/performance.md lists measured gains; the seconds were not measured.
BUILT_IN_GAIN, BUILT_IN_SECONDS = 0.10, 20.0


@dataclass(frozen=True)
class CompileCost:
    """The fraction of the step time that compiled networks save, and the seconds that compiling one takes."""

    gain: float
    seconds_per_network: float
    origin: str


def compile_cost(recipe: str) -> CompileCost:
    """Return what compiling gains and costs for a recipe on this machine; built-in values if nothing was measured."""
    table = _read()
    gain = _value(table, GAINS, recipe)
    seconds = _value(table, SECONDS, recipe)
    measured = [name for name, value in (("gain", gain), ("cost", seconds)) if value is not None]
    origin = f"{' and '.join(measured)} measured on this machine" if measured else "built-in estimates"
    return CompileCost(
        BUILT_IN_GAIN if gain is None else gain, BUILT_IN_SECONDS if seconds is None else seconds, origin
    )


def record_gain(gain: float, recipe: str = ANY_RECIPE) -> None:
    """Save the fraction of the step time that compiled networks save; raise OSError if this is not possible."""
    _record(GAINS, recipe, gain)


def record_seconds(seconds_per_network: float, recipe: str) -> None:
    """Save how long compiling a recipe's networks took. The next run finds the same caches, so it takes as long.

    Nothing is saved if the cache folder cannot be written, because a run must not end for this.
    """
    with suppress(OSError):
        _record(SECONDS, recipe, seconds_per_network)


def compile_cache() -> Path | None:
    """Return the folder in which compiled kernels are kept; None if it cannot be written."""
    folder = user_cache() / "compile"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return None
    return folder


def _read() -> dict[str, Any]:
    """Return the table; empty if it was measured on another machine, GPU or version of torch."""
    table = dict(read_cached(TABLE))
    return table if table.get("machine") == identity() else {}


def _value(table: dict[str, Any], kind: str, recipe: str) -> float | None:
    rows = table.get(kind)
    rows = rows if isinstance(rows, dict) else {}
    value = rows.get(recipe, rows.get(ANY_RECIPE))
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _record(kind: str, recipe: str, value: float) -> None:
    table = _read() or {"machine": identity()}
    rows = table.get(kind)
    table[kind] = {**(rows if isinstance(rows, dict) else {}), recipe: round(value, 4)}
    write_json(cache_file(TABLE), table)
