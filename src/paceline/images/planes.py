"""Reads TIFF files whose pages, planes or samples are channels: multi-page TIFF, OME-TIFF, ImageJ stacks.

A file is read with tifffile and, if its compression needs another package, with Pillow, page by page. Files that an
OME-TIFF refers to are not opened.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import tifffile
from numpy.typing import NDArray
from PIL import Image, ImageSequence, UnidentifiedImageError

from paceline.contracts.pixel_format import MAX_CHANNELS
from paceline.core.installed import is_installed
from paceline.images.decode import BadImage, open_file, reason_of
from paceline.images.integrity import DEFLATE
from paceline.images.orientation import turn
from paceline.images.size_limit import PIXEL_LIMIT
from paceline.images.tiff_integrity import check_directories, check_expansion, is_tiff

MAX_BYTES = 2**31  # maximum size of a decoded image
# The data types of channels. Others have too many bits for float32, which is the widest type of a batch.
PLANE_TYPES = ("uint8", "uint16", "int8", "int16", "float16", "float32", "float64")
CODECS = "imagecodecs"  # the package with which tifffile decodes all other compressions
BUILT_IN = (1, 32773, *DEFLATE)  # compressions that tifffile decodes itself; 1 is none and 32773 is PackBits
FLOAT_PREDICTOR = 3
UNKNOWN_COLOURS = 33004  # a compression, JPEG 2000, for which libvips labels YCbCr as RGB, and other programs do not
SLACK_BYTES = 2**16
COLOURS, PREMULTIPLIED, ALPHA = 3, 1, (1, 2)  # number of colours, and the kinds of extra samples that are transparency
PLANES_ELSEWHERE = "its OME metadata describes planes that are not in the file; save all planes in one file"
FIRST_IMAGE_LATER = (
    "its metadata names an image on a later page as the first; save a file that contains only the image to be read"
)
NOT_COLOURS = "its 3 planes are depths, times or positions, not colours; save one file per plane"
CHANNEL_AXES = {"C", "S", "I", "Q"}  # tifffile's names for channels, samples, and undeclared pages
READ_FIRST_PAGE = "use --set channels=1 or channels=3 to read only the first page"
BLACK_OR_WHITE_IS_ZERO = (tifffile.PHOTOMETRIC.MINISWHITE, tifffile.PHOTOMETRIC.MINISBLACK)


class UnusablePlanes(BadImage):
    """Raised for an undamaged TIFF whose planes cannot be used as channels."""


@dataclass(frozen=True)
class PlanesHeader:
    """What the header of a TIFF file says about its channels."""

    height: int
    width: int
    channels: int
    dtype: np.dtype[Any]
    axes: str  # the dimensions as tifffile names them, without those of length 1
    is_stack: bool  # whether the channels are planes, rather than the grey or colour image that other programs show
    ome: str = ""  # the file's OME-XML, if it has any

    @property
    def has_pages(self) -> bool:
        """Whether the channels are pages that the file does not declare to be channels, as in a scan."""
        return self.is_stack and not {"C", "S"} & set(self.axes)

    @property
    def are_positions(self) -> bool:
        """Whether the channels are three planes that the file declares to be something else, such as depths."""
        return self.is_stack and self.channels == COLOURS and not CHANNEL_AXES & set(self.axes)


def read_planes_header(path: Path | bytes, *, is_limited: bool = True) -> PlanesHeader | None:
    """Return a file's header; None if it is not a TIFF with grey, RGB or any other channels.

    Raise UnusablePlanes if the image is too large to be decoded, unless `is_limited` is False.
    """
    with _opened(path) as (_, tiff):
        header = None if tiff is None else _header(tiff)
        if header and is_limited:
            _check_size(header)
        return header


def read_planes(path: Path | bytes) -> tuple[PlanesHeader, NDArray[Any]] | None:
    """Return a file's header and its pixels [h, w, c]; None if `read_planes_header` returns None."""
    with _opened(path) as (file, tiff):
        header = None if tiff is None else _header(tiff)
        if tiff is None or header is None:
            return None
        _check_size(header)
        page = tiff.series[0].keyframe
        array = _decoded(tiff, file).reshape(_squeezed(tiff.series[0])[1])
        if header.axes != "YX":
            array = np.moveaxis(array, _channel_axis(header.axes), -1) if header.axes[-1] != "S" else array
        else:
            array = array[..., np.newaxis]
        colours, alpha = array[..., : header.channels], array[..., header.channels :]
        if page.photometric == tifffile.PHOTOMETRIC.MINISWHITE and array.dtype.kind == "u":
            colours = np.iinfo(array.dtype).max - colours
        array = _over_white(colours, alpha, page.extrasamples[0] == PREMULTIPLIED) if alpha.size else colours
        return header, np.ascontiguousarray(turn(array, _orientation(page)))


def has_other_pages(path: Path) -> bool:
    """Return whether a TIFF has pages other than its first one and lower-resolution copies of it."""
    try:
        with _opened(path) as (_, tiff):
            if tiff is None:
                return False
            own = len(first_series(tiff).pages)
            return own > 1 or any(not other.keyframe.is_reduced for other in tiff.series[1:])
    except BadImage:
        return True  # some pages cannot be read


@contextmanager
def _opened(path: Path | bytes) -> Iterator[tuple[IO[bytes], tifffile.TiffFile | None]]:
    """Yield a file, and its content if it is a TIFF; raise BadImage for any error."""
    try:
        with open_file(path) as file:
            if not is_tiff(file):
                yield file, None
                return
            check_directories(file)
            with tifffile.TiffFile(file, _multifile=False) as tiff:
                yield file, tiff
    except BadImage:
        raise
    except Exception as error:  # decoders raise many kinds of errors on damaged files
        raise BadImage(reason_of(error)) from error


def first_series(tiff: tifffile.TiffFile) -> tifffile.TiffPageSeries:
    """Return the first image of a file; raise UnusablePlanes unless it is stored in the file and has the first page.

    Other programs, and readers that ignore OME metadata, show the first page.
    """
    series = tiff.series[0]
    if tiff.is_ome and series.kind != "ome":
        raise UnusablePlanes(PLANES_ELSEWHERE)
    if all(page is None or page.index != 0 for page in series.pages):
        raise UnusablePlanes(FIRST_IMAGE_LATER)
    return series


def check_colours(page: Any) -> None:
    """Raise UnusablePlanes if a page has three colours and the file does not state whether they are RGB or YCbCr."""
    is_grey = page.photometric in BLACK_OR_WHITE_IS_ZERO
    if page.compression == UNKNOWN_COLOURS and page.samplesperpixel == COLOURS and not is_grey:
        raise UnusablePlanes(
            "colours with JPEG 2000 compression 33004 may be RGB or YCbCr, and the file does not state which; "
            "save the image with another compression"
        )


def _header(tiff: tifffile.TiffFile) -> PlanesHeader | None:
    series = first_series(tiff)
    page, (axes, shape) = series.keyframe, _squeezed(series)
    check_colours(page)
    samples = int(shape[axes.index("S")]) if "S" in axes else 1
    is_colour = page.photometric == tifffile.PHOTOMETRIC.RGB
    if page.photometric not in (*BLACK_OR_WHITE_IS_ZERO, tifffile.PHOTOMETRIC.RGB) or page.dtype is None:
        return None  # palettes, CMYK, Lab and YCbCr, which Pillow reads
    if page.bitspersample != page.dtype.itemsize * 8:
        if len(axes) == 2 or (is_colour and len(axes) == 3 and "S" in axes):
            return None  # not planes: Pillow reads 1-bit and 12-bit grey, and rejects colours
        raise UnusablePlanes(
            f"{page.bitspersample}-bit planes are not supported; save the image with 8 or 16 bits per channel, "
            f"or {READ_FIRST_PAGE}"
        )
    colours = COLOURS if is_colour else 1
    has_alpha = samples == colours + 1 and bool(page.extrasamples) and page.extrasamples[0] in ALPHA
    channels = colours if has_alpha else samples
    if "S" not in axes and len(axes) == 3:
        channels = int(shape[_channel_axis(axes)])
    elif len(axes) > 3 and not ((is_colour or has_alpha) and len(axes) == 4):
        named = "×".join(f"{length} {axis}" for axis, length in zip(axes, shape, strict=True))
        raise UnusablePlanes(f"too many dimensions ({named}); save one file per time point, depth or position")
    elif len(axes) > 3 and page.dtype != np.uint8:
        raise UnusablePlanes(
            f"several pages of {page.dtype.name} colours; save one page per file, or {READ_FIRST_PAGE}"
        )
    elif len(axes) > 3:
        return None  # several pages of colours, of which Pillow reads the first
    height, width = (int(shape[axes.index(side)]) for side in "YX")
    _check_sizes(tiff, axes, is_colour, (height, width))
    found = (height, width) if _orientation(page) < 5 else (width, height)
    is_stack = not (axes == "YX" or has_alpha or (is_colour and channels == COLOURS))
    header = PlanesHeader(*found, channels, page.dtype, axes, is_stack, tiff.ome_metadata or "")
    _check_limits(header)
    if any(one is None for one in series.pages):
        raise BadImage("some of its planes are missing from the file")
    return header


def _squeezed(series: tifffile.TiffPageSeries) -> tuple[str, tuple[int, ...]]:
    """Return the axes and lengths of a series without dimensions of length 1, other than height and width."""
    kept = [
        (axis, length) for axis, length in zip(series.axes, series.shape, strict=True) if length > 1 or axis in "YX"
    ]
    return "".join(axis for axis, _ in kept), tuple(length for _, length in kept)


def _channel_axis(axes: str) -> int:
    return next(number for number, axis in enumerate(axes) if axis not in "YX")


def _check_sizes(tiff: tifffile.TiffFile, axes: str, is_colour: bool, size: tuple[int, int]) -> None:
    """Raise BadImage if further grey pages differ in size; smaller copies of the first page do not count."""
    if axes != "YX" or is_colour:
        return
    for series in tiff.series[1:]:
        other = series.keyframe
        if not other.is_reduced and other.samplesperpixel == 1 and other.shape[:2] != size:
            sizes = f"{size[1]}×{size[0]} and {other.imagewidth}×{other.imagelength}"
            raise UnusablePlanes(
                f"its pages have different sizes ({sizes} pixels), so they cannot be channels; {READ_FIRST_PAGE}"
            )


def _check_limits(header: PlanesHeader) -> None:
    if header.channels > MAX_CHANNELS:
        raise UnusablePlanes(f"{header.channels} channels, above the limit of {MAX_CHANNELS}")
    if header.dtype.name not in PLANE_TYPES:
        raise UnusablePlanes(
            f"{header.dtype.name} pixels have no defined white level and do not fit into float32; "
            "save the image as uint8, uint16 or float32"
        )


def _check_size(header: PlanesHeader) -> None:
    """Raise UnusablePlanes if an image is too large to be decoded."""
    if header.height * header.width > PIXEL_LIMIT:
        raise UnusablePlanes(
            f"{header.width} × {header.height} pixels, above the limit of {PIXEL_LIMIT // 10**6} megapixels"
        )
    needed = header.height * header.width * header.channels * header.dtype.itemsize
    if needed > MAX_BYTES:
        raise UnusablePlanes(f"{needed / 2**30:.1f} GiB of pixels, above the limit of {MAX_BYTES / 2**30:.0f} GiB")


def _over_white(colours: NDArray[Any], alpha: NDArray[Any], premultiplied: bool) -> NDArray[Any]:
    """Blend grey levels or colours over white; for floats, white is 1."""
    white = np.iinfo(colours.dtype).max if colours.dtype.kind == "u" else 1
    opacity = alpha.astype(np.float32) / white
    blended = colours * (1.0 if premultiplied else opacity) + white * (1 - opacity)
    return (np.rint(blended).clip(0, white) if white > 1 else blended).astype(colours.dtype)


def _orientation(page: Any) -> int:
    tag = page.tags.get("Orientation")
    return int(tag.value) if tag is not None and isinstance(tag.value, int) else 1


def _decoded(tiff: tifffile.TiffFile, file: IO[bytes]) -> NDArray[Any]:
    series = tiff.series[0]
    page = series.keyframe
    if page.compression in DEFLATE:
        most = min(MAX_BYTES, math.prod(page.chunks) * page.dtype.itemsize * len(page.dataoffsets)) if page.dtype else 0
        for one in series.pages:
            assert one is not None, "checked with the header"
            check_expansion(file, zip(one.dataoffsets, one.databytecounts, strict=True), most + SLACK_BYTES)
    try:
        array: NDArray[Any] = series.asarray()
        return array
    except Exception:
        if page.predictor == FLOAT_PREDICTOR and not is_installed(CODECS):
            raise BadImage(f"predictor 3 needs the package {CODECS}; install it, or use no predictor") from None
        if page.compression in BUILT_IN or page.dtype is None:
            raise
    if page.samplesperpixel > 1:
        raise _unsupported(page)
    try:
        pages = _decoded_by_pillow(file, len(series.pages))
    except UnidentifiedImageError:
        raise _unsupported(page) from None
    if len(pages) < len(series.pages) or pages[0].dtype.itemsize < page.dtype.itemsize:
        raise _unsupported(page)
    return np.stack(pages).astype(page.dtype)


def _decoded_by_pillow(file: IO[bytes], num_pages: int) -> list[NDArray[Any]]:
    """Decode single-channel pages whose compression tifffile cannot decode without another package."""
    file.seek(0)
    with Image.open(file, formats=["TIFF"]) as image:
        return [np.asarray(frame) for _, frame in zip(range(num_pages), ImageSequence.Iterator(image), strict=False)]


def _unsupported(page: Any) -> BadImage:
    name = getattr(page.compression, "name", str(page.compression))
    if is_installed(CODECS):
        return BadImage(f"damaged, or its {name} compression is not supported; save the image again, uncompressed")
    return BadImage(
        f"{name} compression is not supported for such images; save the image uncompressed or with deflate, "
        f"or install {CODECS}"
    )
