"""Reads and writes 16-bit colour TIFF files, and writes TIFF files with any channels, with tifffile.

Pillow would reduce 16-bit colours to 8 bits, and cannot write other numbers of channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import tifffile
from numpy.typing import NDArray
from PIL import Image

from paceline.images.decode import ORIENTATION, PREMULTIPLIED, WHITE
from paceline.images.lost_bits import BITS_PER_SAMPLE
from paceline.images.ome import Ome
from paceline.images.orientation import turn

SAMPLES_PER_PIXEL, COLOURS = 277, 3  # TIFF tag, and the number of colour channels
STRAIGHT = 2  # the kind of alpha channel with which colours are not premultiplied
ROWS_AT_ONCE = 64  # rows that are divided by alpha, and alpha rows that are upscaled, at a time
EXTRA_CHANNELS_IGNORED = "channels other than colours and transparency were ignored"
REACH_PX = 4  # neighbouring rows that bicubic upscaling needs


class DeepColours(NamedTuple):
    """A 16-bit colour image from a file, rotated upright."""

    pixels: NDArray[np.uint16]  # shape [h, w, 3]
    alpha: Image.Image | None
    note: str


def has_deep_colours(image: Image.Image) -> bool:
    """Return whether a file is a TIFF with 16-bit colours, in any colour space."""
    if image.format != "TIFF":
        return False
    tags = image.tag_v2  # type: ignore[attr-defined]
    return tags.get(SAMPLES_PER_PIXEL, 1) >= COLOURS and set(tags.get(BITS_PER_SAMPLE, ())) == {16}


def has_extra_channels(image: Image.Image) -> bool:
    """Return whether an RGB TIFF has channels besides colours and transparency. Pillow ignores them."""
    is_rgb = image.format == "TIFF" and image.mode == "RGB"
    return is_rgb and image.tag_v2.get(SAMPLES_PER_PIXEL, 1) > COLOURS  # type: ignore[attr-defined]


def read_deep_colours(path: Path, image: Image.Image) -> DeepColours | None:
    """Return the first page of a TIFF if it is 16-bit RGB, else None; `image` is the same file opened by Pillow."""
    try:
        with tifffile.TiffFile(path) as file:
            page = file.pages.first
            if page.photometric != tifffile.PHOTOMETRIC.RGB or page.dtype != np.uint16:
                return None
            array, axes, extra = page.asarray(), page.axes, page.extrasamples
    except Exception:  # for a damaged file or an unsupported compression, use Pillow
        return None
    if axes == "SYX":  # the file stores one plane per colour
        array = np.moveaxis(array, 0, -1)
    elif axes != "YXS":
        return None
    array = turn(array, image.getexif().get(ORIENTATION, 1))
    pixels = np.ascontiguousarray(array[..., :COLOURS])
    if array.shape[-1] == COLOURS:
        return DeepColours(pixels, None, "")
    if not extra or extra[0] not in (PREMULTIPLIED, STRAIGHT):
        return DeepColours(pixels, None, EXTRA_CHANNELS_IGNORED)
    alpha = array[..., COLOURS]
    if extra[0] == PREMULTIPLIED:
        _divide(pixels, alpha)
    return DeepColours(pixels, Image.fromarray((alpha >> 8).astype(np.uint8)), "")


def write_deep_colours(
    path: Path, pixels: NDArray[np.uint16], alpha: Image.Image | None, profile: bytes, compression: int = 0
) -> None:
    """Write a uint16 [h, w, 3] image; uncompressed, alpha is upscaled a few rows at a time to save memory."""
    height, width, channels = pixels.shape
    shape = (height, width, channels + (alpha is not None))
    options: dict[str, Any] = {
        "photometric": "rgb",
        "extrasamples": None if alpha is None else ["unassalpha"],
        "iccprofile": profile or None,
    }
    if compression:
        if alpha is not None:
            levels = np.concatenate([_sixteen_bits(rows) for _, rows in _enlarged(alpha, height, width)])
            pixels = np.concatenate([pixels, levels], axis=-1)
        tifffile.imwrite(path, pixels, **options, **_deflate(compression))
        return
    place = tifffile.imwrite(path, shape=shape, dtype=np.uint16, **options, returnoffset=True)
    assert place is not None
    with path.open("r+b") as file:
        file.seek(place[0])
        if alpha is None:
            file.write(np.ascontiguousarray(pixels).data)
            return
        for top, rows in _enlarged(alpha, height, width):
            levels = _sixteen_bits(rows)
            file.write(np.concatenate([pixels[top : top + len(levels)], levels], axis=-1).data)


def _sixteen_bits(rows: Image.Image) -> NDArray[np.uint16]:
    """Scale an 8-bit alpha channel to 16 bits, and return it as uint16 [h, w, 1]."""
    return np.asarray(rows).astype(np.uint16)[..., np.newaxis] * 257


def _deflate(level: int) -> dict[str, Any]:
    return {"compression": "zlib", "compressionargs": {"level": level}} if level else {}


def write_planes(
    path: Path | IO[bytes], pixels: NDArray[Any], ome: Ome | None = None, profile: bytes = b"", compression: int = 0
) -> None:
    """Write an image [h, w, c] as a TIFF with one page per channel, or as an OME-TIFF."""
    height, width, channels = pixels.shape
    more = {} if ome is None else ome.for_result(channels, width)
    if ome is not None and ome.is_one_page and channels == COLOURS:
        colours: dict[str, Any] = {"photometric": "rgb", "metadata": {"axes": "YXS", **more}}
        tifffile.imwrite(path, pixels, ome=True, iccprofile=profile or None, **colours, **_deflate(compression))
        return
    tifffile.imwrite(
        path,
        data=(np.ascontiguousarray(pixels[..., channel]) for channel in range(channels)),
        shape=(channels, height, width),
        dtype=pixels.dtype,
        photometric="minisblack",
        metadata={"axes": "CYX", **more},
        ome=ome is not None,
        iccprofile=profile or None,
        **_deflate(compression),
    )


def _enlarged(alpha: Image.Image, height: int, width: int) -> Iterator[tuple[int, Image.Image]]:
    """Yield the upscaled alpha channel in blocks of rows, each with the index of its first row."""
    scale = height // alpha.height
    for first in range(0, alpha.height, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, alpha.height)
        above, below = max(0, first - REACH_PX), min(alpha.height, last + REACH_PX)
        part = alpha.crop((0, above, alpha.width, below))
        part = part.resize((width, (below - above) * scale), Image.Resampling.BICUBIC)
        yield first * scale, part.crop((0, (first - above) * scale, width, (last - above) * scale))


def _divide(pixels: NDArray[np.uint16], alpha: NDArray[np.uint16]) -> None:
    """Divide colours by alpha in place, a few rows at a time, since floating-point copies are large."""
    for top in range(0, len(pixels), ROWS_AT_ONCE):
        rows, levels = pixels[top : top + ROWS_AT_ONCE], alpha[top : top + ROWS_AT_ONCE]
        factors = np.float32(WHITE) / np.maximum(levels, 1).astype(np.float32)
        rows[:] = np.minimum(np.rint(rows * factors[..., np.newaxis]), WHITE)
