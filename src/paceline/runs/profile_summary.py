"""The summary of a profile: where the time of a few training steps went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.core.files import write_file, write_json

PROFILE = "profile"  # folder within a run folder
SUMMARY_JSON, SUMMARY_TEXT = "summary.json", "summary.txt"
MAX_KERNELS = 12


@dataclass(frozen=True)
class KernelTime:
    """The time spent in one kind of GPU kernel, or in one operator on a CPU."""

    name: str
    share: float  # of the profiled time
    calls_per_step: float


@dataclass(frozen=True)
class ProfileSummary:
    """Where the time of the profiled steps went. Shares are fractions of the profiled time."""

    device: str
    num_steps: int
    step_seconds: float
    images_per_second: float
    sections: dict[str, float]  # host time by section of the loop: data, step, log, …
    phases: dict[str, float]  # time by phase and part, such as "generator: forward"
    kernels: tuple[KernelTime, ...]
    communication: float  # including waiting for slower ranks
    exposed_communication: float  # the part that is not hidden behind computation
    gaps: float  # a GPU without work, or a CPU between two operators
    notes: tuple[str, ...] = ()

    def write(self, run: Path) -> None:
        """Write the summary to a run folder, as text and as JSON."""
        folder = run / PROFILE
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / SUMMARY_JSON, asdict(self), durable=False)
        write_file(folder / SUMMARY_TEXT, "\n".join(self.lines()) + "\n", durable=False)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the summary as text, at most one page."""
        yield f"profile of {self.num_steps} training step{'s' * (self.num_steps > 1)} on {self.device}"
        yield f"  {1000 * self.step_seconds:.4g} ms per step, {self.images_per_second:,.0f} images/s while profiling"
        yield ""
        yield "time in the loop"
        yield from _table({SECTION_NAMES.get(name, name): share for name, share in self.sections.items()})
        yield "time by phase"
        yield from _table(self.phases)
        on_gpu = self.device != "CPU"
        yield "time by kernel" if on_gpu else "time by operator, without the operators that it calls"
        yield from (f"  {k.share:6.1%}  {k.name}  ({k.calls_per_step:g} per step)" for k in self.kernels)
        yield ""
        yield f"{'GPU without work (launch gaps)' if on_gpu else 'CPU between operators'}: {self.gaps:.1%}"
        yield f"communication: {self.communication:.1%}, of which {self.exposed_communication:.1%} delays the step"
        yield from (f"note: {note}" for note in self.notes)


SECTION_NAMES = {
    "data": "waiting for data",
    "step": "training steps",
    "evaluate": "evaluation",
    "sample": "sample images",
    "save": "saving",
    "start_up": "start-up",
}


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


def _table(shares: Mapping[str, float]) -> Iterator[str]:
    for name, share in sorted(shares.items(), key=lambda item: -item[1]):
        yield f"  {share:6.1%}  {name}"
    yield ""
