"""The gain and cost of compiling networks on this machine, measured by `paceline doctor` and by earlier runs."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.files import writable_cache, write_json
from paceline.runs.provenance import cache_file, identity, read_cached

TABLE = "compile.json"
GAINS = "gains"
SECONDS = {False: "seconds_per_network", True: "seconds_per_known_network"}  # True: kernels are cached
ANY_RECIPE = ""  # key of the values for recipes without their own
# Measured on one H200 with torch 2.11 (docs/performance.md), at the batch sizes of the presets.
BUILT_IN_GAINS = {
    "classification": 0.26,
    "dcgan": 0.12,
    "dual_gan": 0.10,
    "super_resolution": 0.30,
    "translation": 0.18,
    ANY_RECIPE: 0.10,  # not measured
}
BUILT_IN_SECONDS = {  # per network
    "classification": 30.0,
    "dcgan": 6.0,
    "dual_gan": 6.0,
    "super_resolution": 25.0,
    "translation": 3.5,
    ANY_RECIPE: 20.0,  # not measured
}
SHARE_IF_KNOWN = 0.2  # of these seconds, if the kernels are cached: measured for ResNet-18, 6 s


@dataclass(frozen=True)
class CompileCost:
    """The fraction of the step time that compiled networks save, and the seconds that compiling one takes."""

    gain: float
    seconds_per_network: float
    origin: str
    known: bool = False  # whether kernels of an earlier run are cached


def compile_cost(recipe: str, *, known: bool = False) -> CompileCost:
    """Return what compiling gains and costs for a recipe on this machine; built-in values if nothing was measured.

    If `known` is true, the kernels of an earlier run are cached, and compiling takes less time.
    """
    table = _read()
    gain = _value(table, GAINS, recipe)
    seconds = _value(table, SECONDS[known], recipe)
    measured = [name for name, value in (("gain", gain), ("cost", seconds)) if value is not None]
    origin = f"{' and '.join(measured)} measured on this machine" if measured else "built-in estimates"
    if seconds is None:
        seconds = _built_in(BUILT_IN_SECONDS, recipe) * (SHARE_IF_KNOWN if known else 1)
    return CompileCost(_built_in(BUILT_IN_GAINS, recipe) if gain is None else gain, seconds, origin, known)


def _built_in(values: dict[str, float], recipe: str) -> float:
    return values.get(recipe, values[ANY_RECIPE])


def record_gain(gain: float, recipe: str) -> None:
    """Save the fraction of the step time that compiled networks save; raise OSError if this is not possible."""
    _record(GAINS, recipe, gain)


def record_seconds(seconds_per_network: float, recipe: str, *, known: bool = False) -> None:
    """Save how long compiling a recipe's networks took, without or with the kernels of an earlier run.

    Nothing is saved if the cache folder cannot be written, because this must not stop a run.
    """
    with suppress(OSError):
        _record(SECONDS[known], recipe, seconds_per_network)


def compile_cache() -> Path | None:
    """Return the folder in which compiled kernels are kept; None if it cannot be written."""
    return writable_cache("compile")


def _read() -> dict[str, Any]:
    """Return the table; empty if it was measured on another machine, GPU or version of torch."""
    table = dict(read_cached(TABLE))
    return table if table.get("machine") == identity() else {}


def _value(table: dict[str, Any], kind: str, recipe: str) -> float | None:
    rows = table.get(kind)
    rows = rows if isinstance(rows, dict) else {}
    value = rows.get(recipe)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _record(kind: str, recipe: str, value: float) -> None:
    table = _read() or {"machine": identity()}
    rows = table.get(kind)
    table[kind] = {**(rows if isinstance(rows, dict) else {}), recipe: round(value, 4)}
    write_json(cache_file(TABLE), table)
