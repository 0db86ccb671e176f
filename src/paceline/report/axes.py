"""Tick values and tick labels for a plot's axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

NUM_TICKS = 5  # approximately
MAX_WHOLE_TICKS = 8


def ticks(low: float, high: float) -> list[float]:
    """Return round tick values that cover a range."""
    if not math.isfinite(low) or not math.isfinite(high) or high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / (NUM_TICKS - 1)
    size = 10 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= raw * 0.999)
    first = math.floor(low / step)
    last = math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def whole_ticks(values: Sequence[float]) -> list[float]:
    """Return ticks for whole numbers, such as device counts: the values themselves if there are only a few."""
    own = sorted(set(values))
    if len(own) <= MAX_WHOLE_TICKS:
        return own
    return [tick for tick in ticks(own[0], own[-1]) if tick == round(tick)]


def short(value: float) -> str:
    """Return a short label for a tick, such as 20k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 10 or (abs(value) >= size and value % (size / 10) == 0):
            return f"{value / size:g}{letter}"
    return f"{value:g}"
