"""Recognises images with more than 8 bits per channel that Pillow reduces to 8 bits when it decodes them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from PIL import Image

from paceline.images.pillow_file import SIXTEEN_BIT_MODES, UNBOUNDED_MODES

PNG_DEPTH_AT = 24  # position of the bit depth in a PNG header
PNG_GREY_AND_ALPHA = 4  # a colour type in a PNG header
BITS_PER_SAMPLE = 258  # TIFF tag
START_OF_CODESTREAM, CODESTREAM_BOX = b"\xff\x4f\xff\x51", b"jp2c"  # in JPEG 2000 files
BITS_AT = 42  # from the start of a codestream to the number of bits of its first channel


def loses_bits(image: Image.Image, file: IO[bytes]) -> bool:
    """Return whether Pillow reduces an opened image to 8 bits; the file position is preserved."""
    if image.mode in (*SIXTEEN_BIT_MODES, *UNBOUNDED_MODES):
        return False
    with _from_start(file):
        if image.format == "PNG":
            return file.read(PNG_DEPTH_AT + 1)[PNG_DEPTH_AT:] == b"\x10"
        if image.format == "PPM":
            return _largest_ppm_value(file) > 255
        if image.format == "JPEG2000":
            return _jpeg_2000_bits(file) > 8
        if image.format == "TIFF":
            return any(bits > 8 for bits in image.tag_v2.get(BITS_PER_SAMPLE, ()))  # type: ignore[attr-defined]
        return False


def png_colour_type(file: IO[bytes]) -> int:
    """Return the colour type in a PNG's header; the file position is preserved."""
    with _from_start(file):
        return file.read(PNG_DEPTH_AT + 2)[-1]


@contextmanager
def _from_start(file: IO[bytes]) -> Iterator[None]:
    """Seek to the start of a file, and restore the file position at the end of the `with` block."""
    position = file.tell()
    file.seek(0)
    try:
        yield
    finally:
        file.seek(position)


def _largest_ppm_value(file: IO[bytes]) -> int:
    """Return the maximum pixel value in the header of a PPM or PGM file: the fourth word, not counting comments."""
    if file.read(2) not in (b"P2", b"P3", b"P5", b"P6"):
        return 1
    words, word = 1, b""
    while True:
        byte = file.read(1)
        if byte == b"#":
            while byte not in (b"\r", b"\n", b""):
                byte = file.read(1)
        elif byte.strip():
            word += byte
            continue
        words += bool(word)
        if words == 4:
            return int(word)
        if not byte:
            return 0
        word = b""


def _jpeg_2000_bits(file: IO[bytes]) -> int:
    """Return the bit depth of the first channel of a JPEG 2000 file; 0 if it is unknown."""
    if file.read(4) != START_OF_CODESTREAM:  # the codestream is in a box
        file.seek(0)
        while True:
            header = file.read(8)
            if len(header) < 8:
                return 0
            length, kind = struct.unpack(">I4s", header)
            read = 8
            if length == 1:  # the length is stored in 64 bits
                length, read = int.from_bytes(file.read(8), "big"), 16
            if kind == CODESTREAM_BOX:
                file.seek(4, 1)
                break
            if length < read:
                return 0
            file.seek(length - read, 1)
    file.seek(BITS_AT - 4, 1)
    stored = file.read(1)
    return (stored[0] & 127) + 1 if stored else 0
