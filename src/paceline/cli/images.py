"""Command-line arguments for sample, apply, measure, predict, import and export."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.flags import Assignments, Trust, Weights, with_options
from paceline.commands.options import (
    Accelerator,
    ApplyOptions,
    Checkpoint,
    Interpolate,
    InterpolateWith,
    MeasureOptions,
    SampleOptions,
)


@with_options
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


@with_options
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


@with_options
def measure(
    results: Annotated[str, typer.Argument(metavar="RESULTS", help="a folder of images, or one image")],
    options: MeasureOptions,
    targets: Annotated[
        str,
        typer.Argument(metavar="TARGETS", help="a folder of target images, or one image"),
    ] = "",
) -> None:
    """Compare images from any program with their targets: PSNR, SSIM, LPIPS, FID, IoU and Dice."""
    from paceline.commands.measure import measure as job

    raise typer.Exit(job(results, targets, options))


def predict(
    run: Weights,
    images: Annotated[
        list[str], typer.Argument(metavar="IMAGES…", help="images to classify: files, folders or glob patterns")
    ],
    top: Annotated[int, typer.Option(min=1, help="number of classes to list per image")] = 5,
    out: Annotated[str, typer.Option(help="also write predictions to this .csv or .jsonl file", metavar="FILE")] = "",
    checkpoint: Checkpoint = "best",
    accelerator: Accelerator = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the file if it exists")] = False,
    trust: Trust = False,
) -> None:
    """Classify images with a trained classifier.

    Each image is centre-cropped and scaled to the size that was used to evaluate the run.
    """
    from paceline.commands.predict import predict as job

    raise typer.Exit(job(run, images, top, out, checkpoint, accelerator, overwrite=overwrite))


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
    from paceline.commands.import_weights import import_weights as job

    raise typer.Exit(job(files, recipe, out, preset, set_))


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
    from paceline.commands.export import export as job
    from paceline.inference.trained import Blend

    raise typer.Exit(job(run, out, checkpoint, overwrite=overwrite, blend=Blend(interpolate, interpolate_with)))
