"""The file in each run's folder that records how a comparison trained the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.core.files import write_json
from paceline.core.small_files import read_json

RECORD = "cell.json"  # name of a file in each run's folder


@dataclass(frozen=True)
class CellRecord:
    """The inputs that determine a run in the grid, and how the run was trained."""

    made_from: dict[str, str]
    finished: bool
    side_by_side: bool = False  # whether other runs were trained at the same time, so the run's speed is too low

    @classmethod
    def read(cls, folder: Path) -> CellRecord | None:
        """Return the record in a run's folder, or None if it is missing or cannot be read."""
        content = read_json(folder / RECORD)
        made_from, finished = content.get("made_from"), content.get("finished")
        if not isinstance(made_from, dict) or not isinstance(finished, bool):
            return None
        return cls(made_from, finished, content.get("side_by_side") is True)

    def write(self, folder: Path) -> None:
        """Save the record in a run's folder."""
        write_json(folder / RECORD, asdict(self))
