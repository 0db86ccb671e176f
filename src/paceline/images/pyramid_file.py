"""Writes a tiled, compressed, pyramidal BigTIFF or OME-TIFF by region; an interrupted file can be continued.

The tiles have a fixed order. A tile is recorded in a journal after it has been written, with its length and checksum.
Anything after the last recorded tile, in the file or in the journal, is discarded. The journal is locked, so that only
one command writes the file.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import quoteattr

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UserError
from paceline.core.files import sync_open
from paceline.core.ordered_map import num_cores, ordered_map
from paceline.core.text import printable
from paceline.core.types import JsonObject
from paceline.images.rectangles import Box
from paceline.images.tiff import DEFLATE, GREY, HORIZONTAL, RGB

RECORD = struct.Struct("<IIB")
BYTES_AT_ONCE = 1 << 24


class Part(NamedTuple):
    """A finished part of a file."""

    offset: int
    length: int
    flag: int  # a number from 0 to 255 that belongs to the part


class JournaledFile:
    """A file that grows part by part. Its header is reserved when it is created."""

    def __init__(self, path: Path, journal: Path, purpose: JsonObject, header_bytes: int) -> None:
        self.path, self._journal = path, journal
        self.parts: list[Part] = []
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._log = _open_locked(journal, flags | os.O_APPEND)
        self._opened = [self._log]
        first_line = json.dumps(purpose, sort_keys=True).encode() + b"\n"
        records = _read(journal, first_line) if path.is_file() else b""
        self._file = os.open(path, flags | (0 if records else os.O_TRUNC), 0o666)
        self._opened.append(self._file)
        self.end = header_bytes  # the position after the last part
        for length, checksum, flag in RECORD.iter_unpack(records):  # up to the first damaged part
            content = os.pread(self._file, length, self.end)
            if len(content) < length or zlib.crc32(content) != checksum:
                break
            self.parts.append(Part(self.end, length, flag))
            self.end += length
        os.ftruncate(self._file, self.end)
        os.ftruncate(self._log, len(first_line) + RECORD.size * len(self.parts) if records else 0)
        if not records:
            _write(self._log, first_line)

    def append(self, content: bytes, flag: int = 0) -> None:
        """Write the next part, then record it."""
        _write_at(self._file, content, self.end)
        _write(self._log, RECORD.pack(len(content), zlib.crc32(content), flag))
        self.parts.append(Part(self.end, len(content), flag))
        self.end += len(content)

    def read(self, number: int) -> bytes:
        """Return a finished part."""
        part = self.parts[number]
        return os.pread(self._file, part.length, part.offset)

    def truncate(self, num_parts: int) -> None:
        """Discard all parts from this number on."""
        if num_parts < len(self.parts):
            removed = len(self.parts) - num_parts
            self.end = self.parts[num_parts].offset
            del self.parts[num_parts:]
            os.ftruncate(self._log, os.fstat(self._log).st_size - RECORD.size * removed)
            os.ftruncate(self._file, self.end)

    def complete(self, header: bytes, trailer: bytes) -> None:
        """Write the header and what follows the last part to the disk."""
        _write_at(self._file, trailer, self.end)
        _write_at(self._file, header, 0)
        sync_open(self._file)

    def publish(self, target: Path) -> None:
        """Give a complete file its name, and remove the journal."""
        os.replace(self.path, target)
        self._journal.unlink()
        self.close()  # last, since this releases the lock

    def close(self) -> None:
        """Close the files, unless they are already closed; what has been written so far is kept."""
        while self._opened:
            os.close(self._opened.pop())


def purpose_of(journal: Path) -> JsonObject | None:
    """Return the purpose that a journal states for its file; None if there is no journal."""
    try:
        with journal.open("rb") as file:
            found = json.loads(file.readline(BYTES_AT_ONCE))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _open_locked(journal: Path, flags: int) -> int:
    """Open and lock a journal; raise UserError if another command uses it, or has just removed it."""
    opened = os.open(journal, flags, 0o666)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = os.path.samestat(os.fstat(opened), os.lstat(journal))
    except OSError as error:  # some file systems do not support locks
        is_free = not isinstance(error, BlockingIOError | FileNotFoundError)
    if not is_free:
        os.close(opened)
        raise UserError(f"{printable(journal)}: another command is writing this result; wait until it ends")
    return opened


def _read(journal: Path, first_line: bytes) -> bytes:
    """Return the complete records of a journal; none if it does not exist or has another purpose."""
    try:
        content = journal.read_bytes()
    except OSError:
        return b""
    if not content.startswith(first_line):
        return b""
    records = content[len(first_line) :]
    return records[: len(records) // RECORD.size * RECORD.size]


def _write(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]


def _write_at(file: int, content: bytes, offset: int) -> None:
    while content:
        written = os.pwrite(file, content, offset)
        content, offset = content[written:], offset + written


HEADER_BYTES = 16
BYTE, ASCII, SHORT, LONG, RATIONAL, LONG8, IFD8 = 1, 2, 3, 4, 5, 16, 18  # types of values
FORMATS = {BYTE: "B", ASCII: "B", SHORT: "H", LONG: "I", RATIONAL: "2I", LONG8: "Q", IFD8: "Q"}

# The tags of a directory, which describes one image: for each tag, a type and its values, which may be encoded already.
Tags = dict[int, tuple[int, bytes | Sequence[int]]]


def encode_directory(tags: Tags, offset: int, following: int = 0) -> bytes:
    """Return a directory for a position in the file, with its values; `following` is the next one's position."""
    values_at = offset + 8 + 20 * len(tags) + 8
    entries, values = [], b""
    for tag, (kind, value) in sorted(tags.items()):
        form = FORMATS[kind]
        content = value if isinstance(value, bytes) else struct.pack(f"<{len(value)}{form[-1]}", *value)
        count = len(content) // struct.calcsize(f"<{form}")
        stored = content.ljust(8, b"\0")
        if len(content) > 8:
            stored = struct.pack("<Q", values_at + len(values))
            values += content + b"\0" * (-len(content) % 8)
        entries.append(struct.pack("<HHQ", tag, kind, count) + stored)
    return struct.pack("<Q", len(tags)) + b"".join(entries) + struct.pack("<Q", following) + values


def encode_header(first: int) -> bytes:
    """Return the header of a file whose first directory is at this position."""
    return struct.pack("<2sHHHQ", b"II", 43, 8, 0, first)


SMALLEST_LEVEL_PX = 1024  # levels are added until both sides are at most this long
CENTIMETRE = 3  # a unit of resolution
ORDER = "levels grow together"  # of the tiles; a file that was started with another order is not resumed

Pixels = NDArray[Any]  # uint8 or uint16 [h, w, c]


@dataclass(frozen=True)
class PyramidFormat:
    """The size and type of a pyramid, and how it is stored."""

    height: int
    width: int
    channels: int
    dtype: str  # "uint8" or "uint16"
    tile_px: int  # side of a stored tile, a multiple of 16
    compression: int = 1  # of deflate, from 0 to 9
    microns_per_px: float = 0.0
    profile: bytes = b""
    is_ome: bool = False

    @cached_property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Height and width of each level."""
        sizes = [(self.height, self.width)]
        while max(sizes[-1]) > SMALLEST_LEVEL_PX:
            height, width = sizes[-1]
            sizes.append(((height + 1) // 2, (width + 1) // 2))
        return tuple(sizes)

    def grid(self, level: int) -> tuple[int, int]:
        """Return the number of tiles down and across a level."""
        height, width = self.sizes[level]
        return -(-height // self.tile_px), -(-width // self.tile_px)

    def compress(self, pixels: Pixels) -> bytes:
        """Return a tile, padded to its full size, compressed with deflate and horizontal differencing."""
        tile = np.zeros((self.tile_px, self.tile_px, self.channels), pixels.dtype)
        tile[: pixels.shape[0], : pixels.shape[1]] = pixels
        tile[:, 1:] = tile[:, 1:] - tile[:, :-1]
        return zlib.compress(tile.astype(tile.dtype.newbyteorder("<"), copy=False).data, self.compression)

    def decompress(self, content: bytes) -> Pixels:
        """Return a tile that `compress` returned, at its full size."""
        dtype = np.dtype(self.dtype)
        tile = np.frombuffer(zlib.decompress(content), dtype.newbyteorder("<")).astype(dtype)
        tile = tile.reshape(self.tile_px, self.tile_px, self.channels)
        return np.cumsum(tile, axis=1, dtype=dtype)


class Place(NamedTuple):
    """The level, row and column of a tile in a pyramid."""

    level: int
    row: int
    column: int


class TileOrder:
    """The order of the tiles in the file: those of a block, then the lower-resolution tiles that it completes."""

    def __init__(self, form: PyramidFormat, blocks: Iterable[Box]) -> None:
        grids, side = [form.grid(level) for level in range(len(form.sizes))], form.tile_px
        owners = [np.zeros(grid, np.int64) for grid in grids]  # the block that completes each tile
        for number, box in enumerate(blocks):
            owners[0][box.top // side : -(-box.bottom // side), box.left // side : -(-box.right // side)] = number
        for above, below in pairwise(owners):
            even = np.pad(above, [(0, side % 2) for side in above.shape], mode="edge")
            below[:] = even.reshape(len(even) // 2, 2, -1, 2).max((1, 3))
        owner = np.concatenate([level.ravel() for level in owners])
        order = np.argsort(owner, kind="stable")  # tiles of a block stay in the order of levels, rows and columns
        self.places = [Place(level, *place) for level, grid in enumerate(grids) for place in np.ndindex(grid)]
        self.places = [self.places[number] for number in order]
        numbers = np.split(np.argsort(order), np.cumsum([level.size for level in owners])[:-1])
        self.numbers = [part.reshape(grid) for part, grid in zip(numbers, grids, strict=True)]  # positions of tiles
        self.ends = np.cumsum(np.bincount(owner)).tolist()  # the number after the last tile of each block
        self.starts = [0, *self.ends[:-1]]


class PyramidFile:
    """A pyramid that is being written, in a hidden file next to the final one."""

    def __init__(self, target: Path, form: PyramidFormat, blocks: Iterable[Box], purpose: JsonObject) -> None:
        """Start or resume a file. The blocks are rectangles of whole tiles, which together cover the image."""
        self.target, self.form = target, form
        partial, journal = partial_files(target)
        self._file = JournaledFile(partial, journal, {**purpose, "order": [ORDER, len(form.sizes)]}, HEADER_BYTES)
        self._order = TileOrder(form, blocks)

    @property
    def num_blocks_done(self) -> int:
        """The number of blocks that are written, with the lower-resolution tiles that they complete."""
        return bisect_right(self._order.ends, len(self._file.parts))

    def keep_blocks(self, count: int) -> None:
        """Discard all blocks from this number on."""
        self._file.truncate((self._order.starts + self._order.ends[-1:])[count])

    def flags(self) -> list[int]:
        """Return the flag of each block."""
        return [self._file.parts[start].flag for start in self._order.starts]

    def encode_block(self, block: Box, pixels: Pixels) -> list[bytes]:
        """Return the compressed tiles of a block. May be called by several threads."""
        side = self.form.tile_px
        return [
            self.form.compress(pixels[top : top + side, left : left + side])
            for top in range(0, block.height, side)
            for left in range(0, block.width, side)
        ]

    def append_block(self, tiles: list[bytes], flag: int = 0) -> None:
        """Write the tiles of the next block, and then the lower-resolution tiles that can now be computed."""
        end = self._order.ends[self.num_blocks_done]
        for tile in tiles:
            self._file.append(tile, flag)
        places = self._order.places[len(self._file.parts) : end]
        for _, level in groupby(places, key=attrgetter("level")):  # each needs the tiles of the level before it
            for tile in ordered_map(self._half_tile, list(level), num_cores()):
                self._file.append(tile)

    def complete(self, name: str) -> None:
        """Write the directories. The file is then complete, but does not have its final name yet."""
        assert len(self._file.parts) == len(self._order.places)
        start = self._file.end + -self._file.end % 8
        content = b"\0" * (start - self._file.end) + self._encode_directories(name, start)
        self._file.complete(encode_header(start), content)

    def publish(self) -> None:
        """Give a complete file its name."""
        self._file.publish(self.target)

    def close(self) -> None:
        """Close the file without finishing it."""
        self._file.close()

    def _encode_directories(self, name: str, start: int) -> bytes:
        """Return the directories: in a chain or, in OME-TIFF, with the lower levels inside the first."""
        directories = [self._directory(level, name) for level in range(len(self.form.sizes))]
        is_nested = self.form.is_ome and len(directories) > 1
        if is_nested:
            directories[0][330] = (IFD8, [0] * (len(directories) - 1))
        sizes = [len(encode_directory(tags, 0)) for tags in directories]
        offsets = list(accumulate(sizes, initial=start))[:-1]
        following = [*offsets[1:], 0]
        if is_nested:
            directories[0][330], following = (IFD8, offsets[1:]), [0] * len(directories)
        return b"".join(map(encode_directory, directories, offsets, following))

    def _directory(self, level: int, name: str) -> Tags:
        form, (height, width) = self.form, self.form.sizes[level]
        parts = np.array([part[:2] for part in self._file.parts], "<u8").reshape(-1, 2)
        offsets, lengths = parts[self._order.numbers[level].ravel()].T
        depth = np.dtype(form.dtype).itemsize * 8
        extra = form.channels - (3 if form.channels >= 3 else 1)
        tags: Tags = {
            254: (LONG, [1 if level else 0]),
            256: (LONG, [width]),
            257: (LONG, [height]),
            258: (SHORT, [depth] * form.channels),
            259: (SHORT, [DEFLATE[0]]),
            262: (SHORT, [RGB if form.channels >= 3 else GREY]),
            277: (SHORT, [form.channels]),
            284: (SHORT, [1]),
            317: (SHORT, [HORIZONTAL]),
            322: (LONG, [form.tile_px]),
            323: (LONG, [form.tile_px]),
            324: (LONG8, offsets.tobytes()),
            325: (LONG8, lengths.tobytes()),
            339: (SHORT, [1] * form.channels),
        }
        if extra:
            tags[338] = (SHORT, [0] * extra)
        if form.profile:
            tags[34675] = (BYTE, form.profile)
        if form.microns_per_px:
            per_centimetre = [round(1e4 / (form.microns_per_px * 2**level) * 1000), 1000]
            tags |= {282: (RATIONAL, per_centimetre), 283: (RATIONAL, per_centimetre), 296: (SHORT, [CENTIMETRE])}
        if form.is_ome and not level:
            tags[270] = (ASCII, _ome_xml(form, name).encode() + b"\0")
        return tags

    def tile(self, place: Place) -> Pixels:
        """Return a finished tile at its full size."""
        number = int(self._order.numbers[place.level][place.row, place.column])
        return self.form.decompress(self._file.read(number))

    def _half_tile(self, place: Place) -> bytes:
        """Return a tile of a lower level, from up to four tiles of the level before it."""
        level, row, column = place
        side, (height, width) = self.form.tile_px, self.form.sizes[level - 1]
        down, across = self.form.grid(level - 1)
        top, left = 2 * row * side, 2 * column * side
        area = np.empty((min(2 * side, height - top), min(2 * side, width - left), self.form.channels), self.form.dtype)
        for below, beside in np.ndindex(2, 2):
            if 2 * row + below < down and 2 * column + beside < across:
                part = area[below * side : (below + 1) * side, beside * side : (beside + 1) * side]
                needed = Place(level - 1, 2 * row + below, 2 * column + beside)
                part[:] = self.tile(needed)[: part.shape[0], : part.shape[1]]
        return self.form.compress(halved(area))


def halved(pixels: Pixels) -> Pixels:
    """Return pixels at half the resolution: means of 2×2 pixels, with the last row and column repeated if needed."""
    height, width, channels = pixels.shape
    if height % 2 or width % 2:
        pixels = np.pad(pixels, [(0, height % 2), (0, width % 2), (0, 0)], mode="edge")
    rows = np.add(pixels[::2], pixels[1::2], dtype=np.uint32 if pixels.itemsize > 1 else np.uint16)
    means = np.empty((len(rows), rows.shape[1] // 2, channels), pixels.dtype)
    for channel in range(channels):  # faster than all at once, since the channels are interleaved
        total = rows[:, ::2, channel] + rows[:, 1::2, channel]
        means[..., channel] = (total + 2) >> 2
    return means


def partial_files(target: Path) -> tuple[Path, Path]:
    """Return the names of an unfinished file and of its journal."""
    return target.with_name(f".{target.name}.partial"), target.with_name(f".{target.name}.journal")


def _ome_xml(form: PyramidFormat, name: str) -> str:
    size = f'PhysicalSizeX="{form.microns_per_px:g}" PhysicalSizeY="{form.microns_per_px:g}" '
    return (
        '<?xml version="1.0" encoding="UTF-8"?>'
        '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06">'
        f'<Image ID="Image:0" Name={quoteattr(name)}>'
        f'<Pixels ID="Pixels:0" DimensionOrder="XYCZT" Type="{form.dtype}" {size if form.microns_per_px else ""}'
        f'SizeX="{form.width}" SizeY="{form.height}" SizeC="{form.channels}" SizeZ="1" SizeT="1" Interleaved="true">'
        f'<Channel ID="Channel:0:0" SamplesPerPixel="{form.channels}"/><TiffData IFD="0" PlaneCount="1"/>'
        "</Pixels></Image></OME>"
    )
