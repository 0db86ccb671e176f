"""TIFF planes as channels: files of several writers, damaged copies, and files that cannot be used."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from paceline.config.flags import SeparateTestFolder
from paceline.contracts.data_spec import PixelFormat
from paceline.core.errors import UserError
from paceline.data.stream import to_pixels
from paceline.images.decode import BadImage
from paceline.images.deep import read_deep, read_planes_header, to_format
from paceline.images.encode import Attachments, read_image, write_image
from paceline.images.readers import EightBitReader, choose_reader, make_reader

PLANES = np.random.default_rng(0).integers(0, 65536, (5, 12, 9), dtype=np.uint16)
SIXTEEN_BITS = PixelFormat.of("uint16")
FLOATS = PixelFormat("float32", -1.0, 3.0)


def with_pillow(path: Path, planes: np.ndarray, compression: str) -> None:
    """Write a multi-page TIFF with Pillow, which can write compressions that tifffile alone cannot read."""
    first, *others = (Image.fromarray(plane) for plane in planes)
    first.save(path, save_all=True, append_images=others, compression=compression)


WRITERS: dict[str, Callable[[Path, np.ndarray], Any]] = {
    "pages": lambda path, planes: tifffile.imwrite(path, planes, photometric="minisblack", metadata=None),
    "deflate": lambda path, planes: tifffile.imwrite(
        path, planes, photometric="minisblack", compression="zlib", predictor=True
    ),
    "big": lambda path, planes: tifffile.imwrite(path, planes, photometric="minisblack", bigtiff=True),
    "big_endian": lambda path, planes: tifffile.imwrite(path, planes, photometric="minisblack", byteorder=">"),
    "ome": lambda path, planes: tifffile.imwrite(
        path, planes[None, :, None], photometric="minisblack", ome=True, metadata={"axes": "TCZYX"}
    ),
    "imagej": lambda path, planes: tifffile.imwrite(path, planes, imagej=True, metadata={"axes": "CYX"}),
    "interleaved": lambda path, planes: tifffile.imwrite(path, np.moveaxis(planes, 0, -1), planarconfig="contig"),
    "separate": lambda path, planes: tifffile.imwrite(path, planes, planarconfig="separate"),
    "pillow_raw": lambda path, planes: with_pillow(path, planes, "raw"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_the_planes_of_every_writer_become_channels(writer: str, tmp_path: Path) -> None:
    file = tmp_path / "a.tif"
    WRITERS[writer](file, PLANES)
    header = read_planes_header(file)
    assert header is not None and header.is_stack
    assert (header.height, header.width, header.channels, header.dtype) == (12, 9, 5, np.uint16)
    assert np.array_equal(read_deep(file).pixels, np.moveaxis(PLANES, 0, -1))
    assert np.array_equal(read_deep(file.read_bytes()).pixels, np.moveaxis(PLANES, 0, -1))
    assert np.array_equal(read_image(file, 5, SIXTEEN_BITS).pixels, np.moveaxis(PLANES, 0, -1))
    content = file.read_bytes()
    for length in range(1, len(content), 97):  # a truncated file is never read as fewer planes
        with suppress(BadImage):
            assert np.array_equal(read_deep(content[:length]).pixels, np.moveaxis(PLANES, 0, -1)), length
    with pytest.raises(BadImage):
        read_deep(content[: len(content) // 2])


def test_channels_with_a_compression_that_cannot_be_decoded_are_rejected_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.tif"
    tifffile.imwrite(file, np.moveaxis(PLANES, 0, -1), planarconfig="contig", compression="zlib", metadata=None)
    with tifffile.TiffFile(file, mode="r+") as pages:
        pages.pages.first.tags["Compression"].overwrite(34887)
    for is_installed in (False, True):
        monkeypatch.setattr("paceline.images.deep.is_installed", lambda _, found=is_installed: found)
        remedy = "" if is_installed else ", or install imagecodecs"
        with pytest.raises(BadImage, match=rf"LERC compression .*not supported; save the image .*predictor{remedy}$"):
            read_deep(file)


def test_pixels_that_expand_to_more_than_the_image_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "bomb.tif"
    tifffile.imwrite(file, np.zeros((3, 8, 8), np.uint16), photometric="minisblack", compression="zlib", metadata=None)
    with tifffile.TiffFile(file) as tiff:
        tags = [page.tags for page in tiff.pages]
        places = [(tag["StripOffsets"].valueoffset, tag["StripByteCounts"].valueoffset) for tag in tags]
    bomb = zlib.compress(bytes(2**24))
    content = bytearray(file.read_bytes())
    for offset_at, length_at in places:
        struct.pack_into("<I", content, offset_at, len(content))
        width = 4 if content[length_at - 6] == 4 else 2  # the tag's type: LONG or SHORT
        content[length_at : length_at + width] = min(len(bomb), 2 ** (8 * width) - 1).to_bytes(width, "little")
    with pytest.raises(BadImage, match="expand to more"):
        read_deep(bytes(content) + bomb)


def unusable(path: Path, **options: Any) -> str:
    tifffile.imwrite(path, **options)
    with pytest.raises(BadImage) as raised:
        read_deep(path)
    return str(raised.value)


def test_files_whose_planes_cannot_be_channels_are_rejected_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "a.tif"
    grey: dict[str, Any] = {"photometric": "minisblack"}
    assert "65 channels, above the limit of 64" in unusable(file, data=np.zeros((65, 4, 4), np.uint8), **grey)
    assert "int32 pixels" in unusable(file, data=PLANES.astype(np.int32), **grey)
    assert "uint32 pixels" in unusable(file, data=PLANES.astype(np.uint32), **grey)
    many = unusable(file, data=np.stack([PLANES] * 3), ome=True, metadata={"axes": "ZCYX"}, **grey)
    assert "too many dimensions (3 Z×5 C" in many
    with tifffile.TiffWriter(file) as writer:
        writer.write(PLANES[0], metadata=None)
        writer.write(PLANES[1, :7], metadata=None)
    with pytest.raises(BadImage, match="different sizes \\(9×12 and 9×7 pixels\\)"):
        read_deep(file)


def test_reduced_copies_and_single_images_are_not_stacks(tmp_path: Path) -> None:
    file = tmp_path / "a.tif"
    with tifffile.TiffWriter(file) as writer:
        writer.write(PLANES[0], metadata=None)
        writer.write(PLANES[0, ::2, ::2], subfiletype=1, metadata=None)
    header = read_planes_header(file)
    assert header is not None and not header.is_stack and header.channels == 1
    assert np.array_equal(read_image(file, 1).pixels[..., 0], PLANES[0])


def test_transparent_grey_images_are_blended_over_white_like_transparent_colours(tmp_path: Path) -> None:
    file, pixels = tmp_path / "a.tif", np.full((6, 4, 2), 100, np.uint8)
    pixels[:3, :, 1], pixels[3:, :, 1] = 0, 255
    Image.fromarray(pixels).save(file)
    header = read_planes_header(file)
    assert header is not None and not header.is_stack and header.channels == 1
    assert read_deep(file).pixels[[0, 5], 0].tolist() == [[255], [100]]
    assert type(choose_reader([file], SeparateTestFolder()).reader) is EightBitReader
    tifffile.imwrite(file, pixels, photometric="miniswhite", extrasamples=["unassalpha"])
    assert read_deep(file).pixels[[0, 5], 0].tolist() == [[255], [155]]
    tifffile.imwrite(file, pixels, photometric="minisblack", extrasamples=["unspecified"])
    assert read_deep(file).channels == 2  # not transparency


def test_networks_for_grey_or_rgb_images_read_the_first_page_of_other_stacks(tmp_path: Path) -> None:
    file = tmp_path / "a.tif"
    tifffile.imwrite(file, PLANES, photometric="minisblack")
    found = read_image(file, 3)
    assert np.array_equal(found.pixels[..., 0], PLANES[0]) and found.note == "only the first page was read"
    assert read_image(file, 5).note == ""
    with pytest.raises(BadImage, match="it has 5 channels, but the networks take 4"):
        read_image(file, 4)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(BadImage, match="it has 3 channels, but the networks take 5"):
        read_image(tmp_path / "a.png", 5)


def test_results_keep_the_channel_names_and_pixel_size_of_the_input(tmp_path: Path) -> None:
    names = ["DAPI", "FITC", "TRITC", "Cy5", "BF"]
    metadata = {"axes": "CYX", "Channel": {"Name": names}, "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.25}
    tifffile.imwrite(tmp_path / "a.ome.tif", PLANES, photometric="minisblack", metadata=metadata)
    image = read_image(tmp_path / "a.ome.tif", 5, SIXTEEN_BITS)
    enlarged = np.repeat(np.repeat(image.pixels, 2, axis=0), 2, axis=1)
    write_image(tmp_path / "made.ome.tif", enlarged, attached=Attachments(ome=image.ome))
    with tifffile.TiffFile(tmp_path / "made.ome.tif") as file:
        series, xml = file.series[0], file.ome_metadata or ""
        assert (series.axes, series.shape, series.dtype) == ("CYX", (5, 24, 18), np.uint16)
        assert np.array_equal(series.asarray()[:, ::2, ::2], PLANES)
    assert 'PhysicalSizeX="0.25"' in xml and 'PhysicalSizeY="0.125"' in xml
    assert all(f'Name="{name}"' in xml for name in names)


@pytest.mark.parametrize("kind", ["first_of_five", "grey", "colour", "deep_colour"])
def test_the_result_of_a_single_page_of_an_ome_tiff_is_described_by_its_own_metadata(kind: str, tmp_path: Path) -> None:
    """Copied OME-XML would describe the pages and the size of the input, so readers would return other pixels."""
    source, made = tmp_path / "a.ome.tif", tmp_path / "made.ome.tif"
    metadata: dict[str, Any] = {"PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5}
    if kind in ("first_of_five", "grey"):
        planes = PLANES if kind == "first_of_five" else PLANES[:1]
        metadata |= {"axes": "CYX", "Channel": {"Name": ["DAPI", "FITC", "TRITC", "Cy5", "BF"][: len(planes)]}}
        tifffile.imwrite(source, planes, photometric="minisblack", metadata=metadata)
    else:
        colours = np.moveaxis(PLANES[:3], 0, -1)
        colours = colours if kind == "deep_colour" else (colours >> 8).astype(np.uint8)
        tifffile.imwrite(source, colours, photometric="rgb", metadata=metadata | {"axes": "YXS"})
    image = read_image(source, 3)
    enlarged = np.repeat(np.repeat(image.pixels, 2, axis=0), 2, axis=1)
    write_image(made, enlarged, attached=Attachments(image.alpha, image.profile, image.exif, image.ome))
    with tifffile.TiffFile(made) as file:
        assert file.series[0].kind == "ome" and np.array_equal(file.asarray(), enlarged.squeeze())
        assert 'PhysicalSizeX="0.25"' in (file.ome_metadata or "")
        assert ('Name="DAPI"' in (file.ome_metadata or "")) == (kind in ("first_of_five", "grey"))
        assert "FITC" not in (file.ome_metadata or "")
    in_colour = np.repeat(image.pixels[..., :1], 3, axis=-1)  # as a network for colour panels returns it
    write_image(made, in_colour, attached=Attachments(ome=image.ome))
    with tifffile.TiffFile(made) as file:
        assert file.series[0].axes == "YXS" and np.array_equal(file.asarray(), in_colour)


@pytest.mark.parametrize("options", [{"imagej": True, "metadata": {"axes": "CYX"}}, {"photometric": "minisblack"}])
def test_the_result_of_the_first_page_is_not_described_as_a_stack(options: dict[str, Any], tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", PLANES, **options)
    image = read_image(tmp_path / "a.tif", 3)
    write_image(tmp_path / "made.tif", image.pixels, attached=Attachments(exif=image.exif))
    with tifffile.TiffFile(tmp_path / "made.tif") as file:
        assert file.pages.first.description == "" and np.array_equal(file.asarray(), PLANES[0])


def test_floating_point_results_are_not_rounded(tmp_path: Path) -> None:
    values = (PLANES.astype(np.float32) / 65535 * 4 - 1).clip(-1, 3)
    tifffile.imwrite(tmp_path / "a.tif", values, photometric="minisblack")
    image = read_image(tmp_path / "a.tif", 5, FLOATS)
    assert image.pixel_format == FLOATS
    stored = to_pixels(torch.from_numpy((image.pixels - 1) / 2), image.pixel_format)
    write_image(tmp_path / "made.tif", stored.numpy())
    made = tifffile.imread(tmp_path / "made.tif")
    assert made.dtype == np.float32 and np.abs(made - values).max() < 1e-6
    with pytest.raises(BadImage, match="float32 pixels"):
        read_image(tmp_path / "a.tif", 5, SIXTEEN_BITS)


@pytest.mark.parametrize(
    ("value", "problem"), [(np.nan, "NaN or infinite"), (np.inf, "NaN or infinite"), (-1.5, "from -1.5 to 0 exceed")]
)
def test_values_outside_the_declared_range_are_rejected(value: float, problem: str) -> None:
    array = np.zeros((4, 4, 1), np.float32)
    array[1, 2] = value
    with pytest.raises(BadImage, match=problem):
        to_format(array, FLOATS)


def test_white_stays_white_between_8_and_16_bits() -> None:
    eight = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)
    sixteen = to_format(eight, SIXTEEN_BITS)
    assert sixteen.max() == 65535 and np.array_equal(to_format(sixteen, PixelFormat()), eight)


def write_pages(file: Path, *levels: int, mode: str = "L") -> Path:
    first, *others = (Image.new("L", (8, 8), level).convert(mode) for level in levels)
    first.save(file, save_all=True, append_images=others)
    return file


def test_training_and_inference_read_three_pages_as_the_same_colours(tmp_path: Path) -> None:
    file = write_pages(tmp_path / "a.tif", 10, 20, 30)
    trained = choose_reader([file], SeparateTestFolder()).reader
    assert trained == make_reader(3, PixelFormat())
    assert trained.arrange(trained.decode(file), 4)[0, 0].tolist() == [10, 20, 30]
    assert read_image(file, 3).pixels[0, 0].tolist() == [10, 20, 30]
    grey = choose_reader([file], SeparateTestFolder(channels=1)).reader
    assert grey.arrange(grey.decode(file), 0)[0, 0].tolist() == [10]


def test_pages_that_become_channels_are_noted_unless_the_file_declares_channels(tmp_path: Path) -> None:
    def notes(file: Path) -> str:
        return " ".join(choose_reader([file], SeparateTestFolder()).notes)

    assert "3 pages are read as channels; use --set channels=1 to" in notes(write_pages(tmp_path / "3.tif", 1, 2, 3))
    assert "5 pages are read as channels; use --set channels=1 to" in notes(write_pages(tmp_path / "5.tif", *range(5)))
    WRITERS["pages"](tmp_path / "deep.tif", PLANES)
    assert notes(tmp_path / "deep.tif").endswith("its 5 pages are read as channels")  # 16 bits: all pages or an error
    WRITERS["ome"](tmp_path / "ome.tif", PLANES)
    assert notes(tmp_path / "ome.tif") == ""


def test_pages_that_cannot_be_channels_are_rejected_with_the_setting_that_reads_the_first(tmp_path: Path) -> None:
    fax = write_pages(tmp_path / "fax.tif", 0, 255, mode="1")
    colours = tmp_path / "colours.tif"
    tifffile.imwrite(colours, np.zeros((2, 8, 8, 3), np.uint16), photometric="rgb")
    for file in (fax, colours):
        with pytest.raises(UserError, match="channels=1 or channels=3"):
            choose_reader([file], SeparateTestFolder())
        reader = choose_reader([file], SeparateTestFolder(channels=3)).reader
        assert not reader.arrange(reader.decode(file), 0).any()  # black, like the first page
