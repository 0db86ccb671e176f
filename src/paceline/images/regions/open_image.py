"""Opens image files that are read by region, with the reader for their format."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from paceline.images.decode import PIXEL_LIMIT, BadImage, decode_full_depth, memory_limit, unlimited
from paceline.images.readers import image_size
from paceline.images.rectangles import Box
from paceline.images.regions.region_image import Level, Pixels, RegionFormat, RegionImage
from paceline.images.regions.tiff_image import TiffImage, is_small_tiff
from paceline.images.tiff import TIFF_SUFFIXES


class WholeImage(RegionImage):
    """A PNG, JPEG or other image as 8-bit grey, 16-bit grey or 8-bit RGB, limited by the free memory."""

    def __init__(self, path: Path, num_sharing: int = 1) -> None:
        """Decode an image. The free memory is divided among `num_sharing` processes that decode it."""
        limit = partial(memory_limit, num_sharing=num_sharing)
        self._pixels = decode_full_depth(path, limit, may_lose_bits=True)
        height, width, channels = self._pixels.shape
        self.levels = (Level(height, width, 1.0),)
        self.format = RegionFormat(channels, self._pixels.dtype)

    def read(self, level: int, box: Box) -> Pixels:
        """Return a region, [h, w, c]."""
        return self._pixels[box.slices]

    def close(self) -> None:
        """Do nothing, since the file is closed after decoding."""


SLIDE_SUFFIXES = (".svs", ".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".svslide")  # only SVS is tested
COLOURS = 3


class SlideImage(RegionImage):
    """A slide that openslide recognises. Areas that were not scanned are white.

    openslide takes positions in pixels of the full resolution. If a level's downsampling factor is not an integer, as
    usual in SVS files, these lie between the pixels of the level, and openslide interpolates. Such levels are therefore
    read as TIFF, if possible. openslide also accepts some truncated tiles whose rest is filled with zeros, and returns
    grey, so the end of each tile is checked in the TIFF.
    """

    def __init__(self, path: Path) -> None:
        try:
            import openslide
        except ImportError:
            raise BadImage(f"{path.suffix} files need the package openslide: pip install 'paceline[slides]'") from None
        try:
            self._slide = openslide.OpenSlide(str(path))
            properties = self._slide.properties
            self.levels = tuple(
                Level(height, width, downsample)
                for (width, height), downsample in zip(
                    self._slide.level_dimensions, self._slide.level_downsamples, strict=True
                )
            )
            profile = self._slide.color_profile if hasattr(self._slide, "color_profile") else None
            self.format = RegionFormat(
                COLOURS,
                np.dtype(np.uint8),
                _number(properties.get("openslide.mpp-x")),
                _number(properties.get("openslide.objective-power")),
                profile.tobytes() if profile is not None else b"",
            )
        except Exception as error:
            raise BadImage(f"openslide cannot read this slide: {' '.join(str(error).split())}") from error
        self._tiff = _as_tiff(path, self.levels)

    def read(self, level: int, box: Box) -> Pixels:
        """Return a region of a level, [h, w, 3]."""
        downsample = self.levels[level].downsample
        if self._tiff and not downsample.is_integer() and self._tiff.has_all_tiles(level):
            return self._tiff.read(level, box)
        if self._tiff:
            self._tiff.check_ends(level, box)
        corner = round(box.left * downsample), round(box.top * downsample)
        try:
            region = np.asarray(self._slide.read_region(corner, level, (box.width, box.height)))
        except Exception as error:
            raise BadImage(f"damaged: {' '.join(str(error).split())}") from error
        colours, alpha = region[..., :3], region[..., 3:].astype(np.uint16)
        if (alpha == 255).all():
            return np.ascontiguousarray(colours)
        blended: Pixels = ((colours * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)
        return blended

    def close(self) -> None:
        """Close the file."""
        self._slide.close()
        if self._tiff:
            self._tiff.close()


def is_slide(path: Path) -> bool:
    """Return whether a file has the suffix of a whole slide."""
    return path.suffix.lower() in SLIDE_SUFFIXES


def _as_tiff(path: Path, levels: tuple[Level, ...]) -> TiffImage | None:
    """Return the slide as a TIFF; None if it cannot be read as one with the same levels."""
    try:
        tiff = TiffImage(path)
    except (BadImage, OSError):
        return None
    sizes = [(one.height, one.width) for one in levels]
    is_alike = tiff.format.channels == COLOURS and tiff.format.dtype == np.uint8
    if is_alike and sizes == [(one.height, one.width) for one in tiff.levels]:
        return tiff
    tiff.close()
    return None


def _number(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0


def can_be_read_by_region(path: Path) -> bool:
    """Return whether a file has the suffix of a TIFF or a whole slide."""
    return is_slide(path) or path.suffix.lower() in TIFF_SUFFIXES


def open_region_image(path: Path, channels: int = 0) -> RegionImage:
    """Open a TIFF or a whole slide; raise BadImage if it cannot be read by region.

    For networks with 1 or 3 `channels`, only the colours of an RGB image are read.
    """
    try:
        return SlideImage(path) if is_slide(path) else TiffImage(path, channels)
    except OSError as error:
        raise BadImage(error.strerror or str(error)) from error


def open_any_image(path: Path, num_sharing: int = 1, channels: int = 0) -> RegionImage:
    """Open an image of any format; one that cannot be read by region is decoded, if it fits in memory.

    The free memory is divided among `num_sharing` processes.
    """
    return open_region_image(path, channels) if can_be_read_by_region(path) else WholeImage(path, num_sharing)


def is_huge(path: Path) -> bool:
    """Return whether an image has more pixels than are processed at once; False if it cannot be read."""
    try:
        return huge_size(path) is not None
    except BadImage:
        return False


def huge_size(path: Path) -> tuple[int, int] | None:
    """Return the height and width of an image that is too large to be decoded as a sample; None if it is not.

    The free memory does not matter here, so that the same files are used on every machine. Raise BadImage if a huge
    TIFF or a whole slide cannot be read by region.
    """
    if can_be_read_by_region(path):
        try:
            with open_region_image(path) as image:
                height, width = image.levels[0].height, image.levels[0].width
        except BadImage:
            if is_small_tiff(path):  # it is not read by region, so the reason does not matter
                return None
            raise
    else:
        height, width = image_size(path, unlimited)
    return (height, width) if height * width > PIXEL_LIMIT else None
