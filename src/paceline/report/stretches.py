"""How fast a run was and where its time went, from the stretches between its log lines."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

Line = dict[str, Any]
LOADING, STEPPING = ("time/data_seconds",), ("time/step_seconds", "time/log_seconds")
KEEPING = ("time/save_seconds", "time/sample_seconds")
AWAY = ("time/evaluate_seconds", *KEEPING)  # sections of a stretch that are not training
EVALUATION = "time/evaluation_seconds"
RESUME_SECONDS = 0.5  # the clock of a run stands still while it is stopped; a start takes longer than this


class Stretch(NamedTuple):
    """What one log line is about."""

    images: int
    line: Line
    settled: bool  # not the first one since a start, which has the warm-up in it

    @property
    def timed_seconds(self) -> float:
        """Loading, steps and logging, each by its own clock."""
        return total([self.line], (*LOADING, *STEPPING))

    @property
    def seconds(self) -> float:
        """All of its time but evaluation, samples and saving; with the warm-up in it, what was timed alone.

        The rest of an unsettled stretch is the start itself, and not what a driver spends between steps.
        """
        speed = self.line.get("time/images_per_second")
        if not self.settled or not speed:
            return self.timed_seconds
        return max(self.timed_seconds, self.images / speed - total([self.line], AWAY))


def total(lines: Iterable[Line], names: Collection[str]) -> float:
    """The sum of values by these names; one that a line does not have counts nothing."""
    return sum(line.get(name) or 0.0 for line in lines for name in names)


def stretches_of(lines: Sequence[Line], after_gaps: Collection[int] = (), since: int = 0) -> list[Stretch]:
    """The settled stretches of a run, or all of them where none is.

    `after_gaps` are places in `lines` that a broken line came before: the stretch there has an unknown length.
    `since` is where the run went on in another way: what came before is left out.
    """
    found: list[Stretch] = []
    images, settled, torn = 0, False, False
    for number, line in enumerate(lines):
        torn = torn or number in after_gaps
        settled = settled and not _resumed(lines[number - 1], line)
        if line.get(STEPPING[0]) is None:
            continue
        settled = settled and images > since
        if not torn and line["images"] > images >= since:
            found.append(Stretch(line["images"] - images, line, settled))
        images, settled, torn = line["images"], True, False
    return [stretch for stretch in found if stretch.settled] or found


def _resumed(before: Line, line: Line) -> bool:
    """Whether the run was stopped between two lines: the world's clock went on, and the run's did not."""
    times = before.get("time"), line.get("time")
    if times[0] is None or times[1] is None:
        return False
    return (times[1] - times[0]) - (line["seconds"] - before["seconds"]) > RESUME_SECONDS


def speed_of(stretches: Sequence[Stretch]) -> dict[str, Any]:
    """Images per second of training alone: without evaluation, samples and saving."""
    images, seconds = sum(one.images for one in stretches), sum(one.seconds for one in stretches)
    loading = total([one.line for one in stretches], LOADING)
    if not images or seconds <= loading:
        return {}
    return {
        "images_per_second": images / seconds,
        "images_per_second_without_loading": images / (seconds - loading),
        "stretches": len(stretches),
        "std_of_stretches": _spread(stretches),
        "with_warm_up": not all(one.settled for one in stretches),
    }


def _spread(stretches: Sequence[Stretch]) -> float | None:
    """How the speeds of stretches vary; a short one at the end of an epoch says little and is left out."""
    longest = max(one.images for one in stretches)
    speeds = [one.images / one.seconds for one in stretches if 2 * one.images >= longest and one.seconds > 0]
    return statistics.stdev(speeds) if len(speeds) > 1 else None


def seconds_per_epoch(stretches: Sequence[Stretch], lines: Sequence[Line], since: int = 0) -> dict[str, float]:
    """Where the time of one pass over the data goes, by the host's clock; what no line tells is left out.

    What came before `since` so many images is left out, too.
    """
    lines = [line for line in lines if line["images"] > since]
    taken, images = [one.line for one in stretches], sum(one.images for one in stretches)
    last = next((line for line in reversed(lines) if line.get("epoch")), None)
    if not images or last is None:
        return {}
    per_epoch = last["images"] / last["epoch"] / images
    epochs = last["epoch"] * (1 - since / last["images"])
    seconds = {"data": total(taken, LOADING) * per_epoch, "step": total(taken, STEPPING) * per_epoch}
    if all(one.settled for one in stretches):
        seconds["between"] = sum(one.seconds - one.timed_seconds for one in stretches) * per_epoch
    if any(line.get(EVALUATION) is not None for line in lines):
        seconds["evaluation"] = total(lines, [EVALUATION]) / epochs
    if saving := total(lines, KEEPING):  # a log line comes before a save: the last one is in no line
        seconds["saving"] = saving / epochs
    return seconds
