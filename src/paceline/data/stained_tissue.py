"""The picture of stained tissue that ships inside scikit-image, its stains apart and a mask: no download."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
from PIL import Image

SMOOTHING_PX = 3.0


def stained_tissue() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The picture, its hematoxylin, its DAB, and where the tissue is dense, as uint8 [512, 512, 3]."""
    from skimage.color import hed2rgb, rgb2hed  # takes a moment to import
    from skimage.filters import gaussian, threshold_otsu

    with files("skimage").joinpath("data/ihc.png").open("rb") as file, Image.open(file) as opened:
        picture = np.array(opened.convert("RGB"))
    stains = rgb2hed(picture)  # Ruifrok and Johnston 2001

    def alone(stain: int) -> np.ndarray:
        kept = np.zeros_like(stains)
        kept[..., stain] = stains[..., stain]
        return np.round(hed2rgb(kept) * 255).astype(np.uint8)

    density = gaussian(-np.log10((picture + 1.0) / 256).sum(axis=-1), SMOOTHING_PX)
    mask = np.where(density > threshold_otsu(density), 255, 0).astype(np.uint8)
    return picture, alone(0), alone(2), np.repeat(mask[..., np.newaxis], 3, axis=-1)
