"""Every command, flag and setting in the documentation exists, and its values are accepted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
import typer
from documented import ROOT, Command, blocks, commands, inline_code
from typer.core import TyperCommand, TyperGroup

from paceline.cli.app import app
from paceline.commands.configure import configure
from paceline.config.files import parse_assignments
from paceline.config.settings import LearnerSettings
from paceline.contracts.recipe import Recipe
from paceline.core import registry
from paceline.data.source import Source

LEARNER = {f.name for f in fields(LearnerSettings)}
TABLES = {"network_args"}  # settings whose entries have names that are not declared
# Commands that take one recipe's settings; for all other commands, only setting names are checked.
RESOLVED = {"train", "verify", "plan"}
# Settings that the example recipe and source in docs/guide/ declare.
EXAMPLES = {"first", "noise_size"}
INSTALLED_RECIPES = {"rotation"}  # a recipe from examples/paceline-example, which is not installed during tests
TABLE_OF_SETTINGS = re.compile(r"^\| *setting *\|", re.IGNORECASE)


def group() -> TyperGroup:
    parsed = typer.main.get_command(app)
    assert isinstance(parsed, TyperGroup)
    return parsed


@cache
def known_settings() -> set[str]:
    """Return every name that `--set` accepts for some recipe or source."""
    names = set(LEARNER)
    for recipe in registry.names("recipe"):
        names |= {f.name for f in fields(registry.load_class("recipe", recipe, Recipe).Settings)}
    for source in registry.names("source"):
        names |= {f.name for f in fields(registry.load_class("source", source, Source).Settings)}
    return names


def subcommand(words: list[str]) -> tuple[TyperCommand | TyperGroup, list[str]] | None:
    """Return the command for `paceline WORDS` and the remaining words; None if no command matches."""
    command: TyperCommand | TyperGroup = group()
    while isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return None
        command, words = command.commands[words[0]], words[1:]
    return command, words


def flags_of(command: TyperCommand | TyperGroup) -> set[str]:
    return {"--help", *(name for p in command.params for name in (*p.opts, *p.secondary_opts) if name.startswith("--"))}


def all_flags() -> set[str]:
    def walk(command: TyperCommand | TyperGroup) -> Iterator[TyperCommand | TyperGroup]:
        yield command
        if isinstance(command, TyperGroup):
            for inner in command.commands.values():
                yield from walk(inner)

    return {flag for command in walk(group()) for flag in flags_of(command)}


def paceline_commands() -> list[Command]:
    return [command for command in commands() if command.words and command.words[0] == "paceline"]


@pytest.mark.parametrize("command", paceline_commands(), ids=str)
def test_a_command_in_the_documentation_parses(command: Command) -> None:
    found = subcommand(command.words[1:])
    assert found, f"no such command: {command}"
    parsed, words = found
    if isinstance(parsed, TyperGroup):  # options without a command: --version, --help
        assert words and set(words) <= flags_of(parsed)
        return
    if "--help" in words:
        return
    parameters = parsed.make_context(parsed.name, list(words)).params
    assignments = parse_assignments(parameters.get("set_") or [])
    unknown = {name for name in assignments if not is_known(name)}
    assert not unknown, f"{command}: no setting is called {', '.join(sorted(unknown))}"
    recipe = parameters.get("recipe", "")
    if parsed.name in RESOLVED and not registry.is_path(recipe) and recipe not in INSTALLED_RECIPES:
        resolve(parsed.name, parameters)


def is_known(name: str) -> bool:
    table, dot, own = name.rpartition(".")
    return own in LEARNER or table in TABLES if dot else name in known_settings() | EXAMPLES


def resolve(name: str, parameters: dict[str, Any]) -> None:
    """Resolve settings as the command does, but ignore which files and devices this machine has."""
    own = {"recipe", "config", "vgg", "set_", "strategies", "steps", "tolerance", "control", "result"}
    own |= {"nodes", "bandwidth", "latency", "check", "memory", "device_memory", "name"}
    flags = {key: value for key, value in parameters.items() if key not in own and value is not None}
    if registry.is_path(flags.get("data", "")):
        flags.pop("data")
        parameters = parameters | {"set_": [one for one in parameters["set_"] if one.partition("=")[0] not in EXAMPLES]}
    configure(parameters["recipe"], flags, assignments=parameters["set_"], small=name == "verify", elsewhere=True)


def test_inline_commands_and_flags_exist() -> None:
    flags, wrong = all_flags(), []
    for place, code in inline_code():
        words = code.split()
        if words[0] == "paceline" and len(words) > 1 and words[1].isidentifier():
            found = subcommand([word for word in words[1:] if word != "…"])
            known = flags_of(found[0]) if found else set()
            bad = [] if found else [words[1]]
            bad += [word for word in words if word.startswith("--") and word not in known]
        elif words[0].startswith("--"):
            bad = [word for word in words if word.startswith("--") and re.split(r"[/=]", word)[0] not in flags]
        else:
            continue
        bad += [name for name in re.findall(r"--set ([a-z_0-9.]+)=", code) if not is_known(name)]
        wrong += [f"{place}: `{code}`: {', '.join(bad)}"] if bad else []
    assert not wrong, "\n".join(wrong)


def test_settings_tables_list_existing_settings() -> None:
    wrong = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        inside = False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            inside = (inside and line.startswith("|")) or bool(TABLE_OF_SETTINGS.match(line))
            if inside:
                names = re.findall(r"`(?:--set )?([a-z][a-z_0-9]*)=?`", line.split("|")[1])
                wrong += [f"{path.name}:{number}: {name}" for name in names if not is_known(name)]
    assert not wrong, "\n".join(wrong)


def test_every_block_has_a_language() -> None:
    """Blocks without a language would not be tested."""
    assert not [f"{block.page}:{block.line}" for block in blocks() if not block.language]
