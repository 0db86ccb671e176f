"""Decodes image files to upright 8-bit grey or RGB images, within a size limit."""

from __future__ import annotations

import logging
import stat
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from paceline.config.settings import RunSettings
from paceline.contracts.pixel_format import MAX_CHANNELS
from paceline.core.errors import UserError
from paceline.images.integrity import check_length, load_undamaged
from paceline.images.lost_bits import BITS_PER_SAMPLE, loses_bits
from paceline.images.pillow_file import SIXTEEN_BIT_MODES, UNBOUNDED_MODES, open_of_any_size
from paceline.images.size_limit import SizeLimit, decoded_alone, pixel_limit
from paceline.images.tiff_integrity import HAS_SLICES, IMAGE_DEPTH, is_tiff
from paceline.images.unknown_kind import unknown_kind

# Hide Pillow's warnings about damaged metadata. Damaged pixels raise BadImage.
warnings.filterwarnings("ignore", module=r"PIL\.")
logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # hides messages about damaged metadata
ANIMATED_FORMATS = ("GIF", "PNG", "WEBP", "AVIF")  # in other formats, several images in a file are pages or previews
ORIENTATION, SIDEWAYS = 0x0112, (5, 6, 7, 8)  # EXIF tag, and the values that swap height and width
TURNED = (2, 3, 4, *SIDEWAYS)  # values of ORIENTATION for images that are not upright
WIDTH, HEIGHT, PHOTOMETRIC, PLANES, EXTRA_SAMPLES, SAMPLE_FORMAT = 256, 257, 262, 284, 338, 339
WHITE_IS_ZERO, SEPARATE, PREMULTIPLIED, SIGNED = 0, 2, 1, 2  # values of these TIFF tags, except the first three
WHITE = 65535  # the value of white in 16-bit images


class BadImage(Exception):
    """Raised for a file that cannot be read as an image; the message is the reason, and `kind` the reason in brief."""

    def __init__(self, reason: str, kind: str = "unreadable image") -> None:
        super().__init__(reason)
        self.kind = kind


class TooLarge(BadImage):
    """Raised for an image that is too large to be decoded as a whole."""


def check_image_settings(settings: RunSettings) -> None:
    """Raise UserError for a size or number of channels that no source supports."""
    if not 0 <= settings.channels <= MAX_CHANNELS:
        raise UserError(
            f"channels={settings.channels}: must be 1 (grey), 3 (colour), another number up to {MAX_CHANNELS}, "
            "or 0 (the source's default)"
        )
    if settings.size < 0:
        raise UserError(f"size={settings.size}: must be a number of pixels, or 0 for the source's default")


def check_grey_or_rgb(settings: RunSettings) -> None:
    """Raise UserError if a source with grey or RGB images cannot have the size or number of channels."""
    check_image_settings(settings)
    if settings.channels not in (0, 1, 3):
        raise UserError(f"channels={settings.channels}: {settings.data} has grey or RGB images; use 1, 3 or 0")


def arrange_images(
    images: NDArray[np.uint8],
    settings: RunSettings,
    resample: Image.Resampling = Image.Resampling.BICUBIC,
    default_size: int = 0,
) -> NDArray[np.uint8]:
    """Convert uint8 images [n, h, w, 1 or 3] to the size and number of channels in the settings."""
    check_grey_or_rgb(settings)
    _, height, width, own_channels = images.shape
    channels, side = settings.channels or own_channels, settings.size or default_size
    if channels == own_channels and (side == 0 or side == height == width):
        return np.ascontiguousarray(images)
    squeezed = images[..., 0] if own_channels == 1 else images
    return np.stack([arrange_image(Image.fromarray(one), side, channels, resample) for one in squeezed])


def arrange_image(
    image: Image.Image, side: int, channels: int, resample: Image.Resampling = Image.Resampling.BICUBIC
) -> NDArray[np.uint8]:
    """Return an image as uint8 [h, w, channels]; unless `side` is 0, centre-crop a square and resize it."""
    image = image.convert("L" if channels == 1 else "RGB")  # "L" is the luma of ITU-R 601
    if side:
        short = min(image.size)
        left, top = (image.width - short) // 2, (image.height - short) // 2
        square = (left, top, left + short, top + short)
        image = image.crop(square) if short == side else image.resize((side, side), resample, square)
    array = np.array(image)
    return array[..., np.newaxis] if channels == 1 else array


def upright_size(path: Path | bytes, *, full_depth: bool = False, limit: SizeLimit = pixel_limit) -> tuple[int, int]:
    """Return the height and width that the decoded image will have, read from the file's header.

    With `full_depth`, raise BadImage for an image that `decode_full_depth` cannot read.
    """
    with opened(path, limit) as (image, file):
        if full_depth:
            _check_depth(image, file)
        tags = _tiff_tags(image)  # some versions of Pillow have already swapped the sides of a rotated TIFF
        height, width = tags.get(HEIGHT, image.height), tags.get(WIDTH, image.width)
        # Call getexif() of the base class, because PNG's getexif() decodes the entire file. As a result, EXIF metadata
        # at the end of a PNG is ignored.
        turned = Image.Image.getexif(image).get(ORIENTATION) in SIDEWAYS
        return (width, height) if turned else (height, width)


def decode(path: Path | bytes, limit: SizeLimit = pixel_limit) -> Image.Image:
    """Decode the image in a file, given by its path or content, and convert it with `plain_image`."""
    with opened(path, limit) as (image, file):
        load_undamaged(image, file)
        return plain_image(image)


def decode_unless_tiff(path: Path | bytes) -> Image.Image | None:
    """Decode a file like `decode`, but return None if it is a TIFF; the file is opened only once."""
    with _reported(path), open_file(path) as file:
        if is_tiff(file):
            return None
        with _accepted(file, pixel_limit) as image:
            load_undamaged(image, file)
            return plain_image(image)


def decode_full_depth(path: Path | bytes) -> NDArray[np.uint8 | np.uint16]:
    """Decode the grey or RGB image in a file to [h, w, 1 or 3]; grey images keep their 16 bits."""
    with opened(path) as (image, file):
        _check_depth(image, file)
        load_undamaged(image, file)
        upright = turn_upright(image)
        deep = upright.mode in SIXTEEN_BIT_MODES
        array = np.asarray(upright).astype(np.uint16) if deep else np.asarray(to_eight_bits(upright))
        return array[..., np.newaxis] if array.ndim == 2 else array


def stored_pixels(path: Path | bytes) -> tuple[int, str]:
    """Return the number of channels and the data type of a grey or RGB image; 8-bit images count as RGB."""
    with opened(path) as (image, file):
        if image.mode in SIXTEEN_BIT_MODES or _is_deep_pgm(image):
            return 1, "uint16"
        return 3, "uint16" if loses_bits(image, file) else "uint8"


def _check_depth(image: Image.Image, file: IO[bytes]) -> None:
    if loses_bits(image, file):
        kind = {"JPEG2000": "JPEG 2000"}.get(image.format or "", image.format)
        raise BadImage(
            f"a {kind} with 16-bit colours or transparency can only be read as 8-bit; "
            f"save it as {'RGB' if kind == 'TIFF' else 'TIFF'}, or use --set pixels=uint8"
        )


def plain_image(image: Image.Image) -> Image.Image:
    """Convert an image to upright 8-bit grey or RGB, with transparent pixels blended over white."""
    return to_eight_bits(turn_upright(image))


def turn_upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation; rescale 16-bit grey so that 0 is black and 65535 is white.

    The result may be the image itself.
    """
    if _is_deep_pgm(image):
        return Image.fromarray(np.asarray(image).astype(np.uint16))
    tags = _tiff_tags(image)
    if SIGNED in tags.get(SAMPLE_FORMAT, ()) and image.mode not in UNBOUNDED_MODES:
        # Pillow reads signed values as unsigned ones, so that negative values become bright.
        raise BadImage("signed pixels have no defined white level; save the image as uint8 or uint16")
    bits = max(tags.get(BITS_PER_SAMPLE, (8,)))
    in_planes = tags.get(PLANES) == SEPARATE and len(image.getbands()) > 1
    if bits > 8 and in_planes and image.info.get("compression") == "raw":
        # Pillow would decode these pixels incorrectly.
        raise BadImage(
            f"{bits}-bit colours in separate planes are not supported; save the image with interleaved channels"
        )
    image.load()
    upright = ImageOps.exif_transpose(image) if image.getexif().get(ORIENTATION) in TURNED else image
    negative = tags.get(PHOTOMETRIC) == WHITE_IS_ZERO
    if upright.mode not in SIXTEEN_BIT_MODES or not (negative or 8 < bits < 16):
        return upright
    values = np.asarray(upright).astype(np.uint32) * WHITE // (2**bits - 1)
    return Image.fromarray((WHITE - values if negative else values).astype(np.uint16))


def _is_deep_pgm(image: Image.Image) -> bool:
    """Return whether an image is 16-bit grey that Pillow reads as 32-bit integers, in which 65535 is white."""
    return image.format == "PPM" and image.mode == "I"


@contextmanager
def opened(path: Path | bytes, limit: SizeLimit = pixel_limit) -> Iterator[tuple[Image.Image, IO[bytes]]]:
    """Yield an image that has not been decoded yet, and its file; raise BadImage for any error.

    The file is given by its path or by its content.

    This function alone decides which files are accepted, so that all commands agree.
    """
    with _reported(path), open_file(path) as file, _accepted(file, limit) as image:
        yield image, file


@contextmanager
def _accepted(file: IO[bytes], limit: SizeLimit) -> Iterator[Image.Image]:
    """Yield the image in an open file; raise BadImage if it is too large, shorter than its header says, or animated."""
    # Pass an open file: given a path, Pillow memory-maps some TIFFs and scrambles rotated ones.
    with open_of_any_size(file) as image, decoded_alone(image):
        problem = limit(image)
        if problem:
            raise TooLarge(problem, "too large")
        check_length(image, file)
        _check_still(image)
        _check_planes(image)
        yield image


@contextmanager
def _reported(path: Path | bytes) -> Iterator[None]:
    """Raise BadImage instead of any error."""
    try:
        yield
    except BadImage:
        raise
    except UnidentifiedImageError as error:
        raise BadImage(unknown_kind(BytesIO(path) if isinstance(path, bytes) else path)) from error
    except Exception as error:  # decoders raise many kinds of errors on damaged files
        raise BadImage(reason_of(error)) from error


def open_file(path: Path | bytes) -> IO[bytes]:
    """Open a file, given by its path or content; raise BadImage if it is empty or not a regular file."""
    if isinstance(path, bytes):
        size = len(path)
    else:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a FIFO would wait for a writer
            raise BadImage("not a regular file")
        size = status.st_size
    if not size:
        raise BadImage("the file is empty", "empty file")
    return BytesIO(path) if isinstance(path, bytes) else path.open("rb")


def _check_still(image: Image.Image) -> None:
    if image.format in ANIMATED_FORMATS and getattr(image, "is_animated", False):
        raise BadImage("animated images are not supported", "animated image")


def _check_planes(image: Image.Image) -> None:
    tags = _tiff_tags(image)
    if tags.get(IMAGE_DEPTH, 1) != 1:
        raise BadImage(HAS_SLICES)
    in_planes = tags.get(PLANES) == SEPARATE and image.info.get("compression") == "raw"
    if in_planes and image.mode == "RGBA" and PREMULTIPLIED in tags.get(EXTRA_SAMPLES, ()):
        raise BadImage(
            "premultiplied transparency in separate planes is not supported; save the image with interleaved channels"
        )


def _tiff_tags(image: Image.Image) -> Mapping[int, Any]:
    return image.tag_v2 if image.format == "TIFF" else {}  # type: ignore[attr-defined]


def to_eight_bits(image: Image.Image) -> Image.Image:
    """Return a copy in 8-bit grey or RGB, with transparent pixels blended over white."""
    if image.mode in SIXTEEN_BIT_MODES:
        values = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((values * 255 + WHITE // 2) // WHITE).astype(np.uint8))
    if image.mode in UNBOUNDED_MODES:
        raise BadImage(
            f"signed or 32-bit pixels (mode {image.mode}) have no defined white level; "
            "save the image with 8 or 16 bits per channel"
        )
    if image.has_transparency_data:
        colours = image.convert("RGBA")
        white = Image.new("RGBA", colours.size, "white")
        return Image.alpha_composite(white, colours).convert("RGB")
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def reason_of(error: Exception) -> str:
    """Return in one line why a decoder failed on a file."""
    if isinstance(error, UnidentifiedImageError):
        return "not an image in a supported format"
    if str(error).startswith("decoder error"):  # Pillow gives only a number, e.g. if libtiff lacks a compression
        return f"damaged, or its compression is not supported ({error}); save the image with another compression"
    if isinstance(error, ArithmeticError | LookupError | TypeError | AttributeError):  # the message is about the code
        return "damaged, or of a kind that is not supported; save the image again with another program"
    return " ".join(str(error).split()) or type(error).__name__
