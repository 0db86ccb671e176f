"""A network that the user selects by name with arguments, what it must compute, and how its errors are reported."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from torch import nn

from paceline.core.errors import UserError
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
