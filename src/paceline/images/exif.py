"""What a camera and a person wrote into a image's file besides its pixels: EXIF, for what is made of the image."""

from __future__ import annotations

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
PARTS = (ExifTags.IFD.Exif, ExifTags.IFD.GPSInfo)
# Of the camera's own part: sizes of the old image, and notes that point to places in the old file.
NO_LONGER_TRUE = {
    ExifTags.Base.ExifImageWidth,
    ExifTags.Base.ExifImageHeight,
    ExifTags.Base.ExifInteroperabilityOffset,
    ExifTags.Base.MakerNote,
}


def camera_words(image: Image.Image) -> bytes:
    """When, where, with what and by whom a image was taken, without what is true of its own file alone."""
    try:
        found, kept = image.getexif(), Image.Exif()
        for tag in WORDS:
            text = found.get(tag)
            if isinstance(text, str):  # Pillow reads it as Latin-1, whatever it is, and would write ASCII alone
                kept[tag] = text.encode("latin-1", "replace")
        for part in PARTS:
            inner = {tag: value for tag, value in found.get_ifd(part).items() if tag not in NO_LONGER_TRUE}
            if inner:
                kept[part] = inner
        return kept.tobytes() if len(kept) else b""
    except Exception:  # words that are damaged are no reason not to use the image
        return b""


def without_parts(exif: bytes) -> bytes:
    """The words that stand in no part of their own, as the place's and the camera's do: all that libtiff can write."""
    found = Image.Exif()
    found.load(exif)
    for part in PARTS:
        found.pop(part, None)
    return found.tobytes() if len(found) else b""
