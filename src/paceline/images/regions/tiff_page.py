"""What the tags of a TIFF page say about its pixels, and whether they can be read by region."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import numpy as np

from paceline.images.decode import ORIENTATION, PREMULTIPLIED, BadImage
from paceline.images.deep_image import GREY_AND_RGB
from paceline.images.deep_tiff import EXTRA_CHANNELS_IGNORED
from paceline.images.integrity import DEFLATE, JPEG
from paceline.images.planes import PLANES_ELSEWHERE, check_colours
from paceline.images.regions.region_image import RegionFormat

LARGEST_SEGMENT_BYTES = 256 << 20  # of a decoded tile or strip
LARGEST_WHOLE_STRIP_BYTES = 16 << 20  # of an uncompressed strip; from larger ones, only the requested rows are read
LARGEST_CHANNELS = 64
NONE = 1  # value of the TIFF tag Compression
OLD_JPEG = 6
JPEGS = (OLD_JPEG, JPEG)
# The largest plausible ratio of decoded bytes to stored bytes, by compression. If the size in a header implies a larger
# ratio, the header is damaged. Except for NONE, these are the largest possible ratios, rounded up (5: LZW; 32773:
# PackBits; 34925: LZMA; 34926 and 50000: Zstandard). Compressions that are not listed have no limit. The ratio for NONE
# is not 1, because a file may contain only a part of the pixels.
MOST_EXPANSION = {
    **{NONE: 16, 5: 2048, JPEG: 2048, 32773: 64, 34925: 1 << 16, 34926: 1 << 16, 50000: 1 << 16},
    **dict.fromkeys(DEFLATE, 2048),
}
NO_PREDICTOR, HORIZONTAL = 1, 2
GREY, RGB, YCBCR = 1, 2, 6  # values of the TIFF tag PhotometricInterpretation
ALPHA = (1, 2)  # values of the TIFF tag ExtraSamples
MICRONS_PER_UNIT = {2: 25_400.0, 3: 10_000.0}  # values of the TIFF tag ResolutionUnit: inch, centimetre


def planes_of(level: Any) -> list[Any]:
    """Return the pages that store the channels of a level."""
    axes, pages = level.axes, list(level.pages)
    if any(page is None for page in pages):
        raise BadImage(PLANES_ELSEWHERE)
    if axes in ("YX", "YXS", "SYX"):
        return [pages[0].keyframe if hasattr(pages[0], "keyframe") else pages[0]][:1]
    if axes in ("CYX", "QYX", "IYX") and len(pages) == level.shape[0]:
        return [page.aspage() for page in pages]
    what = f"axes {axes} {tuple(level.shape)}: only rows, columns and channels can be read by region"
    raise BadImage(f"{what}; save one file per time point, depth or position")


class Samples(NamedTuple):
    """Which samples of a page are used."""

    num_used: int  # the first ones
    note: str = ""  # about the others
    has_alpha: bool = False


def samples_of(page: Any, channels: int) -> Samples:
    """Return the samples that are channels, for networks with a number of channels; 0 for all channels.

    Networks for grey and RGB images read only the colours of an RGB image.
    """
    colours = 3 if page.photometric in (RGB, YCBCR) else 1
    if page.samplesperpixel > colours and page.extrasamples and page.extrasamples[0] in ALPHA:
        return Samples(colours, "transparency is ignored", has_alpha=True)
    if page.samplesperpixel > colours > 1 and channels in GREY_AND_RGB:
        return Samples(colours, EXTRA_CHANNELS_IGNORED)
    return Samples(page.samplesperpixel)


def check_page(page: Any, found: RegionFormat) -> None:
    """Raise BadImage for pixels that are not supported."""
    if found.dtype not in (np.uint8, np.uint16):
        raise BadImage(f"{found.dtype} pixels cannot be read by region; save the image with 8 or 16 bits per channel")
    if page.bitspersample not in (8, 16):
        raise BadImage(f"{page.bitspersample}-bit pixels cannot be read by region; save the image with 8 or 16 bits")
    if page.photometric not in (GREY, RGB, YCBCR):
        kind = getattr(page.photometric, "name", page.photometric)
        raise BadImage(f"the colour type {kind} cannot be read by region; save the image as RGB or grey")
    if page.photometric == YCBCR and page.compression not in JPEGS:  # other decoders do not convert to RGB
        raise BadImage("YCbCr colours can be read by region only if they are stored as JPEG; save the image as RGB")
    check_colours(page)
    if found.has_alpha and page.extrasamples[0] == PREMULTIPLIED:  # without it, the colours are too dark
        raise BadImage("premultiplied transparency cannot be read by region; save the image without transparency")
    if page.fillorder != 1 and (page.compression == NONE or page.compression in DEFLATE):
        raise BadImage(
            "pixels whose bits are in reverse order cannot be read by region; save the image with FillOrder 1"
        )
    if page.tags.valueof(ORIENTATION, 1) not in (0, 1):
        raise BadImage("rotated TIFFs cannot be read by region; save the image upright")
    if not 1 <= found.channels <= LARGEST_CHANNELS:
        raise BadImage(f"{found.channels} channels; at most {LARGEST_CHANNELS} are supported")
    _check_stored(page)
    segment = _segment_bytes(page)
    if segment > LARGEST_SEGMENT_BYTES and not is_read_by_row(page):
        what = "tiles" if page.is_tiled else "strips"
        raise BadImage(f"{what} of {segment / 1e6:,.0f} MB cannot be read by region; save the image with smaller tiles")
    if page.compression != NONE and page.compression not in DEFLATE and page.predictor not in (1, 2, 3):
        raise BadImage(f"predictor {page.predictor} is not supported")
    if page.compression != NONE and page.compression not in DEFLATE:
        _check_codec(page)
    elif page.predictor not in (NO_PREDICTOR, HORIZONTAL):
        raise BadImage(f"predictor {page.predictor} is not supported; save the image with deflate and predictor 2")


def _check_stored(page: Any) -> None:
    """Raise BadImage if a page stores too little for the size in its header, which would need a huge plan."""
    counts, needed, most = page.databytecounts, _pixel_bytes(page), MOST_EXPANSION.get(int(page.compression), 0)
    if most and all(counts) and most * sum(counts) < needed:  # a count of 0 is a part that a sparse file leaves out
        kind, than = ("pixels", "instead of") if page.compression == NONE else ("compressed pixels", "for")
        raise BadImage(f"contains {sum(counts):,} bytes of {kind} {than} {needed:,} bytes; the file is damaged")
    _, _, across, down = grid_of(page)
    num_segments = across * down * (page.samplesperpixel if page.planarconfig == 2 else 1)
    if page.compression not in (NONE, OLD_JPEG) and len(counts) < num_segments:
        what = "tiles" if page.is_tiled else "strips"
        raise BadImage(f"contains {len(counts):,} {what} instead of {num_segments:,}; the file is damaged")


def _check_codec(page: Any) -> None:
    try:
        import imagecodecs  # noqa: F401
    except ImportError:
        name = getattr(page.compression, "name", page.compression)
        raise BadImage(f"{name} compression needs the package imagecodecs: pip install 'paceline[slides]'") from None


def is_read_by_row(page: Any) -> bool:
    """Return whether a page has uncompressed strips that are too large to be read as a whole."""
    is_raw = page.compression == NONE and page.predictor == NO_PREDICTOR
    return is_raw and not page.is_tiled and _segment_bytes(page) > LARGEST_WHOLE_STRIP_BYTES


def _pixel_bytes(page: Any) -> int:
    """Return the size of an uncompressed page."""
    return int(page.imagelength) * int(page.imagewidth) * int(page.samplesperpixel) * int(page.bitspersample) // 8


def _segment_bytes(page: Any) -> int:
    """Return the size of a decoded tile or strip."""
    height, width, _, _ = grid_of(page)
    return int(height * width * samples_per_segment(page) * page.dtype.itemsize)


def samples_per_segment(page: Any) -> int:
    """Return the number of samples of a pixel that are stored in the same tile or strip."""
    return 1 if page.planarconfig == 2 else int(page.samplesperpixel)


def grid_of(page: Any) -> tuple[int, int, int, int]:
    """Return the height and width of a page's tiles or strips, and their number across and down."""
    if page.is_tiled:
        height, width = page.tilelength, page.tilewidth
    else:
        height, width = min(page.rowsperstrip, page.imagelength), page.imagewidth
    if not height or not width:
        raise BadImage("damaged: the size of the tiles is 0")
    return height, width, -(-page.imagewidth // width), -(-page.imagelength // height)


def microns_per_px(file: Any, page: Any) -> float:
    """Return the size of a square pixel at full resolution; 0 if it is unknown."""
    stated = re.search(r"MPP\s*=\s*([\d.]+)", page.description) if page.is_svs else None
    if stated:
        return float(stated[1])
    if file.is_ome:
        across, down = (_ome_microns(file.ome_metadata or "", side) for side in "XY")
        return across if not down or math.isclose(across, down, rel_tol=0.01) else 0.0  # only square pixels
    try:
        numerator, denominator = page.tags.valueof(282, (0, 1))
        return MICRONS_PER_UNIT.get(page.tags.valueof(296, 2), 0.0) * denominator / numerator if numerator else 0.0
    except (TypeError, ValueError, ZeroDivisionError):
        return 0.0


def _ome_microns(xml: str, side: str) -> float:
    """Return the size of a pixel along one side; 0 if it is unknown."""
    physical = re.search(rf'PhysicalSize{side}="([\d.eE+-]+)"', xml)
    unit = re.search(rf'PhysicalSize{side}Unit="([^"]*)"', xml)
    return float(physical[1]) if physical and (not unit or unit[1] in ("µm", "um")) else 0.0


def magnification(page: Any) -> float:
    """Return the magnification of the objective; 0 if it is unknown."""
    stated = re.search(r"AppMag\s*=\s*([\d.]+)", page.description) if page.is_svs else None
    return float(stated[1]) if stated else 0.0
