"""The image of stained tissue that ships inside scikit-image, its separated stains and a mask: no download."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SMOOTHING_PX = 3.0


class StainedTissue(NamedTuple):
    """Aligned images of the same tissue, each uint8 [512, 512, 3]."""

    image: NDArray[np.uint8]
    hematoxylin: NDArray[np.uint8]
    dab: NDArray[np.uint8]
    mask: NDArray[np.uint8]  # white where the tissue is dense


def stained_tissue() -> StainedTissue:
    """Return the image, and the stains and mask computed from it."""
    from skimage.color import hed2rgb, rgb2hed  # takes a moment to import
    from skimage.filters import gaussian, threshold_otsu

    with files("skimage").joinpath("data/ihc.png").open("rb") as file, Image.open(file) as opened:
        image = np.array(opened.convert("RGB"))
    stains: NDArray[Any] = rgb2hed(image)  # Ruifrok and Johnston 2001

    def alone(stain: int) -> NDArray[np.uint8]:
        kept = np.zeros_like(stains)
        kept[..., stain] = stains[..., stain]
        colours: NDArray[Any] = np.round(hed2rgb(kept) * 255)
        return colours.astype(np.uint8)

    absorbed = -np.log10((image + 1.0) / 256).sum(axis=-1)
    density: NDArray[Any] = gaussian(absorbed, SMOOTHING_PX)  # type: ignore[no-untyped-call, unused-ignore]
    threshold: float = threshold_otsu(density)  # type: ignore[no-untyped-call, unused-ignore]
    mask = np.where(density > threshold, 255, 0).astype(np.uint8)
    return StainedTissue(image, alone(0), alone(2), np.repeat(mask[..., np.newaxis], 3, axis=-1))
