"""Decides which images are too large to be decoded as a whole.

A small file can contain a huge image. Samples of a data source have a fixed limit, so that the same files are used on
every machine. Single images above this limit, such as those of `apply` and `measure`, are limited by the memory that is
free.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import RLock
from typing import Any

from PIL import Image

from paceline.core.host_memory import free_host_bytes

PIXEL_LIMIT = 89_000_000
# Bytes per pixel of a decoded Pillow image, and of the array that it is converted to. Other modes: as for RGB.
PILLOW_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2, "I;16L": 2}
ARRAY_BYTES = {"1": 1, "L": 1, "I;16": 2, "I;16B": 2, "I;16L": 2}
RGB_PILLOW_BYTES, RGB_ARRAY_BYTES = 4, 3
PILLOW_IMAGES = 2  # the image as it is stored, and upright
TRANSPARENCY_BYTES = 5  # a copy with an alpha channel, and the alpha channel alone
DECODER_BYTES = {"WEBP": 8, "AVIF": 12, "JPEG2000": 16, "TIFF": 12}  # per pixel, while the file is decoded
PROGRESSIVE_BYTES = 6  # of a progressive JPEG, whose coefficients are all held in memory
USABLE_SHARE = 0.7  # of the free memory; the rest is for the results and for other processes
_DECODING_HUGE = RLock()

SizeLimit = Callable[[Image.Image], str]  # returns why an opened image is too large to be decoded; "" if it is not


def pixel_limit(image: Image.Image) -> str:
    """Limit the number of pixels."""
    if not _is_huge(image):
        return ""
    return f"{image.width} × {image.height} pixels, above the limit of {PIXEL_LIMIT // 10**6} megapixels"


def memory_limit(image: Image.Image, num_sharing: int = 1) -> str:
    """Limit the memory that decoding a huge image needs to a share of what is free, divided among processes."""
    if not _is_huge(image):
        return ""
    needed, free = decoding_bytes(image), free_host_bytes() // num_sharing
    if needed <= USABLE_SHARE * free:
        return ""
    kind = "this TIFF" if image.format == "TIFF" else image.format
    each = f" for each of {num_sharing} processes" if num_sharing > 1 else ""
    return (
        f"{image.width} × {image.height} pixels need {needed / 1e9:.1f} GB of memory, more than {USABLE_SHARE:.0%} of "
        f"the {free / 1e9:.1f} GB that is free{each}, and {kind} cannot be read by region; "
        "save the image as a tiled TIFF, whose size is not limited"
    )


def decoded_alone(image: Image.Image) -> AbstractContextManager[Any]:
    """Return a context in which a huge image is checked and decoded; threads enter it one at a time.

    Otherwise, two threads would count the same free memory.
    """
    return _DECODING_HUGE if _is_huge(image) else nullcontext()


def decoding_bytes(image: Image.Image) -> int:
    """Return the memory that an opened image needs while it is decoded and converted to an array."""
    stored = PILLOW_BYTES.get(image.mode, RGB_PILLOW_BYTES)
    decoder = DECODER_BYTES.get(image.format or "", 0)
    if image.info.get("progressive"):
        decoder = PROGRESSIVE_BYTES
    transparency = TRANSPARENCY_BYTES if image.has_transparency_data else 0
    per_px = PILLOW_IMAGES * stored + transparency + ARRAY_BYTES.get(image.mode, RGB_ARRAY_BYTES) + decoder
    return image.width * image.height * per_px


def unlimited(image: Image.Image) -> str:
    """Accept images of any size, for callers that do not decode the pixels."""
    return ""


def _is_huge(image: Image.Image) -> bool:
    return image.width * image.height > PIXEL_LIMIT
