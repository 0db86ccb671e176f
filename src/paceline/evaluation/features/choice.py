"""Chooses the network whose features are used to evaluate generated images.

The standard is Inception 2015, whose metrics have plain names (`FID`). For other networks, metric names include the
network's name (`FID[resnet18-digits]`), since metrics computed from different features are not comparable.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.evaluation.contract import OpenedRun, OpenRun, is_classifier
from paceline.evaluation.features.inception import load_inception
from paceline.evaluation.features.network import Arithmetic, FeatureNetwork, Features, hash_of
from paceline.evaluation.protocol import Protocol


class Pixels(FeatureNetwork):
    """Uses the image itself, averaged down to 8×8 pixels, as features; for quick checks without a feature network."""

    SIDE_PX = 8
    label = f"pixels-{SIDE_PX}x{SIDE_PX}"
    resize = f"area to {SIDE_PX}"

    def __init__(self, spec: DataSpec) -> None:
        self.num_features = spec.channels * self.SIDE_PX**2

    def extract(self, images: Tensor, arithmetic: Arithmetic = "fp32") -> Features:
        return Features(F.adaptive_avg_pool2d(images.float() / 255, self.SIDE_PX).flatten(1))


class Classifier(FeatureNetwork):
    """A finished classification run. Its features are the inputs of its last linear layer."""

    def __init__(self, name: str, run: OpenedRun, spec: DataSpec, device: torch.device) -> None:
        layers = [module for module in run.recipe.modules() if isinstance(module, nn.Linear)]
        if not is_classifier(type(run.recipe)) or not layers:
            raise UserError(f"features={name}: not a classification run with a linear layer; choose a different run")
        if _shape(run.spec) != _shape(spec):
            raise UserError(
                f"features={name}: trained on {_shape(run.spec)} images, "
                f"but the images to evaluate are {_shape(spec)}; "
                f"train a classifier on such images (--set size={spec.height} --set channels={spec.channels})"
            )
        self.recipe, self.last = run.recipe.float().to(device).eval().requires_grad_(False), layers[-1]
        self.num_features, self.num_classes = self.last.in_features, self.last.out_features
        network = next(iter(run.recipe.networks.values()))
        own_kind = f"{type(network).__name__.lower()}{getattr(run.config.recipe, 'depth', '')}"
        kind = getattr(run.config.recipe, "network", "") or own_kind
        self.label = f"{kind}-{run.data_name}"
        self.weights = hash_of(run.recipe)

    def extract(self, images: Tensor, arithmetic: Arithmetic = "fp32") -> Features:
        caught: list[Tensor] = []
        hook = self.last.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
        try:
            logits = self.recipe.predict({"image": images.float() / 127.5 - 1})["logits"]
        finally:
            hook.remove()
        return Features(caught[-1].flatten(1), logits)


class WithClassifier(FeatureNetwork):
    """Features from one network, and class logits for the Inception Score from a classifier."""

    def __init__(self, network: FeatureNetwork, classifier: Classifier) -> None:
        self.network, self.classifier = network, classifier
        self.label, self.num_features, self.num_classes = network.label, network.num_features, classifier.num_classes
        self.score_label = classifier.label

    def require(self, arithmetic: Arithmetic, device: torch.device) -> None:
        self.network.require(arithmetic, device)

    def extract(self, images: Tensor, arithmetic: Arithmetic = "fp32") -> Features:
        return Features(self.network.extract(images, arithmetic).vectors, self.classifier.extract(images).logits)

    def protocol(self) -> Protocol:
        return {**self.network.protocol(), "classifier": self.classifier.weights}


def choose_features(settings: RunSettings, spec: DataSpec, device: torch.device, open_run: OpenRun) -> FeatureNetwork:
    """Return the network chosen by the settings: Inception, a classification run, or pixels if neither is set.

    If both are set and Inception has no logits, the classifier computes the Inception Score.
    """
    if settings.inception and spec.channels not in (1, 3):
        raise UserError(
            f"--inception: needs images with 1 or 3 channels, not {spec.channels}; leave it out, "
            "or use --set features=RUN with a classifier for such images"
        )
    classifier = _load_classifier(settings.features, spec, device, open_run) if settings.features else None
    if settings.inception:
        network = load_inception(settings.inception, settings.inception_sha256, device)
        return WithClassifier(network, classifier) if classifier and not network.num_classes else network
    return classifier or Pixels(spec)


@lru_cache(maxsize=1)  # loaded once for all evaluations of a run
def _load_classifier(run: str, spec: DataSpec, device: torch.device, open_run: OpenRun) -> Classifier:
    return Classifier(run, open_run(run), spec, device)


def _shape(spec: DataSpec) -> str:
    return f"{spec.width}×{spec.height}×{spec.channels}"
