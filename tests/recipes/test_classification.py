"""The recipe classification and its residual networks; tests of networks from timm are in test_timm_networks.py."""

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from paceline.config.settings import LearnerSettings
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.models.resnet import ResNet
from paceline.recipes.classification import Classification, ClassificationSettings
from paceline.runs.recipe import resolve_config


def digits_like(side_px: int = 8, **changes) -> DataSpec:
    return DataSpec(**{"channels": 1, "height": side_px, "width": side_px, "num_classes": 10} | changes)


def build(spec: DataSpec, **settings) -> Classification:
    torch.manual_seed(0)
    return Classification(ClassificationSettings(**{"width": 4} | settings), spec)


def resolved(preset: str):
    layers = [("defaults", Classification.defaults), ("preset", Classification.presets[preset])]
    return resolve_config("classification", layers)


@pytest.mark.parametrize(("side_px", "stem_px"), [(8, 3), (64, 3), (65, 7), (224, 7)])
def test_the_size_of_the_first_convolution_depends_on_the_image_size(side_px, stem_px):
    assert build(digits_like(side_px)).classifier.conv1.kernel_size == (stem_px, stem_px)


def test_the_loss_is_the_cross_entropy_of_the_predicted_logits_with_label_smoothing():
    recipe = build(digits_like(), label_smoothing=0.2, norm="none")
    batch = {"image": torch.randn(6, 1, 8, 8), "label": torch.arange(6)}
    logits = recipe.predict(batch)["logits"]
    expected = F.cross_entropy(logits, batch["label"], label_smoothing=0.2)
    assert torch.equal(recipe("classifier", batch).terms["cross_entropy"], expected)


def test_the_loss_is_computed_in_float32_under_autocast():
    recipe = build(digits_like())
    batch = {"image": torch.randn(6, 1, 8, 8), "label": torch.arange(6)}
    with torch.autocast("cpu", torch.bfloat16):
        assert recipe("classifier", batch).terms["cross_entropy"].dtype == torch.float32


def test_a_network_without_normalisation_has_biases_and_no_buffers():
    network = build(digits_like(), norm="none").classifier
    assert not list(network.buffers())
    assert all(module.bias is not None for module in network.modules() if isinstance(module, nn.Conv2d))


def test_data_without_classes_is_rejected():
    with pytest.raises(UserError, match="--data"):
        build(digits_like(num_classes=0))


def test_the_reference_preset_has_the_settings_from_the_published_comparison():
    config = resolved("reference")
    run, learner = config.run, config.learner
    assert (run.data, run.epochs, run.batch_size, run.precision) == ("cifar100", 50, "128", "fp16")
    assert (run.pad_crop, run.flip, run.cutout, run.validation) == (4, "on", 0, 0.1)
    assert config.recipe == ClassificationSettings(stem="small")
    assert learner == LearnerSettings(
        optimizer="sgd",
        lr=0.1,
        momentum=0.9,
        nesterov=True,
        weight_decay=1e-4,
        schedule="step",
        milestones="25 epochs",
        gamma=0.1,
    )


@pytest.mark.parametrize("depth", [18, 34, 50])
def test_plain_resnets_compute_the_same_outputs_as_those_of_torchvision_with_their_weights(depth):
    theirs = getattr(torchvision.models, f"resnet{depth}")(num_classes=7).eval()
    ours = ResNet(depth, num_classes=7).eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(ours(images), theirs(images))


@pytest.mark.parametrize(("stem", "side_px"), [("small", 32), ("plain", 8)])
def test_the_small_stem_keeps_the_image_size_and_the_plain_stem_divides_it_by_four(stem, side_px):
    network = ResNet(18, num_classes=5, in_channels=1, stem=stem, width=4)
    sides = []
    network.layer1.register_forward_hook(lambda module, inputs, output: sides.append(output.shape[-1]))
    assert network(torch.randn(2, 1, 32, 32)).shape == (2, 5)
    assert sides == [side_px]


@pytest.mark.parametrize("norm", ["batch", "none"])
def test_every_residual_branch_of_an_untrained_network_outputs_zero(norm):
    torch.manual_seed(0)
    network = ResNet(18, num_classes=5, norm=norm, width=4, stem="small")
    features = torch.rand(2, 4, 8, 8)
    assert torch.equal(network.layer1(features), features)


def test_a_network_without_normalisation_can_overfit_a_few_images():
    torch.manual_seed(0)
    network = ResNet(18, num_classes=4, norm="none", width=8, stem="small")
    images, labels = torch.randn(16, 3, 8, 8), torch.arange(16) % 4
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    for _ in range(60):
        loss = nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.2


def test_dropout_changes_the_output_only_in_training_mode():
    torch.manual_seed(0)
    network = ResNet(18, num_classes=5, width=4, stem="small", dropout=0.5)
    images = torch.randn(2, 3, 8, 8)
    assert not torch.equal(network(images), network(images))
    network.eval()
    assert torch.equal(network(images), network(images))
