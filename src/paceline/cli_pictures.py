"""The commands that use networks outside of a run: apply, import and export."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli_flags import Accelerator, Assignments, Checkpoint

Weights = Annotated[str, typer.Argument(metavar="RUN|WEIGHTS", help="a run's folder, or a .safetensors file")]


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
    from paceline.jobs.apply import Wish
    from paceline.jobs.apply import apply as job

    wish = Wish(checkpoint, accelerator, devices, gpus, tile, downsample, overwrite, skip_existing)
    raise typer.Exit(job(run, pictures, out, wish))


def import_weights(
    files: Annotated[list[str], typer.Argument(metavar="FILE…", help="a .pth file; for translation, all or a folder")],
    recipe: Annotated[str, typer.Option(help="super_resolution or translation")],
    out: Annotated[str, typer.Option(help="the .safetensors file to write", metavar="FILE")],
    preset: Annotated[str, typer.Option(help="a named set of the recipe's settings")] = "",
    set_: Assignments = [],  # noqa: B006
) -> None:
    """Make weights of other projects usable here: SRGAN's generator, networks of pix2pix and DeepLIIF."""
    from paceline.jobs.import_weights import import_weights as job

    raise typer.Exit(job(files, recipe, out, preset, set_))


def export(
    run: Weights,
    out: Annotated[str, typer.Option(help="the .onnx file to write", metavar="FILE")],
    checkpoint: Checkpoint = "best",
) -> None:
    """Write what a run learned as ONNX, for pictures of any size, and check it against PyTorch."""
    from paceline.jobs.export import export as job

    raise typer.Exit(job(run, out, checkpoint))
