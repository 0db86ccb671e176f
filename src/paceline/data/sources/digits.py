"""1,797 handwritten digits of 8×8 pixels that ship inside scikit-learn: no download."""

from __future__ import annotations

import numpy as np
from PIL import Image

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import DataSpec
from paceline.data.fixed_split import fixed_split
from paceline.data.source import ArraySource
from paceline.images.decode import arrange_images

DEFAULT_SIZE = 32
WHITE = 16.0  # the brightest value in the dataset


class Digits(ArraySource):
    """Grey digits, 32×32 by default."""

    def __init__(self, split: str, settings: RunSettings) -> None:
        from sklearn.datasets import load_digits  # takes a second to import

        digits = load_digits()
        chosen = fixed_split(len(digits.images), split)
        grey = np.round(digits.images[chosen] * (255 / WHITE)).astype(np.uint8)[..., np.newaxis]
        images = arrange_images(grey, settings, Image.Resampling.BILINEAR, DEFAULT_SIZE)
        _, height, width, channels = images.shape
        names = tuple(str(digit) for digit in range(10))
        super().__init__(
            {"image": images, "label": digits.target[chosen].astype(np.int64)},
            DataSpec(channels, height, width, num_classes=10, class_names=names, flip_allowed=False),
        )
