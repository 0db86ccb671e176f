"""The presets of `classification`, and classifiers from other libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.contracts.data_spec import DataSpec
from paceline.core.types import SettingValue, SettingValues
from paceline.models.networks import Classifiers, NetworkChoice, NetworkTask, load_classifiers, make_network

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


PREFIX = "classifier."  # the recipe's name for the network, in the names of its tensors
PRETRAINED = "pretrained"  # the argument that requests published weights


class SelectedClassifier:
    """Creates the network for a data spec, with random or published weights."""

    def __init__(self, name: str, arguments: Mapping[str, SettingValue], spec: DataSpec) -> None:
        self.choice = NetworkChoice(name, arguments)
        self.task = NetworkTask(spec.channels, spec.height, spec.width, num_classes=spec.num_classes)
        self.checked_px = {(spec.height, spec.width)}  # image sizes that the network is known to accept

    @property
    def provider(self) -> Classifiers:
        """The library that has the network."""
        return load_classifiers(self.choice.name)

    @property
    def is_pretrained(self) -> bool:
        """Whether the arguments request published weights."""
        return self.choice.arguments.get(PRETRAINED) is True

    def make_network(self) -> nn.Module:
        """Return the network with random weights."""
        return make_network(self.choice, self.task)

    def check_size(self, network: nn.Module, images: Tensor) -> None:
        """Raise UserError if the network cannot process images of this size, which may differ from that in training."""
        if torch.compiler.is_compiling():  # an exported or compiled network checks sizes itself
            return
        height, width = images.shape[2:]
        if (height, width) not in self.checked_px:
            load_classifiers(self.choice.name).check_input(
                network, self.choice, replace(self.task, height=height, width=width)
            )
            self.checked_px.add((height, width))

    def make_input_scaling(self) -> nn.Module:
        """Return a module that scales images in [-1, 1] to the values that the network expects."""
        return InputScaling(*self.provider.input_statistics(self.choice), self.task.in_channels)

    def pretrained_weights(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Return the weights in a file of the provider or, for None, those that it published, which are downloaded.

        Raise UserError if they belong to a different network.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch.initial_seed())  # the same seed on every rank, for a last layer that is new
            network = self.provider.make_pretrained(self.choice, self.task, tensors)
        return {f"{PREFIX}{name}": tensor for name, tensor in network.state_dict().items()}
