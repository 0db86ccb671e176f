"""Readers decode image files into arrays with one data type and number of channels, as the settings say."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.config.flags import PixelSettings
from paceline.config.settings import RunSettings
from paceline.contracts.data_spec import EIGHT_BITS, PixelFormat
from paceline.core.errors import UserError
from paceline.core.text import printable
from paceline.images.decode import (
    BadImage,
    arrange_image,
    decode,
    decode_unless_tiff,
    stored_pixels,
    to_pillow,
    upright_size,
)
from paceline.images.deep import (
    COLOURS,
    GREY_AND_RGB,
    NOT_COLOURS,
    DeepImage,
    PlanesHeader,
    UnusablePlanes,
    read_deep,
    read_planes_header,
    to_format,
)
from paceline.images.regions import RegionFormat

Decoded = Image.Image | DeepImage


@dataclass(frozen=True)
class ImageReader:
    """Reads image files, given by their path or content, with any number of channels, in any pixel format."""

    channels: int
    pixel_format: PixelFormat

    def size(self, path: Path | bytes) -> tuple[int, int]:
        """Return the height and width of the decoded image, from the header; raise BadImage if it cannot be used."""
        header = read_planes_header(path)
        if header is None:
            return upright_size(path, full_depth=True)
        self._check(header.channels)
        if header.are_positions:
            raise BadImage(NOT_COLOURS)
        return header.height, header.width

    def decode(self, path: Path | bytes) -> Decoded:
        """Decode a file; raise BadImage if it cannot be used."""
        image = read_deep(path)
        self._check(image.channels)
        return DeepImage(to_format(image.with_channels(self.channels).pixels, self.pixel_format))

    def arrange(self, image: Any, side: int) -> NDArray[Any]:
        """Return the pixels [h, w, c] of a decoded image; unless `side` is 0, centre-crop a square and resize it."""
        pixels: NDArray[Any] = image.fitted(side, side, self.pixel_format).pixels
        return pixels

    def from_region(self, pixels: NDArray[Any], stored: RegionFormat) -> NDArray[Any]:
        """Return the pixels [h, w, c] of a region; raise BadImage if they cannot be used."""
        if stored.has_alpha:
            raise BadImage("has an alpha channel, which is not supported by region; save the image without it")
        self._check(stored.channels)
        return to_format(DeepImage(pixels).with_channels(self.channels).pixels, self.pixel_format)

    def _check(self, channels: int) -> None:
        if channels != self.channels and {channels, self.channels} != GREY_AND_RGB:
            counted = f"{channels} channel{'s' * (channels > 1)}"
            reason = f"{counted} instead of {self.channels}; all images must have the same number of channels"
            raise BadImage(reason, "different number of channels")


@dataclass(frozen=True)
class EightBitReader(ImageReader):
    """Reads grey or RGB images as uint8. A TIFF with three planes is read as RGB, other TIFFs by their first page."""

    channels: int = 3
    pixel_format: PixelFormat = EIGHT_BITS

    def size(self, path: Path | bytes) -> tuple[int, int]:
        return upright_size(path)

    def decode(self, path: Path | bytes) -> Image.Image:
        image = decode_unless_tiff(path) if self.channels == COLOURS else None
        if image is not None:
            return image
        if self.channels == COLOURS and _has_planes_for_colours(path):
            return Image.fromarray(to_format(read_deep(path).pixels, self.pixel_format))
        return decode(path)

    def arrange(self, image: Image.Image, side: int) -> NDArray[np.uint8]:
        return arrange_image(image, side, self.channels)

    def from_region(self, pixels: NDArray[Any], stored: RegionFormat) -> NDArray[Any]:
        if stored.channels == self.channels or stored.channels not in GREY_AND_RGB or stored.has_alpha:
            return super().from_region(pixels, stored)
        return arrange_image(to_pillow(to_format(pixels, self.pixel_format)), 0, self.channels)


def make_reader(channels: int, pixels: PixelFormat) -> ImageReader:
    """Return the reader for a number of channels and a pixel format: the same one in training and inference."""
    if pixels == EIGHT_BITS and channels in GREY_AND_RGB:
        return EightBitReader(channels)
    return ImageReader(channels, pixels)


def _has_planes_for_colours(path: Path | bytes) -> bool:
    """Return whether a file is a stack of three planes that may be colours."""
    try:
        header = read_planes_header(path)
    except BadImage:
        return False  # Pillow may be able to read the first page
    return header is not None and header.is_stack and header.channels == COLOURS and not header.are_positions


FILES_TRIED = 20  # number of files that are tried until one can be read
Limits = tuple[float, float] | None


class ReaderChoice(NamedTuple):
    """A reader for a source's files, and notes for commands to print."""

    reader: ImageReader
    notes: tuple[str, ...] = ()


def choose_reader(files: Iterable[Path | bytes], settings: RunSettings) -> ReaderChoice:
    """Return the reader for a source's files; the first readable file decides what the settings leave open."""
    kind, limits = read_pixel_settings(settings)
    may_skip = settings.bad_images == "skip" or settings.channels in GREY_AND_RGB
    file, header = _first_header(files, may_skip)
    if header is None:  # the reasons are reported when all headers are read
        return ReaderChoice(EightBitReader(settings.channels or COLOURS))
    name = "the first sample" if isinstance(file, bytes) else str(printable(file))
    dtype = _choose_type(name, header, kind, limits)
    first_page_channels = GREY_AND_RGB if header.are_positions else GREY_AND_RGB - {header.channels}
    reads_first_page = header.is_stack and settings.channels in first_page_channels
    if dtype == "uint8" and (reads_first_page or (not header.is_stack and settings.channels in GREY_AND_RGB | {0})):
        is_reduced = kind == "auto" and header.dtype == np.uint16
        note = f"{name}: 16-bit images are read as 8-bit; use --set pixels=uint16 to keep 16 bits of grey and RGB TIFF"
        return ReaderChoice(EightBitReader(settings.channels or COLOURS), (note,) if is_reduced else ())
    if header.are_positions:
        raise UserError(f"{name}: {NOT_COLOURS}")
    channels = settings.channels or header.channels
    if channels != header.channels and not {channels, header.channels} <= GREY_AND_RGB:
        counted = f"{header.channels} channel{'s' * (header.channels > 1)}"
        raise UserError(f"channels={channels}: {name} has {counted}; use --set channels=0")
    values = (math.nan, math.nan)
    if dtype == "float32" and not limits:
        try:
            pixels = read_deep(file).pixels
        except BadImage as error:
            raise UserError(f"{name}: unreadable image ({error}); save it again or replace it") from error
        values = (float(np.nanmin(pixels)), float(np.nanmax(pixels)))
    reader = make_reader(channels, make_format(dtype, limits, name, values))
    are_pages = header.has_pages and channels == header.channels
    note = f"{name}: its {header.channels} pages are read as channels"
    note += "; use --set channels=1 to read only the first page" * (dtype == "uint8")
    return ReaderChoice(reader, (note,) if are_pages else ())


def read_pixel_settings(settings: RunSettings) -> tuple[str, Limits]:
    """Return the settings `pixels` and `value_range`; sources without these settings have 8-bit images."""
    if not isinstance(settings, PixelSettings):
        return "uint8", None
    limits = parse_range(settings.value_range) if settings.value_range else None
    if limits and settings.pixels == "uint8":
        raise UserError(f"value_range={settings.value_range}: not supported with pixels=uint8; remove it")
    return settings.pixels, limits


def parse_range(text: str, name: str = "value_range=") -> tuple[float, float]:
    """Parse the setting `value_range`: two numbers, the smaller one first. Errors start with `name`."""
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(f"{name}{text}: must be two numbers, the lower one first, e.g. {name}0,1")
    return low, high


def make_format(dtype: str, limits: Limits, name: str, values: tuple[float, float]) -> PixelFormat:
    """Return a pixel format; raise UserError for float32 without a range, with the range of values in one image."""
    if limits and dtype == "uint8":
        raise UserError(f"value_range={limits[0]:g},{limits[1]:g}: {name} has 8-bit pixels; remove value_range")
    if limits or dtype != "float32":
        return PixelFormat.of(dtype, limits)
    if not (math.isfinite(values[0]) and math.isfinite(values[1])):
        raise UserError(f"{name}: contains values that are NaN or infinite; replace them")
    raise UserError(
        f"{name}: floating-point pixels need a declared range of values; this image has values from {values[0]:g} to "
        f"{values[1]:g}: set a range that contains all images, e.g. --set value_range={_suggested(*values)}"
    )


def _suggested(low: float, high: float) -> str:
    """Return a simple range that contains both values, with 0 or a negative number as the lower bound.

    The bound is a power of ten, or the largest value of 8, 12 or 16 bits if that is closer.
    """
    largest = max(abs(low), abs(high), 1e-6)
    bound = 10.0 ** math.ceil(math.log10(largest) - 1e-9)
    bound = max(bound, 1.0) if largest > 0.01 else bound
    bound = min([bound, *(limit for limit in (255, 4095, 65535) if largest <= limit < bound)])
    return f"{-bound:g},{bound:g}" if low < 0 else f"0,{bound:g}"


def _first_header(files: Iterable[Path | bytes], may_skip: bool) -> tuple[Path | bytes, PlanesHeader | None]:
    """Return the first file that can be read, with its header; of files other than TIFF, without a size."""
    for _, file in zip(range(FILES_TRIED), files, strict=False):
        try:
            header = read_planes_header(file, is_limited=False)
            if header is None:
                channels, dtype = stored_pixels(file)
                header = PlanesHeader(0, 0, channels, np.dtype(dtype), "YXS", is_stack=False)
            return file, header
        except UnusablePlanes as problem:
            if not may_skip:
                name = "the first sample" if isinstance(file, bytes) else str(printable(file))
                raise UserError(f"{name}: {problem}") from None
        except BadImage:
            continue
    return b"", None


def _choose_type(name: str, header: PlanesHeader, kind: str, limits: Limits) -> str:
    if kind != "auto":
        return kind
    if header.dtype.kind == "f":
        return "float32"
    if header.dtype.kind == "i":
        raise UserError(f"{name}: {header.dtype} pixels; use --set pixels=float32 and a value_range such as -1000,3000")
    return header.dtype.name if header.is_stack or limits else "uint8"
