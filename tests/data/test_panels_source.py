"""The source `panels` reads rows of panels, pairs of folders, and the bundled tissue images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from made_data import raw_batches
from PIL import Image

from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.data.loaders.resident import Resident
from paceline.data.loaders.workers import Workers
from paceline.data.sources.panels import Panels
from paceline.data.stream import Stream
from paceline.data.transforms import Augment, transform

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
    assert {name: int(image.flat[0]) for name, image in sample.items()} == {
        "image": 10,
        "stain": 11,
        "nuclei": 12,
        "segmentation": 13,
    }
    assert all(image.shape == (SIDE, SIDE, 3) and np.ptp(image) == 0 for image in sample.values())


def test_the_input_may_be_any_panel_and_the_segmentation_is_the_last_output(tmp_path):
    write_rows(tmp_path, 4)
    source = open_rows(tmp_path, panels="segmentation,-,image,stain")
    assert source.spec.panels == ("stain", "segmentation")
    assert {name: int(image.flat[0]) for name, image in source.read(0).items()} == {
        "segmentation": 0,
        "image": 2,
        "stain": 3,
    }


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
    assert {name: int(image.flat[0]) for name, image in source.read(0).items()} == {"image": 3, "target": 4}
    swapped = open_rows(tmp_path, panels="photo,image")
    assert {name: int(image.flat[0]) for name, image in swapped.read(0).items()} == {"photo": 1, "image": 2}
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
        ("image,a,b,segmentation", r"0.png: 96×16 pixels is not a row of 4 equal panels.*looks like a row of 6 panels"),
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
