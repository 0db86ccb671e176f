"""EXIF: what a camera and its user wrote into an image file besides the pixels, for files made from the image."""

from __future__ import annotations

from PIL import ExifTags, Image

TEXTS = (
    ExifTags.Base.ImageDescription,
    ExifTags.Base.Make,
    ExifTags.Base.Model,
    ExifTags.Base.Software,
    ExifTags.Base.DateTime,
    ExifTags.Base.Artist,
    ExifTags.Base.Copyright,
)
TABLES = (ExifTags.IFD.Exif, ExifTags.IFD.GPSInfo)
# Of the camera's own table: sizes of the original image, and notes that point into the original file.
STALE_TAGS = {
    ExifTags.Base.ExifImageWidth,
    ExifTags.Base.ExifImageHeight,
    ExifTags.Base.ExifInteroperabilityOffset,
    ExifTags.Base.MakerNote,
}


def portable_exif(image: Image.Image) -> bytes:
    """Return when, where, with what and by whom an image was taken, without what holds for its own file alone."""
    try:
        found, kept = image.getexif(), Image.Exif()
        for tag in TEXTS:
            text = found.get(tag)
            if isinstance(text, str):  # Pillow reads it as Latin-1, whatever it is, and would write ASCII alone
                kept[tag] = text.encode("latin-1", "replace")
        for table in TABLES:
            inner = {tag: value for tag, value in found.get_ifd(table).items() if tag not in STALE_TAGS}
            if inner:
                kept[table] = inner
        return kept.tobytes() if len(kept) else b""
    except Exception:  # damaged EXIF is no reason not to use the image
        return b""


def without_tables(exif: bytes) -> bytes:
    """Return the texts without the tables of the camera and the place: all that libtiff can write."""
    found = Image.Exif()
    found.load(exif)
    for table in TABLES:
        found.pop(table, None)
    return found.tobytes() if len(found) else b""
