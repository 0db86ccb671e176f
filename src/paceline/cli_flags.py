"""Arguments and flags that commands share; every setting is a flag, declared once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from paceline.data.sources._photos_settings import PhotosSettings
from paceline.settings import LearnerSettings

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="a recipe's name, or the path of your own .py file")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="a run's folder")]
Checkpoint = Annotated[str, typer.Option(help="best, last or the images seen at one")]
Accelerator = Annotated[str, typer.Option(help="auto, cpu or cuda")]
ConfigFile = Annotated[str, typer.Option("--config", help="settings from a TOML or INI file", metavar="FILE")]
Vgg = Annotated[str, typer.Option("--vgg", help="VGG19's weights, for recipes with a perceptual term", metavar="FILE")]
Assignments = Annotated[list[str], typer.Option("--set", help="any setting; repeat for more", metavar="NAME=VALUE")]


def _meaning(name: str) -> str:
    return PhotosSettings.__dataclass_fields__[name].metadata["meaning"]


LowRoot = Annotated[str, typer.Option("--low-root", help=_meaning("low_root"))]
TestRoot = Annotated[str, typer.Option("--test-root", help=_meaning("test_root"))]
TestLowRoot = Annotated[str, typer.Option("--test-low-root", help=_meaning("test_low_root"))]


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command a flag for each setting that has one; they arrive as the dict `flags`."""

    def wrapped(**arguments: Any) -> None:
        flags = {name: arguments.pop(name) for name in options}
        command(**arguments, flags={name: value for name, value in flags.items() if value is not None})

    options: dict[str, inspect.Parameter] = {}
    for group in (PhotosSettings, LearnerSettings):  # the run's, and those of the one source that has flags
        hints = get_type_hints(group)
        for f in fields(group):
            if f.metadata["flag"]:
                kind = bool if hints[f.name] is bool else str  # config.py converts, with one kind of message
                default = f"default: {f.default}" if f.default not in ("", 0) else ""
                text = f.metadata["meaning"] + (f" ({default})" if default else "")
                names = [f"--{f.name.replace('_', '-')}"] + (
                    [f"--no-{f.name.replace('_', '-')}"] if kind is bool else []
                )
                values = "|".join(get_args(hints[f.name])) if get_origin(hints[f.name]) is Literal else "VALUE"
                flag = typer.Option(
                    "/".join(names), help=text, show_default=False, metavar=None if kind is bool else values
                )
                annotation = Annotated[kind | None, flag]  # type: ignore[valid-type]
                options[f.name] = inspect.Parameter(
                    f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
                )
    own = [p for name, p in inspect.signature(command, eval_str=True).parameters.items() if name != "flags"]
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    wrapped.__signature__ = inspect.Signature([*own, *options.values()])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in [*own, *options.values()]}
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    return wrapped


def with_vgg(assignments: list[str], vgg: str) -> list[str]:
    """A flag for what is a recipe's own setting."""
    return [*assignments, f"vgg={vgg}"] if vgg else assignments
