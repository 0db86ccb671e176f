import dataclasses

import pytest
import torch
import torch.nn.functional as F

from paceline.commands.configure import configure
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.recipes.importers.deepliif import networks_of, renamed
from paceline.recipes.translation import Translation, TranslationSettings

DATA_SPEC = DataSpec(channels=3, height=32, width=32, panels=("stain", "nuclei", "segmentation"))
TINY = {"generator": "resnet_6", "segmentation_generator": "unet_32", "ngf": 1, "ndf": 1, "d_layers": 1, "dropout": 0.0}
NUM_SAMPLES = 2


def build(spec: DataSpec = DATA_SPEC, **settings) -> Translation:
    torch.manual_seed(0)
    return Translation(TranslationSettings(**TINY | settings), spec).double()


def make_batch(spec: DataSpec = DATA_SPEC, height: int = 32, width: int = 32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: (torch.rand(NUM_SAMPLES, 3, height, width, generator=generator) * 2 - 1).double()
        for name in ("image", *spec.panels)
    }


def after_generators(recipe: Translation) -> dict[str, torch.Tensor]:
    batch = make_batch()
    return batch | {name: tensor.detach() for name, tensor in recipe("generators", batch).shared.items()}


def test_deepliif_has_a_generator_and_a_discriminator_per_modality_and_segmentation():
    recipe = build()
    assert list(recipe.generators) == ["G1", "G2", "GS0", "GS1", "GS2"]
    assert list(recipe.discriminators) == ["D1", "D2", "DS0", "DS1", "DS2"]
    assert list(recipe.networks) == ["generators", "discriminators"]
    assert recipe.evaluation.best == "", "the last checkpoint counts as the best"


def test_the_deepliif_preset_builds_the_model_from_the_deepliif_paper():
    config = configure("translation", {"preset": "deepliif"})
    assert config.run.panels == "image,hematoxylin,dapi,lap2,marker,segmentation" and config.run.crop == 512
    settings = dataclasses.replace(config.recipe, ngf=1, ndf=1)
    panels = tuple(config.run.panels.split(",")[1:])
    recipe = Translation(settings, DataSpec(channels=3, height=512, width=512, panels=panels))
    assert len(recipe.generators) == len(recipe.discriminators) == 9
    assert recipe.plan.fusion == (0.25, 0.15, 0.25, 0.1, 0.25)
    kinds = {name: type(network).__name__ for name, network in recipe.generators.items()}
    assert kinds["G1"] == "ResnetGenerator" and kinds["GS0"] == "UnetGenerator"
    assert sum(isinstance(module, torch.nn.Conv2d) for module in recipe.discriminators["D1"].modules()) == 6


@pytest.mark.parametrize("preset", ["deepliif", "pix2pix"])
def test_the_presets_use_each_images_own_statistics_for_prediction_as_in_the_papers(preset):
    assert configure("translation", {"preset": preset}).recipe.batchnorm == "instance"
    assert configure("translation", {}).recipe.batchnorm == "running"


def test_the_choice_of_statistics_for_prediction_does_not_change_training():
    recipes, batch = [build(batchnorm=name) for name in ("running", "instance")], make_batch()
    losses = [recipe("generators", batch).terms for recipe in recipes]
    for loss in losses:
        sum(loss.values()).backward()
    assert losses[0] == losses[1]
    for one, other in zip(*(recipe.parameters() for recipe in recipes), strict=True):
        assert one.grad is other.grad is None or torch.equal(one.grad, other.grad)
    for one, other in zip(*(recipe.buffers() for recipe in recipes), strict=True):
        assert torch.equal(one, other)
    running, by_image = (recipe.eval().predict(batch)["stain"] for recipe in recipes)
    assert not torch.allclose(running, by_image)


def test_the_segmentation_is_a_weighted_sum_of_its_generators_outputs():
    recipe = build(segmentation_weights="0.5,0.2,0.3")
    batch = make_batch()
    made = recipe.translate(batch["image"])
    parts = [recipe.generators[f"GS{i}"](x) for i, x in enumerate((batch["image"], made["stain"], made["nuclei"]))]
    torch.testing.assert_close(made["segmentation"], 0.5 * parts[0] + 0.2 * parts[1] + 0.3 * parts[2])
    assert torch.equal(made["nuclei"], recipe.generators["G2"](batch["image"]))


def test_a_segmentation_generator_with_zero_weight_is_not_built():
    recipe = build(segmentation_weights="0.5,0,0.5")
    assert list(recipe.generators) == ["G1", "G2", "GS0", "GS2"]
    recipe("generators", make_batch())


def test_the_segmentation_loss_also_trains_the_modality_generators_it_depends_on():
    recipe = build(segmentation_weights="0.5,0.5,0")
    terms = recipe("generators", make_batch()).terms
    terms["segmentation_distance"].backward()
    reached = {name: any(p.grad is not None for p in net.parameters()) for name, net in recipe.generators.items()}
    assert reached == {"G1": True, "G2": False, "GS0": True, "GS1": True}


@pytest.mark.parametrize("distance", ["l1", "smooth_l1"])
def test_each_panel_has_its_own_weight_in_the_generator_loss(distance):
    recipe = build(distance=distance, generator_weights="0.2,0.3,0.5", norm="none")
    batch = make_batch()
    terms, made = recipe("generators", batch).terms, recipe.translate(batch["image"])
    function = {"l1": F.l1_loss, "smooth_l1": F.smooth_l1_loss}[distance]
    torch.testing.assert_close(terms["nuclei_distance"], 0.3 * 100 * function(made["nuclei"], batch["nuclei"]))
    logits = recipe.discriminators["D2"](batch["image"], made["nuclei"])
    torch.testing.assert_close(terms["nuclei_adversarial"], 0.3 * F.softplus(-logits).mean())
    assert len(terms) == 6


def test_the_segmentation_discriminator_loss_uses_a_weighted_sum_of_logits():
    recipe = build(segmentation_weights="0.5,0.2,0.3", norm="none", discriminator_weights="0.2,0.2,0.6")
    batch = after_generators(recipe)
    made = batch["made_segmentation"]
    logits = sum(
        weight * recipe.discriminators[f"DS{i}"](batch[condition], made)
        for i, (weight, condition) in enumerate(((0.5, "image"), (0.2, "stain"), (0.3, "nuclei")))
    )
    terms = recipe("discriminators", batch).terms
    torch.testing.assert_close(terms["segmentation_fake"], 0.6 / 2 * logits.square().mean())
    real = recipe.discriminators["D1"](batch["image"], batch["stain"])
    torch.testing.assert_close(terms["stain_real"], 0.2 / 2 * F.softplus(-real).mean())


def test_discriminators_train_on_images_generated_in_the_same_step():
    recipe = build()
    batch = after_generators(recipe)
    assert {name for name in batch if name.startswith("made_")} == {f"made_{name}" for name in DATA_SPEC.panels}
    changed = recipe("discriminators", batch | {"made_stain": -batch["made_stain"]}).terms
    same = recipe("discriminators", batch).terms
    assert [name for name in same if not torch.equal(same[name], changed[name])] == ["stain_fake"]


def test_a_perceptual_loss_adds_no_weights_to_the_recipe():
    recipe = build(perceptual=1.0, vgg="random", vgg_layer="relu1_2")
    loss = recipe("generators", make_batch())
    assert len(loss.terms) == 9 and loss.terms["stain_perceptual"] > 0
    assert recipe.state_dict().keys() == build().state_dict().keys()


def test_pix2pix_generates_a_single_panel():
    spec = dataclasses.replace(DATA_SPEC, panels=("target",))
    recipe = build(spec, model="pix2pix", generator="unet_32")
    assert list(recipe.generators) == ["G1"] and list(recipe.discriminators) == ["D1"]
    batch = make_batch(spec)
    assert recipe.predict(batch).keys() == {"target"}
    assert recipe.image_to_image(batch["image"]).keys() == {"image"}
    of_several = build(model="pix2pix", target="segmentation", gan="lsgan", segmentation_gan="vanilla")
    logits = of_several.discriminators["D1"](batch["image"], of_several.translate(batch["image"])["segmentation"])
    term = of_several("generators", make_batch()).terms["segmentation_adversarial"]
    torch.testing.assert_close(term, (logits - 1).square().mean())


@pytest.mark.parametrize(("side", "expected"), [(32, "unet_32"), (64, "unet_64"), (96, "unet_32"), (20, "resnet_9")])
def test_the_auto_generator_is_the_largest_unet_that_fits_the_image_size(side, expected):
    spec = DataSpec(channels=3, height=side, width=side, panels=("target",))
    recipe = build(spec, model="pix2pix", generator="auto")
    assert recipe.multiple_px == {"unet_32": 32, "unet_64": 64, "resnet_9": 4}[expected]


def test_images_of_any_size_are_translated_and_previews_show_generated_and_real_panels():
    recipe = build().eval()
    batch = make_batch(height=37, width=70)
    made = recipe.image_to_image(batch["image"])
    assert list(made) == list(DATA_SPEC.panels)
    assert all(panel.shape == (NUM_SAMPLES, 3, 37, 70) for panel in made.values())
    strip = recipe.preview(batch)
    assert list(strip)[:3] == ["input", "stain", "real stain"] and len(strip) == 7
    assert torch.equal(strip["segmentation"], made["segmentation"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"segmentation_weights": "0.5,0.2,0.2"}, "segmentation_weights=0.5,0.2,0.2: sums to 0.9, but must sum to 1"),
        ({"generator_weights": "0.5,0.2,0.4"}, "generator_weights=.*sums to 1.1"),
        ({"discriminator_weights": "1,1,1"}, "discriminator_weights=1,1,1: sums to 3"),
        ({"segmentation_weights": "0.25,0.25,0.25,0.25"}, r"has 4 weights; expected 3 \(the input, stain"),
        ({"segmentation_weights": "0.5,0.5"}, r"has 2 weights; expected 3 \(the input, stain, nuclei"),
        ({"segmentation_weights": "0.5,half,0"}, "expected numbers separated by commas"),
        ({"segmentation_weights": "1.5,-0.5,0"}, "weights must be between 0 and 1"),
        ({"generator_weights": "0.5,0,0.5"}, "'nuclei' has weight 0 and would not be trained"),
        (
            {"modalities": 4},
            "modalities=4: the data has 2, not counting the input and the segmentation .stain, nuclei.",
        ),
        ({"model": "pix2pix"}, "generates one panel, but the data has stain, nuclei, segmentation.*--set target=stain"),
        ({"model": "pix2pix", "target": "stian"}, "target=stian: unknown panel 'stian'; did you mean 'stain'"),
        ({"model": "pix2pix", "target": "stain", "segmentation_weights": "1"}, "only for model=deepliif"),
        ({"model": "pix2pix", "target": "stain", "modalities": 3}, "modalities=3: only for model=deepliif"),
        ({"target": "stain"}, "target=stain: only for model=pix2pix"),
        ({"generator": "unet_256"}, "generator=unet_256: needs sides that are multiples of 256.*32×32"),
        ({"d_layers": 4}, "d_layers=4: needs at least 48 pixels per side.*32×32"),
    ],
)
def test_settings_that_do_not_match_the_data_are_reported(settings, message):
    with pytest.raises(UserError, match=message):
        build(**settings)


def test_translation_without_panels_or_segmentation_weights_without_a_panel_are_rejected():
    without = dataclasses.replace(DATA_SPEC, panels=("stain", "nuclei"))
    assert list(build(without).generators) == ["G1", "G2"]
    with pytest.raises(UserError, match="segmentation_weights=1,0,0: the data has no panel 'segmentation'"):
        build(without, segmentation_weights="1,0,0")
    with pytest.raises(UserError, match="--data panels"):
        build(dataclasses.replace(DATA_SPEC, panels=()))


def test_the_default_hyperparameters_match_pix2pix():
    config = configure("translation", {})
    learner, run, own = config.learner, config.run, config.recipe
    assert (learner.optimizer, learner.lr, learner.beta1, learner.schedule, learner.hold) == (
        *("adam", 2e-4, 0.5, "linear", "50%"),
    )
    assert (run.data, run.batch_size) == ("panels", "1")
    assert (own.distance_weight, own.dropout, own.norm, own.ngf) == (100.0, 0.5, "batch", 64)


@pytest.mark.parametrize(
    ("files", "networks"),
    [
        ("G D", "generators.G1 discriminators.D1"),
        (
            "G1 G2 G3 G4 G51 G52 G55 D4 D53",
            "generators.G1 generators.G2 generators.G3 generators.G4 generators.GS0 generators.GS1 generators.GS4 "
            "discriminators.D4 discriminators.DS2",
        ),
        ("G1 GS0 GS1", "generators.G1 generators.GS0 generators.GS1"),
        ("G1 GS1 GS2", "generators.G1 generators.GS0 generators.GS1"),
        ("G51", "generators.GS0"),
    ],
)
def test_files_of_pix2pix_and_deepliif_map_to_networks_by_the_number_in_their_names(files: str, networks: str):
    named = [f"latest_net_{name}.pth" for name in files.split()]
    assert networks_of([*named, "train_opt.txt"]) == dict(zip(named, networks.split(), strict=True))


def test_files_from_two_models_in_one_folder_are_rejected():
    with pytest.raises(UserError, match=r"latest_net_G51.pth: with 3 modalities.*G41, G42"):
        networks_of(["latest_net_G1.pth", "latest_net_G2.pth", "latest_net_G3.pth", "latest_net_G51.pth"])


def test_the_tensors_of_an_imported_file_can_be_loaded_into_the_recipe():
    spec = DataSpec(channels=3, height=32, width=32, panels=("stain", "segmentation"))
    spec = dataclasses.replace(DATA_SPEC, panels=("stain", "segmentation"))
    recipe, other = (build(spec, norm="instance") for _ in range(2))
    for parameter in other.parameters():
        parameter.data += 1
    written = dict(other.generators["GS1"].state_dict())
    written["model.1.running_mean"] = torch.zeros(1)  # old versions of torch stored this tensor for InstanceNorm
    network = networks_of(["latest_net_G1.pth", "latest_net_G22.pth"])["latest_net_G22.pth"]
    state = renamed(network, written, recipe.state_dict())
    assert {name for name in recipe.state_dict() if name.startswith("generators.GS1.")} == state.keys()
    recipe.load_state_dict(recipe.state_dict() | state)
    assert torch.equal(recipe.generators["GS1"].model.model[0].weight, other.generators["GS1"].model.model[0].weight)
