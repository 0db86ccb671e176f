"""Networks from other libraries, selected by name, such as `timm:convnext_tiny`, or recognised from their weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from types import ModuleType

import torch
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
        provider, lower = self.name.partition(":")[0], {other.lower(): other for other in architectures}
        name = self.architecture.lower()
        starting = sorted((other for other in lower if name and other.startswith(name)), key=len)
        close = dict.fromkeys([*get_close_matches(name, lower, n=MAX_NAMES), *starting])
        shown = [f"{provider}:{other}" for other in [lower[one] for one in close] or sorted(architectures)][:MAX_NAMES]
        hint = f"did you mean {' or '.join(shown)}?" if close else f"examples: {', '.join(shown)}"
        return UserError(f"network={self.name}: {provider} has no network of this name; {hint}")

    def check_reserved(self, reserved: Mapping[str, str]) -> None:
        """Raise UserError for arguments that cannot be set; `reserved` maps each to what to do instead."""
        for argument in self.arguments:
            if argument in reserved:
                raise UserError(f"network_args.{argument}: cannot be set; {reserved[argument]}")

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return the network that `make` creates; turn its exceptions into a UserError."""
        try:
            return make()
        except UserError:
            raise
        except Exception as error:
            raise self.failed("cannot be built", error, "check network_args") from None

    def failed(self, problem: str, error: Exception, advice: str) -> UserError:
        """Return the error for an exception that another library raised; `advice` is what the user can do."""
        given = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        reason = " ".join(str(error).split())[:MAX_REASON_LENGTH]
        arguments = f" with network_args {given}" if given else ""
        return UserError(f"network={self.name}: {problem}{arguments} ({type(error).__name__}: {reason}); {advice}")


@dataclass(frozen=True)
class RecognisedNetwork:
    """The settings that create a network, what it computes, and its weights."""

    network: str  # PROVIDER:ARCHITECTURE
    arguments: Mapping[str, SettingValue]
    channels: int  # of its input and its output
    scale: int  # height and width of the output relative to the input
    tensors: Mapping[str, Tensor]


# A provider is the prefix of its networks' names, a package and an extra of Paceline. A module in this folder
# defines `make_network(choice, task)`. The value tells whether the networks are classifiers; a module with other
# networks also defines `recognise(state, path)`.
PROVIDERS = {"timm": True, "spandrel": False}
RECOGNISERS = [provider for provider, classifies in PROVIDERS.items() if not classifies]


def make_network(choice: NetworkChoice, task: NetworkTask) -> nn.Module:
    """Return a network with random weights; raise UserError if it does not exist or does not fit the task."""
    provider = load_classifiers(choice.name) if task.num_classes else _load(choice.name)
    network: nn.Module = provider.make_network(choice, task)
    return network


def load_classifiers(name: str) -> ModuleType:
    """Import the provider of a classifier; raise UserError if its networks map images to images."""
    module = _load(name)
    if not PROVIDERS[name.partition(":")[0]]:
        raise UserError(f"network={name}: maps images to images; this recipe needs a classifier, such as timm:resnet18")
    return module


def recognise(state: Mapping[str, Tensor], path: str) -> RecognisedNetwork | None:
    """Return the network that weights from a file belong to, or None if no installed provider has such a network."""
    for provider in RECOGNISERS:
        if is_installed(provider):
            recognised: RecognisedNetwork | None = _import(provider).recognise(state, path)
            if recognised is not None:
                return recognised
    return None


def missing_recognisers() -> str:
    """Return which packages could recognise more networks, for a message; empty if all are installed."""
    absent = [missing(provider, provider) for provider in RECOGNISERS if not is_installed(provider)]
    return f"; to recognise more networks: {'; '.join(absent)}" if absent else ""


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


def first_keys(keys: Iterable[str]) -> str:
    """Return the names of a few tensors, for a message."""
    keys = list(keys)
    return f"(its tensors: {', '.join(keys[:NUM_KEYS])}{', …' * (len(keys) > NUM_KEYS)})"


def run_copy(network: nn.Module, size: tuple[int, int, int, int], *, train: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a network's output for images of this size, and the copies of its tensors that it was computed with."""
    try:
        return _run_copy(network, size, torch.device("meta"), train)  # computes shapes only, which takes little time
    except Exception:  # a network may not support tensors without data
        with torch.random.fork_rng(devices=[]):
            return _run_copy(network, size, torch.device("cpu"), train)


def _run_copy(
    network: nn.Module, size: tuple[int, int, int, int], device: torch.device, train: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    # Copies, because normalisation layers update their statistics.
    named = chain(network.named_parameters(), network.named_buffers())
    copies = {
        name: tensor.detach().to(device, copy=True).requires_grad_(isinstance(tensor, nn.Parameter))
        for name, tensor in named
    }
    was_training, dtype = network.training, next(network.parameters()).dtype
    network.train(train)
    try:
        with torch.set_grad_enabled(train), device:
            result = torch.func.functional_call(network, copies, (torch.zeros(size, device=device, dtype=dtype),))
    finally:
        network.train(was_training)
    return result, copies
