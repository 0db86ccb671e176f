"""The commands that use a trained model: sample, apply, predict, import, export."""

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
        bool, typer.Option("--interpolate", help="each row interpolates from one image to another")
    ] = False,
    animate: Annotated[bool, typer.Option("--animate", help="the same images over the course of training")] = False,
    next_to: Annotated[str, typer.Option(help="put another run's images next to these", metavar="RUN")] = "",
    accelerator: Accelerator = "",
) -> None:
    """Show a run's images: grids of a generator, or strips of a model that restores or translates images.

    The random numbers, or the held-out images, are always the same, so that two runs or two checkpoints can be
    compared.
    """
    from paceline.commands.sample import Options
    from paceline.commands.sample import sample as job

    options = Options(
        grid=grid, interpolate=interpolate, animate=animate, checkpoint=checkpoint, accelerator=accelerator
    )
    raise typer.Exit(job([run, *filter(None, [next_to])], out, options))


def apply(
    run: Weights,
    images: Annotated[list[str], typer.Argument(metavar="IMAGES…", help="files, folders or patterns")],
    out: Annotated[str, typer.Option(help="the folder to write to", metavar="DIR")],
    checkpoint: Checkpoint = "best",
    accelerator: Accelerator = "",
    devices: Annotated[int, typer.Option(help="how many devices share the images")] = 1,
    gpus: Annotated[str, typer.Option(help="ids of the GPUs to use, e.g. 2,3")] = "",
    tile: Annotated[int, typer.Option(help="side of a tile in pixels (default: what fits in memory)")] = 0,
    downsample: Annotated[
        str, typer.Option(help="bicubic: downsample first, and compare the result with the image", metavar="bicubic")
    ] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace results that exist")] = False,
    skip_existing: Annotated[bool, typer.Option("--skip-existing", help="skip images whose results exist")] = False,
) -> None:
    """Super-resolve, restore or translate images of any size."""
    from paceline.commands.apply import Options
    from paceline.commands.apply import apply as job

    options = Options(checkpoint, accelerator, devices, gpus, tile, downsample, overwrite, skip_existing)
    raise typer.Exit(job(run, images, out, options))


def predict(
    run: Weights,
    images: Annotated[list[str], typer.Argument(metavar="IMAGES…", help="files, folders or patterns")],
    top: Annotated[int, typer.Option(help="how many classes to list for each image")] = 5,
    out: Annotated[str, typer.Option(help="a file to write as well: .csv or .jsonl", metavar="FILE")] = "",
    checkpoint: Checkpoint = "best",
    accelerator: Accelerator = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the file if it exists")] = False,
) -> None:
    """Classify images with a trained classifier.

    The centre of each image is scaled to the size that the run was evaluated on.
    """
    from paceline.commands.predict import predict as job

    raise typer.Exit(job(run, images, top, out, checkpoint, accelerator, overwrite=overwrite))


def import_weights(
    files: Annotated[list[str], typer.Argument(metavar="FILE…", help="a .pth file; for translation, all or a folder")],
    recipe: Annotated[str, typer.Option(help="super_resolution or translation")],
    out: Annotated[str, typer.Option(help="the .safetensors file to write", metavar="FILE")],
    preset: Annotated[str, typer.Option(help="a named set of the recipe's settings")] = "",
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Import weights of other projects: SRGAN's generator, networks of pix2pix and DeepLIIF."""
    from paceline.commands.import_weights import import_weights as job

    raise typer.Exit(job(files, recipe, out, preset, set_))


def export(
    run: Weights,
    out: Annotated[str, typer.Option(help="the .onnx file to write", metavar="FILE")],
    checkpoint: Checkpoint = "best",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the file if it exists")] = False,
) -> None:
    """Write a trained model as ONNX, and check it against PyTorch.

    A model that restores, enlarges or translates maps images in -1…1 of any size to such images. A classifier maps
    images in 0…255 (uint8, of the size that it was evaluated on) to the probability of each class. A generator maps
    noise to images in -1…1.
    """
    from paceline.commands.export import export as job

    raise typer.Exit(job(run, out, checkpoint, overwrite=overwrite))
