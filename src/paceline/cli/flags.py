"""Arguments and flags that commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from difflib import get_close_matches
from functools import cache
from itertools import zip_longest
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import typer

from paceline.config.flags import ALIASES, FLAGS, SourceFlags
from paceline.config.settings import LearnerSettings
from paceline.core.errors import UserError
from paceline.core.files import SAFETENSORS
from paceline.core.registry import check_name, names
from paceline.core.trust import set_trust
from paceline.core.types import SettingValue


def complete_recipe(incomplete: str) -> list[str]:
    """Return the recipes whose names start with the given text."""
    return [name for name in names("recipe") if name.startswith(incomplete)]


Command = Callable[..., None]
# Setting values by name, as given on the command line. `configure` converts the text.
Flags: TypeAlias = dict[str, str | bool]

COMPILE_VALUES = ("auto", "on", "off")

RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="name of a recipe, or path to your own .py file",
        autocompletion=complete_recipe,
    ),
]
RunName = Annotated[
    str,
    typer.Option(
        "--name",
        help="name of the run, whose folder is then runs/NAME; takes precedence over --out",
        metavar="NAME",
        rich_help_panel="Common",
    ),
]
Weights = Annotated[str, typer.Argument(metavar="RUN|WEIGHTS", help=f"a run folder or a {SAFETENSORS} file")]
ConfigFile = Annotated[
    str,
    typer.Option("--config", help="read settings from a TOML or INI file", metavar="FILE", rich_help_panel="Common"),
]
Vgg = Annotated[
    str,
    typer.Option(
        "--vgg",
        help="file with VGG19 weights, for recipes with a perceptual loss",
        metavar="FILE",
        rich_help_panel="Evaluation and logging",
    ),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="run code from .py files that a run or a --config file refers to", callback=set_trust),
]
Assignments = Annotated[
    list[str],
    typer.Option(
        "--set",
        help="change any setting, e.g. --set size=64; can be repeated; `paceline settings RECIPE` lists all settings",
        metavar="NAME=VALUE",
        rich_help_panel="Common",
    ),
]


def with_options(
    only: Collection[str] = (),
    *,
    but: Collection[str] = (),
    defaults: Mapping[str, SettingValue] = MappingProxyType({}),
) -> Callable[[Command], Command]:
    """Return a decorator that declares the options which a command receives in its parameters `flags` and `options`.

    `flags` stands for one flag for each setting that has one, except those in `but`, or only those in `only`; the
    command receives those that the user gave. `defaults` replaces the defaults shown in its help. `options` stands for
    the annotated fields of its dataclass. A command that reads a settings file also gets the option --trust.
    """

    def declare(command: Command) -> Command:
        parameters = inspect.signature(command, eval_str=True).parameters
        group = parameters["options"].annotation if "options" in parameters else None
        options = {f.name: _parameter(f.name, hint, f.default) for f, hint in _annotated(group)} if group else {}
        chosen = [(f, hint) for f, hint in _fields_with_flags() if f.name not in but and (f.name in only or not only)]
        settings = {f.name: _option(f, hint, defaults) for f, hint in chosen} if "flags" in parameters else {}
        adds_trust = "config" in parameters

        def wrapped(**arguments: Any) -> None:
            if adds_trust:
                del arguments["trust"]  # its callback has recorded it
            if group:
                arguments["options"] = group(**{name: arguments.pop(name) for name in options})
            if settings:
                flags = {name: arguments.pop(name) for name in settings}
                check_names(arguments.get("recipe"), flags.get("data"))
                arguments["flags"] = {name: value for name, value in flags.items() if value is not None}
            command(**arguments)

        others = [_parameter(p.name, p.annotation, p.default) for p in parameters.values()]
        others = [p for p in others if p.name not in ("flags", "options")]
        others += [_parameter("trust", Trust, False)] if adds_trust else []
        first = [p for p in others if p.default is inspect.Parameter.empty]
        shown = [*first, *settings.values(), *options.values(), *(p for p in others if p not in first)]
        wrapped.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in shown}
        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        return wrapped

    return declare


def _annotated(group: Any) -> Iterator[tuple[Field[Any], Any]]:
    return ((f, hint) for f, hint in _with_types(group) if get_origin(hint) is Annotated)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def check_names(recipe: str | None, data: str | None) -> None:
    """Raise UserError for an unknown recipe or source, before the command spends seconds loading PyTorch."""
    if recipe is not None and not recipe.endswith(SAFETENSORS):  # the command explains how to use a weights file
        check_name("recipe", recipe)
    if data is not None:
        check_name("source", data)


@cache
def _fields_with_flags() -> list[tuple[Field[Any], Any]]:
    """Return the run, source and learner settings that have a flag, with their types, in the order of `--help`."""
    groups = (SourceFlags, LearnerSettings)
    by_name = {f.name: (f, hint) for group in groups for f, hint in _with_types(group) if f.name in FLAGS}
    return [by_name[name] for name in FLAGS]


def _with_types(group: Any) -> Iterator[tuple[Field[Any], Any]]:
    hints = get_type_hints(group, include_extras=True)
    return ((f, hints[f.name]) for f in fields(group))


def _option(f: Field[Any], hint: Any, defaults: Mapping[str, Any]) -> inspect.Parameter:
    kind = bool if hint is bool else str  # config/resolve.py converts the text, so all error messages are alike
    name = f.name.replace("_", "-")
    default = defaults.get(f.name, f.default)
    flag = typer.Option(
        f"--{name}/--no-{name}" if kind is bool else f"--{name}",
        help=_with_default(f, hint, default),
        show_default=False,
        metavar=None if kind is bool else "VALUE",
        rich_help_panel=FLAGS[f.name],
    )
    return _parameter(f.name, Annotated[kind | None, flag], None)


def _with_default(f: Field[Any], hint: Any, default: SettingValue) -> str:
    """Return the meaning of a setting, followed by the allowed values and the default."""
    meaning = str(f.metadata["meaning"])
    notes = [", ".join(get_args(hint))] if get_origin(hint) is Literal else []
    if "(default: " not in meaning:
        notes.append(f"default: {_shown(default)}")
    return f"{meaning} [{'; '.join(notes)}]" if notes else meaning


def _shown(default: SettingValue) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default) or "none"


def with_vgg(assignments: list[str], vgg: str) -> list[str]:
    """Return the `--set` assignments, with `vgg=FILE` appended if `--vgg` was given."""
    return [*assignments, f"vgg={vgg}"] if vgg else assignments


def with_name(flags: Flags, name: str) -> Flags:
    """Return the flags, with the run folder runs/NAME if `--name` was given."""
    if not name:
        return flags
    if "/" in name or name in (".", ".."):
        raise UserError(f"--name {name}: must not be a path; use --out for a folder outside runs/")
    return {**flags, "out": f"runs/{name}"}


def with_optional_values(words: Sequence[str]) -> list[str]:
    """Return the arguments with `--compile on` for a bare `--compile`, and `--compile off` for `--no-compile`."""
    spelled: list[str] = []
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        if word == "--no-compile":
            spelled += ["--compile", "off"]
        else:
            spelled += [word, "on"] if word == "--compile" and following not in COMPILE_VALUES else [word]
    return spelled


def in_one_line(error: Any) -> str:
    """Return an error of the parser and a hint for the user, on one line.

    The type of the error is not named because some versions of typer contain their own copy of click's classes.
    """
    if hasattr(error, "option_name") and hasattr(error, "possibilities"):  # click.NoSuchOption
        return f"{error.message} ({_instead_of(error.option_name, error.ctx.command)})"
    return f"{error.format_message()} (--help lists all options)"


def _instead_of(option: str, command: Any) -> str:
    """Return a hint on what to use instead of a flag that the command does not have."""
    name = option.lstrip("-").replace("-", "_")
    name = ALIASES.get(name, name)
    has = [one for parameter in command.params for one in parameter.opts if one.startswith("--")]
    is_known = name in FLAGS  # a correct flag of another command
    alike = get_close_matches(f"--{name.replace('_', '-')}", has, n=1, cutoff=0.9 if is_known else 0.8)
    if alike:
        return f"use {alike[0]}"
    if is_known:
        return f"not supported by {command.name}; leave it out"
    if "--set" not in has:
        return "--help lists all options"
    if name in {f.name for group in (SourceFlags, LearnerSettings) for f in fields(group)}:
        return f"use --set {name}=VALUE"
    return f"--help lists all options; for a recipe or source setting, use --set {name}=VALUE"
