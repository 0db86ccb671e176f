"""The file loggers.json in a run folder: the ID of the run in each logger's service, so that a resumed run keeps it."""

from __future__ import annotations

import re
import threading
from pathlib import Path

from paceline.config.resolve import flatten
from paceline.core.files import write_json
from paceline.core.secrets import redact
from paceline.core.small_files import read_json
from paceline.core.types import SettingValue
from paceline.runs.record import read_record

LOGGER_RUNS = "loggers.json"
_writing = threading.Lock()  # several loggers may write the file at the same time
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def read_run_id(folder: Path, logger: str, service: str = "") -> str:
    """Return the ID of this run in a logger's service; empty if there is none, or if the service is a different one."""
    entry = read_json(folder / LOGGER_RUNS).get(logger)
    if not isinstance(entry, dict) or entry.get("service") != redact(service):
        return ""
    found = entry.get("id")
    return found if isinstance(found, str) and _ID.fullmatch(found) else ""


def write_run_id(folder: Path, logger: str, run_id: str, service: str = "") -> None:
    """Store the ID of this run in a logger's service; `service` is its address, stored without credentials."""
    with _writing:
        kept = dict(read_json(folder / LOGGER_RUNS))
        write_json(folder / LOGGER_RUNS, {**kept, logger: {"id": run_id, "service": redact(service)}}, indent=1)


def describe_run(folder: Path) -> dict[str, SettingValue]:
    """Return a run's recipe, settings, versions and hardware by name, without credentials; empty before it starts."""
    record = read_record(folder)
    if record is None:
        return {}
    provenance = {f"provenance.{name}": text for name, text in record.provenance.versions_and_hardware.items()}
    found = {"recipe": record.recipe, **flatten(record.settings), **provenance}
    return {name: redact(value) if isinstance(value, str) else value for name, value in found.items()}
