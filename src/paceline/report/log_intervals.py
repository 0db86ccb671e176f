"""Speed and time breakdown of a run, computed from the intervals between its log lines."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from paceline.report.run import Speed
from paceline.runs.metrics import EVALUATION_SECONDS

LOADING, STEPPING = ("time/data_seconds",), ("time/step_seconds", "time/log_seconds")
SAVING = ("time/save_seconds", "time/sample_seconds")
NOT_TRAINING = ("time/evaluate_seconds", *SAVING)  # parts of an interval that do not count as training
RESUME_SECONDS = 0.5  # a run was stopped between two lines if wall time exceeds run time by more than this


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
        speed = self.line.get("time/images_per_second")
        if not self.settled or not speed:
            return self.timed_seconds
        return max(self.timed_seconds, self.images / speed - total([self.line], NOT_TRAINING))


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
