"""Settings from files and from `name=value` words, and back into the config.toml that a run keeps."""

from __future__ import annotations

import configparser
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path

from paceline.config.resolve import Config, Inherited, Layer, flatten
from paceline.config.run_format import FORMAT, check_format
from paceline.core.checksums import checksum_of_content
from paceline.core.errors import UserError
from paceline.core.types import SettingValue, SettingValues

PROVENANCE = "provenance"  # the table in a run's config.toml that holds no settings: format, versions, hardware
NOT_INHERITED = ("out", "mirror", "resume_from")  # places of one run, which the next run must not share

Table = Mapping[str, SettingValue]


def read_file(path: str) -> Layer:
    """Return the settings in a TOML or INI file; sections of an INI file are one namespace.

    The settings of a run's config.toml are inherited: they start another run, in another folder.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"--config {path}: no such file")
    text = file.read_text()
    try:
        if file.suffix == ".ini":
            parser = configparser.ConfigParser()
            parser.read_string(text)
            return {name: value for section in parser.sections() for name, value in parser.items(section)}
        settings: dict[str, SettingValue | Table] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, configparser.Error) as error:
        raise UserError(f"--config {path}: {' '.join(str(error).split())}") from None
    provenance = settings.pop(PROVENANCE, None)
    if not isinstance(provenance, Mapping):
        return settings
    check_format(provenance.get(FORMAT), f"--config {path}")
    return Inherited({name: value for name, value in settings.items() if name not in NOT_INHERITED})


def parse_assignments(assignments: Iterable[str]) -> dict[str, str]:
    """Return `name=value` words as a layer of settings."""
    pairs = {}
    for word in assignments:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UserError(f"--set {word}: expected name=value")
        pairs[name.strip()] = value.strip()
    return pairs


def to_toml(settings: Table, provenance: Mapping[str, SettingValue | list[Table]]) -> str:
    """Return settings, by full names, as a file for `--config`; a list in `provenance` becomes an array of tables."""
    tables: dict[str, dict[str, SettingValue]] = {"": {}}
    for full_name, value in settings.items():
        network, _, name = full_name.rpartition(".")
        tables.setdefault(network, {})[name] = value
    arrays = {name: value for name, value in provenance.items() if isinstance(value, list)}
    if provenance:
        tables[PROVENANCE] = {name: value for name, value in provenance.items() if not isinstance(value, list)}
    lines = [line for name, values in tables.items() for line in _table(f"[{name}]" if name else "", values)]
    lines += [
        line for name, array in arrays.items() for one in array for line in _table(f"[[{PROVENANCE}.{name}]]", one)
    ]
    return "\n".join(lines) + "\n"


def _table(header: str, values: Table) -> list[str]:
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    return [f"\n{header}", *lines] if header else lines


def identity(config: Config, data: str) -> str:
    """Return a hash that a run has on every machine: of all that it may not change, and of its data."""
    mutable = _mutable_on_resume(config)
    fixed = {name: value for name, value in _portable(config.values()).items() if name not in mutable}
    return checksum_of_content([fixed, data])[:16]


def changed_settings(kept: SettingValues, now: Config) -> list[str]:
    """Return what a resumed run changes although it must not, as `name: was → is`."""
    before, after = _portable(flatten(kept)), _portable(now.values())
    del after["recipe"]
    mutable = _mutable_on_resume(now)
    names = [name for name in dict.fromkeys([*before, *after]) if name not in mutable]
    return [f"{name}: {before.get(name)} → {after.get(name)}" for name in names if before.get(name) != after.get(name)]


def _mutable_on_resume(config: Config) -> set[str]:
    return {f.name for f in fields(config.run) if f.metadata.get("mutable_on_resume")}


def _portable(values: dict[str, SettingValue]) -> dict[str, SettingValue]:
    """Return settings with `init_from` relative to `out`: both may be moved together, or be spelled differently."""
    start, out = str(values.get("init_from", "")), str(values.get("out", ""))
    return values | {"init_from": os.path.relpath(start, out)} if start and out else values
