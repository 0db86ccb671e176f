"""Readers decode image files into arrays with one data type and number of channels, as the settings say."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

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
    SizeLimit,
    TooLarge,
    arrange_image,
    decode,
    decode_unless_tiff,
    pixel_limit,
    stored_pixels,
    to_pillow,
    upright_size,
)
from paceline.images.deep import (
    COLOURS,
    GREY_AND_RGB,
    NOT_COLOURS,
    READ_FIRST_PAGE,
    DeepImage,
    UnusablePlanes,
    read_deep,
    read_planes_header,
    to_format,
)
from paceline.images.regions.region_image import RegionFormat


class Decoded(Protocol):
    """A decoded image of any kind, such as a Pillow image."""

    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...
    def crop(self, box: tuple[int, int, int, int], /) -> Decoded: ...


class ImageReader(Protocol):
    """Reads image files, given by their path or content."""

    @property
    def channels(self) -> int: ...
    @property
    def pixel_format(self) -> PixelFormat: ...

    def size(self, path: Path | bytes) -> tuple[int, int]:
        """Return the height and width of the decoded image, from the header; raise BadImage if it cannot be used."""

    def decode(self, path: Path | bytes) -> Decoded:
        """Decode a file; raise BadImage if it cannot be used."""

    def arrange(self, image: Any, side: int) -> NDArray[Any]:
        """Return the pixels [h, w, c] of a decoded image; unless `side` is 0, centre-crop a square and resize it."""

    def from_region(self, pixels: NDArray[Any], stored: RegionFormat) -> NDArray[Any]:
        """Return the pixels [h, w, c] of a region; raise BadImage if they cannot be used."""


@dataclass(frozen=True)
class EightBitReader:
    """Reads grey or RGB images as uint8. A TIFF with three planes is read as RGB, other TIFFs by their first page."""

    channels: int = 3
    pixel_format = EIGHT_BITS

    def size(self, path: Path | bytes) -> tuple[int, int]:
        return upright_size(path)

    def decode(self, path: Path | bytes) -> Image.Image:
        if self.channels != COLOURS:
            return decode(path)
        image = decode_unless_tiff(path)
        if image is not None:
            return image
        if _has_planes_for_colours(path):
            return Image.fromarray(to_format(read_deep(path).pixels, self.pixel_format))
        return decode(path)

    def arrange(self, image: Image.Image, side: int) -> NDArray[np.uint8]:
        return arrange_image(image, side, self.channels)

    def from_region(self, pixels: NDArray[Any], stored: RegionFormat) -> NDArray[Any]:
        _check_region(stored)
        if stored.channels not in GREY_AND_RGB:
            raise BadImage(f"{stored.channels} channels instead of {self.channels}")
        levels = to_format(pixels, self.pixel_format)
        if stored.channels == self.channels:
            return levels
        return arrange_image(to_pillow(levels), 0, self.channels)


@dataclass(frozen=True)
class DeepReader:
    """Reads images with any number of channels, in any pixel format."""

    channels: int
    pixel_format: PixelFormat

    def size(self, path: Path | bytes) -> tuple[int, int]:
        header = read_planes_header(path)
        if header is None:
            return upright_size(path, full_depth=True)
        self._check(header.channels)
        if header.are_positions:
            raise BadImage(NOT_COLOURS)
        return header.height, header.width

    def decode(self, path: Path | bytes) -> DeepImage:
        image = read_deep(path)
        self._check(image.channels)
        return DeepImage(to_format(image.with_channels(self.channels).pixels, self.pixel_format))

    def arrange(self, image: DeepImage, side: int) -> NDArray[Any]:
        return image.fitted(side, side, self.pixel_format).pixels

    def from_region(self, pixels: NDArray[Any], stored: RegionFormat) -> NDArray[Any]:
        _check_region(stored)
        self._check(stored.channels)
        return to_format(DeepImage(pixels).with_channels(self.channels).pixels, self.pixel_format)

    def _check(self, channels: int) -> None:
        if channels != self.channels and {channels, self.channels} != GREY_AND_RGB:
            counted = f"{channels} channel{'s' * (channels > 1)}"
            reason = f"{counted} instead of {self.channels}; all images must have the same number of channels"
            raise BadImage(reason, "different number of channels")


def _check_region(stored: RegionFormat) -> None:
    if stored.has_alpha:
        raise BadImage("has an alpha channel, which is not supported by region; save the image without it")


def make_reader(channels: int, pixels: PixelFormat) -> ImageReader:
    """Return the reader for a number of channels and a pixel format: the same one in training and inference."""
    if pixels == EIGHT_BITS and channels in GREY_AND_RGB:
        return EightBitReader(channels)
    return DeepReader(channels, pixels)


def _has_planes_for_colours(path: Path | bytes) -> bool:
    """Return whether a file is a stack of three planes that may be colours."""
    try:
        header = read_planes_header(path)
    except BadImage:
        return False  # Pillow may be able to read the first page
    return header is not None and header.is_stack and header.channels == COLOURS and not header.are_positions


def image_size(path: Path | bytes, limit: SizeLimit = pixel_limit) -> tuple[int, int]:
    """Return the height and width of an image with any number of channels, from its header."""
    try:
        return upright_size(path, limit=limit)
    except TooLarge:
        raise
    except BadImage:
        header = read_planes_header(path)
        if header is None:
            raise
        return header.height, header.width


FILES_TRIED = 20  # number of files that are tried until one can be read
LARGEST_INTEGERS = (255, 4095, 65535)  # of 8, 12 and 16 bits
RGB = 3
Limits = tuple[float, float] | None


class ReaderChoice(NamedTuple):
    """A reader for a source's files, and notes for commands to print."""

    reader: ImageReader
    notes: tuple[str, ...] = ()


class _Content(NamedTuple):
    """What a file contains."""

    file: Path | bytes
    channels: int
    dtype: str
    is_stack: bool = False
    has_pages: bool = False
    are_positions: bool = False
    is_always_reduced: bool = False  # whether it has 16 bits of which only 8 can be read

    @property
    def name(self) -> str:
        """What messages call the file."""
        return _name(self.file)


def choose_reader(files: Iterable[Path | bytes], settings: RunSettings) -> ReaderChoice:
    """Return the reader for a source's files; the first readable file decides what the settings leave open."""
    kind, limits = read_pixel_settings(settings)
    may_skip = settings.bad_images == "skip" or settings.channels in GREY_AND_RGB
    content = _first_content(files, may_skip)
    if content is None:  # the reasons are reported when all headers are read
        return ReaderChoice(EightBitReader(settings.channels or RGB))
    dtype = _choose_type(content, kind, limits)
    first_page_channels = GREY_AND_RGB if content.are_positions else GREY_AND_RGB - {content.channels}
    reads_first_page = content.is_stack and settings.channels in first_page_channels
    if dtype == "uint8" and (reads_first_page or (not content.is_stack and settings.channels in GREY_AND_RGB | {0})):
        return ReaderChoice(EightBitReader(settings.channels or RGB), _notes_on_lost_bits(content, kind))
    if content.are_positions:
        raise UserError(f"{content.name}: {NOT_COLOURS}")
    channels = settings.channels or content.channels
    if channels != content.channels and not {channels, content.channels} <= GREY_AND_RGB:
        counted = f"{content.channels} channel{'s' * (content.channels > 1)}"
        raise UserError(f"channels={channels}: {content.name} has {counted}; use --set channels=0")
    reader = make_reader(channels, _choose_format(content, dtype, limits))
    return ReaderChoice(reader, _notes_on_pages(content, dtype) if channels == content.channels else ())


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


def make_format(dtype: str, limits: Limits, name: str, found: tuple[float, float]) -> PixelFormat:
    """Return a pixel format; raise UserError for float32 without a range, suggesting the range that was found."""
    if limits and dtype == "uint8":
        raise UserError(f"value_range={limits[0]:g},{limits[1]:g}: {name} has 8-bit pixels; remove value_range")
    if limits or dtype != "float32":
        return PixelFormat.of(dtype, limits)
    if not (math.isfinite(found[0]) and math.isfinite(found[1])):
        raise UserError(f"{name}: contains values that are NaN or infinite; replace them")
    raise UserError(
        f"{name}: floating-point pixels need a declared range of values; this image has values from {found[0]:g} to "
        f"{found[1]:g}: set a range that contains all images, e.g. --set value_range={_suggested(*found)}"
    )


def _suggested(low: float, high: float) -> str:
    """Return a simple range that contains both values, with 0 or a negative number as the lower bound.

    The bound is a power of ten, or the largest value of 8, 12 or 16 bits if that is closer.
    """
    largest = max(abs(low), abs(high), 1e-6)
    bound = 10.0 ** math.ceil(math.log10(largest) - 1e-9)
    bound = max(bound, 1.0) if largest > 0.01 else bound
    bound = min([bound, *(limit for limit in LARGEST_INTEGERS if largest <= limit < bound)])
    return f"{-bound:g},{bound:g}" if low < 0 else f"0,{bound:g}"


def _first_content(files: Iterable[Path | bytes], may_skip: bool) -> _Content | None:
    for _, file in zip(range(FILES_TRIED), files, strict=False):
        try:
            return _read_content(file)
        except UnusablePlanes as problem:
            if not may_skip:
                raise UserError(f"{_name(file)}: {problem}") from None
        except BadImage:
            continue
    return None


def _read_content(file: Path | bytes) -> _Content:
    header = read_planes_header(file, is_limited=False)
    if header is not None:
        return _Content(
            file, header.channels, header.dtype.name, header.is_stack, header.has_pages, header.are_positions
        )
    channels, dtype = stored_pixels(file)
    return _Content(file, channels, dtype, is_always_reduced=channels == RGB and dtype == "uint16")


def _choose_type(content: _Content, kind: str, limits: Limits) -> str:
    if kind != "auto":
        return kind
    if content.dtype.startswith("float"):
        return "float32"
    if content.dtype in ("int8", "int16"):
        raise UserError(
            f"{content.name}: {content.dtype} pixels; use --set pixels=float32 and a value_range such as -1000,3000"
        )
    return content.dtype if content.is_stack or limits else "uint8"


def _choose_format(content: _Content, dtype: str, limits: Limits) -> PixelFormat:
    found = (math.nan, math.nan)
    if dtype == "float32" and not limits:
        try:
            pixels = read_deep(content.file).pixels
            found = (float(np.nanmin(pixels)), float(np.nanmax(pixels)))
        except BadImage as error:
            raise UserError(f"{content.name}: unreadable image ({error}); save it again or replace it") from error
    return make_format(dtype, limits, content.name, found)


def _notes_on_lost_bits(content: _Content, kind: str) -> tuple[str, ...]:
    if kind != "auto" or content.dtype != "uint16":
        return ()
    advice = "save them as grey or RGB TIFF and use" if content.is_always_reduced else "use"
    return (f"{content.name}: 16-bit images are read as 8-bit; {advice} --set pixels=uint16 to keep 16 bits",)


def _notes_on_pages(content: _Content, dtype: str) -> tuple[str, ...]:
    if not content.has_pages:
        return ()
    advice = "use --set channels=1 to read only the first page" if content.channels == RGB else READ_FIRST_PAGE
    note = f"{content.name}: its {content.channels} pages are read as channels"
    return (f"{note}; {advice}" if dtype == "uint8" else note,)


def _name(file: Path | bytes) -> str:
    return "the first sample" if isinstance(file, bytes) else str(printable(file))
