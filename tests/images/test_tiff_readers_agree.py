"""The same TIFF, read as a whole and by region: both readers see the same image, or one of them rejects the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile

from paceline.images.decode import BadImage
from paceline.images.deep_image import read_deep
from paceline.images.image_file import read_image
from paceline.images.regions.open_image import open_region_image

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
