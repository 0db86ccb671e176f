"""The content of a checkpoint: tensors, and the values in state.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from torch import Tensor

from paceline.core.types import JsonObject

ScalerState = Mapping[str, float]  # state of a GradScaler; empty if it is disabled


@dataclass(frozen=True)
class Best:
    """The best value so far of the metric that selects checkpoints."""

    name: str  # name of the metric, with its label in [brackets]
    value: float
    images: int  # images seen at that checkpoint


@dataclass(frozen=True)
class CheckpointNumbers:
    """The state of a run that is not stored as tensors."""

    best: Best | None = None
    evaluated_at: int = -1  # images seen at the last evaluation; -1 before the first
    scalers: Mapping[str, ScalerState] = field(default_factory=dict)  # by network

    def to_json(self) -> JsonObject:
        """Return the values as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: JsonObject) -> CheckpointNumbers:
        """Parse the values from a JSON object; raise ValueError, KeyError or TypeError if it is invalid."""
        best, evaluated_at, scalers = content["best"], content["evaluated_at"], content["scalers"]
        if not isinstance(evaluated_at, int) or not isinstance(scalers, dict):
            raise TypeError("evaluated_at or scalers has the wrong type")
        return cls(_best(best), evaluated_at, {name: _scaler(state) for name, state in scalers.items()})


@dataclass(frozen=True)
class Snapshot:
    """Everything that a run needs to resume; nothing else is saved."""

    images: int
    weights: dict[str, Tensor]  # weights of all networks; EMAs are named ema/NETWORK.PARAMETER
    state: dict[str, Tensor]  # optimizer state, and signals between phases
    numbers: CheckpointNumbers

    @property
    def best_images(self) -> int:
        """The images seen at the best checkpoint, or at this one if none has been evaluated."""
        return self.numbers.best.images if self.numbers.best else self.images


def _best(content: object) -> Best | None:
    if content is None:
        return None
    if not isinstance(content, dict):
        raise TypeError("best is not an object")
    return Best(str(content["name"]), float(content["value"]), int(content["images"]))


def _scaler(content: object) -> ScalerState:
    if not isinstance(content, dict):
        raise TypeError("scalers holds a value that is not an object")
    return content
