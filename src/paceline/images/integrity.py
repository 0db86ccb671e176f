"""Checks that image files are whole and undamaged, because Pillow and libtiff do not."""

from __future__ import annotations

import struct
import zlib
from typing import IO, Any

from PIL import Image, ImageFile

from paceline.images import tiff

PNG_SIGNATURE_BYTES = 8
BMP_RUN_LENGTHS = (1, 2)  # compressions of BMP files that may leave out any number of pixels
SEGMENTS = ((273, 279), (324, 325))  # TIFF tags with the offsets and lengths of strips, and of tiles
MAX_BYTES_PER_PX = 16
# Deflate stores 258 bytes in 2 bits, a PNG 8 pixels in a byte, and a JPEG 64 pixels in a bit.
MOST_PIXELS_PER_BYTE = {"PNG": 8256, "JPEG": 512, "MPO": 512, "GIF": 4096, "BMP": 8, "TGA": 128, "QOI": 62, "PPM": 8}


def load_undamaged(image: Image.Image, file: IO[bytes]) -> None:
    """Decode an opened image; raise an exception if its file is truncated or a checksum does not match."""
    check_checksums(image, file)
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # other code may have enabled it, which would make missing pixels black
    image.load()


def check_length(image: Image.Image, file: IO[bytes]) -> None:
    """Raise an exception if a file is too short for the size in its header; the file position is preserved.

    Otherwise, memory for all pixels would be reserved before the decoder reaches the end of the file. Formats that can
    store any number of equal pixels in a few bytes (TIFF, WebP, AVIF, JPEG 2000, compressed BMP) are not checked.
    """
    most = MOST_PIXELS_PER_BYTE.get(image.format or "")
    if most is None or (image.format == "BMP" and image.info.get("compression") in BMP_RUN_LENGTHS):
        return
    with tiff.from_start(file):
        num_bytes = file.seek(0, 2)
    width, height = _stored_size(image)
    if width * height > num_bytes * most:
        size = f"{width} × {height} pixels"
        raise ValueError(f"image file is truncated: {num_bytes:,} bytes cannot contain {size}")


def _stored_size(image: Image.Image) -> tuple[int, int]:
    """Return the width and height of the pixels in the file; a GIF may store only a part of the image."""
    if image.format != "GIF" or not image.tile:  # type: ignore[attr-defined]
        return image.size
    left, top, right, bottom = image.tile[0][1]  # type: ignore[attr-defined]
    return right - left, bottom - top


def check_checksums(image: Image.Image, file: IO[bytes]) -> None:
    """Raise an exception if a checksum in the file does not match; the file position is preserved."""
    with tiff.from_start(file):
        if image.format == "PNG":
            _check_png(file)
        elif image.format == "TIFF":
            limit = image.width * image.height * MAX_BYTES_PER_PX + tiff.BYTES_AT_ONCE
            _check_tiff(file, image.tag_v2, limit)  # type: ignore[attr-defined]


def _check_png(file: IO[bytes]) -> None:
    file.seek(PNG_SIGNATURE_BYTES)
    kind = b""
    while kind != b"IEND":
        header = file.read(8)
        if len(header) < 8:
            raise ValueError("image file is truncated")
        left, kind = struct.unpack(">I4s", header)
        checksum = zlib.crc32(kind)
        while left:
            content = file.read(min(left, tiff.BYTES_AT_ONCE))
            if not content:
                raise ValueError("image file is truncated")
            checksum, left = zlib.crc32(content, checksum), left - len(content)
        if file.read(4) != struct.pack(">I", checksum):
            raise ValueError(f"damaged: the checksum of chunk {kind.decode('ascii', 'replace')} does not match")


def _check_tiff(file: IO[bytes], tags: Any, limit: int) -> None:
    """Check that strips and tiles are complete, and the checksums of deflate; libtiff fills up a JPEG with grey.

    At most `limit` bytes are decompressed, since a small file can expand to a huge size.
    """
    compression = tags.get(tiff.COMPRESSION)
    for offset_tag, length_tag in SEGMENTS:
        for offset, length in zip(tags.get(offset_tag, ()), tags.get(length_tag, ()), strict=False):
            if length and offset < tiff.TIFF_HEADER_BYTES:
                raise ValueError("damaged: the pixels start inside the header of the file")
            if compression not in (*tiff.DEFLATE, tiff.JPEG):
                continue
            file.seek(offset)
            stored = file.read(length)
            if compression in tiff.DEFLATE:
                limit = _check_deflate(stored, limit)
            elif stored and tiff.END_OF_JPEG not in stored:
                raise ValueError("image file is truncated: the compressed pixels have no end")


def _check_deflate(stored: bytes, limit: int) -> int:
    """Decompress at most about `limit` bytes; return how much of the limit is left."""
    try:
        limit, is_complete = tiff.expand(stored, limit)
    except zlib.error:
        raise ValueError("damaged: the checksum of the compressed pixels does not match") from None
    if stored and not is_complete and limit >= 0:
        raise ValueError("image file is truncated: the compressed pixels have no end")
    return limit
