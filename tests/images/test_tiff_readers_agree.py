"""The same TIFF, read as a whole and by region: both readers see the same image, or one of them rejects the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from paceline.config.flags import SeparateTestFolder
from paceline.contracts.data_spec import PixelFormat
from paceline.core.errors import UserError
from paceline.images.decode import BadImage
from paceline.images.deep import image_size, read_deep
from paceline.images.encode import read_image
from paceline.images.readers import choose_reader
from paceline.images.rectangles import Box
from paceline.images.regions import open_region_image

PIXELS = np.random.default_rng(0).integers(0, 256, (96, 64, 3), dtype=np.uint8)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_an_ome_tiff_that_starts_with_another_page_is_never_read_as_two_different_images(dtype, tmp_path: Path) -> None:
    images = "".join(
        f'<Image ID="Image:{number}"><Pixels ID="Pixels:{number}" DimensionOrder="XYCZT" Type="{dtype}" SizeX="64" '
        f'SizeY="{height}" SizeC="3" SizeZ="1" SizeT="1"><Channel ID="Channel:{number}:0" SamplesPerPixel="3"/>'
        f'<TiffData IFD="{page}" PlaneCount="1"/></Pixels></Image>'
        for number, (page, height) in enumerate([(1, 96), (0, 32)])  # the first image is on the second page
    )
    ome = f'<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06">{images}</OME>'
    path = tmp_path / "a.ome.tif"
    with tifffile.TiffWriter(path) as file:
        file.write(PIXELS[:32].astype(dtype), photometric="rgb", description=ome, metadata=None)
        file.write(PIXELS.astype(dtype), photometric="rgb", metadata=None)
    assert np.array_equal(read_image(path).pixels, PIXELS[:32])
    for read in (open_region_image, read_deep):
        with pytest.raises(BadImage, match="an image on a later page as the first"):
            read(path)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("place", ["flagged pages", "pages", "SubIFDs"])
def test_lower_resolutions_are_not_reported_as_pages_that_were_not_read(place: str, dtype: str, tmp_path: Path) -> None:
    path, pixels = tmp_path / "a.tif", PIXELS.astype(dtype)
    inside, flag = int(place == "SubIFDs") * 2, int(place != "pages")
    with tifffile.TiffWriter(path) as file:
        file.write(pixels, photometric="rgb", tile=(32, 32), subifds=inside)
        for step in (2, 4):
            file.write(pixels[::step, ::step], photometric="rgb", tile=(32, 32), subfiletype=flag, metadata=None)
    found = read_image(path)
    assert np.array_equal(found.pixels, pixels) and found.note == ""
    with open_region_image(path) as image:
        assert len(image.levels) == 3 and image.format.note == ""


def test_pages_that_were_not_read_are_reported(tmp_path: Path) -> None:
    for other in (PIXELS, PIXELS[:50]):
        with tifffile.TiffWriter(tmp_path / "a.tif") as file:
            for pixels in (PIXELS, other):
                file.write(pixels, photometric="rgb", metadata=None)
        assert read_image(tmp_path / "a.tif").note == "only the first page was read"
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        damaged, content = file.pages[1].offset, bytearray((tmp_path / "a.tif").read_bytes())
    content[damaged + 2 : damaged + 14] = bytes(12)  # the width
    (tmp_path / "a.tif").write_bytes(content)
    assert read_image(tmp_path / "a.tif").note == "only the first page was read"


@pytest.mark.parametrize(("extra", "dtype"), [(1, "uint8"), (2, "uint8"), (1, "uint16")])
def test_samples_that_are_neither_colours_nor_transparency_are_read_only_for_networks_with_as_many_channels(
    extra: int, dtype: str, tmp_path: Path
) -> None:
    path, stored = tmp_path / "a.tif", np.concatenate([PIXELS, PIXELS[..., :extra]], axis=-1).astype(dtype)
    tifffile.imwrite(path, stored, photometric="rgb", extrasamples=["unspecified"] * extra, tile=(32, 32))
    for channels, expected in ((1, stored[..., :3]), (3, stored[..., :3]), (3 + extra, stored)):
        whole = read_image(path, channels)
        with open_region_image(path, channels) as image:
            assert np.array_equal(image.read(0, Box(0, 0, 96, 64)), expected)
            assert np.array_equal(whole.pixels, expected) and whole.note == image.format.note
            assert ("channels other than colours" in whole.note) == (channels <= 3)


@pytest.mark.parametrize("num_planes", [3, 4])
@pytest.mark.parametrize("options", [{"imagej": True}, {"ome": True, "photometric": "minisblack"}])
@pytest.mark.parametrize("axis", ["Z", "T"])
def test_depths_and_times_are_not_colours(axis: str, options: dict[str, Any], num_planes: int, tmp_path: Path) -> None:
    path, planes = tmp_path / "a.tif", np.moveaxis(np.concatenate([PIXELS, PIXELS], axis=-1), -1, 0)[:num_planes]
    tifffile.imwrite(path, planes, metadata={"axes": f"{axis}YX"}, **options)
    found = read_image(path, 3)
    assert np.array_equal(found.pixels[..., 0], PIXELS[..., 0]) and found.pixels.shape[-1] == 1
    assert found.note == "only the first page was read"
    with pytest.raises(BadImage, match="save one file per time point, depth or position"):
        open_region_image(path)
    reader = choose_reader([path], SeparateTestFolder(channels=3)).reader
    assert np.array_equal(reader.arrange(reader.decode(path), 0), PIXELS[..., :1].repeat(3, axis=-1))


def test_training_rejects_three_depths_unless_only_the_first_is_read(tmp_path: Path) -> None:
    paths = [tmp_path / "colours.tif", tmp_path / "depths.tif"]
    for path, axis in zip(paths, "CZ", strict=True):
        planes = np.moveaxis(PIXELS, -1, 0).astype(np.uint16)
        tifffile.imwrite(path, planes, imagej=True, metadata={"axes": f"{axis}YX"})
    for settings in (SeparateTestFolder(), SeparateTestFolder(channels=3), SeparateTestFolder(channels=1)):
        with pytest.raises(UserError, match=r"depths\.tif: its 3 planes are depths, times or positions, not colours"):
            choose_reader(paths[1:], settings)
    reader = choose_reader(paths, SeparateTestFolder()).reader
    assert reader.size(paths[0]) == (96, 64)
    with pytest.raises(BadImage, match="not colours"):
        reader.size(paths[1])
    with pytest.raises(BadImage, match="it has 3 channels, but the networks take 4"):
        read_image(paths[1], 4)
    with pytest.raises(BadImage, match="not colours"):
        read_image(paths[1], 3, PixelFormat("uint16", 0.0, 4095.0))


@pytest.mark.extras
def test_jpeg_2000_colours_that_may_be_rgb_or_ycbcr_are_rejected(tmp_path: Path) -> None:
    pytest.importorskip("imagecodecs")
    path, options = tmp_path / "a.tif", {"tile": (32, 32), "compression": 33004}
    tifffile.imwrite(path, PIXELS, photometric="rgb", **options)
    for read in (open_region_image, read_deep, image_size):
        with pytest.raises(BadImage, match="33004 may be RGB or YCbCr, and the file does not state which"):
            read(path)
    tifffile.imwrite(path, PIXELS[..., 0], photometric="minisblack", **options)
    with open_region_image(path) as image:
        assert image.read(0, Box(0, 0, 96, 64)).shape == (96, 64, 1)
