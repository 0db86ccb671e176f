"""The commands: parse, then call one job. Nothing here imports torch before a command runs."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from paceline import __version__
from paceline.config import LearnerSettings, RunSettings
from paceline.errors import UserError

app = typer.Typer(
    help="Trains image models on one device or many, from one recipe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="a recipe's name, or the path of your own .py file")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="a run's folder")]
Checkpoint = Annotated[str, typer.Option(help="best, last or the images seen at one")]
Accelerator = Annotated[str, typer.Option(help="auto, cpu or cuda")]
ConfigFile = Annotated[str, typer.Option("--config", help="settings from a TOML or INI file", metavar="FILE")]
Assignments = Annotated[list[str], typer.Option("--set", help="any setting; repeat for more", metavar="NAME=VALUE")]


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command a flag for each setting that has one; they arrive as the dict `flags`."""

    def wrapped(**arguments: Any) -> None:
        flags = {name: arguments.pop(name) for name in options}
        command(**arguments, flags={name: value for name, value in flags.items() if value is not None})

    options: dict[str, inspect.Parameter] = {}
    for group in (RunSettings, LearnerSettings):
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


@app.command()
@with_settings
def train(recipe: RecipeName, flags: dict, config: ConfigFile = "", set_: Assignments = []) -> None:  # noqa: B006
    """Train a recipe; the same command again goes on where it stopped.

    A recipe or a preset may have defaults of its own. Settings without a flag are given with --set.
    """
    from paceline.jobs.configure import configure
    from paceline.jobs.train import train as job

    raise typer.Exit(job(configure(recipe, flags, config_file=config, assignments=set_)))


@app.command()
def evaluate(
    run: RunName,
    split: Annotated[str, typer.Option(help="test, validation or train (default: test; train for generators)")] = "",
    data: Annotated[str, typer.Option(help="another source than the run's own")] = "",
    data_root: Annotated[str, typer.Option(help="folder with the source's files")] = "",
    checkpoint: Checkpoint = "best",
    devices: Annotated[int, typer.Option(help="how many devices share the work")] = 1,
    accelerator: Accelerator = "",
    inception: Annotated[str, typer.Option(help="file of the Inception network that FID is defined by")] = "",
    inception_sha256: Annotated[str, typer.Option(help="SHA-256 of an --inception file that you trust")] = "",
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Measure a run's weights on any data."""
    from paceline.config_file import parse_assignments
    from paceline.jobs.evaluate import evaluate as job

    flags = {"data": data, "data_root": data_root, "devices": devices, "accelerator": accelerator}
    flags |= {"inception": inception, "inception_sha256": inception_sha256}
    raise typer.Exit(job(run, split, flags, parse_assignments(set_), checkpoint))


@app.command()
def sample(
    run: RunName,
    out: Annotated[str, typer.Option(help="a file: .png, or .gif or .webp for an animation (default: in RUN)")] = "",
    checkpoint: Checkpoint = "best",
    grid: Annotated[str, typer.Option(help="rows and columns of the grid")] = "8x8",
    interpolate: Annotated[
        bool, typer.Option("--interpolate", help="each row goes from one picture to another")
    ] = False,
    animate: Annotated[bool, typer.Option("--animate", help="the same pictures over the course of training")] = False,
    beside: Annotated[str, typer.Option(help="put another run's pictures next to these", metavar="RUN")] = "",
    accelerator: Accelerator = "",
) -> None:
    """Show what a generator makes of the same random numbers as always."""
    from paceline.jobs.sample import Wish
    from paceline.jobs.sample import sample as job

    wish = Wish(grid=grid, interpolate=interpolate, animate=animate, checkpoint=checkpoint, accelerator=accelerator)
    raise typer.Exit(job([run, *filter(None, [beside])], out, wish))


@app.command()
@with_settings
def verify(
    recipe: RecipeName,
    flags: dict,
    strategies: Annotated[
        str, typer.Option(help="which to hold against the first, with commas")
    ] = "single,ddp,lightning",
    steps: Annotated[int, typer.Option(help="how many steps to train")] = 20,
    tolerance: Annotated[float, typer.Option(help="largest difference, relative to the largest weight")] = 1e-9,
    control: Annotated[str, typer.Option(help="break it on purpose: unsynced-batchnorm or repeated-part")] = "",
    config: ConfigFile = "",
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Show that a recipe gives the same weights under every strategy, in float64."""
    from paceline.jobs.configure import configure
    from paceline.jobs.verify import verify as job

    resolved = configure(recipe, {"devices": 2} | flags, config_file=config, assignments=set_, small=True)
    raise typer.Exit(job(resolved, strategies.split(","), steps, tolerance, control))


@app.command()
def doctor(
    self_test: Annotated[bool, typer.Option("--self-test", help="run a short verify and a timed all-reduce")] = False,
) -> None:
    """Show what this machine has, and which strategies and loaders can run here."""
    from paceline.jobs.doctor import doctor as job

    raise typer.Exit(job(self_test))


@app.command()
def new(
    kind: Annotated[str, typer.Argument(metavar="recipe|source", help="what to write")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="its name, and its file's")],
) -> None:
    """Write a recipe or a source of your own that works as it is."""
    from pathlib import Path

    from paceline.jobs.new import new as job

    path = job(kind, name, Path.cwd())
    print(
        f"wrote {path.name}; try: paceline train {'./' if kind == 'recipe' else 'classification --data ./'}{path.name}"
    )


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="show the version")] = False) -> None:
    if show:
        print(f"paceline {__version__}")
        raise typer.Exit()


def run(arguments: list[str] | None = None) -> int:
    """Runs a command and gives its exit code; a person's mistake ends in one line and exit code 2."""
    try:
        return app(arguments, standalone_mode=False) or 0
    except UserError as mistake:
        print(f"paceline: {' '.join(str(mistake).splitlines())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("paceline: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if not hasattr(error, "format_message"):  # of the command line's own parser
            traceback.print_exc()
            return 1
        print(f"paceline: {error.format_message()} (--help lists what there is)", file=sys.stderr)
        return 2


def main() -> None:
    """The command `paceline`."""
    code = run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without the interpreter's tear-down, in which threads of a process group can hang
