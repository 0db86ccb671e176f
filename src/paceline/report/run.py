"""Data classes for one run in a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.core.types import SettingValue
from paceline.evaluation.protocol import Protocol
from paceline.runs.profile_summary import ProfileSummary


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
    profile: ProfileSummary | None = field(default=None, repr=False)  # None unless the run was profiled
    speed_run: str = ""  # folder of a separate run in which the speed was measured
