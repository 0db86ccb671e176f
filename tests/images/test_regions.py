"""TIFF files that are read and written by region."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from paceline.core.errors import UserError
from paceline.images import regions
from paceline.images.decode import BadImage
from paceline.images.deep import read_planes_header
from paceline.images.encode import read_image
from paceline.images.pyramid_file import PyramidFile, PyramidFormat, halved
from paceline.images.rectangles import Box
from paceline.images.regions import open_region_image

HEIGHT, WIDTH = 303, 401
RNG = np.random.default_rng(0)
PIXELS = np.cumsum(RNG.integers(0, 3, (HEIGHT, WIDTH, 3)), axis=1).astype(np.uint8)


@pytest.fixture(autouse=True)
def small_pyramids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.images.pyramid_file.SMALLEST_LEVEL_PX", 256)


def write(
    path: Path, pixels: np.ndarray, form: PyramidFormat, blocks: list[Box], first: int = 0, last: int | None = None
) -> PyramidFile:
    """Write the blocks of an image between two numbers, without finishing the file."""
    file = PyramidFile(path, form, blocks, {"test": 1})
    for block in blocks[first:last]:
        part = pixels[block.top : block.top + block.height, block.left : block.left + block.width]
        file.append_block(file.encode_block(block, part))
    return file


def finish(file: PyramidFile, name: str) -> None:
    file.complete(name)
    file.publish()


def blocks_of(height: int, width: int, side: int) -> list[Box]:
    return [
        Box(top, left, min(side, height - top), min(side, width - left))
        for top in range(0, height, side)
        for left in range(0, width, side)
    ]


@pytest.mark.parametrize("is_ome", [False, True])
@pytest.mark.parametrize(("channels", "dtype"), [(1, "uint8"), (3, "uint8"), (3, "uint16"), (5, "uint16")])
def test_tifffile_reads_the_pyramid_that_was_written(channels, dtype, is_ome, tmp_path: Path) -> None:
    pixels = RNG.integers(0, 200, (HEIGHT, WIDTH, channels)).astype(dtype)
    form = PyramidFormat(HEIGHT, WIDTH, channels, dtype, 64, microns_per_px=0.5, is_ome=is_ome)
    name = "made.ome.tif" if is_ome else "made.tif"
    file = write(tmp_path / name, pixels, form, blocks_of(HEIGHT, WIDTH, 128))
    finish(file, "a name with <brackets>")
    with tifffile.TiffFile(tmp_path / name) as made:
        levels = made.series[0].levels
        assert made.is_ome == is_ome and len(levels) == 2
        assert np.array_equal(levels[0].asarray().reshape(pixels.shape), pixels)
        assert np.array_equal(levels[1].asarray().reshape(152, 201, channels), halved(pixels))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with open_region_image(tmp_path / name) as image:
        assert np.array_equal(image.read(1, Box(90, 3, 50, 60)), halved(pixels)[90:140, 3:63])
        assert image.format.microns_per_px == pytest.approx(0.5)


@pytest.mark.parametrize(
    "options",
    [
        {"tile": (128, 64), "compression": "zlib"},
        {"tile": (64, 64), "compression": "zlib", "predictor": 2, "bigtiff": True},
        {"rowsperstrip": 7},
        {"tile": (128, 128), "byteorder": ">"},
        {"planarconfig": "separate", "tile": (128, 128), "compression": "zlib"},
        {"ome": True, "tile": (256, 256), "compression": "zlib"},
    ],
)
def test_regions_of_files_written_by_tifffile_equal_the_image(options, tmp_path: Path) -> None:
    pixels = PIXELS.astype(np.uint8 if "predictor" in options else np.uint16)
    planar = "planarconfig" in options
    path = tmp_path / ("a.ome.tif" if "ome" in options else "a.tif")
    tifffile.imwrite(path, np.moveaxis(pixels, -1, 0) if planar else pixels, photometric="rgb", **options)
    with open_region_image(path) as image:
        level = image.levels[0]
        assert (level.height, level.width, image.format.channels) == (HEIGHT, WIDTH, 3)
        for top, left, height, width in [(0, 0, HEIGHT, WIDTH), (60, 77, 213, 301), (302, 400, 1, 1)]:
            found = image.read(0, Box(top, left, height, width))
            assert np.array_equal(found, pixels[top : top + height, left : left + width])


@pytest.mark.parametrize(
    "options", [{"rowsperstrip": HEIGHT}, {"rowsperstrip": 100, "byteorder": ">"}, {"planarconfig": "separate"}]
)
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_large_uncompressed_strips_are_read_row_by_row(options, dtype, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(regions, "LARGEST_WHOLE_STRIP_BYTES", 1000)
    monkeypatch.setattr(regions, "LARGEST_SEGMENT_BYTES", 1000)
    path, pixels = tmp_path / "a.tif", PIXELS.astype(dtype)
    stored = np.moveaxis(pixels, -1, 0) if "planarconfig" in options else pixels
    tifffile.imwrite(path, stored, photometric="rgb", **options)
    with open_region_image(path) as image:
        for top, left, height, width in [(0, 0, HEIGHT, WIDTH), (60, 77, 213, 301), (302, 400, 1, 1)]:
            found = image.read(0, Box(top, left, height, width))
            assert np.array_equal(found, pixels[top : top + height, left : left + width])
    with tifffile.TiffFile(path, mode="r+") as file:
        tag = file.pages.first.tags["StripByteCounts"]
        tag.overwrite([count // 2 for count in np.atleast_1d(tag.value).tolist()])
    with open_region_image(path) as image:
        assert np.array_equal(image.read(0, Box(0, 0, 40, 50)), pixels[:40, :50])
        with pytest.raises(BadImage, match="is truncated"):
            image.read(0, Box(290, 0, 10, 50))


def test_pages_of_a_stack_are_channels(tmp_path: Path) -> None:
    pixels = RNG.integers(0, 65536, (4, 300, 400), dtype=np.uint16)
    tifffile.imwrite(
        tmp_path / "a.ome.tif", pixels, metadata={"axes": "CYX"}, tile=(128, 128), photometric="minisblack"
    )
    with open_region_image(tmp_path / "a.ome.tif") as image:
        assert np.array_equal(image.read(0, Box(20, 30, 200, 300)), np.moveaxis(pixels, 0, -1)[20:220, 30:330])


def test_only_square_pixels_have_a_size(tmp_path: Path) -> None:
    for height, expected in ((0.5, 0.5), (0.25, 0.0)):  # the result would state the width for both sides
        metadata = {"axes": "YXS", "PhysicalSizeX": 0.5, "PhysicalSizeY": height}
        tifffile.imwrite(tmp_path / "a.ome.tif", PIXELS, metadata=metadata, photometric="rgb")
        with open_region_image(tmp_path / "a.ome.tif") as image:
            assert image.format.microns_per_px == expected


def test_a_file_with_several_images_says_that_only_the_first_is_read(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "a.ome.tif", ome=True) as file:
        for pixels in (PIXELS, PIXELS[:100]):
            file.write(pixels, photometric="rgb", tile=(64, 64))
    with open_region_image(tmp_path / "a.ome.tif") as image:
        assert image.format.note == "only the first of 2 images in the file was read"


def test_a_file_resumes_after_any_number_of_tiles_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    form, blocks = PyramidFormat(HEIGHT, WIDTH, 3, "uint8", 32), blocks_of(HEIGHT, WIDTH, 96)
    finish(write(tmp_path / "whole.tif", PIXELS, form, blocks), "a")
    for count, missing in [(2, 1), (7, 3), (len(blocks), 2)]:
        killed = write(tmp_path / "killed.tif", PIXELS, form, blocks, last=count)
        killed._file.truncate(len(killed._file.parts) - missing)
        killed.close()
        for name in ("partial", "journal"):
            with (tmp_path / f".killed.tif.{name}").open("ab") as file:
                file.write(b"half")
        resumed = PyramidFile(tmp_path / "killed.tif", form, blocks, {"test": 1})
        done = resumed.num_blocks_done
        resumed.keep_blocks(done)
        resumed.close()
        finish(write(tmp_path / "killed.tif", PIXELS, form, blocks, done), "a")
        assert (tmp_path / "killed.tif").read_bytes() == (tmp_path / "whole.tif").read_bytes()


def test_a_damaged_part_and_another_purpose_are_not_resumed(tmp_path: Path) -> None:
    form, blocks = PyramidFormat(HEIGHT, WIDTH, 3, "uint8", 64), blocks_of(HEIGHT, WIDTH, 128)
    write(tmp_path / "a.tif", PIXELS, form, blocks, last=3).close()
    with (tmp_path / ".a.tif.partial").open("r+b") as file:
        content = file.read()
        file.seek(len(content) * 5 // 6)  # in the last of three equal blocks
        file.write(bytes(byte ^ 255 for byte in content[file.tell() :][:1]))
    damaged = PyramidFile(tmp_path / "a.tif", form, blocks, {"test": 1})
    assert damaged.num_blocks_done == 2
    damaged.close()
    other = PyramidFile(tmp_path / "a.tif", form, blocks, {"test": 2})
    assert other.num_blocks_done == 0
    other.close()


def test_damaged_tiles_are_reported(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", PIXELS, tile=(64, 64), compression="zlib", photometric="rgb")
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        page = file.pages.first
        offset, offsets_at = page.dataoffsets[7], page.tags["TileOffsets"].valueoffset
    content = (tmp_path / "a.tif").read_bytes()

    def read(changed: bytes) -> np.ndarray:
        (tmp_path / "b.tif").write_bytes(changed)
        with open_region_image(tmp_path / "b.tif") as image:
            return image.read(0, Box(0, 0, HEIGHT, WIDTH))

    assert np.array_equal(read(content), PIXELS)
    flipped = content[: offset + 50] + bytes([content[offset + 50] ^ 255]) + content[offset + 51 :]
    with pytest.raises(BadImage, match="tile 7 cannot be decoded"):
        read(flipped)
    beyond = np.array([len(content) + 5], "<u4").tobytes()
    with pytest.raises(BadImage, match="tile 2 extends beyond the end of the file"):
        read(content[: offsets_at + 8] + beyond + content[offsets_at + 12 :])
    with pytest.raises(BadImage, match="tile 2 starts inside the header"):
        read(content[: offsets_at + 8] + bytes(4) + content[offsets_at + 12 :])
    with pytest.raises(BadImage, match=r"the end of the file|cannot be decoded|cannot be read"):
        read(content[: len(content) // 2])


@pytest.mark.extras
def test_a_truncated_jpeg_tile_is_reported_instead_of_filled_up(tmp_path: Path) -> None:
    pytest.importorskip("imagecodecs")
    tifffile.imwrite(tmp_path / "a.tif", PIXELS, tile=(64, 64), photometric="rgb", compression="jpeg")
    with tifffile.TiffFile(tmp_path / "a.tif", mode="r+") as file:
        tag = file.pages.first.tags["TileByteCounts"]
        tag.overwrite([*tag.value[:5], tag.value[5] // 2, *tag.value[6:]])
    with open_region_image(tmp_path / "a.tif") as image, pytest.raises(BadImage, match=r"tile 5 .* is truncated"):
        image.read(0, Box(0, 0, HEIGHT, WIDTH))
    with pytest.raises(BadImage, match="truncated"):
        read_image(tmp_path / "a.tif")


@pytest.mark.parametrize("compression", ["raw", "tiff_adobe_deflate", "tiff_lzw"])
def test_colours_and_bits_that_would_be_misread_are_rejected(compression: str, tmp_path: Path) -> None:
    image = Image.fromarray(PIXELS)
    image.convert("YCbCr").save(tmp_path / "a.tif", compression=compression)
    image.save(tmp_path / "b.tif", tiffinfo={266: 2})  # the tag FillOrder
    for name, reason in (
        ("a.tif", "YCbCr colours that are not stored as JPEG"),
        ("b.tif", "bits are in reverse order"),
    ):
        with pytest.raises(BadImage, match=reason):
            open_region_image(tmp_path / name)


@pytest.mark.parametrize(
    ("pixels", "options", "reason"),
    [
        (PIXELS.astype(np.float32), {}, "float32 pixels"),
        (PIXELS, {"compression": "lzma"}, "LZMA compression needs the package imagecodecs|cannot be read"),
        (np.zeros((5, 5, 100, 100), np.uint8), {}, "axes"),
        (PIXELS[..., 0], {"photometric": "miniswhite"}, "MINISWHITE cannot be .*; save the image"),
    ],
)
def test_files_that_cannot_be_read_by_region_are_rejected(pixels, options, reason, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "imagecodecs", None)
    options = {"photometric": "rgb" if pixels.ndim == 3 else "minisblack", **options}
    tifffile.imwrite(tmp_path / "a.tif", pixels, **options)
    with pytest.raises(BadImage, match=reason):
        open_region_image(tmp_path / "a.tif")
    (tmp_path / "b.tif").write_bytes(b"II*\0 not really")
    with pytest.raises(BadImage):
        open_region_image(tmp_path / "b.tif")


def test_planes_in_other_files_of_an_ome_tiff_are_reported(tmp_path: Path) -> None:
    unique = "urn:uuid:{}0000000-0000-0000-0000-000000000000"
    planes = "".join(
        f'<TiffData IFD="0" FirstC="{number}" PlaneCount="1">'
        f'<UUID FileName="c{number}.ome.tif">{unique.format(number)}</UUID></TiffData>'
        for number in (0, 1)
    )
    for number in (0, 1):
        ome = (
            '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" '
            f'UUID="{unique.format(number)}"><Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYCZT" '
            'Type="uint8" SizeX="64" SizeY="64" SizeC="2" SizeZ="1" SizeT="1"><Channel ID="Channel:0:0"/>'
            f'<Channel ID="Channel:0:1"/>{planes}</Pixels></Image></OME>'
        )
        pixels = np.full((64, 64), 50 + number, np.uint8)
        tifffile.imwrite(tmp_path / f"c{number}.ome.tif", pixels, description=ome, metadata=None)
    for number in (0, 1):
        for read in (open_region_image, read_planes_header):
            with pytest.raises(BadImage, match="planes that are not in the file"):
                read(tmp_path / f"c{number}.ome.tif")


def test_a_list_of_pages_above_the_limit_is_rejected(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("paceline.images.tiff.MAX_PAGES", 3)
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((4, 16, 16), np.uint8), photometric="minisblack", metadata=None)
    with pytest.raises(BadImage, match="list of pages"):
        open_region_image(tmp_path / "a.tif")


def test_a_second_command_does_not_write_the_same_file(tmp_path: Path) -> None:
    form, blocks = PyramidFormat(64, 32, 1, "uint8", 32), blocks_of(64, 32, 32)
    pixels = RNG.integers(0, 200, (64, 32, 1)).astype(np.uint8)
    file = PyramidFile(tmp_path / "a.tif", form, blocks, {"weights": "first"})
    file.append_block(file.encode_block(blocks[0], pixels[:32]))
    for purpose in ("first", "second"):
        with pytest.raises(UserError, match="another command is writing this result"):
            PyramidFile(tmp_path / "a.tif", form, blocks, {"weights": purpose})
    file.append_block(file.encode_block(blocks[1], pixels[32:]))
    finish(file, "a")
    assert np.array_equal(tifffile.imread(tmp_path / "a.tif"), pixels[..., 0])
    PyramidFile(tmp_path / "a.tif", form, blocks, {"weights": "second"}).close()


def test_files_that_compress_well_are_not_taken_for_damaged_ones(tmp_path: Path) -> None:
    flat = np.zeros((2048, 2048, 3), np.uint8)
    for options in ({}, {"tile": (256, 256)}, {"tile": (16, 16)}, {"rowsperstrip": 1}):
        tifffile.imwrite(tmp_path / "a.tif", flat, photometric="rgb", compression="zlib", **options)
        with open_region_image(tmp_path / "a.tif") as image:
            assert not image.read(0, Box(2040, 0, 8, 2048)).any()
    planes = {"photometric": "rgb", "planarconfig": "separate"}
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((3, 40, 40), np.uint8), compression="zlib", **planes)
    with open_region_image(tmp_path / "a.tif") as image:
        assert image.read(0, Box(0, 0, 40, 40)).shape == (40, 40, 3)


@pytest.mark.parametrize("compression", [1, 8, 5, 32773, 7, 50000, 34712])
def test_a_header_with_a_size_beyond_the_stored_pixels_is_reported(
    compression: int, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(regions, "is_installed", lambda _: True)
    path = tmp_path / "wide.tif"
    for stored in ({}, {"rowsperstrip": 1}, {"tile": (16, 16)}):
        for tag in ("ImageWidth", "ImageLength"):
            tifffile.imwrite(path, np.zeros((48, 48), np.uint8), **stored)
            with tifffile.TiffFile(path, mode="r+") as file:
                file.pages.first.tags[tag].overwrite(2**27)
                file.pages.first.tags["Compression"].overwrite(compression)
            with pytest.raises(BadImage, match=r"the file is damaged|damaged: tile 0|strips of .* MB cannot be read"):
                open_region_image(path)
