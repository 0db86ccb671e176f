"""Reads TIFF, BigTIFF and OME-TIFF files by region, at any level of a pyramid."""

from __future__ import annotations

import math
import os
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tifffile

from paceline.images import tiff
from paceline.images.decode import PILLOW_COMPRESSIONS, PIXEL_LIMIT, BadImage, reason_of
from paceline.images.deep import (
    EXTRA_CHANNELS_IGNORED,
    GREY_AND_RGB,
    PLANES_ELSEWHERE,
    Ome,
    check_colours,
    first_series,
)
from paceline.images.rectangles import Box
from paceline.images.regions.region_image import Level, Pixels, RegionFormat, RegionImage

LARGEST_SEGMENT_BYTES = 256 << 20  # of a decoded tile or strip
LARGEST_WHOLE_STRIP_BYTES = 16 << 20  # of an uncompressed strip; from larger ones, only the requested rows are read
LARGEST_CHANNELS = 64
# The largest plausible ratio of decoded bytes to stored bytes, by compression. If the size in a header implies a larger
# ratio, the header is damaged. Except for NONE, these are the largest possible ratios, rounded up (5: LZW; 32773:
# PackBits; 34925: LZMA; 34926 and 50000: Zstandard). Compressions that are not listed have no limit. The ratio for NONE
# is not 1, because a file may contain only a part of the pixels.
MOST_EXPANSION = {
    **{tiff.NONE: 16, 5: 2048, tiff.JPEG: 2048, 32773: 64, 34925: 1 << 16, 34926: 1 << 16, 50000: 1 << 16},
    **dict.fromkeys(tiff.DEFLATE, 2048),
}
MICRONS_PER_UNIT = {2: 25_400.0, 3: 10_000.0}  # values of the TIFF tag ResolutionUnit: inch, centimetre


def planes_of(level: Any) -> list[Any]:
    """Return the pages that store the channels of a level."""
    axes, pages = level.axes, list(level.pages)
    if any(page is None for page in pages):
        raise BadImage(PLANES_ELSEWHERE)
    if axes in ("YX", "YXS", "SYX"):
        return [pages[0].keyframe if hasattr(pages[0], "keyframe") else pages[0]][:1]
    if axes in ("CYX", "QYX", "IYX") and len(pages) == level.shape[0]:
        return [page.aspage() for page in pages]
    what = f"axes {axes} {tuple(level.shape)}: only rows, columns and channels can be read by region"
    raise BadImage(f"{what}; save one file per time point, depth or position")


class Samples(NamedTuple):
    """Which samples of a page are used."""

    num_used: int  # the first ones
    note: str = ""  # about the others
    has_alpha: bool = False


def samples_of(page: Any, channels: int) -> Samples:
    """Return the samples that are channels, for networks with a number of channels; 0 for all channels.

    Networks for grey and RGB images read only the colours of an RGB image.
    """
    colours = 3 if page.photometric in (tiff.RGB, tiff.YCBCR) else 1
    if page.samplesperpixel > colours and page.extrasamples and page.extrasamples[0] in tiff.ALPHA:
        return Samples(colours, "transparency is ignored", has_alpha=True)
    if page.samplesperpixel > colours > 1 and channels in GREY_AND_RGB:
        return Samples(colours, EXTRA_CHANNELS_IGNORED)
    return Samples(page.samplesperpixel)


def check_page(page: Any, found: RegionFormat) -> None:
    """Raise BadImage for pixels that are not supported."""
    is_plain = page.compression == tiff.NONE or page.compression in tiff.DEFLATE
    predictors = (tiff.NO_PREDICTOR, tiff.HORIZONTAL, *(() if is_plain else (tiff.FLOAT_PREDICTOR,)))
    problems = {
        f"{found.dtype} pixels": found.dtype not in (np.uint8, np.uint16),
        f"{page.bitspersample}-bit pixels": page.bitspersample not in (8, 16),
        f"the colour type {getattr(page.photometric, 'name', page.photometric)}": (
            page.photometric not in (tiff.GREY, tiff.RGB, tiff.YCBCR)
        ),
        # Other decoders do not convert to RGB.
        "YCbCr colours that are not stored as JPEG": (
            page.photometric == tiff.YCBCR and page.compression not in (tiff.OLD_JPEG, tiff.JPEG)
        ),
        # Without it, the colours are too dark.
        "premultiplied transparency": found.has_alpha and page.extrasamples[0] == tiff.PREMULTIPLIED,
        "pixels whose bits are in reverse order": page.fillorder != 1 and is_plain,
        "rotated pixels": page.tags.valueof(tiff.ORIENTATION, 1) not in (0, 1),
        f"{found.channels} channels": not 1 <= found.channels <= LARGEST_CHANNELS,
        f"predictor {page.predictor}": page.predictor not in predictors,
    }
    for what, is_wrong in problems.items():
        if is_wrong:
            raise BadImage(
                f"{what} cannot be read by region; save the image upright as grey or RGB without transparency, with 8 "
                f"or 16 bits in at most {LARGEST_CHANNELS} channels, uncompressed or with deflate"
            )
    check_colours(page)
    _check_stored(page)
    segment = _segment_bytes(page)
    if segment > LARGEST_SEGMENT_BYTES and not is_read_by_row(page):
        what = "tiles" if page.is_tiled else "strips"
        raise BadImage(f"{what} of {segment / 1e6:,.0f} MB cannot be read by region; save the image with smaller tiles")
    if not is_plain:
        _check_codec(page)


def _check_stored(page: Any) -> None:
    """Raise BadImage if a page stores too little for the size in its header, which would need a huge plan."""
    counts, needed, most = page.databytecounts, _pixel_bytes(page), MOST_EXPANSION.get(int(page.compression), 0)
    if most and all(counts) and most * sum(counts) < needed:  # a count of 0 is a part that a sparse file leaves out
        kind, than = ("pixels", "instead of") if page.compression == tiff.NONE else ("compressed pixels", "for")
        raise BadImage(f"contains {sum(counts):,} bytes of {kind} {than} {needed:,} bytes; the file is damaged")
    _, _, across, down = grid_of(page)
    num_segments = across * down * (page.samplesperpixel if page.planarconfig == 2 else 1)
    if page.compression not in (tiff.NONE, tiff.OLD_JPEG) and len(counts) < num_segments:
        what = "tiles" if page.is_tiled else "strips"
        raise BadImage(f"contains {len(counts):,} {what} instead of {num_segments:,}; the file is damaged")


def _check_codec(page: Any) -> None:
    try:
        import imagecodecs  # noqa: F401
    except ImportError:
        name = getattr(page.compression, "name", page.compression)
        raise BadImage(f"{name} compression needs the package imagecodecs: pip install 'paceline[slides]'") from None


def is_read_by_row(page: Any) -> bool:
    """Return whether a page has uncompressed strips that are too large to be read as a whole."""
    is_raw = page.compression == tiff.NONE and page.predictor == tiff.NO_PREDICTOR
    return is_raw and not page.is_tiled and _segment_bytes(page) > LARGEST_WHOLE_STRIP_BYTES


def _pixel_bytes(page: Any) -> int:
    """Return the size of an uncompressed page."""
    return int(page.imagelength) * int(page.imagewidth) * int(page.samplesperpixel) * int(page.bitspersample) // 8


def _segment_bytes(page: Any) -> int:
    """Return the size of a decoded tile or strip."""
    height, width, _, _ = grid_of(page)
    return int(height * width * samples_per_segment(page) * page.dtype.itemsize)


def samples_per_segment(page: Any) -> int:
    """Return the number of samples of a pixel that are stored in the same tile or strip."""
    return 1 if page.planarconfig == 2 else int(page.samplesperpixel)


def grid_of(page: Any) -> tuple[int, int, int, int]:
    """Return the height and width of a page's tiles or strips, and their number across and down."""
    if page.is_tiled:
        height, width = page.tilelength, page.tilewidth
    else:
        height, width = min(page.rowsperstrip, page.imagelength), page.imagewidth
    if not height or not width:
        raise BadImage("damaged: the size of the tiles is 0")
    return height, width, -(-page.imagewidth // width), -(-page.imagelength // height)


def segments_in(page: Any, box: Box) -> Iterator[tuple[int, Box]]:
    """Yield the index and the rectangle of each tile or strip that has a part of a box, in the first plane."""
    height, width, across, _ = grid_of(page)
    for row in range(box.top // height, (box.bottom - 1) // height + 1):
        for column in range(box.left // width, (box.right - 1) // width + 1):
            yield row * across + column, Box(row * height, column * width, height, width)


def microns_per_px(file: Any, page: Any) -> float:
    """Return the size of a square pixel at full resolution; 0 if it is unknown."""
    stated = re.search(r"MPP\s*=\s*([\d.]+)", page.description) if page.is_svs else None
    if stated:
        return float(stated[1])
    if file.is_ome:
        ome = Ome.parse(file.ome_metadata or "")
        across, down = ome.pixel_size or (0.0, 0.0)
        is_square = math.isclose(across, down, rel_tol=0.01) and set(ome.units) <= {"µm", "um"}
        return across if is_square else 0.0
    try:
        numerator, denominator = page.tags.valueof(282, (0, 1))
        return MICRONS_PER_UNIT.get(page.tags.valueof(296, 2), 0.0) * denominator / numerator if numerator else 0.0
    except (TypeError, ValueError, ZeroDivisionError):
        return 0.0


def magnification(page: Any) -> float:
    """Return the magnification of the objective; 0 if it is unknown."""
    stated = re.search(r"AppMag\s*=\s*([\d.]+)", page.description) if page.is_svs else None
    return float(stated[1]) if stated else 0.0


CACHE_BYTES = 128 << 20  # decoded tiles, since neighbouring regions share tiles
LAST_BYTES = 64  # of a JPEG tile, in which its end is expected


class TiffImage(RegionImage):
    """A TIFF file. Its pages are its channels if it stores one channel per page."""

    def __init__(self, path: Path, channels: int = 0) -> None:
        """Open a file for networks with a number of channels; 0 for all channels of the file."""
        try:
            self._file = _opened(path)
        except Exception as error:
            raise BadImage(f"cannot be read as a TIFF file: {reason_of(error)}") from error
        try:
            series = first_series(self._file)
            self._pages = [planes_of(level) for level in series.levels]
            first = self._pages[0][0]
            heights = [pages[0].imagelength for pages in self._pages]
            self.levels = tuple(
                Level(pages[0].imagelength, pages[0].imagewidth, heights[0] / pages[0].imagelength)
                for pages in self._pages
            )
            kept, note, has_alpha = samples_of(first, channels)
            if len(self._file.series) > 1:
                note += f"{'; ' * bool(note)}only the first of {len(self._file.series)} images in the file was read"
            self._kept, self.only_by_region = kept, first.compression not in PILLOW_COMPRESSIONS
            self.format = RegionFormat(
                kept * len(self._pages[0]),
                first.dtype.newbyteorder("="),
                microns_per_px(self._file, first),
                magnification(first),
                bytes(first.iccprofile or b""),
                note,
                has_alpha,
            )
            check_page(first, self.format)
        except BadImage:
            self._file.close()
            raise
        except Exception as error:
            self._file.close()
            raise BadImage(f"this TIFF cannot be read by region: {reason_of(error)}") from error
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._num_bytes = os.fstat(self._descriptor).st_size
        self._cache: OrderedDict[tuple[int, int, int], Pixels] = OrderedDict()
        self._cached_bytes, self._lock = 0, threading.Lock()
        try:
            self._check_first_strip(first)
        except BadImage:
            self.close()
            raise

    def read(self, level: int, box: Box) -> Pixels:
        """Return a region of a level, [h, w, c]."""
        pages = self._pages[level]
        region = np.zeros((box.height, box.width, self.format.channels), self.format.dtype)
        for number, page in enumerate(pages):
            planes = region[..., number * self._kept : (number + 1) * self._kept]
            self._read_page(level, number, page, box, planes)
        return region

    def has_all_tiles(self, level: int) -> bool:
        """Return whether the file contains all tiles of a level; a sparse file leaves some out."""
        return all(all(page.databytecounts) for page in self._pages[level])

    def check_ends(self, level: int, box: Box) -> None:
        """Raise BadImage if a JPEG tile of a region has no end, without decoding it; other decoders may accept it."""
        for page in self._pages[level]:
            for index, _ in segments_in(page, box):
                self._check_end(page, index)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        os.close(self._descriptor)

    def _read_page(self, level: int, number: int, page: Any, box: Box, region: Pixels) -> None:
        separate = page.planarconfig == 2 and page.samplesperpixel > 1
        _, _, across, down = grid_of(page)
        for first, segment in segments_in(page, box):
            shared = box.intersection(segment)
            inside, target = shared.moved_from(segment).slices, shared.moved_from(box).slices
            for plane in range(self._kept if separate else 1):
                index = plane * across * down + first
                if is_read_by_row(page):
                    part = self._read_rows(page, index, *inside)
                else:
                    part = self._segment(level, number, page, index)[inside]
                samples = slice(plane, plane + 1) if separate else slice(0, self._kept)
                region[*target, samples] = part if separate else part[..., : self._kept]

    def _read_rows(self, page: Any, index: int, rows: slice, columns: slice) -> Pixels:
        """Return a part of an uncompressed strip, [h, w, samples]; only these pixels are read."""
        shape = (rows.stop - rows.start, columns.stop - columns.start, samples_per_segment(page))
        offset, length = self._place(page, index)
        if not length:
            return np.zeros(shape, self.format.dtype)
        dtype = page.dtype.newbyteorder(page.parent.byteorder)
        pixel_bytes, width = shape[2] * dtype.itemsize, page.imagewidth
        if rows.stop * width * pixel_bytes > length:
            raise BadImage(f"damaged: tile {index} cannot be decoded: is truncated")
        starts = (offset + (row * width + columns.start) * pixel_bytes for row in range(rows.start, rows.stop))
        stored = b"".join(os.pread(self._descriptor, shape[1] * pixel_bytes, start) for start in starts)
        return np.frombuffer(stored, dtype).reshape(shape).astype(self.format.dtype)

    def _segment(self, level: int, number: int, page: Any, index: int) -> Pixels:
        """Return a decoded tile or strip, [h, w, samples]."""
        key = (level, number, index)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        segment = self._decode(page, index)
        with self._lock:
            if key not in self._cache:
                self._cache[key] = segment
                self._cached_bytes += segment.nbytes
            while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
                self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        return segment

    def _place(self, page: Any, index: int) -> tuple[int, int]:
        """Return the offset and length of a stored tile or strip; the length is 0 if a sparse file leaves it out."""
        if index >= len(page.dataoffsets) or index >= len(page.databytecounts):
            raise BadImage(f"damaged: tile {index} is missing")
        offset, length = page.dataoffsets[index], page.databytecounts[index]
        if length and offset + length > self._num_bytes:
            raise BadImage(f"damaged: tile {index} extends beyond the end of the file")
        if length and offset < tiff.TIFF_HEADER_BYTES:
            raise BadImage(f"damaged: tile {index} starts inside the header of the file")
        return offset, length

    def _check_first_strip(self, page: Any) -> None:
        """Raise BadImage if a huge page has strips of the wrong size; other checks of the header do not detect this."""
        is_huge = page.imagelength * page.imagewidth > PIXEL_LIMIT
        if is_huge and not page.is_tiled and page.compression not in MOST_EXPANSION:
            self._decode(page, 0)

    def _check_end(self, page: Any, index: int) -> None:
        offset, length = self._place(page, index)
        if page.compression != tiff.JPEG or not length:
            return
        last = min(length, LAST_BYTES)
        if tiff.END_OF_JPEG in os.pread(self._descriptor, last, offset + length - last):
            return
        if tiff.END_OF_JPEG not in os.pread(self._descriptor, min(length, LARGEST_SEGMENT_BYTES), offset):
            raise BadImage(f"damaged: tile {index} is truncated")

    def _decode(self, page: Any, index: int) -> Pixels:
        offset, length = self._place(page, index)
        height, width, _, down = grid_of(page)
        if not page.is_tiled:
            height = min(height, page.imagelength - index % down * height)
        shape = (height, width, samples_per_segment(page))
        if not length:  # the missing pixels are black
            return np.zeros(shape, self.format.dtype)
        if length > LARGEST_SEGMENT_BYTES:
            raise BadImage(f"damaged: tile {index} has {length:,} bytes")
        stored = os.pread(self._descriptor, length, offset)
        try:
            if page.compression == tiff.NONE or page.compression in tiff.DEFLATE:
                return _unpack(page, stored, shape)
            # The decoder would fill up the tile with grey.
            if page.compression == tiff.JPEG and tiff.END_OF_JPEG not in stored:
                raise ValueError("is truncated")
            decoded = page.decode(stored, index, jpegtables=page.jpegtables)[0]
            if decoded is None or decoded.shape[1] < height or decoded.shape[2] < width:
                raise ValueError("is incomplete")
            return np.ascontiguousarray(decoded[0, :height, :width])
        except Exception as error:
            raise BadImage(f"damaged: tile {index} cannot be decoded: {reason_of(error)}") from error


def _opened(path: Path) -> tifffile.TiffFile:
    """Open a file after checking its list of pages, since tifffile reads each page of a long list."""
    with path.open("rb") as file:
        if tiff.is_tiff(file):
            tiff.check_directories(file)
    return tifffile.TiffFile(path, _multifile=False)


def is_small_tiff(path: Path) -> bool:
    """Return whether a TIFF states a size that can be decoded as a whole; it need not be readable by region."""
    try:
        with _opened(path) as file:
            page = file.pages.first
            return 0 < page.imagelength * page.imagewidth <= PIXEL_LIMIT
    except Exception:  # damaged, or not a TIFF
        return False


def _unpack(page: Any, stored: bytes, shape: tuple[int, int, int]) -> Pixels:
    """Decode an uncompressed or deflate segment; its size is known, so it cannot exhaust memory."""
    dtype = page.dtype.newbyteorder(page.parent.byteorder)
    expected = shape[0] * shape[1] * shape[2] * dtype.itemsize
    if page.compression != tiff.NONE:
        stream = zlib.decompressobj()
        stored = stream.decompress(stored, expected)
        # The checksum is verified at the end of the stream.
        if len(stored) == expected and not stream.eof and stream.decompress(stream.unconsumed_tail, 1):
            raise ValueError("has more pixels than a tile")
        if not stream.eof:
            raise ValueError("is truncated")
    if len(stored) < expected:
        raise ValueError("is truncated")
    pixels: Pixels = np.frombuffer(stored[:expected], dtype).reshape(shape).astype(dtype.newbyteorder("="))
    if page.predictor == tiff.HORIZONTAL:
        np.cumsum(pixels, axis=1, dtype=pixels.dtype, out=pixels)
    return pixels
