"""A bundled image of stained tissue, with its separated stains and a mask."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.data.bundled import FOLDER


class StainedTissue(NamedTuple):
    """Aligned images of the same tissue, each uint8 [512, 512, 3]."""

    image: NDArray[np.uint8]
    hematoxylin: NDArray[np.uint8]
    dab: NDArray[np.uint8]
    mask: NDArray[np.uint8]  # white where the tissue is dense


def stained_tissue() -> StainedTissue:
    """Return the image, and the stains and mask computed from it."""
    return StainedTissue(*map(_read, ("ihc.webp", "ihc_hematoxylin.webp", "ihc_dab.webp", "ihc_mask.png")))


def _read(name: str) -> NDArray[np.uint8]:
    with Image.open(FOLDER / name) as image:
        return np.array(image.convert("RGB"))
