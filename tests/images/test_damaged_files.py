"""All functions that decode images reject truncated files, and damaged files if the format has checksums."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
from photographs import photograph
from PIL import Image, ImageFile

from paceline.core.errors import UserError
from paceline.images.decode import BadImage, decode
from paceline.images.deep import read_planes_header
from paceline.images.encode import read_image
from paceline.images.rectangles import Box
from paceline.images.regions import open_region_image
from paceline.inference.generate import animation_frames

PHOTO = Image.fromarray(photograph("astronaut")).resize((96, 80))
READERS: dict[str, Callable[[Path], object]] = {"decode": decode, "read_image": read_image}
CONTAINERS = {  # Pillow's save options for each file name
    "a.png": {},
    "a.jpg": {},
    "progressive.jpg": {"progressive": True},
    "a.webp": {},
    "a.gif": {},
    "raw.tif": {},
    "lzw.tif": {"compression": "tiff_lzw"},
    "deflated.tif": {"compression": "tiff_adobe_deflate"},
    "a.bmp": {},
    "a.ppm": {},
    "a.tga": {},
    "a.qoi": {},
    "a.avif": {},
    "a.jp2": {},
}
# Only these have checksums. In other formats, a changed byte can yield a valid image with different pixels.
CHECKED = ("a.png", "deflated.tif")


def flip_a_bit(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", CHECKED)
def test_a_flipped_bit_in_a_format_with_checksums_is_detected(name: str, reader: str, tmp_path: Path) -> None:
    file = tmp_path / name
    PHOTO.save(file, **CONTAINERS[name])
    content = file.read_bytes()
    first, last = (0, len(content)) if name == "a.png" else pixel_bytes(file)
    for position in random.Random(0).sample(range(first, last), 60):
        file.write_bytes(flip_a_bit(content, position))
        with pytest.raises(BadImage):
            READERS[reader](file)


def pixel_bytes(file: Path) -> tuple[int, int]:
    """Return the byte range of a TIFF's first strip."""
    with tifffile.TiffFile(file) as tiff:
        page = tiff.pages.first
        return page.dataoffsets[0], page.dataoffsets[0] + page.databytecounts[0]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", CONTAINERS)
def test_a_truncated_file_is_rejected_in_every_format(name: str, reader: str, tmp_path: Path) -> None:
    file = tmp_path / name
    try:
        PHOTO.save(file, **CONTAINERS[name])
    except (KeyError, OSError):
        pytest.skip("this build of Pillow cannot write the format")
    content = file.read_bytes()
    for length in (0, 1, 20, *(len(content) * part // 10 for part in range(1, 10))):
        file.write_bytes(content[:length])
        with pytest.raises(BadImage):
            READERS[reader](file)


@pytest.mark.parametrize("reader", READERS)
def test_a_tiff_whose_pixels_start_inside_its_header_is_rejected(reader: str, tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", np.asarray(PHOTO), tile=(32, 32), photometric="rgb")
    with tifffile.TiffFile(tmp_path / "a.tif") as tiff:
        at = tiff.pages.first.tags["TileOffsets"].valueoffset
    content = (tmp_path / "a.tif").read_bytes()
    (tmp_path / "a.tif").write_bytes(content[: at + 8] + bytes(4) + content[at + 12 :])  # the third tile
    with pytest.raises(BadImage, match="inside the header"):
        READERS[reader](tmp_path / "a.tif")


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_truncated_16_bit_colour_images_are_rejected(compression: str | None, tmp_path: Path) -> None:
    file = tmp_path / "deep.tif"
    tifffile.imwrite(file, np.asarray(PHOTO).astype(np.uint16) * 257, photometric="rgb", compression=compression)
    content = file.read_bytes()
    for part in range(1, 10):
        file.write_bytes(content[: len(content) * part // 10])
        with pytest.raises(BadImage):
            read_image(file)


def test_a_png_needs_its_last_chunk_but_may_be_followed_by_other_bytes(tmp_path: Path) -> None:
    PHOTO.save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(content[:-12])
    with pytest.raises(BadImage, match="truncated"):
        decode(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes(content + b"written by another program")
    assert decode(tmp_path / "a.png").tobytes() == PHOTO.tobytes()


def test_truncated_files_are_rejected_even_if_pillow_is_configured_to_accept_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    PHOTO.save(tmp_path / "a.jpg")
    (tmp_path / "a.jpg").write_bytes((tmp_path / "a.jpg").read_bytes()[:-500])
    for read in READERS.values():
        with pytest.raises(BadImage):
            read(tmp_path / "a.jpg")


def test_the_error_from_the_animation_command_names_the_damaged_sample_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.inference.generate.readable_config_of", lambda run: None)
    (tmp_path / "samples").mkdir()
    PHOTO.save(tmp_path / "samples" / "samples-100.png")
    content = (tmp_path / "samples" / "samples-100.png").read_bytes()
    (tmp_path / "samples" / "samples-100.png").write_bytes(flip_a_bit(content, len(content) // 2))
    with pytest.raises(UserError, match=r"samples-100\.png: unreadable image"):
        animation_frames([str(tmp_path)])


def test_files_that_store_few_of_their_pixels_are_not_truncated(tmp_path) -> None:
    width, height = 3000, 2000
    Image.new("L", (2, 2), 255).save(tmp_path / "a.gif")
    content = bytearray((tmp_path / "a.gif").read_bytes())
    content[6:10] = struct.pack("<2H", width, height)  # the frame stays small
    (tmp_path / "a.gif").write_bytes(content)
    skips = b"".join(bytes((0, 2, 0, min(255, height - row))) for row in range(0, height, 255))
    palette = bytes(range(256)) * 4
    header = struct.pack("<I2i2H6I", 40, width, height, 1, 8, 1, len(skips) + 2, 0, 0, 256, 0)
    start = 14 + len(header) + len(palette)
    whole = struct.pack("<2s3I", b"BM", start + len(skips) + 2, 0, start) + header + palette + skips + b"\0\1"
    (tmp_path / "a.bmp").write_bytes(whole)
    for name in ("a.gif", "a.bmp"):
        assert decode(tmp_path / name).size == (width, height)


def test_a_tiff_with_an_unsupported_compression_is_reported_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    PHOTO.save(path, compression="tiff_lzw")
    with tifffile.TiffFile(path, mode="r+") as file:
        file.pages[0].tags["Compression"].overwrite(50001)  # WebP, which the content is not
    with pytest.raises(BadImage, match=r"compression is not supported .*; save the image"):
        decode(path)


def test_a_tiff_without_a_width_is_reported_as_damaged_instead_of_as_a_failed_division(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.asarray(PHOTO), tile=(32, 32), compression="deflate", photometric="rgb")
    with tifffile.TiffFile(path, mode="r+") as file:
        file.pages[0].tags["ImageWidth"].overwrite(0)
    for read in (open_region_image, read_planes_header):
        with pytest.raises(BadImage, match="damaged, or of a kind that is not supported; save the image again"):
            read(path)


@pytest.mark.extras
@pytest.mark.parametrize("share", [0.1, 0.5, 0.97])
def test_a_tile_of_a_slide_that_ends_in_zeros_is_reported_instead_of_grey(share: float, tmp_path: Path) -> None:
    """openslide decodes the zeros of a dense tile as pixels, and reports nothing."""
    pytest.importorskip("openslide")
    pytest.importorskip("imagecodecs")
    path, noise = tmp_path / "a.svs", np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    description = "Aperio Image Library v1\r\n256x256 [0,0 256x256] (128x128) JPEG/RGB Q=95|AppMag = 40|MPP = 0.25"
    tifffile.imwrite(
        path, noise, description=description, tile=(128, 128), photometric="rgb", compression="jpeg", metadata=None
    )
    with tifffile.TiffFile(path) as file:
        page = file.pages.first
        (_, first, *_), (_, length, *_) = page.dataoffsets, page.databytecounts
    content = path.read_bytes()
    lost = int(length * (1 - share))
    path.write_bytes(content[: first + length - lost] + bytes(lost) + content[first + length :])
    with open_region_image(path) as slide:
        assert slide.read(0, Box(128, 0, 128, 256)).std() > 50
        with pytest.raises(BadImage, match="damaged: tile 1 is truncated"):
            slide.read(0, Box(100, 100, 50, 50))
    path.write_bytes(content)
    with open_region_image(path) as slide:
        assert slide.read(0, Box(0, 0, 256, 256)).std() > 50
