"""The data model of a report, which is rendered as HTML, Markdown and JSON."""

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
    """One requested run and its outcome."""

    name: str
    recipe: str
    strategy: str
    devices: int
    batch: str
    seed: int
    state: str = "done"  # one of "done", "planned", "failed", "unfinished", "not measured"
    reason: str = ""
    run: Run | None = field(default=None, repr=False)
    command: str = ""  # command that trains the run
    label: str = ""  # name in the report if the user chose the run by its folder

    @property
    def kind(self) -> str:
        """The name without the seed."""
        return self.name.partition("-seed")[0]


@dataclass(frozen=True)
class Summary:
    """A value across several seeds; `std` is the sample standard deviation, or None for a single seed."""

    mean: float
    std: float | None
    n: int
    values: Sequence[float]


@dataclass(frozen=True)
class SpeedSpread:
    """The standard deviation of a speed over "seeds" or "log intervals".

    If it is unknown, `std` is None and `over` is empty.
    """

    std: float | None
    over: str


@dataclass(frozen=True)
class Scaling:
    """Speed relative to one device with the same global batch ("strong") or the same batch per device ("weak")."""

    kind: str
    baseline: str  # ID of the one-device group that this group is compared with
    speedup: float
    efficiency: float


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    id: str
    label: str
    recipe: str
    ladder_name: str  # key of the group's step-time measurement
    extras: Mapping[str, str]  # settings and hardware that distinguish this group, by name
    differences: Mapping[str, str]  # everything that distinguishes this group from others, by column heading
    family: str  # identifier shared by all groups that differ only in strategy and devices
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
    num_evaluated: float | None  # number of samples from which the selection metric was computed
    images_per_second: Summary | None
    speed_spread: SpeedSpread
    includes_warmup: bool
    side_by_side: bool  # whether other runs were trained at the same time; the speed was then measured separately
    more_processes_than_cores: bool
    num_threads: int | None  # CPU threads per process; None if unknown or not the same in all runs
    load_average: float | None  # the runs' highest mean load average of the host while the speed was measured
    was_busy: bool  # whether more processes than cores were running or waiting while the speed was measured
    images_per_second_without_loading: Summary | None
    seconds: Summary
    seconds_per_epoch: Mapping[str, float]
    gpu: Mapping[str, float]
    scaling: Scaling | None


@dataclass(frozen=True)
class WorseGroup:
    """How much worse a group is than the best, and its speed relative to the recommended group."""

    gap: float
    relative_speed: float


@dataclass(frozen=True)
class Recommendation:
    """The recommended group; `max_gap` and `worse` are None if some groups have no quality metric."""

    group: str
    fastest: str
    tied: Sequence[str]  # groups that are as fast as the fastest, within the spread of their speeds
    best: str | None  # group with the best quality
    equal_quality: Sequence[str]
    # Largest difference in quality between the best group and the groups in `equal_quality`.
    max_gap: float | None = field(metadata=OPTIONAL)
    worse: Mapping[str, WorseGroup] | None = field(metadata=OPTIONAL)
    several_seeds: bool  # whether every group has several seeds
    unevaluated: Sequence[str]


@dataclass(frozen=True)
class Difference:
    """How much a network differs from the one that the reference strategy trained; `value` is None if not finite."""

    strategy: str
    kind: str
    network: str
    value: float | None
    tolerance: float
    worst: str  # name of the first tensor above the tolerance; empty if there is none


@dataclass(frozen=True)
class Parity:
    """Whether strategies produce the same weights."""

    description: str
    differences: Sequence[Difference]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Parity:
        """Parse the output of `paceline verify --json`; raise KeyError, TypeError or ValueError if it is invalid."""
        found = [Difference(**one) for one in content["differences"]]
        return cls(str(content["description"]), [_finite(one) for one in found])

    @property
    def holds(self) -> bool:
        """Whether every difference is finite and within its tolerance."""
        return all(one.value is not None and one.value <= one.tolerance for one in self.differences)

    def __str__(self) -> str:
        values = [one.value for one in self.differences if one.value is not None]
        largest = f"largest difference {max(values):.1e}" if values else "no difference measured"
        return f"{'the weights agree' if self.holds else 'the weights differ'}, {largest}"


def _finite(one: Difference) -> Difference:
    value = one.value if one.value is not None and math.isfinite(one.value) else None  # JSON has no NaN
    return Difference(one.strategy, one.kind, one.network, value, one.tolerance, one.worst)


@dataclass(frozen=True)
class Metric:
    """The metric that selects checkpoints, and the metric reported alongside it."""

    name: str
    reported: str
    mode: str  # "min" if lower values are better, otherwise "max"


@dataclass(frozen=True)
class Counts:
    """How many runs were requested, how many of them have results and how many do not."""

    requested: int
    done: int
    missing: int


@dataclass(frozen=True)
class ResumedRun:
    """A run that was resumed with different devices, with a different strategy or on a different machine."""

    run: str
    changes: Sequence[SegmentChange]


@dataclass(frozen=True)
class Sample:
    """A grid of sample images."""

    caption: str
    path: str


@dataclass(frozen=True)
class Gallery:
    """Sample images of one group over the course of training."""

    label: str
    progress: Sequence[Sample]


TimeSplit = Mapping[str, float]  # seconds per epoch for each activity, and their total


@dataclass(frozen=True)
class Report:
    """The contents of a report. Mappings are keyed by group ID, except `runs` (by folder) and `parity` (by recipe)."""

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
    subject: str  # what the groups differ in, as a column heading
    samples: Sequence[Sample]  # real images if there are any, then the last samples of each group
    progress: Sequence[Gallery]
    provenance: Mapping[str, str]
    settings: Mapping[str, SettingValue]  # settings with the same value in all runs
    best_group: str | None  # group with the best selection metric
    time_split: Mapping[str, TimeSplit]
    time_split_note: str
    not_measured: Sequence[str]
