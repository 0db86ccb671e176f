"""Checks that image files are whole and undamaged, because Pillow, libtiff and tifffile do not."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from PIL import Image, ImageFile

PNG_SIGNATURE_BYTES = 8
BMP_RUN_LENGTHS = (1, 2)  # compressions of BMP files that may leave out any number of pixels
COMPRESSION, DEFLATE, JPEG = 259, (8, 32946), 7  # TIFF tag, and the values for deflate and JPEG
END_OF_JPEG = b"\xff\xd9"  # cannot occur in compressed pixels
TIFF_HEADER_BYTES = 8
SEGMENTS = ((273, 279), (324, 325))  # TIFF tags with the offsets and lengths of strips, and of tiles
BYTES_AT_ONCE = 1 << 20
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
    with from_start(file):
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
    with from_start(file):
        if image.format == "PNG":
            _check_png(file)
        elif image.format == "TIFF":
            limit = image.width * image.height * MAX_BYTES_PER_PX + BYTES_AT_ONCE
            _check_tiff(file, image.tag_v2, limit)  # type: ignore[attr-defined]


@contextmanager
def from_start(file: IO[bytes]) -> Iterator[None]:
    """Seek to the start of a file, and restore the file position at the end of the `with` block."""
    position = file.tell()
    file.seek(0)
    try:
        yield
    finally:
        file.seek(position)


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
            content = file.read(min(left, BYTES_AT_ONCE))
            if not content:
                raise ValueError("image file is truncated")
            checksum, left = zlib.crc32(content, checksum), left - len(content)
        if file.read(4) != struct.pack(">I", checksum):
            raise ValueError(f"damaged: the checksum of chunk {kind.decode('ascii', 'replace')} does not match")


def _check_tiff(file: IO[bytes], tags: Any, limit: int) -> None:
    """Check that strips and tiles are complete, and the checksums of deflate; libtiff fills up a JPEG with grey.

    At most `limit` bytes are decompressed, since a small file can expand to a huge size.
    """
    compression = tags.get(COMPRESSION)
    for offset_tag, length_tag in SEGMENTS:
        for offset, length in zip(tags.get(offset_tag, ()), tags.get(length_tag, ()), strict=False):
            if length and offset < TIFF_HEADER_BYTES:
                raise ValueError("damaged: the pixels start inside the header of the file")
            if compression not in (*DEFLATE, JPEG):
                continue
            file.seek(offset)
            stored = file.read(length)
            if compression in DEFLATE:
                limit = _check_deflate(stored, limit)
            elif stored and END_OF_JPEG not in stored:
                raise ValueError("image file is truncated: the compressed pixels have no end")


def _check_deflate(stored: bytes, limit: int) -> int:
    """Decompress at most about `limit` bytes; return how much of the limit is left."""
    try:
        limit, is_complete = _expand(stored, limit)
    except zlib.error:
        raise ValueError("damaged: the checksum of the compressed pixels does not match") from None
    if stored and not is_complete and limit >= 0:
        raise ValueError("image file is truncated: the compressed pixels have no end")
    return limit


def _expand(stored: bytes, limit: int) -> tuple[int, bool]:
    """Decompress until a limit in bytes is exceeded; return what is left of it, and whether the end was reached."""
    stream, waiting = zlib.decompressobj(), stored
    while waiting and not stream.eof and limit >= 0:
        limit -= len(stream.decompress(waiting, BYTES_AT_ONCE))
        waiting = stream.unconsumed_tail
    return limit, stream.eof


TIFF_SUFFIXES = (".tif", ".tiff", ".btf", ".tf8")  # the last two are BigTIFF
SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the last two are BigTIFF
BYTES_OF_TYPE = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
MAX_PAGES = 10_000
IMAGE_DEPTH = 32997  # tag with the number of slices in a page; readers ignore all but the first slice
HAS_SLICES = "a page contains several slices of a volume; save each slice as a page"
ONE_SLICE = (1, 1 << 16, 1 << 32, 1 << 48)  # as a number of 16 or 32 bits, which may be big-endian, in a larger one
TRUNCATED = "image file is truncated"


def is_tiff(file: IO[bytes]) -> bool:
    """Return whether a file starts like a TIFF; the file position is preserved."""
    with from_start(file):
        return file.read(4) in SIGNATURES


def check_directories(file: IO[bytes]) -> None:
    """Raise ValueError unless all pages' directories and their values lie inside the file; the position is kept."""
    with from_start(file):
        size = file.seek(0, 2)
        file.seek(0)
        header = file.read(16)
        order, big = ("<" if header[:1] == b"I" else ">"), header[2:4] in (b"+\0", b"\0+")
        # The formats of an offset, of the number of entries, and of an entry: tag, type, number of values, value.
        place, count, entry = (f"{order}{kind}" for kind in (("Q", "Q", "HHQQ") if big else ("I", "H", "HHII")))
        inline_bytes = 8 if big else 4
        start, visited = _number(header, 8 if big else 4, place), set[int]()
        while start:
            if start in visited or len(visited) >= MAX_PAGES:
                raise ValueError("damaged: its list of pages does not end")
            visited.add(start)
            file.seek(start)
            num_entries = _number(file.read(struct.calcsize(count)), 0, count)
            content = file.read(min(num_entries, size) * struct.calcsize(entry))
            if len(content) < num_entries * struct.calcsize(entry):
                raise ValueError(TRUNCATED)
            for tag, kind, num_values, value in struct.iter_unpack(entry, content):
                if tag == IMAGE_DEPTH and value not in ONE_SLICE:
                    raise ValueError(HAS_SLICES)
                num_bytes = num_values * BYTES_OF_TYPE.get(kind, 0)
                if num_bytes > inline_bytes and value + num_bytes > size:
                    raise ValueError(TRUNCATED)
            start = _number(file.read(struct.calcsize(place)), 0, place)


def check_expansion(file: IO[bytes], segments: Iterable[tuple[int, int]], limit: int) -> None:
    """Raise ValueError if deflate-compressed segments, given by offset and length, expand to more than `limit` bytes.

    tifffile decompresses everything that a small file contains, which could exhaust memory.
    """
    for offset, length in segments:
        file.seek(offset)
        limit, _ = _expand(file.read(length), limit)
        if limit < 0:
            raise ValueError("damaged: its compressed pixels expand to more than the size of the image")


def _number(content: bytes, at: int, form: str) -> int:
    try:
        return int(struct.unpack_from(form, content, at)[0])
    except struct.error:
        raise ValueError(TRUNCATED) from None
