import pytest
import torch

from paceline.commands.configure import configure
from paceline.contracts.recipe import DataSpec, Draw
from paceline.core.errors import UserError
from paceline.data.stream import Drawer
from paceline.models.losses import BCE, d2gan
from paceline.recipes.dual_gan import DualGan, DualGanSettings
from paceline.training.build import assemble

NUM_SAMPLES = 6


def build(**settings) -> DualGan:
    torch.manual_seed(0)
    spec = DataSpec(channels=1, height=32, width=32)
    return DualGan(DualGanSettings(**{"nz": 5, "ngf": 2, "ndf": 2, "d_norm": "none"} | settings), spec).double()


def make_batch(recipe: DualGan, **columns: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    image = torch.rand(NUM_SAMPLES, 1, 32, 32, generator=generator) * 2 - 1
    noise = torch.randn(NUM_SAMPLES, 5, generator=generator)
    batch = {"image": image.double(), "noise": noise.double()}
    return batch | {name: torch.full((NUM_SAMPLES,), value) for name, value in columns.items()}


def generator_losses(recipe: DualGan, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Return two generator losses, one for each discriminator."""
    fake = recipe.predict(batch)["image"]
    return tuple(BCE.generator(d(fake)).mean().item() for d in (recipe.discriminator_1, recipe.discriminator_2))


def generator_loss(recipe: DualGan, batch: dict[str, torch.Tensor]) -> float:
    return recipe("generator", batch).terms["adversarial"].item()


def test_the_discriminators_start_with_different_weights():
    recipe = build()
    assert not torch.equal(recipe.discriminator_1.main[0].weight, recipe.discriminator_2.main[0].weight)
    assert [phase.network for phase in recipe.phases] == ["generator", "discriminator_1", "discriminator_2"]


@pytest.mark.parametrize("against", ["stronger", "weaker", "swapped"])
@pytest.mark.parametrize(("priorities", "chosen"), [((2.0, 1.0), 0), ((1.0, 2.0), 1), ((1.0, 1.0), 0)])
def test_the_generator_trains_against_the_discriminator_with_the_higher_priority(against, priorities, chosen):
    recipe = build(against=against)
    batch = make_batch(recipe, priority_1=priorities[0], priority_2=priorities[1])
    assert generator_loss(recipe, batch) == generator_losses(recipe, batch)[chosen]


@pytest.mark.parametrize(
    ("against", "sign_of_real", "sign_of_fake"), [("stronger", -1, -1), ("weaker", 1, 1), ("swapped", 1, -1)]
)
def test_a_priority_is_computed_from_the_losses_of_its_discriminator(against, sign_of_real, sign_of_fake):
    recipe = build(against=against)
    assert recipe.signals == {"priority_1": 0.0, "priority_2": 0.0}
    batch = make_batch(recipe, priority_1=0.0, priority_2=0.0)
    batch["fake"] = recipe.predict(batch)["image"].detach()
    for number in (1, 2):
        loss = recipe(f"discriminator_{number}", batch)
        expected = sign_of_real * loss.terms["real"] + sign_of_fake * loss.terms["fake"]
        assert torch.equal(loss.signals[f"priority_{number}"], expected)
        assert not loss.signals[f"priority_{number}"].requires_grad


def test_only_the_chosen_discriminator_affects_the_gradient():
    recipe = build(against="weaker")
    gradients = []
    for batch in (
        make_batch(recipe, priority_1=1.0, priority_2=0.0),
        make_batch(recipe, priority_1=1.0, priority_2=0.0),
    ):
        recipe.zero_grad()
        recipe("generator", batch).terms["adversarial"].backward()
        gradients.append(recipe.generator.main[0].weight.grad.clone())
        with torch.no_grad():
            recipe.discriminator_2.main[0].weight.zero_()  # not chosen, so this change has no effect
    assert torch.equal(*gradients)


def test_a_random_number_chooses_one_discriminator_per_step():
    recipe = build(against="random")
    assert recipe.signals == {} and recipe.draws["coin"] == Draw((), "uniform", common=True)
    for coin, chosen in ((0.2, 0), (0.7, 1)):
        batch = make_batch(recipe, coin=coin)
        assert generator_loss(recipe, batch) == generator_losses(recipe, batch)[chosen]


def test_a_common_random_number_is_the_same_for_all_samples_in_a_step():
    drawer = Drawer({"coin": Draw((), "uniform", common=True)}, 0, torch.device("cpu"), torch.float32)
    first, larger, later = drawer.table(0, 4)["coin"], drawer.table(0, 7)["coin"], drawer.table(4, 4)["coin"]
    assert first.shape == (4,) and larger.shape == (7,)
    assert len(set(first.tolist()) | set(larger.tolist())) == 1
    assert first[0] != later[0]


def test_training_against_both_discriminators_adds_their_losses():
    recipe = build(against="both")
    batch = make_batch(recipe)
    assert recipe.signals == {}
    assert generator_loss(recipe, batch) == pytest.approx(sum(generator_losses(recipe, batch)), rel=1e-12)


def test_d2gan_uses_a_different_objective_for_each_discriminator():
    recipe = build(objective="d2gan", d2gan_alpha=0.3, d2gan_beta=0.2)
    first, second = d2gan(0.3, 0.2)
    batch = make_batch(recipe)
    fake = recipe.predict(batch)["image"].detach()
    logits_1, logits_2 = recipe.discriminator_1(fake), recipe.discriminator_2(fake)
    expected = (first.generator(logits_1) + second.generator(logits_2)).mean().item()
    assert generator_loss(recipe, batch) == pytest.approx(expected, rel=1e-12)
    batch["fake"] = fake
    assert torch.equal(recipe("discriminator_1", batch).terms["fake"], first.fake(logits_1).mean())
    assert torch.equal(recipe("discriminator_2", batch).terms["fake"], second.fake(logits_2).mean())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "d2gan", "against": "stronger"}, "objective=d2gan and against=stronger: d2gan needs both"),
        ({"objective": "d2gan", "r1": 1.0}, "objective=d2gan and r1=1: R1 only works with bce, hinge and lsgan"),
        ({"objective": "d2gan", "d2gan_beta": 0.0}, "d2gan_beta=0: must be above 0"),
    ],
)
def test_conflicting_options_are_rejected_in_one_line(settings, message):
    with pytest.raises(UserError, match=message) as caught:
        build(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["d2gan_alpha", "d2gan_beta"])
def test_a_weight_of_d2gan_is_rejected_with_another_objective(name):
    with pytest.raises(UserError, match=f"{name}=0.5: not used with objective=hinge; use objective=d2gan"):
        DualGan.check(DualGanSettings(objective="hinge", **{name: 0.5}))
    DualGan.check(DualGanSettings(objective="d2gan", **{name: 0.5}))
    DualGan.check(DualGanSettings(objective="hinge"))


def test_discriminators_with_a_constant_output_are_recognised_by_their_score_ranges():
    recipe = build(against="both")
    batch = make_batch(recipe)
    batch["fake"] = recipe.predict(batch)["image"].detach()
    for number in (1, 2):
        assert recipe(f"discriminator_{number}", batch).signals["score_range"] > 0
        for parameter in recipe.networks[f"discriminator_{number}"].parameters():
            parameter.data.zero_()
        assert recipe(f"discriminator_{number}", batch).signals["score_range"] == 0
    assert recipe.must_vary == ("discriminator_1/score_range", "discriminator_2/score_range")


def test_r1_adds_a_penalty_phase_for_each_discriminator():
    recipe = build(r1=1.0)
    assert [(p.name, p.network, p.every) for p in recipe.phases[3:]] == [
        ("penalty_1", "discriminator_1", 16),
        ("penalty_2", "discriminator_2", 16),
    ]
    for number in (1, 2):
        recipe.zero_grad()
        recipe(f"penalty_{number}", make_batch(recipe)).terms["r1"].backward()
        assert all(p.grad is not None for p in recipe.networks[f"discriminator_{number}"].parameters())


def test_the_priorities_of_the_discriminators_are_passed_to_the_next_step():
    parts = assemble(configure("dual_gan", {"accelerator": "cpu"}, assignments=["against=weaker"], small=True))
    losses = {}
    parts.recipe.register_forward_hook(lambda recipe, arguments, loss: losses.update({arguments[0]: loss}))
    parts.step(next(iter(parts.feed.steps(0, parts.total_images))))
    for number in (1, 2):
        loss = sum(losses[f"discriminator_{number}"].terms.values()).item()
        assert parts.step.signals[f"priority_{number}"].item() == pytest.approx(loss, rel=1e-6)


def test_with_d2gan_the_certainty_is_relative_to_the_best_output_of_an_uncertain_discriminator():
    recipe = build(objective="d2gan", ada="color", d2gan_alpha=0.2)
    batch = make_batch(recipe, augment_strength=0.0)
    batch |= {
        f"view_of_{what}": torch.zeros(NUM_SAMPLES, *recipe.draws["view_of_real"].shape) for what in ("real", "fake")
    }
    batch["fake"] = batch["image"]
    for output, certainty in ((0.19, -1), (0.21, 1)):
        logits = torch.full((NUM_SAMPLES,), output, dtype=torch.float64).expm1().log()
        recipe.discriminator_1.forward = lambda images, logits=logits: logits
        assert recipe("discriminator_1", batch).signals["augment_certainty"] == certainty
