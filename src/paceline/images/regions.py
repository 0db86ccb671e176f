"""Images that are read by region, because they may be larger than memory: TIFF pyramids and whole slides."""

from __future__ import annotations

import math
import os
import re
import threading
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from numpy.typing import NDArray

from paceline.core.registry import is_installed
from paceline.images import tiff
from paceline.images.decode import (
    PILLOW_COMPRESSIONS,
    PIXEL_LIMIT,
    BadImage,
    decode_full_depth,
    memory_limit,
    reason_of,
    unlimited,
)
from paceline.images.deep import (
    CODECS,
    COLOURS,
    EXTRA_CHANNELS_IGNORED,
    GREY_AND_RGB,
    PLANES_ELSEWHERE,
    Ome,
    check_colours,
    first_series,
    image_size,
)
from paceline.images.rectangles import Box

Pixels = NDArray[Any]  # uint8 or uint16 [h, w, c]


@dataclass(frozen=True)
class Level:
    """One resolution of an image."""

    height: int
    width: int
    downsample: float  # how many pixels of the full resolution a pixel covers, along one side


@dataclass(frozen=True)
class RegionFormat:
    """The pixels of an image, which are the same at every level."""

    channels: int
    dtype: np.dtype[Any]
    microns_per_px: float = 0.0  # at full resolution; 0 if unknown
    magnification: float = 0.0  # of the objective; 0 if unknown
    profile: bytes = b""
    note: str = ""
    has_alpha: bool = False  # whether the file has an alpha channel, which is not one of the channels


class RegionImage(ABC):
    """An image whose regions can be read, by several threads at once. Close it after use."""

    levels: tuple[Level, ...]
    format: RegionFormat
    only_by_region = False  # whether no other reader can decode the file

    @abstractmethod
    def read(self, level: int, box: Box) -> Pixels:
        """Return a region that lies inside a level; raise BadImage if its pixels are damaged."""

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def __enter__(self) -> RegionImage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def choose_level(image: RegionImage, level: int, magnification: float) -> int:
    """Return the level with the given number or magnification; raise BadImage if there is none."""
    if not magnification:
        if level >= len(image.levels):
            raise BadImage(f"--level {level}: the image has no such level; the last one is {len(image.levels) - 1}")
        return level
    objective = image.format.magnification
    if not objective:
        raise BadImage(f"--magnification {magnification:g}: the file does not state its magnification; use --level")
    available = [objective / one.downsample for one in image.levels]
    nearest = min(range(len(available)), key=lambda number: abs(available[number] / magnification - 1))
    if abs(available[nearest] / magnification - 1) > 0.05:
        listed = ", ".join(f"{one:.3g}" for one in available)
        raise BadImage(f"--magnification {magnification:g}: the image has magnifications {listed}; choose one of them")
    return nearest


def choose_box(level: Level, region: Box | None) -> Box:
    """Return the requested part of a level, or all of it; raise BadImage if it is not inside the level."""
    if region is None:
        return Box(0, 0, level.height, level.width)
    if region.bottom > level.height or region.right > level.width:
        asked = f"{region.left},{region.top},{region.width},{region.height}"
        raise BadImage(f"--region {asked}: is outside the image, which has {level.width}×{level.height} pixels")
    return region


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


def choose_samples(page: Any, channels: int) -> tuple[int, str, bool]:
    """Return how many samples of a page are channels, a note about the others, and whether one is transparency.

    Networks for grey and RGB images, with 1 or 3 `channels`, read only the colours of an RGB image.
    """
    colours = 3 if page.photometric in (tiff.RGB, tiff.YCBCR) else 1
    if page.samplesperpixel > colours and page.extrasamples and page.extrasamples[0] in tiff.ALPHA:
        return colours, "transparency is ignored", True
    if page.samplesperpixel > colours > 1 and channels in GREY_AND_RGB:
        return colours, EXTRA_CHANNELS_IGNORED, False
    return page.samplesperpixel, "", False


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
    if not is_plain and not is_installed(CODECS):
        name = getattr(page.compression, "name", page.compression)
        raise BadImage(f"{name} compression needs the package imagecodecs: pip install 'paceline[slides]'")


def _check_stored(page: Any) -> None:
    """Raise BadImage if a page stores too little for the size in its header, which would need a huge plan."""
    counts, most = page.databytecounts, MOST_EXPANSION.get(int(page.compression), 0)
    num_samples = int(page.imagelength) * int(page.imagewidth) * int(page.samplesperpixel)
    needed = num_samples * int(page.bitspersample) // 8
    if most and all(counts) and most * sum(counts) < needed:  # a count of 0 is a part that a sparse file leaves out
        kind, than = ("pixels", "instead of") if page.compression == tiff.NONE else ("compressed pixels", "for")
        raise BadImage(f"contains {sum(counts):,} bytes of {kind} {than} {needed:,} bytes; the file is damaged")
    _, _, across, down = grid_of(page)
    num_segments = across * down * (page.samplesperpixel if page.planarconfig == 2 else 1)
    if page.compression not in (tiff.NONE, tiff.OLD_JPEG) and len(counts) < num_segments:
        what = "tiles" if page.is_tiled else "strips"
        raise BadImage(f"contains {len(counts):,} {what} instead of {num_segments:,}; the file is damaged")


def is_read_by_row(page: Any) -> bool:
    """Return whether a page has uncompressed strips that are too large to be read as a whole."""
    is_raw = page.compression == tiff.NONE and page.predictor == tiff.NO_PREDICTOR
    return is_raw and not page.is_tiled and _segment_bytes(page) > LARGEST_WHOLE_STRIP_BYTES


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
            kept, note, has_alpha = choose_samples(first, channels)
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
        is_huge = first.imagelength * first.imagewidth > PIXEL_LIMIT
        if is_huge and not first.is_tiled and first.compression not in MOST_EXPANSION:
            try:
                self._decode(first, 0)  # strips may have the wrong size, which no check of the header detects
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


class WholeImage(RegionImage):
    """A PNG, JPEG or other image as 8-bit grey, 16-bit grey or 8-bit RGB, limited by the free memory."""

    def __init__(self, path: Path, num_sharing: int = 1) -> None:
        """Decode an image. The free memory is divided among `num_sharing` processes that decode it."""
        limit = partial(memory_limit, num_sharing=num_sharing)
        self._pixels = decode_full_depth(path, limit, may_lose_bits=True)
        height, width, channels = self._pixels.shape
        self.levels = (Level(height, width, 1.0),)
        self.format = RegionFormat(channels, self._pixels.dtype)

    def read(self, level: int, box: Box) -> Pixels:
        """Return a region, [h, w, c]."""
        return self._pixels[box.slices]

    def close(self) -> None:
        """Do nothing, since the file is closed after decoding."""


SLIDE_SUFFIXES = (".svs", ".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".svslide")  # only SVS is tested


class SlideImage(RegionImage):
    """A slide that openslide recognises. Areas that were not scanned are white.

    openslide interpolates between the pixels of a level if its downsampling factor is not an integer, as usual in SVS
    files, and accepts truncated tiles. So a level is read as TIFF if the file is one and contains all tiles.
    """

    def __init__(self, path: Path) -> None:
        try:
            import openslide
        except ImportError:
            raise BadImage(f"{path.suffix} files need the package openslide: pip install 'paceline[slides]'") from None
        try:
            self._slide = openslide.OpenSlide(str(path))
            properties = self._slide.properties
            self.levels = tuple(
                Level(height, width, downsample)
                for (width, height), downsample in zip(
                    self._slide.level_dimensions, self._slide.level_downsamples, strict=True
                )
            )
            profile = self._slide.color_profile if hasattr(self._slide, "color_profile") else None
            self.format = RegionFormat(
                COLOURS,
                np.dtype(np.uint8),
                _number(properties.get("openslide.mpp-x")),
                _number(properties.get("openslide.objective-power")),
                profile.tobytes() if profile is not None else b"",
            )
        except Exception as error:
            raise BadImage(f"openslide cannot read this slide: {' '.join(str(error).split())}") from error
        self._tiff = _as_tiff(path, self.levels)

    def read(self, level: int, box: Box) -> Pixels:
        """Return a region of a level, [h, w, 3]."""
        downsample = self.levels[level].downsample
        if self._tiff and self._tiff.has_all_tiles(level):
            return self._tiff.read(level, box)
        corner = round(box.left * downsample), round(box.top * downsample)
        try:
            region = np.asarray(self._slide.read_region(corner, level, (box.width, box.height)))
        except Exception as error:
            raise BadImage(f"damaged: {' '.join(str(error).split())}") from error
        colours, alpha = region[..., :3], region[..., 3:].astype(np.uint16)
        if (alpha == 255).all():
            return np.ascontiguousarray(colours)
        blended: Pixels = ((colours * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
        return blended

    def close(self) -> None:
        """Close the file."""
        self._slide.close()
        if self._tiff:
            self._tiff.close()


def is_slide(path: Path) -> bool:
    """Return whether a file has the suffix of a whole slide."""
    return path.suffix.lower() in SLIDE_SUFFIXES


def _as_tiff(path: Path, levels: tuple[Level, ...]) -> TiffImage | None:
    """Return the slide as a TIFF; None if it cannot be read as one with the same levels."""
    try:
        tiff = TiffImage(path)
    except (BadImage, OSError):
        return None
    sizes = [(one.height, one.width) for one in levels]
    is_alike = tiff.format.channels == COLOURS and tiff.format.dtype == np.uint8
    if is_alike and sizes == [(one.height, one.width) for one in tiff.levels]:
        return tiff
    tiff.close()
    return None


def _number(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0


def can_be_read_by_region(path: Path) -> bool:
    """Return whether a file has the suffix of a TIFF or a whole slide."""
    return is_slide(path) or path.suffix.lower() in tiff.TIFF_SUFFIXES


def open_region_image(path: Path, channels: int = 0) -> RegionImage:
    """Open a TIFF or a whole slide; raise BadImage if it cannot be read by region.

    For networks with 1 or 3 `channels`, only the colours of an RGB image are read.
    """
    try:
        return SlideImage(path) if is_slide(path) else TiffImage(path, channels)
    except OSError as error:
        raise BadImage(error.strerror or str(error)) from error


def open_any_image(path: Path, num_sharing: int = 1, channels: int = 0) -> RegionImage:
    """Open an image of any format; one that cannot be read by region is decoded, if it fits in memory.

    The free memory is divided among `num_sharing` processes.
    """
    return open_region_image(path, channels) if can_be_read_by_region(path) else WholeImage(path, num_sharing)


def is_huge(path: Path) -> bool:
    """Return whether an image has more pixels than are processed at once; False if it cannot be read."""
    try:
        return huge_size(path) is not None
    except BadImage:
        return False


def huge_size(path: Path) -> tuple[int, int] | None:
    """Return the height and width of an image that is too large to be decoded as a sample; None if it is not.

    The free memory does not matter here, so that the same files are used on every machine. Raise BadImage if a huge
    TIFF or a whole slide cannot be read by region.
    """
    if can_be_read_by_region(path):
        try:
            with open_region_image(path) as image:
                height, width = image.levels[0].height, image.levels[0].width
        except BadImage:
            if is_small_tiff(path):  # it is not read by region, so the reason does not matter
                return None
            raise
    else:
        height, width = image_size(path, unlimited)
    return (height, width) if height * width > PIXEL_LIMIT else None
