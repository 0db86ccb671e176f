"""Recipes train on 5-channel 16-bit images, and report in one line which of their options need colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch

import paceline
from paceline.cli.app import run
from paceline.commands.apply import predict
from paceline.core.errors import UserError
from paceline.images.decode import decode_full_depth

CHANNELS, SIDE = 5, 32
COMMON = {"batch_size": 4, "accelerator": "cpu", "workers": 0, "images": 8, "loggers": ""}
COMMON |= {"evaluate_every": "100%", "save_every": "100%", "sample_every": "100%", "flip": "off"}
RECIPES: dict[str, dict[str, Any]] = {
    "classification": {"data": "folder", "width": 8, "validation": 0.0},
    "super_resolution": {"data": "photos", "scale": "2", "num_blocks": 1, "width": 4, "norm": "none", "crop": 16},
    "esrgan": {"data": "photos", "scale": "2", "num_blocks": 1, "width": 4, "growth": 2, "crop": 16},
    "translation": {"data": "panels", "model": "pix2pix", "generator": "unet_32", "ngf": 4, "ndf": 4, "d_layers": 1},
    "dcgan": {"data": "folder", "ngf": 4, "ndf": 4, "few_images": "allow", "size": 32},
    "r3gan": {
        "data": "folder",
        "width": 8,
        "num_blocks": 1,
        "group_size": 4,
        "nz": 4,
        "few_images": "allow",
        "size": 32,
    },
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("deep")
    images = np.random.default_rng(0).integers(0, 65536, (8, CHANNELS, SIDE, 2 * SIDE), dtype=np.uint16)
    for split in ("train", "test"):
        for number, planes in enumerate(images):
            label = "ab"[number % 2]
            for folder, shown in ((f"folder/{split}/{label}", planes[..., :SIDE]), (f"panels/{split}", planes)):
                (root / folder).mkdir(parents=True, exist_ok=True)
                tifffile.imwrite(root / folder / f"{number}.tif", shown, photometric="minisblack")
    (root / "photos").symlink_to(root / "folder")
    return root


def train(recipe: str, root: Path, out: Path, **more: Any) -> paceline.TrainResult:
    settings = COMMON | RECIPES[recipe] | more
    return paceline.train(recipe, data_root=root / settings["data"], out=out, **settings)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_on_images_with_five_channels_of_16_bits(recipe: str, root: Path, tmp_path: Path) -> None:
    result = train(recipe, root, tmp_path / "run")
    assert result.images == 8
    model = paceline.load(tmp_path / "run")
    assert (model.spec.channels, model.spec.dtype) == (CHANNELS, "uint16")
    if recipe == "classification":
        images = np.stack([tifffile.imread(root / f"folder/test/a/{number}.tif") for number in (0, 2)])
        assert model.predict(images).shape == (2, 2)
        assert torch.equal(model.predict(torch.from_numpy(images)), model.predict(images))
        with pytest.raises(UserError, match=r"expected images as uint16 \[n, 5, 32, 32\]"):
            model.predict(images.astype(np.uint8))
        files = [str(root / f"folder/test/a/{number}.tif") for number in (0, 2)]
        predict(str(tmp_path / "run"), files, 1, str(tmp_path / "found.csv"), "best", "cpu")
        found = [line.split(",")[-1] for line in (tmp_path / "found.csv").read_text().splitlines()[1:]]
        assert [float(probability) for probability in found] == model.predict(images).amax(dim=1).tolist()
    if recipe in ("dcgan", "r3gan"):
        assert model.sample(2).shape == (2, CHANNELS, 32, 32) and model.sample(2).dtype == torch.uint16


@pytest.mark.parametrize(
    ("dtype", "limits", "channels", "suffix"),
    [("uint16", None, 1, "png"), ("uint16", (0, 4095), 3, "tif"), ("float32", (-2, 2), 1, "tif")],
)
def test_generated_images_are_written_with_the_depth_of_the_training_images(
    dtype: str, limits: tuple[float, float] | None, channels: int, suffix: str, tmp_path: Path
) -> None:
    low, high = limits or (0, 65535)
    images = np.random.default_rng(0).uniform(low, high, (8, SIDE, SIDE, channels)).astype(dtype)
    np.savez(tmp_path / "own.npz", x_train=images, x_test=images)
    values = {"value_range": f"{low},{high}"} if limits else {}
    settings = COMMON | RECIPES["dcgan"] | values | {"data": "npz", "data_root": tmp_path / "own.npz"}
    paceline.train("dcgan", out=tmp_path / "run", **settings)
    words = ["sample", str(tmp_path / "run"), "--accelerator", "cpu", "--count", "3", "--to", str(tmp_path / "made")]
    assert run(words) == 0
    files = sorted((tmp_path / "made").iterdir())
    assert [file.name for file in files] == [f"0000{number}.{suffix}" for number in range(3)]
    written = np.stack([decode_full_depth(file) if suffix == "png" else tifffile.imread(file) for file in files])
    assert written.dtype == dtype and low <= written.min() and written.max() <= high
    eight_bit_levels = (written.astype(np.float64) - low) / (high - low) * 255
    assert np.abs(eight_bit_levels - eight_bit_levels.round()).max() > 0.1  # not rounded to 8 bits
    expected = paceline.load(tmp_path / "run", device="cpu").sample(3).permute(0, 2, 3, 1).numpy()
    assert np.array_equal(written.reshape(expected.shape), expected)


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("super_resolution", {"stage": "adversarial", "vgg": "random"}, "perceptual=0.006: VGG19 takes images with 1"),
        ("esrgan", {"degradation": "second_order"}, "degradation=second_order: simulates 8-bit JPEG files"),
        ("translation", {"perceptual": 1.0, "vgg": "random"}, "perceptual=1: VGG19 takes images with 1 or 3 channels"),
        ("translation", {"panels": "image,segmentation"}, "a segmentation needs 1 or 3 channels"),
        ("dcgan", {"inception": "any.pt"}, "--inception: needs images with 1 or 3 channels, not 5"),
    ],
)
def test_options_that_need_colours_are_rejected(
    recipe: str, settings: dict[str, Any], message: str, root: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message) as raised:
        train(recipe, root, tmp_path / "run", **settings)
    assert "\n" not in str(raised.value)
