"""Requirements for every recipe, checked for the built-in recipes and for the `paceline new` templates."""

import ast
import dataclasses
import inspect
import itertools
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.commands import new
from paceline.config.settings import LearnerSettings, RunSettings
from paceline.contracts.importer import Importer
from paceline.contracts.recipe import Batch, Clock, DataSpec, Loss, Phase, Recipe
from paceline.core import registry
from paceline.core.errors import UserError
from paceline.runs.recipe import resolve_config

DATA_SPEC = DataSpec(channels=3, height=32, width=32, num_classes=10, panels=("stain", "segmentation"))
NUM_SAMPLES = 4


def written_by_new() -> list[str]:
    """Return the recipe files that `paceline new` writes."""
    files = sorted(Path(new.__file__).with_name("templates").glob("*.py"))
    return [str(file) for file in files if file.stem != "source"]


def load(name: str) -> type[Recipe]:
    return registry.load_class("recipe", name, Recipe)


def load_small(name: str) -> dict[str, Any]:
    """Return the recipe's settings for a small network."""
    own = {field.name for field in dataclasses.fields(load(name).Settings)}
    return {key: value for key, value in load(name).small.items() if key in own}


def build(name: str, **settings: Any) -> Recipe:
    torch.manual_seed(0)
    recipe_class = load(name)
    return recipe_class(recipe_class.Settings(**load_small(name) | settings), DATA_SPEC)


def make_batch(recipe: Recipe) -> Batch:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(NUM_SAMPLES, DATA_SPEC.channels, DATA_SPEC.height, DATA_SPEC.width, generator=generator) * 2 - 1
    labels = torch.randint(DATA_SPEC.num_classes, (NUM_SAMPLES,), generator=generator)
    make = {"normal": torch.randn, "uniform": torch.rand}
    draws = {
        name: make[draw.kind]((NUM_SAMPLES, *draw.shape), generator=generator) for name, draw in recipe.draws.items()
    }
    clock = Clock(images=0, images_per_step=NUM_SAMPLES)
    values = {name: value(clock) if callable(value) else value for name, value in recipe.signals.items()}
    signals = {name: torch.full((NUM_SAMPLES,), value) for name, value in values.items()}
    panels = {name: images.roll(number, dims=0) for number, name in enumerate(DATA_SPEC.panels, start=1)}
    return {"image": images, "target": images.flip(3), "label": labels} | panels | draws | signals


def run_phases(recipe: Recipe) -> Iterator[tuple[Phase, Loss]]:
    """Run each phase (the update of one network) in order; yield the phase and its loss after the backward pass."""
    batch = make_batch(recipe)
    for phase in recipe.phases:
        recipe.requires_grad_(False)
        recipe.networks[phase.network].requires_grad_(True)
        recipe.zero_grad(set_to_none=True)
        loss = recipe(phase.name, batch)
        sum(loss.terms.values()).backward()
        yield phase, loss
        batch |= {name: tensor.detach() for name, tensor in loss.shared.items()}
        signals = {name: value for name, value in loss.signals.items() if name in recipe.signals}
        batch |= {name: value.detach().expand(NUM_SAMPLES) for name, value in signals.items()}


every_recipe = pytest.mark.parametrize("name", registry.names("recipe") + written_by_new())


@every_recipe
def test_the_settings_of_a_recipe_have_help_texts_and_unique_names(name):
    fields = dataclasses.fields(load(name).Settings)
    taken = {field.name for group in (RunSettings, LearnerSettings) for field in dataclasses.fields(group)}
    assert not taken & {field.name for field in fields}
    assert all(field.metadata.get("meaning") for field in fields)


@every_recipe
def test_the_defaults_and_presets_of_a_recipe_use_existing_settings_within_their_bounds(name):
    recipe_class = load(name)
    for layer, values in {"none": {}, "small": recipe_class.small, **recipe_class.presets}.items():
        resolve_config(name, [("defaults", recipe_class.defaults), (f"preset {layer}", values)])


@every_recipe
def test_each_phase_of_a_recipe_has_a_loss_method_and_a_network(name):
    recipe = build(name)
    assert recipe.phases
    for phase in recipe.phases:
        assert callable(getattr(recipe, f"{phase.name}_loss"))
        assert list(recipe.networks[phase.network].parameters())
    assert set(recipe.ema) <= set(recipe.networks)
    assert set(recipe.double_backward) <= set(recipe.networks)
    in_networks = {id(p) for network in recipe.networks.values() for p in network.parameters()}
    assert in_networks == {id(p) for p in recipe.parameters()}, (
        "a parameter belongs to no network, so no phase updates it"
    )


@every_recipe
def test_each_phase_computes_gradients_only_for_its_network_and_for_all_its_parameters(name):
    recipe = build(name)
    for phase, _ in run_phases(recipe):
        own = {id(parameter) for parameter in recipe.networks[phase.network].parameters()}
        for parameter_name, parameter in recipe.named_parameters():
            if id(parameter) in own:
                assert parameter.grad is not None, f"{phase.name} leaves {parameter_name} without a gradient"
                assert parameter.grad.isfinite().all()
            else:
                assert parameter.grad is None, f"{phase.name} has a gradient for {parameter_name} of another network"


@every_recipe
def test_loss_terms_are_scalars_and_shared_tensors_have_one_row_per_sample(name):
    for _, loss in run_phases(build(name)):
        assert loss.terms
        assert all(term.ndim == 0 and term.isfinite() for term in loss.terms.values())
        assert all(signal.ndim == 0 for signal in loss.signals.values())
        assert all(tensor.ndim > 0 and len(tensor) == NUM_SAMPLES for tensor in loss.shared.values())


@every_recipe
def test_the_losses_of_a_recipe_do_not_use_the_global_random_generator(name):
    recipe = build(name)
    for module in recipe.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.eval()  # disable dropout, which is allowed to use random numbers
    before = torch.get_rng_state()
    for _ in run_phases(recipe):
        assert torch.equal(before, torch.get_rng_state())


@every_recipe
def test_a_recipe_predicts_one_row_per_sample_and_names_an_existing_evaluator(name):
    recipe = build(name).eval()
    with torch.no_grad():
        prediction = recipe.predict(make_batch(recipe))
    assert prediction
    assert all(len(tensor) == NUM_SAMPLES for tensor in prediction.values())
    if recipe.generates:
        draws = {name: values for name, values in make_batch(recipe).items() if name in recipe.draws}
        assert torch.equal(recipe.predict(draws)["image"], prediction["image"])
        assert prediction["image"].abs().max() <= 1
    evaluation = type(recipe).evaluation  # read from the class, since instances may differ
    if evaluation.evaluator:
        assert evaluation.evaluator in registry.names("evaluator")
        split, _, metric = evaluation.best.partition("/")
        assert split == evaluation.split and metric and evaluation.mode in ("min", "max")


def test_every_importer_is_used_by_a_recipe_and_is_complete():
    used = {load(name).weights.importer for name in registry.names("recipe")} - {""}
    assert used == set(registry.names("importer"))
    for name in used:
        importer = registry.load_class("importer", name, Importer)
        for method in ("__init__", "data_spec", "tensors"):
            assert getattr(importer, method) is not getattr(Importer, method), f"{name} has no {method}()"


@every_recipe
def test_a_recipe_contains_no_device_or_stream_code(name):
    recipe_class = load(name)
    for defined_in in (base for base in recipe_class.__mro__ if issubclass(base, Recipe) and base is not Recipe):
        tree = ast.parse(Path(inspect.getfile(defined_in)).read_text())
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not attributes & {"device", "cuda", "is_cuda", "to"} and "paceline.core.gpu" not in imported


def choices(name: str) -> Iterator[tuple[str, Any]]:
    """Yield (setting, value) pairs to try: some allowed choices, and each integer increased by one."""
    recipe_class = load(name)
    hints = typing.get_type_hints(recipe_class.Settings)
    for field in dataclasses.fields(recipe_class.Settings):
        hint = hints[field.name]
        if typing.get_origin(hint) is typing.Literal or hint is bool:
            yield from ((field.name, value) for value in (typing.get_args(hint) or (False, True))[:3])
        elif hint is int:
            yield field.name, recipe_class.small.get(field.name, field.default) + 1


def compute(recipe: Recipe) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield results of the recipe's networks, each with the conditions under which the results must be equal.

    Predictions may depend on declared conditions, such as the degradation of the images. The images from
    `image_to_image` may not, because their input is given.
    """
    batch = make_batch(recipe)
    yield f"predictions under {dict(recipe.evaluation.conditions)}", recipe.predict(batch)
    if type(recipe).image_to_image is not Recipe.image_to_image:
        yield "images", recipe.image_to_image(batch["image"])


@every_recipe
@pytest.mark.parametrize("num_changes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_settings_that_change_what_the_same_weights_compute_are_declared(name, num_changes):
    bound = load(name).weights.must_match
    assert set(bound) <= {field.name for field in dataclasses.fields(load(name).Settings)}
    usual = vars(load(name).Settings(**load_small(name)))
    changes = [(setting, value) for setting, value in choices(name) if value != usual[setting]]
    pairs = [{}, *(dict(pair) for pair in itertools.combinations_with_replacement(changes, num_changes))]
    weights_of: dict[str, dict[str, torch.Tensor]] = {}
    computed: dict[tuple[str, str], tuple[dict[str, Any], dict[str, torch.Tensor]]] = {}
    for number, settings in enumerate(pairs):
        if settings in pairs[:number]:
            continue
        try:
            recipe = build(name, **settings).eval()
        except UserError:  # this combination of settings is not allowed
            continue
        shapes = {key: tuple(value.shape) for key, value in recipe.state_dict().items()}
        alike = str((shapes, [(usual | settings)[setting] for setting in bound]))
        recipe.load_state_dict(weights_of.setdefault(alike, recipe.state_dict()))
        with torch.no_grad():
            for conditions, found in compute(recipe):
                before, made = computed.setdefault((alike, conditions), (settings, found))
                same = found.keys() == made.keys() and all(torch.equal(found[key], made[key]) for key in made)
                assert same, (
                    f"weights trained with {before} fit {settings} but compute different {conditions}: "
                    "declare Weights.must_match or Evaluation.conditions"
                )
