"""The same TIFF, read as a whole and by region: both readers see the same image, or one of them rejects the file."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from paceline.images.decode import BadImage
from paceline.images.deep_image import read_deep
from paceline.images.image_file import read_image
from paceline.images.regions.open_image import open_region_image
from paceline.images.regions.region_image import Box

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


@pytest.mark.skipif(not shutil.which("vips"), reason="needs the program vips")
@pytest.mark.parametrize("options", [[], ["--subifd"]])
def test_pyramids_of_another_program_are_read_without_a_note(options: list[str], tmp_path: Path) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "a.png")
    words = ["vips", "tiffsave", "a.png", "a.tif", "--tile", "--pyramid", "--tile-width", "16", "--tile-height", "16"]
    subprocess.run([*words, *options], cwd=tmp_path, check=True)
    assert read_image(tmp_path / "a.tif").note == ""
    with open_region_image(tmp_path / "a.tif") as image:
        assert len(image.levels) > 1 and image.format.note == ""


def test_pages_that_were_not_read_are_reported(tmp_path: Path) -> None:
    for other in (PIXELS, PIXELS[:50]):
        with tifffile.TiffWriter(tmp_path / "a.tif") as file:
            for pixels in (PIXELS, other):
                file.write(pixels, photometric="rgb", metadata=None)
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
