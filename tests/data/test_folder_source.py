"""The source `folder`, and what all sources of image files have in common: splits, groups and whole folders."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_data import random_images, writers
from PIL import Image

from paceline.cli.app import run
from paceline.commands.configure import configure
from paceline.commands.evaluate import _for_whole_folder
from paceline.config.flags import PhotoSettings, SeparateTestFolder
from paceline.config.resolve import settings_of as settings_class
from paceline.config.settings import RunSettings
from paceline.core import registry
from paceline.core.errors import UserError
from paceline.data.source import PanelSettings, Source, open_sources
from paceline.data.sources.degraded import Degraded
from paceline.data.sources.folder import Folder
from paceline.data.sources.packed import Packed
from paceline.data.sources.pairs import Pairs
from paceline.data.sources.panels import Panels
from paceline.data.sources.photos import Photos
from paceline.runs.recipe import resolve_config

# Folders with classes


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
    for kind in ("boat", "train"):  # a class may be named train
        for number in range(10):
            save(tmp_path / kind / "deep" / f"{number}.png", random_images(4, 4, 3))
    training, test = Folder("train", settings(tmp_path)), Folder("test", settings(tmp_path))
    assert (len(training), len(test)) == (16, 4) and training.spec.class_names == ("boat", "train")
    assert len({source.name_of(index) for source in (training, test) for index in range(len(source))}) == 20


def test_images_without_class_folders_have_no_labels(tmp_path: Path) -> None:
    save(tmp_path / "0.PNG", random_images(4, 4, 3))
    with pytest.raises(UserError, match="one sample is too few"):
        Folder("train", settings(tmp_path))
    for number in range(1, 5):
        save(tmp_path / f"{number}.PNG", random_images(4, 4, 3))
    source = Folder("train", settings(tmp_path))
    assert len(source) == 4 and source.spec.num_classes == 0
    assert source.read_many(np.arange(4)).keys() == {"image"}


def test_split_folders_with_other_names_are_not_used_as_classes(tmp_path: Path) -> None:
    for names in (("training", "testing"), ("Train", "Test", "Meta"), ("seg_train", "seg_test"), ("train", "dev")):
        root = tmp_path / names[0]
        for name in names:
            save(root / name / "a" / "0.png", random_images(8, 8))
        with pytest.raises(UserError, match=r"not used as splits, which are called train and test; rename them"):
            Folder("train", settings(root))


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


def test_unreadable_images_are_reported_or_skipped_and_counted(tmp_path: Path) -> None:
    for kind in ("a", "b"):
        save_train_and_test(tmp_path, f"{kind}/good.png", random_images(8, 8, 3))
    (tmp_path / "train" / "a" / "z.jpg").write_bytes(b"no image")
    whole = (tmp_path / "train" / "a" / "good.png").read_bytes()
    (tmp_path / "train" / "a" / "torn.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"train/a/torn\.png: unreadable image .*--bad-images skip") as raised:
        Folder("train", settings(tmp_path)).read(1)
    assert "\n" not in str(raised.value)
    source = Folder("train", settings(tmp_path, bad_images="skip"))
    assert [files["image"].name for files in source.files] == ["good.png", "good.png"]
    assert [int(source.read(index)["label"]) for index in range(2)] == [0, 1]
    (note,) = source.notes
    assert note.startswith(f"left out 2 of 4 samples in {tmp_path}/train: a/torn.png: unreadable image (")
    assert ", a/z.jpg: unreadable image (" in note


def test_a_folder_with_only_unreadable_images_is_rejected_even_if_bad_images_is_skip(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"train: none of its images can be used: a\.png: unreadable image \(not an"):
        Folder("train", settings(tmp_path, bad_images="skip"))
    with pytest.raises(UserError, match=r"a\.png: unreadable image"):
        Folder("train", settings(tmp_path))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_rejected_before_it_is_decoded(tmp_path: Path) -> None:
    save_train_and_test(tmp_path, "a.png", random_images(4, 4, 3))
    for side in (10_000, 60_000):
        header = struct.pack(">2I5B", side, side, 8, 2, 0, 0, 0)
        chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
        (tmp_path / "train" / "b.png").write_bytes(png(chunks))
        with pytest.raises(UserError, match=r"b\.png: unreadable image .*(limit|bomb)"):
            Folder("train", settings(tmp_path)).read(1)


def png(chunks: list[tuple[bytes, bytes]]) -> bytes:
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def test_a_missing_or_empty_folder_is_reported(tmp_path: Path) -> None:
    for number, (folders, message) in enumerate(
        (
            ((), "has no images"),
            (("train/a", "test/a"), "train/a: has no images"),
            (("a",), "a: has no images .*; add some, or remove the folder"),
            (("train",), "has no folder 'test'"),
            (None, "--data-root .*4: no such folder"),
        )
    ):
        root = tmp_path / str(number)
        for folder in () if folders is None else ("", *folders):
            (root / folder).mkdir(parents=True, exist_ok=True)
        with pytest.raises(UserError, match=message) as raised:
            Folder("test" if folders == ("train",) else "train", settings(root))
        assert "\n" not in str(raised.value)
    for name, remedy in (("own.npz", "use --data npz"), ("photos.ZIP", "use the folder that contains its images")):
        (tmp_path / name).touch()
        with pytest.raises(UserError, match=f"--data-root .*{name}: is a file, not a folder; {remedy}"):
            Folder("train", settings(tmp_path / name))


# Groups


SCENES, CROPS = 12, 4
BY_SCENE = r"(scene\d+)_"


def write(path: Path, size: tuple[int, int] = (8, 16)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)


def write_scenes(folder: Path, scenes: int = SCENES) -> Path:
    for scene in range(scenes):
        for crop in range(CROPS):
            write(folder / f"scene{scene}_{crop}.png")
    return folder


def scenes_of(paths: list[Path]) -> set[str]:
    return {path.name.partition("_")[0] for path in paths}


def files_of(source: Any) -> list[Path]:
    return [files["image"] for files in source.files]


SOURCES: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "folder": (Folder, SeparateTestFolder, ("a", "b")),
    "photos": (Photos, PhotoSettings, ("",)),
    "degraded": (Degraded, Degraded.Settings, ("",)),
    "panels": (Panels, PanelSettings, ("",)),
    "pairs": (Pairs, Pairs.Settings, ("input", "target")),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_group_is_never_divided_and_stays_in_its_split_when_files_are_added(name: str, tmp_path: Path) -> None:
    source_class, settings_class, folders = SOURCES[name]

    def splits() -> dict[str, set[str]]:
        settings = settings_class(data=name, data_root=str(tmp_path), group_by=BY_SCENE)
        return {split: scenes_of(files_of(source_class(split, settings))) for split in ("train", "test")}

    for folder in folders:
        write_scenes(tmp_path / folder)
    before = splits()
    assert before["train"] and before["test"] and not before["train"] & before["test"]
    assert len(before["train"] | before["test"]) == SCENES
    for folder in folders:
        write_scenes(tmp_path / folder, SCENES + 5)
    after = splits()
    assert before["train"] <= after["train"] and before["test"] <= after["test"] and not after["train"] & after["test"]


def test_groups_survive_packing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos, packed = str(write_scenes(tmp_path / "photos")), str(tmp_path / "packed")
    words = ["pack", photos, packed, "--set", f"group_by={BY_SCENE}"]
    assert run(words) == 0
    names = {}
    for data, root in (("photos", photos), ("packed", packed)):
        flags = {"data": data, "data_root": root, "crop": 8, "workers": 1}
        assignments = {"validation": 0.3, **({"group_by": BY_SCENE} if data == "photos" else {})}
        sources = open_sources(resolve_config("super_resolution", [("flag", flags), ("--set", assignments)]))
        names[data] = {
            split: {source.name_of(index) for index in range(len(source))} for split, source in sources.items()
        }
    assert names["packed"] == names["photos"] and names["packed"].keys() == {"train", "validation", "test"}
    assert run(words) == 0  # packing again only verifies the packed folder
    assert run(words[:-2]) == 2
    assert "train" in capsys.readouterr().err
    (tmp_path / "packed/train/groups.json").write_text("[]")
    with pytest.raises(UserError, match=r"groups\.json: has 2 bytes instead of"):
        Packed("train", PhotoSettings(data="packed", data_root=packed))


def test_validation_samples_are_whole_groups(tmp_path: Path) -> None:
    write_scenes(tmp_path)
    flags = {"data": "degraded", "data_root": str(tmp_path), "crop": 8, "workers": 1}
    layers = [("flag", flags), ("--set", {"group_by": BY_SCENE, "validation": 0.3})]
    sources: dict[str, Any] = open_sources(resolve_config("restoration", layers))
    train, validation = (
        {sources[split].name_of(index).partition("_")[0] for index in range(len(sources[split]))}
        for split in ("train", "validation")
    )
    assert train and validation and not train & validation


def test_a_pattern_that_does_not_group_the_files_is_rejected(tmp_path: Path) -> None:
    write_scenes(tmp_path)
    for pattern, message in (
        (r"(scene\d)_", r"must match every file, but does not match scene10_0\.png, .* and 5 more"),
        (r"(", "invalid regular expression"),
        (r"scene", r"too few groups \(1\)"),
    ):
        with pytest.raises(UserError, match=message):
            Photos("train", PhotoSettings(data="photos", data_root=str(tmp_path), group_by=pattern))


def test_pairs_in_one_folder_are_matched_by_name_suffixes(tmp_path: Path) -> None:
    for number in range(5):
        write(tmp_path / "Canon" / f"{number}_real.JPG")
        write(tmp_path / "Canon" / f"{number}_mean.JPG")
    options = {"data": "pairs", "data_root": str(tmp_path), "input_suffix": "_real", "target_suffix": "_mean"}
    sources = [Pairs(split, Pairs.Settings(**options)) for split in Pairs.splits]
    pairs = [(files["image"].name, files["target"].name) for source in sources for files in source.files]
    assert sorted(pairs) == [(f"{number}_real.JPG", f"{number}_mean.JPG") for number in range(5)]
    write(tmp_path / "Canon" / "9_real.JPG")
    write(tmp_path / "readme.png")
    with pytest.raises(UserError, match=r"readme\.png ends with neither _real nor _mean, Canon/9_real\.JPG has no"):
        Pairs("train", Pairs.Settings(**options))
    with pytest.raises(UserError, match=r"both suffixes .* '_x'"):
        Pairs("train", Pairs.Settings(**options | {"input_suffix": "_x", "target_suffix": "_x"}))


@pytest.mark.parametrize("high", ["_HR", ""])
def test_high_and_low_resolution_images_may_be_in_one_folder(high: str, tmp_path: Path) -> None:
    for number in range(5):
        write(tmp_path / f"{number}{high}.png", (16, 32))
        write(tmp_path / f"{number}_LR.png", (4, 8))
    options = {"data": "photos", "data_root": str(tmp_path), "low_suffix": "_LR", "high_suffix": high}
    sources = [Photos(split, PhotoSettings(**options)) for split in Photos.splits]
    assert sum(map(len, sources)) == 5 and {source.spec.scale for source in sources} == {4}
    for source in sources:
        assert source.read(0)["low"].shape == (4, 8, 3)
        assert all(
            files["low"].stem.removesuffix("_LR") == files["image"].stem.removesuffix(high) for files in source.files
        )
    with pytest.raises(UserError, match="cannot be combined with --low-root"):
        Photos("train", PhotoSettings(**options, low_root=str(tmp_path)))
    with pytest.raises(UserError, match="requires low_suffix"):
        Photos("train", PhotoSettings(**options | {"low_suffix": "", "high_suffix": "_HR"}))


# Whole folders


COUNT, SIDE = 10, 12
FOLDERS = {"photos": ("",), "degraded": ("",), "pairs": ("input", "target"), "panels": ("",), "folder": ("",)}


def source_class(name: str) -> type[Source]:
    return registry.load_class("source", name, Source)


def settings_of(name: str, root: Path, **changes: str | int) -> RunSettings:
    return settings_class(name)(data=name, data_root=str(root), workers=0, **changes)  # type: ignore[arg-type]


def write_whole(root: Path, name: str, count: int) -> None:
    """Write the samples of one split in the layout that the source expects."""
    for folder in FOLDERS[name]:
        (root / folder).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = np.full((SIDE, 2 * SIDE, 3), number, np.uint8)
            Image.fromarray(pixels).save(root / folder / f"{number}.png")


@pytest.mark.parametrize("name", FOLDERS)
def test_all_samples_in_a_folder_without_a_test_split_are_evaluated(name: str, tmp_path: Path) -> None:
    source, settings = source_class(name), settings_of(name, tmp_path)
    write_whole(tmp_path, name, 1)
    with pytest.raises(UserError, match="too few to train and test on; add more, or set --test-root"):
        source("test", settings)
    assert len(source("test", source.measure_whole(settings))) == 1
    write_whole(tmp_path, name, COUNT)
    assert len(source("test", settings)) == COUNT // 5
    whole = source("test", source.measure_whole(settings))
    names = [Path(whole.name_of(index)).name for index in range(len(whole))]
    assert names == [f"{number}.png" for number in range(COUNT)]


@pytest.mark.parametrize("name", FOLDERS)
def test_only_the_test_split_or_folder_is_evaluated_if_there_is_one(name: str, tmp_path: Path) -> None:
    write_whole(tmp_path / "train", name, 3)
    write_whole(tmp_path / "test", name, 2)
    source, settings = source_class(name), settings_of(name, tmp_path)
    assert source.measure_whole(settings) == settings and len(source("test", settings)) == 2
    write_whole(tmp_path / "own", name, 5)
    write_whole(tmp_path / "other", name, 4)
    settings = settings_of(name, tmp_path / "own", test_root=str(tmp_path / "other"))
    assert [len(source(split, settings)) for split in ("train", "test")] == [5, 4]
    assert source.measure_whole(settings) == settings
    with pytest.raises(UserError, match=r"--test-root .*nowhere: no such folder"):
        source("test", settings_of(name, tmp_path / "own", test_root=str(tmp_path / "nowhere")))


def test_panels_in_folders_named_a_and_b_are_evaluated_on_their_test_split(tmp_path: Path) -> None:
    for folder, count in (("trainA", 3), ("trainB", 3), ("testA", 2), ("testB", 2)):
        write_whole(tmp_path / folder, "panels", count)
    settings = settings_of("panels", tmp_path)
    assert source_class("panels").measure_whole(settings) == settings
    assert len(source_class("panels")("test", settings)) == 2


@pytest.mark.parametrize("name", sorted({*writers} - {*FOLDERS}))
def test_sources_with_a_fixed_test_split_evaluate_that_split(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers[name](tmp_path, monkeypatch)
    settings = settings_of(name, tmp_path)
    assert source_class(name).measure_whole(settings) is settings


def test_evaluation_uses_the_source_that_the_run_was_trained_on(tmp_path: Path) -> None:
    for recipe, name in (("restoration", "pairs"), ("translation", "panels")):
        root = tmp_path / name
        write_whole(root, name, COUNT)
        whole = _for_whole_folder(configure(recipe, {"data": name, "data_root": str(root), "workers": "0"}))
        assert isinstance(whole.run, SeparateTestFolder) and whole.run.test_root == str(root)
        assert {split: len(source) for split, source in open_sources(whole, "test").items()} == {"test": COUNT}
    (tmp_path / "high").mkdir()
    settings = settings_of("photos", tmp_path / "high", low_root=str(tmp_path / "low"))
    evaluated = source_class("photos").measure_whole(settings)
    roots = {"test_root": settings.data_root, "test_low_root": str(tmp_path / "low")}
    assert evaluated == dataclasses.replace(settings, **roots, validation=0.0)  # type: ignore[arg-type]
