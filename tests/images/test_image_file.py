"""Image files in all formats are decoded as an image viewer displays them, and written without loss of metadata."""

from __future__ import annotations

import errno
import io
import shutil
import struct
import tempfile
import zlib
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import tifffile
from photographs import photograph
from PIL import ExifTags, Image, ImageCms

from paceline.config.flags import SeparateTestFolder
from paceline.images import encode
from paceline.images.decode import BadImage, decode, upright_size
from paceline.images.deep import Ome, read_planes_header
from paceline.images.encode import Attachments, Encoding, read_image, write_image, write_png
from paceline.images.readers import choose_reader

DEEP = np.random.default_rng(0).integers(0, 65536, (20, 30, 4), dtype=np.uint16)
TURNED = {
    1: lambda rows: rows,
    2: lambda rows: rows[:, ::-1],
    3: lambda rows: rows[::-1, ::-1],
    4: lambda rows: rows[::-1],
    5: lambda rows: rows.swapaxes(0, 1),
    6: lambda rows: np.rot90(rows, -1),
    7: lambda rows: rows[::-1, ::-1].swapaxes(0, 1),
    8: lambda rows: np.rot90(rows),
}
PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


@pytest.mark.parametrize("orientation", TURNED)
@pytest.mark.parametrize("kind", ["grey", "deep_grey", "colour", "deep_colour", "packed_grey"])
def test_the_orientation_tag_of_a_tiff_is_applied_to_its_size_and_pixels(
    kind: str, orientation: int, tmp_path: Path
) -> None:
    file = tmp_path / "turned.tif"
    pixels = DEEP[..., :3] if "colour" in kind else DEEP[..., 0]
    pixels = pixels if "deep" in kind else (pixels >> 8).astype(np.uint8)
    compression = "zlib" if kind == "packed_grey" else None  # the others stay uncompressed, which allows memory mapping
    tifffile.imwrite(file, pixels, compression=compression, extratags=[(0x0112, "H", 1, orientation, True)])
    upright = TURNED[orientation](pixels)
    assert upright_size(file) == upright.shape[:2]
    found = read_image(file)
    assert np.array_equal(np.squeeze(found.pixels), upright) and not found.note
    eight = upright if upright.dtype == np.uint8 else upright / 257
    assert np.abs(np.asarray(decode(file)) - eight).max() <= 1


def test_the_fourth_channel_of_a_16_bit_tiff_is_read_as_the_file_declares(tmp_path: Path) -> None:
    file = tmp_path / "deep.tif"
    tifffile.imwrite(file, DEEP, photometric="rgb", extrasamples=["unassalpha"])
    found = read_image(file)
    assert np.array_equal(found.pixels, DEEP[..., :3])
    assert found.alpha is not None and np.array_equal(np.asarray(found.alpha), DEEP[..., 3] >> 8)

    tifffile.imwrite(file, DEEP, photometric="rgb", extrasamples=["unspecified"])
    found = read_image(file)
    assert np.array_equal(found.pixels, DEEP[..., :3]) and found.alpha is None
    assert "other than colours and transparency were ignored" in found.note

    half = np.full_like(DEEP, 32768)
    half[..., :3] //= 2  # colours premultiplied by an alpha of 0.5
    tifffile.imwrite(file, half, photometric="rgb", extrasamples=["assocalpha"])
    assert np.abs(read_image(file).pixels.astype(int) - 32768).max() <= 2

    cyan = np.zeros_like(DEEP)
    cyan[..., 0] = 65535
    tifffile.imwrite(file, cyan, photometric="separated")
    found = read_image(file)
    assert found.alpha is None and found.pixels.dtype == np.uint8 and (found.pixels == (0, 255, 255)).all()
    assert "16-bit colours were read as 8-bit" in found.note


def test_colour_planes_and_pages_in_a_tiff_are_not_confused(tmp_path: Path) -> None:
    file = tmp_path / "planes.tif"
    narrow = DEEP[:, :3, :3]  # three columns and three channels, which are easily confused
    tifffile.imwrite(file, np.moveaxis(narrow, -1, 0), photometric="rgb", planarconfig="separate")
    assert np.array_equal(read_image(file).pixels, narrow)
    with pytest.raises(BadImage, match="16-bit colours in separate planes"):
        decode(file)
    tifffile.imwrite(file, np.stack([DEEP[..., :3], DEEP[::-1, :, :3]]), photometric="rgb")
    found = read_image(file)
    assert np.array_equal(found.pixels, DEEP[..., :3]) and found.note == "only the first page was read"


def test_inverted_16_bit_and_12_bit_grey_images_are_read_with_the_full_range(tmp_path: Path) -> None:
    file = tmp_path / "negative.tif"
    tifffile.imwrite(file, DEEP[..., 0], photometric="miniswhite")
    assert np.array_equal(read_image(file).pixels[..., 0], 65535 - DEEP[..., 0])
    assert np.abs(np.asarray(decode(file)) - (65535 - DEEP[..., 0]) / 257).max() <= 0.51
    file.write_bytes(row_of_twelve_bits(0, 273, 2730, 4095))
    assert read_image(file).pixels.ravel().tolist() == [0, 4369, 43690, 65535]
    assert np.asarray(decode(file)).ravel().tolist() == [0, 17, 170, 255]


def row_of_twelve_bits(*values: int) -> bytes:
    """Return a 12-bit grey TIFF with one row; tifffile cannot write 12-bit files."""
    bits = "".join(f"{value:012b}" for value in values)
    row = int(bits, 2).to_bytes(len(bits) // 8, "big")
    tags = {256: len(values), 257: 1, 258: 12, 259: 1, 262: 1, 273: 8 + 2 + 9 * 12 + 4, 277: 1, 278: 1, 279: len(row)}
    listed = b"".join(struct.pack("<2H2I", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + listed + bytes(4) + row


def test_a_16_bit_grey_png_with_transparency_is_read_as_8_bit_with_a_note(tmp_path: Path) -> None:
    file = tmp_path / "deep.png"
    write_png(file, DEEP[..., :2])
    found = read_image(file)
    assert found.note == "16-bit colours were read as 8-bit; use RGB TIFF to keep 16 bits"
    assert np.array_equal(found.pixels[..., 0], DEEP[..., 0] >> 8)
    assert found.alpha is not None and np.array_equal(np.asarray(found.alpha), DEEP[..., 1] >> 8)


def test_a_colour_profile_is_kept_unless_the_colours_are_converted(tmp_path: Path) -> None:
    colours = Image.fromarray((DEEP[..., :3] >> 8).astype(np.uint8))
    tifffile.imwrite(tmp_path / "deep.tif", DEEP[..., :3], photometric="rgb", iccprofile=PROFILE)
    colours.quantize(16).save(tmp_path / "palette.png", icc_profile=PROFILE)
    colours.convert("CMYK").save(tmp_path / "ink.jpg", icc_profile=PROFILE)
    for name, kept in (("deep.tif", PROFILE), ("palette.png", PROFILE), ("ink.jpg", None)):
        found = read_image(tmp_path / name)
        made = tmp_path / f"made{Encoding().suffix(tmp_path / name)}"
        write_image(made, found.pixels, attached=Attachments(found.alpha, found.profile))
        with Image.open(made) as image:
            assert image.info.get("icc_profile") == kept, name
    assert np.array_equal(tifffile.imread(tmp_path / "made.tif"), DEEP[..., :3])


def test_a_16_bit_image_is_written_with_its_enlarged_alpha(tmp_path: Path) -> None:
    alpha = Image.fromarray(np.random.default_rng(1).integers(0, 256, (700, 100), dtype=np.uint8))
    pixels = np.full((1400, 200, 3), 49_151, np.uint16)
    write_image(tmp_path / "made.tif", pixels, attached=Attachments(alpha, PROFILE))
    made = tifffile.imread(tmp_path / "made.tif")
    assert made.shape == (1400, 200, 4) and (made[..., :3] == made[0, 0, 0]).all()
    assert np.array_equal(
        made[..., 3], np.asarray(alpha.resize((200, 1400), Image.Resampling.BICUBIC)) * np.uint16(257)
    )
    with Image.open(tmp_path / "made.tif") as image:
        assert image.mode == "RGBA" and image.info["icc_profile"] == PROFILE
    assert [path.name for path in tmp_path.iterdir()] == ["made.tif"]


@pytest.mark.parametrize("kind", ["16-bit colours", "16-bit colours with alpha", "planes", "OME-TIFF"])
def test_the_compression_applies_to_every_kind_of_tiff(kind: str, tmp_path: Path) -> None:
    pixels = np.zeros((80, 60, 5 if kind == "planes" else 3), np.uint16)
    pixels[::7] = 40_000
    alpha = Image.new("L", (60, 80), 99) if kind.endswith("alpha") else None
    attached = Attachments(alpha, ome=Ome() if kind == "OME-TIFF" else None)
    sizes, made = [], []
    for level in (0, 1, 9):
        path = tmp_path / f"{level}.tif"
        write_image(path, pixels, Encoding("tiff", compression=level), attached)
        sizes.append(path.stat().st_size)
        made.append(tifffile.imread(path))
    assert sizes[0] > pixels.nbytes > 5 * sizes[1] and sizes[1] > sizes[2]
    assert np.array_equal(made[0], made[1]) and np.array_equal(made[0], made[2])


@pytest.mark.parametrize("suffix", [".jpg", ".tif", ".png"])
@pytest.mark.parametrize("mode", ["RGB", "L", "I;16"])
def test_exif_is_kept_except_for_fields_that_no_longer_apply(mode: str, suffix: str, tmp_path: Path) -> None:
    if (mode, suffix) == ("I;16", ".jpg"):
        pytest.skip("JPEG is 8-bit")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    artist = "Ann A." if suffix == ".tif" else "Ann Ä."  # Pillow writes only ASCII to TIFF
    exif[ExifTags.Base.Artist] = artist.encode()
    exif[ExifTags.IFD.Exif] = {
        ExifTags.Base.DateTimeOriginal: "2024:05:06 07:08:09",
        ExifTags.Base.ExifImageWidth: 30,
        ExifTags.Base.MakerNote: b"at 1234",
    }
    exif[ExifTags.IFD.GPSInfo] = {ExifTags.GPS.GPSLatitudeRef: "N"}
    taken = tmp_path / f"taken{suffix}"
    Image.new(mode, (30, 20)).save(taken, exif=exif.tobytes())
    image = read_image(taken)
    assert image.pixels.shape[:2] == (30, 20)
    pixels = np.zeros((60, 40, image.pixels.shape[-1]), image.pixels.dtype)
    made = tmp_path / f"made{Encoding().suffix(taken)}"
    write_image(made, pixels, attached=Attachments(exif=image.exif))
    with Image.open(made) as found:
        assert found.size == (40, 60)
        words = found.getexif()
        assert words[ExifTags.Base.Artist].encode("latin-1").decode() == artist
        assert words.get(ExifTags.Base.Orientation, 1) == 1
        if suffix == ".tif":
            return  # libtiff cannot write the metadata checked below
        assert words.get_ifd(ExifTags.IFD.Exif) == {ExifTags.Base.DateTimeOriginal: "2024:05:06 07:08:09"}
        assert words.get_ifd(ExifTags.IFD.GPSInfo)[ExifTags.GPS.GPSLatitudeRef] == "N"


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_an_image_with_damaged_exif_is_read_without_it(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert read_image(tmp_path / "a.png").exif == b""


@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_an_encoder_that_fails_on_a_full_disk_is_reported_as_such(kind, tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise kind("encoder error -2 when writing image file")

    monkeypatch.setattr(encode, "_write", fail)
    with pytest.raises(kind, match="encoder error"):
        write_image(tmp_path / "a.tif", np.zeros((8, 8, 3), np.uint8))
    monkeypatch.setattr(encode.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 100, 0))
    with pytest.raises(OSError) as full:
        write_image(tmp_path / "a.tif", np.zeros((8, 8, 3), np.uint8))
    assert full.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("byteorder", "bigtiff"), [("<", False), ("<", True), (">", False)])
def test_a_tiff_page_with_several_slices_is_rejected_by_every_reader(byteorder, bigtiff, tmp_path: Path) -> None:
    file, volume = tmp_path / "a.tif", np.zeros((5, 32, 32), np.uint8)
    for slices in (volume[:1], volume):
        tifffile.imwrite(file, slices, volumetric=True, tile=(1, 16, 16), byteorder=byteorder, bigtiff=bigtiff)
        for read in (read_image, read_planes_header):
            with pytest.raises(BadImage, match="several slices of a volume") if len(slices) > 1 else nullcontext():
                read(file)


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


LEVELS = np.arange(4 * 6 * 3, dtype=np.uint16).reshape(4, 6, 3) * 900


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
    Image.fromarray((LEVELS >> 8).astype(np.uint8)).save(stream, "JPEG2000", no_jp2=suffix == "j2k")
    return with_bits(stream.getvalue(), 16)


def png(channels: int) -> bytes:
    with tempfile.NamedTemporaryFile(suffix=".png") as file:
        write_png(Path(file.name), np.concatenate([LEVELS, LEVELS[..., :1]], axis=-1)[..., :channels])
        return Path(file.name).read_bytes()


LOSING_BITS = {
    "colours.png": png(3),
    "colours_and_alpha.png": png(4),
    "a.ppm": b"P6\n6 4\n65535\n" + LEVELS.astype(">u2").tobytes(),
    "twelve.ppm": b"P6 6 4 4095 " + (LEVELS >> 4).astype(">u2").tobytes(),
    "a.jp2": jpeg_2000("jp2"),
}


@pytest.mark.parametrize("name", LOSING_BITS)
def test_16_bit_colours_cause_a_note_and_are_not_read_as_16_bits(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(LOSING_BITS[name])
    reader, notes = choose_reader([file], SeparateTestFolder())
    assert reader.size(file) == (4, 6)
    assert "16-bit images are read as 8-bit; use --set pixels=uint16 to keep" in " ".join(notes)
    assert choose_reader([file], SeparateTestFolder(pixels="uint8")).notes == ()
    reader = choose_reader([file], SeparateTestFolder(pixels="uint16")).reader
    for read in (reader.size, reader.decode):
        with pytest.raises(BadImage, match="with 16-bit colours or transparency can only be read as 8-bit"):
            read(file)
    if name.endswith("ppm"):
        assert read_image(file).note == "16-bit colours were read as 8-bit; use RGB TIFF to keep 16 bits"
        assert np.abs(np.asarray(decode(file)).astype(float) - LEVELS / 257).max() <= 1


@pytest.mark.parametrize("header", [b"P5\n6 4\n65535\n", b"P5 6 4 4095\n"])
def test_16_bit_grey_pgm_files_keep_their_bits_on_request_and_otherwise_cause_a_note(
    header: bytes, tmp_path: Path
) -> None:
    white = int(header.split()[-1])
    grey = LEVELS[..., 0] >> (4 if white == 4095 else 0)
    (tmp_path / "a.pgm").write_bytes(header + grey.astype(">u2").tobytes())
    notes = choose_reader([tmp_path / "a.pgm"], SeparateTestFolder()).notes
    assert "16-bit images are read as 8-bit; use --set pixels=uint16" in " ".join(notes)
    reader = choose_reader([tmp_path / "a.pgm"], SeparateTestFolder(pixels="uint16")).reader
    pixels = reader.arrange(reader.decode(tmp_path / "a.pgm"), 0)
    assert pixels.dtype == np.uint16 and np.abs(pixels[..., 0] - grey * (65535 / white)).max() < 1


def test_8_bit_files_cause_no_note(tmp_path: Path) -> None:
    for name in ("a.ppm", "a.pgm", "a.pbm", "a.jp2", "a.j2k", "a.png", "a.tif", "a.bmp"):
        image = Image.fromarray((LEVELS >> 8).astype(np.uint8))
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
