"""The `paceline` command line. It imports torch only when a command runs."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from paceline import __version__
from paceline.cli.flags import (
    Assignments,
    ConfigFile,
    Flags,
    RecipeName,
    RunName,
    Trust,
    Vgg,
    Weights,
    in_one_line,
    with_name,
    with_optional_values,
    with_options,
    with_settings,
    with_vgg,
)
from paceline.cli.help import CONTEXT, EXAMPLES, Command, Commands
from paceline.cli.images import apply, export, import_weights, measure, predict, sample
from paceline.cli.launch import launch
from paceline.cli.start import Interrupted, exit_code, message
from paceline.cli.tools import board, doctor, new, pack, settings
from paceline.commands.options import Checkpoint, Interpolate, InterpolateWith, PlanOptions
from paceline.config import flags as command_settings
from paceline.core.errors import UserError, describe_limit
from paceline.core.output import is_lost, outlive_stdout
from paceline.core.registry import fault_of_plugin
from paceline.core.startup import collecting_rarely, keep_bytecode
from paceline.core.terminal import end_activity, show_activities
from paceline.core.text import print_any_text, print_line
from paceline.core.trust import set_trust, trusts_files

LONGEST_LINE = 3000  # characters of an error message that are printed

app = typer.Typer(
    cls=Commands,
    help="Train image models on one device or many, from one recipe.",
    context_settings=CONTEXT,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(launch, name="launch")


@app.command(cls=Command, epilog=EXAMPLES["train"])
@with_settings()
def train(
    recipe: RecipeName,
    flags: Flags,
    name: RunName = "",
    config: ConfigFile = "",
    vgg: Vgg = "",
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Train a recipe; run the same command again to resume.

    Recipes and presets may override the defaults shown here. Use --set for settings that have no flag.
    """
    outlive_stdout()
    flags = with_name(flags, name)
    with collecting_rarely():
        from paceline.commands.configure import configure
        from paceline.commands.train import train_and_advise as job

    raise typer.Exit(job(configure(recipe, flags, config_file=config, assignments=with_vgg(set_, vgg))))


@app.command(cls=Command, epilog=EXAMPLES["evaluate"])
@with_settings(command_settings.SETTINGS_OF_EVALUATE, defaults=command_settings.DEFAULTS_OF_EVALUATE)
def evaluate(
    run: Weights,
    flags: Flags,
    split: Annotated[
        str,
        typer.Option(
            help="split to evaluate on: test, validation or train (default: test, or validation if there is no test "
            "split; train for generators)"
        ),
    ] = "",
    checkpoint: Checkpoint = "best",
    devices: Annotated[int, typer.Option(min=1, help="number of devices to evaluate on")] = 1,
    interpolate: Interpolate = 1.0,
    interpolate_with: InterpolateWith = "",
    trust: Trust = False,
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Evaluate a trained model on any data."""
    from paceline.commands.evaluate import evaluate as job
    from paceline.config.files import parse_assignments
    from paceline.inference.trained import Blend

    blend = Blend(interpolate, interpolate_with)
    raise typer.Exit(job(run, split, {**flags, "devices": devices}, parse_assignments(set_), checkpoint, blend))


@app.command(cls=Command, epilog=EXAMPLES["verify"])
@with_settings(but=command_settings.SETTINGS_NOT_IN_VERIFY, defaults={"devices": command_settings.VERIFY_DEVICES})
def verify(
    recipe: RecipeName,
    flags: Flags,
    strategies: Annotated[
        str, typer.Option(help="comma-separated strategies; the first is the reference")
    ] = command_settings.STRATEGIES,
    steps: Annotated[int, typer.Option(help="number of training steps")] = 20,
    tolerance: Annotated[float, typer.Option(help="largest allowed difference, relative to the largest weight")] = 1e-9,
    control: Annotated[
        str,
        typer.Option(help="introduce an error that the check must detect: unsynced-batchnorm or repeated-part"),
    ] = "",
    result: Annotated[
        str, typer.Option("--json", help="also write the differences to this JSON file", metavar="FILE")
    ] = "",
    config: ConfigFile = "",
    vgg: Vgg = "",
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Check in float64 that training produces the same weights under every strategy."""
    from paceline.commands.configure import configure
    from paceline.commands.verify import verify as job

    settings = with_vgg(set_, vgg)
    flags = {"devices": str(command_settings.VERIFY_DEVICES), **flags}
    resolved = configure(recipe, flags, config_file=config, assignments=settings, small=True)
    raise typer.Exit(job(resolved, strategies.split(","), steps, tolerance, control, result))


@app.command(cls=Command, epilog=EXAMPLES["compare"])
@with_settings(defaults={"devices": command_settings.COMPARE_DEVICES})
def compare(
    what: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE|RUN…", help="comma-separated recipes to train, or folders of finished runs"),
    ],
    flags: Flags,
    strategies: Annotated[str | None, typer.Option(help=f"strategies (default: {command_settings.STRATEGIES})")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="comma-separated random seeds; tables show the mean and the spread (default: 0)")
    ] = None,
    scaling: Annotated[
        str | None, typer.Option(help="strong: --batch-size is global (default); weak: --batch-size is per device")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(metavar="N", help="train up to N runs at a time, on separate GPUs or CPU cores (default: 1)"),
    ] = None,
    verify: Annotated[
        bool | None,
        typer.Option("--verify/--no-verify", help="also check that all strategies produce the same weights"),
    ] = None,
    step_ladder: Annotated[
        bool | None,
        typer.Option("--step-ladder/--no-step-ladder", help="also measure what limits speed on several devices"),
    ] = None,
    across_recipes: Annotated[
        bool,
        typer.Option(
            "--across-recipes",
            help="compare finished runs of different recipes, if they were evaluated in the same way",
        ),
    ] = False,
    config: ConfigFile = "",
    vgg: Vgg = "",
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Train a recipe under several strategies, or read finished runs, and report which strategy to use and why.

    --devices and --batch-size accept comma-separated lists. Run the same command again to resume.
    """
    from paceline.commands.compare import compare_recipes, compare_runs
    from paceline.compare.cells import are_runs
    from paceline.compare.grid import Options

    options = Options(strategies, seeds, scaling, jobs, verify, step_ladder, config, tuple(with_vgg(set_, vgg)))
    if are_runs(what):
        raise typer.Exit(compare_runs(what, flags, options, across_recipes))
    raise typer.Exit(compare_recipes([name for word in what for name in word.split(",")], flags, options))


@app.command(cls=Command, epilog=EXAMPLES["plan"])
@with_settings(but=command_settings.SETTINGS_NOT_IN_PLAN, defaults={"devices": command_settings.PLAN_DEVICES})
@with_options
def plan(
    recipe: RecipeName,
    flags: Flags,
    options: PlanOptions,
    config: ConfigFile = "",
    vgg: Vgg = "",
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Predict the speed or the memory use of a recipe on more devices.

    The speed is predicted from a short measurement on this machine. The memory is computed and needs no GPU.
    """
    from paceline.commands.plan import plan as job

    raise typer.Exit(job(recipe, flags, options, config_file=config, assignments=with_vgg(set_, vgg)))


for command in (pack, doctor, board, settings, new, sample, apply, predict, measure, import_weights, export):
    name = command.__name__.removesuffix("_weights")
    app.command(name, cls=Command, epilog=EXAMPLES[name])(command)


@app.callback(invoke_without_command=True)
def without_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="show the version and exit")] = False,
) -> None:
    if version:
        print(f"paceline {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code; a user error prints one line and returns 2."""
    trusted = trusts_files()
    words = sys.argv[1:] if arguments is None else arguments
    try:
        _check_working_folder()
        code = app(with_optional_values(words), prog_name="paceline", standalone_mode=False) or 0
        sys.stdout.flush()
        return code
    except (Interrupted, KeyboardInterrupt) as stop:
        print("; ".join([message(), *filter(None, [str(stop)])]), file=sys.stderr)
        return exit_code()
    except (Exception, SystemExit) as error:
        known = str(fault_of_plugin(error) or "") or describe_limit(error)
        line = in_one_line(error) if hasattr(error, "format_message") else known
        if not line:
            if not isinstance(error, (BrokenPipeError, SystemExit)):  # as after `| head`, which needs no message
                traceback.print_exc()
            return 1
        outlive_stdout()
        line = f"paceline: {' '.join(line.splitlines())}"
        if len(line) > LONGEST_LINE:  # it quotes a damaged file; its end is the remedy
            line = f"{line[: LONGEST_LINE // 2]} … {line[-LONGEST_LINE // 4 :]}"
        print_line(line, sys.stderr)
        if is_lost("stderr"):
            print_line(line)
        return 2
    finally:
        set_trust(trusted)  # --trust applies to this command only


def _check_working_folder() -> None:
    """Raise UserError if the working directory was removed: MKL, which torch loads, would end the process."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working directory was removed; change to another one") from None


def main() -> None:
    """Run the command in the arguments of this process, and exit."""
    keep_bytecode()
    print_any_text()
    show_activities()
    code = run()
    end_activity()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skips interpreter shutdown, during which process-group threads can hang
