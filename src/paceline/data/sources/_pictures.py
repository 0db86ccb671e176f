"""Pictures as every source gives them: one size, grey or colour, 8 bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from paceline.errors import UserError
from paceline.settings import RunSettings

PIXEL_LIMIT = 89_000_000  # a small file can claim to be huge; Pillow itself only warns, and from here on
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # such files are refused here, by name
SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N")
ANIMATED_FORMATS = ("GIF", "PNG", "WEBP")  # several pictures in other kinds of files are pages or previews
ORIENTATION, SIDEWAYS = 0x0112, (5, 6, 7, 8)  # of EXIF: the values that swap height and width
UNBOUNDED_MODES = ("I", "F")  # 32-bit numbers: nothing says which of them is white


class BadPicture(Exception):
    """A file that gives no picture; its text says why."""


def check_picture_settings(settings: RunSettings) -> None:
    """Refuses sizes and channels that no source can give."""
    if settings.channels not in (0, 1, 3):
        raise UserError(f"channels={settings.channels}: must be 1 (grey), 3 (colour) or 0 (the source's own)")
    if settings.size < 0:
        raise UserError(f"size={settings.size}: must be a number of pixels, or 0 for the source's own")


def arrange_pictures(
    pictures: np.ndarray,
    settings: RunSettings,
    resample: Image.Resampling = Image.Resampling.BICUBIC,
    default_size: int = 0,
) -> np.ndarray:
    """Pictures uint8 [n, h, w, 1 or 3] in the size and channels that the settings ask for."""
    check_picture_settings(settings)
    _, height, width, own_channels = pictures.shape
    channels, side = settings.channels or own_channels, settings.size or default_size
    if channels == own_channels and (side == 0 or side == height == width):
        return np.ascontiguousarray(pictures)
    squeezed = pictures[..., 0] if own_channels == 1 else pictures
    return np.stack([arrange_picture(Image.fromarray(one), side, channels, resample) for one in squeezed])


def arrange_picture(
    picture: Image.Image, side: int, channels: int, resample: Image.Resampling = Image.Resampling.BICUBIC
) -> np.ndarray:
    """One picture as uint8 [h, w, channels]: its middle square, scaled to `side` unless that is 0."""
    picture = picture.convert("L" if channels == 1 else "RGB")  # "L" is the luma of ITU-R 601
    if side:
        short = min(picture.size)
        left, top = (picture.width - short) // 2, (picture.height - short) // 2
        square = (left, top, left + short, top + short)
        picture = picture.crop(square) if short == side else picture.resize((side, side), resample, square)
    array = np.array(picture)
    return array[..., np.newaxis] if channels == 1 else array


def short_side(path: Path) -> int:
    """The length of a picture's shorter side, read from the file's header."""
    try:
        with Image.open(path) as picture:
            return min(picture.size)
    except Exception as error:
        raise BadPicture(_reason(error)) from error


def upright_size(path: Path) -> tuple[int, int]:
    """Height and width of the picture that `decode` gives, read from the file's header."""
    with opened(path) as picture:
        _check_still(picture)
        # Not the file's own getexif(), which decodes all of a PNG first.
        turned = Image.Image.getexif(picture).get(ORIENTATION) in SIDEWAYS
        return (picture.width, picture.height) if turned else (picture.height, picture.width)


def decode(path: Path) -> Image.Image:
    """The picture in a file: upright, in 8 bits grey or RGB, transparency over white."""
    with opened(path) as picture:
        return _to_eight_bits(ImageOps.exif_transpose(picture))


@contextmanager
def opened(path: Path) -> Iterator[Image.Image]:
    """A file's picture, not decoded yet and not above the limit; whatever goes wrong with it is a BadPicture."""
    try:
        with Image.open(path) as picture:
            _check_limit(picture)
            yield picture
    except BadPicture:
        raise
    except Exception as error:  # decoders raise errors of many kinds on damaged files
        raise BadPicture(_reason(error)) from error


def _check_still(picture: Image.Image) -> None:
    if picture.format in ANIMATED_FORMATS and getattr(picture, "is_animated", False):
        raise BadPicture("it is animated")


def _check_limit(picture: Image.Image) -> None:
    if picture.width * picture.height > PIXEL_LIMIT:
        raise BadPicture(
            f"{picture.width} × {picture.height} pixels, above the limit of {PIXEL_LIMIT // 10**6} megapixels"
        )


def _to_eight_bits(picture: Image.Image) -> Image.Image:
    if picture.mode in SIXTEEN_BIT_MODES:
        values = np.asarray(picture).astype(np.uint32)
        return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))
    if picture.mode in UNBOUNDED_MODES:
        raise BadPicture(f"32-bit pixels (mode {picture.mode}) have no fixed white; store it with 8 or 16 bits")
    if picture.has_transparency_data:
        colours = picture.convert("RGBA")
        white = Image.new("RGBA", colours.size, "white")
        return Image.alpha_composite(white, colours).convert("RGB")
    return picture.convert("L" if picture.mode in ("1", "L") else "RGB")


def _reason(error: Exception) -> str:
    if isinstance(error, Image.DecompressionBombError):  # Pillow stops at twice our limit, before we see the size
        return f"{error.args[0].split(' exceeds')[0]}, above the limit of {PIXEL_LIMIT // 10**6} megapixels"
    if isinstance(error, UnidentifiedImageError):
        return "no picture of a known kind"
    return " ".join(str(error).split()) or type(error).__name__
