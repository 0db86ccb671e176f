"""Networks with a small halo are computed in parts, within large tiles: the same results in less memory."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from paceline.commands.configure import configure
from paceline.contracts.recipe import DataSpec
from paceline.inference.apply import compute_in_parts
from paceline.inference.tiles import choose_tiling
from paceline.inference.trained import TrainedModel, build, open_image_model
from paceline.runs.weights import write_weights

CPU = torch.device("cpu")


def deepliif(folder: Path, segmentation_generator: str) -> TrainedModel:
    settings = ["generator=resnet_6", "norm=batch", "padding=zero", "ngf=1", "batchnorm=running"]
    settings.append(f"segmentation_generator={segmentation_generator}")
    config = configure("translation", {}, assignments=settings, elsewhere=True)
    spec = DataSpec(3, 512, 512, panels=("marker", "segmentation"))
    torch.manual_seed(0)
    recipe = build(config, spec)
    for weight in recipe.generators.parameters():
        torch.nn.init.normal_(weight, 0.0, 0.5)
    write_weights(folder / "weights.safetensors", config, spec, recipe.state_dict())
    return open_image_model(str(folder / "weights.safetensors"))


def test_networks_with_a_small_halo_are_computed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.inference.apply.LARGEST_PART_PX", 512)
    model = deepliif(tmp_path, "unet_512")
    images, seen = torch.rand(1, 3, 512, 1024) * 2 - 1, []
    model.recipe.generators["G1"].model.register_forward_hook(lambda module, inputs, made: seen.append(made.shape[-1]))
    with torch.no_grad():
        whole = model.recipe.image_to_image(images)
        field = compute_in_parts(model, CPU)
        seen.clear()
        in_parts = copy.deepcopy(model.recipe).image_to_image(images)  # other devices use copies
    assert len(seen) == 2 and max(seen) < 1024
    assert whole.keys() == in_parts.keys() == {"marker", "segmentation"}
    for name, made in whole.items():
        assert made.std() > 0.1
        torch.testing.assert_close(in_parts[name], made, rtol=0, atol=1e-4)
    before = model.receptive_field
    assert (field.halo_px, field.multiple_px, field.used) == (before.halo_px, before.multiple_px, before.used)
    assert field.bytes_per_px < 0.8 * before.bytes_per_px and field.elements_per_px < before.elements_per_px


def test_models_whose_halo_is_small_are_not_changed(tmp_path: Path) -> None:
    model = deepliif(tmp_path, "unet_32")
    classes = [type(network) for network in model.recipe.modules()]
    assert compute_in_parts(model, CPU) is model.receptive_field
    assert [type(network) for network in model.recipe.modules()] == classes


def test_tiles_are_so_small_that_indices_need_32_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    field = deepliif(tmp_path, "unet_32").receptive_field
    monkeypatch.setattr("paceline.inference.tiles.free_bytes", lambda device: 10**18)
    gpu, side = torch.device("cuda"), 60_000
    tiling = choose_tiling(field, (side, side), gpu)
    assert tiling.halo_px > 0 and (tiling.side_px + 2 * tiling.halo_px) ** 2 * field.elements_per_px < 2**31
    assert choose_tiling(field, (2048, 2048), gpu).halo_px == 0
