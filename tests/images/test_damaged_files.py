"""Truncated, damaged and too large files are rejected, before memory is used for their pixels."""

from __future__ import annotations

import random
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tifffile
from photographs import photograph
from PIL import Image, ImageFile

from paceline.images.decode import BadImage, TooLarge, decode, memory_limit, opened, unlimited
from paceline.images.deep import image_size, read_planes_header
from paceline.images.encode import read_image
from paceline.images.rectangles import Box
from paceline.images.regions import open_region_image

PHOTO = Image.fromarray(photograph("astronaut")).resize((96, 80))
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


@pytest.mark.parametrize("name", ["a.png", "deflated.tif"])  # the formats with checksums
def test_a_flipped_bit_in_a_format_with_checksums_is_detected(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    PHOTO.save(file, **CONTAINERS[name])
    content = file.read_bytes()
    first, last = 0, len(content)
    if name == "deflated.tif":
        with tifffile.TiffFile(file) as tiff:
            first = tiff.pages.first.dataoffsets[0]
            last = first + tiff.pages.first.databytecounts[0]
    for position in random.Random(0).sample(range(first, last), 60):
        file.write_bytes(content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :])
        for read in (decode, read_image):
            with pytest.raises(BadImage):
                read(file)


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_truncated_file_is_rejected_in_every_format(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    try:
        PHOTO.save(file, **CONTAINERS[name])
    except (KeyError, OSError):
        pytest.skip("this build of Pillow cannot write the format")
    content = file.read_bytes()
    for length in (0, 1, 20, *(len(content) * part // 10 for part in range(1, 10))):
        file.write_bytes(content[:length])
        for read in (decode, read_image):
            with pytest.raises(BadImage):
                read(file)


def test_a_tiff_whose_pixels_start_inside_its_header_is_rejected(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", np.asarray(PHOTO), tile=(32, 32), photometric="rgb")
    with tifffile.TiffFile(tmp_path / "a.tif") as tiff:
        at = tiff.pages.first.tags["TileOffsets"].valueoffset
    content = (tmp_path / "a.tif").read_bytes()
    (tmp_path / "a.tif").write_bytes(content[: at + 8] + bytes(4) + content[at + 12 :])  # the third tile
    for read in (decode, read_image):
        with pytest.raises(BadImage, match="inside the header"):
            read(tmp_path / "a.tif")


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
    for read in (decode, read_image):
        with pytest.raises(BadImage):
            read(tmp_path / "a.jpg")


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


SIDE_PX = 14_000  # 196 megapixels, above Pillow's own limit


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Large black images in small files."""
    folder = tmp_path_factory.mktemp("large")
    Image.new("1", (SIDE_PX, SIDE_PX)).save(folder / "a.png")
    Image.new("L", (SIDE_PX, 6_400)).save(folder / "a.jpg", quality=5)
    return {path.suffix: path for path in folder.iterdir()}


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_a_large_image_is_limited_by_memory_instead_of_its_number_of_pixels(suffix, files, monkeypatch) -> None:
    with pytest.raises(TooLarge, match="above the limit of 89 megapixels"):
        decode(files[suffix])
    monkeypatch.setattr("paceline.images.decode.free_host_bytes", lambda: 100_000_000)
    allocated = []
    monkeypatch.setattr(Image.core, "new", lambda *words: allocated.append(words))
    for read in (read_image, lambda path: image_size(path, memory_limit)):
        with pytest.raises(TooLarge) as rejected:
            read(files[suffix])
        name = {".png": "PNG", ".jpg": "JPEG"}[suffix]
        expected = f"more than 70% of the 0.1 GB that is free, and {name} cannot be read by region"
        assert expected in str(rejected.value)
        assert str(rejected.value).endswith("save the image as a tiled TIFF, whose size is not limited")
    assert not allocated
    assert image_size(files[suffix], unlimited)[1] == SIDE_PX


def test_a_file_that_is_too_short_for_its_pixels_is_rejected_before_they_are_allocated(tmp_path, monkeypatch) -> None:
    header = struct.pack(">2I5B", 12_000, 12_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    parts = [struct.pack(">I", len(c)) + kind + c + struct.pack(">I", zlib.crc32(kind + c)) for kind, c in chunks]
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    content = bytearray(jpeg_bytes(tmp_path))
    at = content.index(b"\xff\xc0")
    content[at + 5 : at + 9] = struct.pack(">2H", 30_000, 30_000)
    (tmp_path / "a.jpg").write_bytes(content)
    monkeypatch.setattr("paceline.images.decode.free_host_bytes", lambda: 10**12)
    for name in ("a.png", "a.jpg"):
        with pytest.raises(BadImage, match=r"truncated: [\d,]+ bytes cannot contain \d+ × \d+ pixels"):
            read_image(tmp_path / name)


def jpeg_bytes(folder: Path) -> bytes:
    Image.new("L", (48, 48)).save(folder / "small.jpg")
    return (folder / "small.jpg").read_bytes()


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "I;16", "CMYK", "1"])
def test_pixels_do_not_depend_on_the_strips_in_which_they_are_converted(mode, tmp_path, monkeypatch) -> None:
    rng = np.random.default_rng(0)
    if mode == "I;16":
        image = Image.fromarray(rng.integers(0, 65536, (31, 17)).astype(np.uint16))
    else:
        image = Image.fromarray(rng.integers(0, 256, (31, 17, 4)).astype(np.uint8), "RGBA").convert(mode)
    image.save(tmp_path / "a.tif")
    whole = read_image(tmp_path / "a.tif")
    monkeypatch.setattr("paceline.images.decode.STRIP_PX", 50)
    strips = read_image(tmp_path / "a.tif")
    assert np.array_equal(whole.pixels, strips.pixels) and whole.pixels.dtype == strips.pixels.dtype


def test_the_free_memory_matters_only_for_images_above_the_limit(tmp_path, monkeypatch) -> None:
    Image.new("L", (40, 30)).save(tmp_path / "a.png")
    asked = []
    monkeypatch.setattr("paceline.images.decode.free_host_bytes", lambda: asked.append(1) or 5000)
    assert read_image(tmp_path / "a.png").pixels.shape == (30, 40, 1) and not asked
    monkeypatch.setattr("paceline.images.decode.PIXEL_LIMIT", 1000)
    with pytest.raises(TooLarge, match="more than 70%"):  # 3600 of 5000 bytes
        read_image(tmp_path / "a.png")
    with opened(tmp_path / "a.png", unlimited) as (image, _):
        assert "for each of 3 processes" in memory_limit(image, 3)
    monkeypatch.setattr("paceline.images.decode.free_host_bytes", lambda: 5200)
    assert read_image(tmp_path / "a.png").pixels.shape == (30, 40, 1)


def test_huge_images_are_decoded_one_at_a_time(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("paceline.images.decode.PIXEL_LIMIT", 1000)
    Image.new("L", (40, 30)).save(tmp_path / "huge.png")
    Image.new("L", (20, 30)).save(tmp_path / "small.png")
    with ThreadPoolExecutor(2) as threads:
        with opened(tmp_path / "huge.png", memory_limit):
            waiting = threads.submit(read_image, tmp_path / "huge.png")
            assert threads.submit(read_image, tmp_path / "small.png").result().pixels.shape == (30, 20, 1)
            assert not waiting.done()
        assert waiting.result().pixels.shape == (30, 40, 1)
