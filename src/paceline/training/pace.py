"""The speed of the loop: host time by section, and the ranks that slow it down."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import NamedTuple

from paceline.core.text import print_line
from paceline.parallel.batchnorm import waiting
from paceline.parallel.world import World
from paceline.runs.metrics import NO_STRAGGLER, RANK_SECONDS, STRAGGLER_RANK, STRAGGLER_SLOWDOWN, TRAINING_SECONDS
from paceline.runs.profile_summary import SECTION_NAMES

Annotate = Callable[[str], AbstractContextManager[object]]  # opens a named range in a profiler's trace


class Stopwatch:
    """Sums host time by section: `with stopwatch("data"): …`. Sections with different names may be nested."""

    def __init__(self) -> None:
        self.annotate: Annotate | None = None  # set while a profiler records the loop
        self._sections: dict[str, _Section] = {}
        self._started = self._taken = perf_counter()
        self._seconds_before: dict[str, float] = {}  # of each section, when `take` was last called
        self._start_up_seconds: float | None = None

    def __call__(self, name: str) -> _Section:
        """Return the section with this name, for use in a `with` block."""
        section = self._sections.get(name)
        if section is None:
            section = self._sections[name] = _Section(name, self)
        return section

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, per section and in "total"; running sections are not counted."""
        now = perf_counter()
        seconds = self.since_take()
        seconds["total"] = now - self._taken
        self._taken = now
        self._seconds_before = {name: section.seconds for name, section in self._sections.items()}
        return seconds

    def since_take(self) -> dict[str, float]:
        """Return the seconds since `take` was last called, per section."""
        before = self._seconds_before
        return {name: section.seconds - before.get(name, 0.0) for name, section in self._sections.items()}

    def end_start_up(self) -> None:
        """Count the time so far that belongs to no section as start-up, which `take` leaves out, in the first call."""
        if self._start_up_seconds is None:
            known = sum(section.seconds for section in self._sections.values())
            self._start_up_seconds = max(0.0, perf_counter() - self._started - known)
            self._taken += self._start_up_seconds

    def shares(self) -> dict[str, float]:
        """Return the fraction of the time since the start that was spent in each section, and in the start-up."""
        total = max(perf_counter() - self._started, 1e-9)
        seconds = {name: section.seconds for name, section in self._sections.items()}
        if self._start_up_seconds is not None:
            seconds["start_up"] = self._start_up_seconds
        return {name: one / total for name, one in seconds.items()}


def with_whole_steps(sections: Mapping[str, float]) -> dict[str, float]:
    """Return the sections with the time for reading losses added to that of the training steps.

    A step only queues work for a GPU. Reading losses waits until the GPU has finished the queued steps.
    """
    whole = dict(sections)
    if (reading := whole.pop("log", None)) is not None:
        whole["step"] = whole.get("step", 0.0) + reading
    return whole


def with_other(shares: Mapping[str, float]) -> dict[str, float]:
    """Return shares of a whole, with the entry "other" for the rest."""
    return {**shares, "other": max(0.0, 1 - sum(shares.values()))}


class _Section:
    __slots__ = ("_entered", "_name", "_range", "_stopwatch", "seconds")  # entered in every step, so keep it cheap

    def __init__(self, name: str, stopwatch: Stopwatch) -> None:
        self.seconds = 0.0  # since the start
        self._name, self._stopwatch = name, stopwatch
        self._entered = 0.0
        self._range: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        if self._stopwatch.annotate:
            self._range = self._stopwatch.annotate(self._name)
            self._range.__enter__()
        self._entered = perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += perf_counter() - self._entered
        if self._range:
            self._range.__exit__(kind, value, trace)
            self._range = None


MIN_STEPS = 20  # shorter log intervals are pooled, because the times of a few steps vary by chance
SLOWER = 0.15  # a rank is a straggler if its work takes longer than that of the others by more than this fraction
NUM_INTERVALS = 2  # in this many intervals in a row, because a busy machine can delay any rank once
# The same two limits for a rank that is slow only in some steps. They are stricter, because other programs on a busy
# machine also delay some steps of any rank.
SLOWER_AT_TIMES = 0.2
NUM_INTERVALS_AT_TIMES = 3
DROPPED = 0.1  # fraction of the steps that a trimmed mean leaves out: the slowest ones
# The difference must also be larger than what chance explains. With two ranks, it must exceed 3.5 standard errors in
# each interval; with more ranks, the limit is higher, because one of many ranks is more often slow by chance.
CHANCE = 4.7e-4  # probability that chance alone exceeds the limit for any rank, with normal noise
AT_TIMES_LIMIT = 0.6  # fraction of the limit for a rank that is slow only in some steps: three intervals must exceed it


class StepTimes(NamedTuple):
    """How long one rank takes for one step, in seconds."""

    work: float  # without waiting for other ranks; on GPUs, only the time waiting for data
    data: float  # waiting for data
    step: float  # the whole step


class Work(NamedTuple):
    """How long one rank takes per step, in seconds, over several steps. Ranks exchange these numbers."""

    work: float  # median; see `StepTimes`
    data: float  # median
    step: float  # median
    error: float = 0.0  # standard error of the median work
    mean: float = 0.0  # of the work
    mean_error: float = 0.0  # standard error of the mean
    trimmed_mean: float = 0.0  # of the work, without the slowest steps, which other programs may have delayed
    num_steps: float = 0.0

    @classmethod
    def of(cls, steps: Sequence[StepTimes]) -> Work:
        """Summarise the times of several steps."""
        if not steps:
            return cls(0.0, 0.0, 0.0)
        work, data, step = zip(*steps, strict=True)
        medians = statistics.median(work), statistics.median(data), statistics.median(step)
        count, ordered, mean = len(work), sorted(work), statistics.fmean(work)
        # For normal noise, a standard deviation is the distance between the quartiles divided by 1.35, and the standard
        # error of a median is 1.25 times that of a mean. The quartiles do not depend on a few delayed steps.
        quartiles = ordered[count // 4], ordered[(3 * count) // 4]
        error = 1.25 * (quartiles[1] - quartiles[0]) / 1.35 / math.sqrt(count)
        deviation = math.dist(work, [mean] * count) / math.sqrt(max(1, count - 1))  # statistics.stdev is slow
        trimmed = statistics.fmean(ordered[: count - int(DROPPED * count)])
        return cls(*medians, error, mean, deviation / math.sqrt(count), trimmed, float(count))


@dataclass(frozen=True)
class Straggler:
    """A rank that delays the others."""

    rank: int
    work: Work
    others: float  # median of the other ranks' work, in seconds per step
    is_at_times: bool = (
        False  # whether it is slow only in some steps; then `others` is the median of their trimmed means
    )

    @property
    def slowdown(self) -> float:
        """How much longer a step takes because of this rank, as a fraction."""
        if self.is_at_times:  # the median step is not delayed
            return (self.work.trimmed_mean - self.others) / max(self.work.step, 1e-9)
        return (self.work.work - self.others) / max(self.work.step - (self.work.work - self.others), 1e-9)

    @property
    def num_intervals(self) -> int:
        """The number of consecutive intervals in which the rank must be slow before it is reported."""
        return NUM_INTERVALS_AT_TIMES if self.is_at_times else NUM_INTERVALS

    def __str__(self) -> str:
        if self.is_at_times:
            mean, typical, others = 1000 * self.work.trimmed_mean, 1000 * self.work.work, 1000 * self.others
            return (
                f"rank {self.rank} is slow in some steps: its own work takes {mean:.4g} ms per step on average "
                f"(median {typical:.4g} ms); the other ranks need {others:.4g} ms on average"
            )
        own, others = 1000 * self.work.work, 1000 * self.others
        share = self.work.data / max(self.work.work, 1e-9)
        data = f", {share:.0%} of it waiting for data" if share > 0.1 else ""
        return (
            f"rank {self.rank} needs {own:.4g} ms per step for its own work{data}; the other ranks need {others:.4g} ms"
        )


class StragglerWatch:
    """Compares the ranks at log lines; reports a straggler after several consecutive intervals."""

    def __init__(self) -> None:
        self._is_first = True
        self._suspect, self._times = -1, 0
        self._times_as_fast = 0  # consecutive intervals in which the straggler was as fast as the others
        self.straggler: Straggler | None = None  # the current one

    def add(self, ranks: Sequence[Work]) -> str:
        """Compare the ranks in one interval; return a line for the user if the straggler has changed.

        The first interval is left out, because it includes the warm-up. Intervals of fewer than `MIN_STEPS` steps are
        ignored; `Pace` pools them.
        """
        if any(one.num_steps < MIN_STEPS for one in ranks):
            return ""
        if self._is_first:
            self._is_first = False
            return ""
        slowest = slowest_rank(ranks)
        suspect = slowest.rank if slowest else -1
        self._suspect, self._times = suspect, self._times + 1 if suspect == self._suspect else 1
        before = self.straggler
        # A difference that chance could explain does not show that a straggler has recovered.
        self._times_as_fast = self._times_as_fast + 1 if before and is_as_fast(ranks, before.rank) else 0
        if slowest and self._times >= slowest.num_intervals:
            self.straggler = slowest
        elif self._times_as_fast >= NUM_INTERVALS:
            self.straggler = None
        if self.straggler and (before is None or before.rank != self.straggler.rank):
            self._times_as_fast = 0
            return f"straggler: {self.straggler}"
        return f"straggler: rank {before.rank} is as fast as the others again" if before and not self.straggler else ""


def slowest_rank(ranks: Sequence[Work]) -> Straggler | None:
    """Return the slowest rank if it delays the others noticeably, in most steps or at times, and not by chance."""
    if len(ranks) < 2:
        return None
    limit = statistics.NormalDist().inv_cdf(1 - CHANCE / len(ranks))
    found = _slowest(ranks, lambda one: one.work)
    excess = found.work.work - found.others
    error = _error(ranks, found.rank, lambda one: one.error)
    if excess > max(SLOWER * found.others, limit * error) and found.slowdown > SLOWER / 2:
        return found
    found = _slowest(ranks, lambda one: one.trimmed_mean, is_at_times=True)
    excess = found.work.mean - _others(ranks, found.rank, lambda one: one.mean)
    error = _error(ranks, found.rank, lambda one: one.mean_error)
    is_slower = found.work.trimmed_mean - found.others > SLOWER_AT_TIMES * found.others and found.slowdown > SLOWER
    return found if is_slower and excess > AT_TIMES_LIMIT * limit * error else None


def is_as_fast(ranks: Sequence[Work], rank: int) -> bool:
    """Return whether a rank works about as fast as the others, both in most steps and on average."""
    values: tuple[Callable[[Work], float], ...] = (lambda one: one.work, lambda one: one.mean)
    return all(value(ranks[rank]) <= (1 + SLOWER / 2) * _others(ranks, rank, value) for value in values)


def _slowest(ranks: Sequence[Work], value: Callable[[Work], float], *, is_at_times: bool = False) -> Straggler:
    rank = max(range(len(ranks)), key=lambda number: value(ranks[number]))
    return Straggler(rank, ranks[rank], _others(ranks, rank, value), is_at_times)


def _others(ranks: Sequence[Work], rank: int, value: Callable[[Work], float]) -> float:
    return statistics.median(value(one) for number, one in enumerate(ranks) if number != rank)


def _error(ranks: Sequence[Work], rank: int, error: Callable[[Work], float]) -> float:
    """Return the standard error of the difference between a rank and the median of the others."""
    return math.hypot(error(ranks[rank]), _others(ranks, rank, error))


MAX_STEPS = 1000  # steps whose times are kept; the median of more steps would be as accurate
NOT_TRAINING = ("evaluate", "sample", "save")  # sections during which the loop does not train


class Pace:
    """Measures the loop of one rank. `images` is the number of images seen when the loop starts."""

    def __init__(self, world: World, images: int, epoch_images: int) -> None:
        self.stopwatch = Stopwatch()
        self._world, self._images_before, self._epoch_images = world, images, epoch_images
        self._data, self._step = self.stopwatch("data"), self.stopwatch("step")
        self._on_cpu = world.device.type == "cpu"
        self._data_before = 0.0  # seconds of waiting for data at the end of the last step
        self._steps: deque[StepTimes] = deque(maxlen=MAX_STEPS)  # the last steps since the ranks were compared
        self._stragglers = StragglerWatch()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one step, and record how long this rank worked on it: `with pace.step(): …`."""
        self.stopwatch.end_start_up()
        step, waited = self._step.seconds, waiting.seconds  # an evaluation or a log before the step may have waited
        with self._step:
            yield
        step, waited = self._step.seconds - step, waiting.seconds - waited
        data, self._data_before = self._data.seconds - self._data_before, self._data.seconds
        # A GPU runs behind its host, whose times do not show how long the GPU itself works.
        self._steps.append(StepTimes(data + max(0.0, step - waited) if self._on_cpu else data, data, data + step))

    def own_work(self) -> Work:
        """Return this rank's time per step since the last log line.

        Log intervals are pooled until they have `MIN_STEPS` steps. Only the last `MAX_STEPS` steps are used.
        """
        return Work.of(self._steps)

    def take(self, images: int, ranks: list[Work]) -> dict[str, float]:
        """Return the timings since the last log line, by metric; print a line if a straggler appears.

        The speed and the share of waiting for data are those of training: without the start of the run, evaluation,
        sample images and saving.
        """
        spent = self.stopwatch.take()
        if len(self._steps) >= MIN_STEPS:  # the same on every rank
            self._steps.clear()
        other = sum(spent.get(name, 0.0) for name in NOT_TRAINING)
        training = max(spent.pop("total") - other, 1e-9)
        seen, self._images_before = images - self._images_before, images
        loading = spent.get("data", 0.0)
        values = {
            "time/images_per_second": seen / training,
            "time/images_per_second_without_loading": seen / max(training - loading, 1e-9),
            "time/data_wait": loading / training,
            TRAINING_SECONDS: training,
            **{f"time/{name}_seconds": seconds for name, seconds in spent.items()},
            "epoch": images / self._epoch_images,
        }
        return values | (self._compare(ranks) if len(ranks) > 1 else {})

    def describe_shares(self) -> str:
        """Return a line with the shares of the time that were spent in steps, evaluation, samples and saving."""
        shares = with_other(with_whole_steps(self.stopwatch.shares()))
        named = {SECTION_NAMES.get(name, name): share for name, share in shares.items()}
        ordered = sorted(named.items(), key=lambda item: -item[1])
        together = sum(shares.get(name, 0.0) for name in NOT_TRAINING)
        listed = ", ".join(f"{share:.1%} {name}" for name, share in ordered)
        return f"time: {listed}; evaluation, sample images and saving together: {together:.1%}"

    def _compare(self, ranks: list[Work]) -> dict[str, float]:
        values = {f"{RANK_SECONDS}{rank}": one.work for rank, one in enumerate(ranks)}
        if not self._on_cpu:  # a rank's wait for data costs nothing while its GPU is busy with earlier steps
            return values
        line = self._stragglers.add(ranks)
        if line and self._world.is_first:
            print_line(line)
        found = self._stragglers.straggler
        rank, slowdown = (float(found.rank), found.slowdown) if found else (NO_STRAGGLER, 0.0)
        return values | {STRAGGLER_RANK: rank, STRAGGLER_SLOWDOWN: slowdown}
