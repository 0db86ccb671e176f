"""What a camera and a person wrote into a picture's file besides its pixels: EXIF, for what is made of the picture."""

from __future__ import annotations

from typing import Any

from PIL import ExifTags, Image

WORDS = (
    ExifTags.Base.ImageDescription,
    ExifTags.Base.Make,
    ExifTags.Base.Model,
    ExifTags.Base.Software,
    ExifTags.Base.DateTime,
    ExifTags.Base.Artist,
    ExifTags.Base.Copyright,
)
# Of the camera's own part: sizes of the old picture, and notes that point to places in the old file.
NO_LONGER_TRUE = {
    ExifTags.Base.ExifImageWidth,
    ExifTags.Base.ExifImageHeight,
    ExifTags.Base.ExifInteroperabilityOffset,
    ExifTags.Base.MakerNote,
}


def camera_words(image: Image.Image) -> bytes:
    """When, where, with what and by whom a picture was taken, without what is true of its own file alone."""
    try:
        found, kept = image.getexif(), Image.Exif()
        for tag in WORDS:
            if tag in found:
                kept[tag] = _as_read(found[tag])
        for part in (ExifTags.IFD.Exif, ExifTags.IFD.GPSInfo):
            inner = {tag: value for tag, value in found.get_ifd(part).items() if tag not in NO_LONGER_TRUE}
            if inner:
                kept[part] = inner
        return kept.tobytes() if len(kept) else b""
    except Exception:  # words that are damaged are no reason not to use the picture
        return b""


def _as_read(value: Any) -> Any:
    """A value to be written as it was: Pillow reads text as Latin-1, whatever it is, and would write ASCII alone."""
    return value.encode("latin-1", "replace") if isinstance(value, str) else value
