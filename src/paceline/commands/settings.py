"""`paceline settings`: what can be set, the value that a run would have, and what it means."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from paceline.commands.configure import configure
from paceline.config.resolve import own_fields
from paceline.core.registry import PluginKind, about, faults, names

Row = tuple[str, str, str]  # a name, a value and a meaning


def settings(recipe: str, data: str, preset: str) -> int:
    """Print the settings of a recipe's runs; without a recipe, all recipes, sources and broken plugins."""
    if not recipe:
        _print({"recipes": _plugins("recipe"), "sources": _plugins("source")})
        for line in faults():
            print(line)
        print("paceline settings RECIPE [--data SOURCE] [--preset NAME] lists what can be set")
        return 0
    said = {"data": data, "preset": preset}
    config = configure(recipe, {name: value for name, value in said.items() if value}, elsewhere=True)
    added = {f.name for f in own_fields(type(config.run))}
    alone = {f"{network}.{name}": value for network, own in config.networks.items() for name, value in own.items()}
    _print(
        {
            f"recipe {recipe}": _rows(config.recipe),
            f"source {config.run.data}": _rows(config.run, only=added),
            "every run": _rows(config.run, but=added),
            "every network; --set NETWORK.NAME=VALUE is for one alone": _rows(config.learner),
            "one network alone": [(name, _shown(value), "") for name, value in alone.items()],
        }
    )
    presets = config.recipe_class.presets
    print("what has no --flag is given with --set NAME=VALUE" + (f"; presets: {', '.join(presets)}" if presets else ""))
    return 0


def _plugins(kind: PluginKind) -> list[Row]:
    """Return the names of a kind, with the first line of what each says about itself."""
    return [(name, "", about(kind, name)) for name in names(kind)]


def _rows(group: Any, only: Iterable[str] | None = None, but: Iterable[str] = ()) -> list[Row]:
    """The settings of a group, a choice with the values that there are."""
    hints, rows = get_type_hints(type(group)), []
    for f in fields(group):
        if f.name in but or (only is not None and f.name not in only):
            continue
        choices = "|".join(get_args(hints[f.name])) if get_origin(hints[f.name]) is Literal else ""
        name = f"--{f.name.replace('_', '-')}" if f.metadata.get("flag") else f.name
        meaning = ": ".join(filter(None, (choices, f.metadata.get("meaning", ""))))
        rows.append((name, _shown(getattr(group, f.name)), meaning))
    return rows


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value) or "–"


def _print(tables: dict[str, list[Row]]) -> None:
    """Tables one after the other, in columns of one width."""
    rows = [row for table in tables.values() for row in table]
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    for title, table in tables.items():
        if table:
            print(title)
            for name, value, meaning in table:
                print(f"  {name:<{name_width}}  {value:<{value_width}}  {meaning}".rstrip())
            print()
