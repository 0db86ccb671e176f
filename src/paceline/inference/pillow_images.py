"""Pillow images that users pass to a model, and that it returns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image

from paceline.core.errors import UserError
from paceline.images.decode import BadImage, plain_image
from paceline.inference.composer import Composition


def type_name(thing: object, in_a_list: bool) -> str:
    """Return the name of a value's type, for an error message."""
    return f"{type(thing).__name__}{' in a list' if in_a_list else ''}"


def plain(image: object) -> Image.Image:
    """Return an upright 8-bit grey or RGB image; raise UserError if the image cannot be used."""
    if not isinstance(image, Image.Image):
        hint = "convert it with Image.fromarray" if hasattr(image, "shape") else "open files with Image.open(FILE)"
        raise UserError(f"expected a Pillow image, not {type_name(image, False)}; {hint}")
    if 0 in image.size:
        raise UserError(f"an image cannot be used: it has no pixels ({image.width}×{image.height})")
    try:
        return plain_image(image)
    except BadImage as problem:
        raise UserError(f"an image cannot be used: {problem}") from None


def pixels_of(image: object) -> npt.NDArray[np.uint8]:
    """Return an image as uint8 [h, w, 1 or 3]."""
    pixels = np.asarray(plain(image))
    return pixels if pixels.ndim == 3 else pixels[..., np.newaxis]


def as_images(composition: Composition) -> dict[str, Image.Image]:
    """Return the results for an image as Pillow images, by name."""
    return {
        name: Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        for name, pixels in composition.results().items()
    }
