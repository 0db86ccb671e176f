"""One run in numbers, as a report needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.types import SettingValue
from paceline.evaluation.protocol import Protocol


@dataclass(frozen=True)
class SelectionMetric:
    """The metric that selected the checkpoint, its value there, and the number of evaluated samples."""

    name: str
    value: float
    images: int
    num_evaluated: float | None = None


@dataclass(frozen=True)
class Speed:
    """Training alone, without evaluation, samples and saving."""

    images_per_second: float
    images_per_second_without_loading: float
    num_log_intervals: int
    std_over_log_intervals: float | None  # None for a single interval
    includes_warmup: bool


@dataclass(frozen=True)
class SegmentChange:
    """Where a run resumed with other devices, another strategy or machine, as `name was → is`."""

    images: int
    changed: str


class Point(NamedTuple):
    """A value of a curve."""

    images: int
    seconds: float
    value: float


Curve = Sequence[Point]


@dataclass(frozen=True)
class Run:
    """One run in numbers."""

    folder: str
    recipe: str
    data: str
    fingerprint: str
    strategy: str
    devices: int
    shares_a_gpu: bool
    batch: int
    seed: int
    precision: str
    settings: Mapping[str, SettingValue] = field(repr=False)
    provenance: Mapping[str, str] = field(repr=False)
    hardware: Mapping[str, str]  # and torch: what a speed depends on besides the settings
    images: int
    seconds: float
    finished: bool
    best: tuple[str, str]  # the metric that selects the checkpoint, and its mode: "min" or "max"
    quality: Mapping[str, float | None]  # None was not finite
    selection_metric: SelectionMetric | None
    speed: Speed | None
    seconds_per_epoch: Mapping[str, float]
    gpu: Mapping[str, float]
    losses: Mapping[str, Curve] = field(repr=False)
    selection_curve: Curve = field(repr=False)  # of the metric that selects the checkpoint
    protocols: Mapping[str, Protocol] = field(repr=False)
    samples: str = ""  # the last grid of sample images
    broken_lines: int = 0  # of metrics.jsonl, which are skipped
    segment_changes: Sequence[SegmentChange] = ()
