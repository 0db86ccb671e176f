"""Photographs made worse on purpose, as pairs: blurred, then noisy, then compressed as JPEG, by the settings.

What happens to a picture follows from `degrade_seed`, the split and the picture's number alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from zlib import crc32

import numpy as np
from PIL import Image, ImageFilter

from paceline.config.photos_settings import PhotosSettings
from paceline.config.settings import SEEDS, setting
from paceline.core.errors import UserError
from paceline.data.source import Encoded, Sample
from paceline.data.sources.photos import Photos


class Degraded(Photos):
    """The worse picture is "image", the photograph is "target"."""

    @dataclass(frozen=True)
    class Settings(PhotosSettings):
        """What is done to a photograph, besides where it lies."""

        degrade_blur: float = setting(0.0, "each picture is blurred by half to all of so many pixels", at_least=0)
        degrade_noise: float = setting(25.0, "strength of the noise in grey levels of 255", at_least=0)
        degrade_jpeg: int = setting(0, "quality of a JPEG compression; 0 is none", at_least=0, at_most=95)
        degrade_seed: int = setting(0, "of blur and noise, apart from the run's seed", at_least=0, below=SEEDS)

    def __init__(self, split: str, settings: Settings) -> None:
        self.blur, self.noise, self.jpeg = settings.degrade_blur, settings.degrade_noise, settings.degrade_jpeg
        self.key = [settings.degrade_seed, crc32(split.encode())]
        if not (self.blur or self.noise or self.jpeg):
            raise UserError("degraded: give degrade_blur, degrade_noise or degrade_jpeg above 0")
        if settings.low_root or settings.test_low_root:
            raise UserError("degraded: makes its pictures itself; --low-root is for --data photos")
        super().__init__(split, settings)

    def read(self, index: int) -> Sample:
        photo = super().read(index)["image"]
        return {"image": self._degrade(photo, index), "target": photo}

    def encoded(self, index: int) -> Encoded | None:
        return None

    def _degrade(self, photo: np.ndarray, index: int) -> np.ndarray:
        chance = np.random.Generator(np.random.Philox(np.random.SeedSequence([*self.key, index])))
        grey = photo.shape[-1] == 1
        picture = Image.fromarray(photo[..., 0] if grey else photo)
        if self.blur:
            picture = picture.filter(ImageFilter.GaussianBlur(self.blur * (0.5 + 0.5 * chance.random())))
        if self.noise:
            values = np.asarray(picture, dtype=np.float32)
            values = values + self.noise * chance.standard_normal(values.shape, dtype=np.float32)
            picture = Image.fromarray(values.round().clip(0, 255).astype(np.uint8))
        if self.jpeg:
            buffer = BytesIO()
            picture.save(buffer, "JPEG", quality=self.jpeg)
            picture = Image.open(buffer)
        worse = np.array(picture)
        return worse[..., np.newaxis] if grey else worse
