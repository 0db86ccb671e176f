"""Writes PNG files with several threads: blocks of rows are filtered and compressed independently.

The blocks' deflate streams are joined into one, as PNG requires: each block but the last ends at a byte boundary
(Z_SYNC_FLUSH), and the Adler-32 checksums of the blocks are combined.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.ordered_map import num_cores, ordered_map

SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}  # by number of channels: grey, grey and alpha, RGB, RGBA
BYTES_PER_BLOCK = 1 << 20
NO_FILTER, AVERAGE, PAETH = 0, 3, 4  # filter types
ADLER_BASE = 65521
ZLIB_HEADER = b"\x78\x01"
FAST = 1  # compression level
UNIFORM = 0.6  # share of zeros in filtered rows from which runs of equal bytes are worth encoding

Pixels = NDArray[Any]  # uint8 or uint16


class _Block(NamedTuple):
    deflated: bytes
    checksum: int  # Adler-32 of the filtered rows
    num_bytes: int  # size of the filtered rows


def write_png(
    path: Path,
    pixels: Pixels,
    alpha: Pixels | None = None,
    *,
    compression: int = FAST,
    profile: bytes = b"",
    exif: bytes = b"",
) -> None:
    """Write a uint8 or uint16 [h, w, 1 to 4] image; alpha, if given, is a further channel [h, w].

    Compression is 0 (none), 1 (fast) or up to 9 (smallest file, slow).
    """
    height, width, channels = pixels.shape
    channels += alpha is not None
    depth = pixels.dtype.itemsize * 8
    with path.open("wb") as file:
        file.write(SIGNATURE)
        _write_chunk(file, b"IHDR", struct.pack(">IIBBBBB", width, height, depth, COLOUR_TYPES[channels], 0, 0, 0))
        if profile:
            _write_chunk(file, b"iCCP", b"ICC Profile\0\0" + zlib.compress(profile))
        if exif:
            _write_chunk(file, b"eXIf", exif.removeprefix(b"Exif\0\0"))
        rows_at_once = max(1, BYTES_PER_BLOCK // (width * channels * depth // 8))
        starts = range(0, height, rows_at_once)

        def deflate(start: int) -> _Block:
            rows = _rows(pixels, alpha, max(0, start - 1), min(height, start + rows_at_once))
            return _deflate(rows, channels * depth // 8, start, compression, last=start == starts[-1])

        checksum, content = 1, ZLIB_HEADER
        for block in ordered_map(deflate, starts, min(num_cores(), len(starts))):
            checksum = _joined_checksum(checksum, block.checksum, block.num_bytes)
            _write_chunk(file, b"IDAT", content + block.deflated)
            content = b""
        _write_chunk(file, b"IDAT", struct.pack(">I", checksum))
        _write_chunk(file, b"IEND", b"")


def _rows(pixels: Pixels, alpha: Pixels | None, start: int, stop: int) -> NDArray[np.uint8]:
    """Return rows as bytes in PNG's byte order, [rows, bytes per row]."""
    part = pixels[start:stop]
    if alpha is not None:
        part = np.concatenate([part, alpha[start:stop, :, np.newaxis].astype(part.dtype)], axis=-1)
    part = part.astype(part.dtype.newbyteorder(">"), copy=False)
    return np.ascontiguousarray(part).reshape(stop - start, -1).view(np.uint8)


def _deflate(rows: NDArray[np.uint8], step: int, start: int, compression: int, *, last: bool) -> _Block:
    """Filter and compress rows; unless `start` is 0, the first row is the row above them."""
    if start == 0:
        rows = np.concatenate([np.zeros_like(rows[:1]), rows])
    kind = NO_FILTER if not compression else AVERAGE if compression == FAST else PAETH
    filtered = _filtered(rows, step, kind)
    compressor = zlib.compressobj(compression, zlib.DEFLATED, -zlib.MAX_WBITS, 9, _strategy(filtered, compression))
    deflated = compressor.compress(filtered.data) + compressor.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)
    return _Block(deflated, zlib.adler32(filtered.data), filtered.nbytes)


def _strategy(filtered: NDArray[np.uint8], compression: int) -> int:
    """Return how to look for repeated bytes: in filtered photographs, a search takes time and finds little."""
    if compression != FAST:
        return zlib.Z_FILTERED
    num_zeros = filtered.size - np.count_nonzero(filtered)
    return zlib.Z_RLE if num_zeros > UNIFORM * filtered.size else zlib.Z_HUFFMAN_ONLY


def _filtered(rows: NDArray[np.uint8], step: int, kind: int) -> NDArray[np.uint8]:
    """Return all rows but the first, each preceded by its filter type; `step` is the size of a pixel in bytes."""
    above, own = rows[:-1], rows[1:]
    filtered = np.empty((len(own), own.shape[1] + 1), np.uint8)
    filtered[:, 0] = kind
    if kind == NO_FILTER:
        filtered[:, 1:] = own
        return filtered
    left = np.zeros_like(own)
    left[:, step:] = own[:, :-step]
    if kind == AVERAGE:
        expected = (left & above) + ((left ^ above) >> 1)  # half of the sum, without an overflow of 8 bits
    else:
        corner = np.zeros_like(above)
        corner[:, step:] = above[:, :-step]
        expected = _paeth(left, above, corner)
    np.subtract(own, expected, out=filtered[:, 1:])
    return filtered


def _paeth(left: NDArray[np.uint8], above: NDArray[np.uint8], corner: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the neighbour that is closest to left + above - corner."""
    rise, run = above.astype(np.int16) - corner, left.astype(np.int16) - corner
    to_left, to_above, to_corner = np.abs(rise), np.abs(run), np.abs(rise + run)
    nearest = np.where(to_above <= to_corner, above, corner)
    return np.where((to_left <= to_above) & (to_left <= to_corner), left, nearest)


def _write_chunk(file: IO[bytes], kind: bytes, content: bytes) -> None:
    file.write(struct.pack(">I", len(content)) + kind)
    file.write(content)
    file.write(struct.pack(">I", zlib.crc32(content, zlib.crc32(kind))))


def _joined_checksum(first: int, second: int, second_bytes: int) -> int:
    """Return the Adler-32 checksum of two joined sequences, given the checksum of each."""
    low = (first & 0xFFFF) + (second & 0xFFFF) - 1
    high = (first >> 16) + (second >> 16) + second_bytes * ((first & 0xFFFF) - 1)
    return (high % ADLER_BASE) << 16 | low % ADLER_BASE
