"""The sources `photos`, `pairs`, `degraded` and `panels` find usable files and report unusable ones."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from made_data import raw_batches, save_image
from PIL import Image

from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.data.loaders.resident import Resident
from paceline.data.loaders.workers import Workers
from paceline.data.sources.degraded import Degraded
from paceline.data.sources.pairs import Pairs
from paceline.data.sources.panels import Panels
from paceline.data.sources.photos import Photos
from paceline.data.stream import Augment, Stream, transform

# Photos and pairs


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
    save_image(tmp_path / "data" / "own1.tif", 9, 9)
    save_image(tmp_path / "data" / "own2.tif", 9, 9)
    assert names(Photos("train", Photos.Settings())) + names(Photos("test", Photos.Settings())) in (
        ["own1.tif", "own2.tif"],
        ["own2.tif", "own1.tif"],
    )


@pytest.mark.parametrize(
    ("train", "test"), [("train", "test"), ("DIV2K_train_HR", "DIV2K_valid_HR"), ("train/deep", "test/deep")]
)
def test_existing_folders_for_training_and_testing_are_used(train: str, test: str, tmp_path: Path) -> None:
    for number in range(3):
        save_image(tmp_path / train / f"000{number}.png", 10, 12)
    save_image(tmp_path / test / "0801.jpg", 11, 9)
    save_image(tmp_path / test / "__MACOSX" / "._0801.jpg", 11, 9)
    assert len(Photos("train", settings(tmp_path))) == 3 and len(Photos("test", settings(tmp_path))) == 1


def test_a_fixed_fifth_of_a_plain_folder_is_held_out_for_testing(tmp_path: Path) -> None:
    for number in range(10):
        save_image(tmp_path / f"{number}.png", 8 + number, 9)
    training, testing = (names(Photos(split, settings(tmp_path))) for split in ("train", "test"))
    assert len(testing) == 2 and sorted(training + testing) == [f"{number}.png" for number in range(10)]


def test_a_different_folder_can_be_used_for_testing(tmp_path: Path) -> None:
    for number in range(3):
        save_image(tmp_path / "own" / f"{number}.png", 9, 9)
        save_image(tmp_path / "set" / "HR" / f"img_{number}.png", 17 + number, 23)
        save_image(tmp_path / "set" / "LRx4" / f"img_{number}.png", 4, 5)
    roots = {"test_root": str(tmp_path / "set" / "HR"), "test_low_root": str(tmp_path / "set" / "LRx4")}
    training = Photos("train", settings(tmp_path / "own", **roots))
    testing = Photos("test", settings(tmp_path / "own", **roots))
    assert len(training) == len(testing) == 3
    assert (training.spec.scale, testing.spec.scale) == (0, 4)
    save_image(tmp_path / "DIV2K" / "DIV2K_train_HR" / "0001.png", 9, 9)
    save_image(tmp_path / "DIV2K" / "DIV2K_train_LR_bicubic" / "X4" / "0001x4.png", 9, 9)
    assert names(Photos("train", settings(tmp_path / "DIV2K", **roots))) == ["0001.png"]
    bundled = Photos("test", Photos.Settings(crop=8, test_root=str(tmp_path / "own")))
    assert names(bundled) == ["0.png", "1.png", "2.png"] and not bundled.notes
    with pytest.raises(UserError, match="--test-low-root: needs --test-root"):
        Photos("train", settings(tmp_path / "own", test_low_root=str(tmp_path)))
    with pytest.raises(UserError, match=r"--test-root .*nowhere: no such folder"):
        Photos("test", settings(tmp_path / "own", test_root=str(tmp_path / "nowhere")))


def test_low_resolution_files_are_found_by_name_and_the_large_image_is_cropped_to_fit(tmp_path: Path) -> None:
    save_image(tmp_path / "high" / "train" / "0001.png", 18, 23)
    save_image(tmp_path / "high" / "test" / "0002.png", 16, 16)
    save_image(tmp_path / "low" / "X4" / "0001x4.png", 4, 5)
    save_image(tmp_path / "other" / "0002.png", 4, 4)
    source = Photos("train", settings(tmp_path / "high", low_root=f"{tmp_path}/low,{tmp_path}/other"))
    sample = source.read(0)
    assert source.spec.scale == 4 and source.sizes is not None and source.sizes.tolist() == [[16, 20]]
    assert sample["image"].shape == (16, 20, 3) and sample["low"].shape == (4, 5, 3)


def test_low_resolution_files_with_the_same_name_are_distinguished_by_their_folders(tmp_path: Path) -> None:
    for folder, size in (("a", 16), ("b", 20)):
        for split in ("train", "test"):
            save_image(tmp_path / "high" / split / folder / "1.png", size, size)
        save_image(tmp_path / "low" / folder / "1.png", size // 4, size // 4)
    for number in (1, 2):  # a name that ends like a scale suffix is not truncated
        save_image(tmp_path / "high" / "train" / f"matrix{number}.png", 16, 16)
        save_image(tmp_path / "low" / f"matrix{number}.png", 4, 4, seed=number)
    source = Photos("train", settings(tmp_path / "high", low_root=str(tmp_path / "low")))
    lows = [files["low"].relative_to(tmp_path / "low").as_posix() for files in source.files]
    assert lows == ["a/1.png", "b/1.png", "matrix1.png", "matrix2.png"]
    with pytest.raises(UserError, match=r"--low-root .*: several files match 1\.png: .*a/1\.png, .*a/1\.png; keep"):
        Photos("train", settings(tmp_path / "high", low_root=f"{tmp_path}/low,{tmp_path}/low"))


def test_an_ambiguous_low_resolution_file_is_rejected(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save_image(tmp_path / "high" / split / "1.png", 16, 16)
        save_image(tmp_path / "low" / split / "1.png", 4, 4)
    with pytest.raises(UserError, match=r"several files match 1\.png: .*train/1\.png"):
        Photos("train", settings(tmp_path / "high", low_root=f"{tmp_path}/low/train,{tmp_path}/low/test"))
    for split in ("train", "test"):  # equal folder names make the match unambiguous
        (files,) = Photos(split, settings(tmp_path / "high", low_root=str(tmp_path / "low"))).files
        assert files["low"] == tmp_path / "low" / split / "1.png"


def test_a_low_resolution_file_of_the_wrong_size_is_rejected(tmp_path: Path) -> None:
    for number in range(3):
        save_image(tmp_path / "high" / "train" / f"{number}.png", 16, 16)
        save_image(tmp_path / "low" / f"{number}.png", 4, 4 if number else 5)
    with pytest.raises(UserError, match=r"0\.png is 16×16 pixels but .*low/0\.png is 5×4, which is not 1/4 of it"):
        Photos("train", settings(tmp_path / "high", low_root=str(tmp_path / "low")))
    (tmp_path / "low" / "0.png").unlink()
    with pytest.raises(UserError, match=r"0\.png has no matching file in --low-root"):
        Photos("train", settings(tmp_path / "high", low_root=str(tmp_path / "low")))
    kept = Photos("train", settings(tmp_path / "high", low_root=str(tmp_path / "low"), bad_images="skip"))
    assert len(kept) == 2 and "left out 1 of 3" in kept.notes[0]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_unusable_files_are_reported_or_skipped(tmp_path: Path) -> None:
    good, root = tmp_path / "train" / "good.png", tmp_path
    save_image(good, 30, 30)
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
    save_image(root / "train" / "small.png", 4, 4)
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


def test_photos_with_an_exif_rotation_and_their_sizes_are_upright(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    for suffix in ("png", "jpg", "tif"):
        save_image(tmp_path / "train" / f"a.{suffix}", 10, 16, exif=turned)
    source = Photos("train", settings(tmp_path))
    assert source.sizes is not None and source.sizes.tolist() == [[16, 10]] * 3
    assert [source.read(index)["image"].shape for index in range(3)] == [(16, 10, 3)] * 3
    file = tmp_path / "late" / "train" / "late.png"  # its EXIF data comes after the pixels
    save_image(file, 10, 16)
    content, chunk_data = file.read_bytes(), b"eXIf" + turned.tobytes().removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I", len(chunk_data) - 4) + chunk_data + struct.pack(">I", zlib.crc32(chunk_data))
    file.write_bytes(content[:-12] + chunk + content[-12:])  # inserted before the IEND chunk
    with pytest.raises(UserError, match=r"late\.png: the image is 10×16 pixels, but its header specifies 16×10; use"):
        Photos("train", settings(tmp_path / "late")).read(0)
    source = Photos("train", settings(tmp_path / "late", bad_images="skip"))
    assert source.sizes is not None and source.sizes.tolist() == [[16, 10]] and not source.notes
    assert source.read(0)["image"].shape == (16, 10, 3)


@pytest.mark.parametrize(("image", "target"), [("input", "target"), ("img", "gt"), ("blurry", "sharp")])
def test_pairs_are_matched_by_their_paths(image: str, target: str, tmp_path: Path) -> None:
    for number, (height, width) in enumerate([(10, 12), (9, 20), (16, 8)]):
        save_image(tmp_path / "train" / image / f"scene{number}" / "1.png", height, width, seed=1)
        save_image(tmp_path / "train" / target / f"scene{number}" / "1.jpg", height, width, seed=2)
    source = Pairs("train", pair_settings(tmp_path))
    assert len(source) == 3 and source.sizes is not None
    for index in range(3):
        sample = source.read(index)
        assert sample["image"].shape == sample["target"].shape == (*source.sizes[index], 3)
        assert not np.array_equal(sample["image"], sample["target"])


def test_pairs_that_do_not_match_are_listed(tmp_path: Path) -> None:
    for kind in ("input", "target"):
        save_image(tmp_path / "train" / kind / "same.png", 10, 10)
        save_image(tmp_path / "train" / kind / "size.png", 10, 10 if kind == "input" else 11)
        save_image(tmp_path / "train" / kind / f"only_{kind}.png", 10, 10)
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
    save_image(tmp_path / "train" / "input" / "same.jpg", 10, 10)
    with pytest.raises(UserError, match=r"input/same\.jpg and same\.png: the names differ only in the suffix"):
        Pairs("train", pair_settings(tmp_path))


def test_the_degradation_of_an_image_depends_only_on_the_seed_and_its_index(tmp_path: Path) -> None:
    for number in range(10):
        save_image(tmp_path / f"{number}.png", 20, 30)
    options = {"degrade_blur": 1.0, "degrade_noise": 10.0, "degrade_jpeg": 80}
    one, same = (Degraded("train", settings(tmp_path, **options)) for _ in range(2))
    other = Degraded("train", settings(tmp_path, **options, degrade_seed=1))
    same.read(5)  # an earlier read must not change later ones
    assert np.array_equal(one.read(0)["image"], same.read(0)["image"])
    assert not np.array_equal(one.read(0)["image"], other.read(0)["image"])
    assert np.array_equal(one.read(0)["target"], one.read(1)["target"])
    assert not np.array_equal(one.read(0)["image"], one.read(1)["image"])
    assert np.array_equal(one.read(3)["target"], Photos("train", settings(tmp_path)).read(3)["image"])


def test_each_degradation_alone_makes_an_image_worse(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    ramp = np.add.outer(np.arange(64), np.arange(64)).astype(np.uint8)
    stripes = np.where(np.arange(64) % 8 < 4, ramp, 255 - ramp).astype(np.uint8)
    Image.fromarray(stripes).save(tmp_path / "train" / "a.png")
    for option in ({"degrade_noise": 20.0}, {"degrade_blur": 2.0}, {"degrade_jpeg": 10}):
        sample = Degraded("train", settings(tmp_path, **{"degrade_noise": 0.0} | option)).read(0)
        differences = sample["image"].astype(int) - sample["target"]
        assert 0.5 < np.abs(differences).mean() < 80
        if "degrade_noise" in option:
            inside = (sample["target"] > 80) & (sample["target"] < 175)
            assert abs(differences[inside].std() - 20) < 2
    for wrong, message in (
        ({"degrade_noise": 0.0}, "degrade_blur, degrade_noise or degrade_jpeg"),
        ({"low_root": str(tmp_path)}, "--low-root, low_suffix: not supported by --data degraded"),
    ):
        with pytest.raises(UserError, match=message):
            Degraded("train", settings(tmp_path, **wrong))


# Panels


SIDE = 16


def write_rows(root: Path, count: int, *, splits: tuple[str, ...] = ("train", "test"), rows: int = 2) -> None:
    """Save rows of square panels; panel p of a row is filled with the value 10·row + p."""
    for split in splits:
        (root / split).mkdir(parents=True, exist_ok=True)
        for row in range(rows):
            panels = [np.full((SIDE, SIDE, 3), 10 * row + panel, np.uint8) for panel in range(count)]
            Image.fromarray(np.concatenate(panels, axis=1)).save(root / split / f"{row}.png")


def open_rows(root: Path, split: str = "train", **settings) -> Panels:
    return Panels(split, Panels.Settings(data_root=str(root), **settings))


def test_a_row_is_split_into_its_named_panels(tmp_path):
    write_rows(tmp_path, 4)
    source = open_rows(tmp_path, panels="image,stain,nuclei,segmentation")
    assert source.spec.panels == ("stain", "nuclei", "segmentation")
    assert (source.spec.height, source.spec.width, len(source)) == (SIDE, SIDE, 2)
    sample = source.read(1)
    assert levels(sample) == {"image": 10, "stain": 11, "nuclei": 12, "segmentation": 13}
    assert all(image.shape == (SIDE, SIDE, 3) and np.ptp(image) == 0 for image in sample.values())
    source = open_rows(tmp_path, panels="segmentation,-,image,stain")  # the segmentation is the last output
    assert source.spec.panels == ("stain", "segmentation")
    assert levels(source.read(0)) == {"segmentation": 0, "image": 2, "stain": 3}


def levels(sample):
    return {name: int(image.flat[0]) for name, image in sample.items()}


def test_rows_of_two_panels_need_no_names(tmp_path):
    write_rows(tmp_path, 2, splits=("train", "val"))
    assert open_rows(tmp_path).spec.panels == ("target",)
    assert len(open_rows(tmp_path, "test")) == 2


def test_without_split_folders_a_fixed_fifth_of_the_rows_is_held_out_for_testing(tmp_path):
    write_rows(tmp_path, 2, splits=(".",), rows=5)
    train, test = open_rows(tmp_path), open_rows(tmp_path, "test")
    assert (len(train), len(test)) == (4, 1)
    assert {train.name_of(i) for i in range(4)} | {test.name_of(0)} == {f"{row}.png" for row in range(5)}


def test_folders_a_and_b_are_matched_by_name(tmp_path):
    for folder, shade in (("trainA", 1), ("trainB", 2), ("testA", 3), ("testB", 4)):
        (tmp_path / folder).mkdir()
        for name in ("x", "y"):
            suffix = ".png" if folder.endswith("A") else ".bmp"
            Image.new("RGB", (20, 12), (shade,) * 3).save(tmp_path / folder / f"{name}{suffix}")
    source = open_rows(tmp_path, "test")
    assert source.spec.panels == ("target",) and len(source) == 2
    assert levels(source.read(0)) == {"image": 3, "target": 4}
    swapped = open_rows(tmp_path, panels="photo,image")
    assert levels(swapped.read(0)) == {"photo": 1, "image": 2}
    (tmp_path / "trainB" / "y.bmp").unlink()
    with pytest.raises(UserError, match=r"trainA/y.png has no counterpart"):
        open_rows(tmp_path)
    assert len(open_rows(tmp_path, bad_images="skip")) == 1
    Image.new("RGB", (12, 12)).save(tmp_path / "trainB" / "x.bmp")
    (tmp_path / "trainA" / "y.png").unlink()
    with pytest.raises(UserError, match=r"trainA/x.png is 20×12 pixels but trainB/x.bmp is 12×12"):
        open_rows(tmp_path)


def test_a_row_that_does_not_match_the_named_panels_is_rejected(tmp_path):
    write_rows(tmp_path, 3)
    Image.new("RGB", (3 * SIDE + 1, SIDE)).save(tmp_path / "train" / "odd.png")
    with pytest.raises(UserError, match=r"odd.png: 49×16 pixels is not a row of 3 equal panels"):
        open_rows(tmp_path, panels="image,stain,segmentation")
    assert len(open_rows(tmp_path, panels="image,stain,segmentation", bad_images="skip")) == 2


@pytest.mark.parametrize(
    ("panels", "message"),
    [
        ("image,a,b,segmentation", r"0.png: 96×16 pixels is not a row of 4 equal panels"),
        ("image,a,b,c,segmentation", r"is not a row of 5 equal panels"),
        ("", r"96×16 pixels is not a row of two square panels; .*--set panels="),
        ("image,a,b,c,d,label", r"panels=.*: 'label' is the name of another field; choose a different name"),
        ("a,b,c,d,e,f", r"panels=a,b,c,d,e,f: give each panel a unique name.*call the input 'image'"),
        ("image,a,a,b,c,d", r"give each panel a unique name"),
        ("image,a b,c,d,e,f", r"'a b' is not a valid name"),
        ("image,-,-,-,-,-", r"give each panel a unique name"),
    ],
)
def test_inconsistent_panel_names_are_rejected(tmp_path, panels, message):
    write_rows(tmp_path, 6)
    with pytest.raises(UserError, match=message):
        open_rows(tmp_path, panels=panels)


def test_a_missing_folder_is_reported(tmp_path):
    with pytest.raises(UserError, match="nowhere: no such folder"):
        open_rows(tmp_path / "nowhere")
    write_rows(tmp_path, 2, splits=("train",))
    with pytest.raises(UserError, match="has no folder test"):
        open_rows(tmp_path, "test")
    (tmp_path / "trainA").mkdir()
    with pytest.raises(UserError, match="has a folder trainA but no trainB"):
        open_rows(tmp_path)


def test_without_a_folder_tiles_of_stained_tissue_are_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train, test = (Panels(split, Panels.Settings()) for split in ("train", "test"))
    assert (len(train), len(test)) == (51, 13)
    assert train.spec.panels == ("hematoxylin", "dab", "segmentation") and train.spec.height == 64
    assert "bundled with Paceline" in train.notes[0]
    write_rows(tmp_path / "data", 2, splits=(".",), rows=5)
    assert Panels("train", Panels.Settings()).spec.height == SIDE  # now the rows in data/ are used
    mask = np.stack([train.read(index)["segmentation"] for index in range(len(train))])
    assert set(np.unique(mask)) == {0, 255} and 0.3 < (mask > 0).mean() < 0.7
    dense, empty = mask[..., 0] > 0, mask[..., 0] == 0
    dab = np.stack([train.read(index)["dab"] for index in range(len(train))]).mean(axis=-1)
    assert dab[dense].mean() < dab[empty].mean() - 20  # dense tissue has a darker brown stain


def test_tiles_have_the_requested_size_and_panels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = Panels("test", Panels.Settings(size=128, panels="image,dab"))
    assert source.spec.panels == ("dab",) and source.read(0)["dab"].shape == (128, 128, 3)
    assert Panels("test", Panels.Settings(panels="dab,segmentation,hematoxylin,image")).spec.panels == (
        "dab",
        "hematoxylin",
        "segmentation",
    )
    with pytest.raises(UserError, match=r"panels=image,lap2: unknown panel 'lap2'; without --data-root, use image,"):
        Panels("train", Panels.Settings(panels="image,lap2"))
    with pytest.raises(UserError, match="size=300: the bundled image is only 512×512 pixels; use at most 256"):
        Panels("train", Panels.Settings(size=300))


def test_all_panels_share_the_same_window_flip_and_rotation_with_either_loader(tmp_path):
    (tmp_path / "train").mkdir()
    for number, row in enumerate(np.random.default_rng(0).integers(256, size=(3, SIDE, SIDE, 3), dtype=np.uint8)):
        Image.fromarray(np.concatenate([row, row // 2, row // 4], axis=1)).save(tmp_path / "train" / f"{number}.png")
    source = open_rows(tmp_path, panels="image,half,quarter", workers=0)
    settings = RunSettings(workers=0)
    batches = []
    for loader in (Workers, Resident):
        (raw,) = raw_batches(loader(source, torch.device("cpu"), settings, 8), [Stream(0, len(source)).take(0, 12)])
        assert torch.equal(raw["image"] // 4, raw["quarter"]) and raw["half"].shape == (12, 3, 8, 8)
        batches.append(transform(raw, Augment(flip=True, rot90=True), torch.float64))
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in ("image", "half", "quarter"))
    levels = {name: ((batches[0][name] + 1) * 127.5).round().long() for name in ("image", "half")}
    assert torch.equal(levels["image"] // 2, levels["half"])
