"""Decides which images of a stored sample are used and how, and turns decoded images into a sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.config.settings import RunSettings
from paceline.contracts.data_spec import INPUT, LEFT_OUT, output_panels
from paceline.core.errors import UserError
from paceline.data.panel_names import TARGET
from paceline.data.shards.samples import LABEL, SampleTable
from paceline.data.source import Sample
from paceline.images.readers import Decoded, ImageReader

LOW = "low"  # low-resolution version of the image


@dataclass(frozen=True)
class SampleLayout:
    """How the images of a sample are used."""

    fields: tuple[str, ...]  # the images that are read
    row: tuple[str, ...]  # names of the panels from left to right, if "image" is a row of panels
    panels: tuple[str, ...]  # fields to predict from the image; empty except for panels
    makes_squares: bool  # whether images are cropped to squares, as in the source `folder`
    side: int  # height and width of the square images; 0 keeps the size of each image
    scale: int  # ratio of "image" to "low"; 0 if there is no field "low"

    @classmethod
    def of(cls, table: SampleTable, settings: RunSettings, names: tuple[str, ...]) -> SampleLayout:
        """Choose the layout for the samples in a table; `names` are the panels in the settings."""
        stored = list(table.images)
        fields, row = stored, tuple(names) if stored == [INPUT] else ()
        if names and not row:
            fields = [name for name in names if name != LEFT_OUT]
            unknown = [name for name in fields if name not in stored]
            if unknown:
                raise UserError(
                    f"panels={','.join(names)}: no panel {unknown[0]!r}; the shards have {', '.join(stored)}"
                )
        others = set(fields) - {INPUT, TARGET, LOW}
        squares = not row and fields == [INPUT] and (table.labels is not None or not settings.crop)
        if LOW in fields and settings.size:
            raise UserError(f"size={settings.size}: not supported with low-resolution images; use --set size=0")
        return cls(
            tuple(fields),
            row,
            output_panels(row or (fields if names or others else ())),
            squares,
            settings.size or (int(table.images[INPUT].pixels[0].min()) if squares else 0),
            _find_scale(table) if LOW in fields else 0,
        )

    def image_sizes(self, table: SampleTable) -> NDArray[np.int64]:
        """Return the height and width of each sample's "image", as an [n, 2] array."""
        if self.scale:
            return table.images[LOW].pixels * self.scale
        return table.images[INPUT].pixels // (1, max(1, len(self.row)))

    def problems(self, table: SampleTable) -> dict[int, str]:
        """Return, by row, why a sample cannot be used: the sizes of its images do not fit together."""
        height, width = table.images[INPUT].pixels.T
        found: dict[int, str] = {}
        if self.row:
            count = len(self.row)
            squares = np.where(width % height == 0, width // height, 0)
            fits = (width % count == 0) & ((count == 2) | (squares == 0) | (squares == count))
            for index in np.flatnonzero(~fits):
                found[int(index)] = f"{width[index]}×{height[index]} pixels is not a row of {count} equal panels"
        for field in self.fields:
            other_height, other_width = table.images[field].pixels.T
            fits = (other_height == height) & (other_width == width)
            if field == LOW:
                fits = _ratios(table) == self.scale
            for index in np.flatnonzero(~fits):
                size = f"{other_width[index]}×{other_height[index]}"
                found[int(index)] = f"{INPUT} is {width[index]}×{height[index]} pixels but {field} is {size}"
        return found

    def arrange(self, images: Mapping[str, Decoded], label: NDArray[np.int64] | None, reader: ImageReader) -> Sample:
        """Return a sample, given its images, as decoded by `reader`, and its label, if any."""
        if self.row:
            image = images[INPUT]
            width = image.width // len(self.row)
            parts = (image.crop((left, 0, left + width, image.height)) for left in range(0, image.width, width))
            images = {name: part for name, part in zip(self.row, parts, strict=True) if name != LEFT_OUT}
        sample = {name: reader.arrange(image, self.side) for name, image in images.items()}
        if self.scale:
            height, width = (length * self.scale for length in sample[LOW].shape[:2])
            sample[INPUT] = sample[INPUT][:height, :width]
        return sample if label is None else {**sample, LABEL: label}


def _ratios(table: SampleTable) -> NDArray[np.int64]:
    """Return the integer ratio of "image" to "low" for each sample; 0 if no ratio fits."""
    size, low = table.images[INPUT].pixels, table.images[LOW].pixels
    ratio = size[:, 0] // low[:, 0]
    fits = (ratio > 1) & (ratio == size[:, 1] // low[:, 1]) & ((size % low).max(axis=1) < ratio)
    return np.where(fits, ratio, 0)


def _find_scale(table: SampleTable) -> int:
    found = _ratios(table)
    values, counts = np.unique(found[found > 1], return_counts=True)
    if not len(values):
        raise UserError(
            f"{table.names[0]}: the image must be larger than the field {LOW!r} by a whole-number factor, such as 4"
        )
    return int(values[counts.argmax()])
