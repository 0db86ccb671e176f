"""`paceline --help`: grouped, complete, with examples that parse, and readable on a narrow terminal."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest
import typer
from typer.core import TyperCommand, TyperGroup

from paceline.cli.app import app, run
from paceline.cli.help import EXAMPLES
from paceline.config.flags import GROUPS
from paceline.contracts.recipe import Recipe
from paceline.core.registry import load_class, names, preset_names


def commands() -> dict[str, TyperCommand | TyperGroup]:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    found: dict[str, TyperCommand | TyperGroup] = {}
    for name, command in group.commands.items():
        found[name] = command
        found |= {f"{name} {inner}": one for inner, one in getattr(command, "commands", {}).items()}
    return found


def help_of(name: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run([*name.split(), "-h"]) == 0
    return capsys.readouterr().out


def words_of(text: str) -> list[str]:
    """Return the words of a help page, without comment signs and line continuations."""
    return [word for word in text.split() if word not in ("\\", "#")]


@pytest.mark.parametrize("arguments", [[], ["launch"]])
def test_a_command_without_arguments_prints_its_help_and_succeeds(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"Usage: {' '.join(['paceline', *arguments])} [OPTIONS] COMMAND") and not printed.err


@pytest.mark.parametrize("name", ["", *commands()])
def test_help_fits_the_terminal_and_breaks_no_word(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide, *others = (help_of(name, columns, capsys, monkeypatch) for columns in (100, 80, 40))
    for text, columns in zip(others, (80, 40), strict=True):
        assert not [line for line in text.splitlines() if len(line) > columns]
        assert words_of(text) == words_of(wide)
    assert "\x1b" not in wide


def test_help_for_train_lists_groups_defaults_choices_recipes_and_presets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = help_of("train", 100, capsys, monkeypatch)
    assert [line[:-1] for line in text.splitlines() if line[:-1] in GROUPS] == list(GROUPS)
    joined = " ".join(text.split())
    for expected in (
        "[default: 128]",
        "[default: off]",
        "[none, bf16; default: none]",
        "Presets: cifar10, cifar10_reference, quick.",
    ):
        assert expected in joined
    assert all(f"  {name}" in text for name in names("recipe"))


@pytest.mark.parametrize("recipe", names("recipe"))
def test_presets_are_found_without_importing_the_recipe(recipe: str) -> None:
    assert preset_names(recipe) == sorted(load_class("recipe", recipe, Recipe).presets)


def test_every_command_has_examples_and_every_example_parses() -> None:
    found = commands()
    assert {name for name, command in found.items() if not isinstance(command, TyperGroup)} == set(EXAMPLES)
    for name, lines in EXAMPLES.items():
        for line in lines.splitlines():
            words = shlex.split(line, comments=True)
            assert words[: 1 + len(name.split())] == ["paceline", *name.split()], line
            command = found[name]
            assert command.make_context(name, words[1 + len(name.split()) :])


def test_a_wrong_recipe_or_source_is_reported_before_torch_is_imported() -> None:
    code = (
        "import sys; from paceline.cli.app import run\n"
        "wrong = ('train clasification', 'plan dcgan --data digit', 'settings ./x.py')\n"
        "codes = [run(words.split()) for words in wrong]\n"
        "print(codes, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[2, 2, 2] False\n"
    assert done.stderr.startswith("paceline: unknown recipe 'clasification'; did you mean 'classification'?\n")
    assert len(done.stderr.splitlines()) == 3


@pytest.mark.parametrize(
    ("words", "suggested"),
    [
        ("train cl", {"classification"}),
        ("compare dcgan --sync-b", {"--sync-batchnorm"}),
    ],
)
def test_the_shell_completes_recipes_and_flags(words: str, suggested: set[str]) -> None:
    line = f"paceline {words}"
    request = {"_PACELINE_COMPLETE": "complete_bash", "COMP_WORDS": line}
    request["COMP_CWORD"] = str(len(line.split(" ")) - 1)
    command = [sys.executable, "-c", "from paceline.cli.app import app; app(prog_name='paceline')"]
    answer = subprocess.run(command, env={**os.environ, **request}, capture_output=True, text=True, timeout=60)
    assert set(answer.stdout.split()) == suggested, answer.stderr
