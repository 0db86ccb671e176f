"""Pictures of pictures: grids, two side by side, captions, animations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

GAP_PX = 2
SMALLEST_SIDE_PX = 32  # smaller pictures are enlarged: eyes need a few pixels
CAPTION_PX = 18
CAPTION_TEXT_PX = 12
FRAME_MS = 250
LAST_FRAME_MS = 2000
MOVING = (".gif", ".webp")


def grid(pictures: np.ndarray, columns: int = 0) -> np.ndarray:
    """Pictures uint8 [n, h, w, c] in rows of `columns` (0 makes a square), with a gap between them."""
    num, height, width, channels = pictures.shape
    columns = columns or math.ceil(math.sqrt(num))
    factor = max(1, SMALLEST_SIDE_PX // min(height, width))
    pictures = pictures.repeat(factor, axis=1).repeat(factor, axis=2)
    height, width = height * factor, width * factor
    rows = math.ceil(num / columns)
    whole = np.zeros((rows * (height + GAP_PX) + GAP_PX, columns * (width + GAP_PX) + GAP_PX, channels), np.uint8)
    for number, picture in enumerate(pictures):
        row, column = divmod(number, columns)
        top, left = GAP_PX + row * (height + GAP_PX), GAP_PX + column * (width + GAP_PX)
        whole[top : top + height, left : left + width] = picture
    return whole


def to_image(picture: np.ndarray) -> Image.Image:
    """A picture uint8 [h, w, c] for Pillow, in colour."""
    return Image.fromarray(picture[..., 0] if picture.shape[-1] == 1 else picture).convert("RGB")


def captioned(picture: Image.Image, text: str, *, room: bool = False) -> Image.Image:
    """A picture with a line of text above it: shortened to fit or, with `room`, on white as wide as it needs."""
    font = ImageFont.load_default(CAPTION_TEXT_PX)
    width = max(picture.width, math.ceil(font.getlength(text)) + 2 * GAP_PX) if room else picture.width
    while len(text) > 1 and font.getlength(text) > width - 2 * GAP_PX:
        text = text.removesuffix("…")[:-1] + "…"
    whole = Image.new("RGB", (width, picture.height + CAPTION_PX), "white")
    whole.paste(picture, (0, CAPTION_PX))
    ImageDraw.Draw(whole).text((GAP_PX, GAP_PX), text, fill="black", font=font)
    return whole


def side_by_side(pictures: Sequence[Image.Image]) -> Image.Image:
    """Pictures in one row, on white."""
    width = sum(picture.width for picture in pictures) + 4 * GAP_PX * (len(pictures) - 1)
    whole = Image.new("RGB", (width, max(picture.height for picture in pictures)), "white")
    left = 0
    for picture in pictures:
        whole.paste(picture, (left, 0))
        left += picture.width + 4 * GAP_PX
    return whole


def one_above_the_other(pictures: Sequence[Image.Image]) -> Image.Image:
    """Pictures in one column, on white."""
    height = sum(picture.height for picture in pictures) + 2 * GAP_PX * (len(pictures) - 1)
    whole = Image.new("RGB", (max(picture.width for picture in pictures), height), "white")
    top = 0
    for picture in pictures:
        whole.paste(picture, (0, top))
        top += picture.height + 2 * GAP_PX
    return whole


def save_animation(frames: Sequence[Image.Image], path: Path) -> None:
    """Frames in RGB one after the other, for ever, the last one longer, as .gif or, without any loss, .webp."""
    suffix = path.suffix.lower()
    assert suffix in MOVING, path
    if suffix == ".gif":  # each frame has 256 colours of its own; a median cut would lose those of few pixels
        frames = [frame.quantize(method=Image.Quantize.FASTOCTREE, kmeans=1) for frame in frames]
    times = [FRAME_MS] * (len(frames) - 1) + [LAST_FRAME_MS]
    frames[0].save(path, save_all=True, append_images=list(frames[1:]), duration=times, loop=0, lossless=True)
