"""Reads whole slides (SVS and others) by region with openslide; needs the extra `slides`."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np

from paceline.images.decode import BadImage
from paceline.images.regions.region_image import Box, Level, Pixels, RegionFormat, RegionImage
from paceline.images.regions.tiff_image import TiffImage

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
        openslide = _load_openslide(path)
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


def _load_openslide(path: Path) -> ModuleType:
    try:
        import openslide
    except ImportError:
        raise BadImage(f"{path.suffix} files need the package openslide: pip install 'paceline[slides]'") from None
    module: ModuleType = openslide
    return module


def _number(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:
        return 0.0
