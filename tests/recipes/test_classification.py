import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.config.settings import LearnerSettings
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
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


def test_a_network_with_norm_none_has_no_batchnorm():
    recipe = build(digits_like(), norm="none")
    assert not any(isinstance(module, nn.BatchNorm2d) for module in recipe.modules())


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
