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
from PIL import Image, ImageSequence, UnidentifiedImageError

from paceline.contracts.data_spec import LUMA, MAX_CHANNELS, WHITE, PixelFormat
from paceline.core.registry import is_installed
from paceline.images.decode import PIXEL_LIMIT, WHITE_16, BadImage, decode_full_depth, open_file, reporting
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
        if page.photometric == WHITE_IS_ZERO and array.dtype.kind == "u":
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


ROWS_AT_ONCE = 64  # rows that are divided by alpha at a time
EXTRA_CHANNELS_IGNORED = "channels other than colours and transparency were ignored"


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
            if page.photometric != RGB or page.dtype != np.uint16:
                return None
            array, axes, extra = page.asarray(), page.axes, page.extrasamples
    except Exception:  # for a damaged file or an unsupported compression, use Pillow
        return None
    if axes == "SYX":  # the file stores one plane per colour
        array = np.moveaxis(array, 0, -1)
    elif axes != "YXS":
        return None
    array = turn(array, image.getexif().get(ORIENTATION, 1))
    pixels = np.ascontiguousarray(array[..., :COLOURS])
    if array.shape[-1] == COLOURS:
        return pixels, None, ""
    if not extra or extra[0] not in ALPHA:
        return pixels, None, EXTRA_CHANNELS_IGNORED
    alpha = array[..., COLOURS]
    if extra[0] == PREMULTIPLIED:
        _divide(pixels, alpha)
    return pixels, Image.fromarray((alpha >> 8).astype(np.uint8)), ""


def write_deep_colours(
    path: Path, pixels: NDArray[np.uint16], alpha: NDArray[np.uint16] | None, profile: bytes, compression: int = 0
) -> None:
    """Write a uint16 [h, w, 3] image, with alpha [h, w] of the same size, if given."""
    tifffile.imwrite(
        path,
        pixels if alpha is None else np.concatenate([pixels, alpha[..., np.newaxis]], axis=-1),
        photometric="rgb",
        extrasamples=None if alpha is None else ["unassalpha"],
        iccprofile=profile or None,
        **_deflate(compression),
    )


def _deflate(level: int) -> dict[str, Any]:
    return {"compression": "zlib", "compressionargs": {"level": level}} if level else {}


def write_planes(
    path: Path | IO[bytes], pixels: NDArray[Any], ome: Ome | None = None, profile: bytes = b"", compression: int = 0
) -> None:
    """Write an image [h, w, c] as a TIFF with one page per channel, or as an OME-TIFF."""
    height, width, channels = pixels.shape
    more = {} if ome is None else ome.for_result(channels, width)
    if ome is not None and ome.is_one_page and channels == COLOURS:
        colours: dict[str, Any] = {"photometric": "rgb", "metadata": {"axes": "YXS", **more}}
        tifffile.imwrite(path, pixels, ome=True, iccprofile=profile or None, **colours, **_deflate(compression))
        return
    tifffile.imwrite(
        path,
        data=(np.ascontiguousarray(pixels[..., channel]) for channel in range(channels)),
        shape=(channels, height, width),
        dtype=pixels.dtype,
        photometric="minisblack",
        metadata={"axes": "CYX", **more},
        ome=ome is not None,
        iccprofile=profile or None,
        **_deflate(compression),
    )


def _divide(pixels: NDArray[np.uint16], alpha: NDArray[np.uint16]) -> None:
    """Divide colours by alpha in place, a few rows at a time, since floating-point copies are large."""
    for top in range(0, len(pixels), ROWS_AT_ONCE):
        rows, levels = pixels[top : top + ROWS_AT_ONCE], alpha[top : top + ROWS_AT_ONCE]
        factors = np.float32(WHITE_16) / np.maximum(levels, 1).astype(np.float32)
        rows[:] = np.minimum(np.rint(rows * factors[..., np.newaxis]), WHITE_16)
