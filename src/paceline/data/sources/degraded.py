"""Photographs made worse on purpose, as pairs: blurred, then noisy, then compressed as JPEG, by the settings.

What happens to a picture follows from `degrade_seed`, the split and the picture's number alone.
"""

from __future__ import annotations

from io import BytesIO
from zlib import crc32

import numpy as np
from PIL import Image, ImageFilter

from paceline.data.source import Encoded, Sample
from paceline.data.sources.photos import Photos
from paceline.errors import UserError
from paceline.settings import RunSettings


class Degraded(Photos):
    """The worse picture is "image", the photograph is "target"."""

    def __init__(self, split: str, settings: RunSettings) -> None:
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
