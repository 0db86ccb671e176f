"""A run's config.toml: its settings and, in the [provenance] table, how and where it was trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from paceline.config.files import PROVENANCE, Table, to_toml
from paceline.config.resolve import flatten
from paceline.config.run_format import FORMAT, RUN_FORMAT, check_format
from paceline.core.errors import UserError
from paceline.core.files import write_file
from paceline.core.small_files import MAX_TOML_BYTES, parse_toml, read_bounded, why
from paceline.core.types import Scalar, SettingValue, SettingValues
from paceline.runs.segments import Choices, Segment, segment_of

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
