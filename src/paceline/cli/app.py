"""The commands: parse, then call one job. Nothing here imports torch before a command runs."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from paceline import __version__
from paceline.cli.flags import (
    Accelerator,
    Assignments,
    Checkpoint,
    ConfigFile,
    LowRoot,
    RecipeName,
    RunName,
    TestLowRoot,
    TestRoot,
    Vgg,
    in_one_line,
    with_settings,
    with_vgg,
)
from paceline.cli.images import apply, export, import_weights, predict, sample
from paceline.cli.interrupt import Commands, Interrupted
from paceline.cli.launch import launch
from paceline.config.settings import NOT_OF_PLAN, NOT_OF_VERIFY
from paceline.core.errors import UserError
from paceline.core.types import SettingValue

app = typer.Typer(
    cls=Commands,
    help="Trains image models on one device or many, from one recipe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(launch, name="launch")


@app.command()
@with_settings()
def train(
    recipe: RecipeName,
    flags: dict,
    config: ConfigFile = "",
    vgg: Vgg = "",
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Train a recipe; the same command again goes on where it stopped.

    A recipe or a preset may have defaults of its own. Settings without a flag are given with --set.
    """
    from paceline.commands.configure import configure
    from paceline.commands.train import train as job

    raise typer.Exit(job(configure(recipe, flags, config_file=config, assignments=with_vgg(set_, vgg))))


@app.command()
def evaluate(
    run: RunName,
    split: Annotated[str, typer.Option(help="test, validation or train (default: test; train for generators)")] = "",
    data: Annotated[str, typer.Option(help="another source than the run's own")] = "",
    data_root: Annotated[str, typer.Option(help="folder with the source's files")] = "",
    low_root: LowRoot = "",
    test_root: TestRoot = "",
    test_low_root: TestLowRoot = "",
    checkpoint: Checkpoint = "best",
    devices: Annotated[int, typer.Option(help="how many devices share the work")] = 1,
    accelerator: Accelerator = "",
    inception: Annotated[str, typer.Option(help="file of the Inception network that FID is defined by")] = "",
    inception_sha256: Annotated[str, typer.Option(help="SHA-256 of an --inception file that you trust")] = "",
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Measure a run's weights on any data."""
    from paceline.commands.evaluate import evaluate as job
    from paceline.config.files import parse_assignments

    flags: dict[str, SettingValue] = {"data": data, "data_root": data_root, "devices": devices}
    flags |= {"accelerator": accelerator, "low_root": low_root, "test_root": test_root, "test_low_root": test_low_root}
    flags |= {"inception": inception, "inception_sha256": inception_sha256}
    raise typer.Exit(job(run, split, flags, parse_assignments(set_), checkpoint))


@app.command()
@with_settings(but=NOT_OF_VERIFY, defaults={"devices": 2})
def verify(
    recipe: RecipeName,
    flags: dict,
    strategies: Annotated[
        str, typer.Option(help="which to hold against the first, with commas")
    ] = "single,ddp,lightning",
    steps: Annotated[int, typer.Option(help="how many steps to train")] = 20,
    tolerance: Annotated[float, typer.Option(help="largest difference, relative to the largest weight")] = 1e-9,
    control: Annotated[str, typer.Option(help="break it on purpose: unsynced-batchnorm or repeated-part")] = "",
    result: Annotated[str, typer.Option("--json", help="keep the differences in this file too", metavar="FILE")] = "",
    config: ConfigFile = "",
    vgg: Vgg = "",
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Show that a recipe gives the same weights under every strategy, in float64."""
    from paceline.commands.configure import configure
    from paceline.commands.verify import verify as job

    settings = with_vgg(set_, vgg)
    resolved = configure(recipe, {"devices": 2} | flags, config_file=config, assignments=settings, small=True)
    raise typer.Exit(job(resolved, strategies.split(","), steps, tolerance, control, result))


@app.command()
@with_settings(defaults={"devices": 2})
def compare(
    what: Annotated[list[str], typer.Argument(metavar="RECIPE|RUN…", help="recipes with commas, or finished runs")],
    flags: dict,
    strategies: Annotated[str | None, typer.Option(help="with commas (default: single,ddp)")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="with commas; the table has their mean and spread (default: 0)")
    ] = None,
    scaling: Annotated[
        str | None, typer.Option(help="strong: --batch-size is global (default); weak: it is per device")
    ] = None,
    verify: Annotated[
        bool | None, typer.Option("--verify/--no-verify", help="also show that the strategies give the same weights")
    ] = None,
    ceilings: Annotated[
        bool | None,
        typer.Option("--ceilings/--no-ceilings", help="also measure what keeps N devices from N times the speed"),
    ] = None,
    across_recipes: Annotated[
        bool, typer.Option("--across-recipes", help="finished runs may be of different recipes, judged alike")
    ] = False,
    config: ConfigFile = "",
    vgg: Vgg = "",
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Run a recipe under several strategies, or take finished runs, and report which to use and why.

    --devices and --batch-size take lists with commas. The same command again goes on where it stopped.
    """
    from paceline.commands.compare import Options, compare_recipes, compare_runs, runs_among

    options = Options(strategies, seeds, scaling, verify, ceilings, config, tuple(with_vgg(set_, vgg)))
    if runs_among(what):
        raise typer.Exit(compare_runs(what, flags, options, across_recipes))
    raise typer.Exit(compare_recipes([name for word in what for name in word.split(",")], flags, options))


@app.command()
@with_settings(but=NOT_OF_PLAN, defaults={"devices": 8})
def plan(
    recipe: RecipeName,
    flags: dict,
    nodes: Annotated[int, typer.Option(help="how many machines share the devices", min=1)] = 1,
    bandwidth: Annotated[str, typer.Option(help="between devices, 25GB/s or 200Gbit/s (default: measured here)")] = "",
    latency: Annotated[str, typer.Option(help="of one exchange between devices, e.g. 20us")] = "",
    check: Annotated[bool, typer.Option("--check", help="also measure what was predicted, in turns with it")] = False,
    config: ConfigFile = "",
    vgg: Vgg = "",
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Predict how fast a recipe will be on more devices, from a short measurement on this machine's."""
    from paceline.commands.plan import Options
    from paceline.commands.plan import plan as job

    options = Options(nodes, bandwidth, latency, check)
    raise typer.Exit(job(recipe, flags, options, config_file=config, assignments=with_vgg(set_, vgg)))


@app.command()
def pack(
    origin: Annotated[str, typer.Argument(metavar="SRC", help="a folder, or the name of a source")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="the folder to make")],
    data: Annotated[str, typer.Option(help="the kind of source that the folder is (default: photos)")] = "",
    data_root: Annotated[str, typer.Option(help="folder with the files, where SRC is a source's name")] = "",
    bad_images: Annotated[str, typer.Option(help="fail or skip (default: fail)")] = "",
    workers: Annotated[str, typer.Option(help="processes that decode (default: 2)")] = "",
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Decode a source once into files that are memory-mapped from then on; the same command again goes on."""
    from paceline.commands.pack import pack as job
    from paceline.config.files import parse_assignments

    flags = {"data": data, "data_root": data_root, "bad_images": bad_images, "workers": workers}
    said = {name: value for name, value in flags.items() if value}
    raise typer.Exit(job(origin, destination, said, parse_assignments(set_)))


@app.command()
def doctor(
    self_test: Annotated[bool, typer.Option("--self-test", help="run a short verify and a timed all-reduce")] = False,
    loaders: Annotated[bool, typer.Option("--loaders", help="measure what each loader gives of --data")] = False,
    data: Annotated[str, typer.Option(help="the source that --loaders measures (default: digits)")] = "",
    data_root: Annotated[str, typer.Option(help="folder with the source's files")] = "",
    crop: Annotated[str, typer.Option(help="side in pixels of the window of a picture; 0 is all of it")] = "",
    batch_size: Annotated[str, typer.Option(help="images per batch (default: 128)")] = "",
    workers: Annotated[str, typer.Option(help="loading processes, or DALI's threads (default: 2)")] = "",
    accelerator: Accelerator = "",
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Show what this machine has, and which strategies and loaders can run here; with --loaders, how fast they are."""
    from paceline.commands.doctor import doctor as job
    from paceline.commands.doctor import doctor_of_loaders

    flags = {"data": data, "data_root": data_root, "crop": crop, "batch_size": batch_size, "workers": workers}
    said = {name: value for name, value in (flags | {"accelerator": accelerator}).items() if value}
    if loaders and self_test:
        raise UserError("--self-test: cannot go with --loaders; give one, then the other")
    if loaders:
        raise typer.Exit(doctor_of_loaders(said, set_))
    if said or set_:
        first = next((f"--{name.replace('_', '-')}" for name in said), "--set")
        raise UserError(f"{first}: says what --loaders is to measure; give that flag, too")
    raise typer.Exit(job(self_test))


@app.command()
def board(
    runs: Annotated[str, typer.Argument(metavar="RUNS", help="a folder of runs, or a URL like s3://…")] = "runs",
    port: Annotated[int | None, typer.Option(help="where to listen; 0 takes any free one (default: 6116)")] = None,
    host: Annotated[str, typer.Option(help="the address to listen at")] = "127.0.0.1",
) -> None:
    """Show runs on a live page, here or elsewhere."""
    from paceline.commands.board import board as job

    raise typer.Exit(job(runs, host, port))


@app.command()
def settings(
    recipe: Annotated[str, typer.Argument(metavar="[RECIPE]", help="a recipe's name, or your own .py file")] = "",
    data: Annotated[str, typer.Option(help="the source: a name, or your own .py file (default: the recipe's)")] = "",
    preset: Annotated[str, typer.Option(help="a named set of the recipe's settings")] = "",
) -> None:
    """List what can be set for a recipe and a source, with the values that a run would have."""
    from paceline.commands.settings import settings as job

    raise typer.Exit(job(recipe, data, preset))


@app.command()
def new(
    kind: Annotated[str, typer.Argument(metavar="recipe|gan|source", help="what to write; gan is a recipe too")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="its name, and its file's")],
) -> None:
    """Write a recipe or a source of your own that works as it is."""
    from pathlib import Path

    from paceline.commands.new import new as job

    path = job(kind, name, Path.cwd())
    print(
        f"wrote {path.name}; try: paceline train {'classification --data ./' if kind == 'source' else './'}{path.name}"
    )


app.command()(sample)
app.command()(apply)
app.command()(predict)
app.command("import")(import_weights)
app.command()(export)


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
    except Interrupted as stop:
        print("; ".join(["paceline: interrupted", *filter(None, [str(stop)])]), file=sys.stderr)
        return 130
    except Exception as error:
        if not hasattr(error, "format_message"):  # of the command line's own parser
            traceback.print_exc()
            return 1
        print(f"paceline: {in_one_line(error)}", file=sys.stderr)
        return 2


def main() -> None:
    """The command `paceline`."""
    code = run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without the interpreter's tear-down, in which threads of a process group can hang
