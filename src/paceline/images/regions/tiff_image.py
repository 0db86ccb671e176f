"""Reads TIFF, BigTIFF and OME-TIFF files by region, at any level of a pyramid.

Uncompressed and deflate tiles are decoded here, within a fixed size. Other compressions need the package imagecodecs.
Files that an OME-TIFF refers to are not opened.
"""

from __future__ import annotations

import math
import os
import re
import threading
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

from paceline.images.decode import ORIENTATION, BadImage
from paceline.images.integrity import DEFLATE, END_OF_JPEG, JPEG, TIFF_HEADER_BYTES
from paceline.images.planes import PLANES_ELSEWHERE, first_series
from paceline.images.regions.region_image import Box, Level, Pixels, RegionFormat, RegionImage
from paceline.images.tiff_structure import check_directories, is_tiff

CACHE_BYTES = 128 << 20  # decoded tiles, since neighbouring regions share tiles
LARGEST_SEGMENT_BYTES = 256 << 20  # of a decoded tile or strip
LARGEST_CHANNELS = 64
NONE = 1  # value of the TIFF tag Compression
PILLOW = (1, 2, 3, 4, 5, 6, 7, 8, 32773, 32946, 34925, 50000)  # compressions that Pillow can decode
JPEGS = (6, JPEG)  # 6 is an older form
NO_PREDICTOR, HORIZONTAL = 1, 2
GREY, RGB, YCBCR = 1, 2, 6  # values of the TIFF tag PhotometricInterpretation
ALPHA = (1, 2)  # values of the TIFF tag ExtraSamples
MICRONS_PER_UNIT = {2: 25_400.0, 3: 10_000.0}  # values of the TIFF tag ResolutionUnit: inch, centimetre


class TiffImage(RegionImage):
    """A TIFF file. Its pages are its channels if it stores one channel per page."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = _opened(path)
        except Exception as error:
            raise BadImage(f"cannot be read as a TIFF file: {_one_line(error)}") from error
        try:
            series = first_series(self._file)
            self._pages = [_planes(level) for level in series.levels]
            first = self._pages[0][0]
            heights = [pages[0].imagelength for pages in self._pages]
            self.levels = tuple(
                Level(pages[0].imagelength, pages[0].imagewidth, heights[0] / pages[0].imagelength)
                for pages in self._pages
            )
            samples = first.samplesperpixel
            kept, note = _colours(first, samples)
            if len(self._file.series) > 1:
                note += f"{'; ' * bool(note)}only the first of {len(self._file.series)} images in the file was read"
            self._kept, self.only_by_region = kept, first.compression not in PILLOW
            self.format = RegionFormat(
                kept * len(self._pages[0]),
                first.dtype.newbyteorder("="),
                _microns_per_px(self._file, first),
                _magnification(first),
                bytes(first.iccprofile or b""),
                note,
            )
            _check(first, self.format, series.axes)
        except BadImage:
            self._file.close()
            raise
        except Exception as error:
            self._file.close()
            raise BadImage(f"this TIFF cannot be read by region: {_one_line(error)}") from error
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._num_bytes = os.fstat(self._descriptor).st_size
        self._cache: OrderedDict[tuple[int, int, int], Pixels] = OrderedDict()
        self._cached_bytes, self._lock = 0, threading.Lock()

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

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        os.close(self._descriptor)

    def _read_page(self, level: int, number: int, page: Any, box: Box, region: Pixels) -> None:
        height, width, across, down = _grid(page)
        separate = page.planarconfig == 2 and page.samplesperpixel > 1
        for row in range(box.top // height, (box.top + box.height - 1) // height + 1):
            for column in range(box.left // width, (box.left + box.width - 1) // width + 1):
                for plane in range(self._kept if separate else 1):
                    segment = self._segment(level, number, page, plane * across * down + row * across + column)
                    top, left = row * height, column * width
                    rows = slice(max(box.top, top), min(box.top + box.height, top + segment.shape[0]))
                    columns = slice(max(box.left, left), min(box.left + box.width, left + segment.shape[1]))
                    part = segment[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]
                    channels = slice(plane, plane + 1) if separate else slice(0, self._kept)
                    region[
                        rows.start - box.top : rows.stop - box.top,
                        columns.start - box.left : columns.stop - box.left,
                        channels,
                    ] = part if separate else part[..., : self._kept]

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

    def _decode(self, page: Any, index: int) -> Pixels:
        if index >= len(page.dataoffsets) or index >= len(page.databytecounts):
            raise BadImage(f"damaged: tile {index} is missing")
        offset, length = page.dataoffsets[index], page.databytecounts[index]
        height, width, _, down = _grid(page)
        if not page.is_tiled:
            height = min(height, page.imagelength - index % down * height)
        samples = 1 if page.planarconfig == 2 else page.samplesperpixel
        shape = (height, width, samples)
        if not length:  # a sparse file leaves out tiles that are black
            return np.zeros(shape, self.format.dtype)
        if offset + length > self._num_bytes or length > LARGEST_SEGMENT_BYTES:
            raise BadImage(f"damaged: tile {index} extends beyond the end of the file")
        if offset < TIFF_HEADER_BYTES:
            raise BadImage(f"damaged: tile {index} starts inside the header of the file")
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
            raise BadImage(f"damaged: tile {index} cannot be decoded: {_one_line(error)}") from error


def _opened(path: Path) -> tifffile.TiffFile:
    """Open a file after checking its list of pages, since tifffile reads each page of a long list."""
    with path.open("rb") as file:
        if is_tiff(file):
            check_directories(file)
    return tifffile.TiffFile(path, _multifile=False)


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


def _planes(level: Any) -> list[Any]:
    """Return the pages that store the channels of a level."""
    axes, pages = level.axes, list(level.pages)
    if any(page is None for page in pages):
        raise BadImage(PLANES_ELSEWHERE)
    if axes in ("YX", "YXS", "SYX"):
        return [pages[0].keyframe if hasattr(pages[0], "keyframe") else pages[0]][:1]
    if axes in ("CYX", "QYX", "IYX") and len(pages) == level.shape[0]:
        return [page.aspage() for page in pages]
    raise BadImage(f"axes {axes} {tuple(level.shape)}: only images with rows, columns and channels are supported")


def _colours(page: Any, samples: int) -> tuple[int, str]:
    """Return how many samples of a page are used, and a note if some are not."""
    colours = 3 if page.photometric in (RGB, YCBCR) else 1
    if samples > colours and page.extrasamples and page.extrasamples[0] in ALPHA:
        return colours, "transparency is ignored"
    return samples, ""


def _check(page: Any, found: RegionFormat, axes: str) -> None:
    """Raise BadImage for pixels that are not supported."""
    if found.dtype not in (np.uint8, np.uint16):
        raise BadImage(f"{found.dtype} pixels cannot be read by region; save the image with 8 or 16 bits per channel")
    if page.bitspersample not in (8, 16):
        raise BadImage(f"{page.bitspersample}-bit pixels cannot be read by region; save the image with 8 or 16 bits")
    if page.photometric not in (GREY, RGB, YCBCR):
        kind = getattr(page.photometric, "name", page.photometric)
        raise BadImage(f"the colour type {kind} cannot be read by region; save the image as RGB or grey")
    if page.photometric == YCBCR and page.compression not in JPEGS:  # other decoders do not convert to RGB
        raise BadImage("YCbCr colours can be read by region only if they are stored as JPEG; save the image as RGB")
    if page.fillorder != 1 and (page.compression == NONE or page.compression in DEFLATE):
        raise BadImage(
            "pixels whose bits are in reverse order cannot be read by region; save the image with FillOrder 1"
        )
    if page.tags.valueof(ORIENTATION, 1) not in (0, 1):
        raise BadImage("rotated TIFFs cannot be read by region; save the image upright")
    if not 1 <= found.channels <= LARGEST_CHANNELS:
        raise BadImage(f"{found.channels} channels; at most {LARGEST_CHANNELS} are supported")
    height, width, _, _ = _grid(page)
    segment = height * width * page.samplesperpixel * found.dtype.itemsize
    if segment > LARGEST_SEGMENT_BYTES:
        what = "tiles" if page.is_tiled else "strips"
        raise BadImage(f"{what} of {segment / 1e6:,.0f} MB cannot be read by region; save the image with smaller tiles")
    if page.compression != NONE and page.compression not in DEFLATE and page.predictor not in (1, 2, 3):
        raise BadImage(f"predictor {page.predictor} is not supported")
    if page.compression != NONE and page.compression not in DEFLATE:
        _check_codec(page)
    elif page.predictor not in (NO_PREDICTOR, HORIZONTAL):
        raise BadImage(f"predictor {page.predictor} is not supported; save the image with deflate and predictor 2")


def _check_codec(page: Any) -> None:
    try:
        import imagecodecs  # noqa: F401
    except ImportError:
        name = getattr(page.compression, "name", page.compression)
        raise BadImage(f"{name} compression needs the package imagecodecs: pip install 'paceline[slides]'") from None


def _grid(page: Any) -> tuple[int, int, int, int]:
    """Return the height and width of a page's tiles or strips, and their number across and down."""
    if page.is_tiled:
        height, width = page.tilelength, page.tilewidth
    else:
        height, width = min(page.rowsperstrip, page.imagelength), page.imagewidth
    if not height or not width:
        raise BadImage("damaged: the size of the tiles is 0")
    return height, width, -(-page.imagewidth // width), -(-page.imagelength // height)


def _microns_per_px(file: Any, page: Any) -> float:
    stated = re.search(r"MPP\s*=\s*([\d.]+)", page.description) if page.is_svs else None
    if stated:
        return float(stated[1])
    if file.is_ome:
        across, down = (_ome_microns(file.ome_metadata or "", side) for side in "XY")
        return across if not down or math.isclose(across, down, rel_tol=0.01) else 0.0  # only square pixels
    try:
        numerator, denominator = page.tags.valueof(282, (0, 1))
        return MICRONS_PER_UNIT.get(page.tags.valueof(296, 2), 0.0) * denominator / numerator if numerator else 0.0
    except (TypeError, ValueError, ZeroDivisionError):
        return 0.0


def _ome_microns(xml: str, side: str) -> float:
    """Return the size of a pixel along one side; 0 if it is unknown."""
    physical = re.search(rf'PhysicalSize{side}="([\d.eE+-]+)"', xml)
    unit = re.search(rf'PhysicalSize{side}Unit="([^"]*)"', xml)
    return float(physical[1]) if physical and (not unit or unit[1] in ("µm", "um")) else 0.0


def _magnification(page: Any) -> float:
    stated = re.search(r"AppMag\s*=\s*([\d.]+)", page.description) if page.is_svs else None
    return float(stated[1]) if stated else 0.0


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
