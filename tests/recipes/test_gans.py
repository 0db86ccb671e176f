"""The recipes dcgan, dual_gan and r3gan: losses as in the papers, augmentation, settings and bad input."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.commands.configure import configure
from paceline.contracts.recipe import Clock, DataSpec, Draw, Recipe
from paceline.core.errors import UserError
from paceline.data.source import open_sources
from paceline.data.stream import Drawer
from paceline.models.losses import BCE, OBJECTIVES, d2gan
from paceline.recipes.dcgan import Dcgan, DcganSettings
from paceline.recipes.dual_gan import DualGan, DualGanSettings
from paceline.recipes.parts.generation import CERTAINTY, STEP, STRENGTH
from paceline.recipes.r3gan import R3gan, R3ganSettings
from paceline.runs.checkpoint import Checkpoints, choose_checkpoint
from paceline.runs.finished_run import config_of
from paceline.runs.recipe import make_recipe
from paceline.runs.weights import EMA
from paceline.training.build import assemble

NUM_SAMPLES = 6
GREY = DataSpec(channels=1, height=32, width=32)
SMALL_GREY = DataSpec(channels=1, height=16, width=16)
CLASSES = DataSpec(channels=3, height=16, width=16, num_classes=3)
ADA = "blit,geometry,color"


def build_dcgan(spec: DataSpec = GREY, **settings: Any) -> Dcgan:
    torch.manual_seed(0)
    return Dcgan(DcganSettings(**{"nz": 5, "ngf": 2, "ndf": 2} | settings), spec).double()


def build_dual(**settings: Any) -> DualGan:
    torch.manual_seed(0)
    return DualGan(DualGanSettings(**{"nz": 5, "ngf": 2, "ndf": 2, "d_norm": "none"} | settings), GREY).double()


def build_r3gan(spec: DataSpec = SMALL_GREY, **settings: Any) -> R3gan:
    torch.manual_seed(0)
    small = {"nz": 4, "width": 8, "num_blocks": 1, "group_size": 4}
    recipe = R3gan(R3ganSettings(**small | settings), spec).double()
    with torch.no_grad():  # blocks start as the identity; random weights make every layer matter
        for parameter in recipe.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return recipe


def make_batch(recipe: Recipe, spec: DataSpec = GREY, **columns: float) -> dict[str, Tensor]:
    """Return a batch with the recipe's draws and signals; `columns` are signals and draws with one value."""
    generator = torch.Generator().manual_seed(1)
    make = {"normal": torch.randn, "uniform": torch.rand}
    batch = {name: make[d.kind]((NUM_SAMPLES, *d.shape), generator=generator) for name, d in recipe.draws.items()}
    batch["image"] = torch.rand(NUM_SAMPLES, spec.channels, spec.height, spec.width, generator=generator) * 2 - 1
    clock = Clock(0, NUM_SAMPLES)
    signals = {name: value(clock) if callable(value) else value for name, value in recipe.signals.items()}
    batch |= {name: torch.full((NUM_SAMPLES,), value) for name, value in {**signals, **columns}.items()}
    return {name: value.double() for name, value in batch.items()} | {"label": torch.arange(NUM_SAMPLES) % 3}


def after_generator(recipe: Recipe) -> dict[str, Tensor]:
    batch = make_batch(recipe)
    return batch | {name: tensor.detach() for name, tensor in recipe("generator", batch).shared.items()}


def with_fake(recipe: R3gan, **columns: float) -> dict[str, Tensor]:
    batch = make_batch(recipe, SMALL_GREY, **columns)
    return batch | {"fake": batch["image"].flip(-1)}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_loss_terms_are_computed_with_the_configured_objective(objective: Any) -> None:
    recipe, functions = build_dcgan(objective=objective, d_norm="none"), OBJECTIVES[objective]
    batch = after_generator(recipe)
    real, fake = recipe.discriminator(batch["image"]), recipe.discriminator(batch["fake"])
    assert torch.equal(recipe("generator", batch).terms["adversarial"], functions.generator(fake).mean())
    loss = recipe("discriminator", batch)
    assert torch.equal(loss.terms["real"], functions.real(real).mean())
    assert torch.equal(loss.terms["fake"], functions.fake(fake).mean())
    assert torch.equal(loss.signals["real_score"], (real - functions.boundary).sigmoid().mean())
    assert torch.equal(loss.signals["fake_score"], (fake - functions.boundary).sigmoid().mean())


def test_the_discriminator_trains_on_images_from_the_noise_in_the_batch_with_statistics_of_their_own() -> None:
    recipe = build_dcgan(d_norm="batch")
    batch = make_batch(recipe)
    fake = recipe("generator", batch).shared["fake"]
    assert torch.equal(fake, recipe.predict(batch)["image"]) and fake.shape == batch["image"].shape
    before = recipe("discriminator", batch | {"fake": fake.detach()}).terms
    after = recipe("discriminator", batch | {"fake": -fake.detach()}).terms
    assert torch.equal(before["real"], after["real"]) and not torch.equal(before["fake"], after["fake"])
    assert torch.equal(before["real"], BCE.real(recipe.discriminator(batch["image"])).mean())


def test_r1_adds_a_penalty_phase_that_runs_every_16_steps() -> None:
    assert [phase.name for phase in build_dcgan().phases] == ["generator", "discriminator"]
    recipe = build_dcgan(r1=2.0, d_norm="none")
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
    dual = build_dual(r1=1.0)
    phases = [(phase.name, phase.network, phase.every) for phase in dual.phases[3:]]
    assert phases == [(f"penalty_{number}", f"discriminator_{number}", 16) for number in (1, 2)]
    for number in (1, 2):
        dual.zero_grad()
        dual(f"penalty_{number}", make_batch(dual)).terms["r1"].backward()
        assert all(p.grad is not None for p in dual.networks[f"discriminator_{number}"].parameters())


def test_r1_backpropagates_through_batchnorm_spectral_norm_and_augmentation() -> None:
    recipe = build_dcgan(r1=1.0, spectral_norm=True, diffaugment="color,translation,cutout")
    recipe("penalty", make_batch(recipe)).terms["r1"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in recipe.discriminator.parameters())
    assert recipe.discriminator.main[0].parametrizations.weight.original.grad.any()
    assert not any(isinstance(m, nn.BatchNorm2d) for m in build_dcgan(d_norm="none").discriminator.modules())


def test_augmentation_changes_what_the_discriminator_sees_but_not_the_generated_images() -> None:
    plain, changed = build_dcgan(), build_dcgan(diffaugment="color, translation")
    batch = make_batch(changed)
    ours, theirs = plain("generator", batch), changed("generator", batch)
    assert torch.equal(ours.shared["fake"], theirs.shared["fake"])
    assert not torch.equal(ours.terms["adversarial"], theirs.terms["adversarial"])
    assert set(changed.draws) - set(plain.draws) == {"view_of_own", "view_of_fake", "view_of_real"}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_certainty_and_scores_are_relative_to_the_boundary_between_real_and_fake(objective: str) -> None:
    plain, recipe = build_dcgan(objective=objective), build_dcgan(objective=objective, ada="color")
    batch = make_batch(recipe)
    batch["fake"] = batch["image"]
    for offset, certainty in ((-0.1, -1), (0.0, 0), (0.1, 1)):
        logits = torch.full((NUM_SAMPLES,), {"lsgan": 0.5}.get(objective, 0.0) + offset, dtype=torch.float64)
        recipe.discriminator.forward = lambda images, logits=logits: logits
        plain.discriminator.forward = recipe.discriminator.forward
        signals = recipe("discriminator", batch).signals
        assert signals[CERTAINTY] == certainty
        generated = plain("generator", make_batch(plain)).signals
        scores = (signals["real_score"], signals["fake_score"], generated["fake_score"])
        assert all(score.item() == pytest.approx(1 / (1 + math.exp(-offset))) for score in scores)
    dual = build_dual(objective="d2gan", ada="color", d2gan_alpha=0.2)
    batch = make_batch(dual)
    batch["fake"] = batch["image"]
    for output, certainty in ((0.19, -1), (0.21, 1)):  # alpha is the best output of an uncertain discriminator
        logits = torch.full((NUM_SAMPLES,), output, dtype=torch.float64).expm1().log()
        dual.discriminator_1.forward = lambda images, logits=logits: logits
        assert dual("discriminator_1", batch).signals[CERTAINTY] == certainty


def generator_losses(recipe: DualGan, batch: dict[str, Tensor]) -> tuple[float, float]:
    """Return two generator losses, one for each discriminator."""
    fake = recipe.predict(batch)["image"]
    first, second = (BCE.generator(d(fake)).mean().item() for d in (recipe.discriminator_1, recipe.discriminator_2))
    return first, second


def generator_loss(recipe: Recipe, batch: dict[str, Tensor]) -> float:
    return recipe("generator", batch).terms["adversarial"].item()


@pytest.mark.parametrize(
    ("against", "sign_of_real", "sign_of_fake"), [("stronger", -1, -1), ("weaker", 1, 1), ("swapped", 1, -1)]
)
def test_the_generator_trains_against_the_discriminator_with_the_higher_priority(
    against: str, sign_of_real: int, sign_of_fake: int
) -> None:
    recipe = build_dual(against=against)
    assert [phase.network for phase in recipe.phases] == ["generator", "discriminator_1", "discriminator_2"]
    assert recipe.signals == {"priority_1": 0.0, "priority_2": 0.0}
    for priorities, chosen in (((2.0, 1.0), 0), ((1.0, 2.0), 1), ((1.0, 1.0), 0)):
        batch = make_batch(recipe, priority_1=priorities[0], priority_2=priorities[1])
        losses = generator_losses(recipe, batch)
        assert losses[0] != losses[1] and generator_loss(recipe, batch) == losses[chosen]
    batch["fake"] = recipe.predict(batch)["image"].detach()
    for number in (1, 2):
        loss = recipe(f"discriminator_{number}", batch)
        expected = sign_of_real * loss.terms["real"] + sign_of_fake * loss.terms["fake"]
        assert torch.equal(loss.signals[f"priority_{number}"], expected)
        assert not loss.signals[f"priority_{number}"].requires_grad


def test_only_the_chosen_discriminator_affects_the_gradient() -> None:
    recipe, gradients = build_dual(against="weaker"), []
    batch = make_batch(recipe, priority_1=1.0, priority_2=0.0)
    for _ in range(2):
        recipe.zero_grad()
        recipe("generator", batch).terms["adversarial"].backward()
        gradients.append(recipe.generator.main[0].weight.grad.clone())
        with torch.no_grad():
            recipe.discriminator_2.main[0].weight.zero_()  # not chosen: no effect
    assert torch.equal(*gradients)


def test_one_random_number_for_all_samples_of_a_step_chooses_a_discriminator() -> None:
    recipe = build_dual(against="random")
    assert recipe.signals == {} and recipe.draws["coin"] == Draw((), "uniform", common=True)
    for coin, chosen in ((0.2, 0), (0.7, 1)):
        batch = make_batch(recipe, coin=coin)
        assert generator_loss(recipe, batch) == generator_losses(recipe, batch)[chosen]
    drawer = Drawer({"coin": recipe.draws["coin"]}, 0, torch.device("cpu"), torch.float32)
    first, larger, later = drawer.table(0, 4)["coin"], drawer.table(0, 7)["coin"], drawer.table(4, 4)["coin"]
    assert first.shape == (4,) and larger.shape == (7,)
    assert len(set(first.tolist()) | set(larger.tolist())) == 1 and first[0] != later[0]


def test_training_against_both_discriminators_adds_their_losses_and_d2gan_gives_them_different_objectives() -> None:
    recipe = build_dual(against="both")
    batch = make_batch(recipe)
    assert generator_loss(recipe, batch) == pytest.approx(sum(generator_losses(recipe, batch)), rel=1e-12)
    recipe = build_dual(objective="d2gan", d2gan_alpha=0.3, d2gan_beta=0.2)
    first, second = d2gan(0.3, 0.2)
    batch["fake"] = recipe.predict(batch)["image"].detach()
    logits_1, logits_2 = recipe.discriminator_1(batch["fake"]), recipe.discriminator_2(batch["fake"])
    expected = (first.generator(logits_1) + second.generator(logits_2)).mean().item()
    assert generator_loss(recipe, batch) == pytest.approx(expected, rel=1e-12)
    assert torch.equal(recipe("discriminator_1", batch).terms["fake"], first.fake(logits_1).mean())
    assert torch.equal(recipe("discriminator_2", batch).terms["fake"], second.fake(logits_2).mean())


def test_the_priorities_of_the_discriminators_are_passed_to_the_next_step() -> None:
    parts = assemble(configure("dual_gan", {"accelerator": "cpu"}, assignments=["against=weaker"], small=True))
    losses: dict[str, Any] = {}
    parts.recipe.register_forward_hook(lambda recipe, arguments, loss: losses.update({arguments[0]: loss}))
    parts.step(next(iter(parts.feed.steps(0, parts.total_images))))
    for number in (1, 2):
        loss = sum(losses[f"discriminator_{number}"].terms.values()).item()
        assert parts.step.signals[f"priority_{number}"].item() == pytest.approx(loss, rel=1e-6)


def penalty(recipe: R3gan, images: Tensor, label: Tensor | None) -> Tensor:
    images = images.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(recipe.discriminator(images, label).sum(), images)
    return gradient.square().sum((1, 2, 3)).mean()


@pytest.mark.parametrize("spec", [SMALL_GREY, CLASSES])
def test_the_losses_of_r3gan_are_those_of_the_paper(spec: DataSpec) -> None:
    recipe = build_r3gan(spec, r_gamma=0.4, burn_in_r_gamma=0.4)
    batch = make_batch(recipe, spec)
    label = batch["label"] if spec.num_classes else None
    generated = recipe("generator", batch)
    fake = generated.shared["fake"].detach()
    assert torch.equal(fake, recipe.generator(batch["noise"], label))
    real_scores, fake_scores = recipe.discriminator(batch["image"], label), recipe.discriminator(fake, label)
    assert torch.allclose(generated.terms["adversarial"], F.softplus(-(fake_scores - real_scores)).mean())
    terms = recipe("discriminator", batch | {"fake": fake}).terms
    assert torch.allclose(terms["adversarial"], F.softplus(-(real_scores - fake_scores)).mean())
    assert torch.allclose(terms["r1"], 0.4 / 2 * penalty(recipe, batch["image"], label))
    assert torch.allclose(terms["r2"], 0.4 / 2 * penalty(recipe, fake, label))


def test_lazy_penalties_run_in_a_phase_of_their_own_and_gamma_falls_during_the_burn_in() -> None:
    eager, lazy = build_r3gan(), build_r3gan(penalty_every=4)
    batch = with_fake(eager)
    assert [phase.every for phase in lazy.phases] == [1, 1, 4]
    whole = eager("discriminator", batch).terms
    assert lazy("discriminator", batch).terms.keys() == {"adversarial"}
    for name, term in lazy("penalty", batch).terms.items():
        assert torch.allclose(term, 4 * whole[name])
    gamma: Any = build_r3gan(r_gamma=0.1, burn_in_r_gamma=0.9).signals["r_gamma"]
    assert [gamma(Clock(images, 8, 100)) for images in (0, 50, 100)] == pytest.approx([0.9, 0.5, 0.1])


def test_a_model_is_conditional_if_the_data_has_classes_and_draws_them_to_generate() -> None:
    recipe = build_r3gan(CLASSES)
    assert recipe.num_classes == 3 and build_r3gan(CLASSES, conditional="off").num_classes == 0
    assert build_r3gan().num_classes == build_r3gan(DataSpec(1, 16, 16, num_classes=1)).num_classes == 0
    with pytest.raises(UserError, match=r"conditional=on: the data has no classes; use data with at least two"):
        build_r3gan(conditional="on")
    draws = {name: value for name, value in make_batch(recipe, CLASSES).items() if name in recipe.draws}
    draws["class"] = torch.tensor([0.0, 0.3, 0.4, 0.6, 0.7, 0.99], dtype=torch.float64)
    prediction = recipe.predict(draws)
    assert prediction["label"].tolist() == [0, 0, 1, 1, 2, 2]
    expected = recipe.generator(draws["noise"], prediction["label"]).clamp(-1, 1)
    assert torch.equal(prediction["image"], expected)


def test_the_strength_of_the_augmentation_follows_the_certainty_of_the_discriminator() -> None:
    recipe = build_r3gan(ada=ADA, ada_target=0.6, ada_images=60)
    assert (recipe.signals[STRENGTH], recipe.signals[CERTAINTY]) == (0.0, 0.0)
    assert recipe.signals[STEP](Clock(0, NUM_SAMPLES)) == NUM_SAMPLES / 60
    for strength, certainty, expected in (
        *((0.5, 1.0, 0.6), (0.5, 0.65, 0.55), (0.5, 0.6, 0.5), (0.5, 0.0, 0.4)),
        *((0.01, 0.0, 0.0), (0.79, 1.0, 0.8)),
    ):
        batch = with_fake(recipe, **{STRENGTH: strength, CERTAINTY: certainty})
        assert recipe("generator", batch).signals[STRENGTH].item() == pytest.approx(expected, abs=1e-6)
    assert -1 <= recipe("discriminator", batch).signals[CERTAINTY] <= 1


def test_a_fixed_strength_rises_during_the_burn_in_and_does_not_adapt() -> None:
    recipe = build_r3gan(ada=ADA, ada_strength=0.4)
    value: Any = recipe.signals[STRENGTH]
    assert [value(Clock(images, 8, 100)) for images in (0, 50, 100, 500)] == pytest.approx([0, 0.2, 0.4, 0.4])
    assert not {STEP, CERTAINTY} & recipe.signals.keys()
    batch = with_fake(recipe, **{STRENGTH: 0.5})
    assert recipe("generator", batch).signals == {} and CERTAINTY not in recipe("discriminator", batch).signals


def test_real_and_fake_images_are_augmented_with_the_strength() -> None:
    recipe = build_r3gan(ada=ADA)
    batch = with_fake(recipe, **{STRENGTH: 0.8})
    before = recipe("discriminator", batch).terms
    for view in ("view_of_real", "view_of_fake"):
        changed = recipe("discriminator", batch | {view: batch[view].flip(0)}).terms
        assert not torch.equal(changed["adversarial"], before["adversarial"])
    none = batch | {STRENGTH: torch.zeros(NUM_SAMPLES).double()}
    plain = build_r3gan()("discriminator", none).terms
    assert all(torch.allclose(recipe("discriminator", none).terms[name], term) for name, term in plain.items())


@pytest.mark.parametrize("recipe", [build_dual(against="both"), build_r3gan()], ids=["dual_gan", "r3gan"])
def test_a_discriminator_with_a_constant_output_is_recognised_by_its_score_range(recipe: Recipe) -> None:
    spec = SMALL_GREY if isinstance(recipe, R3gan) else GREY
    batch = make_batch(recipe, spec)
    batch["fake"] = batch["image"].flip(-1)
    names = [name.removesuffix("/score_range") for name in recipe.must_vary]
    assert names == [name for name in recipe.networks if name.startswith("discriminator")]
    for name in names:
        assert recipe(name, batch).signals["score_range"] > 0
        for parameter in recipe.networks[name].parameters():
            parameter.data.zero_()
        assert recipe(name, batch).signals["score_range"] == 0


@pytest.mark.parametrize(("height", "width"), [(32, 64), (28, 28), (8, 8), (256, 256)])
def test_images_of_unsupported_sizes_are_rejected(height: int, width: int) -> None:
    for build in (build_dcgan, build_r3gan):
        with pytest.raises(UserError, match=rf"the images are {width}×{height} pixels.*use --set size=32"):
            build(DataSpec(channels=1, height=height, width=width))
    wide = DataSpec(channels=3, height=64, width=64)
    assert build_dcgan(wide).predict({"noise": torch.zeros(2, 5).double()})["image"].shape == (2, 3, 64, 64)


BAD_SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("dcgan", {"diffaugment": "colour"}, "diffaugment=colour: unknown augmentation 'colour'; did you mean 'color'"),
    ("dcgan", {"r1": -1.0}, "r1=-1: must be at least 0"),
    ("dcgan", {"ngf": 0}, "ngf=0: must be at least 1"),
    ("dual_gan", {"objective": "d2gan", "against": "stronger"}, "objective=d2gan and against=stronger: d2gan needs"),
    ("dual_gan", {"objective": "d2gan", "r1": 1.0}, "objective=d2gan and r1=1: R1 only works with bce, hinge and lsg"),
    ("dual_gan", {"objective": "d2gan", "d2gan_beta": 0.0}, "d2gan_beta=0: must be above 0"),
    ("dual_gan", {"objective": "hinge", "d2gan_alpha": 0.5}, "d2gan_alpha=0.5: not used with objective=hinge"),
    ("dual_gan", {"objective": "hinge", "d2gan_beta": 0.5}, "d2gan_beta=0.5: not used with objective=hinge"),
    ("r3gan", {"ada": "foo"}, "ada=foo: unknown augmentation 'foo'; choose from: blit, color, cutout, geometry"),
    ("r3gan", {"ada": "color", "diffaugment": "color"}, "cannot be combined; choose one"),
    ("r3gan", {"ada_strength": 0.3}, "ada_strength=0.3: there is nothing to apply; choose transforms"),
    ("r3gan", {"ada_target": 0.5}, "ada_target=0.5: there is nothing to apply; choose transforms"),
    ("r3gan", {"ada": "blit", "ada_strength": 0.3, "ada_target": 0.5}, "ada_target=0.5: not used with ada_strength"),
]


@pytest.mark.parametrize(("recipe", "settings", "message"), BAD_SETTINGS)
def test_conflicting_and_invalid_settings_are_reported_in_one_line(
    recipe: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        config = configure(recipe, {}, assignments=[f"{name}={value}" for name, value in settings.items()], small=True)
        config.recipe_class.check(config.recipe)
        config.recipe_class(config.recipe, DataSpec(channels=1, height=32, width=32))
    assert "\n" not in str(caught.value)


def test_the_default_hyperparameters_match_dcgan_and_the_cifar10_presets_of_both_recipes_are_equal() -> None:
    config = configure("dcgan", {})
    learner, run = config.learner, config.run
    assert (learner.optimizer, learner.lr, learner.beta1, learner.beta2) == ("adam", 2e-4, 0.5, 0.999)
    assert (run.data, run.size, run.batch_size, run.validation) == ("digits", 32, "128", 0.0)
    assert (config.recipe.nz, config.recipe.ngf, config.recipe.ndf) == (100, 64, 64)
    one, two = (configure(recipe, {"preset": "cifar10"}) for recipe in ("dcgan", "dual_gan"))
    assert one.run == two.run and one.learner == two.learner
    shared = dataclasses.asdict(one.recipe)
    assert shared == {name: value for name, value in dataclasses.asdict(two.recipe).items() if name in shared}
    assert (one.run.data, one.run.size, one.run.channels, one.run.batch_size) == ("cifar10", 32, 3, "64")


@pytest.mark.parametrize("recipe", ["dcgan", "dual_gan"])
def test_the_config_file_from_the_dual_discriminator_project_is_accepted(recipe: str, tmp_path: Path) -> None:
    theirs = {"type": "mnist", "batch_size": 64, "nz": 90, "ngf": 32, "ndf": 48, "nc": 3, "lr": 0.0001, "beta1": 0.4}
    theirs |= {"beta2": 0.99, "checkpoint": 200, "workers": 1, "epochs": 7}
    file = tmp_path / "config.ini"
    file.write_text("[parameters]\n" + "".join(f"{name} = {value}\n" for name, value in theirs.items()))
    config = configure(recipe, {}, config_file=str(file))
    run, learner, own = config.run, config.learner, config.recipe
    assert (run.data, run.batch_size, run.channels, run.workers, run.epochs) == ("mnist", "64", 3, 1, 7.0)
    assert (learner.lr, learner.beta1, learner.beta2) == (1e-4, 0.4, 0.99)
    assert (own.nz, own.ngf, own.ndf) == (90, 32, 48)
    changed = configure(recipe, {"data": "digits"}, config_file=str(file), assignments=["nz=8"])
    assert (changed.run.data, changed.recipe.nz) == ("digits", 8)


@pytest.mark.parametrize("recipe", ["dcgan", "dual_gan"])
def test_a_run_whose_discriminator_becomes_constant_stops_and_reports_the_step(recipe: str, tmp_path: Path) -> None:
    settings = {"ngf": 4, "ndf": 4, "optimizer": "adamw", "weight_decay": 1000.0, "evaluate_every": "never"}
    with pytest.raises(
        UserError, match=r"output has become constant \(discrim.*\) at step 10 \(160 images seen\); no checkp"
    ):
        paceline.train(
            recipe, accelerator="cpu", batch_size=16, lr=1e-3, images=320, log_every="5 steps", out=tmp_path, **settings
        )


def test_the_ema_of_the_preset_cifar10_follows_the_weights_in_a_short_run(tmp_path: Path) -> None:
    settings = {"data": "digits", "channels": 1, "ngf": 4, "ndf": 4, "evaluate_every": "100%", "few_images": "allow"}
    paceline.train("dcgan", preset="cifar10", accelerator="cpu", images=1600, out=tmp_path / "run", **settings)
    config = config_of(str(tmp_path / "run"))
    initial = make_recipe(config, open_sources(config)).generator.state_dict()
    weights = choose_checkpoint(Checkpoints(tmp_path / "run" / "checkpoints"), "last").weights
    ema = {name.removeprefix(EMA): tensor for name, tensor in weights.items() if name.startswith(EMA)}
    from_initial = sum(float((ema[name] - initial[name.removeprefix("generator.")]).square().sum()) for name in ema)
    from_last = sum(float((ema[name] - weights[name]).square().sum()) for name in ema)
    assert ema and from_last < from_initial / 10
