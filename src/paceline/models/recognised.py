"""A network that was recognised from its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from paceline.core.types import SettingValue


@dataclass(frozen=True)
class RecognisedNetwork:
    """The settings that create a network, what it computes, and its weights."""

    network: str  # PROVIDER:ARCHITECTURE
    arguments: Mapping[str, SettingValue]
    channels: int  # of its input and its output
    scale: int  # height and width of the output relative to the input
    tensors: Mapping[str, Tensor]
    num_left_out: int = 0  # tensors in the file that can be computed, such as masks and merged convolutions
