"""The `paceline` command line. It imports torch only when a command runs."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
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
    check_names,
    in_one_line,
    with_name,
    with_optional_values,
    with_options,
    with_vgg,
)
from paceline.cli.help import CONTEXT, EXAMPLES, Command, Commands
from paceline.cli.launch import launch
from paceline.cli.start import Interrupted, exit_code, message
from paceline.commands.options import (
    Accelerator,
    ApplyOptions,
    Checkpoint,
    Interpolate,
    InterpolateWith,
    MeasureOptions,
    PlanOptions,
    SampleOptions,
)
from paceline.compare import Options
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
@with_options()
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
@with_options(command_settings.SETTINGS_OF_EVALUATE, defaults=command_settings.DEFAULTS_OF_EVALUATE)
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
@with_options(but=command_settings.SETTINGS_NOT_IN_VERIFY, defaults={"devices": command_settings.VERIFY_DEVICES})
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
@with_options(defaults={"devices": command_settings.COMPARE_DEVICES})
def compare(
    what: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE|RUN…", help="comma-separated recipes to train, or folders of finished runs"),
    ],
    flags: Flags,
    options: Options,
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
    from paceline.compare.grid import are_runs

    options = replace(options, config_file=config, assignments=tuple(with_vgg(set_, vgg)))
    if are_runs(what):
        raise typer.Exit(compare_runs(what, flags, options, across_recipes))
    raise typer.Exit(compare_recipes([name for word in what for name in word.split(",")], flags, options))


@app.command(cls=Command, epilog=EXAMPLES["plan"])
@with_options(but=command_settings.SETTINGS_NOT_IN_PLAN, defaults={"devices": command_settings.PLAN_DEVICES})
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


@app.command(cls=Command, epilog=EXAMPLES["sample"])
@with_options()
def sample(
    run: Weights,
    options: SampleOptions,
    out: Annotated[
        str, typer.Option(help="file to write: .png, or .gif or .webp for animations (default: in the run folder)")
    ] = "",
    next_to: Annotated[
        str, typer.Option(help="second run, whose images are shown alongside the first run's", metavar="RUN")
    ] = "",
    trust: Trust = False,
) -> None:
    """Save sample images from a run: a grid for generators, side-by-side strips for other image models.

    The random inputs or held-out images are always the same, so that runs and checkpoints can be compared.
    """
    from paceline.commands.sample import sample as job

    raise typer.Exit(job([run, *filter(None, [next_to])], out, options))


@app.command(cls=Command, epilog=EXAMPLES["apply"])
@with_options()
def apply(
    run: Weights,
    images: Annotated[
        list[str], typer.Argument(metavar="IMAGES…", help="images to process: files, folders or glob patterns")
    ],
    out: Annotated[str, typer.Option(help="the folder to write to", metavar="DIR")],
    options: ApplyOptions,
    trust: Trust = False,
) -> None:
    """Upscale, restore or translate images of any size."""
    from paceline.commands.apply import apply as job

    raise typer.Exit(job(run, images, out, options))


@app.command(cls=Command, epilog=EXAMPLES["measure"])
@with_options()
def measure(
    results: Annotated[str, typer.Argument(metavar="RESULTS", help="a folder of images, or one image")],
    targets: Annotated[str, typer.Argument(metavar="TARGETS", help="a folder of target images, or one image")],
    options: MeasureOptions,
) -> None:
    """Compare images from any program with their targets: PSNR, SSIM, LPIPS, FID, IoU and Dice."""
    from paceline.commands.measure import measure as job

    raise typer.Exit(job(results, targets, options))


@app.command(cls=Command, epilog=EXAMPLES["predict"])
def predict(
    run: Weights,
    images: Annotated[
        list[str], typer.Argument(metavar="IMAGES…", help="images to classify: files, folders or glob patterns")
    ],
    top: Annotated[int, typer.Option(min=1, help="number of classes to list per image")] = 5,
    out: Annotated[str, typer.Option(help="also write predictions to this .csv file", metavar="FILE")] = "",
    checkpoint: Checkpoint = "best",
    accelerator: Accelerator = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the file if it exists")] = False,
    trust: Trust = False,
) -> None:
    """Classify images with a trained classifier.

    Each image is centre-cropped and scaled to the size that was used to evaluate the run.
    """
    from paceline.commands.apply import predict as job

    raise typer.Exit(job(run, images, top, out, checkpoint, accelerator, overwrite=overwrite))


@app.command("import", cls=Command, epilog=EXAMPLES["import"])
def import_weights(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE…",
            help="a .pth or .safetensors file; for translation, all .pth files or the folder that contains them",
        ),
    ],
    out: Annotated[str, typer.Option(help="the .safetensors file to write", metavar="FILE")],
    recipe: Annotated[
        str,
        typer.Option(
            help="recipe that the weights are for: classification for timm, super_resolution for SRGAN, esrgan for "
            "RRDBNet with a discriminator, translation for pix2pix and DeepLIIF; without --recipe, the network must be "
            "one that spandrel recognises"
        ),
    ] = "",
    preset: Annotated[str, typer.Option(help="named set of settings defined by the recipe")] = "",
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Import weights from other projects: networks known to spandrel, timm classifiers, SRGAN, pix2pix and others.

    The package spandrel recognises networks such as ESRGAN, SwinIR and NAFNet. Other files need --recipe.
    """
    from paceline.commands.convert import import_weights as job

    raise typer.Exit(job(files, recipe, out, preset, set_))


@app.command(cls=Command, epilog=EXAMPLES["export"])
def export(
    run: Weights,
    out: Annotated[str, typer.Option(help="the .onnx file to write", metavar="FILE")],
    checkpoint: Checkpoint = "best",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the file if it exists")] = False,
    interpolate: Interpolate = 1.0,
    interpolate_with: InterpolateWith = "",
    trust: Trust = False,
) -> None:
    """Export a trained model to ONNX and compare its results with PyTorch's.

    Image-to-image models take images of any size and return images; all values are in [-1, 1]. Classifiers take uint8
    images of the size used in evaluation and return class probabilities. Generators take noise and return images with
    values in [-1, 1].
    """
    from paceline.commands.convert import export as job
    from paceline.inference.trained import Blend

    raise typer.Exit(job(run, out, checkpoint, overwrite=overwrite, blend=Blend(interpolate, interpolate_with)))


@app.command(cls=Command, epilog=EXAMPLES["doctor"])
@with_options(command_settings.SETTINGS_OF_DOCTOR)
def doctor(
    flags: Flags,
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="run a short `paceline verify` and time an all-reduce; on several GPUs, test a CUDA graph",
        ),
    ] = False,
    loaders: Annotated[bool, typer.Option("--loaders", help="measure the throughput of each loader on --data")] = False,
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Show this machine's hardware and software, and which strategies and loaders can run on it."""
    from paceline.commands.doctor import doctor as job
    from paceline.commands.doctor import measure_loaders_here

    if loaders and self_test:
        raise UserError("--self-test: cannot be combined with --loaders; run them separately")
    if loaders:
        raise typer.Exit(measure_loaders_here(flags, set_))
    if flags or set_:
        first = next((f"--{name.replace('_', '-')}" for name in flags), "--set")
        raise UserError(f"{first}: only used with --loaders; add --loaders")
    raise typer.Exit(job(self_test))


@app.command(cls=Command, epilog=EXAMPLES["board"])
def board(
    runs: Annotated[
        str, typer.Argument(metavar="RUNS", help="a folder that contains runs, or a URL like s3://…")
    ] = "runs",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="port to listen on; 0 picks a free port (default: 6116)")
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    edit: Annotated[
        bool | None,
        typer.Option(
            "--edit/--read-only",
            help="whether the page can edit tags and notes (default: only if --host is a loopback address)",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve a live web page that shows local or remote runs."""
    from paceline.commands.board import board as job

    raise typer.Exit(job(runs, host, port, edit))


@app.command(cls=Command, epilog=EXAMPLES["settings"])
def settings(
    recipe: Annotated[
        str, typer.Argument(metavar="[RECIPE]", help="name of a recipe, or path to your own .py file")
    ] = "",
    data: Annotated[
        str, typer.Option(help="name of a source, or path to your own .py file (default: the recipe's source)")
    ] = "",
    preset: Annotated[str, typer.Option(help="named set of settings defined by the recipe")] = "",
) -> None:
    """List the settings of a recipe and a source, with the values that a run would use."""
    check_names(recipe or None, data or None)
    from paceline.commands.settings import settings as job

    raise typer.Exit(job(recipe, data, preset))


@app.command(cls=Command, epilog=EXAMPLES["new"])
def new(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="recipe|gan|source", help="what to write: a recipe, a source, or a gan (a recipe with two networks)"
        ),
    ],
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="name of the recipe or source, also used as the file name")
    ],
) -> None:
    """Write a small working recipe or source to start from."""
    from paceline.commands.new import new as job

    path = job(kind, name, Path.cwd())
    print(
        f"wrote {path.name}; try: paceline train {'classification --data ./' if kind == 'source' else './'}{path.name}"
    )


@app.command(cls=Command, epilog=EXAMPLES["pack"])
@with_options(command_settings.SETTINGS_OF_PACK, defaults={"data": "photos"})
def pack(
    origin: Annotated[
        str, typer.Argument(metavar="SRC", help="a folder of images, an .npz file, or the name of a data source")
    ],
    destination: Annotated[str, typer.Argument(metavar="DST", help="the folder to create for the packed files")],
    flags: Flags,
    to_shards: Annotated[
        bool, typer.Option("--to-shards", help="write tar files in the WebDataset layout instead, without decoding")
    ] = False,
    shard_mb: Annotated[int, typer.Option(min=1, help="approximate size of a tar file in MB, for --to-shards")] = 256,
    train_only: Annotated[
        bool, typer.Option("--train-only", help="hold out no images for testing: write a training split only")
    ] = False,
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Decode all images in a source once, into memory-mapped files; run the same command again to resume."""
    from paceline.config.files import parse_assignments

    chosen = parse_assignments(set_)
    if to_shards:
        from paceline.commands.pack import pack_to_shards

        raise typer.Exit(pack_to_shards(origin, destination, flags, chosen, shard_mb, train_only=train_only))
    from paceline.commands.pack import pack as job

    raise typer.Exit(job(origin, destination, flags, chosen, train_only=train_only))


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
