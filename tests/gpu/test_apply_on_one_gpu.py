"""`apply` on one GPU: captured graphs, batches of images, precisions and regions give the results of the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from photographs import photograph
from PIL import Image

from paceline.cli.app import run
from paceline.commands.configure import configure
from paceline.contracts.recipe import DataSpec
from paceline.inference.tiles import TileRunner
from paceline.inference.trained import TrainedModel, build, open_image_model
from paceline.runs.weights import write_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PHOTO = photograph("astronaut")
RECIPES = {
    "super_resolution": ["num_blocks=2", "width=16"],
    "restoration": ["width=8", "depth=3"],
    "esrgan": ["num_blocks=2"],
    "translation": ["generator=resnet_6", "segmentation_generator=unet_64", "ngf=8", "ndf=8"],
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    for recipe, settings in RECIPES.items():
        config = configure(recipe, {}, assignments=settings, elsewhere=True)
        spec = DataSpec(3, 64, 64, panels=("stain", "segmentation") if recipe == "translation" else ())
        built = build(config, spec)
        generator = torch.Generator().manual_seed(0)
        for tensor in built.state_dict().values():
            if tensor.dim() == 4:
                tensor.normal_(0, (1.5 / tensor[0].numel()) ** 0.5, generator=generator)
        write_weights(folder / f"{recipe}.safetensors", config, spec, built.state_dict())
    return folder


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_batches_and_captured_graphs_equal_the_cpu_within_one_level(recipe: str, weights: Path) -> None:
    tiles = [np.ascontiguousarray(PHOTO[start : start + 64, start : start + 64]) for start in range(0, 320, 40)]
    on_cpu = TileRunner(open_image_model(str(weights / f"{recipe}.safetensors")), torch.device("cpu"))
    runner = TileRunner(open_image_model(str(weights / f"{recipe}.safetensors")), torch.device("cuda"))
    expected = [on_cpu.run([tile]).arrays() for tile in tiles]
    for _ in range(6):  # the fourth call with a shape is captured
        made = runner.run(tiles).arrays()
    assert runner._graphs is not None and not runner.notes
    assert runner._graphs._graphs, "nothing was captured"
    for name, values in made.items():
        for number, one in enumerate(expected):
            assert np.abs(values[number].astype(int) - one[name][0]).max() <= 1, name


def test_a_folder_of_small_and_large_images_equals_the_cpu(weights: Path, tmp_path: Path) -> None:
    for number in range(40):
        side = 48 if number % 5 else 200
        Image.fromarray(PHOTO[number : number + side, :side]).save(tmp_path / f"{number:02}.png")
    model = str(weights / "super_resolution.safetensors")
    for device in ("cpu", "cuda"):
        assert run(["apply", model, str(tmp_path), "--out", str(tmp_path / device), "--accelerator", device]) == 0
    for path in sorted((tmp_path / "cpu").glob("*.png")):
        one, other = (np.asarray(Image.open(tmp_path / device / path.name)).astype(int) for device in ("cpu", "cuda"))
        assert np.abs(one - other).max() <= 1, path.name


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_lower_precisions_are_close(precision, weights, tmp_path) -> None:
    Image.fromarray(PHOTO[:200, :200]).save(tmp_path / "a.png")
    words = ["apply", str(weights / "super_resolution.safetensors"), str(tmp_path / "a.png"), "--format", "tiff"]
    for name in ("fp32", precision):
        assert run([*words, "--out", str(tmp_path / name), "--precision", name]) == 0
    one, other = (np.asarray(Image.open(tmp_path / name / "a.tif")).astype(int) for name in ("fp32", precision))
    assert np.abs(one - other).max() < 30


def test_regions_equal_the_whole_image_and_resume_gives_the_same_bytes(weights: Path, tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", PHOTO, tile=(64, 64), compression="zlib", photometric="rgb")
    Image.fromarray(PHOTO).save(tmp_path / "a.png")
    model = str(weights / "restoration.safetensors")
    assert run(["apply", model, str(tmp_path / "a.png"), "--out", str(tmp_path / "whole")]) == 0
    for out in ("one", "two"):
        words = ["--tile", "128", "--region", "0,0,512,512", "--out", str(tmp_path / out)]
        assert run(["apply", model, str(tmp_path / "a.tif"), *words]) == 0
    assert (tmp_path / "one/a.tif").read_bytes() == (tmp_path / "two/a.tif").read_bytes()
    made, whole = tifffile.imread(tmp_path / "one/a.tif").astype(int), np.asarray(Image.open(tmp_path / "whole/a.png"))
    assert np.abs(made - whole).max() <= 1


def test_a_compiled_network_gives_close_results(weights: Path, tmp_path: Path) -> None:
    Image.fromarray(PHOTO[:96, :96]).save(tmp_path / "a.png")
    model = str(weights / "super_resolution.safetensors")
    for out, flags in (("eager", []), ("compiled", ["--compile", "on"])):
        assert run(["apply", model, str(tmp_path / "a.png"), "--out", str(tmp_path / out), *flags]) == 0
    one, other = (np.asarray(Image.open(tmp_path / out / "a.png")).astype(int) for out in ("eager", "compiled"))
    assert np.abs(one - other).max() <= 1


def test_the_halo_measured_on_the_gpu_equals_that_on_the_cpu() -> None:
    pytest.importorskip("spandrel")
    sizes = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 8, "mlp_ratio": 2.0}
    settings = {"network": "spandrel:SwinIR", "network_args": sizes, "scale": "2"}
    config, spec = configure("super_resolution", settings, small=True), DataSpec(3, 64, 64)
    models = [TrainedModel(build(config, spec), config, spec, "") for _ in range(2)]
    models[1].recipe.load_state_dict(models[0].recipe.state_dict())
    assert models[1].receptive_field.is_measurable  # traced before the weights move to the GPU
    models[1].recipe.cuda()
    halos = [model.tiled_field.tiled_halo_px for model in models]
    assert halos[0] == halos[1] and not models[1].tiled_field.obstacles
