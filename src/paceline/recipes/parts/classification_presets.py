"""The presets of the recipe `classification`: named sets of settings."""

from __future__ import annotations

from paceline.core.types import SettingValue, SettingValues

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
