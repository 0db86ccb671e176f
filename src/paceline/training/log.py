"""What a log line contains: the phases' losses, the speed of the loop, and the ranks that slow it down.

The losses and signals stay on the device until they are logged. One row per micro-batch is written without waiting for
the device. Rows from all ranks are read when logging and before every save. Reading also finds the first value that is
not finite, with its step and phase.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.contracts.recipe import Loss, Recipe
from paceline.core.errors import UserError
from paceline.core.text import print_line
from paceline.parallel.batchnorm import waiting
from paceline.parallel.world import World
from paceline.runs.metrics import NO_STRAGGLER, RANK_SECONDS, STRAGGLER_RANK, STRAGGLER_SLOWDOWN, TRAINING_SECONDS
from paceline.runs.profile_summary import SECTION_NAMES, with_other, with_whole_steps
from paceline.runs.tensor_files import HostCopy

VALUES = "values"
SPREAD = "spread/"
DIVERGED_ABOVE = 1e8  # the run stops if the magnitude of a loss or signal exceeds this
CAPACITY = 1024  # rows per page; when a page is full, its rows are added to running sums on the device


class Reading(NamedTuple):
    """Mean losses and signals since the last reading."""

    values: dict[str, float]  # means over all samples on all ranks; `spread/NAME`: max minus min across ranks
    not_finite: tuple[str, int] | None  # the first value that was not finite, and the images seen before it
    largest: dict[str, float]  # the largest magnitudes on any rank
    constant: frozenset[str]  # values that were zero on all ranks in the last step that computed them
    ranks: list[list[float]]  # the numbers that each rank passed to `request`

    def problem(self, recipe: Recipe, images: int) -> tuple[str, int] | None:
        """Return what is wrong, and after how many images; None if the run is healthy.

        A value is not finite, the run has diverged, or a network has collapsed. `images` have been seen so far.
        """
        if self.not_finite:
            return self.not_finite
        for name, value in self.largest.items():
            if value > DIVERGED_ABOVE:
                return f"the run has diverged (the magnitude of {name} is {value:.3g})", images
        collapsed = next((name for name in recipe.must_vary if self.largest.get(name) == 0), "")
        return (collapse(collapsed), images) if collapsed else None

    def suspect(self, recipe: Recipe) -> str:
        """Return the name of a value that must vary but was zero in the last step; "" if there is none.

        A network may have collapsed during the last log interval, so its weights must not be saved.
        """
        return next((name for name in recipe.must_vary if name in self.constant), "")


def collapse(name: str) -> str:
    """Describe the collapse of a network whose loss term or signal `name` is zero."""
    return f"a network's output has become constant ({name} is 0)"


class Entry(NamedTuple):
    """The losses and signals of one phase for one micro-batch, on the device."""

    phase: str
    names: tuple[str, ...]
    values: Tensor  # one value per name
    samples: int

    @classmethod
    def of(cls, phase: str, loss: Loss, samples: int) -> Entry:
        """Return the entry for a phase's loss."""
        values = {**loss.terms, **loss.signals}
        if len(values) < len(loss.terms) + len(loss.signals):
            raise UserError(
                f"phase {phase!r} uses the same name for a loss term and a signal "
                f"({', '.join(loss.terms & loss.signals.keys())}); rename one of them"
            )
        numbers = [value.detach() for value in values.values()]
        column = numbers[0].unsqueeze(0) if len(numbers) == 1 else torch.stack(numbers)
        return cls(phase, tuple(values), column, samples)


class _Page:
    """The logged rows of one phase."""

    def __init__(self, names: tuple[str, ...], device: torch.device) -> None:
        self.names = names
        self.rows = torch.zeros(CAPACITY, len(names), device=device, dtype=torch.float64)
        self.slots = self.rows.unbind()  # row views, created once because every step writes to one
        self.sums = torch.zeros(len(names) + 1, device=device, dtype=torch.float64)  # last element: total weight
        self.first_bad = torch.full((len(names),), float("inf"), device=device, dtype=torch.float64)
        self.largest = torch.zeros(len(names), device=device, dtype=torch.float64)
        self.varied_at = torch.full((len(names),), -float("inf"), device=device, dtype=torch.float64)
        self.at: list[tuple[int, int]] = []  # (images seen, samples) for each row
        self.last_at = 0  # images seen at the last row, also after it was added to the sums

    def fold(self) -> None:
        """Add the rows to the sums, on the device."""
        if not self.at:
            return
        rows = self.rows[: len(self.at)]
        images, weights = _upload(self.at, rows.device).unbind(1)
        bad = torch.where(rows.isfinite(), torch.inf, images.unsqueeze(1))
        self.first_bad = torch.minimum(self.first_bad, bad.amin(0))
        self.largest = torch.maximum(self.largest, rows.abs().amax(0))
        varied = torch.where(rows == 0, -torch.inf, images.unsqueeze(1))
        self.varied_at = torch.maximum(self.varied_at, varied.amax(0))
        self.sums += torch.cat([(rows * weights.unsqueeze(1)).sum(0), weights.sum().reshape(1)])
        self.last_at = self.at[-1][0]
        self.at.clear()


def _upload(numbers: list[Any], device: torch.device) -> Tensor:
    """Copy numbers to a device. Pinned memory makes this asynchronous: nothing waits for the device."""
    tensor = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


class LossLog:
    """The losses and signals of all phases since the last reading."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pages: dict[str, _Page] = {}

    def add(self, images: int, entries: list[Entry]) -> None:
        """Add the entries of a step, without waiting for the device."""
        for phase, names, values, samples in entries:
            page = self.pages.get(phase)
            if page is None:
                page = self.pages[phase] = _Page(names, values.device)
            if page.names != names:
                raise UserError(
                    f"phase {phase!r} returned the losses and signals {', '.join(page.names)}, then "
                    f"{', '.join(names)}: return the same names at every step"
                )
            if len(page.at) == CAPACITY:
                page.fold()
            page.slots[len(page.at)].copy_(values)
            page.at.append((images, samples))

    def request(self, extra: Sequence[float] = ()) -> Request:
        """Collect the values since the last call from all ranks, without waiting for the device.

        `extra` are numbers of this rank that all ranks receive with the losses, without another exchange.
        """
        own: list[Tensor] = []
        for page in self.pages.values():
            page.fold()
            own += [one.to(self.world.device) for one in (page.sums, page.first_bad, page.largest, page.varied_at)]
        vector = torch.cat([*own, _upload(list(extra), self.world.device)])
        copy = HostCopy({VALUES: self.world.gather(vector)})
        for page in self.pages.values():
            page.sums.zero_()
            page.first_bad.fill_(torch.inf)
            page.largest.zero_()
        return Request({phase: (page.names, page.last_at) for phase, page in self.pages.items()}, copy)


@dataclass(frozen=True)
class Request:
    """The values of all ranks since the last reading. They may still be on their way from the device."""

    pages: dict[str, tuple[tuple[str, ...], int]]  # by phase: the names, and the images seen at the last row
    copy: HostCopy

    def wait(self) -> Reading:
        """Wait for the values and return their means."""
        ranks = self.copy.wait()[VALUES]
        values: dict[str, float] = {}
        bad: list[tuple[str, int]] = []
        largest: dict[str, float] = {}
        constant: set[str] = set()
        start = 0
        for phase, (names, last_at) in self.pages.items():
            count = len(names)
            sums, weight, first, magnitudes, varied_at = ranks[:, start : start + 4 * count + 1].split(
                [count, 1, count, count, count], dim=1
            )
            start += 4 * count + 1
            full_names = [f"{phase}/{name}" for name in names]
            constant |= {name for name, at in zip(full_names, varied_at.amax(0).tolist(), strict=True) if at < last_at}
            bad += [
                (f"loss {name!r} in phase {phase!r} is not finite", int(at))
                for at, name in zip(first.amin(0).tolist(), names, strict=True)
                if at < torch.inf
            ]
            if weight.sum() == 0:
                continue
            largest |= zip(full_names, magnitudes.amax(0).tolist(), strict=True)
            means, by_rank = sums.sum(0) / weight.sum(), sums / weight
            spreads = by_rank.amax(0) - by_rank.amin(0)
            for name, mean, spread in zip(full_names, means.tolist(), spreads.tolist(), strict=True):
                values[name] = mean
                if len(ranks) > 1:
                    values[f"{SPREAD}{name}"] = spread
        # Within one step, report the first phase: later phases only inherit its non-finite values.
        first_bad = min(bad, key=lambda problem: problem[1], default=None)
        return Reading(values, first_bad, largest, frozenset(constant), ranks[:, start:].tolist())


Annotate = Callable[[str], AbstractContextManager[object]]  # opens a named range in a profiler's trace


class Stopwatch:
    """Sums host time by section: `with stopwatch("data"): …`. Sections with different names may be nested."""

    def __init__(self) -> None:
        self.annotate: Annotate | None = None  # set while a profiler records the loop
        self.seconds: dict[str, float] = defaultdict(float)  # by section, since the start
        self._started = self._taken = perf_counter()
        self._seconds_before: dict[str, float] = {}  # of each section, when `take` was last called
        self._start_up_seconds: float | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the section with this name."""
        with self.annotate(name) if self.annotate else nullcontext():
            entered = perf_counter()
            try:
                yield
            finally:
                self.seconds[name] += perf_counter() - entered

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, per section and in "total"; running sections are not counted."""
        now, before = perf_counter(), self._seconds_before
        self._seconds_before = dict(self.seconds)
        seconds = {name: total - before.get(name, 0.0) for name, total in self.seconds.items()}
        seconds["total"], self._taken = now - self._taken, now
        return seconds

    def end_start_up(self) -> None:
        """Count the time so far that belongs to no section as start-up, which `take` leaves out, in the first call."""
        if self._start_up_seconds is None:
            self._start_up_seconds = max(0.0, perf_counter() - self._started - sum(self.seconds.values()))
            self._taken += self._start_up_seconds

    def shares(self) -> dict[str, float]:
        """Return the fraction of the time since the start that was spent in each section, and in the start-up."""
        total = max(perf_counter() - self._started, 1e-9)
        start_up = {} if self._start_up_seconds is None else {"start_up": self._start_up_seconds}
        return {name: seconds / total for name, seconds in {**self.seconds, **start_up}.items()}


MIN_STEPS = 20  # shorter log intervals are pooled, because the times of a few steps vary by chance
SLOWER = 0.15  # a rank is a straggler if its work takes longer than that of the others by more than this fraction
NUM_INTERVALS = 2  # in this many intervals in a row, because a busy machine can delay any rank once
# The difference must also be larger than what chance explains. With two ranks, it must exceed 3.5 standard errors in
# each interval; with more ranks, the limit is higher, because one of many ranks is more often slow by chance.
CHANCE = 4.7e-4  # probability that chance alone exceeds the limit for any rank, with normal noise


class StepTimes(NamedTuple):
    """How long one rank takes for one step, in seconds."""

    work: float  # without waiting for other ranks; on GPUs, only the time waiting for data
    data: float  # waiting for data
    step: float  # the whole step


class Work(NamedTuple):
    """How long one rank takes per step, in seconds: medians over several steps. Ranks exchange these numbers."""

    work: float  # see `StepTimes`
    data: float
    step: float
    error: float = 0.0  # standard error of the median work
    num_steps: float = 0.0

    @classmethod
    def of(cls, steps: Sequence[StepTimes]) -> Work:
        """Summarise the times of several steps."""
        if not steps:
            return cls(0.0, 0.0, 0.0)
        ordered, count = sorted(step.work for step in steps), len(steps)
        # For normal noise, a standard deviation is the distance between the quartiles divided by 1.35, and the standard
        # error of a median is 1.25 times that of a mean. The quartiles do not depend on a few delayed steps.
        error = 1.25 * (ordered[(3 * count) // 4] - ordered[count // 4]) / 1.35 / math.sqrt(count)
        work, data, step = (statistics.median(times) for times in zip(*steps, strict=True))
        return cls(work, data, step, error, float(count))


@dataclass(frozen=True)
class Straggler:
    """A rank that delays the others."""

    rank: int
    work: Work
    others: float  # median of the other ranks' work, in seconds per step

    @property
    def slowdown(self) -> float:
        """How much longer a step takes because of this rank, as a fraction."""
        return (self.work.work - self.others) / max(self.work.step - (self.work.work - self.others), 1e-9)

    def __str__(self) -> str:
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
        slowest, before = slowest_rank(ranks), self.straggler
        suspect = slowest.rank if slowest else -1
        self._suspect, self._times = suspect, self._times + 1 if suspect == self._suspect else 1
        # A difference that chance could explain does not show that a straggler has recovered.
        is_as_fast = before and ranks[before.rank].work <= (1 + SLOWER / 2) * _others(ranks, before.rank)
        self._times_as_fast = self._times_as_fast + 1 if is_as_fast else 0
        if slowest and self._times >= NUM_INTERVALS:
            self.straggler = slowest
        elif self._times_as_fast >= NUM_INTERVALS:
            self.straggler = None
        if self.straggler and (before is None or before.rank != self.straggler.rank):
            self._times_as_fast = 0
            return f"straggler: {self.straggler}"
        return f"straggler: rank {before.rank} is as fast as the others again" if before and not self.straggler else ""


def slowest_rank(ranks: Sequence[Work]) -> Straggler | None:
    """Return the slowest rank if it delays the others noticeably, and not by chance."""
    if len(ranks) < 2:
        return None
    rank = max(range(len(ranks)), key=lambda number: ranks[number].work)
    slowest = Straggler(rank, ranks[rank], _others(ranks, rank))
    limit = statistics.NormalDist().inv_cdf(1 - CHANCE / len(ranks))
    error = math.hypot(ranks[rank].error, statistics.median(one.error for one in ranks if one is not ranks[rank]))
    excess = slowest.work.work - slowest.others
    is_slower = excess > max(SLOWER * slowest.others, limit * error) and slowest.slowdown > SLOWER / 2
    return slowest if is_slower else None


def _others(ranks: Sequence[Work], rank: int) -> float:
    """Return the median of the other ranks' work."""
    return statistics.median(one.work for number, one in enumerate(ranks) if number != rank)


MAX_STEPS = 1000  # steps whose times are kept; the median of more steps would be as accurate
NOT_TRAINING = ("evaluate", "sample", "save")  # sections during which the loop does not train


class Pace:
    """Measures the loop of one rank. `images` is the number of images seen when the loop starts."""

    def __init__(self, world: World, images: int, epoch_images: int) -> None:
        self.stopwatch = Stopwatch()
        self._world, self._images_before, self._epoch_images = world, images, epoch_images
        self._on_cpu = world.device.type == "cpu"
        self._data_before = 0.0  # seconds of waiting for data at the end of the last step
        self._steps: deque[StepTimes] = deque(maxlen=MAX_STEPS)  # the last steps since the ranks were compared
        self._stragglers = StragglerWatch()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time one step, and record how long this rank worked on it: `with pace.step(): …`."""
        self.stopwatch.end_start_up()
        spent = self.stopwatch.seconds
        step, waited = spent["step"], waiting.seconds  # an evaluation or a log before the step may have waited
        with self.stopwatch("step"):
            yield
        step, waited = spent["step"] - step, waiting.seconds - waited
        data, self._data_before = spent["data"] - self._data_before, spent["data"]
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
        slowest = self._stragglers.straggler
        rank, slowdown = (float(slowest.rank), slowest.slowdown) if slowest else (NO_STRAGGLER, 0.0)
        return values | {STRAGGLER_RANK: rank, STRAGGLER_SLOWDOWN: slowdown}
