"""Weights files for spandrel's networks are imported, applied, fine-tuned and exported; DDP trains like one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exporting import MISSING
from photographs import photograph
from PIL import Image

from paceline.cli.app import run
from paceline.commands.configure import configure
from paceline.commands.verify import differences
from paceline.inference.trained import open_image_model
from paceline.runs.metrics import read_metrics

spandrel = pytest.importorskip("spandrel")
pytestmark = pytest.mark.extras

NAFNET = {"width": 4, "enc_blk_nums": [1, 1], "middle_blk_num": 1, "dec_blk_nums": [1, 1]}
SWINIR = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 8, "mlp_ratio": 2.0}
CPU = ["--accelerator", "cpu"]


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.fromarray(photograph("astronaut")[100:141, 100:153]).save("small.png")
    Path("photos").mkdir()
    for number in range(12):
        Image.fromarray(photograph("astronaut")[:96, 8 * number : 96 + 8 * number]).save(f"photos/{number}.png")


def public_file(name: str, path: str, seed: int = 0, **arguments: Any) -> torch.nn.Module:
    """Write weights as in public files and return spandrel's own network."""
    torch.manual_seed(seed)
    module = importlib.import_module(f"spandrel.architectures.{name}")
    network: torch.nn.Module = getattr(module, name)(**arguments).eval()
    for parameter in network.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, 0, 0.02)
    torch.save({"params_ema": network.state_dict(), "iter": 5}, path)
    return network


def their_levels(path: str, pixels: np.ndarray) -> np.ndarray:
    described = spandrel.ModelLoader().load_from_file(path).eval()
    made = described(torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None] / 255)
    return made[0].permute(1, 2, 0).numpy() * 255


CASES = [
    ("NAFNet", {"img_channel": 3, **NAFNET}, "restoration", 1),
    ("SwinIR", {"upscale": 2, "upsampler": "pixelshuffle", **SWINIR}, "super_resolution", 2),
    ("ESRGAN", {"num_filters": 8, "num_blocks": 1, "scale": 4}, "super_resolution", 4),
    ("SPAN", {"num_in_ch": 3, "num_out_ch": 3, "feature_channels": 8, "upscale": 2}, "super_resolution", 2),
]


@pytest.mark.parametrize(("name", "arguments", "recipe", "scale"), CASES)
def test_an_imported_network_computes_the_same_images_as_in_spandrel(name, arguments, recipe, scale, capsys):
    public_file(name, "theirs.pth", **arguments)
    assert run(["import", "theirs.pth", "--out", "ours.safetensors"]) == 0
    assert f"recognised: network=spandrel:{name}, " in capsys.readouterr().out
    model = open_image_model("ours.safetensors")
    assert (model.config.recipe_name, model.output_scale) == (recipe, scale)
    assert run(["apply", "ours.safetensors", "small.png", "--out", "made", *CPU]) == 0
    with Image.open("small.png") as image:
        wanted = their_levels("theirs.pth", np.asarray(image))
    with Image.open("made/small.png") as made:
        assert np.abs(np.asarray(made, float) - wanted).max() <= 1 and wanted.std() > 1


@pytest.mark.parametrize(("name", "arguments", "recipe", "scale"), CASES[:2])
def test_an_imported_network_is_fine_tuned_with_one_command(name, arguments, recipe, scale):
    public_file(name, "theirs.pth", **arguments)
    assert run(["import", "theirs.pth", "--out", "ours.safetensors"]) == 0
    words = ["train", recipe, "--init-from", "ours.safetensors", "--data-root", "photos", "--crop", "32", *CPU]
    words += ["--batch-size", "4", "--images", "80", "--lr", "0.002", "--out", "run"]
    words += ["--set", "log_every=4 images", "--set", "evaluate_every=100%", "--set", "sample_every=100%"]
    assert run([*words, "--set", "rot90=off"]) == 0
    assert open_image_model("run").output_scale == scale
    losses = [line[key] for line in read_metrics(Path("run")) for key in line if key.endswith("/pixel")]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    Path("ours.safetensors").unlink()
    assert run([*words, "--set", "rot90=off"]) == 0  # a finished run does not need the initial weights


@pytest.mark.parametrize(("name", "arguments"), [case[:2] for case in CASES[:2]])
def test_an_imported_network_is_exported_to_onnx(name, arguments, capsys):
    if MISSING:
        pytest.skip(f"needs {', '.join(MISSING)}")
    public_file(name, "theirs.pth", **arguments)
    assert run(["import", "theirs.pth", "--out", "ours.safetensors"]) == 0
    assert run(["export", "ours.safetensors", "--out", "ours.onnx"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "network", "arguments"), [("restoration", "NAFNet", NAFNET), ("super_resolution", "SwinIR", SWINIR)]
)
def test_two_processes_train_the_same_weights_as_one(recipe, network, arguments):
    settings = {"network": f"spandrel:{network}", "network_args": arguments, "devices": 2, "accelerator": "cpu"}
    config = configure(recipe, {**settings, "batch_size": "4", "crop": 32, "data_root": "photos"}, small=True)
    found = differences(config, ["single", "ddp"], steps=3, tolerance=1e-9)
    assert found and all(one.value <= 1e-9 for one in found), found


def test_tiles_of_windowed_attention_give_the_result_for_the_whole_image(capsys):
    public_file("SwinIR", "theirs.pth", upscale=2, upsampler="pixelshuffle", **SWINIR)
    assert run(["import", "theirs.pth", "--out", "ours.safetensors"]) == 0
    Image.fromarray(photograph("astronaut")[:150, :170]).save("large.png")
    assert run(["apply", "ours.safetensors", "large.png", "--out", "whole", *CPU]) == 0
    capsys.readouterr()
    assert run(["apply", "ours.safetensors", "large.png", "--out", "tiled", "--tile", "32", *CPU]) == 0
    printed = capsys.readouterr().out
    assert "tiles of 32 pixels, halo " in printed and "seams" not in printed
    with Image.open("whole/large.png") as whole, Image.open("tiled/large.png") as tiled:
        differences_in_levels = np.abs(np.asarray(whole, float) - np.asarray(tiled, float))
    # In float32, a value may be rounded to the next level. tests/inference compares results in float64.
    assert differences_in_levels.max() <= 1 and differences_in_levels.mean() < 0.01


def test_apply_reports_how_much_tiles_change_the_result_of_a_network_that_pools(capsys):
    public_file("NAFNet", "theirs.pth", img_channel=3, **NAFNET)
    assert run(["import", "theirs.pth", "--out", "ours.safetensors"]) == 0
    Image.fromarray(photograph("astronaut")[:150, :170]).save("large.png")
    capsys.readouterr()
    assert run(["apply", "ours.safetensors", "large.png", "--out", "tiled", "--tile", "32", *CPU]) == 0
    printed = capsys.readouterr().out
    assert "pools over the whole image: seams may be visible; tiles change the centre by at most " in printed
    assert "of 255 levels (mean " in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "scale=4"], "scale=4: theirs.pth has scale=2; leave --set scale out"),
        (["--set", "network=spandrel:RCAN"], "theirs.pth has network=spandrel:SwinIR"),
        (["--recipe", "restoration"], "belongs to the recipe super_resolution; leave --recipe out"),
    ],
)
def test_settings_that_contradict_the_file_are_rejected(words, message, capsys):
    public_file("SwinIR", "theirs.pth", upscale=2, upsampler="pixelshuffle", **SWINIR)
    assert run(["import", "theirs.pth", "--out", "ours.safetensors", *words]) == 2
    assert message in capsys.readouterr().err


def test_weights_of_a_different_network_are_rejected(capsys):
    public_file("NAFNet", "theirs.pth", img_channel=3, **NAFNET)
    assert run(["import", "theirs.pth", "--out", "ours.safetensors"]) == 0
    words = ["train", "restoration", "--init-from", "ours.safetensors", "--data-root", "photos", *CPU, "--out", "run"]
    assert run([*words, "--set", "network=spandrel:SwinIR"]) == 2
    error = capsys.readouterr().err
    assert "its weights were trained with network=spandrel:NAFNet (not spandrel:SwinIR)" in error
