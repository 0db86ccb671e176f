"""The interface of images that are read by region, independent of the file format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.images.decode import BadImage
from paceline.images.rectangles import Box

Pixels = NDArray[Any]  # uint8 or uint16 [h, w, c]


@dataclass(frozen=True)
class Level:
    """One resolution of an image."""

    height: int
    width: int
    downsample: float  # how many pixels of the full resolution a pixel covers, along one side


@dataclass(frozen=True)
class RegionFormat:
    """The pixels of an image, which are the same at every level."""

    channels: int
    dtype: np.dtype[Any]
    microns_per_px: float = 0.0  # at full resolution; 0 if unknown
    magnification: float = 0.0  # of the objective; 0 if unknown
    profile: bytes = b""
    note: str = ""
    has_alpha: bool = False  # whether the file has an alpha channel, which is not one of the channels


class RegionImage(ABC):
    """An image whose regions can be read, by several threads at once. Close it after use."""

    levels: tuple[Level, ...]
    format: RegionFormat
    only_by_region = False  # whether no other reader can decode the file

    @abstractmethod
    def read(self, level: int, box: Box) -> Pixels:
        """Return a region that lies inside a level; raise BadImage if its pixels are damaged."""

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def __enter__(self) -> RegionImage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def choose_level(image: RegionImage, level: int, magnification: float) -> int:
    """Return the level with the given number or magnification; raise BadImage if there is none."""
    if not magnification:
        if level >= len(image.levels):
            raise BadImage(f"--level {level}: the image has no such level; the last one is {len(image.levels) - 1}")
        return level
    objective = image.format.magnification
    if not objective:
        raise BadImage(f"--magnification {magnification:g}: the file does not state its magnification; use --level")
    available = [objective / one.downsample for one in image.levels]
    nearest = min(range(len(available)), key=lambda number: abs(available[number] / magnification - 1))
    if abs(available[nearest] / magnification - 1) > 0.05:
        listed = ", ".join(f"{one:.3g}" for one in available)
        raise BadImage(f"--magnification {magnification:g}: the image has magnifications {listed}; choose one of them")
    return nearest


def choose_box(level: Level, region: Box | None) -> Box:
    """Return the requested part of a level, or all of it; raise BadImage if it is not inside the level."""
    if region is None:
        return Box(0, 0, level.height, level.width)
    if region.bottom > level.height or region.right > level.width:
        asked = f"{region.left},{region.top},{region.width},{region.height}"
        raise BadImage(f"--region {asked}: is outside the image, which has {level.width}×{level.height} pixels")
    return region
