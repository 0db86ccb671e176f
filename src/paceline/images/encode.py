"""Writes results as PNG, JPEG, WebP or TIFF, with the transparency, colours and metadata of their inputs."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from paceline.contracts.data_spec import EIGHT_BITS, WHITE, PixelFormat
from paceline.core.errors import UserError
from paceline.core.files import replacing
from paceline.core.ordered_map import num_cores, ordered_map
from paceline.images.decode import (
    SIXTEEN_BIT_MODES,
    BadImage,
    check_bounded,
    check_checksums,
    decode_full_depth,
    load_undamaged,
    loses_bits,
    memory_limit,
    open_of_any_size,
    opened,
    to_array,
    to_pillow,
    turn_upright,
)
from paceline.images.deep import (
    EXTRA_CHANNELS_IGNORED,
    GREY_AND_RGB,
    NOT_COLOURS,
    Ome,
    PlanesHeader,
    has_deep_colours,
    has_extra_channels,
    is_ome,
    read_deep_colours,
    read_planes,
    read_planes_header,
    to_format,
    write_planes,
)
from paceline.images.regions import can_be_read_by_region
from paceline.images.tiff import SUBFILE_TYPE, TIFF_SUFFIXES

SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLOUR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}  # by number of channels: grey, grey and alpha, RGB, RGBA
BYTES_PER_BLOCK = 1 << 20
NO_FILTER, AVERAGE = 0, 3  # filter types
ADLER_BASE = 65521
ZLIB_HEADER = b"\x78\x01"
FAST = 1  # compression level
BICUBIC = Image.Resampling.BICUBIC
UNIFORM = 0.6  # share of zeros in filtered rows from which runs of equal bytes are worth encoding

Pixels = NDArray[Any]  # uint8 or uint16


class _Block(NamedTuple):
    deflated: bytes
    checksum: int  # Adler-32 of the filtered rows
    num_bytes: int  # size of the filtered rows


def write_png(
    path: Path,
    pixels: Pixels,
    alpha: Pixels | None = None,
    *,
    compression: int = FAST,
    profile: bytes = b"",
    exif: bytes = b"",
) -> None:
    """Write a uint8 or uint16 [h, w, 1 to 4] image; alpha, if given, is a further channel [h, w].

    Compression is 0 (none), 1 (fast) or up to 9 (smallest file, slow).
    """
    height, width, channels = pixels.shape
    channels += alpha is not None
    depth = pixels.dtype.itemsize * 8
    with path.open("wb") as file:
        file.write(SIGNATURE)
        _write_chunk(file, b"IHDR", struct.pack(">IIBBBBB", width, height, depth, COLOUR_TYPES[channels], 0, 0, 0))
        if profile:
            _write_chunk(file, b"iCCP", b"ICC Profile\0\0" + zlib.compress(profile))
        if exif:
            _write_chunk(file, b"eXIf", exif.removeprefix(b"Exif\0\0"))
        rows_at_once = max(1, BYTES_PER_BLOCK // (width * channels * depth // 8))
        starts = range(0, height, rows_at_once)

        def deflate(start: int) -> _Block:
            rows = _rows(pixels, alpha, max(0, start - 1), min(height, start + rows_at_once))
            return _deflate(rows, channels * depth // 8, start, compression, last=start == starts[-1])

        checksum, content = 1, ZLIB_HEADER
        for block in ordered_map(deflate, starts, min(num_cores(), len(starts))):
            checksum = _joined_checksum(checksum, block.checksum, block.num_bytes)
            _write_chunk(file, b"IDAT", content + block.deflated)
            content = b""
        _write_chunk(file, b"IDAT", struct.pack(">I", checksum))
        _write_chunk(file, b"IEND", b"")


def _rows(pixels: Pixels, alpha: Pixels | None, start: int, stop: int) -> NDArray[np.uint8]:
    """Return rows as bytes in PNG's byte order, [rows, bytes per row]."""
    part = pixels[start:stop]
    if alpha is not None:
        part = np.concatenate([part, alpha[start:stop, :, np.newaxis].astype(part.dtype)], axis=-1)
    part = part.astype(part.dtype.newbyteorder(">"), copy=False)
    return np.ascontiguousarray(part).reshape(stop - start, -1).view(np.uint8)


def _deflate(rows: NDArray[np.uint8], step: int, start: int, compression: int, *, last: bool) -> _Block:
    """Filter and compress rows; unless `start` is 0, the first row is the row above them."""
    if start == 0:
        rows = np.concatenate([np.zeros_like(rows[:1]), rows])
    filtered = _filtered(rows, step, AVERAGE if compression else NO_FILTER)
    compressor = zlib.compressobj(compression, zlib.DEFLATED, -zlib.MAX_WBITS, 9, _strategy(filtered, compression))
    deflated = compressor.compress(filtered.data) + compressor.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)
    return _Block(deflated, zlib.adler32(filtered.data), filtered.nbytes)


def _strategy(filtered: NDArray[np.uint8], compression: int) -> int:
    """Return how to look for repeated bytes: in filtered photographs, a search takes time and finds little."""
    if compression != FAST:
        return zlib.Z_FILTERED
    num_zeros = filtered.size - np.count_nonzero(filtered)
    return zlib.Z_RLE if num_zeros > UNIFORM * filtered.size else zlib.Z_HUFFMAN_ONLY


def _filtered(rows: NDArray[np.uint8], step: int, kind: int) -> NDArray[np.uint8]:
    """Return all rows but the first, each preceded by its filter type; `step` is the size of a pixel in bytes."""
    above, own = rows[:-1], rows[1:]
    filtered = np.empty((len(own), own.shape[1] + 1), np.uint8)
    filtered[:, 0] = kind
    if kind == NO_FILTER:
        filtered[:, 1:] = own
        return filtered
    left = np.zeros_like(own)
    left[:, step:] = own[:, :-step]
    expected = (left & above) + ((left ^ above) >> 1)  # half of the sum, without an overflow of 8 bits
    np.subtract(own, expected, out=filtered[:, 1:])
    return filtered


def _write_chunk(file: IO[bytes], kind: bytes, content: bytes) -> None:
    file.write(struct.pack(">I", len(content)) + kind)
    file.write(content)
    file.write(struct.pack(">I", zlib.crc32(content, zlib.crc32(kind))))


def _joined_checksum(first: int, second: int, second_bytes: int) -> int:
    """Return the Adler-32 checksum of two joined sequences, given the checksum of each."""
    low = (first & 0xFFFF) + (second & 0xFFFF) - 1
    high = (first >> 16) + (second >> 16) + second_bytes * ((first & 0xFFFF) - 1)
    return (high % ADLER_BASE) << 16 | low % ADLER_BASE


TEXTS = (
    ExifTags.Base.ImageDescription,
    ExifTags.Base.Make,
    ExifTags.Base.Model,
    ExifTags.Base.Software,
    ExifTags.Base.DateTime,
    ExifTags.Base.Artist,
    ExifTags.Base.Copyright,
)
TABLES = (ExifTags.IFD.Exif, ExifTags.IFD.GPSInfo)
# Tags that do not apply to a new file: the original size, and data with offsets into the original file.
STALE_TAGS = {
    ExifTags.Base.ExifImageWidth,
    ExifTags.Base.ExifImageHeight,
    ExifTags.Base.ExifInteroperabilityOffset,
    ExifTags.Base.MakerNote,
}

PAGE_DESCRIPTIONS = ("ImageJ=", '{"shape":')  # as written by ImageJ and tifffile


def portable_exif(image: Image.Image) -> bytes:
    """Return the EXIF metadata that also applies to results: date, place, camera, author and description."""
    try:
        found, kept = image.getexif(), Image.Exif()
        for tag in TEXTS:
            text = found.get(tag)
            # Texts that describe the number and size of a file's pages, which are different in a result, are left out.
            if isinstance(text, str) and not is_ome(text) and not text.startswith(PAGE_DESCRIPTIONS):
                # Pillow decodes any text as Latin-1, but would encode it as ASCII.
                kept[tag] = text.encode("latin-1", "replace")
        for table in TABLES:
            inner = {tag: value for tag, value in found.get_ifd(table).items() if tag not in STALE_TAGS}
            if inner:
                kept[table] = inner
        return kept.tobytes() if len(kept) else b""
    except Exception:  # an image with damaged EXIF is still usable
        return b""


def _tiff_texts(exif: bytes) -> dict[str, Any]:
    """Return the texts in EXIF metadata as arguments of tifffile, which writes no Exif and GPS IFDs."""
    found = Image.Exif()
    if exif:
        found.load(exif)
    texts = {int(tag): str(found[tag]).encode("latin-1", "replace") for tag in TEXTS if tag in found}
    description, software = (texts.pop(int(tag), None) for tag in (TEXTS[0], ExifTags.Base.Software))
    extratags = [(tag, "s", 0, text, True) for tag, text in texts.items()]
    return {"description": description, "software": software or False, "extratags": extratags}


SUFFIXES = {"png": ".png", "jpg": ".jpg", "webp": ".webp", "tiff": ".tif", "ome-tiff": ".ome.tif"}  # by format
OME_SUFFIXES = tuple(f".ome{suffix}" for suffix in TIFF_SUFFIXES)
LARGEST_SIDE_PX = {".jpg": 65_500, ".webp": 16_383}
LOSSY = ("jpg", "webp")


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
    if encoding.quality != Encoding.quality and encoding.format not in LOSSY:
        raise UserError(f"--quality {encoding.quality}: only for --format {' or '.join(LOSSY)}; leave it out")
    if encoding.compression is not None and encoding.format in LOSSY:
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
            _write(temporary, path.suffix, pixels, encoding, attached)
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


def _write(path: Path, suffix: str, pixels: Pixels, encoding: Encoding, attached: Attachments) -> None:
    alpha, level = None, encoding.compression or 0
    if suffix not in (".png", ".tif") and pixels.dtype != np.uint8:
        pixels = ((pixels.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
    if attached.alpha is not None:  # with the size and the data type of the pixels
        size = (pixels.shape[1], pixels.shape[0])
        resized = attached.alpha if attached.alpha.size == size else attached.alpha.resize(size, BICUBIC)
        alpha = np.asarray(resized).astype(pixels.dtype) * (257 if pixels.dtype == np.uint16 else 1)
    if suffix == ".png":
        level = FAST if encoding.compression is None else level
        write_png(path, pixels, alpha, compression=level, profile=attached.profile, exif=attached.exif)
    elif suffix == ".tif":
        is_plain = pixels.dtype != np.float32 and pixels.shape[-1] in GREY_AND_RGB
        if not is_plain or (attached.ome is not None and alpha is None):
            write_planes(path, pixels, attached.ome, attached.profile, level)
            return
        if encoding.compression is None and pixels.dtype == np.uint8:
            level = FAST
        pixels = pixels if alpha is None else np.concatenate([pixels, alpha[..., np.newaxis]], axis=-1)
        write_planes(path, pixels, None, attached.profile, level, is_one_page=True, **_tiff_texts(attached.exif))
    else:
        image, options = to_pillow(pixels), {"icc_profile": attached.profile, "exif": attached.exif}
        if alpha is not None and suffix == ".webp":
            image.putalpha(Image.fromarray(alpha))
        given = {name: value for name, value in options.items() if value}
        # Subsampling 0 keeps the colours of JPEG at full resolution.
        image.save(path, "WEBP" if suffix == ".webp" else "JPEG", quality=encoding.quality, subsampling=0, **given)


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
        return PixelFormat.of(self.pixels.dtype.name, self.value_range)


def read_image(path: Path, channels: int = 3, pixels: PixelFormat = EIGHT_BITS) -> ImageData:
    """Read an image of any mode for networks that take `channels` channels and were trained on `pixels`.

    Raise BadImage if the file cannot be read or does not fit these networks. Grey and RGB images are read for networks
    with 1 or 3 channels; their results have the image's channels. 8-bit and 16-bit images are read in full depth for
    networks trained on either, unless the networks have a declared range of values, which images must not exceed.
    """
    header = _planes_header(path, channels)
    is_stack = header is not None and header.is_stack  # otherwise, the first page may be a grey or RGB image
    if header and channels in GREY_AND_RGB:
        is_stack &= header.channels == channels and not header.are_positions
    if not pixels.is_full_range or is_stack:
        return _read_planes(path, channels, pixels)
    image = _read_grey_or_colour(path)
    check_channels(image.pixels.shape[-1], channels)
    if header is None or not header.ome:
        return image
    ome = Ome.parse(header.ome)  # of which only the first page was read
    return replace(image, ome=replace(ome, channel_names=ome.channel_names[:1], is_one_page=True))


def _planes_header(path: Path, channels: int) -> PlanesHeader | None:
    """Return the header of a TIFF; None for other files, and if its first page may still be a grey or RGB image."""
    if path.suffix.lower() not in TIFF_SUFFIXES:
        return None
    try:
        return read_planes_header(path)
    except BadImage:
        if channels in GREY_AND_RGB:
            return None
        raise


def _read_planes(path: Path, channels: int, pixels: PixelFormat) -> ImageData:
    """Read an image whose planes are channels, or whose values have a declared range."""
    found = read_planes(path)
    if found is None and not pixels.is_integer:
        raise BadImage(f"the networks were trained on {pixels} pixels, which only TIFF files can contain")
    header, array = found or (None, decode_full_depth(path))
    check_channels(array.shape[-1], channels)
    if header and header.are_positions:
        raise BadImage(NOT_COLOURS)
    own = PixelFormat.of(array.dtype.name) if array.dtype.name in WHITE else pixels
    array = to_format(array, own if pixels.is_full_range and own.is_full_range else pixels)
    ome = Ome.parse(header.ome) if header and header.ome else None
    return ImageData(array, value_range=pixels.declared_range, ome=ome)


def check_channels(own: int, expected: int) -> None:
    """Raise BadImage if networks cannot process an image because of its number of channels."""
    if own != expected and not {own, expected} <= GREY_AND_RGB:
        counted = f"{own} channel{'s' * (own > 1)}"
        raise BadImage(f"it has {counted}, but the networks take {expected}; use images with {expected} channels")


def _has_other_pages(path: Path) -> bool:
    """Return whether a TIFF has pages other than its first one and lower-resolution copies of it."""
    try:
        with path.open("rb") as file, open_of_any_size(file) as image:
            (width, height), are_copies = image.size, True
            for number in range(1, getattr(image, "n_frames", 1)):
                image.seek(number)
                is_smaller = image.width < width and round(width / image.width) == round(height / image.height)
                are_copies &= is_smaller or bool(image.tag_v2.get(SUBFILE_TYPE, 0) & 1)  # type: ignore[attr-defined]
            return not are_copies
    except Exception:  # some pages are damaged
        return True


def _read_grey_or_colour(path: Path) -> ImageData:
    with opened(path, memory_limit) as (image, file):
        profile = b"" if image.mode in OTHER_COLOUR_MODES else image.info.get("icc_profile") or b""
        notes = ["only the first page was read"] if image.format == "TIFF" and _has_other_pages(path) else []
        grey = image.mode in GREY_MODES
        if has_deep_colours(image):
            check_checksums(image, file)
            deep = read_deep_colours(path, image)
            if deep is not None:
                pixels, alpha, note = deep
                return ImageData(pixels, alpha, profile, "; ".join(filter(None, (*notes, note))))
        if has_extra_channels(image):
            notes.append(EXTRA_CHANNELS_IGNORED)
        if loses_bits(image, file):
            notes.append("16-bit colours were read as 8-bit; use RGB TIFF to keep 16 bits")
        load_undamaged(image, file)  # must come before reading EXIF, which loads a PNG and ignores all errors
        exif = portable_exif(image)
        image = turn_upright(image)
        if image.mode in SIXTEEN_BIT_MODES:
            pixels = to_array(image).astype(np.uint16, copy=False)
            return ImageData(pixels, None, profile, "; ".join(notes), exif)
        check_bounded(image)
        alpha = None
        if image.has_transparency_data:
            image = image.convert("LA" if grey else "RGBA")
            alpha = image.getchannel("A")
        pixels = to_array(image, lambda strip: strip.convert("L" if grey else "RGB"))
        return ImageData(pixels, alpha, profile, "; ".join(notes), exif)
