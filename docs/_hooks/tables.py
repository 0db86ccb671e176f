"""Fill in the reference tables, `<!-- table: settings -->` and `<!-- table: commands -->`, from the code."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup, TyperOption

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from paceline.cli.app import app
from paceline.config.flags import FLAGS
from paceline.config.resolve import own_fields
from paceline.config.settings import LearnerSettings, RunSettings
from paceline.contracts.recipe import Recipe
from paceline.core.registry import load_class, names
from paceline.data.source import Source

TABLE = re.compile(r"<!-- table: (\w+) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each `<!-- table: … -->` comment with its table."""
    return TABLE.sub(lambda found: "\n".join(TABLES[found[1]]()), markdown)


def _settings() -> Iterator[str]:
    yield from _group("Every run", RunSettings)
    yield from _group("Every network", LearnerSettings)
    for name in names("recipe"):
        yield from _group(f"Recipe `{name}`", load_class("recipe", name, Recipe).Settings)
    for name in names("source"):
        own = {f.name for f in own_fields(load_class("source", name, Source).Settings)}
        if own:
            yield from _group(f"Source `{name}`", load_class("source", name, Source).Settings, own)


def _group(title: str, group: Any, only: set[str] | None = None) -> Iterator[str]:
    yield from ("", f"## {title}", "", "| setting | default | meaning |", "|---|---|---|")
    hints = get_type_hints(group)
    for f in fields(group):
        if only is None or f.name in only:
            flag = f"<br>`--{f.name.replace('_', '-')}`" if f.name in FLAGS else ""
            hint = hints[f.name]
            values = f" ({', '.join(f'`{one}`' for one in get_args(hint))})" if get_origin(hint) is Literal else ""
            default = f"`{f.default}`" if f.default != "" else ""
            yield f"| `{f.name}`{flag} | {default} | {_cell(f.metadata['meaning'])}{values} |"


def _commands() -> Iterator[str]:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    yield from _walk("paceline", group)


def _walk(prefix: str, group: TyperGroup) -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from _walk(f"{prefix} {name}", command)
            continue
        context = typer.Context(command, info_name=f"{prefix} {name}")
        usage = " ".join(command.collect_usage_pieces(context))
        yield from ("", f"## {prefix} {name}", "", "```text", f"{prefix} {name} {usage}", "```", "")
        yield (command.help or "").strip()
        yield from ("", "| option | meaning |", "|---|---|")
        has_settings = any(p.name == "lr" for p in command.params)  # the command accepts every setting that has a flag
        own = [p for p in command.params if not (has_settings and p.name in FLAGS)]
        for parameter in own:
            shown = ", ".join(f"`{one}`" for one in (*parameter.opts, *parameter.secondary_opts))
            if not isinstance(parameter, TyperOption):
                shown = f"`{parameter.metavar or parameter.name}`"
            yield f"| {shown} | {_cell(parameter.help or '')} |"
        if len(own) < len(command.params):
            yield "| any setting that has a flag | see [settings](settings.md) |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


TABLES = {"settings": _settings, "commands": _commands}
