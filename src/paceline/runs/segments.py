"""Segments of a run: parts with the same devices, strategy, loader and machine. A resumed run may start another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from paceline.core.types import SettingValue, SettingValues

HARDWARE = ("cpu", "cores", "gpus", "torch")  # and torch: what determines a run's speed besides its settings
UNTIL = "until_images"


@dataclass(frozen=True)
class Choices:
    """What `auto` came to when a run was started."""

    strategy: str
    devices: int
    accelerator: str
    loader: str
    workers: int = 0  # processes or threads that the loader uses


@dataclass(frozen=True)
class Segment:
    """One part of a run; None is what does not apply to it, or what its machine does not have."""

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
    until_images: int = 0  # the images at which it ended; 0 for the last one

    def to_table(self) -> dict[str, SettingValue]:
        """Return the segment as a table of TOML, which has no None."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @classmethod
    def from_table(cls, table: Mapping[str, object]) -> Segment:
        """Return the segment in a table; raise TypeError or ValueError where it holds something else."""
        known = {f.name for f in fields(cls)}
        segment = cls(**{name: value for name, value in table.items() if name in known})  # type: ignore[arg-type]
        if type(segment.until_images) is not int:
            raise TypeError(UNTIL)
        return segment


def segment_of(settings: SettingValues, choices: Choices, hardware: Mapping[str, str]) -> Segment:
    """Return the segment that a run is in, from its settings, what `auto` came to, and its machine."""
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

    `before` are all earlier segments in order; the last one ends at `images`, wherever it stopped.
    """
    found: list[Segment] = []
    for one in before:
        until = min(one.until_images or images, images)
        if until <= (found[-1].until_images if found else 0):
            continue  # it stopped before its first checkpoint
        if found and not changes(found[-1], one):
            found.pop()
        found.append(dataclasses.replace(one, until_images=until))
    return tuple(found[:-1] if found and not changes(found[-1], now) else found)


def changes(before: Segment, after: Segment) -> list[str]:
    """Return what differs between two segments, as `name was → is`, where it applies to both."""
    pairs = [(f.name, getattr(before, f.name), getattr(after, f.name)) for f in fields(Segment) if f.name != UNTIL]
    return [f"{name} {was} → {now}" for name, was, now in pairs if None not in (was, now) and was != now]
