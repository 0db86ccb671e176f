"""Sources that are kept in memory: the digits, and arrays from a user's .npz file."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config.flags import PixelSettings
from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.data.sources.digits import Digits
from paceline.data.sources.npz import Npz


def test_digits_have_a_fixed_four_to_one_split_and_32_pixels_by_default(tmp_path: Path) -> None:
    training, test = Digits("train", RunSettings(size=8)), Digits("test", RunSettings(size=8))
    assert (len(training), len(test)) == (1438, 359)
    every = np.concatenate([training.arrays["image"], test.arrays["image"]])
    assert every.max() == 255 and every.min() == 0
    assert test.arrays["label"][:8].tolist() == [2, 2, 3, 4, 9, 5, 9, 9]
    assert (Digits("test", RunSettings()).spec.height, test.spec.height) == (32, 8)
    with pytest.raises(UserError, match="--data folder"):  # a folder that would not be read
        Digits("train", RunSettings(data_root=str(tmp_path)))


GOOD: dict[str, Any] = {
    "x_train": np.zeros((6, 5, 4), dtype=np.uint8),
    "y_train": np.arange(6, dtype=np.uint8)[:, None],
    "x_test": np.zeros((3, 5, 4, 3), dtype=np.uint8),
    "y_test": np.arange(3),
}


def npz(tmp_path: Path, **changes: Any) -> PixelSettings:
    arrays = {key: array for key, array in (GOOD | changes).items() if array is not None}
    np.savez(tmp_path / "own.npz", **arrays)
    return PixelSettings(data_root=str(tmp_path / "own.npz"))


def test_npz_accepts_grey_and_colour_images_and_labels_in_a_column(tmp_path: Path) -> None:
    settings = npz(tmp_path)
    training, test = Npz("train", settings), Npz("test", settings)
    assert (training.spec.height, training.spec.width, training.spec.channels) == (5, 4, 1)
    assert test.spec.channels == 3
    assert training.spec.num_classes == test.spec.num_classes == 6
    assert training.arrays["label"].tolist() == [0, 1, 2, 3, 4, 5]


def test_npz_images_that_are_not_square_are_cropped_with_a_note(tmp_path: Path) -> None:
    settings = dataclasses.replace(npz(tmp_path), size=4)
    (note,) = Npz("train", settings).notes
    assert note.endswith("the images of 4×5 pixels are centre-cropped to squares and scaled to 4×4")


def test_npz_images_need_no_labels(tmp_path: Path) -> None:
    source = Npz("train", npz(tmp_path, y_train=None, y_test=None))
    assert set(source.read(0)) == {"image"} and source.spec.num_classes == 0
    assert source.notes == (f"{tmp_path / 'own.npz'}: has no y_train or y_test, so the images have no labels",)


def test_an_npz_file_without_test_images_has_only_a_training_split(tmp_path: Path) -> None:
    assert Npz.splits_of(npz(tmp_path)) == ("train", "test")
    settings = npz(tmp_path, x_test=None, y_test=None)
    assert Npz.splits_of(settings) == ("train",)
    assert Npz("train", settings).arrays["label"].tolist() == [0, 1, 2, 3, 4, 5]
    (note,) = Npz("train", npz(tmp_path, x_test=None, y_test=None, y_train=None)).notes
    assert note == f"{tmp_path / 'own.npz'}: has no y_train, so the images have no labels"


def test_npz_rejects_test_labels_without_test_images(tmp_path: Path) -> None:
    settings = npz(tmp_path, x_test=None)
    assert Npz.splits_of(settings) == ("train", "test")
    with pytest.raises(UserError, match=r"own\.npz: has no x_test \(found: x_train, y_train, y_test\)"):
        Npz("test", settings)


def test_npz_lists_class_numbers_without_training_images(tmp_path: Path) -> None:
    settings = npz(tmp_path, y_train=np.array([1, 1, 4, 4, 1, 4]), y_test=np.array([1, 4, 1]))
    (note,) = Npz("train", settings).notes
    assert "3 of 5 classes have no training images (0, 2, 3); number the classes from 0 without gaps" in note
    assert Npz("test", settings).notes == () == Npz("train", npz(tmp_path)).notes


def test_npz_finds_the_only_file_in_a_folder(tmp_path: Path) -> None:
    npz(tmp_path)
    assert len(Npz("train", PixelSettings(data_root=str(tmp_path)))) == 6
    np.savez(tmp_path / "second.npz", **GOOD)
    with pytest.raises(UserError, match=r"--data-root .*has 2 \.npz files"):
        Npz("train", PixelSettings(data_root=str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": None}, r"has no x_train \(found: y_train, x_test, y_test\); expected x_train, "),
        ({"y_test": None}, "has no y_test"),
        ({"x_train": np.zeros((6, 5, 4))}, r"x_train: floating-point pixels need a declared range"),
        ({"x_train": np.zeros((6, 5, 4), dtype=np.int32)}, r"x_train is int32 of shape \[6, 5, 4\]; expected images"),
        (
            {"x_train": np.zeros((6, 5, 4, 65), dtype=np.uint8)},
            r"x_train is uint8 of shape \[6, 5, 4, 65\]; .* at most 64 channels",
        ),
        ({"x_train": np.zeros((6, 3, 8, 8), dtype=np.uint8)}, r".*x_train\.transpose\(0, 2, 3, 1\)"),
        ({"x_train": np.zeros((6, 1, 96, 96), dtype=np.uint8)}, r".*x_train\.transpose\(0, 2, 3, 1\)"),
        ({"x_train": np.zeros((0, 5, 4), dtype=np.uint8)}, r"x_train is uint8 of shape \[0, 5, 4\]"),
        ({"y_train": np.arange(5)}, "x_train has 6 rows but y_train has 5"),
        ({"y_train": np.zeros(6)}, "y_train is float64"),
        ({"y_train": np.zeros((6, 2), dtype=int)}, r"y_train is int64 of shape \[6, 2\].*\[n\].*y_train.argmax\(1\)"),
        ({"y_train": np.eye(6)}, r"y_train is float64 of shape \[6, 6\].*one-hot labels, y_train.argmax\(1\)"),
        (
            {"y_train": np.array(["cat", "dog"] * 3)},
            r"y_train is <U3 of shape \[6\]; .*np.unique\(labels, return_inverse=True\)\[1\]",
        ),
        ({"y_train": np.arange(6) - 1}, "y_train is int64 .* from -1 to 4"),
        ({"y_train": np.arange(6) * 400_000_000}, ".* from 0 to 2000000000; expected integers .* to 999,999"),
        ({"y_train": np.arange(6, dtype=np.uint64) + 2**63}, "y_train .* to 9223372036854775813"),
        ({"y_train": np.array([{}] * 6)}, "y_train cannot be read"),
    ],
)
def test_an_error_in_an_npz_file_names_the_file_and_the_wrong_key(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=f"own.npz: {message}") as raised:
        Npz("train", npz(tmp_path, **changes))
    assert "\n" not in str(raised.value)


def test_npz_rejects_a_file_that_is_not_an_archive(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--data-root .*absent\.npz: no such file"):
        Npz("train", PixelSettings(data_root=str(tmp_path / "absent.npz")))
    (tmp_path / "text.npz").write_text("not an archive")
    np.save(tmp_path / "bare.npy", np.zeros(3))
    for name in ("text.npz", "bare.npy"):
        with pytest.raises(UserError, match=f"{name}: not a readable .npz file .*write it with np.savez") as raised:
            Npz("train", PixelSettings(data_root=str(tmp_path / name)))
        assert "pickle" not in str(raised.value)


def test_npz_rejects_a_damaged_archive(tmp_path: Path) -> None:
    file = Path(npz(tmp_path, x_train=np.arange(120, dtype=np.uint8).reshape(6, 5, 4)).data_root)
    content = bytearray(file.read_bytes())
    content[content.index(bytes(range(20, 40)))] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(UserError, match="x_train cannot be read"):
        Npz("train", PixelSettings(data_root=str(file)))


def test_npz_rejects_members_that_are_no_arrays_or_claim_more_than_the_memory(tmp_path: Path) -> None:
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (100000000000, 100, 100), }".ljust(117) + b"\n"
    huge = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(100)
    for name, content in (("x_train.npy", huge), ("x_train", b"text")):
        with zipfile.ZipFile(tmp_path / "own.npz", "w") as archive:
            archive.writestr(name, content)
        with pytest.raises(UserError, match=r"^[^\n]+own\.npz: x_train cannot be read \([^\n]+$"):
            Npz("train", PixelSettings(data_root=str(tmp_path / "own.npz")))
