"""Super-resolution and paired restoration: loss terms, low-resolution inputs, fresh noise and settings."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from ranks import difference, make_parts, run_steps, weights

from paceline.commands.configure import configure
from paceline.contracts.recipe import DataSpec, Recipe
from paceline.core.errors import UserError
from paceline.data.source import open_sources
from paceline.images.degradation.operations import add_gaussian_noise
from paceline.images.resample import bicubic, bicubic_as_saved
from paceline.models.features import Features
from paceline.models.losses import OBJECTIVES
from paceline.recipes.parts.restoration import charbonnier, total_variation
from paceline.recipes.restoration import Restoration, RestorationSettings
from paceline.recipes.super_resolution import SuperResolution, SuperResolutionSettings
from paceline.runs.recipe import make_recipe

DATA_SPEC = DataSpec(channels=3, height=32, width=32)
TINY = {"num_blocks": 1, "width": 2, "d_width": 2, "vgg": "random"}


def build(spec: DataSpec = DATA_SPEC, **settings: Any) -> SuperResolution:
    torch.manual_seed(0)
    return SuperResolution(SuperResolutionSettings(**TINY | {"scale": "2"} | settings), spec)


def restoration(**settings: Any) -> Restoration:
    torch.manual_seed(0)
    return Restoration(RestorationSettings(**TINY | {"depth": 1} | settings), DATA_SPEC)


def make_batch(height: int = 32, width: int = 32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(3, 3, height, width, generator=generator) * 2 - 1
    return {"image": images, "target": images.flip(3)}


def after(recipe: Recipe, phase: str) -> tuple[Any, dict[str, torch.Tensor]]:
    batch = make_batch()
    loss = recipe(phase, batch)
    return loss, batch | {name: tensor.detach() for name, tensor in loss.shared.items()}


def test_pretraining_uses_only_a_generator_and_a_pixel_loss():
    recipe = build(stage="pretrain", tv=0.0)
    assert list(recipe.networks) == ["generator"]
    loss, batch = after(recipe, "generator")
    made = recipe.predict(batch)["image"]
    assert loss.terms.keys() == {"pixel"} and not loss.shared
    assert torch.equal(loss.terms["pixel"], F.mse_loss(made, batch["image"]))


def test_the_adversarial_stage_adds_a_perceptual_loss_and_a_discriminator():
    recipe = build(stage="adversarial", d_norm="none")
    assert list(recipe.networks) == ["generator", "discriminator"]
    loss, batch = after(recipe, "generator")
    fake, bce = batch["fake"], OBJECTIVES["bce"]
    features = Features("random", "conv5_4")
    wanted = {
        "pixel": F.mse_loss(fake, batch["image"]),
        "perceptual": 0.006 * F.mse_loss(features(fake), features(batch["image"])),
        "tv": 2e-8 * total_variation(fake),
        "adversarial": 1e-3 * bce.generator(recipe.discriminator(fake)).mean(),
    }
    torch.testing.assert_close(loss.terms, wanted)
    printed = recipe("discriminator", batch).terms
    torch.testing.assert_close(printed["real"], bce.real(recipe.discriminator(batch["image"])).mean())
    torch.testing.assert_close(printed["fake"], bce.fake(recipe.discriminator(fake)).mean())


@pytest.mark.parametrize("term", ["perceptual", "adversarial", "tv", "pixel"])
def test_a_loss_term_with_zero_weight_is_omitted(term, monkeypatch):
    if term == "perceptual":
        monkeypatch.setattr(Features, "__call__", lambda *_: pytest.fail("VGG19 was called"))
    recipe = build(stage="adversarial", **{term: 0.0})
    loss, _ = after(recipe, "generator")
    assert term not in loss.terms and len(loss.terms) == 3
    assert ("discriminator" in recipe.networks) == (term != "adversarial")


def test_the_content_setting_selects_the_pixel_loss_and_total_variation_is_a_mean_over_images():
    loss, batch = after(build(content="l1"), "generator")
    made = build(content="l1").predict(batch)["image"]
    assert torch.equal(loss.terms["pixel"], F.l1_loss(made, batch["image"]))
    loss, batch = after(restoration(content="charbonnier"), "restorer")
    made = restoration().predict(batch)["image"]
    assert torch.equal(loss.terms["pixel"], charbonnier(made, batch["target"]))
    assert charbonnier(made, made).item() == pytest.approx(1e-3)
    one_by_one = torch.stack([total_variation(one[None]) for one in made]).mean()
    torch.testing.assert_close(total_variation(made), one_by_one)


@pytest.mark.parametrize("scale", ["2", "4", "8"])
def test_images_are_cropped_to_a_multiple_of_the_scale_before_downscaling(scale):
    recipe, batch = build(scale=scale), make_batch(37, 42)
    assert recipe.output_scale == int(scale)
    made = recipe.predict(batch)
    height, width = 37 - 37 % int(scale), 42 - 42 % int(scale)
    assert made["image"].shape == made["target"].shape == made["bicubic"].shape == (3, 3, height, width)
    high = batch["image"][..., :height, :width]
    low = bicubic_as_saved(high, height // int(scale), width // int(scale))
    assert torch.equal(made["target"], high)
    assert torch.equal(made["bicubic"], bicubic(low, height, width))
    assert torch.equal(made["image"].clamp(-1, 1), recipe.image_to_image(low)["image"])


def test_low_resolution_images_in_the_data_are_used_if_present():
    recipe, batch = build(dataclasses.replace(DATA_SPEC, scale=2)), make_batch()
    batch["low"] = torch.zeros(3, 3, 16, 16)
    assert torch.equal(recipe.predict(batch)["image"], recipe.generator(batch["low"]))
    assert recipe.preview(batch)["low"].eq(0).all()


def test_a_preview_shows_all_images_at_the_same_size():
    shown = build(scale="4").preview(make_batch())
    assert list(shown) == ["low", "bicubic", "restored", "target"]
    assert {image.shape for image in shown.values()} == {(3, 3, 32, 32)}
    assert list(restoration().preview(make_batch())) == ["input", "restored", "target"]


@pytest.mark.parametrize("network", ["unet", "residual"])
def test_restoration_learns_to_map_images_to_their_targets(network):
    recipe, batch = restoration(network=network), make_batch()
    assert list(recipe.networks) == ["restorer"]
    made = recipe.predict(batch)
    assert torch.equal(made["target"], batch["target"]) and torch.equal(made["input"], batch["image"])
    assert recipe.image_to_image(make_batch(21, 35)["image"])["image"].shape == (3, 3, 21, 35)
    batch["target"] = batch["image"] / 2  # a task that the network learns in a few steps
    optimizer = torch.optim.Adam(recipe.parameters(), 0.01)
    losses = []
    for _ in range(30):
        loss = recipe("restorer", batch).terms["pixel"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_restoration_can_use_a_perceptual_loss_and_a_discriminator():
    recipe = restoration(adversarial=0.01, perceptual=0.1)
    loss, batch = after(recipe, "restorer")
    assert set(loss.terms) == {"pixel", "perceptual", "adversarial"}
    assert set(recipe("discriminator", batch).terms) == {"real", "fake"}


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        (
            DataSpec(3, 30, 30),
            {"scale": "4"},
            "30×30 pixels, but both sides must be multiples of 4 for scale=4: use --crop 96",
        ),
        (DataSpec(3, 32, 32, scale=4), {}, "scale=2: the low-resolution files are smaller by a factor of 4"),
        (DATA_SPEC, {"stage": "both"}, "stage=both: consists of several runs"),
        (DATA_SPEC, {"pixel": 0.0}, "pixel=0: all loss weights are zero"),
        (DATA_SPEC, {"vgg_layer": "conv6_1"}, "unknown layer of VGG19 'conv6_1'"),
    ],
)
def test_conflicting_settings_are_reported(spec, settings, message):
    with pytest.raises(UserError, match=message):
        build(spec, **settings)


def test_low_resolution_test_images_with_a_different_scale_are_rejected(tmp_path):
    for folder, side in (("own", 32), ("HR", 32), ("LR", 8)):
        (tmp_path / folder).mkdir()
        for number in range(2):
            Image.new("RGB", (side, side)).save(tmp_path / folder / f"{number}.png")
    roots = {"data_root": "own", "test_root": "HR", "test_low_root": "LR"}
    flags = {name: str(tmp_path / folder) for name, folder in roots.items()}
    config = configure("super_resolution", flags, assignments=["validation=0"], small=True)
    with pytest.raises(UserError, match="scale=2: the low-resolution test images are smaller by a factor of 4"):
        make_recipe(config, open_sources(config))


def test_images_too_small_to_train_on_can_still_be_evaluated(tmp_path):
    Image.new("RGB", (24, 20)).save(tmp_path / "small.png")
    roots = {"data_root": str(tmp_path), "test_root": str(tmp_path)}
    config = configure("super_resolution", roots | {"bad_images": "skip"}, small=True)
    assert config.run.crop == 32
    with pytest.raises(UserError, match=r"small\.png: 24×20 pixels, smaller than the crop"):
        open_sources(config)
    sources = open_sources(config, "test")
    assert list(sources) == ["test"] and make_recipe(config, sources).output_scale == 2


def test_the_reference_preset_has_the_settings_from_the_distributed_srgan_project():
    config = configure("super_resolution", {"preset": "reference"})
    own, run = config.recipe, config.run
    assert (own.blocks, own.norm, own.output, own.content, own.vgg_layer) == (
        *("shared", "batch", "tanh", "mse"),
        "relu5_4",
    )
    assert (own.pixel, own.perceptual, own.adversarial, own.tv) == (1, 0.006, 1e-3, 2e-8)
    assert (run.crop, run.batch_size, config.learner.lr) == (128, "128", 1e-4)
    recipe = SuperResolution(own, DataSpec(3, 128, 128))
    assert sum(parameter.numel() for parameter in recipe.generator.parameters()) == 290_243


SIGMA = 25.0


def test_fresh_noise_has_the_standard_deviation_of_the_setting_and_differs_between_images():
    images = torch.zeros(4, 3, 64, 64)
    noise = (add_gaussian_noise(images, torch.rand(4, 2), SIGMA) - images) * 127.5
    assert abs(float(noise.mean())) < 1 and abs(float(noise.std()) - SIGMA) < 0.5
    correlations = torch.corrcoef(noise.flatten(1)) - torch.eye(4)
    assert correlations.abs().max() < 0.05


def test_fresh_noise_gives_8_bit_images_and_does_not_depend_on_the_batch():
    images, seeds = torch.rand(4, 3, 16, 16) * 2 - 1, torch.rand(4, 2)
    noisy = add_gaussian_noise(images, seeds, 100.0)
    levels = (noisy + 1) * 127.5
    assert noisy.min() == -1 and noisy.max() == 1
    assert (levels - levels.round()).abs().max() < 1e-4
    assert torch.equal(add_gaussian_noise(images[2:3], seeds[2:3], 100.0), noisy[2:3])


def test_training_with_fresh_noise_ignores_the_input_images_of_the_data_and_evaluation_uses_them():
    batch, losses = make_batch() | {"noise_seeds": torch.rand(3, 2)}, []
    for fresh_noise in (0.0, SIGMA):
        recipe = restoration(fresh_noise=fresh_noise)
        for image in (torch.zeros(3, 3, 32, 32), torch.ones(3, 3, 32, 32)):
            losses.append(float(recipe.restorer_loss(batch | {"image": image}).terms["pixel"].detach()))
    assert losses[0] != losses[1] and losses[2] == losses[3]
    assert torch.equal(recipe.predict(batch)["input"], batch["image"])


def test_each_step_gets_new_noise_and_a_second_run_gets_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the data are photos from the folder `data`, or the built-in ones if there is none
    settings = {"batch_size": "4", "crop": 32, "images": 16, "width": 4, "depth": 1, "fresh_noise": SIGMA}
    first, second = (make_parts("restoration", **settings) for _ in range(2))
    tables = [first.feed.drawer.table(images, 4)["noise_seeds"] for images in (0, 4)]
    assert not torch.equal(*tables)
    run_steps(first, 3)
    run_steps(second, 3)
    assert difference(weights(first), weights(second)) == 0
