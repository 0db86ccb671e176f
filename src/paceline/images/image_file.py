"""Reads images of any mode, and writes results with the same transparency, colour profile and EXIF metadata.

Grey images stay grey. Transparency and colour profiles are kept, and so is EXIF, except in 16-bit colour files. 16-bit
images stay 16-bit if Pillow (grey) or tifffile (colour) supports them. Other images with more than 8 bits (PNG in
colour or with transparency) are read as 8-bit, with a note.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.images.decode import SIXTEEN_BIT_MODES, UNBOUNDED_MODES, BadImage, opened, turn_upright
from paceline.images.deep_tiff import has_deep_colours, read_deep_colours
from paceline.images.exif import portable_exif
from paceline.images.integrity import check_checksums, load_undamaged

TIFF_SUFFIXES = (".tif", ".tiff")
GREY_MODES = ("1", "L", "LA", "La")
# The colour profiles of these modes do not apply after conversion to RGB.
OTHER_COLOUR_MODES = ("CMYK", "YCbCr", "LAB", "HSV")
PNG_DEPTH_AT, PNG_GREY, PNG_GREY_AND_ALPHA = 24, 0, 4  # position of the bit depth in a PNG header, and colour types


@dataclass(frozen=True)
class ImageData:
    """The upright image in a file, with its metadata."""

    pixels: NDArray[np.uint8 | np.uint16]  # shape [h, w, 1 or 3]
    alpha: Image.Image | None = None
    profile: bytes = b""  # ICC profile, only for grey and RGB
    suffix: str = ".png"  # file suffix for results
    note: str = ""
    exif: bytes = b""  # EXIF metadata that also applies to results

    @property
    def deep(self) -> bool:
        """Whether the pixels are 16-bit."""
        return self.pixels.dtype == np.uint16


def read_image(path: Path) -> ImageData:
    """Read an image of any mode; raise BadImage if the file cannot be read."""
    suffix = result_suffix(path)
    with opened(path) as (image, file):
        profile = b"" if image.mode in OTHER_COLOUR_MODES else image.info.get("icc_profile") or b""
        more_pages = image.format == "TIFF" and getattr(image, "is_animated", False)
        notes = ["only the first page was read"] if more_pages else []
        grey = image.mode in GREY_MODES
        if has_deep_colours(image):
            check_checksums(image, file)
            deep = read_deep_colours(path, image)
            if deep is not None:
                return ImageData(deep.pixels, deep.alpha, profile, suffix, "; ".join(filter(None, (*notes, deep.note))))
            notes.append("16-bit colours were read as 8-bit: this kind of TIFF is not supported")
        elif image.format == "PNG":
            kind, lost = _png_pixels(path)
            grey = grey or kind == PNG_GREY_AND_ALPHA  # Pillow reads 16-bit grey with alpha as colour
            notes += [lost] if lost else []
        load_undamaged(image, file)  # must come before reading EXIF, which loads a PNG and ignores all errors
        exif = portable_exif(image)
        image = turn_upright(image)
        if image.mode in SIXTEEN_BIT_MODES:
            pixels = np.asarray(image).astype(np.uint16)[..., np.newaxis]
            return ImageData(pixels, None, profile, suffix, "; ".join(notes), exif)
        if image.mode in UNBOUNDED_MODES:
            raise BadImage(
                f"32-bit pixels (mode {image.mode}) have no defined white level; "
                "save the image with 8 or 16 bits per channel"
            )
        alpha = None
        if image.has_transparency_data:
            image = image.convert("LA" if grey else "RGBA")
            alpha = image.getchannel("A")
        pixels = np.asarray(image.convert("L" if grey else "RGB"))
        return ImageData(pixels[..., np.newaxis] if grey else pixels, alpha, profile, suffix, "; ".join(notes), exif)


def result_suffix(path: Path) -> str:
    """Return the file suffix for results: .tif for TIFF images, otherwise .png, which is lossless."""
    return ".tif" if path.suffix.lower() in TIFF_SUFFIXES else ".png"


def _png_pixels(path: Path) -> tuple[int, str]:
    """Return a PNG's colour type, and a note if Pillow reduces its bit depth."""
    with path.open("rb") as file:
        depth, kind = file.read(PNG_DEPTH_AT + 2)[PNG_DEPTH_AT:]
    if depth < 16 or kind == PNG_GREY:
        return kind, ""
    if kind == PNG_GREY_AND_ALPHA:
        return kind, "16-bit grey and alpha channels were read as 8-bit"
    return kind, "16-bit colours were read as 8-bit; use TIFF to keep 16 bits"
