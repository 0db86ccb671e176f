"""The recipe r3gan: losses as in the paper, conditioning, adaptive augmentation and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from paceline.contracts.recipe import Clock, DataSpec
from paceline.core.errors import UserError
from paceline.recipes.parts.generation import CERTAINTY, STEP, STRENGTH
from paceline.recipes.r3gan import R3gan, R3ganSettings

NUM_SAMPLES = 6
GREY = DataSpec(channels=1, height=16, width=16)
CLASSES = DataSpec(channels=3, height=16, width=16, num_classes=3)
ADA = "blit,geometry,color"


def build(spec: DataSpec = GREY, **settings: Any) -> R3gan:
    torch.manual_seed(0)
    small = {"nz": 4, "width": 8, "num_blocks": 1, "group_size": 4}
    recipe = R3gan(R3ganSettings(**small | settings), spec).double()
    with torch.no_grad():  # blocks start as the identity; random weights make every layer matter
        for parameter in recipe.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return recipe


def make_batch(recipe: R3gan, spec: DataSpec = GREY, strength: float = 0.5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    make = {"normal": torch.randn, "uniform": torch.rand}
    batch = {name: make[d.kind]((NUM_SAMPLES, *d.shape), generator=generator) for name, d in recipe.draws.items()}
    batch["image"] = torch.rand(NUM_SAMPLES, spec.channels, 16, 16, generator=generator) * 2 - 1
    clock = Clock(0, NUM_SAMPLES)
    scalars = {name: value(clock) if callable(value) else value for name, value in recipe.signals.items()}
    scalars |= {STRENGTH: strength} if CERTAINTY in scalars else {}
    batch |= {name: torch.full((NUM_SAMPLES,), value) for name, value in scalars.items()}
    return {name: value.double() for name, value in batch.items()} | {"label": torch.arange(NUM_SAMPLES) % 3}


def penalty(recipe: R3gan, images: torch.Tensor, label: torch.Tensor | None) -> torch.Tensor:
    images = images.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(recipe.discriminator(images, label).sum(), images)
    return gradient.square().sum((1, 2, 3)).mean()


@pytest.mark.parametrize("spec", [GREY, CLASSES])
def test_the_losses_are_those_of_the_paper(spec: DataSpec) -> None:
    recipe = build(spec, r_gamma=0.4)
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


def test_lazy_penalties_run_in_a_phase_of_their_own_with_a_larger_weight() -> None:
    eager, lazy = build(), build(penalty_every=4)
    batch = make_batch(eager) | {"fake": make_batch(eager)["image"].flip(-1)}
    assert [phase.every for phase in lazy.phases] == [1, 1, 4]
    whole = eager("discriminator", batch).terms
    assert lazy("discriminator", batch).terms.keys() == {"adversarial"}
    for name, term in lazy("penalty", batch).terms.items():
        assert torch.allclose(term, 4 * whole[name])


def test_gamma_falls_during_the_burn_in() -> None:
    value = build(r_gamma=0.1, burn_in_r_gamma=0.9).signals["r_gamma"]
    assert [value(Clock(images, 8, 100)) for images in (0, 50, 100)] == pytest.approx([0.9, 0.5, 0.1])


def test_a_conditional_model_draws_its_classes_and_needs_no_labels_to_generate() -> None:
    recipe = build(CLASSES)
    draws = {name: value for name, value in make_batch(recipe, CLASSES).items() if name in recipe.draws}
    draws["class"] = torch.tensor([0.0, 0.3, 0.4, 0.6, 0.7, 0.99], dtype=torch.float64)
    prediction = recipe.predict(draws)
    assert prediction["label"].tolist() == [0, 0, 1, 1, 2, 2]
    expected = recipe.generator(draws["noise"], prediction["label"]).clamp(-1, 1)
    assert torch.equal(prediction["image"], expected)


def test_the_model_is_conditional_if_the_data_has_classes_unless_this_is_switched_off() -> None:
    assert build(CLASSES).num_classes == 3 and build(CLASSES, conditional="off").num_classes == 0
    assert build(GREY).num_classes == 0
    assert build(DataSpec(channels=1, height=16, width=16, num_classes=1)).num_classes == 0
    with pytest.raises(UserError, match=r"conditional=on: the data has no classes; use data with at least two"):
        build(GREY, conditional="on")


@pytest.mark.parametrize(("height", "width"), [(16, 32), (28, 28), (8, 8), (256, 256)])
def test_images_of_unsupported_sizes_are_rejected(height: int, width: int) -> None:
    with pytest.raises(UserError, match=rf"the images are {width}×{height} pixels.*use --set size=32"):
        build(DataSpec(channels=1, height=height, width=width))


def test_the_strength_of_the_augmentation_follows_the_certainty_of_the_discriminator() -> None:
    recipe = build(ada=ADA, ada_target=0.6, ada_images=60)
    assert (recipe.signals[STRENGTH], recipe.signals[CERTAINTY]) == (0.0, 0.0)
    batch = make_batch(recipe, strength=0.5)
    assert recipe.signals[STEP](Clock(0, NUM_SAMPLES)) == NUM_SAMPLES / 60
    found = []
    for certainty in (1.0, 0.65, 0.6, 0.0):
        batch[CERTAINTY].fill_(certainty)
        found.append(recipe("generator", batch).signals[STRENGTH].item())
    assert found == pytest.approx([0.6, 0.55, 0.5, 0.4], abs=1e-6)
    batch[STRENGTH].fill_(0.01)
    assert recipe("generator", batch).signals[STRENGTH] == 0
    batch[STRENGTH].fill_(0.79)
    batch[CERTAINTY].fill_(1.0)
    assert recipe("generator", batch).signals[STRENGTH].item() == 0.8
    signals = recipe("discriminator", batch | {"fake": batch["image"].flip(-1)}).signals
    assert -1 <= signals[CERTAINTY] <= 1


def test_a_fixed_strength_rises_during_the_burn_in_and_does_not_adapt() -> None:
    recipe = build(ada=ADA, ada_strength=0.4)
    value = recipe.signals[STRENGTH]
    assert [value(Clock(images, 8, 100)) for images in (0, 50, 100, 500)] == pytest.approx([0, 0.2, 0.4, 0.4])
    assert not {STEP, CERTAINTY} & recipe.signals.keys()
    batch = make_batch(recipe) | {"fake": make_batch(recipe)["image"].flip(-1)}
    assert recipe("generator", batch).signals == {}
    assert CERTAINTY not in recipe("discriminator", batch).signals
    none = batch | {STRENGTH: torch.zeros(NUM_SAMPLES).double()}
    terms = [recipe("discriminator", some).terms["adversarial"] for some in (batch, none)]
    assert not torch.equal(*terms)


def test_real_and_fake_images_are_augmented() -> None:
    recipe = build(ada=ADA)
    batch = make_batch(recipe, strength=0.8) | {"fake": make_batch(recipe)["image"].flip(-1)}
    before = recipe("discriminator", batch).terms
    for view in ("view_of_real", "view_of_fake"):
        changed = recipe("discriminator", batch | {view: batch[view].flip(0)}).terms
        assert not torch.equal(changed["adversarial"], before["adversarial"])
    none = batch | {STRENGTH: torch.zeros(NUM_SAMPLES).double()}
    plain = build()("discriminator", none).terms
    assert all(torch.allclose(recipe("discriminator", none).terms[name], term) for name, term in plain.items())


def test_a_discriminator_with_a_constant_output_is_recognised_by_its_score_range() -> None:
    recipe = build()
    batch = make_batch(recipe) | {"fake": make_batch(recipe)["image"].flip(-1)}
    assert recipe("discriminator", batch).signals["score_range"] > 0
    recipe.discriminator.head.weight.data.zero_()
    assert recipe("discriminator", batch).signals["score_range"] == 0
    assert recipe.must_vary == ("discriminator/score_range",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ada": "colour"}, "ada=colour: unknown augmentation 'colour'; did you mean 'color'"),
        ({"ada": "foo"}, "ada=foo: unknown augmentation 'foo'; choose from: blit, color, cutout, geometry"),
        ({"ada": "color", "diffaugment": "color"}, "cannot be combined; choose one"),
        ({"ada_strength": 0.3}, "ada_strength=0.3: there is nothing to apply; choose transforms"),
        ({"ada_target": 0.5}, "ada_target=0.5: there is nothing to apply; choose transforms"),
        ({"ada_images": 1000}, "ada_images=1000: there is nothing to apply; choose transforms"),
        ({"ada": "blit", "ada_strength": 0.3, "ada_target": 0.5}, "ada_target=0.5: not used with ada_strength=0.3"),
    ],
)
def test_invalid_augmentations_are_reported(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(**settings)
