"""Reads one run's data for a report, using only the run folder."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from paceline.config.resolve import flatten
from paceline.core.text import printable
from paceline.core.types import Scalar, SettingValue
from paceline.evaluation.protocol import Protocol
from paceline.report.model import Point, Run, SampleFile, SelectionMetric, Speed
from paceline.runs.finished_run import readable_config_of
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import REAL_IMAGES, SAMPLES, TRAINING_SECONDS, read_rows
from paceline.runs.record import HARDWARE, changes

LOADING, STEPPING = ("time/data_seconds",), ("time/step_seconds", "time/log_seconds")
SAVING = ("time/save_seconds", "time/sample_seconds")
NOT_TRAINING = ("time/evaluate_seconds", *SAVING)  # parts of an interval that do not count as training
RESUME_SECONDS = 0.5  # a run was stopped between two lines if wall time exceeds run time by more than this


as_words = lru_cache(maxsize=4096)(printable)  # cached, because all lines of metrics.jsonl contain the same names


class Line(NamedTuple):
    """One line of metrics.jsonl."""

    images: int
    seconds: float
    values: Mapping[str, float | None]  # values by name; None for NaN and infinity

    def get(self, name: str) -> float | None:
        """Return a value, or None if the line does not contain it."""
        return self.values.get(name)


class LogInterval(NamedTuple):
    """The time interval that one log line covers."""

    images: int
    line: Line
    settled: bool  # False for the first interval after a start, which includes warm-up

    @property
    def timed_seconds(self) -> float:
        """Sum of the times logged for loading, training steps and logging."""
        return total([self.line], (*LOADING, *STEPPING))

    @property
    def seconds(self) -> float:
        """Duration in seconds, excluding evaluation, samples and saving.

        For an interval with warm-up, this is only `timed_seconds`, because the rest is start-up time.
        """
        if not self.settled:
            return self.timed_seconds
        training, speed = self.line.get(TRAINING_SECONDS), self.line.get("time/images_per_second")
        if training is None and speed:  # Paceline 0.2 logged the speed with evaluation, samples and saving
            training = self.images / speed - total([self.line], NOT_TRAINING)
        return max(self.timed_seconds, training or 0.0)


def total(lines: Iterable[Line], names: Collection[str]) -> float:
    """Return the sum of the values with these names; missing values count as 0."""
    return sum(line.get(name) or 0.0 for line in lines for name in names)


def log_intervals(lines: Sequence[Line], after_gaps: Collection[int] = (), since: int = 0) -> list[LogInterval]:
    """Return a run's log intervals, leaving out those that include warm-up unless all of them do.

    `after_gaps` contains the indices of lines that follow a broken line, so the length of their intervals is unknown.
    `since` is the number of images at which the run's last segment starts. Earlier intervals are left out.
    """
    intervals: list[LogInterval] = []
    images, settled, after_gap = 0, False, False
    for number, line in enumerate(lines):
        after_gap = after_gap or number in after_gaps
        settled = settled and not _resumed(lines[number - 1], line)
        if line.get(STEPPING[0]) is None:
            continue
        settled = settled and images > since
        if not after_gap and line.images > images >= since:
            intervals.append(LogInterval(line.images - images, line, settled))
        images, settled, after_gap = line.images, True, False
    return [interval for interval in intervals if interval.settled] or intervals


def _resumed(before: Line, line: Line) -> bool:
    """Return whether the run was stopped between two lines, so that more wall time than run time passed."""
    was, now = before.get("time"), line.get("time")
    if was is None or now is None:
        return False
    return (now - was) - (line.seconds - before.seconds) > RESUME_SECONDS


def speed_of(intervals: Sequence[LogInterval]) -> Speed | None:
    """Return the training throughput, or None if it cannot be computed."""
    images, seconds = sum(one.images for one in intervals), sum(one.seconds for one in intervals)
    loading = total([one.line for one in intervals], LOADING)
    if not images or seconds <= loading:
        return None
    return Speed(
        images_per_second=images / seconds,
        images_per_second_without_loading=images / (seconds - loading),
        num_log_intervals=len(intervals),
        std_over_log_intervals=_spread(intervals),
        includes_warmup=not all(one.settled for one in intervals),
    )


def _spread(intervals: Sequence[LogInterval]) -> float | None:
    """Return the standard deviation of the speed across intervals, excluding the short, noisy ones at epoch ends."""
    longest = max(one.images for one in intervals)
    speeds = [one.images / one.seconds for one in intervals if 2 * one.images >= longest and one.seconds > 0]
    return statistics.stdev(speeds) if len(speeds) > 1 else None


MAX_POINTS = 150  # maximum number of points per curve; more would not be visible
NOT_LOSSES = {"time", "lr", "ranks", "spread", "gpu", "host", "train", "validation", "test"}  # other groups of metrics
LARGEST_VALUE = 1e300  # limit for numbers, because JSON can contain numbers that overflow a float
TESTED_CHECKPOINT = "test/checkpoint_images"
NOT_QUALITY = {"count", "checkpoint_images"}  # logged with the metrics, but not measures of quality


def read_run(path: str) -> Run:
    """Read a run; raise UserError if the folder is not a run."""
    config = readable_config_of(path)
    folder = RunFolder(Path(path))
    record = folder.read_record(path)
    assert record is not None
    segments = record.segments
    since = segments[-2].until_images if len(segments) > 1 else 0
    provenance = {as_words(name): as_words(text) for name, text in record.provenance.versions_and_hardware.items()}
    lines, after_gaps, broken = _read_lines(folder.path)
    intervals = log_intervals(lines, after_gaps, since)
    run, evaluation = config.run, config.recipe_class.evaluation
    evaluated = _values_of(lines, evaluation.best)
    choose = max if evaluation.mode == "max" else min
    best, selected = choose(evaluated, key=lambda pair: pair[0]) if evaluated else (None, None)
    tested = next((line for line in reversed(lines) if line.get(TESTED_CHECKPOINT) is not None), None)
    source, split = (tested, "test") if tested else (selected, evaluation.split)
    measured = source.values if source else {}
    quality = {
        name: value
        for name, value in measured.items()
        if name.startswith(f"{split}/") and name.split("/")[1] not in NOT_QUALITY
    }
    gpus = run.gpus.split(",") if run.gpus else []
    real_images = folder.path / SAMPLES / f"{REAL_IMAGES}-{0:012}.png"
    return Run(
        folder=as_words(path),
        recipe=as_words(config.recipe_name),
        data=as_words(run.data),
        fingerprint=as_words(record.provenance.data),
        strategy=as_words(record.segment.strategy),
        devices=record.segment.devices,
        shares_a_gpu=len(set(gpus)) < len(gpus),
        batch=int(run.batch_size) if run.batch_size.isdecimal() else 0,
        seed=run.seed,
        precision=run.precision,
        settings={as_words(name): _shown(value) for name, value in flatten(record.settings).items()},
        provenance=provenance,
        # "none" for components that the machine does not have
        hardware={"accelerator": as_words(record.segment.accelerator)}
        | {name: provenance.get(name, "none") for name in HARDWARE},
        images=max((line.images for line in lines), default=0),
        seconds=max((line.seconds for line in lines), default=0.0),
        finished=_has_finished(folder, lines, run.images, run.epochs),
        best=(evaluation.best, evaluation.mode),
        quality=quality,
        selection_metric=_selection(best, selected, evaluation.best),
        checkpoint=int(tested.get(TESTED_CHECKPOINT) or 0) if tested else selected.images if selected else None,
        speed=speed_of(intervals),
        gpu=_gpu([line for line in lines if line.images > since], len(set(gpus)) or record.segment.devices),
        losses=_losses(lines),
        selection_curve=_downsample([Point(line.images, line.seconds, value) for value, line in evaluated]),
        protocols={name: protocol for name in quality if (protocol := _protocol(folder, name))},
        samples=_sample_files(folder.path / SAMPLES),
        real_images=str(real_images) if real_images.is_file() else "",
        broken_lines=broken,
        changes=[
            as_words(f"at {before.until_images:,} images ({', '.join(changes(before, after))})")
            for before, after in pairwise(segments)
        ],
    )


def _sample_files(folder: Path) -> list[SampleFile]:
    """Return a run's sample images in the order in which they were generated."""
    numbers = [(path.stem.removeprefix(f"{SAMPLES}-"), path) for path in folder.glob(f"{SAMPLES}-*.png")]
    return sorted(SampleFile(int(number), str(path)) for number, path in numbers if number.isdecimal())


def _protocol(folder: RunFolder, metric: str) -> Protocol:
    return {as_words(name): _shown(value) for name, value in folder.protocol_of(metric).items()}


def _shown(value: SettingValue) -> Scalar:
    """Return a finite number unchanged, and any other value as text."""
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return as_words(str(value))


def _read_lines(run: Path) -> tuple[list[Line], set[int], int]:
    """Return the valid lines, the indices of those that follow a damaged line, and the number of damaged lines."""
    lines: list[Line] = []
    after_gaps: set[int] = set()
    rows = read_rows(run)
    for row in rows:
        images, seconds = (row.get("images"), row.get("seconds")) if row else (None, None)
        if row is None or images is None or seconds is None or not all(map(_is_plausible, row.values())):
            after_gaps.add(len(lines))
        else:
            lines.append(Line(int(images), seconds, {as_words(name): value for name, value in row.items()}))
    return lines, after_gaps, len(rows) - len(lines)


def _is_plausible(value: float | None) -> bool:
    return value is None or abs(value) < LARGEST_VALUE


def _has_finished(folder: RunFolder, lines: Sequence[Line], images: int, epochs: float) -> bool:
    """Return whether the last checkpoint is at or past the configured length of training."""
    epoch = next((line.images / passed for line in reversed(lines) if (passed := line.get("epoch"))), 0.0)
    length = images or epochs * epoch
    return bool(lines) and bool(length) and max(folder.checkpoints.all(), default=0) >= round(length)


def _full_name(line: Line, metric: str) -> str:
    """Return the full name of a metric in a line, including any [label]; empty if the line does not contain it."""
    return next((name for name in line.values if name.partition("[")[0] == metric), "") if metric else ""


def _values_of(lines: Sequence[Line], metric: str) -> list[tuple[float, Line]]:
    """Return the finite values of a metric, each with its line."""
    return [(value, line) for line in lines if (value := line.get(_full_name(line, metric))) is not None]


def _selection(value: float | None, line: Line | None, metric: str) -> SelectionMetric | None:
    if value is None or line is None:
        return None
    return SelectionMetric(_full_name(line, metric), value, line.get(f"{metric.partition('/')[0]}/count"))


def _gpu(lines: Sequence[Line], num_gpus: int) -> dict[str, float]:
    """Return NVML measurements for the first process's GPU, with its energy multiplied by `num_gpus`."""
    read = [line for line in lines if "gpu/utilisation" in line.values]
    readings: dict[str, float] = {}
    for name in ("utilisation", "power_watts"):
        values = [value for line in read if (value := line.get(f"gpu/{name}")) is not None]
        if values:
            readings[name] = sum(values) / len(values)
    peaks = [peak for line in lines if (peak := line.get("gpu/peak_memory_gib")) is not None]
    if peaks:
        readings["peak_memory_gib"] = max(peaks)
    energy = [(line.images, joules) for line in read if (joules := line.get("gpu/energy_joules"))]
    if len(energy) > 1 and energy[-1][0] > energy[0][0] and energy[-1][1] > energy[0][1]:
        images, joules = energy[-1][0] - energy[0][0], num_gpus * (energy[-1][1] - energy[0][1])
        readings["joules_per_1000_images"] = 1000 * joules / images
    return readings


def _losses(lines: Sequence[Line]) -> dict[str, list[Point]]:
    names = dict.fromkeys(name for line in lines for name in line.values if "/" in name and "/spread" not in name)
    losses = [name for name in names if name.split("/")[0] not in NOT_LOSSES and not name.endswith("_score")]
    return {
        name: _downsample([Point(x.images, x.seconds, value) for x in lines if (value := x.get(name)) is not None])
        for name in losses
    }


def _downsample(points: list[Point]) -> list[Point]:
    """Return at most MAX_POINTS of the points, always including the last."""
    step = -(-len(points) // MAX_POINTS) or 1
    return points[::-1][::step][::-1]
