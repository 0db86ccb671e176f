"""Writes generated images to a folder: threads encode images while the next ones are generated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from paceline.core.ordered_map import num_cores, ordered_map
from paceline.images.encode import Encoding, write_image
from paceline.inference.model import Model

IMAGES_AT_ONCE = 256
# Channels and pixel types of PNG files that can be read without loss; 16-bit colours are read as 8-bit.
PNG_PIXELS = ((1, "uint8"), (3, "uint8"), (1, "uint16"))


class _Generated(NamedTuple):
    path: Path
    pixels: NDArray[Any]


def write_samples(
    model: Model, folder: Path, count: int, encoding: Encoding, label: str | None = None, truncation: float = 1
) -> Iterator[Path]:
    """Write images 0 … count - 1 and yield the path of each, in order; for `label` and `truncation`, see Model."""
    if (model.spec.channels, model.spec.dtype) not in PNG_PIXELS:
        encoding = replace(encoding, format="tiff")
    digits, suffix = max(5, len(str(count - 1))), encoding.suffix(Path())

    def generate() -> Iterator[_Generated]:
        for first in range(0, count, IMAGES_AT_ONCE):
            images = model.sample(min(IMAGES_AT_ONCE, count - first), None, first, label, truncation)
            for number, pixels in enumerate(images.permute(0, 2, 3, 1).numpy(), start=first):
                yield _Generated(folder / f"{number:0{digits}}{suffix}", pixels)

    def write(image: _Generated) -> Path:
        write_image(image.path, image.pixels, encoding)
        return image.path

    return ordered_map(write, generate(), num_cores())
