"""TIFF files: their tags, and checks of their pages that neither Pillow nor tifffile makes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

# Tags, as in the specification.
SUBFILE_TYPE, WIDTH, HEIGHT, BITS_PER_SAMPLE, COMPRESSION, PHOTOMETRIC = 254, 256, 257, 258, 259, 262
ORIENTATION, SAMPLES_PER_PIXEL, PLANES, EXTRA_SAMPLES, SAMPLE_FORMAT = 274, 277, 284, 338, 339
IMAGE_DEPTH = 32997  # the number of slices in a page; readers ignore all but the first slice
# Values of tags.
NONE, OLD_JPEG, JPEG, DEFLATE = 1, 6, 7, (8, 32946)  # COMPRESSION
WHITE_IS_ZERO, GREY, RGB, YCBCR = 0, 1, 2, 6  # PHOTOMETRIC
PREMULTIPLIED, ALPHA = 1, (1, 2)  # EXTRA_SAMPLES: one kind of transparency, and both kinds
NO_PREDICTOR, HORIZONTAL, FLOAT_PREDICTOR = 1, 2, 3  # PREDICTOR
SEPARATE, SIGNED = 2, 2  # PLANES, SAMPLE_FORMAT
END_OF_JPEG = b"\xff\xd9"  # cannot occur in compressed pixels
TIFF_HEADER_BYTES = 8
BYTES_AT_ONCE = 1 << 20
TIFF_SUFFIXES = (".tif", ".tiff", ".btf", ".tf8")  # the last two are BigTIFF
SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the last two are BigTIFF
BYTES_OF_TYPE = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
MAX_PAGES = 10_000
HAS_SLICES = "a page contains several slices of a volume; save each slice as a page"
ONE_SLICE = (1, 1 << 16, 1 << 32, 1 << 48)  # as a number of 16 or 32 bits, which may be big-endian, in a larger one
TRUNCATED = "image file is truncated"


@contextmanager
def from_start(file: IO[bytes]) -> Iterator[None]:
    """Seek to the start of a file, and restore the file position at the end of the `with` block."""
    position = file.tell()
    file.seek(0)
    try:
        yield
    finally:
        file.seek(position)


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


SEGMENTS = ((273, 279), (324, 325))  # tags with the offsets and lengths of strips, and of tiles


def check_segments(file: IO[bytes], tags: Any, limit: int) -> None:
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
            is_complete = not stored or END_OF_JPEG in stored
            if compression in DEFLATE:
                limit, is_complete = _expand(stored, limit)
            if not is_complete and limit >= 0:
                raise ValueError("image file is truncated: the compressed pixels have no end")


def check_expansion(file: IO[bytes], segments: Iterable[tuple[int, int]], limit: int) -> None:
    """Raise ValueError if deflate-compressed segments, given by offset and length, expand to more than `limit` bytes.

    tifffile decompresses everything that a small file contains, which could exhaust memory.
    """
    for offset, length in segments:
        file.seek(offset)
        limit, _ = _expand(file.read(length), limit)
        if limit < 0:
            raise ValueError("damaged: its compressed pixels expand to more than the size of the image")


def _expand(stored: bytes, limit: int) -> tuple[int, bool]:
    """Decompress until a limit in bytes is exceeded; return what is left of it, and whether the end was reached."""
    stream, waiting = zlib.decompressobj(), stored
    try:
        while waiting and not stream.eof and limit >= 0:
            limit -= len(stream.decompress(waiting, BYTES_AT_ONCE))
            waiting = stream.unconsumed_tail
    except zlib.error:
        raise ValueError("damaged: the checksum of the compressed pixels does not match") from None
    return limit, stream.eof or not stored


def _number(content: bytes, at: int, form: str) -> int:
    try:
        return int(struct.unpack_from(form, content, at)[0])
    except struct.error:
        raise ValueError(TRUNCATED) from None
