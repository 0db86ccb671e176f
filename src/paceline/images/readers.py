"""Readers decode image files into arrays with one data type and one number of channels.

`EightBitReader` is used for grey and RGB images: Pillow decodes them, and files with more bits are reduced to 8 bits.
`DeepReader` is used for all other images: 16-bit or floating-point pixels, or any number of channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.contracts.data_spec import DataSpec
from paceline.contracts.pixel_format import EIGHT_BITS, PixelFormat
from paceline.images.decode import BadImage, TooLarge, arrange_image, decode, decode_unless_tiff, upright_size
from paceline.images.deep_image import GREY_AND_RGB, DeepImage, read_deep, to_format
from paceline.images.planes import COLOURS, NOT_COLOURS, read_planes_header
from paceline.images.regions.region_image import RegionFormat
from paceline.images.size_limit import SizeLimit, pixel_limit


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

    def from_region(self, pixels: NDArray[Any], found: RegionFormat) -> NDArray[Any]:
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

    def from_region(self, pixels: NDArray[Any], found: RegionFormat) -> NDArray[Any]:
        _check_region(found)
        if found.channels not in GREY_AND_RGB:
            raise BadImage(f"{found.channels} channels instead of {self.channels}")
        levels = to_format(pixels, self.pixel_format)
        if found.channels == self.channels:
            return levels
        return arrange_image(Image.fromarray(levels[..., 0] if found.channels == 1 else levels), 0, self.channels)


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
        return image.squared(side, self.pixel_format).pixels if side else image.pixels

    def from_region(self, pixels: NDArray[Any], found: RegionFormat) -> NDArray[Any]:
        _check_region(found)
        self._check(found.channels)
        return to_format(DeepImage(pixels).with_channels(self.channels).pixels, self.pixel_format)

    def _check(self, channels: int) -> None:
        if channels != self.channels and {channels, self.channels} != GREY_AND_RGB:
            own = f"{channels} channel{'s' * (channels > 1)}"
            reason = f"{own} instead of {self.channels}; all images must have the same number of channels"
            raise BadImage(reason, "different number of channels")


def _check_region(found: RegionFormat) -> None:
    if found.has_alpha:
        raise BadImage("has an alpha channel, which is not supported by region; save the image without it")


def make_reader(spec: DataSpec) -> ImageReader:
    """Return the reader whose images have a data spec's channels and pixel format."""
    return reader_of(spec.channels, spec.pixel_format)


def reader_of(channels: int, pixels: PixelFormat) -> ImageReader:
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
