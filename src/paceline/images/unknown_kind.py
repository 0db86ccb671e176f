"""Describes why Pillow cannot identify an image file."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

# Compressions of TIFF files that Pillow can decode.
PILLOW_COMPRESSIONS = (1, 2, 3, 4, 5, 6, 7, 8, 32773, 32946, 34925, 50000)


def unknown_kind(path: Path | IO[bytes]) -> str:
    """Return why Pillow cannot identify a file; a TIFF may have unsupported pixels or compression."""
    import tifffile

    try:
        with tifffile.TiffFile(path) as file:
            return _unsupported(file.pages.first, is_big_endian_bigtiff=file.is_bigtiff and file.byteorder == ">")
    except Exception:  # not a TIFF, or a damaged one
        return "not an image in a supported format"


def _unsupported(page: Any, *, is_big_endian_bigtiff: bool) -> str:
    numbers = page.dtype
    if numbers is not None and (numbers.itemsize > 2 or numbers.kind != "u"):
        return f"{numbers.name} pixels have no defined white level; save the image as uint8 or uint16"
    if is_big_endian_bigtiff:
        return "big-endian BigTIFF files are not supported; save the image as little-endian, or as a TIFF below 4 GiB"
    if page.compression not in PILLOW_COMPRESSIONS:
        name = getattr(page.compression, "name", page.compression)
        return f"{name} compression is not supported; save the image uncompressed or with deflate"
    found, extra = int(page.samplesperpixel), len(page.extrasamples)
    if extra or page.bitspersample not in (8, 16):
        channels = f"{found} channel{'s' * (found > 1)} of {page.bitspersample} bits"
        kind = " (of these, 1 is transparency)" if extra == 1 and page.extrasamples[0] in (1, 2) else ""
        return f"{channels}{kind} cannot be read as colours; save the image as grey or RGB with 8 or 16 bits"
    return "this kind of TIFF is not supported; save it as 8-bit or 16-bit with interleaved channels"
