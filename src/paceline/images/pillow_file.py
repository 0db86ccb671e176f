"""Opens image files with Pillow, however large the images are, and converts them to arrays without further copies."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

FORMATS = (
    *("JPEG", "MPO", "PNG", "WEBP", "AVIF", "JPEG2000", "TIFF", "GIF", "BMP", "QOI", "PPM"),
    "TGA",  # TGA is last, since it has no signature
)
PREFIX_BYTES = 16  # passed to a format's signature check
SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
UNBOUNDED_MODES = ("I", "F")  # 32-bit pixels, in which no value is defined as white
STRIP_PX = 1 << 24  # number of pixels that are converted at a time


def open_of_any_size(file: IO[bytes]) -> Image.Image:
    """Open an image without decoding it. Unlike `Image.open`, accept any number of pixels: the caller checks them."""
    file.seek(0)
    prefix = file.read(PREFIX_BYTES)
    for name in _formats():
        factory, accept = Image.OPEN[name]
        try:
            accepted = accept is None or accept(prefix)
            if accepted and not isinstance(accepted, str):  # a string explains why Pillow cannot decode it
                file.seek(0)
                return factory(file, "")
        except (SyntaxError, IndexError, TypeError, struct.error):  # raised if the file has another format
            continue
    raise UnidentifiedImageError("cannot identify image file")


@cache
def _formats() -> tuple[str, ...]:
    """Return the supported formats. Other Pillow formats may run programs (PostScript) or match arbitrary files."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def to_array(image: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> NDArray[Any]:
    """Return an image as an array [h, w, c]; `convert` is called for strips, since a converted copy may be large."""
    rows = max(1, STRIP_PX // image.width)
    whole: NDArray[Any] | None = None
    for top in range(0, image.height, rows):
        strip = np.asarray(convert(image.crop((0, top, image.width, min(image.height, top + rows)))))
        strip = strip if strip.ndim == 3 else strip[..., np.newaxis]
        if whole is None:
            whole = np.empty((image.height, *strip.shape[1:]), strip.dtype)
        whole[top : top + rows] = strip
    assert whole is not None, "an image has at least one row"
    return whole
