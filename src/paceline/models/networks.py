"""Networks from other libraries, selected by name: `timm:convnext_tiny` or `spandrel:NAFNet`.

A provider is one module in this package with a function `make_network`. It is imported only when one of its networks
is used, since it needs an optional package.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

from torch import Tensor, nn

from paceline.core.errors import UserError, missing, unknown
from paceline.core.installed import is_installed
from paceline.models.network_choice import NetworkChoice, NetworkTask
from paceline.models.recognised import RecognisedNetwork


class Provider(NamedTuple):
    """A library with networks, and the module that creates them for Paceline."""

    # Defines `make_network(choice, task)`. A provider of classifiers also defines the other functions below, with the
    # same arguments.
    module: str
    package: str
    extra: str
    classifies: bool = False  # whether its networks map images to logits, not to images
    recognises_weights: bool = False  # whether the module defines `recognise(state, path)`


PROVIDERS = {
    "timm": Provider("paceline.models.timm_networks", "timm", "timm", classifies=True),
    "spandrel": Provider("paceline.models.spandrel_networks", "spandrel", "spandrel", recognises_weights=True),
}


def make_network(choice: NetworkChoice, task: NetworkTask) -> nn.Module:
    """Return a network with random weights; raise UserError if it does not exist or does not fit the task."""
    load = _load_classifiers if task.num_classes else _load
    network: nn.Module = load(choice.name).make_network(choice, task)
    return network


def check_input(network: nn.Module, choice: NetworkChoice, task: NetworkTask) -> None:
    """Raise UserError if a classifier from `make_network` cannot process images of the task's size."""
    _load_classifiers(choice.name).check_input(network, choice, task)


def make_pretrained(choice: NetworkChoice, task: NetworkTask, weights: dict[str, Tensor] | None = None) -> nn.Module:
    """Return a network with the provider's published weights, or with `weights` from a file for that network.

    Layers whose shape depends on the data, such as the last layer of a classifier, are adapted or newly initialised.
    """
    network: nn.Module = _load_classifiers(choice.name).make_pretrained(choice, task, weights)
    return network


def describe_weights(choice: NetworkChoice, weights: Mapping[str, Tensor], size_px: int) -> NetworkTask:
    """Return the task that a classifier's weights are for; `size_px` is the image size, or 0 for the usual one."""
    task: NetworkTask = _load_classifiers(choice.name).describe_weights(choice, weights, size_px)
    return task


def input_statistics(choice: NetworkChoice) -> tuple[Sequence[float], Sequence[float]]:
    """Return the mean and standard deviation per channel of a classifier's training images, as values in [0, 1]."""
    mean, std = _load_classifiers(choice.name).input_statistics(choice)
    return mean, std


def recognise(state: Mapping[str, Tensor], path: str) -> RecognisedNetwork | None:
    """Return the network that weights from a file belong to, or None if no installed provider has such a network."""
    for provider in PROVIDERS.values():
        if provider.recognises_weights and is_installed(provider.package):
            found: RecognisedNetwork | None = importlib.import_module(provider.module).recognise(state, path)
            if found is not None:
                return found
    return None


def missing_recognisers() -> str:
    """Return which packages could recognise more networks, for a message; empty if all are installed."""
    providers = [provider for provider in PROVIDERS.values() if provider.recognises_weights]
    absent = [missing(one.package, one.extra) for one in providers if not is_installed(one.package)]
    return f"; to recognise more networks: {'; '.join(absent)}" if absent else ""


def _load_classifiers(name: str) -> ModuleType:
    """Import the provider of a classifier; raise UserError if its networks map images to images."""
    module = _load(name)
    if not PROVIDERS[name.partition(":")[0]].classifies:
        raise UserError(f"network={name}: maps images to images; this recipe needs a classifier, such as timm:resnet18")
    return module


def _load(name: str) -> ModuleType:
    """Import the provider of a network."""
    prefix, _, architecture = name.partition(":")
    if not architecture:
        raise UserError(f"network={name}: expected PROVIDER:NAME; providers: {', '.join(PROVIDERS)}")
    if prefix not in PROVIDERS:
        raise UserError(f"network={name}: {unknown('provider', prefix, PROVIDERS)}")
    provider = PROVIDERS[prefix]
    if not is_installed(provider.package):
        raise UserError(f"network={name}: {missing(provider.package, provider.extra)}")
    return importlib.import_module(provider.module)
