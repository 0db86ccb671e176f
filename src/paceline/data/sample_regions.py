"""Samples that are read by region, because their images are too large to be decoded as a whole."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from paceline.contracts.pixel_format import EIGHT_BITS
from paceline.data.crop import Window
from paceline.data.file_lists import unreadable
from paceline.data.source import Sample
from paceline.images.decode import BadImage
from paceline.images.readers import ImageReader
from paceline.images.regions.open_image import open_any_image
from paceline.images.regions.region_image import Box, RegionImage
from paceline.images.size_limit import PIXEL_LIMIT


class RegionField(NamedTuple):
    """The place of a sample's field in a file."""

    path: Path
    size: tuple[int, int]  # height and width of the image in the file
    left: int = 0  # first column of the field, if the file is a row of panels
    scale: int = 1  # how many pixels of the sample's "image" a pixel of this field covers, along one side


class SampleRegions:
    """The images of one sample. Regions can be read by several threads at once. Close it after use.

    Images that are decoded as a whole must fit in the free memory, divided among `num_sharing` processes.
    """

    def __init__(self, fields: dict[str, RegionField], reader: ImageReader, num_sharing: int = 1) -> None:
        self._fields, self._reader, self._stack = fields, reader, ExitStack()
        self._images: dict[Path, RegionImage] = {}
        self._arrays: dict[Path, NDArray[Any]] = {}  # images that are not huge
        channels = reader.channels if reader.pixel_format == EIGHT_BITS else 0  # as for whole images
        for field in fields.values():
            if field.path in self._images or field.path in self._arrays:
                continue
            try:
                if field.size[0] * field.size[1] > PIXEL_LIMIT:
                    image = open_any_image(field.path, num_sharing, channels)
                    self._images[field.path] = self._stack.enter_context(image)
                else:
                    self._arrays[field.path] = reader.arrange(reader.decode(field.path), 0)
            except BadImage as error:
                self.close()
                raise unreadable(field.path, error) from error

    def read(self, window: Window) -> Sample:
        """Return every field of the sample inside a window of its "image"."""
        return {name: self._read(field, window) for name, field in self._fields.items()}

    def close(self) -> None:
        """Close all files."""
        self._stack.close()

    def __enter__(self) -> SampleRegions:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, field: RegionField, window: Window) -> NDArray[Any]:
        top, left, height, width = (side // field.scale for side in window)
        left += field.left
        if field.path in self._arrays:
            return self._arrays[field.path][top : top + height, left : left + width]
        image = self._images[field.path]
        try:
            return self._reader.from_region(image.read(0, Box(top, left, height, width)), image.format)
        except BadImage as error:
            raise unreadable(field.path, error) from error
