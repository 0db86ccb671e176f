"""Settings from files and words, and back into the file that is kept with a run."""

from __future__ import annotations

import configparser
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.config.resolve import Config, Inherited, flatten
from paceline.core.checksums import checksum_of_content
from paceline.core.errors import UserError


def read_file(path: str) -> dict[str, Any]:
    """The settings in a TOML or INI file; sections of an INI file are one namespace."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"--config {path}: no such file")
    text = file.read_text()
    try:
        if file.suffix == ".ini":
            parser = configparser.ConfigParser()
            parser.read_string(text)
            return {name: value for section in parser.sections() for name, value in parser.items(section)}
        settings = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, configparser.Error) as error:
        raise UserError(f"--config {path}: {' '.join(str(error).split())}") from None
    if settings.pop(MADE_WITH, None):  # kept with a run: its settings make another run, in another folder
        for place in ("out", "mirror", "resume_from"):
            settings.pop(place, None)
        return Inherited(settings)
    return settings


def parse_assignments(assignments: Iterable[str]) -> dict[str, str]:
    """`name=value` words as a layer of settings."""
    pairs = {}
    for word in assignments:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UserError(f"--set {word}: expected name=value")
        pairs[name.strip()] = value.strip()
    return pairs


MADE_WITH = "made_with"  # the table of versions and hardware in a kept config, not settings


def to_toml(settings: Mapping[str, Any], made_with: Mapping[str, Any]) -> str:
    """Resolved settings, by full names, as a file that `--config` takes; lists in `made_with` are of tables."""
    tables: dict[str, dict[str, Any]] = {"": {}}
    for full_name, value in settings.items():
        network, _, name = full_name.rpartition(".")
        tables.setdefault(network, {})[name] = value
    several = {name: value for name, value in made_with.items() if isinstance(value, list)}
    if made_with:
        tables[MADE_WITH] = {name: value for name, value in made_with.items() if name not in several}
    lines = [line for name, values in tables.items() for line in _table(f"[{name}]" if name else "", values)]
    lines += [line for name in several for one in several[name] for line in _table(f"[[{MADE_WITH}.{name}]]", one)]
    return "\n".join(lines) + "\n"


def _table(head: str, values: Mapping[str, Any]) -> list[str]:
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    return [f"\n{head}", *lines] if head else lines


def identity(config: Config, data: str) -> str:
    """What a run has in common with itself on another machine, in short: all that it may not change, and its data."""
    free = _free(config)
    fixed = {name: value for name, value in _portable(config.values()).items() if name not in free}
    return checksum_of_content([fixed, data])[:16]


def changed_settings(kept: Mapping[str, Any], now: Config) -> list[str]:
    """What a resumed run may not change and does, as `name: was → is`."""
    before, after = _portable(flatten(kept)), _portable(now.values())
    del after["recipe"]
    free = _free(now)
    names = [name for name in dict.fromkeys([*before, *after]) if name not in free]
    return [f"{name}: {before.get(name)} → {after.get(name)}" for name in names if before.get(name) != after.get(name)]


def _free(config: Config) -> set[str]:
    """What a resumed run may change."""
    return {f.name for f in fields(config.run) if f.metadata.get("free")}


def _portable(values: dict[str, Any]) -> dict[str, Any]:
    """Settings with the start of a run as its own folder sees it, since both may be moved, or named in another way."""
    start, out = values.get("init_from"), values.get("out")
    return values | {"init_from": os.path.relpath(start, out)} if start and out else values
