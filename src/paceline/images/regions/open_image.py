"""Opens image files that are read by region, with the reader for their format."""

from __future__ import annotations

from pathlib import Path

from paceline.images.decode import BadImage, TooLarge
from paceline.images.readers import image_size
from paceline.images.regions.region_image import RegionImage
from paceline.images.regions.slide_image import SlideImage, is_slide
from paceline.images.regions.tiff_image import TiffImage, is_small_tiff
from paceline.images.regions.whole_image import WholeImage
from paceline.images.size_limit import PIXEL_LIMIT, unlimited
from paceline.images.tiff_integrity import TIFF_SUFFIXES


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
        if not can_be_read_by_region(path):
            height, width = image_size(path, unlimited)
            return height * width > PIXEL_LIMIT
        with open_region_image(path) as image:
            return image.levels[0].height * image.levels[0].width > PIXEL_LIMIT
    except TooLarge:
        return True
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
