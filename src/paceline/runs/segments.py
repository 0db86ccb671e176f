"""Segments of a run: parts with the same devices, strategy, loader and machine. Resuming may start a new segment."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from paceline.core.types import SettingValue, SettingValues

HARDWARE = ("cpu", "cores", "gpus", "torch")  # properties that affect a run's speed, apart from its settings
UNTIL = "until_images"


@dataclass(frozen=True)
class Choices:
    """The values that `auto` settings resolved to when a run was started."""

    strategy: str
    devices: int
    accelerator: str
    loader: str
    workers: int = 0  # number of loader processes or threads


@dataclass(frozen=True)
class Segment:
    """A part of a run with the same devices, strategy and machine. A field is None if it does not apply."""

    strategy: str
    devices: int
    accelerator: str
    loader: str
    gpu_ids: str
    workers: int
    graph: str | None = None
    deterministic: bool | None = None
    cpu: str | None = None
    cores: str | None = None
    gpus: str | None = None
    torch: str | None = None
    until_images: int = 0  # images seen when the segment ended; 0 for the last segment

    def to_table(self) -> dict[str, SettingValue]:
        """Return the segment as a TOML table, omitting fields that are None."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @classmethod
    def from_table(cls, table: Mapping[str, object]) -> Segment:
        """Parse a segment from a table; raise TypeError or ValueError if it is invalid."""
        known = {f.name for f in fields(cls)}
        segment = cls(**{name: value for name, value in table.items() if name in known})  # type: ignore[arg-type]
        if type(segment.until_images) is not int:
            raise TypeError(f"{UNTIL} is not an integer")
        return segment


def segment_of(settings: SettingValues, choices: Choices, hardware: Mapping[str, str]) -> Segment:
    """Return the current segment of a run, given its settings, the resolved choices and the machine."""
    on_gpus = choices.accelerator == "cuda"
    return Segment(
        strategy=choices.strategy,
        devices=choices.devices,
        accelerator=choices.accelerator,
        loader=choices.loader,
        gpu_ids=str(settings.get("gpus", "")),
        workers=choices.workers,
        graph=str(settings.get("graph", "")) if on_gpus else None,
        deterministic=bool(settings.get("deterministic", False)) if on_gpus else None,
        cpu=hardware.get("cpu"),
        cores=hardware.get("cores"),
        gpus=hardware.get("gpus"),
        torch=hardware.get("torch"),
    )


def earlier_segments(before: Iterable[Segment], images: int, now: Segment) -> tuple[Segment, ...]:
    """Return the segments before `now` that led to the checkpoint at `images`, from which the run resumes.

    `before` lists all earlier segments in order. The last segment ends at `images`, even if it ran further.
    """
    found: list[Segment] = []
    for one in before:
        until = min(one.until_images or images, images)
        if until <= (found[-1].until_images if found else 0):
            continue  # the segment stopped before its first checkpoint
        if found and not changes(found[-1], one):
            found.pop()
        found.append(dataclasses.replace(one, until_images=until))
    return tuple(found[:-1] if found and not changes(found[-1], now) else found)


def changes(before: Segment, after: Segment) -> list[str]:
    """Return the differences between two segments as `name old → new`, for fields that apply to both."""
    pairs = [(f.name, getattr(before, f.name), getattr(after, f.name)) for f in fields(Segment) if f.name != UNTIL]
    return [f"{name} {was} → {now}" for name, was, now in pairs if None not in (was, now) and was != now]
