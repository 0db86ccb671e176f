"""Decodes image files to upright 8-bit grey or RGB images, within a size limit, or says why that fails."""

from __future__ import annotations

import logging
import stat
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from io import BytesIO
from pathlib import Path
from threading import RLock
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.core.host import free_host_bytes
from paceline.images import tiff

FORMATS = (
    *("JPEG", "MPO", "PNG", "WEBP", "AVIF", "JPEG2000", "TIFF", "GIF", "BMP", "QOI", "PPM"),
    "TGA",  # TGA is last, since it has no signature
)
PREFIX_BYTES = 16  # passed to a format's signature check
SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
UNBOUNDED_MODES = ("I", "F")  # 32-bit pixels, in which no value is defined as white
NOT_AN_IMAGE = "not an image in a supported format"
UNSUPPORTED_TIFF = (
    "damaged, or its pixels or compression are not supported; save the image as grey or RGB, uint8 or uint16, "
    "uncompressed or with deflate, in a little-endian file"
)
STRIP_PX = 1 << 24  # number of pixels that are converted at a time


def open_of_any_size(file: IO[bytes]) -> Image.Image:
    """Open an image without decoding it. Unlike `Image.open`, accept any number of pixels: the caller checks them."""
    file.seek(0)
    prefix = file.read(PREFIX_BYTES)
    for name in _formats():
        factory, accept = Image.OPEN[name]
        try:
            accepted = accept is None or accept(prefix)
            if accepted and not isinstance(accepted, str):  # a string explains why Pillow cannot decode it
                file.seek(0)
                return factory(file, "")
        except (SyntaxError, IndexError, TypeError, struct.error):  # raised if the file has another format
            continue
    raise BadImage(UNSUPPORTED_TIFF if tiff.is_tiff(file) else NOT_AN_IMAGE)


@cache
def _formats() -> tuple[str, ...]:
    """Return the supported formats. Other Pillow formats may run programs (PostScript) or match arbitrary files."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def to_array(image: Image.Image, convert: Callable[[Image.Image], Image.Image] = lambda strip: strip) -> NDArray[Any]:
    """Return an image as an array [h, w, c]; `convert` is called for strips, since a converted copy may be large."""
    rows = max(1, STRIP_PX // image.width)
    whole: NDArray[Any] | None = None
    for top in range(0, image.height, rows):
        strip = np.asarray(convert(image.crop((0, top, image.width, min(image.height, top + rows)))))
        strip = strip if strip.ndim == 3 else strip[..., np.newaxis]
        if whole is None:
            whole = np.empty((image.height, *strip.shape[1:]), strip.dtype)
        whole[top : top + rows] = strip
    assert whole is not None, "an image has at least one row"
    return whole


def to_pillow(pixels: NDArray[Any]) -> Image.Image:
    """Return pixels [h, w, c] as a Pillow image."""
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


PNG_SIGNATURE_BYTES = 8
BMP_RUN_LENGTHS = (1, 2)  # compressions of BMP files that may leave out any number of pixels
MAX_BYTES_PER_PX = 16
# Deflate stores 258 bytes in 2 bits, a PNG 8 pixels in a byte, and a JPEG 64 pixels in a bit.
MOST_PIXELS_PER_BYTE = {"PNG": 8256, "JPEG": 512, "MPO": 512, "GIF": 4096, "BMP": 8, "TGA": 128, "QOI": 62, "PPM": 8}


def load_undamaged(image: Image.Image, file: IO[bytes]) -> None:
    """Decode an opened image; raise an exception if its file is truncated or a checksum does not match."""
    check_checksums(image, file)
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # other code may have enabled it, which would make missing pixels black
    image.load()


def check_length(image: Image.Image, file: IO[bytes]) -> None:
    """Raise an exception if a file is too short for the size in its header; the file position is preserved.

    Otherwise, memory for all pixels would be reserved before the decoder reaches the end of the file. Formats that can
    store any number of equal pixels in a few bytes (TIFF, WebP, AVIF, JPEG 2000, compressed BMP) are not checked.
    """
    most = MOST_PIXELS_PER_BYTE.get(image.format or "")
    if most is None or (image.format == "BMP" and image.info.get("compression") in BMP_RUN_LENGTHS):
        return
    with tiff.from_start(file):
        num_bytes = file.seek(0, 2)
    width, height = image.size
    if image.format == "GIF" and image.tile:  # type: ignore[attr-defined]  # it may store only a part of the image
        left, top, right, bottom = image.tile[0][1]  # type: ignore[attr-defined]
        width, height = right - left, bottom - top
    if width * height > num_bytes * most:
        size = f"{width} × {height} pixels"
        raise ValueError(f"image file is truncated: {num_bytes:,} bytes cannot contain {size}")


def check_checksums(image: Image.Image, file: IO[bytes]) -> None:
    """Raise an exception if a checksum in the file does not match; the file position is preserved."""
    with tiff.from_start(file):
        if image.format == "PNG":
            _check_png(file)
        elif image.format == "TIFF":
            limit = image.width * image.height * MAX_BYTES_PER_PX + tiff.BYTES_AT_ONCE
            tiff.check_segments(file, image.tag_v2, limit)  # type: ignore[attr-defined]


def _check_png(file: IO[bytes]) -> None:
    file.seek(PNG_SIGNATURE_BYTES)
    kind = b""
    while kind != b"IEND":
        header = file.read(8)
        if len(header) < 8:
            raise ValueError("image file is truncated")
        left, kind = struct.unpack(">I4s", header)
        checksum = zlib.crc32(kind)
        while left:
            content = file.read(min(left, tiff.BYTES_AT_ONCE))
            if not content:
                raise ValueError("image file is truncated")
            checksum, left = zlib.crc32(content, checksum), left - len(content)
        if file.read(4) != struct.pack(">I", checksum):
            raise ValueError(f"damaged: the checksum of chunk {kind.decode('ascii', 'replace')} does not match")


PNG_DEPTH_AT = 24  # position of the bit depth in a PNG header
START_OF_CODESTREAM = b"\xff\x4f\xff\x51"  # in JPEG 2000 files
BITS_AT = 38  # the position after it of the number of bits of the first channel


def loses_bits(image: Image.Image, file: IO[bytes]) -> bool:
    """Return whether Pillow reduces an opened image to 8 bits; the file position is preserved."""
    if image.mode in (*SIXTEEN_BIT_MODES, *UNBOUNDED_MODES):
        return False
    if image.format == "PNG":
        with tiff.from_start(file):
            return file.read(PNG_DEPTH_AT + 1)[PNG_DEPTH_AT:] == b"\x10"
    if image.format == "JPEG2000":
        with tiff.from_start(file):
            codestream = file.read().partition(START_OF_CODESTREAM)[2]
        return len(codestream) > BITS_AT and codestream[BITS_AT] & 127 >= 8  # the number of bits less one
    if image.format == "PPM":
        largest = image.tile[0][3][-1]  # type: ignore[attr-defined]  # of 8 bits: the name of a mode
        return isinstance(largest, int) and largest > 255
    return any(bits > 8 for bits in _tiff_tags(image).get(tiff.BITS_PER_SAMPLE, ()))


# Compressions of TIFF files that Pillow can decode.
PILLOW_COMPRESSIONS = (1, 2, 3, 4, 5, 6, 7, 8, 32773, 32946, 34925, 50000)


PIXEL_LIMIT = 89_000_000
# Bytes per pixel of a decoded Pillow image, and of the array that it is converted to. Other modes: as for RGB.
BYTES = {"1": (1, 1), "L": (1, 1), "P": (1, 3), **dict.fromkeys(SIXTEEN_BIT_MODES, (2, 2))}
RGB_BYTES = (4, 3)
PILLOW_IMAGES = 2  # the image as it is stored, and upright
TRANSPARENCY_BYTES = 5  # a copy with an alpha channel, and the alpha channel alone
DECODER_BYTES = {"WEBP": 8, "AVIF": 12, "JPEG2000": 16, "TIFF": 12}  # per pixel, while the file is decoded
PROGRESSIVE_BYTES = 6  # of a progressive JPEG, whose coefficients are all held in memory
USABLE_SHARE = 0.7  # of the free memory; the rest is for the results and for other processes
_DECODING_HUGE = RLock()  # held by one thread at a time; otherwise, two threads would count the same free memory

SizeLimit = Callable[[Image.Image], str]  # returns why an opened image is too large to be decoded; "" if it is not


def pixel_limit(image: Image.Image) -> str:
    """Limit the number of pixels."""
    if not _is_huge(image):
        return ""
    return f"{image.width} × {image.height} pixels, above the limit of {PIXEL_LIMIT // 10**6} megapixels"


def memory_limit(image: Image.Image, num_sharing: int = 1) -> str:
    """Limit the memory that decoding a huge image needs to a share of what is free, divided among processes."""
    if not _is_huge(image):
        return ""
    needed, free = decoding_bytes(image), free_host_bytes() // num_sharing
    if needed <= USABLE_SHARE * free:
        return ""
    kind = "this TIFF" if image.format == "TIFF" else image.format
    each = f" for each of {num_sharing} processes" if num_sharing > 1 else ""
    return (
        f"{image.width} × {image.height} pixels need {needed / 1e9:.1f} GB of memory, more than {USABLE_SHARE:.0%} of "
        f"the {free / 1e9:.1f} GB that is free{each}, and {kind} cannot be read by region; "
        "save the image as a tiled TIFF, whose size is not limited"
    )


def decoding_bytes(image: Image.Image) -> int:
    """Return the memory that an opened image needs while it is decoded and converted to an array."""
    stored, array = BYTES.get(image.mode, RGB_BYTES)
    decoder = DECODER_BYTES.get(image.format or "", 0)
    if image.info.get("progressive"):
        decoder = PROGRESSIVE_BYTES
    transparency = TRANSPARENCY_BYTES if image.has_transparency_data else 0
    return image.width * image.height * (PILLOW_IMAGES * stored + transparency + array + decoder)


def unlimited(image: Image.Image) -> str:
    """Accept images of any size, for callers that do not decode the pixels."""
    return ""


def _is_huge(image: Image.Image) -> bool:
    return image.width * image.height > PIXEL_LIMIT


# Hide Pillow's warnings about damaged metadata. Damaged pixels raise BadImage.
warnings.filterwarnings("ignore", module=r"PIL\.")
logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # hides messages about damaged metadata
ANIMATED_FORMATS = ("GIF", "PNG", "WEBP", "AVIF")  # in other formats, several images in a file are pages or previews
SIDEWAYS = (5, 6, 7, 8)  # values of ORIENTATION, in TIFF tags and EXIF, that swap height and width
TURNED = (2, 3, 4, *SIDEWAYS)  # values of ORIENTATION for images that are not upright
WHITE_16 = 65535  # the value of white in 16-bit images


class BadImage(Exception):
    """Raised for a file that cannot be read as an image; the message is the reason, and `kind` the reason in brief."""

    def __init__(self, reason: str, kind: str = "unreadable image") -> None:
        super().__init__(reason)
        self.kind = kind


class TooLarge(BadImage):
    """Raised for an image that is too large to be decoded as a whole."""


def check_grey_or_rgb(settings: RunSettings) -> None:
    """Raise UserError if a source with grey or RGB images cannot have the size or number of channels."""
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
        height, width = tags.get(tiff.HEIGHT, image.height), tags.get(tiff.WIDTH, image.width)
        # Call getexif() of the base class, because PNG's getexif() decodes the entire file. As a result, EXIF metadata
        # at the end of a PNG is ignored.
        turned = Image.Image.getexif(image).get(tiff.ORIENTATION) in SIDEWAYS
        return (width, height) if turned else (height, width)


def decode(path: Path | bytes, limit: SizeLimit = pixel_limit) -> Image.Image:
    """Decode the image in a file, given by its path or content, and convert it with `plain_image`."""
    with opened(path, limit) as (image, file):
        load_undamaged(image, file)
        return plain_image(image)


def decode_unless_tiff(path: Path | bytes) -> Image.Image | None:
    """Decode a file like `decode`, but return None if it is a TIFF; the file is opened only once."""
    with reporting(path), open_file(path) as file:
        if tiff.is_tiff(file):
            return None
        with _accepted(file, pixel_limit) as image:
            load_undamaged(image, file)
            return plain_image(image)


def decode_full_depth(
    path: Path | bytes, limit: SizeLimit = pixel_limit, *, may_lose_bits: bool = False
) -> NDArray[np.uint8 | np.uint16]:
    """Decode the grey or RGB image in a file to [h, w, 1 or 3]; grey images keep their 16 bits."""
    with opened(path, limit) as (image, file):
        if not may_lose_bits:
            _check_depth(image, file)
        load_undamaged(image, file)
        upright = turn_upright(image)
        if upright.mode in SIXTEEN_BIT_MODES:
            return to_array(upright).astype(np.uint16, copy=False)
        return to_array(upright, to_eight_bits)


def stored_pixels(path: Path | bytes) -> tuple[int, str]:
    """Return the number of channels and the data type of a grey or RGB image; 8-bit images count as RGB."""
    with opened(path) as (image, file):
        if image.mode in SIXTEEN_BIT_MODES or _is_deep_pgm(image):
            return 1, "uint16"
        return 3, "uint16" if loses_bits(image, file) else "uint8"


def _check_depth(image: Image.Image, file: IO[bytes]) -> None:
    if loses_bits(image, file):
        raise BadImage(
            f"a {image.format} with 16-bit colours or transparency can only be read as 8-bit; "
            f"save it as {'RGB' if image.format == 'TIFF' else 'TIFF'}, or use --set pixels=uint8"
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
    if tiff.SIGNED in tags.get(tiff.SAMPLE_FORMAT, ()) and image.mode not in UNBOUNDED_MODES:
        # Pillow reads signed values as unsigned ones, so that negative values become bright.
        raise BadImage("signed pixels have no defined white level; save the image as uint8 or uint16")
    bits = max(tags.get(tiff.BITS_PER_SAMPLE, (8,)))
    in_planes = tags.get(tiff.PLANES) == tiff.SEPARATE and len(image.getbands()) > 1
    if bits > 8 and in_planes and image.info.get("compression") == "raw":
        # Pillow would decode these pixels incorrectly.
        raise BadImage(
            f"{bits}-bit colours in separate planes are not supported; save the image with interleaved channels"
        )
    image.load()
    upright = ImageOps.exif_transpose(image) if image.getexif().get(tiff.ORIENTATION) in TURNED else image
    negative = tags.get(tiff.PHOTOMETRIC) == tiff.WHITE_IS_ZERO
    if upright.mode not in SIXTEEN_BIT_MODES or not (negative or 8 < bits < 16):
        return upright
    values = np.asarray(upright).astype(np.uint32) * WHITE_16 // (2**bits - 1)
    return Image.fromarray((WHITE_16 - values if negative else values).astype(np.uint16))


def _is_deep_pgm(image: Image.Image) -> bool:
    """Return whether an image is 16-bit grey that Pillow reads as 32-bit integers, in which 65535 is white."""
    return image.format == "PPM" and image.mode == "I"


@contextmanager
def opened(path: Path | bytes, limit: SizeLimit = pixel_limit) -> Iterator[tuple[Image.Image, IO[bytes]]]:
    """Yield an image that has not been decoded yet, and its file; raise BadImage for any error.

    The file is given by its path or by its content.

    This function alone decides which files are accepted, so that all commands agree.
    """
    with reporting(path), open_file(path) as file, _accepted(file, limit) as image:
        yield image, file


@contextmanager
def _accepted(file: IO[bytes], limit: SizeLimit) -> Iterator[Image.Image]:
    """Yield the image in an open file; raise BadImage if it is too large, shorter than its header says, or animated."""
    # Pass an open file: given a path, Pillow memory-maps some TIFFs and scrambles rotated ones.
    with open_of_any_size(file) as image, _DECODING_HUGE if _is_huge(image) else nullcontext():
        problem = limit(image)
        if problem:
            raise TooLarge(problem, "too large")
        check_length(image, file)
        if image.format in ANIMATED_FORMATS and getattr(image, "is_animated", False):
            raise BadImage("animated images are not supported", "animated image")
        _check_planes(image)
        yield image


@contextmanager
def reporting(path: Path | bytes) -> Iterator[None]:
    """Raise BadImage instead of any error."""
    try:
        yield
    except BadImage:
        raise
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


def _check_planes(image: Image.Image) -> None:
    tags = _tiff_tags(image)
    if tags.get(tiff.IMAGE_DEPTH, 1) != 1:
        raise BadImage(tiff.HAS_SLICES)
    in_planes = tags.get(tiff.PLANES) == tiff.SEPARATE and image.info.get("compression") == "raw"
    if in_planes and image.mode == "RGBA" and tiff.PREMULTIPLIED in tags.get(tiff.EXTRA_SAMPLES, ()):
        raise BadImage(
            "premultiplied transparency in separate planes is not supported; save the image with interleaved channels"
        )


def _tiff_tags(image: Image.Image) -> Mapping[int, Any]:
    return image.tag_v2 if image.format == "TIFF" else {}  # type: ignore[attr-defined]


def check_bounded(image: Image.Image) -> None:
    """Raise BadImage for an image whose pixels have no defined white level."""
    if image.mode in UNBOUNDED_MODES:
        raise BadImage(
            f"signed or 32-bit pixels (mode {image.mode}) have no defined white level; "
            "save the image with 8 or 16 bits per channel"
        )


def to_eight_bits(image: Image.Image) -> Image.Image:
    """Return a copy in 8-bit grey or RGB, with transparent pixels blended over white."""
    if image.mode in SIXTEEN_BIT_MODES:
        values = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((values * 255 + WHITE_16 // 2) // WHITE_16).astype(np.uint8))
    check_bounded(image)
    if image.has_transparency_data:
        colours = image.convert("RGBA")
        white = Image.new("RGBA", colours.size, "white")
        return Image.alpha_composite(white, colours).convert("RGB")
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def reason_of(error: Exception) -> str:
    """Return in one line why a decoder failed on a file."""
    if isinstance(error, UnidentifiedImageError):
        return NOT_AN_IMAGE
    if str(error).startswith("decoder error"):  # Pillow gives only a number, e.g. if libtiff lacks a compression
        return f"damaged, or its compression is not supported ({error}); save the image with another compression"
    if isinstance(error, ArithmeticError | LookupError | TypeError | AttributeError):  # the message is about the code
        return "damaged, or of a kind that is not supported; save the image again with another program"
    return " ".join(str(error).split()) or type(error).__name__
