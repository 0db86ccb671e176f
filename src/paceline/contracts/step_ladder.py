"""The step ladder: the speed of a training step as costs such as communication are added one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.core.types import JsonObject


@dataclass(frozen=True)
class MeasuredRung:
    """The speed of one variant of the training step: median, 10th and 90th percentiles over n blocks of steps."""

    name: str
    images_per_second: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class StepLadder:
    """Speeds of a training step, measured while adding one cost at a time, from one device to all devices."""

    devices: int
    batch: int
    rungs: tuple[MeasuredRung, ...]
    gradient_bytes: dict[str, int]  # size of each phase's gradients

    def to_json(self) -> JsonObject:
        """Return the measurements as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> StepLadder:
        """Parse the output of `to_json`; raise KeyError, TypeError or ValueError if it is invalid."""
        rungs = tuple(MeasuredRung(**rung) for rung in content["rungs"])
        return cls(int(content["devices"]), int(content["batch"]), rungs, dict(content["gradient_bytes"]))
