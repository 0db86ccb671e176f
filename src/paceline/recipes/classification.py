"""Classification: a network predicts the class of an image.

By default, the network is a residual network; `network=timm:NAME` selects any classifier from timm. The preset
`reference` has the settings from a published comparison of strategies on CIFAR-100 (ResNet-18, up to 71.9% top-1).
`accurate` reaches a higher accuracy with the same network and data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.resolve import Arguments
from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, DataSpec, Draw, Evaluation, Loss, Phase, Recipe, Weights
from paceline.core.errors import NoClasses
from paceline.core.types import SettingValue, SettingValues
from paceline.models.augmentation import MIX_UNIFORMS, TRIVIAL_UNIFORMS, mix, neighbours, trivial_augment
from paceline.models.networks import NetworkChoice, NetworkTask, load_classifiers, make_network
from paceline.models.resnet import ResNet

SMALL_STEM_UP_TO_PX = 64  # the plain stem downsamples by 4, which is too much for small images

_STRONG_AUGMENTATION: dict[str, SettingValue] = {
    "mixup": 0.8,
    "cutmix": 1.0,
    "trivial_augment": True,
    "label_smoothing": 0.1,
}
_ADAMW: dict[str, SettingValue] = {
    "optimizer": "adamw",
    "beta2": 0.999,
    "decay_norms": False,
    "schedule": "cosine",
    "clip": 1.0,
}
# CIFAR-100 with SGD and a learning rate that decays to zero. The learning rate is for a batch of 512. A small
# validation split is enough, since the last checkpoints hardly differ.
_CIFAR100: dict[str, SettingValue] = {
    "data": "cifar100",
    "depth": "18",
    "stem": "small",
    "batch_size": "512",
    "reference_batch": 512,
    "lr": 0.4,
    "weight_decay": 5e-4,
    "schedule": "cosine",
    "warmup": "5 epochs",
    "label_smoothing": 0.1,
    "pad_crop": 4,
    "flip": "on",
    "validation": 0.02,
}

PRESETS: dict[str, SettingValues] = {
    # For a first run on a CPU: a narrow network, and the digits at their original size of 8 pixels.
    "quick": {
        "data": "digits",
        "size": 8,
        "width": 16,
        "epochs": 12,
        "batch_size": "64",
        "reference_batch": 64,
        "pad_crop": 1,
        "flip": "off",
    },
    # The settings from the published comparison, including its fp16 mixed precision: bf16 rounds differently.
    "reference": {
        "data": "cifar100",
        "depth": "18",
        "stem": "small",
        "epochs": 50,
        "batch_size": "128",
        "lr": 0.1,
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 1e-4,
        "schedule": "step",
        "milestones": "25 epochs",
        "gamma": 0.1,
        "warmup": "0 images",
        "pad_crop": 4,
        "flip": "on",
        "validation": 0.1,
        "precision": "fp16",
        "save_every": "10 epochs",
    },
    # Chosen for accuracy on CIFAR-100 in little time. Epochs are short on a large GPU, so evaluating and saving after
    # each one would take too long.
    "accurate": {
        **_CIFAR100,
        "epochs": 100,
        "cutout": 8,
        "evaluate_every": "4 epochs",
        "save_every": "20 epochs",
    },
    # Chosen to exceed 81 % top-1 on CIFAR-100 in ten minutes on one H200: a ResNet-18 of twice the usual width, with
    # CutMix for half of the images and one random operation per image.
    "cifar100": {
        **_CIFAR100,
        "width": 128,
        "epochs": 150,
        "cutmix": 1.0,
        "mix_probability": 0.5,
        "trivial_augment": True,
        "ema_half_life": "1 epochs",
        "evaluate_every": "10 epochs",
        "save_every": "50 epochs",
    },
    # For networks without BatchNorm, such as ConvNeXt and vision transformers, trained from random weights. The
    # learning rate is for a batch of 512; use --scale-lr linear for other batch sizes.
    "modern": {
        **_STRONG_AUGMENTATION,
        **_ADAMW,
        "epochs": 300,
        "batch_size": "512",
        "reference_batch": 512,
        "lr": 1e-3,
        "weight_decay": 0.05,
        "warmup": "20 epochs",
        "ema_half_life": "5 epochs",
    },
    # For published weights (network_args.pretrained=true) or --init-from: layers close to the input change the least.
    "finetune": {
        **_ADAMW,
        "epochs": 20,
        "batch_size": "128",
        "lr": 5e-4,
        "layer_decay": 0.75,
        "weight_decay": 0.05,
        "warmup": "10%",
        "label_smoothing": 0.1,
        "pad_crop": 0,
        "trivial_augment": True,
        "ema_half_life": "1 epochs",
    },
}


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

    def __init__(self, settings: ClassificationSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        if spec.num_classes < 2:
            raise NoClasses("classification needs data with at least two classes: choose a different --data")
        self.selected = SelectedClassifier(settings.network, settings.network_args, spec) if settings.network else None
        self.normalise: nn.Module = nn.Identity()
        self.classifier: nn.Module
        if self.selected:
            mean, std = self.selected.provider.input_statistics(self.selected.choice)
            self.normalise = InputScaling(mean, std, spec.channels)
            self.classifier = make_network(self.selected.choice, self.selected.task)
            self.weights = replace(self.weights, published=settings.network_args.get("pretrained") is True)
        else:
            self.classifier = _make_resnet(settings, spec)
        self.mixes = bool(settings.mixup or settings.cutmix)
        self.draws = {
            **({"mix": Draw((MIX_UNIFORMS,), "uniform")} if self.mixes else {}),
            **({"operation": Draw((TRIVIAL_UNIFORMS,), "uniform")} if settings.trivial_augment else {}),
        }

    def classifier_loss(self, batch: Batch) -> Loss:
        """Return the cross-entropy of the logits, with label smoothing. A mixed image has two labels."""
        settings, images, labels = self.settings, batch["image"], batch["label"]
        if settings.trivial_augment:
            images = trivial_augment(images, batch["operation"])
        if not self.mixes:
            logits = self.classifier(self.normalise(images))
            return Loss({"cross_entropy": F.cross_entropy(logits, labels, label_smoothing=settings.label_smoothing)})
        images, own = mix(images, batch["mix"], settings.mixup, settings.cutmix, settings.mix_probability)
        logits = self.classifier(self.normalise(images))
        error = partial(F.cross_entropy, logits, reduction="none", label_smoothing=settings.label_smoothing)
        mixed = own * error(labels) + (1 - own) * error(neighbours(labels))
        return Loss({"cross_entropy": mixed.mean()})

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return one logit per class."""
        if self.selected:
            self.selected.check_size(self.classifier, batch["image"])
        return {"logits": self.classifier(self.normalise(batch["image"]))}

    def pretrained_weights(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Return the weights of a timm network: those in a file or, without a file, the published ones."""
        return self.selected.pretrained_weights(tensors) if self.selected else {}


class InputScaling(nn.Module):
    """Maps images in [-1, 1] to (v - mean) / std, where v is in [0, 1] and mean and std are given per channel.

    If the number of channels differs, the averages of mean and std are used for every channel.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], channels: int) -> None:
        super().__init__()
        if not len(mean) == len(std) == channels:
            mean, std = [sum(mean) / len(mean)] * channels, [sum(std) / len(std)] * channels
        means, deviations = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (mean, std))
        # Not stored with the weights, because the name of the network determines both.
        self.register_buffer("scale", (0.5 / deviations).float(), persistent=False)
        self.register_buffer("shift", ((0.5 - means) / deviations).float(), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scaled images."""
        return images * self.scale + self.shift


class SelectedClassifier:
    """A classifier from another library, for the images and classes of a data spec."""

    def __init__(self, name: str, arguments: Mapping[str, SettingValue], spec: DataSpec) -> None:
        self.choice, self.provider = NetworkChoice(name, arguments), load_classifiers(name)
        self.task = NetworkTask(spec.channels, spec.height, spec.width, num_classes=spec.num_classes)
        self.checked_px = {(spec.height, spec.width)}  # image sizes that the network is known to accept

    def check_size(self, network: nn.Module, images: Tensor) -> None:
        """Raise UserError if the network cannot process images of this size, which may differ from that in training."""
        height, width = images.shape[2:]
        # An exported or compiled network checks sizes itself.
        if not torch.compiler.is_compiling() and (height, width) not in self.checked_px:
            self.provider.check_input(network, self.choice, replace(self.task, height=height, width=width))
            self.checked_px.add((height, width))

    def pretrained_weights(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Return the weights in a file of the provider or, for None, those that it published, which are downloaded.

        Raise UserError if they belong to a different network.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch.initial_seed())  # the same seed on every rank, for a last layer that is new
            network = self.provider.make_pretrained(self.choice, self.task, tensors)
        return {f"classifier.{name}": tensor for name, tensor in network.state_dict().items()}


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
