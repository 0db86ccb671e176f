"""The content of a checkpoint: tensors, and the values in state.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from torch import Tensor

from paceline.core.types import JsonObject

INVALID = (ValueError, KeyError, TypeError, OverflowError)
ScalerState = Mapping[str, float]  # state of a GradScaler; empty if it is disabled


@dataclass(frozen=True)
class Best:
    """The best value so far of the metric that selects checkpoints."""

    name: str  # name of the metric, with its label in [brackets]
    value: float
    images: int  # images seen at the checkpoint with this value


@dataclass(frozen=True)
class CheckpointNumbers:
    """The state of a run that is not stored as tensors."""

    best: Best | None = None
    evaluated_at: int = -1  # images seen at the last evaluation; -1 if there was none
    scalers: Mapping[str, ScalerState] = field(default_factory=dict)  # keyed by network name

    def to_json(self) -> JsonObject:
        """Return the values as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: object, images: int) -> CheckpointNumbers:
        """Parse the values for the checkpoint at `images`; raise one of the errors in `INVALID` if any is invalid."""
        if not isinstance(content, dict):
            raise TypeError("the content is not a JSON object")
        if content["images"] != images or type(content["images"]) is not int:
            raise ValueError(f"`images` is {content['images']!r}, but the folder is named {images}")
        scalers = content["scalers"]
        if not isinstance(scalers, dict):
            raise TypeError("`scalers` is not a JSON object")
        evaluated_at = _count(content["evaluated_at"], "evaluated_at", -1, images)
        return cls(_best(content["best"], images), evaluated_at, {name: _scaler(one) for name, one in scalers.items()})


@dataclass(frozen=True)
class Rows:
    """Which rows of a tensor a process has, if the tensor is divided among the processes."""

    first: int  # index of the first row
    shape: tuple[int, ...]  # shape of the whole tensor


@dataclass(frozen=True)
class Snapshot:
    """Everything that a checkpoint stores so that a run can resume."""

    images: int
    weights: dict[str, Tensor]  # weights of all networks; EMAs are named ema/NETWORK.PARAMETER
    state: dict[str, Tensor]  # optimizer state, and signals (scalars passed between phases)
    numbers: CheckpointNumbers
    rows: Mapping[str, Rows] = field(default_factory=dict)  # by tensor name; tensors that are not listed are whole

    @property
    def best_images(self) -> int:
        """The number of images seen at the best checkpoint, or at this one if none has been evaluated."""
        return self.numbers.best.images if self.numbers.best else self.images


def _best(content: object, images: int) -> Best | None:
    if content is None:
        return None
    if not isinstance(content, dict) or not isinstance(content["name"], str):
        raise TypeError("`best` is not a JSON object that contains a name")
    value = _number(content["value"], "best.value")
    return Best(content["name"], value, _count(content["images"], "best.images", 0, images))


def _scaler(content: object) -> ScalerState:
    if not isinstance(content, dict):
        raise TypeError("`scalers` contains a value that is not a JSON object")
    for name, value in content.items():
        if not math.isfinite(_number(value, f"a scaler's {name}")):
            raise ValueError(f"a scaler's {name} is {value}: expected a finite number")
    return content


def _count(value: object, name: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:  # `isinstance` would accept a bool
        raise ValueError(f"{name} is {value!r:.40}: expected a whole number from {low} to {high}")
    return value


def _number(value: object, name: str) -> float:
    """Return a number as a float; it may be infinite, like the PSNR of identical images."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise ValueError(f"{name} is {value!r:.40}: expected a number")
    return float(value)  # raises OverflowError for a huge int
