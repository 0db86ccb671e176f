"""The recipe restoration can train on new noise at every step."""

from __future__ import annotations

import torch
from ranks import difference, make_parts, run_steps, weights

from paceline.contracts.recipe import DataSpec
from paceline.images.degradation.operations import add_gaussian_noise
from paceline.recipes.restoration import Restoration, RestorationSettings

SIGMA = 25.0


def make_recipe(fresh_noise: float) -> Restoration:
    settings = RestorationSettings(width=4, depth=1, fresh_noise=fresh_noise)
    return Restoration(settings, DataSpec(channels=3, height=64, width=64))


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


def test_training_with_fresh_noise_ignores_the_input_images_of_the_data():
    target, seeds = torch.rand(2, 3, 64, 64) * 2 - 1, torch.rand(2, 2)
    losses = []
    for fresh_noise in (0.0, SIGMA):
        torch.manual_seed(0)
        recipe = make_recipe(fresh_noise)
        for image in (torch.zeros_like(target), torch.ones_like(target)):
            batch = {"image": image, "target": target, "noise_seeds": seeds}
            losses.append(float(recipe.restorer_loss(batch).terms["pixel"].detach()))
    assert losses[0] != losses[1] and losses[2] == losses[3]


def test_evaluation_uses_the_input_images_of_the_data():
    recipe = make_recipe(SIGMA)
    batch = {"image": torch.rand(1, 3, 64, 64), "target": torch.rand(1, 3, 64, 64)}
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
