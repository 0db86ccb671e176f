"""EXIF metadata that is copied from an image to results computed from it."""

from __future__ import annotations

from PIL import ExifTags, Image

from paceline.images.ome import is_ome

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
# Tags that do not apply to a new file: the original size, and data with offsets into the original file.
STALE_TAGS = {
    ExifTags.Base.ExifImageWidth,
    ExifTags.Base.ExifImageHeight,
    ExifTags.Base.ExifInteroperabilityOffset,
    ExifTags.Base.MakerNote,
}

PAGE_DESCRIPTIONS = ("ImageJ=", '{"shape":')  # as written by ImageJ and tifffile


def portable_exif(image: Image.Image) -> bytes:
    """Return the EXIF metadata that also applies to results: date, place, camera, author and description."""
    try:
        found, kept = image.getexif(), Image.Exif()
        for tag in TEXTS:
            text = found.get(tag)
            if isinstance(text, str) and not _describes_pages(text):
                # Pillow decodes any text as Latin-1, but would encode it as ASCII.
                kept[tag] = text.encode("latin-1", "replace")
        for table in TABLES:
            inner = {tag: value for tag, value in found.get_ifd(table).items() if tag not in STALE_TAGS}
            if inner:
                kept[table] = inner
        return kept.tobytes() if len(kept) else b""
    except Exception:  # an image with damaged EXIF is still usable
        return b""


def _describes_pages(text: str) -> bool:
    """Return whether a text describes the number and size of a file's pages, which are different in a result."""
    return is_ome(text) or text.startswith(PAGE_DESCRIPTIONS)


def without_tables(exif: bytes) -> bytes:
    """Remove the Exif and GPS IFDs, which libtiff cannot write."""
    found = Image.Exif()
    found.load(exif)
    for table in TABLES:
        found.pop(table, None)
    return found.tobytes() if len(found) else b""
