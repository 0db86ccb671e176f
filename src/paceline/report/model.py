"""The model of a report: built once, then rendered as HTML, as Markdown and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.contracts.step_ladder import StepLadder
from paceline.core.types import SettingValue
from paceline.report.as_json import OPTIONAL
from paceline.report.run import Run, SegmentChange
from paceline.report.step_ladder import Explanation


@dataclass
class Cell:
    """One requested run, and its outcome."""

    name: str
    recipe: str
    strategy: str
    devices: int
    batch: str
    seed: int
    state: str = "done"  # or "planned", "failed", "unfinished", "not measured"
    reason: str = ""
    run: Run | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Summary:
    """Values of several seeds; `std` is their sample standard deviation, None for a single one."""

    mean: float
    std: float | None
    n: int
    values: Sequence[float]


@dataclass(frozen=True)
class SpeedSpread:
    """How far a speed varies, and over what; None and nothing where that is unknown."""

    std: float | None
    over: str


@dataclass(frozen=True)
class Scaling:
    """Speed relative to one device, with the same batch (strong) or the same batch per device (weak)."""

    kind: str
    baseline: str  # the id of the group on one device
    speedup: float
    efficiency: float


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    id: str
    label: str
    recipe: str
    ladder_name: str  # the name that step ladders have
    extras: Mapping[str, str]  # other settings and hardware that distinguish groups
    family: str  # of groups that differ only in where they ran
    data: str
    strategy: str
    devices: int
    shares_a_gpu: bool
    batch: int
    precision: str
    n: int
    seeds: Sequence[int]
    runs: Sequence[str]
    quality: Mapping[str, Summary]
    selection_metric: Summary | None
    num_evaluated: float | None  # samples of the split that selects the checkpoint
    images_per_second: Summary | None
    speed_spread: SpeedSpread
    includes_warmup: bool
    more_processes_than_cores: bool
    images_per_second_without_loading: Summary | None
    seconds: Summary
    seconds_per_epoch: Mapping[str, float]
    gpu: Mapping[str, float]
    scaling: Scaling | None


@dataclass(frozen=True)
class WorseGroup:
    """How far a group's quality is behind the best, and its speed relative to the recommended group."""

    gap: float
    relative_speed: float


@dataclass(frozen=True)
class Recommendation:
    """The group to use; `max_gap` and `worse` are None where quality was not measured for all groups."""

    group: str
    fastest: str
    tied: Sequence[str]  # as fast as the fastest
    best: str | None  # in quality
    equal_quality: Sequence[str]
    max_gap: float | None = field(metadata=OPTIONAL)  # of those to the best
    worse: Mapping[str, WorseGroup] | None = field(metadata=OPTIONAL)
    several_seeds: bool  # every group has several seeds
    unevaluated: Sequence[str]


@dataclass(frozen=True)
class Difference:
    """How far one network is from its reference under one strategy; None is not finite."""

    strategy: str
    kind: str
    network: str
    value: float | None
    tolerance: float
    worst: str  # the first tensor beyond the tolerance, if any


@dataclass(frozen=True)
class Parity:
    """Whether strategies give the same weights."""

    description: str
    differences: Sequence[Difference]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Parity:
        """Return what `paceline verify --json` wrote; raise KeyError, TypeError or ValueError for anything else."""
        found = [Difference(**one) for one in content["differences"]]
        return cls(str(content["description"]), [_finite(one) for one in found])

    @property
    def holds(self) -> bool:
        """Whether every difference is within its tolerance; one that is not finite is not."""
        return all(one.value is not None and one.value <= one.tolerance for one in self.differences)


def _finite(one: Difference) -> Difference:
    value = one.value if one.value is not None and math.isfinite(one.value) else None  # JSON has no NaN
    return Difference(one.strategy, one.kind, one.network, value, one.tolerance, one.worst)


@dataclass(frozen=True)
class Metric:
    """The metric that selects checkpoints, and the one that is reported with it."""

    name: str
    reported: str
    mode: str  # "min" or "max"


@dataclass(frozen=True)
class Counts:
    """Runs that were requested, that have numbers, and that have none."""

    requested: int
    done: int
    missing: int


@dataclass(frozen=True)
class ResumedRun:
    """A run that resumed in another segment."""

    run: str
    changes: Sequence[SegmentChange]


@dataclass(frozen=True)
class Sample:
    """A grid of sample images."""

    caption: str
    path: str


TimeSplit = Mapping[str, float]  # seconds per epoch by part, and their total


@dataclass(frozen=True)
class Report:
    """All numbers of a report, by the id of a group or the folder of a run."""

    title: str
    subtitle: Sequence[str]
    command: str
    metric: Metric
    groups: Mapping[str, Group]
    cells: Sequence[Cell]
    counts: Counts
    runs: Mapping[str, Run]
    resumed_runs: Sequence[ResumedRun]
    recommendation: Recommendation | None
    step_ladders: Mapping[str, StepLadder]
    scaling_costs: Mapping[str, Explanation]
    scaling_costs_note: str
    parity: Mapping[str, Parity]
    samples: Sequence[Sample]
    provenance: Mapping[str, str]
    settings: Mapping[str, SettingValue]  # that are the same in all runs
    best_group: str | None  # by the metric that selects checkpoints
    time_split: Mapping[str, TimeSplit]
    time_split_note: str
    not_measured: Sequence[str]
