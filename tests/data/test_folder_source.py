"""The source `folder` reads images in several layouts and file formats, and reports broken files."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_data import random_images
from PIL import Image

from paceline.config.flags import SeparateTestFolder
from paceline.core.errors import UserError
from paceline.data.sources.folder import Folder


def save(path: Path, image: np.ndarray | Image.Image, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(path, **options)
    return path


def settings(root: Path, **changes: object) -> SeparateTestFolder:
    return SeparateTestFolder(data_root=str(root), workers=0, **changes)  # type: ignore[arg-type]


def read_only_image(root: Path, **changes: object) -> np.ndarray:
    return Folder("train", settings(root, **changes)).read(0)["image"]


def save_train_and_test(root: Path, name: str, image: np.ndarray | Image.Image, **options: Any) -> None:
    for split in ("train", "test"):
        save(root / split / name, image, **options)


def test_classes_are_the_subfolders_of_the_training_folder(tmp_path: Path) -> None:
    for split, kind, count in (("train", "b", 2), ("train", "a", 3), ("test", "b", 1)):
        for number in range(count):
            save(tmp_path / split / kind / f"{number}.png", random_images(6, 6, 3))
    training, test = Folder("train", settings(tmp_path)), Folder("test", settings(tmp_path))
    assert training.spec.class_names == test.spec.class_names == ("a", "b")
    assert [int(training.read(index)["label"]) for index in range(5)] == [0, 0, 0, 1, 1]
    assert [int(test.read(index)["label"]) for index in range(len(test))] == [1]
    (tmp_path / "test" / "c").mkdir()
    with pytest.raises(UserError, match="class 'c' has no folder in the training split"):
        Folder("test", settings(tmp_path))


def test_without_a_test_folder_a_fixed_fifth_of_the_images_is_held_out(tmp_path: Path) -> None:
    for kind in ("a", "b"):
        for number in range(10):
            save(tmp_path / kind / "deep" / f"{number}.png", random_images(4, 4, 3))
    training, test = Folder("train", settings(tmp_path)), Folder("test", settings(tmp_path))
    assert (len(training), len(test)) == (16, 4)
    assert len({source.name_of(index) for source in (training, test) for index in range(len(source))}) == 20
    assert training.spec.num_classes == 2


def test_images_without_class_folders_have_no_labels(tmp_path: Path) -> None:
    for number in range(5):
        save(tmp_path / f"{number}.PNG", random_images(4, 4, 3))
    source = Folder("train", settings(tmp_path))
    assert len(source) == 4 and source.spec.num_classes == 0
    assert source.read_many(np.arange(4)).keys() == {"image"}


def test_a_class_may_be_named_train(tmp_path: Path) -> None:
    for kind in ("boat", "train"):
        for number in range(5):
            save(tmp_path / kind / f"{number}.png", random_images(4, 4, 3))
    assert Folder("train", settings(tmp_path)).spec.class_names == ("boat", "train")


@pytest.mark.parametrize(
    "names",
    [
        ("Train", "Test"),
        ("training", "testing"),
        ("train", "TEST"),
        ("Train", "Test", "Meta"),
        ("seg_train", "seg_test"),
        ("train", "dev"),
    ],
)
def test_split_folders_with_other_names_are_not_used_as_classes(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        for kind in ("a", "b"):
            save(tmp_path / name / kind / "0.png", random_images(8, 8))
    with pytest.raises(UserError, match=r"not used as splits, which are called train and test; rename them"):
        Folder("train", settings(tmp_path))


def test_a_class_that_loses_all_training_images_is_reported(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        for number in range(4):
            save(tmp_path / "train" / name / f"{number}.png", random_images(8, 8))
        save(tmp_path / "test" / name / "0.png", random_images(8, 8))
    assert not Folder("train", settings(tmp_path)).notes
    for file in (tmp_path / "train" / "b").iterdir():
        file.write_bytes(file.read_bytes()[:60])
    notes = Folder("train", settings(tmp_path, bad_images="skip")).notes
    assert any("1 of 3 classes have no training images (b); add images" in note for note in notes), notes
    assert not Folder("test", settings(tmp_path, bad_images="skip")).notes


def test_a_linked_class_folder_with_a_colon_in_its_name_is_not_reported_as_ignored(tmp_path: Path) -> None:
    for number in range(6):
        save(tmp_path / "elsewhere" / f"{number}.png", random_images(8, 8))
        save(tmp_path / "data" / "b" / f"{number}.png", random_images(8, 8))
    (tmp_path / "data" / "a:1").symlink_to(tmp_path / "elsewhere")
    source = Folder("train", settings(tmp_path / "data"))
    assert source.spec.class_names == ("a:1", "b") and not source.notes and not source.not_used


def test_images_alongside_class_folders_are_skipped_with_a_note(tmp_path: Path) -> None:
    save_train_and_test(tmp_path, "a/0.png", random_images(4, 4, 3))
    save(tmp_path / "train" / "stray.png", random_images(4, 4, 3))
    save(tmp_path / "train" / "a" / ".hidden.png", random_images(4, 4, 3))
    source = Folder("train", settings(tmp_path))
    assert len(source) == 1
    assert source.notes == (f"{tmp_path}: images outside the class folders are not used (images affected: 1)",)


def test_images_of_every_format_become_8_bit_rgb_or_grey(tmp_path: Path) -> None:
    flat, grey, colour = np.full((6, 6, 3), 200, dtype=np.uint8), random_images(6, 6), random_images(6, 6, 3)

    def read_saved(name: str, image: np.ndarray, channels: int = 0, **options: Any) -> np.ndarray:
        for split in ("train", "test"):
            save(tmp_path / f"{name} {image.dtype}" / split / name, image, **options)
        return read_only_image(tmp_path / f"{name} {image.dtype}", channels=channels)

    for suffix in ("png", "bmp", "tif", "gif", "webp", "jpg"):
        assert np.abs(read_saved(f"a.{suffix}", flat).astype(int) - 200).max() <= 4
    assert np.array_equal(read_saved("grey.png", grey), np.repeat(grey[..., None], 3, axis=2))
    assert np.array_equal(read_saved("grey.png", grey, channels=1), grey[..., None])
    luma = colour @ np.array([0.299, 0.587, 0.114])  # BT.601
    assert np.abs(read_saved("colour.png", colour, channels=1)[..., 0] - luma).max() <= 0.51
    deep = np.array([[0, 257], [32896, 65535]], dtype=np.uint16)  # 16 bits are scaled, not clipped
    for name in ("deep.png", "deep.tif"):
        assert read_saved(name, deep, channels=1)[..., 0].tolist() == [[0, 1], [128, 255]]
    veil = np.zeros((2, 2, 4), dtype=np.uint8)
    veil[0, :, 3] = 255  # the upper row is opaque black; transparent pixels become white
    assert read_saved("veil.png", veil)[..., 0].tolist() == [[0, 0], [255, 255]]
    exif = Image.Exif()
    exif[0x0112] = 6  # EXIF orientation: rotate by 90° clockwise
    assert np.array_equal(read_saved("turned.png", colour, exif=exif), np.rot90(colour, -1))


def test_sixteen_bit_colour_is_scaled_too(tmp_path: Path) -> None:
    rows = b"\x00" + struct.pack(">6H", 0, 32896, 65535, 65535, 0, 257)
    chunks = [(b"IHDR", struct.pack(">2I5B", 2, 1, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.png").write_bytes(png(chunks))
    assert Folder("train", settings(tmp_path, size=1)).read(0)["image"].shape == (1, 1, 3)
    assert read_only_image(tmp_path)[0, 0].tolist() == [0, 128, 255]


def test_pixel_formats_without_a_white_level_are_rejected(tmp_path: Path) -> None:
    save_train_and_test(tmp_path, "a.tif", Image.fromarray(np.ones((4, 4), dtype=np.float32)))
    with pytest.raises(UserError, match=r"a\.tif: floating-point pixels need a declared range.*value_range=0,1"):
        read_only_image(tmp_path)
    with pytest.raises(UserError, match=r"a\.tif: unreadable image \(signed or 32-bit pixels"):
        read_only_image(tmp_path, pixels="uint8", channels=3)


def test_the_central_square_is_used_and_the_first_image_sets_the_size(tmp_path: Path) -> None:
    wide = random_images(6, 10, 3)
    save_train_and_test(tmp_path, "a.png", wide)
    save_train_and_test(tmp_path, "b.png", random_images(20, 9, 3))
    source = Folder("train", settings(tmp_path))
    assert (source.spec.height, source.spec.width) == (6, 6)
    assert np.array_equal(source.read(0)["image"], wide[:, 2:8])
    assert source.read(1)["image"].shape == (6, 6, 3)


def test_downsampling_averages_over_all_pixels(tmp_path: Path) -> None:
    stripes = np.zeros((64, 64, 3), dtype=np.uint8)
    stripes[:, ::2] = 255
    save_train_and_test(tmp_path, "a.png", stripes)
    assert np.abs(read_only_image(tmp_path, size=8).astype(int) - 127)[:, 1:-1].max() <= 3


def test_the_error_for_an_unreadable_image_suggests_a_fix(tmp_path: Path) -> None:
    save_train_and_test(tmp_path, "a.png", random_images(4, 4, 3))
    (tmp_path / "train" / "b.png").write_bytes(b"no image")
    source = Folder("train", settings(tmp_path))
    with pytest.raises(UserError, match=r"train/b\.png: unreadable image .*--bad-images skip") as raised:
        source.read(1)
    assert "\n" not in str(raised.value)


def test_unreadable_images_are_skipped_and_counted_if_bad_images_is_skip(tmp_path: Path) -> None:
    for kind in ("a", "b"):
        save_train_and_test(tmp_path, f"{kind}/good.png", random_images(8, 8, 3))
    (tmp_path / "train" / "a" / "0.jpg").write_bytes(b"no image")
    whole = (tmp_path / "train" / "a" / "good.png").read_bytes()
    (tmp_path / "train" / "a" / "torn.png").write_bytes(whole[: len(whole) // 2])
    source = Folder("train", settings(tmp_path, bad_images="skip"))
    assert [files["image"].name for files in source.files] == ["good.png", "good.png"]
    assert [int(source.read(index)["label"]) for index in range(2)] == [0, 1]
    (note,) = source.notes
    assert note.startswith(f"left out 2 of 4 samples in {tmp_path}/train: a/0.jpg: unreadable image (")
    assert ", a/torn.png: unreadable image (" in note


def test_a_folder_with_only_unreadable_images_is_rejected_even_if_bad_images_is_skip(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"train: none of its images can be used: a\.png: unreadable image \(not an"):
        Folder("train", settings(tmp_path, bad_images="skip"))
    with pytest.raises(UserError, match=r"a\.png: unreadable image"):
        Folder("train", settings(tmp_path))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_000, 60_000])
def test_a_decompression_bomb_is_rejected_before_it_is_decoded(side: int, tmp_path: Path) -> None:
    header = struct.pack(">2I5B", side, side, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    save_train_and_test(tmp_path, "a.png", random_images(4, 4, 3))
    (tmp_path / "train" / "b.png").write_bytes(png(chunks))
    with pytest.raises(UserError, match=r"b\.png: unreadable image .*(limit|bomb)"):
        Folder("train", settings(tmp_path)).read(1)


def png(chunks: list[tuple[bytes, bytes]]) -> bytes:
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (None, "--data-root .*absent: no such folder"),
        ([], "has no images"),
        (["train/a", "test/a"], "train/a: has no images"),
        (["a"], "a: has no images .*; add some, or remove the folder"),
        (["train"], "has no folder 'test'"),
    ],
)
def test_a_missing_or_empty_folder_is_reported(folders: list[str] | None, message: str, tmp_path: Path) -> None:
    root = tmp_path / "absent" if folders is None else tmp_path
    for folder in folders or []:
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(UserError, match=message) as raised:
        Folder("test" if folders == ["train"] else "train", settings(root))
    assert "\n" not in str(raised.value)


def test_a_file_instead_of_a_folder_is_reported(tmp_path: Path) -> None:
    for name, remedy in (
        ("own.npz", "use --data npz"),
        ("photo.png", "use the folder that contains it"),
        ("photos.ZIP", "extract the archive, and use the extracted folder"),
        ("photos.tar.gz", "extract the archive, and use the extracted folder"),
    ):
        (tmp_path / name).touch()
        with pytest.raises(UserError, match=f"--data-root .*{name}: is a file, not a folder; {remedy}"):
            Folder("train", settings(tmp_path / name))


def test_a_single_image_cannot_be_split(tmp_path: Path) -> None:
    save(tmp_path / "a.png", random_images(4, 4, 3))
    with pytest.raises(UserError, match="one sample is too few"):
        Folder("train", settings(tmp_path))
