"""Networks from other libraries, selected by name, such as `timm:convnext_tiny`, or recognised from their weights."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Protocol, cast

from torch import Tensor, nn

from paceline.core.errors import UserError, missing, unknown
from paceline.core.registry import is_installed
from paceline.core.types import SettingValue

MAX_NAMES = 5  # maximum number of similar names in an error message
MAX_REASON_LENGTH = 200  # maximum length of another library's error message inside ours


@dataclass(frozen=True)
class NetworkTask:
    """The input and output of a network: images to one logit per class, or images to images."""

    in_channels: int
    height: int  # height and width of the training images in pixels
    width: int
    num_classes: int = 0  # number of logits; 0 if the output is an image
    out_channels: int = 0  # channels of the output image; 0 if the output is logits
    scale: int = 1  # height and width of the output image relative to the input


@dataclass(frozen=True)
class NetworkChoice:
    """The value of the settings `network` and `network_args`."""

    name: str  # PROVIDER:ARCHITECTURE
    arguments: Mapping[str, SettingValue]

    @property
    def architecture(self) -> str:
        """The name of the network without its provider."""
        return self.name.partition(":")[2]

    def unknown(self, architectures: Collection[str]) -> UserError:
        """Return the error for an architecture that the provider does not have, with the most similar names."""
        provider = self.name.partition(":")[0]
        close = _similar(self.architecture, architectures)
        hint = (
            f"did you mean {' or '.join(f'{provider}:{name}' for name in close)}?" if close else _listed(architectures)
        )
        return UserError(f"network={self.name}: {provider} has no network of this name; {hint}")

    def check_reserved(self, reserved: Mapping[str, str]) -> None:
        """Raise UserError for arguments that cannot be set; `reserved` maps each to what to do instead."""
        for argument in self.arguments:
            if argument in reserved:
                raise UserError(f"network_args.{argument}: cannot be set; {reserved[argument]}")

    def build(self, make: Callable[[], nn.Module], accepted: Callable[[], Collection[str]]) -> nn.Module:
        """Return the network that `make` creates; turn its exceptions into a UserError.

        `accepted` returns the names of the network's arguments, or nothing if it accepts any name. It is called only
        if `make` fails.
        """
        try:
            return make()
        except UserError:
            raise
        except Exception as error:
            names = accepted()
            for argument in self.arguments:
                if names and argument not in names:
                    close = _similar(argument, names)
                    hint = f"did you mean {' or '.join(close)}?" if close else _listed(names)
                    raise UserError(f"network_args.{argument}: {self.name} has no such argument; {hint}") from None
            raise self.failed("cannot be built", error, "check network_args") from None

    def failed(self, problem: str, error: Exception, advice: str) -> UserError:
        """Return the error for an exception that another library raised; `advice` is what the user can do."""
        given = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        reason = " ".join(str(error).split())[:MAX_REASON_LENGTH]
        arguments = f" with network_args {given}" if given else ""
        return UserError(f"network={self.name}: {problem}{arguments} ({type(error).__name__}: {reason}); {advice}")


def _similar(name: str, names: Collection[str]) -> list[str]:
    """Return the names that start with a name or are spelled like it, ignoring case."""
    lower = {other.lower(): other for other in names}
    starting = sorted((other for other in lower if name and other.startswith(name.lower())), key=len)
    close = get_close_matches(name.lower(), lower, n=MAX_NAMES, cutoff=0.6)
    return [lower[other] for other in dict.fromkeys([*close, *starting])][:MAX_NAMES]


def _listed(names: Collection[str]) -> str:
    shown = sorted(names)[:MAX_NAMES]
    return f"examples: {', '.join(shown)}" if len(names) > MAX_NAMES else f"choose from: {', '.join(shown)}"


@dataclass(frozen=True)
class RecognisedNetwork:
    """The settings that create a network, what it computes, and its weights."""

    network: str  # PROVIDER:ARCHITECTURE
    arguments: Mapping[str, SettingValue]
    channels: int  # of its input and its output
    scale: int  # height and width of the output relative to the input
    tensors: Mapping[str, Tensor]
    num_left_out: int = 0  # tensors in the file that can be computed, such as masks and merged convolutions


# A provider is the prefix of its networks' names, a package and an extra of Paceline. A module in this folder
# defines `make_network(choice, task)`. The value tells whether the networks are classifiers: such a module implements
# `Classifiers`, and any other one defines `recognise(state, path)`.
PROVIDERS = {"timm": True, "spandrel": False}


class Classifiers(Protocol):
    """The functions of a module with classifiers. They raise UserError for unusable names and arguments."""

    def make_network(self, choice: NetworkChoice, task: NetworkTask) -> nn.Module:
        """Return a network with random weights."""

    def make_pretrained(self, choice: NetworkChoice, task: NetworkTask, weights: dict[str, Tensor] | None) -> nn.Module:
        """Return a network with the published weights, or with `weights` from a file for that network.

        Layers whose shape depends on the data, such as the last layer, are adapted or newly initialised.
        """

    def check_input(self, network: nn.Module, choice: NetworkChoice, task: NetworkTask) -> None:
        """Raise UserError if a network cannot process images of the task's size."""

    def describe_weights(self, choice: NetworkChoice, weights: Mapping[str, Tensor], size_px: int) -> NetworkTask:
        """Return the task that weights are for; `size_px` is the image size, or 0 for the usual one."""

    def input_statistics(self, choice: NetworkChoice) -> tuple[Sequence[float], Sequence[float]]:
        """Return the mean and standard deviation per channel of the training images, as values in [0, 1]."""


def make_network(choice: NetworkChoice, task: NetworkTask) -> nn.Module:
    """Return a network with random weights; raise UserError if it does not exist or does not fit the task."""
    if task.num_classes:
        return load_classifiers(choice.name).make_network(choice, task)
    network: nn.Module = _load(choice.name).make_network(choice, task)
    return network


def load_classifiers(name: str) -> Classifiers:
    """Import the provider of a classifier; raise UserError if its networks map images to images."""
    module = _load(name)
    if not PROVIDERS[name.partition(":")[0]]:
        raise UserError(f"network={name}: maps images to images; this recipe needs a classifier, such as timm:resnet18")
    return cast(Classifiers, module)


def recognise(state: Mapping[str, Tensor], path: str) -> RecognisedNetwork | None:
    """Return the network that weights from a file belong to, or None if no installed provider has such a network."""
    for provider in _recognisers():
        if is_installed(provider):
            found: RecognisedNetwork | None = _import(provider).recognise(state, path)
            if found is not None:
                return found
    return None


def missing_recognisers() -> str:
    """Return which packages could recognise more networks, for a message; empty if all are installed."""
    absent = [missing(provider, provider) for provider in _recognisers() if not is_installed(provider)]
    return f"; to recognise more networks: {'; '.join(absent)}" if absent else ""


def _recognisers() -> list[str]:
    return [provider for provider, classifies in PROVIDERS.items() if not classifies]


def _load(name: str) -> ModuleType:
    """Import the provider of a network."""
    provider, _, architecture = name.partition(":")
    if not architecture:
        raise UserError(f"network={name}: expected PROVIDER:NAME; providers: {', '.join(PROVIDERS)}")
    if provider not in PROVIDERS:
        raise UserError(f"network={name}: {unknown('provider', provider, PROVIDERS)}")
    if not is_installed(provider):
        raise UserError(f"network={name}: {missing(provider, provider)}")
    return _import(provider)


def _import(provider: str) -> ModuleType:
    return importlib.import_module(f"paceline.models.{provider}_networks")


NUM_KEYS = 4  # tensors listed in a message

# A network is recognised if each pattern matches the beginning of a tensor's name. The first match counts.
ARCHITECTURES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("RRDBNet (ESRGAN, Real-ESRGAN; try --recipe esrgan)", (r"(RRDB_trunk|body)\.0\.(RDB|rdb)1\.conv1\.",)),
    ("RRDBNet (ESRGAN; try --recipe esrgan)", (r"model\.1\.sub\.0\.RDB1\.",)),
    ("HAT", (r"layers\.0\.residual_group\.blocks\.0\.conv_block\.",)),
    ("SwinIR", (r"layers\.0\.residual_group\.blocks\.0\.attn\.",)),
    ("RCAN", (r"body\.0\.body\.0\.body\.0\.", r"body\.0\.body\.0\.body\.3\.")),
    ("EDSR", (r"head\.0\.weight", r"body\.0\.body\.0\.weight", r"tail\.")),
    ("EDSR or MSRResNet (BasicSR)", (r"conv_first\.", r"body\.0\.conv1\.", r"conv_last\.")),
    ("SRVGGNetCompact (Real-ESRGAN)", (r"body\.0\.weight", r"body\.1\.weight", r"body\.2\.weight")),
    ("NAFNet", (r"intro\.weight", r"encoders\.0\.0\.", r"ending\.weight")),
    ("Restormer", (r"patch_embed\.proj\.weight", r"encoder_level1\.0\.attn\.")),
    ("a pix2pix or CycleGAN generator (try --recipe translation)", (r"model\.model\.\d|model\.\d+\.conv_block\.",)),
    ("StyleGAN", (r"(.*\.)?(synthesis\.b4|mapping\.fc0|g_mapping|style\.1)\.",)),
    ("a diffusion U-Net", (r"down_blocks\.0\.resnets\.|input_blocks\.0\.0\.|model\.diffusion_model\.",)),
    ("a vision transformer", (r"(cls_token|class_token|pos_embed)$",)),
    ("a ResNet classifier (timm or torchvision)", (r"layer1\.0\.conv1\.", r"layer4\.0\.")),
    ("a VGG classifier", (r"features\.0\.weight", r"classifier\.0\.weight")),
)


def check_architecture(keys: Iterable[str], path: Path, supported: str) -> None:
    """Raise UserError with the hint `supported` if the tensors belong to a known network that an importer rejects."""
    keys = list(keys)
    for name, patterns in ARCHITECTURES:
        if all(any(re.match(pattern, key) for key in keys) for pattern in patterns):
            raise UserError(f"{path}: contains {name}; {supported}")


def first_keys(keys: Iterable[str]) -> str:
    """Return the names of a few tensors, for a message."""
    keys = list(keys)
    return f"(its tensors: {', '.join(keys[:NUM_KEYS])}{', …' * (len(keys) > NUM_KEYS)})"
