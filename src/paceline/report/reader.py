"""Reads one run's data for a report, using only the run folder."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from paceline.config.resolve import flatten
from paceline.contracts.recipe import Recipe
from paceline.core.files import read_bounded
from paceline.core.text import printable, printable_lines
from paceline.core.types import Scalar, SettingValue
from paceline.evaluation.protocol import NUM_GENERATED, NUM_REAL, Protocol
from paceline.report.model import (
    Checkpoint,
    Point,
    Run,
    SampleFile,
    SegmentChange,
    SelectionMetric,
    Speed,
    StragglerRank,
)
from paceline.runs.finished_run import readable_config_of
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import (
    EVALUATION_SECONDS,
    REAL_IMAGES,
    SAMPLES,
    STRAGGLER_RANK,
    STRAGGLER_SLOWDOWN,
    TRAINING_SECONDS,
    read_rows,
)
from paceline.runs.profile_summary import PROFILE, SUMMARY_TEXT
from paceline.runs.readings import LOAD_AVERAGE
from paceline.runs.record import HARDWARE, RunRecord, changes

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
    found: list[LogInterval] = []
    images, settled, after_gap = 0, False, False
    for number, line in enumerate(lines):
        after_gap = after_gap or number in after_gaps
        settled = settled and not _resumed(lines[number - 1], line)
        if line.get(STEPPING[0]) is None:
            continue
        settled = settled and images > since
        if not after_gap and line.images > images >= since:
            found.append(LogInterval(line.images - images, line, settled))
        images, settled, after_gap = line.images, True, False
    return [interval for interval in found if interval.settled] or found


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


def seconds_per_epoch(intervals: Sequence[LogInterval], lines: Sequence[Line], since: int = 0) -> dict[str, float]:
    """Return the seconds per epoch that each activity takes, measured by the host's clock.

    Activities whose time is unknown are omitted. Lines before the run's last segment, which starts at `since`
    images, are not used.
    """
    lines = [line for line in lines if line.images > since]
    taken, images = [one.line for one in intervals], sum(one.images for one in intervals)
    last = next((line for line in reversed(lines) if line.get("epoch")), None)
    epoch = last.get("epoch") if last else None
    if not images or last is None or not epoch:
        return {}
    per_epoch = last.images / epoch / images
    epochs = epoch * (1 - since / last.images)
    seconds = {"data": total(taken, LOADING) * per_epoch, "step": total(taken, STEPPING) * per_epoch}
    if all(one.settled for one in intervals):
        seconds["between_steps"] = sum(one.seconds - one.timed_seconds for one in intervals) * per_epoch
    if any(line.get(EVALUATION_SECONDS) is not None for line in lines):
        seconds["evaluation"] = total(lines, [EVALUATION_SECONDS]) / epochs
    if saving := total(lines, SAVING):  # no line includes the last save, because each line is logged before a save
        seconds["saving"] = saving / epochs
    return seconds


def find_straggler(lines: Sequence[Line]) -> StragglerRank | None:
    """Return the rank that was the straggler in most log intervals; None if there was none."""
    found = [
        (int(rank), line.get(STRAGGLER_SLOWDOWN) or 0.0)
        for line in lines
        if (rank := line.get(STRAGGLER_RANK)) is not None
    ]
    counts = Counter(rank for rank, _ in found if rank >= 0)
    if not counts:
        return None
    rank, count = counts.most_common(1)[0]
    return StragglerRank(rank, count / len(found), statistics.median(slow for one, slow in found if one == rank))


def read_profile(run: Path) -> str:
    """Return the text of a run's profile; empty if there is none."""
    try:
        return printable_lines(read_bounded(run / PROFILE / SUMMARY_TEXT, MAX_PROFILE_BYTES).decode(errors="replace"))
    except OSError:
        return ""


MAX_PROFILE_BYTES = 2**16
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
    segment = record.segment
    segment_changes = _segment_changes(record)
    since = segment_changes[-1].images if segment_changes else 0
    provenance = {as_words(name): as_words(text) for name, text in record.provenance.versions_and_hardware.items()}
    lines, after_gaps, broken = _read_lines(folder.path)
    recent = [line for line in lines if line.images > since]
    intervals = log_intervals(lines, after_gaps, since)
    recipe = config.recipe_class
    selection_metric, selected = _select(lines, recipe, folder)
    quality = _quality(lines, recipe, selected)
    run = config.run
    gpus = run.gpus.split(",") if run.gpus else []
    real_images = folder.path / SAMPLES / f"{REAL_IMAGES}-{0:012}.png"
    return Run(
        folder=as_words(path),
        recipe=as_words(config.recipe_name),
        data=as_words(run.data),
        fingerprint=as_words(record.provenance.data),
        strategy=as_words(segment.strategy),
        devices=segment.devices,
        shares_a_gpu=len(set(gpus)) < len(gpus),
        batch=int(run.batch_size) if run.batch_size.isdecimal() else 0,
        seed=run.seed,
        precision=run.precision,
        settings=_settings(record),
        provenance=provenance,
        hardware=_hardware(as_words(segment.accelerator), provenance),
        images=max((line.images for line in lines), default=0),
        seconds=max((line.seconds for line in lines), default=0.0),
        finished=_has_finished(folder, lines, run.images, run.epochs),
        best=(recipe.evaluation.best, recipe.evaluation.mode),
        quality=quality,
        selection_metric=selection_metric,
        checkpoint=_checkpoint(lines, selected),
        speed=speed_of(intervals),
        seconds_per_epoch=seconds_per_epoch(intervals, lines, since),
        gpu=_gpu(recent, len(set(gpus)) or segment.devices),
        losses=_losses(lines),
        selection_curve=_selection_curve(lines, recipe.evaluation.best),
        protocols={name: protocol for name in quality if (protocol := _protocol(folder, name))},
        samples=_sample_files(folder.path / SAMPLES),
        real_images=str(real_images) if real_images.is_file() else "",
        broken_lines=broken,
        segment_changes=segment_changes,
        num_threads=int(provenance["threads"]) if provenance.get("threads", "").isdecimal() else None,
        straggler=find_straggler(recent),
        profile=read_profile(folder.path),
        load_average=_mean_load(recent),
    )


def _sample_files(folder: Path) -> list[SampleFile]:
    """Return a run's sample images in the order in which they were generated."""
    found = [(path.stem.removeprefix(f"{SAMPLES}-"), path) for path in folder.glob(f"{SAMPLES}-*.png")]
    return sorted(SampleFile(int(number), str(path)) for number, path in found if number.isdecimal())


def _settings(record: RunRecord) -> dict[str, SettingValue]:
    return {as_words(name): _shown(value) for name, value in flatten(record.settings).items()}


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


def _segment_changes(record: RunRecord) -> list[SegmentChange]:
    """Return the changes between consecutive segments of the run."""
    pairs = pairwise(record.segments)
    return [SegmentChange(int(one.until_images or 0), as_words(", ".join(changes(one, after)))) for one, after in pairs]


def _hardware(accelerator: str, provenance: Mapping[str, str]) -> dict[str, str]:
    """Return the hardware by name, with "none" for components that the machine does not have."""
    return {"accelerator": accelerator} | {name: provenance.get(name, "none") for name in HARDWARE}


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
    found = [(line.get(_full_name(line, metric)), line) for line in lines]
    return [(value, line) for value, line in found if value is not None]


def _select(
    lines: Sequence[Line], recipe: type[Recipe], folder: RunFolder
) -> tuple[SelectionMetric | None, Line | None]:
    """Return the metric that selected the checkpoint, and its log line; None for both if nothing was evaluated."""
    metric, mode = recipe.evaluation.best, recipe.evaluation.mode
    evaluated = _values_of(lines, metric)
    if not evaluated:
        return None, None
    value, line = (max if mode == "max" else min)(evaluated, key=lambda pair: pair[0])
    count = line.get(f"{metric.partition('/')[0]}/count")
    name = _full_name(line, metric)
    protocol = folder.protocol_of(name)
    num_real = protocol.get(NUM_REAL) if NUM_GENERATED in protocol else None
    return SelectionMetric(name, value, line.images, count, num_real if isinstance(num_real, int) else None), line


def _checkpoint(lines: Sequence[Line], selected: Line | None) -> Checkpoint | None:
    """Return the checkpoint that was evaluated: on the test split if there is one, or else on the selection split."""
    tested = _values_of(lines, TESTED_CHECKPOINT)
    if not tested and selected is None:
        return None
    images = int(tested[-1][0]) if tested else selected.images if selected else 0
    last = max(line.images for line in lines)
    is_best = selected is not None and selected.images == images
    return Checkpoint(images, is_best, images == last, tested[-1][1].get("test/count") if tested else None)


def _mean_load(lines: Sequence[Line]) -> float | None:
    loads = [value for value, _ in _values_of(lines, LOAD_AVERAGE)]
    return sum(loads) / len(loads) if loads else None


def _quality(lines: Sequence[Line], recipe: type[Recipe], selected: Line | None) -> dict[str, float | None]:
    """Return the metrics of the selected checkpoint, on the test split if there is one."""
    tested = [line for line in lines if TESTED_CHECKPOINT in line.values]
    source = tested[-1] if tested else selected
    split = "test" if tested else recipe.evaluation.split
    found = {name: value for name, value in source.values.items() if name.startswith(f"{split}/")} if source else {}
    return {name: value for name, value in found.items() if name.split("/")[1] not in NOT_QUALITY}


def _gpu(lines: Sequence[Line], num_gpus: int) -> dict[str, float]:
    """Return NVML measurements for the first process's GPU, with its energy multiplied by `num_gpus`."""
    read = [line for line in lines if "gpu/utilisation" in line.values]
    found: dict[str, float] = {}
    for name, key in (("utilisation", "gpu/utilisation"), ("power_watts", "gpu/power_watts")):
        values = [value for line in read if (value := line.get(key)) is not None]
        if values:
            found[name] = sum(values) / len(values)
    peaks = [peak for line in lines if (peak := line.get("gpu/peak_memory_gib")) is not None]
    if peaks:
        found["peak_memory_gib"] = max(peaks)
    energy = [(line.images, joules) for line in read if (joules := line.get("gpu/energy_joules"))]
    if len(energy) > 1 and energy[-1][0] > energy[0][0] and energy[-1][1] > energy[0][1]:
        images, joules = energy[-1][0] - energy[0][0], num_gpus * (energy[-1][1] - energy[0][1])
        found["joules_per_1000_images"] = 1000 * joules / images
    return found


def _losses(lines: Sequence[Line]) -> dict[str, list[Point]]:
    names = dict.fromkeys(name for line in lines for name in line.values if "/" in name and "/spread" not in name)
    losses = [name for name in names if name.split("/")[0] not in NOT_LOSSES and not name.endswith("_score")]
    return {
        name: _downsample([Point(x.images, x.seconds, value) for x in lines if (value := x.get(name)) is not None])
        for name in losses
    }


def _selection_curve(lines: Sequence[Line], metric: str) -> list[Point]:
    return _downsample([Point(line.images, line.seconds, value) for value, line in _values_of(lines, metric)])


def _downsample(points: list[Point]) -> list[Point]:
    """Return at most MAX_POINTS of the points, always including the last."""
    step = -(-len(points) // MAX_POINTS) or 1
    return points[::-1][::step][::-1]
