"""Formats numbers and durations as text for the user."""

from __future__ import annotations

import math


def four_digits(value: float) -> str:
    """Return a number with four significant digits, such as 0.1230 or 12,350; very small numbers as 1.234e-07."""
    if not math.isfinite(value):
        return f"{value:g}"
    exponent = int(f"{value:.3e}".partition("e")[2]) if value else 0
    if not -5 < exponent < 9:
        return f"{value:.3e}"
    return f"{round(value, 3 - exponent):,.{max(0, 3 - exponent)}f}"


def rate(images_per_second: float) -> str:
    """Return a speed, such as `1,234 images/s`; slow speeds have decimals."""
    digits = 0 if images_per_second >= 100 else 1 if images_per_second >= 10 else 2
    return f"{images_per_second:,.{digits}f} images/s"


def epoch(images: int, total_images: int, epoch_images: int) -> str:
    """Return a position in epochs, such as `epoch 4.6/12`; a run of less than one epoch has more decimals."""
    now, total = images / epoch_images, total_images / epoch_images
    return f"epoch {now:.1f}/{f'{total:.1f}'.removesuffix('.0')}" if total >= 1 else f"epoch {now:.2g}/{total:.2g}"


def duration(seconds: float) -> str:
    """Return a duration as hours:minutes:seconds, or minutes:seconds below one hour; "?" if it is not known yet."""
    if seconds > 1e8:  # several years
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
