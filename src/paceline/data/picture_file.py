"""Pictures of any mode from files, and results back into files, with what the pixels have besides colours.

Grey stays grey, transparency and colour profiles are kept, and so are 16 bits where Pillow (grey) or tifffile (colour)
can read and write them. What has more than eight bits elsewhere (colour PNG) is read with eight, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from paceline.data.sources._pictures import (
    ORIENTATION,
    SIXTEEN_BIT_MODES,
    UNBOUNDED_MODES,
    BadPicture,
    opened,
    upright_size,
)

TIFF_SUFFIXES = (".tif", ".tiff")
BITS_PER_SAMPLE = 258  # of TIFF
PNG_DEPTH_AT, PNG_COLOURS = 24, (2, 6)  # in a PNG's header: bits, then the kind of its pixels
PNG_COMPRESSION = 3  # of 9: photographs gain little from more, and take long


@dataclass(frozen=True)
class Picture:
    """What a file holds, upright."""

    pixels: np.ndarray  # [h, w, 1 or 3], uint8 or uint16
    alpha: Image.Image | None = None
    profile: bytes = b""  # ICC, of grey and RGB alone
    suffix: str = ".png"  # of files that hold what is made of it
    note: str = ""

    @property
    def deep(self) -> bool:
        """Whether it has 16 bits."""
        return self.pixels.dtype == np.uint16


def read_picture(path: Path) -> Picture:
    """The picture in a file of any mode; BadPicture where there is none."""
    upright_size(path)  # refuses what is animated or too large by its header
    suffix = result_suffix(path)
    with opened(path) as image:
        profile = image.info.get("icc_profile") or b""
        deep, note = _read_deep_colours(path, image)
        if deep is not None:
            alpha = Image.fromarray((deep[..., 3] >> 8).astype(np.uint8)) if deep.shape[-1] == 4 else None
            return Picture(deep[..., :3], alpha, profile, suffix)
        image = ImageOps.exif_transpose(image)
        if image.mode in SIXTEEN_BIT_MODES:
            return Picture(np.asarray(image).astype(np.uint16)[..., np.newaxis], None, profile, suffix)
        if image.mode in UNBOUNDED_MODES:
            raise BadPicture(f"32-bit pixels (mode {image.mode}) have no fixed white; store it with 8 or 16 bits")
        grey = image.mode in ("1", "L", "LA", "La")
        alpha = None
        if image.has_transparency_data:
            image = image.convert("LA" if grey else "RGBA")
            alpha = image.getchannel("A")
        profile = profile if image.mode in ("L", "LA", "RGB", "RGBA") else b""
        pixels = np.asarray(image.convert("L" if grey else "RGB"))
        return Picture(pixels[..., np.newaxis] if grey else pixels, alpha, profile, suffix, note)


def result_suffix(path: Path) -> str:
    """What files end in that are made of a picture: TIFF of TIFF, PNG of all others, which loses nothing."""
    return ".tif" if path.suffix.lower() in TIFF_SUFFIXES else ".png"


def _read_deep_colours(path: Path, image: Image.Image) -> tuple[np.ndarray | None, str]:
    """Colours of 16 bits, which Pillow would cut to 8; or a note that this is what happens."""
    if image.format == "PNG":
        with path.open("rb") as file:
            depth, kind = file.read(PNG_DEPTH_AT + 2)[PNG_DEPTH_AT:]
        return (
            None,
            "its 16-bit colours were read with 8 bits; TIFF keeps them" if depth == 16 and kind in PNG_COLOURS else "",
        )
    bits = getattr(image, "tag_v2", {}).get(BITS_PER_SAMPLE, ())
    if image.format != "TIFF" or len(bits) < 3 or set(bits) != {16}:
        return None, ""
    import tifffile

    try:
        array = tifffile.imread(path)
    except Exception:
        array = np.empty(0)
    known = array.dtype == np.uint16 and array.ndim == 3 and array.shape[-1] in (3, 4)
    if not known or image.getexif().get(ORIENTATION, 1) != 1:
        return None, "its 16-bit colours were read with 8 bits: this kind of TIFF is not known"
    return array, ""


class Canvas:
    """A result that is pasted together from parts, in as little memory as its pixels need."""

    def __init__(self, height: int, width: int, *, deep: bool = False) -> None:
        self.height, self.width, self.deep = height, width, deep
        self._image: Image.Image | None = None  # 8 bits
        self._array: np.ndarray | None = None  # 16 bits

    def paste(self, top: int, left: int, values: np.ndarray) -> None:
        """Puts a part, in -1…1 [h, w, 1 or 3], at its place."""
        height, width, channels = values.shape
        if self.deep:
            if self._array is None:
                self._array = np.zeros((self.height, self.width, channels), np.uint16)
            self._array[top : top + height, left : left + width] = _levels(values, 65535)
            return
        if self._image is None:
            self._image = Image.new("L" if channels == 1 else "RGB", (self.width, self.height))
        levels = _levels(values, 255).astype(np.uint8)
        self._image.paste(Image.fromarray(levels[..., 0] if channels == 1 else levels), (left, top))

    @property
    def image(self) -> Image.Image:
        """The result, where it has 8 bits."""
        assert self._image is not None
        return self._image

    def save(self, path: Path, alpha: Image.Image | None = None, profile: bytes = b"") -> None:
        """Writes the result; transparency is enlarged with it."""
        size = (self.width, self.height)
        if alpha is not None and alpha.size != size:
            alpha = alpha.resize(size, Image.Resampling.BICUBIC)
        if self._array is not None and self._array.shape[-1] == 3:
            _save_deep_colours(path, self._array, alpha)
            return
        image = self.image if self._array is None else Image.fromarray(self._array[..., 0])
        if alpha is not None and self._array is None:
            image.putalpha(alpha)
        save_image(image, path, profile)


def save_image(image: Image.Image, path: Path, profile: bytes = b"") -> None:
    """Writes a picture beside and renames it, so that a file is whole or not there."""
    beside = path.with_name(f".{path.name}.writing")
    kind = "TIFF" if path.suffix == ".tif" else "PNG"
    options = {"icc_profile": profile} if profile else {}
    try:
        if kind == "PNG":
            image.save(beside, kind, compress_level=PNG_COMPRESSION, **options)
        else:
            image.save(beside, kind, compression="tiff_lzw" if image.mode != "I;16" else None, **options)
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)


def _save_deep_colours(path: Path, array: np.ndarray, alpha: Image.Image | None) -> None:
    import tifffile

    beside = path.with_name(f".{path.name}.writing")
    extra = None if alpha is None else ["unassalpha"]
    if alpha is not None:
        array = np.concatenate([array, np.asarray(alpha).astype(np.uint16)[..., np.newaxis] * 257], axis=-1)
    try:
        tifffile.imwrite(beside, array, photometric="rgb", extrasamples=extra)
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)


def _levels(values: np.ndarray, top: int) -> np.ndarray:
    return np.clip(np.rint((values + 1) * (top / 2)), 0, top)
