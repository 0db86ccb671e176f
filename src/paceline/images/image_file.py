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

from paceline.core.files import replacing
from paceline.images.decode import SIXTEEN_BIT_MODES, UNBOUNDED_MODES, BadImage, opened, turn_upright
from paceline.images.deep_tiff import has_deep_colours, read_deep_colours, write_deep_colours
from paceline.images.exif import portable_exif, without_tables
from paceline.images.integrity import check_checksums, load_undamaged

TIFF_SUFFIXES = (".tif", ".tiff")
GREY_MODES = ("1", "L", "LA", "La")
# The colour profiles of these modes do not apply after conversion to RGB.
OTHER_COLOUR_MODES = ("CMYK", "YCbCr", "LAB", "HSV")
PNG_DEPTH_AT, PNG_GREY, PNG_GREY_AND_ALPHA = 24, 0, 4  # position of the bit depth in a PNG header, and colour types
PNG_COMPRESSION = 3  # from 0 to 9; higher levels are slow and save little space on photographs


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


class Canvas:
    """Assembles a result image from parts, and needs memory only for the image's pixels."""

    def __init__(self, height: int, width: int, *, deep: bool = False) -> None:
        self.height, self.width, self.deep = height, width, deep
        self._image: Image.Image | None = None  # 8-bit result
        self._array: NDArray[np.uint16] | None = None  # 16-bit result

    def paste(self, top: int, left: int, values: NDArray[np.floating]) -> None:
        """Write a part at a position; its values [h, w, 1 or 3] are in [-1, 1]."""
        height, width, channels = values.shape
        if self.deep:
            if self._array is None:
                self._array = np.zeros((self.height, self.width, channels), np.uint16)
            self._array[top : top + height, left : left + width] = _levels(values, 65535)
            return
        if self._image is None:
            self._image = Image.new("L" if channels == 1 else "RGB", (self.width, self.height))
        levels = _levels(values, 255).astype(np.uint8)
        self._image.paste(Image.fromarray(levels[..., 0] if channels == 1 else levels), (left, top))

    @property
    def image(self) -> Image.Image:
        """The result image, available only if it is 8-bit."""
        assert self._image is not None
        return self._image

    def save(self, path: Path, alpha: Image.Image | None = None, profile: bytes = b"", exif: bytes = b"") -> None:
        """Write the result image to a file. The alpha channel is resized to match."""
        if self._array is not None and self._array.shape[-1] == 3:
            with replacing(path, durable=False) as temporary:
                write_deep_colours(temporary, self._array, alpha, profile)
            return
        image = self.image if self._array is None else Image.fromarray(self._array[..., 0])
        if alpha is not None and self._array is None:
            image.putalpha(alpha if alpha.size == image.size else alpha.resize(image.size, Image.Resampling.BICUBIC))
        save_image(image, path, profile, exif)


def save_image(image: Image.Image, path: Path, profile: bytes = b"", exif: bytes = b"") -> None:
    """Write an image as lossless TIFF or PNG."""
    exif = without_tables(exif) if exif and path.suffix == ".tif" else exif
    options = {name: value for name, value in (("icc_profile", profile), ("exif", exif)) if value}
    with replacing(path, durable=False) as temporary:
        if path.suffix == ".tif":
            image.save(temporary, "TIFF", compression="tiff_lzw" if image.mode != "I;16" else None, **options)
        else:
            image.save(temporary, "PNG", compress_level=PNG_COMPRESSION, **options)


def _levels(values: NDArray[np.floating], top: int) -> NDArray[np.floating]:
    levels: NDArray[np.floating] = np.clip(np.rint((values + 1) * (top / 2)), 0, top)
    return levels
