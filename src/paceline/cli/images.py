"""The commands that show what networks make, or use them outside of a run: sample, apply, predict, import, export."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.flags import Accelerator, Assignments, Checkpoint, RunName

Weights = Annotated[str, typer.Argument(metavar="RUN|WEIGHTS", help="a run's folder, or a .safetensors file")]


def sample(
    run: RunName,
    out: Annotated[str, typer.Option(help="a file: .png, or .gif or .webp for an animation (default: in RUN)")] = "",
    checkpoint: Checkpoint = "best",
    grid: Annotated[str, typer.Option(help="generators: rows and columns of the grid (default: 8x8)")] = "",
    interpolate: Annotated[
        bool, typer.Option("--interpolate", help="each row goes from one picture to another")
    ] = False,
    animate: Annotated[bool, typer.Option("--animate", help="the same pictures over the course of training")] = False,
    beside: Annotated[str, typer.Option(help="put another run's pictures next to these", metavar="RUN")] = "",
    accelerator: Accelerator = "",
) -> None:
    """Show what a run makes: grids of a generator, or strips of what restores or translates pictures.

    Its random numbers, or the held-out pictures that it gets, are always the same, so that two runs or two checkpoints
    can be compared.
    """
    from paceline.commands.sample import Options
    from paceline.commands.sample import sample as job

    options = Options(
        grid=grid, interpolate=interpolate, animate=animate, checkpoint=checkpoint, accelerator=accelerator
    )
    raise typer.Exit(job([run, *filter(None, [beside])], out, options))


def apply(
    run: Weights,
    pictures: Annotated[list[str], typer.Argument(metavar="PICTURES…", help="files, folders or patterns")],
    out: Annotated[str, typer.Option(help="the folder to write to", metavar="DIR")],
    checkpoint: Checkpoint = "best",
    accelerator: Accelerator = "",
    devices: Annotated[int, typer.Option(help="how many devices share the pictures")] = 1,
    gpus: Annotated[str, typer.Option(help="ids of the GPUs to use, e.g. 2,3")] = "",
    tile: Annotated[int, typer.Option(help="side of a tile in pixels (default: what fits in memory)")] = 0,
    downsample: Annotated[
        str, typer.Option(help="bicubic: shrink first, and compare what comes out with the picture", metavar="bicubic")
    ] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace results that are there already")] = False,
    skip_existing: Annotated[
        bool, typer.Option("--skip-existing", help="leave pictures out whose results are there already")
    ] = False,
) -> None:
    """Super-resolve, restore or translate pictures of any size."""
    from paceline.commands.apply import Options
    from paceline.commands.apply import apply as job

    options = Options(checkpoint, accelerator, devices, gpus, tile, downsample, overwrite, skip_existing)
    raise typer.Exit(job(run, pictures, out, options))


def predict(
    run: Weights,
    pictures: Annotated[list[str], typer.Argument(metavar="PICTURES…", help="files, folders or patterns")],
    top: Annotated[int, typer.Option(help="how many classes to name of each picture")] = 5,
    out: Annotated[str, typer.Option(help="a file to write as well: .csv or .jsonl", metavar="FILE")] = "",
    checkpoint: Checkpoint = "best",
    accelerator: Accelerator = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the file if it is there already")] = False,
) -> None:
    """Tell which classes pictures show, by what a classifier learned.

    The middle of each picture is scaled to the size that the run learned from.
    """
    from paceline.commands.predict import predict as job

    raise typer.Exit(job(run, pictures, top, out, checkpoint, accelerator, overwrite=overwrite))


def import_weights(
    files: Annotated[list[str], typer.Argument(metavar="FILE…", help="a .pth file; for translation, all or a folder")],
    recipe: Annotated[str, typer.Option(help="super_resolution or translation")],
    out: Annotated[str, typer.Option(help="the .safetensors file to write", metavar="FILE")],
    preset: Annotated[str, typer.Option(help="a named set of the recipe's settings")] = "",
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Make weights of other projects usable here: SRGAN's generator, networks of pix2pix and DeepLIIF."""
    from paceline.commands.import_weights import import_weights as job

    raise typer.Exit(job(files, recipe, out, preset, set_))


def export(
    run: Weights,
    out: Annotated[str, typer.Option(help="the .onnx file to write", metavar="FILE")],
    checkpoint: Checkpoint = "best",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the file if it is there already")] = False,
) -> None:
    """Write what a run learned as ONNX, and check it against PyTorch.

    What restores, enlarges or translates takes pictures in -1…1 of any size and gives such pictures. A classifier takes
    pictures as they are (uint8, of the size that it learned from) and gives the probability of each class. A generator
    takes noise and gives pictures in -1…1.
    """
    from paceline.commands.export import export as job

    raise typer.Exit(job(run, out, checkpoint, overwrite=overwrite))
