"""Files in one group are always in the same split, and both files of a pair may be in the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.cli.app import run
from paceline.config.flags import PhotoSettings, SeparateTestFolder
from paceline.core.errors import UserError
from paceline.data.open_sources import open_sources
from paceline.data.source import PanelSettings
from paceline.data.sources.degraded import Degraded
from paceline.data.sources.folder import Folder
from paceline.data.sources.packed import Packed
from paceline.data.sources.pairs import Pairs
from paceline.data.sources.panels import Panels
from paceline.data.sources.photos import Photos
from paceline.runs.recipe import resolve_config

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


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"(scene\d)_", r"must match every file, but does not match scene10_0\.png, .* and 5 more"),
        (r"(", "invalid regular expression"),
        (r"scene", r"too few groups \(1\)"),
    ],
)
def test_a_pattern_that_does_not_group_the_files_is_rejected(pattern: str, message: str, tmp_path: Path) -> None:
    write_scenes(tmp_path)
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
