"""Reads images of any mode, and writes results with the same transparency, colour profile and EXIF metadata.

Grey images stay grey. Transparency and colour profiles are kept, and so is EXIF, except in 16-bit colour files. 16-bit
images stay 16-bit if Pillow (grey) or tifffile (colour) supports them. Other images with more than 8 bits (PNG, PPM and
JPEG 2000 in colour or with transparency) are read as 8-bit, with a note. The planes of a TIFF become channels if the
networks have the same number of channels; results are then also written as planes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.contracts.pixel_format import EIGHT_BITS, WHITE, PixelFormat, PixelType
from paceline.images.decode import (
    BadImage,
    decode_full_depth,
    opened,
    turn_upright,
)
from paceline.images.deep_image import GREY_AND_RGB, to_format
from paceline.images.deep_tiff import (
    EXTRA_CHANNELS_IGNORED,
    has_deep_colours,
    has_extra_channels,
    read_deep_colours,
)
from paceline.images.exif import portable_exif
from paceline.images.integrity import check_checksums, load_undamaged
from paceline.images.lost_bits import PNG_GREY_AND_ALPHA, loses_bits, png_colour_type
from paceline.images.ome import Ome
from paceline.images.pillow_file import SIXTEEN_BIT_MODES, UNBOUNDED_MODES, to_array
from paceline.images.planes import NOT_COLOURS, has_other_pages, read_planes, read_planes_header
from paceline.images.size_limit import memory_limit
from paceline.images.tiff_integrity import TIFF_SUFFIXES

GREY_MODES = ("1", "L", "LA", "La")
# The colour profiles of these modes do not apply after conversion to RGB.
OTHER_COLOUR_MODES = ("CMYK", "YCbCr", "LAB", "HSV")


@dataclass(frozen=True)
class ImageData:
    """The upright image in a file, with its metadata."""

    pixels: NDArray[Any]  # shape [h, w, c]; uint8, uint16 or float32
    alpha: Image.Image | None = None
    profile: bytes = b""  # ICC profile, only for grey and RGB
    note: str = ""
    exif: bytes = b""  # EXIF metadata that also applies to results
    value_range: tuple[float, float] | None = None  # None for the full range of an integer type
    ome: Ome | None = None  # metadata of an OME-TIFF

    @property
    def deep(self) -> bool:
        """Whether the pixels have more than 8 bits."""
        return self.pixels.dtype != np.uint8

    @property
    def pixel_format(self) -> PixelFormat:
        """The data type of the pixels and their range, which results share."""
        dtype = self.pixels.dtype.name
        return PixelFormat(cast(PixelType, dtype), *self.value_range) if self.value_range else PixelFormat.full(dtype)


def read_image(path: Path, channels: int = 3, pixels: PixelFormat = EIGHT_BITS) -> ImageData:
    """Read an image of any mode for networks that take `channels` channels and were trained on `pixels`.

    Raise BadImage if the file cannot be read or does not fit these networks. Grey and RGB images are read for networks
    with 1 or 3 channels; their results have the image's channels. 8-bit and 16-bit images are read in full depth for
    networks trained on either, unless the networks have a declared range of values, which images must not exceed.
    """
    if not pixels.is_full_range or _is_stack_of(channels, path):
        return _read_planes(path, channels, pixels)
    image = _read_grey_or_colour(path)
    check_channels(image.pixels.shape[-1], channels)
    return replace(image, ome=_ome_of_first_page(path))


def _ome_of_first_page(path: Path) -> Ome | None:
    """Return the metadata of an OME-TIFF that also applies to its first page alone; None for other files."""
    if path.suffix.lower() not in TIFF_SUFFIXES:
        return None
    try:
        header = read_planes_header(path)
    except BadImage:
        return None
    if header is None or not header.ome:
        return None
    found = Ome.parse(header.ome)
    return replace(found, channel_names=found.channel_names[:1], is_one_page=True)


def _is_stack_of(channels: int, path: Path) -> bool:
    """Return whether a file's planes are the networks' channels. If not, its first page may be a grey or RGB image."""
    if path.suffix.lower() not in TIFF_SUFFIXES:
        return False
    try:
        header = read_planes_header(path)
    except BadImage:
        if channels in GREY_AND_RGB:
            return False
        raise
    if header is None or not header.is_stack:
        return False
    return channels not in GREY_AND_RGB or (header.channels == channels and not header.are_positions)


def _read_planes(path: Path, channels: int, pixels: PixelFormat) -> ImageData:
    """Read an image whose planes are channels, or whose values have a declared range."""
    found = read_planes(path)
    if found is None and not pixels.is_integer:
        raise BadImage(f"the networks were trained on {pixels} pixels, which only TIFF files can contain")
    header, array = found or (None, decode_full_depth(path))
    check_channels(array.shape[-1], channels)
    if header and header.are_positions:
        raise BadImage(NOT_COLOURS)
    own = PixelFormat.full(array.dtype.name) if array.dtype.name in WHITE else pixels
    array = to_format(array, own if pixels.is_full_range and own.is_full_range else pixels)
    ome = Ome.parse(header.ome) if header and header.ome else None
    return ImageData(array, value_range=pixels.declared_range, ome=ome)


def check_channels(own: int, expected: int) -> None:
    """Raise BadImage if networks cannot process an image because of its number of channels."""
    if own != expected and not {own, expected} <= GREY_AND_RGB:
        counted = f"{own} channel{'s' * (own > 1)}"
        raise BadImage(f"it has {counted}, but the networks take {expected}; use images with {expected} channels")


def _read_grey_or_colour(path: Path) -> ImageData:
    with opened(path, memory_limit) as (image, file):
        profile = b"" if image.mode in OTHER_COLOUR_MODES else image.info.get("icc_profile") or b""
        has_pages = image.format == "TIFF" and getattr(image, "is_animated", False)
        notes = ["only the first page was read"] if has_pages and has_other_pages(path) else []
        grey = image.mode in GREY_MODES
        if has_deep_colours(image):
            check_checksums(image, file)
            deep = read_deep_colours(path, image)
            if deep is not None:
                return ImageData(deep.pixels, deep.alpha, profile, "; ".join(filter(None, (*notes, deep.note))))
            notes.append("16-bit colours were read as 8-bit: this kind of TIFF is not supported")
        elif has_extra_channels(image):
            notes.append(EXTRA_CHANNELS_IGNORED)
        else:
            # Pillow reads 16-bit grey with alpha as colour.
            grey = grey or (image.format == "PNG" and png_colour_type(file) == PNG_GREY_AND_ALPHA)
            lost = _note_on_lost_bits(image, file, is_grey=grey)
            notes += [lost] if lost else []
        load_undamaged(image, file)  # must come before reading EXIF, which loads a PNG and ignores all errors
        exif = portable_exif(image)
        image = turn_upright(image)
        if image.mode in SIXTEEN_BIT_MODES:
            pixels = to_array(image, lambda strip: strip).astype(np.uint16, copy=False)
            return ImageData(pixels, None, profile, "; ".join(notes), exif)
        if image.mode in UNBOUNDED_MODES:
            raise BadImage(
                f"signed or 32-bit pixels (mode {image.mode}) have no defined white level; "
                "save the image with 8 or 16 bits per channel"
            )
        alpha = None
        if image.has_transparency_data:
            image = image.convert("LA" if grey else "RGBA")
            alpha = image.getchannel("A")
        pixels = to_array(image, lambda strip: strip.convert("L" if grey else "RGB"))
        return ImageData(pixels, alpha, profile, "; ".join(notes), exif)


def _note_on_lost_bits(image: Image.Image, file: IO[bytes], *, is_grey: bool) -> str:
    """Return a note if Pillow reduces an image's bit depth, otherwise an empty string."""
    if not loses_bits(image, file):
        return ""
    if is_grey:
        return "16-bit grey and alpha channels were read as 8-bit"
    return "16-bit colours were read as 8-bit; use TIFF to keep 16 bits"
