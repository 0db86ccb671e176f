"""Applies an EXIF orientation to arrays; Pillow does this only for its own images."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray


def turn(array: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Return pixels [h, w, c] turned upright; an unknown orientation counts as upright."""
    number = orientation - 1 if 1 <= orientation <= 8 else 0
    array = array.swapaxes(0, 1) if number >= 4 else array
    return array[:: -1 if number % 4 in (2, 3) else 1, :: -1 if number % 4 in (1, 2) else 1]
