"""`paceline settings`: list a run's settings with their values and meanings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args, get_origin, get_type_hints

from paceline.config.flags import FLAGS
from paceline.config.resolve import own_fields
from paceline.core.registry import PluginKind, about, names, plugin_problems
from paceline.core.types import SettingValue

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Row(NamedTuple):
    """One row of a table of settings or plugins."""

    name: str
    value: str
    meaning: str


def settings(recipe: str, data: str, preset: str) -> int:
    """Print a recipe's settings; without a recipe, list all recipes, sources and broken plugins."""
    if not recipe:
        _print({"recipes": _plugins("recipe"), "sources": _plugins("source")})
        for line in plugin_problems():
            print(line)
        print("list a recipe's settings with: paceline settings RECIPE [--data SOURCE] [--preset NAME]")
        return 0
    from paceline.commands.configure import configure  # imports torch, which takes seconds

    flags = {"data": data, "preset": preset}
    config = configure(recipe, {name: value for name, value in flags.items() if value}, elsewhere=True)
    added = {f.name for f in own_fields(type(config.run))}
    of_run = _rows(config.run)
    alone = {f"{network}.{name}": value for network, own in config.networks.items() for name, value in own.items()}
    _print(
        {
            f"recipe {recipe}": list(_rows(config.recipe).values()),
            f"source {config.run.data}": [row for name, row in of_run.items() if name in added],
            "every run": [row for name, row in of_run.items() if name not in added],
            "every network (--set NETWORK.NAME=VALUE changes a single network)": list(_rows(config.learner).values()),
            "single networks": [Row(name, _shown(value), "") for name, value in alone.items()],
        }
    )
    presets = config.recipe_class.presets
    hint = f"; presets: {', '.join(presets)}" if presets else ""
    print(f"use --set NAME=VALUE for settings without a --flag{hint}")
    return 0


def _plugins(kind: PluginKind) -> list[Row]:
    """Return one row per plugin, with its name and the first line of its docstring."""
    return [Row(name, "", about(kind, name)) for name in names(kind)]


def _rows(group: DataclassInstance) -> dict[str, Row]:
    """Return one row per setting, keyed by name; if only certain values are allowed, the meaning starts with them."""
    hints, rows = get_type_hints(type(group)), {}
    for f in fields(group):
        choices = "|".join(get_args(hints[f.name])) if get_origin(hints[f.name]) is Literal else ""
        name = f"--{f.name.replace('_', '-')}" if f.name in FLAGS else f.name
        meaning = ": ".join(filter(None, (choices, f.metadata.get("meaning", ""))))
        rows[f.name] = Row(name, _shown(getattr(group, f.name)), meaning)
    return rows


def _shown(value: SettingValue | Mapping[str, SettingValue]) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={entry}" for name, entry in value.items()) or "–"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value) or "–"


def _print(tables: Mapping[str, Sequence[Row]]) -> None:
    """Print the tables, all with the same column widths."""
    rows = [row for table in tables.values() for row in table]
    name_width, value_width = max(len(row.name) for row in rows), max(len(row.value) for row in rows)
    for title, table in tables.items():
        if table:
            print(title)
            for row in table:
                print(f"  {row.name:<{name_width}}  {row.value:<{value_width}}  {row.meaning}".rstrip())
            print()
