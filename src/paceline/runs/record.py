"""What a run records: its settings, provenance and segments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from paceline.config.files import FORMAT, PROVENANCE, RUN_FORMAT, Table, check_format, to_toml
from paceline.config.resolve import flatten
from paceline.core.errors import UserError
from paceline.core.files import MAX_TOML_BYTES, parse_toml, read_bounded, why, write_file
from paceline.core.types import Scalar, SettingValue, SettingValues

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


CONFIG = "config.toml"
DATA = "data"
EARLIER = "earlier"  # key of an array of tables with all segments except the last


@dataclass(frozen=True)
class Provenance:
    """How and where a run was trained."""

    data: str  # number of samples, and a fingerprint of the data
    choices: Choices
    versions_and_hardware: Mapping[str, str] = field(default_factory=dict)
    earlier: tuple[Segment, ...] = ()

    def to_table(self) -> dict[str, Scalar | list[Table]]:
        """Return the content of the [provenance] table."""
        table: dict[str, Scalar | list[Table]] = {FORMAT: RUN_FORMAT, DATA: self.data, **asdict(self.choices)}
        table |= self.versions_and_hardware
        return table | ({EARLIER: [segment.to_table() for segment in self.earlier]} if self.earlier else {})

    @classmethod
    def from_table(cls, table: Mapping[str, object]) -> Provenance:
        """Parse the [provenance] table; raise KeyError, TypeError or ValueError if it is invalid."""
        names = [f.name for f in fields(Choices)]
        texts = {name: str(table[name]) for name in (DATA, *names)}
        choices = Choices(
            texts["strategy"], int(texts["devices"]), texts["accelerator"], texts["loader"], int(texts["workers"])
        )
        others = {name: value for name, value in table.items() if name not in (FORMAT, DATA, EARLIER, *names)}
        earlier = table.get(EARLIER, [])
        if not isinstance(earlier, list):
            raise TypeError(f"{EARLIER} is not a list")
        segments = tuple(Segment.from_table(one) for one in earlier)
        return cls(texts[DATA], choices, {name: str(value) for name, value in others.items()}, segments)


@dataclass(frozen=True)
class RunRecord:
    """The content of a run's config.toml."""

    recipe: str
    settings: SettingValues  # per-network settings are nested tables
    provenance: Provenance

    @property
    def segment(self) -> Segment:
        """The last segment of the run."""
        return segment_of(self.settings, self.provenance.choices, self.provenance.versions_and_hardware)

    @property
    def segments(self) -> list[Segment]:
        """All segments of the run, in order."""
        return [*self.provenance.earlier, self.segment]

    def write(self, run: Path) -> None:
        """Write config.toml to a run folder, replacing the old one."""
        settings: dict[str, SettingValue] = {"recipe": self.recipe, **flatten(self.settings)}
        write_file(run / CONFIG, to_toml(settings, self.provenance.to_table()))


def read_record(run: Path, where: str = "") -> RunRecord | None:
    """Return the record in a run folder, or None if it has no config.toml.

    Raise UserError if the file cannot be read or its run format is not supported. A message about the format begins
    with `where`, by default the folder.
    """
    file = run / CONFIG
    try:
        kept = parse_toml(read_bounded(file, MAX_TOML_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({why(error)}): restore the file") from None
    recipe, provenance = kept.pop("recipe", None), kept.pop(PROVENANCE, None)
    if not isinstance(recipe, str):
        raise UserError(f"{file}: does not name a recipe, so {run} is not a run folder")
    if not isinstance(provenance, dict) or not provenance:
        raise UserError(f"{file}: damaged: [{PROVENANCE}] is missing: restore the file")
    check_format(provenance.get(FORMAT), where or str(run))
    try:
        return RunRecord(recipe, kept, Provenance.from_table(provenance))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(f"{file}: [{PROVENANCE}] cannot be read ({error}): restore the file") from None
