"""1,797 handwritten digits of 8×8 pixels. They ship with Paceline, so nothing is downloaded."""

from __future__ import annotations

import numpy as np
from PIL import Image

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.data.bundled import FOLDER
from paceline.data.file_lists import fixed_split
from paceline.data.source import ArraySource
from paceline.images.decode import arrange_images

DEFAULT_SIZE = 32
WHITE = 16.0  # the brightest value in the dataset


class Digits(ArraySource):
    """Grey images of digits, resized to 32×32 pixels by default."""

    def __init__(self, split: str, settings: RunSettings) -> None:
        if settings.data_root not in ("", RunSettings.data_root):
            raise UserError(
                f"--data-root {settings.data_root}: not used by --data digits, which ships with Paceline; use "
                "--data folder for your own images, or leave --data-root out"
            )
        with np.load(FOLDER / "digits.npz") as digits:
            pixels, labels = digits["images"], digits["labels"]
        chosen = fixed_split(len(pixels), split)
        grey = np.round(pixels[chosen] * (255 / WHITE)).astype(np.uint8)[..., np.newaxis]
        images = arrange_images(grey, settings, Image.Resampling.BILINEAR, DEFAULT_SIZE)
        _, height, width, channels = images.shape
        names = tuple(str(digit) for digit in range(10))
        super().__init__(
            {"image": images, "label": labels[chosen].astype(np.int64)},
            DataSpec(channels, height, width, num_classes=10, class_names=names, flip_allowed=False),
        )
