"""Images with any number of channels, in 8 or 16 bits or float32, and the TIFF files that hold them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree

import numpy as np
import tifffile
from numpy.typing import NDArray
from PIL import Image

from paceline.contracts.data_spec import LUMA, MAX_CHANNELS, WHITE, PixelFormat
from paceline.core.registry import is_installed
from paceline.images.decode import (
    PIXEL_LIMIT,
    WHITE_16,
    BadImage,
    SizeLimit,
    TooLarge,
    decode_full_depth,
    open_file,
    pixel_limit,
    reporting,
    upright_size,
)
from paceline.images.tiff import (
    ALPHA,
    BITS_PER_SAMPLE,
    DEFLATE,
    FLOAT_PREDICTOR,
    GREY,
    ORIENTATION,
    PREMULTIPLIED,
    RGB,
    SAMPLES_PER_PIXEL,
    WHITE_IS_ZERO,
    check_directories,
    check_expansion,
    is_tiff,
)


def turn(array: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Return pixels [h, w, c] turned upright; an unknown orientation counts as upright."""
    number = orientation - 1 if 1 <= orientation <= 8 else 0
    array = array.swapaxes(0, 1) if number >= 4 else array
    return array[:: -1 if number % 4 in (2, 3) else 1, :: -1 if number % 4 in (1, 2) else 1]


MAX_BYTES = 2**31  # maximum size of a decoded image
# The data types of channels. Others have too many bits for float32, which is the widest type of a batch.
PLANE_TYPES = ("uint8", "uint16", "int8", "int16", "float16", "float32", "float64")
CODECS = "imagecodecs"  # the package with which tifffile decodes all other compressions
BUILT_IN = (1, 32773, *DEFLATE)  # compressions that tifffile decodes itself; 1 is none and 32773 is PackBits
UNKNOWN_COLOURS = 33004  # a compression, JPEG 2000, for which libvips labels YCbCr as RGB, and other programs do not
SLACK_BYTES = 2**16
COLOURS = 3  # their number
PLANES_ELSEWHERE = "its OME metadata describes planes that are not in the file; save all planes in one file"
FIRST_IMAGE_LATER = (
    "its metadata names an image on a later page as the first; save a file that contains only the image to be read"
)
NOT_COLOURS = "its 3 planes are depths, times or positions, not colours; save one file per plane"
CHANNEL_AXES = {"C", "S", "I", "Q"}  # tifffile's names for channels, samples, and undeclared pages
READ_FIRST_PAGE = "use --set channels=1 or channels=3 to read only the first page"
EXTRA_CHANNELS_IGNORED = "channels other than colours and transparency were ignored"


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

    def check_size(self) -> None:
        """Raise UnusablePlanes if the image is too large to be decoded."""
        num_pixels = self.height * self.width
        needed = num_pixels * self.channels * self.dtype.itemsize
        if num_pixels > PIXEL_LIMIT:
            limit = f"{PIXEL_LIMIT // 10**6} megapixels"
            raise UnusablePlanes(f"{self.width} × {self.height} pixels, above the limit of {limit}")
        if needed > MAX_BYTES:
            limit = f"{MAX_BYTES / 2**30:.0f} GiB"
            raise UnusablePlanes(f"{needed / 2**30:.1f} GiB of pixels, above the limit of {limit}")


def read_planes_header(path: Path | bytes, *, is_limited: bool = True) -> PlanesHeader | None:
    """Return a file's header; None if it is not a TIFF with grey, RGB or any other channels.

    Raise UnusablePlanes if the image is too large to be decoded, unless `is_limited` is False.
    """
    with _opened(path) as (_, tiff):
        header = None if tiff is None else _header(tiff)
        if header and is_limited:
            header.check_size()
        return header


def read_planes(path: Path | bytes) -> tuple[PlanesHeader, NDArray[Any]] | None:
    """Return a file's header and its pixels [h, w, c]; None if `read_planes_header` returns None."""
    with _opened(path) as (file, tiff):
        header = None if tiff is None else _header(tiff)
        if tiff is None or header is None:
            return None
        header.check_size()
        page = tiff.series[0].keyframe
        array = _decoded(tiff.series[0], file).reshape(_squeezed(tiff.series[0])[1])
        if header.axes == "YX":
            array = array[..., np.newaxis]
        elif header.axes[-1] != "S":
            array = np.moveaxis(array, _channel_axis(header.axes), -1)
        colours, alpha = array[..., : header.channels], array[..., header.channels :]
        if page.photometric == WHITE_IS_ZERO and array.dtype.kind == "u":
            colours = np.iinfo(array.dtype).max - colours
        array = _over_white(colours, alpha, page.extrasamples[0] == PREMULTIPLIED) if alpha.size else colours
        return header, np.ascontiguousarray(turn(array, _orientation(page)))


@contextmanager
def _opened(path: Path | bytes) -> Iterator[tuple[IO[bytes], tifffile.TiffFile | None]]:
    """Yield a file, and its content if it is a TIFF; raise BadImage for any error."""
    with reporting(path), open_file(path) as file:
        if not is_tiff(file):
            yield file, None
            return
        check_directories(file)
        with tifffile.TiffFile(file, _multifile=False) as tiff:
            yield file, tiff


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
    is_grey = page.photometric in (WHITE_IS_ZERO, GREY)
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
    is_colour = page.photometric == RGB
    if page.photometric not in (WHITE_IS_ZERO, GREY, RGB) or page.dtype is None:
        return None  # palettes, CMYK, Lab and YCbCr, which Pillow reads
    is_one_page = len(axes) == 2 or (is_colour and len(axes) == 3 and "S" in axes)
    if page.bitspersample != page.dtype.itemsize * 8:
        if is_one_page:
            return None  # Pillow reads 1-bit and 12-bit grey, and rejects colours
        raise UnusablePlanes(
            f"{page.bitspersample}-bit planes are not supported; save the image with 8 or 16 bits per channel, "
            f"or {READ_FIRST_PAGE}"
        )
    if not _can_decode(page) and is_one_page and (page.dtype == np.uint8 or (axes == "YX" and page.dtype == np.uint16)):
        return None  # Pillow reads more compressions
    colours = COLOURS if is_colour else 1
    has_alpha = samples == colours + 1 and bool(page.extrasamples) and page.extrasamples[0] in ALPHA
    channels = colours if has_alpha else samples
    if "S" not in axes and len(axes) == 3:
        channels = int(shape[_channel_axis(axes)])
    elif len(axes) > 3:
        if (is_colour or has_alpha) and len(axes) == 4 and page.dtype == np.uint8:
            return None  # several pages of colours, of which Pillow reads the first
        dimensions = "×".join(f"{length} {axis}" for axis, length in zip(axes, shape, strict=True))
        raise UnusablePlanes(f"too many dimensions ({dimensions}); save one file per image, or {READ_FIRST_PAGE}")
    height, width = (int(shape[axes.index(side)]) for side in "YX")
    if axes == "YX" and not is_colour:
        _check_sizes(tiff, (height, width))
    size = (height, width) if _orientation(page) < 5 else (width, height)
    is_stack = not (axes == "YX" or has_alpha or (is_colour and channels == COLOURS))
    if channels > MAX_CHANNELS:
        raise UnusablePlanes(f"{channels} channels, above the limit of {MAX_CHANNELS}")
    if page.dtype.name not in PLANE_TYPES:
        raise UnusablePlanes(f"{page.dtype.name} pixels do not fit into float32; save them as uint16 or float32")
    if any(page is None for page in series.pages):
        raise BadImage("some of its planes are missing from the file")
    return PlanesHeader(*size, channels, page.dtype, axes, is_stack, tiff.ome_metadata or "")


def _squeezed(series: tifffile.TiffPageSeries) -> tuple[str, tuple[int, ...]]:
    """Return the axes and lengths of a series without dimensions of length 1, other than height and width."""
    kept = [
        (axis, length) for axis, length in zip(series.axes, series.shape, strict=True) if length > 1 or axis in "YX"
    ]
    return "".join(axis for axis, _ in kept), tuple(length for _, length in kept)


def _channel_axis(axes: str) -> int:
    return next(number for number, axis in enumerate(axes) if axis not in "YX")


def _check_sizes(tiff: tifffile.TiffFile, size: tuple[int, int]) -> None:
    """Raise BadImage if further grey pages differ in size; smaller copies of the first page do not count."""
    for other in (series.keyframe for series in tiff.series[1:]):
        if not other.is_reduced and other.samplesperpixel == 1 and other.shape[:2] != size:
            sizes = f"{size[1]}×{size[0]} and {other.imagewidth}×{other.imagelength}"
            raise UnusablePlanes(
                f"its pages have different sizes ({sizes} pixels), so they cannot be channels; {READ_FIRST_PAGE}"
            )


def _over_white(colours: NDArray[Any], alpha: NDArray[Any], premultiplied: bool) -> NDArray[Any]:
    """Blend grey levels or colours over white; for floats, white is 1."""
    white = np.iinfo(colours.dtype).max if colours.dtype.kind == "u" else 1
    opacity = alpha.astype(np.float32) / white
    blended = colours * (1.0 if premultiplied else opacity) + white * (1 - opacity)
    return (np.rint(blended).clip(0, white) if white > 1 else blended).astype(colours.dtype)


def _orientation(page: Any) -> int:
    tag = page.tags.get("Orientation")
    return int(tag.value) if tag is not None and isinstance(tag.value, int) else 1


def _can_decode(page: Any) -> bool:
    is_plain = page.compression in BUILT_IN and page.predictor != FLOAT_PREDICTOR
    return is_plain or is_installed(CODECS)


def _decoded(series: tifffile.TiffPageSeries, file: IO[bytes]) -> NDArray[Any]:
    page = series.keyframe
    if page.compression in DEFLATE:
        most = min(MAX_BYTES, math.prod(page.chunks) * page.dtype.itemsize * len(page.dataoffsets)) if page.dtype else 0
        for stored in series.pages:
            assert stored is not None, "checked with the header"
            check_expansion(file, zip(stored.dataoffsets, stored.databytecounts, strict=True), most + SLACK_BYTES)
    try:
        array: NDArray[Any] = series.asarray()
        return array
    except Exception:
        if page.compression in BUILT_IN and _can_decode(page):
            raise
    what = f"{getattr(page.compression, 'name', page.compression)} compression with predictor {page.predictor}"
    remedy = "" if is_installed(CODECS) else f", or install {CODECS}"
    raise BadImage(
        f"damaged, or its {what} is not supported; save the image uncompressed or with deflate, without a "
        f"predictor{remedy}"
    )


GREY_AND_RGB = {1, 3}  # numbers of channels that can be converted into each other
EIGHT_TO_SIXTEEN = 257  # 255 · 257 = 65535, so white stays white


@dataclass(frozen=True, eq=False)
class DeepImage:
    """An upright image [h, w, c], with the parts of a Pillow image's interface that sources need."""

    pixels: NDArray[Any]

    @property
    def height(self) -> int:
        """The number of rows."""
        return int(self.pixels.shape[0])

    @property
    def width(self) -> int:
        """The number of columns."""
        return int(self.pixels.shape[1])

    @property
    def channels(self) -> int:
        """The number of channels."""
        return int(self.pixels.shape[2])

    def crop(self, box: tuple[int, int, int, int]) -> DeepImage:
        """Return the part between (left, top) and (right, bottom)."""
        left, top, right, bottom = box
        return DeepImage(self.pixels[top:bottom, left:right])

    def with_channels(self, channels: int) -> DeepImage:
        """Return the image with 3 channels instead of 1 (repeated), or with 1 instead of 3 (luma)."""
        if channels == self.channels:
            return self
        if self.channels == 1:
            return DeepImage(self.pixels.repeat(channels, axis=-1))
        luma = (self.pixels.astype(np.float32) @ np.array(LUMA, np.float32))[..., np.newaxis]
        return DeepImage((luma if self.pixels.dtype.kind == "f" else np.rint(luma)).astype(self.pixels.dtype))

    @classmethod
    def each(cls, images: NDArray[Any], channels: int, side: int, pixels: PixelFormat) -> NDArray[Any]:
        """Convert images [n, h, w, c] to a number of channels and, unless `side` is 0, to squares."""
        if channels == images.shape[-1] and (not side or side == images.shape[1] == images.shape[2]):
            return np.ascontiguousarray(images)
        arranged = (cls(image).with_channels(channels) for image in images)
        return np.stack([image.fitted(side, side, pixels).pixels for image in arranged])

    def fitted(self, height: int, width: int, pixels: PixelFormat) -> DeepImage:
        """Centre-crop to a shape and resize (bicubic); values stay within the range. If a side is 0, keep the size."""
        if not (height and width) or (height, width) == (self.height, self.width):
            return self
        scale = min(self.height / height, self.width / width)
        inner_height, inner_width = round(scale * height), round(scale * width)
        left, top = (self.width - inner_width) // 2, (self.height - inner_height) // 2
        box = (left, top, left + inner_width, top + inner_height)
        if (inner_height, inner_width) == (height, width):
            return self.crop(box)
        planes = (Image.fromarray(plane.astype(np.float32)) for plane in np.moveaxis(self.pixels, -1, 0))
        sized = np.stack([np.asarray(one.resize((width, height), Image.Resampling.BICUBIC, box)) for one in planes], -1)
        sized = np.rint(sized) if pixels.is_integer else sized
        return DeepImage(sized.clip(pixels.low, pixels.high).astype(pixels.dtype))


def read_deep(path: Path | bytes) -> DeepImage:
    """Return an image in the data type of its file; raise BadImage if it cannot be read."""
    found = read_planes(path)
    return DeepImage(decode_full_depth(path) if found is None else found[1])


def to_format(array: NDArray[Any], pixels: PixelFormat) -> NDArray[Any]:
    """Convert an image to a pixel format; raise BadImage if it does not fit.

    Between 8 and 16 bits, white stays white. Converting to float32 keeps the values.
    """
    own = array.dtype.name
    if pixels.is_integer:
        if own not in WHITE:
            raise BadImage(f"{own} pixels instead of {pixels.dtype}; use --set pixels=float32 for such images")
        if own == "uint8" and pixels.dtype == "uint16":
            array = array.astype(np.uint16) * EIGHT_TO_SIXTEEN
        elif own == "uint16" and pixels.dtype == "uint8":
            array = ((array.astype(np.uint32) + EIGHT_TO_SIXTEEN // 2) // EIGHT_TO_SIXTEEN).astype(np.uint8)
    else:
        array = array.astype(np.float32, copy=False)
    if not pixels.is_full_range:
        _check_values(array, pixels)
    return array


def _check_values(array: NDArray[Any], pixels: PixelFormat) -> None:
    low, high = float(array.min()), float(array.max())
    if not np.isfinite([low, high]).all():  # NaN and infinity also appear in the minimum or the maximum
        raise BadImage("it contains NaN or infinite values; replace them")
    if low < pixels.low or high > pixels.high:
        raise BadImage(
            f"its values from {low:g} to {high:g} exceed value_range={pixels.low:g},{pixels.high:g}; "
            "use a larger range, or clip the image"
        )


def to_eight_bit_array(array: NDArray[Any], pixels: PixelFormat) -> NDArray[np.uint8]:
    """Return pixels on a scale from 0 to 255, as they are shown in sample images."""
    if array.dtype == np.uint8:
        return array
    levels: NDArray[np.float32] = (array.astype(np.float32) - pixels.low) * (255 / pixels.span)
    return np.rint(levels).clip(0, 255).astype(np.uint8)


def is_ome(description: str) -> bool:
    """Return whether the description of a TIFF is OME-XML."""
    return description.rstrip("\0 \r\n").endswith("OME>")


@dataclass(frozen=True)
class Ome:
    """Metadata of an OME-TIFF."""

    channel_names: tuple[str, ...] = ()
    pixel_size: tuple[float, float] | None = None  # width and height of a pixel
    units: tuple[str, str] = ("µm", "µm")
    width_px: int = 0  # width of the image that the pixel size belongs to
    is_one_page: bool = False  # whether the image is one grey or RGB page, rather than one plane per channel

    @classmethod
    def parse(cls, text: str) -> Ome:
        """Return the metadata in OME-XML; parts that cannot be read are left out."""
        try:
            pixels = ElementTree.fromstring(text).find(".//{*}Pixels")
        except ElementTree.ParseError:
            pixels = None
        if pixels is None:
            return cls()
        names = tuple(channel.get("Name", "") for channel in pixels.findall("{*}Channel"))
        named = cls(names if all(names) else ())
        try:
            size = float(pixels.attrib["PhysicalSizeX"]), float(pixels.attrib["PhysicalSizeY"])
            units = (pixels.get("PhysicalSizeXUnit", "µm"), pixels.get("PhysicalSizeYUnit", "µm"))
            return replace(named, pixel_size=size, units=units, width_px=int(pixels.attrib["SizeX"]))
        except (KeyError, ValueError):
            return named

    def for_result(self, channels: int, width_px: int) -> dict[str, Any]:
        """Return the metadata of a result, as tifffile expects it; the pixels of an enlarged result are smaller."""
        found: dict[str, Any] = {}
        if len(self.channel_names) == channels:
            found["Channel"] = {"Name": list(self.channel_names)}
        if self.pixel_size and self.width_px:
            width, height = (side * self.width_px / width_px for side in self.pixel_size)
            found |= {"PhysicalSizeX": width, "PhysicalSizeY": height}
            found |= {"PhysicalSizeXUnit": self.units[0], "PhysicalSizeYUnit": self.units[1]}
        return found


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


ROWS_AT_ONCE = 64  # rows that are divided by alpha at a time


def has_deep_colours(image: Image.Image) -> bool:
    """Return whether a file is a TIFF with 16-bit colours, in any colour space."""
    if image.format != "TIFF":
        return False
    tags = image.tag_v2  # type: ignore[attr-defined]
    return tags.get(SAMPLES_PER_PIXEL, 1) >= COLOURS and set(tags.get(BITS_PER_SAMPLE, ())) == {16}


def has_extra_channels(image: Image.Image) -> bool:
    """Return whether an RGB TIFF has channels besides colours and transparency. Pillow ignores them."""
    is_rgb = image.format == "TIFF" and image.mode == "RGB"
    return is_rgb and image.tag_v2.get(SAMPLES_PER_PIXEL, 1) > COLOURS  # type: ignore[attr-defined]


def read_deep_colours(path: Path, image: Image.Image) -> tuple[NDArray[np.uint16], Image.Image | None, str] | None:
    """Return the pixels [h, w, 3] and alpha of the first page of a TIFF, with a note; None if it is not 16-bit RGB.

    `image` is the same file opened by Pillow.
    """
    try:
        with tifffile.TiffFile(path) as file:
            page = file.pages.first
            if page.photometric != RGB or page.dtype != np.uint16 or page.axes not in ("YXS", "SYX"):
                return None
            array, extra = page.asarray(), page.extrasamples
            array = np.moveaxis(array, 0, -1) if page.axes == "SYX" else array  # one plane per colour
    except Exception:  # for a damaged file or an unsupported compression, use Pillow
        return None
    array = turn(array, image.getexif().get(ORIENTATION, 1))
    pixels = np.ascontiguousarray(array[..., :COLOURS])
    if array.shape[-1] == COLOURS:
        return pixels, None, ""
    if not extra or extra[0] not in ALPHA:
        return pixels, None, EXTRA_CHANNELS_IGNORED
    alpha = array[..., COLOURS]
    if extra[0] == PREMULTIPLIED:  # a few rows at a time, since floating-point copies are large
        for top in range(0, len(pixels), ROWS_AT_ONCE):
            rows = pixels[top : top + ROWS_AT_ONCE]
            factors = np.float32(WHITE_16) / np.maximum(alpha[top : top + ROWS_AT_ONCE], 1).astype(np.float32)
            rows[:] = np.minimum(np.rint(rows * factors[..., np.newaxis]), WHITE_16)
    return pixels, Image.fromarray((alpha >> 8).astype(np.uint8)), ""


def write_planes(
    path: Path | IO[bytes],
    pixels: NDArray[Any],
    ome: Ome | None = None,
    profile: bytes = b"",
    compression: int = 0,
    *,
    is_one_page: bool = False,
    **options: Any,
) -> None:
    """Write an image [h, w, c] as a TIFF with one page per channel, or as an OME-TIFF; `options` are tifffile's.

    With `is_one_page`, write one page of grey or RGB; a further channel is transparency.
    """
    height, width, channels = pixels.shape
    metadata = {} if ome is None else ome.for_result(channels, width)
    common: dict[str, Any] = {"iccprofile": profile or None, "ome": ome is not None, **options}
    if compression:
        common |= {"compression": "zlib", "compressionargs": {"level": compression}}
    if is_one_page or (ome is not None and ome.is_one_page and channels == COLOURS):
        common["metadata"] = {"axes": "YXS", **metadata} if ome is not None else None
        common["extrasamples"] = ["unassalpha"] if channels in (2, 4) else None
        one_page = pixels if channels > 1 else pixels[..., 0]
        tifffile.imwrite(path, one_page, photometric="rgb" if channels > 2 else "minisblack", **common)
        return
    tifffile.imwrite(
        path,
        data=(np.ascontiguousarray(pixels[..., channel]) for channel in range(channels)),
        shape=(channels, height, width),
        dtype=pixels.dtype,
        photometric="minisblack",
        metadata={"axes": "CYX", **metadata},
        **common,
    )
