"""Writes results as PNG, JPEG, WebP or TIFF, with the transparency, colour profile and EXIF metadata of their input."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.core.errors import UserError
from paceline.core.files import replacing
from paceline.images.decode import BadImage
from paceline.images.deep_image import GREY_AND_RGB
from paceline.images.deep_tiff import write_deep_colours, write_planes
from paceline.images.exif import without_tables
from paceline.images.ome import Ome
from paceline.images.png import FAST, write_png
from paceline.images.regions.open_image import can_be_read_by_region
from paceline.images.tiff_integrity import TIFF_SUFFIXES

SUFFIXES = {"png": ".png", "jpg": ".jpg", "webp": ".webp", "tiff": ".tif", "ome-tiff": ".ome.tif"}  # by format
OME_SUFFIXES = tuple(f".ome{suffix}" for suffix in TIFF_SUFFIXES)
LARGEST_SIDE_PX = {".jpg": 65_500, ".webp": 16_383}
LOSSY = ("jpg", "webp")

Pixels = NDArray[Any]  # uint8, uint16 or float32 [h, w, c]; except in TIFF files, integers and 1 or 3 channels


@dataclass(frozen=True)
class Encoding:
    """The file format of results, with its options."""

    format: str = ""  # a key of SUFFIXES; "" for the format of the input: TIFF for TIFF, otherwise PNG
    quality: int = 95  # of JPEG and WebP, from 1 to 100
    compression: int | None = None  # of PNG and TIFF, from 0 to 9; None for the format's default

    def suffix(self, source: Path) -> str:
        """Return the file suffix for the results of an image."""
        if self.format:
            return SUFFIXES[self.format]
        if source.name.lower().endswith(OME_SUFFIXES):
            return ".ome.tif"
        return ".tif" if can_be_read_by_region(source) else ".png"


def check_encoding(encoding: Encoding) -> None:
    """Raise UserError for options that do not exist or do not apply to the format."""
    if encoding.format and encoding.format not in SUFFIXES:
        raise UserError(f"--format {encoding.format}: expected {', '.join(SUFFIXES)}")
    if not 1 <= encoding.quality <= 100:
        raise UserError(f"--quality {encoding.quality}: expected a number from 1 to 100")
    if encoding.quality != Encoding.quality and encoding.format not in LOSSY:
        raise UserError(f"--quality {encoding.quality}: only for --format {' or '.join(LOSSY)}; leave it out")
    if encoding.compression is not None:
        if not 0 <= encoding.compression <= 9:
            raise UserError(f"--compression {encoding.compression}: expected a number from 0 to 9")
        if encoding.format in LOSSY:
            raise UserError(f"--compression: not for --format {encoding.format}; use --quality")


@dataclass(frozen=True)
class Attachments:
    """What a result has in common with the image that it was computed from."""

    alpha: Image.Image | None = None  # resized to the size of the result
    profile: bytes = b""
    exif: bytes = b""
    ome: Ome | None = None  # only for OME-TIFF


NO_ATTACHMENTS = Attachments()
DEFAULT_ENCODING = Encoding()


def write_image(
    path: Path, pixels: Pixels, encoding: Encoding = DEFAULT_ENCODING, attached: Attachments = NO_ATTACHMENTS
) -> None:
    """Write an image atomically, in the format given by the path's suffix; raise BadImage if it is too large for it."""
    if path.suffix != ".tif" and (pixels.dtype == np.float32 or pixels.shape[-1] not in GREY_AND_RGB):
        what = f"{pixels.dtype} results with {pixels.shape[-1]} channels"
        raise BadImage(f"{what} cannot be stored in a {path.suffix} file; use --format tiff")
    largest = LARGEST_SIDE_PX.get(path.suffix)
    if largest and max(pixels.shape[:2]) > largest:
        height, width = pixels.shape[:2]
        limit = f"a {path.suffix} file has at most {largest:,} per side"
        raise BadImage(f"the result has {width}×{height} pixels, but {limit}; use --format png")
    with replacing(path, durable=False) as temporary:
        try:
            WRITERS[path.suffix](temporary, pixels, encoding, attached)
        except (OSError, RuntimeError) as error:  # libtiff does not say that the disk is full
            if getattr(error, "errno", None) is None and shutil.disk_usage(path.parent).free < pixels.nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise


def lost_in(suffix: str, pixels: Pixels, attached: Attachments) -> str:
    """Return a note about what the format cannot store; empty if nothing is lost."""
    lost = []
    if suffix not in (".png", ".tif") and pixels.dtype != np.uint8:
        lost.append("16-bit values were written as 8-bit")
    if suffix == ".jpg" and attached.alpha is not None:
        lost.append("transparency was left out")
    return f"{' and '.join(lost)}: not supported by {suffix[1:]}" if lost else ""


def _write_png(path: Path, pixels: Pixels, encoding: Encoding, attached: Attachments) -> None:
    alpha: Pixels | None = None if attached.alpha is None else _sized_alpha(attached.alpha, pixels)
    if alpha is not None and pixels.dtype == np.uint16:
        alpha = alpha.astype(np.uint16) * 257
    level = FAST if encoding.compression is None else encoding.compression
    write_png(path, pixels, alpha, compression=level, profile=attached.profile, exif=attached.exif)


def _write_tiff(path: Path, pixels: Pixels, encoding: Encoding, attached: Attachments) -> None:
    is_plain = pixels.dtype != np.float32 and pixels.shape[-1] in GREY_AND_RGB
    if not is_plain or (attached.ome is not None and attached.alpha is None):
        write_planes(path, pixels, attached.ome, attached.profile, encoding.compression or 0)
        return
    if pixels.dtype == np.uint16 and pixels.shape[-1] == 3:
        write_deep_colours(path, pixels, attached.alpha, attached.profile, encoding.compression or 0)
        return
    image = _pillow_image(pixels, attached)
    compression = "tiff_lzw" if pixels.dtype == np.uint8 else None
    if encoding.compression is not None:
        compression = "tiff_adobe_deflate" if encoding.compression else None
    exif = without_tables(attached.exif) if attached.exif else b""
    image.save(path, "TIFF", compression=compression, **_metadata(attached.profile, exif))


def _write_jpeg(path: Path, pixels: Pixels, encoding: Encoding, attached: Attachments) -> None:
    image = _pillow_image(_eight_bits(pixels), NO_ATTACHMENTS)
    metadata = _metadata(attached.profile, attached.exif)
    image.save(path, "JPEG", quality=encoding.quality, subsampling=0, **metadata)  # 0: colours at full resolution


def _write_webp(path: Path, pixels: Pixels, encoding: Encoding, attached: Attachments) -> None:
    image = _pillow_image(_eight_bits(pixels), attached)
    image.save(path, "WEBP", quality=encoding.quality, **_metadata(attached.profile, attached.exif))


WRITERS: dict[str, Callable[[Path, Pixels, Encoding, Attachments], None]] = {
    ".png": _write_png,
    ".tif": _write_tiff,
    ".jpg": _write_jpeg,
    ".webp": _write_webp,
}


def _pillow_image(pixels: Pixels, attached: Attachments) -> Image.Image:
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    if attached.alpha is not None and pixels.dtype == np.uint8:
        image.putalpha(Image.fromarray(_sized_alpha(attached.alpha, pixels)))
    return image


def _sized_alpha(alpha: Image.Image, pixels: Pixels) -> NDArray[np.uint8]:
    size = (pixels.shape[1], pixels.shape[0])
    return np.asarray(alpha if alpha.size == size else alpha.resize(size, Image.Resampling.BICUBIC))


def _eight_bits(pixels: Pixels) -> NDArray[np.uint8]:
    if pixels.dtype == np.uint8:
        return pixels
    return ((pixels.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)


def _metadata(profile: bytes, exif: bytes) -> dict[str, bytes]:
    return {name: value for name, value in (("icc_profile", profile), ("exif", exif)) if value}
