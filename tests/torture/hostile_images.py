"""Damaged and malicious image files, each with the expected verdict: accepted, rejected or not an image."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tifffile
from photographs import photograph
from PIL import Image, ImageCms

SIDE_PX = 48
SIGNATURE = b"\x89PNG\r\n\x1a\n"
Make = Callable[[], bytes]
LONG_STEM = "long" * 60


class HostileImage(NamedTuple):
    """A damaged or malicious image file, and whether commands must accept or reject the file."""

    name: str
    path: Path
    verdict: Literal["ok", "rejected", "not-an-image"]


class Explodes:
    """An object that creates a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch unpickled",)


@cache
def photo() -> Image.Image:
    return Image.fromarray(photograph("astronaut")[100 : 100 + SIDE_PX, 180 : 180 + SIDE_PX])


def saved(kind: str, image: Image.Image | None = None, **options: Any) -> bytes:
    """Return the bytes of an image file written by Pillow."""
    buffer = io.BytesIO()
    (image or photo()).save(buffer, kind, **options)
    return buffer.getvalue()


def frames(kind: str, **options: Any) -> bytes:
    return saved(kind, save_all=True, append_images=[photo().rotate(90), photo().rotate(180)], **options)


def tiff(pixels: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, pixels, **options)
    return buffer.getvalue()


def flipped(content: bytes, position: float) -> bytes:
    """Flip one bit at a relative position (0 to 1) in the file."""
    at = int(position * (len(content) - 1))
    return content[:at] + bytes([content[at] ^ 0x20]) + content[at + 1 :]


def cut(content: bytes, share: float) -> bytes:
    return content[: int(len(content) * share)]


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(*extra: bytes, width: int = SIDE_PX, height: int = SIDE_PX, pixels: bytes | None = None) -> bytes:
    """Return an RGB PNG with extra chunks; `pixels` may have the wrong length for its size."""
    rows = b"".join(b"\0" + row.tobytes() for row in np.asarray(photo())) if pixels is None else pixels
    header = chunk(b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0))
    return SIGNATURE + header + b"".join(extra) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def bomb(size: int = 5_000_000) -> bytes:
    """Return compressed data that expands to `size` zero bytes."""
    return zlib.compress(bytes(size), 9)


def jpeg_of_size(width: int, height: int) -> bytes:
    """Return a JPEG whose header declares the given size instead of the true size."""
    content = bytearray(saved("JPEG"))
    at = content.index(b"\xff\xc0")
    content[at + 5 : at + 9] = struct.pack(">2H", height, width)
    return bytes(content)


def jpeg_with_exif(tags: bytes) -> bytes:
    """Return a JPEG with arbitrary bytes in its EXIF segment."""
    content = saved("JPEG")
    exif = b"Exif\0\0" + tags
    return content[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + content[2:]


def tiff_of(changes: dict[int, int], next_page: int = 0, pixels: bytes | None = None) -> bytes:
    """Return a small grey TIFF with the given tags; `next_page` is the offset of the next page."""
    strip = bytes(range(48)) * SIDE_PX if pixels is None else pixels
    tags = {256: SIDE_PX, 257: SIDE_PX, 258: 8, 259: 1, 262: 1, 273: 0, 277: 1, 278: SIDE_PX, 279: len(strip)}
    tags[273] = 8 + 2 + 12 * len(tags) + 4
    listed = b"".join(struct.pack("<2HIi", tag, 4, 1, value) for tag, value in (tags | changes).items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + listed + struct.pack("<I", next_page) + strip


def bitmap_of_size(width: int, height: int) -> bytes:
    content = bytearray(saved("BMP"))
    content[18:26] = struct.pack("<2i", width, height)
    return bytes(content)


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(5_000_000))
    return buffer.getvalue()


def deep() -> Any:
    return np.asarray(photo()).astype(np.uint16) * 257


REJECTED: dict[str, Make] = {
    "flip_signature.png": lambda: flipped(saved("PNG"), 0),
    "flip_header.png": lambda: flipped(saved("PNG"), 18 / len(saved("PNG"))),
    "flip_early.png": lambda: flipped(saved("PNG"), 0.1),
    "flip_middle.png": lambda: flipped(saved("PNG"), 0.5),
    "flip_late.png": lambda: flipped(saved("PNG"), 0.98),
    "flip_palette.png": lambda: flipped(saved("PNG", photo().quantize(64)), 0.05),
    "flip_deflated.tif": lambda: flipped(saved("TIFF", compression="tiff_adobe_deflate"), 0.5),
    "flip_text.png": lambda: saved("PNG").replace(b"IDAT", b"tEXt", 1),
    "cut_quarter.png": lambda: cut(saved("PNG"), 0.25),
    "cut_end.png": lambda: saved("PNG")[:-12],
    "cut_signature.png": lambda: SIGNATURE,
    "cut_half.jpg": lambda: cut(saved("JPEG"), 0.5),
    "cut_progressive.jpg": lambda: cut(saved("JPEG", progressive=True), 0.7),
    "cut_start.jpg": lambda: b"\xff\xd8\xff\xe0",
    "cut_half.gif": lambda: cut(saved("GIF"), 0.5),
    "cut_half.webp": lambda: cut(saved("WEBP"), 0.5),
    "cut_lossless.webp": lambda: cut(saved("WEBP", lossless=True), 0.9),
    "cut_raw.tif": lambda: cut(saved("TIFF"), 0.9),
    "cut_lzw.tif": lambda: cut(saved("TIFF", compression="tiff_lzw"), 0.5),
    "cut_deep.tif": lambda: cut(tiff(deep(), photometric="rgb"), 0.9),
    "cut_half.bmp": lambda: cut(saved("BMP"), 0.5),
    "cut_half.ppm": lambda: cut(saved("PPM"), 0.5),
    "cut_half.tga": lambda: cut(saved("TGA"), 0.5),
    "huge_header.png": lambda: png(width=20_000, height=20_000),
    "huge_sides.png": lambda: png(width=2**31 - 1, height=2**31 - 1),
    "negative_sides.png": lambda: png(width=2**32 - 1, height=2**32 - 5),
    "zero_width.png": lambda: png(width=0),
    "few_pixels.png": lambda: png(pixels=bytes(100)),
    "no_pixels.png": lambda: (
        SIGNATURE + chunk(b"IHDR", struct.pack(">2I5B", 8, 8, 8, 2, 0, 0, 0)) + chunk(b"IEND", b"")
    ),
    "bomb_text.png": lambda: png(chunk(b"zTXt", b"Comment\0\0" + bomb())),
    "bomb_international.png": lambda: png(chunk(b"iTXt", b"Comment\0\1\0\0\0" + bomb())),
    "bomb_profile.png": lambda: png(chunk(b"iCCP", b"profile\0\0" + bomb())),
    "huge_header.jpg": lambda: jpeg_of_size(65_000, 65_000),
    "zero_height.jpg": lambda: jpeg_of_size(SIDE_PX, 0),
    "huge_screen.gif": lambda: saved("GIF")[:6] + b"\xff\xff\xff\xff" + saved("GIF")[10:],
    "huge_header.ppm": lambda: b"P6 100000 100000 255\n" + bytes(100),
    "negative.ppm": lambda: b"P6 -48 48 255\n" + bytes(6912),
    "deep_maximum.ppm": lambda: b"P6 48 48 99999\n" + bytes(13824),
    "huge_header.qoi": lambda: b"qoif" + struct.pack(">2I2B", 60_000, 60_000, 3, 0) + bytes(50),
    "huge_header.bmp": lambda: bitmap_of_size(60_000, 60_000),
    "negative_width.bmp": lambda: bitmap_of_size(-SIDE_PX, SIDE_PX),
    "huge_header.tif": lambda: tiff_of({256: 60_000, 257: 60_000}),
    "negative_width.tif": lambda: tiff_of({256: -SIDE_PX}),
    "zero_width.tif": lambda: tiff_of({256: 0}),
    "strip_outside.tif": lambda: tiff_of({273: 2**30}),
    "cyclic_first.tif": lambda: b"II*\0" + struct.pack("<IHI", 8, 0, 8),
    "integers.tif": lambda: tiff(deep()[..., 0].astype(np.int32)),
    "floats.tif": lambda: tiff(deep()[..., 0].astype(np.float32)),
    "doubles.tif": lambda: tiff(deep()[..., 0].astype(np.float64)),
    "moving.gif": lambda: frames("GIF"),
    "moving_pixels.png": lambda: frames("PNG"),
    "moving.webp": lambda: frames("WEBP"),
    "vector.png": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>',
    "page.jpg": lambda: b"<!doctype html><title>404 Not Found</title>",
    "pickled.png": lambda: pickle.dumps(Explodes()),
    "archive.png": zipped,
    "compressed.tif": lambda: gzip.compress(bytes(5_000_000)),
    "program.bmp": lambda: b"\x7fELF\2\1\1" + bytes(500),
    "script.png": lambda: b"#!/bin/sh\ntouch executed\n",
    "postscript.png": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 48 48\n(executed) (w) file\n%%EOF\n",
    "photoshop.png": lambda: b"8BPS\0\1" + bytes(6) + struct.pack(">H2I2H", 3, 48, 48, 8, 3) + bytes(7000),
    "zeros.jpg": lambda: bytes(100_000),
    "empty.png": lambda: b"",
    "noise.png": lambda: random.Random(1).randbytes(999),
    "one_byte.webp": lambda: b"R",
    "utf16.png": lambda: "not an image".encode("utf-16"),
}
OK: dict[str, Make] = {
    "jpeg_inside.png": lambda: saved("JPEG"),
    "png_inside.jpg": lambda: saved("PNG"),
    "gif_inside.tif": lambda: saved("GIF"),
    "CAPITALS.PNG": lambda: saved("PNG"),
    "ink.jpg": lambda: saved("JPEG", photo().convert("CMYK")),
    "palette.png": lambda: saved("PNG", photo().quantize(9), transparency=3),
    "deep_grey.png": lambda: saved("PNG", Image.fromarray(deep()[..., 0])),
    "deep_colours.tif": lambda: tiff(deep(), photometric="rgb"),
    "pages.tif": lambda: frames("TIFF"),
    "two_photos.jpg": lambda: frames("MPO"),
    "cyclic_pages.tif": lambda: tiff_of({}, next_page=8),
    "upside_down.bmp": lambda: bitmap_of_size(SIDE_PX, -SIDE_PX),
    "archive_appended.png": lambda: saved("PNG") + zipped(),
    "text_appended.jpg": lambda: saved("JPEG") + b"<?php system('touch executed'); ?>",
    "more_pixels.png": lambda: png(pixels=b"\0" * (SIDE_PX * (3 * SIDE_PX + 1)) + bytes(5_000_000)),
    "more_pixels.tif": lambda: tiff_of({259: 8}, pixels=bomb()),
    "exif_damaged.png": lambda: saved("PNG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"),
    "exif_many_tags.jpg": lambda: jpeg_with_exif(b"II*\0\x08\0\0\0\xff\xff" + bytes(200)),
    "exif_cyclic.jpg": lambda: jpeg_with_exif(b"II*\0\x08\0\0\0" + struct.pack("<H2HIII", 1, 0x8769, 4, 1, 8, 8)),
    "exif_bomb.jpg": lambda: jpeg_with_exif(b"II*\0\x08\0\0\0" + struct.pack("<H2HIII", 1, 270, 2, 2**32 - 1, 8, 0)),
    "exif_rotation_99.jpg": lambda: jpeg_with_exif(b"II*\0\x08\0\0\0" + struct.pack("<H2HIII", 1, 0x112, 3, 1, 99, 0)),
    "comment.jpg": lambda: saved("JPEG", comment=b"\x1b[2J\x1b]0;owned\x07"),
    "profile_garbage.jpg": lambda: saved("JPEG", icc_profile=b"not a profile" * 9),
    "profile.png": lambda: saved("PNG", icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()),
    "two\nlines.png": lambda: saved("PNG"),
    "\x1b[2J\x1b[31mred.png": lambda: saved("PNG"),
    "\u202egnp.exe.png": lambda: saved("PNG"),
    os.fsdecode(b"latin-\xe9\xff.png"): lambda: saved("PNG"),
    "--out=elsewhere.png": lambda: saved("PNG"),
    "$(touch executed) `x` '\"; %s {0} [red].png": lambda: saved("PNG"),
    "日本語 👩‍🔬.png": lambda: saved("PNG"),
    f"{LONG_STEM}.png": lambda: saved("PNG"),
}


def write_hostile_images(folder: Path) -> list[HostileImage]:
    """Write all test images to a folder, and return them with the expected verdicts."""
    listed = []
    verdicts: list[tuple[Literal["ok", "rejected"], dict[str, Make]]] = [("ok", OK), ("rejected", REJECTED)]
    for verdict, files in verdicts:
        for name, make in files.items():
            (folder / name).write_bytes(make())
            listed.append(HostileImage(name, folder / name, verdict))
    links = {"loop.png": "loop.png", "dangling.png": "nowhere.png", "endless.png": "/dev/zero", "null.png": "/dev/null"}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "pipe.png")
    (folder / "notes.txt").write_text("not an image\n")
    listed += [HostileImage(name, folder / name, "not-an-image") for name in (*links, "pipe.png", "notes.txt")]
    (folder / "passwords.png").symlink_to("/etc/passwd")
    (folder / "linked.png").symlink_to((folder / "CAPITALS.PNG").absolute())
    listed += [HostileImage("passwords.png", folder / "passwords.png", "rejected")]
    return [*listed, HostileImage("linked.png", folder / "linked.png", "ok")]
