"""The data model of a report, which is rendered as HTML, Markdown and JSON, and how its numbers are written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.core.types import SettingValue
from paceline.evaluation.protocol import Protocol


@dataclass(frozen=True)
class SelectionMetric:
    """The metric that selected the checkpoint, its value, and the number of evaluated samples."""

    name: str
    value: float
    num_evaluated: float | None = None


@dataclass(frozen=True)
class Speed:
    """Training throughput, excluding evaluation, samples and saving."""

    images_per_second: float
    images_per_second_without_loading: float
    num_log_intervals: int
    std_over_log_intervals: float | None  # None if there is only one log interval
    includes_warmup: bool


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
    gpu: Mapping[str, float]
    losses: Mapping[str, Curve] = field(repr=False)
    selection_curve: Curve = field(repr=False)  # values of the selection metric
    protocols: Mapping[str, Protocol] = field(repr=False)
    checkpoint: int | None = None  # the number of training images at the evaluated checkpoint
    samples: Sequence[SampleFile] = ()
    real_images: str = ""  # path of a grid of training images, for comparison with generated ones
    broken_lines: int = 0  # number of damaged lines in metrics.jsonl, which are skipped
    changes: Sequence[str] = ()  # where the run was resumed with other settings or hardware, and with which
    side_by_side: bool = False  # whether other runs were trained at the same time, so that the speed is unknown


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
    speed_std: float | None  # over seeds or, for a single seed, over log intervals; None if unknown
    includes_warmup: bool
    images_per_second_without_loading: Summary | None
    seconds: Summary
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
class Parity:
    """Whether strategies produce the same weights, as written by `paceline verify --json`."""

    description: str
    # Each has a strategy, kind, network, value (None if it is not finite), tolerance and worst tensor.
    differences: Sequence[Mapping[str, Any]]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Parity:
        """Parse the output of `paceline verify --json`; raise KeyError, TypeError or ValueError if it is invalid."""
        differences = [
            {**{name: str(one[name]) for name in ("strategy", "kind", "network", "worst")}}
            | {"value": _finite(one["value"]), "tolerance": float(one["tolerance"])}
            for one in content["differences"]
        ]
        return cls(str(content["description"]), differences)

    @property
    def holds(self) -> bool:
        """Whether every difference is finite and within its tolerance."""
        return all(one["value"] is not None and one["value"] <= one["tolerance"] for one in self.differences)

    def __str__(self) -> str:
        values = [one["value"] for one in self.differences if one["value"] is not None]
        largest = f"largest difference {max(values):.1e}" if values else "no difference measured"
        return f"{'the weights agree' if self.holds else 'the weights differ'}, {largest}"


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)  # JSON has no NaN


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
    cells: Sequence[Cell]
    counts: Mapping[str, int]  # how many runs were requested, how many have results ("done") and how many do not
    runs: Mapping[str, Run]
    recommendation: Recommendation | None
    scaling_costs: Mapping[str, Explanation]
    parity: Mapping[str, Parity]
    samples: Sequence[Sample]  # real images if there are any, then the last samples of each group
    progress: Mapping[str, Sequence[Sample]]  # samples during training by the label of their run
    provenance: Mapping[str, str]
    settings: Mapping[str, SettingValue]  # settings with the same value in all runs
    not_measured: Sequence[str]


NO_VALUE = "–"
DISPLAY_NAMES = {"top1": "top-1", "top5": "top-5"}


def is_share(metric: str) -> bool:
    """Return whether a metric is a percentage of the evaluated samples."""
    return "/top" in metric


def heading_of_metric(name: str) -> str:
    """Return a metric name such as `test/top1` as a column heading: `test top-1, %`."""
    split, _, metric = name.partition("/")
    plain, bracket, label = metric.partition("[")
    where = f" ({label.removesuffix(']')})" if bracket else ""
    return f"{split} {DISPLAY_NAMES.get(plain, plain)}{', %' if is_share(name) else ''}{where}"


def metric_in_text(name: str) -> str:
    """Return a metric name such as `test/top1` for use in a sentence: `test top-1`."""
    return heading_of_metric(name).replace(", %", "")


def metrics_in_order(qualities: Iterable[Iterable[str]], first: str) -> list[str]:
    """Return the names of all metrics without duplicates, starting with the most important one."""
    names = dict.fromkeys(name for quality in qualities for name in quality)
    return sorted(names, key=lambda name: name != first)


def format_of(name: str, value: float | None) -> str:
    """Return the number format of a metric, with more decimals for smaller values."""
    size = abs(value or 0.0)
    if is_share(name):
        return ".2f"
    return ".1f" if size >= 100 else ".2f" if size >= 10 else ".3f" if size >= 1 else ".4f"


def number(value: float | None, spec: str) -> str:
    """Return a number, or a dash if it is unknown."""
    return NO_VALUE if value is None else f"{value:{spec}}"


def with_spread(spec: str, summary: Summary | None) -> str:
    """Return the mean, with ± standard deviation if there are several values."""
    if summary is None:
        return NO_VALUE
    return f"{summary.mean:{spec}}" + ("" if summary.std is None else f" ± {summary.std:{spec}}")


def metric_with_spread(name: str, summary: Summary | None) -> str:
    """Return the mean of a metric, with its spread."""
    return with_spread(format_of(name, summary.mean if summary else None), summary)


def percent(share: float, decimals: int = 0) -> str:
    """Return a fraction as a percentage."""
    return f"{share:.{decimals}%}".replace("%", " %")


def listed(labels: Iterable[str]) -> str:
    """Join labels with commas; labels that contain a comma are quoted."""
    return ", ".join(f"“{label}”" if "," in label else label for label in labels)
