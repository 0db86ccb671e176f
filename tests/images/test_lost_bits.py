"""Images with 16 bits that can only be read as 8-bit cause a note, in every format."""

from __future__ import annotations

import io
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.config.flags import SeparateTestFolder
from paceline.images.decode import BadImage, decode
from paceline.images.encode import read_image, write_png
from paceline.images.readers import choose_reader

DEEP = np.arange(4 * 6 * 3, dtype=np.uint16).reshape(4, 6, 3) * 900


def plain(array: np.ndarray) -> bytes:
    return " ".join(map(str, array.ravel())).encode()


def with_bits(content: bytes, bits: int) -> bytes:
    """Return a JPEG 2000 file whose header states another number of bits per channel."""
    at = content.index(b"\xff\x4f\xff\x51") + 42
    return (
        b"".join(
            [content[:at], *(bytes([bits - 1, *content[at + 3 * one + 1 : at + 3 * one + 3]]) for one in range(3))]
        )
        + content[at + 9 :]
    )


def jpeg_2000(suffix: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray((DEEP >> 8).astype(np.uint8)).save(stream, "JPEG2000", no_jp2=suffix == "j2k")
    return with_bits(stream.getvalue(), 16)


def png(channels: int) -> bytes:
    with tempfile.NamedTemporaryFile(suffix=".png") as file:
        write_png(Path(file.name), np.concatenate([DEEP, DEEP[..., :1]], axis=-1)[..., :channels])
        return Path(file.name).read_bytes()


COLOURS = {
    "grey_and_alpha.png": png(2),
    "colours.png": png(3),
    "colours_and_alpha.png": png(4),
    "a.ppm": b"P6\n6 4\n65535\n" + DEEP.astype(">u2").tobytes(),
    "comments.ppm": b"P6 # a comment\n6#another\n 4\r# 255\n65535\n" + DEEP.astype(">u2").tobytes(),
    "twelve.ppm": b"P6 6 4 4095 " + (DEEP >> 4).astype(">u2").tobytes(),
    "plain.ppm": b"P3\n6 4 65535\n" + plain(DEEP),
    "a.jp2": jpeg_2000("jp2"),
    "a.j2k": jpeg_2000("j2k"),
}


@pytest.mark.parametrize("name", COLOURS)
def test_16_bit_colours_cause_a_note_and_are_not_read_as_16_bits(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(COLOURS[name])
    reader, notes = choose_reader([file], SeparateTestFolder())
    assert reader.size(file) == (4, 6)
    assert "16-bit images are read as 8-bit; use --set pixels=uint16 to keep" in " ".join(notes)
    assert choose_reader([file], SeparateTestFolder(pixels="uint8")).notes == ()
    reader = choose_reader([file], SeparateTestFolder(pixels="uint16")).reader
    for read in (reader.size, reader.decode):
        with pytest.raises(BadImage, match="with 16-bit colours or transparency can only be read as 8-bit"):
            read(file)
    if name.endswith("ppm"):
        assert read_image(file).note == "16-bit colours were read as 8-bit; use TIFF to keep 16 bits"
        assert np.abs(np.asarray(decode(file)).astype(float) - DEEP / 257).max() <= 1


@pytest.mark.parametrize("header", [b"P5\n6 4\n65535\n", b"P5 6 4 4095\n"])
def test_16_bit_grey_pgm_files_keep_their_bits_on_request_and_otherwise_cause_a_note(
    header: bytes, tmp_path: Path
) -> None:
    white = int(header.split()[-1])
    grey = DEEP[..., 0] >> (4 if white == 4095 else 0)
    (tmp_path / "a.pgm").write_bytes(header + grey.astype(">u2").tobytes())
    notes = choose_reader([tmp_path / "a.pgm"], SeparateTestFolder()).notes
    assert "16-bit images are read as 8-bit; use --set pixels=uint16" in " ".join(notes)
    reader = choose_reader([tmp_path / "a.pgm"], SeparateTestFolder(pixels="uint16")).reader
    pixels = reader.arrange(reader.decode(tmp_path / "a.pgm"), 0)
    assert pixels.dtype == np.uint16 and np.abs(pixels[..., 0] - grey * (65535 / white)).max() < 1


def test_8_bit_files_cause_no_note(tmp_path: Path) -> None:
    for name in ("a.ppm", "a.pgm", "a.pbm", "a.jp2", "a.j2k", "a.png", "a.tif", "a.bmp"):
        image = Image.fromarray((DEEP >> 8).astype(np.uint8))
        mode = {"a.pgm": "L", "a.pbm": "1"}.get(name, "RGB")
        image.convert(mode).save(tmp_path / name)
        assert choose_reader([tmp_path / name], SeparateTestFolder()).notes == (), name
        assert read_image(tmp_path / name).note == "", name


def test_a_jpeg_2000_file_without_pixels_causes_no_note_but_an_error(tmp_path: Path) -> None:
    content = jpeg_2000("jp2")
    at = content.index(b"jp2c")
    (tmp_path / "a.jp2").write_bytes(content[: at - 4] + struct.pack(">I4s", 8, b"free"))
    with pytest.raises(BadImage):
        read_image(tmp_path / "a.jp2")
