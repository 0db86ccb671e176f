"""Training and evaluating image translation on a folder of images, each of which is a row of panels."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from running import run_fork

from paceline.cli.app import run
from paceline.commands.configure import configure
from paceline.core.registry import names
from paceline.runs.recipe import load_recipe

SIDE = 40  # not a multiple of the crop or of 32; a five-level U-Net needs multiples of 32
TINY = "generator=resnet_6,segmentation_generator=unet_32,ngf=1,ndf=1,d_layers=1,dropout=0"


def write_row(file: Path, seed: int) -> None:
    """Save a row of three panels: an input, its negative as the stain, and a mask of its left half."""
    image = np.random.default_rng(seed).integers(256, size=(SIDE, SIDE, 3), dtype=np.uint8)
    mask = np.zeros_like(image)
    mask[:, : SIDE // 2] = 255
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.concatenate([image, 255 - image, mask], axis=1)).save(file)


def settings() -> list[str]:
    chosen = [*TINY.split(","), "batch_size=2", "validation=0.25", "evaluate_every=50%", "sample_every=50%"]
    return [word for one in (*chosen, "panels=image,stain,segmentation") for word in ("--set", one)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run trained on four rows of panels."""
    folder = tmp_path_factory.mktemp("translation")
    for number in range(4):
        write_row(folder / "rows" / "train" / f"{number}.png", number)
    write_row(folder / "rows" / "test" / "0.png", 4)
    command = ["train", "translation", "--accelerator", "cpu", "--data-root", "rows", "--crop", "32", "--images", "4"]
    trained = run_fork(folder, *command, "--out", "run", *settings())
    assert trained.wait() == 0, trained.stdout + trained.stderr
    return folder


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_training_evaluates_every_panel_and_saves_image_strips():
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if "validation/psnr" in row]
    assert [row["images"] for row in evaluated] == [2, 4]
    assert {"validation/stain_psnr", "validation/segmentation_ssim", "validation/iou"} <= evaluated[-1].keys()
    names = sorted(path.name for path in Path("run/samples").iterdir())
    assert names == [f"samples-{images:012}.png" for images in (0, 2, 4)]
    with Image.open(Path("run/samples", names[-1])) as strip:
        assert strip.width >= 5 * SIDE  # the input, two generated panels and two real ones


def test_evaluate_prints_the_metrics_for_all_panels(capsys):
    assert run(["evaluate", "run", "--accelerator", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "stain_psnr" in printed and "dice" in printed


def test_evaluate_uses_all_rows_in_a_given_folder(capsys):
    for number in range(5):
        write_row(Path("others", f"{number}.png"), number)
    assert run(["evaluate", "run", "--accelerator", "cpu", "--data-root", "others"]) == 0
    (count,) = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.split()[0] == "count"]
    assert count == "5"


def test_a_row_of_the_wrong_size_is_reported_in_one_line(rejected):
    Image.new("RGB", (3 * SIDE + 2, SIDE)).save("rows/train/odd.png")
    try:
        command = ["train", "translation", "--accelerator", "cpu", "--data-root", "rows", "--out", "other"]
        assert "odd.png: 122×40 pixels is not a row of 3 equal panels" in rejected(*command, *settings())
    finally:
        Path("rows/train/odd.png").unlink()
    assert not Path("other").exists()


def test_apply_rejects_a_row_of_panels_until_the_user_chooses_a_panel_or_the_whole_image(capsys):
    write_row(Path("row/0.png"), 7)
    with Image.open("row/0.png") as row:
        row.crop((0, 0, SIDE, SIDE)).save("row/alone.png")
    words = ["--accelerator", "cpu", "--out"]
    assert run(["apply", "run", "row/0.png", *words, "whole"]) == 1 and not list(Path("whole").iterdir())
    line = "row/0.png: 120×40 pixels looks like a row of 3 panels: use --panel 1 for the input alone, or --panel 0 for"
    assert line in capsys.readouterr().err
    assert run(["apply", "run", "row/0.png", *words, "whole", "--panel", "0"]) == 0
    with Image.open("whole/0-stain.png") as whole:
        assert whole.size == (3 * SIDE, SIDE)
    assert run(["apply", "run", "row/0.png", *words, "first", "--panel", "1"]) == 0
    assert run(["apply", "run", "row/alone.png", *words, "alone"]) == 0
    assert "looks like" not in capsys.readouterr().out
    for name in ("stain", "segmentation"):
        with Image.open(f"first/0-{name}.png") as first, Image.open(f"alone/alone-{name}.png") as alone:
            assert np.array_equal(np.asarray(first), np.asarray(alone))
    assert run(["apply", "run", "row/alone.png", *words, "none", "--panel", "2"]) == 1
    assert "--panel 2: 40×40 pixels is not a row of 2 square panels" in capsys.readouterr().err
    assert run(["apply", "run", "row", *words, "none", "--panel", "-1"]) == 2


@pytest.mark.parametrize(
    ("recipe", "word", "line"),
    [
        ("translation", "gpu_ids=0", "did you mean 'gpus'?"),
        ("translation", "crop_size=256", "did you mean 'crop'?"),
        ("super_resolution", "pretrain=x.pth", "did you mean 'init_from'?"),
        ("super_resolution", "savetag=x", "did you mean 'out'?"),
        ("dual_gan", "image_size=32", "unknown setting 'image_size'; did you mean 'size'?"),
        ("dual_gan", "num_epochs=5", "did you mean 'epochs'?"),
        ("classification", "amp=1", "did you mean 'precision'?"),
    ],
)
def test_the_error_for_a_setting_from_another_project_names_the_paceline_setting(recipe, word, line, rejected):
    assert line in rejected("train", recipe, "--set", word, "--out", "never")


def test_the_error_for_an_option_from_another_program_names_the_paceline_option(rejected):
    for flag, line in (
        ("--image_size", "use --set size=VALUE"),
        ("--gpu-ids", "use --gpus"),
        ("--print_freq", "use --set log_every=VALUE"),
    ):
        assert f"({line})" in rejected("train", "dcgan", flag, "1")


@pytest.mark.parametrize("name", names("recipe"))
def test_advice_about_other_projects_names_only_existing_settings(name):
    """The advice names only existing settings and flags, and no existing setting has advice."""
    recipe_class = load_recipe(name)
    values = configure(name, {}, elsewhere=True).values()
    assert not recipe_class.other_names.keys() & values.keys()
    for advice in recipe_class.other_names.values():
        for setting in re.findall(r"--set '?([a-z_0-9]+)=", advice):
            assert setting in values, advice
        for flag in re.findall(r"--([a-z-]+)", advice):
            assert flag in ("set", "downsample") or flag.replace("-", "_") in values, advice
