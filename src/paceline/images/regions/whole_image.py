"""Images in formats that cannot be read by region: they are decoded as a whole, and their regions are copied."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.images.decode import opened, to_eight_bits, turn_upright
from paceline.images.integrity import load_undamaged
from paceline.images.pillow_file import to_array
from paceline.images.regions.region_image import Box, Level, Pixels, RegionFormat, RegionImage
from paceline.images.size_limit import memory_limit


class WholeImage(RegionImage):
    """A PNG, JPEG or other image as 8-bit grey or RGB, limited by the free memory."""

    def __init__(self, path: Path) -> None:
        with opened(path, memory_limit) as (image, file):
            load_undamaged(image, file)
            self._pixels = to_array(turn_upright(image), to_eight_bits)
        height, width, channels = self._pixels.shape
        self.levels = (Level(height, width, 1.0),)
        self.format = RegionFormat(channels, np.dtype(np.uint8))

    def read(self, level: int, box: Box) -> Pixels:
        """Return a region, [h, w, c]."""
        return self._pixels[box.top : box.top + box.height, box.left : box.left + box.width]

    def close(self) -> None:
        """Do nothing, since the file is closed after decoding."""
