"""All commands agree on which files they accept."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tifffile
import torch
from photographs import photograph
from PIL import Image

from paceline.config.flags import PhotoSettings, SeparateTestFolder
from paceline.core.errors import UserError
from paceline.data.sources.folder import Folder
from paceline.data.sources.photos import Photos
from paceline.images.decode import BadImage
from paceline.images.encode import read_image
from paceline.images.readers import EightBitReader
from paceline.inference.apply_regions import RegionOptions, read_headers
from paceline.inference.files import find_images, plan_results
from paceline.inference.model import classify_files

PHOTO = Image.fromarray(photograph("coffee")).resize((24, 20))
ANIMATED = [PHOTO, PHOTO.rotate(180), PHOTO.rotate(90)]


def save(image: Image.Image, **options: Any) -> Callable[[Path], object]:
    return lambda path: image.save(path, **options)


def animate(**options: Any) -> Callable[[Path], object]:
    return lambda path: PHOTO.save(path, save_all=True, append_images=ANIMATED[1:], **options)


def as_tiff(pixels: Any, **options: Any) -> Callable[[Path], object]:
    return lambda path: tifffile.imwrite(path, pixels, **options)


def content(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def claim_to_be_huge(path: Path) -> None:
    """Write a tiny PNG file whose header declares 400 megapixels."""
    header = b"IHDR" + struct.pack(">2I5B", 20_000, 20_000, 8, 2, 0, 0, 0)
    chunks = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks + struct.pack(">I", 0) + b"IEND\xae\x42\x60\x82")


@dataclass(frozen=True)
class Odd:
    write: Callable[[Path], object]
    accepted: bool


DEEP = np.asarray(PHOTO).astype(np.uint16) * 257
ODD_FILES = {
    "plain.png": Odd(save(PHOTO), True),
    "CAPITALS.JPG": Odd(save(PHOTO, format="JPEG"), True),
    "jpeg_named.png": Odd(save(PHOTO, format="JPEG"), True),
    "png_named.tif": Odd(save(PHOTO, format="PNG"), True),
    "bitmap_named.gif": Odd(save(PHOTO, format="BMP"), True),
    "ink.jpg": Odd(save(PHOTO.convert("CMYK")), True),
    "ink.tif": Odd(save(PHOTO.convert("CMYK")), True),
    "lab.tif": Odd(save(PHOTO.convert("LAB")), True),
    "one_bit.png": Odd(save(PHOTO.convert("1")), True),
    "palette.png": Odd(save(PHOTO.quantize(7), transparency=0), True),
    "grey_alpha.png": Odd(save(PHOTO.convert("LA")), True),
    "deep_grey.png": Odd(save(Image.fromarray(DEEP[..., 0])), True),
    "deep_colours.tif": Odd(as_tiff(DEEP, photometric="rgb"), True),
    "pages.tif": Odd(animate(), True),
    "single_frame.gif": Odd(save(PHOTO), True),
    "moving.gif": Odd(animate(), False),
    "moving.png": Odd(animate(), False),
    "moving.webp": Odd(animate(lossless=True), False),
    "moving_named.jpg": Odd(animate(format="GIF"), False),
    "integers.tif": Odd(as_tiff(DEEP[..., 0].astype(np.int32)), False),
    "unsigned.tif": Odd(as_tiff(DEEP[..., 0].astype(np.uint32)), False),
    "floats.tif": Odd(as_tiff(DEEP[..., 0].astype(np.float32)), False),
    "signed.tif": Odd(as_tiff(DEEP[..., 0].astype(np.int8)), False),
    "huge.png": Odd(claim_to_be_huge, False),
    "empty.png": Odd(content(b""), False),
    "text.jpg": Odd(content(b"<html>404</html>"), False),
    "drawing.png": Odd(content(b'<svg xmlns="http://www.w3.org/2000/svg"/>'), False),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("odd") / "files"
    made.mkdir()
    for name, file in ODD_FILES.items():
        file.write(made / name)
    return made


class AnyClass:
    """A classifier that reads its input images and always predicts the same class."""

    classes = ("any",)
    reader = EightBitReader()

    def predict(self, images: Any) -> torch.Tensor:
        return torch.ones(len(list(images)), 1)


def apply_accepts(folder: Path) -> set[str]:
    accepted = set()
    for task in read_headers(plan_results([str(folder)], folder.parent / "out", [""]), RegionOptions()):
        try:
            read_image(Path(task.path))
        except BadImage:
            continue
        accepted.add(Path(task.path).name)
    return accepted


def predict_accepts(folder: Path) -> set[str]:
    found = classify_files(cast(Any, AnyClass()), find_images([str(folder)]).images, 1, [])
    return {Path(path).name for path, _ in found}


def folder_accepts(folder: Path) -> set[str]:
    settings = SeparateTestFolder(data="folder", data_root=str(folder), size=8, workers=2, bad_images="skip")
    sources = [Folder(split, settings) for split in Folder.splits]
    return {files["image"].name for source in sources for files in source.files}


def photos_accept(folder: Path) -> set[str]:
    settings = PhotoSettings(data="photos", data_root=str(folder), workers=2, bad_images="skip")
    sources = [Photos(split, settings) for split in Photos.splits]
    return {files["image"].name for source in sources for files in source.files}


def photos_read(folder: Path) -> set[str]:
    """Return the files that the source `photos` can read. Each file is tried in a separate folder."""
    accepted = set()
    for name in ODD_FILES:
        alone = folder.parent / f"only {name}"
        alone.mkdir()
        (alone / name).symlink_to(folder / name)
        settings = PhotoSettings(data="photos", data_root=str(alone), test_root=str(alone), workers=1)
        try:
            Photos("test", settings).read(0)
        except UserError:
            continue
        accepted.add(name)
    return accepted


@pytest.mark.parametrize("accept", [apply_accepts, predict_accepts, folder_accepts, photos_accept, photos_read])
def test_all_commands_accept_the_same_files(accept: Callable[[Path], set[str]], folder: Path) -> None:
    assert accept(folder) == {name for name, file in ODD_FILES.items() if file.accepted}


def test_a_folder_of_animated_images_is_rejected(tmp_path: Path) -> None:
    for name in ("a.gif", "b.gif"):
        animate()(tmp_path / name)
    with pytest.raises(UserError, match="animated images are not supported"):
        Folder("train", SeparateTestFolder(data="folder", data_root=str(tmp_path)))
