"""Host time spent in each section of the loop."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType


class Stopwatch:
    """Sums host time by section: `with stopwatch("data"): …`. Sections with different names may be nested."""

    def __init__(self) -> None:
        self._sections: dict[str, _Section] = {}
        self._taken = perf_counter()

    def __call__(self, name: str) -> _Section:
        """Return the section with this name, for use in a `with` block."""
        section = self._sections.get(name)
        if section is None:
            section = self._sections[name] = _Section()
        return section

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, per section and in "total"; running sections are not counted."""
        now = perf_counter()
        seconds = {name: section.seconds for name, section in self._sections.items()}
        seconds["total"] = now - self._taken
        self._taken = now
        for section in self._sections.values():
            section.seconds = 0.0
        return seconds


class _Section:
    __slots__ = ("_entered", "seconds")  # sections are entered in every step, so keep them cheap

    def __init__(self) -> None:
        self.seconds = 0.0
        self._entered = 0.0

    def __enter__(self) -> None:
        self._entered = perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += perf_counter() - self._entered
