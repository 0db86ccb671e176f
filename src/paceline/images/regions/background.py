"""Finds the background of bright-field slides, which is bright and has almost no colour."""

from __future__ import annotations

import numpy as np

from paceline.images.regions.region_image import Pixels

DARKEST, MOST_COLOUR = 0.86, 0.06  # of white: the darkest background, and its largest difference between channels
LARGEST_SHARE = 0.001  # of other pixels in a background region


def is_background(pixels: Pixels) -> bool:
    """Return whether a region contains only background."""
    white = np.iinfo(pixels.dtype).max
    darkest, brightest = pixels.min(axis=-1), pixels.max(axis=-1)
    other = (darkest < DARKEST * white) | (brightest - darkest > MOST_COLOUR * white)
    return bool(other.mean() <= LARGEST_SHARE)
