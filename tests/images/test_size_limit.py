"""Images that are too large for the free memory are rejected before memory is used for their pixels."""

from __future__ import annotations

import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.images.decode import BadImage, TooLarge, decode, decoding_bytes, memory_limit, opened, unlimited
from paceline.images.deep import image_size
from paceline.images.encode import read_image

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


def test_an_image_above_the_limit_of_pillow_is_read(files) -> None:
    image = read_image(files[".png"])
    assert image.pixels.shape == (SIDE_PX, SIDE_PX, 1) and not image.pixels[::100].any()


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


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_the_estimated_memory_includes_the_copies_of_a_transparent_image(mode, tmp_path) -> None:
    needed = []
    for name, more in (("opaque.png", {}), ("clear.png", {"transparency": (1, 2, 3) if mode == "RGB" else 0})):
        Image.new(mode, (40, 30)).save(tmp_path / name, **more)
        with opened(tmp_path / name) as (image, _):
            needed.append(decoding_bytes(image) // (40 * 30))
    assert needed[1] - needed[0] == 5, "a copy with 4 bytes per pixel, and the alpha channel"
    for suffix in ("gif", "bmp", "tif", "tga", "webp"):  # every format has an estimate
        Image.new("RGB", (40, 30)).convert("P").save(tmp_path / f"a.{suffix}")
        with opened(tmp_path / f"a.{suffix}") as (image, _):
            assert decoding_bytes(image) >= 40 * 30 * 3
