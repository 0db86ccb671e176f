"""Images in formats that cannot be read by region: they are decoded as a whole, and their regions are copied."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from paceline.images.decode import opened, to_eight_bits, turn_upright
from paceline.images.integrity import load_undamaged
from paceline.images.pillow_file import SIXTEEN_BIT_MODES, to_array
from paceline.images.regions.region_image import Box, Level, Pixels, RegionFormat, RegionImage
from paceline.images.size_limit import memory_limit


class WholeImage(RegionImage):
    """A PNG, JPEG or other image as 8-bit grey, 16-bit grey or 8-bit RGB, limited by the free memory."""

    def __init__(self, path: Path, num_sharing: int = 1) -> None:
        """Decode an image. The free memory is divided among `num_sharing` processes that decode it."""
        with opened(path, partial(memory_limit, num_sharing=num_sharing)) as (image, file):
            load_undamaged(image, file)
            upright = turn_upright(image)
            if upright.mode in SIXTEEN_BIT_MODES:
                self._pixels = to_array(upright, lambda strip: strip).astype(np.uint16, copy=False)
            else:
                self._pixels = to_array(upright, to_eight_bits)
        height, width, channels = self._pixels.shape
        self.levels = (Level(height, width, 1.0),)
        self.format = RegionFormat(channels, self._pixels.dtype)

    def read(self, level: int, box: Box) -> Pixels:
        """Return a region, [h, w, c]."""
        return self._pixels[box.top : box.top + box.height, box.left : box.left + box.width]

    def close(self) -> None:
        """Do nothing, since the file is closed after decoding."""
