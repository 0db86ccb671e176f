"""Reads TIFF, BigTIFF and OME-TIFF files by region, at any level of a pyramid.

Uncompressed and deflate tiles are decoded here, within a fixed size. Other compressions need the package imagecodecs.
Large uncompressed strips are read row by row.
Files that an OME-TIFF refers to are not opened.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

from paceline.images.decode import BadImage, reason_of
from paceline.images.integrity import DEFLATE, END_OF_JPEG, JPEG, TIFF_HEADER_BYTES
from paceline.images.planes import first_series
from paceline.images.regions.region_image import Box, Level, Pixels, RegionFormat, RegionImage
from paceline.images.regions.tiff_page import (
    HORIZONTAL,
    LARGEST_SEGMENT_BYTES,
    MOST_EXPANSION,
    NONE,
    check_page,
    grid_of,
    is_read_by_row,
    magnification,
    microns_per_px,
    planes_of,
    samples_of,
    samples_per_segment,
)
from paceline.images.size_limit import PIXEL_LIMIT
from paceline.images.tiff_integrity import check_directories, is_tiff
from paceline.images.unknown_kind import PILLOW_COMPRESSIONS

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
            height, width, across, _ = grid_of(page)
            for row in range(box.top // height, (box.top + box.height - 1) // height + 1):
                for column in range(box.left // width, (box.left + box.width - 1) // width + 1):
                    self._check_end(page, row * across + column)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        os.close(self._descriptor)

    def _read_page(self, level: int, number: int, page: Any, box: Box, region: Pixels) -> None:
        height, width, across, down = grid_of(page)
        separate = page.planarconfig == 2 and page.samplesperpixel > 1
        for row in range(box.top // height, (box.top + box.height - 1) // height + 1):
            for column in range(box.left // width, (box.left + box.width - 1) // width + 1):
                top, left = row * height, column * width
                rows = slice(max(box.top, top), min(box.top + box.height, top + height))
                columns = slice(max(box.left, left), min(box.left + box.width, left + width))
                inside = slice(rows.start - top, rows.stop - top), slice(columns.start - left, columns.stop - left)
                for plane in range(self._kept if separate else 1):
                    index = plane * across * down + row * across + column
                    if is_read_by_row(page):
                        part = self._read_rows(page, index, *inside)
                    else:
                        part = self._segment(level, number, page, index)[inside]
                    region[
                        rows.start - box.top : rows.stop - box.top,
                        columns.start - box.left : columns.stop - box.left,
                        slice(plane, plane + 1) if separate else slice(0, self._kept),
                    ] = part if separate else part[..., : self._kept]

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
        if length and offset < TIFF_HEADER_BYTES:
            raise BadImage(f"damaged: tile {index} starts inside the header of the file")
        return offset, length

    def _check_first_strip(self, page: Any) -> None:
        """Raise BadImage if a huge page has strips of the wrong size; other checks of the header do not detect this."""
        is_huge = page.imagelength * page.imagewidth > PIXEL_LIMIT
        if is_huge and not page.is_tiled and page.compression not in MOST_EXPANSION:
            self._decode(page, 0)

    def _check_end(self, page: Any, index: int) -> None:
        offset, length = self._place(page, index)
        if page.compression != JPEG or not length:
            return
        last = min(length, LAST_BYTES)
        if END_OF_JPEG in os.pread(self._descriptor, last, offset + length - last):
            return
        if END_OF_JPEG not in os.pread(self._descriptor, min(length, LARGEST_SEGMENT_BYTES), offset):
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
            if page.compression == NONE or page.compression in DEFLATE:
                return _unpack(page, stored, shape)
            if page.compression == JPEG and END_OF_JPEG not in stored:  # the decoder would fill up the tile with grey
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
        if is_tiff(file):
            check_directories(file)
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
    if page.compression != NONE:
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
    if page.predictor == HORIZONTAL:
        np.cumsum(pixels, axis=1, dtype=pixels.dtype, out=pixels)
    return pixels
