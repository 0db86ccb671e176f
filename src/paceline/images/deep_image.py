"""Images as arrays with any number of channels, in 8 or 16 bits or floating point."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.contracts.pixel_format import LUMA, WHITE, PixelFormat
from paceline.images.decode import BadImage, decode_full_depth
from paceline.images.planes import read_planes

GREY_AND_RGB = {1, 3}  # numbers of channels that can be converted into each other
EIGHT_TO_SIXTEEN = 257  # 255 · 257 = 65535, so white stays white


@dataclass(frozen=True, eq=False)
class DeepImage:
    """An upright image [h, w, c], with the parts of a Pillow image's interface that sources need."""

    pixels: NDArray[Any]

    @property
    def height(self) -> int:
        """The number of rows."""
        return int(self.pixels.shape[0])

    @property
    def width(self) -> int:
        """The number of columns."""
        return int(self.pixels.shape[1])

    @property
    def channels(self) -> int:
        """The number of channels."""
        return int(self.pixels.shape[2])

    def crop(self, box: tuple[int, int, int, int]) -> DeepImage:
        """Return the part between (left, top) and (right, bottom)."""
        left, top, right, bottom = box
        return DeepImage(self.pixels[top:bottom, left:right])

    def with_channels(self, channels: int) -> DeepImage:
        """Return the image with 3 channels instead of 1 (repeated), or with 1 instead of 3 (luma)."""
        if channels == self.channels:
            return self
        if self.channels == 1:
            return DeepImage(self.pixels.repeat(channels, axis=-1))
        luma = (self.pixels.astype(np.float32) @ np.array(LUMA, np.float32))[..., np.newaxis]
        return DeepImage((luma if self.pixels.dtype.kind == "f" else np.rint(luma)).astype(self.pixels.dtype))

    @classmethod
    def each(cls, images: NDArray[Any], channels: int, side: int, pixels: PixelFormat) -> NDArray[Any]:
        """Convert images [n, h, w, c] to a number of channels and, unless `side` is 0, to squares."""
        if channels == images.shape[-1] and (not side or side == images.shape[1] == images.shape[2]):
            return np.ascontiguousarray(images)
        arranged = (cls(image).with_channels(channels) for image in images)
        return np.stack([(image.squared(side, pixels) if side else image).pixels for image in arranged])

    def squared(self, side: int, pixels: PixelFormat) -> DeepImage:
        """Centre-crop a square and resize it (bicubic); values stay within the range of the format."""
        return self.fitted(side, side, pixels)

    def fitted(self, height: int, width: int, pixels: PixelFormat) -> DeepImage:
        """Centre-crop to a shape and resize (bicubic); values stay within the range. If a side is 0, keep the size."""
        if not (height and width) or (height, width) == (self.height, self.width):
            return self
        scale = min(self.height / height, self.width / width)
        inner_height, inner_width = round(scale * height), round(scale * width)
        left, top = (self.width - inner_width) // 2, (self.height - inner_height) // 2
        box = (left, top, left + inner_width, top + inner_height)
        if (inner_height, inner_width) == (height, width):
            return self.crop(box)
        planes = (Image.fromarray(plane.astype(np.float32)) for plane in np.moveaxis(self.pixels, -1, 0))
        sized = np.stack([np.asarray(one.resize((width, height), Image.Resampling.BICUBIC, box)) for one in planes], -1)
        sized = np.rint(sized) if pixels.is_integer else sized
        return DeepImage(sized.clip(pixels.low, pixels.high).astype(pixels.dtype))


def read_deep(path: Path | bytes) -> DeepImage:
    """Return an image in the data type of its file; raise BadImage if it cannot be read."""
    found = read_planes(path)
    return DeepImage(decode_full_depth(path) if found is None else found[1])


def to_format(array: NDArray[Any], pixels: PixelFormat) -> NDArray[Any]:
    """Convert an image to a pixel format; raise BadImage if it does not fit.

    Between 8 and 16 bits, white stays white. Converting to float32 keeps the values.
    """
    own = array.dtype.name
    if pixels.is_integer:
        if own not in WHITE:
            raise BadImage(f"{own} pixels instead of {pixels.dtype}; use --set pixels=float32 for such images")
        if own == "uint8" and pixels.dtype == "uint16":
            array = array.astype(np.uint16) * EIGHT_TO_SIXTEEN
        elif own == "uint16" and pixels.dtype == "uint8":
            array = ((array.astype(np.uint32) + EIGHT_TO_SIXTEEN // 2) // EIGHT_TO_SIXTEEN).astype(np.uint8)
    else:
        array = array.astype(np.float32, copy=False)
    if not pixels.is_full_range:
        _check_values(array, pixels)
    return array


def _check_values(array: NDArray[Any], pixels: PixelFormat) -> None:
    low, high = float(array.min()), float(array.max())
    if not np.isfinite([low, high]).all():  # NaN and infinity also appear in the minimum or the maximum
        raise BadImage("it contains NaN or infinite values; replace them")
    if low < pixels.low or high > pixels.high:
        raise BadImage(
            f"its values from {low:g} to {high:g} exceed value_range={pixels.low:g},{pixels.high:g}; "
            "use a larger range, or clip the image"
        )


def to_eight_bit_array(array: NDArray[Any], pixels: PixelFormat) -> NDArray[np.uint8]:
    """Return pixels on a scale from 0 to 255, as they are shown in sample images."""
    if array.dtype == np.uint8:
        return array
    levels: NDArray[np.float32] = (array.astype(np.float32) - pixels.low) * (255 / pixels.span)
    return np.rint(levels).clip(0, 255).astype(np.uint8)
