"""The data model of a report, which is rendered as HTML, Markdown and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from paceline.core.types import SettingValue
from paceline.evaluation.protocol import Protocol


@dataclass(frozen=True)
class StragglerRank:
    """The rank that was most often slower than the others."""

    rank: int
    share: float  # fraction of the log intervals in which it was the straggler
    slowdown: float  # median fraction by which it made a step longer


@dataclass(frozen=True)
class SelectionMetric:
    """The metric that selected the checkpoint, its value, and the number of evaluated samples."""

    name: str
    value: float
    images: int
    num_evaluated: float | None = None
    num_real: int | None = None  # number of real images that generated images are compared with; None if none are


@dataclass(frozen=True)
class Checkpoint:
    """The evaluated checkpoint: after how many training images it was saved, and how it was chosen."""

    images: int
    is_best: bool  # whether it has the best value of the selection metric
    is_last: bool  # whether it was saved at the end of the run
    num_tested: float | None  # number of samples in the test split; None if there is no test result


@dataclass(frozen=True)
class Speed:
    """Training throughput, excluding evaluation, samples and saving."""

    images_per_second: float
    images_per_second_without_loading: float
    num_log_intervals: int
    std_over_log_intervals: float | None  # None if there is only one log interval
    includes_warmup: bool


@dataclass(frozen=True)
class SegmentChange:
    """A point where a run resumed with different settings or hardware, listed in `changed` as `name old → new`."""

    images: int
    changed: str


class Point(NamedTuple):
    """A point on a curve."""

    images: int
    seconds: float
    value: float


Curve = Sequence[Point]


class SampleFile(NamedTuple):
    """A file with sample images that were generated after `images` training images."""

    images: int
    path: str


@dataclass(frozen=True)
class Run:
    """The data that a report uses from one run."""

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
    hardware: Mapping[str, str]  # hardware and torch version, which affect speed
    images: int
    seconds: float
    finished: bool
    best: tuple[str, str]  # metric that selects the checkpoint, and its mode: "min" or "max"
    quality: Mapping[str, float | None]  # metrics by name; None for NaN and infinity
    selection_metric: SelectionMetric | None
    speed: Speed | None
    seconds_per_epoch: Mapping[str, float]
    gpu: Mapping[str, float]
    losses: Mapping[str, Curve] = field(repr=False)
    selection_curve: Curve = field(repr=False)  # values of the selection metric
    protocols: Mapping[str, Protocol] = field(repr=False)
    checkpoint: Checkpoint | None = None  # None if nothing was evaluated
    samples: Sequence[SampleFile] = ()
    real_images: str = ""  # path of a grid of training images, for comparison with generated ones
    broken_lines: int = 0  # number of damaged lines in metrics.jsonl, which are skipped
    segment_changes: Sequence[SegmentChange] = ()
    side_by_side: bool = False  # whether other runs were trained at the same time
    num_threads: int | None = None  # CPU threads per process; None if the run did not record it
    load_average: float | None = None  # mean load average of the host during the run
    straggler: StragglerRank | None = None
    profile: str = field(default="", repr=False)  # the text of its profile; empty unless the run was profiled
    speed_run: str = ""  # folder of a separate run in which the speed was measured


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
    extras: Mapping[str, str]  # settings and hardware that distinguish this group, by name
    differences: Mapping[str, str]  # everything that distinguishes this group from others, by column heading
    family: str  # identifier shared by all groups that differ only in strategy and devices
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
    num_threads: int | None  # CPU threads per process; None if unknown or not the same in all runs
    load_average: float | None  # the runs' highest mean load average of the host while the speed was measured
    was_busy: bool  # whether more processes than cores were running or waiting while the speed was measured
    images_per_second_without_loading: Summary | None
    seconds: Summary
    seconds_per_epoch: Mapping[str, float]
    gpu: Mapping[str, float]
    scaling: Scaling | None = None


@dataclass(frozen=True)
class Recommendation:
    """The recommended group."""

    group: str
    tied: Sequence[str]  # groups that are as fast as the fastest, within the spread of their speeds
    best: str | None  # group with the best quality; None if some groups have no quality metric
    equal_quality: Sequence[str]
    worse: Mapping[str, float]  # how much worse the other groups are than the best
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
        differences = [Difference(**one) for one in content["differences"]]
        finite = [one if math.isfinite(one.value or 0.0) else replace(one, value=None) for one in differences]
        return cls(str(content["description"]), finite)  # JSON has no NaN

    @property
    def holds(self) -> bool:
        """Whether every difference is finite and within its tolerance."""
        return all(one.value is not None and one.value <= one.tolerance for one in self.differences)

    def __str__(self) -> str:
        values = [one.value for one in self.differences if one.value is not None]
        largest = f"largest difference {max(values):.1e}" if values else "no difference measured"
        return f"{'the weights agree' if self.holds else 'the weights differ'}, {largest}"


@dataclass(frozen=True)
class Metric:
    """The metric that selects checkpoints, and the metric reported alongside it."""

    name: str
    reported: str
    mode: str  # "min" if lower values are better, otherwise "max"


@dataclass(frozen=True)
class Rung:
    """The speed of the training step after one more cost was added, and the size of that cost."""

    name: str
    images_per_second: float
    share: float = 0.0  # fraction of the time per image that this cost takes
    gain: float = 0.0  # relative speedup from removing only this cost


@dataclass(frozen=True)
class Explanation:
    """The speed of the training step as costs are added one at a time, and the size of each cost."""

    devices: int
    weak: bool  # whether the batch per device is the same as on one device
    rungs: Sequence[Rung]
    largest_cost: str | None  # name of the rung that adds the largest cost; None if there is no cost
    gain: float  # relative speedup from removing the largest cost
    efficiency: float


class Sample(NamedTuple):
    """A grid of sample images."""

    caption: str
    path: str


@dataclass(frozen=True)
class Report:
    """The contents of a report. Mappings are keyed by group ID, except `runs` (by folder) and `parity` (by recipe)."""

    title: str
    subtitle: Sequence[str]
    command: str
    metric: Metric
    subject: str  # what the groups differ in, as a column heading
    groups: Mapping[str, Group]
    best_group: str | None  # group with the best selection metric
    cells: Sequence[Cell]
    counts: Mapping[str, int]  # how many runs were requested, how many have results ("done") and how many do not
    runs: Mapping[str, Run]
    recommendation: Recommendation | None
    scaling_costs: Mapping[str, Explanation]
    time_split: Mapping[str, Mapping[str, float]]  # seconds per epoch for each activity, and their total
    parity: Mapping[str, Parity]
    samples: Sequence[Sample]  # real images if there are any, then the last samples of each group
    progress: Mapping[str, Sequence[Sample]]  # samples during training by the label of their run
    provenance: Mapping[str, str]
    settings: Mapping[str, SettingValue]  # settings with the same value in all runs
    not_measured: Sequence[str]
