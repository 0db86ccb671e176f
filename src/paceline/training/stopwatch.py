"""Host time spent in each section of the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from time import perf_counter
from types import TracebackType

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
