"""Differences between images, in 8-bit levels."""

from __future__ import annotations

LEVELS = 255 / 2  # 8-bit levels per unit of the value range [-1, 1]


def in_levels(difference: float) -> str:
    """Format a difference with two significant digits, such as "0.13", "2.6" or "260"."""
    return f"{float(f'{difference:.2g}'):g}"
