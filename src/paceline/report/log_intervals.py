"""The speed of a run and where its time was spent, from the intervals between its log lines."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from paceline.report.run import Speed

LOADING, STEPPING = ("time/data_seconds",), ("time/step_seconds", "time/log_seconds")
SAVING = ("time/save_seconds", "time/sample_seconds")
NOT_TRAINING = ("time/evaluate_seconds", *SAVING)  # parts of an interval that are not training
EVALUATION = "time/evaluation_seconds"
RESUME_SECONDS = 0.5  # the clock of a run stands still while it is stopped; a start takes longer than this


class Line(NamedTuple):
    """One line of metrics.jsonl."""

    images: int
    seconds: float
    values: Mapping[str, float | None]  # by name; None was not finite

    def get(self, name: str) -> float | None:
        """Return a value, None where the line does not have it."""
        return self.values.get(name)


class LogInterval(NamedTuple):
    """What one log line is about."""

    images: int
    line: Line
    settled: bool  # not the first one after a start, which includes the warm-up

    @property
    def timed_seconds(self) -> float:
        """Loading, steps and logging, each by its own clock."""
        return total([self.line], (*LOADING, *STEPPING))

    @property
    def seconds(self) -> float:
        """All of its time except evaluation, samples and saving; with a warm-up, only what was timed.

        The rest of an unsettled interval is the start itself, not what a driver spends between steps.
        """
        speed = self.line.get("time/images_per_second")
        if not self.settled or not speed:
            return self.timed_seconds
        return max(self.timed_seconds, self.images / speed - total([self.line], NOT_TRAINING))


def total(lines: Iterable[Line], names: Collection[str]) -> float:
    """Return the sum of the values with these names; a missing one counts as 0."""
    return sum(line.get(name) or 0.0 for line in lines for name in names)


def log_intervals(lines: Sequence[Line], after_gaps: Collection[int] = (), since: int = 0) -> list[LogInterval]:
    """Return the settled intervals of a run, or all of them where none is settled.

    `after_gaps` are the positions in `lines` that follow a broken line: the length of that interval is unknown.
    `since` is the number of images at which the last segment starts: what came before is left out.
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
    """Return whether the run was stopped between two lines: wall time passed, and the run's clock stood still."""
    was, now = before.get("time"), line.get("time")
    if was is None or now is None:
        return False
    return (now - was) - (line.seconds - before.seconds) > RESUME_SECONDS


def speed_of(intervals: Sequence[LogInterval]) -> Speed | None:
    """Return the images per second of training alone; None where no interval shows them."""
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
    """Return how the speed varies over intervals; a short one at the end of an epoch is noisy and left out."""
    longest = max(one.images for one in intervals)
    speeds = [one.images / one.seconds for one in intervals if 2 * one.images >= longest and one.seconds > 0]
    return statistics.stdev(speeds) if len(speeds) > 1 else None


def seconds_per_epoch(intervals: Sequence[LogInterval], lines: Sequence[Line], since: int = 0) -> dict[str, float]:
    """Return where the time of one epoch is spent, by the host's clock; what no line has is left out.

    What came before the last segment, which starts at `since` images, is left out as well.
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
    if any(line.get(EVALUATION) is not None for line in lines):
        seconds["evaluation"] = total(lines, [EVALUATION]) / epochs
    if saving := total(lines, SAVING):  # a log line comes before a save: the last save is in no line
        seconds["saving"] = saving / epochs
    return seconds
