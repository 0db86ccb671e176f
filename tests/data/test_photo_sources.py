"""The sources `photos`, `pairs` and `degraded` find usable files and report unusable ones."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.core.errors import UserError
from paceline.data.sources.degraded import Degraded
from paceline.data.sources.pairs import Pairs
from paceline.data.sources.photos import Photos


def save(file: Path, height: int, width: int, seed: int = 0, **how: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(image).save(file, **how)  # type: ignore[arg-type]


def settings(root: Path, **changes: object) -> Degraded.Settings:
    """Return settings for the source `degraded`, which include the settings for `photos` and for all runs."""
    return Degraded.Settings(data_root=str(root), **{"crop": 8, "workers": 1} | changes)  # type: ignore[arg-type]


def pair_settings(root: Path, **changes: object) -> Pairs.Settings:
    return Pairs.Settings(data_root=str(root), **{"crop": 8, "workers": 1} | changes)  # type: ignore[arg-type]


def names(source: Photos | Pairs) -> list[str]:
    return [source.name_of(index) for index in range(len(source))]


def test_without_a_data_root_the_bundled_photos_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    training, testing = (Photos(split, Photos.Settings(crop=96)) for split in ("train", "test"))
    assert len(training) > len(testing) > 0 and not set(names(training)) & set(names(testing))
    assert training.sizes is not None and training.sizes.min() >= 256 and len(np.unique(training.sizes)) > 3
    assert "bundled with Paceline" in training.notes[0]
    assert training.spec.height == training.spec.width == 96
    for low in ({"low_root": str(tmp_path)}, {"low_suffix": "_LR"}):
        with pytest.raises(UserError, match="needs --data-root"):
            Photos("train", Photos.Settings(data="photos", **low))  # type: ignore[arg-type]
    (tmp_path / "data").mkdir()
    save(tmp_path / "data" / "own1.tif", 9, 9)
    save(tmp_path / "data" / "own2.tif", 9, 9)
    assert names(Photos("train", Photos.Settings())) + names(Photos("test", Photos.Settings())) in (
        ["own1.tif", "own2.tif"],
        ["own2.tif", "own1.tif"],
    )


@pytest.mark.parametrize(
    ("train", "test"), [("train", "test"), ("DIV2K_train_HR", "DIV2K_valid_HR"), ("train/deep", "test/deep")]
)
def test_existing_folders_for_training_and_testing_are_used(train: str, test: str, tmp_path: Path) -> None:
    for number in range(3):
        save(tmp_path / train / f"000{number}.png", 10, 12)
    save(tmp_path / test / "0801.jpg", 11, 9)
    save(tmp_path / test / "__MACOSX" / "._0801.jpg", 11, 9)
    assert len(Photos("train", settings(tmp_path))) == 3 and len(Photos("test", settings(tmp_path))) == 1


def test_a_fixed_fifth_of_a_plain_folder_is_held_out_for_testing(tmp_path: Path) -> None:
    for number in range(10):
        save(tmp_path / f"{number}.png", 8 + number, 9)
    training, testing = (names(Photos(split, settings(tmp_path))) for split in ("train", "test"))
    assert len(testing) == 2 and sorted(training + testing) == [f"{number}.png" for number in range(10)]


def test_a_different_folder_can_be_used_for_testing(tmp_path: Path) -> None:
    for number in range(3):
        save(tmp_path / "own" / f"{number}.png", 9, 9)
        save(tmp_path / "set" / "HR" / f"img_{number}.png", 17 + number, 23)
        save(tmp_path / "set" / "LRx4" / f"img_{number}.png", 4, 5)
    roots = {"test_root": str(tmp_path / "set" / "HR"), "test_low_root": str(tmp_path / "set" / "LRx4")}
    training = Photos("train", settings(tmp_path / "own", **roots))
    testing = Photos("test", settings(tmp_path / "own", **roots))
    assert len(training) == len(testing) == 3
    assert (training.spec.scale, testing.spec.scale) == (0, 4)
    save(tmp_path / "DIV2K" / "DIV2K_train_HR" / "0001.png", 9, 9)
    save(tmp_path / "DIV2K" / "DIV2K_train_LR_bicubic" / "X4" / "0001x4.png", 9, 9)
    assert names(Photos("train", settings(tmp_path / "DIV2K", **roots))) == ["0001.png"]
    bundled = Photos("test", Photos.Settings(crop=8, test_root=str(tmp_path / "own")))
    assert names(bundled) == ["0.png", "1.png", "2.png"] and not bundled.notes
    with pytest.raises(UserError, match="--test-low-root: needs --test-root"):
        Photos("train", settings(tmp_path / "own", test_low_root=str(tmp_path)))
    with pytest.raises(UserError, match=r"--test-root .*nowhere: no such folder"):
        Photos("test", settings(tmp_path / "own", test_root=str(tmp_path / "nowhere")))


def test_low_resolution_files_are_found_by_name_and_the_large_image_is_cropped_to_fit(tmp_path: Path) -> None:
    save(tmp_path / "high" / "train" / "0001.png", 18, 23)
    save(tmp_path / "high" / "test" / "0002.png", 16, 16)
    save(tmp_path / "low" / "X4" / "0001x4.png", 4, 5)
    save(tmp_path / "other" / "0002.png", 4, 4)
    source = Photos("train", settings(tmp_path / "high", low_root=f"{tmp_path}/low,{tmp_path}/other"))
    sample = source.read(0)
    assert source.spec.scale == 4 and source.sizes is not None and source.sizes.tolist() == [[16, 20]]
    assert sample["image"].shape == (16, 20, 3) and sample["low"].shape == (4, 5, 3)


def test_files_with_the_same_name_are_distinguished_by_their_folders(tmp_path: Path) -> None:
    for folder, size in (("a", 16), ("b", 20)):
        for split in ("train", "test"):
            save(tmp_path / "high" / split / folder / "1.png", size, size)
        save(tmp_path / "low" / folder / "1.png", size // 4, size // 4)
    source = Photos("train", settings(tmp_path / "high", low_root=str(tmp_path / "low")))
    assert [source.read(index)["low"].shape[0] for index in range(2)] == [4, 5]
    save(tmp_path / "low" / "X2" / "1x2.png", 8, 8)
    save(tmp_path / "high" / "train" / "c" / "1.png", 16, 16)
    with pytest.raises(UserError, match=r"--low-root .*: several files match 1\.png: .*a/1\.png, .*a/1\.png; keep"):
        Photos("train", settings(tmp_path / "high", low_root=f"{tmp_path}/low,{tmp_path}/low"))


def test_an_ambiguous_low_resolution_file_is_rejected(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save(tmp_path / "high" / split / "1.png", 16, 16)
        save(tmp_path / "low" / split / "1.png", 4, 4)
    with pytest.raises(UserError, match=r"several files match 1\.png: .*train/1\.png"):
        Photos("train", settings(tmp_path / "high", low_root=f"{tmp_path}/low/train,{tmp_path}/low/test"))
    for split in ("train", "test"):  # equal folder names make the match unambiguous
        (files,) = Photos(split, settings(tmp_path / "high", low_root=str(tmp_path / "low"))).files
        assert files["low"] == tmp_path / "low" / split / "1.png"


def test_a_name_that_ends_like_a_scale_suffix_is_not_truncated(tmp_path: Path) -> None:
    for number in (1, 2):
        save(tmp_path / "high" / "train" / f"matrix{number}.png", 16, 16)
        save(tmp_path / "low" / f"matrix{number}.png", 4, 4, seed=number)
    source = Photos("train", settings(tmp_path / "high", low_root=str(tmp_path / "low")))
    assert [files["low"].name for files in source.files] == ["matrix1.png", "matrix2.png"]


def test_a_low_resolution_file_of_the_wrong_size_is_rejected(tmp_path: Path) -> None:
    for number in range(3):
        save(tmp_path / "high" / "train" / f"{number}.png", 16, 16)
        save(tmp_path / "low" / f"{number}.png", 4, 4 if number else 5)
    with pytest.raises(UserError, match=r"0\.png is 16×16 pixels but .*low/0\.png is 5×4, which is not 1/4 of it"):
        Photos("train", settings(tmp_path / "high", low_root=str(tmp_path / "low")))
    (tmp_path / "low" / "0.png").unlink()
    with pytest.raises(UserError, match=r"0\.png has no matching file in --low-root"):
        Photos("train", settings(tmp_path / "high", low_root=str(tmp_path / "low")))
    kept = Photos("train", settings(tmp_path / "high", low_root=str(tmp_path / "low"), bad_images="skip"))
    assert len(kept) == 2 and "left out 1 of 3" in kept.notes[0]


def test_unrelated_low_resolution_files_are_not_reported_as_a_different_scale(tmp_path: Path) -> None:
    for number, (height, width) in enumerate(((5, 9), (8, 8), (7, 3), (4, 4))):
        save(tmp_path / "high" / "train" / f"{number}.png", 16, 16)
        save(tmp_path / "low" / f"{number}.png", height, width)
    with pytest.raises(UserError) as rejected:
        Photos("train", settings(tmp_path / "high", low_root=str(tmp_path / "low")))
    for number, low in ((0, "9×5"), (2, "3×7"), (3, "4×4")):
        assert f"{number}.png is 16×16 pixels but {tmp_path}/low/{number}.png is {low}, which is not 1/2" in str(
            rejected.value
        )


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_unusable_files_are_reported_or_skipped(tmp_path: Path) -> None:
    good, root = tmp_path / "train" / "good.png", tmp_path
    save(good, 30, 30)
    content = good.read_bytes()
    (root / "train" / "truncated.png").write_bytes(content[: len(content) // 2])
    source = Photos("train", settings(root))  # no error yet, because the header is intact
    with pytest.raises(UserError, match=r"truncated\.png: unreadable image"):
        source.read(1)
    (root / "train" / "empty.jpg").touch()
    (root / "train" / "bomb.png").write_bytes(bomb(30000))
    (root / "train" / "large.png").write_bytes(bomb(9500))
    frames = [Image.new("L", (9, 9), shade) for shade in (0, 99)]
    frames[0].save(root / "train" / "moving.gif", save_all=True, append_images=frames[1:])
    save(root / "train" / "small.png", 4, 4)
    expected = (
        r"bomb\.png: .*30000 × 30000 pixels.* limit of 89 .*empty\.jpg: unreadable image \(the file is empty.*"
        r"large\.png: unreadable image \(9500 × 9500 pixels.* and 1 more; use --bad-images skip to leave"
    )
    with pytest.raises(UserError, match=expected):
        Photos("train", settings(root))
    kept = Photos("train", settings(root, bad_images="skip"))
    assert names(kept) == ["good.png"] and "left out 6 of 7" in kept.notes[0]


def bomb(side: int) -> bytes:
    """Return the bytes of a small PNG file whose header declares a huge size."""
    header = struct.pack(">2I5B", side, side, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    parts = [struct.pack(">I", len(c)) + kind + c + struct.pack(">I", zlib.crc32(kind + c)) for kind, c in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_a_folder_without_usable_images_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match="has no images"):
        Photos("train", settings(tmp_path))
    (tmp_path / "train" / "a.png").touch()
    for low_root in ("", str(tmp_path / "train")):
        with pytest.raises(UserError, match=r"none of its images can be used: a\.png"):
            Photos("train", settings(tmp_path, bad_images="skip", low_root=low_root))
    with pytest.raises(UserError, match="no such folder"):
        Photos("train", settings(tmp_path / "nowhere"))


def test_photos_with_exif_rotation_and_their_sizes_are_upright(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    for suffix in ("png", "jpg", "tif"):
        save(tmp_path / "train" / f"a.{suffix}", 10, 16, exif=turned)
    source = Photos("train", settings(tmp_path))
    assert source.sizes is not None and source.sizes.tolist() == [[16, 10]] * 3
    assert [source.read(index)["image"].shape for index in range(3)] == [(16, 10, 3)] * 3


def test_photos_with_exif_data_after_the_pixels_are_rejected_unless_decoded_on_opening(
    tmp_path: Path,
) -> None:
    file = tmp_path / "train" / "late.png"
    save(file, 10, 16)
    turned = Image.Exif()
    turned[0x0112] = 6
    content, chunk_data = file.read_bytes(), b"eXIf" + turned.tobytes().removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I", len(chunk_data) - 4) + chunk_data + struct.pack(">I", zlib.crc32(chunk_data))
    file.write_bytes(content[:-12] + chunk + content[-12:])  # inserted before the IEND chunk
    with pytest.raises(UserError, match=r"late\.png: the image is 10×16 pixels, but its header specifies 16×10; use"):
        Photos("train", settings(tmp_path)).read(0)
    source = Photos("train", settings(tmp_path, bad_images="skip"))
    assert source.sizes is not None and source.sizes.tolist() == [[16, 10]] and not source.notes
    assert source.read(0)["image"].shape == (16, 10, 3)


@pytest.mark.parametrize(("image", "target"), [("input", "target"), ("img", "gt"), ("blurry", "sharp")])
def test_pairs_are_matched_by_their_paths(image: str, target: str, tmp_path: Path) -> None:
    for number, (height, width) in enumerate([(10, 12), (9, 20), (16, 8)]):
        save(tmp_path / "train" / image / f"scene{number}" / "1.png", height, width, seed=1)
        save(tmp_path / "train" / target / f"scene{number}" / "1.jpg", height, width, seed=2)
    source = Pairs("train", pair_settings(tmp_path))
    assert len(source) == 3 and source.sizes is not None
    for index in range(3):
        sample = source.read(index)
        assert sample["image"].shape == sample["target"].shape == (*source.sizes[index], 3)
        assert not np.array_equal(sample["image"], sample["target"])


def test_pairs_that_do_not_match_are_listed(tmp_path: Path) -> None:
    for kind in ("input", "target"):
        save(tmp_path / "train" / kind / "same.png", 10, 10)
        save(tmp_path / "train" / kind / "size.png", 10, 10 if kind == "input" else 11)
        save(tmp_path / "train" / kind / f"only_{kind}.png", 10, 10)
    expected = (
        r"input/only_input\.png has no counterpart, target/only_target\.png has no counterpart, "
        r"input/size\.png is 10×10 pixels but target/size\.png is 11×10; use --bad-images skip"
    )
    with pytest.raises(UserError, match=expected):
        Pairs("train", pair_settings(tmp_path))
    kept = Pairs("train", pair_settings(tmp_path, bad_images="skip"))
    assert names(kept) == ["input/same.png"] and "left out 3 of 4" in kept.notes[0]
    with pytest.raises(UserError, match="has no folder test"):
        Pairs("test", pair_settings(tmp_path))
    save(tmp_path / "train" / "input" / "same.jpg", 10, 10)
    with pytest.raises(UserError, match=r"input/same\.jpg and same\.png: the names differ only in the suffix"):
        Pairs("train", pair_settings(tmp_path))


def test_the_degradation_of_an_image_depends_only_on_the_seed_and_its_index(tmp_path: Path) -> None:
    for number in range(10):
        save(tmp_path / f"{number}.png", 20, 30)
    options = {"degrade_blur": 1.0, "degrade_noise": 10.0, "degrade_jpeg": 80}
    one, same = (Degraded("train", settings(tmp_path, **options)) for _ in range(2))
    other = Degraded("train", settings(tmp_path, **options, degrade_seed=1))
    same.read(5)  # an earlier read must not change later ones
    assert np.array_equal(one.read(0)["image"], same.read(0)["image"])
    assert not np.array_equal(one.read(0)["image"], other.read(0)["image"])
    assert np.array_equal(one.read(0)["target"], one.read(1)["target"])
    assert not np.array_equal(one.read(0)["image"], one.read(1)["image"])
    assert np.array_equal(one.read(3)["target"], Photos("train", settings(tmp_path)).read(3)["image"])


@pytest.mark.parametrize("option", [{"degrade_noise": 20.0}, {"degrade_blur": 2.0}, {"degrade_jpeg": 10}])
def test_each_degradation_alone_makes_an_image_worse(option: dict[str, float], tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    ramp = np.add.outer(np.arange(64), np.arange(64)).astype(np.uint8)
    Image.fromarray(np.where(np.arange(64) % 8 < 4, ramp, 255 - ramp).astype(np.uint8)).save(
        tmp_path / "train" / "a.png"
    )
    source = Degraded("train", settings(tmp_path, **{"degrade_noise": 0.0} | option))
    sample = source.read(0)
    error = np.abs(sample["image"].astype(int) - sample["target"]).mean()
    assert 0.5 < error < 80
    if "degrade_noise" in option:
        differences = sample["image"].astype(int) - sample["target"]
        inside = (sample["target"] > 80) & (sample["target"] < 175)
        assert abs(differences[inside].std() - 20) < 2


def test_invalid_degradations_are_rejected(tmp_path: Path) -> None:
    save(tmp_path / "train" / "a.png", 10, 10)
    with pytest.raises(UserError, match="degrade_blur, degrade_noise or degrade_jpeg"):
        Degraded("train", settings(tmp_path, degrade_noise=0.0))
    with pytest.raises(UserError, match="--low-root, low_suffix: not supported by --data degraded"):
        Degraded("train", settings(tmp_path, low_root=str(tmp_path)))
