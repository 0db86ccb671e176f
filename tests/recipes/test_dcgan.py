import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.commands.configure import configure
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.data.source import open_sources
from paceline.models.losses import OBJECTIVES
from paceline.recipes.dcgan import Dcgan, DcganSettings
from paceline.runs.checkpoint import Checkpoints, choose_checkpoint
from paceline.runs.finished_run import config_of
from paceline.runs.recipe import make_recipe
from paceline.runs.weights import EMA

NUM_SAMPLES = 6


def build(spec: DataSpec | None = None, **settings) -> Dcgan:
    torch.manual_seed(0)
    spec = spec or DataSpec(channels=1, height=32, width=32)
    return Dcgan(DcganSettings(**{"nz": 5, "ngf": 2, "ndf": 2} | settings), spec).double()


def make_batch(recipe: Dcgan) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    make = {"normal": torch.randn, "uniform": torch.rand}
    draws = {name: make[d.kind]((NUM_SAMPLES, *d.shape), generator=generator) for name, d in recipe.draws.items()}
    image = torch.rand(NUM_SAMPLES, 1, 32, 32, generator=generator) * 2 - 1
    return {name: tensor.double() for name, tensor in (draws | {"image": image}).items()}


def after_generator(recipe: Dcgan) -> dict[str, torch.Tensor]:
    batch = make_batch(recipe)
    return batch | {name: tensor.detach() for name, tensor in recipe("generator", batch).shared.items()}


@pytest.mark.parametrize("objective", ["bce", "hinge", "lsgan"])
def test_the_loss_terms_are_computed_with_the_configured_objective(objective):
    recipe = build(objective=objective, d_norm="none")
    batch = after_generator(recipe)
    functions = OBJECTIVES[objective]
    real, fake = recipe.discriminator(batch["image"]), recipe.discriminator(batch["fake"])
    assert torch.equal(recipe("generator", batch).terms["adversarial"], functions.generator(fake).mean())
    loss = recipe("discriminator", batch)
    assert torch.equal(loss.terms["real"], functions.real(real).mean())
    assert torch.equal(loss.terms["fake"], functions.fake(fake).mean())
    assert torch.equal(loss.signals["real_score"], (real - functions.boundary).sigmoid().mean())
    assert torch.equal(loss.signals["fake_score"], (fake - functions.boundary).sigmoid().mean())


def test_the_discriminator_trains_on_images_generated_from_the_noise_in_the_batch():
    recipe = build()
    batch = make_batch(recipe)
    fake = recipe("generator", batch).shared["fake"]
    assert torch.equal(fake, recipe.predict(batch)["image"])
    assert fake.shape == batch["image"].shape
    before = recipe("discriminator", batch | {"fake": fake.detach()}).terms
    after = recipe("discriminator", batch | {"fake": -fake.detach()}).terms
    assert torch.equal(before["real"], after["real"]) and not torch.equal(before["fake"], after["fake"])


def test_batchnorm_statistics_are_computed_separately_for_real_and_fake_images():
    recipe = build(d_norm="batch")
    batch = after_generator(recipe)
    alone = recipe.discriminator(batch["image"])
    assert torch.equal(recipe("discriminator", batch).terms["real"], OBJECTIVES["bce"].real(alone).mean())


def test_r1_adds_a_penalty_phase_that_runs_every_16_steps():
    assert [phase.name for phase in build().phases] == ["generator", "discriminator"]
    recipe = build(r1=2.0, d_norm="none")
    phase = recipe.phases[-1]
    assert (phase.name, phase.network, phase.every) == ("penalty", "discriminator", 16)
    assert recipe.double_backward == ("discriminator",)
    batch = make_batch(recipe)
    loss = recipe("penalty", batch).terms["r1"]
    loss.backward()
    assert all(parameter.grad is not None for parameter in recipe.discriminator.parameters())
    image = batch["image"].clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(recipe.discriminator(image).sum(), image)
    torch.testing.assert_close(loss, 2.0 / 2 * 16 * gradient.square().sum((1, 2, 3)).mean())


def test_r1_backpropagates_through_batchnorm_spectral_norm_and_augmentation():
    recipe = build(r1=1.0, spectral_norm=True, diffaugment="color,translation,cutout")
    recipe("penalty", make_batch(recipe)).terms["r1"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in recipe.discriminator.parameters())
    assert recipe.discriminator.main[0].parametrizations.weight.original.grad.any()


@pytest.mark.parametrize("phase", ["generator", "discriminator", "penalty"])
def test_losses_do_not_depend_on_the_global_random_seed(phase):
    recipe = build(r1=1.0, diffaugment="color,translation,cutout", d_norm="none")
    batch = after_generator(recipe)
    torch.manual_seed(1)
    first = recipe(phase, batch).terms
    torch.manual_seed(2)
    second = recipe(phase, batch).terms
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_augmentation_changes_what_the_discriminator_sees_but_not_the_generated_images():
    plain, changed = build(), build(diffaugment="color, translation")
    batch = make_batch(changed)
    ours, theirs = plain("generator", batch), changed("generator", batch)
    assert torch.equal(ours.shared["fake"], theirs.shared["fake"])
    assert not torch.equal(ours.terms["adversarial"], theirs.terms["adversarial"])
    assert set(changed.draws) - set(plain.draws) == {"view_of_own", "view_of_fake", "view_of_real"}


@pytest.mark.parametrize(("objective", "boundary"), [("bce", 0.0), ("hinge", 0.0), ("lsgan", 0.5)])
def test_certainty_and_scores_are_relative_to_the_boundary_between_real_and_fake(objective, boundary):
    plain, recipe = build(objective=objective), build(objective=objective, ada="color")
    batch = make_batch(recipe) | {"augment_strength": torch.zeros(NUM_SAMPLES)}
    batch["fake"] = batch["image"]
    for offset, certainty in ((-0.1, -1), (0.0, 0), (0.1, 1)):
        logits = torch.full((NUM_SAMPLES,), boundary + offset, dtype=torch.float64)
        recipe.discriminator.forward = lambda images, logits=logits: logits
        signals = recipe("discriminator", batch).signals
        assert signals["augment_certainty"] == certainty
        plain.discriminator.forward = recipe.discriminator.forward
        generated = plain("generator", make_batch(plain)).signals
        scores = (signals["real_score"], signals["fake_score"], generated["fake_score"])
        assert all(score.item() == pytest.approx(1 / (1 + math.exp(-offset))) for score in scores)


def test_batchnorm_and_spectral_norm_of_the_discriminator_can_be_configured():
    assert not any(isinstance(m, nn.BatchNorm2d) for m in build(d_norm="none").discriminator.modules())
    names = build(spectral_norm=True).discriminator.state_dict()
    assert "main.0.parametrizations.weight.original" in names and "main.0.parametrizations.weight.0._u" in names


@pytest.mark.parametrize(
    ("height", "width", "fits"), [(32, 32, True), (64, 64, True), (28, 28, False), (32, 64, False)]
)
def test_images_of_unsupported_sizes_are_rejected(height, width, fits):
    spec = DataSpec(channels=3, height=height, width=width)
    if fits:
        assert build(spec).predict({"noise": torch.zeros(2, 5).double()})["image"].shape == (2, 3, height, width)
    else:
        with pytest.raises(UserError, match="with a side of 32 or 64: use --set size=32"):
            build(spec)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"diffaugment": "colour"}, "diffaugment=colour: unknown augmentation 'colour'; did you mean 'color'"),
        ({"r1": -1.0}, "r1=-1: must be at least 0"),
        ({"ngf": 0}, "ngf=0: must be at least 1"),
    ],
)
def test_invalid_settings_are_reported(settings, message):
    with pytest.raises(UserError, match=message):
        build(**dataclasses.asdict(configure("dcgan", settings).recipe))


def test_the_default_hyperparameters_match_dcgan():
    config = configure("dcgan", {})
    learner, run = config.learner, config.run
    assert (learner.optimizer, learner.lr, learner.beta1, learner.beta2) == ("adam", 2e-4, 0.5, 0.999)
    assert (run.data, run.size, run.batch_size, run.validation) == ("digits", 32, "128", 0.0)
    assert (config.recipe.nz, config.recipe.ngf, config.recipe.ndf) == (100, 64, 64)


REFERENCE_INI = """[parameters]
type = mnist
batch_size = 64
nz = 90
ngf = 32
ndf = 48
nc = 3
lr = 0.0001
beta1 = 0.4
beta2 = 0.99
checkpoint = 200
workers = 1
epochs = 7
"""


@pytest.mark.parametrize("recipe", ["dcgan", "dual_gan"])
def test_the_config_file_from_the_dual_discriminator_project_is_accepted(recipe, tmp_path):
    file = tmp_path / "config.ini"
    file.write_text(REFERENCE_INI)
    config = configure(recipe, {}, config_file=str(file))
    run, learner, own = config.run, config.learner, config.recipe
    assert (run.data, run.batch_size, run.channels, run.workers, run.epochs) == ("mnist", "64", 3, 1, 7.0)
    assert (learner.lr, learner.beta1, learner.beta2) == (1e-4, 0.4, 0.99)
    assert (own.nz, own.ngf, own.ndf) == (90, 32, 48)


def test_flags_override_the_config_file(tmp_path):
    file = tmp_path / "config.ini"
    file.write_text(REFERENCE_INI)
    config = configure("dcgan", {"data": "digits"}, config_file=str(file), assignments=["nz=8"])
    assert (config.run.data, config.recipe.nz) == ("digits", 8)


@pytest.mark.parametrize("recipe", ["dcgan", "dual_gan"])
def test_a_run_whose_discriminator_becomes_constant_stops_and_reports_the_step(recipe: str, tmp_path: Path) -> None:
    settings = {"ngf": 4, "ndf": 4, "optimizer": "adamw", "weight_decay": 1000.0, "evaluate_every": "never"}
    with pytest.raises(
        UserError, match=r"output has become constant \(discrim.*\) at step 10 \(160 images seen\); no checkp"
    ):
        paceline.train(
            recipe, accelerator="cpu", batch_size=16, lr=1e-3, images=320, log_every="5 steps", out=tmp_path, **settings
        )


def test_the_cifar10_presets_of_dcgan_and_dual_gan_have_equal_settings():
    one, two = (configure(recipe, {"preset": "cifar10"}) for recipe in ("dcgan", "dual_gan"))
    assert one.run == two.run and one.learner == two.learner
    shared = dataclasses.asdict(one.recipe)
    assert shared == {name: value for name, value in dataclasses.asdict(two.recipe).items() if name in shared}
    assert (one.run.data, one.run.size, one.run.channels, one.run.batch_size) == ("cifar10", 32, 3, "64")


def test_the_ema_of_the_preset_cifar10_follows_the_weights_in_a_short_run(tmp_path: Path) -> None:
    settings = {"data": "digits", "channels": 1, "ngf": 4, "ndf": 4, "evaluate_every": "100%", "few_images": "allow"}
    paceline.train("dcgan", preset="cifar10", accelerator="cpu", images=3200, out=tmp_path / "run", **settings)
    config = config_of(str(tmp_path / "run"))
    initial = make_recipe(config, open_sources(config)).generator.state_dict()
    weights = choose_checkpoint(Checkpoints(tmp_path / "run" / "checkpoints"), "last").weights
    ema = {name.removeprefix(EMA): tensor for name, tensor in weights.items() if name.startswith(EMA)}
    from_initial = sum(float((ema[name] - initial[name.removeprefix("generator.")]).square().sum()) for name in ema)
    from_last = sum(float((ema[name] - weights[name]).square().sum()) for name in ema)
    assert ema and from_last < from_initial / 10
