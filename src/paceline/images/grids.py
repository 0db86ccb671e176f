"""Image layouts: grids, rows, columns, captions and animations, and the channels that they show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from paceline.core.errors import UserError
from paceline.images.decode import to_pillow

GAP_PX = 2
SMALLEST_SIDE_PX = 32  # smaller images are enlarged to make them visible
CAPTION_PX = 18
CAPTION_TEXT_PX = 12
FRAME_MS = 250
LAST_FRAME_MS = 2000
ANIMATED_SUFFIXES = (".gif", ".webp")


def grid(images: NDArray[np.uint8], columns: int = 0) -> NDArray[np.uint8]:
    """Arrange uint8 images [n, h, w, c] in a grid with gaps; if `columns` is 0, the grid is about square."""
    num, height, width, channels = images.shape
    columns = columns or math.ceil(math.sqrt(num))
    factor = max(1, SMALLEST_SIDE_PX // min(height, width))
    images = images.repeat(factor, axis=1).repeat(factor, axis=2)
    height, width = height * factor, width * factor
    rows = math.ceil(num / columns)
    whole = np.zeros((rows * (height + GAP_PX) + GAP_PX, columns * (width + GAP_PX) + GAP_PX, channels), np.uint8)
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        top, left = GAP_PX + row * (height + GAP_PX), GAP_PX + column * (width + GAP_PX)
        whole[top : top + height, left : left + width] = image
    return whole


def to_image(image: NDArray[np.uint8]) -> Image.Image:
    """Convert a uint8 [h, w, c] array to an RGB Pillow image."""
    return to_pillow(image).convert("RGB")


def captioned(image: Image.Image, text: str, *, room: bool = False) -> Image.Image:
    """Add a caption above an image. A long caption is shortened or, with `room`, the result is widened."""
    font = ImageFont.load_default(CAPTION_TEXT_PX)
    width = max(image.width, math.ceil(font.getlength(text)) + 2 * GAP_PX) if room else image.width
    while len(text) > 1 and font.getlength(text) > width - 2 * GAP_PX:
        text = text.removesuffix("…")[:-1] + "…"
    whole = Image.new("RGB", (width, image.height + CAPTION_PX), "white")
    whole.paste(image, (0, CAPTION_PX))
    ImageDraw.Draw(whole).text((GAP_PX, GAP_PX), text, fill="black", font=font)
    return whole


def side_by_side(images: Sequence[Image.Image], *, vertical: bool = False) -> Image.Image:
    """Place images side by side on a white background; with `vertical`, one below the other."""
    axis, gap = (1, 2 * GAP_PX) if vertical else (0, 4 * GAP_PX)
    size = [max(sides) for sides in zip(*(image.size for image in images), strict=True)]
    size[axis] = sum(image.size[axis] for image in images) + gap * (len(images) - 1)
    whole, place = Image.new("RGB", (size[0], size[1]), "white"), [0, 0]
    for image in images:
        whole.paste(image, (place[0], place[1]))
        place[axis] += image.size[axis] + gap
    return whole


def save_animation(frames: Sequence[Image.Image], path: Path, kind: str) -> None:
    """Write RGB frames as a looping .gif or lossless .webp; the last frame is shown longer."""
    assert kind.lower() in ANIMATED_SUFFIXES, kind
    if kind.lower() == ".gif":  # each frame has its own palette of 256 colours; median cut would drop rare colours
        frames = [frame.quantize(method=Image.Quantize.FASTOCTREE, kmeans=1) for frame in frames]
    times = [FRAME_MS] * (len(frames) - 1) + [LAST_FRAME_MS]
    frames[0].save(
        path,
        save_all=True,
        append_images=list(frames[1:]),
        duration=times,
        loop=0,
        lossless=True,
        format=kind[1:].upper(),
    )


@dataclass(frozen=True)
class ShownChannels:
    """One or three channels, counted from 0. By default, images with 1 or 3 channels are shown as they are."""

    indices: tuple[int, ...] = ()  # empty for the default

    @classmethod
    def parse(cls, text: str, channels: int) -> ShownChannels:
        """Parse the setting `preview_channels` for images with a number of channels."""
        try:
            indices = tuple(int(part) for part in text.split(",")) if text else ()
        except ValueError:
            indices = (-1,)
        if text and (len(indices) not in (1, 3) or not all(0 <= index < channels for index in indices)):
            raise UserError(
                f"preview_channels={text}: must be one or three of the channels 0 to {channels - 1}, e.g. "
                f"preview_channels={'0,1,2' if channels > 2 else '0'}"
            )
        return cls(indices)

    def of(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return the shown channels of images, whose last dimension is the channels."""
        channels = images.shape[-1]
        if self.indices and max(self.indices) < channels:
            return images[..., list(self.indices)]
        return images if channels in (1, 3) else images[..., : 3 if channels > 2 else 1]
