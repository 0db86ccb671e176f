"""Opens an image file that is read by region, with the reader for its format."""

from __future__ import annotations

from pathlib import Path

from paceline.images.decode import BadImage
from paceline.images.regions.region_image import RegionImage
from paceline.images.regions.slide_image import SlideImage, is_slide
from paceline.images.regions.tiff_image import TiffImage

TIFF_SUFFIXES = (".tif", ".tiff", ".btf", ".tf8")


def can_be_read_by_region(path: Path) -> bool:
    """Return whether a file has the suffix of a TIFF or a whole slide."""
    return is_slide(path) or path.suffix.lower() in TIFF_SUFFIXES


def open_region_image(path: Path) -> RegionImage:
    """Open a TIFF or a whole slide; raise BadImage if it cannot be read by region."""
    try:
        return SlideImage(path) if is_slide(path) else TiffImage(path)
    except OSError as error:
        raise BadImage(error.strerror or str(error)) from error
