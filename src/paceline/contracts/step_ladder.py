"""The step ladder: the speed of a step as its costs are added one by one. Benchmarking measures it, reports show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.core.types import JsonObject


@dataclass(frozen=True)
class MeasuredRung:
    """The speed of one variant of the step: median, 10th and 90th percentile of n blocks."""

    name: str
    images_per_second: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class StepLadder:
    """Speeds of a step, from one device alone up to the complete training step."""

    devices: int
    batch: int
    rungs: tuple[MeasuredRung, ...]
    gradient_bytes: dict[str, int]  # by phase

    def to_json(self) -> JsonObject:
        """Return the ladder as JSON, for reports to read."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> StepLadder:
        """Return the ladder that `to_json` wrote; raise KeyError, TypeError or ValueError for other content."""
        rungs = tuple(MeasuredRung(**rung) for rung in content["rungs"])
        return cls(int(content["devices"]), int(content["batch"]), rungs, dict(content["gradient_bytes"]))
