"""ESRGAN: loss terms, low-resolution inputs, settings, and equality on one and two processes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from degraded_inputs import REAL, TINY, write_inputs
from PIL import Image
from running import run_fork, start_function_in_ranks

from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.images.degradation.second_order import NUM_NUMBERS, degrade
from paceline.images.resample import bicubic_as_saved
from paceline.models.esrgan import RRDBNet, UNetDiscriminator
from paceline.models.features import Features
from paceline.models.losses import OBJECTIVES
from paceline.recipes.esrgan import Esrgan, EsrganSettings
from paceline.recipes.importers.esrgan import EsrganFile

DATA_SPEC = DataSpec(channels=3, height=32, width=32)
ADVERSARIAL = {"stage": "adversarial", "perceptual_distance": "l1", "d_norm": "none"}
BCE = OBJECTIVES["bce"]


def build(spec: DataSpec = DATA_SPEC, **settings: Any) -> Esrgan:
    torch.manual_seed(0)
    return Esrgan(EsrganSettings(**TINY | settings), spec)


def make_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(3, 3, 32, 32, generator=generator) * 2 - 1
    return {"image": images, "degradation": torch.rand(3, NUM_NUMBERS, generator=generator)}


def after_generator(recipe: Esrgan) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    batch = make_batch()
    loss = recipe("generator", batch)
    return loss.terms, batch | {name: tensor.detach() for name, tensor in loss.shared.items()}


def test_pretraining_uses_only_a_generator_and_a_pixel_loss():
    recipe = build()
    terms, batch = after_generator(recipe)
    assert list(recipe.networks) == ["generator"] and terms.keys() == {"pixel"}
    low = bicubic_as_saved(batch["image"], 16, 16)
    torch.testing.assert_close(terms["pixel"], F.l1_loss(recipe.generator(low), batch["image"]))


def test_the_relativistic_losses_compare_each_real_image_with_its_upscaled_version():
    recipe = build(**ADVERSARIAL)
    terms, batch = after_generator(recipe)
    real, fake = recipe.discriminator(batch["image"]), recipe.discriminator(batch["fake"])
    torch.testing.assert_close(terms["adversarial"], 1e-3 * F.softplus(real - fake).mean())
    found = recipe("discriminator", batch).terms
    torch.testing.assert_close(found, {"relativistic": F.softplus(fake - real).mean()})


def test_the_plain_losses_rate_every_pixel_with_the_unet_discriminator():
    recipe = build(**REAL)
    assert isinstance(recipe.discriminator, UNetDiscriminator)
    recipe.discriminator.eval()  # keeps the vectors of spectral normalisation
    terms, batch = after_generator(recipe)
    real, fake = recipe.discriminator(batch["image"]), recipe.discriminator(batch["fake"])
    assert real.shape == (3, 1, 32, 32)
    torch.testing.assert_close(terms["adversarial"], 1e-3 * BCE.generator(fake).mean())
    torch.testing.assert_close(
        recipe("discriminator", batch).terms, {"real": BCE.real(real).mean(), "fake": BCE.fake(fake).mean()}
    )


def test_the_perceptual_loss_is_a_weighted_sum_over_layers():
    recipe = build(**ADVERSARIAL, vgg_layer="conv1_2:0.1,conv3_4", perceptual=2.0)
    terms, batch = after_generator(recipe)
    wanted = sum(
        weight * F.l1_loss(Features("random", name)(batch["fake"]), Features("random", name)(batch["image"]))
        for name, weight in (("conv1_2", 0.1), ("conv3_4", 1.0))
    )
    torch.testing.assert_close(terms["perceptual"], 2 * wanted)


def test_fft_and_ssim_losses_are_added_if_they_have_a_weight():
    terms, _ = after_generator(build(fft=0.1, ssim=0.5))
    assert terms.keys() == {"pixel", "fft", "ssim"}
    assert all(term.requires_grad and term > 0 for term in terms.values())


def test_the_network_receives_images_from_the_second_order_degradation():
    recipe, batch = build(**REAL), make_batch()
    shown = recipe.preview(batch)
    low = degrade(batch["image"], batch["degradation"], 2, *recipe.rounds)
    assert torch.equal(shown["low"], F.interpolate(low, scale_factor=2, mode="nearest"))
    assert torch.equal(recipe.predict(batch)["image"], recipe.generator(low))


@pytest.mark.parametrize(
    ("settings", "spec", "message"),
    [
        ({"stage": "both"}, DATA_SPEC, "stage=both: consists of several runs"),
        ({"scale": "4"}, DataSpec(3, 30, 32), "multiples of 4 for scale=4"),
        (REAL, DataSpec(3, 36, 36), "multiples of 8 for logits=pixel"),
        (REAL, DataSpec(3, 32, 32, scale=2), "degradation=second_order: not supported with low-resolution files"),
        ({"scale": "4"}, DataSpec(3, 32, 32, scale=2), "set scale to this factor"),
        ({"vgg_layer": "conv1_2:much"}, DATA_SPEC, "'much' is not a number"),
        ({"pixel": 0.0}, DATA_SPEC, "all loss weights are zero"),
    ],
)
def test_settings_that_do_not_fit_raise_an_error(settings, spec, message):
    with pytest.raises(UserError, match=message):
        build(spec, **settings)


@pytest.mark.parametrize("stage", ["pretrain", "adversarial"])
def test_lpips_as_a_loss_needs_its_package(monkeypatch, stage):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"lpips: the package is not installed; install with: .*paceline\[lpips\]"):
        Esrgan.check(EsrganSettings(**TINY | {"stage": stage, "perceptual": 0.0, "lpips": 1.0}))


@pytest.mark.parametrize("scale", [2, 4])
def test_a_residual_output_starts_close_to_bicubic_upscaling(scale):
    recipe = build(scale=str(scale), output="residual", width=16, growth=8)
    found = recipe.eval().predict(make_batch())
    change = (found["image"] - found["bicubic"]).abs().mean()
    assert 0 < change < 0.02 < (found["image"] - found["target"]).abs().mean()
    odd = torch.rand(1, 3, 13, 7) * 2 - 1
    assert recipe.image_to_image(odd)["image"].shape == (1, 3, 13 * scale, 7 * scale)


def test_the_degradation_is_a_condition_of_the_metrics():
    assert build().evaluation.conditions == {}
    usual = build(**REAL).evaluation.conditions
    assert usual["degradation"] == "second_order" and usual["max_blur"] == 3.0
    assert build(**REAL, max_noise=10.0).evaluation.conditions != usual


def test_degraded_batches_are_bit_identical_on_one_and_two_processes_and_with_all_loaders(tmp_path: Path) -> None:
    ranks = start_function_in_ranks(tmp_path, 2, write_inputs, "two", 2, "workers")
    ranks += start_function_in_ranks(tmp_path, 1, write_inputs, "one", 1, "resident")
    for running in ranks:
        assert running.wait() == 0, running.stderr
    one = np.load(tmp_path / "one-0.npz")
    two = [np.load(tmp_path / f"two-{rank}.npz") for rank in (0, 1)]
    for name in one.files:
        assert np.array_equal(one[name], np.concatenate([part[name] for part in two])), name
    assert len(np.unique(one["low0"])) > 50


@pytest.mark.slow
@pytest.mark.parametrize("settings", [REAL, pytest.param({"stage": "adversarial"}, marks=pytest.mark.slow)])
def test_two_processes_train_the_same_weights_as_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = ("verify", "esrgan", "--strategies", "single,ddp", "--devices", "2", "--steps", "3", *words)
    done = run_fork(tmp_path, *command, "--set", "ema_half_life=20 images")
    assert done.wait() == 0, done.stdout + done.stderr


def older(key: str) -> str:
    """Return a tensor's name in ESRGAN's first public checkpoints."""
    names = {"conv_first": "model.0", "conv_body": "model.1.sub.2", "conv_up1": "model.3", "conv_up2": "model.6"}
    names |= {"conv_hr": "model.8", "conv_last": "model.10"}
    layer, _, part = key.rpartition(".")
    if layer in names:
        return f"{names[layer]}.{part}"
    return f"{layer.replace('body.', 'model.1.sub.').replace('rdb', 'RDB')}.0.{part}"


def old(key: str) -> str:
    """Return a tensor's name in ESRGAN's second public layout."""
    names = {"conv_body": "trunk_conv", "conv_up1": "upconv1", "conv_up2": "upconv2", "conv_hr": "HRconv"}
    layer, _, part = key.rpartition(".")
    return f"{names.get(layer, layer)}.{part}".replace("body.", "RRDB_trunk.").replace("rdb", "RDB")


@pytest.mark.parametrize("rename", [str, old, older])
@pytest.mark.parametrize("scale", [2, 4])
def test_public_checkpoints_are_imported_under_any_public_names(tmp_path: Path, rename: Any, scale: int) -> None:
    network = RRDBNet(scale, width=6, num_blocks=2, growth=3)
    state = network.state_dict()
    torch.save({"params_ema": {rename(key): tensor for key, tensor in state.items()}}, tmp_path / "theirs.pth")
    found = EsrganFile([tmp_path / "theirs.pth"])
    assert found.recognised == {"scale": str(scale), "num_blocks": 2, "width": 6, "growth": 3}
    tensors = found.tensors({})
    assert tensors.keys() == {f"generator.{key}" for key in state}
    assert all(torch.equal(tensors[f"generator.{key}"], tensor) for key, tensor in state.items())


def test_files_with_other_networks_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "theirs.pth"
    state = RRDBNet(width=4, num_blocks=1, growth=2).state_dict()
    for content, message in (
        ({"head.0.weight": torch.zeros(4, 3, 9, 9)}, "'head.0.weight' does not belong"),
        ({**state, "extra.weight": torch.zeros(1)}, "'extra.weight' does not belong"),
        ({**state, "conv_first.weight": torch.zeros(4, 48, 3, 3)}, "use a generator for ×2 or ×4"),
    ):
        torch.save(content, file)
        with pytest.raises(UserError, match=message):
            EsrganFile([file])


def test_a_network_is_trained_interpolated_imported_and_applied(tmp_path: Path) -> None:
    words = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
    length = ("--images", "8", "--batch-size", "4", "--crop", "32", "--accelerator", "cpu", "--set", "validation=0")
    for out, more in (("psnr", ()), ("gan", ("--set", "stage=adversarial", "--init-from", "psnr"))):
        trained = run_fork(tmp_path, "train", "esrgan", *words, *length, *more, "--out", out)
        assert trained.wait() == 0, trained.stdout + trained.stderr
    photo = np.random.default_rng(0).integers(0, 255, (21, 30, 3), dtype=np.uint8)
    Image.fromarray(photo).save(tmp_path / "photo.png")
    made = {}
    for share in ("1", "0.5", "0"):
        done = run_fork(tmp_path, "apply", "gan", "photo.png", "--out", share, "--interpolate", share)
        assert done.wait() == 0, done.stderr
        made[share] = np.array(Image.open(next((tmp_path / share).iterdir()))).astype(int)
    assert made["1"].shape == (42, 60, 3)
    done = run_fork(tmp_path, "apply", "psnr", "photo.png", "--out", "psnr-alone")
    assert np.array_equal(made["0"], np.array(Image.open(next((tmp_path / "psnr-alone").iterdir()))))
    assert "0.5 × gan" in run_fork(tmp_path, "evaluate", "gan", "--interpolate", "0.5").stdout
    rejected = run_fork(tmp_path, "apply", "psnr", "photo.png", "--out", "no", "--interpolate", "0.5")
    assert rejected.wait() == 2 and "was not initialised from another model" in rejected.stderr
    rejected = run_fork(tmp_path, "evaluate", "gan", "--interpolate", "2")
    assert rejected.wait() == 2 and "--interpolate 2: expected a number from 0 to 1" in rejected.stderr
