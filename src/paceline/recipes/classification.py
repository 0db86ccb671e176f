"""Classification: a network predicts the class of an image.

By default, the network is a residual network; `network=timm:NAME` selects any classifier from timm. The preset
`reference` has the settings from a published comparison of strategies on CIFAR-100 (ResNet-18, up to 71.9% top-1).
`accurate` reaches a higher accuracy with the same network and data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.resolve import Arguments
from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, DataSpec, Draw, Evaluation, Loss, Phase, Recipe, Weights
from paceline.core.errors import NoClasses
from paceline.models import mixing, trivial_augment
from paceline.models.resnet import ResNet
from paceline.recipes.parts.classifiers import PRESETS, SelectedClassifier
from paceline.recipes.parts.other_names import CLASSIFICATION

SMALL_STEM_UP_TO_PX = 64  # the plain stem downsamples by 4, which is too much for small images


@dataclass(frozen=True)
class ClassificationSettings:
    """The network, its loss and the augmentation that uses other images or the labels."""

    network: str = setting("", "network from another library: timm:NAME, e.g. timm:convnext_tiny; empty for a ResNet")
    network_args: Arguments = setting(
        Arguments(), "arguments of that network, e.g. network_args.drop_path_rate=0.1 or network_args.pretrained=true"
    )
    depth: Literal["18", "34", "50"] = setting("18", "number of layers in the residual network")
    stem: Literal["auto", "small", "plain"] = setting(
        "auto",
        "first layers: small (3×3), plain (7×7, downsamples by a factor of 4) "
        "or auto (small for images up to 64 pixels)",
    )
    width: int = setting(64, "channels in the first stage", at_least=1)
    norm: Literal["batch", "none"] = setting("batch", "normalisation layers")
    label_smoothing: float = setting(
        0.0, "label smoothing: fraction of the target probability spread over all classes", at_least=0, below=1
    )
    dropout: float = setting(0.0, "dropout probability before the last layer", at_least=0, below=1)
    mixup: float = setting(
        0.0, "mixup: α of the Beta(α, α) distribution of the mixing ratio; 0 disables it", at_least=0, at_most=100
    )
    cutmix: float = setting(
        0.0, "CutMix: α of the Beta(α, α) distribution of the area; 0 disables it", at_least=0, at_most=100
    )
    mix_probability: float = setting(
        1.0, "fraction of the training images that mixup and CutMix change", at_least=0, at_most=1
    )
    trivial_augment: bool = setting(
        False, "change each training image with one random operation of random strength (TrivialAugment)"
    )


class Classification(Recipe):
    """Trains one network with cross-entropy, in a single phase."""

    Settings = ClassificationSettings
    evaluation = Evaluation("accuracy", best="validation/top1")
    # Weights may fit a network of the same shape with different activations: hence `network`.
    weights = Weights("timm_classifier", must_match=("network",), row_per_class=True)
    defaults = {
        "batch_size": "128",
        "epochs": 30,
        "optimizer": "sgd",
        "lr": 0.1,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 5e-4,
        "schedule": "cosine",
        "warmup": "5%",
        "pad_crop": 4,
    }
    presets = PRESETS
    small = {"width": 8, "size": 16, "pad_crop": 2, "batch_size": "32"}
    phases = (Phase("classifier", "classifier"),)
    ema = ("classifier",)
    other_names = CLASSIFICATION

    def __init__(self, settings: ClassificationSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        if spec.num_classes < 2:
            raise NoClasses("classification needs data with at least two classes: choose a different --data")
        self.selected = SelectedClassifier(settings.network, settings.network_args, spec) if settings.network else None
        self.normalise = self.selected.make_input_scaling() if self.selected else nn.Identity()
        self.classifier = self.selected.make_network() if self.selected else _make_resnet(settings, spec)
        self.weights = replace(self.weights, published=bool(self.selected and self.selected.is_pretrained))
        self.mixes = bool(settings.mixup or settings.cutmix)
        self.draws = {
            **({"mix": Draw((mixing.NUM_UNIFORMS,), "uniform")} if self.mixes else {}),
            **({"operation": Draw((trivial_augment.NUM_UNIFORMS,), "uniform")} if settings.trivial_augment else {}),
        }

    def classifier_loss(self, batch: Batch) -> Loss:
        """Return the cross-entropy of the logits, with label smoothing. A mixed image has two labels."""
        settings, images, labels = self.settings, batch["image"], batch["label"]
        if settings.trivial_augment:
            images = trivial_augment.augment(images, batch["operation"])
        if not self.mixes:
            logits = self.classifier(self.normalise(images))
            return Loss({"cross_entropy": F.cross_entropy(logits, labels, label_smoothing=settings.label_smoothing)})
        images, own = mixing.mix(images, batch["mix"], settings.mixup, settings.cutmix, settings.mix_probability)
        logits = self.classifier(self.normalise(images))
        error = partial(F.cross_entropy, logits, reduction="none", label_smoothing=settings.label_smoothing)
        mixed = own * error(labels) + (1 - own) * error(mixing.neighbours(labels))
        return Loss({"cross_entropy": mixed.mean()})

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return one logit per class."""
        if self.selected:
            self.selected.check_size(self.classifier, batch["image"])
        return {"logits": self.classifier(self.normalise(batch["image"]))}

    def pretrained_weights(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Return the weights of a timm network: those in a file or, without a file, the published ones."""
        return self.selected.pretrained_weights(tensors) if self.selected else {}


def _make_resnet(settings: ClassificationSettings, spec: DataSpec) -> ResNet:
    stem = settings.stem
    if stem == "auto":
        stem = "small" if max(spec.height, spec.width) <= SMALL_STEM_UP_TO_PX else "plain"
    return ResNet(
        depth=int(settings.depth),
        num_classes=spec.num_classes,
        in_channels=spec.channels,
        stem=stem,
        norm=settings.norm,
        width=settings.width,
        dropout=settings.dropout,
    )
