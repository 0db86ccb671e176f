"""Photographs paired with degraded copies. The `degrade_…` settings add blur, then noise, then JPEG compression.

The degradation of an image depends only on the settings, the split and the image's index.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from io import BytesIO
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from paceline.config.flags import PhotoSettings
from paceline.config.settings import SEEDS, setting
from paceline.core.errors import UserError
from paceline.data.source import Encoded, Sample
from paceline.data.sources.photos import Photos
from paceline.images.decode import to_pillow

NOISE_LEVELS = 255.0  # the noise strength is on a scale from 0 to 255
REACH_IN_SIGMAS = 3.0  # radius of the Gaussian kernel


def gaussian_blur(image: NDArray[np.float32], sigma: float) -> NDArray[np.float32]:
    """Blur the rows and columns of an image [h, w, c], repeating its border pixels."""
    reach = max(1, math.ceil(REACH_IN_SIGMAS * sigma))
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    weights = (weights / weights.sum()).astype(np.float32)
    for axis in (0, 1):
        margins = [(reach, reach) if dimension == axis else (0, 0) for dimension in range(3)]
        padded, length = np.pad(image, margins, mode="edge"), image.shape[axis]
        parts = (padded.take(range(start, start + length), axis) for start in range(len(weights)))
        image = np.sum([weight * part for weight, part in zip(weights, parts, strict=True)], axis=0, dtype=np.float32)
    return image


class Degraded(Photos):
    """Samples with the degraded photograph as "image" and the original as "target"."""

    @dataclass(frozen=True)
    class Settings(PhotoSettings):
        """The kinds and strengths of degradation."""

        degrade_blur: float = setting(
            0.0, "maximum sigma of the Gaussian blur in pixels (the minimum is half that); 0: no blur", at_least=0
        )
        degrade_noise: float = setting(
            25.0,
            "standard deviation of the noise, on a scale from 0 (black) to 255 (white) for any pixel type; 0: no noise",
            at_least=0,
        )
        degrade_jpeg: int = setting(0, "JPEG quality; 0: no JPEG compression", at_least=0, at_most=95)
        degrade_seed: int = setting(0, "seed for blur and noise, independent of --seed", at_least=0, below=SEEDS)

    reads_regions = False  # the degradation of an image depends on all of its pixels

    def __init__(self, split: str, settings: Settings) -> None:
        self.blur, self.noise, self.jpeg = settings.degrade_blur, settings.degrade_noise, settings.degrade_jpeg
        self.key = [settings.degrade_seed, crc32(split.encode())]
        if not (self.blur or self.noise or self.jpeg):
            raise UserError("--data degraded: no degradation; set degrade_blur, degrade_noise or degrade_jpeg above 0")
        if settings.low_root or settings.test_low_root or settings.low_suffix:
            raise UserError(
                "--low-root, low_suffix: not supported by --data degraded, which degrades the images itself; "
                "remove these settings"
            )
        super().__init__(split, settings)
        self.is_plain = self.spec.dtype == "uint8" and self.spec.channels in (1, 3)
        if self.jpeg and not self.is_plain:
            raise UserError(
                f"degrade_jpeg={self.jpeg}: JPEG files have 8 bits and 1 or 3 channels, but the images are "
                f"{self.spec.pixel_format} with {self.spec.channels} channels; use --set degrade_jpeg=0"
            )

    def read(self, index: int) -> Sample:
        photo = super().read(index)["image"]
        return {"image": self._degrade(photo, index), "target": photo}

    def encoded(self, index: int) -> Encoded | None:
        return None

    def originals(self, index: int) -> Encoded | None:
        return None

    def _degrade(self, photo: NDArray[Any], index: int) -> NDArray[Any]:
        chance = np.random.Generator(np.random.Philox(np.random.SeedSequence([*self.key, index])))
        pixels, values = self.spec.pixel_format, photo
        if self.blur:
            sigma = self.blur * (0.5 + 0.5 * chance.random())
            if self.is_plain:
                blurred = to_pillow(photo).filter(ImageFilter.GaussianBlur(sigma))
                values = np.asarray(blurred).reshape(photo.shape)
            else:
                values = gaussian_blur(photo.astype(np.float32), sigma)
        if self.noise:
            strength = np.float32(self.noise * pixels.span / NOISE_LEVELS)
            values = values.astype(np.float32) + strength * chance.standard_normal(photo.shape, dtype=np.float32)
        values = values.round() if pixels.is_integer else values
        degraded: NDArray[Any] = values.clip(pixels.low, pixels.high).astype(pixels.dtype)
        if not self.jpeg:
            return degraded
        buffer = BytesIO()
        to_pillow(degraded).save(buffer, "JPEG", quality=self.jpeg)
        return np.array(Image.open(buffer)).reshape(photo.shape)
