"""PNG files that are compressed by several threads, read back by Pillow."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
from photographs import photograph
from PIL import Image

from paceline.images import encode
from paceline.images.encode import write_png


@pytest.mark.parametrize("compression", [0, 1, 6])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 300, 3), (300, 1, 2), (257, 33, 3), (40, 50, 4)])
def test_pillow_reads_the_same_pixels(shape, compression, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(encode, "BYTES_PER_BLOCK", 999)  # so that small images have several blocks
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    write_png(tmp_path / "made.png", pixels, compression=compression)
    with Image.open(tmp_path / "made.png") as image:
        assert np.array_equal(np.asarray(image).reshape(shape), pixels)


@pytest.mark.parametrize("channels", [1, 3])
def test_16_bit_pixels_are_stored_in_full_depth(channels: int, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 65536, (31, 29, channels), dtype=np.uint16)
    write_png(tmp_path / "made.png", pixels, compression=0)
    content = (tmp_path / "made.png").read_bytes()
    assert content[24] == 16  # bits per channel
    start = content.index(b"IDAT") + 4
    (length,) = np.frombuffer(content[start - 8 : start - 4], ">u4")
    rows = zlib.decompressobj().decompress(content[start : start + int(length)])
    stored = np.frombuffer(rows, np.uint8).reshape(31, -1)[:, 1:]  # without the filter types
    assert np.array_equal(stored.copy().view(">u2").reshape(pixels.shape), pixels)


def test_photographs_become_smaller_with_a_higher_compression_and_masks_are_always_small(tmp_path: Path) -> None:
    photo, mask = photograph("astronaut"), np.zeros((400, 500, 3), np.uint8)
    mask[100:300, 200:350] = 255
    sizes = []
    for pixels, compression in ((photo, 0), (photo, 1), (photo, 9), (mask, 1)):
        write_png(tmp_path / "made.png", pixels, compression=compression)
        sizes.append((tmp_path / "made.png").stat().st_size)
    assert sizes[0] > 1.5 * sizes[1] > 1.5 * sizes[2] and sizes[3] < mask.nbytes / 100
    assert np.array_equal(np.asarray(Image.open(tmp_path / "made.png")), mask)


def test_a_profile_and_exif_are_stored(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[315] = "Ann"
    write_png(tmp_path / "made.png", np.zeros((4, 4, 3), np.uint8), profile=b"profile", exif=exif.tobytes())
    with Image.open(tmp_path / "made.png") as image:
        assert image.info["icc_profile"] == b"profile" and image.getexif()[315] == "Ann"
